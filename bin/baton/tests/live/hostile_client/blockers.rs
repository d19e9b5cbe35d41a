//! Programs that do not do what others could wait for.

use super::{Client, PEER, alone, ask_on, move_to_nic};
use baton_fuzz::setting;
use baton_linux::control::Channel;
use baton_linux::{process, socket};
use baton_protocol::program::{Ask, Opening, Reply, Request};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// An attacher whose connection is on the NIC, and that lends nothing when it is asked.
pub fn lend_nothing(socket: &Path, begun: impl Fn()) {
    let client = Client::open(socket, Opening { attacher: true, ..alone() }).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let stream = TcpStream::connect(peer).expect("a connection to the peer");
    let ask = Ask::Register { inherited: false, process: Some(std::process::id()) };
    let Some((Reply::Registered { connection }, _)) = ask_on(&client.channel, ask, &[stream.as_fd()]) else { panic!("no") };
    move_to_nic(&client, connection, &stream);
    begun();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}

/// The file that this program was given.
pub fn file() -> OwnedFd {
    process::inherited(process::FIRST_DESCRIPTOR).expect("a file")
}

/// How many files or sockets an attack is made with.
pub const COUNT: &str = "HOSTILE_COUNT";

/// Descriptors that come with one message.
const AT_ONCE: usize = 16;

/// Sends a file along with requests that need none, so many times, on as many connections as it takes: the agent turns
/// away who sends much that does not close.
pub fn send_files(socket: &Path, begun: impl Fn()) {
    let file = file();
    let mut kept = Vec::new();
    for _ in 0..(setting(COUNT, 100) as usize).div_ceil(AT_ONCE) {
        let Ok(channel) = Channel::connect(socket) else { continue };
        let _ = channel.try_send(&Request { tag: 1, body: Ask::Attachers }, &[file.as_fd(); AT_ONCE]);
        kept.push(channel);
    }
    begun();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Sends a file where a socket is to be, so many times, each when the one before has been refused: the agent turns away
/// who sends much that does not close.
pub fn register_files(socket: &Path, begun: impl Fn()) {
    let file = file();
    let channel = Channel::connect(socket).expect("the agent");
    let ask = || Ask::Register { inherited: false, process: None };
    let refused = (0..setting(COUNT, 100)).take_while(|_| ask_on(&channel, ask(), &[file.as_fd()]).is_some()).count();
    assert!(refused < 64, "{refused} files were taken that do not close");
    begun();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Registers connections until one is refused. Says how many it has, and why it gets no more.
pub fn take_descriptors(path: &Path) {
    let client = Client::open(path, alone()).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let mut kept = Vec::new();
    let why = loop {
        let stream = TcpStream::connect(peer).expect("a connection to the peer");
        let ask = Ask::Register { inherited: false, process: None };
        let reply = ask_on(&client.channel, ask, &[stream.as_fd()]);
        match reply {
            Some((Reply::Registered { .. }, _)) if kept.len() < 1000 => kept.push(stream),
            Some((Reply::Stayed { reason, .. }, _)) => break reason,
            other => panic!("connection {}: {other:?}", kept.len()),
        }
    };
    println!("attacking with {} connections: {why}", kept.len());
    let _ = std::io::stdout().flush();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}

/// A connection that lingers for a thousand seconds with unsent data. Its peer must not read.
pub fn lingering(peer: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(peer).expect("a connection to the peer");
    // Memory for many of them.
    socket::set(stream.as_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, 1).expect("SO_SNDBUF");
    stream.set_nonblocking(true).expect("a socket");
    while (&stream).write(&[7; 4096]).is_ok() {}
    let linger = [1i32.to_ne_bytes(), 1000i32.to_ne_bytes()].concat();
    socket::set_bytes(stream.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &linger).expect("SO_LINGER");
    stream
}

/// Registers so many connections that linger, and ends.
pub fn die_with_sockets(path: &Path, begun: impl Fn()) {
    let client = Client::open(path, alone()).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let mut kept = Vec::new();
    for at in 0..setting(COUNT, 10) {
        let stream = lingering(peer);
        let ask = Ask::Register { inherited: false, process: None };
        let reply = ask_on(&client.channel, ask, &[stream.as_fd()]).map(|(reply, _)| reply);
        assert!(matches!(reply, Some(Reply::Registered { .. })), "connection {at}: {reply:?}");
        kept.push(stream);
    }
    begun();
}
