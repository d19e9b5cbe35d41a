//! `baton nic attach`: large receive in front of a device that the kernel keeps, on a veth between two hosts without
//! Baton.

use crate::common::{self, wait_until};
use baton_backends::VnetDevice;
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, MAC_A, MAC_B, TestbedSettings, address_a, address_b, counter, without_baton};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_linux::interface::TapOptions;
use baton_linux::namespace::{Namespace, mount_own_sysfs};
use baton_linux::tcp_info::TcpInfo;
use baton_linux::{interface, process, rtnetlink};
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use baton_sim::stream;
use baton_steering::front::{Front, Path};
use baton_wire::frame::{Header, MAX_HEADER, TCP_CHECKSUM, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const KEY: u64 = 77;
const PIECE: usize = 1 << 17;

/// Where segments are taken.
const PATHS: [&str; 2] = ["path=xdp", "path=tc"];

/// Two hosts. Host B cuts what it sends into segments itself, as a host behind a cable does. One processor receives all
/// of host A's frames, as by a card's only queue: a veth receives on the processor that sends, and frames that two have
/// sent overtake each other.
fn hosts() -> [Namespace; 2] {
    let [a, b] = without_baton(&TestbedSettings::default()).expect("two test hosts (root is needed)");
    b.run(|| interface::set_segmentation(INTERFACE_B, false)).expect("segmentation off");
    a.run(|| interface::set_gro(INTERFACE_A, false)).expect("GRO off");
    let receiver = process::allowed_cpus().into_iter().max().expect("a processor");
    let steer = || {
        mount_own_sysfs()?;
        std::fs::write(format!("/sys/class/net/{INTERFACE_A}/queues/rx-0/rps_cpus"), format!("{:x}", 1u64 << receiver))
    };
    a.run(steer).expect("receive packet steering (CONFIG_RPS)");
    [a, b]
}

fn baton(host: &Namespace, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    let command = command.args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
    host.spawn(command).expect("baton").wait_with_output().expect("its end")
}

/// Runs a command that must fail, and returns what it says.
fn refused(host: &Namespace, words: &[&str]) -> String {
    let output = baton(host, words);
    assert!(!output.status.success(), "{words:?} worked");
    String::from_utf8(output.stderr).expect("text")
}

/// `baton nic attach` on host A.
struct Attached {
    /// The first line that it printed.
    first: String,
    process: Child,
    says: BufReader<ChildStdout>,
}

impl Attached {
    fn new(host: &Namespace, settings: &[&str]) -> Attached {
        Attached::start(host, Command::new(env!("CARGO_BIN_EXE_baton")).args(["nic", "attach", INTERFACE_A]).args(settings))
    }

    fn start(host: &Namespace, command: &mut Command) -> Attached {
        let mut process = host.spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped())).expect("baton nic attach");
        let mut says = BufReader::new(process.stdout.take().expect("its output"));
        let mut line = String::new();
        says.read_line(&mut line).expect("a line");
        if !line.starts_with("attached to") {
            let _ = process.kill();
            let ended = process.wait_with_output().expect("its end");
            panic!("it said {line:?}, {}", String::from_utf8_lossy(&ended.stderr));
        }
        Attached { first: line, process, says }
    }

    fn signal(&self, signal: i32) {
        process::signal(self.process.id(), signal).expect("a signal");
    }

    /// Waits for its end. Returns whether that was orderly, and what it said meanwhile.
    fn ended(mut self) -> (bool, String) {
        let mut text = String::new();
        self.says.read_to_string(&mut text).expect("output");
        self.process.stderr.take().expect("errors").read_to_string(&mut text).expect("errors");
        (self.process.wait().expect("its end").success(), text)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What the only attached process answers.
fn answer(host: &Namespace) -> serde_json::Value {
    let output = baton(host, &["nic", "attach", "--list", "--json"]);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut all: Vec<serde_json::Value> = serde_json::from_str(&text).expect("JSON");
    assert_eq!(all.len(), 1, "{text}");
    all.remove(0)
}

fn figures(host: &Namespace) -> serde_json::Value {
    answer(host)["figures"].take()
}

fn figure(host: &Namespace, name: &str) -> u64 {
    figures(host)[name].as_u64().expect("a number")
}

/// Progress of a transfer from host B to host A.
#[derive(Default)]
struct Progress {
    received: AtomicU64,
    stop: AtomicBool,
    sender: OnceLock<TcpStream>,
    /// The sender's most time-outs one after the other that were seen since it was last taken.
    timeouts: AtomicU8,
}

impl Progress {
    fn await_bytes(&self, more: u64) {
        let goal = self.received.load(Ordering::Relaxed) + more;
        wait_until("the transfer goes on", || {
            if let Some(sender) = self.sender.get() {
                let waits = TcpInfo::read(sender.as_fd()).expect("TCP_INFO").retransmits;
                self.timeouts.fetch_max(waits, Ordering::Relaxed);
            }
            self.received.load(Ordering::Relaxed) >= goal
        });
    }

    fn take_timeouts(&self) -> u8 {
        self.timeouts.swap(0, Ordering::Relaxed)
    }
}

/// Ends a transfer whose test fails in the middle of it.
struct EndsOnPanic<'a>(&'a Progress);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::Relaxed);
        }
    }
}

