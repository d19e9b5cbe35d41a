//! Programs whose messages the NIC acknowledges one by one (`--interface handshake`): a socket is writable when the
//! last message is acknowledged, and whoever waits for that is woken.

use crate::common::{hosts, wait_until};
use crate::stopped::{WOULD_WAIT, hold_nic, in_time, nic_process, start_with_peers};
use baton_bed::testbed::TestbedSettings;
use baton_linux::freeze::release_late;
use baton_linux::process;
use std::io::{BufRead, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;

const HANDSHAKE: &[&str] = &["--interface", "handshake"];

/// Connections that are waited for by poll, in two sets, and by a send, and the calls that wait.
const WAYS: &str = "
import select, socket, sys, threading
polls, level, edge, blocks = ways = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(4)]
for one in ways:
    one.sendall(b'y')
    assert one.recv(1) == b'y'
print('ready', flush=True)
sys.stdin.readline()
for one in polls, level, edge:
    one.setblocking(False)
poll, level_set, edge_set = select.poll(), select.epoll(), select.epoll()
poll.register(polls, select.POLLOUT)
level_set.register(level, select.EPOLLOUT)
edge_set.register(edge, select.EPOLLOUT | select.EPOLLET)
waits = {polls: poll.poll, level: level_set.poll, edge: edge_set.poll, blocks: lambda: blocks.send(b'z')}
";

/// A message of each connection is under way while the NIC stands still: no socket is writable, and all threads sleep.
/// Then their calls return, and what these report is true.
const UNDER_WAY: &str = "
def sleeps(thread):
    call = open(f'/proc/self/task/{thread.native_id}/syscall').read().split()[0]
    # poll(2), epoll_wait(2), ppoll(2), epoll_pwait(2).
    return call in ('7', '232', '271', '281')
assert edge_set.poll()
print('writable', flush=True)
sys.stdin.readline()
for one in ways:
    assert one.send(b'x') == 1
fail = [would_wait(lambda: one.send(b'x')) for one in (polls, level, edge)]
found = [len(wait(0)) for wait in (poll.poll, level_set.poll, edge_set.poll)]
print('fail', fail, 'writable', found, flush=True)
def wait_and_send(one):
    while not waits[one]():
        pass
    if one is not blocks:
        one.send(b'z')
threads = [threading.Thread(target=wait_and_send, args=[one]) for one in ways]
for thread in threads:
    thread.start()
while not all(sleeps(thread) for thread in threads):
    pass
print('asleep', flush=True)
for thread in threads:
    thread.join()
print('woken', flush=True)
sys.stdin.readline()
";

/// Sends many messages by each way of waiting: a send that follows an event finds room.
const MANY: &str = "
print('begins', flush=True)
for one in polls, level, edge:
    refused, left = 0, 500000
    while left:
        waits[one]()
        first = left
        def send():
            global left
            left -= one.send(b'x' * min(100, left))
        while left and not would_wait(send) and one is edge:
            pass
        refused += left == first
    print('refused', refused, flush=True)
";

/// A message of each connection waits for its acknowledgement while the NIC stands still. No call says that there is
/// room, and each returns when the NIC goes on, although nothing else happens to its connection: no peer answers.
#[test]
fn whoever_waits_for_a_handshake_is_woken_by_it() {
    let bed = hosts(TestbedSettings::default());
    let program = [WOULD_WAIT, WAYS, UNDER_WAY].concat();
    let ((mut program, mut lines), peers) = start_with_peers::<4>(&bed, &program, HANDSHAKE);
    for peer in &peers {
        baton_handoff::shell::block_input(peer.as_fd()).expect("a deaf peer");
    }
    let mut input = program.stdin.take().expect("its input");
    let mut says = |wanted: &str| {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert_eq!(line, wanted);
    };
    input.write_all(b"\n").expect("a line");
    says("writable\n");
    let nic = hold_nic(&bed);
    input.write_all(b"\n").expect("a line");
    says("fail [True, True, True] writable [0, 0, 0]\n");
    says("asleep\n");
    drop(nic);
    let mut line = String::new();
    let woken = in_time("the program", move || lines.read_line(&mut line).map(|_| line));
    assert_eq!(woken.expect("a line"), "woken\n");
    program.kill().expect("our child");
    program.wait().expect("its end");
}

/// The NIC stops for good, or dies, while messages wait for their acknowledgement. Whoever waits is woken when the
/// connections are in the kernel, and their peers get all bytes.
#[test]
fn a_nic_that_ends_in_a_handshake_holds_up_nobody() {
    const SIGKILL: i32 = 9;
    const SIGSTOP: i32 = 19;
    for signal in [SIGSTOP, SIGKILL] {
        let bed = hosts(TestbedSettings::default());
        let program = [WOULD_WAIT, WAYS, UNDER_WAY].concat();
        let ((mut program, mut lines), peers) = start_with_peers::<4>(&bed, &program, HANDSHAKE);
        let mut input = program.stdin.take().expect("its input");
        let mut says = |wanted: &str| {
            let mut line = String::new();
            lines.read_line(&mut line).expect("a line");
            assert_eq!(line, wanted, "signal {signal}");
        };
        input.write_all(b"\n").expect("a line");
        says("writable\n");
        let ends = nic_process(&bed);
        let nic = hold_nic(&bed);
        input.write_all(b"\n").expect("a line");
        says("fail [True, True, True] writable [0, 0, 0]\n");
        says("asleep\n");
        process::signal(ends, signal).expect("a signal");
        drop(nic);
        // Its tracer learns of its end before the agent does.
        wait_until("its tracer has let go", || !release_late());
        let mut line = String::new();
        let woken = in_time("the program", move || lines.read_line(&mut line).map(|_| line));
        assert_eq!(woken.expect("a line"), "woken\n", "signal {signal}");
        wait_until("the next NIC", || nic_process(&bed) != ends);
        input.write_all(b"\n").expect("a line");
        assert!(in_time("its end", move || program.wait()).expect("its end").success());
        for mut peer in peers {
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).expect("all bytes");
            assert_eq!(bytes, b"xz", "signal {signal}");
        }
    }
}

/// A program that waits for room, and then sends, is not refused.
#[test]
fn a_send_that_was_waited_for_finds_room_by_each_handshake() {
    let bed = hosts(TestbedSettings::default());
    let ((mut program, mut lines), peers) = start_with_peers::<4>(&bed, &[WOULD_WAIT, WAYS, MANY].concat(), HANDSHAKE);
    let mut input = program.stdin.take().expect("its input");
    let reads = |peer: TcpStream| move || std::io::copy(&mut &peer, &mut std::io::sink());
    let readers: Vec<_> = peers.map(|peer| std::thread::spawn(reads(peer))).into_iter().collect();
    input.write_all(b"\n").expect("a line");
    for wanted in ["begins\n", "refused 0\n", "refused 0\n", "refused 0\n"] {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        assert_eq!(line, wanted);
    }
    assert!(in_time("its end", move || program.wait()).expect("its end").success());
    let received: Vec<u64> = readers.into_iter().map(|reader| reader.join().expect("a reader").expect("all bytes")).collect();
    assert_eq!(received, [500_000, 500_000, 500_000, 0]);
}
