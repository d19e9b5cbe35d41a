//! A web server under a load like SPECweb99's: an event loop around select(2) as Flash has it, its connections' TCP on
//! the host or, from the moment that they are established, on the NIC. Host and NIC have a processor each, whose time
//! passes. Times are nanoseconds.

use super::agenda::Agenda;
use super::host::{Data, Faults, Host, Layer, Profile, Timer, Timing};
use super::nic::Counts;
use super::numbers as n;
use crate::web_mix::{Mix, pause};
use baton_sim::pair::arriving;
use baton_tcp::segment::{Events, Segment};
use baton_tcp::{Config, Connection, Instant, State};
use std::collections::{BTreeMap, VecDeque};

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct WebLoad {
    /// Clients, each with one connection at a time.
    pub clients: usize,
    /// Share of requests whose answer a program makes.
    pub dynamic: f64,
    /// Connections are handed to the NIC.
    pub handoff: bool,
    /// The host's cycles.
    pub timing: Timing,
    /// Its clock in Hz.
    pub clock: f64,
    /// Seconds of the NIC for a packet.
    pub nic: f64,
    /// The server's own cycles for a byte of its answers.
    pub application: f64,
    /// What is wrong on purpose.
    pub faults: Faults,
}

/// What a run gives.
#[derive(Clone, Debug)]
pub struct Served {
    /// What the host's layers did for a packet.
    pub profile: Profile,
    /// The host's cycles for a packet, the server's own among them.
    pub cycles: f64,
    /// Megabits of answers a second that the clients read.
    pub rate: f64,
    /// Share of the time that the host's and the NIC's processor were busy.
    pub busy: [f64; 2],
    /// Descriptors or messages of a packet by kind.
    pub messages: Vec<(&'static str, f64)>,
}

/// Packets before the profile is taken, and those that it is taken of.
const WARM_UP: u64 = 100_000;
const PACKETS: u64 = 100_000;
/// The one-way delay in nanoseconds.
const DELAY: u64 = n::DELAY * 1000;

/// The end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Server,
    Client,
}

enum Happening {
    Connect(usize),
    Reads(usize, u64, u32),
    Arrives(Side, usize, u64, Segment),
    Timer(Side, usize, u64),
    Processor,
    Nic,
}

/// Work for the host's processor, before any of the server's.
enum Interrupt {
    Segment(usize, Segment),
    Event(usize, Event),
}

/// What the NIC reports of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Received,
    Acknowledged(u32),
    Fin,
    Closed,
}

/// Work for the NIC.
enum NicWork {
    Segment(usize, Segment),
    Send(usize, u32),
    Read(usize, u32),
    Close(usize),
}

/// A client, its connection and the server's side of it.
struct Client {
    epoch: u64,
    far: Option<Connection>,
    near: Option<Connection>,
    on_nic: bool,
    accepted: bool,
    ready: bool,
    /// Requests left on this connection, bytes of the answer that are still to be read, and when what has come is read.
    requests: u64,
    wanted: u64,
    read_at: u64,
    length: u64,
    /// The answer is made by a program. What the server still has to write of it.
    dynamic: bool,
    left: u64,
    /// What the host knows of the connection on the NIC: bytes to read, bytes not acknowledged, the peer's FIN.
    readable: u32,
    pending: u32,
    fin: bool,
    closing: bool,
    timers: [u64; 2],
}

struct World {
    load: WebLoad,
    host: Host,
    mix: Mix,
    clients: Vec<Client>,
    agenda: Agenda<Happening>,
    now: u64,
    interrupts: VecDeque<Interrupt>,
    ready: VecDeque<usize>,
    /// Those that the last select(2) reported.
    selected: VecDeque<usize>,
    nic: VecDeque<NicWork>,
    /// Segments that leave when the work at hand is done.
    out: Vec<(Side, usize, Segment)>,
    running: [bool; 2],
    busy: [f64; 2],
    cycles: f64,
    application: f64,
    sum: Profile,
    packets: u64,
    bytes: u64,
    counts: Counts,
}

fn micros(nanos: u64) -> Instant {
    Instant(nanos / 1000)
}

/// A connection's rules on both ends: segments of 1460 bytes, the sockets' memory of FreeBSD.
fn config() -> Config {
    Config { timestamps: false, nodelay: true, receive_buffer: 64 << 10, ..Config::default() }
}

impl World {
    fn count(&mut self, kind: &'static str, number: u64) {
        *self.counts.entry(kind).or_default() += number;
    }

    fn end(&mut self, side: Side, at: usize) -> Option<&mut Connection> {
        match side {
            Side::Server => self.clients[at].near.as_mut(),
            Side::Client => self.clients[at].far.as_mut(),
        }
    }

