//! Active acknowledgements between two kernels: large receive waits for 64 KB, and neither side retransmits;
//! acknowledged data arrives although the NIC that holds it dies.

use crate::common::{before_others, connect, hosts, unacknowledged, wait_until};
use crate::full::on_b;
use crate::moves::nft;
use baton_abi::layout::Counter;
use baton_bed::testbed::{INTERFACE_B, Testbed, TestbedSettings, address_a, counter};
use baton_linux::{process, socket};
use baton_lro::{Mode, Push};
use baton_offloads::Offloads;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::{Ask, Reply};
use baton_sim::stream;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

/// Large receive that waits for 64 KB, or 100 ms without a segment.
fn patient(mode: Mode) -> Offloads {
    let lro = baton_lro::LroSettings { mode, push: Push::Ignore, quiet: (100_000, 100_000), age: 100_000, ..Default::default() };
    Offloads { lro, active_ack: true, ..Offloads::default() }
}

fn bed(offloads: Offloads) -> Testbed {
    let link = LinkSettings { delay: 2000, ..LinkSettings::default() };
    hosts(TestbedSettings { link, offloads, ..TestbedSettings::default() })
}

fn count(bed: &Testbed, of: Counter) -> u64 {
    bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").counters[of as usize]
}

/// Sends `bytes` to a receiver that reads 16 KB every 2 ms. Returns the number of segments that the sender
/// retransmitted, without its loss probes: a busy machine's answer may come late (RFC 8985 section 7).
fn slow_transfer(bed: &Testbed, ipv6: bool, bytes: u64) -> u64 {
    let (mut server, client) = connect(bed, ipv6, 8080);
    server.set_nonblocking(false).expect("a blocking socket");
    server.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    let probes = || counter(&bed.host_b, "netstat", "TcpExt:", "TCPLossProbes").expect("a counter");
    let again = || counter(&bed.host_b, "snmp", "Tcp:", "RetransSegs").expect("a counter").saturating_sub(probes());
    let before = again();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut sent, mut piece) = (0, vec![0; 1 << 14]);
            while sent < bytes {
                let length = piece.len().min((bytes - sent) as usize);
                stream::fill(9, sent, &mut piece[..length]);
                match socket::send(client.as_fd(), &piece[..length]) {
                    Ok(count) => sent += count as u64,
                    // Waits: for room, between two looks.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_micros(200)),
                    Err(error) => panic!("the sender's connection broke: {error}"),
                }
            }
        });
        let (mut received, mut piece) = (0, vec![0; 1 << 14]);
        while received < bytes {
            let got = server.read(&mut piece).expect("the connection goes on");
            assert_eq!(stream::mismatches(9, received, &piece[..got]), 0, "wrong bytes after {received}");
            received += got as u64;
            // Waits: this receiver is slow.
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    again() - before
}

#[test]
fn a_threshold_of_64_kb_and_a_slow_receiver_cause_no_retransmissions() {
    for (mode, ipv6) in [(Mode::InOrder, false), (Mode::Reorder, true)] {
        let bed = bed(patient(mode));
        // A busy machine's acknowledgements come late: the sender's timer waits for them.
        let to = address_a(ipv6).to_string();
        let patient = on_b(&bed, &["ip", "route", "add", &to, "dev", INTERFACE_B, "rto_min", "10s"]);
        assert!(patient.status.success(), "{patient:?}");
        assert_eq!(slow_transfer(&bed, ipv6, 3_000_000), 0, "{mode:?}");
        let aggregates = count(&bed, Counter::Aggregates);
        let mean = count(&bed, Counter::AggregateBytes) / aggregates.max(1);
        assert!(mean > 8_000, "{aggregates} aggregates of {mean} bytes");
        assert!(count(&bed, Counter::Acknowledged) > 500);
    }
}

#[test]
fn what_was_acknowledged_survives_the_nic() {
    survives(1);
}

/// Whichever worker held the data, and whichever worker has the connection afterwards.
#[test]
fn what_one_of_several_workers_acknowledged_survives_the_nic() {
    survives(3);
}

/// A connection from host B to host A for which the NIC acknowledges: it does so once the kernel has sent something
/// after the handshake.
fn acknowledged_for(bed: &Testbed, port: u16) -> (TcpStream, TcpStream) {
    let (mut server, client) = connect(bed, false, port);
    server.set_nonblocking(false).expect("a blocking socket");
    server.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    assert_eq!(socket::send(client.as_fd(), &[1]).expect("a send"), 1);
    server.read_exact(&mut [0]).expect("the first byte");
    wait_until("the kernel does not acknowledge", || unacknowledged(&client) == 0);
    (server, client)
}

