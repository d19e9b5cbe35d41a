//! The preloaded library in whole programs in C: each case succeeds natively, and under `baton run` before its
//! connection has moved and after.

use crate::compiled::compile;
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::path::Path;
use std::process::{Command, Output, Stdio};

pub fn set_up_loopback(namespace: &Namespace) {
    namespace.run(|| baton_linux::rtnetlink::set_up(&baton_linux::rtnetlink::open()?, 1, None, None)).expect("loopback");
}

pub fn finish(namespace: &Namespace, mut command: Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    namespace.spawn(&mut command).expect("a program").wait_with_output().expect("its output")
}

/// How a case is run: the options of `baton run`, or natively without any, and whether its connections have moved
/// before it begins.
pub type Way = (&'static [&'static str], bool);

const NATIVELY: Way = (&[], false);
const MOVES: Way = (&["--eager", "--rule", "bytes:65536"], false);
const HAS_MOVED: Way = (&["--eager", "--rule", "established"], true);
/// Its connections move at random all the time.
pub const FLIPS: Way = (&["--eager", "--flip", "0..2"], false);

/// Runs cases natively, then under `baton run`, where their connections move after 64 KiB, and where they have moved
/// before it begins.
pub fn as_natively(program: &str, cases: &[&str]) {
    in_each(program, cases, &[NATIVELY, MOVES, HAS_MOVED]);
}

/// The same, and where their connections move at random all the time.
pub fn as_natively_while_moving(program: &str, cases: &[&str]) {
    in_each(program, cases, &[NATIVELY, MOVES, HAS_MOVED, FLIPS]);
}

/// Runs cases in each of these ways.
pub fn in_each(program: &str, cases: &[&str], ways: &[Way]) {
    let scratch = Scratch::new(program);
    let compiled = compile(program, &scratch);
    for case in cases {
        for (how, moved) in ways {
            let namespace = Namespace::new().expect("a namespace");
            let mut command = if how.is_empty() {
                set_up_loopback(&namespace);
                Command::new(&compiled)
            } else {
                let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
                command.args(["run", "--log", &scratch.file("log")]).args(*how).arg("--").arg(&compiled);
                command
            };
            command.arg(case).args(moved.then_some("moved")).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
            let ran = finish(&namespace, command);
            let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
            let said = format!("{}{}{log}", text(&ran.stdout), text(&ran.stderr));
            assert!(ran.status.success() && log.is_empty(), "{program}, {case}, {how:?}, moved: {moved}: {} {said}", ran.status);
        }
    }
}

/// stdio on a connection: the C library reads and writes without the preloaded library; other threads' calls go on.
#[test]
fn a_stream_of_the_c_library_is_a_connection() {
    as_natively("stdio", &["stream", "streams", "beside recv", "beside poll"]);
}

/// splice on a connection of which both directions have ended on the NIC.
#[test]
fn an_end_on_the_nic_is_spliced() {
    as_natively("stdio", &["spliced end"]);
}

/// What has been spliced stays in the kernel: though it was to move before, and though a child has had it since.
#[test]
fn what_has_been_spliced_does_not_move() {
    in_each("stdio", &["first moves", "vfork"], &[NATIVELY, FLIPS]);
}

/// A set keeps what is registered under a descriptor that is closed while a copy of it is open.
#[test]
fn a_closed_number_stays_in_its_set() {
    as_natively("stdio", &["closed number"]);
}

/// A descriptor of a connection on the NIC is closed, or becomes another one, while another thread makes calls on it:
/// none of them finds the shell.
#[test]
fn a_number_that_changes_is_no_shell() {
    as_natively("numbers", &["same", "closed", "replaced", "exchanged"]);
}

/// What is unread is what the owner has, though the connection moves while that is asked for.
#[test]
fn a_move_changes_nothing_of_what_is_unread() {
    in_each("unread", &["asked for"], &[NATIVELY, FLIPS]);
}

/// A receive with MSG_WAITALL or SO_RCVLOWAT returns the bytes that have come when a time-out or a signal ends it.
#[test]
fn a_receive_that_ends_early_gets_what_is_there() {
    as_natively_while_moving("partly", &["time", "signal"]);
}

/// A receive of all that is asked for waits for the bytes that come later, though the connection moves meanwhile.
#[test]
fn a_receive_of_all_bytes_gets_all() {
    as_natively_while_moving("partly", &["all"]);
}

