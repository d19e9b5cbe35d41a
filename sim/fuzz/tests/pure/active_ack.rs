//! Active acknowledgements between kernels' connections and their peers', on wires that lose, reorder, repeat and forge
//! frames, for a kernel that refuses what it is given at random, on workers that exchange connections, on NICs that
//! die. What was acknowledged arrives.
//!
//! A step is a frame that arrives, is lost, repeated or forged; a call of a program's; a change of settings or of
//! workers; the death of a NIC; or a time that passes with all that becomes due in it.

use crate::active_ack_memory::Memory;
use crate::end::{End, before, byte, segment_of};
use baton_active_ack::{ActiveAck, Store};
use baton_device::{Checksum, Frame};
use baton_fuzz::{Choice, World, note};
use baton_tcp::{Config, Connection, EndReason, Instant, Segment, State};
use baton_wire::frame::{Header, Link, MAX_HEADER, Template, finish_checksum};
use baton_wire::{Endpoint, Flags, Flow, FlowKey, TcpFrame, TcpOptions};
use std::collections::VecDeque;

const SECOND: u64 = 1_000_000;
/// How long all may take without faults, in microseconds and in events.
const PATIENCE: u64 = 4 * 3600 * SECOND;
const MOST_EVENTS: u32 = 100_000;
const KEY: [u64; 4] = [1, 2, 3, 4];
/// Buffers of each of the two workers.
const BUFFERS: [&[usize]; 2] = [&[0, 1], &[2]];
const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// A connection of the kernel's.
struct Both {
    flow: Flow,
    kernel: End,
    peer: End,
    /// Its worker.
    worker: usize,
    /// The peer's timestamp that the kernel echoed last; 0 before.
    echoed: u32,
    /// A program, or an end without an answer, has given up: not all has to arrive.
    broken: bool,
}

struct Nics {
    memory: Memory,
    workers: [ActiveAck<Memory>; 2],
    connections: Vec<Both>,
    now: Instant,
    /// On the wire to the NIC and from it, and between NIC and kernel: frames with the number of their connection.
    to_nic: VecDeque<(usize, Frame)>,
    to_peer: VecDeque<(usize, Frame)>,
    to_kernel: VecDeque<(usize, Frame)>,
    last: Choice,
}

/// A worker's share of the buffers. Those with data go to the first one.
fn worker(memory: &Memory, number: usize, on: bool, now: Instant) -> ActiveAck<Memory> {
    let all = 0..memory.buffers();
    let buffers: Vec<usize> = all
        .filter(|buffer| {
            let holds = memory.holds(*buffer);
            if number == 0 { holds || BUFFERS[0].contains(buffer) } else { !holds && BUFFERS[1].contains(buffer) }
        })
        .collect();
    ActiveAck::new(memory.clone(), &buffers, KEY, on, now.0)
}

fn frame(flow: &Flow, from_kernel: bool, segment: &Segment, key: u8, whole_sum: bool) -> Frame {
    let (source, destination) = if from_kernel { (OUR_MAC, PEER_MAC) } else { (PEER_MAC, OUR_MAC) };
    let template = Template::new(flow, &Link { source, destination, ttl: 64, ..Link::default() }, false);
    let Segment { seq, ack, flags, window, options, length, congestion_experienced } = *segment;
    let ecn = if congestion_experienced { 3 } else { 0 };
    let header = Header { seq, ack, flags, window, options: &options, ecn, ident: 0 };
    let length = length as usize;
    let mut frame = Frame::with_capacity(MAX_HEADER + length);
    frame.set_length(MAX_HEADER + length);
    let headers = template.emit(&header, length, frame.bytes_mut());
    frame.set_length(headers + length);
    frame.bytes_mut()[headers..].iter_mut().enumerate().for_each(|(at, found)| *found = byte(key, seq.wrapping_add(at as u32)));
    if whole_sum {
        finish_checksum(frame.bytes_mut(), template.tcp_offset(), 16);
    } else {
        frame.checksum = Checksum::Partial { start: template.tcp_offset() as u16, offset: 16 };
    }
    frame
}

