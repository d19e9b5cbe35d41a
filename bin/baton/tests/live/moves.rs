//! Moves of real kernel connections in every state and condition.

use crate::common::{
    KEYS, Scene, answered, connect, hosts, kernel_repeats, scene, scene_at, scene_in, unacknowledged, wait_for, wait_until,
};
use baton_agent::{Crash, Fault, Step};
use baton_bed::testbed::{self, TestbedSettings, address_b};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_fuzz::setting;
use baton_linux::namespace::Namespace;
use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_offloads::{DuringMoves, Offloads};
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::{Ask, Place, Reply};
use baton_sim::stream;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

fn lossy() -> LinkSettings {
    LinkSettings { delay: 2000, loss: 10_000, reorder: 20_000, hold: 1000, seed: 5, ..LinkSettings::default() }
}

fn back_and_forth(scene: &mut Scene, bytes: u64) {
    for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
        scene.exchange(bytes, to);
    }
}

#[test]
fn bytes_are_equal_over_ipv4_and_ipv6_and_at_every_mtu() {
    for (mtu, ipv6) in [(576, false), (1500, false), (1500, true), (9000, false), (9000, true)] {
        let mut scene = scene_at(TestbedSettings { mtu, ..TestbedSettings::default() }, ipv6, 8080);
        back_and_forth(&mut scene, 300_000);
    }
}

/// The NIC's wire is a packet socket on a veth, with partial checksums and frames of 64 KB.
#[test]
fn bytes_are_equal_over_a_packet_socket() {
    for ipv6 in [false, true] {
        let settings = TestbedSettings { packet_socket: true, ..TestbedSettings::default() };
        back_and_forth(&mut scene_at(settings, ipv6, 8080), 2_000_000);
    }
}

/// With receive threads the kernel still processes frames from before the steal while its sockets are read.
#[test]
fn bytes_are_equal_with_receive_threads() {
    let mut scene = scene(TestbedSettings { threaded_napi: true, ..TestbedSettings::default() });
    for to in [Place::Nic, Place::Kernel].into_iter().cycle().take(100) {
        scene.send(100_000);
        scene.peer_sends(100_000);
        scene.move_to(to);
        scene.send(100_000);
        scene.peer_sends(100_000);
        scene.receive();
        scene.peer_receives();
    }
    scene.drain();
}

#[test]
fn bytes_are_equal_with_options_off() {
    for (option, value) in [("ipv4/tcp_sack", "0"), ("ipv4/tcp_timestamps", "0"), ("ipv4/tcp_window_scaling", "0")] {
        for link in [LinkSettings::default(), lossy()] {
            let settings =
                TestbedSettings { peer_sysctls: vec![(option, value.to_string())], link, ..TestbedSettings::default() };
            back_and_forth(&mut scene(settings), 100_000);
        }
    }
}

/// A peer that does not scale windows takes the kernel's for what they are, not for a part of it.
#[test]
fn without_window_scaling_windows_are_as_large_as_before() {
    let sysctl = ("ipv4/tcp_window_scaling", "0".to_string());
    let mut scene = scene(TestbedSettings { peer_sysctls: vec![sysctl], ..TestbedSettings::default() });
    let window = |scene: &mut Scene| {
        scene.fill(20_000);
        scene.drain();
        TcpInfo::read(scene.peer.as_fd()).expect("TCP_INFO").snd_wnd
    };
    let before = window(&mut scene);
    for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
        scene.move_to(to);
        assert!(window(&mut scene) > before / 2, "{to:?}");
    }
}

/// More than a megabyte unread and more than a megabyte unsent, both with a closed window, in both directions of the
/// move.
#[test]
fn full_queues_move() {
    let mut scene = scene(TestbedSettings::default());
    for to in [Place::Nic, Place::Kernel] {
        for buffer in [socket_buffer(&scene.peer, libc::SO_RCVBUF), socket_buffer(&scene.peer, libc::SO_SNDBUF)] {
            assert!(buffer >= 4 << 20);
        }
        for option in [libc::SO_RCVBUF, libc::SO_SNDBUF] {
            scene.session.set_option(scene.id, libc::SOL_SOCKET, option, 4 << 20).expect("a large buffer");
        }
        scene.fill(6 << 20);
        let waiting = [scene.sent[0] - scene.received[1], scene.sent[1] - scene.received[0]];
        if to == Place::Nic {
            // The window of the program's kernel has grown as far as its buffer allows; the rest waits at the sender.
            assert!(waiting.iter().all(|bytes| *bytes > 2 << 20), "not enough is on its way: {waiting:?}");
        }
        scene.move_to(to);
        scene.drain();
    }
}

