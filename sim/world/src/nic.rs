//! The NIC process: real workers of the datapath, and with partial offload the host's TCP, which die together, between
//! two rounds or in the middle of one.

use crate::fault::Halt;
use crate::port::{Killed, Port};
use crate::scenario::Offloads;
use baton_abi::layout;
use baton_datapath::{HostWire, Limits, NoKernel, Worker, WorkerSettings, crossbar};
use baton_device::MAX_FRAME;
use baton_lro::LroSettings;
use baton_rss::{Key, RssSettings};
use baton_shm::Region;
use baton_tcp::Instant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Connections that a NIC has room for.
pub(crate) const SLOTS: usize = 16;
/// Bytes of the frames' buffers.
const FRAME_BYTES: usize = 2048;

/// Why there is no NIC any more.
pub(crate) enum End {
    /// It was killed.
    Killed,
    /// Its code panicked: a failure of the run.
    Panicked(String),
}

/// A running NIC: its workers, and the host's TCP, which dies with it.
pub(crate) struct Nic {
    workers: Vec<Worker<Port, Port>>,
    host_tcp: Option<Worker<NoKernel, HostWire>>,
    flows: bool,
    /// When a timer is due next. Finding out takes the workers longer than a round, and it changes only in rounds that
    /// find work.
    due: u64,
    /// Until when the process does nothing useful, microseconds; 0 if that never was. And why, and since when.
    halted_until: u64,
    halted: Option<(Halt, u64)>,
}

impl Nic {
    /// Starts a NIC on the devices and the memory, with the programs' sessions attached. No frame flows yet.
    pub fn start(
        host: &Port,
        wire: &Port,
        memory: &Arc<Region>,
        sessions: &[Arc<Region>],
        offloads: Offloads,
        now: Instant,
    ) -> Nic {
        let settings = settings(&offloads);
        let mut workers = workers(host, wire, memory, &settings, offloads.workers.max(1), now);
        let host_tcp = offloads.fast_path.then(|| host_tcp(&mut workers[0], memory, &settings, now));
        let mut nic = Nic { workers, host_tcp, flows: false, due: 0, halted_until: 0, halted: None };
        for (number, session) in sessions.iter().enumerate() {
            nic.workers[0].attach(number as u32, session.clone());
            if let Some(host_tcp) = &mut nic.host_tcp {
                host_tcp.attach(number as u32, session.clone());
                nic.workers[0].keep_fast_path(number as u32);
            }
        }
        nic
    }

    /// Spreads connections over the workers by this indirection table, repeated: up to eight hexadecimal digits.
    pub fn spread(&mut self, table: u32) {
        if let Ok(indirection) = format!("{table:x}").parse() {
            let spread = RssSettings { indirection, ..RssSettings::default() };
            self.workers[0].set_rss(&spread, &Key::MICROSOFT);
            self.due = 0;
        }
    }

    /// Lets frames flow.
    pub fn let_frames_flow(&mut self, now: Instant) {
        self.workers[0].start(now);
        (self.flows, self.due) = (true, now.0);
    }

    /// Whether frames flow at this time.
    pub fn flows(&self, now: Instant) -> bool {
        self.flows && self.halted_until <= now.0
    }

    /// From `now` to `until`, microseconds, the process does nothing useful, and does not die of it. If it does so
    /// already it goes on in that way.
    pub fn halt(&mut self, halt: Halt, now: u64, until: u64) {
        let (halt, since) = self.halted(now).unwrap_or((halt, now));
        self.halted = Some((halt, since));
        self.halted_until = self.halted_until.max(until);
    }

    /// A process that is stopped goes on (SIGCONT).
    pub fn resume(&mut self, now: u64) {
        if self.halted(now).is_some_and(|(halt, _)| halt == Halt::Stopped) {
            self.halted_until = now;
        }
    }

    /// Why the process does nothing useful now, and since when.
    pub fn halted(&self, now: u64) -> Option<(Halt, u64)> {
        self.halted.filter(|_| now < self.halted_until)
    }

    /// Whether that was ever so.
    pub fn has_been_halted(&self) -> bool {
        self.halted_until > 0
    }

