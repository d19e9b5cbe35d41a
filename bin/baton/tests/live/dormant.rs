//! Connections that are idle on the NIC are dormant there: their state takes a few hundred bytes. They wake up when
//! anything happens.

use crate::common::{hosts, wait_until};
use crate::full::{connections, count, in_both_shapes, statistics};
use baton_abi::layout::{Counter, nic};
use baton_bed::testbed::connect_pairs;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::{ConnectionId, Session};
use baton_linux::{process, socket};
use baton_protocol::program::Place;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

in_both_shapes! {
    a_thousand_connections_sleep_through_deaths
    the_end_of_many_at_once_is_survived
    what_has_carried_nothing_returns_its_scratch
    idle_connections_that_have_to_leave_lose_nothing
}

/// Connections of the test.
const MANY: usize = 1100;
const LONG: Duration = Duration::from_secs(60);

/// The byte at a place of a direction of a connection.
fn byte(connection: usize, direction: usize, at: u64) -> u8 {
    (connection as u64 * 31 + direction as u64 * 97 + at * 7 + (at >> 8)) as u8
}

/// One of the connections: how much its program and its peer have sent and received.
struct One {
    id: ConnectionId,
    peer: TcpStream,
    sent: [u64; 2],
    received: [u64; 2],
}

struct Many {
    bed: Testbed,
    session: Session,
    all: Vec<One>,
}

fn many(beside: bool, connections: usize) -> Many {
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let (servers, clients) = connect_pairs(&bed, connections, false).expect("connections");
    many_of(bed, servers, clients)
}

/// A program with these connections, and their peers.
fn many_of(bed: Testbed, servers: Vec<TcpStream>, clients: Vec<TcpStream>) -> Many {
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let one = |(server, peer)| {
        let id = session.adopt(OwnedFd::from(server)).expect("adopted");
        One { id, peer, sent: [0; 2], received: [0; 2] }
    };
    let all = servers.into_iter().zip(clients).map(one).collect();
    Many { bed, session, all }
}

fn done(result: io::Result<usize>) -> usize {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
        result => result.expect("it goes on"),
    }
}

impl Many {
    fn poll(&mut self, millis: u64) {
        self.session.poll(Some(Duration::from_millis(millis)), &mut Vec::new()).expect("poll");
    }

    fn all_to_nic(&mut self) {
        for at in 0..self.all.len() {
            let deadline = Instant::now() + LONG;
            while self.session.place(self.all[at].id) != Some(Place::Nic) {
                assert!(Instant::now() < deadline, "it does not move");
                match self.session.move_to(self.all[at].id, Place::Nic) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => self.poll(1),
                    moved => moved.expect("a move"),
                }
            }
        }
    }

    /// Waits until all are dormant, which lists show.
    fn all_sleep(&mut self) {
        let deadline = Instant::now() + LONG;
        while count(&self.bed, Counter::Dormant) < self.all.len() as u64 {
            assert!(Instant::now() < deadline, "{} sleep", count(&self.bed, Counter::Dormant));
            self.poll(50);
        }
        let list = connections(&self.bed);
        assert!(!list.is_empty() && list.iter().all(|info| info.dormant && info.place == Place::Nic));
    }

    /// Each connection carries `bytes` both ways. The first byte comes from the program of every other one, and from
    /// the others' peers.
    fn carry(&mut self, bytes: u64) {
        let deadline = Instant::now() + 2 * LONG;
        let goals: Vec<[u64; 2]> = self.all.iter().map(|one| one.sent.map(|sent| sent + bytes)).collect();
        loop {
            let mut left = 0;
            for (number, one) in self.all.iter_mut().enumerate() {
                let goal = goals[number];
                let first = number % 2;
                for direction in [first, 1 - first] {
                    let from = one.sent[direction];
                    // The other side waits for the first byte.
                    let begun = direction == first || one.received[first] + bytes > goal[first];
                    if from < goal[direction] && begun {
                        let out: Vec<u8> = (from..goal[direction]).map(|at| byte(number, direction, at)).collect();
                        one.sent[direction] += match direction {
                            0 => done(self.session.send(one.id, &out)),
                            _ => done(socket::send(one.peer.as_fd(), &out)),
                        } as u64;
                    }
                    let mut room = [0; 4096];
                    let got = match direction {
                        0 => done(socket::receive(one.peer.as_fd(), &mut room)),
                        _ => done(self.session.receive(one.id, &mut room)),
                    };
                    for (at, found) in room[..got].iter().enumerate() {
                        let at = one.received[direction] + at as u64;
                        assert_eq!(*found, byte(number, direction, at), "byte {at} of connection {number}");
                    }
                    one.received[direction] += got as u64;
                    left += goal[direction] - one.received[direction];
                }
            }
            if left == 0 {
                return;
            }
            assert!(Instant::now() < deadline, "{left} bytes are left");
            self.poll(1);
        }
    }
}

