//! Frames that were delayed by a filter's limit take the same path as others afterwards.

use baton_abi::layout::{Counter, nic, session};
use baton_backends::memory_pair;
use baton_datapath::{Gate, MessageEndpoint, Worker, WorkerSettings, crossbar};
use baton_device::{Capabilities, Device, Frame};
use baton_filter::words::WORDS;
use baton_filter::{Filter, Installed, Table, parse_all};
use baton_rmpp::{DataConfig, Halves};
use baton_rss::Key;
use baton_shm::Region;
use baton_tcp::Instant;
use baton_wire::frame::Link;
use baton_wire::rmpp::envelope::Envelope;
use baton_wire::{Endpoint, Flow};
use std::sync::Arc;
use std::sync::atomic::Ordering;

const FRAME: usize = 2048;
/// Several workers, of which the second has the session.
const WORKERS: usize = 2;
const SESSION: u32 = 1;
const PACKETS: u64 = 3;

fn endpoint(address: Endpoint) -> MessageEndpoint {
    let data = DataConfig {
        halves: Halves::BOTH,
        address,
        endpoint: 0,
        peers: 4,
        incoming: 4,
        outgoing: 4,
        buffers: session::HEAP as u64,
        buffer_count: 4,
        buffer_size: 2048,
        packet: 1400,
        events: 16,
        matching: None,
        streams: None,
    };
    MessageEndpoint { data, starts: 1 }
}

/// Packets of a session of the other worker, whose program has not begun yet: its worker counts and drops them.
#[test]
fn packets_that_have_waited_reach_the_worker_of_their_session() {
    let memory = Arc::new(Region::private(nic::bytes(4)).expect("memory"));
    let mut now = Instant(1_000_000);
    let capabilities = Capabilities { checksum: true, segmentation: 0 };
    let (mut far, mut kernel) = (Vec::new(), Vec::new());
    let mut workers: Vec<_> = crossbar(WORKERS, &Key::MICROSOFT, None)
        .into_iter()
        .map(|peers| {
            let ((wire, there), (host, behind)) = (memory_pair(64, FRAME, capabilities), memory_pair(64, FRAME, capabilities));
            far.push(there);
            kernel.push(behind);
            let settings = WorkerSettings { slots: 4, frame_bytes: FRAME, ..WorkerSettings::default() };
            let mut worker = Worker::new(host, wire, memory.clone(), settings, now);
            worker.join(peers, now);
            worker
        })
        .collect();
    workers[0].start(now);
    let address = Endpoint::v4([10, 0, 0, 1], 700);
    let heap = Arc::new(Region::private(session::HEAP + (1 << 16)).expect("memory"));
    workers[0].attach_messages(SESSION, heap, endpoint(address));
    let rules = parse_all("in udp limit 1mbit burst 200b").expect("rules").into_iter().enumerate();
    let rules = rules.map(|(slot, rule)| Installed { rule, slot: slot as u16 }).collect();
    let table = Arc::new(Table::new(rules, 1, [1; 4]).expect("a table"));
    let words = Arc::new(Region::private(8 * WORDS).expect("memory")).shared_array(0);
    workers[0].set_gate(Gate::Filtered(Box::new(Filter::new(table, [1; 4])), words));
    let poll = |workers: &mut Vec<Worker<_, _>>, now: Instant| {
        (0..4).for_each(|_| workers.iter_mut().for_each(|worker| _ = worker.poll_with_peers(now)));
    };
    poll(&mut workers, now);

    let link = Link { ttl: 64, ..Link::default() };
    let envelope = Envelope::Udp(link, Flow { local: Endpoint::v4([10, 0, 0, 2], 700), remote: address, device: 0 });
    let mut bytes = vec![7; envelope.header() + 120];
    envelope.emit(&mut bytes);
    for _ in 0..PACKETS {
        let mut frame = Frame::with_capacity(FRAME);
        frame.fill(&bytes);
        assert!(far[0].transmit(&mut frame));
    }
    poll(&mut workers, now);
    assert!(workers[0].next_timeout().is_some(), "some wait");
    for _ in 0..10 {
        now = Instant(now.0 + 1_000);
        poll(&mut workers, now);
    }
    let mut frame = Frame::with_capacity(FRAME);
    assert!(!kernel.iter_mut().any(|device| device.receive(&mut frame)), "the kernel gets none of them");
    let received =
        |worker: usize| memory.words(nic::counters(worker) + 8 * Counter::WireReceived as usize, 1)[0].load(Ordering::Relaxed);
    assert_eq!([received(0), received(1)], [0, PACKETS]);
}
