//! Addresses of the NIC's own: a client that does not know them finds them by ARP and neighbour discovery, programs use
//! them, they survive deaths, are defended, and are gone at the end.

use crate::common::hosts;
use crate::full::{ECHO, Program, connect, connections, count, exchange, in_both_shapes, on_b, start, statistics, wait_until};
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{ControlPoint, INTERFACE_A, INTERFACE_B, Testbed, TestbedSettings, address_a, address_b};
use baton_linux::namespace::Namespace;
use baton_linux::resolution::ResolutionSocket;
use baton_linux::{process, rtnetlink};
use baton_protocol::address::{AddressInfo, OwnAddress, Standing};
use baton_protocol::program::{Ask, Place, Reply};
use baton_wire::arp::Arp;
use baton_wire::neighbour::{NEIGHBOUR_FRAME, Neighbour};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

in_both_shapes! {
    a_client_finds_the_address_and_a_server_behind_it
    programs_connect_from_the_address
    the_address_survives_nic_and_agent
    an_address_that_another_host_has_is_not_used
    an_address_in_use_is_defended
    nothing_is_left_at_the_end
}

const MAC_A: [u8; 6] = baton_bed::testbed::MAC_A;

/// The NIC's addresses in these tests.
fn own(ipv6: bool) -> IpAddr {
    if ipv6 { "fd00:ba70::50".parse().expect("an address") } else { IpAddr::from([10, 77, 0, 50]) }
}

fn settings(beside: bool, addresses: &[IpAddr]) -> TestbedSettings {
    let prefixed = |address: &IpAddr| OwnAddress { address: *address, prefix: if address.is_ipv4() { 24 } else { 64 } };
    TestbedSettings {
        beside,
        addresses: addresses.iter().map(prefixed).collect(),
        between_probes: 50_000,
        ..TestbedSettings::default()
    }
}

/// The addresses, when none of them is being probed for any more.
fn settled(bed: &Testbed) -> Vec<AddressInfo> {
    ask(bed, true)
}

fn ask(bed: &Testbed, settled: bool) -> Vec<AddressInfo> {
    match bed.tool().expect("a tool").ask(Ask::Addresses { settled }).expect("an answer") {
        Reply::Addresses(list) => list,
        other => panic!("{other:?}"),
    }
}

fn info(bed: &Testbed, address: IpAddr) -> AddressInfo {
    ask(bed, false).into_iter().find(|one| one.address == address).expect("the address")
}

/// Two hosts, the first with a NIC that uses both addresses. Where the NIC stands between kernel and wire, the kernel's
/// own answers to ARP are turned off: then every answer is the NIC's.
fn bed(settings: TestbedSettings) -> Testbed {
    let beside = settings.beside;
    let bed = hosts(settings);
    let list = settled(&bed);
    assert!(list.iter().all(|one| one.standing == Standing::Used && one.device == INTERFACE_A), "{list:?}");
    if !beside {
        bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/conf/all/arp_ignore", "8")).expect("a setting");
    }
    // The kernels have to find each other by themselves, host A's from the NIC's address.
    for address in [address_b(false), address_b(true)] {
        let flushed = on_a(&bed, &["ip", "neigh", "flush", "nud", "permanent", "to", &address.to_string()]);
        assert!(flushed.status.success(), "{}", text(&flushed.stderr));
        if let Some(own) = list.iter().find(|one| one.address.is_ipv4() == address.is_ipv4()) {
            let ping = on_a(&bed, &["ping", "-c", "1", "-W", "10", "-I", &own.address.to_string(), &address.to_string()]);
            assert!(ping.status.success(), "{}", text(&ping.stdout));
        }
        // Host A does not ask again by itself, from the NIC's address: host B would learn that from the question.
        let to = address.to_string();
        let keep = ["ip", "neigh", "replace", &to, "lladdr", "02:00:00:00:00:0b", "dev", INTERFACE_A, "nud", "permanent"];
        let kept = on_a(&bed, &keep);
        assert!(kept.status.success(), "{}", text(&kept.stderr));
    }
    bed
}

