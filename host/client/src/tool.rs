//! A tool's connection to an agent: requests and answers one at a time, and the lists that need several.

use anyhow::{Context, Result, bail};
use baton_capture::Reader;
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::terminal::plain;
use baton_protocol::events::{EventList, ProgramCounts};
use baton_protocol::program::{Answer, Ask, ConnectionInfo, Load, Reply, Request, Statistics};
use baton_shm::Region;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Time limit for each answer to a tool that only reads; for all answers together if the agent is another user's.
const LIMIT: Duration = Duration::from_secs(1);

/// Time limit for another user's agent to answer a request of root's.
const FOREIGN: Duration = Duration::from_secs(10);

/// Pause before the next attempt to connect to an agent that has no room for another client, or does not listen yet.
const AGAIN: Duration = Duration::from_millis(10);

/// How many times a request is sent if agents die before they answer and their keeper starts the next one.
const MOST_ASKED: u32 = 5;

/// Most connections in the lists of one agent: more than its sessions can have.
const MOST_LISTED: usize = 1 << 20;

/// A tool's connection to the agent. The texts in all answers are safe to print.
pub struct Tool {
    channel: Channel,
    tag: u32,
    limit: Limit,
}

/// How long an answer is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Limit {
    None,
    /// Each for this long.
    Each(Duration),
    /// All until this time, in microseconds of the monotonic clock.
    Until(u64),
}

impl Limit {
    fn receive(self, channel: &Channel) -> Result<Answer> {
        let (left, most) = match self {
            Limit::None => return Ok(channel.receive()?.0),
            Limit::Each(limit) => (limit, limit),
            Limit::Until(at) => (Duration::from_micros(at.saturating_sub(monotonic_micros())), LIMIT),
        };
        match channel.receive_message_within(left) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let process = channel.peer_process().unwrap_or_default();
                bail!("it (process {process}) has not answered in time ({} s): it is stopped or overloaded", most.as_secs())
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                bail!("its answer cannot be read: it is of another version of Baton ({error})")
            }
            received => Ok(received?),
        }
    }
}

impl Tool {
    /// Connects to the agent at a path. Root may connect to other users' agents: neither requests nor answers give
    /// those users anything. After an agent's death this waits up to a second until its keeper has started the next
    /// one.
    ///
    /// # Errors
    /// If no agent listens there, or one of another user.
    pub fn connect(path: &Path) -> Result<Tool> {
        let deadline = monotonic_micros() + LIMIT.as_micros() as u64;
        let of_another = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied && baton_linux::process::user() == 0;
        let (channel, limit) = loop {
            match Channel::connect(path) {
                Err(error) if of_another(&error) => break (Channel::try_connect_to_anybody(path), Limit::Each(FOREIGN)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && monotonic_micros() < deadline => {
                    std::thread::sleep(AGAIN);
                }
                connected => break (connected, Limit::None),
            }
        };
        let channel = channel.with_context(|| {
            format!("no agent at {}: start Baton (baton up), or set BATON_SOCKET to the path of its socket", path.display())
        })?;
        Ok(Tool { channel, tag: 0, limit })
    }

    /// Connects to the agent at a path for reading only. Root may read other users' agents; `process` is then the
    /// process that is expected to listen there, if that is known. No wait takes longer than a second.
    ///
    /// # Errors
    /// As [`Tool::connect`], or if the agent does not accept the connection, or is another process.
    pub fn look(path: &Path, process: Option<u32>) -> Result<Tool> {
        let deadline = monotonic_micros() + LIMIT.as_micros() as u64;
        let absent =
            || format!("no agent at {}: start Baton (baton up), or set BATON_SOCKET to the path of its socket", path.display());
        let channel = loop {
            match Channel::try_connect_to_anybody(path) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && monotonic_micros() < deadline => {
                    std::thread::sleep(AGAIN);
                }
                other => break other.with_context(absent)?,
            }
        };
        let (own, peer) = (baton_linux::process::user(), channel.peer_user()?);
        if [0, own].contains(&peer) {
            return Ok(Tool { channel, tag: 0, limit: Limit::Each(LIMIT) });
        }
        if own != 0 {
            // In a user namespace the host's root is shown as another user: then the path decides whether the listener
            // is trusted.
            let channel = Channel::connect(path).with_context(absent)?;
            return Ok(Tool { channel, tag: 0, limit: Limit::Each(LIMIT) });
        }
        if process.is_some_and(|process| channel.peer_process().ok() != Some(process)) {
            bail!("another process than the agent listens at {}", path.display());
        }
        Ok(Tool { channel, tag: 0, limit: Limit::Until(deadline) })
    }

