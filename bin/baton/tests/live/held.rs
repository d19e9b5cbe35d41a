//! A program whose socket's lock is held, by a system call that waits for memory which does not come: the agent waits
//! for it, and nobody waits for the agent.

mod requests;

use crate::common::{PacketThreads, Scene, SetsAtEnd, answered, scene, wait_until};
use crate::hostile_client::Hostile;
use baton_bed::testbed::TestbedSettings;
use baton_linux::process;
use baton_protocol::program::{ConnectionInfo, Place};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Makes another thread wait inside setsockopt(2) with the socket's lock: its filter is in memory that userfaultfd does
/// not deliver. Lets go when its input ends, or after a minute: whoever waits for the lock then fails, instead of
/// hanging.
const HOLDER: &str = r"
import ctypes, fcntl, mmap, os, select, struct, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
process, number = int(sys.argv[1]), int(sys.argv[2])
socket = libc.syscall(438, libc.syscall(434, process, 0), number, 0)
uffd = libc.syscall(323, os.O_CLOEXEC)
assert socket >= 0 and uffd >= 0, ctypes.get_errno()
fcntl.ioctl(uffd, 0xc018aa3f, struct.pack('QQQ', 0xaa, 0, 0))
memory = mmap.mmap(-1, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fcntl.ioctl(uffd, 0xc020aa00, struct.pack('QQQQ', address, 4096, 1, 0))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, address))
held = threading.Thread(target=lambda: libc.setsockopt(socket, 1, 26, program, 16))
held.start()
# The fault is reported while the lock is held.
os.read(uffd, 32)
print('held', flush=True)
select.select([sys.stdin], [], [], 60)
fcntl.ioctl(uffd, 0xc020aa04, struct.pack('QQQq', address, 4096, 0, 0))
held.join()
";

/// Holds a socket's lock while it exists.
struct Holder(Child);

impl Holder {
    fn new(process: &str, number: &str) -> Holder {
        let mut command = Command::new("python3");
        command.args(["-c", HOLDER, process, number]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        assert_eq!(line, "held\n");
        Holder(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The longest that a move of the honest program, with data both ways before and after it, and a list take, of ten,
/// without what the kernel's packet threads have waited for a processor.
fn longest_round(scene: &mut Scene) -> Duration {
    let round = |at| {
        let (begun, before) = (Instant::now(), PacketThreads::now());
        scene.fill(10_000);
        let filled = begun.elapsed();
        scene.move_to(if at % 2 == 0 { Place::Nic } else { Place::Kernel });
        let moved = begun.elapsed();
        assert!(!answered(&scene.bed, |tool| tool.connections()).is_empty());
        let listed = begun.elapsed();
        scene.fill(10_000);
        scene.drain();
        let drained = begun.elapsed();
        let waited = before.waited();
        // Waits: decides only what is printed.
        if drained > Duration::from_millis(500) {
            println!(
                "round {at}: filled after {filled:?}, moved after {moved:?}, listed after {listed:?}, all read after {drained:?}; {waited:?} for a processor"
            );
        }
        drained.saturating_sub(waited)
    };
    (0..10).map(round).max().unwrap_or_default()
}

/// Moves of the honest program and lists, each within a second, beyond what they take on this machine when nothing is
/// held, usually some milliseconds, and beyond the longest time for which a thread that wants to run now and then did
/// not: a virtual machine stands still for a second at times.
fn goes_on(scene: &mut Scene, usual: Duration) {
    let (longest, still) = while_looking(|| longest_round(scene));
    println!("a move and a list take {longest:?}, else {usual:?}; the machine stood still for {still:?}");
    // Waits: this is what is promised.
    let most = Duration::from_secs(1) + 5 * usual + still;
    assert!(longest < most, "a move and a list take {longest:?}, else {usual:?}; the machine stood still for {still:?}");
}

/// Does this, and says for how long a thread that wants to run each millisecond did not meanwhile, at most.
fn while_looking<T>(what: impl FnOnce() -> T) -> (T, Duration) {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !ended.load(Ordering::Relaxed) {
                let begun = Instant::now();
                // Waits: how much longer this takes is what is measured.
                std::thread::sleep(Duration::from_millis(1));
                longest = longest.max(begun.elapsed());
            }
            longest
        });
        let done = {
            let _ended = SetsAtEnd(&ended);
            what()
        };
        (done, looks.join().expect("a thread that looks"))
    })
}

/// An honest program of root's, and one of nobody's with a connection.
struct Both {
    scene: Scene,
    hostile: Hostile,
    process: String,
    number: String,
    /// How long a round of the honest program takes when nothing is held.
    usual: Duration,
}

impl Both {
    fn new() -> Both {
        let mut scene = scene(TestbedSettings::default());
        let mut hostile = Hostile::start(&scene.bed, "held");
        let line = hostile.await_attack();
        let mut words = line.split_whitespace().rev();
        let mut word = || words.next().expect("process and descriptor").to_owned();
        let (number, process) = (word(), word());
        let usual = longest_round(&mut scene);
        Both { scene, hostile, process, number, usual }
    }