fn both(beside: bool) -> Testbed {
    bed(settings(beside, &[own(false), own(true)]))
}

fn on_a(bed: &Testbed, command: &[&str]) -> Output {
    let mut line = Command::new(command[0]);
    line.args(&command[1..]).stdout(Stdio::piped()).stderr(Stdio::piped());
    bed.host_a.spawn(&mut line).expect(command[0]).wait_with_output().expect("its output")
}

/// What `ip neigh` on host B says about an address.
fn neighbour(bed: &Testbed, address: IpAddr) -> String {
    text(&on_b(bed, &["ip", "neigh", "show", &address.to_string()]).stdout)
}

/// Makes host B forget how it reaches an address.
fn forget(bed: &Testbed, address: IpAddr) {
    let forgotten = on_b(bed, &["ip", "neigh", "flush", "to", &address.to_string()]);
    assert!(forgotten.status.success(), "{}", text(&forgotten.stderr));
}

/// Whether host A's kernel has an address because of Baton.
fn is_in_kernel(host: &Namespace, address: IpAddr) -> bool {
    let found = host.run(|| rtnetlink::own_addresses(&rtnetlink::open()?)).expect("addresses");
    found.iter().any(|(_, other)| *other == address)
}

/// [`ECHO`] at an address.
fn server_at(at: SocketAddr) -> String {
    let family = if at.is_ipv4() { "AF_INET" } else { "AF_INET6" };
    ECHO.replace("('', 7000)", &format!("('{}', {}), family=socket.{family}", at.ip(), at.port()))
}

/// An echo server at an address, and a client's connection that the NIC has made.
fn echo(bed: &Testbed, at: SocketAddr) -> (Program, TcpStream) {
    let server = start(bed, &["python3", "-c", &server_at(at)]);
    let mut made = None;
    wait_until("a connection that the NIC has made", || {
        let Ok(client) = connect(bed, at) else { return false };
        exchange(&client, 1);
        let local = client.local_addr().expect("its address").to_string();
        let by_nic = connections(bed).iter().any(|one| one.peer == local && one.made_by == Place::Nic);
        made = by_nic.then_some(client);
        by_nic
    });
    (server, made.expect("a connection"))
}

