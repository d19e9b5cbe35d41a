//! A connection's number in its session goes to the next connection when its program has closed it.

use crate::common::{answered, connect, hosts};
use crate::hostile_client::Client;
use crate::moves::nft;
use baton_abi::layout::{block, session};
use baton_bed::testbed::{TestbedSettings, address_b};
use baton_linux::{process, socket};
use baton_protocol::program::{Ask, Opening, Reply};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

/// The agent dies while the NIC opens a connection for a program, which has not had the answer and repeats the request:
/// its socket is one connection's.
#[test]
fn a_repeated_request_to_connect_makes_one_connection() {
    let bed = hosts(TestbedSettings::default());
    nft(&bed.host_b, &["add table ip deaf; add chain ip deaf input { type filter hook input priority 0; policy drop; }"]);
    let client = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let opening = bed.host_a.run(|| socket::stream(false, libc::IPPROTO_TCP)).expect("a socket");
    let connect = || client.connect(opening.as_fd(), SocketAddr::new(address_b(false), 8080)).expect("an agent");
    connect();
    let agent = answered(&bed, |tool| tool.statistics()).agent_process;
    process::signal(agent, libc::SIGKILL).expect("the agent");
    client.await_restart();
    let number = connect();
    let listed = answered(&bed, |tool| tool.connections());
    assert!(matches!(&listed[..], [one] if one.connection == number), "{listed:?}");
}

/// A program notes that it has closed a connection, and its thread waits for its turn to ask the agent to forget it.
/// The agent dies, and the next one forgets it by itself and gives its number away. The request does not concern the
/// connection that has the number then.
#[test]
fn a_late_request_to_forget_does_not_concern_the_next_connection() {
    let bed = hosts(TestbedSettings::default());
    let client = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let (first, _peer) = connect(&bed, false, 8080);
    let number = client.register(&first).expect("an agent");
    let flags = client.memory.word32(session::block(number) + block::FLAGS);
    let close = || flags.fetch_or(block::FLAG_CLOSED, Ordering::SeqCst);
    close();
    let agent = answered(&bed, |tool| tool.statistics()).agent_process;
    process::signal(agent, libc::SIGKILL).expect("the agent");
    client.await_restart();
    assert_eq!(flags.load(Ordering::SeqCst) & block::FLAG_CLOSED, 0, "the next agent has forgotten it");

    let (second, _peer) = connect(&bed, false, 8081);
    assert_eq!(client.register(&second), Some(number));
    let forget = || assert!(matches!(client.ask(Ask::Forget { connection: number }), Some(Reply::Done)));
    forget();
    let listed = || answered(&bed, |tool| tool.connections());
    assert!(matches!(&listed()[..], [one] if one.local.ends_with(":8081")), "{:?}", listed());
    close();
    // The socket is registered again before the agent has got that: its number goes to another connection soon.
    let again = client.register(&second).expect("an agent");
    assert_ne!(again, number);
    forget();
    assert!(matches!(&listed()[..], [one] if one.connection == again), "{:?}", listed());
    client.memory.word32(session::block(again) + block::FLAGS).fetch_or(block::FLAG_CLOSED, Ordering::SeqCst);
    assert!(matches!(client.ask(Ask::Forget { connection: again }), Some(Reply::Done)));
    assert!(listed().is_empty(), "{:?}", listed());
}