    fn hold(&self) -> Holder {
        Holder::new(&self.process, &self.number)
    }

    /// What a tool sees of the hostile program's connection.
    fn held(&self) -> ConnectionInfo {
        let all = answered(&self.scene.bed, |tool| tool.connections());
        all.into_iter().find(|info| info.process.to_string() == self.process).expect("its connection")
    }

    fn goes_on(&mut self) {
        goes_on(&mut self.scene, self.usual);
    }

    /// Asks for a move, again if the agent has died meanwhile.
    fn ask(&mut self, to: Place) -> String {
        loop {
            self.hostile.tell(if to == Place::Nic { "nic" } else { "kernel" });
            let answer = self.hostile.hear();
            if answer != "none" {
                return answer;
            }
        }
    }

    /// Begins the hostile program's move to there, while its socket's lock is held.
    fn begin_held(&mut self, to: Place) -> Holder {
        if to == Place::Kernel {
            assert_eq!(self.ask(Place::Nic), "Done");
        }
        let holder = self.hold();
        self.hostile.tell(if to == Place::Nic { "nic" } else { "kernel" });
        self.is_shown_as_held();
        holder
    }

    /// Its connection moves, and its bytes arrive.
    fn ends_well(mut self) {
        wait_until("a move to the NIC", || self.ask(Place::Nic) == "Done");
        wait_until("a move to the kernel", || self.ask(Place::Kernel) == "Done");
        self.hostile.expect_success();
    }

    fn is_shown_as_held(&self) {
        wait_until("the reason", || self.held().reason.contains("its program holds it"));
    }

    fn processes(&self) -> (u32, u32) {
        let now = answered(&self.scene.bed, |tool| tool.statistics());
        (now.agent_process, now.nic_process)
    }
}

/// A registration, too, waits for the lock of its socket.
#[test]
fn a_registration_that_waits_for_a_sockets_lock_holds_up_no_other() {
    let mut both = Both::new();
    let holder = both.hold();
    both.hostile.tell("register");
    both.goes_on();
    drop(holder);
    let answer = both.hostile.hear();
    assert!(answer.starts_with("Registered"), "{answer}");
    both.hostile.expect_success();
}

/// The NIC dies while a move waits for a socket's lock. Everybody else goes on at once, and that connection when the
/// lock is let go.
#[test]
fn a_nic_dies_while_a_sockets_lock_is_held() {
    for to in [Place::Nic, Place::Kernel] {
        let mut both = Both::new();
        let holder = both.begin_held(to);
        process::signal(both.processes().1, libc::SIGKILL).expect("the NIC");
        both.goes_on();
        both.is_shown_as_held();
        drop(holder);
        println!("the move has ended: {}", both.hostile.hear());
        both.ends_well();
    }
}

/// The agent dies while a move waits for a socket's lock: a thread of its goes on waiting. The next agent serves
/// everybody else, and that connection when the lock is let go.
#[test]
fn an_agent_dies_while_a_sockets_lock_is_held() {
    for to in [Place::Nic, Place::Kernel] {
        let mut both = Both::new();
        let holder = both.begin_held(to);
        let agent = both.processes().0;
        process::signal(agent, libc::SIGKILL).expect("the agent");
        both.scene.exchange(10_000, Place::Kernel);
        assert_ne!(both.processes().0, agent);
        both.goes_on();
        drop(holder);
        println!("the move has ended: {}", both.hostile.hear());
        both.ends_well();
    }
}

/// A program sends thousands of requests to move a connection whose move is held up. The agent keeps a bounded number
/// of them and refuses the others at once; other programs go on.
#[test]
fn a_program_keeps_only_so_many_requests_waiting_for_a_move() {
    let mut both = Both::new();
    let before = both.processes();
    let holder = both.hold();
    both.hostile.tell("flood");
    both.goes_on();
    let answer = both.hostile.hear();
    assert!(answer.contains("too many requests wait"), "{answer}");
    both.goes_on();
    both.is_shown_as_held();
    drop(holder);
    assert_eq!(both.processes(), before);
    both.ends_well();
}

/// Both ways: the move waits, everybody else goes on, and it ends well when the lock is let go.
#[test]
fn a_move_that_waits_for_a_sockets_lock_holds_up_no_other() {
    let mut both = Both::new();
    let before = both.processes();
    for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
        let holder = both.hold();
        both.hostile.tell(if to == Place::Nic { "nic" } else { "kernel" });
        both.goes_on();
        both.is_shown_as_held();
        drop(holder);
        assert_eq!(both.hostile.hear(), "Done");
        assert_eq!(both.held().place, to);
    }
    assert_eq!(both.processes(), before);
    // Its bytes, too.
    both.hostile.expect_success();
}
