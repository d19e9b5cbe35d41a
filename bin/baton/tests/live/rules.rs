//! Firewall rules whose verdict changes from packet to packet, and rules whose changes cannot be observed: connections
//! that they may judge stay in the kernel, others move.

use crate::common::{Scene, scene, scene_at, wait_until};
use baton_bed::testbed::TestbedSettings;
use baton_linux::conntrack::{self, Entry};
use baton_linux::namespace::Namespace;
use baton_linux::netlink::{NETFILTER, Netlink};
use baton_protocol::program::Place;
use baton_wire::Flow;
use std::net::UdpSocket;
use std::process::Command;
use std::time::{Duration, Instant};

fn beside(firewall: Option<&str>) -> TestbedSettings {
    TestbedSettings { beside: true, firewall: firewall.map(Into::into), ..TestbedSettings::default() }
}

fn run(host: &Namespace, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let mut command = Command::new(words[0]);
    let status = host.spawn(command.args(&words[1..])).expect("the program").wait().expect("its status");
    assert!(status.success(), "{line}");
}

fn stays(scene: &mut Scene, why: &str) {
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err(why);
    assert!(error.to_string().contains(why), "{error}");
    assert_eq!(scene.settled_place(), Some(Place::Kernel));
}

/// The agent's reason for a connection that was restored.
fn returned(scene: &Scene) -> String {
    wait_until("it has left the NIC", || scene.session.place(scene.id) == Some(Place::Kernel));
    let mut tool = scene.bed.tool().expect("the agent");
    tool.connections().expect("connections").into_iter().map(|connection| connection.reason).collect()
}

/// Packets put their sender into a set, and packets from members are dropped: a connection's own packets must be
/// checked, too.
const BLACKLIST: &str = "table inet t {
  set bad { type ipv4_addr; flags dynamic,timeout; timeout 1m; }
  chain input { type filter hook input priority 0; RULE udp dport 7 add @bad { ip saddr }; ip saddr @bad drop; }
}";

#[test]
fn a_set_that_packets_change_counts() {
    let mut scene = scene(beside(Some(&BLACKLIST.replace("RULE", ""))));
    stays(&mut scene, "a set that packets");
    let knock = scene.bed.host_b.run(|| UdpSocket::bind("10.77.0.2:0")?.send_to(b"!", "10.77.0.1:7"));
    knock.expect("a datagram");
    scene.peer_repeats(1);
    assert_eq!(scene.receive(), 0, "the set does not count");
}

/// Rules that cannot judge the connection do not keep it: other ports, new connections, rules after the one that
/// accepts it; counters, logs, and the translations and verdict maps of containers' hosts.
#[test]
fn rules_that_cannot_judge_it_do_not_keep_it() {
    let harmless = [
        &BLACKLIST.replace("RULE", "ct state established,related accept;"),
        &BLACKLIST.replace("RULE", "ct state vmap { established : accept, invalid : drop };"),
        &BLACKLIST.replace("RULE", "tcp dport { 22, 8080 } accept; tcp sport 8080 accept;"),
        "table inet t { chain input { type filter hook input priority 0; policy drop;
          tcp dport 22 limit rate over 5/second drop; ct state new limit rate 5/second accept;
          limit rate 3/minute log; counter; tcp dport 8080 accept; }
        }",
        "table ip nat { chain output { type nat hook output priority -100; tcp dport 80 dnat to numgen inc mod 2 map { 0 : 10.0.0.1, 1 : 10.0.0.2 }; }
         }
         table ip filter { chain forward { type filter hook forward priority 0; limit rate 5/second accept; drop; }
         }",
    ];
    for rules in harmless {
        let mut scene = scene(beside(Some(rules)));
        for to in [Place::Nic, Place::Kernel] {
            scene.try_to_move(to);
            assert_eq!(scene.settled_place(), Some(to), "{rules}");
        }
    }
}