/// Several messages that are received within a time limit: the program gets the time that is left.
#[test]
fn what_is_left_of_a_time_limit_is_written_back() {
    as_natively("partly", &["messages"]);
}

/// A receive of more bytes than the NIC has room for gets them as they come.
#[test]
fn a_receive_of_much_gets_all() {
    as_natively_while_moving("partly", &["all of much"]);
}

/// A reset that ends a send in its middle is what the next call reports.
#[test]
fn a_reset_under_a_send_is_reported_by_the_next_call() {
    as_natively_while_moving("partly", &["reset"]);
}

/// A send has filled the queue in the kernel when the connection moves: an edge follows when there is room again.
#[test]
fn an_edge_follows_a_send_that_has_filled_the_queue() {
    as_natively("partly", &["write", "sendfile"]);
}

/// With SO_LINGER the last close(2) of a socket waits for the peer, or has reset the connection when it returns.
#[test]
fn a_close_that_lingers_is_the_last_one() {
    as_natively_while_moving("linger", &["waits", "resets"]);
}

/// connect(2), bind(2) and listen(2) of a connected socket are refused, and do not use what a move has just
/// disconnected.
#[test]
fn a_connected_socket_is_not_connected_again() {
    as_natively_while_moving("connected", &["again"]);
    as_natively("connected", &["beside"]);
}

/// The port of a bound socket is free when the socket is closed, though Baton has had descriptors of it.
#[test]
fn a_closed_socket_leaves_its_port_to_the_next() {
    as_natively_while_moving("connected", &["own port"]);
}

/// A socket that is in a set, edge-triggered, and has been reported there before it is connected: there is an edge when
/// the connection is open, and one when it ends.
#[test]
fn a_connection_has_its_edges_whatever_was_reported_before() {
    as_natively("connected", &["in a set"]);
}

/// What comes while a close(2) is under way does not turn its FIN into a reset.
#[test]
fn a_close_sends_a_fin_though_more_comes_behind_it() {
    as_natively_while_moving("closes", &["late"]);
}

/// What a ring closes that the library does not know is closed for the peer, too.
#[test]
fn a_ring_that_is_not_known_closes_for_the_peer() {
    as_natively_while_moving("ring_close", &["ring"]);
}

/// What has closed a process for good, for itself and its children, holds after a fork, too.
#[test]
fn a_fork_does_not_reopen_what_is_closed_for_good() {
    as_natively("processes", &["io_uring for good", "raw fork for good", "seccomp for good"]);
}

/// Parent and child, whichever way it was made, use one connection together: what one sends and the other receives is
/// complete, whether the connection has moved before or is due to move after.
#[test]
fn two_processes_share_a_connection() {
    as_natively(
        "processes",
        &["fork", "_Fork", "clone", "raw fork", "spawn", "spawn, with actions", "vfork", "exec", "popen", "system"],
    );
}

/// The same while the connection moves all the time: at the moment of the fork it is in either place, or in between.
#[test]
fn two_processes_share_a_connection_that_moves() {
    in_each("processes", &["fork", "_Fork", "clone", "spawn", "spawn, with actions", "vfork", "popen"], &[FLIPS]);
}

/// A child of vfork has its parent's memory, and descriptors of its own: a number that is a connection of the parent's
/// may be a file of the child's, which it reads. That changes nothing for the parent. What the child uses or passes on
/// is restored.
#[test]
fn a_child_of_vfork_has_descriptors_of_its_own() {
    let cases = ["file", "file in place", "pipe", "socket", "pass on", "pass on a copy", "use"];
    as_natively_while_moving("vforks", &cases);
}

/// Children of vfork that are killed while they use sockets hold nothing up: neither the next ones nor their parent.
#[test]
fn a_killed_child_of_vfork_holds_nothing_up() {
    in_each("vforks", &["killed"], &[NATIVELY, HAS_MOVED, FLIPS]);
}

/// A process executes another program, which is the same process for the agent: the connection that it goes on with
/// stays in the kernel meanwhile.
#[test]
fn a_process_that_executes_a_program_keeps_its_connection() {
    as_natively_while_moving("vforks", &["exec"]);
}

/// posix_spawn(3) with file actions, none of which passes a connection on: it stays on the NIC.
#[test]
fn a_connection_that_a_started_program_does_not_get_stays() {
    as_natively("processes", &["spawn, beside"]);
}

