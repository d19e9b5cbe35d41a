//! Frames leave by the device that the kernel would use, and are received at each device at which it would accept them:
//! several devices, policy routing, IPsec, MTUs.

use crate::common::{Scene, answered, connect, hosts, scene, scene_at, wait_until};
use crate::trust::expect_abort;
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_a, address_b};
use baton_client::Session;
use baton_client::tool::Tool;
use baton_linux::{namespace::Namespace, rtnetlink, socket};
use baton_offloads::{Offloads, RouteChange};
use baton_protocol::program::Place;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) fn beside() -> TestbedSettings {
    TestbedSettings { beside: true, ..TestbedSettings::default() }
}

pub(crate) fn run(host: &Namespace, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut command = Command::new(words[0]);
    let status = host.spawn(command.args(&words[1..])).expect("the program").wait().expect("its status");
    assert!(status.success(), "{line}");
}

pub(crate) const MAC_SECOND_A: &str = "02:00:00:00:01:0a";
pub(crate) const MAC_SECOND_B: &str = "02:00:00:00:01:0b";

/// A second link between the hosts: `second0` on host A, `second1` on host B. No route leads over it yet.
pub(crate) fn second_link(bed: &Testbed) {
    let made = bed.host_b.run(|| rtnetlink::add_veth(&rtnetlink::open()?, "second1", "second0", bed.host_a.as_fd()));
    made.expect("a second link");
    for (host, name, own, other, peers) in [
        (&bed.host_a, "second0", MAC_SECOND_A, MAC_SECOND_B, [address_b(false), address_b(true)]),
        (&bed.host_b, "second1", MAC_SECOND_B, MAC_SECOND_A, [address_a(false), address_a(true)]),
    ] {
        run(host, &format!("ip link set {name} address {own}"));
        run(host, &format!("ip link set {name} up"));
        for peer in peers {
            run(host, &format!("ip neigh replace {peer} lladdr {other} dev {name}"));
        }
    }
}

pub(crate) fn reverse_path_filter(host: &Namespace, value: u32) {
    let set = host.run(|| {
        for name in std::fs::read_dir("/proc/sys/net/ipv4/conf")? {
            std::fs::write(name?.path().join("rp_filter"), value.to_string())?;
        }
        Ok(())
    });
    set.expect("rp_filter");
}

/// Number of packets that a host has sent by a device.
fn sent_by(host: &Namespace, device: &str) -> u64 {
    let table = host.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("counters");
    let line = table.lines().find_map(|line| line.trim().strip_prefix(device)?.strip_prefix(':')).expect("the device");
    line.split_whitespace().nth(9).expect("a counter").parse().expect("a number")
}

/// Bytes both ways, wherever the connection is: it moves by itself here.
fn exchange(scene: &mut Scene, bytes: u64) {
    scene.fill(bytes);
    scene.drain();
}

fn wait_for(scene: &Scene, place: Place) -> String {
    wait_until(&format!("it is at {place:?}"), || scene.session.place(scene.id) == Some(place));
    reason(&scene.bed)
}

/// The answers come by another device than our frames leave by, from the start or from when it appears.
/// Packet sockets of a host that are shown its frames (/proc/net/packet).
fn listening_packet_sockets(host: &Namespace) -> usize {
    let table = host.run(|| std::fs::read_to_string("/proc/thread-self/net/packet")).expect("its packet sockets");
    let running = |line: &&str| line.split_whitespace().nth(5) == Some("1");
    table.lines().skip(1).filter(running).count()
}

/// A Baton that has no connection costs the frames of others nothing.
#[test]
fn no_frame_is_shown_before_the_first_connection() {
    let mut scene = scene(beside());
    assert_eq!(listening_packet_sockets(&scene.bed.host_a), 0);
    scene.exchange(10_000, Place::Nic);
    assert_eq!(listening_packet_sockets(&scene.bed.host_a), 2);
}