fn send(mut connection: TcpStream, most: u64, progress: &Progress) {
    let mut piece = vec![0; PIECE];
    let mut sent = 0;
    while sent < most && !progress.stop.load(Ordering::Relaxed) {
        stream::fill(KEY, sent, &mut piece);
        connection.write_all(&piece).expect("the connection breaks");
        sent += PIECE as u64;
    }
    connection.shutdown(Shutdown::Write).expect("the end of the stream");
}

fn receive(mut connection: TcpStream, progress: &Progress) {
    let mut buffer = vec![0; PIECE];
    loop {
        let got = connection.read(&mut buffer).expect("the connection breaks");
        let received = progress.received.load(Ordering::Relaxed);
        assert_eq!(stream::mismatches(KEY, received, &buffer[..got]), 0, "wrong bytes after {received}");
        progress.received.store(received + got as u64, Ordering::Relaxed);
        if got == 0 {
            return;
        }
    }
}

/// Sends up to `most` bytes from host B to host A while `meanwhile` runs, and checks them.
fn transfer([a, b]: [&Namespace; 2], address: IpAddr, most: u64, meanwhile: impl FnOnce(&Progress)) -> u64 {
    let listener = a.run(|| TcpListener::bind(SocketAddr::new(address, 0))).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let client = b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    let (server, _) = listener.accept().expect("its other end");
    server.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
    let progress = Progress::default();
    progress.sender.set(client.try_clone().expect("a duplicate")).expect("the only sender");
    std::thread::scope(|scope| {
        scope.spawn(|| send(client, most, &progress));
        let receiver = scope.spawn(|| receive(server, &progress));
        let guard = EndsOnPanic(&progress);
        meanwhile(&progress);
        drop(guard);
        receiver.join().expect("every byte");
    });
    progress.received.into_inner()
}

/// Segments that host B has sent, and has sent again.
fn sent(b: &Namespace) -> [u64; 2] {
    ["OutSegs", "RetransSegs"].map(|name| counter(b, "snmp", "Tcp:", name).expect("a counter"))
}

/// Names of a host's devices.
fn devices(host: &Namespace) -> usize {
    host.run(|| rtnetlink::links(&rtnetlink::open()?)).expect("its links").len()
}

#[test]
fn segments_are_merged_and_none_is_lost_or_reordered() {
    for path in PATHS {
        for (ipv6, mode) in [(false, "lro=in-order"), (true, "lro=in-order"), (false, "lro=reorder")] {
            merges(ipv6, &[mode, path]);
        }
    }
}

/// Transfers 200 MB, and checks that they were merged, and nothing lost or overtaken. The process goes before all
/// others, since one that gets no processor for a while is passed by, which is another test's matter. And the sender
/// has fewer segments in flight than the veth's queue takes while its receiver gets no processor.
fn merges(ipv6: bool, settings: &[&str]) {
    const BYTES: u64 = 200 << 20;
    let hosts = hosts();
    let limit = || std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 262144");
    hosts[0].run(limit).expect("small receive windows");
    let before = sent(&hosts[1]);
    let gaps = || counter(&hosts[0], "netstat", "TcpExt:", "TCPOFOQueue").expect("a counter");
    let gaps_before = gaps();
    let command = ["chrt", "--fifo", "1", env!("CARGO_BIN_EXE_baton"), "nic", "attach", INTERFACE_A];
    let attached = Attached::start(&hosts[0], Command::new(command[0]).args(&command[1..]).args(settings));
    let received = transfer(hosts.each_ref(), address_a(ipv6), BYTES, |_| ());
    assert_eq!(received, BYTES);
    let after = sent(&hosts[1]);
    let gaps = gaps() - gaps_before;
    let figures = figures(&hosts[0]);
    drop(attached);
    let [taken, given, aggregates, lapses] =
        ["taken", "given", "aggregates", "lapses"].map(|name| figures[name].as_u64().expect("a number"));
    let (segments, again) = (after[0] - before[0], after[1] - before[1]);
    let full = || {
        let netlink = rtnetlink::open()?;
        rtnetlink::dropped_sends(&netlink, rtnetlink::link(&netlink, INTERFACE_B)?.index)
    };
    let lost = hosts[1].run(full).expect("a counter");
    println!(
        "{settings:?} IPv6 {ipv6}: {segments} segments, {lost} lost on the wire, {again} again, {gaps} behind a gap; {figures}"
    );
    // What was lost or overtaken leaves a gap. A sender whose acknowledgements are late sends again what has arrived,
    // up to a window of it: on a busy machine that says nothing. Nor does what the veth loses there while its receiver
    // gets no processor: a window of segments comes behind each.
    const WINDOW: u64 = 200;
    assert_eq!(lapses, 0, "the process was passed by");
    assert!(taken * 10 > segments * 9, "of {segments} segments only {taken} were taken");
    assert!(given * 8 < taken && aggregates > 0, "{taken} in, {given} out");
    assert!(gaps < segments / 1000 + WINDOW * lost, "{gaps} of {segments} segments came behind a gap");
}