impl Nics {
    fn open(&mut self, number: usize, choice: &mut Choice) {
        let mut config = || Config {
            receive_buffer: 1 << (12 + choice.below(4)),
            mtu: choice.of(&[576, 1500]),
            timestamps: !choice.one_in(3),
            sack: !choice.one_in(3),
            window_scaling: !choice.one_in(3),
            receive_limit: choice.of(&[0, 1 << 20]),
            ecn: choice.one_in(3),
            nodelay: true,
            ..Config::default()
        };
        let configs = [config(), config()];
        let flow = match choice.below(3) {
            0 => Flow { local: Endpoint::v6([0xfd; 16], 80), remote: Endpoint::v6([0xfe; 16], 4000 + number as u16), device: 0 },
            _ => Flow {
                local: Endpoint::v4([10, 0, 0, 1], 80),
                remote: Endpoint::v4([10, 0, 0, 2], 4000 + number as u16),
                device: 0,
            },
        };
        note!("{flow:?} {configs:?}");
        let now = self.now;
        let connects = choice.one_in(3);
        let mut client = Connection::connect(configs[0], choice.number() | 0xffff_0000, choice.number(), now);
        let syn = client.poll_transmit(now, 0).expect("a SYN");
        let segment = segment_of(&syn);
        let server = Connection::accept(configs[1], &segment, choice.number(), choice.number(), now).expect("a SYN");
        let keys = [number as u8, 100 + number as u8];
        let [mut client, server] = [(client, 0), (server, 1)].map(|(tcp, at)| {
            let keys = if (at == 0) == connects { keys } else { [keys[1], keys[0]] };
            End::new(tcp, &configs[at], keys, now)
        });
        client.check_sent(&syn, now);
        let (kernel, peer) = if connects { (client, server) } else { (server, client) };
        self.connections.push(Both { flow, kernel, peer, worker: 0, echoed: 0, broken: false });
        // The SYN has passed the NIC.
        if connects {
            let mut sent = frame(&flow, true, &segment, 0, true);
            self.workers[0].from_kernel(&mut sent, now.0, &mut |_| panic!("nothing is held"));
        }
        self.settle(number);
    }

    /// Both ends send what they have to send, and the kernel's frames pass the NIC.
    fn settle(&mut self, number: usize) {
        let now = self.now;
        let Both { flow, kernel, peer, worker, echoed, .. } = &mut self.connections[number];
        let (mut from_kernel, mut from_peer) = (Vec::new(), Vec::new());
        kernel.send(0, now, |transmit| from_kernel.push(segment_of(transmit)));
        End::note_scales(kernel, peer);
        peer.send(0, now, |transmit| from_peer.push(segment_of(transmit)));
        End::note_scales(kernel, peer);
        let mut echoes = from_kernel.iter().filter_map(|segment| segment.options.timestamps);
        *echoed = echoes.next_back().map_or(*echoed, |(_, echo)| echo);
        let (keys, flow, worker) = ([kernel.keys[0], peer.keys[0]], *flow, *worker);
        for segment in from_peer {
            self.to_nic.push_back((number, frame(&flow.reversed(), false, &segment, keys[1], true)));
        }
        for segment in from_kernel {
            let whole_sum = segment.seq & 1 == 0;
            let mut frame = frame(&flow, true, &segment, keys[0], whole_sum);
            let to_kernel = &mut self.to_kernel;
            self.workers[worker].from_kernel(&mut frame, now.0, &mut |frame| to_kernel.push_back((number, frame.clone())));
            if whole_sum && frame.checksum == Checksum::Unknown {
                let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
                assert!(parsed.checksum_holds(frame.bytes()), "the checksum is wrong after a change");
            }
            self.send_to_peer(number, frame);
        }
        self.note_ends(number);
    }

    /// What the NIC lets out says nothing that the kernel would not stand for.
    fn send_to_peer(&mut self, number: usize, frame: Frame) {
        let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
        let Both { kernel, peer, .. } = &self.connections[number];
        let open = !matches!(peer.tcp.state(), State::SynSent | State::SynReceived | State::Closed);
        if parsed.flags.contains(Flags::ACK) && !parsed.flags.intersects(Flags::SYN | Flags::RST) && open {
            assert!(!before(peer.tcp.snd_nxt(), parsed.ack), "what was never sent is acknowledged");
            let edge = parsed.ack.wrapping_add(u32::from(parsed.window) << kernel.shifts[1]);
            let promised = kernel.edge.unwrap_or(edge);
            assert!(!before(promised, edge), "a window to {edge} that the kernel has not granted: {promised}");
        }
        self.to_peer.push_back((number, frame));
        if self.to_peer.len() > 200 {
            self.to_peer.pop_front();
        }
    }

