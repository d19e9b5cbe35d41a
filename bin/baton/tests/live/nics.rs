//! Several NICs at once: each serves the connections that leave by its devices, and dies alone.

use crate::common::{KEYS, answered, hosts, until_moved};
use crate::full::{ECHO, exchange};
use crate::lifecycle::wait_for;
use crate::scratch::{Scratch, agent_socket, text};
use crate::{full, messages};
use anyhow::Context;
use baton_abi::layout::{Counter, session};
use baton_agent::{Crash, Fault, Step};
use baton_bed::testbed::{Testbed, TestbedSettings, address_a, address_b};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Listener, Session, Shared};
use baton_linux::namespace::Namespace;
use baton_linux::{process, rtnetlink, socket};
use baton_protocol::address::{OwnAddress, Standing};
use baton_protocol::program::{Ask, ConnectionInfo, Opening, Place, Reply, Statistics};
use baton_shm::Region;
use baton_sim::stream;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SIGKILL: i32 = 9;
/// Segments (of up to 64 KB) that a NIC receives at least while a connection of its carries a megabyte each way.
const SOME: u64 = 10;
/// Addresses of the second link: host A's, and that of the second peer.
const SECOND_A: [u8; 4] = [10, 78, 0, 1];
const SECOND_PEER: [u8; 4] = [10, 78, 0, 2];

fn two_nics() -> TestbedSettings {
    TestbedSettings { beside: true, nics: 2, ..TestbedSettings::default() }
}

fn run(host: &Namespace, line: &str) {
    let words: Vec<&str> = line.split(' ').collect();
    let status = host.spawn(Command::new(words[0]).args(&words[1..])).expect("the program").wait().expect("its status");
    assert!(status.success(), "{line}");
}

/// A connection of the program on host A, and its peer.
pub(crate) struct Pair {
    pub id: ConnectionId,
    pub peer: TcpStream,
    /// Bytes sent and received by the program, then by the peer.
    sent: [u64; 2],
    received: [u64; 2],
}

/// Host A with two links to two peers, a Baton with two NICs, and a program with connections over both links.
pub(crate) struct Scene {
    pub session: Session,
    pub pairs: Vec<Pair>,
    pub bed: Testbed,
    /// The second peer, beside the test bed's host B. Its link has to be there until the test bed has ended.
    second: Option<Namespace>,
}

fn later(result: io::Result<usize>) -> usize {
    match result {
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => panic!("the connection broke: {error}"),
    }
}

/// Makes host A's second link, to a peer that knows it by this name.
fn second_link(bed: &Testbed, second: &Namespace, name: &str) {
    let made = second.run(|| rtnetlink::add_veth(&rtnetlink::open()?, name, "second0", bed.host_a.as_fd()));
    made.expect("a second link");
    for (host, name, own) in [(&bed.host_a, "second0", SECOND_A), (second, name, SECOND_PEER)] {
        run(host, &format!("ip address add {}/24 dev {name}", IpAddr::from(own)));
        run(host, &format!("ip link set {name} up"));
    }
}

impl Scene {
    fn new(settings: TestbedSettings) -> Scene {
        let bed = hosts(settings);
        let second = Namespace::new().expect("a second peer");
        second_link(&bed, &second, "eth0");
        Scene::on(bed, Some(second))
    }

    pub fn on(bed: Testbed, second: Option<Namespace>) -> Scene {
        let session = Session::connect(&bed.socket()).expect("a session");
        Scene { session, pairs: Vec::new(), second, bed }
    }

    /// A scene with a connection over each link.
    fn with_both(settings: TestbedSettings) -> Scene {
        let mut scene = Scene::new(settings);
        scene.connect(0);
        scene.connect(1);
        scene
    }

