//! Connections that the NIC has made and that a program accepts while agents die: each is some program's.

use super::{address, bed, connect, count, wait_until};
use crate::common::answered;
use crate::hostile_client::Client;
use baton_abi::layout::{Counter, session};
use baton_bed::testbed::Testbed;
use baton_linux::{process, socket};
use baton_protocol::program::Opening;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

in_both_shapes! {
    what_was_not_received_is_given_again
}

fn agent_of(bed: &Testbed) -> u32 {
    answered(bed, |tool| tool.statistics()).agent_process
}

/// Waits until a connection waits to be accepted: the queue has a byte for it.
fn await_byte(queue: &OwnedFd) {
    let mut queue = UnixStream::from(queue.try_clone().expect("a descriptor"));
    queue.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    queue.read_exact(&mut [0]).expect("a byte");
}

/// A program that asks for a connection, and has not noted that it has the one that it was given last, gets that one
/// again: from the same agent, which may have read a request that is repeated, and from the next one. Whatever else it
/// notes concerns nobody.
fn what_was_not_received_is_given_again(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let listener = bed.host_a.run(|| TcpListener::bind(at)).expect("a listener");
    let program = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let (id, queue) = program.listen(&listener);
    let given = program.memory.word32(session::GIVEN);
    let client = connect(&bed, at).expect("a connection");
    await_byte(&queue);
    let (number, _) = program.accept(id).expect("a connection");
    assert_eq!(given.load(Ordering::Acquire), number + 1);
    assert_eq!(program.accept(id).expect("the same agent's answer").0, number);
    process::signal(agent_of(&bed), libc::SIGKILL).expect("the agent");
    program.await_restart();
    let (again, fd) = program.accept(id).expect("the next agent's answer");
    assert_eq!(again, number);
    assert_eq!(socket::peer_address(fd.as_fd()).expect("its peer"), client.local_addr().expect("its address"));
    assert_eq!(answered(&bed, |tool| tool.connections()).len(), 1);
    // It has it now.
    given.store(0, Ordering::Release);
    assert!(program.accept(id).is_none(), "no other connection waits");
    for none in [number + 2, session::MAX_CONNECTIONS as u32 + 1, u32::MAX] {
        given.store(none, Ordering::Release);
        assert!(program.accept(id).is_none(), "there is no connection {}", none - 1);
    }
    let (before, mut clients) = (count(&bed, Counter::Made), Vec::new());
    wait_until("the next NIC makes connections", || {
        // Waits: between two connections, since those that the kernel makes meanwhile fill the listener's queue.
        std::thread::sleep(Duration::from_millis(20));
        clients.extend(connect(&bed, at));
        count(&bed, Counter::Made) > before
    });
    await_byte(&queue);
    let (other, fd) = program.accept(id).expect("another connection");
    assert_ne!(other, number);
    let peer = socket::peer_address(fd.as_fd()).expect("its peer");
    assert!(clients.iter().any(|one| one.local_addr().expect("its address") == peer), "{peer} is no new client");
}