    fn note_ends(&mut self, number: usize) {
        let both = &mut self.connections[number];
        for end in [&both.kernel, &both.peer] {
            if end.is_closed() {
                end.may_have_ended(self.now);
                both.broken |= matches!(end.tcp.end_reason(), Some(EndReason::TimedOut | EndReason::Aborted));
            }
        }
    }

    /// A frame comes from the wire: to the NIC, and by it to the kernel.
    fn at_nic(&mut self, number: usize, frame: Frame) {
        let now = self.now.0;
        let mut acknowledgements = Vec::new();
        let worker = self.connections[number].worker;
        self.workers[worker].from_wire(&frame, now, &mut |ack| acknowledgements.push(ack.clone()));
        for acknowledgement in acknowledgements {
            self.send_to_peer(number, acknowledgement);
        }
        self.to_kernel.push_back((number, frame));
        if self.to_kernel.len() > 200 {
            self.to_kernel.pop_front();
        }
    }

    fn at_kernel(&mut self, number: usize, frame: &Frame) {
        self.at_end(number, frame, true);
    }

    fn at_end(&mut self, number: usize, frame: &Frame, at_kernel: bool) {
        let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
        if frame.checksum == Checksum::Unknown && !parsed.checksum_holds(frame.bytes()) {
            return;
        }
        let segment = Segment::from(&parsed);
        note!("{:?} {number}, at the {}: {segment:?}", self.now, if at_kernel { "kernel" } else { "peer" });
        let both = &mut self.connections[number];
        let end = if at_kernel { &mut both.kernel } else { &mut both.peer };
        if !end.is_closed() {
            end.receive(&segment, Some(parsed.payload(frame.bytes())), false, self.now);
            return self.settle(number);
        }
        if segment.flags.contains(Flags::RST) {
            return;
        }
        let (seq, ack, flags) = match segment.flags.contains(Flags::ACK) {
            true => (segment.ack, 0, Flags::RST),
            false => (0, segment.end(), Flags::RST | Flags::ACK),
        };
        let reset = Segment { seq, ack, flags, ..Segment::default() };
        let flow = both.flow;
        if at_kernel {
            let mut reset = self::frame(&flow, true, &reset, 0, true);
            let worker = both.worker;
            self.workers[worker].from_kernel(&mut reset, self.now.0, &mut |_| ());
            self.to_peer.push_back((number, reset));
        } else {
            self.to_nic.push_back((number, self::frame(&flow.reversed(), false, &reset, 0, true)));
        }
    }

    /// Lets time pass, and all expire that becomes due.
    fn wait(&mut self, micros: u64) {
        let until = self.now.after(micros);
        for expiries in 0.. {
            let Some(next) = self.next_expiry().filter(|next| *next <= until) else { break };
            assert!(expiries < 20_000, "time-outs without an end");
            self.now = self.now.max(next);
            self.expire();
        }
        self.now = until;
    }

    fn next_expiry(&self) -> Option<Instant> {
        let ends = self.connections.iter().flat_map(|both| [&both.kernel, &both.peer]).map(|end| end.tcp.next_timeout());
        let nics = self.workers.iter().filter_map(ActiveAck::next_expiry).map(|at| Instant(at.max(self.now.0 + 1)));
        ends.chain(nics).min().filter(|next| *next != Instant::NEVER)
    }

    fn expire(&mut self) {
        let now = self.now;
        for worker in 0..2 {
            let (mut acknowledgements, mut again) = (Vec::new(), Vec::new());
            let (to_wire, to_kernel) = (&mut acknowledgements, &mut again);
            self.workers[worker].expire(now.0, &mut |ack| to_wire.push(ack.clone()), &mut |frame| to_kernel.push(frame.clone()));
            for acknowledgement in acknowledgements {
                self.send_to_peer(self.number(&acknowledgement, true), acknowledgement);
            }
            for frame in again {
                self.to_kernel.push_back((self.number(&frame, false), frame));
            }
        }
        for number in 0..self.connections.len() {
            let Both { kernel, peer, .. } = &mut self.connections[number];
            let mut due = false;
            for end in [kernel, peer] {
                if end.tcp.next_timeout() <= now {
                    end.tcp.on_timeout(now);
                    end.check(now);
                    due = true;
                }
            }
            if due {
                self.settle(number);
            }
        }
    }

