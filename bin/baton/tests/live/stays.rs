//! Connections that cannot be moved stay where they are, with the reason in the error.

use crate::common::{hosts, scene, unacknowledged, wait_until};
use baton_bed::testbed::{TestbedSettings, address_a, address_b};
use baton_linux::rtnetlink;
use baton_protocol::program::Place;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

#[test]
fn urgent_data_stays() {
    let mut scene = scene(TestbedSettings::default());
    baton_linux::socket::send_urgent(scene.peer.as_fd(), b'!').expect("urgent data");
    wait_until("the urgent byte arrives", || unacknowledged(&scene.peer) == 0);
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err("urgent data");
    assert!(error.to_string().contains("urgent"), "{error}");
    assert_eq!(scene.settled_place(), Some(Place::Kernel));
}

#[test]
fn mptcp_stays() {
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 8080))).expect("a listener");
    // Protocol 262 is Multipath TCP.
    let fd = bed.host_b.run(|| baton_linux::socket::stream(false, 262));
    let Ok(fd) = fd else {
        eprintln!("skipped: this kernel has no MPTCP");
        assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
        return;
    };
    baton_linux::socket::connect(fd.as_fd(), listener.local_addr().expect("an address")).expect("an MPTCP connection");
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let error = session.adopt(fd).expect_err("MPTCP");
    assert!(error.to_string().contains("MPTCP"), "{error}");
}

/// A timestamp clock that runs in microseconds (bit 0 of TCP_TIMESTAMP selects it).
#[test]
fn a_microsecond_clock_stays() {
    const TCP_REPAIR: i32 = 19;
    const TCP_TIMESTAMP: i32 = 24;
    let mut scene = scene(TestbedSettings::default());
    let (server, _peer) = crate::common::connect(&scene.bed, false, 9090);
    let set = |option, value| baton_linux::socket::set(server.as_fd(), libc::IPPROTO_TCP, option, value);
    set(TCP_REPAIR, 1).expect("repair");
    let clock = baton_linux::socket::get(server.as_fd(), libc::IPPROTO_TCP, TCP_TIMESTAMP).expect("the clock");
    set(TCP_TIMESTAMP, clock | 1).expect("the microsecond clock");
    set(TCP_REPAIR, -1).expect("end of repair");
    let id = scene.session.adopt(OwnedFd::from(server)).expect("adoption");
    let error = scene.session.move_to(id, Place::Nic).expect_err("a microsecond clock");
    assert!(error.to_string().contains("microseconds"), "{error}");
    assert_eq!(scene.session.place(id), Some(Place::Kernel));
}

