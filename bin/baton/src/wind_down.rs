//! `baton wind-down`, which is baton.service's ExecStopPost=. When `baton up` has ended, killed perhaps, its keepers
//! may still be restoring connections. Another one is started when they have ended.

use anyhow::Result;
use baton_linux::events::{Poller, Trigger};
use baton_linux::process;
use baton_protocol::keeper::KEEPER_NAME;
use std::fs;
use std::os::fd::AsFd;

/// Waits until all keepers of this process's control groups have ended.
///
/// # Errors
/// If one cannot be waited for.
pub fn run() -> Result<()> {
    let groups = |process: &str| fs::read_to_string(format!("/proc/{process}/cgroup")).ok();
    let own = groups("self");
    for other in process::all() {
        if process::name(other).as_deref() == Some(KEEPER_NAME)
            && groups(&other.to_string()) == own
            && let Ok(process) = process::open_process(other)
        {
            wait_for(&process)?;
        }
    }
    Ok(())
}

fn wait_for(process: &impl AsFd) -> Result<()> {
    let poller = Poller::new()?;
    poller.add(process.as_fd(), 0, Trigger::Readable)?;
    let mut tokens = Vec::new();
    while tokens.is_empty() {
        poller.wait(None, &mut tokens)?;
    }
    Ok(())
}
