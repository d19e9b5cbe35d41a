//! Requests with random fields, and words that may be none, with descriptors of every kind and state, for
//! `BATON_FUZZ_SECONDS` (3), from `BATON_FUZZ_SEED` (1) on.

use super::{Client, Hostile, PEER, alone};
use baton_abi::layout::session as at;
use baton_fuzz::setting;
use baton_linux::bell::SessionBell;
use baton_linux::control::{Channel, MOST_RECEIVED, try_send_bytes};
use baton_linux::events::{Doorbell, Poller, Trigger};
use baton_linux::{process, socket};
use baton_protocol::program::{Answer, Ask, Flip, Messages, Opening, Place, Reply, Request, Rings, Until};
use baton_shm::Region;
use baton_sim::Rng;
use std::fs::File;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Says from which seed on a hostile program has asked, and how far it has come, if its test fails.
pub struct Seeds(u32);

impl Seeds {
    pub fn of(hostile: &Hostile) -> Seeds {
        Seeds(hostile.0.id())
    }
}

impl Drop for Seeds {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let reached = std::fs::read_to_string(format!("/proc/{}/comm", self.0)).unwrap_or_default();
            eprintln!("it began with BATON_FUZZ_SEED={}, and has come to: {}", setting("BATON_FUZZ_SEED", 1), reached.trim());
        }
    }
}

/// The seed of the requests under way. This process has it as its name, where [`Seeds`] finds it.
struct Seed(u64);

impl Seed {
    fn begin(seed: u64) -> Seed {
        let _ = std::fs::write("/proc/self/comm", format!("seed {seed}"));
        Seed(seed)
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("BATON_FUZZ_SEED={} has failed", self.0);
        }
    }
}

/// Makes a descriptor; None if that fails, as when a port is taken.
type Make = fn(SocketAddr) -> Option<OwnedFd>;

fn any(v6: bool) -> SocketAddr {
    if v6 { ([0u16; 8], 0).into() } else { ([0u8; 4], 0).into() }
}

