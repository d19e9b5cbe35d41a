//! Two links with the same addresses, link-local ones or such of sockets that are bound to a device, and connections
//! with the same ports: the device alone tells them apart, on the NIC as in the kernel.

use crate::common::{answered, hosts, wait_until};
use crate::full::{ECHO, Program};
use crate::routes::{MAC_SECOND_A, MAC_SECOND_B, beside, reverse_path_filter, run, second_link};
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, MAC_A, MAC_B, Testbed, address_a, address_b};
use baton_client::messages::{Endpoint, Settings};
use baton_client::{ConnectionId, Session};
use baton_linux::{process, rtnetlink, socket};
use baton_protocol::program::Place;
use baton_sim::stream;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

const LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xa);
const PEER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xb);
const PORT: u16 = 8080;
const SO_BINDTOIFINDEX: i32 = 62;

/// The devices of a link, host A's and host B's.
const LINKS: [[&str; 2]; 2] = [[INTERFACE_A, INTERFACE_B], ["second0", "second1"]];

/// By what connections of the two links differ from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Their addresses are link-local.
    LinkLocal,
    /// Their sockets are bound to the devices (SO_BINDTODEVICE); IPv4.
    Bound,
}

const KINDS: [Kind; 2] = [Kind::LinkLocal, Kind::Bound];

impl Kind {
    /// Addresses of host A and host B.
    fn addresses(self) -> [IpAddr; 2] {
        match self {
            Kind::LinkLocal => [LOCAL.into(), PEER.into()],
            Kind::Bound => [address_a(false), address_b(false)],
        }
    }
}

/// Two hosts with two links that have the same addresses.
fn bed(kind: Kind) -> Testbed {
    let bed = hosts(beside());
    second_link(&bed);
    for link in 0..2 {
        prepare(&bed, kind, link);
    }
    bed
}

/// Gives a link its addresses.
fn prepare(bed: &Testbed, kind: Kind, link: usize) {
    let plain = |mac: [u8; 6]| mac.map(|byte| format!("{byte:02x}")).join(":");
    let macs = [[plain(MAC_A), plain(MAC_B)], [MAC_SECOND_A.into(), MAC_SECOND_B.into()]];
    for (host, which) in [(&bed.host_a, 0), (&bed.host_b, 1)] {
        let (device, mac, [own, peer]) = (LINKS[link][which], &macs[link][1 - which], kind.addresses());
        let (own, peer) = if which == 0 { (own, peer) } else { (peer, own) };
        if kind == Kind::LinkLocal {
            run(host, &format!("ip addr add {own}/64 dev {device} nodad"));
            run(host, &format!("ip neigh replace {peer} lladdr {mac} dev {device}"));
        } else if link == 1 {
            run(host, &format!("ip route add 10.77.0.0/24 dev {device} src {own} metric 999"));
            reverse_path_filter(host, 0);
        }
    }
}

fn index(device: &str) -> io::Result<u32> {
    Ok(rtnetlink::link(&rtnetlink::open()?, device)?.index)
}

/// A socket of the calling thread's host for one of the links, with an address.
fn socket_of(kind: Kind, device: &str, address: SocketAddr) -> io::Result<OwnedFd> {
    let fd = socket::stream(address.is_ipv6(), 0)?;
    socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    if kind == Kind::Bound {
        socket::set(fd.as_fd(), libc::SOL_SOCKET, SO_BINDTOIFINDEX, index(device)? as i32)?;
    }
    socket::bind(fd.as_fd(), address)?;
    Ok(fd)
}

/// The address as a socket names it that uses this device.
fn at(address: IpAddr, port: u16, device: &str) -> io::Result<SocketAddr> {
    Ok(match address {
        IpAddr::V6(v6) => SocketAddrV6::new(v6, port, 0, index(device)?).into(),
        IpAddr::V4(_) => SocketAddr::new(address, port),
    })
}

/// A listener for each link. Of link-local addresses one socket would do, which is how most servers have it.
fn listeners(bed: &Testbed, kind: Kind) -> Vec<TcpListener> {
    let made = bed.host_a.run(|| {
        let of_device = |[device, _]: [&str; 2]| {
            let fd = socket_of(kind, device, SocketAddr::new(kind.addresses()[0], PORT))?;
            socket::listen(fd.as_fd(), 10)?;
            Ok(TcpListener::from(fd))
        };
        match kind {
            Kind::LinkLocal => TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT)).map(|listener| vec![listener]),
            Kind::Bound => LINKS.into_iter().map(of_device).collect(),
        }
    });
    made.expect("listeners")
}

