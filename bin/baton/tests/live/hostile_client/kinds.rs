//! Requests about a socket of each kind, as the lines say that the program reads: its test holds the sockets' locks
//! meanwhile.

use super::{Client, PEER, alone, ask_on, echo};
use baton_abi::layout::session as at;
use baton_linux::bell::SessionBell;
use baton_linux::control::Channel;
use baton_linux::socket;
use baton_protocol::program::{Ask, Messages, Opening, Place, Reply, Rings, Until};
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// An endpoint that any NIC can serve.
pub(crate) fn messages() -> Messages {
    Messages {
        address: SocketAddr::from(([0; 4], 0)),
        ethernet: false,
        endpoint: 0,
        receiving: true,
        sending: true,
        peers: 8,
        incoming: 8,
        outgoing: 8,
        buffers: at::HEAP as u64,
        buffer_count: 8,
        buffer_size: 1472,
        packet: 1472,
        posted: 64,
        unexpected: 8,
        receives: 64,
    }
}

/// A socket of each kind, and sessions that ask for something about it.
struct Kinds {
    client: Client,
    channel: Channel,
    peer: SocketAddr,
    listener: TcpListener,
    unconnected: OwnedFd,
    udp: UdpSocket,
    /// The end of its doorbell that the agent gets.
    bell: OwnedFd,
    endpoint: UdpSocket,
    /// The connection that the NIC opens, and the UDP socket that it serves.
    connection: u32,
    datagrams: u32,
}

impl Kinds {
    fn new(socket: &Path) -> Kinds {
        let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
        // From here on the kernel knows the way.
        let known = TcpStream::connect(peer).expect("a connection to the peer");
        echo(&known);
        let any = SocketAddr::from(([0; 4], 0));
        let here = SocketAddr::new(known.local_addr().expect("an address").ip(), 0);
        let (_, bell) = SessionBell::pair().expect("a doorbell");
        Kinds {
            client: Client::open(socket, alone()).expect("a session"),
            channel: Channel::connect(socket).expect("the agent"),
            peer,
            listener: TcpListener::bind(any).expect("a listener"),
            unconnected: socket::stream(false, 0).expect("a socket"),
            udp: UdpSocket::bind(any).expect("a socket"),
            bell: bell.into(),
            endpoint: UdpSocket::bind(here).expect("a socket"),
            connection: u32::MAX,
            datagrams: u32::MAX,
        }
    }

    /// Those sockets whose locks can be held.
    fn sockets(&self) -> [BorrowedFd<'_>; 4] {
        [self.listener.as_fd(), self.unconnected.as_fd(), self.udp.as_fd(), self.endpoint.as_fd()]
    }

    fn ask(&mut self, what: &str) -> Option<Reply> {
        let (connection, host) = (self.connection, self.peer.ip());
        let rings = Rings { base: at::heap_end(self.client.memory.len()) as u32, receive: 4096, send: 4096 };
        let (channel, body, descriptors) = match what {
            "listen" => (&self.client.channel, Ask::Listen, vec![self.listener.as_fd()]),
            "connect" => (&self.client.channel, Ask::Connect { peer: self.peer }, vec![self.unconnected.as_fd()]),
            "datagrams" => (&self.client.channel, Ask::Datagrams { rings }, vec![self.udp.as_fd(), self.bell.as_fd()]),
            "way" => (&self.client.channel, Ask::Way { socket: self.datagrams, host }, Vec::new()),
            "messages" => {
                let opening = Opening { messages: Some(messages()), ..alone() };
                (&self.channel, Ask::Open(opening), vec![self.endpoint.as_fd()])
            }
            "reach" => (&self.channel, Ask::Reach { host }, Vec::new()),
            "kernel" => (&self.client.channel, Ask::Move { connection, to: Place::Kernel }, Vec::new()),
            "back" => {
                let back = Ask::GiveBack { connection, reason: "asked to".into(), until: Until::Again };
                (&self.client.channel, back, Vec::new())
            }
            other => panic!("no request {other:?}"),
        };
        let (reply, _) = ask_on(channel, body, &descriptors)?;
        match reply {
            Reply::Registered { connection } => self.connection = connection,
            Reply::Datagrams { socket } => self.datagrams = socket,
            _ => {}
        }
        Some(reply)
    }
}

/// Serves the lines. Says first which process it is, and the numbers of its sockets' descriptors.
pub fn run(socket: &Path) {
    let mut kinds = Kinds::new(socket);
    let numbers = kinds.sockets().map(|fd| fd.as_raw_fd().to_string()).join(" ");
    println!("attacking {} {numbers}", std::process::id());
    let _ = std::io::stdout().flush();
    for line in std::io::stdin().lines() {
        match line.expect("a line").as_str() {
            "echo" => {
                let stream = TcpStream::from(kinds.unconnected.try_clone().expect("a descriptor"));
                echo(&stream);
                println!("echoed");
            }
            what => println!("{}", kinds.ask(what).map_or("none".into(), |reply| format!("{reply:?}"))),
        }
        let _ = std::io::stdout().flush();
    }
}
