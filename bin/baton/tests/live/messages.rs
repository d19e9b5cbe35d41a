//! Messages (RMPP): the data half on the NIC, in part there, or in the program; NICs that die, peers that start anew,
//! programs that are refused or end.

use crate::common::{hosts, wait_until};
use crate::hostile_client::kinds::messages;
use baton_abi::layout::{Counter, session};
use baton_bed::testbed::{self, TestbedSettings};
use baton_client::messages::{Endpoint, Settings};
use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::namespace::Namespace;
use baton_protocol::program::{Answer, Ask, Messages, Opening, Reply, Request};
use baton_ring::{Consumer, Producer};
use baton_rmpp::{Halves, Memory, Outgoing, Region};
use baton_shm::RingWords;
use baton_sim::Rng;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;

/// Runs this Baton; it must succeed. Returns the JSON objects that it printed.
fn baton(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).output().expect("baton runs");
    let (out, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {out} {errors}");
    out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[test]
fn messages_come_right_wherever_the_halves_are() {
    for (offload, mtu, most_events) in
        [("none", "1500", 1.0), ("receive", "1500", 0.7), ("both", "1500", 0.15), ("both", "9000", 0.2)]
    {
        let sizes = ["0,1,1000,1432,100000", "0,1,1000,8932,1000000"][usize::from(mtu == "9000")];
        let arguments = ["rmpp", "pingpong", "--offload", offload, "--mtu", mtu, "--sizes", sizes, "--rounds", "5", "--json"];
        let cells = baton(&arguments);
        assert_eq!(cells.len(), 5);
        for cell in &cells {
            assert_eq!(cell["mismatches"], 0, "{cell}");
            let (packets, on_nic) = (cell["packets"].as_u64().unwrap(), cell["packets_on_nic"].as_u64().unwrap());
            match offload {
                "none" => assert!(on_nic == 0 && packets > 0, "{cell}"),
                "both" => assert!(on_nic == packets && packets > 0, "{cell}"),
                _ => assert!(on_nic > 0 && on_nic < packets, "{cell}"),
            }
        }
        let largest = cells.last().unwrap();
        assert!(largest["events_per_packet"].as_f64().unwrap() <= most_events, "{largest}");
        if offload == "both" {
            assert!(
                largest["copies_per_byte"].as_f64().unwrap() < 0.2,
                "the program copies what an RTS carried, no more: {largest}"
            );
        }
    }
}

#[test]
fn no_message_is_lost_with_a_nic_or_comes_to_the_wrong_peer() {
    let faults = ["--loss", "1", "--reorder", "2", "--duplicate", "1", "--corrupt", "0.1"];
    for (seed, mtu) in [("1", "1500"), ("2", "9000")] {
        let mut arguments =
            vec!["soak", "--rmpp", "--json", "--messages", "4000", "--kill-nic", "6", "--kill-agent", "2", "--restart-peer", "1"];
        arguments.extend(faults);
        arguments.extend(["--seed", seed, "--mtu", mtu]);
        let report = &baton(&arguments)[0];
        assert_eq!((&report["kills"], &report["replacements"]), (&8.into(), &8.into()), "{report}");
        assert_eq!((&report["mismatches"], &report["disordered"]), (&0.into(), &0.into()), "{report}");
    }
}

fn settings(bed: &testbed::Testbed, ip: IpAddr) -> Settings {
    settings_at(bed, SocketAddr::new(ip, 0))
}

pub(crate) fn settings_at(bed: &testbed::Testbed, address: SocketAddr) -> Settings {
    Settings {
        address,
        ethernet: None,
        on_nic: Halves::BOTH,
        agent: bed.socket(),
        packet: 1472,
        early: 0,
        nic_buffers: 256,
        memory: 1 << 20,
        messages: 16,
        posted_on_nic: 0,
        hash_key: [1, 2, 3, 4],
        incarnation: 1,
    }
}

/// The same endpoint without the NIC.
pub(crate) fn in_the_program(settings: &Settings) -> Settings {
    Settings { on_nic: Halves::default(), ..settings.clone() }
}

/// Opens an endpoint on host A, which must be refused for a reason that has `why` in it.
pub(crate) fn refused(bed: &testbed::Testbed, settings: &Settings, why: &str) {
    let opened = bed.host_a.run(|| Ok(Endpoint::new(settings).err().map(|error| error.to_string()))).expect("host A");
    let reason = opened.expect("it is refused");
    assert!(reason.contains(why), "{reason}");
}

#[test]
fn an_endpoint_is_admitted_with_its_address_and_goes_with_its_program() {
    let bed = hosts(TestbedSettings::default());
    let sessions = || bed.tool().unwrap().statistics().unwrap().sessions;
    let before = sessions();
    let mine = testbed::address_a(false);
    let good = settings(&bed, mine);
    refused(&bed, &settings(&bed, IpAddr::from([0, 0, 0, 0])), "bind the UDP socket to an address");
    refused(&bed, &Settings { packet: 100, ..good.clone() }, "packets of 100 bytes");
    refused(&bed, &Settings { messages: 10_000, ..good.clone() }, "messages in each direction");
    let halves = Halves { receiving: false, sending: true };
    refused(&bed, &Settings { on_nic: halves, ..good.clone() }, "no sending half without the receiving one");
    let theirs =
        bed.host_b.run(|| Ok(Endpoint::new(&settings(&bed, testbed::address_b(false))).err().map(|error| error.to_string())));
    assert!(theirs.expect("host B").is_some_and(|reason| reason.contains("UDP socket")), "a socket of another namespace");
    wait_until("no session of those that were refused is left", || sessions() == before);
    let endpoints: Vec<_> = (0..20).map(|_| bed.host_a.run(|| Endpoint::new(&good)).expect("an endpoint")).collect();
    assert_eq!(sessions(), before + 20);
    drop(endpoints);
    wait_until("no session of programs that have ended is left", || sessions() == before);
}

#[test]
fn beside_the_kernel_half_a_data_half_is_refused() {
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let good = settings(&bed, testbed::address_a(false));
    refused(&bed, &Settings { on_nic: Halves { receiving: true, sending: false }, ..good.clone() }, "both halves");
    bed.host_a.run(|| Endpoint::new(&good)).expect("both halves");
}

/// Messages beside the kernel, with several workers, over IPv6, and matched by the NIC: with NICs that die and a peer
/// that starts anew.
#[test]
fn messages_survive_nics_in_every_shape() {
    let faults = ["--loss", "1", "--reorder", "2", "--duplicate", "1", "--corrupt", "0.1"];
    let common =
        ["soak", "--rmpp", "--json", "--messages", "3000", "--kill-nic", "5", "--kill-agent", "1", "--restart-peer", "1"];
    for (faulty, shape) in [
        (false, &["--beside"][..]),
        (false, &["--beside", "--ipv6", "--match-on-nic", "64"]),
        (true, &["--workers", "3"]),
        (true, &["--workers", "2", "--one-queue", "--ipv6"]),
        (true, &["--match-on-nic", "64"]),
        // Fewer than are posted: the NIC has no room, time and again.
        (true, &["--match-on-nic", "8", "--workers", "3"]),
    ] {
        let mut arguments = common.to_vec();
        arguments.extend(faults.iter().filter(|_| faulty));
        arguments.extend(shape);
        let report = &baton(&arguments)[0];
        assert_eq!((&report["kills"], &report["replacements"]), (&6.into(), &6.into()), "{report}");
        assert_eq!((&report["mismatches"], &report["disordered"]), (&0.into(), &0.into()), "{report}");
    }
}

#[test]
fn messages_are_handled_by_the_nic_in_every_shape() {
    for shape in [
        &["--beside"][..],
        &["--beside", "--ipv6"],
        &["--workers", "3"],
        &["--ipv6", "--match-on-nic", "64"],
        &["--encapsulation", "ethernet"],
        &["--encapsulation", "ethernet", "--workers", "2"],
    ] {
        let mut arguments = vec!["rmpp", "pingpong", "--offload", "both", "--sizes", "0,1412,100000", "--rounds", "5", "--json"];
        arguments.extend(shape);
        for cell in baton(&arguments) {
            assert_eq!(cell["mismatches"], 0, "{shape:?} {cell}");
            assert!(cell["packets"].as_u64() > Some(0) && cell["packets"] == cell["packets_on_nic"], "{shape:?} {cell}");
        }
    }
}

/// Two endpoints of host A, each of which a worker of its own has, and packets of either never reach the other.
#[test]
fn sessions_are_divided_among_workers() {
    let bed = hosts(TestbedSettings { workers: 2, card: true, ..TestbedSettings::default() });
    let good = Settings { posted_on_nic: 4, ..settings(&bed, testbed::address_a(false)) };
    let mut near: Vec<_> = (0..4).map(|_| bed.host_a.run(|| Endpoint::new(&good)).expect("an endpoint")).collect();
    let far = Settings { on_nic: Halves::default(), ..settings(&bed, testbed::address_b(false)) };
    let mut far: Vec<_> = (0..4).map(|_| bed.host_b.run(|| Endpoint::new(&far)).expect("an endpoint")).collect();
    for (at, (near, far)) in near.iter_mut().zip(&mut far).enumerate() {
        exchange(near, far, at as u64);
        assert!(near.usage().packets_on_nic > 0 && near.matches_on_nic());
    }
    assert_eq!(bed.tool().unwrap().statistics().unwrap().nic_starts, 1);
}

/// A NIC that matches is killed while receives are posted: the next one has them again, and gives them messages in
/// their order.
#[test]
fn the_next_nic_matches_what_was_posted_before() {
    const COUNT: u64 = 8;
    let bed = hosts(TestbedSettings::default());
    let near = Settings { posted_on_nic: 32, ..settings(&bed, testbed::address_a(false)) };
    let mut near = bed.host_a.run(|| Endpoint::new(&near)).expect("an endpoint");
    let far = Settings { on_nic: Halves::default(), ..settings(&bed, testbed::address_b(false)) };
    let mut far = bed.host_b.run(|| Endpoint::new(&far)).expect("an endpoint");
    exchange(&mut near, &mut far, 99);
    let (here, there) = (near.heap()[0], far.heap()[0]);
    for token in 0..COUNT {
        let region = Region { offset: here + token * 4096, length: 4096 };
        let request = baton_rmpp::Request { source: None, context: 0, tag: 5, ignore: 0, region, token };
        near.receive(request, monotonic_micros()).expect("a receive");
    }
    let begin = monotonic_micros();
    let killed = bed.tool().unwrap().statistics().unwrap().nic_process;
    baton_linux::process::signal(killed, 9).expect("the NIC");
    while near.usage().nic_deaths == 0 || !near.matches_on_nic() {
        near.progress(monotonic_micros()).expect("the endpoint");
        assert!(monotonic_micros() < begin + 20_000_000, "no other NIC matches");
        near.wait(monotonic_micros(), monotonic_micros() + 1000).expect("sleep");
    }
    let peer = far.peer(near.address()).expect("a peer");
    for token in 0..COUNT {
        far.memory().write(there + token * 4096, &[token as u8 + 1; 4096]);
        let region = Region { offset: there + token * 4096, length: 4096 };
        far.send(Outgoing { peer, context: 0, tag: 5, data: token, region, token }, monotonic_micros()).expect("a send");
    }
    let mut received = Vec::new();
    while (received.len() as u64) < COUNT {
        far.progress(monotonic_micros()).expect("the endpoint");
        near.progress(monotonic_micros()).expect("the endpoint");
        received.extend(std::iter::from_fn(|| near.poll_completion()));
        assert!(monotonic_micros() < begin + 40_000_000, "{} messages came", received.len());
        near.wait(monotonic_micros(), monotonic_micros() + 1000).expect("sleep");
    }
    let mut pairs: Vec<_> = received.iter().map(|one| (one.token, one.result.expect("delivered").data)).collect();
    pairs.sort_unstable();
    assert_eq!(pairs, (0..COUNT).map(|token| (token, token)).collect::<Vec<_>>());
    for token in 0..COUNT {
        let mut bytes = [0; 4096];
        assert!(near.memory().read(here + token * 4096, &mut bytes) && bytes == [token as u8 + 1; 4096]);
    }
}

/// Opens an endpoint on the NIC of host A, and one on another host that its NIC has no part in, and sends a message.
/// Returns the packets that the NIC has handled.
pub(crate) fn exchange_between(bed: &testbed::Testbed, here: IpAddr, peer: &Namespace, there: IpAddr) -> u64 {
    let mut near = bed.host_a.run(|| Endpoint::new(&settings(bed, here))).expect("an endpoint");
    let far = Settings { on_nic: Halves::default(), ..settings(bed, there) };
    let mut far = peer.run(|| Endpoint::new(&far)).expect("an endpoint");
    exchange(&mut near, &mut far, 1);
    near.usage().packets_on_nic
}

/// Sends a message from `far` to `near`, and waits for both completions.
pub(crate) fn exchange(near: &mut Endpoint, far: &mut Endpoint, token: u64) {
    let [here, there] = [near.heap()[0], far.heap()[0]];
    let length = 10_000;
    let now = monotonic_micros();
    let peer = far.peer(near.address()).expect("a peer");
    far.memory().write(there, &[token as u8 + 1; 10_000]);
    let request =
        baton_rmpp::Request { source: None, context: 0, tag: token, ignore: 0, region: Region { offset: here, length }, token };
    near.receive(request, now).expect("a receive");
    let region = Region { offset: there, length };
    far.send(Outgoing { peer, context: 0, tag: token, data: 0, region, token }, now).expect("a send");
    let mut ended = [false; 2];
    while ended != [true; 2] {
        for (ended, endpoint) in ended.iter_mut().zip([&mut *near, &mut *far]) {
            endpoint.progress(monotonic_micros()).expect("the endpoint");
            while let Some(completion) = endpoint.poll_completion() {
                *ended |= completion.token == token && completion.result.is_ok();
                assert!(completion.result.is_ok(), "{completion:?}");
            }
        }
        assert!(monotonic_micros() < now + 20_000_000, "message {token} does not come");
        near.wait(monotonic_micros(), monotonic_micros() + 1000).expect("sleep");
    }
    let mut bytes = [0; 10_000];
    assert!(near.memory().read(here, &mut bytes) && bytes == [token as u8 + 1; 10_000]);
}

/// The peer's link address changes, then its route goes and comes back, all while an endpoint has sent there before.
#[test]
fn routes_and_neighbours_are_followed() {
    for (beside, ipv6) in [(false, false), (true, true)] {
        let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
        let (here, there) = (testbed::address_a(ipv6), testbed::address_b(ipv6));
        let mut near = bed.host_a.run(|| Endpoint::new(&Settings { packet: 1452, ..settings(&bed, here) })).expect("an endpoint");
        let far = Settings { on_nic: Halves::default(), packet: 1452, ..settings(&bed, there) };
        let mut far = bed.host_b.run(|| Endpoint::new(&far)).expect("an endpoint");
        exchange(&mut near, &mut far, 1);
        let run = |host: &baton_linux::namespace::Namespace, command: &str| {
            let status = host.run(|| Command::new("sh").args(["-c", command]).status()).expect("a shell");
            assert!(status.success(), "{command}");
        };
        let family = if ipv6 { "-6" } else { "-4" };
        // The NIC must send to the new address: its frames to the old one are nobody's.
        run(&bed.host_b, "ip link set dev eth0 address 02:00:00:77:77:77");
        run(&bed.host_a, &format!("ip {family} neighbour replace {there} dev baton0 lladdr 02:00:00:77:77:77 nud permanent"));
        exchange(&mut near, &mut far, 2);
        run(&bed.host_a, &format!("ip {family} route add unreachable {there}"));
        // Waits: for so long messages have no way; if that is shorter, less is tried.
        run(&bed.host_a, &format!("sleep 0.2; ip {family} route delete unreachable {there}"));
        exchange(&mut near, &mut far, 3);
    }
}

/// A program that opens a session for messages and writes into its rings what it likes.
struct Hostile {
    channel: Channel,
    commands: Producer<RingWords>,
    events: Consumer<RingWords>,
    _memory: Arc<baton_shm::Region>,
    _socket: UdpSocket,
}

impl Hostile {
    fn open(bed: &testbed::Testbed) -> Hostile {
        let ip = testbed::address_a(false);
        let socket = bed.host_a.run(|| UdpSocket::bind((ip, 0))).expect("a socket");
        let channel = Channel::connect(&bed.socket()).expect("the agent");
        let messages = Messages { address: SocketAddr::new(IpAddr::from([8, 8, 8, 8]), 53), ..messages() };
        let opening = Opening { messages: Some(messages), ..Opening::alone() };
        channel.send(&Request { tag: 1, body: Ask::Open(opening) }, &[socket.as_fd()]).expect("a request");
        let (answer, descriptors): (Answer, Vec<OwnedFd>) = channel.receive().expect("an answer");
        assert!(matches!(answer.body, Reply::Opened { .. }), "{answer:?}");
        let memory = Arc::new(baton_shm::Region::map(descriptors.into_iter().next().expect("memory")).expect("memory"));
        let commands = Producer::new(memory.ring(session::COMMANDS));
        let events = Consumer::new(memory.ring(session::EVENTS));
        Hostile { channel, commands, events, _memory: memory, _socket: socket }
    }

    /// Sends a record once there is room, and rings nobody: the NIC looks by itself for as long as it is awake.
    fn send(&mut self, record: &baton_records::Record) {
        wait_until("the NIC takes commands", || {
            let taken = baton_records::push(&mut self.commands, record).is_ok();
            if !taken {
                self.commands.publish();
                while self.events.pop().is_some() {}
                self.events.release();
            }
            taken
        });
        self.commands.publish();
    }
}

/// Records of random words, most of them nearly commands, harm neither the NIC nor others; a part of a record ends the
/// session.
#[test]
fn a_program_that_writes_nonsense_harms_itself_only() {
    let bed = hosts(TestbedSettings::default());
    let mut hostile = Hostile::open(&bed);
    hostile.send(&baton_records::begin(1));
    let mut rng = Rng::new(9);
    for _ in 0..20_000 {
        let mut record: baton_records::Record = std::array::from_fn(|_| match rng.below(4) {
            0 => rng.next_u64(),
            1 => session::HEAP as u64 + rng.below(1 << 32),
            _ => rng.below(16) | rng.below(16) << 16 | rng.below(16) << 32,
        });
        record[0] = rng.below(18);
        hostile.send(&record);
    }
    let statistics = bed.tool().unwrap().statistics().unwrap();
    assert_eq!(statistics.nic_starts, 1, "the NIC lives");
    assert!(statistics.counters[Counter::BadMessages as usize] > 0, "some records were no commands");
    let mut other = Hostile::open(&bed);
    other.send(&baton_records::begin(1));
    assert!(!other.channel.is_hung_up());
    other.commands.push([3, 0]).expect("room");
    other.commands.publish();
    wait_until("a session with a torn record ends", || other.channel.is_hung_up());
    assert_eq!(bed.tool().unwrap().statistics().unwrap().nic_starts, 1);
}
