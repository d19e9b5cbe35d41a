//! A server is started again with SO_REUSEADDR while connections of its last run still exist. listen(2) succeeds
//! natively, so it must succeed wherever those connections are.

use crate::common::{connect, hosts, listen_at_freed, scene_at};
use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_handoff::export::{self, Exporter};
use baton_handoff::import::Importer;
use baton_handoff::shell::{self, Saved};
use baton_linux::socket::{self, Pieces};
use baton_protocol::program::Place;
use baton_shm::Region;
use baton_wire::frame::Link;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

const PORT: u16 = 8080;

/// Listens on the port of a connection, as a server that is started again.
fn listen(bed: &Testbed, when: &str) {
    drop(listen_at_freed(bed, SocketAddr::new(address_a(false), PORT), when));
}

/// Every state of the program's socket that outlasts a single step of a move.
#[test]
fn whatever_has_become_of_a_socket() {
    let bed = hosts(TestbedSettings::default());
    let (server, _peer) = connect(&bed, false, PORT);
    let fd = server.as_fd();
    let (local, peer) = (server.local_addr().expect("local"), server.peer_addr().expect("peer"));
    let flow = crate::kernel_stay::flow(local, peer);
    let saved = Saved::read(fd).expect("its settings");
    let begin = || Exporter::begin(fd, flow, Link::default(), &saved).expect("an export");
    drop(begin());
    export::undo(fd, &saved).expect("the end of repair");
    listen(&bed, "a move that was given up");
    let exporter = begin();
    listen(&bed, "a move that has begun");
    let image = *exporter.image();
    let saved = exporter.purge(fd).map_err(|(_, refusal)| refusal).expect("a shell");
    listen(&bed, "on the NIC");
    shell::show_closing(fd).expect("an open shell");
    listen(&bed, "on the NIC, with an attacher");
    let memory = Region::private(1 << 16).expect("memory");
    let nothing = || Pieces::of(&memory, (0, 1 << 16), 0, 0).expect("no bytes");
    let importer = Importer::begin(fd, &image, (local, peer), &nothing(), &nothing(), &saved, false).expect("an import");
    listen(&bed, "a move back that has begun");
    importer.finish(fd, &nothing(), true).expect("its end");
    listen(&bed, "in the kernel again");
    shell::acknowledge(fd).expect("an acknowledgement");
    listen(&bed, "after an acknowledgement");
    begin().purge(fd).map_err(|(_, refusal)| refusal).expect("a shell");
    shell::end(fd).expect("the end");
    listen(&bed, "when the connection has ended");
}

/// Segments that a socket has received (`tcpi_segs_in`).
fn segments(fd: BorrowedFd<'_>) -> u32 {
    const AT: usize = 140;
    let mut info = [0; AT + 4];
    assert_eq!(socket::get_bytes(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).expect("TCP_INFO"), info.len());
    u32::from_ne_bytes(info[AT..].try_into().expect("four bytes"))
}

/// An idle connection: the NIC sends one acknowledgement at each offload, and the kernel sends no window probe at a
/// restore. While that probe is sent, SO_REUSEADDR is off and nobody can listen on the port.
#[test]
fn an_idle_connection_returns_in_silence() {
    const ROUNDS: u32 = 20;
    for ipv6 in [false, true] {
        let mut scene = scene_at(TestbedSettings::default(), ipv6, PORT);
        scene.exchange(10_000, Place::Nic);
        let before = segments(scene.peer.as_fd());
        for _ in 0..ROUNDS {
            scene.move_to(Place::Kernel);
            scene.move_to(Place::Nic);
        }
        let came = segments(scene.peer.as_fd()) - before;
        assert!(came <= ROUNDS + ROUNDS / 4, "the peer got {came} segments in {ROUNDS} rounds");
        scene.exchange(10_000, Place::Kernel);
    }
}
