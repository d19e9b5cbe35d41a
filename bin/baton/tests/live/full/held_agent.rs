//! A server that begins to wait for its listener while the agent is held: the kernel makes its connections then, and
//! the NIC later. And servers that wait when the agent ends.

use super::{address, bed, connect, connections, exchange, start_printing, wait_for_server};
use crate::stopped::{hold_agent, in_time};
use baton_bed::testbed::Testbed;
use baton_protocol::program::Place;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

in_both_shapes! {
    a_server_whose_agent_was_held_is_served_later
    a_listener_that_is_shut_down_ends_accept
    the_agents_end_is_no_event_of_a_listener
}

/// Echoes what comes to port 7000, all in one set. With `session` it has a listener on the NIC before; else no session
/// either.
const SERVER: &str = "
import select, socket, sys
epoll = select.epoll()
def listen(port):
    listener = socket.create_server(('', port), backlog=20)
    listener.setblocking(False)
    epoll.register(listener, select.EPOLLIN)
    print(port, flush=True)
    return listener
if sys.argv[1] == 'session': first = listen(7001)
else: print('alone', flush=True)
sys.stdin.readline()
listener = listen(7000)
peers = {}
while True:
    for fd, _ in epoll.poll():
        if fd != listener.fileno():
            data = peers[fd].recv(65536)
            if data: peers[fd].sendall(data)
            else: peers.pop(fd).close()
            continue
        try:
            peer, _ = listener.accept()
        except BlockingIOError:
            continue
        peers[peer.fileno()] = peer
        epoll.register(peer, select.EPOLLIN)
";

/// The agent does not open a session, or does not answer in one, when the server's set watches the listener.
fn a_server_whose_agent_was_held_is_served_later(beside: bool) {
    for (way, first) in [("alone", "alone"), ("session", "7001")] {
        let bed = bed(beside);
        let at = address(false, 7000);
        let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", SERVER, way]);
        assert_eq!(lines.next().expect("a line").expect("text"), first);
        let agent = hold_agent(&bed);
        writeln!(server.0.stdin.as_mut().expect("its input")).expect("a line");
        assert_eq!(in_time("epoll_ctl", move || lines.next()).expect("a line").expect("text"), "7000");
        drop(agent);
        wait_for_server(&bed, at);
        let client = connect(&bed, at).expect("a connection");
        exchange(&client, 1);
        let local = client.local_addr().expect("its address").to_string();
        let ours = connections(&bed).into_iter().find(|one| one.peer == local);
        assert!(ours.is_some_and(|one| one.made_by == Place::Nic), "{way}: the kernel made it");
    }
}

/// Waits until the NIC makes the connections of a server that sends a byte over each which it accepts. Returns the last
/// one: when it is accepted, those before are.
fn last_accepted(bed: &Testbed, at: SocketAddr) -> TcpStream {
    wait_for_server(bed, at);
    let mut last = connect(bed, at).expect("a connection");
    last.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    last.read_exact(&mut [0]).expect("a byte");
    last
}

/// A thread accepts until that fails. At a line on standard input the listener is shut down.
const SHUTS: &str = "
import socket, sys, threading
listener, peers = socket.create_server(('', 7000), backlog=20), []
def accept():
    try:
        while True:
            peers.append(listener.accept()[0])
            try: peers[-1].sendall(b'x')
            except OSError: pass
    except OSError as error: print(error.errno, flush=True)
accepts = threading.Thread(target=accept)
accepts.start()
sys.stdin.readline()
listener.shutdown(socket.SHUT_RDWR)
accepts.join()
";

/// A thread that sleeps in accept comes back when another one shuts the listener down, with the kernel's error, and not
/// only when the agent finds that out.
fn a_listener_that_is_shut_down_ends_accept(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", SHUTS]);
    let _last = last_accepted(&bed, at);
    let _agent = hold_agent(&bed);
    writeln!(server.0.stdin.as_mut().expect("its input")).expect("a line");
    assert_eq!(in_time("accept", move || lines.next()).expect("a line").expect("text"), libc::EINVAL.to_string());
}

/// Waits for its listener in the way that is its argument, and accepts. From a line on standard input on it does not
/// accept any more, but notes what is reported, which it prints at the next line.
const WATCHES: &str = "
import select, socket, sys
listener, peers, noted = socket.create_server(('', 7000), backlog=20), [], None
listener.setblocking(False)
def accept():
    try:
        while True:
            peers.append(listener.accept()[0])
            try: peers[-1].sendall(b'x')
            except OSError: pass
    except BlockingIOError: pass
def by_select(): return [(one.fileno(), 1) for one in select.select([listener, sys.stdin], [], [])[0]]
if sys.argv[1] == 'select': wait = by_select
else:
    watch = getattr(select, sys.argv[1])()
    for one in listener, sys.stdin: watch.register(one, 1)
    wait = watch.poll
while True:
    for fd, events in wait():
        if fd != listener.fileno():
            sys.stdin.readline()
            if noted is None: accept()
            print('notes' if noted is None else noted, flush=True)
            if noted is None: noted = []
        elif noted is None: accept()
        else: noted.append(events)
";

/// The queues of listeners hang up when the agent ends, which is neither a connection nor an end of the listeners'.
fn the_agents_end_is_no_event_of_a_listener(beside: bool) {
    for way in ["select", "poll", "epoll"] {
        let bed = bed(beside);
        let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", WATCHES, way]);
        let mut input = server.0.stdin.take().expect("its input");
        let _last = last_accepted(&bed, address(false, 7000));
        writeln!(input).expect("a line");
        let mut next = || lines.next().expect("a line").expect("text");
        assert_eq!(next(), "notes");
        // The agent ends in this, after it has restored all connections.
        drop(bed);
        writeln!(input).expect("a line");
        assert_eq!(next(), "[]", "{way}");
    }
}
