//! One user cannot harm another. Each attack is a program of user `nobody`, beside an honest one whose bytes go on,
//! while agent and NIC remain the same processes.

use crate::common::{PacketThreads, Scene, scene};
use crate::hostile_client::{Hostile, Seeds};
use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_bed::testbed::TestbedSettings;
use baton_fuzz::setting;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Place, Statistics};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Each of these tests keeps both cores of a small machine busy, so they run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// The other tests start this one as the hostile program. Alone it checks that they learn of an attack that fails.
#[test]
fn hostile_program() {
    if crate::hostile_client::run() {
        return;
    }
    let host = Namespace::new().expect("a namespace");
    let hostile = Hostile::start_at(&host, Path::new("/nonexistent"), "", "no such attack");
    assert!(!hostile.succeeds(), "an attack that there is not has succeeded");
}

struct Honest {
    scene: Scene,
    before: Statistics,
}

impl Honest {
    fn new(settings: TestbedSettings) -> Honest {
        let mut scene = scene(settings);
        scene.move_to(Place::Nic);
        let before = scene.bed.tool().expect("a tool").statistics().expect("statistics");
        Honest { scene, before }
    }

    /// Bytes both ways, and a move there and back, in a time of which an idle machine needs a hundredth.
    fn goes_on(&mut self) {
        let (began, before) = (Instant::now(), PacketThreads::now());
        for place in [Place::Kernel, Place::Nic] {
            self.scene.exchange(100_000, place);
        }
        let took = began.elapsed().saturating_sub(before.waited());
        assert!(took < Duration::from_secs(10), "it took {took:?}");
    }

    fn goes_on_beside(&mut self, mut hostile: Hostile) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !hostile.ended() {
            assert!(Instant::now() < deadline, "the hostile program does not end");
            self.goes_on();
        }
        hostile.expect_success();
        self.goes_on();
    }

    fn expect_no_failure(&mut self) {
        self.expect_the_same_processes();
        let now = self.scene.bed.tool().expect("a tool").statistics().expect("statistics");
        assert_eq!((now.failed_moves, now.lost), (0, 0));
    }

    /// What the hostile program's own connection has come to is its own affair.
    fn expect_the_same_processes(&mut self) {
        let mut tool = self.scene.bed.tool().expect("a tool");
        let now = tool.statistics().expect("statistics");
        assert_eq!((now.agent_process, now.nic_process), (self.before.agent_process, self.before.nic_process));
        // The agent sees the hang-up of a program's control connection a moment later.
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let left = tool.connections().expect("a list");
            if left.len() <= 1 {
                break;
            }
            assert!(Instant::now() < deadline, "more than the honest program's is left: {left:?}");
        }
    }

    /// The agent is killed, and its NIC with it; the next one starts, and the honest program goes on.
    fn survives_the_agent(&mut self) {
        let agent = self.scene.bed.tool().expect("a tool").statistics().expect("statistics").agent_process;
        process::signal(agent, libc::SIGKILL).expect("the agent");
        self.goes_on();
        let now = self.scene.bed.tool().expect("a tool").statistics().expect("statistics");
        assert_ne!(now.agent_process, agent);
    }
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn an_impossible_ring_ends_its_session_and_no_other() {
    let _alone = alone();
    for settings in [TestbedSettings::default(), TestbedSettings { workers: 2, ..TestbedSettings::default() }] {
        let mut honest = Honest::new(settings);
        let hostile = Hostile::start(&honest.scene.bed, "ring");
        honest.goes_on_beside(hostile);
        honest.expect_no_failure();
    }
}

#[test]
fn random_words_in_a_session_harm_no_other() {
    let _alone = alone();
    let mut honest = Honest::new(TestbedSettings::default());
    let hostile = Hostile::start(&honest.scene.bed, "rings");
    honest.goes_on_beside(hostile);
    honest.expect_no_failure();
    let mut hostile = Hostile::start(&honest.scene.bed, "rings");
    hostile.await_attack();
    honest.survives_the_agent();
    honest.goes_on_beside(hostile);
}

#[test]
fn invalid_requests_end_no_agent() {
    let _alone = alone();
    let mut honest = Honest::new(TestbedSettings::default());
    let mut hostile = Hostile::start(&honest.scene.bed, "requests");
    std::thread::scope(|scope| {
        let all_sent = scope.spawn(|| hostile.await_attack());
        while !all_sent.is_finished() {
            honest.goes_on();
        }
    });
    honest.scene.bed.tool().expect("a tool").connections().expect("a list");
    hostile.expect_success();
    honest.expect_no_failure();
}

/// Descriptors of every kind, in requests of every kind.
#[test]
fn no_descriptor_ends_or_holds_up_an_agent() {
    goes_on_beside_random("descriptors");
}

