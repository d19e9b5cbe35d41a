//! How Baton ends and starts again, in order or killed, and what its programs notice: nothing, or ECONNRESET within a
//! second.

pub(crate) use crate::common::wait_until as wait_for;
use crate::scratch::{Scratch, agent_socket, script, text};
use baton_client::tool::Tool;
use baton_linux::control::Channel;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Answer, Ask, ConnectionInfo, Opening, Place, Reply, Request, VERSION, Withdrawn};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;
const SIGSTOP: i32 = 19;

/// Kills keeper and agent, and the NIC if it is given. Keeper and agent are stopped first: the agent would restore
/// connections once the keeper is dead, and the keeper would start another agent. The agent is killed first: the kernel
/// lets a stopped process go on whose parent ends, since nobody is left who would (its process group is orphaned). The
/// NIC may have ended by itself by then.
pub(crate) fn kill_at_once(helpers: &[u32]) {
    let [keeper, agent, ref nic @ ..] = *helpers else { panic!("keeper and agent") };
    for helper in [keeper, agent] {
        process::signal(helper, SIGSTOP).expect("a signal");
    }
    for helper in [agent, keeper] {
        process::signal(helper, SIGKILL).expect("a signal");
    }
    for helper in nic {
        if let Err(error) = process::signal(*helper, SIGKILL) {
            assert_eq!(error.raw_os_error(), Some(libc::ESRCH), "{error}");
        }
    }
    wait_for("the end of those who were killed", || !helpers.iter().any(|helper| process::lives(*helper)));
}

/// Seconds in which everything that ends must end, though the machine is busy. The kernel's own time-outs would need
/// more: nine probes, a second apart.
const SOON: f64 = 8.0;

/// The ways in which a program may wait.
const WAYS: [&str; 6] = ["block", "poll", "select", "epoll", "edge", "spin"];

/// A host with a Baton that stays, or that was started for its program.
struct Host {
    namespace: Namespace,
    scratch: Scratch,
    up: Option<Child>,
}

impl Host {
    fn new(name: &str) -> Host {
        Host { namespace: Namespace::new().expect("a namespace"), scratch: Scratch::new(name), up: None }
    }

    /// A host with `baton up`.
    fn with_baton(name: &str) -> Host {
        let mut host = Host::new(name);
        host.up();
        host
    }

    fn socket_path(&self) -> PathBuf {
        self.scratch.0.join("door/agent.sock")
    }

    fn up(&mut self) {
        self.up_with("exec \"$@\"");
    }

    /// Starts `baton up` from a line of shell.
    fn up_with(&mut self, line: &str) {
        let mut command = Command::new("sh");
        command
            .args(["-c", line, "sh", env!("CARGO_BIN_EXE_baton"), "up", "--socket"])
            .arg(self.socket_path())
            .stderr(Stdio::piped());
        let mut up = self.namespace.spawn(&mut command).expect("baton");
        let mut said = String::new();
        BufReader::new(up.stderr.take().expect("its errors")).read_line(&mut said).expect("a line");
        assert!(said.contains("is up"), "{said}");
        self.up = Some(up);
    }

    /// Ends `baton up` in order.
    fn down(&mut self) {
        let mut up = self.up.take().expect("a Baton");
        process::signal(up.id(), SIGTERM).expect("a signal");
        assert!(up.wait().expect("its end").success());
        let left: Vec<_> = std::fs::read_dir(self.scratch.0.join("door")).expect("a directory").flatten().collect();
        assert!(left.is_empty(), "left: {left:?}");
    }

