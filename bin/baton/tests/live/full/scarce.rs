//! A listener on a NIC that has no slot left for its connections.

use super::{ECHO, address, connect, count, exchange, start, wait_for_server, wait_until};
use crate::common::hosts;
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

in_both_shapes! {
    a_listener_is_served_again_when_slots_are_free
}

/// Slots of the NIC: fewer than the server's accept queue has room for.
const SLOTS: usize = 8;

/// As `connect`, for no longer than two SYNs take.
fn connect_briefly(bed: &Testbed, at: SocketAddr) -> io::Result<TcpStream> {
    // Waits: a second between two SYNs. One that fails is tried again, or is to fail.
    bed.host_b.run(|| TcpStream::connect_timeout(&at, Duration::from_millis(2500)))
}

/// A server has accepted as many connections as the NIC has slots, so that its listener has none: new clients are
/// served as soon as some of these connections have ended.
fn a_listener_is_served_again_when_slots_are_free(beside: bool) {
    let bed = hosts(TestbedSettings { beside, slots: SLOTS, ..TestbedSettings::default() });
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ECHO]);
    wait_for_server(&bed, at);
    let mut clients = Vec::new();
    // Those with which the server was waited for keep their slots for a while.
    wait_until("each slot has a client's connection", || {
        if let Ok(client) = connect_briefly(&bed, at) {
            // The echo shows that it has been accepted.
            exchange(&client, 1);
            clients.push(client);
        }
        clients.len() == SLOTS
    });
    let (made, refused) = (count(&bed, Counter::Made), count(&bed, Counter::AcceptQueueFull));
    assert!(connect_briefly(&bed, at).is_err(), "the NIC has a slot left");
    assert!(count(&bed, Counter::AcceptQueueFull) > refused, "the NIC has not got its SYN");
    clients.truncate(SLOTS - 2);
    let next = [(); 2].map(|()| connect(&bed, at).expect("a connection"));
    next.iter().for_each(|client| exchange(client, 2));
    clients.iter().for_each(|client| exchange(client, 3));
    assert_eq!(count(&bed, Counter::Made), made + 2, "both were made by the NIC");
}
