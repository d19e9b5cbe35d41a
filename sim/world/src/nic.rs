//! The NIC process: a real worker of the datapath, which can die between two rounds or in the middle of one.

use crate::port::{Killed, Port};
use crate::scenario::Offloads;
use baton_datapath::{Worker, WorkerSettings};
use baton_device::MAX_FRAME;
use baton_lro::LroSettings;
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

/// A running NIC.
pub(crate) struct Nic {
    worker: Worker<Port, Port>,
    flows: bool,
    /// When a timer is due next. Finding out takes the worker longer than a round, and it changes only in rounds that find work.
    due: u64,
}

impl Nic {
    /// Starts a NIC on the devices and the memory, with the programs' sessions attached. No frame flows yet.
    pub fn start(
        host: Port,
        wire: Port,
        memory: &Arc<Region>,
        sessions: &[Arc<Region>],
        Offloads { lro: mode, moderation }: Offloads,
        now: Instant,
    ) -> Nic {
        let hash_key = [1, 2, 3, 4];
        let settings = WorkerSettings {
            slots: SLOTS,
            hash_key,
            lro: LroSettings { mode, connections: SLOTS, aggregates: 4, hash_key, ..LroSettings::default() },
            moderation,
            // What waits for the kernel may be an aggregate.
            frame_bytes: if moderation == baton_moderation::Mode::Off { FRAME_BYTES } else { MAX_FRAME },
            ..WorkerSettings::default()
        };
        let mut worker = Worker::new(host, wire, memory.clone(), settings, now);
        for (number, session) in sessions.iter().enumerate() {
            worker.attach(number as u32, session.clone());
        }
        Nic { worker, flows: false, due: 0 }
    }

    /// Lets frames flow.
    pub fn let_frames_flow(&mut self, now: Instant) {
        self.worker.start(now);
        (self.flows, self.due) = (true, now.0);
    }

    /// Whether frames flow.
    pub fn flows(&self) -> bool {
        self.flows
    }

    /// Runs rounds until there is nothing to do.
    pub fn run(&mut self, now: Instant) -> Result<(), End> {
        let mut worked = self.due <= now.0;
        let rounds = catch_unwind(AssertUnwindSafe(|| {
            while self.worker.poll(now) {
                worked = true;
            }
        }));
        if worked && rounds.is_ok() {
            self.due = self.worker.next_timeout().unwrap_or(u64::MAX);
        }
        rounds.map_err(|payload| match payload.downcast::<Killed>() {
            Ok(_) => End::Killed,
            Err(other) => End::Panicked(message(&*other)),
        })
    }

    pub fn next_timeout(&self) -> u64 {
        self.due
    }
}

/// The message of a panic.
pub(crate) fn message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}