    /// Adds a connection over a link, which a peer opens.
    pub fn connect(&mut self, link: usize) -> usize {
        let (peer, address) = match link {
            0 => (&self.bed.host_b, address_a(false)),
            _ => (self.second.as_ref().expect("a second peer"), IpAddr::from(SECOND_A)),
        };
        let listener = self.bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address, 0))).expect("a listener");
        let address = listener.local_addr().expect("its address");
        let peer = peer.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
        let (server, _) = listener.accept().expect("its other end");
        self.adopt(server, peer)
    }

    fn adopt(&mut self, server: TcpStream, peer: TcpStream) -> usize {
        for socket in [&server, &peer] {
            socket.set_nonblocking(true).expect("non-blocking");
        }
        let id = self.session.adopt(OwnedFd::from(server)).expect("adoption");
        self.pairs.push(Pair { id, peer, sent: [0; 2], received: [0; 2] });
        self.pairs.len() - 1
    }

    /// Sends and receives what fits now on a connection, both ways, and checks it. Returns bytes received.
    pub fn step(&mut self, at: usize, most: usize) -> usize {
        let pair = &mut self.pairs[at];
        let mut piece = vec![0; most];
        stream::fill(KEYS[0], pair.sent[0], &mut piece);
        pair.sent[0] += later(self.session.send(pair.id, &piece)) as u64;
        stream::fill(KEYS[1], pair.sent[1], &mut piece);
        pair.sent[1] += later(socket::send(pair.peer.as_fd(), &piece)) as u64;
        self.receive(at)
    }

    fn receive(&mut self, at: usize) -> usize {
        let pair = &mut self.pairs[at];
        let mut buffer = vec![0; 1 << 16];
        let got = self.session.receive(pair.id, &mut buffer);
        let program = checked(got, KEYS[1], pair.received[0], &buffer);
        let got = socket::receive(pair.peer.as_fd(), &mut buffer);
        let peer = checked(got, KEYS[0], pair.received[1], &buffer);
        pair.received[0] += program as u64;
        pair.received[1] += peer as u64;
        program + peer
    }

    pub fn wait_a_little(&mut self) {
        self.session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
    }

    /// Both ways on all connections until a condition holds.
    pub fn load_until(&mut self, what: &str, mut holds: impl FnMut(&mut Scene) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !holds(self) {
            assert!(Instant::now() < deadline, "{what}: not within twenty seconds; {:?}", self.all());
            if (0..self.pairs.len()).map(|at| self.step(at, 16384)).sum::<usize>() == 0 {
                self.wait_a_little();
            }
        }
    }

    /// This many bytes more each way on one connection.
    fn carry(&mut self, at: usize, bytes: u64) {
        let goal = self.pairs[at].received.map(|received| received + bytes);
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.pairs[at].received[0] < goal[0] || self.pairs[at].received[1] < goal[1] {
            assert!(Instant::now() < deadline, "connection {at} is stuck: {:?}", self.all());
            if self.step(at, 16384) == 0 {
                self.wait_a_little();
            }
        }
    }

    /// Reads until everything that was sent has arrived.
    pub fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let missing = |pair: &Pair| pair.received[0] < pair.sent[1] || pair.received[1] < pair.sent[0];
        while self.pairs.iter().any(missing) {
            assert!(Instant::now() < deadline, "what was sent does not arrive: {:?}", self.all());
            if (0..self.pairs.len()).map(|at| self.receive(at)).sum::<usize>() == 0 {
                self.wait_a_little();
            }
        }
    }

    /// Moves a connection as its program does.
    fn offload(&mut self, at: usize) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = self.session.move_to(self.pairs[at].id, Place::Nic) {
            assert!(error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline, "it could not be moved: {error}");
        }
    }

    fn offload_both(&mut self) {
        (0..2).for_each(|at| self.offload(at));
    }

    fn carry_both(&mut self, bytes: u64) {
        (0..2).for_each(|at| self.carry(at, bytes));
    }

    pub fn all(&self) -> Vec<ConnectionInfo> {
        answered(&self.bed, Tool::connections)
    }

    fn info(&self, at: usize) -> ConnectionInfo {
        let id = self.pairs[at].id;
        let listed = |list: Vec<ConnectionInfo>| list.into_iter().find(|info| info.connection == id);
        answered(&self.bed, |tool| listed(tool.connections()?).context("it is not listed"))
    }

    /// The NIC that has a connection.
    fn nic_of(&self, at: usize) -> Option<u32> {
        self.info(at).nic
    }

    pub fn statistics(&self) -> Statistics {
        answered(&self.bed, Tool::statistics)
    }

    /// Segments of its connections that each NIC has received.
    fn segments(&self) -> Vec<u64> {
        self.statistics().nics.iter().map(|nic| nic.counters[Counter::Segments as usize]).collect()
    }

    /// Moves a connection as a tool does, to a NIC. The agent may die meanwhile: the next one has other numbers.
    fn ask_for_nic(&mut self, at: usize, nic: u32) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let info = self.info(at);
            let ask = Ask::MoveAny { session: info.session, connection: info.connection, to: Place::Nic, nic: Some(nic) };
            match answered(&self.bed, |tool| tool.ask(ask.clone())) {
                Reply::Done => break,
                Reply::Stayed { transient: true, .. } if Instant::now() < deadline => {}
                // It was on its way back to its NIC by itself.
                Reply::Stayed { reason, .. } if reason.contains("before it had moved") && Instant::now() < deadline => {}
                Reply::Failed { reason } if reason.contains("has no connection") && Instant::now() < deadline => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Checks bytes that were received. Returns how many.
fn checked(got: io::Result<usize>, key: u64, from: u64, buffer: &[u8]) -> usize {
    let got = later(got);
    assert_eq!(stream::mismatches(key, from, &buffer[..got]), 0, "wrong bytes");
    got
}

/// Connections go to the NIC of the device by which they leave. Each NIC sees its own connections' segments and no
/// others.
#[test]
fn each_connection_is_on_the_nic_of_its_device() {
    let mut scene = Scene::with_both(two_nics());
    for at in [0, 1] {
        scene.carry(at, 100_000);
        scene.offload(at);
    }
    assert_eq!([0, 1].map(|at| scene.nic_of(at)), [Some(0), Some(1)]);
    let devices: Vec<_> = scene.statistics().nics.into_iter().map(|nic| nic.devices).collect();
    assert_eq!(devices, [["baton0"], ["second0"]]);
    for at in [0, 1] {
        let before = scene.segments();
        scene.carry(at, 3_000_000);
        scene.drain();
        let after = scene.segments();
        assert!(after[at] > before[at] + SOME, "NIC {at} has not carried it: {before:?} {after:?}");
        // The other connection's peer may acknowledge something late.
        assert!(after[1 - at] <= before[1 - at] + 3, "NIC {} has seen what is not its own: {before:?} {after:?}", 1 - at);
    }
}

/// A NIC dies under load: its own connection is recovered, and goes by itself to the next NIC of that number. The other
/// NIC and its connection notice nothing.
#[test]
fn a_nic_dies_alone() {
    let mut scene = Scene::with_both(two_nics());
    scene.offload_both();
    for dies in [1, 0] {
        let lives = 1 - dies;
        let before = scene.statistics();
        let other = scene.info(lives);
        scene.load_until("traffic on both", |scene| {
            scene.segments().iter().zip(&before.nics).all(|(now, nic)| *now > nic.counters[Counter::Segments as usize] + SOME)
        });
        process::signal(before.nics[dies].process, SIGKILL).expect("a signal");
        scene.load_until("the recovery", |scene| scene.statistics().recovered == before.recovered + 1);
        scene.load_until("the connection on the next NIC", |scene| scene.nic_of(dies) == Some(dies as u32));
        let after = scene.statistics();
        assert_eq!(after.nics[lives].process, before.nics[lives].process, "the other NIC has died, too");
        assert_ne!(after.nics[dies].process, before.nics[dies].process);
        assert_eq!((after.nic_starts, after.lost), (before.nic_starts + 1, 0));
        let now = scene.info(lives);
        assert_eq!((now.place, now.nic, now.moves), (Place::Nic, other.nic, other.moves), "{now:?}");
        scene.carry(dies, 1_000_000);
        scene.offload(dies);
        assert_eq!(scene.nic_of(dies), Some(dies as u32));
        scene.carry_both(1_000_000);
        scene.drain();
    }
}

/// A tool moves a connection from NIC to NIC while bytes flow both ways, and back.
#[test]
fn a_connection_moves_from_nic_to_nic() {
    let mut scene = Scene::with_both(two_nics());
    scene.offload_both();
    for round in 0..6 {
        let nic = 1 - round % 2;
        scene.carry_both(200_000);
        for at in [0, 1] {
            // So that something is queued and in flight.
            scene.step(at, 1 << 16);
        }
        scene.ask_for_nic(0, nic);
        assert_eq!([0, 1].map(|at| scene.nic_of(at)), [Some(nic), Some(1)]);
        let before = scene.segments();
        scene.carry(0, 1_000_000);
        assert!(scene.segments()[nic as usize] > before[nic as usize] + SOME, "NIC {nic} does not carry it");
    }
    scene.drain();
    // The NIC that it is on dies, not the one that has its device.
    scene.ask_for_nic(0, 1);
    let before = scene.statistics();
    process::signal(before.nics[1].process, SIGKILL).expect("a signal");
    scene.load_until("the recovery", |scene| scene.statistics().recovered == before.recovered + 2);
    scene.carry_both(1_000_000);
    scene.drain();
    let statistics = scene.statistics();
    assert_eq!((statistics.lost, statistics.failed_moves), (0, 0));
}

/// The route of a connection changes to the other link, and back, while bytes flow: it moves to the NIC of that link.
#[test]
fn a_changed_route_leads_to_the_other_nic() {
    let bed = hosts(two_nics());
    second_link(&bed, &bed.host_b, "eth1");
    // Addresses of both hosts that are of no link.
    let (a, b) = (IpAddr::from([10, 79, 0, 1]), IpAddr::from([10, 79, 0, 2]));
    for (host, own) in [(&bed.host_a, a), (&bed.host_b, b)] {
        run(host, &format!("ip address add {own}/32 dev lo"));
    }
    let lead = |bed: &Testbed, over: usize| {
        let to_b = [address_b(false), IpAddr::from(SECOND_PEER)][over];
        let to_a = [address_a(false), IpAddr::from(SECOND_A)][over];
        run(&bed.host_a, &format!("ip route replace {b} via {to_b} src {a}"));
        run(&bed.host_b, &format!("ip route replace {a} via {to_a} src {b}"));
    };
    lead(&bed, 0);
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(a, 0))).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let peer = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    let (server, _) = listener.accept().expect("its other end");
    let mut scene = Scene::on(bed, None);
    let at = scene.adopt(server, peer);
    scene.offload(at);
    assert_eq!(scene.nic_of(at), Some(0));
    for round in 0..4 {
        let over = 1 - round % 2;
        scene.carry(at, 200_000);
        lead(&scene.bed, over);
        scene.load_until("the move to the other NIC", |scene| scene.nic_of(at) == Some(over as u32));
        let before = scene.segments();
        scene.carry(at, 1_000_000);
        let after = scene.segments();
        assert!(after[over] > before[over] + SOME && after[1 - over] == before[1 - over], "{before:?} {after:?}");
    }
    scene.drain();
    let statistics = scene.statistics();
    assert_eq!((statistics.lost, statistics.failed_moves, statistics.nic_starts), (0, 0, 2));
}

