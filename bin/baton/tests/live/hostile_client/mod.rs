//! A program that breaks every rule, run as `nobody` beside an honest one: the test's own binary, started again.

pub(crate) mod blockers;
mod descriptors;
pub(crate) mod kinds;
mod unreceived;

use crate::fuse::FuseFile;
use baton_abi::layout::{RING_WORDS, session as at};
use baton_bed::testbed::{Testbed, address_b};
use baton_linux::control::Channel;
use baton_linux::namespace::Namespace;
use baton_linux::{process, socket};
use baton_protocol::program::{Answer, Ask, ConnectionInfo, Detail, Flip, Opening, Place, Reply, Request, Rings, Until};
use baton_shm::Region;
use baton_sim::Rng;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const ATTACK: &str = "HOSTILE_ATTACK";
const SOCKET: &str = "HOSTILE_SOCKET";
const PEER: &str = "HOSTILE_PEER";
pub const NOBODY: u32 = 65534;

pub use descriptors::Seeds;

/// Duration of attacks that do not end by themselves.
// Waits: nothing but the end of this attack; a busy machine has fewer rounds of it.
const LONG: Duration = Duration::from_secs(3);

/// The hostile program, as the test that started it sees it.
pub struct Hostile(Child, BufReader<std::process::ChildStdout>, Option<FuseFile>);

impl Hostile {
    /// Starts it on host A, with a peer on host B that echoes.
    pub fn start(bed: &Testbed, attack: &str) -> Hostile {
        Self::start_at(&bed.host_a, &bed.socket(), &echo_server(bed).to_string(), attack)
    }

    /// Starts it in a namespace, with the path of an agent.
    pub fn start_at(namespace: &Namespace, socket: &Path, peer: &str, attack: &str) -> Hostile {
        Hostile::start_with(namespace, socket, peer, (attack, 1), None)
    }

    /// The same, with a number for the attack, and with a file, which is its descriptor 3.
    pub fn start_with(
        namespace: &Namespace,
        socket: &Path,
        peer: &str,
        (attack, count): (&str, usize),
        file: Option<FuseFile>,
    ) -> Hostile {
        // Not by its path, which may be inside a directory that only some users can read.
        let mut command = match &file {
            Some(file) => file.held_by(NOBODY, std::env::current_exe().expect("this program")),
            None => Command::new("/proc/self/exe"),
        };
        if file.is_none() {
            std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
        }
        command.args(["--exact", "hostile::hostile_program", "--nocapture", "--test-threads=1"]);
        command.env(blockers::COUNT, count.to_string());
        command.env(ATTACK, attack).env(SOCKET, socket).env(PEER, peer).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = namespace.run(|| command.spawn()).expect("the hostile program");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        Hostile(child, output, file)
    }

    /// Waits until the attack has begun. Returns what the program printed about it.
    pub fn await_attack(&mut self) -> String {
        let mut line = String::new();
        while !line.contains("attacking") {
            line.clear();
            assert!(self.1.read_line(&mut line).expect("a line") > 0, "the hostile program ended before it began");
        }
        line
    }

    /// Gives it a line to read.
    pub fn tell(&mut self, line: &str) {
        writeln!(self.0.stdin.as_mut().expect("its input"), "{line}").expect("it reads");
    }

    /// The next line that it prints.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        assert!(self.1.read_line(&mut line).expect("a line") > 0, "the hostile program has ended");
        line.trim_end().to_owned()
    }

    pub fn ended(&mut self) -> bool {
        self.0.try_wait().expect("our child").is_some()
    }

    /// Lets it end, and waits for that. Returns whether it reports success.
    pub fn succeeds(mut self) -> bool {
        drop(self.0.stdin.take());
        let mut rest = String::new();
        self.1.read_to_string(&mut rest).expect("its output");
        let success = self.0.wait().expect("our child").success();
        println!("the hostile program: {rest}");
        success
    }

    /// Waits until it reports success.
    pub fn expect_success(self) {
        assert!(self.succeeds(), "the hostile program has failed");
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        // It ends when it can close that.
        drop(self.2.take());
        let _ = self.0.wait();
    }
}

