//! The BPF programs.
//!
//! All but the injector begin alike: they read the frame's headers through a helper (so that the frame may be in
//! pieces), build the flow's key as this host sees it, and look it up.
//!
//! A client's first SYN to a listener of the NIC's is seen by the program at the ingress alone, which can ask the
//! kernel whether it has a connection of this 4-tuple. If not, the program enters the handshake in a map and lets the
//! device receive the frame once more. Then it is found there, by the NIC's packet socket too, like all that follows of
//! this handshake.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::{AGGREGATED, FURTHER, INJECTED, LISTENER_PORT, LOOPBACK, MARK, ROUTED, Steer};
use baton_wire::frame::INJECT;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The maps.
#[derive(Clone, Copy)]
pub(crate) struct Maps<'a> {
    flows: BorrowedFd<'a>,
    devices: BorrowedFd<'a>,
    handshakes: BorrowedFd<'a>,
    kinds: BorrowedFd<'a>,
}

impl<'a> Maps<'a> {
    /// Flows, devices, handshakes, kinds.
    pub fn of(maps: [&'a OwnedFd; 4]) -> Maps<'a> {
        let [flows, devices, handshakes, kinds] = maps.map(AsFd::as_fd);
        Maps { flows, devices, handshakes, kinds }
    }
}

/// Bytes of the map's key: addresses and ports, which are [`ENDS`], then the device.
pub(crate) const KEY_BYTES: usize = ENDS + 4;
pub(crate) const ENDS: usize = 36;

/// Bytes of its value: the state; the device by which the connection's frames leave; the bit of the connection's
/// family, if it is received at the devices of the map of devices, too; further devices at which it is received in any
/// case; the NIC's number.
pub(crate) const VALUE_BYTES: usize = 16 + 4 * FURTHER;
/// Those of both.
pub(crate) const BYTES: (usize, usize) = (KEY_BYTES, VALUE_BYTES);
/// Bytes of a value of the map of devices: families, then the device's address.
pub(crate) const DEVICE_BYTES: usize = 12;
const DEVICE_ADDRESS: i32 = 4;

const LEAVES_BY: i16 = 4;
const ANYWHERE: i16 = 8;
const ALSO_AT: i16 = 12;
const NIC: i16 = ALSO_AT + 4 * FURTHER as i16;

/// Stack offsets.
const KEY: i16 = -40;
const LOCAL: i16 = KEY;
const REMOTE: i16 = KEY + 16;
const LOCAL_PORT: i16 = KEY + 32;
const REMOTE_PORT: i16 = KEY + 34;
const DEVICE: i16 = KEY + 36;
const SMALL: i16 = -48;
const HEADER: i16 = -88;

/// Words of the map of kinds.
pub(crate) const LISTENERS: u32 = 0;
pub(crate) const BOUND: u32 = 1;

/// Offsets in `__sk_buff`.
const PACKET_TYPE: i16 = 4;
const SKB_MARK: i16 = 8;
const TAGGED: i16 = 20;
const INTERFACE: i16 = 40;

/// `TCX_NEXT`, `TC_ACT_SHOT`, `PACKET_OTHERHOST`, `PACKET_OUTGOING`, `BPF_F_INGRESS`.
const NEXT: i32 = -1;
const SHOT: i32 = 2;
const OTHER_HOST: i32 = 3;
const OUTGOING: i32 = 4;
const TO_INGRESS: i32 = 1;

/// Offset of the source address in a frame, and size of its header.
const SOURCE: i32 = 6;
const ETHERNET: i32 = 14;
const TCP: i32 = 6;
const UDP: i32 = 17;
const ICMP: i32 = 1;
const ICMPV6: i32 = 58;
/// IPv6's header of hop-by-hop options; and one in front of TCP with nothing but a jumbo option (RFC 2675), up to the
/// length.
const HOP_BY_HOP: i32 = 0;
const JUMBO: [u8; 4] = [TCP as u8, 0, 0xc2, 4];
/// IPv6's fragment header; [`find`] returns it for IPv4 fragments of TCP, too.
const FRAGMENT: i32 = 44;

/// Direction of the frame: its source is the peer, or this host.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Incoming,
    Outgoing,
}

impl Way {
    /// Stack offsets of the key's halves for the source and the destination.
    fn places(self) -> [i16; 2] {
        match self {
            Way::Incoming => [REMOTE, LOCAL],
            Way::Outgoing => [LOCAL, REMOTE],
        }
    }
}

fn load_bytes(a: &mut Assembler, at: i16, length: i32) {
    a.mov(R::R1, R::R6).mov(R::R3, R::R10).add(R::R3, i32::from(at)).set(R::R4, length).call(Helper::LoadBytes);
    a.jump_unless(R::R0, 0, "other");
}

/// Bits of a TCP header's flags: FIN, SYN, RST and ACK; a SYN alone. Where they stand.
const FLAGS: i32 = 0x17;
const SYN: i32 = 0x02;
const FLAGS_AT: i32 = 13;

/// `BPF_F_CURRENT_NETNS`; offset of the state in `bpf_sock`, and the state of a listener.
const OWN_NAMESPACE: i32 = -1;
const STATE: i16 = 72;
const LISTEN: i32 = 10;

/// Who looks for handshakes: the packet socket's filter only finds those that the program at the ingress has entered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Opens {
    Sought,
    Entered,
}

