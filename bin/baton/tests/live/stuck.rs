//! Programs that stay inside an operation on a connection that is to be moved, and a NIC that does not answer.

use crate::common::{SetsAtEnd, connect, hosts, kernel_repeats, wait_until};
use baton_abi::layout::{Owner, block, session};
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::{Connection, Listener, Shared};
use baton_linux::freeze::Frozen;
use baton_linux::process;
use baton_protocol::events::What;
use baton_protocol::program::{Opening, Place};
use baton_shm::Region;
use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A program with one connection, on the NIC.
struct Program {
    shared: Shared,
    connection: Arc<Connection>,
    _server: TcpStream,
    _peer: TcpStream,
}

impl Program {
    fn start(bed: &Testbed, port: u16) -> Program {
        let (server, peer) = connect(bed, false, port);
        let shared = Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
        let connection = shared.register(server.as_fd(), false).expect("a registration");
        shared.move_to(connection.number(), Place::Nic).expect("a move");
        Program { shared, connection, _server: server, _peer: peer }
    }

    /// Sets that a thread is inside an operation, or that none is.
    fn is_inside(&self, inside: bool) {
        let memory = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", self.shared.descriptors()[1]));
        let memory = Region::map(memory.expect("session memory").into()).expect("session memory");
        let busy = session::block(self.connection.number()) + block::BUSY;
        memory.word32(busy).store(if inside { 77 } else { 0 }, Ordering::Release);
    }
}

/// How long a program's close takes.
fn time_of_a_close(bed: &Testbed, port: u16) -> Duration {
    let program = Program::start(bed, port);
    let begun = Instant::now();
    program.shared.forget(&program.connection, Duration::ZERO).expect("forgotten");
    begun.elapsed()
}

/// A move that waits for its program does not hold up moves and closes of others' connections, and is given up after a
/// while.
#[test]
fn a_program_inside_an_operation_delays_no_other() {
    let bed = hosts(TestbedSettings::default());
    let stuck: Vec<Program> = (0..24).map(|at| Program::start(&bed, 8000 + at)).collect();
    let is_over = AtomicBool::new(false);
    let median = |first: u16| {
        let mut times: Vec<Duration> = (0..9).map(|at| time_of_a_close(&bed, first + at)).collect();
        times.sort_unstable();
        times[4]
    };
    let alone = median(9000);
    let beside = std::thread::scope(|scope| {
        let _over = SetsAtEnd(&is_over);
        for program in &stuck {
            program.is_inside(true);
            scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    let moved = program.shared.move_to(program.connection.number(), Place::Kernel);
                    assert_eq!(moved.expect_err("it cannot move").kind(), io::ErrorKind::WouldBlock);
                }
            });
        }
        median(9100)
    });
    // Waits: if they were waited for one after the other, everybody else would wait 24 times 20 ms more than alone in
    // the same run.
    assert!(beside < 2 * alone + Duration::from_millis(24 * 20 / 2), "a close takes {beside:?}, and {alone:?} without them");
    for program in &stuck {
        program.is_inside(false);
        program.shared.move_to(program.connection.number(), Place::Kernel).expect("it is out of the operation");
    }
}

/// How often the agent has tried in vain to have the only connection leave the NIC.
fn moves_in_vain(bed: &Testbed) -> u32 {
    let mut tool = bed.tool().expect("a tool");
    let listed = tool.connections().expect("a list");
    let lists = tool.events(&[(listed[0].session, listed[0].connection)]).expect("its events");
    let events = lists.iter().flat_map(|list| &list.histories).flat_map(|history| &history.events);
    events.filter(|event| event.what == What::StayedOnNic).map(|event| event.figure).sum()
}

/// A connection has to leave the NIC, and a thread is inside an operation on it: it is tried again after 20 ms, then
/// 40 ms and so on, not once a second. The kernel sends a segment again by such time-outs, too.
#[test]
fn what_has_to_leave_the_nic_is_tried_again_soon() {
    let bed = hosts(TestbedSettings::default());
    let program = Program::start(&bed, 8000);
    program.is_inside(true);
    let rules = "add table inet t; add chain inet t c { type filter hook input priority 0; }; add rule inet t c tcp dport 9 drop";
    let changed = bed.host_a.spawn(Command::new("nft").arg(rules)).expect("nft").wait().expect("its status");
    assert!(changed.success());
    wait_until("it is tried", || moves_in_vain(&bed) > 0);
    // The last one after 3 s, or after 1.4 s if the first one was a probe (RFC 8985).
    kernel_repeats(&bed, 8100, 4);
    let moves = moves_in_vain(&bed);
    assert!(moves >= 6, "only {moves}");
    program.is_inside(false);
    wait_until("it has left", || program.connection.moves() > 1);
}