/// A key of TCP MD5 on the socket.
#[test]
fn signed_connections_stay() {
    const TCP_MD5SIG: i32 = 14;
    let mut scene = scene(TestbedSettings::default());
    let (server, _peer) = crate::common::connect(&scene.bed, false, 9090);
    // struct tcp_md5sig: the peer's address, flags, prefix, key length, interface, key.
    let mut key = [0u8; 216];
    key[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
    key[4..8].copy_from_slice(&[10, 77, 0, 2]);
    key[130..132].copy_from_slice(&4u16.to_ne_bytes());
    key[136..140].copy_from_slice(b"key!");
    let set = baton_linux::socket::set_bytes(server.as_fd(), libc::IPPROTO_TCP, TCP_MD5SIG, &key);
    let Ok(()) = set else {
        eprintln!("skipped: this kernel has no TCP MD5");
        assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
        return;
    };
    let id = scene.session.adopt(OwnedFd::from(server)).expect("adoption");
    let error = scene.session.move_to(id, Place::Nic).expect_err("a signed connection");
    assert!(error.to_string().contains("signed"), "{error}");
}

/// A host that limits how much its connections may have unsent.
#[test]
fn where_the_host_limits_what_is_unsent_connections_stay() {
    const SETTING: &str = "/proc/sys/net/ipv4/tcp_notsent_lowat";
    let mut scene = scene(TestbedSettings::default());
    scene.bed.host_a.run(|| std::fs::write(SETTING, "16384")).expect("the setting");
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err("a limit");
    assert!(error.to_string().contains("tcp_notsent_lowat"), "{error}");
    assert_eq!(scene.settled_place(), Some(Place::Kernel));
    scene.bed.host_a.run(|| std::fs::write(SETTING, u32::MAX.to_string())).expect("the setting");
    wait_until("it moves", || scene.session.move_to(scene.id, Place::Nic).is_ok());
}

/// Options that only the kernel acts on, set before the move or while the NIC has the connection.
#[test]
fn options_that_the_nic_does_not_act_on_stay() {
    use baton_lab::options::{Fate, OPTIONS};
    let bed = hosts(TestbedSettings::default());
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let mut seen = 0;
    for option in OPTIONS.iter().filter(|option| option.fate == Fate::Stays && option.value.is_some()) {
        let ipv6 = option.level == 41;
        for set_on_nic in [false, true] {
            let (server, _peer) = crate::common::connect(&bed, ipv6, 9091);
            let id = session.adopt(OwnedFd::from(server)).expect("adoption");
            if set_on_nic {
                session.move_to(id, Place::Nic).expect("a move");
            }
            session.set_option(id, option.level, option.number, option.value.unwrap_or_default()).expect(option.name);
            assert_eq!(session.place(id), Some(Place::Kernel), "{}", option.name);
            let error = session.move_to(id, Place::Nic).expect_err(option.name);
            assert!(error.to_string().contains(option.name), "{error}");
            session.close(id).expect("close");
            seen += 1;
        }
    }
    assert_eq!(seen, 14);
    // A congestion control that the program has set; the host's default does not count as that.
    for (wanted, default, moves) in
        [("bbr", "cubic", false), ("reno", "cubic", true), ("cubic", "bbr", true), ("bbr", "bbr", true)]
    {
        let set = || std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", default);
        if bed.host_a.run(set).is_err() {
            eprintln!("this kernel does not give its hosts {default}");
            continue;
        }
        let (server, _peer) = crate::common::connect(&bed, false, 9092);
        let set = baton_linux::socket::set_bytes(server.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, wanted.as_bytes());
        if let Err(error) = set {
            eprintln!("this kernel has no {wanted}: {error}");
            continue;
        }
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        match session.move_to(id, Place::Nic) {
            Ok(()) => assert!(moves, "{wanted} where {default} is usual"),
            Err(error) => assert!(!moves && error.to_string().contains("TCP_CONGESTION"), "{wanted}, {default}: {error}"),
        }
        session.close(id).expect("close");
    }
}

/// With SO_PEEK_OFF each look at what has come begins behind the last one, and a move's own look would, too. The
/// program still finds what it has not looked at.
#[test]
fn an_offset_of_looks_stays() {
    let bed = hosts(TestbedSettings::default());
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    for set_on_nic in [false, true] {
        let (server, mut peer) = crate::common::connect(&bed, false, 9093);
        let view = server.try_clone().expect("a duplicate");
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        if set_on_nic {
            session.move_to(id, Place::Nic).expect("a move");
        }
        if let Err(error) = session.set_option(id, libc::SOL_SOCKET, libc::SO_PEEK_OFF, 0) {
            // Linux before 6.9.
            eprintln!("skipped: this kernel has no SO_PEEK_OFF for TCP: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        assert_eq!(session.place(id), Some(Place::Kernel));
        peer.write_all(b"abcdef").expect("room");
        wait_until("it has come", || {
            baton_linux::socket::queue_bytes(view.as_fd(), baton_linux::socket::SIOCINQ).is_ok_and(|unread| unread == 6)
        });
        let look = || {
            let mut seen = [0; 3];
            view.peek(&mut seen).map(|length| seen[..length].to_vec())
        };
        assert_eq!(look().expect("a look"), b"abc");
        let error = session.move_to(id, Place::Nic).expect_err("an offset");
        assert!(error.to_string().contains("SO_PEEK_OFF"), "{error}");
        assert_eq!(look().expect("a look"), b"def");
        session.close(id).expect("close");
    }
}

/// Without a route, or with its source address gone, a connection stays on the side where it is, and goes on when they
/// are back.
#[test]
fn no_route_and_a_changed_source_address_stay() {
    for start in [Place::Kernel, Place::Nic] {
        let mut scene = scene(TestbedSettings::default());
        scene.move_to(start);
        let other = if start == Place::Nic { Place::Kernel } else { Place::Nic };
        let index = scene.bed.host_a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "baton0")?.index)).expect("the interface");
        scene.bed.host_a.run(|| rtnetlink::delete_address(&rtnetlink::open()?, index, address_a(false), 24)).expect("delete");
        let error = scene.session.move_to(scene.id, other).expect_err("no source address");
        assert!(error.to_string().contains("source address"), "{error}");
        let restore = || {
            let netlink = rtnetlink::open()?;
            rtnetlink::add_address(&netlink, index, address_a(false), 24)?;
            rtnetlink::set_neighbour(&netlink, index, address_b(false), baton_bed::testbed::MAC_B)
        };
        scene.bed.host_a.run(restore).expect("the address again");
        scene.exchange(10_000, other);
    }
}