/// A small message and its answer do not wait for the process.
#[test]
fn small_messages_pass() {
    PATHS.iter().for_each(|path| small_messages(path));
}

fn small_messages(path: &str) {
    let hosts = hosts();
    let attached = Attached::new(&hosts[0], &[path]);
    let [a, b] = &hosts;
    let listener = a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 0))).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let mut client = b.run(|| TcpStream::connect(address)).expect("a connection");
    let (mut server, _) = listener.accept().expect("its other end");
    for _ in 0..1000 {
        let mut message = [0; 64];
        client.write_all(&message).expect("a request");
        server.read_exact(&mut message).expect("the request");
        server.write_all(&message).expect("an answer");
        client.read_exact(&mut message).expect("the answer");
    }
    assert_eq!(figure(a, "taken"), 0);
    drop(attached);
}

/// The transfer goes on at once when the process is killed, and within a third of a second when it is stopped. It
/// merges again when it goes on, or the next one does.
#[test]
fn a_dead_process_is_passed_by() {
    PATHS.iter().for_each(|path| dies(path));
}

fn dies(path: &str) {
    let hosts = hosts();
    let before = devices(&hosts[0]);
    let mut attached = Attached::new(&hosts[0], &[path]);
    transfer(hosts.each_ref(), address_a(false), u64::MAX, |progress| {
        for round in 0..2 {
            progress.await_bytes(30 << 20);
            let taken = figure(&hosts[0], "taken");
            progress.take_timeouts();
            attached.signal(libc::SIGSTOP);
            progress.await_bytes(60 << 20);
            println!("{path}, round {round}: stopped, {} time-outs", progress.take_timeouts());
            let error = refused(&hosts[0], &["nic", "attach", "--list"]);
            assert!(error.contains("does not answer"), "{error}");
            attached.signal(libc::SIGCONT);
            progress.await_bytes(60 << 20);
            assert!(figure(&hosts[0], "taken") > taken, "it takes nothing after it was stopped");
            progress.take_timeouts();
            attached.signal(libc::SIGKILL);
            progress.await_bytes(60 << 20);
            let timeouts = progress.take_timeouts();
            println!("{path}, round {round}: killed, {timeouts} time-outs");
            // A sender that lost its last segments waits for a time-out. If frames went nowhere for long, it would wait
            // for a third.
            assert!(timeouts < 3, "{timeouts} time-outs one after the other after it was killed");
            attached.process.wait().expect("its end");
            // In a driver there can be only one program: the last one's is gone.
            attached = Attached::new(&hosts[0], &[path]);
        }
        progress.stop.store(true, Ordering::Relaxed);
    });
    drop(attached);
    assert_eq!(devices(&hosts[0]), before, "a device was left behind");
}

#[test]
fn detaching_and_changes_of_the_device_disturb_nothing() {
    changes("path=tc", &[9000, 1500, 1400]);
    changes("path=xdp", &[1400, 9000]);
}

/// What a driver's program does not get in one piece is taken at the ingress.
const LARGE_MTU: u32 = 9000;

