//! Connections that the NIC has made and that a program accepts while agents die: each is some program's.

use super::{
    ECHO, address, bed, connect, count, exchange, made_by_nic, on_demand, start, start_printing, wait_for_server, wait_until,
};
use crate::common::{answered, hosts};
use crate::entries::PYTHON;
use crate::fuse::{FuseFile, READ};
use crate::hostile_client::Client;
use crate::stopped::in_time;
use baton_abi::layout::{Counter, session};
use baton_agent::{Crash, Fault, Step};
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_linux::{freeze, process, socket};
use baton_protocol::program::Opening;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

in_both_shapes! {
    what_was_not_received_is_given_again
    what_waits_to_be_accepted_outlives_an_agent
    an_agent_may_die_while_a_program_accepts
    a_program_that_is_closed_for_good_accepts_what_the_nic_makes
    bytes_without_connections_hide_no_client
    a_listener_in_a_set_that_is_passed_on_is_the_kernels
    a_read_that_does_not_end_holds_up_no_agent
}

fn agent_of(bed: &Testbed) -> u32 {
    answered(bed, |tool| tool.statistics()).agent_process
}

/// Waits until a connection waits to be accepted: the queue has a byte for it.
#[track_caller]
fn await_byte(queue: &OwnedFd) {
    let mut queue = UnixStream::from(queue.try_clone().expect("a descriptor"));
    queue.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    let read = queue.read_exact(&mut [0]);
    assert!(read.is_ok(), "no connection waits: {read:?}");
}

/// A client whose connection the NIC has made, and for which the queue has had a byte. Before the NIC has slots for the
/// listener the kernel makes them, and the program accepts them there.
fn client_of_nic(bed: &Testbed, listener: &TcpListener, queue: &OwnedFd) -> TcpStream {
    let (at, mut client) = (listener.local_addr().expect("an address"), None);
    listener.set_nonblocking(true).expect("non-blocking");
    wait_until("the NIC makes a connection", || {
        let one = connect(bed, at).expect("a connection");
        let mut by_nic = false;
        wait_until("somebody makes it", || {
            by_nic = socket::receive(queue.as_fd(), &mut [0]).is_ok_and(|bytes| bytes > 0);
            by_nic || listener.accept().is_ok()
        });
        client = by_nic.then_some(one);
        by_nic
    });
    client.expect("a client")
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
    let client = client_of_nic(&bed, &listener, &queue);
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
    let client = client_of_nic(&bed, &listener, &queue);
    let (other, fd) = program.accept(id).expect("another connection");
    assert_ne!(other, number);
    assert_eq!(socket::peer_address(fd.as_fd()).expect("its peer"), client.local_addr().expect("its address"));
}

/// What waits to be accepted when the agent dies is accepted from the next one, also when the clients wait for the
/// program to send something first: they send nothing that would make their connections anew.
fn what_waits_to_be_accepted_outlives_an_agent(beside: bool) {
    let bed = bed(beside);
    let at = address(false, 7000);
    let listener = bed.host_a.run(|| TcpListener::bind(at)).expect("a listener");
    let program = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let (id, queue) = program.listen(&listener);
    let given = program.memory.word32(session::GIVEN);
    let clients = [(); 3].map(|()| client_of_nic(&bed, &listener, &queue));
    assert_eq!(count(&bed, Counter::Made), clients.len() as u64);
    process::signal(agent_of(&bed), libc::SIGKILL).expect("the agent");
    program.await_restart();
    let accepted = clients.each_ref().map(|_| {
        await_byte(&queue);
        let (_, fd) = program.accept(id).expect("a connection that has waited");
        given.store(0, Ordering::Release);
        socket::peer_address(fd.as_fd()).expect("its peer")
    });
    for client in &clients {
        assert!(accepted.contains(&client.local_addr().expect("its address")), "{accepted:?}");
    }
    assert!(program.accept(id).is_none(), "no other connection waits");
}