/// An unmodified server on the NIC's address answers a client that has to find it first, and every byte is right.
fn a_client_finds_the_address_and_a_server_behind_it(beside: bool) {
    let bed = both(beside);
    let scratch = Scratch::new("own");
    let content: Vec<u8> = (0..2_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    for ipv6 in [false, true] {
        let at = SocketAddr::new(own(ipv6), 8000);
        let (_echo, client) = echo(&bed, SocketAddr::new(own(ipv6), 7000));
        let directory = scratch.0.to_string_lossy().into_owned();
        let _server =
            start(&bed, &["python3", "-m", "http.server", "8000", "--bind", &at.ip().to_string(), "--directory", &directory]);
        let fetch = || on_b(&bed, &["curl", "-sS", "-m", "20", &format!("http://{at}/content")]);
        // Until the agent has its listener the kernel makes the connections.
        wait_until("the server on the NIC", || {
            let made = count(&bed, Counter::Made);
            fetch().status.success() && count(&bed, Counter::Made) > made
        });
        // Segments of connections that have just ended may look for it once more, and be answered: at any time after
        // this count.
        let mut before = info(&bed, at.ip());
        wait_until("an unknown address", || {
            before = info(&bed, at.ip());
            forget(&bed, at.ip());
            !neighbour(&bed, at.ip()).contains("lladdr")
        });
        let made = count(&bed, Counter::Made);
        let answer = fetch();
        assert!(answer.stdout == content, "{} bytes of {}: {}", answer.stdout.len(), content.len(), text(&answer.stderr));
        assert!(count(&bed, Counter::Made) > made, "the NIC makes the connections");
        let shown = neighbour(&bed, at.ip());
        assert!(shown.contains("lladdr 02:00:00:00:00:0a"), "{shown}");
        let after = info(&bed, at.ip());
        assert_eq!(after.answers > before.answers, !beside, "the NIC answers where the kernel is behind it");
        assert_eq!((after.probes, after.announcements, after.conflicts), (3, 2, 0));
        exchange(&client, 2);
        // Echo is answered, too.
        let ping = on_b(&bed, &["ping", "-c", "1", "-W", "10", &at.ip().to_string()]);
        assert!(ping.status.success(), "{}", text(&ping.stdout));
    }
    assert_eq!(statistics(&bed).lost, 0);
}

/// A program binds to the NIC's address and connects from it: the NIC opens the connection.
fn programs_connect_from_the_address(beside: bool) {
    let bed = both(beside);
    for ipv6 in [false, true] {
        let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(ipv6), 0))).expect("a listener");
        let to = listener.local_addr().expect("its address");
        let family = if ipv6 { "AF_INET6" } else { "AF_INET" };
        let client = format!(
            "
import socket
one = socket.socket(socket.{family})
one.bind(('{}', 0))
one.connect(('{}', {}))
while data := one.recv(65536): one.sendall(data)
",
            own(ipv6),
            to.ip(),
            to.port()
        );
        let made = count(&bed, Counter::Made);
        let _client = start(&bed, &["python3", "-c", &client]);
        let (accepted, from) = listener.accept().expect("a connection");
        assert_eq!(from.ip(), own(ipv6));
        exchange(&accepted, 3);
        assert_eq!(count(&bed, Counter::Made), made + 1);
        let list = connections(&bed);
        assert!(list.iter().any(|one| one.local == from.to_string() && one.place == Place::Nic), "{list:?}");
    }
    // Who names no address gets the host's own, not one of the NIC's.
    for ipv6 in [false, true] {
        let found = on_a(&bed, &["ip", "route", "get", &address_b(ipv6).to_string()]);
        assert!(text(&found.stdout).contains(&format!("src {} ", address_a(ipv6))), "{}", text(&found.stdout));
    }
}

/// NIC and agent are killed one after the other: connections go on, the address is answered for, and the next NIC
/// announces it without probing for it.
fn the_address_survives_nic_and_agent(beside: bool) {
    let bed = both(beside);
    for ipv6 in [false, true] {
        let at = SocketAddr::new(own(ipv6), 7000);
        let (_server, client) = echo(&bed, at);
        for (byte, agent_dies) in [(2, false), (3, true)] {
            let (first, before) = (statistics(&bed), info(&bed, at.ip()));
            process::signal(if agent_dies { first.agent_process } else { first.nic_process }, 9).expect("a signal");
            exchange(&client, byte);
            wait_until("the next NIC", || {
                let answer = bed.tool().and_then(|mut tool| tool.ask(Ask::Statistics));
                matches!(answer, Ok(Reply::Statistics(now)) if now.nic_process != first.nic_process)
            });
            forget(&bed, at.ip());
            exchange(&connect(&bed, at).expect("a connection"), byte);
            let announced = before.announcements + 2;
            if beside && agent_dies {
                // Its counters are the agent's, and begin anew.
                wait_until("two announcements", || info(&bed, at.ip()).announcements == 2);
                assert_eq!(info(&bed, at.ip()).probes, 0);
            } else if !beside {
                wait_until("two announcements", || info(&bed, at.ip()).announcements == announced);
                assert_eq!(info(&bed, at.ip()).probes, before.probes);
            }
            assert_eq!(info(&bed, at.ip()).standing, Standing::Used);
        }
        assert_eq!(statistics(&bed).lost, 0);
    }
}

