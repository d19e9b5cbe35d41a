//! What one user's programs do not do: other users' programs go on within a second.

use crate::common::{hosts, start_python, wait_until};
use crate::hostile_client::Hostile;
use baton_bed::testbed::{Testbed, TestbedSettings, address_b};
use baton_linux::process;
use baton_protocol::program::Place;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, ChildStdout};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// What is promised.
// Waits: compared with the same calls without the attacher in the same run, which take milliseconds.
pub const PROMISED: Duration = Duration::from_secs(1);

/// Does the same at each line that it reads, and prints when each call has returned.
const PROGRAM: &str = "
import socket, sys
where = (sys.argv[1], int(sys.argv[2]))
def exchange(one):
    one.sendall(b'y')
    assert one.recv(1) == b'y'
first = socket.create_connection(where)
exchange(first)
print('ready', flush=True)
for line in sys.stdin:
    one = socket.create_connection(where)
    print('connect', flush=True)
    exchange(one)
    print('exchange', flush=True)
    one.close()
    print('close', flush=True)
    exchange(first)
    print('exchange on the NIC', flush=True)
";

/// An unmodified program of root's under Baton.
pub struct Program {
    child: Child,
    lines: BufReader<ChildStdout>,
    /// When its peer has received an end of stream.
    ends: Receiver<Instant>,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An echo server on host B that reports when a connection ends.
pub fn echoes(bed: &Testbed) -> (SocketAddr, Receiver<Instant>) {
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let (ended, ends) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let ended = ended.clone();
            std::thread::spawn(move || {
                let mut bytes = [0; 64];
                while let Ok(length @ 1..) = (&stream).read(&mut bytes) {
                    let _ = (&stream).write_all(&bytes[..length]);
                }
                ended.send(Instant::now())
            });
        }
    });
    (at, ends)
}

impl Program {
    pub fn start(bed: &Testbed) -> Program {
        let (at, ends) = echoes(bed);
        let (child, lines) = start_python(bed, PROGRAM, at, true);
        Program { child, lines, ends }
    }

    /// How long each call takes, and its FIN to the peer.
    pub fn calls(&mut self) -> Vec<(String, Duration)> {
        while self.ends.try_recv().is_ok() {}
        let mut times = Vec::new();
        let mut last = Instant::now();
        writeln!(self.child.stdin.as_mut().expect("its input")).expect("a line");
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).expect("a line") > 0, "the program has ended: {times:?}");
            let now = Instant::now();
            let name = line.trim_end().to_owned();
            times.push((name.clone(), now - last));
            if name == "close" {
                // Waits: for much longer than is promised.
                let end = self.ends.recv_timeout(20 * PROMISED).expect("a FIN");
                times.push(("FIN".into(), end.saturating_duration_since(now)));
            }
            if name == "exchange on the NIC" {
                return times;
            }
            last = Instant::now();
        }
    }
}

/// A NIC dies, and an attacher does not lend the descriptors of what it had: its connections alone wait for that.
#[test]
fn an_attacher_that_lends_nothing() {
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let mut program = Program::start(&bed);
    let on_nic = |count| {
        let all = bed.tool().expect("a tool").connections().expect("a list");
        all.iter().filter(|one| one.place == Place::Nic).count() == count
    };
    let kill_nic = || {
        let nic = bed.tool().expect("a tool").statistics().expect("statistics").nic_process;
        process::signal(nic, libc::SIGKILL).expect("the NIC");
    };
    let mut longest = |count| {
        wait_until("the connections are on the NIC", || on_nic(count));
        kill_nic();
        program.calls().into_iter().map(|(_, time)| time).max().expect("calls")
    };
    let alone = longest(1);
    let mut hostile = Hostile::start(&bed, "silent");
    hostile.await_attack();
    let beside = longest(2);
    println!("the longest call takes {alone:?} after a NIC's death, and {beside:?} beside the attacher");
    assert!(beside < alone + PROMISED, "{beside:?}, {alone:?} without the attacher");
}
