//! Opening of a session with an agent that may die meanwhile.

use super::protocol_error;
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_protocol::program::{Answer, Ask, Opening, Reply, Request};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// How many agents are asked, each after the previous one has died.
const AGENTS: usize = 4;

/// A session that an agent has opened.
pub(super) struct Opened {
    /// Its control connection, and its number.
    pub channel: Channel,
    pub session: u32,
    /// The descriptors of its memory and its doorbells.
    pub descriptors: Vec<OwnedFd>,
}

/// Asks the agent at `path` for a session. The control connection's descriptor is passed through `renumber`. If the
/// agent dies, the next one is asked over a new connection, whose descriptor gets the same number: the program does
/// not know whether the next agent has the first request or the session.
///
/// # Errors
/// If no agent listens there; with the reason, if it refuses; `TimedOut` if the answer is not there after `limit`.
pub(super) fn ask(
    path: &Path,
    opening: Opening,
    socket: Option<BorrowedFd<'_>>,
    limit: Duration,
    renumber: &mut impl FnMut(OwnedFd) -> io::Result<OwnedFd>,
) -> io::Result<Opened> {
    let deadline = monotonic_micros().saturating_add(limit.as_micros() as u64);
    let left = || Duration::from_micros(deadline.saturating_sub(monotonic_micros()));
    let given: Vec<BorrowedFd<'_>> = socket.into_iter().collect();
    let request = Request { tag: 1, body: Ask::Open(opening) };
    let mut channel = Channel::from_fd(renumber(reach(path, limit)?.into())?);
    let mut asked = exchange(&channel, &request, &given, left());
    for _ in 1..AGENTS {
        if !agent_has_died(&asked) {
            break;
        }
        channel = Channel::from_fd(process::put_in_place_of(reach(path, left())?.into(), channel.into())?);
        asked = exchange(&channel, &request, &given, left());
    }
    let (answer, descriptors) = asked?;
    match answer.body {
        Reply::Opened { session } => Ok(Opened { channel, session, descriptors }),
        Reply::Failed { reason } => Err(io::Error::other(reason)),
        Reply::Restarted { .. } => Err(io::ErrorKind::ConnectionReset.into()),
        _ => Err(protocol_error("the session was not opened")),
    }
}

fn reach(path: &Path, limit: Duration) -> io::Result<Channel> {
    Channel::connect_within(path, limit).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!(
                "no agent at {} ({error}): start Baton (baton up), or set BATON_SOCKET to the path of its socket",
                path.display()
            ),
        )
    })
}

fn exchange(
    channel: &Channel,
    request: &Request,
    given: &[BorrowedFd<'_>],
    limit: Duration,
) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let sent = channel.try_send(request, given);
    // An agent that turns a client away sends the reason and closes the connection, perhaps before it has read the
    // request: then the first receive reports only the latter.
    let received = channel.receive_within(limit).or_else(|error| match error.kind() {
        io::ErrorKind::ConnectionReset => channel.receive_within(limit),
        _ => Err(error),
    });
    received.map_err(|error| sent.err().unwrap_or(error))
}

/// Whether the agent has died: another agent has answered, or the connection was closed, which happens if the agent
/// dies before it has given the connection to its keeper.
fn agent_has_died(asked: &io::Result<(Answer, Vec<OwnedFd>)>) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    match asked {
        Ok((answer, _)) => matches!(answer.body, Reply::Restarted { .. }),
        Err(error) => matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_linux::control::Listener;
    use std::os::fd::AsFd;

    /// One agent closes the connection, and the next one dies before it has answered.
    #[test]
    fn another_agent_is_asked_after_a_death() {
        let directory = std::env::temp_dir().join(format!("baton-opening-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let path = directory.join("agent.sock");
        let listener = Listener::bind(&path).expect("a listener");
        let agents = std::thread::spawn(move || {
            for body in [None, Some(Reply::Restarted { starts: 1 }), Some(Reply::Failed { reason: "no room".into() })] {
                let client = listener.accept().expect("a client");
                let channel = Channel::from_fd(client.as_fd().try_clone_to_owned().expect("a descriptor"));
                let (request, _): (Request, _) = channel.receive().expect("a request");
                assert!(matches!(request.body, Ask::Open(_)));
                body.into_iter().for_each(|body| channel.send(&Answer { tag: request.tag, body }, &[]).expect("sent"));
            }
        });
        let limit = Duration::from_secs(20);
        let mut numbers = Vec::new();
        let refused = ask(&path, Opening::alone(), None, limit, &mut |fd| {
            numbers.push(fd);
            process::lift(numbers[0].try_clone()?, 0)
        });
        assert_eq!(refused.err().expect("a refusal").to_string(), "no room");
        assert_eq!(numbers.len(), 1, "the number is chosen once");
        agents.join().expect("three clients");
        std::fs::remove_dir_all(&directory).expect("the directory is removed");
    }
}