/// A session that breaks every rule.
pub(crate) struct Client {
    channel: Channel,
    pub memory: Arc<Region>,
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
    pub fn open(socket: &Path, opening: Opening) -> Option<Client> {
        let channel = Channel::connect(socket).ok()?;
        let (reply, mut given) = ask_on(&channel, Ask::Open(opening), &[])?;
        if !matches!(reply, Reply::Opened { .. }) {
            return None;
        }
        let memory = Arc::new(Region::map(given.remove(0)).expect("session memory"));
        Some(Client { channel, memory, bells: given })
    }

    /// The agent's answer; None if it has died.
    pub fn ask(&self, body: Ask) -> Option<Reply> {
        ask_on(&self.channel, body, &[]).map(|(reply, _)| reply)
    }

    /// Waits until the next agent says that it serves the session.
    pub fn await_restart(&self) {
        while !matches!(self.channel.receive::<Answer>().expect("an answer").0.body, Reply::Restarted { .. }) {}
    }

    /// Registers a connection. Returns its number; None if the agent has died.
    pub fn register(&self, stream: &TcpStream) -> Option<u32> {
        let ask = Ask::Register { inherited: false, process: None };
        let (reply, _) = ask_on(&self.channel, ask, &[stream.as_fd()])?;
        let Reply::Registered { connection } = reply else { panic!("{reply:?}") };
        Some(connection)
    }

    /// Has the NIC open a connection from a socket. Returns its number; None if the agent has died.
    pub fn connect(&self, socket: BorrowedFd<'_>, peer: SocketAddr) -> Option<u32> {
        let (reply, _) = ask_on(&self.channel, Ask::Connect { peer }, &[socket])?;
        let Reply::Registered { connection } = reply else { panic!("{reply:?}") };
        Some(connection)
    }

    /// Has the NIC make a listening socket's connections. Returns the listener's number and its queue.
    pub fn listen(&self, listener: &TcpListener) -> (u32, OwnedFd) {
        let (reply, mut given) = ask_on(&self.channel, Ask::Listen, &[listener.as_fd()]).expect("an agent");
        let Reply::Listening { listener } = reply else { panic!("{reply:?}") };
        (listener, given.pop().expect("the queue"))
    }

    /// Accepts a connection that the NIC has made, and does not note that it has received it. Returns its number and
    /// descriptor; None if none waits.
    pub fn accept(&self, listener: u32) -> Option<(u32, OwnedFd)> {
        match ask_on(&self.channel, Ask::Accept { listener }, &[]).expect("an agent") {
            (Reply::Accepted { connection }, mut given) => Some((connection, given.pop().expect("its descriptor"))),
            (Reply::Stayed { .. }, _) => None,
            (reply, _) => panic!("{reply:?}"),
        }
    }

    /// A connection of its own that is on the NIC.
    fn offload(&self) -> Option<(TcpStream, u32)> {
        let peer: SocketAddr = std::env::var(PEER).ok()?.parse().ok()?;
        let stream = TcpStream::connect(peer).expect("a connection to the peer");
        let connection = self.register(&stream)?;
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
            // Whatever takes eight bytes counts as a doorbell.
            write_once(bell.as_fd(), &1u64.to_ne_bytes());
        }
    }

    /// Waits until the agent has closed the session.
    fn is_cut_off(&self) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        while Instant::now() < deadline {
            match self.channel.try_receive::<Answer>() {
                // Waits: between two looks.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
                Ok(_) => {}
                Err(_) => return true,
            }
        }
        false
    }
}

/// Whether a single write wrote anything.
fn write_once(fd: BorrowedFd<'_>, bytes: &[u8]) -> bool {
    std::fs::File::from(fd.try_clone_to_owned().expect("a descriptor")).write(bytes).is_ok()
}

/// Changes a flag that everybody shares who has the same description.
fn set_nonblocking(fd: BorrowedFd<'_>, on: bool) {
    let socket = std::os::unix::net::UnixStream::from(fd.try_clone_to_owned().expect("a descriptor"));
    socket.set_nonblocking(on).expect("a flag");
}

