//! Segments that a peer seldom sends, on the NIC: fragments made by a router, probes into a closed window, a FIN that
//! overtakes data; and more in flight than this host would ever have sent.

use crate::common::{Scene, connect, hosts, scene, unacknowledged, wait_until};
use baton_backends::VnetDevice;
use baton_bed::testbed::{MAC_A, MAC_B, TestbedSettings, address_a};
use baton_client::Session;
use baton_device::{Checksum, Device, Frame, MAX_FRAME};
use baton_linux::namespace::Namespace;
use baton_linux::tcp_info::TcpInfo;
use baton_linux::{interface, rtnetlink, socket};
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use baton_sim::stream;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flags, Flow, TcpFrame, TcpOptions};
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

fn ip(host: &Namespace, arguments: &str) {
    let mut command = Command::new("ip");
    command.args(arguments.split(' '));
    let status = host.spawn(&mut command).and_then(|mut child| child.wait()).expect("ip (Debian's package iproute2)");
    assert!(status.success(), "ip {arguments}");
}

fn sysctl(host: &Namespace, path: &str, value: &str) {
    host.run(|| std::fs::write(format!("/proc/sys/net/{path}"), value)).expect(path);
}

/// A sender that allows fragmentation, behind a router whose next link has an MTU of 1000.
#[test]
fn fragments_made_by_a_router_arrive() {
    for beside in [false, true] {
        let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
        let far = Namespace::new().expect("a third host");
        bed.host_b.run(|| rtnetlink::add_veth(&rtnetlink::open()?, "far0", "eth1", far.as_fd())).expect("a veth");
        // The kernel's names for the two ends: `far0` is in this namespace or in the other.
        let here = bed.host_b.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "far0").is_ok())).expect("links");
        let (router_side, far_side) = if here { ("far0", "eth1") } else { ("eth1", "far0") };
        ip(&bed.host_b, &format!("addr add 10.78.0.1/24 dev {router_side}"));
        ip(&bed.host_b, &format!("link set {router_side} up"));
        ip(&far, &format!("addr add 10.78.0.2/24 dev {far_side}"));
        ip(&far, &format!("link set {far_side} up"));
        ip(&far, "route add default via 10.78.0.1");
        ip(&bed.host_a, "route add 10.78.0.0/24 via 10.77.0.2");
        ip(&bed.host_b, "link set eth0 mtu 1000");
        sysctl(&bed.host_b, "ipv4/ip_forward", "1");
        sysctl(&far, "ipv4/ip_no_pmtu_disc", "1");
        let listener = bed.host_a.run(|| TcpListener::bind((address_a(false), 8080))).expect("a listener");
        let to = SocketAddr::new(address_a(false), 8080);
        let mut peer = far.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(10))).expect("a connection");
        let server = listener.accept().expect("its other end").0;
        server.set_nonblocking(true).expect("non-blocking");
        let mut session = Session::connect(&bed.socket()).expect("a session");
        let id = session.adopt(OwnedFd::from(server)).expect("adoption");
        peer.set_write_timeout(Some(Duration::from_secs(10))).expect("a limit");
        let (mut sent, mut received) = (0u64, 0u64);
        let cut_before = baton_bed::testbed::counter(&bed.host_b, "snmp", "Ip:", "FragOKs").expect("a counter");
        for place in [Place::Nic, Place::Kernel, Place::Nic] {
            let deadline = Instant::now() + Duration::from_secs(20);
            while let Err(error) = session.move_to(id, place) {
                assert!(error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline, "{error}");
            }
            let mut piece = vec![0; 400_000];
            stream::fill(3, sent, &mut piece);
            sent += piece.len() as u64;
            std::thread::scope(|scope| {
                scope.spawn(|| peer.write_all(&piece).expect("the peer's data is taken"));
                let (mut ready, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
                while received < sent {
                    assert!(Instant::now() < deadline, "stuck at {received} of {sent} bytes at {place:?}, beside: {beside}");
                    match session.receive(id, &mut buffer) {
                        Ok(got) => {
                            assert_eq!(stream::mismatches(3, received, &buffer[..got]), 0, "wrong bytes");
                            received += got as u64;
                        }
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            session.poll(Some(Duration::from_millis(5)), &mut ready).expect("poll");
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let cut = baton_bed::testbed::counter(&bed.host_b, "snmp", "Ip:", "FragOKs").expect("a counter") - cut_before;
        assert!(cut > 500, "the router cut {cut} packets only: this test tests nothing");
    }
}

/// Forges segments of a connection's peer, and reads the answers, at host B's end of the link.
struct Forger {
    device: VnetDevice,
    template: Template,
    frame: Frame,
    /// The peer's latest sequence number.
    seq: u32,
    ack: u32,
    clock: u32,
}

impl Forger {
    /// Makes the program send a byte, and reads the numbers from its segment.
    fn new(scene: &mut Scene) -> Forger {
        let open = || {
            let index = rtnetlink::link(&rtnetlink::open()?, "eth0")?.index;
            interface::open_packet_socket(index)
        };
        let device = VnetDevice::new(scene.bed.host_b.run(open).expect("a packet socket"), true);
        let end = |address: SocketAddr| match address.ip() {
            IpAddr::V4(ip) => Endpoint::v4(ip.octets(), address.port()),
            IpAddr::V6(ip) => Endpoint::v6(ip.octets(), address.port()),
        };
        let peer = &scene.peer;
        let flow =
            Flow { local: end(peer.local_addr().expect("local")), remote: end(peer.peer_addr().expect("peer")), device: 0 };
        let link = Link { source: MAC_B, destination: MAC_A, ttl: 64, ..Link::default() };
        let template = Template::new(&flow, &link, true);
        let mut forger = Forger { device, template, frame: Frame::with_capacity(MAX_FRAME), seq: 0, ack: 0, clock: 0 };
        // After a move the NIC learns the peer's timestamp clock from the peer's first segment.
        assert_eq!(scene.peer_sends(1), 1);
        scene.drain();
        assert_eq!(scene.send(1), 1);
        let segment = forger.receive(|parsed| parsed.payload_length == 1).expect("the program's byte");
        forger.seq = segment.ack;
        forger.ack = segment.seq.wrapping_add(1);
        // The echoed timestamp is the peer's clock; a little later, since the peer's clock goes on.
        forger.clock = segment.options.timestamps.expect("timestamps").1.wrapping_add(200);
        scene.drain();
        forger
    }

    fn send(&mut self, seq: u32, flags: Flags, payload: &[u8]) {
        let options = TcpOptions { timestamps: Some((self.clock, self.clock)), ..TcpOptions::default() };
        let header = Header { seq, ack: self.ack, flags, window: 512, options: &options, ecn: 0, ident: 1 };
        self.frame.set_length(MAX_HEADER + payload.len());
        let headers = self.template.emit(&header, payload.len(), self.frame.bytes_mut());
        self.frame.set_length(headers + payload.len());
        self.frame.bytes_mut()[headers..].copy_from_slice(payload);
        let start = self.template.tcp_offset();
        baton_wire::frame::finish_checksum(self.frame.bytes_mut(), start, 16);
        self.frame.checksum = Checksum::Unknown;
        self.frame.segmentation = None;
        assert!(self.device.transmit(&mut self.frame), "the link takes a frame");
    }

    /// Waits for the next segment of the program's side for which this holds, a minute at most.
    fn receive(&mut self, mut wanted: impl FnMut(&TcpFrame) -> bool) -> Option<TcpFrame> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            while self.device.receive(&mut self.frame) {
                if let Ok(parsed) = TcpFrame::parse(self.frame.bytes(), 0)
                    && wanted(&parsed)
                {
                    return Some(parsed);
                }
            }
            // Waits: between two looks.
            std::thread::sleep(Duration::from_micros(200));
        }
        None
    }

    /// Reads and drops the frames that have come.
    fn forget(&mut self) {
        while self.device.receive(&mut self.frame) {}
    }
}

/// The kernel answers a byte that arrives in a closed window (RFC 9293 section 3.8.6.1), and so does the NIC.
#[test]
fn a_byte_into_a_closed_window_is_answered() {
    for place in [Place::Kernel, Place::Nic] {
        let mut scene = scene(TestbedSettings::default());
        scene.move_to(place);
        let mut forger = Forger::new(&mut scene);
        // Until nothing more fits: the window is closed. Less of it than a segment may be left, which the peer fills
        // when its timer for closed windows expires.
        scene.fill(64 << 20);
        wait_until("a closed window", || {
            scene.peer_sends(1 << 16);
            TcpInfo::read(scene.peer.as_fd()).expect("TCP_INFO").snd_wnd == 0
        });
        forger.forget();
        // The forger knows of one byte that the peer has sent.
        let sent = forger.seq.wrapping_add(scene.sent[1] as u32 - 1);
        let acknowledged = || sent.wrapping_sub(socket::queue_bytes(scene.peer.as_fd(), socket::SIOCOUTQ).expect("SIOCOUTQ"));
        for _ in 0..3 {
            let next = acknowledged();
            forger.send(next, Flags::ACK | Flags::PSH, b"?");
            let answer = forger.receive(|parsed| parsed.payload_length == 0);
            let answer = answer.unwrap_or_else(|| panic!("no answer at {place:?}"));
            assert_eq!(answer.window, 0, "at {place:?}");
            // A probe of the peer's may have come in between, and have found room for its bytes.
            wait_until(&format!("at {place:?} {} after {next}", answer.ack), || {
                answer.ack == next || answer.ack == acknowledged()
            });
        }
        scene.drain();
    }
}

/// A FIN alone overtakes ten bytes: it counts once they have arrived, in the kernel and on the NIC.
#[test]
fn a_fin_that_overtakes_its_data_counts() {
    for place in [Place::Kernel, Place::Nic] {
        let mut scene = scene(TestbedSettings::default());
        scene.move_to(place);
        let mut forger = Forger::new(&mut scene);
        forger.send(forger.seq.wrapping_add(10), Flags::ACK | Flags::FIN, b"");
        let hole = forger.receive(|parsed| parsed.payload_length == 0).expect("an acknowledgement of the hole");
        assert_eq!(hole.ack, forger.seq, "at {place:?}");
        forger.send(forger.seq, Flags::ACK | Flags::PSH, b"0123456789");
        let all = forger.receive(|parsed| parsed.ack == forger_end(hole.ack));
        assert!(all.is_some(), "the FIN was forgotten at {place:?}");
        let mut got = [0; 16];
        wait_until("the bytes", || matches!(scene.session.receive(scene.id, &mut got), Ok(10)));
        scene.expect_end();
    }
}

/// The sequence number after ten bytes and a FIN.
fn forger_end(seq: u32) -> u32 {
    seq.wrapping_add(11)
}

const SO_SNDBUFFORCE: i32 = 32;
const SO_RCVBUFFORCE: i32 = 33;

const IN_FLIGHT: u32 = 4300 * 1448;

/// More than four thousand segments are in flight when the connection moves to the NIC: every acknowledgement of them
/// counts.
#[test]
fn thousands_of_segments_in_flight_move() {
    let link = LinkSettings { delay: 90_000, ..LinkSettings::default() };
    let bed = hosts(TestbedSettings { link, peer_queue: Some(10_000), ..TestbedSettings::default() });
    // A NIC that gets no processor for a while loses nothing either: a loss would end the growth.
    ip(&bed.host_a, "link set baton0 txqueuelen 10000");
    let (server, peer) = connect(&bed, false, 8080);
    // Slow start that only a loss ends.
    socket::set_bytes(server.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").expect("reno");
    for (socket, force) in [(&peer, SO_RCVBUFFORCE), (&server, SO_SNDBUFFORCE)] {
        socket::set(socket.as_fd(), libc::SOL_SOCKET, force, 16 << 20).expect("a large buffer");
    }
    let kernels = server.try_clone().expect("a duplicate");
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let id = session.adopt(server.into()).expect("adoption");
    let mut scene = Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] };
    wait_until("thousands of segments in flight", || {
        while scene.send(1 << 16) + scene.peer_receives() > 0 {}
        let unsent = socket::queue_bytes(kernels.as_fd(), socket::SIOCOUTQNSD).expect("SIOCOUTQNSD");
        unacknowledged(&kernels) - unsent > IN_FLIGHT
    });
    drop(kernels);
    scene.move_to(Place::Nic);
    scene.drain();
    scene.exchange(100_000, Place::Kernel);
}