/// Another host has the address: it is not used, and the reason names that host.
fn an_address_that_another_host_has_is_not_used(beside: bool) {
    let taken = [address_b(false), address_b(true)];
    let bed = hosts(settings(beside, &[taken[0], own(false), taken[1]]));
    let list = settled(&bed);
    assert_eq!(list.iter().map(|one| one.standing).collect::<Vec<_>>(), [Standing::Taken, Standing::Used, Standing::Taken]);
    for address in taken {
        let one = info(&bed, address);
        assert!(one.reason.contains("02:00:00:00:00:0b") && one.conflicts == 1 && one.announcements == 0, "{one:?}");
        assert!(!is_in_kernel(&bed.host_a, address));
    }
    // That host is still reached at its address.
    let ping = on_a(&bed, &["ping", "-c", "1", "-W", "10", &address_b(false).to_string()]);
    assert!(ping.status.success(), "{}", text(&ping.stdout));
}

/// The other host's socket for frames about an address of the NIC's.
fn on_wire(bed: &Testbed, address: IpAddr) -> ResolutionSocket {
    let open = || ResolutionSocket::open(rtnetlink::link(&rtnetlink::open()?, INTERFACE_B)?.index, address);
    bed.host_b.run(open).expect("a packet socket")
}

/// A host that claims an address all the time is answered at a bounded rate, and connections are not disturbed.
fn an_address_in_use_is_defended(beside: bool) {
    const RIVAL: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0c];
    let bed = both(beside);
    for ipv6 in [false, true] {
        let at = SocketAddr::new(own(ipv6), 7000);
        let (_server, client) = echo(&bed, at);
        let mut claim = [0; NEIGHBOUR_FRAME];
        let claim = match at.ip() {
            IpAddr::V4(v4) => Arp::announcement(RIVAL, v4.octets()).emit().to_vec(),
            IpAddr::V6(v6) => {
                let length = Neighbour::announcement(RIVAL, v6.octets()).emit([0xff; 6], &mut claim);
                claim[..length].to_vec()
            }
        };
        let (socket, before) = (on_wire(&bed, at.ip()), info(&bed, at.ip()));
        let started = Instant::now();
        while info(&bed, at.ip()).conflicts < before.conflicts + 200 {
            assert!(started.elapsed() < Duration::from_secs(20));
            (0..50).for_each(|_| socket.send(&claim));
        }
        exchange(&client, 4);
        let (after, took) = (info(&bed, at.ip()), started.elapsed());
        let defended = after.announcements - before.announcements;
        // Ten times the interval between two probes.
        let most = 1 + took.as_millis() as u64 / 500;
        assert!((1..=most).contains(&defended), "{defended} defences in {took:?}");
        assert!(after.standing == Standing::Used && after.reason.contains("02:00:00:00:00:0c"), "{after:?}");
        // The other host sees the defence after its claim.
        let mut frame = [0; ResolutionSocket::LONGEST];
        let mut sources = std::iter::from_fn(|| socket.receive(&mut frame).map(|_| frame[6..12].to_vec()));
        assert!(sources.any(|source| source == MAC_A), "an announcement of the NIC's");
    }
}

/// A flood of questions is answered at a bounded rate, and an honest client is served meanwhile.
#[test]
fn a_flood_of_questions_is_bounded() {
    let bed = both(false);
    let at = SocketAddr::new(own(false), 7000);
    let (_server, client) = echo(&bed, at);
    let socket = on_wire(&bed, at.ip());
    let IpAddr::V4(v4) = at.ip() else { panic!("an IPv4 address") };
    let forged = [2, 0xf1, 0x00, 0xd0, 0, 1];
    let question = Arp { is_request: true, sender: [10, 77, 0, 99], ..Arp::probe(forged, v4.octets()) }.emit();
    let garbage: Vec<u8> = question[..30].to_vec();
    let (before, bad) = (info(&bed, at.ip()), count(&bed, Counter::BadResolution));
    let started = Instant::now();
    let mut byte = 5;
    while info(&bed, at.ip()).unanswered < before.unanswered + 50_000 {
        assert!(started.elapsed() < Duration::from_secs(60));
        for _ in 0..2000 {
            socket.send(&question);
        }
        socket.send(&garbage);
        exchange(&client, byte);
        byte = byte.wrapping_add(1);
    }
    forget(&bed, at.ip());
    exchange(&connect(&bed, at).expect("an honest client"), 1);
    let answers = info(&bed, at.ip()).answers - before.answers;
    let most = 10 * (started.elapsed().as_secs() + 2) + 5;
    assert!((1..=most).contains(&answers), "{answers} answers in {:?}", started.elapsed());
    assert!(count(&bed, Counter::BadResolution) > bad);
    assert_eq!(statistics(&bed).nic_starts, 1);
}