    /// A survivor with this many connections to itself, under these rules.
    fn program(&self, rule: &str, way: &str, count: usize) -> Survivor {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--eager", "--rule", rule]);
        if self.up.is_some() {
            command.arg("--socket").arg(self.socket_path());
        } else {
            command.args(["--log", &self.scratch.file("log")]).env_remove("BATON_SOCKET");
        }
        command.args(["--", "python3", &script("survivor.py"), way, &count.to_string()]).env("TMPDIR", &self.scratch.0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.namespace.spawn(&mut command).expect("baton");
        let (input, output) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
        let mut survivor = Survivor { child, input: Some(input), output: BufReader::new(output) };
        assert_eq!(survivor.line(), Value::from(vec!["ok"; count]), "{way}");
        survivor
    }

    /// The path at which the agent itself listens.
    fn inner(&self) -> PathBuf {
        self.agents_path().expect("an agent")
    }

    fn tool(&self) -> Option<Tool> {
        Tool::connect(&self.agents_path()?).ok()
    }

    fn agents_path(&self) -> Option<PathBuf> {
        // A client that connects to the path itself is served in its own namespace, which is another one.
        let entries = std::fs::read_dir(self.scratch.0.join("door")).into_iter().flatten().flatten();
        let inner = entries.map(|entry| entry.path()).find(|path| path.extension().is_some_and(|number| number != "sock"));
        inner.or_else(|| agent_socket(&self.scratch))
    }

    fn on_nic(&self) -> usize {
        let Some(mut tool) = self.tool() else { return 0 };
        let (mut from, mut found) = ((0, 0), 0);
        loop {
            let Ok(Reply::Connections(list)) = tool.ask(Ask::List { from }) else { return found };
            let Some(ConnectionInfo { session, connection, .. }) = list.last() else { return found };
            from = (*session, connection + 1);
            found += list.iter().filter(|info| info.place == Place::Nic).count();
        }
    }

    fn wait_until_on_nic(&self, count: usize) {
        wait_for(&format!("{count} connections on the NIC"), || self.on_nic() >= count);
    }

    /// Keeper, agent and NIC.
    fn helpers(&self) -> [u32; 3] {
        let statistics = self.tool().expect("an agent").statistics().expect("statistics");
        [process::parent(statistics.agent_process).expect("a keeper"), statistics.agent_process, statistics.nic_process]
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut up) = self.up.take() {
            let _ = process::signal(up.id(), SIGTERM);
            let _ = up.wait();
        }
    }
}

struct Survivor {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Survivor {
    fn line(&mut self) -> Value {
        let mut line = String::new();
        let _ = self.output.read_line(&mut line);
        serde_json::from_str(&line).unwrap_or_else(|error| {
            let mut said = String::new();
            let _ = self.child.kill();
            self.child.stderr.take().map(|mut errors| errors.read_to_string(&mut said));
            panic!("{line:?} is no answer ({error}): {said}")
        })
    }

    fn ask(&mut self, what: &str) -> Value {
        let input = self.input.as_mut().expect("its input");
        writeln!(input, "{what}").expect("a listener");
        self.line()
    }

    /// One round on every connection works, soon, and without spinning.
    fn is_well(&mut self, count: usize, way: &str) {
        let said = self.ask("echo");
        assert_eq!((&said["client"], &said["server"]), (&Value::from(vec!["ok"; count]), &Value::from(vec![""; 0])), "{way}");
        assert!(said["longest"].as_f64() < Some(SOON), "{way}: {said}");
    }

    /// It has used hardly any CPU since the last answer, and uses hardly any while it has nothing to do.
    fn rests(&mut self, way: &str) {
        let _ = self.ask("echo");
        // Waits: until it has done what follows an answer, and then for a span in which a program that spins would use
        // all of a processor. On a busy machine both would use less.
        std::thread::sleep(Duration::from_millis(100));
        let busy = process::cpu_nanos(self.child.id()).expect("its time");
        // Waits: see above.
        std::thread::sleep(Duration::from_millis(200));
        let busy = process::cpu_nanos(self.child.id()).expect("its time") - busy;
        assert!(busy < 80_000_000, "{way}: {} ms of 200 ms on a processor", busy / 1_000_000);
    }

