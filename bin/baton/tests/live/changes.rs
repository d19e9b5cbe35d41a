//! Changes on the host count for connections that are on the NIC, too.

use crate::common::{Scene, answered, connect, hosts, scene, session, unacknowledged, wait_until};
use crate::full::count;
use baton_abi::layout::{Counter, RING_MESSAGES};
use baton_bed::testbed::{TestbedSettings, address_b, connect_pairs};
use baton_client::Session;
use baton_linux::freeze::Frozen;
use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_protocol::program::Place;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::process::Command;

fn on_host_a(scene: &Scene, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    let status = scene.bed.host_a.spawn(command.args(arguments)).expect("the program").wait().expect("its status");
    assert!(status.success(), "{program} {arguments:?}");
}

/// Waits until the connection is in the kernel.
fn until_in_the_kernel(scene: &Scene) {
    wait_until("it is in the kernel", || scene.session.place(scene.id) == Some(Place::Kernel));
}

/// Requests that the agent answers, one after the other, until the connection is in the kernel.
fn requests_until_in_the_kernel(scene: &Scene) -> u32 {
    let (mut tool, mut requests) = (scene.bed.tool().expect("the agent"), 0);
    while scene.session.place(scene.id) != Some(Place::Kernel) {
        tool.statistics().expect("statistics");
        requests += 1;
        assert!(requests < MOST_REQUESTS, "it stays on the NIC");
    }
    requests
}

/// Far more than an agent answers while it restores a connection, and far fewer than until it looks at everything
/// again.
const MOST_REQUESTS: u32 = 2000;

/// A new rule that drops a connection's packets stops it before the agent does much else, and it does not leave the
/// kernel again until traffic passes.
#[test]
fn a_new_drop_rule_stops_a_connection_on_the_nic() {
    for beside in [true, false] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        scene.move_to(Place::Nic);
        scene.exchange(10_000, Place::Nic);
        let rules =
            "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c tcp dport 8080 drop";
        on_host_a(&scene, "nft", &[rules]);
        let requests = requests_until_in_the_kernel(&scene);
        println!("beside: {beside}: after {requests} requests");
        scene.peer_repeats(1);
        let error = scene.session.move_to(scene.id, Place::Nic).expect_err("nothing has passed the new rules");
        assert!(error.to_string().contains("the firewall has changed"), "{error}");
        assert_eq!(scene.receive(), 0, "the rule lets it through");
        on_host_a(&scene, "nft", &["delete table inet t"]);
        scene.drain();
        scene.exchange(10_000, Place::Kernel);
        scene.try_to_move(Place::Nic);
        scene.exchange(10_000, Place::Nic);
    }
}

/// A new rule that drops what a connection sends, and lets in what it receives: it does not leave the kernel again,
/// though it receives, until something that it has sent under the rules is acknowledged.
#[test]
fn a_new_drop_rule_for_what_is_sent_keeps_a_connection_in_the_kernel() {
    for beside in [true, false] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        for place in [Place::Nic, Place::Kernel] {
            scene.try_to_move(place);
            scene.exchange(10_000, place);
            wait_until("all is acknowledged", || unacknowledged(&scene.peer) == 0);
            let rules = "add table inet t; add chain inet t c { type filter hook output priority 0; }; add rule inet t c tcp sport 8080 drop";
            on_host_a(&scene, "nft", &[rules]);
            requests_until_in_the_kernel(&scene);
            // With nothing in flight it sends at once.
            assert!(scene.peer_sends(1) > 0);
            wait_until("it comes", || scene.receive() > 0);
            for round in 0..3 {
                let error = scene.session.move_to(scene.id, Place::Nic).expect_err("nothing leaves under the new rules");
                assert!(error.to_string().contains("the firewall has changed"), "beside: {beside}, round {round}: {error}");
            }
            on_host_a(&scene, "nft", &["delete table inet t"]);
            scene.drain();
            scene.exchange(10_000, Place::Kernel);
        }
        scene.try_to_move(Place::Nic);
        scene.exchange(10_000, Place::Nic);
    }
}

