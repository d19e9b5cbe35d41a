//! A program that sends in bulk by the client library: bytes of its own, which the library copies, or a buffer, from
//! which the NIC takes them.

use anyhow::{Context, Result, ensure};
use baton_abi::layout::BUFFERS_SENT;
use baton_client::{ConnectionId, Session};
use baton_linux::socket;
use baton_protocol::program::Place;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Bytes of a call, as in the benches' other programs; and of a buffer, so that few parts of it fill the send queue.
const PIECE: usize = 1 << 17;
const BUFFER: usize = 1 << 20;

/// How long it waits for a part to be acknowledged before it looks again: nobody is woken for that while there is room.
const SOON: Duration = Duration::from_millis(1);

/// Connects to `peer` and sends until that ends, or this process is killed. With `buffers` from a buffer.
///
/// # Errors
/// If nobody listens there, no agent listens at `agent`, or the connection does not come to the NIC or breaks.
pub fn run(peer: SocketAddr, agent: &Path, buffers: bool) -> Result<()> {
    let mut session = Session::connect(agent)?;
    let stream = TcpStream::connect(peer).with_context(|| format!("connecting to {peer}"))?;
    socket::use_cubic(stream.as_fd())?;
    stream.set_nonblocking(true)?;
    let id = session.adopt(OwnedFd::from(stream))?;
    while let Err(error) = session.move_to(id, Place::Nic) {
        ensure!(error.kind() == ErrorKind::WouldBlock, "the connection does not go to the NIC: {error}");
        session.poll(Some(SOON), &mut Vec::new())?;
    }
    if buffers { send_buffers(&mut session, id) } else { send(&mut session, id) }
}

fn send(session: &mut Session, id: ConnectionId) -> Result<()> {
    let bytes = vec![0x5a; PIECE];
    loop {
        match session.send(id, &bytes) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => session.poll(None, &mut Vec::new())?,
            Err(error) => return Err(error).context("the connection broke"),
        }
    }
}

/// Never has more parts under way than the NIC takes from buffers: the library would copy the others.
fn send_buffers(session: &mut Session, id: ConnectionId) -> Result<()> {
    let buffer = session.buffer(BUFFER)?;
    let mut under_way = 0;
    loop {
        under_way -= session.take_sent(id)?;
        if under_way >= BUFFERS_SENT {
            session.poll(Some(SOON), &mut Vec::new())?;
            continue;
        }
        match session.send_buffer(id, &buffer, 0..BUFFER) {
            Ok(_) => under_way += 1,
            Err(error) if error.kind() == ErrorKind::WouldBlock => session.poll(Some(SOON), &mut Vec::new())?,
            Err(error) => return Err(error).context("the connection broke"),
        }
    }
}