/// A program closes a connection while a thread is inside an operation on it: as natively the connection ends when the
/// thread has left, or the program has ended. What that thread still does with the connection's memory would be in
/// another connection's otherwise. The thread that closes is not held up for ever.
#[test]
fn a_close_ends_the_connection_when_all_have_left_it() {
    let bed = hosts(TestbedSettings::default());
    let listed = || bed.tool().expect("a tool").connections().expect("a list").len();
    for (port, leaves) in [(8000, true), (8001, false)] {
        let program = Program::start(&bed, port);
        program.is_inside(true);
        program.shared.forget(&program.connection, Duration::ZERO).expect("forgotten");
        assert_eq!(listed(), 1, "a thread is inside");
        if leaves {
            program.is_inside(false);
        } else {
            drop(program);
        }
        wait_until("the connection ends", || listed() == 0);
    }
}

/// The NIC dies while a thread is inside an operation: the others' connections go on in the kernel, this one when the
/// thread has left, however long that takes.
#[test]
fn a_recovery_waits_for_a_thread_that_is_inside() {
    let bed = hosts(TestbedSettings::default());
    let [stuck, other] = [8000, 8001].map(|port| Program::start(&bed, port));
    stuck.is_inside(true);
    process::signal(nic_process(&bed), SIGKILL).expect("SIGKILL");
    // It may be on the next NIC by then.
    let is_back = |program: &Program| program.connection.moves() > 1 && program.connection.owner() != Owner::Moving;
    wait_until("the other one is back", || is_back(&other));
    // Waits: for longer than any other move waits for a thread. A machine that stands still only makes it longer.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(stuck.connection.owner(), Owner::Moving);
    stuck.is_inside(false);
    wait_until("it is back", || is_back(&stuck));
}

const SIGKILL: i32 = 9;
const SIGSTOP: i32 = 19;

/// A program with a session and a connection in the kernel.
fn registered(bed: &Testbed, port: u16) -> (Shared, Arc<Connection>, [TcpStream; 2]) {
    let (server, peer) = connect(bed, false, port);
    let shared = Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
    let connection = shared.register(server.as_fd(), false).expect("a registration");
    (shared, connection, [server, peer])
}

fn nic_process(bed: &Testbed) -> u32 {
    bed.tool().expect("a tool").statistics().expect("statistics").nic_process
}

/// While a debugger has stopped the NIC, and moves wait for its answers, other programs register connections and close
/// them, and tools list them. The moves go on when the NIC does.
#[test]
fn a_nic_that_is_stopped_delays_only_what_needs_it() {
    let bed = hosts(TestbedSettings::default());
    let moving: Vec<_> = (0..4).map(|at| registered(&bed, 8000 + at)).collect();
    let (other, _, _streams) = registered(&bed, 8100);
    // Made now: their packets pass the NIC.
    let later: Vec<_> = (0..5).map(|at| connect(&bed, false, 9000 + at)).collect();
    let nic = nic_process(&bed);
    let debugger = Frozen::freeze(&[nic]).expect("a tracer");
    std::thread::scope(|scope| {
        let moves = moving.iter().map(|(shared, connection, _)| scope.spawn(|| shared.move_to(connection.number(), Place::Nic)));
        let moves: Vec<_> = moves.collect();
        // If one of these waited for the NIC, it would be ended first, after two seconds, and the moves refused.
        for (server, _) in &later {
            let connection = other.register(server.as_fd(), false).expect("a registration");
            assert_eq!(bed.tool().expect("a tool").connections().expect("a list").len(), 6);
            other.forget(&connection, Duration::ZERO).expect("forgotten");
        }
        assert!(moves.iter().all(|waits| !waits.is_finished()), "a move has not waited for the NIC");
        drop(debugger);
        moves.into_iter().for_each(|moved| moved.join().expect("no panic").expect("a move"));
    });
    assert_eq!(nic_process(&bed), nic);
}

/// A NIC that somebody has stopped is ended, and what it had goes on in the kernel.
#[test]
fn a_nic_that_stays_stopped_is_ended() {
    let bed = hosts(TestbedSettings::default());
    let program = Program::start(&bed, 8000);
    let (shared, connection, _streams) = registered(&bed, 8001);
    let nic = nic_process(&bed);
    process::signal(nic, SIGSTOP).expect("a signal");
    let moved = shared.move_to(connection.number(), Place::Nic);
    assert_eq!(moved.expect_err("there is no NIC").kind(), io::ErrorKind::WouldBlock);
    assert_ne!(nic_process(&bed), nic);
    shared.move_to(connection.number(), Place::Nic).expect("the next NIC takes it");
    program.shared.move_to(program.connection.number(), Place::Kernel).expect("it is there");
}
