//! What stops or never answers, each alone and some together: another user's program under Baton goes on exchanging
//! bytes, and a list answers or says what does not. NIC and agent are stopped for good. An agent that a debugger holds
//! is not resumed; no NIC is stopped beside it, which nobody would end then.

use crate::blocked::{PROMISED, echoes};
use crate::common::{PacketThreads, answered, hosts, start_python, wait_until};
use crate::entries::Locked;
use crate::fuse::{FuseFile, NEVER_FLUSHED};
use crate::hostile_client::{Hostile, NeverReads};
use crate::scratch::text;
use crate::stopped::in_time;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_linux::freeze::Frozen;
use baton_linux::process;
use baton_protocol::program::{Place, Statistics};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command};
use std::time::{Duration, Instant};

/// Exchanges a byte every two milliseconds on a connection that it keeps, and now and then on one that it closes again.
/// Prints the longest exchange or connect since the last line that it read, in milliseconds, and what that was.
const PROGRAM: &str = "
import select, socket, sys, time
where = (sys.argv[1], int(sys.argv[2]))
longest = (0, '')
def step(name, act):
    global longest
    begun = time.monotonic()
    result = act()
    longest = max(longest, (round(1000 * (time.monotonic() - begun)), name))
    return result
def exchange(one):
    one.sendall(b'y')
    assert one.recv(1) == b'y'
first = socket.create_connection(where)
exchange(first)
print('ready', flush=True)
rounds = 0
while True:
    step('exchange', lambda: exchange(first))
    rounds += 1
    if rounds % 50 == 0:
        one = step('connect', lambda: socket.create_connection(where))
        step('first exchange', lambda: exchange(one))
        step('close', one.close)
    # Waits: the pace of its exchanges.
    if select.select([sys.stdin], [], [], 0.002)[0]:
        if not sys.stdin.readline():
            break
        print(*longest, flush=True)
        longest = (0, '')
";

/// That program, under Baton or not.
struct Pulse(Child, BufReader<ChildStdout>);

impl Drop for Pulse {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Pulse {
    fn start(bed: &Testbed, at: SocketAddr, with_baton: bool) -> Pulse {
        let (child, lines) = start_python(bed, PROGRAM, at, with_baton);
        Pulse(child, lines)
    }