/// A connection from host B to host A over one link, always with the same ports: the program's end and the peer's.
fn connected(bed: &Testbed, kind: Kind, listeners: &[TcpListener], link: usize) -> (TcpStream, TcpStream) {
    let [local, peer] = kind.addresses();
    let [_, device] = LINKS[link];
    let made = bed.host_b.run(|| {
        let fd = socket_of(kind, device, at(peer, 40_000, device)?)?;
        socket::connect(fd.as_fd(), at(local, PORT, device)?)?;
        Ok(TcpStream::from(fd))
    });
    let peer = made.expect("a connection");
    let (server, _) = listeners[link.min(listeners.len() - 1)].accept().expect("its other end");
    for stream in [&peer, &server] {
        stream.set_nonblocking(true).expect("non-blocking");
    }
    (server, peer)
}

/// Where the program's end of a connection is.
enum End {
    Adopted(ConnectionId),
    /// Without Baton.
    Kernel(TcpStream),
}

/// One of the connections, with the bytes that each end has sent and received. Link, direction and place in the stream
/// determine each byte.
struct One {
    link: u64,
    end: End,
    peer: TcpStream,
    sent: [u64; 2],
    received: [u64; 2],
}

fn later<T: Default>(result: io::Result<T>) -> T {
    match result {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => T::default(),
        other => other.expect("a connection that works"),
    }
}

impl One {
    fn key(&self, direction: u64) -> u64 {
        100 + 10 * self.link + direction
    }

    fn id(&self) -> ConnectionId {
        match self.end {
            End::Adopted(id) => id,
            End::Kernel(_) => panic!("it is not Baton's"),
        }
    }

    /// Both ends send what fits, up to `goal` bytes in all.
    fn send(&mut self, session: &mut Session, goal: u64) {
        for direction in 0..2 {
            let mut piece = vec![0; (goal - self.sent[direction]).min(8000) as usize];
            stream::fill(self.key(direction as u64), self.sent[direction], &mut piece);
            let sent = match &self.end {
                _ if piece.is_empty() => 0,
                End::Adopted(id) if direction == 0 => later(session.send(*id, &piece)),
                End::Kernel(server) if direction == 0 => later(socket::send(server.as_fd(), &piece)),
                _ => later(socket::send(self.peer.as_fd(), &piece)),
            };
            self.sent[direction] += sent as u64;
        }
    }

    /// Both ends read what there is, and check it.
    fn receive(&mut self, session: &mut Session) {
        let mut buffer = [0; 16_384];
        for direction in 0..2 {
            let got = match &self.end {
                _ if direction == 0 => later(socket::receive(self.peer.as_fd(), &mut buffer)),
                End::Adopted(id) => later(session.receive(*id, &mut buffer)),
                End::Kernel(server) => later(socket::receive(server.as_fd(), &mut buffer)),
            };
            let wrong = stream::mismatches(self.key(direction as u64), self.received[direction], &buffer[..got]);
            assert_eq!(wrong, 0, "bytes of another connection at link {}, direction {direction}", self.link);
            self.received[direction] += got as u64;
        }
    }
}

/// Sends so many bytes more over each connection, both ways and at the same time, and waits until all have come.
fn exchange(session: &mut Session, all: &mut [One], bytes: u64) {
    let goals: Vec<u64> = all.iter().map(|one| one.sent[0].max(one.sent[1]) + bytes).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    while all.iter().zip(&goals).any(|(one, goal)| one.received != [*goal; 2]) {
        for (one, goal) in all.iter_mut().zip(&goals) {
            one.send(session, *goal);
            one.receive(session);
        }
        session.poll(Some(Duration::ZERO), &mut Vec::new()).expect("poll");
        let counts = || all.iter().map(|one| (one.sent, one.received)).collect::<Vec<_>>();
        assert!(Instant::now() < deadline, "a connection stands still: {:?}", counts());
    }
}

/// Moves a connection, and tries again while that is put off.
fn move_to(session: &mut Session, one: &One, to: Place) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match session.move_to(one.id(), to) {
            Ok(()) => return,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {}
            Err(error) => panic!("link {} could not be moved to {to:?}: {error}", one.link),
        }
    }
}

fn adopted(session: &mut Session, link: u64, (server, peer): (TcpStream, TcpStream)) -> One {
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    One { link, end: End::Adopted(id), peer, sent: [0; 2], received: [0; 2] }
}

/// Two hosts, and a connection over each link, both on the NIC. The second is made when the first is there.
fn both_on_the_nic(kind: Kind) -> (Testbed, Vec<TcpListener>, Session, [One; 2]) {
    let bed = bed(kind);
    let listeners = listeners(&bed, kind);
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let both = [0, 1].map(|link| {
        let one = adopted(&mut session, link, connected(&bed, kind, &listeners, link as usize));
        move_to(&mut session, &one, Place::Nic);
        one
    });
    (bed, listeners, session, both)
}

