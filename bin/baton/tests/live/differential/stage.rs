//! Where scripts are played: two hosts, a TAP between them, and the connections of a batch.

use super::broken::Broken;
use super::judge::Tally;
use super::listening::{self, Listening, Made};
use super::peer::{self, Peer, Seen};
use super::script::{Offer, Script, Segment, Step};
use crate::common::{hosts, wait_until};
use baton_abi::layout::Counter;
use baton_backends::VnetDevice;
use baton_bed::testbed::{MAC_B, Testbed, TestbedSettings, address_a, counter};
use baton_client::{ConnectionId, Session};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_fuzz::setting;
use baton_linux::{interface, rtnetlink, socket};
use baton_protocol::program::{Place, Statistics};
use baton_sim::stream;
use baton_wire::{Endpoint, Flags, Flow, SackBlocks, TcpFrame};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Scripts that are played at once on one stage.
pub const BATCH: usize = 1000;
/// Bytes that the program sends, and the peer acknowledges, before the connection moves: an old acknowledgement is of
/// something that was sent.
pub const OPENING: usize = 1200;
/// Connections of a script: two in the kernel, one on the NIC.
pub const LANES: usize = 3;
pub const NIC: usize = 2;
const FIRST_PORT: u16 = 10_000;
const SERVER: u16 = 8080;
/// Frames that are sent before a fence: no queue on the way is shorter, also with ten answers each.
const BURST: usize = 50;
/// The peer's port of a fence, and a port of host A that nobody listens on.
pub const FENCE: u16 = 9;
pub const CLOSED: u16 = 9;
/// After so long a frame whose answer is awaited is sent again.
// Waits: on a busy machine either may be lost; nothing is judged by when it comes.
const AGAIN: Duration = Duration::from_millis(500);
/// Handshakes that are begun so that the NIC answers further SYNs with cookies: more than it remembers.
const HANDSHAKES: u16 = 600;
/// The peers' port of the first of them.
const FIRST_HANDSHAKE: u16 = 1000;
/// Most frames that host B's kernel sends by itself while a batch is played.
const OF_HOST_B: u64 = 100;
/// Waits: an acknowledgement may be delayed by 200 ms.
const STEP: Duration = Duration::from_millis(260);
/// A step is over when nothing has come for so long, too.
// Waits: the answers of the peers of a step have no end that could be awaited; the kernel's two lanes show when it was
// too short.
const QUIET: Duration = Duration::from_millis(60);

/// The address of the peers, which is nobody's: host B's kernel does not answer in their place.
pub fn peers(ipv6: bool) -> IpAddr {
    if ipv6 { "fd00:ba70::64".parse().expect("an address") } else { IpAddr::from([10, 77, 0, 100]) }
}

pub fn endpoint(address: IpAddr, port: u16) -> Endpoint {
    match address {
        IpAddr::V4(ip) => Endpoint::v4(ip.octets(), port),
        IpAddr::V6(ip) => Endpoint::v6(ip.octets(), port),
    }
}

/// The program's end of a connection.
enum Socket {
    Kernel(TcpStream),
    Nic(ConnectionId),
    Made(Made),
}

/// What the program has seen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    pub read: usize,
    pub wrong: u64,
    pub written: usize,
    pub end: bool,
    pub error: Option<io::ErrorKind>,
}

struct Lane {
    peer: Peer,
    socket: Option<Socket>,
    program: Program,
    /// The rule that it seems to break.
    broken: Option<Broken>,
    /// Acknowledgements are not looked at, until the next step.
    hidden: bool,
}

/// What was seen by the end of one step.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub wire: Seen,
    pub program: Program,
    /// Data was sent again by now: which data, and when, is not compared.
    pub resent: bool,
    /// Also in this step.
    pub resent_now: bool,
    /// The right edge of the window; not compared.
    pub edge: i32,
}

/// Two hosts with a TAP, and the connections of the batch that is being played.
pub struct Stage {
    session: Session,
    listeners: [TcpListener; 2],
    /// Those whose connections the NIC makes, if it makes its own.
    listening: Option<Listening>,
    device: VnetDevice,
    frame: Frame,
    lanes: Vec<Lane>,
    /// The peer's port of the first lane. Each batch has ports of its own, since late frames of the last one may be
    /// under way.
    first_port: u16,
    /// Fences sent, and the last one that was answered.
    fences: u32,
    passed: u32,
    /// Frames that were given to the link, and how many of them were large.
    given: u64,
    large: u64,
    /// Host A's kernel answers SYNs with cookies.
    cookies: bool,
    /// Prints the answers.
    verbose: bool,
    bed: Testbed,
}