#[test]
fn frames_by_another_device_are_received() {
    for (ipv6, filter, early) in [(false, 0, true), (false, 2, false), (true, 0, true)] {
        let mut scene = scene_at(beside(), ipv6, 8080);
        if early {
            second_link(&scene.bed);
        }
        scene.exchange(10_000, Place::Nic);
        if !early {
            second_link(&scene.bed);
        }
        // A loose filter accepts nothing at a device without an address.
        run(&scene.bed.host_a, "ip address add 10.78.0.1/24 dev second0");
        reverse_path_filter(&scene.bed.host_a, filter);
        let family = if ipv6 { "-6" } else { "-4" };
        let bits = if ipv6 { 128 } else { 32 };
        run(&scene.bed.host_b, &format!("ip {family} route add {}/{bits} dev second1", address_a(ipv6)));
        let before = sent_by(&scene.bed.host_b, "second1");
        exchange(&mut scene, 300_000);
        assert!(sent_by(&scene.bed.host_b, "second1") > before + 10, "it does not come by the second link");
        assert_eq!(scene.settled_place(), Some(Place::Nic), "the NIC does not receive");
        scene.exchange(10_000, Place::Kernel);
        scene.exchange(10_000, Place::Nic);
    }
}

/// A strict filter accepts what comes by any of several equal paths.
#[test]
fn frames_by_every_path_of_a_route_are_received() {
    let mut scene = scene_at(beside(), false, 8080);
    second_link(&scene.bed);
    reverse_path_filter(&scene.bed.host_a, 1);
    run(&scene.bed.host_a, "ip route add 10.77.0.2/32 nexthop dev baton0 nexthop dev second0");
    for device in ["eth0", "second1"] {
        run(&scene.bed.host_b, &format!("ip route replace 10.77.0.1/32 dev {device}"));
        scene.exchange(100_000, Place::Kernel);
        scene.exchange(100_000, Place::Nic);
        exchange(&mut scene, 100_000);
        assert_eq!(scene.settled_place(), Some(Place::Nic));
    }
}

/// Inline only one device is the NIC's: frames that come by another one reach the shell, which counts them, and the
/// connection is restored.
#[test]
fn inline_a_connection_that_comes_by_another_device_returns() {
    let mut scene = scene(TestbedSettings::default());
    second_link(&scene.bed);
    reverse_path_filter(&scene.bed.host_a, 0);
    scene.exchange(10_000, Place::Nic);
    // Of another connection frames come elsewhere: it returns, and this one, of which none do, stays.
    let (server, mut other) = connect(&scene.bed, false, 9090);
    let id = scene.session.adopt(OwnedFd::from(server)).expect("adoption");
    scene.session.move_to(id, Place::Nic).expect("a move");
    run(&scene.bed.host_b, "ip route add 10.77.0.1/32 dev second1 table 100");
    run(&scene.bed.host_b, "ip rule add ipproto tcp dport 9090 lookup 100");
    other.write_all(b"?").expect("a byte");
    wait_until("the other is in the kernel", || scene.session.place(id) == Some(Place::Kernel));
    scene.exchange(10_000, Place::Nic);
    assert_eq!(scene.settled_place(), Some(Place::Nic));
    run(&scene.bed.host_b, "ip route add 10.77.0.1/32 dev second1");
    scene.peer_sends(1000);
    let reason = wait_for(&scene, Place::Kernel);
    assert!(reason.contains("by a device at which the NIC does not hear"), "{reason}");
    exchange(&mut scene, 100_000);
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err("its frames would be lost again");
    assert!(error.to_string().contains("does not hear"), "{error}");
}

/// A connection from host A to host B whose socket is prepared before it connects.
fn connected(bed: Testbed, prepare: impl Fn(&OwnedFd) -> io::Result<()> + Sync) -> (Scene, OwnedFd) {
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 8080))).expect("a listener");
    let fd = bed.host_a.run(|| {
        let fd = socket::stream(false, 0)?;
        prepare(&fd)?;
        socket::connect(fd.as_fd(), SocketAddr::new(address_b(false), 8080))?;
        Ok(fd)
    });
    let fd = fd.expect("a connection");
    let (peer, _) = listener.accept().expect("its other end");
    let stream = std::net::TcpStream::from(fd);
    for stream in [&stream, &peer] {
        stream.set_nonblocking(true).expect("non-blocking");
        stream.set_nodelay(true).expect("no delay");
    }
    let fd = OwnedFd::from(stream);
    let again = fd.try_clone().expect("a duplicate");
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let id = session.adopt(fd).expect("adoption");
    (Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] }, again)
}

const SO_MARK: i32 = 36;
const SO_BINDTOIFINDEX: i32 = 62;