/// Every kind of descriptor that a program can send: sockets of each family and state, files, what is no file.
const KINDS: [Make; 46] = [
    |peer| Some(TcpStream::connect(peer).ok()?.into()),
    |peer| Some(TcpStream::connect(peer).ok()?.into()),
    |peer| {
        let stream = TcpStream::connect(peer).ok()?;
        stream.shutdown(Shutdown::Write).ok()?;
        Some(stream.into())
    },
    |peer| {
        let stream = TcpStream::connect(peer).ok()?;
        stream.shutdown(Shutdown::Both).ok()?;
        Some(stream.into())
    },
    |peer| {
        let stream = TcpStream::connect(peer).ok()?;
        socket::disconnect(stream.as_fd()).ok()?;
        Some(stream.into())
    },
    |_| socket::stream(false, 0).ok(),
    |_| socket::stream(true, 0).ok(),
    // MPTCP.
    |_| socket::stream(false, 262).ok(),
    |_| {
        let fd = socket::stream(false, 0).ok()?;
        socket::bind(fd.as_fd(), any(false)).ok()?;
        Some(fd)
    },
    |_| Some(TcpListener::bind(any(false)).ok()?.into()),
    |_| Some(TcpListener::bind(any(true)).ok()?.into()),
    |peer| {
        let stream = TcpStream::connect(peer).ok()?;
        socket::set(stream.as_fd(), 6, 31, 0).ok();
        socket::set(stream.as_fd(), 1, 2, 1).ok();
        Some(stream.into())
    },
    |_| {
        // Its other end is gone.
        let listener = TcpListener::bind(any(false)).ok()?;
        let stream = TcpStream::connect(("127.0.0.1", listener.local_addr().ok()?.port())).ok()?;
        Some(stream.into())
    },
    |_| {
        // Connected to itself.
        let fd = socket::stream(false, 0).ok()?;
        socket::bind(fd.as_fd(), "127.0.0.1:0".parse().ok()?).ok()?;
        socket::connect(fd.as_fd(), socket::local_address(fd.as_fd()).ok()?).ok()?;
        Some(fd)
    },
    |_| Some(UdpSocket::bind(any(false)).ok()?.into()),
    |_| Some(UdpSocket::bind(any(true)).ok()?.into()),
    |peer| {
        let udp = UdpSocket::bind(any(false)).ok()?;
        udp.connect(peer).ok()?;
        Some(udp.into())
    },
    |peer| {
        let udp = UdpSocket::bind(any(false)).ok()?;
        udp.connect(peer).ok()?;
        socket::disconnect(udp.as_fd()).ok()?;
        Some(udp.into())
    },
    |_| Some(UnixStream::pair().ok()?.0.into()),
    |_| {
        // Full, and its other end is not read.
        let (one, other) = UnixStream::pair().ok()?;
        one.set_nonblocking(true).ok()?;
        while std::io::Write::write(&mut &one, &[0; 4096]).is_ok() {}
        one.set_nonblocking(false).ok()?;
        std::mem::forget(other);
        Some(one.into())
    },
    |_| Some(UnixDatagram::unbound().ok()?.into()),
    |_| Some(UnixListener::bind_addr(&unix_name()?).ok()?.into()),
    |_| Some(Channel::pair().ok()?.0.into()),
    |_| Some(std::io::pipe().ok()?.0.into()),
    |_| Some(std::io::pipe().ok()?.1.into()),
    |_| Some(File::open("/dev/null").ok()?.into()),
    |_| Some(File::open("/dev/zero").ok()?.into()),
    |_| Some(File::open("/proc/self/status").ok()?.into()),
    |_| Some(File::open("/proc/self/exe").ok()?.into()),
    |_| Some(File::open("/").ok()?.into()),
    |_| Poller::new().ok()?.as_fd().try_clone_to_owned().ok(),
    |_| {
        let poller = Poller::new().ok()?;
        poller.add(Poller::new().ok()?.as_fd(), 0, Trigger::Readable).ok()?;
        poller.as_fd().try_clone_to_owned().ok()
    },
    |_| Doorbell::new().ok()?.as_fd().try_clone_to_owned().ok(),
    |_| Region::create("hostile", 1 << 16).ok()?.fd()?.try_clone_to_owned().ok(),
    |_| process::open_process(std::process::id()).ok(),
    |_| process::open_process(1).ok(),
    |_| process::signal_descriptor(&process::ENDING).ok(),
    |_| Some(File::open("/proc/self/ns/net").ok()?.into()),
    |_| socket::of_family(libc::AF_NETLINK as u16, libc::SOCK_RAW as u32, 0).ok(),
    |_| socket::of_family(libc::AF_VSOCK as u16, libc::SOCK_STREAM as u32, 0).ok(),
    |_| socket::of_family(libc::AF_INET as u16, libc::SOCK_DGRAM as u32, libc::IPPROTO_ICMP as u32).ok(),
    |_| socket::of_family(libc::AF_INET6 as u16, libc::SOCK_DGRAM as u32, libc::IPPROTO_UDPLITE as u32).ok(),
    |peer| {
        // Resets its connection when it is closed.
        let stream = TcpStream::connect(peer).ok()?;
        let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
        socket::set_bytes(stream.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, &linger).ok()?;
        Some(stream.into())
    },
    |peer| {
        // In its queue are a connection, and itself.
        let (one, other) = UnixDatagram::pair().ok()?;
        let stream = TcpStream::connect(peer).ok()?;
        try_send_bytes(one.as_fd(), b"x", &[stream.as_fd(), other.as_fd()]).ok()?;
        Some(other.into())
    },
    |_| Some(File::options().read(true).custom_flags(libc::O_PATH).open("/proc/self/exe").ok()?.into()),
    |_| Some(File::open("/proc/self/mem").ok()?.into()),
];

