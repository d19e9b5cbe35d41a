//! Programs that send back what they receive: one over ordinary sockets, by the C library's calls, which knows nothing
//! of Baton, and one by the client library.

use crate::closed_loop::Patience;
use anyhow::{Context, Result};
use baton_client::{ConnectionId, Session};
use baton_linux::process::raise_descriptor_limit;
use baton_protocol::program::Place;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

const LISTENER: Token = Token(usize::MAX);
/// A program that spins looks for new connections after so many looks at those that it has.
const LOOKS: usize = 4096;
/// Polls after which the program that uses the client library looks for new connections, if any connection was ready in
/// each.
const POLLS: usize = 64;

/// Echoes at `address` until it is killed. With `spin` it never sleeps; with `shares`, too, it offers the processor as
/// [`Patience`] says.
///
/// # Errors
/// If it cannot listen.
pub fn run(address: SocketAddr, spin: bool, shares: bool) -> Result<()> {
    raise_descriptor_limit();
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut clients: HashMap<Token, TcpStream> = HashMap::new();
    let (mut events, mut buffer, mut next) = (Events::with_capacity(256), vec![0; 65536], 0);
    loop {
        let wait = (spin && !clients.is_empty()).then_some(Duration::ZERO);
        match poll.poll(&mut events, wait) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut client, _)) = listener.accept() {
                    let token = Token(next);
                    next += 1;
                    let _ = client.set_nodelay(true);
                    poll.registry().register(&mut client, token, Interest::READABLE)?;
                    clients.insert(token, client);
                }
            } else if let Some(client) = clients.get_mut(&event.token())
                && echo(client, &mut buffer).is_err()
            {
                clients.remove(&event.token());
            }
        }
        let mut patience = Patience::new(shares);
        for _ in 0..if spin { LOOKS } else { 0 } {
            let mut came = false;
            clients.retain(|_, client| echo(client, &mut buffer).map(|echoed| came |= echoed).is_ok());
            patience.looked(came);
        }
    }
}

/// Sends back all that has come, and returns whether anything has. The end of the stream is an error. Messages are far
/// smaller than a send queue, so that one that does not fit ends the connection.
fn echo(client: &mut TcpStream, buffer: &mut [u8]) -> io::Result<bool> {
    let mut came = false;
    loop {
        match client.read(buffer) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(got) => client.write_all(&buffer[..got])?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(came),
            Err(error) => return Err(error),
        }
        came = true;
    }
}

/// Echoes at `address` until it is killed, by the client library: the connections that it accepts move to the NIC at
/// once.
///
/// # Errors
/// If it cannot listen, or no agent listens at `agent`.
pub fn run_on_ring(address: SocketAddr, agent: &Path) -> Result<()> {
    raise_descriptor_limit();
    let mut session = Session::connect(agent)?;
    let listener = std::net::TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    listener.set_nonblocking(true)?;
    session.watch(listener.as_fd())?;
    let (mut ready, mut buffer, mut moving) = (Vec::new(), vec![0; 65536], Vec::new());
    for polls in 0.. {
        let wait = match (ready.is_empty(), moving.is_empty()) {
            (false, _) => Some(Duration::ZERO),
            (true, false) => Some(Duration::from_millis(1)),
            (true, true) => None,
        };
        session.poll(wait, &mut ready)?;
        if ready.is_empty() || polls % POLLS == 0 {
            while let Ok((client, _)) = listener.accept() {
                client.set_nonblocking(true)?;
                client.set_nodelay(true)?;
                moving.push(session.adopt(OwnedFd::from(client))?);
            }
            moving.retain(|id| matches!(session.move_to(*id, Place::Nic), Err(error) if error.kind() == ErrorKind::WouldBlock));
        }
        for id in std::mem::take(&mut ready) {
            if !echo_by(&mut session, id, &mut buffer, &mut ready).unwrap_or(false) {
                let _ = session.close(id);
                moving.retain(|other| *other != id);
            }
        }
    }
    Ok(())
}

/// As [`echo`]. A connection that is being moved is ready again when it has moved; others that become ready meanwhile
/// are added to `ready`.
fn echo_by(session: &mut Session, id: ConnectionId, buffer: &mut [u8], ready: &mut Vec<ConnectionId>) -> io::Result<bool> {
    loop {
        match session.receive(id, buffer) {
            Ok(0) => return Ok(false),
            Ok(got) => {
                let mut left = &buffer[..got];
                while !left.is_empty() {
                    match session.send(id, left) {
                        Ok(sent) => left = &left[sent..],
                        // It moves.
                        Err(error) if error.kind() == ErrorKind::WouldBlock => session.poll(Some(Duration::ZERO), ready)?,
                        Err(error) => return Err(error),
                    }
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error),
        }
    }
}