/// The kernel keeps the two apart: what the following tests expect of the NIC.
#[test]
fn the_kernel_tells_connections_of_two_links_apart() {
    for kind in KINDS {
        let bed = bed(kind);
        let listeners = listeners(&bed, kind);
        let mut session = Session::connect(&bed.socket()).expect("a session");
        let mut both = [0, 1].map(|link| {
            let (server, peer) = connected(&bed, kind, &listeners, link as usize);
            One { link, end: End::Kernel(server), peer, sent: [0; 2], received: [0; 2] }
        });
        exchange(&mut session, &mut both, 200_000);
    }
}

#[test]
fn connections_of_two_links_with_the_same_addresses_and_ports_stay_apart() {
    for kind in KINDS {
        let (_bed, _listeners, mut session, mut both) = both_on_the_nic(kind);
        exchange(&mut session, &mut both, 200_000);
        for one in &both {
            assert_eq!(session.place(one.id()), Some(Place::Nic), "{kind:?}: link {}", one.link);
        }
        // One of them, or both, on either side, with bytes under way.
        for round in 0..12u64 {
            for one in &mut both {
                let goal = one.sent[0].max(one.sent[1]) + 30_000;
                one.send(&mut session, goal);
            }
            let (which, to) = ((round / 2 % 2) as usize, if round % 2 == 0 { Place::Kernel } else { Place::Nic });
            move_to(&mut session, &both[which], to);
            if round % 4 == 2 {
                move_to(&mut session, &both[1 - which], to);
            }
            exchange(&mut session, &mut both, 50_000);
        }
    }
}

/// What dies is restored, and goes back, each with its own bytes.
#[test]
fn both_links_connections_survive_nic_and_agent() {
    for kind in KINDS {
        for agent in [false, true] {
            let (bed, _listeners, mut session, mut both) = both_on_the_nic(kind);
            exchange(&mut session, &mut both, 50_000);
            for one in &mut both {
                let goal = one.sent[0] + 30_000;
                one.send(&mut session, goal);
            }
            let before = answered(&bed, |tool| tool.statistics());
            let dies = if agent { before.agent_process } else { before.nic_process };
            process::signal(dies, libc::SIGKILL).expect("a signal");
            exchange(&mut session, &mut both, 50_000);
            wait_until("both are on the NIC again", || {
                session.poll(Some(Duration::ZERO), &mut Vec::new()).expect("poll");
                both.iter().all(|one| session.place(one.id()) == Some(Place::Nic))
            });
            exchange(&mut session, &mut both, 50_000);
        }
    }
}

/// A connection that is reset, and one that ends, takes nothing of the other's with it; the next one with the same
/// ports is another.
#[test]
fn what_ends_at_one_link_goes_on_at_the_other() {
    for kind in KINDS {
        for reset in [false, true] {
            let (bed, listeners, mut session, [mut first, second]) = both_on_the_nic(kind);
            let rest = |first: &mut One, session: &mut Session| exchange(session, std::slice::from_mut(first), 50_000);
            rest(&mut first, &mut session);
            let id = second.id();
            if reset {
                let linger = libc::linger { l_onoff: 1, l_linger: 0 };
                socket::set_bytes(
                    second.peer.as_fd(),
                    libc::SOL_SOCKET,
                    libc::SO_LINGER,
                    &[linger.l_onoff, linger.l_linger].map(i32::to_ne_bytes).concat(),
                )
                .expect("SO_LINGER");
            }
            drop(second);
            let mut ended = None;
            wait_until("its end", || {
                session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
                ended = Some(session.receive(id, &mut [0; 16]))
                    .filter(|got| !matches!(got, Err(error) if error.kind() == io::ErrorKind::WouldBlock));
                ended.is_some()
            });
            match ended.expect("an end") {
                Ok(got) => assert!(!reset && got == 0, "{kind:?}: {got} bytes"),
                Err(error) => assert!(reset && error.kind() == io::ErrorKind::ConnectionReset, "{kind:?}: {error}"),
            }
            session.close(id).expect("closed");
            rest(&mut first, &mut session);
            if reset {
                let next = adopted(&mut session, 2, connected(&bed, kind, &listeners, 1));
                move_to(&mut session, &next, Place::Nic);
                let mut both = [first, next];
                exchange(&mut session, &mut both, 50_000);
            }
        }
    }
}

