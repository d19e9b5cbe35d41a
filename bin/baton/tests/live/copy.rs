//! The copy engine between several workers and one queue of the kernel's: what it delivers is complete, and new
//! connections are established while others keep it busy.

use crate::common::{SetsAtEnd, connect, hosts};
use baton_abi::layout::Counter;
use baton_bed::testbed::{TestbedSettings, address_a, counter};
use baton_lro::Mode;
use baton_offloads::Offloads;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BULK: u16 = 6;

#[test]
fn new_connections_are_established_beside_bulk_transfers() {
    let offloads = Offloads { lro: baton_lro::LroSettings { mode: Mode::InOrder, ..Default::default() }, ..Offloads::default() };
    // Nothing is lost on the way to the NIC, so only the engine can delay a connection.
    let bed = hosts(TestbedSettings {
        workers: 4,
        copy_engine: true,
        peer_queue: Some(30_000),
        offloads,
        ..TestbedSettings::default()
    });
    let pairs: Vec<_> = (0..BULK).map(|at| connect(&bed, false, 7000 + at)).collect();
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 8080))).expect("a listener");
    let address = listener.local_addr().expect("its address");
    let over = AtomicBool::new(false);
    let again = || counter(&bed.host_b, "netstat", "TcpExt:", "TCPSynRetrans").expect("a counter");
    let before = again();
    std::thread::scope(|scope| {
        let _over = SetsAtEnd(&over);
        for (at, (mut server, mut client)) in pairs.into_iter().enumerate() {
            [&server, &client].into_iter().for_each(|side| side.set_nonblocking(false).expect("blocking"));
            let piece: Vec<u8> = (0..1 << 16).map(|byte: usize| (byte * 7 + at) as u8).collect();
            let expected = piece.clone();
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    client.write_all(&piece).expect("the sender");
                }
            });
            scope.spawn(move || {
                let mut got = vec![0; expected.len()];
                while server.read_exact(&mut got).is_ok() {
                    assert!(got == expected, "connection {at}: wrong bytes");
                }
            });
        }
        let count =
            |counter: Counter| bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").counters[counter as usize];
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut made = 0;
        while made < 100 || count(Counter::SynPrioritized) == 0 {
            assert!(Instant::now() < deadline, "{made} connections, none of which went before other frames");
            let client = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
            drop((client, listener.accept().expect("its other end")));
            made += 1;
        }
        println!("{made} connections, {} went before", count(Counter::SynPrioritized));
        assert_eq!(count(Counter::Dropped), 0);
    });
    assert_eq!(again(), before, "a SYN was sent again");
}
