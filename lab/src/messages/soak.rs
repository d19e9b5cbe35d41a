//! Messages of random sizes both ways over a faulty link, while NICs are killed and the peer is started anew: every
//! byte right, every message once and in MPI's order, nothing left over.

use super::bed::{Bed, Conditions};
use super::pingpong::{compare, fill};
use crate::closed_loop::SetsAtEnd;
use anyhow::{Context, Result, bail};
use baton_client::messages::Endpoint;
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_protocol::program::Statistics;
use baton_rmpp::{Completion, Error, Outgoing, PeerId, ReceiveId, Region, Request, Side};
use baton_sim::Rng;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Messages that each side sends, and receives, at the same time.
const AT_ONCE: usize = 16;
/// Bytes of the longest message.
const LONGEST: u64 = 256 << 10;
/// Tags; the order of messages of each is checked.
const TAGS: u64 = 4;
/// Microseconds without a completion after which messages count as lost.
const PATIENCE: u64 = 20_000_000;
/// Longest sleep, in microseconds.
const LOOK: u64 = 10_000;

/// Settings of a soak.
#[derive(Clone, Copy, Debug)]
pub struct SoakSettings {
    /// Conditions: what is on the NIC, and the link.
    pub conditions: Conditions,
    /// Messages, both directions together.
    pub messages: u64,
    /// Times that the NIC is killed.
    pub kill_nic: u32,
    /// Times that the agent is killed, and with it the NIC.
    pub kill_agent: u32,
    /// Times that the peer is started anew in the middle of its messages.
    pub restart_peer: u32,
}

/// Results of a soak.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SoakReport {
    /// Messages that were delivered.
    pub delivered: u64,
    /// Bytes compared.
    pub bytes_verified: u64,
    /// Bytes that were wrong.
    pub mismatches: u64,
    /// Messages that matched another receive than MPI's order says, came twice, or had another length.
    pub disordered: u64,
    /// Messages that failed without a restart of the peer.
    pub failed: u64,
    /// Messages that failed since the peer had been restarted.
    pub failed_by_restart: u64,
    /// NICs and agents killed.
    pub kills: u32,
    /// Times that another NIC was given all messages.
    pub replacements: u32,
    /// Times that the peer was started anew.
    pub restarts: u32,
    /// What either endpoint still held at the end, by kind: see `Endpoint::held`.
    pub held_a: [u64; 7],
    /// The same of the peer.
    pub held_b: [u64; 7],
    /// The agent's sessions when the program had ended, more than before it began.
    pub sessions_left: i64,
    /// Packets of host A, and of these the NIC's.
    pub packets: [u64; 2],
    /// Frames that the link lost while the last NIC had it.
    pub link_lost: u64,
    /// Seconds.
    pub seconds: f64,
}

impl SoakReport {
    /// Whether every message came, right, once and in order, and nothing is left.
    pub fn is_clean(&self, settings: &SoakSettings) -> bool {
        let wrong = self.mismatches + self.disordered + self.failed;
        let left = self.held_a.iter().chain(&self.held_b).sum::<u64>() + self.sessions_left.unsigned_abs();
        wrong + left == 0
            && self.delivered >= settings.messages
            && self.kills == settings.kill_nic + settings.kill_agent
            && self.restarts == settings.restart_peer
    }
}

/// One side's messages of one round.
struct Traffic {
    /// Round: the context, so that messages of another round match nothing.
    round: u32,
    to: PeerId,
    rng: Rng,
    /// Messages to send and to receive in all, and how many of each were begun and ended, by tag.
    count: u64,
    begun: BTreeMap<(Tag, bool), u64>,
    ended: [u64; 2],
    /// Places of [`LONGEST`] bytes that are free.
    free: VecDeque<u64>,
    /// Operations that run, by token.
    running: BTreeMap<u64, Running>,
    token: u64,
    restarting: bool,
    /// Why the first message failed that should not have.
    failure: Option<Error>,
    report: SoakReport,
}

type Tag = u64;

struct Running {
    tag: Tag,
    /// Which message of its tag it is.
    number: u64,
    region: Region,
    receive: Option<ReceiveId>,
}

/// A message's pattern and length follow from where it is from, and its number.
fn name(from_a: bool, round: u32, tag: Tag, number: u64) -> u64 {
    number << 16 | u64::from(round) << 8 | tag << 1 | u64::from(from_a)
}

