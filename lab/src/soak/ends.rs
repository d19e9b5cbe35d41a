//! The connections' ends, where the NIC has a policy for them: the peers send their FINs, the NIC keeps the connections
//! or gives them back, and the program goes on to send before it ends them.

use super::{Pipe, Shared, SoakReport, SoakSettings, Streams, TURN};
use anyhow::{Result, ensure};
use baton_abi::layout::Counter;
use baton_client::tool::Tool;
use baton_linux::events::monotonic_micros;
use baton_offloads::PeerFin;
use baton_protocol::program::{Place, Statistics};
use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Microseconds that a step on all connections may take. The peers wait for the program's end for as long, while it is
/// looked where the connections are, for at most half of that.
const LONGEST: u64 = 120_000_000;
const LOOKING: u64 = LONGEST / 2;

/// Runs `turn` on the connections that are not broken, again and again, until it has returned true for each. One on
/// which it fails, or takes too long, is broken.
fn on_all(streams: &mut Streams<'_>, mut turn: impl FnMut(&mut Streams<'_>, usize) -> io::Result<bool>) {
    let deadline = monotonic_micros() + LONGEST;
    let mut left: Vec<usize> = (0..streams.alive.len()).filter(|at| streams.alive[*at]).collect();
    while !left.is_empty() {
        let is_late = monotonic_micros() > deadline;
        left.retain(|at| {
            let done = match turn(streams, *at) {
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
                other => other,
            };
            match done {
                Ok(false) if is_late => streams.note_broken(*at, &ErrorKind::TimedOut.into()),
                Err(error) => streams.note_broken(*at, &error),
                Ok(done) => return !done,
            }
            false
        });
        std::thread::sleep(Duration::from_millis(TURN));
    }
}

impl Streams<'_> {
    /// Reads and checks what has come. Returns whether the stream has ended.
    fn read_to_end(&mut self, pipe: &mut impl Pipe, at: usize) -> io::Result<bool> {
        match self.read_some(pipe, at, true) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(true),
            other => other.map(|()| false),
        }
    }
}

/// The program's part: it reads the ends of its peers' streams and, once it may, sends some more and ends its own.
pub(super) fn end_program(pipe: &mut impl Pipe, streams: &mut Streams<'_>) {
    let shared = streams.shared;
    shared.drained.fetch_add(1, Ordering::AcqRel);
    on_all(streams, |streams, at| {
        let has_ended = streams.read_to_end(pipe, at)?;
        shared.half_closed.fetch_add(usize::from(has_ended), Ordering::AcqRel);
        Ok(has_ended)
    });
    while !shared.may_end.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(TURN));
    }
    on_all(streams, |streams, at| {
        streams.write_some(pipe, at)?;
        pipe.shut_down(at).map(|()| true)
    });
}

/// The peers' part: they end their streams once everything has been read, and read the program's to the end.
pub(super) fn end_peers(pipe: &mut impl Pipe, streams: &mut Streams<'_>) {
    let shared = streams.shared;
    shared.drained.fetch_add(1, Ordering::AcqRel);
    // The program would take an end that comes while it still reads for a broken connection.
    let deadline = monotonic_micros() + LONGEST;
    while shared.drained.load(Ordering::Acquire) < 2 && monotonic_micros() < deadline {
        std::thread::sleep(Duration::from_millis(TURN));
    }
    on_all(streams, |_, at| pipe.shut_down(at).map(|()| true));
    on_all(streams, |streams, at| streams.read_to_end(pipe, at));
}

/// Waits until the peers' FINs have come, and with [`PeerFin::Return`] until the NIC has given their connections back.
pub(super) fn observe(
    settings: &SoakSettings,
    tool: &mut Tool,
    session: u32,
    shared: &Shared,
    report: &mut SoakReport,
) -> Result<()> {
    let given_back = |statistics: &Statistics| statistics.counters.get(Counter::PeerFins as usize).copied().unwrap_or(0);
    let before = given_back(&tool.statistics()?);
    let deadline = monotonic_micros() + LOOKING;
    let returns = settings.bed.offloads.peer_fin == PeerFin::Return;
    loop {
        let left = settings.connections.saturating_sub(shared.half_closed.load(Ordering::Acquire));
        let broken = shared.broken.load(Ordering::Relaxed) as usize;
        let on_nic = tool.connections()?.iter().filter(|info| info.session == session && info.place == Place::Nic).count();
        let have_come = left <= broken;
        report.kept_after_fin = if have_come && returns { on_nic as u64 } else { 0 };
        if have_come && report.kept_after_fin == 0 || monotonic_micros() > deadline {
            ensure!(have_come, "{left} of {} programs have not read their peers' end", settings.connections);
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    report.peer_fins = given_back(&tool.statistics()?).saturating_sub(before);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soak::{CHUNK, Plain, run_program};
    use std::net::{TcpListener, TcpStream};

    /// Both sides over connections of the kernel: the program reads its peers' ends and goes on to send, and the peers
    /// read all of that and its end.
    #[test]
    fn both_sides_read_each_others_end() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let (mut near, mut far) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            far.push(TcpStream::connect(listener.local_addr().expect("its address")).expect("a connection"));
            near.push(listener.accept().expect("a connection").0);
        }
        near.iter().chain(&far).for_each(|socket| socket.set_nonblocking(true).expect("a flag"));
        let shared = Shared::new(3);
        shared.stop.store(true, Ordering::Relaxed);
        shared.may_end.store(true, Ordering::Relaxed);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                let (mut pipe, mut streams) = (Plain { sockets: near }, Streams::new(&shared, true, 1));
                run_program(&mut pipe, &mut streams);
                end_program(&mut pipe, &mut streams);
            });
            threads.spawn(|| {
                let (mut pipe, mut streams) = (Plain { sockets: far }, Streams::new(&shared, false, 1));
                run_program(&mut pipe, &mut streams);
                end_peers(&mut pipe, &mut streams);
            });
        });
        assert_eq!(shared.half_closed.load(Ordering::Relaxed), 3);
        assert_eq!([&shared.broken, &shared.mismatches].map(|count| count.load(Ordering::Relaxed)), [0, 0]);
        for direction in &shared.to_b {
            let (written, read) = (direction.written.load(Ordering::Relaxed), direction.read.load(Ordering::Relaxed));
            assert!(written == read && read >= CHUNK as u64, "{read} of {written} bytes");
        }
    }
}