    /// Takes what an end has to send, and follows its timer.
    fn transmit(&mut self, side: Side, at: usize) {
        let now = micros(self.now);
        let Some(end) = self.end(side, at) else { return };
        let mut segments = Vec::new();
        while let Some(transmit) = end.poll_transmit(now, 0) {
            segments.push(arriving(&transmit));
        }
        let expires = end.next_timeout();
        let client = &mut self.clients[at];
        let on_host = side == Side::Server && !client.on_nic;
        let data = Data { copied: client.dynamic, summed: false };
        let epoch = client.epoch;
        let known = &mut client.timers[side as usize];
        if expires != Instant::NEVER && expires.0 * 1000 != *known {
            *known = expires.0 * 1000;
            self.agenda.enter(expires.0 * 1000, Happening::Timer(side, at, epoch));
            if on_host {
                self.host.set_timer(at, Timer::Retransmit, Some(expires.0), now.0);
            }
        } else if expires == Instant::NEVER && std::mem::take(known) > 0 && on_host {
            self.host.set_timer(at, Timer::Retransmit, None, now.0);
        }
        for segment in segments {
            if side == Side::Server {
                self.packets += 1;
            }
            if on_host {
                self.host.send_segment(at, segment.length.into(), data);
                self.count("transmit descriptor", 1 + u64::from(segment.length > 0));
            }
            self.out.push((side, at, segment));
        }
    }

    /// What was sent leaves at `time`.
    fn flush(&mut self, time: u64) {
        for (side, at, segment) in std::mem::take(&mut self.out) {
            let other = if side == Side::Server { Side::Client } else { Side::Server };
            let epoch = self.clients[at].epoch;
            self.agenda.enter(time + DELAY, Happening::Arrives(other, at, epoch, segment));
        }
    }

    fn wake(&mut self, processor: usize) {
        if !std::mem::replace(&mut self.running[processor], true) {
            self.agenda.enter(self.now, if processor == 0 { Happening::Processor } else { Happening::Nic });
        }
    }

    fn make_ready(&mut self, at: usize) {
        if !std::mem::replace(&mut self.clients[at].ready, true) {
            self.ready.push_back(at);
            self.wake(0);
        }
    }

    fn connect(&mut self, at: usize) {
        let requests = self.mix.requests();
        let isn = (self.now as u32).wrapping_mul(31).wrapping_add(at as u32);
        let client = &mut self.clients[at];
        *client = Client {
            epoch: client.epoch + 1,
            far: Some(Connection::connect(config(), isn, 0, micros(self.now))),
            requests,
            ..Client::new()
        };
        self.transmit(Side::Client, at);
        self.flush(self.now);
    }

    fn request(&mut self, at: usize) {
        // The first answers are those that clients are in the midst of.
        let (request, bytes) = match self.clients[at].epoch {
            1 => self.mix.in_progress(),
            _ => {
                let request = self.mix.request();
                (request, request.bytes())
            }
        };
        let client = &mut self.clients[at];
        client.requests -= 1;
        client.length = n::ANSWER_HEADER + bytes;
        client.wanted = client.length;
        client.dynamic = request.dynamic;
        if let Some(far) = &mut client.far {
            far.queue(n::REQUEST);
        }
        self.transmit(Side::Client, at);
        self.flush(self.now);
    }

    /// A segment reaches a client, which reads its data as slowly as its rate wants it.
    fn client_receives(&mut self, at: usize, segment: &Segment) {
        let client = &mut self.clients[at];
        let Some(far) = &mut client.far else { return };
        let received = far.input(segment, micros(self.now));
        if received.delivered > 0 {
            client.read_at = client.read_at.max(self.now) + 1000 * pause(received.delivered.into());
            self.agenda.enter(client.read_at, Happening::Reads(at, client.epoch, received.delivered));
        }
        if received.events.contains(Events::ESTABLISHED) {
            self.request(at);
        }
        self.transmit(Side::Client, at);
        let over = |far: &Connection| matches!(far.state(), State::TimeWait | State::Closed);
        let client = &mut self.clients[at];
        if client.far.as_ref().is_some_and(over) {
            client.far = None;
            // What is still on its way belongs to this connection.
            self.agenda.enter(self.now + 2 * DELAY, Happening::Connect(at));
        }
        self.flush(self.now);
    }

