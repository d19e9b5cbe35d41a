//! Descriptors that take long to close: those who have sent them, or died with them, hold up nobody else.

use crate::common::{connect, hosts};
use crate::scratch::Scratch;
use crate::stopped::{in_time, listed, registered};
use baton_client::{Listener, Shared};
use baton_lab::testbed::{Testbed, TestbedSettings};
use baton_linux::control::Channel;
use baton_linux::{process, socket};
use baton_protocol::program::{Answer, Ask, Opening, Reply, Request};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Makes a socket linger for a thousand seconds, with as much unsent data as there is room for.
fn linger(stream: &TcpStream) {
    stream.set_nonblocking(true).expect("a socket");
    while (&*stream).write(&[7; 65536]).is_ok() {}
    let value = [1i32.to_ne_bytes(), 1000i32.to_ne_bytes()].concat();
    socket::set_bytes(stream.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &value).expect("SO_LINGER");
}

/// Threads of a process.
fn threads(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/task")).expect("a process").count()
}

fn agent(bed: &Testbed) -> u32 {
    bed.tool().expect("a tool").statistics().expect("statistics").agent_process
}

/// A program dies with sockets that linger, and whose peers do not read. Agent and keeper, which have the last descriptors, go on; each peer
/// gets everything and the FIN when it reads.
#[test]
fn a_dead_programs_sockets_that_linger_hold_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let pairs: Vec<(TcpStream, TcpStream)> = (0..40).map(|at| connect(&bed, false, 9000 + at)).collect();
    let shared = Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
    for (ours, _) in &pairs {
        linger(ours);
        shared.register(ours.as_fd(), false).expect("a registration");
    }
    let peers: Vec<TcpStream> = pairs.into_iter().map(|(_, peer)| peer).collect();
    // Its control connection hangs up: for agent and keeper it has died.
    drop(shared);
    in_time("another program's close", move || other.forget(&connection, 1)).expect("forgotten");
    while listed(&bed) > 0 {}
    assert!(threads(agent(&bed)) < 20, "{} threads", threads(agent(&bed)));
    in_time("the end of their connections", move || {
        for mut peer in peers {
            peer.set_nonblocking(false).expect("a socket");
            peer.set_read_timeout(Some(Duration::from_secs(15))).expect("a time-out");
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).expect("everything, and the FIN");
            assert!(!bytes.is_empty() && bytes.iter().all(|byte| *byte == 7));
        }
    });
}

/// A file of a FUSE server that answers everything but FLUSH and STATFS, which close(2) and fstatfs(2) wait for, until this is dropped.
struct NeverFlushed {
    file: File,
    ends: Arc<AtomicBool>,
    mounting: Child,
}

impl Drop for NeverFlushed {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Release);
        // The server sees that when this close asks for a flush.
        drop(self.file.try_clone());
        let _ = self.mounting.kill();
        let _ = self.mounting.wait();
    }
}

/// Length and number of a FUSE request's header, and of an answer's.
const REQUEST: usize = 40;
const ANSWER: usize = 16;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const STATFS: u32 = 17;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const FORGET: u32 = 2;

/// The body of the answer to a request; None if there is none.
fn answer_of(operation: u32) -> Option<Vec<u8>> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    match operation {
        INIT => Some([words(&[7, 31, 0, 0, 0, 4096, 1]), vec![0; 36]].concat()),
        // Fit for ever: a regular file with number 1.
        GETATTR => Some([words(&[1 << 30, 0, 0, 0, 1, 0]), vec![0; 52], words(&[0o100_666, 1]), vec![0; 20]].concat()),
        OPEN => Some(vec![0; 16]),
        FLUSH | STATFS | FORGET => None,
        _ => Some(Vec::new()),
    }
}

fn serve(mut server: &File, ends: &AtomicBool) {
    let (mut request, mut unanswered) = (vec![0; 1 << 17], Vec::new());
    let answer = |number: &[u8], body: &[u8]| {
        let header = [((ANSWER + body.len()) as u32).to_ne_bytes(), [0; 4]].concat();
        // Whoever has asked may have been interrupted.
        let _ = (&*server).write_all(&[&header, number, body].concat());
    };
    while let Ok(length) = server.read(&mut request) {
        assert!(length >= REQUEST);
        let operation = u32::from_ne_bytes(request[4..8].try_into().expect("four bytes"));
        let number = request[8..16].to_vec();
        match answer_of(operation) {
            Some(body) => answer(&number, &body),
            None if operation != FORGET => unanswered.push(number),
            None => {}
        }
        if ends.load(Ordering::Acquire) {
            unanswered.drain(..).for_each(|number| answer(&number, &[]));
        }
    }
}

