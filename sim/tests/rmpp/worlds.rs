//! Worlds of two RMPP endpoints for the tests.

use baton_rmpp::Config;
use baton_sim::Impairments;
use baton_sim::rmpp::{Carrier, Node, World, halves_on_nic};
use baton_wire::rmpp::{Header, Kind, MAX_CLEARED, PacketFlags};

/// Bytes of a node's memory for messages; the buffers for RTS packets lie behind it.
pub const MESSAGES: u64 = 1 << 20;

/// Settings of endpoint `node`.
pub fn config(node: u16) -> Config {
    let config = Config { endpoint: node, incarnation: 100 + u32::from(node), packet: 1446, ..Config::default() };
    Config { buffers: MESSAGES, memory: MESSAGES + u64::from(config.buffer_count) * u64::from(config.buffer_size), ..config }
}

/// Two endpoints at one of the paper's steps.
pub fn world(step: u8, carrier: Carrier, impairments: Impairments, seed: u64, change: impl Fn(&mut Config)) -> World {
    let node = |number: u16| {
        let mut config = config(number);
        change(&mut config);
        Node::new(config, halves_on_nic(step), carrier.address(number.into()))
    };
    World::new(vec![node(0), node(1)], carrier, impairments, seed)
}

/// A link without faults.
pub const fn clean() -> Impairments {
    Impairments { rate: 0, delay: 0, buffer: 0, loss: 0, reorder: 0, hold: 0, duplicate: 0, corrupt: 0 }
}

/// The header with each field in the range of its kind, so that the packet is not refused at once.
pub fn readable(mut header: Header) -> Header {
    use Kind::*;
    let kind = header.kind;
    let least = |value: u32, has: bool| if has { value.max(1) } else { 0 };
    header.message = least(header.message, matches!(kind, Rts | Cts | Data | End | Ack | Cleanup | Hold));
    header.handle = least(header.handle, matches!(kind, Cts | Data | End | Ack | Hold));
    header.count = match kind {
        Cts => header.count.clamp(1, MAX_CLEARED),
        Ack | Hold => header.count % 3,
        _ => 0,
    };
    header.grant = if matches!(kind, Cts | Data | End) { header.grant } else { 0 };
    header.flags = if kind == Data { header.flags } else { PacketFlags::empty() };
    header
}
