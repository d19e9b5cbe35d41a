//! A peer that does not answer any more: the time that has run for it goes with a connection that moves, so that it
//! ends when it would have ended in the kernel, and with the same error.

use crate::common::{Scene, connect, hosts, scene_in, unacknowledged, wait_until};
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_linux::namespace::Namespace;
use baton_linux::{process, socket};
use baton_protocol::program::Place;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::process::Command;
use std::time::{Duration, Instant};

/// TCP_USER_TIMEOUT of the connections.
// Waits: the time is what is tested, and compared with the kernel's in the same run.
const LIMIT: Duration = Duration::from_secs(2);
/// How much later than in the kernel a connection may end: a time-out after its loss probe, whose times the two stacks
/// choose differently, the agent's timers, and a busy machine.
// Waits: compared with the kernel in the same run.
const LATE: Duration = Duration::from_millis(800);

/// How a connection ended, and how long after its last byte was sent.
#[derive(Debug)]
struct End {
    error: Option<i32>,
    after: Duration,
}

fn run(host: &Namespace, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    let status = host.spawn(command.args(arguments)).expect("the program").wait().expect("its status");
    assert!(status.success(), "{program} {arguments:?}");
}

/// Host B receives nothing any more.
fn fall_silent(bed: &Testbed) {
    let rules = "add table inet silent; add chain inet silent c { type filter hook prerouting priority -300; policy drop; }";
    run(&bed.host_b, "nft", &[rules]);
}

/// The error that a connection of the kernel has by now.
fn end_of(native: &TcpStream, begun: Instant) -> Option<End> {
    match socket::receive(native.as_fd(), &mut [0; 16]) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => Some(End { error: error.raw_os_error(), after: begun.elapsed() }),
        Ok(count) => panic!("{count} bytes from a silent peer"),
    }
}

/// What two connections have in common, of which one moves.
struct Case<'a> {
    settings: TestbedSettings,
    /// The host's tcp_retries2.
    resends: u8,
    /// Where the one that moves begins.
    starts: Place,
    options: &'a [(i32, i32, i32)],
    /// Bytes that are under way when the peer falls silent.
    bytes: usize,
}

/// A connection that `moves` moves, and one that stays in the kernel, to a peer that falls silent. Returns how they
/// ended: this one, the kernel's.
fn ends(case: Case<'_>, mut moves: impl FnMut(&mut Scene, Duration)) -> [End; 2] {
    let bed = hosts(case.settings);
    bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_retries2", case.resends.to_string())).expect("the limit");
    let (native, its_peer) = connect(&bed, false, 8081);
    let mut scene = scene_in(bed, false, 8080);
    for (level, option, value) in case.options {
        scene.session.set_option(scene.id, *level, *option, *value).expect("an option");
        socket::set(native.as_fd(), *level, *option, *value).expect("an option");
    }
    scene.exchange(1000, Place::Kernel);
    scene.exchange(1000, case.starts);
    // With a last byte each peer acknowledges all that it has received. Otherwise a busy machine may acknowledge it a
    // second later, and both stacks count the silence from the peer's last segment.
    socket::send(its_peer.as_fd(), &[1]).expect("room");
    assert_eq!(scene.peer_sends(1), 1, "room");
    scene.drain();
    wait_until("a byte", || socket::receive(native.as_fd(), &mut [0]).is_ok());
    wait_until("both are acknowledged", || [&its_peer, &scene.peer].iter().all(|peer| unacknowledged(peer) == 0));
    fall_silent(&scene.bed);
    let begun = Instant::now();
    if case.bytes > 0 {
        socket::send(native.as_fd(), &vec![1; case.bytes]).expect("room");
        assert!(scene.send(case.bytes) > 0);
    }
    let (mut ours, mut theirs) = (None, None);
    while ours.is_none() || theirs.is_none() {
        theirs = theirs.or_else(|| end_of(&native, begun));
        if ours.is_none() {
            match scene.session.receive(scene.id, &mut [0; 16]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    scene.session.poll(Some(Duration::from_millis(5)), &mut Vec::new()).expect("poll");
                    moves(&mut scene, begun.elapsed());
                }
                Err(error) => ours = Some(End { error: error.raw_os_error(), after: begun.elapsed() }),
                Ok(count) => panic!("{count} bytes from a silent peer"),
            }
        } else {
            // Waits: between two looks.
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(begun.elapsed() < LIMIT * 30, "they do not end: {ours:?}, {theirs:?}");
    }
    // Seen if the test fails.
    let ls = Command::new(env!("CARGO_BIN_EXE_baton")).args(["ls", "-e", "--socket"]).arg(scene.bed.socket()).output();
    eprintln!("{}", String::from_utf8_lossy(&ls.expect("a list").stdout));
    [ours.expect("it ended"), theirs.expect("it ended")]
}

/// With something under way, and TCP_USER_TIMEOUT.
fn with_user_timeout(starts: Place) -> Case<'static> {
    const OPTIONS: [(i32, i32, i32); 1] = [(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, LIMIT.as_millis() as i32)];
    Case { settings: beside(), resends: 15, starts, options: &OPTIONS, bytes: 1000 }
}