fn socket_buffer(stream: &std::net::TcpStream, option: i32) -> i32 {
    let _ = socket::set(stream.as_fd(), libc::SOL_SOCKET, if option == libc::SO_RCVBUF { 33 } else { 32 }, 4 << 20);
    socket::get(stream.as_fd(), libc::SOL_SOCKET, option).expect("a buffer size")
}

/// Losses keep both senders in fast recovery and both receivers with holes, whenever the move happens.
#[test]
fn moves_during_fast_recovery_and_with_data_out_of_order() {
    let mut scene = scene(TestbedSettings { link: LinkSettings { loss: 50_000, ..lossy() }, ..TestbedSettings::default() });
    for to in [Place::Nic, Place::Kernel].into_iter().cycle().take(20) {
        scene.exchange(60_000, to);
    }
}

/// Segments arrived out of order once, and the program has not read since: the kernel does not report that the hole is
/// filled unless it is made to acknowledge.
#[test]
fn a_quiet_connection_that_saw_reordering_moves() {
    let mut scene = scene(TestbedSettings { link: LinkSettings { reorder: 300_000, ..lossy() }, ..TestbedSettings::default() });
    scene.peer_sends(100_000);
    wait_until("the peer's data arrives", || unacknowledged(&scene.peer) == 0);
    scene.move_to(Place::Nic);
    scene.drain();
    scene.exchange(10_000, Place::Kernel);
}

/// Frames that come during a move may also be dropped: the peer retransmits them.
#[test]
fn bytes_are_equal_when_frames_are_dropped_during_moves() {
    let offloads = Offloads { during_moves: DuringMoves::Drop, ..Offloads::default() };
    let mut scene = scene(TestbedSettings { offloads, ..TestbedSettings::default() });
    for to in [Place::Nic, Place::Kernel].into_iter().cycle().take(10) {
        scene.exchange(200_000, to);
    }
}

/// Beside the kernel too, and from one moment to the next.
#[test]
fn what_becomes_of_frames_during_moves_can_be_set_at_any_time() {
    let mut scene = scene(TestbedSettings { beside: true, ..TestbedSettings::default() });
    for (round, to) in [Place::Nic, Place::Kernel].into_iter().cycle().take(10).enumerate() {
        let during_moves = if round % 4 < 2 { DuringMoves::Drop } else { DuringMoves::Hold };
        let offloads = Box::new(Offloads { during_moves, ..Offloads::default() });
        let set = answered(&scene.bed, |tool| tool.ask(Ask::SetOffloads { nic: 0, offloads: offloads.clone() }));
        assert!(matches!(set, Reply::Done), "{set:?}");
        let is = answered(&scene.bed, |tool| tool.ask(Ask::Offloads { nic: 0 }));
        assert!(matches!(is, Reply::Offloads(is) if is == offloads));
        scene.exchange(200_000, to);
    }
    // `baton nic show` has the messages of these moves and transfers.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_baton"));
    let shown = command.args(["nic", "show", "--json", "--socket"]).arg(scene.bed.socket()).output().expect("baton");
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let messages = |operation: &str, from: &str| {
        let rows = shown["messages"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["operation"] == operation && row["from"] == from).expect(operation);
        row["messages"].as_u64().expect("a number")
    };
    assert!(shown["counters"]["agent_doorbells"].as_u64().is_some_and(|rung| rung > 0), "{shown}");
    assert_eq!(messages("nic_handoff", "agent"), 5);
    // It is asked again where it has just sent what is not acknowledged.
    assert!(messages("nic_restore", "agent") >= 5, "{shown}");
    for (operation, from) in [("nic_send", "program"), ("nic_recvd", "program"), ("os_recv", "nic"), ("os_ack", "nic")] {
        assert!(messages(operation, from) > 0, "{operation}: {shown}");
    }
}

