//! Connections with the same addresses and ports, which are told apart by their devices.

use super::stage::{BUFFER, Stage};
use baton_abi::layout::{nic, session, slot};
use baton_abi::{ALREADY_HERE, Cid, Control, Message, Operation};
use baton_datapath::WorkerSettings;
use baton_device::Device;
use baton_wire::frame::{ETHERNET, IPV6};
use baton_wire::{Endpoint, Flow, TcpFrame};

/// The 4-tuple of both, over IPv4 and between link-local addresses.
fn flows() -> [Flow; 2] {
    let link_local = |last| {
        let mut address = [0; 16];
        (address[0], address[1], address[15]) = (0xfe, 0x80, last);
        address
    };
    [
        Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 40_000), device: 0 },
        Flow { local: Endpoint::v6(link_local(1), 80), remote: Endpoint::v6(link_local(2), 40_000), device: 0 },
    ]
}

/// Connection 0 is bound to device 3, connection 1 to device 4.
fn stage(flow: Flow, many: u64) -> Stage {
    let mut stage = Stage::empty(WorkerSettings { beside: true, many, quick_ack: true, ..WorkerSettings::default() });
    for of in 0..2 {
        stage.offload(of, flow.by(3 + of));
    }
    stage
}

impl Stage {
    /// Runs the worker, and returns the acknowledgement numbers that it has sent.
    fn acknowledged(&mut self) -> Vec<u32> {
        let mut all = Vec::new();
        for _ in 0..5 {
            self.now = self.now.after(10);
            self.worker.poll(self.now);
            while self.far.receive(&mut self.frame) {
                all.extend(TcpFrame::parse(self.frame.bytes(), 0).map(|parsed| parsed.ack));
            }
            while self.kernel.receive(&mut self.frame) {}
        }
        all
    }

    /// The byte of a connection's receive memory for this sequence number.
    fn received(&self, of: usize, seq: u32) -> u8 {
        let mut found = [0u8];
        self.programs[of].memory.read(session::HEAP + seq as usize % BUFFER as usize, &mut found).unwrap();
        found[0]
    }
}

#[test]
fn a_frame_is_its_devices_connections() {
    for flow in flows() {
        for many in [1, WorkerSettings::default().many] {
            let mut stage = stage(flow, many);
            let mut next = [1u32; 2];
            for round in 0..20u32 {
                let of = (round * 7 / 3 % 2) as usize;
                stage.send_of(flow.by(3 + of as u32), next[of], 1, &[round as u8 + 1; 100]);
                assert_eq!(stage.acknowledged(), [next[of] + 100], "round {round}");
                assert_eq!(stage.received(of, next[of]), round as u8 + 1);
                next[of] += 100;
            }
            assert_ne!(next[0], next[1], "the two differ");
            // A segment out of order takes another path through the worker.
            stage.send_of(flow.by(4), next[1] + 100, 1, &[200; 100]);
            stage.acknowledged();
            assert_eq!((stage.received(1, next[1] + 100), stage.received(0, next[1] + 100) == 200), (200, false));
            stage.send_of(flow.by(4), next[1], 1, &[199; 100]);
            assert_eq!(stage.acknowledged().last(), Some(&(next[1] + 200)));
            // A segment by a third device belongs to neither.
            stage.send_of(flow.by(5), next[0], 1, &[201; 100]);
            assert!(stage.acknowledged().is_empty());
            assert!((0..2).all(|of| stage.received(of, next[0]) != 201));
        }
    }
}

