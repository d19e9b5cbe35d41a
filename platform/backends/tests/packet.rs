//! Packet sockets with rings against the kernel: a veth pair in a namespace of its own.

use baton_backends::PacketDevice;
use baton_device::{Arrival, Checksum, Device, Frame, MAX_FRAME, Segmentation};
use baton_linux::namespace::Namespace;
use baton_linux::{interface, packet_ring, rtnetlink};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering};

/// An Ethernet type that no protocol of the kernel's takes.
const TYPE: [u8; 2] = [0x88, 0xb5];

struct Wire {
    namespace: Namespace,
    /// Interfaces' indices.
    ends: [u32; 2],
}

impl Wire {
    /// None, and a message, without the right to make one.
    fn new() -> Option<Wire> {
        let made = Namespace::new().and_then(|namespace| {
            let ends = namespace.run(|| {
                let routes = rtnetlink::open()?;
                rtnetlink::add_veth(&routes, "one", "two", namespace.as_fd())?;
                let ends = [rtnetlink::link(&routes, "one")?.index, rtnetlink::link(&routes, "two")?.index];
                for (end, name) in ends.into_iter().zip(["one", "two"]) {
                    // The kernel itself is to send nothing.
                    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
                    rtnetlink::set_up(&routes, end, None, None)?;
                }
                Ok(ends)
            })?;
            Ok(Wire { namespace, ends })
        });
        match made {
            Ok(wire) => Some(wire),
            Err(error) => {
                eprintln!("skipped: {error}");
                assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
                None
            }
        }
    }

    fn socket(&self, end: usize, rings: bool) -> OwnedFd {
        let attach = |fd: std::os::fd::BorrowedFd<'_>| if rings { packet_ring::set_up(fd, true) } else { Ok(()) };
        self.namespace.run(|| interface::open_filtered_packet_socket(self.ends[end], true, attach)).unwrap()
    }

    fn over_rings(&self, socket: &OwnedFd, end: usize) -> PacketDevice {
        PacketDevice::new(socket.try_clone().unwrap(), true).over_rings(self.socket(end, false)).unwrap()
    }

    fn plain(&self, end: usize) -> PacketDevice {
        PacketDevice::new(self.socket(end, false), true)
    }

    fn set_mtu(&self, end: usize, mtu: u32) {
        self.namespace.run(|| rtnetlink::set_up(&rtnetlink::open()?, self.ends[end], None, Some(mtu))).unwrap();
    }
}

/// A frame for an interface, whose payload shows its number.
fn frame(interface: u32, number: usize, length: usize) -> Frame {
    let mut frame = Frame::with_capacity(length);
    frame.set_length(length);
    frame.bytes_mut().fill(number as u8);
    frame.bytes_mut()[..12].fill(0xff);
    frame.bytes_mut()[12..14].copy_from_slice(&TYPE);
    frame.bytes_mut()[14..18].copy_from_slice(&(number as u32).to_ne_bytes());
    frame.interface = interface;
    frame
}

/// Takes frames until none waits.
fn take_all(device: &mut PacketDevice) -> Vec<Frame> {
    let mut frame = Frame::with_capacity(MAX_FRAME);
    let mut all = Vec::new();
    while device.receive(&mut frame) {
        let mut copy = frame.clone();
        copy.interface = frame.interface;
        all.push(copy);
    }
    all
}

fn same_bytes(came: &[Frame], sent: &[Frame]) -> bool {
    came.iter().map(|frame| frame.bytes()).eq(sent.iter().map(|frame| frame.bytes()))
}

