//! Helpers of the tests against the real kernel: two hosts, a program with one connection that can move, its peer.
#![allow(dead_code, reason = "each test file uses its part")]

use baton_client::{ConnectionId, Session};
use baton_lab::testbed::{Testbed, TestbedSettings, address_a};
use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_protocol::program::Place;
use baton_sim::stream;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Two hosts with Baton on the first. Without root (or a user namespace with /dev/net/tun) the test fails and says so.
pub fn hosts(settings: TestbedSettings) -> Testbed {
    let program = Some(env!("CARGO_BIN_EXE_baton").into());
    Testbed::new(&TestbedSettings { program, ..settings }).expect("two test hosts (root is needed)")
}

/// A program on host A with one accepted connection, and its peer on host B.
pub struct Scene {
    pub session: Session,
    pub id: ConnectionId,
    pub peer: TcpStream,
    pub bed: Testbed,
    /// Bytes sent and received by the program, then by the peer.
    pub sent: [u64; 2],
    pub received: [u64; 2],
}

pub fn scene(settings: TestbedSettings) -> Scene {
    scene_at(settings, false, 8080)
}

pub fn scene_at(settings: TestbedSettings, ipv6: bool, port: u16) -> Scene {
    scene_in(hosts(settings), ipv6, port)
}

/// The same with hosts that are there.
pub fn scene_in(bed: Testbed, ipv6: bool, port: u16) -> Scene {
    let (server, peer) = connect(&bed, ipv6, port);
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] }
}

/// A connection from host B to a listener on host A: the accepted socket, the connecting one.
pub fn connect(bed: &Testbed, ipv6: bool, port: u16) -> (TcpStream, TcpStream) {
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(ipv6), port))).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let peer = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    let (server, _) = listener.accept().expect("its other end");
    for socket in [&server, &peer] {
        socket.set_nonblocking(true).expect("non-blocking");
        socket.set_nodelay(true).expect("no delay");
    }
    (server, peer)
}

/// Keys of the two streams: from the program, from the peer.
pub const KEYS: [u64; 2] = [11, 1 << 40];

fn later(result: io::Result<usize>) -> usize {
    match result {
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => panic!("the connection broke: {error}"),
    }
}

impl Scene {
    pub fn move_to(&mut self, to: Place) {
        self.try_to_move(to);
        let place = self.settled_place();
        assert_eq!(place, Some(to));
    }

    /// Where the connection is. Its memory may be growing now; then it is moving for a moment.
    pub fn settled_place(&self) -> Option<Place> {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            match self.session.place(self.id) {
                None if Instant::now() < deadline => std::thread::yield_now(),
                place => return place,
            }
        }
    }

    /// Moves it, and tries again while that is put off. Does not check where it is a moment later.
    pub fn try_to_move(&mut self, to: Place) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.session.move_to(self.id, to) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {}
                Err(error) => panic!("it could not be moved to {to:?}: {error}"),
            }
        }
    }

    /// The program sends what fits now. Returns bytes sent.
    pub fn send(&mut self, most: usize) -> usize {
        let mut piece = vec![0; most];
        stream::fill(KEYS[0], self.sent[0], &mut piece);
        let sent = later(self.session.send(self.id, &piece));
        self.sent[0] += sent as u64;
        sent
    }

    /// The peer sends what fits now.
    pub fn peer_sends(&mut self, most: usize) -> usize {
        let mut piece = vec![0; most];
        stream::fill(KEYS[1], self.sent[1], &mut piece);
        let sent = later(socket::send(self.peer.as_fd(), &piece));
        self.sent[1] += sent as u64;
        sent
    }

    /// The program reads and checks what has arrived.
    pub fn receive(&mut self) -> usize {
        let mut buffer = vec![0; 1 << 16];
        let got = later(self.session.receive(self.id, &mut buffer));
        assert_eq!(stream::mismatches(KEYS[1], self.received[0], &buffer[..got]), 0, "wrong bytes at the program");
        self.received[0] += got as u64;
        got
    }

    /// The peer reads and checks what has arrived.
    pub fn peer_receives(&mut self) -> usize {
        let mut buffer = vec![0; 1 << 16];
        let got = later(socket::receive(self.peer.as_fd(), &mut buffer));
        assert_eq!(stream::mismatches(KEYS[0], self.received[1], &buffer[..got]), 0, "wrong bytes at the peer");
        self.received[1] += got as u64;
        got
    }

    /// Reads on both sides until everything that was sent has arrived.
    pub fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut ready = Vec::new();
        while self.received[0] < self.sent[1] || self.received[1] < self.sent[0] {
            assert!(
                Instant::now() < deadline,
                "stuck with the connection at {:?}: sent {:?}, received {:?}; the peer: {:?}",
                self.session.place(self.id),
                self.sent,
                self.received,
                TcpInfo::read(self.peer.as_fd()),
            );
            if self.receive() + self.peer_receives() == 0 {
                self.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
            }
        }
    }

    /// Sends on both sides until `bytes` more are in flight or nothing more fits for a while, without reading.
    pub fn fill(&mut self, bytes: u64) {
        let goal = [self.sent[0] + bytes, self.sent[1] + bytes];
        let mut quiet = Instant::now();
        while quiet.elapsed() < Duration::from_millis(300) && (self.sent[0] < goal[0] || self.sent[1] < goal[1]) {
            let first = if self.sent[0] < goal[0] { self.send(16384) } else { 0 };
            let second = if self.sent[1] < goal[1] { self.peer_sends(16384) } else { 0 };
            if first + second > 0 {
                quiet = Instant::now();
            } else {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// One exchange with a move in the middle of it.
    pub fn exchange(&mut self, bytes: u64, to: Place) {
        self.fill(bytes);
        self.move_to(to);
        self.fill(bytes);
        self.drain();
    }

    /// Waits until the program sees the end of the stream.
    pub fn expect_end(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.session.receive(self.id, &mut [0; 16]) {
                Ok(0) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => panic!("no end of stream but {other:?}"),
            }
            assert!(Instant::now() < deadline, "the end of the stream never came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the peer sees the end of the stream.
    pub fn expect_peer_end(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match socket::receive(self.peer.as_fd(), &mut [0; 16]) {
                Ok(0) => return,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => panic!("no end of stream but {other:?}"),
            }
            assert!(Instant::now() < deadline, "the end of the stream never came");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