    /// A client reads `bytes` bytes.
    fn client_reads(&mut self, at: usize, bytes: u32) {
        let client = &mut self.clients[at];
        let Some(far) = &mut client.far else { return };
        far.consumed(bytes);
        self.bytes += u64::from(bytes);
        client.wanted = client.wanted.saturating_sub(bytes.into());
        if client.wanted == 0 {
            if client.requests > 0 {
                self.request(at);
            } else {
                far.shutdown();
            }
        }
        self.transmit(Side::Client, at);
        self.flush(self.now);
    }

    /// The host's TCP receives a segment.
    fn host_receives(&mut self, at: usize, segment: &Segment) {
        self.packets += 1;
        self.count("receive descriptor", 1);
        let now = micros(self.now);
        self.host.receive_segment(at, segment.length.into(), Data::UNTOUCHED, now.0);
        if self.clients[at].on_nic {
            // It was on its way while the connection was handed over.
            self.packets -= 1;
            self.command(at, "ch_nic_forward");
            self.nic.push_back(NicWork::Segment(at, *segment));
            self.wake(1);
            return;
        }
        let Some(near) = &mut self.clients[at].near else {
            self.clients[at].near = Connection::accept(config(), segment, self.now as u32, 0, now);
            self.host.make_or_end(at);
            self.transmit(Side::Server, at);
            return;
        };
        let received = near.input(segment, now);
        let ended = near.state() == State::Closed;
        self.host.release(Layer::Tcp, at, received.acked.into());
        self.transmit(Side::Server, at);
        let client = &mut self.clients[at];
        client.pending = client.pending.saturating_sub(received.acked);
        client.readable += received.delivered;
        client.fin |= received.events.contains(Events::FIN);
        if ended {
            client.near = None;
            self.host.make_or_end(at);
        } else if received.events.contains(Events::ESTABLISHED) {
            if self.load.handoff {
                self.command(at, "ch_nic_handoff");
                self.clients[at].on_nic = true;
            }
            self.make_ready(at);
        } else {
            self.look(at);
        }
    }

    /// The server is to look at a connection if there is something that it can do.
    fn look(&mut self, at: usize) {
        let client = &self.clients[at];
        let writable = client.left > 0 && n::SEND_SPACE.saturating_sub(client.pending) >= n::LOW_WATER;
        if !client.closing && (client.readable > 0 && client.left == 0 || client.fin || writable) {
            self.make_ready(at);
        }
    }

    fn command(&mut self, at: usize, kind: &'static str) {
        self.host.command(at);
        self.count(kind, 1);
    }

    /// A message of the NIC's reaches the host.
    fn host_notes(&mut self, at: usize, event: Event) {
        self.host.event(at);
        match event {
            Event::Acknowledged(bytes) => {
                self.host.release(Layer::Bypass, at, bytes.into());
                self.count("ch_os_ack", 1);
            }
            Event::Received => self.count("ch_os_recv", 1),
            Event::Fin | Event::Closed => self.count("ch_os_ctrl", 1),
        }
        if event == Event::Closed { self.host.make_or_end(at) } else { self.look(at) }
    }

    /// The server looks at a connection that select(2) reported.
    fn serve(&mut self, at: usize) {
        self.clients[at].ready = false;
        if self.clients[at].near.is_none() {
            return;
        }
        if !std::mem::replace(&mut self.clients[at].accepted, true) {
            self.host.make_or_end(at);
        }
        let client = &mut self.clients[at];
        if client.left == 0 && client.readable > 0 {
            let read = std::mem::take(&mut client.readable);
            client.left = client.length;
            self.host.read(at, read.into());
            if self.clients[at].on_nic {
                self.command(at, "ch_nic_recvd");
                self.nic.push_back(NicWork::Read(at, read));
                self.wake(1);
            } else if let Some(near) = &mut self.clients[at].near {
                near.consumed(read);
            }
        }
        let client = &mut self.clients[at];
        let amount = u64::from(n::SEND_SPACE.saturating_sub(client.pending)).min(client.left) as u32;
        if amount > 0 {
            client.left -= u64::from(amount);
            self.application += f64::from(amount) * self.load.application;
            client.pending += amount;
            let (data, on_nic) = (Data { copied: client.dynamic, summed: false }, client.on_nic);
            self.host.write(at, amount.into(), data);
            if on_nic {
                for page in 0..u64::from(amount).div_ceil(n::PAGE) {
                    self.command(at, "ch_nic_send");
                    let length = (u64::from(amount) - page * n::PAGE).min(n::PAGE) as u32;
                    self.nic.push_back(NicWork::Send(at, length));
                }
                self.wake(1);
            } else {
                if let Some(near) = &mut self.clients[at].near {
                    near.queue(amount);
                }
                self.transmit(Side::Server, at);
            }
        }
        let client = &mut self.clients[at];
        if client.fin && client.left == 0 && !std::mem::replace(&mut client.closing, true) {
            self.host.make_or_end(at);
            if self.clients[at].on_nic {
                self.command(at, "ch_nic_ctrl");
                self.nic.push_back(NicWork::Close(at));
                self.wake(1);
            } else {
                if let Some(near) = &mut self.clients[at].near {
                    near.shutdown();
                }
                self.transmit(Side::Server, at);
            }
        }
    }