#[test]
fn frames_keep_their_order_and_bytes_in_both_directions() {
    let Some(wire) = Wire::new() else { return };
    let socket = wire.socket(0, true);
    let (mut ringed, mut plain) = (wire.over_rings(&socket, 0), wire.plain(1));
    let lengths = [60, 300, 1000, 1500, 1514];
    // Twice around the ring of frames to be sent.
    let numbers = 0..2 * packet_ring::SEND_SLOTS;
    let mut frames: Vec<Frame> = numbers.map(|number| frame(wire.ends[0], number, lengths[number % lengths.len()])).collect();
    let mut came = Vec::new();
    for batch in frames.chunks_mut(100) {
        batch.iter_mut().for_each(|frame| assert!(ringed.transmit(frame)));
        assert_eq!(ringed.flush(), 0);
        came.extend(take_all(&mut plain));
    }
    assert!(same_bytes(&came, &frames));
    for frame in &mut frames {
        frame.interface = wire.ends[1];
        assert!(plain.transmit(frame));
    }
    let came = take_all(&mut ringed);
    assert!(same_bytes(&came, &frames));
    assert!(came.iter().all(|frame| frame.interface == wire.ends[0]));
}

/// Bytes of a large frame's headers.
const HEADERS: usize = 54;

/// An IPv4 TCP frame with a payload that stands for several segments.
fn large(interface: u32, payload: usize) -> Frame {
    let mut large = frame(interface, 7, HEADERS + payload);
    let bytes = large.bytes_mut();
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..HEADERS].fill(0);
    bytes[14] = 0x45;
    bytes[16..18].copy_from_slice(&((HEADERS - 14 + payload) as u16).to_be_bytes());
    (bytes[22], bytes[23], bytes[46]) = (64, 6, 0x50);
    large.checksum = Checksum::Partial { start: 34, offset: 16 };
    large.segmentation = Some(Segmentation { size: 1400, headers: HEADERS as u16, ipv6: false, ecn: false, udp: false });
    large
}

#[test]
fn large_frames_pass_whole_and_in_their_place() {
    let Some(wire) = Wire::new() else { return };
    let sockets = [wire.socket(0, true), wire.socket(1, true)];
    let (mut one, mut other) = (wire.over_rings(&sockets[0], 0), wire.over_rings(&sockets[1], 1));
    let mut frames = vec![frame(wire.ends[0], 1, 60), large(wire.ends[0], 60_000), frame(wire.ends[0], 2, 60)];
    frames.iter_mut().for_each(|frame| assert!(one.transmit(frame)));
    assert_eq!(one.flush(), 0);
    let came = take_all(&mut other);
    assert!(same_bytes(&came, &frames));
    assert_eq!(came[1].segmentation.map(|large| large.size), Some(1400));
    assert_eq!(came[1].interface, wire.ends[1]);
}

/// The bytes in memory that is shared.
fn shared(bytes: &[u8]) -> Vec<AtomicU8> {
    bytes.iter().map(|byte| AtomicU8::new(*byte)).collect()
}

#[test]
fn the_payload_of_large_frames_goes_elsewhere_and_comes_from_elsewhere() {
    let Some(wire) = Wire::new() else { return };
    let sockets = [wire.socket(0, true), wire.socket(1, true)];
    let (mut one, mut other) = (wire.over_rings(&sockets[0], 0), wire.over_rings(&sockets[1], 1));
    let whole = large(wire.ends[0], 60_000);
    let (headers, payload) = whole.bytes().split_at(HEADERS);
    let mut frames = [frame(wire.ends[0], 1, 60), whole.clone(), frame(wire.ends[0], 2, 60)];
    let memory = shared(payload);
    for pieces in [[&memory[..], &[]], [&memory[..10_000], &memory[10_000..]]] {
        assert!(one.transmits_apart());
        assert!(one.transmit(&mut frames[0]));
        let mut front = whole.clone();
        front.set_length(HEADERS);
        assert!(one.transmit_apart(&mut front, pieces));
        assert!(one.transmit(&mut frames[2]));
        assert_eq!(one.flush(), 0);

        let mut came = Frame::with_capacity(MAX_FRAME);
        assert_eq!(other.receive_or_show(&mut came), Arrival::Frame);
        // Showing the frame again gives the same.
        for _ in 0..2 {
            assert_eq!(other.receive_or_show(&mut came), Arrival::Large);
            assert_eq!((came.length(), came.interface, &came.bytes()[..HEADERS]), (whole.length(), wire.ends[1], headers));
            assert_eq!((came.checksum, came.segmentation.map(|large| large.size)), (whole.checksum, Some(1400)));
        }
        let places = shared(&vec![0; payload.len()]);
        assert!(other.receive_apart(HEADERS, [&places[..7], &places[7..]]));
        assert!(places.iter().map(|place| place.load(Ordering::Relaxed)).eq(payload.iter().copied()));
        assert_eq!(other.receive_or_show(&mut came), Arrival::Frame);
        assert_eq!(came.bytes(), frames[2].bytes());
        assert_eq!(other.receive_or_show(&mut came), Arrival::Nothing);
    }
}