#[test]
fn sockets_that_are_no_connections_are_refused() {
    let bed = hosts(TestbedSettings::default());
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let listener = bed.host_a.run(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
    let error = session.adopt(OwnedFd::from(listener.try_clone().expect("dup"))).expect_err("a listener");
    assert!(error.to_string().contains("LISTEN"), "{error}");
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    assert!(session.adopt(OwnedFd::from(file)).is_err());
    // A connection whose route does not lead through the NIC stays in the kernel.
    let address = listener.local_addr().expect("an address");
    let stream = bed.host_a.run(|| TcpStream::connect(address)).expect("loopback");
    let id = session.adopt(OwnedFd::from(stream)).expect("adoption");
    let error = session.move_to(id, Place::Nic).expect_err("loopback");
    assert!(error.to_string().contains("interface") || error.to_string().contains("address"), "{error}");
}

/// The addresses on the wire are not the socket's: destinations that this host translates, whoever opened the
/// connection.
#[test]
fn translated_connections_stay() {
    const RULES: &str = "table ip nat {
      chain output { type nat hook output priority -100; tcp dport 9999 dnat to 10.77.0.2:8081; }
      chain prerouting { type nat hook prerouting priority -100; tcp dport 9998 redirect to :8082; }
    }";
    for beside in [false, true] {
        let bed = hosts(TestbedSettings { firewall: Some(RULES.into()), beside, ..TestbedSettings::default() });
        let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
        let mut stays = |fd: TcpStream| {
            let id = session.adopt(OwnedFd::from(fd)).expect("adoption");
            let error = session.move_to(id, Place::Nic).expect_err("a translated connection");
            assert!(error.to_string().contains("NAT"), "{error}");
            assert_eq!(session.place(id), Some(Place::Kernel));
        };
        let connect = |to: SocketAddr| TcpStream::connect_timeout(&to, Duration::from_secs(10));
        let there = bed.host_b.run(|| TcpListener::bind((address_b(false), 8081))).expect("a listener");
        stays(bed.host_a.run(|| connect(SocketAddr::new(address_b(false), 9999))).expect("a connection to a translated port"));
        drop(there);
        let here = bed.host_a.run(|| TcpListener::bind((address_a(false), 8082))).expect("a listener");
        let peer =
            bed.host_b.run(|| connect(SocketAddr::new(address_a(false), 9998))).expect("a connection to a translated port");
        stays(here.accept().expect("its other end").0);
        drop(peer);
        // Connections that are not translated move.
        let (server, _peer) = crate::common::connect(&bed, false, 8083);
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        session.move_to(id, Place::Nic).expect("a move");
    }
}

/// A socket of another namespace may have any addresses, even those of this host's connections.
#[test]
fn sockets_of_other_namespaces_are_refused() {
    let bed = hosts(TestbedSettings::default());
    let (_server, peer) = crate::common::connect(&bed, false, 8084);
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let error = session.adopt(OwnedFd::from(peer)).expect_err("host B's socket");
    assert!(error.to_string().contains("another network namespace"), "{error}");
}
