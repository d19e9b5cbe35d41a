//! Section V.B: connections of two kernels are set up at once, while those that are established send. What goes to the
//! accepting host waits for a copy engine, whose copies are slow here: in a stack, or in the real engine's queues.

use super::super::requests::{Order, Requests};
use super::super::setting_up::{CONNECTIONS, PATIENCE};
use anyhow::{Context, Result, anyhow};
use baton_backends::VnetDevice;
use baton_bed::testbed::{self, TestbedSettings, address_a};
use baton_copy::Kind;
use baton_device::{Device, Frame, MAX_FRAME};
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::socket;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Receiving threads, as in the model.
const WORKERS: usize = 13;
/// Microseconds of a copy: more than a client needs to begin a connection, so that requests wait.
const COPY: u64 = 100;
/// Bytes of a frame at most: nothing is merged, and the MTU is 1500.
const LARGEST: usize = 2048;
/// The accepting host's receive memory, by which segments in flight are as few as in the model.
const RECEIVE_MEMORY: &str = "4096 65536 65536";
/// Token of the listener.
const LISTENER: u64 = u64::MAX;

/// When each connection was established, in microseconds after its SYN and in this order; None for one that never was.
///
/// # Errors
/// If the hosts cannot be made, or a connection is refused.
pub fn run(order: Order) -> Result<Vec<Option<u64>>> {
    let ([host_a, host_b], [near, far]) = testbed::by_hand(&TestbedSettings::default())?;
    let listener = host_a.run(|| {
        std::fs::write("/proc/sys/net/ipv4/tcp_rmem", RECEIVE_MEMORY)?;
        TcpListener::bind(SocketAddr::new(address_a(false), 0))
    })?;
    let address = listener.local_addr()?;
    let over = AtomicBool::new(false);
    let mut times = std::thread::scope(|scope| {
        let carrying = scope.spawn(|| carry(near, far, order, &over));
        let accepting = scope.spawn(|| accept(&listener, &over));
        let connecting = scope.spawn(|| host_b.run(|| Ok(connect(address))));
        let connected = connecting.join().map_err(|_| anyhow!("the client panicked"));
        over.store(true, Ordering::Relaxed);
        carrying.join().map_err(|_| anyhow!("the copy engine panicked"))?;
        accepting.join().map_err(|_| anyhow!("the server panicked"))?.context("the server")?;
        connected??.context("the client")
    })?;
    times.sort_by_key(|time| time.unwrap_or(u64::MAX));
    Ok(times)
}

/// Carries frames between the hosts' interfaces until it is over. Those for `near` are requests to a copy engine.
fn carry(near: OwnedFd, far: OwnedFd, order: Order, over: &AtomicBool) {
    let [mut near, mut far] = [near, far].map(|tap| VnetDevice::new(tap, false));
    let mut requests = Requests::new(order, WORKERS);
    let (mut frame, mut spares, mut free_at) = (Frame::with_capacity(MAX_FRAME), Vec::new(), 0);
    while !over.load(Ordering::Relaxed) {
        let mut idle = true;
        while far.receive(&mut frame) {
            idle = false;
            if frame.length() > LARGEST {
                continue;
            }
            let mut waits = spares.pop().unwrap_or_else(|| Frame::with_capacity(LARGEST));
            waits.copy_from(&frame);
            let (kind, bytes) = (Kind::of(frame.bytes()), frame.length());
            if let Err(refused) = requests.push(kind.connection as usize % WORKERS, waits, bytes, kind) {
                spares.push(refused);
            }
        }
        let now = monotonic_micros();
        if now >= free_at
            && let Some(mut copied) = requests.pop()
        {
            idle = false;
            free_at = now + COPY;
            // What the host has no room for is lost.
            let _ = near.transmit(&mut copied);
            spares.push(copied);
        }
        while near.receive(&mut frame) {
            idle = false;
            let _ = far.transmit(&mut frame);
        }
        if idle {
            std::thread::yield_now();
        }
    }
}

/// Accepts all that come, and reads what they send, until it is over.
fn accept(listener: &TcpListener, over: &AtomicBool) -> Result<()> {
    listener.set_nonblocking(true)?;
    let poller = Poller::new()?;
    poller.add(listener.as_fd(), LISTENER, Trigger::Readable)?;
    let (mut accepted, mut tokens, mut buffer) = (Vec::<TcpStream>::new(), Vec::new(), vec![0; 1 << 16]);
    while !over.load(Ordering::Relaxed) {
        poller.wait(Some(Duration::from_millis(10)), &mut tokens)?;
        for token in tokens.drain(..) {
            if token != LISTENER {
                // An end of one says nothing here: the clients end first.
                let _ = socket::receive(accepted[token as usize].as_fd(), &mut buffer);
                continue;
            }
            while let Ok((stream, _)) = listener.accept() {
                poller.add(stream.as_fd(), accepted.len() as u64, Trigger::Readable)?;
                accepted.push(stream);
            }
        }
    }
    Ok(())
}

/// A client's connection.
struct Client {
    socket: TcpStream,
    /// When its SYN was sent, and how long after that it was established.
    begun: u64,
    established: Option<u64>,
}

/// Begins all connections at once. Each sends as fast as it can once it is established, until all are, or the time is
/// over. Returns when each was.
fn connect(address: SocketAddr) -> Result<Vec<Option<u64>>> {
    let poller = Poller::new()?;
    let sockets = (0..CONNECTIONS).map(|_| Ok(TcpStream::from(socket::stream(false, 0)?))).collect::<Result<Vec<_>>>()?;
    let mut clients = Vec::new();
    for socket in sockets {
        let begun = monotonic_micros();
        socket::begin_connecting(socket.as_fd(), address)?;
        clients.push(Client { socket, begun, established: None });
    }
    for (at, client) in clients.iter().enumerate() {
        poller.add(client.socket.as_fd(), at as u64, Trigger::Edge)?;
    }
    let (end, mut tokens, piece) = (monotonic_micros() + PATIENCE, Vec::new(), vec![0x5a; 1 << 16]);
    while monotonic_micros() < end && clients.iter().any(|client| client.established.is_none()) {
        poller.wait(Some(Duration::from_millis(10)), &mut tokens)?;
        for token in tokens.drain(..) {
            let client = &mut clients[token as usize];
            if client.established.is_none() {
                if let Some(error) = client.socket.take_error()? {
                    return Err(error.into());
                }
                if client.socket.peer_addr().is_err() {
                    continue;
                }
                client.established = Some(monotonic_micros() - client.begun);
            }
            while socket::send(client.socket.as_fd(), &piece).is_ok() {}
        }
    }
    Ok(clients.iter().map(|client| client.established).collect())
}