fn changes(path: &str, mtus: &[u32]) {
    let hosts = hosts();
    let before = devices(&hosts[0]);
    let sent_before = sent(&hosts[1]);
    transfer(hosts.each_ref(), address_a(false), u64::MAX, |progress| {
        for &mtu in mtus {
            let attached = Attached::new(&hosts[0], &[path]);
            assert!(attached.first.contains(path), "{}", attached.first);
            progress.await_bytes(30 << 20);
            for (host, name) in hosts.iter().zip([INTERFACE_A, INTERFACE_B]) {
                let set = || {
                    let netlink = rtnetlink::open()?;
                    let link = rtnetlink::link(&netlink, name)?;
                    rtnetlink::set_up(&netlink, link.index, None, Some(mtu))?;
                    rtnetlink::add_address(&netlink, link.index, IpAddr::from([10, 78, 0, 1]), 24)
                };
                host.run(set).expect("another MTU and another address");
            }
            let taken = figure(&hosts[0], "taken");
            progress.await_bytes(30 << 20);
            assert!(figure(&hosts[0], "taken") > taken, "it takes nothing with an MTU of {mtu}");
            let taken_at = answer(&hosts[0])["path"].to_string();
            assert_eq!(taken_at.contains("tc"), path == "path=tc" || mtu == LARGE_MTU, "{taken_at}");
            progress.take_timeouts();
            let output = baton(&hosts[0], &["nic", "detach", INTERFACE_A]);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let (orderly, text) = attached.ended();
            assert!(orderly && text.contains("detached from"), "{text}");
            assert_eq!(devices(&hosts[0]), before, "a device was left behind");
            progress.await_bytes(30 << 20);
            let timeouts = progress.take_timeouts();
            println!("{path}, MTU {mtu}: {timeouts} time-outs; {text}");
            assert!(timeouts < 3, "{timeouts} time-outs one after the other after the detach");
        }
        progress.stop.store(true, Ordering::Relaxed);
    });
    if path == "path=xdp" {
        let attached = Attached::new(&hosts[0], &[path]);
        assert!(attached.first.contains("path=tc (an MTU of 9000 is too large for XDP"), "{}", attached.first);
    }
    let after = sent(&hosts[1]);
    let (segments, again) = (after[0] - sent_before[0], after[1] - sent_before[1]);
    println!("{again} of {segments} segments were sent again");
    // Of a sender whose acknowledgements are late this is up to a window for each time-out.
    assert!(again * 20 < segments, "{again} of {segments} segments were sent again");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let hosts = hosts();
    let host = &hosts[0];
    for (words, says) in [
        (&["nic", "attach", "nosuch0"][..], "no device nosuch0"),
        (&["nic", "attach", "lo"], "loopback"),
        (&["nic", "attach", "a-name-longer-than-any-device-has"], "no device a-name-longer"),
        (&["nic", "attach", INTERFACE_A, "tso=on"], "no setting of large receive"),
        (&["nic", "attach", INTERFACE_A, "lro-usec=5"], "known are path, lro, lro-push"),
        (&["nic", "attach", INTERFACE_A, "eth1"], "write KEY=VALUE"),
        (&["nic", "attach", INTERFACE_A, "lro-usecs=5ms"], "from 1 to 100000 (microseconds)"),
        (&["nic", "attach", INTERFACE_A, "lro=off"], "nothing would be merged"),
        (&["nic", "attach", INTERFACE_A, "lro=maybe"], "off, in-order, reorder"),
        (&["nic", "attach", INTERFACE_A, "path=maybe"], "auto, xdp, tc"),
        (&["nic", "detach", INTERFACE_A], "nothing is attached"),
        (&["nic", "detach", "nosuch0"], "no device nosuch0"),
    ] {
        let error = refused(host, words);
        assert!(error.contains(says) && !error.contains("os error"), "{words:?}: {error}");
    }
    let output = baton(host, &["nic", "attach", "--list"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "nothing is attached in this network namespace\n");
    let attached = Attached::new(host, &["lro=reorder", "lro-usecs=300"]);
    let error = refused(host, &["nic", "attach", INTERFACE_A]);
    assert!(error.contains("another `baton nic attach` (process"), "{error}");
    let output = baton(host, &["nic", "attach", "--list"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("lro=reorder lro-usecs=300") && text.contains(INTERFACE_A), "{text}");
    drop(attached);
    // What was killed is in nobody's way.
    drop(Attached::new(host, &[]));
}

#[test]
fn it_ends_with_its_device() {
    PATHS.iter().for_each(|path| ends_with_its_device(path));
}

fn ends_with_its_device(path: &str) {
    let hosts = hosts();
    let attached = Attached::new(&hosts[0], &[path]);
    // The other end of a veth goes with the namespace of this one.
    let [host_a, host_b] = hosts;
    drop(host_b);
    let (orderly, text) = attached.ended();
    assert!(!orderly && text.contains("is gone"), "{text}");
    drop(host_a);
}

/// Moved to another namespace, a device goes on as without it, though the program in its driver may go with it.
#[test]
fn a_device_that_is_moved_away_goes_on() {
    for path in PATHS {
        let [a, b] = hosts();
        let attached = Attached::new(&a, &[path]);
        let elsewhere = Namespace::new().expect("a namespace");
        let index = a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, INTERFACE_A)?.index)).expect("the device");
        let there = format!("/proc/{}/fd/{}", std::process::id(), elsewhere.as_fd().as_raw_fd());
        run(&a, "ip", &format!("link set {INTERFACE_A} netns {there}"));
        let (orderly, text) = attached.ended();
        assert!(!orderly && text.contains("is gone: it was removed, or is in another namespace"), "{text}");
        let up = || {
            let netlink = rtnetlink::open()?;
            let link = rtnetlink::link(&netlink, INTERFACE_A)?;
            rtnetlink::set_up(&netlink, link.index, None, None)?;
            rtnetlink::add_address(&netlink, link.index, address_a(false), 24)
        };
        elsewhere.run(up).unwrap_or_else(|error| panic!("device {index}: {error}"));
        let received = transfer([&elsewhere, &b], address_a(false), 20 << 20, |_| ());
        assert_eq!(received, 20 << 20);
    }
}