/// A device goes away: its NIC's connection has no route any more, and waits; the other one goes on. A device that
/// comes is the NIC's that has the fewest.
#[test]
fn devices_go_and_come() {
    let mut scene = Scene::with_both(two_nics());
    scene.offload_both();
    scene.carry_both(200_000);
    scene.drain();
    let before = scene.statistics();
    run(&scene.bed.host_a, "ip link delete second0");
    scene.carry(0, 2_000_000);
    wait_for("the device's end", || scene.statistics().nics[1].devices.is_empty());
    assert_eq!(scene.nic_of(0), Some(0));
    run(&scene.bed.host_a, "ip link add third0 type veth peer name third1");
    run(&scene.bed.host_a, "ip link set third0 up");
    wait_for("the new device", || scene.statistics().nics[1].devices == ["third0"]);
    let after = scene.statistics();
    assert_eq!([0, 1].map(|nic: usize| after.nics[nic].process), [0, 1].map(|nic: usize| before.nics[nic].process));
    // The same link again: its connection goes on where it was.
    run(&scene.bed.host_a, "ip link delete third0");
    let second = scene.second.take().expect("the second peer");
    second_link(&scene.bed, &second, "eth0");
    scene.second = Some(second);
    scene.carry(1, 1_000_000);
    scene.carry(0, 1_000_000);
    scene.drain();
    wait_for("the device's NIC", || scene.statistics().nics[1].devices == ["second0"]);
    scene.load_until("the connection's NIC", |scene| scene.nic_of(1) == Some(1));
    scene.drain();
}