    /// The host's processor is free.
    fn run_host(&mut self) {
        match self.interrupts.pop_front() {
            Some(Interrupt::Segment(at, segment)) => self.host_receives(at, &segment),
            Some(Interrupt::Event(at, event)) => self.host_notes(at, event),
            None => match self.selected.pop_front() {
                Some(at) => self.serve(at),
                None if self.ready.is_empty() => {
                    self.running[0] = false;
                    return;
                }
                None => {
                    self.selected = std::mem::take(&mut self.ready);
                    let clients = &self.clients;
                    self.host.select((0..clients.len()).filter(|at| clients[*at].accepted));
                }
            },
        }
        let profile = self.host.take_profile();
        let cycles = profile.total().cycles(self.load.timing) + std::mem::take(&mut self.application);
        self.sum.add(&profile);
        self.cycles += cycles;
        let nanos = cycles / self.load.clock * 1e9;
        self.busy[0] += nanos;
        let free = self.now + nanos as u64;
        self.flush(free);
        self.agenda.enter(free, Happening::Processor);
    }

    /// The NIC's processor is free: it runs a round, and reports what came of it for each connection.
    fn run_nic(&mut self) {
        if self.nic.is_empty() {
            self.running[1] = false;
            return;
        }
        let before = self.packets;
        let mut changes: BTreeMap<usize, (u32, u32, Events, bool)> = BTreeMap::new();
        for _ in 0..n::ROUND {
            let Some(work) = self.nic.pop_front() else { break };
            let now = micros(self.now);
            let (NicWork::Segment(at, _) | NicWork::Send(at, _) | NicWork::Read(at, _) | NicWork::Close(at)) = work;
            let Some(near) = &mut self.clients[at].near else { continue };
            match work {
                NicWork::Segment(_, segment) => {
                    self.packets += 1;
                    let received = near.input(&segment, now);
                    let entry = changes.entry(at).or_insert((0, 0, Events::empty(), false));
                    entry.0 += received.delivered;
                    entry.1 += received.acked;
                    entry.2 |= received.events;
                    entry.3 |= near.state() == State::Closed;
                }
                NicWork::Send(_, length) => {
                    near.queue(length);
                }
                NicWork::Read(_, length) => {
                    near.consumed(length);
                }
                NicWork::Close(_) => near.shutdown(),
            }
            self.transmit(Side::Server, at);
        }
        let nanos = (self.packets - before) as f64 * self.load.nic * 1e9;
        self.busy[1] += nanos;
        let free = self.now + nanos as u64;
        self.flush(free);
        for (at, (received, acknowledged, events, closed)) in changes {
            let client = &mut self.clients[at];
            client.readable += received;
            client.pending = client.pending.saturating_sub(acknowledged);
            client.fin |= events.contains(Events::FIN);
            if closed {
                client.near = None;
            }
            let reports = [
                (received > 0, Event::Received),
                (acknowledged > 0, Event::Acknowledged(acknowledged)),
                (events.contains(Events::FIN), Event::Fin),
                (closed, Event::Closed),
            ];
            self.interrupts.extend(reports.into_iter().filter(|one| one.0).map(|(_, event)| Interrupt::Event(at, event)));
        }
        self.wake(0);
        self.agenda.enter(free, Happening::Nic);
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Connect(at) => self.connect(at),
            Happening::Arrives(side, at, epoch, segment) if epoch == self.clients[at].epoch => match side {
                Side::Client => self.client_receives(at, &segment),
                Side::Server if self.clients[at].on_nic => {
                    self.nic.push_back(NicWork::Segment(at, segment));
                    self.wake(1);
                }
                Side::Server => {
                    self.interrupts.push_back(Interrupt::Segment(at, segment));
                    self.wake(0);
                }
            },
            Happening::Timer(side, at, epoch) if epoch == self.clients[at].epoch => {
                let now = micros(self.now);
                let Some(end) = self.end(side, at) else { return };
                if end.next_timeout() <= now {
                    end.on_timeout(now);
                    self.clients[at].timers[side as usize] = 0;
                    self.transmit(side, at);
                    self.flush(self.now);
                }
            }
            Happening::Reads(at, epoch, bytes) if epoch == self.clients[at].epoch => self.client_reads(at, bytes),
            Happening::Arrives(..) | Happening::Timer(..) | Happening::Reads(..) => {}
            Happening::Processor => self.run_host(),
            Happening::Nic => self.run_nic(),
        }
    }
}