/// The agent dies at a step of a connection that a program accepts, with the answer or before the program has had the
/// time to use it, at every third of these steps. The program gets each connection, once; none of the clients, of which
/// the first connects while an agent dies, is reset.
fn an_agent_may_die_while_a_program_accepts(beside: bool) {
    for after in [Step::Purged, Step::HandedOff, Step::Nic] {
        let crash = Some(Crash { after, fault: Fault::AgentDies });
        let bed = hosts(TestbedSettings { beside, crash, ..TestbedSettings::default() });
        let at = address(false, 7000);
        let mut server = start(&bed, &["python3", "-c", &on_demand()]);
        let mut orders = server.0.stdin.take().expect("its input");
        wait_for_server(&bed, at);
        let first = agent_of(&bed);
        for _ in 0..50 {
            writeln!(orders, "accept").expect("a server");
        }
        let mine = |peer: &str| answered(&bed, |tool| tool.connections()).iter().any(|one| one.peer == peer);
        // One after the other: with more than two that go back to the NIC by themselves each agent would die of them.
        for byte in 1..7 {
            let client = connect(&bed, at).expect("a connection");
            let local = client.local_addr().expect("its address").to_string();
            exchange(&client, byte);
            exchange(&client, byte + 100);
            drop(client);
            wait_until("the end of a connection", || !mine(&local));
        }
        assert_ne!(agent_of(&bed), first, "no agent has died: {after:?}");
        assert_eq!(answered(&bed, |tool| tool.statistics()).lost, 0, "{after:?}");
    }
}

/// A program forks by a system call of its own, so that nothing of its stays on the NIC, which makes connections for it
/// nevertheless: it accepts and uses them.
fn a_program_that_is_closed_for_good_accepts_what_the_nic_makes(beside: bool) {
    let (bed, at) = (bed(beside), address(false, 7000));
    let program = format!(
        "
import ctypes, os, sys, threading
sys.setswitchinterval(1000)
def fork():
    sys.stdin.readline()
    # 57 is SYS_fork of x86-64. The child has Python's lock, which nobody has asked it to give up.
    if ctypes.PyDLL(None).syscall(57) == 0:
        os._exit(0)
    os.wait()
    print('closed', flush=True)
threading.Thread(target=fork, daemon=True).start()
{ECHO}"
    );
    let (mut program, mut lines) = start_printing(&bed, &["python3", "-c", &program]);
    wait_for_server(&bed, at);
    exchange(&connect(&bed, at).expect("a client"), 1);
    program.0.stdin.as_mut().expect("its input").write_all(b"\n").expect("a line");
    assert_eq!(lines.next().expect("a line").expect("text"), "closed");
    let before = count(&bed, Counter::Made);
    (2..5).for_each(|byte| exchange(&connect(&bed, at).expect("a client"), byte));
    assert!(count(&bed, Counter::Made) > before, "the NIC makes none");
}

/// Waits by edges for clients at an address, and echoes the first bytes of each, once the test has sent it
/// a line. Prints its process, its listener's number, and when it has found no other client.
const BY_EDGES: &str = "
import os, select, socket, sys
listener = socket.create_server((sys.argv[1], 7000), backlog=20)
listener.setblocking(False)
epoll = select.epoll()
epoll.register(listener, select.EPOLLIN | select.EPOLLET)
print(os.getpid(), listener.fileno(), flush=True)
sys.stdin.readline()
while True:
    epoll.poll()
    try:
        while True:
            one = listener.accept()[0]
            one.sendall(one.recv(100))
    except BlockingIOError: print('none', flush=True)
";

/// A queue has bytes for two connections that another session has accepted. Beside one of them there would be none for
/// the next client: a server that waits for edges reads both, and serves it.
fn bytes_without_connections_hide_no_client(beside: bool) {
    let (bed, at) = (bed(beside), address(false, 7000));
    let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", BY_EDGES, &at.ip().to_string()]);
    let mut said = || lines.next().expect("a line").expect("text");
    let [process, number] = said().split(' ').map(|word| word.parse().expect("a number")).collect::<Vec<u32>>()[..] else {
        panic!("two numbers")
    };
    let process = process::open_process(process).expect("the server");
    let listener = freeze::take_descriptor(process.as_fd(), number as i32).expect("its listener");
    let listener = TcpListener::from(listener.as_fd().try_clone_to_owned().expect("a descriptor"));
    let program = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let (id, queue) = program.listen(&listener);
    let accept = || {
        program.accept(id).expect("a connection");
        program.memory.word32(session::GIVEN).store(0, Ordering::Release);
    };
    let _first = client_of_nic(&bed, &listener, &queue);
    accept();
    let bytes = || socket::queue_bytes(queue.as_fd(), socket::SIOCINQ).expect("a number");
    let others = [1, 2].map(|count| {
        let client = connect(&bed, at).expect("a connection");
        wait_until("the NIC's connection", || bytes() == count);
        client
    });
    others.iter().for_each(|_| accept());
    assert_eq!(bytes(), 2, "no byte of them was read");
    server.0.stdin.as_mut().expect("its input").write_all(b"\n").expect("a line");
    assert_eq!(said(), "none");
    assert_eq!(bytes(), 0, "it has read on");
    let made = count(&bed, Counter::Made);
    let mut client = connect(&bed, at).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    client.write_all(&[7]).and_then(|()| client.read_exact(&mut [0])).expect("the echo");
    assert_eq!(count(&bed, Counter::Made), made + 1);
}

