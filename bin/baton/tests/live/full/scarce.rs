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

/// A server has accepted as many connections as the NIC has slots: the kernel accepts the next ones, and the NIC makes
/// connections again as soon as some of its own have ended.
fn a_listener_is_served_again_when_slots_are_free(beside: bool) {
    let bed = hosts(TestbedSettings { beside, slots: SLOTS, ..TestbedSettings::default() });
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ECHO]);
    wait_for_server(&bed, at);
    let mut clients = Vec::new();
    // Those with which the server was waited for keep their slots for a while.
    wait_until("each slot has a client's connection", || {
        let made = count(&bed, Counter::Made);
        if let Ok(client) = connect_briefly(&bed, at) {
            // The echo shows that it has been accepted.
            exchange(&client, 1);
            clients.extend((count(&bed, Counter::Made) > made).then_some(client));
        }
        clients.len() == SLOTS
    });
    let made = count(&bed, Counter::Made);
    let beyond = connect(&bed, at).expect("the kernel's connection");
    exchange(&beyond, 2);
    assert_eq!(count(&bed, Counter::Made), made, "the NIC has a slot left");
    clients.truncate(SLOTS - 2);
    wait_until("the NIC makes connections again", || {
        let next = connect(&bed, at).expect("a connection");
        exchange(&next, 2);
        count(&bed, Counter::Made) > made
    });
    clients.iter().chain([&beyond]).for_each(|client| exchange(client, 3));
}
