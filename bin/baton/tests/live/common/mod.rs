//! Helpers of the tests against the real kernel: two hosts, a program with one connection that can move, its peer.
#![allow(dead_code, reason = "each test file uses its part")]

use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_client::tool::Tool;
use baton_client::{ConnectionId, Session};
use baton_linux::namespace::Namespace;
use baton_linux::socket;
use baton_linux::tcp_info::TcpInfo;
use baton_protocol::program::Place;
use baton_sim::stream;
use std::io::{self, BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Waits until a condition holds, a minute at most: a machine that is busy with other things is slow, but not so slow.
pub fn wait_until(what: &str, holds: impl FnMut() -> bool) {
    wait_for(Duration::from_secs(60), what, holds);
}

/// Binds a socket in a host to an address whose socket has just been closed. A child that another test forks has a copy
/// of the closed one until its execve(2).
pub fn bind_at_freed<T: Send>(host: &Namespace, when: &str, bind: impl Fn() -> io::Result<T> + Sync) -> T {
    let mut made = None;
    wait_until(when, || match host.run(&bind) {
        Ok(bound) => made.replace(bound).is_none(),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => false,
        Err(error) => panic!("{when}: {error}"),
    });
    made.expect("a socket")
}

/// Listens so at an address of host A, with SO_REUSEADDR as std does.
pub fn listen_at_freed(bed: &Testbed, address: SocketAddr, when: &str) -> TcpListener {
    bind_at_freed(&bed.host_a, when, || TcpListener::bind(address))
}

/// Waits until a condition holds that comes late by itself.
pub fn wait_for(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    loop {
        let looks = Instant::now();
        if holds() {
            return;
        }
        let waited = begun.elapsed();
        assert!(waited < limit, "{what}: not within {limit:?}");
        // Waits: between two looks at the condition.
        std::thread::sleep(until_next_look(waited, looks.elapsed()));
    }
}

/// Looks take processor from other tests. So there are fewer of them where it takes long until the condition holds, or
/// where one takes long, as that of a command does.
fn until_next_look(waited: Duration, look: Duration) -> Duration {
    // Waits: between two looks at a condition.
    let [least, usual, most] = [1, 10, 20].map(Duration::from_millis);
    (waited / 16).min(usual).max(look.min(most)).max(least)
}

/// Sets a flag for which other threads look, however this one ends: a test that fails in a scope waits for its threads.
pub struct SetsAtEnd<'a>(pub &'a AtomicBool);

impl Drop for SetsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The calling thread goes before all others from now on (SCHED_FIFO): a busy machine does not let it wait.
pub fn go_before_others() {
    let this = std::fs::read_link("/proc/thread-self").expect("this thread");
    let mut command = Command::new("chrt");
    command.args(["--fifo", "--pid", "1"]).arg(this.file_name().expect("its number"));
    assert!(command.status().expect("chrt (Debian's package util-linux)").success(), "this thread's priority");
}

/// Runs this in a thread of its own that goes before all others.
pub fn before_others<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    let first = || {
        go_before_others();
        run()
    };
    std::thread::scope(|scope| scope.spawn(first).join().expect("no panic"))
}

/// The kernel's packet threads (ksoftirqd), and for how long each has waited for a processor up to some time. Some
/// kernels' schedulers let one wait for many seconds while processes that never sleep run beside it, with autogroups
/// (sched(7)): whatever has to come through the kernel's network stack stands still, natively as well.
pub struct PacketThreads(Instant, Vec<Duration>);

