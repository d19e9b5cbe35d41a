//! Frames of every kind, whole and damaged, at a live NIC with every offload on, while a connection beside them goes on
//! and moves.
//!
//! A step is a frame.

use crate::common::{Scene, hosts, scene_in, wait_until};
use baton_abi::layout::Counter;
use baton_backends::VnetDevice;
use baton_bed::testbed::{ControlPoint, INTERFACE_B, MAC_A, MAC_B, TestbedSettings, address_a, address_b};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_fuzz::{Choice, Fuzzer, World, note};
use baton_linux::{interface, process, rtnetlink};
use baton_lro::{Mode, Push};
use baton_moderation::Mode as Moderation;
use baton_offloads::Offloads;
use baton_protocol::program::{Place, Statistics};
use baton_sim::frames::of_every_kind;
use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, TcpOptions};
use std::cell::RefCell;
use std::net::IpAddr;
use std::time::Duration;

const PORT: u16 = 8080;
/// EtherType of RMPP without UDP, and its port.
const RMPP: [u8; 2] = [0x88, 0xb5];
const RMPP_PORT: u16 = baton_wire::rmpp::envelope::UDP_PORT;

/// Two hosts with a connection, which scripts use one after the other as long as all goes well.
struct Stage {
    scene: Scene,
    wire: VnetDevice,
    frame: Frame,
    kinds: Vec<Vec<u8>>,
    before: Statistics,
    peer_port: u16,
    /// Number of frames sent. Of others Linux says at once that it sends none such.
    sent: u64,
}

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

impl Stage {
    fn new() -> Stage {
        let lro = baton_lro::LroSettings { mode: Mode::Reorder, push: Push::Bulk, ..Default::default() };
        let rules = [
            "in icmp count",
            "in udp limit 8gbit burst 1mb",
            "in tcp dport 9 reject",
            "in tcp state established accept",
            "accept",
        ];
        let control_point = Some(ControlPoint { key: vec![7; 32], rules: rules.map(str::to_string).to_vec(), contained: false });
        let bed = hosts(TestbedSettings {
            offloads: Offloads {
                large_sends: true,
                lro,
                active_ack: true,
                moderation: Moderation::Adaptive,
                ..Offloads::default()
            },
            workers: 2,
            copy_engine: true,
            control_point,
            ..TestbedSettings::default()
        });
        let mut scene = scene_in(bed, false, PORT);
        scene.move_to(Place::Nic);
        let opened = scene.bed.host_b.run(|| {
            let link = rtnetlink::link(&rtnetlink::open()?, INTERFACE_B)?;
            interface::open_packet_socket(link.index)
        });
        let wire = VnetDevice::new(opened.expect("a packet socket"), false).send_only();
        let before = scene.bed.tool().expect("a tool").statistics().expect("statistics");
        let peer_port = scene.peer.local_addr().expect("an address").port();
        Stage { scene, wire, frame: Frame::with_capacity(MAX_FRAME), kinds: of_every_kind(), before, peer_port, sent: 0 }
    }

    fn statistics(&self) -> Statistics {
        self.scene.bed.tool().expect("a tool").statistics().expect("statistics")
    }

    /// The connection goes on where it is and elsewhere, and the processes are the same.
    fn goes_on(&mut self) {
        for place in [Place::Kernel, Place::Nic] {
            self.scene.exchange(20_000, place);
        }
        let now = self.statistics();
        assert_eq!((now.agent_process, now.nic_process), (self.before.agent_process, self.before.nic_process), "one has died");
        assert_eq!((now.failed_moves, now.lost), (0, 0));
    }

    /// With nothing to do the NIC does nothing.
    fn rests(&self) {
        let nic = self.before.nic_process;
        wait_until("the NIC rests", || {
            let before = process::cpu_nanos(nic).expect("the NIC");
            // Waits: how much it does in a time is what is asked.
            std::thread::sleep(Duration::from_millis(200));
            process::cpu_nanos(nic).expect("the NIC") - before < 100_000_000
        });
    }
}

fn endpoint(address: IpAddr, port: u16) -> Endpoint {
    match address {
        IpAddr::V4(address) => Endpoint::v4(address.octets(), port),
        IpAddr::V6(address) => Endpoint::v6(address.octets(), port),
    }
}

