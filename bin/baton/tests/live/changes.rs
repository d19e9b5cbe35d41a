//! Changes on the host count for connections that are on the NIC, too.

use crate::common::{Scene, scene};
use baton_lab::testbed::{TestbedSettings, address_b};
use baton_protocol::program::Place;
use std::process::Command;
use std::time::{Duration, Instant};

fn on_host_a(scene: &Scene, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    let status = scene.bed.host_a.spawn(command.args(arguments)).expect("the program").wait().expect("its status");
    assert!(status.success(), "{program} {arguments:?}");
}

/// Waits until the connection is in the kernel. Returns how long that took.
fn until_in_the_kernel(scene: &Scene) -> Duration {
    let started = Instant::now();
    while scene.session.place(scene.id) != Some(Place::Kernel) {
        assert!(started.elapsed() < Duration::from_secs(5), "it stays on the NIC");
        std::thread::yield_now();
    }
    started.elapsed()
}

/// A new rule that drops a connection's packets stops it within 100 ms, and it does not leave the kernel again until traffic passes.
#[test]
fn a_new_drop_rule_stops_a_connection_on_the_nic() {
    for beside in [true, false] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        scene.move_to(Place::Nic);
        scene.exchange(10_000, Place::Nic);
        let rules =
            "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c tcp dport 8080 drop";
        on_host_a(&scene, "nft", &[rules]);
        let took = until_in_the_kernel(&scene);
        assert!(took < Duration::from_millis(100), "beside: {beside}: it took {took:?}");
        scene.peer_sends(1000);
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

/// A connection whose route or address is removed sends nothing, wherever it is, and goes on when the route or address is back.
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
            let deadline = Instant::now() + Duration::from_secs(5);
            while !reason(&scene).contains("no route") && !reason(&scene).contains("not one of this host's") {
                assert!(Instant::now() < deadline, "{away:?}: {}", reason(&scene));
            }
            // The agent sends the NIC its command at the same moment; until the NIC has run it, it may still send.
            let mut quiet = Instant::now();
            while quiet.elapsed() < Duration::from_millis(20) {
                scene.send(1);
                if scene.peer_receives() > 0 {
                    quiet = Instant::now();
                }
                assert!(Instant::now() < deadline, "beside: {beside}, {away:?}: it goes on sending");
            }
            scene.send(1000);
            // Long enough for some retransmissions.
            std::thread::sleep(Duration::from_millis(700));
            assert_eq!(scene.peer_receives(), 0, "beside: {beside}, {away:?}: it goes on sending");
            scene.session.move_to(scene.id, Place::Kernel).expect_err("without a route the kernel cannot have it");
            on_host_a(&scene, "ip", back);
            scene.drain();
            scene.exchange(10_000, Place::Kernel);
        }
    }
}

/// The NIC has acknowledged the peer's FIN, and notified the program. A rule drops the frame that replays it to the kernel: until it has
/// arrived the program does not find a socket without it, and it is replayed again.
#[test]
fn the_end_of_a_stream_reaches_the_kernel_in_spite_of_a_drop() {
    for beside in [true, false] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        scene.move_to(Place::Nic);
        scene.exchange(10_000, Place::Nic);
        scene.peer.shutdown(std::net::Shutdown::Write).expect("the peer's shutdown");
        let ended = |scene: &mut Scene| matches!(scene.session.receive(scene.id, &mut [0; 16]), Ok(0));
        let deadline = Instant::now() + Duration::from_secs(5);
        while !ended(&mut scene) {
            assert!(Instant::now() < deadline, "the NIC has no end of the stream");
        }
        let rules =
            "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c tcp flags fin drop";
        on_host_a(&scene, "nft", &[rules]);
        let removed = std::thread::scope(|scope| {
            let host = &scene.bed.host_a;
            let remover = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(200));
                host.spawn(Command::new("nft").args(["delete table inet t"])).expect("nft").wait().expect("its status").success()
            });
            until_in_the_kernel(&scene);
            assert!(matches!(scene.session.receive(scene.id, &mut [0; 16]), Ok(0)), "beside: {beside}: the stream's end is gone");
            remover.join().expect("the remover")
        });
        assert!(removed, "the rule is still there");
    }
}