/// A hang-up does not end it if its parent has it ignored, as nohup(1) does.
#[test]
fn a_hang_up_ends_it_unless_it_is_to_be_ignored() {
    let [host, _b] = hosts();
    let attached = Attached::start(
        &host,
        Command::new("nohup").args([env!("CARGO_BIN_EXE_baton"), "nic", "attach", INTERFACE_A]).stdin(Stdio::null()),
    );
    attached.signal(libc::SIGHUP);
    // It looks at signals before it answers.
    for _ in 0..2 {
        assert_eq!(answer(&host)["device"], INTERFACE_A);
    }
    attached.signal(libc::SIGTERM);
    assert!(attached.ended().0);
    // These tests may run under nohup(1) themselves.
    let attached = Attached::start(
        &host,
        Command::new("env").args(["--default-signal=HUP", env!("CARGO_BIN_EXE_baton"), "nic", "attach", INTERFACE_A]),
    );
    attached.signal(libc::SIGHUP);
    assert!(attached.ended().0);
}

/// A device is listed by the name that it has now, and with the settings' names.
#[test]
fn a_renamed_device_is_listed_by_its_new_name() {
    let [host, _b] = hosts();
    let attached = Attached::new(&host, &["lro-usecs=300"]);
    for words in [["down", ""], ["name", "wan0"], ["up", ""]] {
        let name = if words[0] == "up" { "wan0" } else { INTERFACE_A };
        run(&host, "ip", format!("link set {name} {}", words.join(" ")).trim_end());
    }
    run(&host, "ip", "link property add dev wan0 altname a-long-alternative-name");
    let listed = answer(&host);
    assert_eq!(listed["device"], "wan0");
    assert_eq!(listed["settings"]["lro-usecs"], "300", "{listed}");
    let text = output(&host, Command::new(env!("CARGO_BIN_EXE_baton")).args(["nic", "attach", "--list"]));
    assert!(text.starts_with("wan0: process"), "{text}");
    let error = refused(&host, &["nic", "detach", INTERFACE_A]);
    assert!(error.contains("no device") && error.contains("--list"), "{error}");
    let text = output(&host, Command::new(env!("CARGO_BIN_EXE_baton")).args(["nic", "detach", "a-long-alternative-name"]));
    assert!(text.contains("detached from"), "{text}");
    assert!(attached.ended().0);
}

/// One process that does not answer hides no other from the list.
#[test]
fn a_stopped_process_hides_no_other() {
    let [host, _b] = hosts();
    let tap = host.run(|| interface::open_tap("tap0", TapOptions::default())).expect("a second device");
    let stopped = Attached::new(&host, &[]);
    let other = Attached::start(&host, Command::new(env!("CARGO_BIN_EXE_baton")).args(["nic", "attach", "tap0"]));
    stopped.signal(libc::SIGSTOP);
    for json in [&[][..], &["--json"]] {
        let listed = baton(&host, &[&["nic", "attach", "--list"], json].concat());
        let (text, error) = (String::from_utf8_lossy(&listed.stdout), String::from_utf8_lossy(&listed.stderr));
        assert!(!listed.status.success() && text.contains("tap0"), "{text}{error}");
        assert!(error.contains(&format!("attached to {INTERFACE_A}, does not answer")), "{error}");
    }
    drop((stopped, other, tap));
}