    fn ends_well(mut self) {
        drop(self.input.take());
        let ended = self.child.wait_with_output().expect("its end");
        assert!(ended.status.success(), "{}", text(&ended.stderr));
    }
}

/// `baton up` is ended by SIGTERM and started again: programs go on, sleep when they have nothing to do, and their
/// connections move again.
#[test]
fn an_orderly_end_goes_unnoticed_and_the_next_baton_is_used() {
    for way in WAYS {
        let mut host = Host::with_baton(&format!("orderly-{way}"));
        let mut program = host.program("established", way, 4);
        for _ in 0..if way == "epoll" { 3 } else { 1 } {
            host.wait_until_on_nic(8);
            host.down();
            program.is_well(4, way);
            program.rests(way);
            host.up();
            // Programs try the next agent a second after the previous one has ended.
            wait_for("connections on the next NIC", || {
                program.is_well(4, way);
                host.on_nic() == 8
            });
        }
        program.is_well(4, way);
        program.ends_well();
    }
}

/// Only the keeper is killed: the agent restores what the NIC had.
#[test]
fn a_killed_keeper_goes_unnoticed() {
    for way in ["block", "poll", "edge"] {
        let host = Host::with_baton(&format!("keeper-{way}"));
        let mut program = host.program("established", way, 4);
        host.wait_until_on_nic(8);
        let [keeper, agent, nic] = host.helpers();
        process::signal(keeper, SIGKILL).expect("a signal");
        wait_for("the others' end", || !process::lives(agent) && !process::lives(nic));
        program.is_well(4, way);
        program.rests(way);
        program.ends_well();
    }
}

/// Keeper and NIC are killed at the same time while the kernel has all connections: the agent ends without a NIC that
/// nobody wants.
#[test]
fn a_nic_that_ends_with_the_keeper_is_not_replaced() {
    let host = Host::new("with-keeper");
    let mut program = host.program("hot:1G", "poll", 2);
    let [keeper, agent, nic] = host.helpers();
    // It finds both at once.
    [keeper, agent].iter().for_each(|one| process::signal(*one, SIGSTOP).expect("a signal"));
    [nic, keeper].iter().for_each(|one| process::signal(*one, SIGKILL).expect("a signal"));
    wait_for("their end", || ![nic, keeper].iter().any(|one| process::lives(*one)));
    // The kernel may have let it go on already, since its parent has ended.
    let _ = process::resume(agent);
    wait_for("the agent's end", || !process::lives(agent));
    let log = std::fs::read_to_string(host.scratch.file("log")).expect("a log");
    assert!(!log.contains("has died"), "{log}");
    program.is_well(2, "poll");
    program.ends_well();
}

/// Keeper and agent are killed together, or all three: what the NIC had fails with ECONNRESET within a second, in every
/// way to wait, and no program spins. What was in the kernel goes on.
#[test]
fn when_all_are_killed_connections_are_reset_at_once() {
    for (at, way) in WAYS.into_iter().enumerate() {
        let killed = 2 + at % 2;
        let host = Host::with_baton(&format!("killed-{way}"));
        let mut program = host.program("established", way, 4);
        let mut untouched = host.program("never", way, 2);
        host.wait_until_on_nic(8);
        kill_at_once(&host.helpers()[..killed]);
        let said = program.ask("wait");
        assert_eq!(said["server"], Value::from(vec!["ECONNRESET"; 4]), "{way}, {killed}: {said}");
        let said = program.ask("echo");
        assert_eq!(said["client"], Value::from(vec!["ECONNRESET"; 4]), "{way}, {killed}: {said}");
        assert!(said["longest"].as_f64() < Some(SOON), "{way}: {said}");
        program.rests(way);
        untouched.is_well(2, way);
        program.ends_well();
        untouched.ends_well();
    }
}

/// All are killed while no thread of the program sleeps in a call of the library's: a look that does not wait finds it
/// out. The lost connections' sockets are closed all the same, so their peers are reset by what they send next.
#[test]
fn lost_connections_are_reset_although_no_thread_sleeps() {
    let host = Host::with_baton("spinning");
    let mut program = host.program("accepted", "spin", 2);
    host.wait_until_on_nic(2);
    let established = || {
        let mut command = Command::new("ss");
        let listed = host.namespace.spawn(command.args(["-Htn", "state", "established"]).stdout(Stdio::piped()));
        let output = listed.expect("ss").wait_with_output().expect("its end").stdout;
        text(&output).lines().count()
    };
    assert_eq!(established(), 4);
    kill_at_once(&host.helpers());
    let said = program.ask("wait");
    assert_eq!(said["server"], Value::from(vec!["ECONNRESET"; 2]), "{said}");
    assert!(established() <= 2, "the server's sockets are open");
    let said = program.ask("echo");
    assert_eq!(said["client"], Value::from(vec!["ECONNRESET"; 2]), "{said}");
    program.ends_well();
}

/// The agent is killed while it restores connections after the keeper was killed: each connection works in the kernel
/// or is reset. Where one side was restored and the other lost, the kernel finds out by its next retransmission, whose
/// timer begins at a second.
#[test]
fn an_agent_killed_while_it_restores_leaves_each_connection_working_or_reset() {
    for (at, way) in WAYS.into_iter().enumerate() {
        let host = Host::with_baton(&format!("restoring-{way}"));
        let mut program = host.program("established", way, 4);
        host.wait_until_on_nic(8);
        let [keeper, agent, _] = host.helpers();
        process::signal(keeper, SIGKILL).expect("a signal");
        // Waits: each way is tried at another moment of the restoring, and at each moment the same must hold.
        std::thread::sleep(Duration::from_micros(150 * at as u64));
        process::signal(agent, SIGKILL).expect("a signal");
        let said = program.ask("echo");
        let results = said["client"].as_array().expect("results").iter();
        let bad: Vec<_> = results.filter(|one| !["ok", "end", "ECONNRESET", "EPIPE"].map(Value::from).contains(one)).collect();
        assert!(bad.is_empty() && said["longest"].as_f64() < Some(SOON), "{way}: {said}");
        program.rests(way);
        program.ends_well();
    }
}

/// A program that only writes gets the error, too.
#[test]
fn writers_get_the_error_when_all_are_killed() {
    let host = Host::with_baton("writers");
    let mut program = host.program("accepted", "block", 2);
    host.wait_until_on_nic(2);
    let mut other = host.program("connected", "spin", 2);
    host.wait_until_on_nic(4);
    kill_at_once(&host.helpers());
    for program in [&mut program, &mut other] {
        let said = program.ask("write");
        let failed = said["client"].as_array().expect("results").iter().all(|one| one == "ECONNRESET" || one == "EPIPE");
        assert!(failed && said["longest"].as_f64() < Some(SOON), "{said}");
    }
}

/// A program of another version, whose requests the agent cannot read, gets an answer. Without one it would wait for
/// ever.
#[test]
fn a_program_of_another_version_is_refused() {
    let host = Host::with_baton("version");
    let channel = Channel::connect(&host.inner()).expect("the agent");
    channel.send(&(1u32, "x".repeat(120)), &[]).expect("a message that is no request");
    let mut answer = None;
    wait_for("an answer", || {
        answer = channel.try_receive::<Answer>().ok();
        answer.is_some()
    });
    let said = answer.map(|(answer, _)| answer.body);
    assert!(matches!(&said, Some(Reply::Failed { reason }) if reason.contains("version")), "{said:?}");
}

/// A program that was started before an upgrade which has changed the protocol: it goes on in the kernel, and the list
/// says why, once, however often it asks.
#[test]
fn a_library_of_another_version_is_listed() {
    let host = Host::with_baton("library");
    let channel = Channel::connect(&host.inner()).expect("the agent");
    for tag in 1..=2 {
        let opening = Opening { version: VERSION + 1, program: "older".into(), ..Opening::alone() };
        channel.send(&Request { tag, body: Ask::Open(opening) }, &[]).expect("a request");
        let body = channel.receive::<Answer>().expect("an answer").0.body;
        assert!(matches!(&body, Reply::Failed { reason } if reason.contains("version")), "{body:?}");
    }
    let listed = host.tool().expect("a tool").statistics().expect("statistics").withdrawn;
    let older: Vec<&Withdrawn> = listed.iter().filter(|one| one.program == "older").collect();
    assert!(older.len() == 1 && older[0].reason.contains("another version"), "{listed:?}");
    assert_eq!((older[0].process, older[0].connections), (std::process::id(), 0));
}

/// The command's file is replaced while a Baton runs, as an upgrade does it: a NIC and an agent that die then are
/// replaced all the same, by what runs already.
#[test]
fn a_baton_whose_file_was_replaced_starts_its_processes_anew() {
    let mut host = Host::new("replaced");
    let (file, next) = (host.scratch.file("baton"), host.scratch.file("next"));
    std::fs::copy(env!("CARGO_BIN_EXE_baton"), &file).expect("a copy");
    host.up_with(&format!("shift; exec {file} \"$@\""));
    let mut program = host.program("established", "epoll", 4);
    host.wait_until_on_nic(8);
    std::fs::write(&next, "no program").expect("a file");
    std::fs::rename(&next, &file).expect("in its place");
    let [_, agent, nic] = host.helpers();
    let statistics = || host.tool().and_then(|mut tool| tool.statistics().ok());
    process::signal(nic, SIGKILL).expect("a signal");
    wait_for("the next NIC", || statistics().is_some_and(|now| ![0, nic].contains(&now.nic_process)));
    program.is_well(4, "the NIC has died");
    process::signal(agent, SIGKILL).expect("a signal");
    wait_for("the next agent", || statistics().is_some_and(|now| now.agent_process != agent));
    program.is_well(4, "the agent has died");
    host.wait_until_on_nic(8);
    program.ends_well();
    host.down();
}

/// A unit is stopped as systemd does it: SIGTERM to all processes at once. A program that shuts down by itself can do
/// so, and then nothing is left.
#[test]
fn a_stopped_unit_ends_in_order() {
    for way in ["block", "epoll"] {
        let host = Host::new(&format!("unit-{way}"));
        let mut program = host.program("established", way, 4);
        host.wait_until_on_nic(8);
        host.helpers().iter().for_each(|helper| process::signal(*helper, SIGTERM).expect("a signal"));
        wait_for("connections in the kernel", || host.on_nic() == 0);
        for _ in 0..3 {
            program.is_well(4, way);
        }
        assert_eq!(host.on_nic(), 0, "a Baton that is to end takes connections");
        program.rests(way);
        program.ends_well();
        wait_for("nothing is left", || agent_socket(&host.scratch).is_none() && !leftovers(&host.scratch));
        let log = std::fs::read_to_string(host.scratch.file("log")).unwrap_or_default();
        assert!(log.is_empty(), "{log}");
    }
}

/// With 128 descriptors (hard limit) the agent has too few for 160 connections and 40 idle clients: it refuses some,
/// which changes nothing for the program, and serves others again once the idle ones have left.
#[test]
fn few_descriptors_end_no_agent() {
    let mut host = Host::new("descriptors");
    host.up_with("ulimit -n 128; exec \"$@\"");
    let mut program = host.program("established", "epoll", 80);
    let before = host.helpers();
    assert!(host.on_nic() > 0, "no connection is on the NIC");
    program.is_well(80, "few descriptors");
    let idle: Vec<_> = (0..40).map(|_| std::os::unix::net::UnixStream::connect(host.inner())).collect();
    program.is_well(80, "idle clients");
    drop(idle);
    wait_for("the agent's answer", || host.tool().and_then(|mut tool| tool.statistics().ok()).is_some());
    assert_eq!(host.helpers(), before, "the agent or the NIC was replaced");
    program.ends_well();
}

/// The agent has a control group namespace of its own, and the program's group lies outside of it. The agent cannot ask
/// which BPF programs filter the connections of that group, so they stay in the kernel.
#[test]
fn connections_of_a_control_group_that_is_not_seen_stay_in_the_kernel() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let mut words = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = words.find(|words| words[2] == "cgroup2").expect("cgroup2 is mounted")[1];
    let group = format!("{mount}/baton-unseen-{}", std::process::id());
    std::fs::create_dir(&group).expect("a control group");
    let mut host = Host::new("unseen");
    host.up_with(&format!("echo $$ > {group}/cgroup.procs && exec unshare --cgroup \"$@\""));
    let mut program = host.program("established", "poll", 2);
    wait_for("the reason", || {
        let listed = host.tool().and_then(|mut tool| tool.connections().ok()).unwrap_or_default();
        let stays = |one: &ConnectionInfo| one.place == Place::Kernel && one.reason.contains("control group namespace");
        listed.len() == 4 && listed.iter().all(stays)
    });
    program.is_well(2, "poll");
    program.ends_well();
    host.down();
    wait_for("an empty group", || std::fs::remove_dir(&group).is_ok());
}

