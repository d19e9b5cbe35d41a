//! A listener on a NIC that has no slot left for its connections, and one whose program has no descriptor left.

use super::{ECHO, address, connect, count, exchange, start, start_printing, wait_for_server, wait_until};
use crate::common::hosts;
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

in_both_shapes! {
    a_listener_is_served_again_when_slots_are_free
    a_server_without_descriptors_loses_no_client
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

/// Accepts a client, and when that says so, tries to accept others without a descriptor left. Then it has some again,
/// accepts them and echoes.
const WITHOUT_DESCRIPTORS: &str = "
import os, resource, select, socket
listener = socket.create_server(('', 7000), backlog=20)
first = listener.accept()[0]
listener.setblocking(False)
first.sendall(first.recv(1))
first.recv(1)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
spare = []
try:
    while True: spare.append(os.dup(0))
except OSError: pass
errors = set()
select.select([listener], [], [])
for _ in range(50):
    try: listener.accept()
    except OSError as error: errors.add(error.errno)
for one in spare: os.close(one)
print(errors, flush=True)
clients = []
while True:
    select.select([listener], [], [])
    clients.append(listener.accept()[0])
    clients[-1].sendall(clients[-1].recv(100))
";

/// Without a descriptor accept(2) fails and takes nothing from the queue, as in the kernel.
fn a_server_without_descriptors_loses_no_client(beside: bool) {
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let at = address(false, 7000);
    let (_server, mut lines) = start_printing(&bed, &["python3", "-c", WITHOUT_DESCRIPTORS]);
    let mut first = None;
    wait_until("the server", || {
        first = connect_briefly(&bed, at).ok();
        first.is_some()
    });
    let mut first = first.expect("a connection");
    first.write_all(&[1]).and_then(|()| first.read_exact(&mut [0])).expect("an echo");
    // The listener has been given to the NIC with the first accept(2).
    let mut clients = Vec::new();
    wait_until("three that the NIC has made", || {
        let made = count(&bed, Counter::Made);
        let mut client = connect(&bed, at).expect("a connection");
        let is_nics = count(&bed, Counter::Made) > made;
        client.write_all(&[3]).expect("room");
        clients.extend(is_nics.then_some(client));
        clients.len() == 3
    });
    first.write_all(&[0]).expect("room");
    assert_eq!(lines.next().expect("a line").expect("text"), format!("{{{}}}", libc::EMFILE));
    for mut client in clients {
        client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        client.read_exact(&mut [0]).expect("an echo");
    }
}
