//! Forged segments with a connection's 4-tuple that arrive while its frames are held: half of all sequence numbers look
//! old, and half of all acknowledgements look like old ones.

use crate::stage::{Stage, flow};
use baton_abi::layout::{nic, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_datapath::WorkerSettings;
use baton_device::{Checksum, Device};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template};
use baton_wire::{Flags, TcpOptions};
use std::sync::atomic::Ordering;

const CID: Cid = Cid::new(0, 1);
const LENGTH: usize = 10;
/// Further back than any window.
const FAR: u32 = 1 << 30;
/// How far the segments' sequence numbers and acknowledgements lie behind the peer's next ones.
const FORGED: [(u32, u32); 3] = [(FAR, FAR), (FAR, 0), (LENGTH as u32, FAR)];

/// Sends the victim a segment with old data and a timestamp far ahead of the peer's.
fn forge(stage: &mut Stage, (behind, acked): (u32, u32)) {
    let template = Template::new(&flow(0).reversed(), &Link { ttl: 64, ..Link::default() }, true);
    let options = TcpOptions { timestamps: Some((FAR, 1)), ..TcpOptions::default() };
    let (seq, ack) = (stage.seq.wrapping_sub(behind), 1u32.wrapping_sub(acked));
    let header = Header { seq, ack, flags: Flags::ACK, window: 512, options: &options, ecn: 0, ident: 0 };
    stage.frame.set_length(MAX_HEADER + LENGTH);
    let headers = template.emit(&header, LENGTH, stage.frame.bytes_mut());
    stage.frame.set_length(headers + LENGTH);
    stage.frame.checksum = Checksum::Verified;
    stage.far.transmit(&mut stage.frame);
    stage.now = stage.now.after(10);
    stage.worker.poll(stage.now);
}

/// If PAWS took the timestamp from the forged segment, it would refuse the peer's next one.
#[test]
fn a_forged_segment_that_comes_during_an_offload_stops_nothing() {
    for forged in FORGED {
        let mut stage = Stage::empty(WorkerSettings { quick_ack: true, ..WorkerSettings::default() });
        stage.prepare(0, flow(0));
        for control in [Control::Mirror, Control::Steal] {
            stage.command(Message::control(Operation::NicControl, control, CID, 0, 0));
            forge(&mut stage, forged);
        }
        stage.command(Message::new(Operation::NicHandoff, CID, 0, 0));
        stage.victim_goes_on(100);
    }
}

/// The same while the connection rests because its memory grows, or is returned.
#[test]
fn a_forged_segment_that_comes_during_a_rest_stops_nothing() {
    for forged in FORGED {
        let mut stage = Stage::new();
        stage.victim_goes_on(100);
        stage.command(Message::new(Operation::NicRestore, CID, 0, 0));
        forge(&mut stage, forged);
        stage.nic_memory.word32(nic::slot(0) + slot::READ).store(stage.seq, Ordering::Relaxed);
        stage.command(Message::control(Operation::NicControl, Control::Resume, CID, CID.0, 0));
        stage.victim_goes_on(100);
    }
}
