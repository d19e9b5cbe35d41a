//! Sessions for messages (RMPP): admission of their endpoints, and the hosts that they may send to.

use super::Agent;
use crate::ground::Shape;
use anyhow::{Context, Result, bail};
use baton_abi::layout::session;
use baton_linux::socket;
use baton_protocol::program::{Messages, Opening, Reply};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};

impl Agent {
    /// Checks the endpoint that a session is to be opened with. The address is that of the socket: who can bind a port may have
    /// its packets, and nobody else.
    pub(super) fn examine_messages(&self, opening: &Opening, socket: Option<&OwnedFd>) -> Result<Option<Messages>> {
        let Some(asked) = &opening.messages else { return Ok(None) };
        if opening.attacher {
            bail!("an attacher's session is for connections");
        }
        if !matches!(self.shape, Shape::Inline { .. }) {
            bail!("messages need a NIC between kernel and wire; this one is beside the kernel");
        }
        if self.settings.nic.workers != 1 {
            bail!("messages need a NIC of one worker; this one has {} (--workers)", self.settings.nic.workers);
        }
        let socket = socket.context("a session for messages needs a UDP socket")?.as_fd();
        self.has_room_for(socket, 0).map_err(anyhow::Error::new)?;
        if !socket::is_udp(socket) {
            bail!("a session for messages needs a UDP socket");
        }
        let address = socket::local_address(socket).context("the socket's address")?;
        if address.ip().to_canonical().is_unspecified() || address.port() == 0 {
            bail!("bind the UDP socket to an address of this host and a port: a packet's checksum covers both");
        }
        let used = self.sessions.iter().flatten().filter_map(|session| session.opening.messages.as_ref());
        if used.into_iter().any(|other| other.address == address) {
            bail!("another session has the messages for {address}");
        }
        let messages = Messages { address, ..asked.clone() };
        messages.check(session::HEAP as u64, self.settings.session_bytes as u64).map_err(anyhow::Error::msg)?;
        Ok(Some(messages))
    }

    /// Lets a session for messages send to a host.
    pub(super) fn reach(&mut self, number: u32, host: IpAddr) -> Reply {
        let way = self.split(number).and_then(|(mut ground, session)| {
            let local = session.opening.messages.as_ref()?.address;
            let socket = session.open.as_ref()?.socket.as_ref()?;
            Some(ground.way_to(socket.as_fd(), local, host))
        });
        match way {
            None => Reply::Failed { reason: "this session is not for messages".into() },
            Some(Err(refusal)) => Reply::Stayed { transient: refusal.is_transient(), reason: refusal.to_string() },
            Some(Ok(hop)) => match self.nic.reach(number, host, hop) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed { reason: format!("{error:#}") },
            },
        }
    }
}
