//! Entries of /proc that hold up whoever reads them: a process can see to that. Who looks for Batons, is attached to
//! programs, or searches for other holders of a socket, goes on.

use crate::attach::{attach, listed};
use crate::common::{hosts, scene, wait_until};
use crate::fuse::{FuseFile, NEVER_FLUSHED, READ};
use crate::hostile_client::NOBODY;
use crate::scratch::{Scratch, text};
use crate::stopped::in_time;
use baton_bed::testbed::{TestbedSettings, address_b};
use baton_linux::namespace::Namespace;
use baton_protocol::program::Place;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What is promised.
// Waits: compared with the same call without such a process in the same run. Another test's listener may cost a second
// of it.
const PROMISED: Duration = Duration::from_secs(3);

pub const PYTHON: &str = "/usr/bin/python3";

/// Holds the lock of its own memory: one thread reads that through /proc, at an address whose page does not come, and
/// another one waits to map more, behind which all others wait.
const LOCKS_ITS_MEMORY: &str = "
import ctypes, mmap, os, sys, threading
libc = ctypes.CDLL(None)
if sys.argv[1]:
    libc.prctl(15, sys.argv[1].encode(), 0, 0, 0)
held = mmap.mmap(3, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
address = ctypes.addressof(ctypes.c_char.from_buffer(held))
memory = os.open('/proc/self/mem', os.O_RDONLY)
reader = threading.Thread(target=lambda: os.pread(memory, 1, address))
reader.start()
print('reads', flush=True)
sys.stdin.readline()
libc.mmap(0, 4096, 1, 0x22, -1, 0)
";

/// Such a process while this exists.
pub struct Locked {
    child: Child,
    file: Option<FuseFile>,
}

impl Locked {
    /// One of nobody's, by a name. None if there is no FUSE here.
    pub fn new(name: &str) -> Option<Locked> {
        let mut file = FuseFile::new(&[READ])?;
        let mut command = file.held_by(NOBODY, PYTHON);
        command.args(["-c", LOCKS_ITS_MEMORY, name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        assert_eq!(line, "reads\n");
        file.until_waited_for();
        writeln!(child.stdin.as_mut().expect("its input")).expect("a line");
        let number = child.id();
        let maps = || std::fs::read_to_string(format!("/proc/{number}/syscall")).is_ok_and(|call| call.starts_with("9 "));
        wait_until("it maps", maps);
        Some(Locked { child, file: Some(file) })
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // A thread of it waits for the file, whatever signal comes.
        drop(self.file.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `baton ls` about all Batons, and how long it takes.
fn list() -> (String, Duration) {
    in_time("a list", || {
        let begun = Instant::now();
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        let ran = command.args(["ls", "--json"]).env_remove("BATON_SOCKET").output().expect("baton ls");
        (text(&[ran.stdout, ran.stderr].concat()), begun.elapsed())
    })
}

/// A process whose memory is locked, so that reading its command line waits, is passed by; so is one that calls itself
/// an agent.
#[test]
fn a_process_that_locks_its_memory_holds_up_no_list() {
    let scene = scene(TestbedSettings::default());
    let socket = scene.bed.socket().to_string_lossy().into_owned();
    let (_, alone) = list();
    for name in ["", "baton-agent"] {
        let Some(_locked) = Locked::new(name) else { return };
        let (listed, beside) = list();
        assert!(listed.contains(&socket), "{socket} is not in {listed}");
        println!("a list takes {alone:?}, and {beside:?} beside a process {name:?} whose memory is locked");
        assert!(beside < alone + PROMISED, "{beside:?}, {alone:?} without it");
    }
}

/// Calls itself an agent, and executes a program with a file that does not close: it never comes back from that.
const STAYS_IN_EXECVE: &str = "
import ctypes, os
ctypes.CDLL(None).prctl(15, b'baton-agent', 0, 0, 0)
os.set_inheritable(3, False)
os.execv('/bin/true', ['true'])
";

/// A process that stays in execve(2) is said not to let anybody look at it.
#[test]
fn a_process_that_stays_in_execve_holds_up_no_list() {
    let scene = scene(TestbedSettings::default());
    let socket = scene.bed.socket().to_string_lossy().into_owned();
    let (_, alone) = list();
    let Some(mut file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let mut command = file.held_by(NOBODY, PYTHON);
    let mut child = command.args(["-c", STAYS_IN_EXECVE]).spawn().expect("python3");
    file.until_waited_for();
    let (listed, beside) = list();
    drop(file);
    child.wait().expect("its end");
    assert!(listed.contains(&socket), "{socket} is not in {listed}");
    assert!(listed.contains("does not let anybody look"), "{listed}");
    println!("a list takes {alone:?}, and {beside:?} beside a process in execve(2)");
    assert!(beside < alone + PROMISED, "{beside:?}, {alone:?} without it");
}

/// Executes a program with a file that does not close.
const ENTERS_EXECVE: &str = "
import os
os.set_inheritable(3, False)
os.execv('/bin/true', ['true'])
";

/// Exchanges a byte over a connection. At each line it starts a child, which ends at once, and exchanges a byte again.
const FORKS: &str = "
import os, socket, sys
one = socket.create_connection((sys.argv[1], int(sys.argv[2])))
def exchange(line):
    one.sendall(b'x')
    assert one.recv(1) == b'x'
    print(line, flush=True)
exchange('begins')
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    exchange('has forked')
";

/// A process of another user stays in execve(2): a program that forks gets its connection back on the NIC all the same,
/// once its child has ended. That process can hold none of the program's sockets, since they share neither user,
/// session nor parent.
#[test]
fn a_process_that_stays_in_execve_keeps_no_forked_program_from_the_nic() {
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_b.run(|| TcpListener::bind((address_b(false), 0))).expect("a listener");
    let at = listener.local_addr().expect("its address");
    let Some(mut file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let mut stays = file.held_by(NOBODY, PYTHON).args(["-c", ENTERS_EXECVE]).spawn().expect("python3");
    file.until_waited_for();
    // In a session of its own, and not a child of this process, whose other children it would share with.
    let mut command = Command::new("setsid");
    command.args([env!("CARGO_BIN_EXE_baton"), "run", "--socket"]).arg(bed.socket());
    command.args(["--rule", "established", "--eager", "--", "sh", "-c", r#"python3 -c "$0" "$@"; true"#, FORKS]);
    command.args([at.ip().to_string(), at.port().to_string()]).env_remove("BATON_RUN");
    let mut program = bed.host_a.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("setsid");
    let mut lines = BufReader::new(program.stdout.take().expect("its output")).lines();
    let (peer, _) = listener.accept().expect("a connection");
    let echo = std::thread::spawn(move || std::io::copy(&mut &peer, &mut &peer));
    let on_nic = || bed.tool().expect("a tool").connections().expect("a list").iter().any(|one| one.place == Place::Nic);
    let mut next = || lines.next().expect("a line").expect("text");
    assert_eq!(next(), "begins");
    wait_until("its connection is on the NIC", on_nic);
    let mut input = program.stdin.take().expect("its input");
    for _ in 0..3 {
        writeln!(input).expect("it reads");
        assert_eq!(next(), "has forked");
        wait_until("its connection is on the NIC again", on_nic);
    }
    drop(input);
    assert!(program.wait().expect("its end").success());
    echo.join().expect("no panic").expect("an echo");
    drop(file);
    stays.wait().expect("its end");
}

/// Echoes what comes on two connections. At a line, a file takes the place of the first one, which is closed by that.
const PUTS_A_FILE_IN_ITS_PLACE: &str = "
import os, select, socket, sys
listener = socket.create_server(('127.0.0.1', 0))
print(listener.getsockname()[1], flush=True)
both = [listener.accept()[0] for _ in range(2)]
for one in both:
    one.setblocking(False)
while True:
    for one in select.select([sys.stdin, *both], [], [])[0]:
        if one is sys.stdin:
            if not one.readline():
                os._exit(0)
            number = both[0].detach()
            del both[0]
            os.dup2(3, number)
        else:
            one.send(one.recv(1000))
";

/// Starts a server that prints the port where it listens.
pub fn serve(host: &Namespace, command: &mut Command) -> (Child, u16) {
    let mut program = host.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("python3");
    let mut line = String::new();
    BufReader::new(program.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    (program, line.trim().parse().expect("a port"))
}

pub fn echo(peer: &mut TcpStream) {
    peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    peer.write_all(b"hello").expect("sent");
    peer.read_exact(&mut [0; 5]).expect("an echo");
}

/// An attached program closes a connection, and has a file that does not close at its number: the peer receives the end
/// of the stream, and its other connection goes on.
#[test]
fn a_file_in_the_place_of_a_socket_holds_up_no_attacher() {
    let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return };
    let scratch = Scratch::new("in-place");
    let host = Namespace::new().expect("a namespace");
    let mut command = file.held_by(0, PYTHON);
    let (mut program, port) = serve(&host, command.args(["-c", PUTS_A_FILE_IN_ITS_PLACE]));
    let mut both = [(); 2].map(|()| host.run(|| TcpStream::connect(("127.0.0.1", port))).expect("a connection"));
    let mut attacher = attach(&host, &scratch, &["--after", "0", &program.id().to_string()]);
    wait_until("both are on the NIC", || {
        both.iter_mut().for_each(echo);
        listed(&scratch).iter().filter(|one| one.place == Place::Nic).count() == 2
    });
    writeln!(program.stdin.as_mut().expect("its input")).expect("a line");
    assert_eq!(both[0].read(&mut [0; 5]).expect("the end of the stream"), 0);
    echo(&mut both[1]);
    drop(program.stdin.take());
    // They end when they can close it.
    drop(file);
    program.wait().expect("its end");
    attacher.wait().expect("its end");
}
