//! Frames that are none of TCP's: broadcasts, fragments, tags, and what has no name.

use baton_wire::checksum::Sum;

fn ethernet(kind: u16, destination: [u8; 6], rest: &[u8]) -> Vec<u8> {
    [&destination[..], &[2, 0, 0, 0, 0, 1], &kind.to_be_bytes(), rest].concat()
}

/// An IPv4 packet of some protocol from 10.0.0.1 to 10.0.0.2, in its frame.
pub fn ipv4(protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let mut ip = vec![0x45, 0];
    ip.extend(((20 + payload.len()) as u16).to_be_bytes());
    ip.extend([0, 7]);
    ip.extend(fragment.to_be_bytes());
    ip.extend([64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let sum = Sum::new().bytes(&ip).finish();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ip.extend(payload);
    ethernet(0x0800, [2, 0, 0, 0, 0, 2], &ip)
}

fn ipv6(next: u8, payload: &[u8]) -> Vec<u8> {
    let mut ip = vec![0x60, 0, 0, 0];
    ip.extend((payload.len() as u16).to_be_bytes());
    ip.extend([next, 255]);
    ip.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    ip.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 2]);
    ip.extend(payload);
    ethernet(0x86dd, [0x33, 0x33, 0xff, 0, 0, 2], &ip)
}

/// Frames of every kind but a plain TCP segment: what a NIC has to pass on as it is.
pub fn of_every_kind() -> Vec<Vec<u8>> {
    let payload: Vec<u8> = (0..600).map(|n| n as u8).collect();
    vec![
        ethernet(0x0806, [0xff; 6], &[0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2]),
        ipv4(1, 0x4000, &[8, 0, 1, 2, 3, 4, 5, 6]),
        ipv4(17, 0, &payload),
        ipv4(17, 0x2000, &payload),
        ipv4(17, 0x004b, &payload[..100]),
        ipv4(6, 0x2000, &payload),
        ipv4(6, 0x0010, &payload),
        ipv4(132, 0x4000, &payload),
        ipv4(2, 0x4000, &[0x16, 0, 9, 4, 0xe0, 0, 0, 0xfb]),
        ipv4(47, 0, &payload[..50]),
        ipv6(58, &[135, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]),
        ipv6(17, &payload),
        ipv6(44, &payload),
        ipv6(0, &payload),
        // VLAN tags, one and two, around a TCP segment; link layer discovery; something unknown.
        ethernet(0x8100, [2, 0, 0, 0, 0, 2], &[&[0, 5, 8, 0][..], &ipv4(6, 0x4000, &payload)[14..]].concat()),
        ethernet(0x88a8, [2, 0, 0, 0, 0, 2], &[&[0, 5, 0x81, 0, 0, 6, 8, 0][..], &ipv4(17, 0, &payload)[14..]].concat()),
        ethernet(0x88cc, [1, 0x80, 0xc2, 0, 0, 0x0e], &payload[..60]),
        ethernet(0x1234, [2, 0, 0, 0, 0, 2], &payload),
        vec![1; 14],
    ]
}
