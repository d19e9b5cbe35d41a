//! A connection whose peer has sent its FIN stays on the NIC, or leaves its place to others (`peer-fin`); the kernel
//! gets the FIN before the program goes on.

use crate::common::{Scene, answered, connect, hosts, scene, session, start_python, wait_until};
use crate::moves::nft;
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_b};
use baton_linux::tcp_info::TcpInfo;
use baton_offloads::{Offloads, PeerFin};
use baton_protocol::program::{Ask, Place, Reply};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::Duration;

fn set(scene: &Scene, peer_fin: PeerFin) {
    let offloads = Box::new(Offloads { peer_fin, ..Offloads::default() });
    let done = answered(&scene.bed, |tool| tool.ask(Ask::SetOffloads { nic: 0, offloads: offloads.clone() }));
    assert!(matches!(done, Reply::Done), "{done:?}");
}

/// What `baton` prints about the scene's Baton.
fn baton(scene: &Scene, words: [&str; 2]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(words).arg("--socket").arg(scene.bed.socket()).env_remove("BATON_SOCKET");
    let ran = command.output().expect("baton");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).expect("text")
}

fn given_back(scene: &Scene) -> u64 {
    let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
    statistics.nics[0].counters[Counter::PeerFins as usize]
}

/// Between kernel and wire, and beside the kernel: with `return` the connection is in the kernel soon, for the reason
/// that is listed, and stays there; the program reads all and the end, and its own bytes still arrive. With `keep`
/// nothing moves.
#[test]
fn the_peers_fin_gives_the_place_back_if_so_set() {
    for (beside, peer_fin) in [(false, PeerFin::Return), (true, PeerFin::Return), (false, PeerFin::Keep)] {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        set(&scene, peer_fin);
        scene.exchange(100_000, Place::Nic);
        scene.peer_sends(50_000);
        scene.peer.shutdown(Shutdown::Write).expect("the peer's end");
        if peer_fin == PeerFin::Return {
            wait_until("it is in the kernel", || scene.session.place(scene.id) == Some(Place::Kernel));
            let why = "its peer has sent its FIN";
            let listed = baton(&scene, ["ls", "-e"]);
            assert!(listed.lines().any(|line| line.contains("moved to the kernel") && line.ends_with(why)), "{listed}");
            assert!(listed.lines().any(|line| line.contains(" kernel ") && line.ends_with(why)), "{listed}");
            let refused = scene.session.move_to(scene.id, Place::Nic).expect_err("it stays");
            assert!(refused.to_string().contains(why), "{refused}");
        }
        scene.send(30_000);
        scene.drain();
        scene.expect_end();
        let expected = if peer_fin == PeerFin::Return { (1, Place::Kernel) } else { (0, Place::Nic) };
        assert_eq!((given_back(&scene), scene.settled_place().expect("a place")), expected);
        scene.session.shutdown(scene.id).expect("the program's end");
        scene.expect_peer_end();
    }
}

/// The peer's FIN came before the connection did: it is given back at once.
#[test]
fn a_connection_that_comes_with_the_peers_fin_is_given_back() {
    let mut scene = scene(TestbedSettings::default());
    set(&scene, PeerFin::Return);
    scene.peer_sends(5_000);
    scene.peer.shutdown(Shutdown::Write).expect("the peer's end");
    scene.drain();
    scene.expect_end();
    scene.try_to_move(Place::Nic);
    wait_until("it is in the kernel again", || given_back(&scene) == 1 && scene.session.place(scene.id) == Some(Place::Kernel));
    scene.send(5_000);
    scene.drain();
    scene.session.shutdown(scene.id).expect("the program's end");
    scene.expect_peer_end();
}

/// The kernel's packet threads may wait for a processor for seconds: here a rule drops the FIN that is replayed to the
/// kernel for as long. The program, which knows of the end, does not go on with a socket that has none.
#[test]
fn a_fin_that_the_kernel_gets_late_is_waited_for() {
    /// Linux's number of the state.
    const CLOSE_WAIT: u8 = 8;
    for beside in [false, true] {
        let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
        let (server, peer) = connect(&bed, false, 8080);
        let copy = server.try_clone().expect("a descriptor");
        let mut session = session(&bed);
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        session.move_to(id, Place::Nic).expect("a move");
        peer.shutdown(Shutdown::Write).expect("the peer's end");
        wait_until("the end of the stream", || session.receive(id, &mut [0; 16]).is_ok_and(|length| length == 0));
        let drop = "add table ip late; add chain ip late input { type filter hook input priority 0; }; add rule ip late input tcp flags & fin == fin drop";
        nft(&bed.host_a, &[drop]);
        let state = std::thread::scope(|scope| {
            let moves = scope.spawn(|| {
                session.move_to(id, Place::Kernel).expect("a move");
                TcpInfo::read(copy.as_fd()).expect("TCP_INFO").state
            });
            // Waits: for longer than a FIN was once waited for.
            std::thread::sleep(Duration::from_millis(1500));
            nft(&bed.host_a, &["delete", "table", "ip", "late"]);
            moves.join().expect("a move")
        });
        assert_eq!(state, CLOSE_WAIT, "beside: {beside}");
    }
}