/// Routing rules may match ports, users and bound devices: frames leave by the device that the kernel would use.
#[test]
fn frames_leave_by_the_device_that_the_rules_say() {
    let rules = ["ip rule add ipproto tcp dport 8080 lookup 100", "ip rule add uidrange 4242-4242 lookup 100", ""];
    for rule in rules {
        let bed = hosts(beside());
        second_link(&bed);
        for host in [&bed.host_a, &bed.host_b] {
            reverse_path_filter(host, 0);
        }
        run(&bed.host_b, "ip route add 10.77.0.1/32 dev second1");
        if !rule.is_empty() {
            run(&bed.host_a, "ip route add 10.77.0.2/32 dev second0 src 10.77.0.1 table 100");
            run(&bed.host_a, rule);
        }
        let index = bed.host_a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "second0")?.index)).expect("the device");
        let (mut scene, _fd) = connected(bed, |fd| {
            if rule.contains("uidrange") {
                std::os::unix::fs::fchown(fd, Some(4242), None)?;
            }
            if rule.is_empty() {
                socket::bind(fd.as_fd(), SocketAddr::new(address_a(false), 0))?;
                socket::set(fd.as_fd(), 1, SO_BINDTOIFINDEX, index as i32)?;
            }
            Ok(())
        });
        let sent = |scene: &Scene| ["baton0", "second0"].map(|device| sent_by(&scene.bed.host_a, device));
        for place in [Place::Kernel, Place::Nic, Place::Kernel] {
            scene.try_to_move(place);
            let before = sent(&scene);
            exchange(&mut scene, 100_000);
            let after = sent(&scene);
            assert_eq!(scene.settled_place(), Some(place));
            // A neighbour solicitation may be among them.
            assert!(after[0] < before[0] + 5, "{rule:?}, {place:?}: frames leave by the wrong device: {before:?} {after:?}");
            assert!(after[1] > before[1] + 2, "{rule:?}, {place:?}: {before:?} {after:?}");
        }
    }
}

/// With `route-change=drop` a connection whose route leads to another device is reset.
#[test]
fn what_leads_elsewhere_is_dropped_if_that_is_asked_for() {
    for beside in [false, true] {
        let offloads = Offloads { route_change: RouteChange::Drop, ..Offloads::default() };
        let mut scene = scene(TestbedSettings { beside, offloads, ..TestbedSettings::default() });
        second_link(&scene.bed);
        scene.exchange(10_000, Place::Nic);
        // Its device is still the same.
        run(&scene.bed.host_a, &format!("ip route add 10.77.0.2/32 dev {INTERFACE_A} src 10.77.0.1"));
        exchange(&mut scene, 10_000);
        assert_eq!((answered(&scene.bed, Tool::statistics).dropped, scene.settled_place()), (0, Some(Place::Nic)));
        run(&scene.bed.host_a, "ip route replace 10.77.0.2/32 dev second0 src 10.77.0.1");
        expect_abort(&mut scene);
        assert_eq!(answered(&scene.bed, Tool::statistics).dropped, 1);
    }
}

/// The NIC's frames have no mark: a connection with one stays in the kernel, and is restored when its program sets one.
#[test]
fn what_has_a_mark_is_the_kernels() {
    let bed = hosts(beside());
    second_link(&bed);
    for host in [&bed.host_a, &bed.host_b] {
        reverse_path_filter(host, 0);
    }
    run(&bed.host_a, "ip route add 10.77.0.2/32 dev second0 src 10.77.0.1 table 100");
    run(&bed.host_a, "ip rule add fwmark 5 lookup 100");
    let rules =
        "add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule inet t c meta mark 5 counter";
    let mut nft = Command::new("nft");
    assert!(bed.host_a.spawn(nft.arg(rules)).expect("nft").wait().expect("its status").success());
    let (mut scene, fd) = connected(bed, |_| Ok(()));
    scene.exchange(10_000, Place::Nic);
    let left = sent_by(&scene.bed.host_a, "second0");
    socket::set(fd.as_fd(), 1, SO_MARK, 5).expect("SO_MARK");
    let reason = wait_for(&scene, Place::Kernel);
    assert!(reason.contains("SO_MARK"), "{reason}");
    exchange(&mut scene, 100_000);
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err("a mark");
    assert!(error.to_string().contains("SO_MARK 5"), "{error}");
    assert!(sent_by(&scene.bed.host_a, "second0") > left + 2, "the mark's rule is not followed");
    let mut list = Command::new("nft");
    list.args(["list", "table", "inet", "t"]).stdout(std::process::Stdio::piped());
    let output = scene.bed.host_a.spawn(&mut list).expect("nft").wait_with_output().expect("its output");
    let counted = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!counted.contains("packets 0 "), "the mark is not counted: {counted}");
    // Without a mark the connection may move again.
    socket::set(fd.as_fd(), 1, SO_MARK, 0).expect("SO_MARK");
    scene.exchange(10_000, Place::Nic);
}