/// Of two connections that would get the same frames the NIC takes one: a connection that is bound to no device gets
/// all devices' frames.
#[test]
fn connections_that_no_device_tells_apart_are_refused() {
    for flow in flows() {
        for (here, comes) in [([3, 4], 0), ([3, 4], 4), ([0, 5], 7)] {
            let mut stage = Stage::empty(WorkerSettings { beside: true, ..WorkerSettings::default() });
            let other = Flow { remote: Endpoint { port: 9, ..flow.remote }, ..flow };
            stage.offload(0, flow.by(here[0]));
            stage.offload(1, if here[0] == 0 { other } else { flow.by(here[1]) });
            let refused = |stage: &mut Stage, device| {
                stage.nic_memory.write(nic::slot(2) + slot::FLOW, &flow.by(device).to_bytes()).unwrap();
                stage
                    .agent
                    .push(Message::control(Operation::NicControl, Control::Mirror, Cid::new(2, 1), 0, 0).to_words())
                    .unwrap();
                stage.agent.publish();
                stage.worker.poll(stage.now);
                let mut refusal = None;
                while let Some(words) = stage.events.pop() {
                    let message = Message::from_words(words).expect("a message");
                    if message.kind == Control::Refused as u16 {
                        refusal = Some((message.address, message.length));
                    }
                }
                stage.events.release();
                refusal
            };
            let refusal = refused(&mut stage, comes).expect("a refusal");
            assert!(refusal.0 == ALREADY_HERE || refusal.1 == ALREADY_HERE, "{refusal:?}");
            if here[0] != 0 {
                assert_eq!(refused(&mut stage, 6), None, "a third device is another one");
            }
        }
    }
}

/// A router's message that packets are too big concerns the connection whose device it came by.
#[test]
fn an_icmp_message_is_about_its_devices_connection() {
    let [_, flow] = flows();
    let mut stage = stage(flow, WorkerSettings::default().many);
    for of in 0..2 {
        let queued = Message::new(Operation::NicSend, Cid::new(of, 1), session::HEAP as u32 + BUFFER + 1, 3000);
        let program = &mut stage.programs[of as usize];
        program.commands.push(queued.to_words()).unwrap();
        program.commands.publish();
    }
    let mut sent = Vec::new();
    let lengths = |stage: &mut Stage| {
        stage.now = stage.now.after(10);
        stage.worker.poll(stage.now);
        let mut lengths = Vec::new();
        while stage.far.receive(&mut stage.frame) {
            lengths.extend(TcpFrame::parse(stage.frame.bytes(), 0).map(|parsed| parsed.payload_length));
        }
        lengths
    };
    sent.extend(lengths(&mut stage));
    assert!(sent.iter().filter(|length| **length > 1280).count() == 4, "{sent:?}");
    let mut message = vec![0; ETHERNET + IPV6 + 8 + IPV6 + 8];
    message[12..14].copy_from_slice(&[0x86, 0xdd]);
    let (length, inner) = ((8 + IPV6 + 8) as u8, ETHERNET + IPV6 + 8);
    for (at, source, destination, next, bytes) in
        [(ETHERNET, flow.remote, flow.local, 58, length), (inner, flow.local, flow.remote, 6, 8)]
    {
        (message[at], message[at + 5], message[at + 6], message[at + 7]) = (0x60, bytes, next, 64);
        message[at + 8..at + 24].copy_from_slice(&source.address);
        message[at + 24..at + 40].copy_from_slice(&destination.address);
    }
    let ports = [flow.local.port.to_be_bytes(), flow.remote.port.to_be_bytes()].concat();
    message[inner + IPV6..inner + IPV6 + 4].copy_from_slice(&ports);
    message[inner + IPV6 + 4..].copy_from_slice(&1u32.to_be_bytes());
    let icmp = ETHERNET + IPV6;
    (message[icmp], message[icmp + 6], message[icmp + 7]) = (2, 5, 0);
    let [first, second] = [&flow.remote.address, &flow.local.address];
    let sum = baton_wire::checksum::pseudo_header(first, second, 58, length.into()).bytes(&message[icmp..]).finish();
    message[icmp + 2..icmp + 4].copy_from_slice(&sum.to_be_bytes());
    stage.frame.fill(&message);
    stage.frame.interface = 4;
    stage.far.transmit(&mut stage.frame);
    let again = lengths(&mut stage);
    // Connection 1 sends what was too big in smaller pieces, connection 0 nothing.
    assert!(!again.is_empty() && again.iter().all(|length| *length <= 1280), "{again:?}");
    stage.frame.fill(&message);
    stage.frame.interface = 5;
    stage.far.transmit(&mut stage.frame);
    assert!(lengths(&mut stage).is_empty(), "of another device");
}
