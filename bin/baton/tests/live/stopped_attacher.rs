//! An attacher that does not run for a while: its connections leave the NIC as soon as it runs again, however many they
//! are.

use crate::attach::{Killed, attach, listed};
use crate::common::wait_until;
use crate::scratch::Scratch;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::Place;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Connections: more than there is room for requests in the attacher's channel, which has 208 KB, and 768 bytes for
/// each.
const MANY: usize = 350;

/// Echoes what comes on any number of connections; prints its port.
pub const SERVER: &str = "
import select, socket
listener = socket.create_server(('127.0.0.1', 0), backlog=100)
print(listener.getsockname()[1], flush=True)
epoll = select.epoll()
epoll.register(listener, select.EPOLLIN)
open_ones = {}
while True:
    for fd, _ in epoll.poll():
        if fd == listener.fileno():
            one, _ = listener.accept()
            one.setblocking(False)
            open_ones[one.fileno()] = one
            epoll.register(one, select.EPOLLIN)
        elif piece := open_ones[fd].recv(1000):
            open_ones[fd].send(piece)
        else:
            epoll.unregister(fd)
            open_ones.pop(fd).close()
";

/// Opens connections: to which port, and how many. At each line, and at the beginning, asks over each of them, and
/// prints a line.
const CLIENT: &str = "
import socket, sys
every = [socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=30) for _ in range(int(sys.argv[2]))]
while True:
    for n, one in enumerate(every):
        one.sendall(b'%05d' % n)
    for n, one in enumerate(every):
        got = b''
        while len(got) < 5:
            got += one.recv(5 - len(got)) or sys.exit('the end')
        assert got == b'%05d' % n
    print('echoed', flush=True)
    if not sys.stdin.readline():
        break
";

/// A program in Python.
pub struct Program {
    pub child: Killed,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Program {
    pub fn start(host: &Namespace, program: &str, arguments: &[&str]) -> Program {
        let mut command = Command::new("python3");
        command.args(["-c", program]).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = host.spawn(&mut command).expect("python3");
        let (input, output) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
        Program { child: Killed(child), input, lines: BufReader::new(output).lines() }
    }

    pub fn line(&mut self) -> String {
        self.lines.next().expect("a line").expect("text")
    }
}

/// The firewall changes while the attacher of many connections is stopped: all leave the NIC when it runs again, since
/// only the kernel knows what the new rules mean for them.
#[test]
fn all_connections_of_an_attacher_that_was_stopped_leave_the_nic() {
    let scratch = Scratch::new("stopped-attacher");
    let host = Namespace::new().expect("a namespace");
    let mut server = Program::start(&host, SERVER, &[]);
    let port = server.line();
    let mut client = Program::start(&host, CLIENT, &[&port, &MANY.to_string()]);
    assert_eq!(client.line(), "echoed");
    let attacher = Killed(attach(&host, &scratch, &["--after", "0", &server.child.0.id().to_string()]));
    let at = |place| listed(&scratch).iter().filter(|one| one.place == place).count();
    wait_until("all are on the NIC", || at(Place::Nic) == MANY);
    process::signal(attacher.0.id(), libc::SIGSTOP).expect("our child");
    let mut nft = Command::new("nft");
    nft.arg("add table inet guard; add chain inet guard in { type filter hook input priority 0; }");
    assert!(host.spawn(&mut nft).expect("nft").wait().expect("its end").success());
    // Waits: longer than the second after which the agent asks for what has not returned.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(at(Place::Nic), MANY, "without their attacher they cannot leave it");
    process::resume(attacher.0.id()).expect("our child");
    wait_until("all have left the NIC", || at(Place::Kernel) == MANY);
    writeln!(client.input).expect("it reads");
    assert_eq!(client.line(), "echoed");
}
