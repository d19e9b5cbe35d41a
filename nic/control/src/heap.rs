//! Gives pages of the heap back to the system, in a thread of its own: walking a heap that thousands of connections
//! have used takes up to a millisecond, in which no frame may have to wait for a worker.

use anyhow::Result;
use baton_linux::process;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::Duration;

/// Least time between two walks. What allocates meanwhile waits for the walk, and a longer pause lets one walk serve
/// for more.
const PAUSE: Duration = Duration::from_millis(100);

/// Asks the thread for a walk.
#[derive(Clone)]
pub(crate) struct Trimmer(SyncSender<()>);

impl Trimmer {
    /// With what [`trim`] receives.
    pub fn new() -> (Trimmer, Receiver<()>) {
        let (asks, asked) = mpsc::sync_channel(1);
        (Trimmer(asks), asked)
    }

    /// Has the heap trimmed soon. Does not wait; what is asked while a walk is still to come is served by that one.
    pub fn ask(&self) {
        let _ = self.0.try_send(());
    }
}

/// The thread: trims the heap whenever that is asked for, until nobody is left who could ask.
pub(crate) fn trim(asked: &Receiver<()>) -> Result<()> {
    while asked.recv().is_ok() {
        process::trim_heap();
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