/// Words, requests among them, and descriptors of every kind, from peers that have opened no session.
#[test]
fn words_of_no_session_end_or_hold_up_no_agent() {
    goes_on_beside_random("words");
}

/// The honest program goes on, lists come, and agent and NIC remain, while another one sends what is random.
fn goes_on_beside_random(attack: &str) {
    let _alone = alone();
    let mut honest = Honest::new(TestbedSettings::default());
    let mut hostile = Hostile::start(&honest.scene.bed, attack);
    let _seeds = Seeds::of(&hostile);
    let deadline = Instant::now() + Duration::from_secs(60 + setting("BATON_FUZZ_SECONDS", 3));
    while !hostile.ended() {
        assert!(Instant::now() < deadline, "the hostile program does not end");
        honest.goes_on();
        honest.scene.bed.tool().expect("a tool").connections().expect("a list");
    }
    hostile.expect_success();
    honest.goes_on();
    honest.expect_the_same_processes();
}

#[test]
fn a_session_that_never_reads_does_not_block_the_agent() {
    let _alone = alone();
    let mut honest = Honest::new(TestbedSettings::default());
    let mut hostile = Hostile::start(&honest.scene.bed, "deaf");
    hostile.await_attack();
    honest.goes_on();
    honest.expect_no_failure();
    honest.survives_the_agent();
    assert!(!hostile.ended());
    honest.goes_on();
}

#[test]
fn a_blocking_doorbell_blocks_nobody_else() {
    let _alone = alone();
    let mut honest = Honest::new(TestbedSettings::default());
    let hostile = Hostile::start(&honest.scene.bed, "bells");
    honest.goes_on_beside(hostile);
    // It writes into its socket while the connection moves, without asking the library: that may end this connection.
    honest.expect_the_same_processes();
}

/// `baton up` limits the namespaces and sessions of each user; the error names the limit.
#[test]
fn no_user_takes_all_namespaces_or_sessions() {
    let _alone = alone();
    let (host, first, second, scratch) = (ns(), ns(), ns(), Scratch::new("limits"));
    let socket = scratch.file("agent.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["up", "--socket", &socket, "--namespaces-per-user", "1", "--sessions-per-user", "3"]).stderr(Stdio::piped());
    let mut up = Up(host.spawn(&mut command).expect("baton"));
    let mut messages = BufReader::new(up.0.stderr.take().expect("its messages"));
    messages.read_line(&mut String::new()).expect("a line");
    let mut hostile = Hostile::start_at(&first, socket.as_ref(), "", "many");
    let said = hostile.await_attack();
    assert!(said.contains("with 3 sessions: user 65534 has 3 sessions, of 3"), "{said}");
    let said = Hostile::start_at(&second, socket.as_ref(), "", "many").await_attack();
    assert!(said.contains("with 0 sessions") && said.contains("user 65534 has a Baton in 1 network namespaces"), "{said}");
    // Other users are served, there and elsewhere.
    for namespace in [&first, &second] {
        let mut list = Command::new(env!("CARGO_BIN_EXE_baton"));
        let listed = namespace.spawn(list.args(["ls", "--socket", &socket])).expect("baton").wait().expect("its end");
        assert!(listed.success());
    }
}

/// An agent with few descriptors leaves some for others: an ordinary user is refused when it has as many as are left,
/// and `baton ls` says so.
#[test]
fn no_user_takes_all_descriptors() {
    let _alone = alone();
    let (host, scratch) = (ns(), Scratch::new("shares"));
    set_up_loopback(&host);
    let socket = scratch.file("agent.sock");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 128; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_baton"), "up", "--socket", &socket]);
    let mut up = Up(host.spawn(command.stderr(Stdio::piped())).expect("baton"));
    let mut messages = BufReader::new(up.0.stderr.take().expect("its messages"));
    messages.read_line(&mut String::new()).expect("a line");
    let listener = host.run(|| TcpListener::bind("127.0.0.1:0")).expect("a listener");
    let peer = listener.local_addr().expect("its address").to_string();
    let mut hostile = Hostile::start_at(&host, socket.as_ref(), &peer, "share");
    let (said, why) = (hostile.await_attack(), "user 65534 has as many of the agent's descriptors as are left for all others");
    assert!(said.contains(why), "{said}");
    let mut list = Command::new(env!("CARGO_BIN_EXE_baton"));
    list.args(["ls", "--socket", &socket]);
    let listed = text(&finish(&host, list).stdout);
    assert!(listed.contains(why), "{listed}");
}

/// `baton up`, which ends with its test, however that ends.
struct Up(Child);

impl Drop for Up {
    fn drop(&mut self) {
        let _ = process::signal(self.0.id(), libc::SIGTERM);
        let _ = self.0.wait();
    }
}

fn ns() -> Namespace {
    Namespace::new().expect("a namespace (root is needed)")
}