/// Ends a child that a test has started.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Listens as a user at names of its network namespace until its input ends, in a process that the one with the
/// listener's id leaves behind.
const LISTENS: &str = "import os, socket, sys
def listen(name):
    at = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    at.bind('\\0baton-nic-attach/' + name)
    at.listen()
    return at
os.setuid(int(sys.argv[1]))
all = [listen(name) for name in sys.argv[2:]]
if os.fork() == 0:
    print(os.getpid(), flush=True)
    sys.stdin.read()";

/// Starts that, and returns the process id that a client sees, which is that of a process that has ended, and what
/// keeps it going.
fn listening(host: &Namespace, user: u32, names: &[String]) -> (u32, ChildStdin) {
    let mut command = Command::new("python3");
    command.args(["-c", LISTENS, &user.to_string()]).args(names).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut listener = host.spawn(&mut command).expect("python3");
    let holds_it = listener.stdin.take().expect("its input");
    let mut line = String::new();
    BufReader::new(listener.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    assert!(listener.wait().expect("its end").success() && !line.is_empty(), "it does not listen");
    (listener.id(), holds_it)
}

fn index_of(host: &Namespace, device: &str) -> u32 {
    host.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, device)?.index)).expect("the device")
}

/// Any user can listen at any name. That keeps nobody from attaching, and is not listed.
#[test]
fn a_user_that_may_not_attach_is_in_nobodys_way() {
    let [host, _b] = hosts();
    let index = index_of(&host, INTERFACE_A);
    let names = [format!("{index}"), format!("{index}/0123456789abcdef"), "99/0123456789abcdef".into()];
    let _listens = listening(&host, 65534, &names);
    let output = baton(&host, &["nic", "attach", "--list"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "nothing is attached in this network namespace\n");
    let attached = Attached::new(&host, &[]);
    let listed = String::from_utf8(baton(&host, &["nic", "attach", "--list", "--json"]).stdout).expect("text");
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    assert!(listed.as_array().is_some_and(|all| all.len() == 1 && all[0]["device"] == INTERFACE_A), "{listed}");
    drop(attached);
}

/// Any process can get the process id of one that has ended and has left its socket to others. A detach must not end
/// that.
#[test]
fn a_detach_ends_no_stranger() {
    let [host, _b] = hosts();
    let name = format!("{}/0123456789abcdef", index_of(&host, INTERFACE_A));
    let tap = host.run(|| interface::open_tap("tap0", TapOptions::default())).expect("a TAP");
    run(&host, "ip", &format!("link set tap0 alias baton-nic-attach/{name}"));
    let (number, _holds_it) = listening(&host, 0, &[name]);
    // Waits: until the kernel gives the number to this child; other tests start processes, too.
    let stranger = (0..1000).find_map(|_| {
        std::fs::write("/proc/sys/kernel/ns_last_pid", (number - 1).to_string()).expect("root");
        let child = Killed(Command::new("sleep").arg("60").spawn().expect("sleep"));
        (child.0.id() == number).then_some(child)
    });
    let mut stranger = stranger.expect("a process with the number of the one that has ended");
    let error = refused(&host, &["nic", "detach", INTERFACE_A]);
    assert!(error.contains(&format!("process {number}")) && error.contains("has ended"), "{error}");
    assert_eq!(stranger.0.try_wait().expect("its state"), None, "a process that has nothing to do with it was ended");
    drop(tap);
}

/// A user that may not detach it sees why.
#[test]
fn another_user_cannot_detach_it() {
    let [host, _b] = hosts();
    let attached = Attached::new(&host, &[]);
    // The directory of the program need not be readable for others.
    let program = std::env::temp_dir().join(format!("baton-detach-{}", std::process::id()));
    std::fs::copy(env!("CARGO_BIN_EXE_baton"), &program).expect("a copy of the program");
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program).args(["nic", "detach", INTERFACE_A]);
    let ended = host.spawn(command.stderr(Stdio::piped())).and_then(|child| child.wait_with_output());
    std::fs::remove_file(&program).expect("the copy");
    let error = String::from_utf8(ended.expect("baton").stderr).expect("text");
    assert!(error.contains("run as root, or as the user that attached it"), "{error}");
    drop(attached);
}

/// Runs a program that must work, and returns what it prints.
fn output(host: &Namespace, command: &mut Command) -> String {
    let ended = host.spawn(command.stdout(Stdio::piped())).and_then(|child| child.wait_with_output()).expect("a program");
    assert!(ended.status.success(), "{command:?}");
    String::from_utf8(ended.stdout).expect("text")
}