fn alone() -> Opening {
    Opening::alone()
}

/// Runs the attack, if this process was started for one; called by `hostile_program` of the test. Returns whether it
/// was.
pub fn run() -> bool {
    let (Ok(attack), Ok(socket)) = (std::env::var(ATTACK), std::env::var(SOCKET)) else { return false };
    let socket = Path::new(&socket);
    let say = || {
        println!("attacking");
        let _ = std::io::stdout().flush();
    };
    match attack.as_str() {
        "ring" => corrupt_once(socket, say),
        "rings" => corrupt_for_long(socket, say),
        "requests" => send_nonsense(socket, say),
        "deaf" => never_read(socket, say),
        "bells" => stop_doorbells(socket, say),
        "held" => move_when_told(socket),
        "kinds" => kinds::run(socket),
        "silent" => blockers::lend_nothing(socket, say),
        "many" => take_all_sessions(socket),
        "descriptors" => descriptors::run(socket, say),
        "attacher" => claim_connections(socket, say),
        "impostor" => pretend(socket, say, false, None),
        "liar" => pretend(socket, say, true, None),
        "giver" => pretend(socket, say, true, Some(blockers::file())),
        "files" => blockers::send_files(socket, say),
        "files for sockets" => blockers::register_files(socket, say),
        "lingers" => blockers::die_with_sockets(socket, say),
        "unreceived" => unreceived::run(socket, say, None),
        "unreceived files" => unreceived::run(socket, say, Some(blockers::file())),
        "words" => descriptors::send_words(socket, say),
        "share" => blockers::take_descriptors(socket),
        other => panic!("no attack {other:?}"),
    }
    true
}

/// Moves the command ring's head far away; the connection is then moved to the kernel, which makes the NIC read the
/// whole ring.
fn corrupt_once(socket: &Path, begun: impl Fn()) {
    let client = Client::open(socket, alone()).expect("a session");
    let (mut stream, connection) = client.offload().expect("a connection on the NIC");
    begun();
    client.memory.words(at::COMMANDS, 1)[0].store(1 << 40, Ordering::SeqCst);
    let _ = client.channel.try_send(&Request { tag: 8, body: Ask::Move { connection, to: Place::Kernel } }, &[]);
    client.ring();
    assert!(client.is_cut_off(), "the session goes on");
    // The connection must be in the kernel, and undamaged.
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
    stream.write_all(b"still here").expect("sent");
    let mut echo = [0; 10];
    stream.read_exact(&mut echo).expect("an echo");
    assert_eq!(&echo, b"still here");
}

/// Registers a connection, and moves it as the lines that it reads say. Says its process, and the number of the
/// socket's descriptor.
fn move_when_told(socket: &Path) {
    let client = Client::open(socket, alone()).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let stream = TcpStream::connect(peer).expect("a connection to the peer");
    let register = || ask_on(&client.channel, Ask::Register { inherited: false, process: None }, &[stream.as_fd()]);
    let Some((Reply::Registered { connection }, _)) = register() else { panic!("it is not registered") };
    println!("attacking {} {}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&stream));
    let _ = std::io::stdout().flush();
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        if line == "flood" {
            println!("{}", flood(&client.channel, connection));
            let _ = std::io::stdout().flush();
            continue;
        }
        let reply = match line.as_str() {
            "nic" => client.ask(Ask::Move { connection, to: Place::Nic }),
            "register" => register().map(|(reply, _)| reply),
            _ => client.ask(Ask::Move { connection, to: Place::Kernel }),
        };
        // The agent has died: its session goes on.
        println!("{}", reply.map_or("none".into(), |reply| format!("{reply:?}")));
        let _ = std::io::stdout().flush();
    }
    echo(&stream);
}

/// Requests of [`flood`], and those of them that the agent may keep waiting.
const REQUESTS: u32 = 10_000;
const WAITING: u32 = 256;
/// Requests beyond these that it sends before it reads the answers.
const UNREAD: u32 = 32;

