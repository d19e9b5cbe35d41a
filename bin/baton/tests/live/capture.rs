//! `baton capture`: a connection before, during and after its moves, and what goes wrong.

use crate::common::{Scene, hosts, scene, sent_again, wait_until};
use baton_bed::testbed::{Testbed, TestbedSettings, counter};
use baton_linux::process::signal;
use baton_protocol::program::Place;
use baton_wire::Glance;
use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketOption;
use pcap_file::pcapng::{Block, PcapNgReader};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};

/// A capture that runs.
struct Capture {
    child: Child,
    errors: BufReader<ChildStderr>,
    file: PathBuf,
}

fn command(bed: &Testbed, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("capture").arg("--socket").arg(bed.socket()).args(arguments).env_remove("BATON_SOCKET");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts one, and returns it when it runs.
fn start(bed: &Testbed, name: &str, arguments: &[&str]) -> Capture {
    let file = std::env::temp_dir().join(format!("baton-capture-{name}-{}.pcapng", std::process::id()));
    let path = file.to_str().expect("a path");
    let mut child = command(bed, &[&["-w", path], arguments].concat()).spawn().expect("baton");
    let mut errors = BufReader::new(child.stderr.take().expect("its errors"));
    let mut line = String::new();
    errors.read_line(&mut line).expect("a line");
    assert!(line.starts_with("capturing to "), "{line}");
    Capture { child, errors, file }
}

/// A frame in a file.
#[derive(Debug)]
struct Seen {
    interface: u32,
    glance: Glance,
    captured: usize,
    comments: Vec<String>,
}

fn read(file: &Path) -> Vec<Seen> {
    let bytes = std::fs::read(file).expect("a file");
    let mut reader = PcapNgReader::new(&bytes[..]).expect("pcapng");
    let (mut frames, mut last) = (Vec::new(), None);
    while let Some(block) = reader.next_block() {
        let Block::EnhancedPacket(packet) = block.expect("a block") else { continue };
        assert!(last <= Some(packet.timestamp), "back in time");
        last = Some(packet.timestamp);
        let comments = packet.options.iter().filter_map(|option| match option {
            EnhancedPacketOption::Comment(text) => Some(text.to_string()),
            _ => None,
        });
        let comments = comments.collect();
        let glance = Glance::at(&packet.data, packet.original_len as usize);
        frames.push(Seen { interface: packet.interface_id, glance, captured: packet.data.len(), comments });
    }
    frames
}

impl Capture {
    /// Ends it. Returns what it has said, and what it has written.
    fn end(mut self) -> (String, Vec<Seen>) {
        // It may have ended.
        let _ = signal(self.child.id(), libc::SIGINT);
        let mut said = String::new();
        self.errors.read_to_string(&mut said).expect("text");
        assert!(self.child.wait().expect("its end").success(), "{said}");
        let frames = read(&self.file);
        std::fs::remove_file(&self.file).expect("removed");
        (said, frames)
    }
}

fn dropped(said: &str) -> u64 {
    let line = said.lines().find(|line| line.contains("dropped by the NIC")).unwrap_or_else(|| panic!("{said}"));
    line.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

fn comments(frames: &[Seen]) -> String {
    frames.iter().flat_map(|frame| frame.comments.iter().map(|comment| format!("{comment}\n"))).collect()
}

/// Whether the program's host, and the peer, have sent anything again: for the former the peer's kernel shows it,
/// which reports what it gets twice (RFC 2883). A connection that moves counts anew in the kernel.
fn sent_again_by(scene: &Scene) -> [bool; 2] {
    let twice = ["TCPDSACKOldSent", "TCPDSACKOfoSent"].map(|name| counter(&scene.bed.host_b, "netstat", "TcpExt", name));
    [twice.into_iter().any(|count| count.expect("a counter") > 0), sent_again(&scene.peer) > 0]
}

/// Checks that each byte of both directions is there, and once unless something was sent again. What the kernel sends
/// in the middle of a move may never leave, and follows later.
fn check_sequence(scene: &Scene, frames: &[Seen], sent_again: [bool; 2]) {
    for (from_server, sent) in [(true, scene.sent[0]), (false, scene.sent[1])] {
        let of = |frame: &Seen| {
            let packet = frame.glance.packet.filter(|packet| (packet.source.port == 8080) == from_server)?;
            packet.segment.filter(|segment| segment.length > 0)
        };
        let segments: Vec<_> = frames.iter().filter_map(|frame| Some((of(frame)?, frame))).collect();
        let first = segments.first().expect("data").0.seq;
        let mut places: Vec<(u64, u64)> = Vec::new();
        for (segment, frame) in &segments {
            assert_eq!(frame.captured, frame.glance.headers, "payload: {frame:?}");
            let begin = u64::from(segment.seq.wrapping_sub(first));
            places.push((begin, begin + u64::from(segment.length)));
        }
        places.sort_unstable();
        let (mut end, mut twice) = (0, 0);
        for (begin, next) in places {
            assert!(begin <= end, "{} bytes are missing at {end} of {sent}, server: {from_server}", begin - end);
            twice += end.min(next) - begin;
            end = end.max(next);
        }
        assert_eq!(end, sent, "bytes, server: {from_server}");
        assert!(twice == 0 || sent_again[usize::from(!from_server)], "{twice} bytes are there twice, server: {from_server}");
    }
}

/// Moves a connection there and back under load, and checks what was captured.
fn watch_moves(name: &str, settings: TestbedSettings) {
    let mut scene = scene(settings);
    let capture = start(&scene.bed, name, &["--kernel"]);
    scene.fill(20_000);
    scene.drain();
    for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
        scene.exchange(40_000, to);
    }
    let (said, frames) = capture.end();
    assert_eq!(dropped(&said), 0, "{said}");
    check_sequence(&scene, &frames, sent_again_by(&scene));
    let data = |interface| {
        let of = |frame: &&Seen| frame.glance.packet.and_then(|packet| packet.segment).is_some_and(|one| one.length > 0);
        frames.iter().filter(of).filter(|frame| frame.interface == interface).count()
    };
    assert!(data(0) > 0 && data(1) > 0, "on the NIC {} segments, in the kernel {}", data(0), data(1));
    let comments = comments(&frames);
    let count = |words: &str| comments.matches(words).count() + said.matches(words).count();
    assert_eq!((count("moved to the NIC in"), count("moved to the kernel in")), (2, 2), "{comments}{said}");
    assert!(comments.contains("moved to the NIC in"), "{said}");
}

#[test]
fn each_byte_is_there_once_before_during_and_after_moves() {
    watch_moves("inline", TestbedSettings::default());
}

#[test]
fn each_byte_is_there_once_with_two_workers() {
    watch_moves("workers", TestbedSettings { workers: 2, ..TestbedSettings::default() });
}

#[test]
fn each_byte_is_there_once_beside_the_kernel() {
    watch_moves("beside", TestbedSettings { beside: true, ..TestbedSettings::default() });
}

#[test]
fn a_capture_that_stands_still_costs_frames_which_are_counted_and_the_nic_nothing() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    let capture = start(&scene.bed, "slow", &["--payload"]);
    signal(capture.child.id(), libc::SIGSTOP).expect("SIGSTOP");
    // Three times what its ring has room for.
    while scene.sent[0] < 3 * u64::from(baton_capture::RING) {
        scene.fill(100_000);
        scene.drain();
    }
    signal(capture.child.id(), libc::SIGCONT).expect("SIGCONT");
    let (said, frames) = capture.end();
    assert!(dropped(&said) > 0 && !frames.is_empty(), "{said}");
    assert!(frames.iter().any(|frame| frame.captured > frame.glance.headers), "no payload");
    assert_eq!(scene.settled_place(), Some(Place::Nic));
}

