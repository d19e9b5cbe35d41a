//! The paper's programs: the ping-pong test (Figure 6) and the measurement of processor availability (Figure 9).

use super::cable::Cable;
use super::hardware::Hardware;
use baton_rmpp::{Halves, Side};
use serde::Serialize;

/// What is offloaded, in the paper's words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Which halves the NIC has.
    pub on_nic: Halves,
    /// Packets before the last cleared one that the RSM is sent: "Pre k".
    pub early: u8,
}

impl Step {
    /// Step 0: nothing is offloaded.
    pub const NONE: Step = Step { on_nic: Halves { receiving: false, sending: false }, early: 0 };
    /// Step 1: receive handling is offloaded.
    pub const RECEIVE: Step = Step { on_nic: Halves { receiving: true, sending: false }, early: 0 };
    /// Step 2: send and receive handling are.
    pub const BOTH: Step = Step { on_nic: Halves::BOTH, early: 0 };

    /// Step 3: both, and the RSM is sent `early` packets early.
    pub const fn pre(early: u8) -> Step {
        Step { early, ..Step::BOTH }
    }
}

/// Latency of messages of one length, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    /// Bytes of a message.
    pub length: u64,
    /// Shortest.
    pub min: f64,
    /// Mean.
    pub mean: f64,
    /// Longest.
    pub max: f64,
}

/// The paper's MB: its figures for bandwidth and for the time of a 1500-byte packet agree if it is 2²⁰ bytes.
pub const MB: f64 = 1_048_576.0;

impl Latency {
    /// Bandwidth in MB/s.
    pub fn bandwidth(&self) -> f64 {
        self.length as f64 / self.mean * 1e6 / MB
    }
}

/// Runs until a send or receive of machine `at` completes.
fn wait(cable: &mut Cable, at: usize, side: Side) {
    loop {
        let completions = &mut cable.machines[at].completions;
        if let Some(found) = completions.iter().position(|completion| completion.side == side) {
            let completion = completions.remove(found).expect("it was found");
            completion.result.expect("nothing is lost on the model's cable");
            return;
        }
        cable.step();
    }
}

/// The ping-pong test of Figure 6: half a round trip, `rounds` times. A first round, in which the machines meet, is
/// left out.
pub fn ping_pong(hardware: Hardware, step: Step, length: u64, rounds: u32) -> Latency {
    let mut cable = Cable::new(hardware, step.on_nic, step.early);
    let mut latencies = Vec::new();
    for round in 0..=rounds {
        let begin = cable.now;
        for from in [0, 1] {
            // Each program receives as soon as it has sent; the other one's receive is posted by then.
            cable.receive(1 - from, length);
            cable.send(from, length);
            wait(&mut cable, 1 - from, Side::Receive);
        }
        for at in [0, 1] {
            wait(&mut cable, at, Side::Send);
        }
        if round > 0 {
            latencies.push((cable.now - begin) / 2.0);
        }
    }
    let mean = latencies.iter().sum::<f64>() / latencies.len() as f64;
    let min = latencies.iter().copied().fold(f64::INFINITY, f64::min);
    Latency { length, min, mean, max: latencies.iter().copied().fold(0.0, f64::max) }
}

/// Bandwidth and availability at one polling interval.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Availability {
    /// Microseconds of work between polls.
    pub interval: f64,
    /// MB/s.
    pub bandwidth: f64,
    /// Share of the processor that the program has.
    pub availability: f64,
}

/// Microseconds after which a reply will not come any more: a hundred times what the slowest takes.
const LOST: f64 = 1e7;

/// The measurement of Figure 9: the program sends, posts a receive, and works in pieces of `interval` microseconds
/// until a poll finds that the reply has come; `rounds` times. Availability is the work done over the time that it
/// took.
pub fn availability(hardware: Hardware, step: Step, length: u64, interval: f64, rounds: u32) -> Availability {
    let mut cable = Cable::new(hardware, step.on_nic, step.early);
    let (mut worked, mut begin) = (0.0, 0.0);
    for round in 0..=rounds {
        if round == 1 {
            (worked, begin) = (0.0, cable.now);
        }
        cable.receive(1, length);
        cable.receive(0, length);
        cable.send(0, length);
        let (mut replied, sent) = (false, cable.now);
        loop {
            assert!(cable.now - sent < LOST, "a message of {length} bytes is not answered, polled every {interval} µs");
            work(&mut cable, interval, |cable| {
                // Pong replies as soon as it has the message.
                let pong = &mut cable.machines[1].completions;
                let got = pong.iter().any(|completion| completion.side == Side::Receive);
                pong.clear();
                if got && !replied {
                    replied = true;
                    cable.send(1, length);
                }
            });
            worked += interval;
            let ping = &mut cable.machines[0].completions;
            if ping.iter().any(|completion| completion.side == Side::Receive) {
                ping.clear();
                break;
            }
        }
    }
    let elapsed = cable.now - begin;
    let bandwidth = length as f64 * 2.0 * f64::from(rounds) / elapsed * 1e6 / MB;
    Availability { interval, bandwidth, availability: worked / elapsed }
}

/// The program at machine 0 works for `interval` microseconds of processor time: longer by what the kernel takes.
fn work(cable: &mut Cable, interval: f64, mut meanwhile: impl FnMut(&mut Cable)) {
    let kernel_before = cable.machines[0].kernel_time_until(cable.now);
    let begin = cable.now;
    loop {
        let taken = cable.machines[0].kernel_time_until(cable.now) - kernel_before;
        let left = interval - (cable.now - begin - taken);
        if left <= 1e-3 {
            return;
        }
        let deadline = cable.now + left;
        cable.wake(0, deadline);
        while cable.now < deadline - 1e-3 {
            cable.step();
            meanwhile(cable);
        }
    }
}