/// Datagrams to the NIC's address are the NIC's, where it is between kernel and wire, and its answers come from there.
#[test]
fn datagrams_reach_the_address() {
    let bed = both(false);
    for ipv6 in [false, true] {
        let at = SocketAddr::new(own(ipv6), 7000);
        let family = if ipv6 { "AF_INET6" } else { "AF_INET" };
        let echo = format!(
            "
import socket
one = socket.socket(socket.{family}, socket.SOCK_DGRAM)
one.bind(('{}', 7000))
while True:
    data, peer = one.recvfrom(2000)
    one.sendto(data, peer)
",
            at.ip()
        );
        let _server = start(&bed, &["python3", "-c", &echo]);
        let client = bed.host_b.run(|| UdpSocket::bind(SocketAddr::new(address_b(ipv6), 0))).expect("a socket");
        client.connect(at).expect("an address");
        client.set_nonblocking(true).expect("a socket that does not wait");
        let before = count(&bed, Counter::DatagramsSent);
        let mut received = [0; 100];
        wait_until("answers of the NIC's", || {
            let answered = client.send(b"a datagram").is_ok() && matches!(client.recv(&mut received), Ok(10));
            answered && count(&bed, Counter::DatagramsSent) > before
        });
        assert_eq!(&received[..10], b"a datagram");
    }
}

/// The kernel's interface gets another MAC address, and goes down and up: the NIC announces the addresses there, and
/// the kernel has them again.
#[test]
fn the_addresses_follow_their_device() {
    let bed = both(false);
    let ip = |arguments: &[&str]| {
        let ran = on_a(&bed, &[&["ip", "link", "set", INTERFACE_A], arguments].concat());
        assert!(ran.status.success(), "{}", text(&ran.stderr));
    };
    for ipv6 in [false, true] {
        let ping = on_b(&bed, &["ping", "-c", "1", "-W", "10", &own(ipv6).to_string()]);
        assert!(ping.status.success(), "{}", text(&ping.stdout));
        assert!(neighbour(&bed, own(ipv6)).contains("02:00:00:00:00:0a"));
    }
    ip(&["address", "02:00:00:00:00:aa"]);
    wait_until("announcements", || [false, true].iter().all(|ipv6| neighbour(&bed, own(*ipv6)).contains("02:00:00:00:00:aa")));
    ip(&["down"]);
    wait_until("the loss of an address", || !is_in_kernel(&bed.host_a, own(true)));
    ip(&["up"]);
    wait_until("both addresses", || [false, true].iter().all(|ipv6| is_in_kernel(&bed.host_a, own(*ipv6))));
    let ping = on_b(&bed, &["ping", "-c", "1", "-W", "10", &own(false).to_string()]);
    assert!(ping.status.success(), "{}", text(&ping.stdout));
}

/// With several workers one has the addresses, whichever receives the frames.
#[test]
fn several_workers_answer_as_one() {
    for card in [false, true] {
        let several = TestbedSettings { workers: 3, card, nic_cores: Vec::new(), ..settings(false, &[own(false), own(true)]) };
        let bed = bed(several);
        for ipv6 in [false, true] {
            let at = SocketAddr::new(own(ipv6), 7000);
            let (_server, client) = echo(&bed, at);
            for byte in 2..6 {
                let before = info(&bed, at.ip());
                forget(&bed, at.ip());
                exchange(&connect(&bed, at).expect("a connection"), byte);
                assert!(info(&bed, at.ip()).answers > before.answers);
            }
            exchange(&client, 6);
            assert_eq!(info(&bed, at.ip()).conflicts, 0);
        }
    }
}