/// A server at port 80 and its client, which exchange some bytes for each line of input.
const AT_PORT_80: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', 80))
client = socket.create_connection(('127.0.0.1', 80))
server, _ = listener.accept()
while True:
    for one, other in ((client, server), (server, client)):
        one.sendall(b'x' * 1000)
        assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
    print('well', flush=True)
    if not sys.stdin.readline():
        break
";

/// An agent that may not bind its connections' ports could not give them back to the kernel: they stay there, and are
/// well when it ends.
#[test]
fn connections_at_ports_that_the_agent_may_not_bind_stay() {
    let mut host = Host::new("ports");
    host.up_with("exec setpriv --bounding-set=-net_bind_service -- \"$@\"");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--eager", "--rule", "established", "--socket"]).arg(host.socket_path());
    command.args(["--", "python3", "-c", AT_PORT_80]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = host.namespace.spawn(&mut command).expect("baton");
    let (mut input, mut output) = (child.stdin.take().expect("its input"), BufReader::new(child.stdout.take().expect("output")));
    let mut is_well = |input: &mut std::process::ChildStdin| {
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        assert_eq!(line, "well\n");
        let _ = input.write_all(b"\n");
    };
    (0..3).for_each(|_| is_well(&mut input));
    // Both ends of the connection: the client's port may be bound.
    let list = || host.tool().and_then(|mut tool| tool.connections().ok()).unwrap_or_default();
    let of_server = |info: &&ConnectionInfo| info.local.ends_with(":80");
    let stays = |info: &ConnectionInfo| info.place == Place::Kernel && info.reason.contains("CAP_NET_BIND_SERVICE");
    wait_for("the reason why it stays", || list().iter().find(of_server).is_some_and(stays));
    host.down();
    (0..3).for_each(|_| is_well(&mut input));
    drop(input);
    assert!(child.wait().expect("its end").success());
}

fn leftovers(scratch: &Scratch) -> bool {
    let entries = std::fs::read_dir(&scratch.0).expect("a directory").flatten();
    entries.into_iter().any(|entry| entry.file_name().to_string_lossy().starts_with("baton-run-"))
}

/// Where Baton cannot start, the message says why, and nothing is left.
#[test]
fn a_start_that_fails_leaves_nothing() {
    let scratch = Scratch::new("start");
    let line = "mount -t tmpfs none /dev/net && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", line, "sh", env!("CARGO_BIN_EXE_baton"), "run", "--", "true"]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("its end");
    assert!(!ran.status.success() && text(&ran.stderr).contains("/dev/net/tun"), "{}", text(&ran.stderr));
    assert!(!leftovers(&scratch), "a directory is left");
}