/// Looks up the flow in the map of flows, where the key without a device is on the stack. Goes on with its value in R0,
/// 0 if there is none, and the key as it was. A flow of link-local addresses has the frame's device (R8 is not 0), so
/// that it is another one at each link. One of other addresses may be bound to the device, if there are such flows at
/// all; those go first.
fn look_up_flow(a: &mut Assembler, flows: BorrowedFd<'_>, kinds: BorrowedFd<'_>) {
    a.jump_if(R::R8, 0, "not link-local");
    a.load(Size::Word, R::R1, R::R6, INTERFACE).store(Size::Word, R::R10, DEVICE, R::R1);
    look_up(a, flows, KEY);
    a.jump("looked up").label("not link-local");
    a.store_word(R::R10, HEADER, BOUND as i32).map(R::R1, kinds).mov(R::R2, R::R10).add(R::R2, i32::from(HEADER));
    a.call(Helper::MapLookup).jump_if(R::R0, 0, "bound to none");
    a.load(Size::Word, R::R1, R::R0, 0).jump_if(R::R1, 0, "bound to none");
    a.load(Size::Word, R::R1, R::R6, INTERFACE).store(Size::Word, R::R10, DEVICE, R::R1);
    look_up(a, flows, KEY);
    a.store_word(R::R10, DEVICE, 0).jump_unless(R::R0, 0, "looked up");
    a.label("bound to none");
    look_up(a, flows, KEY);
    a.label("looked up");
}

/// Sets R8 to 1 if an address in the key is link-local (RFC 4291 section 2.5.6), else to 0.
fn find_link_local(a: &mut Assembler) {
    let (mask, prefix) = (i32::from(0xffc0u16.to_be()), i32::from(0xfe80u16.to_be()));
    a.set(R::R8, 1);
    for at in [LOCAL, REMOTE] {
        a.load(Size::Half, R::R1, R::R10, at).and(R::R1, mask).jump_if(R::R1, prefix, "link-local");
    }
    a.set(R::R8, 0).label("link-local");
}