/// The owner of a NIC sets its addresses, and the host's agent, a container's, learns them.
#[test]
fn the_owner_sets_the_addresses() {
    let control_point = Some(ControlPoint { key: vec![7; 32], rules: Vec::new(), contained: true });
    let bed = bed(TestbedSettings { control_point, ..settings(false, &[own(false), own(true)]) });
    for ipv6 in [false, true] {
        assert!(is_in_kernel(&bed.host_a, own(ipv6)));
        forget(&bed, own(ipv6));
        let ping = on_b(&bed, &["ping", "-c", "1", "-W", "10", &own(ipv6).to_string()]);
        assert!(ping.status.success(), "{}", text(&ping.stdout));
        assert!(info(&bed, own(ipv6)).answers > 0);
    }
}

/// The kernel of host A has the addresses as long as Baton runs, and gets one back that it has lost.
fn nothing_is_left_at_the_end(beside: bool) {
    let bed = both(beside);
    let host = Namespace::of_process(statistics(&bed).agent_process).expect("host A");
    let addresses = [own(false), own(true)];
    assert!(addresses.iter().all(|address| is_in_kernel(&host, *address)));
    let removed = on_a(&bed, &["ip", "address", "del", &format!("{}/32", own(false)), "dev", INTERFACE_A]);
    assert!(removed.status.success(), "{}", text(&removed.stderr));
    wait_until("the address", || is_in_kernel(&host, own(false)));
    drop(bed);
    assert!(!addresses.iter().any(|address| is_in_kernel(&host, *address)));
}

/// A host with an Ethernet device and two addresses, without a Baton.
struct Host {
    namespace: Namespace,
    scratch: Scratch,
    peer: Namespace,
}

impl Host {
    fn new() -> Host {
        let (namespace, peer) = (Namespace::new().expect("a namespace"), Namespace::new().expect("a namespace"));
        namespace
            .run(|| rtnetlink::add_veth(&rtnetlink::open()?, "eth0", "eth0", std::os::fd::AsFd::as_fd(&peer)))
            .expect("a link");
        let up = |last: u8| {
            move || {
                let netlink = rtnetlink::open()?;
                let index = rtnetlink::link(&netlink, "eth0")?.index;
                rtnetlink::set_up(&netlink, index, None, None)?;
                rtnetlink::add_address(&netlink, index, IpAddr::from([10, 78, 0, last]), 24)
            }
        };
        namespace.run(up(1)).expect("its device");
        peer.run(up(2)).expect("its device");
        Host { namespace, scratch: Scratch::new("own"), peer }
    }

    /// `baton run` with these arguments. Its Baton's files are in the scratch directory.
    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--probe-interval", "50"]).args(arguments).env("TMPDIR", &self.scratch.0);
        command.env_remove("BATON_SOCKET").env_remove("BATON_RUN");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn ran(&self, arguments: &[&str]) -> Output {
        self.namespace.spawn(&mut self.run(arguments)).expect("baton").wait_with_output().expect("its output")
    }
}