impl Stage {
    /// A stage on which the NIC makes its connections itself.
    pub fn listening() -> Stage {
        let stage = Stage::new();
        let listening = Listening::new(&stage.bed);
        for ipv6 in [false, true] {
            let at = SocketAddr::new(address_a(ipv6), listening::PORT);
            wait_until("the NIC makes connections", || {
                let before = stage.count(Counter::Made);
                // Waits: between two connections, since those that the kernel makes meanwhile fill its queue.
                std::thread::sleep(Duration::from_millis(20));
                let client = stage.bed.host_b.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(10)));
                client.is_ok() && stage.count(Counter::Made) > before
            });
        }
        Stage { listening: Some(listening), ..stage }
    }

    /// Without connections.
    pub fn new() -> Stage {
        // The wire takes large frames, so that those of the peers reach the NIC as one. Nothing makes larger ones of
        // small ones.
        let settings = TestbedSettings {
            segmentation: true,
            gro: false,
            slots: 2 * BATCH,
            nic_cores: Vec::new(),
            agent_core: None,
            ..TestbedSettings::default()
        };
        let bed = hosts(TestbedSettings { peer_queue: Some(20_000), ..settings });
        for ipv6 in [false, true] {
            let neighbour = || {
                let netlink = rtnetlink::open()?;
                let link = rtnetlink::link(&netlink, "baton0")?;
                rtnetlink::set_neighbour(&netlink, link.index, peers(ipv6), MAC_B)
            };
            bed.host_a.run(neighbour).expect("the peers' link address");
        }
        let longer = ["link", "set", "baton0", "txqueuelen", "20000"];
        let set = bed.host_a.spawn(Command::new("ip").args(longer)).and_then(|mut child| child.wait()).expect("ip");
        assert!(set.success(), "ip {longer:?}");
        let open = || interface::open_packet_socket(rtnetlink::link(&rtnetlink::open()?, "eth0")?.index);
        let raw = bed.host_b.run(open).expect("a packet socket");
        const SO_RCVBUFFORCE: i32 = 33;
        socket::set(raw.as_fd(), 1, SO_RCVBUFFORCE, 1 << 27).expect("room for frames");
        let listen = |ipv6| bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(ipv6), SERVER))).expect("a listener");
        let session = Session::connect(&bed.socket()).expect("a session");
        let listeners = [listen(false), listen(true)];
        listeners.iter().for_each(|listener| listener.set_nonblocking(true).expect("non-blocking"));
        let (device, frame) = (VnetDevice::new(raw, false), Frame::with_capacity(MAX_FRAME));
        Stage {
            session,
            listeners,
            listening: None,
            device,
            frame,
            lanes: Vec::new(),
            first_port: FIRST_PORT,
            fences: 0,
            passed: 0,
            given: 0,
            large: 0,
            cookies: false,
            verbose: setting("BATON_SCRIPTS", 0) == 1,
            bed,
        }
    }

    /// Reads all frames that are there. Returns whether there were any of the connections'.
    fn pump(&mut self) -> bool {
        let mut any = false;
        if let Some(listening) = &self.listening {
            listening.catch_up();
        }
        while self.device.receive(&mut self.frame) {
            let Ok(mut parsed) = TcpFrame::parse(self.frame.bytes(), 0) else { continue };
            let port = parsed.flow.local.port;
            if port == FENCE && parsed.flags.contains(Flags::RST) {
                self.passed = parsed.seq;
            }
            if ![SERVER, listening::PORT].contains(&parsed.flow.remote.port) || port < self.first_port {
                continue;
            }
            if let Some(lane) = self.lanes.get_mut(usize::from(port - self.first_port)) {
                if self.verbose {
                    println!(
                        "lane {}: {:?} seq {} ack {} len {} win {} sack {:?}",
                        usize::from(port - self.first_port) % LANES,
                        parsed.flags,
                        parsed.seq,
                        parsed.ack,
                        parsed.payload_length,
                        parsed.window,
                        parsed.options.sack.as_slice()
                    );
                }
                any = true;
                if lane.broken == Some(Broken::Sack) {
                    parsed.options.sack = SackBlocks::default();
                }
                if !lane.hidden || parsed.flags != Flags::ACK || parsed.payload_length > 0 {
                    lane.peer.take(&parsed);
                }
            }
        }
        any
    }

    /// Gives the link a frame as soon as it takes one: on a busy machine it is full now and then.
    fn give(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !self.device.transmit(&mut self.frame) {
            assert!(Instant::now() < deadline, "the link takes no frame");
            std::thread::yield_now();
        }
        self.given += 1;
        self.large += u64::from(self.frame.segmentation.is_some());
    }

    fn transmit(&mut self, sent: &mut usize) {
        self.give();
        *sent += 1;
        if sent.is_multiple_of(BURST) {
            self.fence();
        }
    }

    /// Waits until the NIC and host A's kernel have received all that was sent: the kernel answers a segment to a
    /// closed port.
    fn fence(&mut self) {
        self.fences += 1;
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.passed != self.fences {
            assert!(Instant::now() < deadline, "host A does not answer");
            peer::fence(self.fences, &mut self.frame);
            self.give();
            let sent = Instant::now();
            while self.passed != self.fences && sent.elapsed() < AGAIN {
                if !self.pump() {
                    // Waits: between two looks; the other tests get the processor.
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        }
    }

    /// Makes the connections of a batch of scripts, each as many times as there are lanes, and moves the last one to
    /// the NIC, or lets the NIC make it.
    fn connect(&mut self, scripts: &[Script], first: u32) -> io::Result<()> {
        let lanes = scripts.iter().flat_map(|script| std::iter::repeat_n(script, LANES)).enumerate();
        let lanes = lanes.map(|(at, script)| {
            let local = endpoint(peers(script.ipv6), self.first_port + at as u16);
            let port = if self.listening.is_some() && at % LANES == NIC { listening::PORT } else { SERVER };
            let flow = Flow { local, remote: endpoint(address_a(script.ipv6), port), device: 0 };
            let peer = Peer::new(&flow, script.offer, first.wrapping_mul(2_654_435_761).wrapping_add(at as u32 * 1_000_003));
            let broken = script.broken.filter(|_| at % LANES == NIC);
            Lane { peer, socket: None, program: Program::default(), broken, hidden: false }
        });
        self.lanes = lanes.collect();
        let deadline = Instant::now() + Duration::from_secs(60);
        let restored = self.restored_from_cookies();
        let mut remembers = self.listening.is_some();
        for at in 0..self.lanes.len() {
            let script = &scripts[at / LANES];
            self.use_cookies(script.cookie);
            if script.cookie && std::mem::take(&mut remembers) {
                self.begin_handshakes();
            }
            // The kernel remembers nothing of a cookie, and sends none again.
            let mut again = Instant::now();
            while !self.lanes[at].peer.is_answered() {
                assert!(Instant::now() < deadline, "no answer to a SYN");
                if Instant::now() >= again {
                    again += AGAIN;
                    self.lanes[at].peer.syn(&mut self.frame);
                    self.transmit(&mut 0);
                }
                self.pump();
            }
            let acknowledge =
                Segment { at: 0, length: 1, flags: Flags::ACK | Flags::PSH, ack: 0, window: 65_535, clock: 0, bare: false };
            self.lanes[at].peer.segment(&acknowledge, &mut self.frame);
            self.transmit(&mut 0);
            let (is_nic, port) = (at % LANES == NIC, self.first_port + at as u16);
            let made = is_nic && self.listening.is_some();
            self.lanes[at].socket = Some(if made {
                Socket::Made(self.accept_made(script.ipv6, port, deadline))
            } else {
                let stream = self.accept(script.ipv6, port, deadline);
                stream.set_nonblocking(true).expect("non-blocking");
                stream.set_nodelay(true).expect("no delay");
                Socket::Kernel(stream)
            });
            self.open(at, deadline)?;
            let socket = self.lanes[at].socket.take();
            if let (Some(Socket::Kernel(stream)), Some(bytes)) = (&socket, script.receive_buffer) {
                socket::set(stream.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, bytes).expect("SO_RCVBUF");
            }
            self.lanes[at].socket = match socket {
                Some(Socket::Kernel(stream)) if is_nic => Some(self.on_nic(stream)),
                other => other,
            };
        }
        let restored = self.restored_from_cookies() - restored;
        let of_kernel = by_cookies(scripts) * if self.listening.is_some() { NIC as u64 } else { LANES as u64 };
        assert!(restored >= of_kernel, "the kernel has made {restored} of {of_kernel} connections from cookies");
        // Each move sends an acknowledgement, which answers no script.
        let mut last = Instant::now();
        while last.elapsed() < QUIET {
            if self.pump() {
                last = Instant::now();
            }
        }
        Ok(())
    }

    /// Makes host A's kernel answer all SYNs with cookies, or none.
    fn use_cookies(&mut self, on: bool) {
        if self.cookies != on {
            let value = if on { "2" } else { "1" };
            let set = self.bed.host_a.run(|| std::fs::write("/proc/sys/net/ipv4/tcp_syncookies", value));
            set.expect("tcp_syncookies (CONFIG_SYN_COOKIES)");
            self.cookies = on;
        }
    }

    /// How many acknowledgements of cookies host A's kernel has received.
    fn restored_from_cookies(&self) -> u64 {
        counter(&self.bed.host_a, "netstat", "TcpExt:", "SyncookiesRecv").expect("a counter")
    }

    /// Begins so many handshakes with the NIC that it remembers no more, and answers with cookies.
    fn begin_handshakes(&mut self) {
        let mut sent = 0;
        for number in 0..HANDSHAKES {
            let local = endpoint(peers(false), FIRST_HANDSHAKE + number);
            let flow = Flow { local, remote: endpoint(address_a(false), listening::PORT), device: 0 };
            let offer = Offer { mss: None, scale: None, sack: false, timestamps: false };
            Peer::new(&flow, offer, u32::from(number)).syn(&mut self.frame);
            self.transmit(&mut sent);
        }
        self.fence();
    }

    /// The program sends [`OPENING`] bytes, and the peer acknowledges them.
    fn open(&mut self, at: usize, deadline: Instant) -> io::Result<()> {
        let mut sent = 0;
        while sent < OPENING {
            match self.send(at, &[0; OPENING][sent..]) {
                Ok(count) => sent += count,
                // What the NIC has made is handed to it.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    self.pump();
                }
                Err(error) => return Err(error),
            }
        }
        while self.lanes[at].peer.seen.sent < OPENING as i32 {
            assert!(Instant::now() < deadline, "the opening does not come");
            self.pump();
        }
        let acknowledges = Segment { at: 0, length: 0, flags: Flags::ACK, ack: 0, window: 65_535, clock: 0, bare: false };
        self.lanes[at].peer.segment(&acknowledges, &mut self.frame);
        self.transmit(&mut 0);
        Ok(())
    }

    /// Accepts the next connection of the kernel's.
    fn accept(&mut self, ipv6: bool, port: u16, deadline: Instant) -> TcpStream {
        self.accepted(deadline, |stage| match stage.listeners[usize::from(ipv6)].accept() {
            // Any other one is left from a batch that was given up.
            Ok((stream, peer)) => Some(stream).filter(|_| peer.port() == port),
            Err(error) => {
                assert!(error.kind() == io::ErrorKind::WouldBlock, "{error}");
                None
            }
        })
    }

    /// Accepts the next connection that the NIC has made.
    fn accept_made(&mut self, ipv6: bool, port: u16, deadline: Instant) -> Made {
        self.accepted(deadline, |stage| {
            let (made, peer) = stage.listening.as_ref()?.accept(ipv6)?;
            if peer != port {
                made.close();
                return None;
            }
            Some(made)
        })
    }

    /// Waits for what `accept` returns. The frame that completes the handshake, which `frame` still holds, is sent
    /// again now and then: on a busy machine the kernel may have no room for it.
    fn accepted<T>(&mut self, deadline: Instant, accept: impl Fn(&Stage) -> Option<T>) -> T {
        let mut again = Instant::now() + QUIET;
        let last = self.frame.bytes().to_vec();
        loop {
            if let Some(accepted) = accept(self) {
                return accepted;
            }
            assert!(Instant::now() < deadline, "no connection to accept");
            self.pump();
            if Instant::now() >= again {
                again += QUIET;
                self.frame.fill(&last);
                self.transmit(&mut 0);
            }
        }
    }

    fn on_nic(&mut self, stream: TcpStream) -> Socket {
        let id = self.session.adopt(OwnedFd::from(stream)).expect("adoption");
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = self.session.move_to(id, Place::Nic) {
            assert!(error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline, "it does not move: {error}");
            self.pump();
        }
        Socket::Nic(id)
    }

    fn send(&mut self, at: usize, bytes: &[u8]) -> io::Result<usize> {
        match &self.lanes[at].socket {
            Some(Socket::Kernel(stream)) => socket::send(stream.as_fd(), bytes),
            Some(Socket::Nic(id)) => self.session.send(*id, bytes),
            Some(Socket::Made(made)) => made.send(bytes),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// The program's part of a step.
    fn call(&mut self, at: usize, step: Step) {
        let lane = &mut self.lanes[at];
        let Some(socket) = &lane.socket else { return };
        match step {
            Step::Segment(_) => {}
            Step::Write(length) => {
                let mut piece = vec![0; length as usize];
                stream::fill(5, lane.program.written as u64, &mut piece);
                let written = match socket {
                    Socket::Kernel(stream) => socket::send(stream.as_fd(), &piece),
                    Socket::Nic(id) => self.session.send(*id, &piece),
                    Socket::Made(made) => made.send(&piece),
                };
                lane.program.note(written, |program, count| program.written += count);
            }
            Step::Read(most) => {
                let mut piece = vec![0; most as usize];
                let read = match socket {
                    Socket::Kernel(stream) => socket::receive(stream.as_fd(), &mut piece),
                    Socket::Nic(id) => self.session.receive(*id, &mut piece),
                    Socket::Made(made) => made.receive(&mut piece),
                };
                lane.program.note(read, |program, count| {
                    program.wrong += stream::mismatches(peer::KEY, program.read as u64, &piece[..count]);
                    program.read += count;
                    program.end |= count == 0;
                });
            }
            Step::Shutdown => {
                let ended = match socket {
                    Socket::Kernel(stream) => stream.shutdown(std::net::Shutdown::Write),
                    Socket::Nic(id) => self.session.shutdown(*id),
                    Socket::Made(made) => made.shutdown(),
                };
                lane.program.note(ended.map(|()| 0), |_, _| {});
            }
        }
    }

    /// Whether no connection is moving: some end in the kernel.
    fn settled(&self) -> bool {
        self.lanes.iter().all(|lane| match &lane.socket {
            Some(Socket::Nic(id)) => self.session.place(*id).is_some(),
            Some(Socket::Made(made)) => made.is_settled(),
            Some(Socket::Kernel(_)) | None => true,
        })
    }

    fn statistics(&self) -> Statistics {
        self.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics")
    }

    fn count(&self, counter: Counter) -> u64 {
        self.statistics().counters[counter as usize]
    }

    /// Plays a batch, again if the agent took the NIC for hung and moved everything: the machine was too busy.
    pub fn play_undisturbed(&mut self, scripts: &[Script], first: u32) -> Vec<Vec<Outcome>> {
        // Waits: a NIC that was ended has played another script than the one that is compared; what ended it is shown.
        for _ in 0..20 {
            self.fence();
            let (before, given, large) = (self.statistics(), self.given, self.large);
            let outcomes = self.play(scripts, first);
            self.fence();
            let after = self.statistics();
            match outcomes {
                Ok(outcomes) if after.nic_starts == before.nic_starts => {
                    let grown = |counter: Counter| after.counters[counter as usize] - before.counters[counter as usize];
                    let (received, cookies) = (grown(Counter::WireReceived), grown(Counter::SynCookies));
                    assert!(self.listening.is_none() || cookies >= by_cookies(scripts), "{cookies} were cookies of the NIC's");
                    let (given, large) = (self.given - given, self.large - large);
                    // Each would be three frames at least.
                    assert!(
                        received <= given + OF_HOST_B,
                        "the NIC has received {received} frames instead of {given}: the {large} large ones were cut on the way"
                    );
                    return outcomes;
                }
                Ok(_) => println!("a NIC was started anew: the batch is played again"),
                Err(error) => println!("{error}: the batch is played again"),
            }
        }
        panic!("no NIC lives for as long as a batch takes");
    }

    /// Plays the scripts of these numbers. Returns the numbers of those that differ as is not meant.
    pub fn judge(&mut self, numbers: &[u64], tally: &Mutex<Tally>) -> Vec<u64> {
        let scripts: Vec<Script> = numbers.iter().map(|number| Script::new(*number)).collect();
        let outcomes = self.play_undisturbed(&scripts, numbers[0] as u32);
        let mut tally = tally.lock().expect("a tally");
        let played = numbers.iter().zip(&scripts).zip(outcomes.chunks(LANES));
        let differing =
            played.filter(|((number, script), lanes)| tally.judge(**number, script, [&lanes[0], &lanes[1], &lanes[NIC]]));
        differing.map(|((number, _), _)| *number).collect()
    }

    /// Does step `number` of all scripts that have one, and waits until all answers have come.
    fn step(&mut self, scripts: &[Script], number: usize) {
        let mut sent = 0;
        self.lanes.iter_mut().for_each(|lane| lane.peer.begin());
        if self.verbose {
            println!("{:?}", scripts[0].steps.get(number));
        }
        for at in 0..self.lanes.len() {
            let Some(step) = scripts[at / LANES].steps.get(number) else { continue };
            let lane = &mut self.lanes[at];
            lane.hidden = false;
            if let Step::Segment(segment) = step {
                lane.hidden = lane.broken.is_some_and(|broken| broken.hides(segment));
                let next = lane.peer.expected();
                let other = lane.broken.map_or(Some(*segment), |broken| broken.instead(segment, next));
                if lane.peer.instead(segment, other.as_ref(), &mut self.frame) {
                    self.transmit(&mut sent);
                }
            } else {
                self.call(at, *step);
            }
        }
        self.fence();
        let (begun, mut last) = (Instant::now(), Instant::now());
        let mut ready = Vec::new();
        while begun.elapsed() < STEP || last.elapsed() < QUIET || !self.settled() {
            if self.pump() {
                last = Instant::now();
            }
            self.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
            assert!(begun.elapsed() < Duration::from_secs(30), "the answers do not end");
        }
        if self.verbose
            && let Some(Socket::Nic(id)) = &self.lanes[NIC].socket
        {
            println!("{:?}", self.session.place(*id));
        }
    }

    /// Ends the connections of a batch.
    fn disconnect(&mut self) {
        let mut sent = 0;
        for at in 0..self.lanes.len() {
            self.lanes[at].peer.reset(&mut self.frame);
            self.transmit(&mut sent);
        }
        for lane in std::mem::take(&mut self.lanes) {
            match lane.socket {
                Some(Socket::Nic(id)) => self.session.close(id).expect("close"),
                Some(Socket::Made(made)) => made.close(),
                Some(Socket::Kernel(stream)) => {
                    let _ = socket::reset_on_close(stream.as_fd());
                }
                None => {}
            }
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.bed.tool().and_then(|mut tool| tool.connections()).expect("a list").is_empty() {
            assert!(Instant::now() < deadline, "closed connections are left");
            self.pump();
            // Waits: between two lists of up to a thousand connections.
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Plays a batch. Returns the outcomes of each lane's steps.
    ///
    /// # Errors
    /// A connection was reset while it opened.
    fn play(&mut self, scripts: &[Script], first: u32) -> io::Result<Vec<Vec<Outcome>>> {
        let connected = self.connect(scripts, first);
        if connected.is_err() {
            self.disconnect();
        }
        connected?;
        let most = scripts.iter().map(|script| script.steps.len()).max().unwrap_or(0);
        let mut outcomes = vec![Vec::new(); self.lanes.len()];
        for number in 0..=most {
            if number == most {
                // What comes behind a script's last step is data that is sent again, and probes.
                self.lanes.iter_mut().for_each(|lane| lane.peer.forget_answers());
                (0..self.lanes.len()).for_each(|at| self.call(at, Step::Read(100_000)));
            } else {
                self.step(scripts, number);
            }
            for (at, lane) in self.lanes.iter().enumerate() {
                if number == most || number < scripts[at / LANES].steps.len() {
                    let (wire, program) = (lane.peer.seen.clone(), lane.program.clone());
                    outcomes[at].push(Outcome {
                        wire,
                        program,
                        resent: lane.peer.resent,
                        resent_now: lane.peer.resent_now,
                        edge: lane.peer.edge(),
                    });
                }
            }
        }
        self.disconnect();
        let next = usize::from(self.first_port) + BATCH * LANES;
        self.first_port = if next + BATCH * LANES < 60_000 { next as u16 } else { FIRST_PORT };
        Ok(outcomes)
    }
}

/// How many of these scripts' connections are made from SYN cookies.
fn by_cookies(scripts: &[Script]) -> u64 {
    scripts.iter().filter(|script| script.cookie).count() as u64
}

impl Program {
    fn note(&mut self, result: io::Result<usize>, count: impl FnOnce(&mut Program, usize)) {
        match result {
            Ok(bytes) => count(self, bytes),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => self.error = Some(error.kind()),
        }
    }
}