fn unix_name() -> Option<std::os::unix::net::SocketAddr> {
    use std::os::linux::net::SocketAddrExt;
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("baton-hostile-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::os::unix::net::SocketAddr::from_abstract_name(name).ok()
}

/// Random requests.
struct Fuzz {
    rng: Rng,
    peer: SocketAddr,
    /// The number of a listener or a UDP socket that the agent has given last.
    given: u32,
}

impl Fuzz {
    fn number(&mut self) -> u32 {
        match self.rng.below(7) {
            0 => 0,
            1 => u32::MAX,
            4 => self.given,
            2 => self.rng.below(1 << 32) as u32,
            3 => 1 << self.rng.below(32),
            _ => self.rng.below(4) as u32,
        }
    }

    fn flag(&mut self) -> bool {
        self.rng.below(2) == 0
    }

    fn place(&mut self) -> Place {
        if self.flag() { Place::Nic } else { Place::Kernel }
    }

    fn address(&mut self) -> SocketAddr {
        match self.rng.below(5) {
            0 => self.peer,
            1 => any(false),
            2 => any(true),
            3 => SocketAddr::from((self.number().to_ne_bytes(), self.number() as u16)),
            _ => SocketAddr::from(([self.number() as u16; 8], self.number() as u16)),
        }
    }

    fn until(&mut self) -> Until {
        [Until::Again, Until::Alone, Until::Never][self.rng.below(3) as usize]
    }

    fn messages(&mut self) -> Option<Messages> {
        let usual = self.flag();
        let mut small = |most: u32| if usual { 1 + most / 2 } else { self.number() };
        let messages = Messages {
            address: any(false),
            ethernet: small(2) > 5,
            endpoint: small(9) as u16,
            receiving: true,
            sending: small(2) < 9,
            peers: small(16) as u16,
            incoming: small(16) as u16,
            outgoing: small(16) as u16,
            buffers: at::HEAP as u64 + u64::from(small(0)),
            buffer_count: small(8) as u16,
            buffer_size: small(2000) as u16,
            packet: small(2000) as u16,
            posted: small(8) as u16,
            unexpected: small(8) as u16,
            receives: small(64),
        };
        self.flag().then_some(messages)
    }

    fn opening(&mut self) -> Opening {
        let messages = if self.rng.below(4) == 0 { self.messages() } else { None };
        let program = "\u{1b}[2J\u{0}x".repeat(self.rng.below(200) as usize);
        let group = u64::from(self.number());
        Opening { group, program, attacher: self.rng.below(3) == 0, fast_path: self.flag(), messages, ..alone() }
    }

    fn ask(&mut self) -> Ask {
        let (connection, session) = (self.number(), self.number());
        match self.rng.below(27) {
            0 => Ask::Admit,
            1 => {
                let flip = Flip { min: self.number().into(), max: self.number().into(), seed: 1 };
                Ask::Group { flip: self.flag().then_some(flip) }
            }
            2..=5 => Ask::Register { inherited: self.flag(), process: if self.flag() { Some(self.number()) } else { None } },
            6..=8 => Ask::Move { connection, to: self.place() },
            9 => Ask::GiveBack { connection, reason: "\u{1b}c".repeat(self.rng.below(99) as usize), until: self.until() },
            10 => Ask::Lend { connection },
            11 => Ask::Closed { connection, abort: self.flag() },
            12 => Ask::Listen,
            13 => Ask::Accept { listener: connection },
            14 => Ask::Connect { peer: self.address() },
            15 => Ask::StopListening { listener: connection },
            16 => {
                let usual = Rings { base: 0, receive: 4096, send: 4096 };
                let wild = Rings { base: self.number(), receive: self.number(), send: self.number() };
                Ask::Datagrams { rings: if self.flag() { usual } else { wild } }
            }
            17 => Ask::Way { socket: connection, host: self.address().ip() },
            18 => Ask::EndDatagrams { socket: connection, replay: self.flag() },
            19 => Ask::Reach { host: self.address().ip() },
            20 => Ask::MoveAny { session, connection, to: self.place(), nic: self.flag().then_some(session) },
            21 => Ask::Forget { connection },
            22 => Ask::Detail { connection },
            23..=24 => Ask::Inherit { connection },
            25 => Ask::Attachers,
            _ => Ask::List { from: (session, connection) },
        }
    }

    fn descriptors(&mut self) -> Vec<OwnedFd> {
        let count = match self.rng.below(8) {
            0 => 0,
            1..=4 => 1,
            5..=6 => 2,
            _ => self.rng.below(20),
        };
        (0..count).filter_map(|_| KINDS[self.rng.below(KINDS.len() as u64) as usize](self.peer)).collect()
    }

    /// A request's bytes, some of them changed, cut off or added; or bytes that never were one.
    fn words(&mut self, tag: u32) -> Vec<u8> {
        let mut bytes = if self.rng.below(4) == 0 { Vec::new() } else { encoded(&Request { tag, body: self.ask() }) };
        let length = bytes.len() as u64;
        match self.rng.below(5) {
            0 => {}
            1 => bytes.truncate(self.rng.below(length + 1) as usize),
            2 => {
                let most = if self.flag() { 64 } else { 70_000 };
                let more = self.rng.below(most);
                bytes.extend((0..more).map(|_| self.rng.below(256) as u8));
            }
            _ => {
                for _ in 0..1 + self.rng.below(4) {
                    let (at, byte) = (self.rng.below(length.max(1)) as usize, self.rng.below(256) as u8);
                    if let Some(place) = bytes.get_mut(at) {
                        *place = byte;
                    }
                }
            }
        }
        bytes
    }
}

/// A request's bytes.
fn encoded(request: &Request) -> Vec<u8> {
    let (one, other) = Channel::pair().expect("two sockets");
    one.send(request, &[]).expect("room");
    let mut bytes = vec![0; 1 << 16];
    let length = socket::receive(other.as_fd(), &mut bytes).expect("its bytes");
    bytes.truncate(length);
    bytes
}

/// Connects again and again, opens no session, and sends words with as many descriptors as a message can have. Answers
/// are read or not.
pub fn send_words(socket: &Path, begun: impl Fn()) {
    let peer = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let until = Instant::now() + Duration::from_secs(setting("BATON_FUZZ_SECONDS", 3));
    let mut seed = setting("BATON_FUZZ_SEED", 1);
    begun();
    let (mut sent, mut connected) = (0u64, 0u64);
    while Instant::now() < until {
        let _seed = Seed::begin(seed);
        let mut fuzz = Fuzz { rng: Rng::new(seed), peer, given: 0 };
        seed += 1;
        let channel = Channel::connect(socket).expect("the agent");
        connected += 1;
        for tag in 0..1 + fuzz.rng.below(20) as u32 {
            let (bytes, descriptors) = (fuzz.words(tag), fuzz.descriptors());
            let mut given: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            match fuzz.rng.below(12) {
                0 => given.push(channel.as_fd()),
                1 => given = given.iter().copied().cycle().take(MOST_RECEIVED).collect(),
                _ => {}
            }
            sent += u64::from(try_send_bytes(channel.as_fd(), &bytes, &given).is_ok());
            match fuzz.rng.below(40) {
                0 => _ = socket::shutdown_write(channel.as_fd()),
                1 => _ = socket::shutdown_read(channel.as_fd()),
                2..20 => while channel.try_receive::<Answer>().is_ok() {},
                _ => {}
            }
        }
    }
    println!("{sent} messages on {connected} connections, seeds to {seed}");
    assert!(sent > 100, "only {sent} messages");
}

/// Runs it. Sessions come and go, and answers are read or not.
pub fn run(socket: &Path, begun: impl Fn()) {
    let peer = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let until = Instant::now() + Duration::from_secs(setting("BATON_FUZZ_SECONDS", 3));
    let mut seed = setting("BATON_FUZZ_SEED", 1);
    begun();
    let (mut requests, mut sessions) = (0u64, 0u64);
    while Instant::now() < until {
        let _seed = Seed::begin(seed);
        let mut fuzz = Fuzz { rng: Rng::new(seed), peer, given: 0 };
        seed += 1;
        let opening = fuzz.opening();
        let opened =
            if fuzz.rng.below(8) == 0 { None } else { Client::open(socket, opening).or_else(|| Client::open(socket, alone())) };
        let (channel, memory, bells) = match opened {
            Some(Client { channel, memory, bells }) => (channel, Some(memory), bells),
            None => (Channel::connect(socket).expect("the agent"), None, Vec::new()),
        };
        sessions += 1;
        for tag in 0..1 + fuzz.rng.below(60) as u32 {
            let (body, descriptors) = (fuzz.ask(), fuzz.descriptors());
            let mut given: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            match fuzz.rng.below(20) {
                0 => given.push(channel.as_fd()),
                1 => given.extend(memory.as_ref().and_then(|memory| memory.fd())),
                2 => given.extend(bells.iter().map(AsFd::as_fd)),
                _ => {}
            }
            given.truncate(32);
            requests += u64::from(channel.try_send(&Request { tag, body }, &given).is_ok());
            if fuzz.rng.below(4) > 0 {
                while let Ok((answer, _)) = channel.try_receive::<Answer>() {
                    if let Reply::Listening { listener: number } | Reply::Datagrams { socket: number } = answer.body {
                        fuzz.given = number;
                    }
                }
            }
            // What comes of sockets that change under the agent's hands.
            for fd in descriptors.iter().filter(|_| fuzz.rng.below(8) == 0) {
                let _ = socket::disconnect(fd.as_fd());
            }
        }
        drop(bells.into_iter().map(SessionBell::from_fd).collect::<Vec<_>>());
    }
    println!("{requests} requests in {sessions} sessions, seeds to {seed}");
    assert!(requests > 100, "only {requests} requests");
}