/// Rules that may judge it keep it, wherever they are on its way.
#[test]
fn rules_that_may_judge_it_keep_it() {
    let rules = [
        ("limit rate over 1000/second drop", "a rate"),
        ("tcp dport 8080 jump other", "a quota"),
        ("tcp dport vmap { 22 : accept, 8080 : goto other }", "a quota"),
        ("meta l4proto tcp queue", "another program"),
        ("ip saddr 10.0.0.0/8 numgen random mod 10 0 drop", "numgen"),
        ("ct bytes > 1000000000 drop", "a count of packets or bytes"),
    ];
    for (rule, why) in rules {
        if rule.contains("queue") && !has_queue() {
            continue;
        }
        let text = format!(
            "table inet t {{ chain other {{ quota over 100 mbytes drop; }}
              chain input {{ type filter hook input priority 0; ct state invalid drop; {rule}; }}
            }}"
        );
        let mut scene = scene(beside(None));
        scene.exchange(10_000, Place::Nic);
        let file = std::env::temp_dir().join(format!("baton-rules-{}", std::process::id()));
        std::fs::write(&file, text).expect("a file");
        run(&scene.bed.host_a, &format!("nft -f {}", file.display()));
        let _ = std::fs::remove_file(&file);
        returned(&scene);
        scene.drain();
        scene.exchange(10_000, Place::Kernel);
        stays(&mut scene, why);
    }
}

/// Whether this kernel has queues to programs.
fn has_queue() -> bool {
    let namespace = Namespace::new().expect("a namespace");
    let mut nft = Command::new("nft");
    let rules = "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c queue";
    nft.arg(rules).stderr(std::process::Stdio::null());
    namespace.spawn(&mut nft).expect("nft").wait().is_ok_and(|status| status.success())
}

/// iptables on top of nftables: a list that packets change, about this port or another.
#[test]
fn iptables_matches_are_known() {
    for (rule, why) in [
        ("-p tcp --dport 8080 -m recent --name bad --update --seconds 60 -j DROP", Some("-m recent")),
        ("-p tcp --dport 22 -m recent --name bad --update --seconds 60 -j DROP", None),
        ("-p tcp --dport 8080 -m conntrack --ctstate NEW -m recent --name bad --update --seconds 60 -j DROP", None),
        ("-p tcp --dport 8080 -m conntrack --ctstate ESTABLISHED -j ACCEPT", None),
    ] {
        let mut scene = scene(beside(None));
        let mut iptables = Command::new("iptables-nft");
        iptables.args(["-A", "INPUT"]).args(rule.split(' ')).stderr(std::process::Stdio::null());
        let done = scene.bed.host_a.spawn(&mut iptables).expect("iptables-nft").wait().expect("its status");
        if !done.success() && rule.contains("recent") {
            // This kernel has no such match.
            continue;
        }
        assert!(done.success(), "{rule}");
        // Traffic passes the new rules.
        scene.exchange(10_000, Place::Kernel);
        match why {
            Some(why) => stays(&mut scene, why),
            None => scene.exchange(10_000, Place::Nic),
        }
    }
}

/// What is established passes, a SYN may begin, and nothing else: a connection that the tracker has forgotten is dead.
const STATEFUL: &str = "table inet t {
  chain input { type filter hook input priority 0; policy drop; meta l4proto icmpv6 accept;
    ct state established accept; tcp flags & (fin | syn | rst | ack) == syn ct state new accept; }
  chain output { type filter hook output priority 0; policy drop; meta l4proto icmpv6 accept;
    ct state established accept; tcp flags & (fin | syn | rst | ack) == syn ct state new accept; }
}";

/// A connection on a host with [`STATEFUL`] rules, whose tracker forgets what is idle for so many seconds.
fn tracked(beside: bool, ipv6: bool, seconds: u32) -> Scene {
    let settings = TestbedSettings { beside, firewall: Some(STATEFUL.into()), ..TestbedSettings::default() };
    let scene = scene_at(settings, ipv6, 8080);
    let set = || std::fs::write("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established", seconds.to_string());
    scene.bed.host_a.run(set).expect("the time-out");
    scene
}

/// The 4-tuple of a scene's connection.
fn flow(scene: &Scene) -> Flow {
    let local = scene.peer.peer_addr().expect("the server's address");
    Flow { local: local.into(), remote: scene.peer.local_addr().expect("the peer's").into(), device: 0 }
}

/// The tracker's entry of a connection on host A.
fn entry(scene: &Scene, flow: &Flow) -> Option<Entry> {
    scene.bed.host_a.run(|| conntrack::find(&Netlink::open(NETFILTER)?, flow)).expect("the tracker")
}