#[test]
fn a_capture_goes_on_when_a_nic_or_the_agent_dies() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    let mut capture = start(&scene.bed, "deaths", &["--kernel"]);
    let statistics = |scene: &Scene| scene.bed.tool().and_then(|mut tool| tool.statistics());
    let agent = statistics(&scene).expect("statistics").agent_process;
    scene.fill(10_000);
    scene.drain();
    let place = |scene: &Scene| {
        scene.bed.tool().and_then(|mut tool| tool.connections()).ok().and_then(|list| list.first().map(|one| one.place))
    };
    // The agent first: with it ends what it knows of a NIC's death.
    signal(agent, libc::SIGKILL).expect("SIGKILL");
    let next = |scene: &Scene| statistics(scene).is_ok_and(|now| now.agent_process != agent) && place(scene) == Some(Place::Nic);
    wait_until("it is on the next agent's NIC", || next(&scene));
    let mut line = String::new();
    capture.errors.read_line(&mut line).expect("a line");
    assert!(line.contains("the capture goes on with the next one"), "{line}");
    scene.fill(10_000);
    scene.drain();
    let nic = statistics(&scene).expect("statistics").nic_process;
    signal(nic, libc::SIGKILL).expect("SIGKILL");
    let next_nic = |scene: &Scene| statistics(scene).is_ok_and(|now| now.nic_process != nic) && place(scene) == Some(Place::Nic);
    wait_until("it is on the next NIC", || next_nic(&scene));
    let marked = scene.sent;
    scene.fill(10_000);
    scene.drain();
    let (said, frames) = capture.end();
    let comments = comments(&frames) + &said;
    assert!(comments.contains("the NIC died: somebody killed it"), "{comments}");
    let seen: u64 = frames.iter().filter_map(|frame| frame.glance.packet?.segment).map(|one| u64::from(one.length)).sum();
    assert!(seen >= scene.sent[0] - marked[0] + 20_000, "{seen} bytes: the next NICs' are missing");
}