impl NeverFlushed {
    /// None, and a word why, if this machine or user has no FUSE.
    fn new() -> Option<NeverFlushed> {
        let Ok(server) = File::options().read(true).write(true).open("/dev/fuse") else {
            println!("skipped: there is no /dev/fuse here, or no right to it");
            return None;
        };
        let scratch = Scratch::new("fuse");
        let path = scratch.file("file");
        File::create(&path).expect("a file to mount at");
        // The first descriptor that a program inherits is number 3.
        let options = "fd=3,rootmode=100000,user_id=0,group_id=0";
        // In a mount namespace of a process of its own, which goes with it.
        let script = format!("mount -i -t fuse -o {options} fuse {path} && echo mounted && exec cat");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        process::inherit(&mut command, &[server.as_fd()], false);
        let mut mounting = command.spawn().expect("unshare");
        let mut said = String::new();
        let _ = BufReader::new(mounting.stdout.take().expect("its output")).read_line(&mut said);
        if said.is_empty() {
            println!("skipped: no FUSE file system can be mounted here");
            return None;
        }
        // Not before: a connection that is not mounted cannot be read from.
        let ends = Arc::new(AtomicBool::new(false));
        let are_over = ends.clone();
        std::thread::spawn(move || serve(&server, &are_over));
        let file = File::open(format!("/proc/{}/root{path}", mounting.id())).expect("the file");
        Some(NeverFlushed { file, ends, mounting })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Files of FUSE, sent along with requests that need none, hold up nobody: closing each would wait for its server. Their user is turned away meanwhile.
#[test]
fn files_that_do_not_close_hold_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let Some(file) = NeverFlushed::new() else { return };
    let before = agent(&bed);
    for _ in 0..8 {
        let Ok(channel) = Channel::connect(&bed.socket()) else { continue };
        let descriptors = [file.fd(); 16];
        for tag in 1..3 {
            // It may have been turned away by now.
            let _ = channel.try_send(&Request { tag, body: Ask::Attachers }, &descriptors);
        }
        let _ = in_time("an answer, or the end", move || channel.receive::<Answer>().map(drop));
        // Not root's own tool, which is of the same user here.
        assert!(threads(before) < 20, "{} threads", threads(before));
    }
    // Here it is of the same user, which has been turned away; it is not held up.
    let _ = in_time("another program's close", move || other.forget(&connection, 1));
    // The server answers at last: what waits for it goes on.
    drop(file);
    while bed.tool().and_then(|mut tool| tool.connections()).is_err() {}
    assert_eq!(agent(&bed), before);
}

/// A report's file whose server does not answer delays the report and nothing else.
#[test]
fn a_reports_file_that_never_answers_holds_up_nobody() {
    let bed = hosts(TestbedSettings::default());
    let (other, connection, _streams) = registered(&bed, 8000);
    let Some(file) = NeverFlushed::new() else { return };
    let channel = Channel::connect(&bed.socket()).expect("the agent");
    channel.send(&Request { tag: 1, body: Ask::Group { flip: None } }, &[file.fd()]).expect("a request");
    in_time("a group", move || channel.receive::<Answer>().map(drop)).expect("an answer");
    in_time("another program's close", move || other.forget(&connection, 1)).expect("forgotten");
    assert_eq!(listed(&bed), 0);
}

/// The answer to a program's last request comes when its group's report has been written, however late that is: whoever reads the report when the
/// program has ended finds it.
#[test]
fn a_program_that_ends_waits_for_its_own_report_alone() {
    let bed = hosts(TestbedSettings::default());
    let Some(file) = NeverFlushed::new() else { return };
    let tool = Channel::connect(&bed.socket()).expect("the agent");
    tool.send(&Request { tag: 1, body: Ask::Group { flip: None } }, &[file.fd()]).expect("a request");
    let Reply::Grouped { group } = tool.receive::<Answer>().expect("an answer").0.body else { panic!("no group") };
    let program = Channel::connect(&bed.socket()).expect("the agent");
    let opening = Opening { group, ..Opening::alone() };
    program.send(&Request { tag: 1, body: Ask::Open(opening) }, &[]).expect("a request");
    assert!(matches!(program.receive::<Answer>().expect("an answer").0.body, Reply::Opened { .. }));
    program.send(&Request { tag: 2, body: Ask::Goodbye }, &[]).expect("a request");
    // The agent has read the request by then.
    (0..20).for_each(|_| assert_eq!(listed(&bed), 0));
    let early = program.try_receive::<Answer>().map(|(answer, _)| answer);
    assert!(early.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{early:?}");
    drop(file);
    let (answer, _) = in_time("an answer", move || program.receive::<Answer>()).expect("an answer");
    assert!(answer.tag == 2 && matches!(answer.body, Reply::Done), "{answer:?}");
}