fn survives(workers: usize) {
    let link = LinkSettings { delay: 2000, ..LinkSettings::default() };
    // Large receive also waits where timestamps change.
    let offloads = patient(Mode::Reorder);
    let cores = if workers > 1 { Vec::new() } else { TestbedSettings::default().nic_cores };
    let bed =
        hosts(TestbedSettings { workers, card: workers > 1, nic_cores: cores, link, offloads, ..TestbedSettings::default() });
    let (mut server, mut client) = acknowledged_for(&bed, 8080);
    let (mut sent, mut held, mut round) = (0, 0, 0);
    while held < 5 {
        assert!(round < 50, "the NIC died in time {held} times of {round} only");
        round += 1;
        if workers > 1 {
            // The connection is another worker's from now on, also after the NIC's death.
            let indirection = (round % workers).to_string().parse().expect("a table");
            let set = Offloads { rss: baton_rss::RssSettings { indirection, ..Default::default() }, ..offloads };
            let reply = bed
                .tool()
                .and_then(|mut tool| tool.ask(Ask::SetOffloads { nic: 0, offloads: Box::new(set) }))
                .expect("an answer");
            assert!(matches!(reply, Reply::Done), "{reply:?}");
            // A bucket that moves passes what large receive holds to the kernel: wait until no bucket moves any more.
            let mut moved = u64::MAX;
            wait_until("buckets that stay", || {
                // Waits: the NIC reports no end of the buckets that are left to move; it moves the next one within a
                // millisecond.
                std::thread::sleep(Duration::from_millis(30));
                let before = std::mem::replace(&mut moved, count(&bed, Counter::Buckets));
                before == moved
            });
        }
        // Whole segments: a shorter one would end the aggregate.
        let mut piece = vec![0; 14 * 1448];
        stream::fill(9, sent, &mut piece);
        let nic = bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").nic_process;
        // Large receive waits for a tenth of a second only. Where a busy machine kills the NIC later than that, the
        // round is not counted.
        let waiting = before_others(|| {
            assert_eq!(socket::send(client.as_fd(), &piece).expect("a send"), piece.len());
            wait_until("the NIC's acknowledgement", || unacknowledged(&client) == 0);
            // The sender has dropped all of it from its queue; large receive waits for more.
            let waiting = socket::queue_bytes(server.as_fd(), socket::SIOCINQ).expect("SIOCINQ");
            process::signal(nic, 9).expect("a signal");
            waiting
        });
        let in_time = (waiting as usize) < piece.len();
        held += usize::from(in_time);
        let mut found = vec![0; piece.len()];
        server.read_exact(&mut found).expect("what was acknowledged arrives");
        assert_eq!(stream::mismatches(9, sent, &found), 0);
        sent += piece.len() as u64;
        wait_until("the next NIC", || {
            bed.tool().and_then(|mut tool| tool.statistics()).is_ok_and(|statistics| statistics.nic_process != nic)
        });
        // The old NIC had seen that the connection's window is scaled; the next NIC must know that, too. It learns it
        // from the data that it takes over: without any, it acknowledges for new connections only.
        if !in_time {
            (server, client) = acknowledged_for(&bed, 8080 + round as u16);
        }
    }
}

/// A listener whose accept queue is full ignores the end of a handshake and repeats its SYN-ACK. Every request of its
/// clients arrives once it accepts again.
#[test]
fn requests_to_a_listener_whose_queue_is_full_arrive() {
    // The queue holds one more than this. A SYN is ignored while the queue is full, and so many handshakes may be under
    // way.
    const BACKLOG: usize = 4;
    const BYTES: usize = 5000;
    let bed = bed(Offloads { active_ack: true, ..Offloads::default() });
    let address = SocketAddr::new(address_a(false), 8090);
    let listener = bed.host_a.run(|| {
        std::fs::write("/proc/sys/net/core/somaxconn", BACKLOG.to_string())?;
        TcpListener::bind(address)
    });
    let listener = listener.expect("a listener");
    listener.set_nonblocking(true).expect("non-blocking");
    let byte = |client: usize, at: usize| (client * 31 + at) as u8;
    let repeated = || counter(&bed.host_a, "snmp", "Tcp:", "RetransSegs").expect("a counter");
    let first = (0..BACKLOG).map(|_| bed.host_b.run(|| TcpStream::connect(address)).expect("a connection"));
    let mut clients: Vec<TcpStream> = first.collect();
    // All SYNs of these are there before the first of them completes its handshake, since their answers are dropped
    // until then: one finds a place in the queue.
    let deaf = "add table ip deaf; add chain ip deaf input { type filter hook input priority 0; }; add rule ip deaf input tcp sport 8090 drop";
    nft(&bed.host_b, &[deaf]);
    clients.extend((0..BACKLOG).map(|_| {
        let socket = bed.host_b.run(|| socket::stream(false, libc::IPPROTO_TCP)).expect("a socket");
        socket::begin_connecting(socket.as_fd(), address).expect("a SYN");
        TcpStream::from(socket)
    }));
    wait_until("a SYN is missing", || {
        let sockets = bed.host_a.run(|| std::fs::read_to_string("/proc/thread-self/net/tcp")).expect("the sockets");
        // Port 8090, SYN-RECEIVED.
        sockets.lines().filter(|line| line.contains(":1F9A ") && line.contains(" 03 ")).count() == BACKLOG
    });
    nft(&bed.host_b, &["delete", "table", "ip", "deaf"]);
    for (number, client) in clients.iter_mut().enumerate() {
        wait_until("a client is not connected", || client.peer_addr().is_ok());
        client.set_nonblocking(false).expect("a blocking socket");
        // Several segments, which are acknowledged together.
        let bytes: Vec<u8> = [number as u8].into_iter().chain((0..BYTES).map(|at| byte(number, at))).collect();
        client.write_all(&bytes).expect("a request");
    }
    let before = repeated();
    wait_until("no SYN-ACK is repeated", || repeated() > before);
    let mut seen = [false; 2 * BACKLOG];
    for _ in 0..seen.len() {
        let mut accepted = None;
        wait_until("a connection is missing", || {
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let Some((mut server, _)) = accepted else { continue };
        server.set_nonblocking(false).expect("a blocking socket");
        server.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        let mut bytes = vec![0; 1 + BYTES];
        server.read_exact(&mut bytes).expect("the request arrives");
        let number = usize::from(bytes[0]);
        assert!(bytes[1..].iter().enumerate().all(|(at, found)| *found == byte(number, at)), "other bytes");
        seen[number] = true;
    }
    assert_eq!(seen, [true; 2 * BACKLOG]);
}
