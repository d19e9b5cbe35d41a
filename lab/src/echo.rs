//! A program that sends back what it receives, over ordinary sockets, by the C library's calls. It knows nothing of Baton.

use anyhow::{Context, Result};
use baton_linux::process::raise_descriptor_limit;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

const LISTENER: Token = Token(usize::MAX);
/// A program that spins looks for new connections after so many looks at those that it has.
const LOOKS: usize = 4096;

/// Echoes at `address` until it is killed. With `spin` it never sleeps; with `shares`, too, it offers the processor whenever nothing
/// has come.
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
                && !echo(client, &mut buffer).unwrap_or(false)
            {
                clients.remove(&event.token());
            }
        }
        for _ in 0..if spin { LOOKS } else { 0 } {
            clients.retain(|_, client| echo(client, &mut buffer).unwrap_or(false));
            if shares {
                std::thread::yield_now();
            }
        }
    }
}

/// Sends back all that has come. False at the end of the stream. Messages are far smaller than a send queue, so that one that does
/// not fit ends the connection.
fn echo(client: &mut TcpStream, buffer: &mut [u8]) -> io::Result<bool> {
    loop {
        match client.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(got) => client.write_all(&buffer[..got])?,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
            Err(error) => return Err(error),
        }
    }
}