    fn number(&self, frame: &Frame, to_wire: bool) -> usize {
        let flow = TcpFrame::parse(frame.bytes(), 0).expect("a segment").flow;
        let flow = if to_wire { flow.reversed() } else { flow };
        self.connections.iter().position(|both| both.flow == flow).expect("a connection")
    }

    /// A segment of somebody who does not know the numbers, or has a copy of an old one's timestamp.
    fn forge(&mut self, number: usize, choice: &mut Choice) {
        let Both { flow, kernel, echoed, .. } = &self.connections[number];
        let far =
            |from: u32, choice: &mut Choice| from.wrapping_add(1 << 21).wrapping_add(choice.below((1 << 32) - (1 << 22)) as u32);
        let opening = matches!(kernel.tcp.state(), State::SynSent | State::SynReceived);
        let tcp = &kernel.tcp;
        let flags = choice.of(&[
            Flags::ACK,
            Flags::ACK,
            Flags::ACK | Flags::FIN,
            Flags::RST,
            Flags::RST | Flags::ACK,
            Flags::SYN | Flags::ACK,
        ]);
        let options = TcpOptions {
            timestamps: choice.one_in(2).then(|| (choice.number(), choice.number())),
            window_scale: choice.one_in(8).then(|| choice.below(15) as u8),
            ..TcpOptions::default()
        };
        let mut segment = Segment {
            seq: far(tcp.rcv_nxt(), choice),
            ack: far(tcp.snd_una(), choice),
            flags,
            window: choice.number() as u16,
            options,
            length: choice.below(1000) as u32,
            congestion_experienced: choice.one_in(4),
        };
        match choice.below(5) {
            0 if !opening => segment.ack = tcp.snd_nxt(),
            2 if !opening => {
                // All is right but that it acknowledges what the kernel has not sent, nor will have when it gets there
                // (RFC 9293 section 3.10.7.4, fifth check).
                segment.seq = tcp.rcv_nxt();
                segment.ack = tcp.snd_nxt().wrapping_add((1 << 21) + choice.magnitude(30));
                (segment.flags, segment.congestion_experienced) = (Flags::ACK, false);
                segment.length += 1;
                segment.options = TcpOptions::default();
                segment.options.timestamps = Some((*echoed, choice.number())).filter(|_| *echoed != 0);
            }
            1 if !opening => {
                // Both numbers are right, and the timestamp is older than what the kernel echoes.
                let recent = *echoed;
                if recent == 0 {
                    return;
                }
                (segment.seq, segment.ack, segment.flags) = (tcp.rcv_nxt(), tcp.snd_una(), Flags::ACK);
                segment.length += 1;
                segment.options.timestamps = Some((recent.wrapping_sub(1 + choice.magnitude(30)), choice.number()));
            }
            _ => {}
        }
        note!("{:?} {number}, forged: {segment:?}", self.now);
        let forged = frame(&flow.reversed(), false, &segment, 0xee, true);
        self.at_nic(number, forged);
    }

    /// A bit of a segment on its way flips: of its sequence number, its acknowledgement, or what lies behind its
    /// checksum.
    fn damage(&mut self, choice: &mut Choice) {
        let wire = if choice.one_in(3) { &mut self.to_peer } else { &mut self.to_nic };
        let Some((_, frame)) = wire.front_mut() else { return };
        let parsed = TcpFrame::parse(frame.bytes(), 0).expect("a segment");
        // Two bits may leave the sum as it was.
        if frame.checksum == Checksum::Unknown && parsed.checksum_holds(frame.bytes()) {
            let places = [parsed.tcp_offset + 4..parsed.tcp_offset + 12, parsed.payload_offset..frame.bytes().len()];
            let place = choice.of(&[0, 1, 1]);
            let range = if places[place].is_empty() { &places[0] } else { &places[place] };
            let at = range.start + choice.below(range.len() as u64) as usize;
            frame.bytes_mut()[at] ^= 1 << choice.below(8);
        }
    }