fn length(name: u64) -> u64 {
    let mut rng = Rng::new(name.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    match rng.below(20) {
        0..5 => rng.below(64),
        5..15 => rng.below(4096),
        15..19 => rng.below(32 << 10),
        _ => rng.below(LONGEST + 1),
    }
}

impl Traffic {
    fn new(endpoint: &mut Endpoint, to: SocketAddr, round: u32, count: u64, seed: u64) -> Result<Traffic> {
        let [heap, bytes] = endpoint.heap();
        let places = bytes / LONGEST;
        let to = endpoint.peer(to).map_err(|limit| anyhow::anyhow!("{limit:?}"))?;
        Ok(Traffic {
            round,
            to,
            rng: Rng::new(seed),
            count,
            begun: BTreeMap::new(),
            ended: [0; 2],
            free: (0..places).map(|place| heap + place * LONGEST).collect(),
            running: BTreeMap::new(),
            token: 0,
            restarting: false,
            failure: None,
            report: SoakReport::default(),
        })
    }

    fn is_done(&self) -> bool {
        self.ended == [self.count; 2]
    }

    /// Begins sends or receives while there are fewer than [`AT_ONCE`].
    fn begin(&mut self, endpoint: &mut Endpoint, on_a: bool, receiving: bool) {
        loop {
            let begun: u64 = (0..TAGS).map(|tag| self.begun.get(&(tag, receiving)).copied().unwrap_or(0)).sum();
            let running = self.running.values().filter(|running| running.receive.is_some() == receiving).count();
            if begun == self.count || running >= AT_ONCE {
                return;
            }
            // Tags take turns in both directions, so that as many receives as messages have each.
            let tag = begun % TAGS;
            let number = begun / TAGS;
            let Some(offset) = self.free.pop_front() else { return };
            self.token += 1;
            let name = name(on_a != receiving, self.round, tag, number);
            let region = Region { offset, length: if receiving { LONGEST } else { length(name) } };
            let (context, now) = (self.round, monotonic_micros());
            let receive = if receiving {
                let request = Request { source: None, context, tag, ignore: 0, region, token: self.token };
                endpoint.receive(request, now).map(Some)
            } else {
                fill(endpoint, region, name);
                let outgoing = Outgoing { peer: self.to, context, tag, data: number, region, token: self.token };
                endpoint.send(outgoing, now).map(|()| None)
            };
            match receive {
                Ok(receive) => {
                    self.running.insert(self.token, Running { tag, number, region, receive });
                    *self.begun.entry((tag, receiving)).or_default() += 1;
                }
                Err(_) => return self.free.push_back(offset),
            }
        }
    }

    /// Takes a completion, and compares what was received.
    fn end(&mut self, endpoint: &mut Endpoint, completion: &Completion, on_a: bool) {
        let Some(running) = self.running.remove(&completion.token) else {
            self.report.disordered += 1;
            return;
        };
        let receiving = completion.side == Side::Receive;
        self.ended[usize::from(receiving)] += 1;
        match completion.result {
            Ok(delivered) if receiving => {
                let name = name(!on_a, self.round, running.tag, running.number);
                let region = Region { length: delivered.length, ..running.region };
                let right = (delivered.tag, delivered.data, delivered.length) == (running.tag, running.number, length(name));
                self.report.disordered += u64::from(!right || delivered.placed != delivered.length);
                if right {
                    self.report.mismatches += compare(endpoint, region, name);
                    self.report.bytes_verified += region.length;
                }
                self.report.delivered += 1;
            }
            Ok(_) => {}
            Err(error) if self.restarting => {
                let known = matches!(error, Error::PeerRestarted | Error::Cancelled | Error::PeerDead | Error::Aborted);
                self.report.failed += u64::from(!known);
                self.report.failed_by_restart += u64::from(receiving);
            }
            Err(error) => {
                self.report.failed += 1;
                self.failure = self.failure.or(Some(error));
            }
        }
        // Not at once the same place again: a late packet would be seen.
        self.free.insert(self.rng.below(self.free.len() as u64 + 1) as usize, running.region.offset);
    }

    /// Drives one side until its messages have ended, or `stop` says so.
    fn run(&mut self, endpoint: &mut Endpoint, on_a: bool, course: &Course<'_>, stop: &dyn Fn() -> bool) -> Result<()> {
        let mut last = monotonic_micros();
        while !self.is_done() && !stop() {
            self.begin(endpoint, on_a, true);
            if !course.is_ahead() {
                self.begin(endpoint, on_a, false);
            }
            let now = monotonic_micros();
            endpoint.progress(now).context("the endpoint")?;
            while let Some(completion) = endpoint.poll_completion() {
                self.end(endpoint, &completion, on_a);
                course.done.fetch_add(u64::from(completion.side == Side::Receive), Ordering::Relaxed);
                last = now;
            }
            if now > last + PATIENCE {
                let [sent, received] = self.ended;
                let held = endpoint.held();
                let (host, begun) = (if on_a { "A" } else { "B" }, self.begun.values().sum::<u64>());
                let (killed, done) = (course.killed.load(Ordering::Relaxed), course.done.load(Ordering::Relaxed));
                bail!(
                    "host {host}: nothing for 20 s; {sent} sent, {received} received, {begun} begun, held {held:?}; \
                     {killed} NICs killed after {done} messages; {} failed, the first one by {:?}",
                    self.report.failed,
                    self.failure
                );
            }
            endpoint.wait(now, now + LOOK)?;
        }
        Ok(())
    }

    /// The peer has ended: what runs fails when its successor answers, and receives are taken back.
    fn abandon(&mut self, endpoint: &mut Endpoint, on_a: bool) -> Result<()> {
        self.restarting = true;
        let begin = monotonic_micros();
        while !self.running.is_empty() {
            for receive in self.running.values().filter_map(|running| running.receive) {
                endpoint.cancel(receive);
            }
            let now = monotonic_micros();
            endpoint.progress(now)?;
            while let Some(completion) = endpoint.poll_completion() {
                self.end(endpoint, &completion, on_a);
            }
            if now > begin + PATIENCE {
                bail!("{} messages to a peer that was restarted did not end", self.running.len());
            }
            endpoint.wait(now, now + LOOK)?;
        }
        self.find_successor(endpoint)
    }

    /// Sends messages of this round, which the peer's successor discards, until one comes. If all that was sent had
    /// been acknowledged, nothing has shown the restart yet, and the first messages of the next round would fail.
    fn find_successor(&self, endpoint: &mut Endpoint) -> Result<()> {
        let region = Region { offset: endpoint.heap()[0], length: 0 };
        let outgoing = Outgoing { peer: self.to, context: self.round, tag: 0, data: 0, region, token: 0 };
        let (begin, mut sent, mut found) = (monotonic_micros(), false, false);
        while !found {
            let now = monotonic_micros();
            sent = sent || endpoint.send(outgoing, now).is_ok();
            endpoint.progress(now)?;
            while let Some(completion) = endpoint.poll_completion() {
                (sent, found) = (false, completion.result.is_ok());
            }
            if now > begin + PATIENCE {
                bail!("no message has come to a peer that was restarted");
            }
            endpoint.wait(now, now + LOOK)?;
        }
        Ok(())
    }
}

/// Answers until `over`, and then until nothing is held, as long as that may take.
fn settle(endpoint: &mut Endpoint, over: &dyn Fn() -> bool) -> Result<[u64; 7]> {
    let mut deadline = u64::MAX;
    loop {
        let now = monotonic_micros();
        endpoint.progress(now)?;
        while endpoint.poll_completion().is_some() {}
        if over() {
            deadline = deadline.min(now + PATIENCE / 2);
            if endpoint.held().iter().sum::<u64>() == 0 || now > deadline {
                return Ok(endpoint.held());
            }
        }
        endpoint.wait(now, now + LOOK)?;
    }
}

/// Takes messages of a round that nobody waits for any more, until `over`: what was not sent yet when a peer was
/// restarted goes to its successor.
fn discard(endpoint: &mut Endpoint, round: u32, over: &dyn Fn() -> bool) -> Result<()> {
    let region = Region { offset: endpoint.heap()[0], length: LONGEST };
    let request = Request { source: None, context: round, tag: 0, ignore: u64::MAX, region, token: 0 };
    let mut posted = None;
    loop {
        let now = monotonic_micros();
        endpoint.progress(now)?;
        while endpoint.poll_completion().is_some() {
            posted = None;
        }
        match posted {
            Some(receive) if over() => _ = endpoint.cancel(receive),
            None if over() => return Ok(()),
            Some(_) => {}
            None => posted = endpoint.receive(request, now).ok(),
        }
        endpoint.wait(now, now + LOOK)?;
    }
}

/// Adds one side's findings to the whole.
fn add(report: &mut SoakReport, part: &SoakReport) {
    report.delivered += part.delivered;
    report.bytes_verified += part.bytes_verified;
    report.mismatches += part.mismatches;
    report.disordered += part.disordered;
    report.failed += part.failed;
    report.failed_by_restart += part.failed_by_restart;
}

/// How far a soak has come.
struct Course<'a> {
    settings: &'a SoakSettings,
    /// Messages that have come, and NICs that were killed.
    done: AtomicU64,
    killed: AtomicU32,
}