impl Client {
    fn new() -> Client {
        Client {
            epoch: 0,
            far: None,
            near: None,
            on_nic: false,
            accepted: false,
            ready: false,
            requests: 0,
            wanted: 0,
            read_at: 0,
            length: 0,
            dynamic: false,
            left: 0,
            readable: 0,
            pending: 0,
            fin: false,
            closing: false,
            timers: [0; 2],
        }
    }
}

/// Runs a load.
pub fn run(load: &WebLoad) -> Served {
    let mut world = World {
        load: *load,
        host: Host::new(load.clients, load.faults),
        mix: Mix::new(load.clients, load.dynamic, 11),
        clients: (0..load.clients).map(|_| Client::new()).collect(),
        agenda: Agenda::default(),
        now: 0,
        interrupts: VecDeque::new(),
        ready: VecDeque::new(),
        selected: VecDeque::new(),
        nic: VecDeque::new(),
        out: Vec::new(),
        running: [false; 2],
        busy: [0.0; 2],
        cycles: 0.0,
        application: 0.0,
        sum: Profile::default(),
        packets: 0,
        bytes: 0,
        counts: Counts::new(),
    };
    // Clients begin one after the other, in the time that a mean answer takes at their rate.
    for at in 0..load.clients {
        let begin = 1_000_000_000 + 300_000_000 / load.clients as u64 * at as u64;
        world.agenda.enter(begin, Happening::Connect(at));
    }
    let mut begun = 0;
    let mut end = load.faults.of(WARM_UP);
    while world.packets < end {
        let Some((now, happening)) = world.agenda.next() else { break };
        world.now = now;
        world.happen(happening);
        if world.packets >= end && begun == 0 {
            begun = now;
            (world.busy, world.cycles, world.sum) = ([0.0; 2], 0.0, Profile::default());
            (world.bytes, world.packets, end) = (0, 0, load.faults.of(PACKETS));
            world.counts.clear();
        }
    }
    let (packets, nanos) = (world.packets as f64, (world.now - begun) as f64);
    Served {
        profile: world.sum.per(packets),
        cycles: world.cycles / packets,
        rate: world.bytes as f64 * 8e3 / nanos,
        busy: world.busy.map(|busy| busy / nanos),
        messages: world.counts.iter().map(|(name, number)| (*name, *number as f64 / packets)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(handoff: bool) -> WebLoad {
        let timing = Timing { instruction: 1.0, first: 3.0 };
        WebLoad {
            clients: 64,
            dynamic: 0.3,
            handoff,
            timing,
            clock: 2e9,
            nic: 7e-6,
            application: 20.0,
            faults: Faults::default(),
        }
    }

    /// Without and with handoff.
    fn both() -> &'static [Served; 2] {
        static BOTH: std::sync::OnceLock<[Served; 2]> = std::sync::OnceLock::new();
        BOTH.get_or_init(|| [false, true].map(|handoff| run(&load(handoff))))
    }

    #[test]
    fn clients_are_served_at_their_rate_and_no_faster() {
        for (handoff, served) in [false, true].into_iter().zip(both()) {
            let most = 64.0 * crate::web_mix::CLIENT_RATE / 1e6;
            assert!(served.rate > 0.9 * most && served.rate <= most, "{handoff}: {} of {most}", served.rate);
            assert!(served.busy.iter().all(|share| *share < 1.0), "{:?}", served.busy);
        }
    }

    /// With handoff the host sees the packets of handshakes only, and messages in place of the others.
    #[test]
    fn handoff_takes_packets_from_the_host() {
        let [without, with] = both();
        let number =
            |served: &Served, kind: &str| served.messages.iter().find(|(name, _)| *name == kind).map_or(0.0, |one| one.1);
        assert!(number(with, "receive descriptor") < 0.2 * number(without, "receive descriptor"));
        assert!(number(with, "ch_nic_handoff") > 0.0 && number(without, "ch_nic_handoff") == 0.0);
        // Each connection that is handed over is closed.
        assert!((number(with, "ch_nic_handoff") / number(with, "ch_nic_ctrl") - 1.0).abs() < 0.1);
        let tcp = |served: &Served| served.profile.0[Layer::Tcp as usize].instructions;
        assert!(tcp(with) < 0.2 * tcp(without));
    }
}