/// A process received a frame and ended before it gave the slot back: only frames that wait in the ring are lost by
/// that.
#[test]
fn a_slot_without_its_frame_is_passed_over() {
    let Some(wire) = Wire::new() else { return };
    let socket = wire.socket(0, true);
    let (mut ringed, mut plain) = (wire.over_rings(&socket, 0), wire.plain(1));
    let send = |plain: &mut PacketDevice, payload| assert!(plain.transmit(&mut large(wire.ends[1], payload)));
    send(&mut plain, 30_000);
    assert!(rustix::io::read(&socket, &mut [0; 100]).is_ok());
    send(&mut plain, 40_000);
    assert!(take_all(&mut ringed).is_empty());
    for payload in [50_000, 60_000] {
        send(&mut plain, payload);
        assert_eq!(take_all(&mut ringed).iter().map(|frame| frame.length()).collect::<Vec<_>>(), [HEADERS + payload]);
    }
}

/// Whatever happens to the device, at worst frames are lost, and later frames are sent.
#[test]
fn a_device_with_a_smaller_mtu_and_one_that_is_gone_lose_frames_only() {
    let Some(wire) = Wire::new() else { return };
    let socket = wire.socket(0, true);
    let (mut ringed, mut plain) = (wire.over_rings(&socket, 0), wire.plain(1));
    let mut send = |numbers: std::ops::Range<usize>, length| {
        numbers.for_each(|number| assert!(ringed.transmit(&mut frame(wire.ends[0], number, length))));
        ringed.flush()
    };
    wire.set_mtu(1, 576);
    send(0..3, 1000);
    assert!(take_all(&mut plain).is_empty());
    wire.set_mtu(1, 1500);
    assert_eq!(send(3..6, 1000), 0);
    assert_eq!(take_all(&mut plain).len(), 3);
    let gone = wire.namespace.spawn(Command::new("ip").args(["link", "delete", "one"])).unwrap().wait().unwrap();
    assert!(gone.success());
    // More than the ring holds, in all.
    (0..20).for_each(|round| assert_eq!(send(round..round + 50, 100), 50));
}

/// The next process that maps the rings goes on where the previous process stopped.
#[test]
fn rings_pass_from_one_reader_to_the_next() {
    let Some(wire) = Wire::new() else { return };
    let socket = wire.socket(0, true);
    let mut plain = wire.plain(1);
    let mut sent = 0;
    for _ in 0..5 {
        let mut ringed = wire.over_rings(&socket, 0);
        for _ in 0..1000 {
            assert!(plain.transmit(&mut frame(wire.ends[1], sent, 60)));
            sent += 1;
        }
        let number = |frame: &Frame| u32::from_ne_bytes(frame.bytes()[14..18].try_into().unwrap()) as usize;
        assert!(take_all(&mut ringed).iter().map(number).eq(sent - 1000..sent));
        // Gathered, and never sent.
        assert!(ringed.transmit(&mut frame(wire.ends[0], 0, 60)));
        drop(ringed);
        let mut next = wire.over_rings(&socket, 0);
        assert!(next.transmit(&mut frame(wire.ends[0], 1, 60)));
        assert_eq!(next.flush(), 0);
        assert_eq!(take_all(&mut plain).len(), 1);
    }
}