/// Looks for the handshake that a TCP segment without a flow belongs to: goes on with the map's value in R0, or jumps
/// to `unknown`. The offset of the segment's header is at [`SMALL`].
fn find_handshake(a: &mut Assembler, opens: Opens, maps: Maps<'_>) {
    // The NIC has no listeners at link-local addresses.
    a.jump_unless(R::R8, 0, "unknown");
    a.store_word(R::R10, HEADER, LISTENERS as i32).map(R::R1, maps.kinds).mov(R::R2, R::R10).add(R::R2, i32::from(HEADER));
    a.call(Helper::MapLookup).jump_if(R::R0, 0, "unknown");
    a.load(Size::Word, R::R1, R::R0, 0).jump_if(R::R1, 0, "unknown");
    look_up(a, maps.handshakes, KEY);
    if opens == Opens::Sought {
        a.jump_if(R::R0, 0, "unknown");
        return;
    }
    a.jump_unless(R::R0, 0, "found");
    a.load(Size::Double, R::R2, R::R10, SMALL).add(R::R2, FLAGS_AT);
    load_bytes(a, HEADER, 1);
    a.load(Size::Byte, R::R1, R::R10, HEADER).and(R::R1, FLAGS).jump_unless(R::R1, SYN, "unknown");
    is_for_listener(a);
    // The listener's key: the local endpoint, and no client's.
    a.set(R::R1, 0).store(Size::Double, R::R10, HEADER + 16, R::R1).store(Size::Double, R::R10, HEADER + 24, R::R1);
    for at in [0, 8] {
        a.load(Size::Double, R::R1, R::R10, LOCAL + at).store(Size::Double, R::R10, HEADER + at, R::R1);
    }
    a.load(Size::Half, R::R1, R::R10, LOCAL_PORT).store(Size::Half, R::R10, HEADER + 32, R::R1);
    a.set(R::R1, i32::from(LISTENER_PORT.to_be())).store(Size::Half, R::R10, HEADER + 34, R::R1);
    a.store_word(R::R10, HEADER + 36, 0);
    look_up(a, maps.flows, HEADER);
    a.jump_if(R::R0, 0, "unknown");
    a.map(R::R1, maps.handshakes).mov(R::R2, R::R10).add(R::R2, i32::from(KEY)).mov(R::R3, R::R0).set(R::R4, 0);
    a.call(Helper::MapUpdate).jump_unless(R::R0, 0, "unknown");
    a.load(Size::Word, R::R1, R::R6, INTERFACE).set(R::R2, TO_INGRESS).call(Helper::Redirect).exit();
}

fn look_up(a: &mut Assembler, map: BorrowedFd<'_>, key: i16) {
    a.map(R::R1, map).mov(R::R2, R::R10).add(R::R2, i32::from(key)).call(Helper::MapLookup);
}

/// Jumps to `unknown` unless the kernel would give a SYN to a listening socket: it has no connection and no handshake
/// of this 4-tuple.
fn is_for_listener(a: &mut Assembler) {
    // The 4-tuple as the kernel's table has it: source first, IPv4 addresses in 4 bytes.
    a.load(Size::Half, R::R1, R::R10, LOCAL + 10).jump_if(R::R1, 0xffff, "four bytes");
    for at in [0, 8] {
        a.load(Size::Double, R::R1, R::R10, REMOTE + at).store(Size::Double, R::R10, HEADER + at, R::R1);
        a.load(Size::Double, R::R1, R::R10, LOCAL + at).store(Size::Double, R::R10, HEADER + 16 + at, R::R1);
    }
    a.load(Size::Half, R::R1, R::R10, REMOTE_PORT).store(Size::Half, R::R10, HEADER + 32, R::R1);
    a.load(Size::Half, R::R1, R::R10, LOCAL_PORT).store(Size::Half, R::R10, HEADER + 34, R::R1);
    a.set(R::R3, 36).jump("ask");
    a.label("four bytes");
    for (from, to) in [(REMOTE, HEADER), (LOCAL, HEADER + 4)] {
        a.load(Size::Word, R::R1, R::R10, from + 12).store(Size::Word, R::R10, to, R::R1);
    }
    a.load(Size::Half, R::R1, R::R10, REMOTE_PORT).store(Size::Half, R::R10, HEADER + 8, R::R1);
    a.load(Size::Half, R::R1, R::R10, LOCAL_PORT).store(Size::Half, R::R10, HEADER + 10, R::R1);
    a.set(R::R3, 12).label("ask");
    a.mov(R::R1, R::R6).mov(R::R2, R::R10).add(R::R2, i32::from(HEADER)).set(R::R4, OWN_NAMESPACE).set(R::R5, 0);
    a.call(Helper::ConnectionLookup).jump_if(R::R0, 0, "unknown");
    a.load(Size::Word, R::R7, R::R0, STATE).mov(R::R1, R::R0).call(Helper::SocketRelease).jump_unless(R::R7, LISTEN, "unknown");
}

