//! A program that breaks every rule, run as `nobody` beside an honest one: the test's own binary, started again.

use baton_abi::layout::{RING_WORDS, session as at};
use baton_lab::testbed::{Testbed, address_b};
use baton_linux::control::Channel;
use baton_linux::namespace::Namespace;
use baton_protocol::program::{Answer, Ask, Flip, Opening, Place, Reply, Request, Until};
use baton_shm::Region;
use baton_sim::Rng;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const ATTACK: &str = "HOSTILE_ATTACK";
const SOCKET: &str = "HOSTILE_SOCKET";
const PEER: &str = "HOSTILE_PEER";
const NOBODY: u32 = 65534;

/// How long an attack lasts that has no end of its own.
const LONG: Duration = Duration::from_secs(3);

/// The hostile program, as the test that started it sees it.
pub struct Hostile(Child, BufReader<std::process::ChildStdout>);

impl Hostile {
    /// Starts it on host A, with a peer on host B that echoes.
    pub fn start(bed: &Testbed, attack: &str) -> Hostile {
        let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
        let peer = listener.local_addr().expect("its address");
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
            }
        });
        Self::start_at(&bed.host_a, &bed.socket(), &peer.to_string(), attack)
    }

    /// Starts it in a namespace, with the path of an agent.
    pub fn start_at(namespace: &Namespace, socket: &Path, peer: &str, attack: &str) -> Hostile {
        // Not by its path, which may lead through a directory that is not everybody's.
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "hostile::hostile_program", "--ignored", "--nocapture", "--test-threads=1"]);
        command.env(ATTACK, attack).env(SOCKET, socket).env(PEER, peer).stdout(Stdio::piped());
        std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
        let mut child = namespace.run(|| command.spawn()).expect("the hostile program");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Hostile(child, output)
    }

    /// Waits until the attack is under way. What it says of that.
    pub fn await_attack(&mut self) -> String {
        let mut line = String::new();
        while !line.contains("attacking") {
            line.clear();
            assert!(self.1.read_line(&mut line).expect("a line") > 0, "the hostile program ended before it began");
        }
        line
    }

    pub fn ended(&mut self) -> bool {
        self.0.try_wait().expect("our child").is_some()
    }

    /// Waits until it has found what it expects.
    pub fn expect_success(mut self) {
        let mut rest = String::new();
        self.1.read_to_string(&mut rest).expect("its output");
        assert!(self.0.wait().expect("our child").success(), "the hostile program: {rest}");
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A session that keeps no rule.
struct Client {
    channel: Channel,
    memory: Arc<Region>,
    bells: Vec<OwnedFd>,
}

fn ask_on(channel: &Channel, body: Ask, descriptors: &[BorrowedFd<'_>]) -> Option<(Reply, Vec<OwnedFd>)> {
    channel.send(&Request { tag: 1, body }, descriptors).ok()?;
    loop {
        let (answer, given) = channel.receive::<Answer>().ok()?;
        match answer.body {
            Reply::Restarted { .. } => return None,
            body if answer.tag == 1 => return Some((body, given)),
            _ => {}
        }
    }
}

impl Client {
    fn open(socket: &Path, opening: Opening) -> Option<Client> {
        let channel = Channel::connect(socket).ok()?;
        let (reply, mut given) = ask_on(&channel, Ask::Open(opening), &[])?;
        if !matches!(reply, Reply::Opened { .. }) {
            return None;
        }
        let memory = Arc::new(Region::map(given.remove(0)).expect("session memory"));
        Some(Client { channel, memory, bells: given })
    }

    fn ask(&self, body: Ask) -> Option<Reply> {
        ask_on(&self.channel, body, &[]).map(|(reply, _)| reply)
    }

    /// A connection of its own that is on the NIC.
    fn offload(&self) -> Option<(TcpStream, u32)> {
        let peer: SocketAddr = std::env::var(PEER).ok()?.parse().ok()?;
        let stream = TcpStream::connect(peer).expect("a connection to the peer");
        let ask = Ask::Register { inherited: false, process: None };
        let (reply, _) = ask_on(&self.channel, ask, &[stream.as_fd()])?;
        let Reply::Registered { connection } = reply else { panic!("{reply:?}") };
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            match self.ask(Ask::Move { connection, to: Place::Nic })? {
                Reply::Done => return Some((stream, connection)),
                Reply::Stayed { transient: true, .. } => {}
                other => panic!("{other:?}"),
            }
        }
        panic!("it was never moved");
    }

    fn ring(&self) {
        for bell in &self.bells {
            // A doorbell is whatever takes eight bytes.
            write_once(bell.as_fd(), &1u64.to_ne_bytes());
        }
    }

    /// Waits until the agent has closed the session.
    fn is_cut_off(&self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            match self.channel.try_receive::<Answer>() {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                Ok(_) => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// Whether a single write took anything.
fn write_once(fd: BorrowedFd<'_>, bytes: &[u8]) -> bool {
    std::fs::File::from(fd.try_clone_to_owned().expect("a descriptor")).write(bytes).is_ok()
}

/// Of any descriptor, and everybody's who shares it.
fn set_nonblocking(fd: BorrowedFd<'_>, on: bool) {
    let socket = std::os::unix::net::UnixStream::from(fd.try_clone_to_owned().expect("a descriptor"));
    socket.set_nonblocking(on).expect("a flag");
}

fn alone() -> Opening {
    Opening::alone()
}

/// What the hostile program does; `hostile_program` of the test calls it.
pub fn run() {
    let (Ok(attack), Ok(socket)) = (std::env::var(ATTACK), std::env::var(SOCKET)) else { return };
    let socket = Path::new(&socket);
    let say = || {
        println!("attacking");
        let _ = std::io::stdout().flush();
    };
    match attack.as_str() {
        "ring" => lie_once(socket, say),
        "rings" => lie_for_long(socket, say),
        "requests" => ask_nonsense(socket, say),
        "deaf" => never_read(socket, say),
        "bells" => stop_doorbells(socket, say),
        "many" => take_all_sessions(socket),
        other => panic!("no attack {other:?}"),
    }
}

/// The command ring's head is far away; the connection is to go to the kernel, which makes the NIC read the whole ring.
fn lie_once(socket: &Path, say: impl Fn()) {
    let client = Client::open(socket, alone()).expect("a session");
    let (mut stream, connection) = client.offload().expect("a connection on the NIC");
    say();
    client.memory.words(at::COMMANDS, 1)[0].store(1 << 40, Ordering::SeqCst);
    let _ = client.channel.try_send(&Request { tag: 8, body: Ask::Move { connection, to: Place::Kernel } }, &[]);
    client.ring();
    assert!(client.is_cut_off(), "the session goes on");
    // The connection is the kernel's, whole.
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
    stream.write_all(b"still here").expect("sent");
    let mut echo = [0; 10];
    stream.read_exact(&mut echo).expect("an echo");
    assert_eq!(&echo, b"still here");
}

/// Any words, all over its session, again and again, while its connections are on the NIC.
fn lie_for_long(socket: &Path, say: impl Fn()) {
    let (deadline, mut rng) = (Instant::now() + LONG, Rng::new(3));
    say();
    while Instant::now() < deadline {
        // A NIC or an agent that was killed meanwhile closes the session; the next one opens another.
        let Some(client) = Client::open(socket, alone()) else { continue };
        let Some(_connection) = client.offload() else { continue };
        let until = Instant::now() + Duration::from_millis(1 + rng.below(200));
        while Instant::now() < until {
            let all = at::HEAP + at::MAX_CONNECTIONS;
            let place = match rng.below(4) {
                0 => at::COMMANDS + 64 * rng.below(3) as usize,
                1 => at::EVENTS + 64 * rng.below(3) as usize,
                2 => at::COMMANDS + 8 * rng.below(RING_WORDS as u64) as usize,
                _ => 8 * rng.below(all as u64 / 8) as usize,
            };
            let value = match rng.below(3) {
                0 => rng.below(1 << 13),
                1 => rng.below(u64::MAX),
                _ => u64::MAX,
            };
            client.memory.words(place, 1)[0].store(value, Ordering::SeqCst);
            client.ring();
        }
    }
}

/// Requests whose numbers and strings nobody should believe, and bytes that are no request.
fn ask_nonsense(socket: &Path, say: impl Fn()) {
    let mut rng = Rng::new(4);
    say();
    for (min, max) in [(0, u64::MAX), (u64::MAX, u64::MAX), (1, u64::MAX), (9, 1), (0, 0)] {
        let channel = Channel::connect(socket).expect("the agent");
        let reply = ask_on(&channel, Ask::Group { flip: Some(Flip { min, max, seed: 1 }) }, &[]);
        if let Some((Reply::Grouped { group }, _)) = reply {
            let client = Client::open(socket, Opening { group, ..alone() }).expect("a session");
            client.offload();
        }
    }
    let long = "x".repeat(60_000);
    let mut kept = Vec::new();
    for _ in 0..3 {
        let Some(client) = Client::open(socket, Opening { program: long.clone(), ..alone() }).or(Client::open(socket, alone()))
        else {
            panic!("no session");
        };
        let (stream, connection) = client.offload().expect("a connection");
        for until in [Until::Again, Until::Alone, Until::Never] {
            for _ in 0..20 {
                client.ask(Ask::GiveBack { connection, reason: format!("{}{long}", rng.below(1 << 40)), until });
            }
        }
        for number in [u32::MAX, 1 << 14, connection + 1] {
            client.ask(Ask::Move { connection: number, to: Place::Nic });
            client.ask(Ask::MoveAny { session: number, connection: number, to: Place::Nic });
            client.ask(Ask::GiveBack { connection: number, reason: String::new(), until: Until::Never });
            client.ask(Ask::Lend { connection: number });
            client.ask(Ask::Closed { connection: number, abort: true });
            client.ask(Ask::Forget { connection: number });
            client.ask(Ask::Detail { connection: number });
            client.ask(Ask::List { from: (number, number) });
        }
        kept.push((client, stream));
    }
    let client = Client::open(socket, alone()).expect("a session");
    for _ in 0..3000 {
        let bytes: Vec<u8> = (0..1 + rng.below(40)).map(|_| rng.below(256) as u8).collect();
        write_once(client.channel.as_fd(), &bytes);
        while client.channel.try_receive::<Answer>().is_ok() {}
    }
    // They are still there while the test lists connections.
    std::thread::sleep(Duration::from_millis(500));
}

/// Asks and asks, and reads no answer.
fn never_read(socket: &Path, say: impl Fn()) {
    let channels: Vec<Channel> = (0..4).map(|_| Channel::connect(socket).expect("the agent")).collect();
    let attacher = Client::open(socket, Opening { attacher: true, ..alone() }).expect("a session");
    let began = Instant::now();
    let mut said = false;
    loop {
        for channel in channels.iter().chain([&attacher.channel]) {
            let _ = channel.try_send(&Request { tag: 9, body: Ask::Statistics }, &[]);
        }
        if !said && began.elapsed() > Duration::from_millis(300) {
            // By now no answer finds room.
            said = true;
            say();
        }
    }
}

/// Opens sessions until there are no more.
fn take_all_sessions(socket: &Path) {
    let (mut kept, mut refused) = (Vec::new(), String::new());
    while refused.is_empty() && kept.len() < 20 {
        let channel = Channel::connect(socket).expect("the agent");
        match ask_on(&channel, Ask::Open(alone()), &[]) {
            Some((Reply::Opened { .. }, _)) => kept.push(channel),
            Some((Reply::Failed { reason }, _)) => refused = reason,
            other => panic!("{other:?}"),
        }
    }
    println!("attacking with {} sessions: {refused}", kept.len());
    let _ = std::io::stdout().flush();
    std::thread::sleep(Duration::from_secs(60));
}

/// Doorbells that block whoever rings or silences them.
fn stop_doorbells(socket: &Path, say: impl Fn()) {
    let client = Client::open(socket, alone()).expect("a session");
    let (mut stream, connection) = client.offload().expect("a connection on the NIC");
    // Nobody reads the echo: what is sent has no room some time.
    stream.set_nonblocking(true).expect("a flag");
    client.memory.word32(at::PROGRAM_SLEEPING).store(1, Ordering::SeqCst);
    say();
    let deadline = Instant::now() + LONG;
    while Instant::now() < deadline {
        for bell in &client.bells {
            set_nonblocking(bell.as_fd(), true);
            while write_once(bell.as_fd(), &(u64::MAX - 1).to_ne_bytes()) {}
            set_nonblocking(bell.as_fd(), false);
        }
        let _ = client.channel.try_send(&Request { tag: 8, body: Ask::Move { connection, to: Place::Kernel } }, &[]);
        let _ = client.channel.try_send(&Request { tag: 8, body: Ask::Move { connection, to: Place::Nic } }, &[]);
        let _ = stream.write_all(b"x");
        while client.channel.try_receive::<Answer>().is_ok() {}
    }
}