/// Three programs, two connections each, all moving.
#[test]
fn several_sessions_move_side_by_side() {
    let bed = hosts(TestbedSettings::default());
    let mut programs: Vec<(Session, Vec<(u32, std::net::TcpStream)>)> = (0..3)
        .map(|program| {
            let mut session = Session::connect(&bed.socket()).expect("a session");
            let connections = (0..2).map(|at| connect(&bed, at == 1, 8000 + program * 2 + at as u16));
            let adopted = connections.map(|(server, peer)| (session.adopt(server.into()).expect("adoption"), peer)).collect();
            (session, adopted)
        })
        .collect();
    let mut ready = Vec::new();
    for round in 0..20u64 {
        for (number, (session, connections)) in programs.iter_mut().enumerate() {
            for (at, (id, peer)) in connections.iter().enumerate() {
                let to = if (round + number as u64 + at as u64).is_multiple_of(2) { Place::Nic } else { Place::Kernel };
                let mut piece = vec![0; 3000];
                baton_sim::stream::fill(number as u64 * 7 + at as u64, round * 3000, &mut piece);
                assert_eq!(socket::send(peer.as_fd(), &piece).expect("sending"), piece.len());
                session.move_to(*id, to).expect("a move");
                let mut got = Vec::new();
                let deadline = Instant::now() + Duration::from_secs(10);
                while got.len() < piece.len() {
                    assert!(Instant::now() < deadline, "program {number}, connection {at}: {} of 3000 bytes", got.len());
                    let mut buffer = [0; 4096];
                    match session.receive(*id, &mut buffer) {
                        Ok(length) => got.extend_from_slice(&buffer[..length]),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            session.poll(Some(Duration::from_millis(5)), &mut ready).expect("poll");
                        }
                        Err(error) => panic!("program {number}, connection {at}: {error}"),
                    }
                }
                assert_eq!(got, piece, "program {number}, connection {at}, round {round}");
            }
        }
    }
}

/// The NIC dies, and then the agent while it restores its connection: the next agent restores it nevertheless.
#[test]
fn an_agent_may_die_while_it_recovers() {
    let crash = Some(Crash { after: Step::Restored, fault: Fault::AgentDies });
    let mut scene = scene(TestbedSettings { crash, ..TestbedSettings::default() });
    scene.exchange(300_000, Place::Nic);
    scene.fill(100_000);
    let mut tool = scene.bed.tool().expect("a tool");
    let before = tool.statistics().expect("statistics");
    baton_linux::process::signal(before.nic_process, libc::SIGKILL).expect("SIGKILL");
    scene.fill(100_000);
    scene.drain();
    let after = tool.statistics().expect("statistics");
    assert_ne!(after.agent_process, before.agent_process, "the agent did not die");
    assert_eq!((after.recovered, after.lost), (1, 0));
    scene.exchange(100_000, Place::Nic);
}

fn counter(host: &Namespace, table: &str, row: &str, name: &str) -> u64 {
    testbed::counter(host, table, row, name).expect("a counter")
}

