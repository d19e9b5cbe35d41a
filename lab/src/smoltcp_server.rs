//! A server that contains smoltcp, another TCP for programs, and uses it as smoltcp's own examples do: a TAP, one frame
//! in each system call, checksums by the program. It runs on the client's host, which reaches it through the TAP and
//! gives it no other service.

use anyhow::{Context, Result};
use baton_bed::testbed::{self, INTERFACE_B, MAC_A};
use baton_linux::events::monotonic_micros;
use baton_linux::process::raise_descriptor_limit;
use smoltcp::iface::{Config, Interface, PollResult, SocketSet};
use smoltcp::phy::{Medium, TunTapInterface, wait};
use smoltcp::socket::tcp::{CongestionControl, Socket, SocketBuffer, State};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, HardwareAddress, IpCidr};
use std::net::SocketAddrV4;
use std::os::fd::AsRawFd;

/// Bytes of a connection's buffer, each way: for short messages, and for data in bulk.
const SHORT: usize = 4096;
const BULK: usize = 1 << 20;
/// Sockets that listen beyond those that are asked for, for connections that end at once.
const SPARE: usize = 4;
/// Bytes that are sent from at a time.
const PIECE: usize = 1 << 17;

/// What it does with its connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Service {
    /// Sends back what comes.
    Echo,
    /// Takes what comes.
    Sink,
    /// Connects to this address and sends without end.
    Source(SocketAddrV4),
}

/// Serves at `address` until it is killed, on as many connections as `connections` at once. With `spin` it never
/// sleeps.
///
/// # Errors
/// If the TAP cannot be made.
pub fn run(address: SocketAddrV4, service: Service, connections: usize, spin: bool) -> Result<()> {
    raise_descriptor_limit();
    let mut device =
        TunTapInterface::new(INTERFACE_B, Medium::Ethernet).with_context(|| format!("making the TAP {INTERFACE_B}"))?;
    testbed::set_interface_b()?;
    let mut config = Config::new(HardwareAddress::Ethernet(EthernetAddress(MAC_A)));
    config.random_seed = monotonic_micros();
    let mut interface = Interface::new(config, &mut device, now());
    interface.update_ip_addrs(|addresses| {
        // There is room for one.
        let _ = addresses.push(IpCidr::new((*address.ip()).into(), 24));
    });
    let mut sockets = SocketSet::new(Vec::new());
    let size = if service == Service::Echo { SHORT } else { BULK };
    let count = if matches!(service, Service::Source(_)) { 1 } else { connections + SPARE };
    for _ in 0..count {
        sockets.add(socket(size));
    }
    let mut buffer = vec![0; PIECE];
    loop {
        for (_, socket) in sockets.iter_mut() {
            let smoltcp::socket::Socket::Tcp(socket) = socket;
            if socket.state() == State::Closed {
                match service {
                    // The first attempt may come before there is a listener.
                    Service::Source(to) => drop(socket.connect(interface.context(), to, address.port())),
                    _ => drop(socket.listen(address.port())),
                }
            }
            serve(socket, service, &mut buffer);
        }
        while interface.poll(now(), &mut device, &mut sockets) == PollResult::None && !spin {
            wait(device.as_raw_fd(), interface.poll_delay(now(), &sockets)).context("waiting for a frame")?;
        }
    }
}

/// smoltcp's clock.
fn now() -> Instant {
    Instant::from_micros(i64::try_from(monotonic_micros()).unwrap_or(i64::MAX))
}

/// A socket with buffers of `size` bytes and the congestion control of the other ways.
fn socket(size: usize) -> Socket<'static> {
    let buffer = || SocketBuffer::new(vec![0; size]);
    let mut socket = Socket::new(buffer(), buffer());
    socket.set_congestion_control(CongestionControl::Cubic);
    socket.set_nagle_enabled(false);
    socket
}

/// Does what there is to do on one connection.
fn serve(socket: &mut Socket<'_>, service: Service, buffer: &mut [u8]) {
    match service {
        Service::Source(_) => while socket.can_send() && socket.send_slice(buffer).is_ok_and(|sent| sent > 0) {},
        Service::Sink => while socket.can_recv() && socket.recv(|bytes| (bytes.len(), ())).is_ok() {},
        Service::Echo => {
            while socket.can_recv() && socket.can_send() {
                let most = (socket.send_capacity() - socket.send_queue()).min(buffer.len());
                let Ok(got) = socket.recv_slice(&mut buffer[..most]) else { break };
                // There is room for it.
                let _ = socket.send_slice(&buffer[..got]);
            }
        }
    }
    if socket.state() == State::CloseWait {
        socket.close();
    }
}