/// Echoes the bytes of each client in turn. When the test sends it a line, it sends its epoll set's descriptor in a
/// message.
const PASSES_SET_ON: &str = "
import select, socket, sys
listener = socket.create_server(('', 7000), backlog=20)
listener.setblocking(False)
epoll = select.epoll()
for one in listener, sys.stdin: epoll.register(one, select.EPOLLIN)
ours, theirs = socket.socketpair()
while True:
    for fd, _ in epoll.poll():
        if fd == sys.stdin.fileno():
            sys.stdin.readline()
            socket.send_fds(ours, [b'set'], [epoll.fileno()])
            print('passed on', flush=True)
            continue
        try: client = listener.accept()[0]
        except BlockingIOError: continue
        while data := client.recv(65536): client.sendall(data)
        client.close()
";

/// A set with a listener is passed on. Nobody could have it watch the queue that the next agent gives the program, so
/// the kernel makes the listener's connections from then on.
fn a_listener_in_a_set_that_is_passed_on_is_the_kernels(beside: bool) {
    let (bed, at) = (bed(beside), address(false, 7000));
    let (mut program, mut lines) = start_printing(&bed, &["python3", "-c", PASSES_SET_ON]);
    wait_for_server(&bed, at);
    assert_eq!(made_by_nic(&bed, at), Some(true));
    program.0.stdin.as_mut().expect("its input").write_all(b"\n").expect("a line");
    assert_eq!(lines.next().expect("a line").expect("text"), "passed on");
    wait_until("the kernel's connections", || made_by_nic(&bed, at) == Some(false));
    (1..4).for_each(|byte| exchange(&connect(&bed, at).expect("a client"), byte));
}

/// Reads from its standard input into memory that does not come.
const READS: &str = "
import mmap, socket
memory = mmap.mmap(3, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
socket.socket(fileno=0).recv_into(memory, 1)
";

/// A process that reads from a listener's queue, and does not come back while this exists.
struct Reads {
    child: Child,
    file: Option<FuseFile>,
}

impl Drop for Reads {
    fn drop(&mut self) {
        // It waits for the file, whatever signal comes.
        drop(self.file.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program reads from the queue of a listener into memory that does not come, and keeps all who would read from it
/// waiting. The next agent counts what is in the queue, and reads nothing.
fn a_read_that_does_not_end_holds_up_no_agent(beside: bool) {
    let Some(file) = FuseFile::new(&[READ]) else { return };
    let bed = bed(beside);
    let at = address(false, 7000);
    let listener = bed.host_a.run(|| TcpListener::bind(at)).expect("a listener");
    let program = Client::open(&bed.socket(), Opening::alone()).expect("a session");
    let (id, queue) = program.listen(&listener);
    let _first = client_of_nic(&bed, &listener, &queue);
    let mut command = file.held_by(0, PYTHON);
    command.args(["-c", READS]).stdin(Stdio::from(queue.try_clone().expect("a descriptor")));
    let mut reads = Reads { child: command.spawn().expect("python3"), file: Some(file) };
    let _second = connect(&bed, at).expect("a connection");
    reads.file.as_mut().expect("the file").until_waited_for();
    process::signal(agent_of(&bed), libc::SIGKILL).expect("the agent");
    let program = in_time("the next agent", move || {
        program.await_restart();
        program
    });
    assert!(program.accept(id).is_some(), "a connection has waited");
}