/// Runs a program of Debian's packages iproute2 and iputils-ping.
fn run(host: &Namespace, program: &str, arguments: &str) {
    let status =
        host.spawn(Command::new(program).args(arguments.split(' ')).stdout(Stdio::null())).and_then(|mut child| child.wait());
    assert!(status.expect(program).success(), "{program} {arguments}");
}

/// Where another program is in the driver, that stays, and segments are taken at the ingress.
#[test]
fn another_program_in_the_driver_stays() {
    let hosts = hosts();
    let host = &hosts[0];
    let make = || {
        let tap = interface::open_tap("tap0", TapOptions::default())?;
        let netlink = rtnetlink::open()?;
        let index = |name| rtnetlink::link(&netlink, name).map(|link| link.index);
        Ok((tap, index("tap0")?, index(INTERFACE_A)?))
    };
    let (_tap, to, at) = host.run(make).expect("a TAP");
    let other = || host.run(|| Front::attach(Path::Driver, at, to));
    let there = other().expect("a program in the driver");
    let attached = Attached::new(host, &["path=xdp"]);
    assert!(attached.first.contains("path=tc (another XDP program is attached"), "{}", attached.first);
    assert_eq!(transfer(hosts.each_ref(), address_a(false), 20 << 20, |_| ()), 20 << 20);
    assert!(figure(host, "taken") > 1000, "it takes nothing at the ingress");
    let error = other().expect_err("the program in the driver is gone");
    assert!(error.to_string().contains("another XDP program"), "{error}");
    drop((attached, there));
    let attached = Attached::new(host, &["path=xdp"]);
    assert!(attached.first.ends_with("path=xdp\n"), "{}", attached.first);
    let links = output(host, Command::new("ip").args(["link", "show", INTERFACE_A]));
    assert!(links.contains("name baton"), "nobody can tell whose program this is: {links}");
    other().expect_err("a second program in the driver");
    drop(attached);
    let attached = Attached::new(host, &[]);
    assert!(attached.first.contains("path=tc (on a veth XDP takes large sends from its peer"), "{}", attached.first);
}

/// Between kernel and wire, too, where frames have whole checksums: a damaged segment is not merged, and not believed.
#[test]
fn damaged_segments_are_not_merged() {
    const BYTES: u64 = 20 << 20;
    // Of a million frames.
    let link = LinkSettings { corrupt: 1000, ..LinkSettings::default() };
    let bed = common::hosts(TestbedSettings { link, gro: false, ..TestbedSettings::default() });
    let attached = Attached::new(&bed.host_a, &["path=xdp"]);
    assert!(attached.first.ends_with("path=xdp\n"), "{}", attached.first);
    let damaged = || counter(&bed.host_a, "snmp", "Tcp:", "InCsumErrors").expect("a counter");
    let before = damaged();
    assert_eq!(transfer([&bed.host_a, &bed.host_b], address_a(false), BYTES, |_| ()), BYTES);
    let figures = figures(&bed.host_a);
    println!("{} damaged; {figures}", damaged() - before);
    assert!(damaged() > before, "no damaged segment reached the kernel");
    assert!(figures["aggregates"].as_u64().expect("a number") > 0, "{figures}");
}

/// What is no TCP passes a program in the driver as it is; so do large frames, which its peer cuts itself as long as it
/// is there.
#[test]
fn other_traffic_passes() {
    let [a, b] = without_baton(&TestbedSettings::default()).expect("two test hosts (root is needed)");
    let attached = Attached::new(&a, &["path=xdp"]);
    for ipv6 in [false, true] {
        run(&b, "ping", &format!("-q -c 5 -i 0.01 -s 1400 {}", address_a(ipv6)));
        let receiver = a.run(|| UdpSocket::bind(SocketAddr::new(address_a(ipv6), 0))).expect("a socket");
        receiver.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
        let sender = b.run(|| UdpSocket::bind(SocketAddr::new(address_b(ipv6), 0))).expect("a socket");
        // The last is sent in fragments.
        for length in [1, 1000, 1400, 8000] {
            for round in 0..20u8 {
                let datagram = vec![round; length];
                sender.send_to(&datagram, receiver.local_addr().expect("an address")).expect("a datagram sent");
                let mut buffer = vec![0; 9000];
                let got = receiver.recv(&mut buffer).expect("a datagram");
                assert_eq!(buffer[..got], datagram);
            }
        }
    }
    assert_eq!(figure(&a, "taken"), 0);
    assert_eq!(transfer([&a, &b], address_a(false), 100 << 20, |_| ()), 100 << 20);
    assert!(figure(&a, "aggregates") > 0);
    drop(attached);
}