/// With nothing under way, and keep-alive: probes after 2, 3 and 4 seconds.
fn with_keepalive(starts: Place) -> Case<'static> {
    const OPTIONS: [(i32, i32, i32); 4] = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 2),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
    ];
    Case { settings: beside(), resends: 15, starts, options: &OPTIONS, bytes: 0 }
}

fn check(what: &str, [ours, natively]: [End; 2]) {
    eprintln!("{what}: {ours:?}, in the kernel {natively:?}");
    assert_eq!((ours.error, natively.error), (Some(libc::ETIMEDOUT), Some(libc::ETIMEDOUT)), "{what}: {ours:?} and {natively:?}");
    assert!(ours.after + LATE > natively.after && ours.after < natively.after + LATE, "{what}: {ours:?} and {natively:?}");
}

/// Moves a connection once to a place, when so much time has passed.
fn once(at: Duration, to: Place) -> impl FnMut(&mut Scene, Duration) {
    let mut moved = false;
    move |scene, now| {
        if now >= at && !moved {
            moved = true;
            scene.session.move_to(scene.id, to).expect("a move");
        }
    }
}

fn beside() -> TestbedSettings {
    TestbedSettings { beside: true, ..TestbedSettings::default() }
}

/// Moves a connection back and forth, every so often.
fn back_and_forth(pause: Duration) -> impl FnMut(&mut Scene, Duration) {
    let mut last = Duration::ZERO;
    move |scene, now| {
        if now >= last + pause {
            last = now;
            let to = if scene.session.place(scene.id) == Some(Place::Nic) { Place::Kernel } else { Place::Nic };
            // It may have ended meanwhile, or the last move may not be over.
            let _ = scene.session.move_to(scene.id, to);
        }
    }
}

#[test]
fn a_user_timeout_goes_on_from_the_kernel_to_the_nic() {
    // Waits: a moment between two time-outs, while the peer is silent.
    let moves = once(Duration::from_millis(1200), Place::Nic);
    check("to the NIC", ends(with_user_timeout(Place::Kernel), moves));
}

#[test]
fn a_user_timeout_goes_on_from_the_nic_to_the_kernel() {
    for at in [50, 1000] {
        let moves = once(Duration::from_millis(at), Place::Kernel);
        check(&format!("to the kernel after {at} ms"), ends(with_user_timeout(Place::Nic), moves));
    }
}

#[test]
fn a_user_timeout_goes_on_however_often_a_connection_moves() {
    // Waits: a moment between two time-outs, while the peer is silent.
    check("back and forth", ends(with_user_timeout(Place::Nic), back_and_forth(Duration::from_millis(60))));
}

/// The NIC's record does not say for how long the peer has been silent: that much later may the connection end.
#[test]
fn a_user_timeout_goes_on_when_the_nic_dies() {
    // Waits: a moment between two time-outs, while the peer is silent.
    const AT: Duration = Duration::from_millis(600);
    let mut died = false;
    let moves = |scene: &mut Scene, now: Duration| {
        if now >= AT && !died {
            died = true;
            let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics");
            process::signal(statistics.nic_process, libc::SIGKILL).expect("the NIC");
        }
    };
    let [ours, natively] = ends(with_user_timeout(Place::Nic), moves);
    let ours = End { after: ours.after.saturating_sub(AT), ..ours };
    check("the NIC's death", [ours, natively]);
}

#[test]
fn keepalive_goes_on_over_moves() {
    check("on the NIC", ends(with_keepalive(Place::Nic), |_, _| {}));
    // Waits: a moment between two time-outs, while the peer is silent.
    check("to the NIC", ends(with_keepalive(Place::Kernel), once(Duration::from_millis(2500), Place::Nic)));
    // Waits: a moment between two time-outs, while the peer is silent.
    check("back and forth", ends(with_keepalive(Place::Nic), back_and_forth(Duration::from_millis(300))));
}

/// The host's limit for how long data is sent again (tcp_retries2) is the NIC's, too.
#[test]
fn the_hosts_retransmissions_are_the_nics() {
    const RESENDS: u8 = 3;
    // A connection ends at the first time-out that comes 3 s or more after its first retransmission (Linux,
    // tcp_model_timeout), and each time-out takes twice as long as the one before. The first one takes .2 s, up to a
    // second if the machine was busy when round trips were measured: so the end comes after 3.2 s at the earliest, and
    // after less than twice 3 s and three first time-outs. With one resend more allowed it would come after 12.6 s.
    // Waits: times that the kernel's connection keeps in the same run.
    let (least, most) = (Duration::from_millis(3200), Duration::from_secs(9));
    for (starts, what) in [(Place::Nic, "on the NIC"), (Place::Kernel, "to the NIC")] {
        let case = Case { settings: beside(), resends: RESENDS, starts, options: &[], bytes: 1000 };
        // Waits: a moment between two time-outs, while the peer is silent.
        let both = ends(case, once(Duration::from_millis(900), Place::Nic));
        eprintln!("{what}, and in the kernel: {both:?}");
        for end in both {
            let in_time = end.after >= least && end.after < most + LATE;
            assert!(end.error == Some(libc::ETIMEDOUT) && in_time, "{what}: {end:?}");
        }
    }
}