/// The agent dies, and both NICs with it: the next agent recovers the connections of both, and hands them to the same
/// NICs.
#[test]
fn the_next_agent_takes_over_both_nics() {
    let mut scene = Scene::with_both(two_nics());
    for round in 0..3 {
        scene.offload_both();
        scene.carry_both(500_000);
        // One of them, in another round, where its route does not lead.
        if round == 1 {
            scene.ask_for_nic(0, 1);
        }
        let before = scene.statistics();
        process::signal(before.agent_process, SIGKILL).expect("a signal");
        scene.load_until("the next agent", |scene| {
            scene.bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(|now| now.agent_process != before.agent_process)
        });
        scene.load_until("the recovery", |scene| scene.statistics().recovered == 2);
        scene.carry_both(500_000);
        assert_eq!(scene.statistics().lost, 0);
    }
    scene.offload_both();
    assert_eq!([0, 1].map(|at| scene.nic_of(at)), [Some(0), Some(1)]);
    scene.carry_both(500_000);
    scene.drain();
}

/// Devices named at the start are dealt in turn, whatever their order in the system.
#[test]
fn named_devices_are_dealt_in_turn() {
    let devices = ["second0", "baton0"].map(String::from).to_vec();
    let mut scene = Scene::with_both(TestbedSettings { devices, ..two_nics() });
    scene.offload_both();
    assert_eq!([0, 1].map(|at| scene.nic_of(at)), [Some(1), Some(0)]);
    scene.carry_both(500_000);
    scene.drain();
}