fn a_thousand_connections_sleep_through_deaths(beside: bool) {
    let mut many = many(beside, MANY);
    many.all_to_nic();
    many.carry(3_000);
    many.all_sleep();
    many.carry(2_000);
    assert!(count(&many.bed, Counter::Dormant) < MANY as u64, "they are awake");
    assert!(connections(&many.bed).iter().all(|info| info.place == Place::Nic));
    for agent in [false, true] {
        many.all_sleep();
        let before = statistics(&many.bed);
        let dies = if agent { before.agent_process } else { before.nic_process };
        process::signal(dies, libc::SIGKILL).expect("a signal");
        many.carry(2_000);
        let after = statistics(&many.bed);
        assert_ne!(after.nic_process, before.nic_process);
        assert_eq!((after.agent_process != before.agent_process, after.lost), (agent, 0));
        many.all_to_nic();
    }
    many.all_sleep();
    many.carry(2_000);
}

/// Program and peers end while all connections are on the NIC: the agent gets very many answers at once.
fn the_end_of_many_at_once_is_survived(beside: bool) {
    let mut many = many(beside, 2 * MANY);
    many.all_to_nic();
    let before = statistics(&many.bed);
    let Many { bed, session, all } = many;
    drop(all);
    drop(session);
    wait_until("no connection is left", || statistics(&bed).counters[Counter::Connections as usize] == 0);
    let after = statistics(&bed);
    assert_eq!((after.agent_process, after.nic_process), (before.agent_process, before.nic_process));
}

/// Bytes of NIC memory that have pages.
fn nic_bytes(bed: &Testbed) -> u64 {
    let agent = statistics(bed).agent_process;
    let descriptors = std::fs::read_dir(format!("/proc/{agent}/fd")).expect("the agent's descriptors");
    let is_nic = |path: &Path| std::fs::read_link(path).is_ok_and(|name| name.to_string_lossy().contains("baton-nic"));
    let path = descriptors.flatten().map(|entry| entry.path()).find(|path| is_nic(path)).expect("NIC memory");
    std::fs::metadata(path).expect("its size").blocks() * 512
}

/// Also a connection that has carried nothing since it came to the NIC returns the page that its move needed.
fn what_has_carried_nothing_returns_its_scratch(beside: bool) {
    let mut many = many(beside, 64);
    many.all_to_nic();
    // The rings take a few pages more as they are used.
    let few = nic_bytes(&many.bed) - 56 * nic::SCRATCH_BYTES as u64;
    let deadline = Instant::now() + LONG;
    while nic_bytes(&many.bed) > few {
        assert!(Instant::now() < deadline, "{} bytes, not {few}", nic_bytes(&many.bed));
        many.poll(50);
    }
    many.carry(2_000);
}

/// Connections of the test: more than the agent returns the pages of in one period, and no more than it polls in one.
const SOME: usize = 160;

/// All idle connections have to leave the NIC while the agent still returns the pages of one after the other. In the
/// next period it does both to some of them. Program and peers go on as soon as the first has left.
fn idle_connections_that_have_to_leave_lose_nothing(beside: bool) {
    const WHY: &str = "its program has set";
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let (servers, clients) = connect_pairs(&bed, SOME, false).expect("connections");
    // The library does not see what is set on a duplicate: the agent finds it when it polls.
    let duplicates: Vec<OwnedFd> = servers.iter().map(|server| server.try_clone().expect("a duplicate").into()).collect();
    let mark =
        |mark| duplicates.iter().for_each(|fd| socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_MARK, mark).expect("SO_MARK"));
    let mut many = many_of(bed, servers, clients);
    // After 80,000 bytes pages are returned in a second, after fewer in ten, when all are dormant.
    for bytes in [40_000, 40_000, 2_000] {
        many.all_to_nic();
        many.carry(bytes);
        let used = nic_bytes(&many.bed);
        let deadline = Instant::now() + LONG;
        let mut returned = 0;
        while returned < 8 {
            assert!(Instant::now() < deadline, "no pages are returned");
            many.poll(2);
            returned = used.saturating_sub(nic_bytes(&many.bed)) / nic::SCRATCH_BYTES as u64;
        }
        // More than one period's may have been returned before this thread could look.
        assert!(returned < SOME as u64, "all pages were returned before any was seen to be");
        let dormant = count(&many.bed, Counter::Dormant);
        assert!(bytes > 2_000 || dormant > SOME as u64 / 2, "only {dormant} are dormant");
        mark(5);
        while many.all.iter().all(|one| many.session.place(one.id) == Some(Place::Nic)) {
            assert!(Instant::now() < deadline, "they do not leave");
        }
        many.carry(3_000);
        while !many.all.iter().all(|one| many.session.place(one.id) == Some(Place::Kernel)) {
            assert!(Instant::now() < deadline, "they do not leave");
            many.poll(1);
        }
        let all = many.bed.tool().and_then(|mut tool| tool.connections()).expect("connections");
        for info in &all {
            // After a second the agent would offload it again, and finds that it must not.
            assert!(info.reason.starts_with(WHY) || info.for_us > 900_000, "offloaded again at once: {info:?}");
        }
        many.carry(3_000);
        mark(0);
    }
    let after = statistics(&many.bed);
    assert_eq!((after.lost, after.recovered), (0, 0));
}