/// The peer's link address changes: the connection is restored, and sends to the new address.
#[test]
fn a_changed_neighbour_brings_the_connection_back() {
    let mut scene = scene(TestbedSettings { beside: true, ..TestbedSettings::default() });
    scene.move_to(Place::Nic);
    let peer = address_b(false).to_string();
    let change = |address: &'static str| ["neigh", "replace", &*peer.clone().leak(), "lladdr", address, "dev", "baton0"];
    on_host_a(&scene, "ip", &change("02:00:00:00:00:77"));
    until_in_the_kernel(&scene);
    on_host_a(&scene, "ip", &change("02:00:00:00:00:0b"));
    scene.exchange(10_000, Place::Kernel);
}

/// A connection whose route or address is removed sends nothing, wherever it is, and goes on when the route or address
/// is back.
#[test]
fn without_a_route_nothing_is_sent() {
    let commands: [[&[&str]; 2]; 3] = [
        [&["route", "add", "blackhole", "10.77.0.2/32"], &["route", "del", "blackhole", "10.77.0.2/32"]],
        [&["route", "del", "10.77.0.0/24"], &["route", "add", "10.77.0.0/24", "dev", "baton0", "src", "10.77.0.1"]],
        [&["address", "del", "10.77.0.1/24", "dev", "baton0"], &["address", "add", "10.77.0.1/24", "dev", "baton0"]],
    ];
    for beside in [true, false] {
        for [away, back] in commands {
            let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
            scene.exchange(10_000, Place::Nic);
            on_host_a(&scene, "ip", away);
            let reason = |scene: &Scene| {
                let connections = scene.bed.tool().and_then(|mut tool| tool.connections()).expect("connections");
                connections.into_iter().map(|connection| connection.reason).collect::<String>()
            };
            wait_until(&format!("{away:?} is noticed"), || {
                let reason = reason(&scene);
                reason.contains("no route") || reason.contains("not one of this host's")
            });
            // The agent sends the NIC its command at the same moment; until the NIC has run it, it may still send, and
            // acknowledge.
            scene.until_silent();
            scene.send(1000);
            // It would send again by the same time-outs as the peer does.
            scene.peer_repeats(1);
            assert_eq!(scene.peer_receives(), 0, "beside: {beside}, {away:?}: it goes on sending");
            scene.session.move_to(scene.id, Place::Kernel).expect_err("without a route the kernel cannot have it");
            on_host_a(&scene, "ip", back);
            scene.drain();
            scene.exchange(10_000, Place::Kernel);
        }
    }
}

/// A connection that moves while its route takes small packets only has large segments again when the route has: what
/// moves is the size that the peer takes, and not the kernel's present one.
#[test]
fn a_route_that_was_narrow_leaves_the_segment_size() {
    for (ipv6, net, narrow) in [(false, "10.77.0.0/24", "600"), (true, "fd00:ba70::/64", "1280")] {
        let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
        let (server, peer) = connect(&bed, ipv6, 8080);
        let (own, mut session) = (server.try_clone().expect("another descriptor"), session(&bed));
        let id = session.adopt(server.into()).expect("adoption");
        let mut scene = Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] };
        let size = || TcpInfo::read(own.as_fd()).expect("TCP_INFO").snd_mss;
        scene.exchange(10_000, Place::Kernel);
        let usual = size();
        let route = |scene: &Scene, mtu: &[&str]| {
            let change = ["route", if ipv6 { "replace" } else { "change" }, net, "dev", "baton0"];
            let metric: &[&str] = if ipv6 { &["metric", "256"] } else { &[] };
            on_host_a(scene, "ip", &[&change, metric, mtu].concat());
        };
        route(&scene, &["mtu", narrow]);
        scene.exchange(10_000, Place::Kernel);
        assert!(size() < usual, "IPv6: {ipv6}");
        scene.try_to_move(Place::Nic);
        scene.exchange(10_000, Place::Nic);
        scene.exchange(10_000, Place::Kernel);
        route(&scene, &[]);
        scene.exchange(10_000, Place::Kernel);
        assert_eq!(size(), usual, "IPv6: {ipv6}");
    }
}