impl PacketThreads {
    pub fn now() -> PacketThreads {
        static THREADS: LazyLock<Vec<PathBuf>> = LazyLock::new(|| {
            let all = std::fs::read_dir("/proc").expect("/proc").flatten().map(|entry| entry.path());
            let name = |path: &PathBuf| std::fs::read_to_string(path.join("comm")).unwrap_or_default();
            all.filter(|path| name(path).starts_with("ksoftirqd/")).collect()
        });
        // The second number of a schedstat, in nanoseconds. It is raised when a wait is over.
        let waited = |path: &PathBuf| {
            let text = std::fs::read_to_string(path.join("schedstat")).unwrap_or_default();
            Duration::from_nanos(text.split_whitespace().nth(1).and_then(|word| word.parse().ok()).unwrap_or(0))
        };
        PacketThreads(Instant::now(), THREADS.iter().map(waited).collect())
    }

    /// For how long one of them has waited since then, at most.
    pub fn waited(&self) -> Duration {
        let PacketThreads(_, now) = PacketThreads::now();
        let longest = self.1.iter().zip(now).map(|(before, now)| now.saturating_sub(*before)).max();
        longest.unwrap_or_default().min(self.0.elapsed())
    }
}

/// Waits until so many connections of a Baton have each moved so often.
pub fn until_moved(socket: impl Fn() -> Option<PathBuf>, connections: usize, moves: u32) {
    let list = || Tool::connect(&socket()?).ok()?.connections().ok();
    wait_until(&format!("{moves} moves of each of {connections} connections"), || {
        list().is_some_and(|list| list.iter().filter(|one| one.moves >= moves).count() == connections)
    });
}

/// Segments that a socket's kernel has sent again.
pub fn sent_again(socket: impl AsFd) -> u32 {
    TcpInfo::read(socket.as_fd()).expect("TCP_INFO").total_retrans
}

/// Waits for as long as host A's kernel needs to send a segment again so many times, to a peer that answers nothing.
/// Whoever sends by the same time-outs has had its chances then, however busy the machine is.
pub fn kernel_repeats(bed: &Testbed, port: u16, times: u32) {
    let (server, peer) = connect(bed, false, port);
    baton_handoff::shell::block_input(peer.as_fd()).expect("a deaf peer");
    socket::send(server.as_fd(), b"?").expect("a byte");
    wait_until("the kernel sends again", || sent_again(&server) >= times);
}

/// Bytes that a socket has sent and its peer has not acknowledged.
pub fn unacknowledged(socket: impl AsFd) -> u32 {
    socket::queue_bytes(socket.as_fd(), socket::SIOCOUTQ).expect("SIOCOUTQ")
}

/// Two hosts with Baton on the first. Without root (or a user namespace with /dev/net/tun) the test fails and says so.
pub fn hosts(settings: TestbedSettings) -> Testbed {
    let program = Some(env!("CARGO_BIN_EXE_baton").into());
    Testbed::new(&TestbedSettings { program, ..settings }).expect("two test hosts (root is needed)")
}

/// What an agent answers. For a moment there may be none: one has died, and the next one is about to listen.
pub fn answered<T>(bed: &Testbed, ask: impl Fn(&mut Tool) -> anyhow::Result<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match bed.tool().and_then(|mut tool| ask(&mut tool)) {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < deadline, "no agent answers: {error:#}"),
        }
        // Waits: between two looks; the deadline is far away.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Starts a Python program on host A, under Baton (each connection moves to the NIC as soon as it is established) or
/// natively. Its arguments are the address and port of a peer. Returns it when it has printed that it is ready, with
/// its further output.
pub fn start_python(bed: &Testbed, program: &str, peer: SocketAddr, with_baton: bool) -> (Child, BufReader<ChildStdout>) {
    start_python_with(bed, program, peer, with_baton.then_some(&[]))
}

/// The same, under Baton with these options of `baton run`.
pub fn start_python_with(
    bed: &Testbed,
    program: &str,
    peer: SocketAddr,
    options: Option<&[&str]>,
) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(if options.is_some() { env!("CARGO_BIN_EXE_baton") } else { "python3" });
    if let Some(options) = options {
        let rule = ["--rule", "established", "--eager", "--", "python3"];
        command.arg("run").arg("--socket").arg(bed.socket()).args(options).args(rule).env_remove("BATON_RUN");
    }
    command.args(["-c", program, &peer.ip().to_string(), &peer.port().to_string()]);
    let mut child = bed.host_a.spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped())).expect("the program");
    let mut lines = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("a line");
    assert_eq!(line, "ready\n");
    (child, lines)
}

