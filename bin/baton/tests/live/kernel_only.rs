//! Calls that only the kernel can make on a connection, while the connection cannot leave the NIC.

use crate::common::{hosts, start_python, wait_until};
use crate::stopped::in_time;
use baton_bed::testbed::{Testbed, TestbedSettings, address_b};
use baton_protocol::program::{Ask, ConnectionInfo, Place, Reply};
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::time::Duration;

/// Splices bytes into its connection, and sends some more. With O_NONBLOCK, it prints "waits" when that has been
/// refused with EAGAIN.
const PROGRAM: &str = "
import os, select, socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
one.sendall(b'begin')
print('ready', flush=True)
if sys.stdin.readline() == 'nonblocking\\n': one.setblocking(False)
pipe, end = os.pipe()
os.write(end, bytes(range(250)) * 40)
done, refused = 0, False
while done < 10000:
    try:
        done += os.splice(pipe, one.fileno(), 10000 - done)
    except BlockingIOError:
        if not refused: print('waits', flush=True)
        refused = True
        select.select([], [one], [])
one.setblocking(True)
one.sendall(b'end')
print('spliced', flush=True)
sys.stdin.readline()
";

/// Receives with a flag (MSG_MORE) that means nothing there, or sends urgent data and some more.
const FLAGS: &str = "
import socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
one.sendall(b'begin')
print('ready', flush=True)
if sys.stdin.readline() == 'receives\\n':
    print(one.recv(5, 0x8000).decode(), flush=True)
else:
    one.send(b'!', socket.MSG_OOB)
    print('there', flush=True)
one.sendall(b'end')
sys.stdin.readline()
";

/// A Python program on host A that has connected to host B and sent "begin", with its further lines and its peer. Under
/// Baton the connection is on the NIC, and cannot be restored: there is no route to the peer.
fn cut_off(
    program: &str,
    beside: bool,
    with_baton: bool,
) -> (Testbed, Child, impl Iterator<Item = String> + Send + use<>, TcpStream) {
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let listener = bed.host_b.run(|| TcpListener::bind((address_b(false), 0))).expect("a listener");
    let (child, lines) = start_python(&bed, program, listener.local_addr().expect("its address"), with_baton);
    let (mut peer, _) = listener.accept().expect("a connection");
    peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    let mut begin = [0; 5];
    peer.read_exact(&mut begin).expect("its first bytes");
    assert_eq!(&begin, b"begin");
    if with_baton {
        wait_until("it is on the NIC", || listed(&bed).iter().any(|one| one.place == Place::Nic));
        ip(&bed, "route del 10.77.0.0/24");
        wait_until("the route's end is noticed", || listed(&bed).iter().any(|one| one.reason.contains("no route")));
    }
    (bed, child, lines.lines().map(|line| line.expect("text")), peer)
}

fn listed(bed: &Testbed) -> Vec<ConnectionInfo> {
    bed.tool().expect("a tool").connections().expect("a list")
}

fn ip(bed: &Testbed, arguments: &str) {
    let mut command = Command::new("ip");
    let status = bed.host_a.spawn(command.args(arguments.split(' '))).expect("ip").wait().expect("its status");
    assert!(status.success(), "ip {arguments}");
}

/// The system call in which a process's first thread sleeps.
pub fn sleeps_in(process: u32) -> Option<i64> {
    let line = std::fs::read_to_string(format!("/proc/{process}/syscall")).ok()?;
    line.split(' ').next()?.parse().ok()
}

/// A program splices into a connection on the NIC while there is no route to the peer, so that it cannot be restored.
/// The call waits, or fails with EAGAIN if it may not; when the route is back the peer gets all bytes, in order.
#[test]
fn a_splice_waits_until_the_connection_is_in_the_kernel() {
    for (beside, way) in [(false, "blocking"), (true, "blocking"), (false, "nonblocking")] {
        let (bed, mut program, mut lines, mut peer) = cut_off(PROGRAM, beside, true);
        let mut input = program.stdin.take().expect("its input");
        writeln!(input, "{way}").expect("a line");
        if way == "blocking" {
            // It asks the agent in other calls, and sleeps in this one between two times.
            wait_until("it waits", || sleeps_in(program.id()) == Some(libc::SYS_ppoll));
        } else {
            let (line, rest) = in_time("a splice", move || (lines.next(), lines));
            assert_eq!(line.as_deref(), Some("waits"));
            lines = rest;
        }
        ip(&bed, "route add 10.77.0.0/24 dev baton0 src 10.77.0.1");
        let mut received = vec![0; 10_003];
        peer.read_exact(&mut received).expect("all bytes");
        let expected: Vec<u8> = (0..10_000).map(|at| (at % 250) as u8).chain(*b"end").collect();
        assert!(received == expected, "{way}, beside: {beside}: wrong bytes");
        assert_eq!(in_time("the splice's end", move || lines.next()).as_deref(), Some("spliced"));
        drop(input);
        assert!(program.wait().expect("its end").success());
    }
}