    /// Begins a new time limit for all answers, as if the tool had just connected. For tools that read periodically.
    pub fn begin_round(&mut self) {
        if let Limit::Until(deadline) = &mut self.limit {
            *deadline = monotonic_micros() + LIMIT.as_micros() as u64;
        }
    }

    /// Sends a request whose answer is read later. Returns its tag.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn send(&mut self, body: Ask) -> Result<u32> {
        self.send_with(body, &[])
    }

    fn send_with(&mut self, body: Ask, descriptors: &[BorrowedFd<'_>]) -> Result<u32> {
        self.tag = self.tag.wrapping_add(1);
        let request = Request { tag: self.tag, body };
        // With a time limit for answers this does not wait for room to send either.
        match self.limit {
            Limit::None => self.channel.send(&request, descriptors)?,
            Limit::Each(_) | Limit::Until(_) => self.channel.try_send(&request, descriptors)?,
        }
        Ok(self.tag)
    }

    fn next(&self) -> Result<Answer> {
        let Answer { tag, body } = self.limit.receive(&self.channel)?;
        Ok(Answer { tag, body: body.with_plain_texts(plain) })
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn receive(&mut self) -> Result<Answer> {
        loop {
            let answer = self.next()?;
            if !matches!(answer.body, Reply::Restarted { .. }) {
                return Ok(answer);
            }
        }
    }

    /// Sends a request and waits for the answer.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn ask(&mut self, body: Ask) -> Result<Reply> {
        self.ask_with(body, &[])
    }

    /// As [`Tool::ask`], with descriptors attached to the request.
    ///
    /// # Errors
    /// If the agent has ended, or several agents die one after the other before they answer.
    pub fn ask_with(&mut self, body: Ask, descriptors: &[BorrowedFd<'_>]) -> Result<Reply> {
        for _ in 0..MOST_ASKED {
            let tag = self.send_with(body.clone(), descriptors)?;
            loop {
                let answer = self.next()?;
                match answer.body {
                    // The agent may have died with the request; a late answer to it is ignored.
                    Reply::Restarted { .. } => break,
                    body if answer.tag == tag => return Ok(body),
                    // The request could not be read.
                    Reply::Failed { reason } if answer.tag == 0 => bail!("{reason}"),
                    _ => {}
                }
            }
        }
        bail!("{MOST_ASKED} agents have died, one after the other, before they answered")
    }

    /// All connections that the agent knows.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn connections(&mut self) -> Result<Vec<ConnectionInfo>> {
        let of = |reply| if let Reply::Connections(list) = reply { Ok(list) } else { Err(reply) };
        self.whole_list(|from| Ask::List { from }, of, |one| (one.session, one.connection))
    }

    /// Reads a list that comes in several answers. Each request names the session and number after which the next part
    /// begins.
    fn whole_list<T>(
        &mut self,
        ask: impl Fn((u32, u32)) -> Ask,
        of: impl Fn(Reply) -> Result<Vec<T>, Reply>,
        place: impl Fn(&T) -> (u32, u32),
    ) -> Result<Vec<T>> {
        let mut all = Vec::new();
        loop {
            let behind = |(session, connection): (u32, u32)| (session, connection.saturating_add(1));
            let from = all.last().map_or((0, 0), |last| behind(place(last)));
            match of(self.ask(ask(from))?) {
                Ok(list) if list.is_empty() => return Ok(all),
                Ok(list) if all.len() < MOST_LISTED => all.extend(list),
                Ok(_) => bail!("the agent's list has no end"),
                Err(other) => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            }
        }
    }

    /// Describes these connections (session and number). Those that have ended meanwhile are missing.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn describe(&mut self, connections: &[(u32, u32)]) -> Result<Vec<ConnectionInfo>> {
        let mut all: Vec<ConnectionInfo> = Vec::new();
        let mut rest = connections;
        while !rest.is_empty() {
            let (asked, later) = rest.split_at(rest.len().min(Ask::MOST_DESCRIBED));
            let list = match self.ask(Ask::Describe { connections: asked.to_vec() })? {
                Reply::Connections(list) => list,
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            };
            // If not all have fitted into one answer, the next request begins after the last one.
            let last = list.last().map(|last| (last.session, last.connection));
            let done = last.and_then(|last| asked.iter().position(|one| *one == last)).map_or(asked.len(), |at| at + 1);
            rest = if done < asked.len() { &rest[done..] } else { later };
            all.extend(list);
        }
        Ok(all)
    }

    /// The last events of these connections (session and number). Those that have ended meanwhile are missing.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn events(&mut self, connections: &[(u32, u32)]) -> Result<Vec<EventList>> {
        let (mut all, mut rest) = (Vec::new(), connections);
        while !rest.is_empty() {
            let (asked, later) = rest.split_at(rest.len().min(Ask::MOST_DESCRIBED));
            let list = match self.ask(Ask::Events { connections: asked.to_vec() })? {
                Reply::Events(list) => list,
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            };
            let last = list.histories.last().map(|last| (last.session, last.connection));
            let done = last.and_then(|last| asked.iter().position(|one| *one == last)).map_or(asked.len(), |at| at + 1);
            rest = if done < asked.len() { &rest[done..] } else { later };
            all.push(list);
        }
        Ok(all)
    }

    /// The counters of each program.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn counts(&mut self) -> Result<Vec<ProgramCounts>> {
        let mut all: Vec<ProgramCounts> = Vec::new();
        loop {
            match self.ask(Ask::Counts { from: all.len() as u32 })? {
                Reply::Counts(list) if list.is_empty() => return Ok(all),
                Reply::Counts(list) if all.len() < MOST_LISTED => all.extend(list),
                Reply::Counts(_) => bail!("the agent's list has no end"),
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            }
        }
    }

    /// Begins to capture the frames that pass the NICs' wires, until this is dropped, or [`Tool::has_ended`].
    ///
    /// # Errors
    /// If the agent has ended, or refuses.
    pub fn capture(&mut self, bytes: Option<u32>, kernel: bool) -> Result<(Vec<Reader>, Option<OwnedFd>)> {
        let mut tag = self.send(Ask::Capture { bytes, kernel })?;
        loop {
            let (answer, descriptors) = self.channel.receive_within::<Answer>(FOREIGN).context("waiting for the agent")?;
            if let Reply::Restarted { .. } = answer.body {
                // The agent may have died with the request.
                tag = self.send(Ask::Capture { bytes, kernel })?;
            }
            let reply = if answer.tag == tag { answer.body.with_plain_texts(plain) } else { continue };
            let (nics, workers) = match reply {
                Reply::Capturing { nics, workers } => (nics as usize, workers as usize),
                Reply::Failed { reason } => bail!("{reason}"),
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            };
            let mut descriptors = descriptors.into_iter();
            let mut readers = Vec::new();
            for memory in descriptors.by_ref().take(nics) {
                let memory = Arc::new(Region::map(memory).context("the memory of the frames")?);
                memory.exclude_from_dumps(0);
                readers.extend((0..workers).map_while(|worker| Reader::new(&memory, worker)));
            }
            if readers.len() != nics * workers {
                bail!("the agent's answer lacks memory");
            }
            // The NIC answers when its first worker has begun; the other workers begin a moment later.
            let until = monotonic_micros() + LIMIT.as_micros() as u64;
            while !readers.iter().all(Reader::has_begun) && monotonic_micros() < until {
                std::thread::sleep(AGAIN);
            }
            return Ok((readers, descriptors.next()));
        }
    }

    /// Whether the agent that began has ended; also if the next one has taken the connection over or closed it. Unread
    /// answers are lost.
    pub fn has_ended(&self) -> bool {
        loop {
            match self.channel.try_receive::<Answer>() {
                Ok((Answer { body: Reply::Restarted { .. }, .. }, _)) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    /// The traffic of all connections.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn traffic(&mut self) -> Result<Vec<Load>> {
        let of = |reply| if let Reply::Traffic(list) = reply { Ok(list) } else { Err(reply) };
        self.whole_list(|from| Ask::Traffic { from }, of, |one| (one.session, one.connection))
    }

    /// The agent's and the NIC's counters.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn statistics(&mut self) -> Result<Statistics> {
        match self.ask(Ask::Statistics)? {
            Reply::Statistics(statistics) => Ok(*statistics),
            other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
        }
    }
}
