//! A tool's connection to an agent: requests and answers one at a time, and the lists that need several.

use anyhow::{Context, Result, bail};
use baton_linux::control::Channel;
use baton_protocol::program::{Answer, Ask, ConnectionInfo, Reply, Request, Statistics};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

/// A tool's connection to the agent.
pub struct Tool {
    channel: Channel,
    tag: u32,
    /// Time that an answer may take.
    limit: Option<Duration>,
}

fn no_agent(path: &Path) -> String {
    format!("no agent at {}: start Baton (baton up), or set BATON_SOCKET to the path of its socket", path.display())
}

impl Tool {
    /// Connects to the agent at a path.
    ///
    /// # Errors
    /// If no agent listens there.
    pub fn connect(path: &Path) -> Result<Tool> {
        Ok(Tool { channel: Channel::connect(path).with_context(|| no_agent(path))?, tag: 0, limit: None })
    }

    /// As [`Tool::connect`], for requests whose answers take no longer than this, unless the agent is stopped or overloaded.
    ///
    /// # Errors
    /// If no agent listens there, or its queue of clients is full.
    pub fn connect_within(path: &Path, limit: Duration) -> Result<Tool> {
        let channel = Channel::connect_within(path, limit).with_context(|| no_agent(path))?;
        Ok(Tool { channel, tag: 0, limit: Some(limit) })
    }

    fn next_answer(&self) -> Result<Answer> {
        let Some(limit) = self.limit else { return Ok(self.channel.receive()?.0) };
        match self.channel.receive_within(limit) {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                let process = self.channel.peer_process().unwrap_or_default();
                bail!("the agent (process {process}) has not answered for {} s: it is stopped or overloaded", limit.as_secs_f32())
            }
            received => Ok(received?.0),
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
        self.channel.send(&Request { tag: self.tag, body }, descriptors)?;
        Ok(self.tag)
    }

    /// Waits for the next answer.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn receive(&mut self) -> Result<Answer> {
        loop {
            let answer = self.next_answer()?;
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

    /// As [`Tool::ask`], with descriptors that come along.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn ask_with(&mut self, body: Ask, descriptors: &[BorrowedFd<'_>]) -> Result<Reply> {
        let mut tag = self.send_with(body.clone(), descriptors)?;
        loop {
            let answer = self.next_answer()?;
            match answer.body {
                // The agent may have died with the request; a late answer to it is ignored.
                Reply::Restarted { .. } => tag = self.send_with(body.clone(), descriptors)?,
                body if answer.tag == tag => return Ok(body),
                _ => {}
            }
        }
    }

    /// All connections that the agent knows.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn connections(&mut self) -> Result<Vec<ConnectionInfo>> {
        let mut all: Vec<ConnectionInfo> = Vec::new();
        loop {
            let from = all.last().map_or((0, 0), |last| (last.session, last.connection + 1));
            match self.ask(Ask::List { from })? {
                Reply::Connections(list) if list.is_empty() => return Ok(all),
                Reply::Connections(list) => all.extend(list),
                other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
            }
        }
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
