//! What a seed stands for: hosts, links, connections, moves, faults.

use crate::exhaustive;
use crate::fault::{self, Planned};
use crate::fork::Fork;
use crate::program::{Opening, Plan};
use baton_abi::resource::PAIRS;
use baton_lro::Mode;
use baton_sim::{Impairments, Rng};
use baton_tcp::Config;
use baton_wire::Endpoint;
use baton_wire::frame::{IPV4, IPV6};

/// Port of the first connection; each has its own, so that both ends know each other.
const PORT: u16 = 1000;
/// Sessions of a host's Baton. The last one is of a program that has no connections: it may scribble.
pub(crate) const SESSIONS: usize = 3;

/// A program and where it runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub host: usize,
    pub session: u32,
    pub plan: Plan,
}

/// How all NICs are made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offloads {
    /// Large receive and moderation, for the connections that the kernels have.
    pub lro: Mode,
    pub moderation: baton_moderation::Mode,
    /// Number of workers; 0 counts as 1.
    pub workers: usize,
    /// The NIC, which has one worker then, keeps only the fast path of its connections; the rest is the host's TCP's.
    pub fast_path: bool,
    /// What a NIC has room for: connections, pages of memory, and (address, length) pairs; `u32::MAX` for all.
    pub room: [u32; 3],
    /// Connections whose peer has sent its FIN are given back.
    pub return_at_fin: bool,
}

impl Offloads {
    /// One worker, nothing for the kernels' connections, and no limits.
    pub const NONE: Offloads = Offloads {
        lro: Mode::Off,
        moderation: baton_moderation::Mode::Off,
        workers: 1,
        fast_path: false,
        room: [u32::MAX; 3],
        return_at_fin: false,
    };
}

/// A run's plan.
pub(crate) struct Scenario {
    pub seed: u64,
    /// For each host: whether it has a Baton.
    pub hosts: Vec<bool>,
    /// The hosts have IPv6 addresses instead of IPv4 addresses.
    pub ipv6: bool,
    pub impairments: Impairments,
    pub config: Config,
    pub offloads: Offloads,
    /// Two programs for each connection: the one that connects, then the one that accepts.
    pub programs: Vec<Placed>,
    /// Mean time between two requests that a connection moves, microseconds; 0 for none.
    pub moves_every: u64,
    /// Until when there are moves and faults, microseconds.
    pub end_of_faults: u64,
    pub faults: Vec<Planned>,
    /// Crashes on the first host, instead of faults at random times.
    pub crashes: Vec<exhaustive::Planned>,
}

/// The address of a host, as [`Endpoint`] has it.
pub(crate) fn address(host: usize, ipv6: bool) -> [u8; 16] {
    let last = 1 + host as u8;
    if ipv6 { [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last] } else { Endpoint::v4([10, 0, 0, last], 0).address }
}

/// The host that has an address.
pub(crate) fn host_of(address: &[u8; 16]) -> usize {
    usize::from(address[15]).wrapping_sub(1)
}

impl Scenario {
    /// The scenario of a seed.
    pub fn of(seed: u64) -> Scenario {
        let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        let hosts: Vec<bool> = (0..2 + rng.below(3)).map(|at| at == 0 || rng.chance(400_000)).collect();
        let with_nic: Vec<usize> = (0..hosts.len()).filter(|at| hosts[*at]).collect();
        let ipv6 = rng.chance(300_000);
        let impairments = impairments(&mut rng);
        let connections = 1 + rng.below(6) as u16;
        let programs = (0..connections).flat_map(|at| pair(&mut rng, at, hosts.len(), ipv6)).collect();
        let end_of_faults = 200_000 + rng.below(2_000_000);
        let interval = [50_000, 20_000, 5_000][rng.below(3) as usize];
        let faults =
            if rng.chance(900_000) { fault::plan(&mut rng, &with_nic, end_of_faults, interval, ipv6) } else { Vec::new() };
        let moves_every = [2_000, 10_000, 50_000][rng.below(3) as usize];
        let config = Config {
            receive_buffer: [1 << 14, 1 << 16, 1 << 17][rng.below(3) as usize],
            nodelay: rng.chance(500_000),
            ip_header: if ipv6 { IPV6 } else { IPV4 } as u32,
            // A RST may be lost: only keep-alive ends a connection whose peer is gone and that has nothing to send.
            keepalive: true,
            keepalive_idle: 15,
            keepalive_interval: 5,
            ..Config::default()
        };
        let offloads = offloads(&mut rng);
        Scenario {
            seed,
            hosts,
            ipv6,
            impairments,
            config,
            offloads,
            programs,
            moves_every,
            end_of_faults,
            faults,
            crashes: Vec::new(),
        }
    }
}