/// Connections that each NIC has made.
fn made(bed: &Testbed) -> Vec<u64> {
    let statistics = bed.tool().and_then(|mut tool| tool.statistics()).expect("the statistics");
    statistics.nics.iter().map(|nic| nic.counters[Counter::Made as usize]).collect()
}

/// Full offload: clients of a listener are served by the NIC whose device has the address that they connect to, also
/// after one of the NICs has died.
#[test]
fn each_nic_makes_the_connections_at_its_addresses() {
    // The link has to be there until the test bed has ended.
    let second = Namespace::new().expect("a second peer");
    let bed = hosts(two_nics());
    second_link(&bed, &second, "eth0");
    let _server = full::start(&bed, &["python3", "-c", ECHO]);
    let connect = |link: usize| {
        let (peer, address) = [(&bed.host_b, address_a(false)), (&second, IpAddr::from(SECOND_A))][link];
        peer.run(|| TcpStream::connect_timeout(&SocketAddr::new(address, 7000), Duration::from_secs(10)))
    };
    let is_made_by = |nic: usize| {
        let before = made(&bed);
        let Ok(client) = connect(nic) else { return None };
        exchange(&client, 1);
        let after = made(&bed);
        (after[nic] == before[nic] + 1 && after[1 - nic] == before[1 - nic]).then_some(client)
    };
    let mut clients = Vec::new();
    for nic in [0, 1] {
        wait_for("a connection that the NIC has made", || {
            clients.extend(is_made_by(nic));
            clients.len() > nic
        });
    }
    let connections = || bed.tool().and_then(|mut tool| tool.connections()).expect("the connections");
    let of = |client: &TcpStream| {
        let peer = client.local_addr().expect("its address").to_string();
        connections().into_iter().find(|info| info.peer == peer).expect("it is listed")
    };
    assert_eq!([0, 1].map(|at: usize| of(&clients[at]).nic), [Some(0), Some(1)]);
    // A client of the first link connects to the second link's address: that NIC makes the connection, and the first
    // one gets it.
    run(&bed.host_b, &format!("ip route add {} via {}", IpAddr::from(SECOND_A), address_a(false)));
    let before = made(&bed);
    let at = SocketAddr::new(IpAddr::from(SECOND_A), 7000);
    let crossing = bed.host_b.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10))).expect("a connection");
    exchange(&crossing, 6);
    assert_eq!(made(&bed), [before[0], before[1] + 1]);
    wait_for("the NIC that its answers leave by", || of(&crossing).nic == Some(0));
    exchange(&crossing, 7);
    let before = bed.tool().and_then(|mut tool| tool.statistics()).expect("the statistics");
    process::signal(before.nics[1].process, SIGKILL).expect("a signal");
    exchange(&clients[0], 2);
    exchange(&clients[1], 3);
    assert_eq!(of(&clients[0]).nic, Some(0));
    assert!(is_made_by(0).is_some(), "the listener of the NIC that lives");
    let mut again = None;
    wait_for("the next NIC's listener", || {
        again = is_made_by(1);
        again.is_some()
    });
    exchange(&clients[0], 4);
    exchange(&clients[1], 5);
    let after = bed.tool().and_then(|mut tool| tool.statistics()).expect("the statistics");
    assert_eq!((after.nics[0].process, after.lost, after.failed_moves), (before.nics[0].process, 0, 0));
}

/// Connects to port 7000 of each host that it is given, and exchanges bytes over all connections until it has done so
/// for a while, and its input has ended.
const CLIENT: &str = "
import os, select, socket, sys, time
# With a time-out they are not in blocking mode, in which an attached program's connections stay in the kernel.
peers = [socket.create_connection((host, 7000), 60) for host in sys.argv[2:]]
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end or not select.select([sys.stdin], [], [], 0)[0]:
    for peer in peers:
        data = os.urandom(30000)
        peer.sendall(data)
        got = b''
        while len(got) < len(data): got += peer.recv(65536) or sys.exit('the end')
        if got != data: sys.exit('wrong bytes')
for peer in peers: peer.close()
print('ok')
";