/// Large frames at a TAP pass, and so does what else their connection sends: it must not be overtaken by them.
#[test]
fn connections_with_large_frames_pass() {
    const BYTES: u64 = 200 << 20;
    let bed = common::hosts(TestbedSettings::default());
    let attached = Attached::new(&bed.host_a, &["path=xdp"]);
    assert!(attached.first.ends_with("path=xdp\n"), "{}", attached.first);
    let begin = Instant::now();
    assert_eq!(transfer([&bed.host_a, &bed.host_b], address_a(false), BYTES, |_| ()), BYTES);
    let (taken, took) = (figure(&bed.host_a, "taken"), begin.elapsed());
    println!("{taken} taken, {took:?}");
    assert!(taken < 200 && took < Duration::from_secs(20), "{taken} taken, {took:?}");
}

/// Beside it another Baton's NIC has connections of its own at the device: every byte arrives wherever they are.
#[test]
fn a_connection_on_a_nic_beside_it_gets_everything() {
    for path in PATHS {
        let mut scene = common::scene(TestbedSettings { beside: true, gro: false, ..TestbedSettings::default() });
        scene.bed.host_b.run(|| interface::set_segmentation(INTERFACE_B, false)).expect("segmentation off");
        let attached = Attached::new(&scene.bed.host_a, &[path]);
        for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
            scene.exchange(2 << 20, to);
        }
        let taken = figure(&scene.bed.host_a, "taken");
        assert!(taken > 1000, "{path}: {taken} taken");
        drop(attached);
        scene.exchange(2 << 20, Place::Nic);
    }
}

/// A frame that is tagged for a VLAN passes a program in the driver, with the tag beside it: its segments are not this
/// network's.
#[test]
fn segments_of_a_vlan_are_not_taken() {
    const SENT: u64 = 100;
    let [a, b] = hosts();
    let attached = Attached::new(&a, &["path=xdp"]);
    // The kernel takes the tags out of the frames of a TAP, and hands them on beside the frames.
    let make = || {
        let tap = interface::open_tap("tap0", TapOptions::default())?;
        let netlink = rtnetlink::open()?;
        rtnetlink::set_up(&netlink, rtnetlink::link(&netlink, "tap0")?.index, None, None)?;
        Ok(VnetDevice::new(tap, false))
    };
    let mut tap = b.run(make).expect("a TAP");
    run(&b, "tc", "qdisc add dev tap0 ingress");
    let forward = "filter add dev tap0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev";
    run(&b, "tc", &format!("{forward} {INTERFACE_B}"));
    let mut send = |tag: &[u8]| {
        for number in 0..SENT {
            let mut frame = Frame::with_capacity(MAX_FRAME);
            frame.fill(&segment(tag, number as u32));
            assert!(tap.transmit(&mut frame));
        }
    };
    let mut sent = 0;
    let deadline = Instant::now() + Duration::from_secs(20);
    while figure(&a, "taken") < SENT / 2 {
        assert!(Instant::now() < deadline, "it takes nothing without a tag: {}", figures(&a));
        send(&[0x81, 0, 0, 5]);
        send(&[]);
        sent += SENT;
    }
    let taken = figure(&a, "taken");
    assert!(taken < sent, "{taken} taken, {sent} sent without a tag");
    drop(attached);
}

/// A segment of 1000 bytes from host B to host A, with a VLAN tag if there is one.
fn segment(tag: &[u8], number: u32) -> Vec<u8> {
    const PAYLOAD: usize = 1000;
    let flow = Flow { local: Endpoint::v4([10, 7, 7, 2], 80), remote: Endpoint::v4([10, 7, 7, 1], 4000), device: 0 };
    let link = baton_wire::frame::Link { destination: MAC_A, source: MAC_B, ttl: 64, ..Default::default() };
    let template = Template::new(&flow, &link, false);
    let options = TcpOptions::default();
    let seq = 1 + number * PAYLOAD as u32;
    let header = Header { seq, ack: 1, flags: Flags::ACK, window: 9, options: &options, ecn: 0, ident: number as u16 };
    let mut bytes = vec![0; MAX_HEADER + PAYLOAD];
    let headers = template.emit(&header, PAYLOAD, &mut bytes);
    bytes.truncate(headers + PAYLOAD);
    finish_checksum(&mut bytes, template.tcp_offset(), TCP_CHECKSUM);
    [&bytes[..12], tag, &bytes[12..]].concat()
}
