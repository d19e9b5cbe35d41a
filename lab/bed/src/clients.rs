//! The loop of the small servers here: one thread, ordinary sockets, as many clients as come. It knows nothing of
//! Baton.

use anyhow::{Context, Result};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;

const LISTENER: Token = Token(usize::MAX);

/// What a server knows of a client.
pub trait Client {
    /// Reads and answers until there is nothing to read, or no room to write; the buffer is of the loop's.
    ///
    /// # Errors
    /// If the connection ends: by an error, its end ([`ErrorKind::UnexpectedEof`]), or a request that is none.
    fn serve(&mut self, stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()>;

    /// Whether it waits for room to write.
    fn waits(&self) -> bool;
}

/// Reads once. None if there is nothing to read at present.
///
/// # Errors
/// If the connection has ended, as [`Client::serve`] has it.
pub fn read(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match io::Read::read(stream, buffer) {
        Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
        got => unless_it_would_block(got),
    }
}

/// Writes once. None if there is no room at present.
///
/// # Errors
/// If the connection has ended.
pub fn write(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    unless_it_would_block(io::Write::write(stream, bytes))
}

fn unless_it_would_block(done: io::Result<usize>) -> io::Result<Option<usize>> {
    match done {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) => Err(error),
    }
}

/// Serves at `address` until it is killed: each client that comes is what `new` makes, with a buffer of `piece` bytes
/// that all share.
///
/// # Errors
/// If it cannot listen.
pub fn serve<C: Client>(address: SocketAddr, piece: usize, mut new: impl FnMut() -> C) -> Result<()> {
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut clients: HashMap<Token, (TcpStream, C)> = HashMap::new();
    let (mut events, mut buffer, mut next) = (Events::with_capacity(256), vec![0; piece], 0);
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut stream, _)) = listener.accept() {
                    let token = Token(next);
                    next += 1;
                    let _ = stream.set_nodelay(true);
                    poll.registry().register(&mut stream, token, Interest::READABLE)?;
                    clients.insert(token, (stream, new()));
                }
            } else if let Some((stream, client)) = clients.get_mut(&event.token()) {
                let waited = client.waits();
                if client.serve(stream, &mut buffer).is_err() {
                    clients.remove(&event.token());
                } else if waited != client.waits() {
                    // Only a client that has to wait asks for the event of room.
                    let interest = if waited { Interest::READABLE } else { Interest::READABLE | Interest::WRITABLE };
                    poll.registry().reregister(stream, event.token(), interest)?;
                }
            }
        }
    }
}