/// A route goes away and comes back so often that the NIC's ring of commands is full, since the NIC stands still
/// meanwhile. Once it runs again, no connection sends without a route.
#[test]
fn every_change_of_a_route_is_told_though_the_nic_stands_still() {
    // Together more than its ring holds.
    const CONNECTIONS: usize = 72;
    const CHANGES: usize = 61;
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let (servers, peers) = connect_pairs(&bed, CONNECTIONS, false).expect("connections");
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let all: Vec<_> = servers.into_iter().map(|server| session.adopt(server.into()).expect("adopted")).collect();
    for id in &all {
        session.move_to(*id, Place::Nic).expect("a move");
    }
    let nic = answered(&bed, |tool| tool.statistics()).nic_process;
    // As by a debugger: a NIC that is stopped otherwise is ended.
    let frozen = Frozen::freeze(&[nic]).expect("a tracer");
    for change in 0..CHANGES {
        let away = change % 2 == 0;
        let mut command = Command::new("ip");
        command.args(["route", if away { "add" } else { "del" }, "blackhole", "10.77.0.2/32"]);
        assert!(bed.host_a.spawn(&mut command).expect("ip").wait().expect("its status").success());
        wait_until(&format!("change {change} is noticed"), || {
            let listed = answered(&bed, |tool| tool.connections());
            listed.len() == CONNECTIONS && listed.iter().all(|one| one.reason.contains("no route") == away)
        });
    }
    // Those that the ring holds, and the last one of each connection.
    let commands = count(&bed, Counter::AgentControl) + (RING_MESSAGES + CONNECTIONS) as u64;
    let sends = count(&bed, Counter::ProgramSend) + CONNECTIONS as u64;
    drop(frozen);
    wait_until("the NIC has run all commands", || count(&bed, Counter::AgentControl) >= commands);
    for id in &all {
        assert_eq!(session.send(*id, b"ten bytes.").expect("room"), 10);
    }
    wait_until("the NIC has read all messages", || count(&bed, Counter::ProgramSend) >= sends);
    let receive = |peer: &std::net::TcpStream| socket::receive(peer.as_fd(), &mut [0; 64]);
    let got = peers.iter().filter(|peer| !receive(peer).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)).count();
    assert_eq!(got, 0, "connections that send though they have no route");
    let mut command = Command::new("ip");
    command.args(["route", "del", "blackhole", "10.77.0.2/32"]);
    assert!(bed.host_a.spawn(&mut command).expect("ip").wait().expect("its status").success());
    for peer in &peers {
        wait_until("it goes on", || receive(peer).is_ok_and(|got| got == 10));
    }
}

/// The NIC has acknowledged the peer's FIN, and notified the program. A rule drops the frame that replays it to the
/// kernel: until it has arrived the program does not find a socket without it, and it is replayed again.
#[test]
fn the_end_of_a_stream_reaches_the_kernel_in_spite_of_a_drop() {
    for beside in [true, false] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        scene.move_to(Place::Nic);
        scene.exchange(10_000, Place::Nic);
        scene.peer.shutdown(std::net::Shutdown::Write).expect("the peer's shutdown");
        let ended = |scene: &mut Scene| matches!(scene.session.receive(scene.id, &mut [0; 16]), Ok(0));
        wait_until("the NIC has the end of the stream", || ended(&mut scene));
        let rules = "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c tcp flags fin counter drop";
        on_host_a(&scene, "nft", &[rules]);
        let removed = std::thread::scope(|scope| {
            let host = &scene.bed.host_a;
            let dropped = move || {
                let mut command = Command::new("nft");
                let listed = host.spawn(command.args(["list table inet t"]).stdout(std::process::Stdio::piped())).expect("nft");
                let listed = listed.wait_with_output().expect("its output").stdout;
                !String::from_utf8_lossy(&listed).contains("counter packets 0 ")
            };
            let remover = scope.spawn(move || {
                wait_until("the rule drops the frame", dropped);
                host.spawn(Command::new("nft").args(["delete table inet t"])).expect("nft").wait().expect("its status").success()
            });
            until_in_the_kernel(&scene);
            assert!(matches!(scene.session.receive(scene.id, &mut [0; 16]), Ok(0)), "beside: {beside}: the stream's end is gone");
            remover.join().expect("the remover")
        });
        assert!(removed, "the rule is still there");
    }
}
