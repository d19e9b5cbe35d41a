//! Faults, and when they happen.

use baton_sim::Rng;

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The NIC is killed now.
    KillNic,
    /// The NIC is killed before or after it sends its next frames: after this many such points.
    LightFuse(u32),
    /// The NIC's process does nothing useful for this long, microseconds, and goes on then, unless it has been ended.
    HaltNic(Halt, u64),
    /// These processes are stopped for this long, microseconds, unless they are resumed or ended before.
    Stop(Scope, u64),
    /// The agent is killed, and its NIC dies with it.
    KillAgent,
    /// The agent is killed after this many further actions.
    KillAgentAfter(u64),
    /// The NIC is killed after this many further actions of its agent.
    KillNicAfter(u64),
    /// The keeper's messages take this long from now on, microseconds.
    DelayKeeper(u64),
    /// The ring from the NIC to the agent is full.
    FillRing,
    /// There is no memory for connections that move to the NIC, for this long, microseconds.
    ShortMemory(u64),
    /// A program writes this many random words into its session memory, and as many into its ring.
    Scribble(u32),
    /// A program repeats commands that it queued for connections which the NIC has no more, as a thread that was
    /// stopped for long.
    Repeat,
    /// The host's network is cut off for this long, microseconds.
    Cut(u64),
    /// The MTU of the paths from the host, bytes.
    Mtu(u16),
    /// The connections are spread anew over the NIC's workers: eight digits of an indirection table.
    Spread(u32),
}

/// Why a NIC's process answers nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Halt {
    /// It is stopped.
    Stopped,
    /// It is in an endless loop.
    Spins,
    /// It gets no processor: nobody may end it for that.
    Starved,
}

/// Which processes somebody stops together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The agent.
    Agent,
    /// The agent and its NIC, which is stopped a little before and goes on a little later.
    WithNic,
    /// These and the keeper.
    All,
}

/// A fault of a host at a time in microseconds.
pub(crate) type Planned = (u64, usize, Fault);

/// Faults at random times before `end`, on the average one in `interval` microseconds, on hosts with a NIC.
pub(crate) fn plan(rng: &mut Rng, hosts: &[usize], end: u64, interval: u64, ipv6: bool) -> Vec<Planned> {
    let mut faults = Vec::new();
    let mut at = 0;
    loop {
        at += 1 + rng.below(2 * interval);
        if at >= end {
            return faults;
        }
        let host = hosts[rng.below(hosts.len() as u64) as usize];
        faults.push((at, host, draw(rng, ipv6)));
    }
}

fn draw(rng: &mut Rng, ipv6: bool) -> Fault {
    match rng.below(23) {
        22 => {
            let longest = [150_000, 500_000, 3_000_000][rng.below(3) as usize];
            Fault::Stop([Scope::Agent, Scope::WithNic, Scope::All][rng.below(3) as usize], rng.below(longest))
        }
        21 => Fault::Spread(rng.next_u64() as u32),
        // Some for so long that the agent ends it.
        20 => {
            let longest = [2_000, 50_000, 3_000_000][rng.below(3) as usize];
            let time = rng.below(longest);
            Fault::HaltNic([Halt::Stopped, Halt::Spins, Halt::Starved][time as usize % 3], time)
        }
        0..2 => Fault::KillNic,
        2..6 => Fault::LightFuse(rng.below(40) as u32),
        6..7 => Fault::KillAgent,
        7..11 => Fault::KillAgentAfter(rng.below(40)),
        11..14 => Fault::KillNicAfter(rng.below(40)),
        14 => Fault::DelayKeeper(rng.below(20_000)),
        15 => Fault::FillRing,
        16 => Fault::ShortMemory(rng.below(100_000)),
        17 if rng.chance(500_000) => Fault::Scribble(1 + rng.below(64) as u32),
        17 => Fault::Repeat,
        18 => Fault::Cut(rng.below(300_000)),
        // No IPv6 link has a smaller one (RFC 8200 section 5).
        _ => Fault::Mtu([1500, 1280, 1000, 576][rng.below(4) as usize].max(if ipv6 { 1280 } else { 0 })),
    }
}