    /// Runs rounds until there is nothing to do.
    pub fn run(&mut self, now: Instant) -> Result<(), End> {
        if self.halted_until > now.0 {
            return Ok(());
        }
        let mut worked = self.due <= now.0;
        let rounds = catch_unwind(AssertUnwindSafe(|| {
            while self.round(now) {
                worked = true;
            }
        }));
        if worked && rounds.is_ok() {
            let workers = self.workers.iter().filter_map(Worker::next_timeout);
            self.due = workers.chain(self.host_tcp.iter().filter_map(Worker::next_timeout)).min().unwrap_or(u64::MAX);
        }
        rounds.map_err(|payload| match payload.downcast::<Killed>() {
            Ok(_) => End::Killed,
            Err(other) => End::Panicked(message(&*other)),
        })
    }

    /// One round of every worker, in an order that differs from time to time. Returns whether there was anything to do.
    fn round(&mut self, now: Instant) -> bool {
        let several = self.workers.len() > 1;
        let first = now.0 as usize % self.workers.len();
        let (back, front) = self.workers.split_at_mut(first);
        let mut worked = false;
        for worker in front.iter_mut().chain(back) {
            worked |= if several { worker.poll_with_peers(now) } else { worker.poll(now) };
        }
        if let Some(host_tcp) = &mut self.host_tcp {
            worked |= host_tcp.poll_lent(now);
            assert!(!host_tcp.is_broken(), "the NIC has lent a connection that cannot be taken");
        }
        worked
    }

    pub fn next_timeout(&self) -> u64 {
        self.due.max(self.halted_until)
    }
}

fn settings(offloads: &Offloads) -> WorkerSettings {
    let (hash_key, moderation) = ([1, 2, 3, 4], offloads.moderation);
    WorkerSettings {
        slots: SLOTS,
        hash_key,
        // So that frames are received ahead when there are several connections.
        many: 2,
        // So that connections become dormant in every pause, and wake up after it.
        dormant_after: 2_000,
        lro: LroSettings { mode: offloads.lro, connections: SLOTS, aggregates: 4, hash_key, ..LroSettings::default() },
        moderation,
        // What waits for the kernel may be an aggregate.
        return_at_fin: offloads.return_at_fin,
        limits: Limits { connections: offloads.room[0], pages: offloads.room[1], pairs: offloads.room[2], ..Limits::default() },
        frame_bytes: if moderation == baton_moderation::Mode::Off { FRAME_BYTES } else { MAX_FRAME },
        ..WorkerSettings::default()
    }
}

/// Makes the workers. All frames arrive at the first one.
fn workers(
    host: &Port,
    wire: &Port,
    memory: &Arc<Region>,
    settings: &WorkerSettings,
    number: usize,
    now: Instant,
) -> Vec<Worker<Port, Port>> {
    let new = |host, wire| Worker::new(host, wire, memory.clone(), *settings, now);
    if number == 1 {
        let mut worker = new(host.clone(), wire.clone());
        worker.review(now, 0);
        return vec![worker];
    }
    let peers = crossbar(number, &Key::MICROSOFT, None).into_iter().enumerate();
    let join = |(at, peers)| {
        let (host, wire) = if at == 0 { (host.clone(), wire.clone()) } else { (host.sending_only(), wire.sending_only()) };
        let mut worker = new(host, wire);
        worker.join(peers, now);
        worker
    };
    let mut workers: Vec<_> = peers.map(join).collect();
    workers[0].set_rss(&RssSettings::default(), &Key::MICROSOFT);
    workers[0].review(now, 0);
    workers
}

/// Makes the host's TCP, and connects it with the NIC's only worker.
fn host_tcp(
    worker: &mut Worker<Port, Port>,
    memory: &Arc<Region>,
    settings: &WorkerSettings,
    now: Instant,
) -> Worker<NoKernel, HostWire> {
    let shared = Arc::new(Region::private(layout::host_tcp::bytes(SLOTS)).expect("memory for a simulated host's TCP"));
    worker.set_host_tcp(shared.clone());
    let settings = WorkerSettings { slots: SLOTS, hash_key: settings.hash_key, ..WorkerSettings::default() };
    Worker::host_tcp(memory.clone(), shared, settings, now)
}

/// The message of a panic.
pub(crate) fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}