    /// The longest step since the last time.
    fn longest(&mut self) -> (Duration, String) {
        writeln!(self.0.stdin.as_mut().expect("its input")).expect("it reads");
        let mut line = String::new();
        assert!(self.1.read_line(&mut line).expect("a line") > 0, "the program has ended");
        let (time, name) = line.trim_end().split_once(' ').expect("time and name");
        (Duration::from_millis(time.parse().expect("a number")), name.to_owned())
    }
}

/// A process that is stopped by a signal, and resumed when this is dropped, if nobody has resumed it before.
struct Stopped(u32);

impl Stopped {
    fn new(process: u32) -> Stopped {
        process::signal(process, libc::SIGSTOP).expect("a signal");
        Stopped(process)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = process::resume(self.0);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    /// The agent is stopped (SIGSTOP).
    Agent,
    /// The agent is held by a debugger.
    Held,
    /// The NIC is stopped.
    Nic,
    /// Files that never answer: sent to the agent, and in the memory of a process that calls itself one.
    File,
    /// A dead program's sockets that linger.
    Linger,
    /// A client that never reads.
    Deaf,
}
use Trouble::{Agent, Deaf, File, Held, Linger, Nic};

/// What lasts as long as this.
#[allow(dead_code, reason = "held until it is dropped")]
enum Lasting {
    Stopped(Stopped),
    Frozen(Frozen),
    Hostile(Hostile),
    Locked(Locked),
    Server(NeverReads),
}

fn statistics(bed: &Testbed) -> Statistics {
    answered(bed, |tool| tool.statistics())
}

impl Trouble {
    fn begin(self, bed: &Testbed) -> Vec<Lasting> {
        let started = |attack, peer: &str, file: Option<FuseFile>| {
            let mut hostile = Hostile::start_with(&bed.host_a, &bed.socket(), peer, (attack, 32), file);
            hostile.await_attack();
            Lasting::Hostile(hostile)
        };
        match self {
            Agent => vec![Lasting::Stopped(Stopped::new(statistics(bed).agent_process))],
            Nic => vec![Lasting::Stopped(Stopped::new(statistics(bed).nic_process))],
            Held => vec![Lasting::Frozen(Frozen::freeze(&[statistics(bed).agent_process]).expect("a tracer"))],
            File => {
                let Some(file) = FuseFile::new(&NEVER_FLUSHED) else { return Vec::new() };
                let locked = Locked::new("baton-agent").into_iter().map(Lasting::Locked);
                locked.chain([started("files", "", Some(file))]).collect()
            }
            Linger => {
                let server = NeverReads::start(bed);
                vec![started("lingers", &server.address().to_string(), None), Lasting::Server(server)]
            }
            Deaf => vec![started("deaf", "", None)],
        }
    }
}

/// A list of every Baton: how long it takes, and what it says.
fn list(arguments: &[String]) -> (Duration, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("ls").args(arguments).env_remove("BATON_SOCKET");
    let begun = Instant::now();
    let said = in_time("a list", move || command.output().expect("baton ls"));
    (begun.elapsed(), text(&[said.stdout, said.stderr].concat()))
}

/// For this long the programs and lists go on beside each set.
// Waits: longer than anything here is promised to last.
const WHILE: Duration = Duration::from_millis(2500);

#[test]
fn what_stops_or_never_answers_holds_up_no_other_program() {
    let bed = hosts(TestbedSettings { beside: true, ..TestbedSettings::default() });
    let (at, _ends) = echoes(&bed);
    let mut native = Pulse::start(&bed, at, false);
    let mut here = Pulse::start(&bed, at, true);
    let on_nic = || answered(&bed, |tool| tool.connections()).iter().any(|one| one.place == Place::Nic);
    let arguments = ["--socket".to_owned(), bed.socket().to_string_lossy().into_owned()];
    wait_until("it is on the NIC", on_nic);
    let alone = (0..5).map(|_| list(&arguments).0.max(list(&[]).0)).max().expect("lists");
    let sets: [&[Trouble]; 12] = [
        &[Agent],
        &[Held],
        &[Nic],
        &[File],
        &[Linger],
        &[Deaf],
        &[Agent, Nic],
        &[File, Linger, Deaf],
        &[Linger, Deaf, Nic],
        &[Linger, Deaf, Held],
        &[File, Linger, Deaf, Nic],
        // A debugger cannot hold a thread that waits for such a file.
        &[File, Linger, Deaf, Agent],
    ];
    let mut wrong = Vec::new();
    for set in sets {
        let (hostile, stopped): (Vec<Trouble>, Vec<Trouble>) = set.iter().partition(|one| [File, Linger, Deaf].contains(one));
        let mut lasting: Vec<_> = hostile.iter().flat_map(|one| one.begin(&bed)).collect();
        native.longest();
        here.longest();
        // The agent last: then none answers, perhaps.
        lasting.extend(stopped.iter().rev().flat_map(|one| one.begin(&bed)));
        let (begun, before) = (Instant::now(), PacketThreads::now());
        let mut lists = Vec::new();
        while begun.elapsed() < WHILE {
            lists.extend([list(&arguments), list(&[])]);
            // Waits: between two lists, each of which is a process.
            std::thread::sleep(Duration::from_millis(30));
        }
        let (gap, control) = (here.longest(), native.longest());
        let waited = before.waited();
        drop(lasting);
        let slowest = lists.iter().max_by_key(|(time, _)| *time).expect("lists");
        println!("{set:?}: {gap:?}, natively {control:?}; the slowest of {} lists {slowest:?}, alone {alone:?}", lists.len());
        if gap.0 > control.0.max(waited) + PROMISED
            || slowest.0 > alone + 2 * PROMISED
            || lists.iter().any(|(_, said)| said.is_empty())
        {
            wrong.push(format!("{set:?}: {gap:?}, natively {control:?}; lists {slowest:?}"));
        }
        wait_until("it is on the NIC again", on_nic);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