/// A call with a flag that only the kernel knows waits, too: it finds no shell, and urgent data is not sent as other
/// data.
#[test]
fn a_call_with_flags_waits_until_the_connection_is_in_the_kernel() {
    for way in ["receives", "sends"] {
        let (bed, mut program, mut lines, mut peer) = cut_off(FLAGS, false, true);
        peer.write_all(b"there").expect("sent");
        let mut input = program.stdin.take().expect("its input");
        writeln!(input, "{way}").expect("a line");
        wait_until("it waits", || sleeps_in(program.id()) == Some(libc::SYS_ppoll));
        ip(&bed, "route add 10.77.0.0/24 dev baton0 src 10.77.0.1");
        assert_eq!(in_time("the call", move || lines.next()).as_deref(), Some("there"), "{way}");
        let mut received = [0; 3];
        peer.read_exact(&mut received).expect("all but urgent data");
        assert_eq!(&received, b"end", "{way}");
        drop(input);
        assert!(program.wait().expect("its end").success());
    }
}

/// Shuts receiving down, or both directions, and prints what it reads then: at once, when more has come, and later.
const SHUTS: &str = "
import select, socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
one.sendall(b'begin')
print('ready', flush=True)
both = sys.stdin.readline() == 'both\\n'
one.setblocking(False)
one.shutdown(socket.SHUT_RDWR if both else socket.SHUT_RD)
is_readable = lambda: bool(select.select([one], [], [], 0)[0])
print(is_readable(), one.recv(9), flush=True)
if not both:
    one.sendall(b'more')
    while not (data := one.recv(9)): pass
    print(is_readable(), data, one.recv(9), flush=True)
sys.stdin.readline()
print(is_readable(), one.recv(9), flush=True)
sys.stdin.readline()
";

/// A program shuts receiving down while there is no route to the peer, so that the connection cannot leave the NIC: it
/// does not wait, reads what it would read natively, also when the connection is in the kernel later.
#[test]
fn receiving_is_shut_where_the_connection_is() {
    for way in ["alone", "both"] {
        let read = |with_baton: bool| {
            let (bed, mut program, mut lines, mut peer) = cut_off(SHUTS, false, with_baton);
            let mut input = program.stdin.take().expect("its input");
            writeln!(input, "{way}").expect("a line");
            let (first, rest) = in_time("shutdown", move || (lines.next(), lines));
            let mut said = vec![first];
            lines = rest;
            if with_baton {
                assert!(listed(&bed).iter().all(|one| one.place == Place::Nic), "{way}: {:?}", listed(&bed));
                ip(&bed, "route add 10.77.0.0/24 dev baton0 src 10.77.0.1");
            }
            if way == "both" {
                assert_eq!(peer.read_to_end(&mut Vec::new()).expect("the end of the stream"), 0);
            } else {
                peer.read_exact(&mut [0; 4]).expect("more");
                peer.write_all(b"there").expect("sent");
                said.push(lines.next());
            }
            if with_baton {
                let mut tool = bed.tool().expect("a tool");
                let one = listed(&bed).pop().expect("the connection");
                let ask = Ask::MoveAny { session: one.session, connection: one.connection, to: Place::Kernel, nic: None };
                wait_until("it is in the kernel", || matches!(tool.ask(ask.clone()), Ok(Reply::Done)));
            }
            writeln!(input).expect("a line");
            said.push(lines.next());
            drop(input);
            assert!(program.wait().expect("its end").success());
            said
        };
        assert_eq!(read(true), read(false), "{way}");
    }
}