/// The agent's reason for the connection's place.
fn reason(bed: &Testbed) -> String {
    let mut tool = bed.tool().expect("the agent");
    tool.connections().expect("connections").into_iter().map(|connection| connection.reason).collect()
}

/// An IPsec policy that is added while the connection is on the NIC counts at once; one for other addresses does not.
/// The kernel must judge what comes in. A connection that must not send could not be imported either, so it stays where
/// it is and sends nothing.
#[test]
fn an_ipsec_policy_counts() {
    for shape in [true, false] {
        for (direction, place) in
            [("out src 10.77.0.1 dst 10.77.0.2", Place::Nic), ("in src 10.77.0.2 dst 10.77.0.1", Place::Kernel)]
        {
            let mut scene = scene(TestbedSettings { beside: shape, ..TestbedSettings::default() });
            run(&scene.bed.host_a, "ip xfrm policy add dir out src 10.99.0.0/16 dst 0.0.0.0/0 action block");
            scene.exchange(10_000, Place::Nic);
            run(&scene.bed.host_a, &format!("ip xfrm policy add dir {direction} action block"));
            wait_until("the policy is noticed", || reason(&scene.bed).contains("IPsec"));
            assert_eq!(scene.settled_place(), Some(place));
            // The NIC may still send until it has run its command.
            if place == Place::Nic {
                scene.until_silent();
            }
            scene.send(1000);
            // Whoever may not receive, or not send, acknowledges nothing.
            scene.peer_repeats(1);
            let got = if place == Place::Nic { scene.peer_receives() } else { scene.receive() };
            assert_eq!(got, 0, "{direction}: the policy does not count");
            let elsewhere = if place == Place::Nic { Place::Kernel } else { Place::Nic };
            let error = scene.session.move_to(scene.id, elsewhere).expect_err("a policy covers it");
            assert!(error.to_string().contains("IPsec"), "{error}");
            run(&scene.bed.host_a, &format!("ip xfrm policy delete dir {direction}"));
            scene.drain();
            scene.exchange(10_000, Place::Kernel);
            scene.exchange(10_000, Place::Nic);
        }
    }
}

/// An ICMP message to host A from host B: a datagram to port 7001 was too big for a link with an MTU of 1000.
const TOO_BIG: &str = "
import socket, struct
def sum16(data):
    total = sum(struct.unpack('!%dH' % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xffff) + (total >> 16)
    return ~total & 0xffff
a, b = socket.inet_aton('10.77.0.1'), socket.inet_aton('10.77.0.2')
inner = struct.pack('!BBHHHBBH4s4s', 0x45, 0, 1400, 1, 0x4000, 64, 17, 0, a, b) + struct.pack('!HHHH', 7000, 7001, 1380, 0)
head = lambda check: struct.pack('!BBHHH', 3, 4, check, 0, 1000)
out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
out.sendto(head(sum16(head(0) + inner)) + inner, ('10.77.0.1', 0))
";

/// A smaller MTU of the route, of the device, or of a route exception caused by another socket's packet: the NIC's
/// segments fit it.
#[test]
fn a_smaller_path_mtu_reaches_the_nic() {
    for shape in [true, false] {
        for change in ["ip route change 10.77.0.0/24 dev baton0 src 10.77.0.1 mtu 1000", "ip link set baton0 mtu 1000", ""] {
            let settings = TestbedSettings { beside: shape, segmentation: false, ..TestbedSettings::default() };
            let mut scene = scene(settings);
            scene.exchange(100_000, Place::Nic);
            // Larger packets are dropped without an ICMP message.
            let rules = "add table inet t; add chain inet t c { type filter hook prerouting priority 0; }; \
                         add rule inet t c tcp sport 8080 meta length > 1000 counter drop";
            let mut nft = Command::new("nft");
            assert!(scene.bed.host_b.spawn(nft.arg(rules)).expect("nft").wait().expect("its status").success());
            if change.is_empty() {
                let datagrams = scene.bed.host_a.run(|| {
                    let datagrams = std::net::UdpSocket::bind(SocketAddr::new(address_a(false), 7000))?;
                    datagrams.connect(SocketAddr::new(address_b(false), 7001))?;
                    Ok(datagrams)
                });
                let mut python = Command::new("python3");
                let status = scene.bed.host_b.spawn(python.args(["-c", TOO_BIG])).expect("python3").wait().expect("its status");
                assert!(status.success());
                drop(datagrams.expect("a socket"));
            } else {
                run(&scene.bed.host_a, change);
            }
            if change.starts_with("ip link") {
                // A device drops received frames that are longer than its own MTU.
                run(&scene.bed.host_b, &format!("ip link set {INTERFACE_B} mtu 1000"));
            }
            scene.fill(100_000);
            scene.drain();
            assert_eq!(scene.settled_place(), Some(Place::Nic), "{change:?}");
        }
    }
}

/// A socket is bound to another device while on the NIC: the connection is restored, since the NIC does not receive
/// there.
#[test]
fn a_socket_that_is_bound_while_on_the_nic_returns() {
    let bed = hosts(beside());
    second_link(&bed);
    reverse_path_filter(&bed.host_a, 0);
    let index = bed.host_a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "second0")?.index)).expect("the device");
    let (server, peer) = connect(&bed, false, 8080);
    let again = server.try_clone().expect("a duplicate");
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    let mut scene = Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] };
    scene.exchange(10_000, Place::Nic);
    run(&scene.bed.host_b, "ip route add 10.77.0.1/32 dev second1");
    exchange(&mut scene, 10_000);
    let left = sent_by(&scene.bed.host_a, "second0");
    socket::set(again.as_fd(), 1, SO_BINDTOIFINDEX, index as i32).expect("SO_BINDTOIFINDEX");
    let reason = wait_for(&scene, Place::Kernel);
    assert!(reason.contains("SO_BINDTODEVICE"), "{reason}");
    // It may move again, by the device to which it is bound.
    scene.try_to_move(Place::Nic);
    exchange(&mut scene, 100_000);
    assert!(sent_by(&scene.bed.host_a, "second0") > left + 2);
}