/// Requests moves, both ways, of a connection whose move is held up, and reads the answers. Prints how many answers
/// came and the last one. Requests that the agent keeps are answered when the move ends.
fn flood(channel: &Channel, connection: u32) -> String {
    let mut answers = Vec::new();
    let read = |answers: &mut Vec<Reply>, limit| match channel.receive_within::<Answer>(limit) {
        Ok((answer, _)) => answers.push(answer.body),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::TimedOut),
    };
    for number in 0..REQUESTS {
        let body = match number % 3 {
            0 => Ask::Move { connection, to: Place::Nic },
            1 => Ask::Move { connection, to: Place::Kernel },
            _ => Ask::GiveBack { connection, reason: "flood".into(), until: Until::Again },
        };
        let request = Request { tag: 2 + number, body };
        // Who leaves very many answers unread is cut off.
        let is_ahead = |answers: &[Reply]| number.saturating_sub(answers.len() as u32) > WAITING + UNREAD;
        while is_ahead(&answers) || channel.try_send(&request, &[]).is_err() {
            // Waits: for room, or an answer.
            read(&mut answers, Duration::from_millis(1));
        }
        read(&mut answers, Duration::ZERO);
    }
    // Waits: for what is never answered, without the bound.
    let deadline = Instant::now() + Duration::from_secs(10);
    while answers.len() < (REQUESTS - WAITING) as usize && Instant::now() < deadline {
        // Waits: for the next answer; the deadline is above.
        read(&mut answers, Duration::from_millis(100));
    }
    format!("{} answered, the last with {:?}", answers.len(), answers.last())
}

/// Writes random words all over its session, again and again, while its connections are on the NIC.
fn corrupt_for_long(socket: &Path, begun: impl Fn()) {
    let (deadline, mut rng) = (Instant::now() + LONG, Rng::new(3));
    begun();
    while Instant::now() < deadline {
        // A NIC or an agent that was killed meanwhile closes the session; the next agent opens another.
        let Some(client) = Client::open(socket, alone()) else { continue };
        let Some(_connection) = client.offload() else { continue };
        // Waits: each session is attacked for another while, and at each moment the same must hold.
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

/// Sends requests with impossible numbers and strings, and bytes that are no request. Ends when it may.
fn send_nonsense(socket: &Path, all_sent: impl Fn()) {
    let mut rng = Rng::new(4);
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
            client.ask(Ask::MoveAny { session: number, connection: number, to: Place::Nic, nic: None });
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
    // They are still open while the test lists connections.
    all_sent();
    let _ = std::io::stdin().read(&mut [0]);
}

/// Sends requests without end, and reads no answer. It connects again whenever it is cut off.
fn never_read(socket: &Path, begun: impl Fn()) {
    let mut channels: Vec<Channel> = (0..4).map(|_| Channel::connect(socket).expect("the agent")).collect();
    let attacher = Client::open(socket, Opening { attacher: true, ..alone() }).expect("a session");
    let request = Request { tag: 9, body: Ask::Statistics };
    let mut cut_off = 0;
    loop {
        for channel in &mut channels {
            if channel.try_send(&request, &[]).is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock) {
                // An answer has found no room.
                cut_off += 1;
                if cut_off == 4 {
                    begun();
                }
                if let Ok(next) = Channel::connect(socket) {
                    *channel = next;
                }
            }
        }
        let _ = attacher.channel.try_send(&request, &[]);
    }
}

/// Opens sessions until the agent refuses.
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
    // Waits: to be killed.
    std::thread::sleep(Duration::from_secs(60));
}

/// Asks for the move of an attacher's connection until it is on the NIC.
fn move_to_nic(client: &Client, connection: u32, stream: &TcpStream) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match ask_on(&client.channel, Ask::Move { connection, to: Place::Nic }, &[stream.as_fd()]) {
            Some((Reply::Done, _)) => return,
            Some((Reply::Stayed { transient: true, .. }, _)) if Instant::now() < deadline => {}
            other => panic!("{other:?}"),
        }
    }
}