/// A host with links to two peers that echo (10.90.0.2 by link0, 10.90.1.2 by link1), and these.
fn host_with_echoes() -> (Namespace, [Namespace; 2], Vec<full::Program>) {
    let (host, peers) = (Namespace::new().expect("a host"), [(); 2].map(|()| Namespace::new().expect("a peer")));
    run(&host, "ip link set lo up");
    let mut servers = Vec::new();
    for (at, peer) in peers.iter().enumerate() {
        let name = format!("link{at}");
        host.run(|| rtnetlink::add_veth(&rtnetlink::open()?, &name, "eth0", peer.as_fd())).expect("a link");
        for (of, name, last) in [(&host, &*name, 1), (peer, "eth0", 2)] {
            run(of, &format!("ip address add 10.90.{at}.{last}/24 dev {name}"));
            run(of, &format!("ip link set {name} up"));
        }
        let mut command = Command::new("python3");
        servers.push(full::Program(peer.spawn(command.args(["-c", ECHO])).expect("a server")));
        let server = SocketAddr::from(([10, 90, at as u8, 2], 7000));
        wait_for("the server", || host.run(|| TcpStream::connect(server)).is_ok());
    }
    (host, peers, servers)
}

/// The peers of connections that have been on a NIC, each with that NIC's number, by the agent of a program with its
/// temporary files in `scratch`: when there have been two.
fn seen_on_nics(scratch: &Scratch) -> BTreeSet<(String, u32)> {
    let mut seen = BTreeSet::new();
    wait_for("a connection on each NIC", || {
        let tool = agent_socket(scratch).and_then(|socket| Tool::connect(&socket).ok());
        let all = tool.and_then(|mut tool| tool.connections().ok()).unwrap_or_default();
        seen.extend(all.into_iter().filter_map(|info| Some((info.peer, info.nic?))));
        seen.len() >= 2
    });
    seen
}