/// Exchanges bytes on the NIC for twice the tracker's time-out.
fn stay_on_nic(scene: &mut Scene, seconds: u64) {
    scene.exchange(10_000, Place::Kernel);
    // Waits: the tracker's time-out has to pass, which the kernel counts in seconds.
    let end = Instant::now() + Duration::from_secs(2 * seconds + 1);
    while Instant::now() < end {
        scene.exchange(100, Place::Nic);
        // Waits: between two of many looks or exchanges; how long they take decides nothing.
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_tracker_knows_a_connection_that_comes_back() {
    for (beside, ipv6) in [(true, false), (false, true)] {
        let mut scene = tracked(beside, ipv6, 3);
        stay_on_nic(&mut scene, 3);
        scene.exchange(10_000, Place::Kernel);
    }
}

#[test]
fn the_tracker_knows_a_connection_whose_nic_has_died() {
    let mut scene = tracked(true, false, 3);
    stay_on_nic(&mut scene, 3);
    let nic = crate::full::statistics(&scene.bed).nic_process;
    baton_linux::process::signal(nic, libc::SIGKILL).expect("the NIC");
    scene.drain();
    scene.exchange(10_000, Place::Kernel);
}

/// An idle connection is forgotten, as it would be without Baton.
#[test]
fn the_tracker_forgets_an_idle_connection_on_the_nic() {
    let mut scene = tracked(true, false, 1);
    scene.exchange(10_000, Place::Nic);
    let flow = flow(&scene);
    assert!(entry(&scene, &flow).is_some());
    let deadline = Instant::now() + Duration::from_secs(30);
    while entry(&scene, &flow).is_some() {
        assert!(Instant::now() < deadline, "it has an entry still");
        // Waits: between two of many looks or exchanges; how long they take decides nothing.
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The tracker has not seen the FINs of a connection that ended on the NIC; its entry goes nevertheless.
#[test]
fn the_tracker_is_told_of_an_end_on_the_nic() {
    let mut scene = tracked(true, false, 100_000);
    scene.exchange(10_000, Place::Nic);
    let flow = flow(&scene);
    assert!(entry(&scene, &flow).expect("an entry").left > 1000);
    scene.peer.shutdown(std::net::Shutdown::Write).expect("the peer's FIN");
    scene.session.shutdown(scene.id).expect("our FIN");
    let deadline = Instant::now() + Duration::from_secs(20);
    while entry(&scene, &flow).is_some_and(|entry| entry.left > 1000) {
        assert!(Instant::now() < deadline, "it stays: {:?}", entry(&scene, &flow));
        scene.session.poll(Some(Duration::from_millis(20)), &mut Vec::new()).expect("poll");
    }
}

/// An entry in a zone of its own could not be renewed.
#[test]
fn zones_of_the_tracker_keep_connections() {
    let rules = "table inet t {
      chain incoming { type filter hook prerouting priority -300; tcp dport 8080 ct zone set 7; }
      chain outgoing { type filter hook output priority -300; tcp sport 8080 ct zone set 7; }
    }";
    let mut scene = scene(beside(Some(rules)));
    stays(&mut scene, "a zone of the connection tracker");
}

/// The NIC's packets pass neither rules of iptables-legacy nor filters at a device's ingress, so these keep a
/// connection in the kernel.
#[test]
fn rules_that_the_nics_packets_do_not_pass_keep_it() {
    for (lines, why) in [
        (vec!["iptables-legacy -A INPUT -p tcp --dport 22 -j DROP"], "iptables-legacy"),
        (
            vec!["tc qdisc add dev baton0 clsact", "tc filter add dev baton0 ingress protocol ip u32 match u32 0 0 flowid 1:1"],
            "traffic control",
        ),
    ] {
        for shape in [true, false] {
            let mut scene = scene(TestbedSettings { beside: shape, ..TestbedSettings::default() });
            scene.exchange(10_000, Place::Nic);
            lines.iter().for_each(|line| run(&scene.bed.host_a, line));
            let reason = returned(&scene);
            assert!(reason.contains("rules that change"), "{reason}");
            scene.drain();
            stays(&mut scene, why);
        }
    }
}