    /// Buffers with bytes that the NIC has acknowledged and the kernel has not.
    fn held(&self) -> usize {
        (0..self.memory.buffers()).filter(|buffer| self.memory.holds(*buffer)).count()
    }

    /// The kernel answers the SYN of a connection that never comes to be. What is held for others stays.
    fn stranger(&mut self, choice: &mut Choice) {
        let flow = Flow {
            local: Endpoint::v4([10, 0, 0, 1], 80),
            remote: Endpoint::v4([10, 0, 0, 3], choice.number() as u16),
            device: 0,
        };
        let segment =
            Segment { seq: choice.number(), ack: choice.number(), flags: Flags::SYN | Flags::ACK, ..Segment::default() };
        let mut answer = frame(&flow, true, &segment, 0, true);
        let (now, held) = (self.now.0, self.held());
        self.workers[choice.below(2) as usize].from_kernel(&mut answer, now, &mut |_| panic!("nothing is held"));
        assert_eq!(self.held(), held, "what was acknowledged is forgotten for a stranger");
    }

    fn program(&mut self, number: usize, choice: &mut Choice) {
        let both = &mut self.connections[number];
        let (end, at_kernel) = if choice.one_in(2) { (&mut both.kernel, true) } else { (&mut both.peer, false) };
        match choice.below(40) {
            0..20 => {
                let bytes = choice.magnitude(if at_kernel { 8 } else { 14 });
                if end.waiting() + bytes <= 40_000 {
                    end.program_writes(bytes);
                }
            }
            20..38 => end.program_reads(choice.of(&[100, 1000, u32::MAX >> 1]), !choice.one_in(4)),
            38 if choice.one_in(6) && end.tcp.state() != State::SynSent => end.tcp.shutdown(),
            39 if choice.one_in(40) && !end.is_closed() => {
                both.broken = true;
                end.tcp.abort();
            }
            _ => {}
        }
        self.settle(number);
    }

    fn nic_dies(&mut self, choice: &mut Choice) {
        note!("{:?} the NIC dies", self.now);
        let on = !choice.one_in(4);
        for number in [0, 1] {
            self.workers[number] = worker(&self.memory, number, on, self.now);
        }
        self.connections.iter_mut().for_each(|both| both.worker = 0);
    }

    /// A connection's bucket goes to the other worker.
    fn change_worker(&mut self, number: usize) {
        let Both { flow, worker, .. } = &mut self.connections[number];
        let taken = self.workers[*worker].take(|entry| entry.flow() == flow);
        *worker = 1 - *worker;
        self.workers[*worker].adopt(taken);
    }
}

impl World for Nics {
    const LONGEST: u64 = 1200;

    fn new(word: u64) -> Nics {
        let mut choice = Choice::new(word);
        let memory = Memory::new(BUFFERS.concat().len());
        let now = Instant(SECOND + choice.below(1 << 40));
        let workers = [0, 1].map(|number| worker(&memory, number, true, now));
        let queue = VecDeque::new;
        let (to_nic, to_peer, to_kernel, connections) = (queue(), queue(), queue(), Vec::new());
        let mut nics = Nics { memory, workers, connections, now, to_nic, to_peer, to_kernel, last: choice.clone() };
        for number in 0..choice.of(&[1, 1, 2, 5]) {
            nics.open(number, &mut choice);
        }
        nics
    }