/// A thread sets FD_CLOEXEC of a connection that a command of the shell's has, which another one waits for: afterwards
/// the connection moves again, although nothing that is started then would get it.
#[test]
fn a_connection_that_is_passed_on_no_more_moves_again() {
    as_natively("processes", &["kept, system"]);
}

/// A program that was started, served or not, keeps a connection that its starter closes: the peer sees no end before
/// that program's, and then sees it.
#[test]
fn a_connection_ends_with_its_last_process() {
    as_natively("processes", &["outlived, system", "outlived, setuid"]);
}

/// A child of fork finds the library's locks free, and has eventfds of its own.
#[test]
fn a_child_does_not_depend_on_its_parents_threads() {
    as_natively("processes", &["churn", "eventfds"]);
}

/// Handlers of forks, whenever they were registered, use connections, and make and close some: they run while this
/// library holds nothing for the fork.
#[test]
fn handlers_of_forks_use_connections() {
    as_natively_while_moving("processes", &["handlers"]);
}

/// Hundreds of forks beside threads that make, wait for, use and close connections: no child hangs that does so, too,
/// or closes what it has inherited, and its parent's threads go on.
#[test]
fn children_of_a_busy_process_go_on() {
    as_natively("processes", &["serve", "serve, _Fork", "serve, unseen"]);
}

/// fork with ten thousand connections in the kernel: natively, under the library, and where the agent manages each.
#[test]
fn a_fork_does_not_wait_for_each_connection() {
    const CONNECTIONS: u32 = 10_000;
    let scratch = Scratch::new("fork-cost");
    let compiled = compile("fork_cost", &scratch);
    let (baton, report) = (Path::new(env!("CARGO_BIN_EXE_baton")), scratch.file("report"));
    let run = |how: Option<&[&str]>| {
        let namespace = Namespace::new().expect("a namespace");
        // Before all others: a fork in the kernel waits for no other process, so what it takes is its own.
        let first = ["chrt", "--fifo", "1"];
        let mut command = Command::new(if how.is_some() { baton } else { Path::new(first[0]) });
        if let Some(arguments) = how {
            command.args(["run", "--flip-report", &report]).args(arguments).arg("--").args(first);
        } else {
            set_up_loopback(&namespace);
            command.args(&first[1..]);
        }
        command.arg(&compiled).arg(CONNECTIONS.to_string()).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let ran = finish(&namespace, command);
        let printed = text(&ran.stdout);
        assert!(ran.status.success(), "{how:?}: {}{printed}{}", ran.status, text(&ran.stderr));
        let numbers: Vec<u64> = printed.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        let [parent, child, faults] = numbers[..] else { panic!("three numbers: {printed}") };
        println!("{how:?}: {parent} µs in the parent, {child} in the child, {faults} page faults");
        [parent, child, faults]
    };
    let (natively, ours) = (run(None), run(Some(&[])));
    // No connection carries as much as this rule asks for: all are the agent's, and stay in the kernel.
    let managed = run(Some(&["--eager", "--rule", "hot:3G"]));
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&report).expect("a report")).expect("a report in JSON");
    // Nearly all: where few descriptors are allowed, a user may have half of the agent's.
    assert!(report["connections"].as_u64() >= Some(9_000) && report["moves"] == 0, "{report}");
    // Waits: 5 ms is what the parent may lose, also where each is held for the time of the fork: a request for each
    // would take tenths of a second. The child makes an entry for each connection; one look at each other entry for
    // that would take seconds. What the library knows of ten connections takes a page: a write for each would be a
    // thousand faults.
    let is_quick = |ours: [u64; 3]| ours[0] <= natively[0] + 5_000 && ours[1] <= natively[1] + 100_000;
    let is_little = |ours: [u64; 3]| ours[2] <= natively[2] + 200;
    let are_as_wanted = [ours, managed].into_iter().all(|ours| is_quick(ours) && is_little(ours));
    assert!(are_as_wanted, "natively {natively:?}, with Baton {ours:?}, by its agent {managed:?}");
}

/// A child that was made by instructions of the program's own: nothing that it sends or receives is lost in silence, of
/// its own or of its parent's.
#[test]
fn a_child_that_nobody_saw_loses_nothing() {
    as_natively("processes", &["unseen"]);
}