/// A program on host A with one accepted connection, and its peer on host B.
pub struct Scene {
    pub session: Session,
    pub id: ConnectionId,
    pub peer: TcpStream,
    pub bed: Testbed,
    /// Bytes sent and received by the program, then by the peer.
    pub sent: [u64; 2],
    pub received: [u64; 2],
}

pub fn scene(settings: TestbedSettings) -> Scene {
    scene_at(settings, false, 8080)
}

pub fn scene_at(settings: TestbedSettings, ipv6: bool, port: u16) -> Scene {
    scene_in(hosts(settings), ipv6, port)
}

/// A session. There is none while the NIC gets no processor, for two seconds.
pub fn session(bed: &Testbed) -> Session {
    let (mut made, mut why) = (None, None);
    wait_until("a session", || {
        match Session::connect(&bed.socket()) {
            Ok(session) => made = Some(session),
            Err(error) => why = Some(error),
        }
        made.is_some() || !why.as_ref().is_some_and(|why| why.to_string().contains("does not answer"))
    });
    made.unwrap_or_else(|| panic!("a session: {why:?}"))
}

/// The same with hosts that are there.
pub fn scene_in(bed: Testbed, ipv6: bool, port: u16) -> Scene {
    let (server, peer) = connect(&bed, ipv6, port);
    let mut session = session(&bed);
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] }
}

/// A connection from host B to a listener on host A: the accepted socket, the connecting one.
pub fn connect(bed: &Testbed, ipv6: bool, port: u16) -> (TcpStream, TcpStream) {
    let listener = listen_at_freed(bed, SocketAddr::new(address_a(ipv6), port), "a listener");
    let address = listener.local_addr().expect("its address");
    let peer = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    let (server, _) = listener.accept().expect("its other end");
    for socket in [&server, &peer] {
        socket.set_nonblocking(true).expect("non-blocking");
        socket.set_nodelay(true).expect("no delay");
    }
    (server, peer)
}

/// Keys of the two streams: from the program, from the peer.
pub const KEYS: [u64; 2] = [11, 1 << 40];

/// What a call has transferred; nothing if it would have to wait.
pub fn later(result: io::Result<usize>) -> usize {
    match result {
        Ok(count) => count,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
        Err(error) => panic!("the connection broke: {error}"),
    }
}

impl Scene {
    pub fn move_to(&mut self, to: Place) {
        self.try_to_move(to);
        let place = self.settled_place();
        assert_eq!(place, Some(to));
    }