impl Course<'_> {
    /// Messages after which the NIC is killed for the `number`th time.
    fn share(&self, number: u32) -> u64 {
        u64::from(number) * self.settings.messages / u64::from(self.settings.kill_nic + self.settings.kill_agent + 1)
    }

    /// Whether messages have to wait for a NIC's death: they may be faster than the next one starts.
    fn is_ahead(&self) -> bool {
        let killed = self.killed.load(Ordering::Relaxed);
        let all = killed >= self.settings.kill_nic + self.settings.kill_agent;
        // Those that are left when the last NIC dies come through its successor.
        !all && self.done.load(Ordering::Relaxed) >= (self.share(killed + 1) + self.share(killed + 2)) / 2
    }
}

/// Kills the NIC, and then the agent with it, whenever a share of the messages has come, until `over`.
fn kill(bed: &baton_bed::testbed::Testbed, course: &Course<'_>, over: &AtomicBool) -> Result<u32> {
    let settings = course.settings;
    let kills = settings.kill_nic + settings.kill_agent;
    let mut killed = 0;
    while killed < kills && !over.load(Ordering::Relaxed) {
        if course.done.load(Ordering::Relaxed) >= course.share(killed + 1) {
            let before = bed.tool()?.statistics()?;
            let victim = if killed < settings.kill_nic { before.nic_process } else { before.agent_process };
            process::signal(victim, 9)?;
            killed += 1;
            course.killed.store(killed, Ordering::Relaxed);
            // While there is no agent it cannot be asked.
            let another = |now: Statistics| now.nic_process != before.nic_process;
            while !bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(another) && !over.load(Ordering::Relaxed) {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Ok(killed)
}

/// Runs a soak.
///
/// # Errors
/// If a test bed cannot be made, or messages do not end.
pub fn soak(settings: &SoakSettings) -> Result<SoakReport> {
    let started = monotonic_micros();
    // Places for what runs, and as many again, so that a place rests before it is used again.
    let memory = 4 * AT_ONCE * LONGEST as usize;
    let conditions = Conditions { memory, accounted: false, ..settings.conditions };
    let mut bed = Bed::new(&conditions)?;
    let sessions = bed.testbed.tool()?.statistics()?.sessions;
    let mut report = SoakReport::default();
    let course = Course { settings, done: AtomicU64::new(0), killed: AtomicU32::new(0) };
    let over = AtomicBool::new(false);
    let (testbed, a, b, _) = bed.split();
    let rounds = settings.restart_peer + 1;
    let kills = std::thread::scope(|scope| {
        let killer = scope.spawn(|| kill(testbed, &course, &over));
        let exchanged = {
            let _ending = SetsAtEnd(&over);
            exchange(&course, &conditions, testbed, [a, b], rounds, &mut report)
        };
        let killed = killer.join().map_err(|_| anyhow::anyhow!("the killer panicked"))?;
        match (exchanged, killed) {
            // Messages wait for deaths that do not come.
            (Err(error), Err(cause)) => Err(error.context(format!("the NIC could not be killed: {cause:#}"))),
            (exchanged, killed) => exchanged.and(killed),
        }
    })?;
    report.kills = kills;
    let usage = bed.a.usage();
    (report.packets, report.replacements) = ([usage.packets, usage.packets_on_nic], usage.nic_deaths);
    let lost = bed.testbed.tool()?.statistics()?.counters[baton_abi::layout::Counter::LinkLost as usize];
    report.link_lost = lost;
    let Bed { testbed, a, .. } = bed;
    drop(a);
    let deadline = monotonic_micros() + PATIENCE;
    loop {
        // The session of the endpoint that has just ended was among those counted before.
        let offloaded = u32::from(settings.conditions.offload != super::Offload::None);
        let now = testbed.tool()?.statistics()?.sessions;
        report.sessions_left = i64::from(now) - i64::from(sessions - offloaded);
        if report.sessions_left == 0 || monotonic_micros() > deadline {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    report.seconds = (monotonic_micros() - started) as f64 / 1e6;
    Ok(report)
}

/// All rounds; between two of them the peer is ended in the middle of its messages, and started anew.
fn exchange(
    course: &Course<'_>,
    conditions: &Conditions,
    testbed: &baton_bed::testbed::Testbed,
    [a, b]: [&mut Endpoint; 2],
    rounds: u32,
    report: &mut SoakReport,
) -> Result<()> {
    let (settings, done) = (course.settings, &course.done);
    let each = settings.messages / u64::from(rounds) / 2;
    let (address_a, address_b) = (a.address(), b.address());
    for round in 0..rounds {
        let last = round + 1 == rounds;
        // The last round makes up for what restarts cut short.
        let count = if last { (settings.messages - report.delivered.min(settings.messages)).div_ceil(2).max(each) } else { each };
        let seed = conditions.seed.wrapping_add(u64::from(round));
        let before = done.load(Ordering::Relaxed);
        let halfway = || !last && done.load(Ordering::Relaxed) - before > count;
        let mut mine = Traffic::new(a, address_b, round, count, seed)?;
        let finished = [AtomicBool::new(false), AtomicBool::new(false)];
        let both = || finished.iter().all(|finished| finished.load(Ordering::Relaxed));
        let theirs = std::thread::scope(|scope| -> Result<(SoakReport, [u64; 7])> {
            let peer = scope.spawn(|| -> Result<(SoakReport, [u64; 7])> {
                let _end = SetsAtEnd(&finished[1]);
                let mut theirs = Traffic::new(b, address_a, round, count, !seed)?;
                theirs.run(b, false, course, &|| halfway() || finished[0].load(Ordering::Relaxed) && !last)?;
                finished[1].store(true, Ordering::Relaxed);
                let held = if last { settle(b, &both)? } else { [0; 7] };
                Ok((theirs.report, held))
            });
            let run = mine.run(a, true, course, &|| halfway());
            finished[0].store(true, Ordering::Relaxed);
            if last && run.is_ok() {
                report.held_a = settle(a, &both)?;
            }
            let theirs = peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))?;
            match (run, theirs) {
                // What one side waits for may have failed on the other.
                (Err(error), Ok((its, _))) => Err(error.context(format!("{} messages of the peer's failed", its.failed))),
                (Err(error), Err(its)) => Err(error.context(format!("the peer: {its:#}"))),
                (Ok(()), Err(its)) => {
                    let ours = format!("{} messages of host A failed, the first one by {:?}", mine.report.failed, mine.failure);
                    Err(its.context(ours))
                }
                (Ok(()), theirs) => theirs,
            }
        })?;
        report.held_b = theirs.1;
        if !last {
            restart(conditions, testbed, b, address_b)?;
            let over = AtomicBool::new(false);
            std::thread::scope(|scope| -> Result<()> {
                let peer = scope.spawn(|| discard(b, round, &|| over.load(Ordering::Relaxed)));
                let abandoned = {
                    let _ending = SetsAtEnd(&over);
                    mine.abandon(a, true)
                };
                peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
                abandoned
            })?;
            report.restarts += 1;
        }
        add(report, &mine.report);
        add(report, &theirs.0);
    }
    Ok(())
}

/// Ends the peer without a farewell, and starts another one at its address.
fn restart(conditions: &Conditions, bed: &baton_bed::testbed::Testbed, b: &mut Endpoint, address: SocketAddr) -> Result<()> {
    let elsewhere = conditions.endpoint(bed, false);
    // The endpoint's socket has to be closed before another one can have the port.
    *b = bed.host_b.run(|| Endpoint::new(&elsewhere))?;
    let settings =
        baton_client::messages::Settings { address, incarnation: elsewhere.incarnation.wrapping_add(1000), ..elsewhere };
    *b = bed.host_b.run(|| Endpoint::new(&settings)).context("the peer's next endpoint")?;
    Ok(())
}
