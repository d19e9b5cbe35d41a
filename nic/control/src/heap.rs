//! Gives pages of the heap back to the system, in a thread of its own: walking a heap that thousands of connections
//! have used takes up to a millisecond, in which no frame may have to wait for a worker.

use anyhow::Result;
use baton_linux::process;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

/// Least time between two walks. Allocations wait during a walk, and with a longer pause one walk serves more requests.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks the thread for a walk.
#[derive(Clone)]
pub(crate) struct Trimmer(SyncSender<()>);

impl Trimmer {
    /// A trimmer, and the receiver for [`trim`].
    pub fn new() -> (Trimmer, Receiver<()>) {
        let (asks, asked) = mpsc::sync_channel(1);
        (Trimmer(asks), asked)
    }

    /// Requests a walk, without waiting. Requests before the next walk are all served by that one.
    pub fn ask(&self) {
        let _ = self.0.try_send(());
    }
}

/// The thread: trims the heap at each request, until all trimmers are dropped.
pub(crate) fn trim(asked: &Receiver<()>) -> Result<()> {
    while asked.recv().is_ok() {
        process::trim_heap();
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