/// A child that is forked while another thread asks for a session, of a Baton that never answers.
#[test]
fn a_fork_while_a_session_is_opened() {
    let scratch = Scratch::new("opening");
    let compiled = compile("processes", &scratch);
    let socket = scratch.file("mute");
    let library = Path::new(env!("CARGO_BIN_EXE_baton")).with_file_name("libbaton_preload.so");
    let run = serde_json::json!({ "socket": socket, "group": 1, "rules": [{ "when": "established" }], "eager": true });
    for preloaded in [false, true] {
        let namespace = Namespace::new().expect("a namespace");
        set_up_loopback(&namespace);
        let mut command = Command::new(&compiled);
        command.args(["opening", &socket]);
        if preloaded {
            command.env("LD_PRELOAD", &library).env("BATON_RUN", run.to_string());
        }
        let ran = finish(&namespace, command);
        assert!(ran.status.success(), "{preloaded}: {} {}{}", ran.status, text(&ran.stdout), text(&ran.stderr));
        std::fs::remove_file(&socket).expect("a socket");
    }
}

/// The C library's own input and output on a connection: printf to its descriptor, and standard input and output.
#[test]
fn the_c_library_reads_and_writes_connections() {
    as_natively("stdio", &["print", "output", "output beside", "input", "super-server"]);
}

/// A server with a thread for each of its connections, and little more than a descriptor for each.
#[test]
fn sleeping_threads_need_no_descriptor_each() {
    as_natively("threads", &["few"]);
}

/// Threads sleep, and are woken, when the program has no descriptor left at all.
#[test]
fn sleeping_threads_need_no_descriptor() {
    as_natively("limits", &["none left", "none for sets"]);
}

/// A program that may have many descriptors: select for all of them looks no further than the kernel natively does, and
/// what closes all of them takes no longer.
#[test]
fn large_tables_of_descriptors_cost_nothing() {
    as_natively("limits", &["select", "closefrom"]);
}

/// poll takes as many entries as the program may have descriptors, and no more.
#[test]
fn poll_takes_as_many_entries_as_natively() {
    as_natively("limits", &["poll"]);
}

/// Handlers of signals that come a thousand times a second make the same calls as what they interrupt, on its
/// connections and on others.
#[test]
fn handlers_use_sockets() {
    as_natively("handlers", &["calls"]);
}

/// The same handlers, where what they interrupt is the program's malloc.
#[test]
fn handlers_use_sockets_in_the_middle_of_malloc() {
    as_natively("handlers", &["allocates"]);
}

/// Handlers leave calls by siglongjmp, while these run and while they sleep: nothing is left of a call.
#[test]
fn handlers_leave_calls() {
    as_natively("jumps", &["alone", "threads"]);
}

/// Threads are cancelled in calls that run and that sleep, and end in handlers there: nothing is left of a call.
#[test]
fn threads_are_cancelled_in_calls() {
    as_natively("cancel", &["deferred", "at any time", "exit"]);
}

/// A signal comes at any instruction of a call: its handler ends the thread, leaves the call, or makes calls itself.
/// The program draws the instructions from `BATON_FUZZ_SEED` (1), and plays four times as many with `BATON_EVERY_CASE`.
#[test]
fn a_handler_runs_at_any_instruction() {
    as_natively("steps", &["exit", "jump", "call"]);
}

/// A program sees its own actions, and its handlers get what these ask for.
#[test]
fn actions_are_the_programs() {
    as_natively("handlers", &["actions"]);
}

/// Real-time signals that come while calls run are handled once each and in their order, however many wait.
#[test]
fn queued_signals_keep_their_order() {
    as_natively("handlers", &["queue"]);
}

/// A limit of less than a millisecond is kept, with what the kernel's clock allows.
#[test]
fn short_waits_are_as_short_as_natively() {
    as_natively("limits", &["short waits"]);
}

/// A limit that no clock reaches (LONG_MAX seconds, say) is none: the wait does not end before there is an event.
#[test]
fn longest_waits_are_for_ever() {
    as_natively("limits", &["longest waits"]);
}

/// What a connection on the NIC adds to a program's address space, to what mlockall(2) locks, and to core files, is not
/// session memory as a whole; a program without address space for more goes on, and one with little keeps it.
#[test]
fn session_memory_is_no_memory_of_the_programs() {
    as_natively("memory", &["address space", "locked", "locked before", "limited", "kept free", "dumped"]);
}

/// A thread of a real-time priority does not wait in a loop for an ordinary one that it keeps off the processor.
#[test]
fn a_real_time_thread_lets_others_go_on() {
    as_natively("priority", &["one connection", "two connections"]);
}