/// Waits until the NIC has acknowledged the peer's FIN; from then on a rule drops those that are replayed.
fn fins_are_dropped(bed: &Testbed, peer: &TcpStream) {
    /// Linux's number of the state.
    const FIN_WAIT_2: u8 = 5;
    wait_until("the NIC's acknowledgement", || TcpInfo::read(peer.as_fd()).expect("TCP_INFO").state == FIN_WAIT_2);
    let drop = "add table ip never; add chain ip never input { type filter hook input priority 0; }; add rule ip never input tcp flags & fin == fin drop";
    nft(&bed.host_a, &[drop]);
}

/// A rule that drops the replayed FIN for good: the program reads the end of the stream nevertheless, and its own end
/// reaches the peer. The list shows why the connection stays in the kernel then: Baton has shut its receiving side.
#[test]
fn a_fin_that_the_kernel_never_gets_ends_the_stream() {
    /// Linux's number of the state.
    const ESTABLISHED: u8 = 1;
    for beside in [false, true] {
        let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
        let (server, mut peer) = connect(&bed, false, 8080);
        let copy = server.try_clone().expect("a descriptor");
        let mut session = session(&bed);
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        session.move_to(id, Place::Nic).expect("a move");
        peer.write_all(b"last").expect("the peer's bytes");
        peer.shutdown(Shutdown::Write).expect("the peer's end");
        fins_are_dropped(&bed, &peer);
        session.move_to(id, Place::Kernel).expect("a move");
        assert_eq!(TcpInfo::read(copy.as_fd()).expect("TCP_INFO").state, ESTABLISHED, "the kernel has no FIN");
        let mut bytes = [0; 16];
        assert_eq!(session.receive(id, &mut bytes).expect("the bytes"), 4);
        wait_until("the end of the stream", || session.receive(id, &mut bytes).is_ok_and(|length| length == 0));
        let refused = session.move_to(id, Place::Nic).expect_err("nothing would put it back");
        assert!(refused.to_string().contains("Baton has shut its receiving side down"), "{refused}");
        let listed = answered(&bed, |tool| tool.connections());
        assert!(listed.iter().any(|one| one.reason.contains("Baton has shut its receiving side down")), "{listed:?}");
        assert_eq!(session.send(id, b"answer").expect("the answer"), 6);
        session.shutdown(id).expect("the program's end");
        peer.set_nonblocking(false).expect("blocking");
        let mut answer = Vec::new();
        peer.read_to_end(&mut answer).expect("the answer");
        assert_eq!(answer, b"answer");
    }
}

/// Another user's program, which may hold its socket's lock: the agent's calls on that are made elsewhere.
#[test]
fn another_users_program_reads_the_end_that_the_kernel_never_gets() {
    const PROGRAM: &str = "
import encodings.idna, os, socket, sys
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print('ready', flush=True)
sys.stdin.read()
data = b''
while piece := connection.recv(100):
    data += piece
connection.sendall(b'read ' + data)
";
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_b.run(|| TcpListener::bind((address_b(false), 0))).expect("a listener");
    let (mut program, _lines) = start_python(&bed, PROGRAM, listener.local_addr().expect("its address"), true);
    let (mut peer, _) = listener.accept().expect("a connection");
    wait_until("it is on the NIC", || answered(&bed, |tool| tool.connections()).iter().any(|one| one.place == Place::Nic));
    peer.write_all(b"last").expect("the peer's bytes");
    peer.shutdown(Shutdown::Write).expect("the peer's end");
    fins_are_dropped(&bed, &peer);
    let mut moves = Command::new(env!("CARGO_BIN_EXE_baton"));
    moves.args(["move", "kernel", "all", "--socket"]).arg(bed.socket());
    let moved = moves.output().expect("baton move");
    assert!(moved.status.success(), "{moved:?}");
    drop(program.stdin.take());
    let mut answer = Vec::new();
    peer.read_to_end(&mut answer).expect("the answer");
    assert_eq!(answer, b"read last");
    assert!(program.wait().expect("its end").success());
}
