//! What the real kernel shows of a connection that it has from a NIC, from which the next offload concludes whether the
//! NIC's state holds (`baton_image::Stay`).

use crate::common::{Scene, answered, connect, hosts, sent_again, session, unacknowledged, wait_until};
use crate::moves::nft;
use baton_bed::testbed::TestbedSettings;
use baton_handoff::export::{self, Exporter};
use baton_handoff::import::Importer;
use baton_handoff::shell::Saved;
use baton_image::{Image, NicState, Stay};
use baton_linux::process;
use baton_linux::socket::{self, Pieces};
use baton_linux::tcp_info::TcpInfo;
use baton_protocol::program::Place;
use baton_shm::Region;
use baton_wire::frame::Link;
use baton_wire::{Endpoint, Flow};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes of send and of receive memory; the receive memory follows the send memory.
const MEMORY: u32 = 1 << 17;
const PORT: u16 = 8080;
const IN_FLIGHT: u32 = 5000;

fn endpoint(address: SocketAddr) -> Endpoint {
    match address {
        SocketAddr::V4(v4) => Endpoint::v4(v4.ip().octets(), v4.port()),
        SocketAddr::V6(_) => unreachable!("the hosts are connected by IPv4"),
    }
}

/// The flow of a connection between the hosts.
pub fn flow(local: SocketAddr, peer: SocketAddr) -> Flow {
    Flow { local: endpoint(local), remote: endpoint(peer), device: 0 }
}

/// A connection of the kernel's that goes through a NIC, of which only the handoff is there.
struct Moved<'a> {
    server: &'a TcpStream,
    flow: Flow,
    memory: Region,
}

impl Moved<'_> {
    fn queues(&self, image: &Image) -> (Pieces<'_>, Pieces<'_>) {
        let unread = Pieces::of(&self.memory, (MEMORY, MEMORY), image.read_seq(), image.unread).expect("receive memory");
        (unread, Pieces::of(&self.memory, (0, MEMORY), image.snd_una, image.send_queue()).expect("send memory"))
    }

    /// Exports, and imports again. Returns the image between them.
    fn through_nic(&self) -> Image {
        let (fd, saved) = (self.server.as_fd(), Saved::read(self.server.as_fd()).expect("its settings"));
        let exporter = Exporter::begin(fd, self.flow, Link::default(), &saved).expect("an export");
        let image = *exporter.image();
        let (unread, unacknowledged) = self.queues(&image);
        exporter.copy_queues(fd, &unread, &unacknowledged).expect("the queues");
        let saved = exporter.purge(fd).map_err(|(_, refusal)| refusal).expect("a shell");
        let (local, peer) = (self.server.local_addr().expect("local"), self.server.peer_addr().expect("peer"));
        let importer = Importer::begin(fd, &image, (local, peer), &unread, &unacknowledged, &saved, false).expect("an import");
        importer.finish(fd, &unacknowledged, false).expect("its end");
        image
    }

    /// What an offload reads, and how many segments the kernel has sent again. The connection stays in the kernel.
    fn shown(&self) -> (Image, u32) {
        let saved = Saved::read(self.server.as_fd()).expect("its settings");
        let exporter = Exporter::begin(self.server.as_fd(), self.flow, Link::default(), &saved).expect("an export");
        let shown = (*exporter.image(), exporter.retransmitted());
        drop(exporter);
        export::undo(self.server.as_fd(), &saved).expect("the end of repair");
        shown
    }

    fn await_retransmission(&self) {
        wait_until("data is sent again", || sent_again(self.server) > 0);
    }
}

/// Acknowledgements are lost: the kernel sends the data in flight again. That counts against the NIC's state only if it
/// happened after the import, and the time since data was sent begins there, too.
#[test]
fn the_kernel_shows_what_it_sent_again_since_an_import() {
    let bed = hosts(TestbedSettings::default());
    let (server, peer) = connect(&bed, false, PORT);
    let rules = "table inet stay { chain input { type filter hook input priority 0; tcp dport 8080 drop; }; }";
    nft(&bed.host_a, &[rules]);
    let flow = flow(server.local_addr().expect("local"), server.peer_addr().expect("peer"));
    let moved = Moved { server: &server, flow, memory: Region::private(2 * MEMORY as usize).expect("memory") };
    assert_eq!(socket::send(server.as_fd(), &[7; IN_FLIGHT as usize]).expect("data"), IN_FLIGHT as usize);
    moved.await_retransmission();

    let begun = Instant::now();
    let image = moved.through_nic();
    assert_eq!(image.snd_nxt.wrapping_sub(image.snd_una), IN_FLIGHT);
    let (mut shown, retransmitted) = moved.shown();
    let numbers = |image: &Image| (image.state, image.snd_una, image.snd_nxt, image.snd_end, image.rcv_nxt);
    assert_eq!((numbers(&shown), retransmitted), (numbers(&image), 0), "counted from the import on");
    let ago = Duration::from_micros(shown.sent_ago.expect("it is shown").into());
    // Waits: the kernel counts in ticks of its clock, of 10 ms at most.
    assert!(ago <= begun.elapsed() + Duration::from_millis(10), "{ago:?}");
    let stay = Stay::new(image, Some(NicState::default()), 0);
    assert!(stay.complete(&mut shown, retransmitted, 0).is_some(), "nothing has happened");

    moved.await_retransmission();
    let (mut shown, retransmitted) = moved.shown();
    assert_eq!(numbers(&shown), numbers(&image));
    assert!(retransmitted > 0 && stay.complete(&mut shown, retransmitted, 0).is_none(), "{retransmitted} sent again");

    nft(&bed.host_a, &["delete", "table", "inet", "stay"]);
    let mut received = vec![0; 1 << 16];
    peer.set_nonblocking(false).expect("blocking");
    assert_eq!(socket::receive(peer.as_fd(), &mut received).expect("the data"), IN_FLIGHT as usize);
    wait_until("the acknowledgement arrives", || unacknowledged(&server) == 0);
}

/// The NIC dies with data in flight that is lost. The kernel knows the round trip that the NIC has measured: else it
/// would wait a second, or three, before it sends that again.
#[test]
fn the_kernel_knows_the_round_trip_after_a_nics_death() {
    for (beside, ipv6) in [(false, false), (true, true)] {
        let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
        let (server, peer) = connect(&bed, ipv6, 8080);
        let copy = server.try_clone().expect("a descriptor");
        let mut session = session(&bed);
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        let mut scene = Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] };
        scene.exchange(50_000, Place::Nic);
        let lose = "add table inet lose; add chain inet lose c { type filter hook input priority 0; }; add rule inet lose c tcp sport 8080 drop";
        nft(&scene.bed.host_b, &[lose]);
        scene.send(5000);
        let detail = || answered(&scene.bed, |tool| tool.connections())[0].detail;
        wait_until("data is in flight", || detail().in_flight == 5000);
        let nic = answered(&scene.bed, |tool| tool.statistics()).nic_process;
        process::signal(nic, 9).expect("a signal");
        wait_until("it is in the kernel", || scene.session.place(id) == Some(Place::Kernel));
        let info = || TcpInfo::read(copy.as_fd()).expect("TCP_INFO");
        wait_until("the round trip is known", || info().rto < 1_000_000);
        let found = info();
        assert!(found.rtt > 0 && found.unacked as usize >= 5000_usize.div_ceil(found.snd_mss as usize), "{found:?}");
        nft(&scene.bed.host_b, &["delete", "table", "inet", "lose"]);
        scene.drain();
        scene.exchange(50_000, Place::Nic);
    }
}