/// An unmodified program with connections over two links, which move at random; it notices nothing, and nothing is
/// left.
#[test]
fn a_program_over_two_links_does_not_notice() {
    let (host, _peers, _servers) = host_with_echoes();
    let scratch = Scratch::new("two-links");
    let (log, report) = (scratch.file("log"), scratch.file("report"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--nics", "2", "--device", "link1", "--device", "link0", "--log", &log, "--flip", "1..20"]);
    command.args(["--flip-report", &report, "--", "python3", "-c", CLIENT, "0", "10.90.0.2", "10.90.1.2"]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    // It goes on until its output is waited for.
    command.stdin(Stdio::piped());
    let program = host.spawn(&mut command).expect("baton");
    // Each link's connection is on the NIC that it was dealt to.
    let expected = [("10.90.0.2:7000".to_string(), 1), ("10.90.1.2:7000".to_string(), 0)];
    assert_eq!(seen_on_nics(&scratch), BTreeSet::from(expected));
    until_moved(|| agent_socket(&scratch), 2, 11);
    let ran = program.wait_with_output().expect("its output");
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    assert!(ran.status.success() && said.is_empty(), "{}{}{said}", text(&ran.stdout), text(&ran.stderr));
    let report: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(report).expect("a report")).expect("JSON");
    assert_eq!((&report["resets"], &report["errors"]), (&0.into(), &0.into()), "{report}");
    assert!(report["moves"].as_u64().is_some_and(|moves| moves > 20), "{report}");
    let devices = || host.run(|| std::fs::read_to_string("/proc/thread-self/net/dev")).expect("the devices");
    let sockets = || host.run(|| std::fs::read_to_string("/proc/thread-self/net/packet")).expect("its packet sockets");
    wait_for("the end of Baton", || !devices().contains("baton") && sockets().lines().count() == 1);
}

/// A program that runs already is attached to by a Baton with two NICs, of which one dies.
#[test]
fn an_attached_program_over_two_links_does_not_notice() {
    let (host, _peers, _servers) = host_with_echoes();
    let scratch = Scratch::new("two-links-attached");
    let mut command = Command::new("python3");
    command.args(["-c", CLIENT, "5", "10.90.0.2", "10.90.1.2"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.stdin(Stdio::piped());
    let program = host.spawn(&mut command).expect("the program");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["attach", "--nics", "2", "--log", &scratch.file("log"), "--json", &program.id().to_string()]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let attacher = host.spawn(&mut command).expect("baton");
    let expected = [("10.90.0.2:7000".to_string(), 0), ("10.90.1.2:7000".to_string(), 1)];
    assert_eq!(seen_on_nics(&scratch), BTreeSet::from(expected));
    let mut tool = agent_socket(&scratch).and_then(|socket| Tool::connect(&socket).ok()).expect("its agent");
    let before = tool.statistics().expect("the statistics");
    process::signal(before.nics[1].process, SIGKILL).expect("a signal");
    wait_for("the recovery", || tool.statistics().expect("the statistics").recovered == 1);
    let all = tool.connections().expect("the connections");
    let nic_of = |peer: &str| all.iter().find(|info| info.peer == peer).expect("it is listed").nic;
    assert_eq!(nic_of("10.90.0.2:7000"), Some(0), "the other NIC's connection");
    let ran = program.wait_with_output().expect("its output");
    assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    assert!(attacher.wait_with_output().expect("its output").status.success());
}

/// A NIC, or the agent with both, dies after any step of a move of one connection between two NICs; the other
/// connection stays on its own.
#[test]
fn a_nic_or_the_agent_may_die_after_any_step_of_a_move_between_nics() {
    for (step, fault) in
        Step::OF_A_MOVE.into_iter().flat_map(|step| [Fault::NicDies, Fault::AgentDies].map(|fault| (step, fault)))
    {
        let crash = Some(Crash { after: step, fault });
        let mut scene = Scene::with_both(TestbedSettings { crash, ..two_nics() });
        scene.offload_both();
        let before = scene.statistics();
        for round in 0..6 {
            scene.carry_both(50_000);
            (0..2).for_each(|at| _ = scene.step(at, 60_000));
            scene.ask_for_nic(0, 1 - round % 2);
            scene.carry_both(50_000);
        }
        scene.drain();
        let after = scene.statistics();
        assert_eq!((after.lost, after.failed_moves), (0, 0), "after {step:?}: {fault:?}");
        let died = after.nic_starts > before.nic_starts || after.agent_process != before.agent_process;
        assert!(died, "nobody died after {step:?}");
    }
}

/// A program breaks the ring that it shares with the second NIC: it loses its session, and its connections go to the
/// kernel. Those of another program stay where they are, on both NICs.
#[test]
fn a_broken_ring_of_one_nic_ends_its_own_session_only() {
    let mut scene = Scene::with_both(two_nics());
    scene.offload_both();
    let hostile = Shared::connect(&scene.bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
    let memory = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", hostile.descriptors()[1]));
    let memory = Region::map(memory.expect("session memory").into()).expect("session memory");
    let before = scene.statistics();
    // The producer's index, further away than the ring is long.
    memory.words(session::area(1) + session::COMMANDS, 1)[0].store(1 << 40, Ordering::SeqCst);
    scene.load_until("the end of the session", |scene| scene.statistics().sessions == before.sessions - 1);
    scene.carry_both(500_000);
    scene.drain();
    assert_eq!([0, 1].map(|at| scene.nic_of(at)), [Some(0), Some(1)]);
    assert_eq!([0, 1].map(|at| scene.info(at).moves), [1; 2]);
    assert_eq!(scene.statistics().nic_starts, before.nic_starts);
}

/// Sessions for messages are the first NIC's, whichever device their packets take.
#[test]
fn messages_are_the_first_nics() {
    let mut scene = Scene::with_both(two_nics());
    scene.offload_both();
    let second = scene.second.as_ref().expect("a second peer");
    for (here, peer, there) in
        [(address_a(false), &scene.bed.host_b, address_b(false)), (IpAddr::from(SECOND_A), second, IpAddr::from(SECOND_PEER))]
    {
        let received = |scene: &Scene| {
            scene.statistics().nics.iter().map(|nic| nic.counters[Counter::WireReceived as usize]).collect::<Vec<u64>>()
        };
        let before = received(&scene);
        let packets = messages::exchange_between(&scene.bed, here, peer, there);
        let after = received(&scene);
        // The connections' peers may acknowledge something late.
        assert!(packets > 5 && after[0] > before[0] + 3, "{packets} packets; {before:?} {after:?}");
        assert!(after[1] <= before[1] + 3, "the second NIC has received them: {before:?} {after:?}");
    }
    scene.carry_both(500_000);
    scene.drain();
}

/// What cannot be is refused, with the reason and what to type.
#[test]
fn wrong_numbers_and_devices_are_refused() {
    let host = Namespace::new().expect("a host");
    let scratch = Scratch::new("refused");
    let socket = scratch.file("agent.sock");
    let refused = |arguments: &[&str], why: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(arguments).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let ran = host.spawn(&mut command).expect("baton").wait_with_output().expect("its output");
        assert!(ran.status.code() == Some(2) && text(&ran.stderr).contains(why), "{arguments:?}: {}", text(&ran.stderr));
    };
    let up = ["up", "--socket", &socket];
    for (further, why) in [
        (&["--nics", "0"][..], "a Baton has 1 to 4 NICs"),
        (&["--nics", "5"], "a Baton has 1 to 4 NICs"),
        (&["--device", "lo"], "add --nics 2"),
        (&["--nics", "2", "--device", "nosuch0"], "there is no such device here"),
        (&["--nics", "2", "--device", "lo", "--device", "lo"], "given twice"),
    ] {
        refused(&[&up, further].concat(), why);
        refused(&[&["run"], further, &["--", "true"]].concat(), why);
    }
    refused(&["hosts", "--nics", "2", "--", "true"], "`baton up --nics` starts several beside the kernel");
    // Of a Baton with two NICs there is no third.
    let scene = Scene::new(two_nics());
    let socket = scene.bed.socket();
    let path = socket.to_str().expect("a path");
    refused(&["nic", "show", "--nic", "2", "--socket", path], "this Baton has NICs 0 to 1");
    refused(&["nic", "set", "bell-usecs=50", "--nic", "7", "--socket", path], "this Baton has NICs 0 to 1");
}

/// Settings are all NICs' or one's, and stay that when the agent dies.
#[test]
fn settings_are_of_all_nics_or_of_one() {
    let scene = Scene::new(two_nics());
    let socket = scene.bed.socket();
    let baton = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        let ran = command.args(arguments).arg("--socket").arg(&socket).output().expect("baton");
        assert!(ran.status.success(), "{arguments:?}: {}", text(&ran.stderr));
        text(&ran.stdout)
    };
    let bells = || {
        [0, 1].map(|nic: u32| {
            let shown = baton(&["nic", "show", "--json", "--nic", &nic.to_string()]);
            let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
            assert_eq!((&shown["nics"][0]["nic"], shown["nics"].as_array().map(Vec::len)), (&nic.into(), Some(1)));
            shown["settings"]["bell-usecs"].as_str().expect("a setting").to_string()
        })
    };
    baton(&["nic", "set", "bell-usecs=70"]);
    assert_eq!(bells(), ["70", "70"]);
    baton(&["nic", "set", "bell-usecs=30", "--nic", "1"]);
    assert_eq!(bells(), ["70", "30"]);
    let before = scene.statistics();
    process::signal(before.agent_process, SIGKILL).expect("a signal");
    wait_for("the next agent", || {
        scene.bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(|now| now.agent_process != before.agent_process)
    });
    assert_eq!(bells(), ["70", "30"]);
    assert!(baton(&["nic", "show"]).contains("baton0"), "the NICs' devices are shown");
}

/// An address of Baton's own belongs to the NIC whose device it is reached by: full offload makes its connections
/// there.
#[test]
fn an_own_address_is_served_by_the_nic_of_its_device() {
    let address = IpAddr::from([10, 77, 0, 50]);
    // Host A's first link is the second NIC's.
    let devices = ["second0", "baton0"].map(String::from).to_vec();
    let addresses = vec![OwnAddress { address, prefix: 24 }];
    let bed = hosts(TestbedSettings { devices, addresses, between_probes: 50_000, ..two_nics() });
    let settled = bed.tool().expect("a tool").ask(Ask::Addresses { settled: true }).expect("an answer");
    assert!(matches!(&settled, Reply::Addresses(all) if all[0].standing == Standing::Used), "{settled:?}");
    let _server = full::start(&bed, &["python3", "-c", ECHO]);
    let at = SocketAddr::new(address, 7000);
    let connect = || bed.host_b.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10)));
    let mut client = None;
    wait_for("a connection that the NIC has made", || {
        let before = made(&bed);
        client = connect().ok();
        client.iter_mut().for_each(|client| exchange(client, 1));
        let after = made(&bed);
        assert_eq!(after[0], before[0], "the other NIC has made it");
        client.is_some() && after[1] == before[1] + 1
    });
    let before = bed.tool().and_then(|mut tool| tool.statistics()).expect("the statistics");
    process::signal(before.nics[1].process, SIGKILL).expect("a signal");
    client.iter_mut().for_each(|client| exchange(client, 2));
    wait_for("the next NIC's listener", || {
        let before = made(&bed);
        connect().is_ok_and(|client| {
            exchange(&client, 3);
            made(&bed)[1] == before[1] + 1
        })
    });
}