/// The second link is removed with a connection on the NIC, and made again: the device has another index, and is
/// another link. In the kernel, too, the connection of the old one gets nothing any more.
#[test]
fn a_device_that_is_made_again_is_another_link() {
    for kind in KINDS {
        let (bed, listeners, mut session, [first, _old]) = both_on_the_nic(kind);
        let before = bed.host_a.run(|| index("second0")).expect("the device");
        drop(listeners);
        run(&bed.host_a, "ip link delete second0");
        second_link(&bed);
        prepare(&bed, kind, 1);
        assert_ne!(bed.host_a.run(|| index("second0")).expect("the device"), before);
        let listeners = self::listeners(&bed, kind);
        let next = adopted(&mut session, 2, connected(&bed, kind, &listeners, 1));
        let mut both = [first, next];
        exchange(&mut session, &mut both, 50_000);
        move_to(&mut session, &both[1], Place::Nic);
        exchange(&mut session, &mut both, 50_000);
    }
}

/// Under full offload, connections of link-local addresses are made by the kernel, each with its own bytes, wherever
/// they are.
#[test]
fn a_server_of_the_nics_keeps_two_links_apart() {
    let kind = Kind::LinkLocal;
    let bed = bed(kind);
    let mut server = Command::new(env!("CARGO_BIN_EXE_baton"));
    server.arg("run").arg("--socket").arg(bed.socket()).args(["--offload", "full", "--rule", "accepted"]);
    let echo = ECHO.replace("('', 7000)", "('::', 8080), family=socket.AF_INET6, dualstack_ipv6=True");
    server.args(["--", "python3", "-c", &echo]).env_remove("BATON_RUN");
    let mut server = Program(bed.host_a.spawn(&mut server).expect("baton run"));
    let connect = |link: usize| {
        let [_, device] = LINKS[link];
        bed.host_b.run(|| {
            let fd = socket_of(kind, device, at(PEER.into(), 40_000, device)?)?;
            socket::connect(fd.as_fd(), at(LOCAL.into(), PORT, device)?)?;
            Ok(TcpStream::from(fd))
        })
    };
    let mut both = Vec::new();
    for link in 0..2 {
        wait_until("a connection", || {
            assert!(server.0.try_wait().expect("its status").is_none(), "the server has ended");
            connect(link).map(|stream| both.push(stream)).is_ok()
        });
    }
    for round in 0..40u8 {
        for (link, stream) in both.iter_mut().enumerate() {
            use std::io::{Read, Write};
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
            let piece = [round * 2 + link as u8; 2000];
            stream.write_all(&piece).expect("sent");
            let mut back = [0; 2000];
            stream.read_exact(&mut back).expect("its own bytes");
            assert!(back == piece, "bytes of another connection at link {link}");
        }
    }
}

/// Endpoints for messages at the same link-local address and port of two links: the NIC has one of them, and the other
/// is refused, whose program handles its messages itself. A host with such an address is reached by the link that the
/// endpoint is bound to alone.
#[test]
fn messages_of_two_links_stay_apart() {
    let bed = bed(Kind::LinkLocal);
    let at = |link: usize, which: usize| {
        let host = if which == 0 { &bed.host_a } else { &bed.host_b };
        let device = LINKS[link][which];
        host.run(|| at(Kind::LinkLocal.addresses()[which], 7777, device)).expect("an address")
    };
    let settings = |address: SocketAddr| Settings { packet: 1452, ..crate::messages::settings_at(&bed, address) };
    let mut near = bed.host_a.run(|| Endpoint::new(&settings(at(0, 0)))).expect("an endpoint");
    crate::messages::refused(&bed, &settings(at(1, 0)), "another session has the messages");
    let mut far = bed.host_b.run(|| Endpoint::new(&crate::messages::in_the_program(&settings(at(0, 1))))).expect("an endpoint");
    crate::messages::exchange(&mut near, &mut far, 1);
    // From the other link come messages from the same address, for the other link's endpoint.
    let own = crate::messages::in_the_program(&settings(at(1, 0)));
    let when = "the socket of the endpoint that was refused is closed";
    let mut near_other = crate::common::bind_at_freed(&bed.host_a, when, || Endpoint::new(&own));
    let mut far_other =
        bed.host_b.run(|| Endpoint::new(&crate::messages::in_the_program(&settings(at(1, 1))))).expect("an endpoint");
    for token in 2..10 {
        let (one, other) = if token % 2 == 0 { (&mut near, &mut far) } else { (&mut near_other, &mut far_other) };
        crate::messages::exchange(one, other, token);
    }
    assert!(near.usage().packets_on_nic > 0 && near_other.usage().packets_on_nic == 0);
}