/// Goes on if the IP protocol in R7 is that of a TCP segment, with 0 in R7, or that of a datagram that comes in. Jumps
/// to `other` with any other protocol.
fn judge(a: &mut Assembler, way: Way, [segment, datagram]: [&'static str; 2]) {
    if way == Way::Outgoing {
        a.jump_unless(R::R7, TCP, "other").set(R::R7, 0);
        return;
    }
    a.jump_if(R::R7, TCP, segment).jump_if(R::R7, UDP, datagram).jump("other");
    a.label(segment).set(R::R7, 0).label(datagram);
}

/// Looks up the frame's flow; of a datagram that comes in, its destination, at which a session for messages may
/// receive. Jumps to `other` if the frame is neither, with its IP protocol in R7 (0 if it is not IP), and to `unknown`
/// if the map does not contain it. Else goes on, with the state in R7, and a pointer to the map's value in R0.
fn find(a: &mut Assembler, way: Way, maps: Maps<'_>, opening: Option<Opens>) {
    let [source, destination] = way.places();
    a.mov(R::R6, R::R1).set(R::R7, 0).set(R::R8, 0).store_word(R::R10, DEVICE, 0).set(R::R2, 12);
    load_bytes(a, SMALL, 2);
    a.load(Size::Half, R::R1, R::R10, SMALL);
    a.jump_if(R::R1, i32::from(0x0800u16.to_be()), "v4").jump_if(R::R1, i32::from(0x86ddu16.to_be()), "v6").jump("other");

    a.label("v4").set(R::R2, ETHERNET);
    load_bytes(a, HEADER, 20);
    a.load(Size::Byte, R::R7, R::R10, HEADER + 9);
    judge(a, way, ["segment v4", "datagram v4"]);
    // A later fragment has no ports, so only the whole datagram shows whose it is. RMPP packets are not fragmented.
    a.load(Size::Half, R::R1, R::R10, HEADER + 6).and(R::R1, i32::from(0x3fffu16.to_be())).jump_if(R::R1, 0, "whole v4");
    a.jump_if(R::R7, UDP, "unknown").set(R::R7, FRAGMENT).jump("other");
    a.label("whole v4").set(R::R1, 0);
    for half in [LOCAL, REMOTE] {
        a.store(Size::Double, R::R10, half, R::R1);
        // The IPv4-mapped form.
        a.store_word(R::R10, half + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    }
    for (from, to) in [(12, source), (16, destination)] {
        a.load(Size::Word, R::R1, R::R10, HEADER + from).store(Size::Word, R::R10, to + 12, R::R1);
    }
    a.load(Size::Byte, R::R2, R::R10, HEADER).and(R::R2, 15).shift_left(R::R2, 2).add(R::R2, ETHERNET).jump("ports");

    a.label("v6").set(R::R2, ETHERNET);
    load_bytes(a, HEADER, 40);
    a.load(Size::Byte, R::R7, R::R10, HEADER + 6);
    for (from, to) in [(8, source), (16, source + 8), (24, destination), (32, destination + 8)] {
        a.load(Size::Double, R::R1, R::R10, HEADER + from).store(Size::Double, R::R10, to, R::R1);
    }
    find_link_local(a);
    // A frame of more than 64 KB has its length in an option.
    a.jump_unless(R::R7, HOP_BY_HOP, "without options").set(R::R2, ETHERNET + 40);
    load_bytes(a, HEADER, 4);
    a.load(Size::Word, R::R1, R::R10, HEADER).jump_unless(R::R1, i32::from_ne_bytes(JUMBO), "other");
    a.set(R::R2, ETHERNET + 40 + 8).jump("ports");
    a.label("without options");
    judge(a, way, ["segment v6", "datagram v6"]);
    a.set(R::R2, ETHERNET + 40);

    a.label("ports").store(Size::Double, R::R10, SMALL, R::R2);
    load_bytes(a, HEADER, 4);
    let [source_port, destination_port] =
        if way == Way::Incoming { [REMOTE_PORT, LOCAL_PORT] } else { [LOCAL_PORT, REMOTE_PORT] };
    for (from, to) in [(HEADER, source_port), (HEADER + 2, destination_port)] {
        a.load(Size::Half, R::R1, R::R10, from).store(Size::Half, R::R10, to, R::R1);
    }
    if way == Way::Incoming {
        // A session for messages receives from whatever address, by the devices of its value.
        a.jump_if(R::R7, 0, "look up").set(R::R8, 0).set(R::R1, 0);
        a.store(Size::Double, R::R10, REMOTE, R::R1).store(Size::Double, R::R10, REMOTE + 8, R::R1);
        a.store(Size::Half, R::R10, REMOTE_PORT, R::R1).label("look up");
    }
    look_up_flow(a, maps.flows, maps.kinds);
    match opening {
        Some(opens) => {
            a.jump_unless(R::R0, 0, "found").jump_unless(R::R7, 0, "unknown");
            find_handshake(a, opens, maps);
            a.label("found");
        }
        None => _ = a.jump_if(R::R0, 0, "unknown"),
    }
    a.load(Size::Word, R::R7, R::R0, 0);
}

/// Jumps to `unknown` unless the flow's frames leave by this device.
fn leaves_here(a: &mut Assembler) {
    a.load(Size::Word, R::R1, R::R0, LEAVES_BY);
    a.load(Size::Word, R::R2, R::R6, INTERFACE).jump_unless_equal(R::R1, R::R2, "unknown");
}

/// Jumps to `unknown` unless the kernel would accept the flow's frames at this device: where they leave, at the further
/// devices of its value, and at those in the map of devices that have the flow's family. A frame that is tagged for a
/// VLAN, or addressed to another host, does not count for this device: it is seen again at the device that it belongs
/// to.
fn comes_here(a: &mut Assembler, devices: BorrowedFd<'_>) {
    a.load(Size::Word, R::R1, R::R6, TAGGED).jump_unless(R::R1, 0, "unknown");
    a.load(Size::Word, R::R1, R::R6, PACKET_TYPE).jump_if(R::R1, OTHER_HOST, "unknown");
    a.load(Size::Word, R::R2, R::R6, INTERFACE);
    for at in [LEAVES_BY].into_iter().chain((0..FURTHER as i16).map(|at| ALSO_AT + 4 * at)) {
        a.load(Size::Word, R::R1, R::R0, at).jump_if_equal(R::R1, R::R2, "here");
    }
    a.load(Size::Word, R::R1, R::R0, ANYWHERE).jump_if(R::R1, 0, "unknown");
    a.store(Size::Word, R::R10, SMALL, R::R2).store(Size::Word, R::R10, SMALL + 4, R::R1);
    a.map(R::R1, devices).mov(R::R2, R::R10).add(R::R2, i32::from(SMALL)).call(Helper::MapLookup).jump_if(R::R0, 0, "unknown");
    a.load(Size::Word, R::R1, R::R0, 0).load(Size::Word, R::R2, R::R10, SMALL + 4).and_register(R::R1, R::R2);
    a.jump_if(R::R1, 0, "unknown").label("here");
}

/// Jumps to `unknown` unless the flow is that NIC's. Where there is one NIC, all flows are.
fn is_of(a: &mut Assembler, nic: Option<u32>) {
    if let Some(nic) = nic {
        a.load(Size::Word, R::R1, R::R0, NIC).jump_unless(R::R1, nic as i32, "unknown");
    }
}

/// Index that no device has.
const NOWHERE: i32 = i32::MAX;

/// Program at a device's ingress: the kernel receives nothing for the NIC's connections but what is injected.
pub(crate) fn ingress(maps: Maps<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    // No later program may see the mark.
    a.load(Size::Word, R::R2, R::R1, SKB_MARK).jump_if(R::R2, INJECTED as i32, "injected");
    a.jump_unless(R::R2, ROUTED as i32, "unmarked");
    a.store_word(R::R1, SKB_MARK, 0).label("unmarked");
    find(&mut a, Way::Incoming, maps, Some(Opens::Entered));
    comes_here(&mut a, maps.devices);
    a.jump_unless(R::R7, Steer::Steal as i32, "other").set(R::R0, SHOT).exit();
    a.label("injected").store_word(R::R1, SKB_MARK, 0);
    a.label("unknown").label("other").set(R::R0, NEXT).exit();
    a.finish()
}

/// Program at a device's egress: the kernel sends nothing for the NIC's connections, by any device; of one that is
/// bound to a device, by that one: by another device another connection may have the same addresses and ports.
pub(crate) fn egress(maps: Maps<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    a.load(Size::Word, R::R2, R::R1, SKB_MARK).jump_if(R::R2, MARK as i32, "ours");
    a.jump_if(R::R2, ROUTED as i32, "other").jump_if(R::R2, INJECTED as i32, "other");
    find(&mut a, Way::Outgoing, maps, None);
    a.load(Size::Word, R::R1, R::R0, ANYWHERE).jump_unless(R::R1, 0, "theirs");
    leaves_here(&mut a);
    a.jump("theirs");
    // The kernel drops frames that come in at the loopback device without a route as martians, so the NIC's frames get
    // the route that the kernel's own have.
    a.label("ours").load(Size::Word, R::R2, R::R1, INTERFACE).jump_unless(R::R2, LOOPBACK as i32, "other");
    a.mov(R::R6, R::R1).store_word(R::R1, SKB_MARK, ROUTED as i32).set(R::R2, SOURCE);
    load_bytes(&mut a, SMALL, 2);
    a.load(Size::Half, R::R1, R::R10, SMALL).jump_unless(R::R1, i32::from(u16::from_ne_bytes(INJECT)), "routed");
    a.store_word(R::R6, SKB_MARK, INJECTED as i32).label("routed");
    a.set(R::R1, LOOPBACK as i32).set(R::R2, 0).set(R::R3, 0).set(R::R4, 0).call(Helper::RedirectNeighbour).exit();
    // To a device that does not exist: this counts as sent. A plain drop would be reported to the kernel's TCP, which
    // would then not count the data as sent.
    a.label("theirs").jump_unless(R::R7, Steer::Steal as i32, "other");
    a.set(R::R1, NOWHERE).set(R::R2, 0).call(Helper::Redirect).exit();
    a.label("unknown").label("other").set(R::R0, NEXT).exit();
    a.finish()
}

/// Filter of a NIC's packet socket: what comes in for its connections, and ICMP and fragments, which may concern them,
/// but nothing that is injected, and no aggregates, whose segments it has received. The kernel gets the fragments, too:
/// only a whole datagram shows whose it is, and a shell drops what it receives.
pub(crate) fn incoming(maps: Maps<'_>, nic: Option<u32>) -> Vec<u8> {
    let mut a = Assembler::default();
    a.load(Size::Word, R::R2, R::R1, PACKET_TYPE).jump_if(R::R2, OUTGOING, "unknown");
    a.load(Size::Word, R::R2, R::R1, SKB_MARK).jump_if(R::R2, INJECTED as i32, "unknown");
    a.jump_if(R::R2, AGGREGATED as i32, "unknown");
    find(&mut a, Way::Incoming, maps, Some(Opens::Sought));
    is_of(&mut a, nic);
    comes_here(&mut a, maps.devices);
    a.label("whole").set(R::R0, -1).exit();
    a.label("other").jump_if(R::R7, ICMP, "icmp").jump_if(R::R7, ICMPV6, "icmp").jump_if(R::R7, FRAGMENT, "icmp");
    a.label("unknown").set(R::R0, 0).exit();
    a.label("icmp").set(R::R0, -1).exit();
    a.finish()
}

/// Filter of a NIC's second packet socket: what the kernel sends for connections that are being mirrored.
pub(crate) fn outgoing(maps: Maps<'_>, nic: Option<u32>) -> Vec<u8> {
    let mut a = Assembler::default();
    a.load(Size::Word, R::R2, R::R1, PACKET_TYPE).jump_unless(R::R2, OUTGOING, "unknown");
    find(&mut a, Way::Outgoing, maps, None);
    is_of(&mut a, nic);
    leaves_here(&mut a);
    a.jump_unless(R::R7, Steer::Mirror as i32, "unknown").set(R::R0, -1).exit();
    a.label("unknown").label("other").set(R::R0, 0).exit();
    a.finish()
}

/// Program at the injector's ingress: the frame counts as received by the device whose index is in its source address,
/// and is addressed to it.
pub(crate) fn inject(devices: BorrowedFd<'_>) -> Vec<u8> {
    let mut a = Assembler::default();
    a.mov(R::R6, R::R1).set(R::R2, SOURCE + INJECT.len() as i32);
    load_bytes(&mut a, SMALL, 4);
    a.map(R::R1, devices).mov(R::R2, R::R10).add(R::R2, i32::from(SMALL)).call(Helper::MapLookup).jump_if(R::R0, 0, "as it is");
    a.mov(R::R3, R::R0).add(R::R3, DEVICE_ADDRESS).mov(R::R1, R::R6).set(R::R2, 0).set(R::R4, 6).set(R::R5, 0);
    a.call(Helper::StoreBytes).label("as it is");
    a.store_word(R::R6, SKB_MARK, INJECTED as i32);
    a.load(Size::Word, R::R1, R::R10, SMALL).set(R::R2, TO_INGRESS).call(Helper::Redirect).exit();
    a.label("other").set(R::R0, SHOT).exit();
    a.finish()
}
