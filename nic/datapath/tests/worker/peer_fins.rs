//! A connection whose peer has sent its FIN stays on the NIC, or is given back (`peer-fin`).

use crate::stage::{Stage, flow};
use baton_abi::layout::{COUNTERS, Counter, nic};
use baton_abi::{Cid, Message, Operation, RestoreCause};
use baton_datapath::WorkerSettings;
use baton_wire::Flags;
use std::sync::atomic::Ordering;

/// The causes for which the NIC has asked that the first connection be taken back, since the last call.
fn asked(stage: &mut Stage) -> Vec<u32> {
    let all: Vec<Message> = std::iter::from_fn(|| stage.events.pop()).filter_map(Message::from_words).collect();
    stage.events.release();
    let returns = all.iter().filter(|message| (message.operation, message.cid) == (Operation::OsRestore, Cid::new(0, 1)));
    returns.map(|message| message.address).collect()
}

fn counted(stage: &Stage) -> u64 {
    stage.nic_memory.words(nic::counters(0), COUNTERS)[Counter::PeerFins as usize].load(Ordering::Relaxed)
}

/// A FIN that comes before what precedes it is none yet; it counts once, however often it comes.
#[test]
fn the_host_is_asked_once_the_fin_is_in_order_and_only_if_it_is_so_set() {
    for return_at_fin in [false, true] {
        let mut stage = Stage::empty(WorkerSettings { return_at_fin, ..WorkerSettings::default() });
        stage.offload(0, flow(0));
        let fin = Flags::FIN | Flags::ACK;
        stage.send_bare(4, fin);
        assert_eq!((asked(&mut stage), counted(&stage)), (vec![], 0));
        stage.send_segment(1, 1, b"abc");
        stage.now = stage.now.after(10);
        stage.worker.poll(stage.now);
        let expected = if return_at_fin { vec![RestoreCause::PeerFin as u32] } else { vec![] };
        assert_eq!((asked(&mut stage), counted(&stage)), (expected, u64::from(return_at_fin)));
        stage.send_bare(4, fin);
        assert_eq!((asked(&mut stage), counted(&stage)), (vec![], u64::from(return_at_fin)));
    }
}