#[test]
fn captures_that_are_killed_leave_nothing_and_so_many_run_at_a_time() {
    let bed = hosts(TestbedSettings::default());
    for round in 0..2 {
        let mut running: Vec<_> = (0..4).map(|one| start(&bed, &format!("many-{one}"), &[])).collect();
        let refused = command(&bed, &["-w", "/dev/null"]).output().expect("baton");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(refused.status.code() == Some(2) && said.contains("which is the most at a time"), "{round}: {said}");
        for capture in &mut running {
            signal(capture.child.id(), libc::SIGKILL).expect("SIGKILL");
            capture.child.wait().expect("its end");
            std::fs::remove_file(&capture.file).expect("removed");
        }
        // The agent sees their ends soon.
        let free = || command(&bed, &["-w", "/dev/null", "--seconds", "1"]).output().is_ok_and(|ran| ran.status.success());
        wait_until("there is room again", free);
    }
}

#[test]
fn what_goes_wrong_is_said() {
    let bed = hosts(TestbedSettings::default());
    let cases: [(&[&str], &str); 4] = [
        (&["tcp", "prot", "80"], "the filter \"tcp prot 80\": "),
        (&["-w", "/nowhere/file"], "writing /nowhere/file: No such file or directory"),
        (&["-w", "/dev/full", "--seconds", "1"], "capturing to /dev/full: "),
        (&["--count", "0"], "invalid value '0'"),
    ];
    for (arguments, words) in cases {
        let ran = command(&bed, arguments).output().expect("baton");
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.code() == Some(2) && said.contains(words), "{arguments:?}: {said}");
    }
    let ran = command(&bed, &["-w", "/dev/full", "--seconds", "1"]).output().expect("baton");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("No space left on device"));
    // Somebody else, whom the agent knows.
    let ran = command(&bed, &[]).uid(65534).gid(65534).output().expect("baton");
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.code() == Some(2) && said.contains("only root may look at frames"), "{said}");
}

#[test]
fn lines_are_filtered_and_counted() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    let mut child = command(&scene.bed, &["--count", "3", "src", "port", "8080"]).spawn().expect("baton");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let mut got = Vec::new();
    wait_until("three lines", || {
        // The first ones may pass before it looks.
        scene.fill(100);
        scene.drain();
        child.try_wait().expect("a child").is_some()
    });
    got.extend(lines.by_ref().map(|line| line.expect("a line")));
    let frames: Vec<_> = got.iter().filter(|line| line.contains("Flags [")).collect();
    assert_eq!(frames.len(), 3, "{got:?}");
    assert!(frames.iter().all(|line| line.contains(" nic    Out ") && line.contains(":8080 > ")), "{got:?}");
}