fn ethernet(kind: [u8; 2], payload: &[u8]) -> Vec<u8> {
    [&MAC_A[..], &MAC_B, &kind, payload].concat()
}

fn bytes(choice: &mut Choice, length: usize) -> Vec<u8> {
    let word = choice.word();
    (0..length).map(|at| (word >> (at % 8 * 8)) as u8 ^ at as u8).collect()
}

/// A TCP segment of the connection itself, whose numbers are wrong, or of any other.
fn segment(stage: &Stage, choice: &mut Choice) -> Vec<u8> {
    let ipv6 = choice.one_in(3);
    let own = !ipv6 && choice.one_in(3);
    let (port, from) =
        if own { (PORT, stage.peer_port) } else { (choice.of(&[PORT, 9, 22, 40_000]), 1 + choice.magnitude(4) as u16) };
    let flow = Flow { local: endpoint(address_b(ipv6), from), remote: endpoint(address_a(ipv6), port), device: 0 };
    let flags = Flags(choice.of(&[16, 16, 16, 24, 2, 18, 17, 4, 20, 0, 0xff, choice.clone().number() as u8]));
    let mut options = TcpOptions {
        timestamps: choice.one_in(2).then(|| (choice.number(), choice.number())),
        mss: choice.one_in(6).then(|| choice.number() as u16),
        window_scale: choice.one_in(6).then(|| choice.below(256) as u8),
        sack_permitted: choice.one_in(6),
        ..TcpOptions::default()
    };
    if choice.one_in(4) {
        options.sack.push(choice.number(), choice.number());
    }
    // Numbers drawn at random hit the connection's window too seldom to matter; a reset that did would rightly end it.
    let flags = if own { Flags(flags.0 & !Flags::RST.0) } else { flags };
    let header = Header {
        seq: choice.number(),
        ack: choice.number(),
        flags,
        window: choice.number() as u16,
        options: &options,
        ecn: choice.below(4) as u8,
        ident: choice.number() as u16,
    };
    let length = choice.of(&[0, 1, 100, 1400]);
    let template =
        Template::new(&flow, &Link { source: MAC_B, destination: MAC_A, ttl: 64, ..Link::default() }, choice.one_in(2));
    let mut frame = vec![0; MAX_HEADER + 40 + length];
    let headers = template.emit(&header, length, &mut frame);
    frame.truncate(headers + length);
    if !choice.one_in(8) {
        finish_checksum(&mut frame, template.tcp_offset(), 16);
    }
    frame
}

/// An IPv4 packet of some protocol, or a fragment of one.
fn ipv4(choice: &mut Choice) -> Vec<u8> {
    let protocol = choice.of(&[1, 6, 17, 17, 47, 132]);
    let mut payload = match protocol {
        // An ICMP error about the connection, or something else.
        1 => [&[choice.of(&[3, 11, 8, 5, 0]), choice.below(16) as u8, 0, 0, 0, 0][..], &bytes(choice, 60)].concat(),
        17 => {
            let port = choice.of(&[RMPP_PORT, 53, 9]);
            let length = choice.of(&[0usize, 20, 500]);
            let head = [&1000u16.to_be_bytes()[..], &port.to_be_bytes(), &(8 + length as u16).to_be_bytes(), &[0, 0]].concat();
            [head, bytes(choice, length)].concat()
        }
        _ => bytes(choice, 40),
    };
    if protocol == 1 && payload[0] == 5 {
        // A redirect is the kernel's to judge, and no frame for the connection then comes here.
        payload[0] = 8;
    }
    let fragment = choice.of(&[0u16, 0, 0x4000, 0x2000, 0x2001, 0x0010, 0x1fff]);
    let total = 20 + payload.len() as u16;
    let mut head = vec![0x45, choice.number() as u8];
    head.extend(choice.of(&[total, total, total, 0, 19, total + 8]).to_be_bytes());
    head.extend((choice.below(4) as u16).to_be_bytes());
    head.extend(fragment.to_be_bytes());
    head.extend([choice.of(&[64, 1, 0]), protocol, 0, 0]);
    let [from, to] = [address_b(false), address_a(false)].map(|address| match address {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(_) => [0; 4],
    });
    head.extend(from);
    head.extend(to);
    let sum = baton_wire::checksum::Sum::new().bytes(&head).finish();
    head[10..12].copy_from_slice(&sum.to_be_bytes());
    ethernet([8, 0], &[head, payload].concat())
}