/// Calls itself an attacher, and claims others' connections and its own without a socket.
fn claim_connections(socket: &Path, begun: impl Fn()) {
    let client = Client::open(socket, Opening { attacher: true, ..alone() }).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let stream = TcpStream::connect(peer).expect("a connection to the peer");
    let local = stream.local_addr().expect("an address");
    let register = |process| ask_on(&client.channel, Ask::Register { inherited: false, process }, &[stream.as_fd()]);
    match register(Some(1)) {
        Some((Reply::Stayed { reason, .. }, _)) => assert!(reason.contains("only that user and root may attach"), "{reason}"),
        other => panic!("another user's process: {other:?}"),
    }
    let Some((Reply::Registered { connection }, _)) = register(Some(std::process::id())) else { panic!("it is not registered") };
    move_to_nic(&client, connection, &stream);
    begun();
    // It says nothing of this.
    drop(stream);
    let deadline = Instant::now() + Duration::from_secs(30);
    let next = loop {
        // Waits: one try of many; the loop has 30 s.
        match connect_from(local, peer, Duration::from_secs(1)) {
            Ok(next) => break next,
            Err(error) => assert!(Instant::now() < deadline, "the port is of no use to anybody: {error}"),
        }
    };
    echo(&next);
}

/// A connection from a local address and port.
pub fn connect_from(local: SocketAddr, peer: SocketAddr, limit: Duration) -> std::io::Result<TcpStream> {
    let fd = socket::stream(false, 0)?;
    socket::set(fd.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    socket::bind(fd.as_fd(), local)?;
    let limit = libc::timeval { tv_sec: limit.as_secs() as i64, tv_usec: limit.subsec_micros().into() };
    let bytes = [limit.tv_sec.to_ne_bytes(), limit.tv_usec.to_ne_bytes()].concat();
    socket::set_bytes(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDTIMEO, &bytes)?;
    socket::connect(fd.as_fd(), peer)?;
    Ok(fd.into())
}

/// Bytes there and back.
pub fn echo(mut stream: &TcpStream) {
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a time-out");
    stream.write_all(b"still here").expect("sent");
    let mut echo = [0; 10];
    stream.read_exact(&mut echo).expect("an echo");
    assert_eq!(&echo, b"still here");
}

/// Calls itself an agent, listens where one would, and answers nothing, or that it has connections without end, whose
/// texts are for a terminal; with an answer, a file may come along.
fn pretend(socket: &Path, begun: impl Fn(), lies: bool, gift: Option<OwnedFd>) {
    process::set_name(baton_protocol::keeper::AGENT_NAME).expect("a name");
    std::fs::create_dir_all(socket.parent().expect("a directory")).expect("a directory");
    let listener = baton_linux::control::Listener::bind(socket).expect("a listener");
    begun();
    let mut kept = Vec::new();
    // Ends with the test: then its output has nobody who reads it.
    while let Ok(client) = listener.accept() {
        let channel = Channel::from_fd(client.as_fd().try_clone_to_owned().expect("a descriptor"));
        println!("a client");
        let mut from = 0;
        while lies && let Ok((Request { tag, body }, _)) = channel.receive::<Request>() {
            let body = match body {
                Ask::List { .. } => {
                    from += 1;
                    Reply::Connections(vec![lie(from)])
                }
                _ => Reply::Failed { reason: "\u{1b}[2J".into() },
            };
            let answer = Answer { tag, body };
            let given = gift.as_ref().is_some_and(|gift| channel.send(&answer, &[gift.as_fd()]).is_ok());
            if !given && channel.send(&answer, &[]).is_err() {
                break;
            }
        }
        kept.push(channel);
    }
}

fn lie(session: u32) -> ConnectionInfo {
    let text = || String::from("\u{1b}]0;owned\u{7}");
    ConnectionInfo {
        session,
        connection: 0,
        process: std::process::id(),
        program: text(),
        local: text(),
        peer: text(),
        place: Place::Kernel,
        nic: None,
        made_by: Place::Kernel,
        moves: 0,
        lent: None,
        dormant: false,
        for_us: 0,
        detail: Detail::default(),
        reason: text(),
    }
}

/// Registers a connection, disconnects its socket, has it connected elsewhere, and asks for the move while somebody
/// else has the connection's addresses and ports. What the agent answers, and the other's connection.
pub fn swap(bed: &Testbed, elsewhere: bool) -> (Reply, TcpStream) {
    let client = Client::open(&bed.socket(), alone()).expect("a session");
    let [peer, other] = [(); 2].map(|()| echo_server(bed));
    let stream = bed.host_a.run(|| TcpStream::connect(peer)).expect("a connection");
    let local = stream.local_addr().expect("its address");
    let ask = Ask::Register { inherited: false, process: None };
    let Some((Reply::Registered { connection }, _)) = ask_on(&client.channel, ask, &[stream.as_fd()]) else { panic!("no") };
    socket::disconnect(stream.as_fd()).expect("disconnected");
    let victim = bed.host_a.run(|| connect_from(local, peer, Duration::from_secs(10))).expect("the victim's connection");
    if elsewhere {
        socket::connect(stream.as_fd(), other).expect("connected elsewhere");
    }
    echo(&victim);
    (client.ask(Ask::Move { connection, to: Place::Nic }).expect("an answer"), victim)
}

/// A server on host B that accepts connections and never reads from them, with little room for what comes. It ends when
/// it is dropped.
pub struct NeverReads(Arc<TcpListener>);

impl NeverReads {
    pub fn start(bed: &Testbed) -> NeverReads {
        let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
        socket::set(listener.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, 1).expect("SO_RCVBUF");
        let server = NeverReads(Arc::new(listener));
        let listener = server.0.clone();
        std::thread::spawn(move || drop(listener.incoming().map_while(Result::ok).collect::<Vec<_>>()));
        server
    }

    pub fn address(&self) -> SocketAddr {
        self.0.local_addr().expect("its address")
    }
}

impl Drop for NeverReads {
    fn drop(&mut self) {
        // Then accept(2) fails, and the thread ends. Only the type of a stream has the call.
        let _ = self.0.as_fd().try_clone_to_owned().map(|listener| TcpStream::from(listener).shutdown(Shutdown::Read));
    }
}

/// A server on host B that sends back what it gets.
pub fn echo_server(bed: &Testbed) -> SocketAddr {
    let listener = bed.host_b.run(|| TcpListener::bind(SocketAddr::new(address_b(false), 0))).expect("a listener");
    let peer = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || std::io::copy(&mut &stream, &mut &stream));
        }
    });
    peer
}