/// Host B marks every packet both ways as having met congestion (CE): the NIC echoes that to the peer, and slows down
/// on the peer's echo.
#[test]
fn congestion_marks_are_echoed_and_reduce_the_rate() {
    let mut scene =
        scene(TestbedSettings { peer_sysctls: vec![("ipv4/tcp_ecn", "1".to_string())], ..TestbedSettings::default() });
    let ecn = TcpInfo::read(scene.peer.as_fd()).expect("TCP_INFO").options & baton_linux::tcp_info::OPTION_ECN;
    assert_ne!(ecn, 0, "the kernels did not agree on ECN");
    scene.exchange(50_000, Place::Nic);
    let rules = "table inet marks { counter cwr { }; \
        chain in { type filter hook prerouting priority -300; tcp flags & cwr == cwr counter name cwr; ip ecn ect0 ip ecn set ce; }; \
        chain out { type filter hook output priority -300; ip ecn ect0 ip ecn set ce; }; }";
    nft(&scene.bed.host_b, &[rules]);
    let (capable, echoed) = (counter(&scene.bed.host_b, "netstat", "IpExt:", "InECT0Pkts"), delivered_marked(&scene));
    scene.exchange(300_000, Place::Nic);
    assert!(
        counter(&scene.bed.host_b, "netstat", "IpExt:", "InECT0Pkts") > capable + 10,
        "the NIC's packets were not ECN-capable"
    );
    assert!(delivered_marked(&scene) > echoed + 10, "the NIC did not echo the marks");
    let reduced = nft(&scene.bed.host_b, &["list", "counter", "inet", "marks", "cwr"]);
    assert!(!reduced.contains("packets 0 "), "the NIC did not say that it reduced its window: {reduced}");
    scene.exchange(100_000, Place::Kernel);
}

pub fn nft(host: &Namespace, arguments: &[&str]) -> String {
    let output = host.run(|| std::process::Command::new("nft").args(arguments).output()).expect("nft");
    assert!(output.status.success(), "nft: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Packets of the peer's that it knows to have been marked (tcpi_delivered_ce).
fn delivered_marked(scene: &Scene) -> u32 {
    let mut raw = [0u8; 256];
    let length = socket::get_bytes(scene.peer.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut raw).expect("TCP_INFO");
    assert!(length >= 196);
    u32::from_ne_bytes([raw[192], raw[193], raw[194], raw[195]])
}

/// A FIN sent, received, or both, before the move or after it, both ways.
#[test]
fn fins_move() {
    for (program_first, peer_first) in [(true, false), (false, true), (true, true)] {
        for before in [Place::Kernel, Place::Nic] {
            eprintln!("FIN from program {program_first}, from peer {peer_first}, first in {before:?}");
            let mut scene = scene(TestbedSettings::default());
            scene.move_to(before);
            scene.fill(50_000);
            if program_first {
                scene.session.shutdown(scene.id).expect("shutdown");
            }
            if peer_first {
                scene.peer.shutdown(Shutdown::Write).expect("the peer's shutdown");
            }
            let after = if before == Place::Kernel { Place::Nic } else { Place::Kernel };
            match scene.session.move_to(scene.id, after) {
                Ok(()) => {}
                // With both FINs acknowledged the connection may have ended.
                Err(error) if program_first && peer_first => eprintln!("stayed: {error}"),
                Err(error) => panic!("FINs {program_first} {peer_first} from {before:?}: {error}"),
            }
            scene.drain();
            if program_first {
                scene.expect_peer_end();
            } else {
                scene.fill_from_program(20_000);
                scene.session.shutdown(scene.id).expect("shutdown");
                scene.drain();
                scene.expect_peer_end();
            }
            if !peer_first {
                scene.peer.shutdown(Shutdown::Write).expect("the peer's shutdown");
            }
            scene.expect_end();
        }
    }
}

impl Scene {
    fn fill_from_program(&mut self, bytes: usize) {
        let mut left = bytes;
        while left > 0 {
            left -= self.send(left);
        }
    }
}

/// The program closes while the NIC has the connection: the peer sees what close(2) causes.
#[test]
fn close_on_the_nic_is_close() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(10_000, Place::Nic);
    scene.session.close(scene.id).expect("close");
    scene.expect_peer_end();
    // With unread data it is a reset.
    let mut scene = crate::common::scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    scene.peer_sends(1000);
    wait_until("the peer's data arrives", || unacknowledged(&scene.peer) == 0);
    scene.session.close(scene.id).expect("close");
    wait_until("a reset", || match socket::receive(scene.peer.as_fd(), &mut [0; 16]) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => true,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        other => panic!("not a reset but {other:?}"),
    });
}