/// What a killed Baton leaves is taken over by the next one that wants it, and removed by any other. Another that runs
/// keeps its own.
#[test]
fn what_a_killed_baton_has_left_is_taken_over_or_removed() {
    let host = Host::new();
    let address = IpAddr::from([10, 78, 0, 50]);
    let killed = || {
        let mut program = host.namespace.spawn(&mut host.run(&["--address", "10.78.0.50/24", "--", "cat"])).expect("baton");
        wait_until("the address", || is_in_kernel(&host.namespace, address));
        let socket = crate::scratch::agent_socket(&host.scratch).expect("an agent");
        let agent = baton_client::tool::Tool::connect(&socket).expect("a tool").statistics().expect("statistics").agent_process;
        // Another Baton of this namespace does not touch it, and cannot have it.
        let other = host.ran(&["--", "true"]);
        assert!(other.status.success() && is_in_kernel(&host.namespace, address), "{}", text(&other.stderr));
        let other = host.ran(&["--address", "10.78.0.50/24", "--", "true"]);
        assert!(text(&other.stderr).contains("another Baton of this network namespace has it"), "{}", text(&other.stderr));
        let keeper = process::parent(agent).expect("a keeper");
        process::signal(agent, libc::SIGSTOP).expect("a signal");
        [keeper, agent].iter().for_each(|one| process::signal(*one, libc::SIGKILL).expect("a signal"));
        wait_until("their end", || ![keeper, agent].iter().any(|one| process::lives(*one)));
        drop(program.stdin.take());
        program.wait().expect("its end");
        std::fs::remove_dir_all(socket.parent().expect("a directory")).expect("removed");
        assert!(is_in_kernel(&host.namespace, address), "it is left");
    };
    killed();
    let next = host.ran(&["--address", "10.78.0.50/24", "--", "ip", "-o", "address", "show", "to", "10.78.0.50"]);
    assert!(next.status.success() && text(&next.stdout).contains("10.78.0.50/32"), "{}", text(&next.stderr));
    wait_until("its end", || !is_in_kernel(&host.namespace, address));
    killed();
    assert!(host.ran(&["--", "true"]).status.success());
    assert!(!is_in_kernel(&host.namespace, address));
}

/// `baton up` ends while programs use the address: their connections go on in the kernel, and so does the address,
/// until the next Baton has it again; when nobody uses it any more, it is removed.
#[test]
fn an_address_stays_as_long_as_programs_use_it() {
    let host = Host::new();
    let address = IpAddr::from([10, 78, 0, 50]);
    let path = host.scratch.file("agent.sock");
    let up = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["up", "--address", "10.78.0.50/24", "--probe-interval", "50", "--socket", &path]).stderr(Stdio::piped());
        let mut up = host.namespace.spawn(&mut command).expect("baton");
        let mut said = String::new();
        let mut errors = BufReader::new(up.stderr.take().expect("its errors"));
        errors.read_line(&mut said).expect("a line");
        assert!(said.contains("is up"), "{said}");
        (up, errors)
    };
    let down = |(mut up, mut errors): (Child, BufReader<_>)| {
        process::signal(up.id(), libc::SIGTERM).expect("a signal");
        assert!(up.wait().expect("its end").success());
        let mut said = String::new();
        errors.read_to_string(&mut said).expect("text");
        said
    };
    let client = || host.peer.run(|| TcpStream::connect_timeout(&SocketAddr::new(address, 7000), Duration::from_secs(10)));
    let first = up();
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args([
        "run",
        "--socket",
        &path,
        "--offload",
        "full",
        "--",
        "python3",
        "-c",
        &server_at(SocketAddr::new(address, 7000)),
    ]);
    command.env_remove("BATON_RUN").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let server = Program(host.namespace.spawn(&mut command).expect("baton"));
    let mut connection = None;
    wait_until("the server", || {
        connection = client().ok();
        connection.is_some()
    });
    let connection = connection.expect("a connection");
    exchange(&connection, 1);
    let said = down(first);
    assert!(said.contains("the kernel keeps 10.78.0.50"), "{said}");
    assert!(is_in_kernel(&host.namespace, address));
    exchange(&connection, 2);
    exchange(&client().expect("a connection that the kernel makes"), 3);
    // Another Baton of this namespace does not take it away.
    assert!(host.ran(&["--", "true"]).status.success());
    exchange(&connection, 4);
    let second = up();
    exchange(&connection, 5);
    drop(connection);
    drop(server);
    down(second);
    // The kernel may have to end connections that the program's end has closed.
    let expires = || {
        let mut command = Command::new("ip");
        command.args(["-o", "address", "show", "to", "10.78.0.50"]).stdout(Stdio::piped());
        let shown = host.namespace.spawn(&mut command).expect("ip").wait_with_output().expect("its output");
        text(&shown.stdout).contains("sec")
    };
    assert!(!is_in_kernel(&host.namespace, address) || expires());
}