    fn step(&mut self, word: u64) -> bool {
        let mut choice = Choice::new(word);
        let number = choice.below(self.connections.len() as u64) as usize;
        match choice.below(64) {
            0..14 => {
                if let Some((number, frame)) = self.to_nic.pop_front() {
                    self.at_nic(number, frame);
                }
            }
            14..28 => {
                if let Some((number, frame)) = self.to_kernel.pop_front() {
                    self.at_kernel(number, &frame);
                }
            }
            28..38 => {
                if let Some((number, frame)) = self.to_peer.pop_front() {
                    self.at_end(number, &frame, false);
                }
            }
            38 => drop(self.to_kernel.pop_front()),
            39 => drop(self.to_nic.pop_front()),
            40 => drop(self.to_peer.pop_front()),
            41 => drop([&mut self.to_kernel, &mut self.to_nic, &mut self.to_peer][choice.below(3) as usize].drain(..)),
            // One overtakes the others; one comes twice.
            42 | 43 => {
                let wire = if choice.one_in(2) { &mut self.to_nic } else { &mut self.to_peer };
                if !wire.is_empty() {
                    let at = choice.below(wire.len() as u64) as usize;
                    if choice.one_in(2) {
                        wire.swap(0, at);
                    } else {
                        let copy = wire[at].clone();
                        wire.push_back(copy);
                    }
                }
            }
            44 => self.forge(number, &mut choice),
            45 if choice.one_in(2) => self.forge(number, &mut choice),
            45 => self.damage(&mut choice),
            46..56 => self.program(number, &mut choice),
            56..60 => self.wait(u64::from(choice.magnitude(19))),
            60 => self.wait(choice.of(&[SECOND, 5 * SECOND, 20 * SECOND])),
            61 => self.change_worker(number),
            62 if choice.one_in(2) => self.nic_dies(&mut choice),
            62 => {
                let on = choice.one_in(2);
                self.workers.iter_mut().for_each(|worker| worker.set(on));
            }
            63 if !choice.one_in(8) => self.stranger(&mut choice),
            63 => {
                let both = &self.connections[number];
                self.workers[both.worker].end(&FlowKey::from(&both.flow));
            }
            _ => {}
        }
        true
    }

    fn end(mut self) {
        let (begun, delay) = (self.now, 1 + u64::from(self.last.magnitude(17)));
        note!("{:?} from now on all is well", self.now);
        [&mut self.to_nic, &mut self.to_peer].into_iter().for_each(VecDeque::clear);
        let mut due: VecDeque<(Instant, bool, usize, Frame)> = VecDeque::new();
        for events in 0.. {
            for number in 0..self.connections.len() {
                let Both { kernel, peer, .. } = &mut self.connections[number];
                for end in [kernel, peer] {
                    end.program_reads(u32::MAX >> 1, true);
                    if !matches!(end.tcp.state(), State::SynSent | State::SynReceived) {
                        end.tcp.shutdown();
                    }
                }
                self.settle(number);
            }
            let arrives = self.now.after(delay);
            due.extend(self.to_nic.drain(..).map(|(number, frame)| (arrives, true, number, frame)));
            due.extend(self.to_peer.drain(..).map(|(number, frame)| (arrives, false, number, frame)));
            let is_over = |both: &Both| both.kernel.is_closed() && both.peer.is_closed();
            if self.connections.iter().all(is_over) {
                break;
            }
            assert!(events < MOST_EVENTS && self.now.since(begun) < PATIENCE, "it does not end: {}", self.states());
            if let Some((number, frame)) = self.to_kernel.pop_front() {
                self.at_kernel(number, &frame);
                continue;
            }
            let arrival = due.front().map(|(at, ..)| *at);
            let expiry = self.next_expiry();
            let Some(next) = arrival.into_iter().chain(expiry).min() else { break };
            self.now = self.now.max(next);
            match due.front().is_some_and(|(at, ..)| *at <= next).then(|| due.pop_front()).flatten() {
                Some((_, true, number, frame)) => self.at_nic(number, frame),
                Some((_, false, number, frame)) => self.at_end(number, &frame, false),
                None => self.expire(),
            }
        }
        for both in &mut self.connections {
            both.kernel.program_reads(u32::MAX >> 1, false);
            both.peer.program_reads(u32::MAX >> 1, false);
        }
        for both in &self.connections {
            let right = (both.kernel.read, both.peer.read) == (both.peer.queued, both.kernel.queued);
            assert!(both.broken || right, "not everything has arrived: {}", self.states());
        }
    }
}

impl Nics {
    fn states(&self) -> String {
        let of = |both: &Both| {
            let end = |end: &End| format!("{} queued, {} read, {:#?}", end.queued, end.read, end.tcp);
            format!("kernel: {}\npeer: {}", end(&both.kernel), end(&both.peer))
        };
        self.connections.iter().map(of).collect::<Vec<_>>().join("\n")
    }
}

#[test]
fn what_was_acknowledged_arrives() {
    crate::fuzzer!("active_ack").run::<Nics>();
}