/// Moves there and back with data in flight and out of order, while a process dies after every third time that the step
/// is made.
fn die_after(step: Step, agent: bool) {
    for link in [LinkSettings::default(), lossy()] {
        eprintln!("after {step:?}, loss {}", link.loss);
        let crash = Some(Crash { after: step, fault: if agent { Fault::AgentDies } else { Fault::NicDies } });
        let mut scene = scene(TestbedSettings { crash, link, ..TestbedSettings::default() });
        let process = |scene: &Scene| {
            let statistics = answered(&scene.bed, Tool::statistics);
            assert_eq!((statistics.lost, statistics.failed_moves), (0, 0), "after {step:?}");
            if agent { statistics.agent_process } else { statistics.nic_process }
        };
        let before = process(&scene);
        for to in [Place::Nic, Place::Kernel].into_iter().cycle().take(6) {
            scene.fill(60_000);
            // Recovery may have restored it to the kernel by the time it is checked.
            scene.try_to_move(to);
            scene.fill(60_000);
            scene.drain();
        }
        assert_ne!(process(&scene), before, "nobody died after {step:?}");
    }
}

#[test]
fn a_nic_may_die_after_any_step() {
    Step::OF_A_MOVE.into_iter().for_each(|step| die_after(step, false));
}

/// Moves that have only begun, and wait for the mirror to cover what the kernel holds out of order, are answered, too.
#[test]
fn a_nic_may_die_while_a_move_waits() {
    let link = LinkSettings { delay: 2000, reorder: 300_000, hold: 3000, seed: 7, ..LinkSettings::default() };
    let crash = Some(Crash { after: Step::Mirrored, fault: Fault::NicDies });
    let (done, over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut scene = scene(TestbedSettings { crash, link, ..TestbedSettings::default() });
        for to in [Place::Nic, Place::Kernel].into_iter().cycle().take(60) {
            scene.fill(200_000);
            scene.try_to_move(to);
            scene.drain();
        }
        let _ = done.send(());
    });
    over.recv_timeout(Duration::from_secs(60)).expect("every move is answered");
}

/// The keeper starts the next agent, and the program's session goes on with it.
#[test]
fn an_agent_may_die_after_any_step() {
    Step::OF_A_MOVE.into_iter().for_each(|step| die_after(step, true));
}

/// Beside the kernel the NIC stands still, and is ended for that, just when a connection that both sides have closed is
/// to return with unread data: about when the kernel sends its FIN again, which the peer would answer with a reset. The
/// program finds the data and the end of the stream.
#[test]
fn an_ended_connection_returns_in_peace_while_the_nic_stands_still() {
    let crash = Some(Crash { after: Step::Finished, fault: Fault::NicStops });
    let mut scene = scene(TestbedSettings { crash, beside: true, ..TestbedSettings::default() });
    scene.move_to(Place::Nic);
    scene.session.shutdown(scene.id).expect("the program's shutdown");
    scene.expect_peer_end();
    assert_eq!(scene.peer_sends(5000), 5000);
    scene.peer.shutdown(Shutdown::Write).expect("the peer's shutdown");
    let nic = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").nic_process;
    let ended = || scene.bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(|statistics| statistics.nic_process != nic);
    wait_until("the NIC that was stopped is ended", ended);
    scene.drain();
    scene.expect_end();
}

/// The kernel delays what a paced socket sends. A connection that both sides have closed returns in such a time: the
/// FIN that its peer has acknowledged counts as sent nevertheless, so that the peer's FIN is taken, and the program
/// finds the end of the stream.
#[test]
fn an_ended_connection_returns_while_its_socket_is_paced() {
    for beside in [false, true] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        pace(&mut scene, 2000);
        // The kernel does not pace a connection's first ten segments.
        (0..20).for_each(|_| {
            scene.fill_from_program(100);
            scene.drain();
        });
        // Another segment would have to wait for more than a second.
        scene.fill_from_program(2800);
        scene.drain();
        pace(&mut scene, -1);
        scene.move_to(Place::Nic);
        scene.session.shutdown(scene.id).expect("the program's shutdown");
        scene.expect_peer_end();
        scene.peer.shutdown(Shutdown::Write).expect("the peer's shutdown");
        scene.expect_end();
        scene.try_to_move(Place::Kernel);
        scene.expect_end();
    }
}