/// A packet with extension headers, or a fragment.
fn ipv6(choice: &mut Choice) -> Vec<u8> {
    let [from, to] = [address_b(true), address_a(true)].map(|address| match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(_) => [0; 16],
    });
    let mut rest = Vec::new();
    let mut next = choice.of(&[0u8, 43, 44, 60, 6, 17, 59]);
    let first = next;
    for _ in 0..choice.below(6) {
        let following = choice.of(&[0u8, 43, 44, 60, 6, 17]);
        rest.extend([following, if next == 44 { 0 } else { choice.of(&[0, 0, 1, 255]) }]);
        rest.extend(choice.of(&[[0u8, 1], [0, 0], [0, 9], [1, 4], [0xff, 0xf8]]));
        rest.extend(choice.of(&[[0u8; 4], [0, 0, 0, 7], [0xc2, 4, 0, 1]]));
        next = following;
    }
    rest.extend(bytes(choice, 40));
    let length = rest.len() as u16;
    let mut head = vec![0x60, 0, 0, 0];
    head.extend(choice.of(&[length, length, length, 0, length + 1, 4]).to_be_bytes());
    head.extend([first, 64]);
    head.extend(from);
    head.extend(to);
    ethernet([0x86, 0xdd], &[head, rest].concat())
}

fn frame(stage: &Stage, choice: &mut Choice) -> Vec<u8> {
    let mut frame = match choice.below(16) {
        0..7 => segment(stage, choice),
        7..10 => ipv4(choice),
        10..12 => ipv6(choice),
        12 => {
            let kind = choice.of(&[0x0101u16, 0x0102, 0x0103, 0x0204, choice.clone().number() as u16]);
            ethernet(RMPP, &[&b"RM"[..], &kind.to_be_bytes(), &bytes(choice, 60)].concat())
        }
        13 => {
            let tag = choice.of(&[[0x81, 0], [0x88, 0xa8]]);
            let inner = segment(stage, choice);
            [&inner[..12], &tag, &[0, 5], &inner[12..]].concat()
        }
        _ => stage.kinds[choice.below(stage.kinds.len() as u64) as usize].clone(),
    };
    if choice.one_in(3) {
        for _ in 0..=choice.below(4) {
            let at = 12 + choice.below(frame.len() as u64 - 12) as usize;
            frame[at] = choice.of(&[0, 0xff, choice.clone().number() as u8]);
        }
    }
    if choice.one_in(8) {
        frame.truncate(14 + choice.below(frame.len() as u64 - 13) as usize);
    }
    // What says who has an address could take the peer's from it, natively, too.
    let resolves = frame[12..14] == [8, 6] || frame[12..14] == [0x86, 0xdd] && frame.get(20) == Some(&58);
    if resolves {
        frame[0] = 2;
    }
    frame
}

/// Frames that are sent before the connection has to go on once more: fewer than a device's queue holds. Behind them
/// the NIC has received what comes to it.
const AT_ONCE: u64 = 256;

struct Live(Stage);

impl World for Live {
    const LONGEST: u64 = 40_000;
    const PLAYS: usize = 60;

    fn new(_: u64) -> Live {
        Live(STAGE.take().unwrap_or_else(Stage::new))
    }

    fn step(&mut self, word: u64) -> bool {
        let frame = frame(&self.0, &mut Choice::new(word));
        note!("{frame:02x?}");
        self.0.frame.fill(&frame);
        self.0.sent += u64::from(self.0.wire.transmit(&mut self.0.frame));
        if self.0.sent.is_multiple_of(AT_ONCE) {
            self.0.goes_on();
        }
        true
    }

    fn end(mut self) {
        self.0.goes_on();
        STAGE.set(Some(self.0));
    }
}

/// The NIC gets most of the frames (devices on the way drop damaged ones), the connection goes on beside them, and then
/// the NIC rests.
#[test]
fn no_frame_disturbs_a_nic_with_every_offload() {
    let corpus = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../sim/fuzz/corpus/frames.txt"));
    Fuzzer { name: "frames", corpus }.run::<Live>();
    let stage = STAGE.take().expect("the scripts have ended well");
    stage.rests();
    let received = stage.statistics().counters[Counter::WireReceived as usize];
    assert!(received > stage.sent / 2, "the NIC got {received} of {} frames", stage.sent);
}