fn offloads(rng: &mut Rng) -> Offloads {
    let (workers, fast_path) = [(1, false), (1, true), (2, false), (4, false)][rng.below(4) as usize];
    Offloads {
        workers,
        fast_path,
        lro: [Mode::Off, Mode::Off, Mode::InOrder, Mode::Reorder][rng.below(4) as usize],
        moderation: match rng.below(4) {
            0 => baton_moderation::Mode::Static { time: 1 + rng.below(500) as u32, frames: 1 + rng.below(20) as u32 },
            1 => baton_moderation::Mode::Adaptive,
            _ => baton_moderation::Mode::Off,
        },
        room: match rng.below(6) {
            0 => match rng.below(3) as u32 {
                // As many connections have these pairs.
                2 => [u32::MAX, u32::MAX, 3 * PAIRS - 1],
                connections => [connections, u32::MAX, u32::MAX],
            },
            1 => [u32::MAX, 8 + rng.below(100) as u32, u32::MAX],
            _ => [u32::MAX; 3],
        },
        return_at_fin: rng.chance(250_000),
    }
}

fn impairments(rng: &mut Rng) -> Impairments {
    let mut some = |most: u64| if rng.chance(500_000) { rng.below(most) as u32 } else { 0 };
    let (loss, reorder, duplicate, corrupt) = (some(50_000), some(100_000), some(30_000), some(10_000));
    Impairments {
        rate: [0, 10_000_000, 100_000_000, 1_000_000_000][rng.below(4) as usize],
        delay: [20, 200, 2_000, 20_000][rng.below(4) as usize],
        buffer: if rng.chance(300_000) { 20_000 } else { 0 },
        loss,
        reorder,
        hold: 50 + rng.below(3_000),
        duplicate,
        corrupt,
    }
}

/// A program's fork, if it makes one. `bytes`: what it sends and receives.
fn fork(rng: &mut Rng, bytes: u64) -> Option<Fork> {
    let (at, heir, lasts) = (rng.below(bytes + 1), rng.below(SESSIONS as u64 - 1) as u32, rng.below(300_000));
    let kind = rng.below(10);
    (kind < 3).then_some(Fork { at, heir: (kind > 0).then_some(heir), lasts })
}

/// The programs of a connection between two hosts.
fn pair(rng: &mut Rng, at: u16, hosts: usize, ipv6: bool) -> [Placed; 2] {
    // Most connections have an end on the first host, which has a NIC.
    let near = if rng.chance(700_000) { 0 } else { rng.below(hosts as u64) as usize };
    let far = (near + 1 + rng.below(hosts as u64 - 1) as usize) % hosts;
    let (client, server) = if rng.chance(500_000) { (near, far) } else { (far, near) };
    let mut amount = || [0, 1, 5_000, 60_000, 400_000][rng.below(5) as usize];
    let amounts = [amount(), amount()];
    let key = u64::from(at) * 2 + 1;
    let port = PORT + at;
    let openings = [Opening::Connect(Endpoint::v6(address(server, ipv6), port)), Opening::Accept(port)];
    let aborts = rng.chance(80_000).then(|| rng.below(amounts[0] + amounts[1] + 1));
    let aborting = rng.below(2) as usize;
    std::array::from_fn(|side| Placed {
        host: [client, server][side],
        session: rng.below(SESSIONS as u64 - 1) as u32,
        plan: Plan {
            opening: openings[side],
            sends: amounts[side],
            expects: amounts[1 - side],
            key: key + side as u64,
            peer_key: key + 1 - side as u64,
            chunk: [100, 3_000, 30_000][rng.below(3) as usize],
            think: [50, 500, 20_000][rng.below(3) as usize],
            aborts_at: aborts.filter(|_| side == aborting),
            fork: fork(rng, amounts[0] + amounts[1]),
        },
    })
}