/// The kernel's packets of IPv6 have a flow label, and so have the NIC's.
#[test]
fn packets_have_a_flow_label_on_the_nic_too() {
    let mut scene = scene_at(beside(), true, 8080);
    scene.exchange(10_000, Place::Kernel);
    let rules = "add table inet t; add chain inet t c { type filter hook input priority 0; }; \
                 add rule inet t c ip6 flowlabel 0 tcp sport 8080 drop";
    let mut nft = Command::new("nft");
    let dropping = scene.bed.host_b.spawn(nft.arg(rules)).expect("nft").wait().expect("its status");
    assert!(dropping.success());
    scene.exchange(10_000, Place::Kernel);
    scene.exchange(10_000, Place::Nic);
}

/// The link's other end goes down with data under way: the kernel forgets its neighbour and could not send either, so
/// the connection stays on the NIC, whose TCP_USER_TIMEOUT runs on, and ends as in the kernel: ETIMEDOUT, not
/// EHOSTUNREACH after the time-outs of two stacks.
#[test]
fn a_user_timeout_runs_on_without_a_carrier() {
    // Waits: the time-out is what is tested, and the kernel would take twice as long.
    const TIMEOUT: Duration = Duration::from_secs(2);
    let mut scene = scene(beside());
    for (host, peer, device) in
        [(&scene.bed.host_a, address_b(false), INTERFACE_A), (&scene.bed.host_b, address_a(false), INTERFACE_B)]
    {
        // A neighbour that was found, and not one that the administrator has set, which stays.
        run(host, &format!("ip neigh del {peer} dev {device}"));
    }
    scene
        .session
        .set_option(scene.id, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, TIMEOUT.as_millis() as i32)
        .expect("the option");
    scene.fill(1000);
    scene.drain();
    scene.move_to(Place::Nic);
    scene.fill(1000);
    scene.drain();
    run(&scene.bed.host_b, &format!("ip link set {INTERFACE_B} down"));
    let begun = Instant::now();
    assert!(scene.send(1000) > 0);
    let error = loop {
        match scene.session.receive(scene.id, &mut [0; 16]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                scene.session.poll(Some(Duration::from_millis(50)), &mut Vec::new()).expect("poll")
            }
            other => break other.expect_err("no stream ends here"),
        }
        // Waits: a limit that is far away.
        assert!(begun.elapsed() < 30 * TIMEOUT, "it does not end");
    };
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT), "after {:?}", begun.elapsed());
    // Waits: the time-out is what is tested. The kernel had no time for a second one of the whole length.
    assert!((TIMEOUT..2 * TIMEOUT).contains(&begun.elapsed()), "after {:?}", begun.elapsed());
    assert_eq!(scene.session.place(scene.id), Some(Place::Nic));
}