/// `baton up` that cannot start leaves none of the directories that it has made for its socket, and does not take a
/// file for the socket of an earlier one.
#[test]
fn an_up_that_fails_leaves_nothing() {
    let scratch = Scratch::new("up");
    let up = |socket: &str| {
        let line = "mount -t tmpfs none /dev/net && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", line, "sh", env!("CARGO_BIN_EXE_baton"), "up", "--socket", socket]);
        command.env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
        let up = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton");
        let ran = up.wait_with_output().expect("its end");
        assert!(!ran.status.success());
        text(&ran.stderr)
    };
    let said = up(&scratch.file("missing/too/agent.sock"));
    assert!(said.contains("/dev/net/tun"), "{said}");
    assert!(!Path::new(&scratch.file("missing")).exists(), "a directory is left");
    let file = scratch.file("file");
    std::fs::write(&file, "text").expect("a file");
    for (socket, why) in [(file.clone(), "is no socket"), (format!("{file}/agent.sock"), "File exists")] {
        let said = up(&socket);
        assert!(said.contains(why) && said.contains(&file) && !said.contains("needs root"), "{said}");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), "text");
}

/// `baton run` whose log file cannot be made says so, and leaves no directory.
#[test]
fn a_start_without_its_log_leaves_nothing() {
    let scratch = Scratch::new("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["run", "--log", &scratch.file("missing/log"), "--", "true"]);
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = Namespace::new().expect("a namespace").spawn(&mut command).expect("baton").wait_with_output().expect("its end");
    assert!(!ran.status.success() && text(&ran.stderr).contains("missing/log"), "{}", text(&ran.stderr));
    assert!(!leftovers(&scratch), "a directory is left");
}

/// `baton up` by root, in a mount namespace with a /run of its own: an ordinary user's tools find it at its usual path.
#[test]
fn an_ordinary_user_finds_the_hosts_baton() {
    const BOTH: &str = "
mount -t tmpfs none /run && ip link set lo up || exit 1
\"$0\" up & up=$!
while kill -0 $up && ! \"$0\" status > /dev/null; do :; done
setpriv --reuid=65534 --regid=65534 --clear-groups \"$0\" ls; listed=$?
kill $up && wait $up && exit $listed";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "sh", "-c", BOTH, env!("CARGO_BIN_EXE_baton")]).env_remove("BATON_SOCKET");
    let ran = command.output().expect("unshare (Debian's package util-linux)");
    let printed = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && printed.lines().last().is_some_and(|last| last.starts_with("NUMBER")), "{ran:?}");
}