/// Has the NIC serve a listening socket of host A.
pub fn listen(bed: &Testbed, listener: &TcpListener) -> (impl Sized + use<>, Reply) {
    let client = Client::open(&bed.socket(), alone()).expect("a session");
    let (reply, _) = ask_on(&client.channel, Ask::Listen, &[listener.as_fd()]).expect("an answer");
    (client, reply)
}

/// Has the NIC serve a UDP socket of host A.
pub fn take_datagrams(bed: &Testbed, udp: &std::net::UdpSocket) -> (impl Sized + use<>, Reply) {
    let client = Client::open(&bed.socket(), alone()).expect("a session");
    let (bell, theirs) = baton_linux::bell::SessionBell::pair().expect("a doorbell");
    let rings = Rings { base: at::heap_end(client.memory.len()) as u32, receive: 4096, send: 4096 };
    let (reply, _) = ask_on(&client.channel, Ask::Datagrams { rings }, &[udp.as_fd(), theirs.as_fd()]).expect("an answer");
    ((client, bell), reply)
}

/// Makes doorbells block whoever rings or clears them.
fn stop_doorbells(socket: &Path, begun: impl Fn()) {
    let client = Client::open(socket, alone()).expect("a session");
    let (mut stream, connection) = client.offload().expect("a connection on the NIC");
    // The test reads no echo, so at some time sends find no room.
    stream.set_nonblocking(true).expect("a flag");
    client.memory.word32(at::PROGRAM_SLEEPING).store(1, Ordering::SeqCst);
    begun();
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
