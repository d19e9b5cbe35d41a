use super::*;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::ops::Range;

/// A listener with slots of these numbers: in the first the NIC may make connections, in the others it has made some.
fn listener(granted: Range<u32>, made: Range<u32>) -> Listener {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let listening = Listening::read(socket.as_fd()).expect("one that a NIC can serve");
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let cid = |slot| Cid::new(slot, 1);
    let flow = Flow { local: listening.local.into(), remote: listening.local.into(), device: 0 };
    let waiting = made.map(|slot| Waiting { cid: cid(slot), image: Image::open(flow) }).collect();
    let granted = granted.map(cid).collect();
    Listener { granted, waiting, ..Listener::new(listening, Limits::default(), ours, theirs.into()) }
}

/// A client of a listener that a program has may come again.
#[test]
fn the_ends_of_listeners_are_known() {
    let mut listeners = Listeners::new();
    listeners.by_id.insert(1, listener(0..0, 0..0));
    let local = listeners.by_id[&1].listening.local;
    let other = SocketAddr::from(([127, 0, 0, 2], local.port()));
    assert!(!listeners.ends().accept_at(local.into()), "no program has it");
    listeners.by_id.entry(1).and_modify(|listener| _ = listener.sessions.insert(7));
    assert!(listeners.ends().accept_at(local.into()));
    assert!(!listeners.ends().accept_at(other.into()), "another address");
    assert!(!listeners.ends().accept_at(SocketAddr::new(local.ip(), local.port() ^ 1).into()), "another port");
    // Sockets at any address: of IPv4, of IPv6, and one of IPv6 that accepts both.
    let v6 = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], local.port()));
    for (v6_socket, dual, accepts) in [(false, false, [true, false]), (true, false, [false, true]), (true, true, [true, true])] {
        let ip: std::net::IpAddr = if v6_socket { [0u8; 16].into() } else { [0u8; 4].into() };
        listeners.by_id.entry(1).and_modify(|listener| {
            listener.listening.local.set_ip(ip);
            (listener.listening.v6, listener.listening.dual) = (v6_socket, dual);
        });
        let ends = listeners.ends();
        assert_eq!([local, v6].map(|address| ends.accept_at(address.into())), accepts);
    }
}

#[test]
fn all_listeners_together_have_a_quarter_of_the_slots() {
    let mut listeners = Listeners::new();
    assert_eq!(listeners.left(2, 40), [10, 10]);
    assert_eq!(listeners.left(1, 2), [1], "a small NIC serves one, too");
    listeners.by_id.insert(1, listener(0..3, 3..5));
    listeners.by_id.insert(2, listener(5..6, 6..6));
    listeners.by_id.entry(2).and_modify(|listener| listener.granted.push(Cid::new(0, 1).on(1)));
    listeners.revoked.insert(Cid::new(7, 1).0);
    assert_eq!(listeners.left(2, 40), [3, 9]);
    // A NIC with fewer slots than the last one's.
    assert_eq!(listeners.left(2, 20), [0, 4]);
}

/// What no session can accept any more waits for another process that has the socket, but not for ever: that one may
/// accept from the kernel alone.
#[test]
fn what_nobody_accepts_waits_for_a_while() {
    const MINUTE: u64 = 60_000_000;
    let over = |listener: &Listener, now| [false, true].map(|ends| unaccepted::is_over(listener, ends, now));
    let mut left = listener(0..0, 0..2);
    left.left_at = 7;
    assert_eq!([7, 6 + MINUTE, 7 + MINUTE].map(|now| over(&left, now)), [[false, true], [false, true], [true, true]]);
    left.sessions.insert(3);
    assert_eq!(over(&left, 7 + MINUTE), [false, false], "a program has it again");
    left.sessions.clear();
    left.waiting.clear();
    assert_eq!(over(&left, 7), [true, true], "nothing waits");
    left.asks(0);
    assert_eq!(over(&left, 7), [false, true], "some may come still");
}

/// A program has read a byte of the queue, and has ended before it has asked for the connection. What is there already
/// is not read.
#[test]
fn the_next_program_finds_all_that_waits() {
    let mut left = listener(0..0, 0..3);
    left.ours.write_all(&[7; 2]).expect("room");
    unaccepted::recount_if_unhad(&left);
    assert_eq!(queued(left), [7, 7, 0]);
}

/// The same while another worker of the server has the listener.
#[test]
fn the_other_programs_find_all_that_waits() {
    let mut shared = listener(0..0, 0..3);
    shared.sessions.extend([3, 4]);
    shared.ours.write_all(&[7; 2]).expect("room");
    unaccepted::recount_if_unhad(&shared);
    assert!(!unaccepted::leave(&mut shared, 5) && unaccepted::leave(&mut shared, 3) && shared.sessions.contains(&4));
    assert_eq!(queued(shared), [7, 7, 0]);
}

/// What a dead agent has written, and no program has read, stands for connections that wait still.
#[test]
fn what_the_last_agent_has_written_counts() {
    let mut held = listener(0..0, 0..1);
    held.ours.write_all(&[7; 2]).expect("room");
    unaccepted::announce(&held, 1);
    held.waiting.extend(listener(0..0, 1..3).waiting);
    for _ in 0..2 {
        unaccepted::announce(&held, 1);
    }
    assert_eq!(queued(held), [7, 7, 0]);
}

/// What programs can read from a listener's queue.
fn queued(of: Listener) -> Vec<u8> {
    let mut queue = UnixStream::from(of.theirs.try_clone().expect("a descriptor"));
    // The other end with it.
    drop(of);
    let mut bytes = Vec::new();
    queue.read_to_end(&mut bytes).expect("what is left");
    bytes
}