/// Bounds the rate at which the kernel sends for the program's socket, in bytes a second; -1 ends that.
fn pace(scene: &mut Scene, rate: i32) {
    const SO_MAX_PACING_RATE: i32 = 47;
    scene.session.set_option(scene.id, libc::SOL_SOCKET, SO_MAX_PACING_RATE, rate).expect("SO_MAX_PACING_RATE");
}

/// RSTs that a host's kernel has sent.
pub(crate) fn resets_sent(host: &Namespace) -> u64 {
    counter(host, "snmp", "Tcp:", "OutRsts")
}

/// A connection that both sides have closed ends on the NIC, and its program may close the descriptor at any moment:
/// the close succeeds, and the shell sends nothing that the peer would answer with a RST.
#[test]
fn closing_an_ended_connection_sends_nothing() {
    let bed = hosts(TestbedSettings::default());
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let before = resets_sent(&bed.host_b);
    for round in 0..30 {
        let (server, peer) = connect(&bed, false, 8000 + round);
        let id = session.adopt(server.into()).expect("adoption");
        session.move_to(id, Place::Nic).expect("a move");
        // The peer's FIN first, so that ours is the last segment and nothing waits in TIME-WAIT.
        peer.shutdown(Shutdown::Write).expect("the peer's shutdown");
        let deadline = Instant::now() + Duration::from_secs(10);
        while session.receive(id, &mut [0; 16]).is_err() {
            assert!(Instant::now() < deadline, "the end of the stream never came");
        }
        session.shutdown(id).expect("shutdown");
        if round % 2 == 0 {
            while socket::receive(peer.as_fd(), &mut [0; 16]).is_err() {
                assert!(Instant::now() < deadline, "the peer never saw the end of the stream");
            }
        }
        session.close(id).expect("close");
    }
    assert_eq!(resets_sent(&bed.host_b), before, "the peer had to answer something with a RST");
}

/// Makes the closing of the peer's socket a reset.
fn close_with_a_reset(peer: &std::net::TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let raw: [u8; 8] = [linger.l_onoff.to_ne_bytes(), linger.l_linger.to_ne_bytes()].concat().try_into().expect("eight bytes");
    socket::set_bytes(peer.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &raw).expect("SO_LINGER");
}

fn expect_reset(session: &mut Session, id: ConnectionId) {
    wait_until("a reset", || match session.receive(id, &mut [0; 16]) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => true,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        other => panic!("not a reset but {other:?}"),
    });
}

/// The peer resets while the NIC has the connection.
#[test]
fn a_reset_reaches_the_program() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    close_with_a_reset(&scene.peer);
    let Scene { mut session, id, peer, bed, .. } = scene;
    drop(peer);
    expect_reset(&mut session, id);
    session.close(id).expect("close");
    drop(bed);
}

/// A connection ends on the NIC, by TCP_USER_TIMEOUT, and the program, which has not read yet, sets an option that only
/// the kernel can do: what it has not read stays there for it, also when another connection takes memory.
#[test]
fn what_a_connection_had_received_when_it_ended_can_be_read_after_a_request_to_restore_it() {
    let mut scene = scene(TestbedSettings::default());
    scene.session.set_option(scene.id, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 300).expect("TCP_USER_TIMEOUT");
    scene.move_to(Place::Nic);
    assert_eq!(scene.peer_sends(5000), 5000);
    let (other, other_peer) = connect(&scene.bed, false, 8081);
    let Scene { mut session, id, peer, bed, .. } = scene;
    let mut buffer = [0; 5000];
    wait_until("something arrives", || session.receive(id, &mut buffer[..1]).is_ok());
    baton_handoff::shell::block_input(peer.as_fd()).expect("a deaf peer");
    wait_until("its end", || session.send(id, b"x").is_err_and(|error| error.kind() != io::ErrorKind::WouldBlock));
    session.set_option(id, libc::IPPROTO_IP, libc::IP_MINTTL, 10).expect("an option of the shell");
    // It takes the freed memory, if any, and fills it.
    let other = session.adopt(other.into()).expect("another connection");
    session.move_to(other, Place::Nic).expect("its memory");
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    let deadline = Instant::now() + Duration::from_secs(10);
    while received.iter().any(|bytes| *bytes < 1 << 20) {
        assert!(Instant::now() < deadline, "sent {sent:?}, received {received:?}");
        sent[0] += session.send(other, &[0xee; 5000]).unwrap_or(0);
        sent[1] += socket::send(other_peer.as_fd(), &[0xee; 5000]).unwrap_or(0);
        received[0] += socket::receive(other_peer.as_fd(), &mut buffer).unwrap_or(0);
        received[1] += session.receive(other, &mut buffer).unwrap_or(0);
    }
    let got = session.receive(id, &mut buffer).expect("what it had received");
    assert_eq!((got, stream::mismatches(KEYS[1], 1, &buffer[..got])), (4999, 0));
    session.close(id).expect("close");
    drop(bed);
}