    /// Where the connection is. Its memory may be growing now; then it is moving for a moment.
    pub fn settled_place(&self) -> Option<Place> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.session.place(self.id) {
                // Waits: between two looks; the deadline is far away.
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(200)),
                place => return place,
            }
        }
    }

    /// Moves it, and tries again while that is put off. Does not check where it is a moment later.
    pub fn try_to_move(&mut self, to: Place) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            match self.session.move_to(self.id, to) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    // Waits: between two tries; the deadline is far away.
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => panic!("it could not be moved to {to:?}: {error}"),
            }
        }
    }

    /// The program sends what fits now. Returns bytes sent.
    pub fn send(&mut self, most: usize) -> usize {
        let mut piece = vec![0; most];
        stream::fill(KEYS[0], self.sent[0], &mut piece);
        let sent = later(self.session.send(self.id, &piece));
        self.sent[0] += sent as u64;
        sent
    }

    /// The peer sends what fits now.
    pub fn peer_sends(&mut self, most: usize) -> usize {
        let mut piece = vec![0; most];
        stream::fill(KEYS[1], self.sent[1], &mut piece);
        let sent = later(socket::send(self.peer.as_fd(), &piece));
        self.sent[1] += sent as u64;
        sent
    }

    /// The program reads and checks what has arrived.
    pub fn receive(&mut self) -> usize {
        let mut buffer = vec![0; 1 << 16];
        let got = later(self.session.receive(self.id, &mut buffer));
        assert_eq!(stream::mismatches(KEYS[1], self.received[0], &buffer[..got]), 0, "wrong bytes at the program");
        self.received[0] += got as u64;
        got
    }

    /// The peer reads and checks what has arrived.
    pub fn peer_receives(&mut self) -> usize {
        let mut buffer = vec![0; 1 << 16];
        let got = later(socket::receive(self.peer.as_fd(), &mut buffer));
        assert_eq!(stream::mismatches(KEYS[0], self.received[1], &buffer[..got]), 0, "wrong bytes at the peer");
        self.received[1] += got as u64;
        got
    }

    /// Reads on both sides until everything that was sent has arrived.
    pub fn drain(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut ready = Vec::new();
        while self.received[0] < self.sent[1] || self.received[1] < self.sent[0] {
            assert!(
                Instant::now() < deadline,
                "stuck with the connection at {:?}: sent {:?}, received {:?}; the peer: {:?}",
                self.session.place(self.id),
                self.sent,
                self.received,
                TcpInfo::read(self.peer.as_fd()),
            );
            if self.receive() + self.peer_receives() == 0 {
                self.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
            }
        }
    }

    /// Sends on both sides until `bytes` more are in flight or nothing more fits for a while, without reading.
    pub fn fill(&mut self, bytes: u64) {
        let goal = [self.sent[0] + bytes, self.sent[1] + bytes];
        let mut quiet = Instant::now();
        // Waits: there is no event when no more will fit. Whoever gives up early on a busy machine sends less.
        while quiet.elapsed() < Duration::from_millis(300) && (self.sent[0] < goal[0] || self.sent[1] < goal[1]) {
            let first = if self.sent[0] < goal[0] { self.send(16384) } else { 0 };
            let second = if self.sent[1] < goal[1] { self.peer_sends(16384) } else { 0 };
            if first + second > 0 {
                quiet = Instant::now();
            } else {
                // Waits: between two looks.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The peer sends, and nobody acknowledges: waits until its kernel has sent that again so many times.
    pub fn peer_repeats(&mut self, times: u32) {
        assert!(self.peer_sends(1000) > 0, "nothing fits");
        let before = sent_again(&self.peer);
        wait_until("the peer sends again", || sent_again(&self.peer) >= before + times);
    }

    /// Both sides send until nothing has come from the program's while the peer's kernel has sent again twice.
    pub fn until_silent(&mut self) {
        let mut mark = sent_again(&self.peer);
        wait_until("nothing comes any more", || {
            self.send(1);
            self.peer_sends(1);
            if self.peer_receives() > 0 {
                mark = sent_again(&self.peer);
            }
            sent_again(&self.peer) >= mark + 2
        });
    }

    /// One exchange with a move in the middle of it.
    pub fn exchange(&mut self, bytes: u64, to: Place) {
        self.fill(bytes);
        self.move_to(to);
        self.fill(bytes);
        self.drain();
    }

    /// Waits until the program sees the end of the stream.
    pub fn expect_end(&mut self) {
        wait_until("the end of the stream", || match self.session.receive(self.id, &mut [0; 16]) {
            Ok(0) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            other => panic!("no end of stream but {other:?}"),
        });
    }

    /// Waits until the peer sees the end of the stream.
    pub fn expect_peer_end(&mut self) {
        wait_until("the end of the stream", || match socket::receive(self.peer.as_fd(), &mut [0; 16]) {
            Ok(0) => true,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            other => panic!("no end of stream but {other:?}"),
        });
    }
}