/// A program sends, closes and ends, and its Baton with it: what is under way reaches the client before the address
/// goes.
#[test]
fn what_a_program_has_sent_arrives_after_its_end() {
    let host = Host::new();
    let address = IpAddr::from([10, 78, 0, 50]);
    let sends = "
import socket
listener = socket.create_server(('10.78.0.50', 7000))
print('listens', flush=True)
one, _ = listener.accept()
one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
one.sendall(bytes(1_500_000))
";
    let mut program = host.run(&["--address", "10.78.0.50/24", "--offload", "full", "--", "python3", "-c", sends]);
    let mut program = host.namespace.spawn(&mut program).expect("baton");
    BufReader::new(program.stdout.take().expect("its output")).read_line(&mut String::new()).expect("a line");
    let connect = || TcpStream::connect_timeout(&SocketAddr::new(address, 7000), Duration::from_secs(10));
    let mut client = host.peer.run(connect).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    // Its window is full, and the program ends.
    assert!(program.wait().expect("its end").success());
    wait_until("the end of its Baton", || crate::scratch::agent_socket(&host.scratch).is_none());
    let mut received = Vec::new();
    client.read_to_end(&mut received).expect("all bytes");
    assert_eq!(received.len(), 1_500_000);
}

/// What cannot be the NIC's address is refused with the reason, and the program is not started.
#[test]
fn wrong_addresses_are_clear_errors() {
    let host = Host::new();
    for (address, why) in [
        ("10.78.0.1/24", "this host's already"),
        ("10.78.0.2/24", "has it"),
        ("192.0.2.7/24", "no device of this host leads to its link"),
        ("fd00::50/64", "no device of this host leads to its link"),
        ("10.78.0.255/24", "broadcast"),
        ("224.0.0.1", "multicast"),
        ("127.0.0.5", "loopback"),
        ("nonsense", "is not an address"),
    ] {
        let ran = host.ran(&["--address", address, "--", "echo", "started"]);
        let said = text(&ran.stderr);
        assert!(ran.status.code() == Some(2) && ran.stdout.is_empty(), "{address}: {said}");
        assert!(said.contains(why) && said.contains(address.split('/').next().unwrap_or("")), "{address}: {said}");
    }
    let twice = host.ran(&["--address", "10.78.0.50/24", "--address", "10.78.0.50", "--", "true"]);
    assert!(text(&twice.stderr).contains("given twice"), "{}", text(&twice.stderr));
}

/// `baton nic show` lists them, as JSON too.
#[test]
fn they_are_shown() {
    let bed = both(false);
    let show = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["nic", "show", "--socket"]).arg(bed.socket()).args(arguments);
        let ran = command.output().expect("baton");
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        text(&ran.stdout)
    };
    let shown: Value = serde_json::from_str(&show(&["--json"])).expect("JSON");
    let addresses = shown["addresses"].as_array().expect("addresses");
    let of = |at: usize, field: &str| addresses[at][field].clone();
    assert_eq!((of(0, "address"), of(1, "address")), ("10.77.0.50".into(), "fd00:ba70::50".into()));
    assert_eq!(
        (of(0, "state"), of(0, "probes"), of(0, "conflicts"), of(0, "device")),
        ("used".into(), 3.into(), 0.into(), "baton0".into())
    );
    let lines = show(&[]);
    assert!(lines.lines().any(|line| line.starts_with("fd00:ba70::50 ") && line.contains(" used ")), "{lines}");
}