/// KEEPIDLE=1, KEEPINTVL=1, KEEPCNT=2: while the peer answers, the connection stays; once it does not, the connection
/// ends with ETIMEDOUT.
#[test]
fn keep_alive_is_the_nics() {
    let mut scene = scene(TestbedSettings::default());
    for (level, option, value) in [
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 2),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
    ] {
        scene.session.set_option(scene.id, level, option, value).expect("keep-alive");
    }
    scene.move_to(Place::Nic);
    let idle = Duration::from_secs(setting("BATON_IDLE_SECONDS", 6));
    let segments = |scene: &Scene| {
        let mut raw = [0u8; 256];
        socket::get_bytes(scene.peer.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut raw).expect("TCP_INFO");
        u32::from_ne_bytes([raw[140], raw[141], raw[142], raw[143]])
    };
    let before = segments(&scene);
    let (begun, probes) = (Instant::now(), idle.as_secs() - 1);
    wait_for(10 * idle, "a probe each second", || u64::from(segments(&scene) - before) >= probes);
    assert!(begun.elapsed().as_secs() + 1 >= probes, "{probes} probes in {:?}", begun.elapsed());
    assert_eq!(scene.session.option(scene.id, libc::SOL_SOCKET, libc::SO_KEEPALIVE).expect("SO_KEEPALIVE"), 1);
    scene.exchange(1000, Place::Kernel);
    assert_eq!(scene.session.option(scene.id, libc::SOL_SOCKET, libc::SO_KEEPALIVE).expect("SO_KEEPALIVE"), 1);
    scene.move_to(Place::Nic);
    // Now the peer stops answering: a filter drops everything that its kernel receives.
    let silent = Instant::now();
    baton_handoff::shell::block_input(scene.peer.as_fd()).expect("a deaf peer");
    wait_until("ETIMEDOUT", || match scene.session.receive(scene.id, &mut [0; 16]) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => true,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        other => panic!("not ETIMEDOUT but {other:?}"),
    });
    // Waits: for this time at least, which a busy machine only makes longer.
    assert!(silent.elapsed() > Duration::from_secs(2), "the kernel would have waited for three seconds");
}

/// What the host says about idle connections (tcp_slow_start_after_idle) goes with a connection to the NIC: a window
/// that has grown there is worn down while nothing is sent, or is not.
#[test]
fn an_idle_connection_keeps_its_window_if_the_host_says_so() {
    for worn_down in [true, false] {
        let bed = hosts(TestbedSettings::default());
        let setting = if worn_down { "1" } else { "0" };
        bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_slow_start_after_idle", setting)).expect("the setting");
        let mut scene = scene_in(bed, false, 8080);
        scene.move_to(Place::Nic);
        let window = |scene: &Scene| answered(&scene.bed, |tool| tool.connections())[0].detail.cwnd;
        wait_until("a wide window", || {
            scene.fill(200_000);
            scene.drain();
            window(&scene) > 20
        });
        wait_until("all is acknowledged", || unacknowledged(&scene.peer) == 0);
        let before = window(&scene);
        // Several of the time-outs by which it is worn down.
        kernel_repeats(&scene.bed, 8081, 4);
        assert_eq!(scene.send(1), 1, "room");
        scene.drain();
        let after = window(&scene);
        assert_eq!(after < before, worn_down, "{before} segments before, {after} after");
    }
}

/// A hundred outgoing connections share one ephemeral port, also after they have moved.
#[test]
fn connections_that_share_a_port_keep_sharing_it() {
    const SO_REUSEADDR_OFF: i32 = 0;
    let bed = hosts(TestbedSettings::default());
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let listeners: Vec<TcpListener> = (0..100)
        .map(|at| bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 20_000 + at))).expect("a listener"))
        .collect();
    let port_range =
        |fd: std::os::fd::BorrowedFd<'_>, range: i32| socket::set(fd, libc::IPPROTO_IP, 51, range).expect("port range");
    let connect_from = |port: i32, to: &TcpListener| {
        let address = to.local_addr().expect("an address");
        bed.host_a.run(|| {
            let fd = socket::stream(false, 0)?;
            port_range(fd.as_fd(), port << 16 | port);
            socket::connect(fd.as_fd(), address)?;
            Ok(fd)
        })
    };
    let mut ids = Vec::new();
    let mut peers = Vec::new();
    for listener in &listeners {
        let fd = connect_from(41_000, listener).expect("the shared port");
        peers.push(listener.accept().expect("accept").0);
        assert_eq!(socket::get(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR).expect("SO_REUSEADDR"), SO_REUSEADDR_OFF);
        ids.push(session.adopt(fd).expect("adoption"));
    }
    for to in [Place::Nic, Place::Kernel] {
        for id in &ids {
            session.move_to(*id, to).expect("a move");
        }
        // The port can still be used for another destination.
        let more = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
        connect_from(41_000, &more).expect("the port is still shared");
    }
    for id in ids {
        assert_eq!(session.option(id, libc::SOL_SOCKET, libc::SO_REUSEADDR).expect("SO_REUSEADDR"), SO_REUSEADDR_OFF);
    }
}

/// A firewall that drops what its tracker finds invalid lets moved connections pass.
#[test]
fn a_stateful_firewall_lets_moved_connections_pass() {
    let rules = "table inet filter { chain input { type filter hook input priority 0; policy accept; ct state invalid drop; };
        chain output { type filter hook output priority 0; policy accept; ct state invalid drop; }; }\n";
    for ipv6 in [false, true] {
        let settings = TestbedSettings { firewall: Some(rules.into()), ..TestbedSettings::default() };
        back_and_forth(&mut scene_at(settings, ipv6, 8080), 2_000_000);
    }
}

/// Everything that is not offloaded crosses the NIC unchanged: another TCP connection, UDP with fragments, ping.
#[test]
fn other_traffic_crosses_the_nic() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    let (server, client) = connect(&scene.bed, true, 9090);
    let mut got = [0u8; 5];
    assert_eq!(socket::send(client.as_fd(), b"hello").expect("send"), 5);
    wait_until("another connection's data", || socket::receive(server.as_fd(), &mut got).is_ok());
    assert_eq!(&got, b"hello");
    let udp = scene.bed.host_a.run(|| std::net::UdpSocket::bind(SocketAddr::new(baton_bed::testbed::address_a(false), 5353)));
    let udp = udp.expect("a UDP socket");
    udp.set_read_timeout(Some(Duration::from_secs(5))).expect("a time-out");
    let sender = scene.bed.host_b.run(|| std::net::UdpSocket::bind(SocketAddr::new(address_b(false), 0))).expect("a UDP socket");
    for size in [1, 1400, 20_000] {
        sender.send_to(&vec![7u8; size], SocketAddr::new(baton_bed::testbed::address_a(false), 5353)).expect("send");
        assert_eq!(udp.recv(&mut vec![0u8; 65536]).expect("the datagram"), size);
    }
    let ping = scene.bed.host_b.spawn(std::process::Command::new("ping").args(["-c", "2", "-i", "0.2", "-W", "2", "10.77.0.1"]));
    match ping {
        Ok(mut ping) => assert!(ping.wait().expect("ping").success()),
        Err(error) => panic!("ping (Debian's package iputils-ping): {error}"),
    }
    scene.exchange(100_000, Place::Kernel);
}
