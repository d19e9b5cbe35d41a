//! Streams between RMPP endpoints in virtual time: connections that deliver bytes in order, in pieces, late, and until
//! they break.

use crate::Rng;
use crate::rmpp::Node;
use baton_rmpp::{Intake, Memory, StreamConfig, StreamId, StreamOrder};
use baton_wire::Endpoint;
use baton_wire::rmpp::stream::GREETING;
use std::collections::VecDeque;

/// TCP port of every endpoint.
const PORT: u16 = 7000;
/// Bytes that are under way at most.
const WINDOW: usize = 30_000;
/// Microseconds after which a receiver looks again that is to look for packets first.
const LOOK: u64 = 10;

/// What happens to streams, in parts per million.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamFaults {
    /// An attempt to open one fails.
    pub refused: u32,
    /// One breaks with a piece that is written or read.
    pub breaks: u32,
    /// Longest way of a piece, in microseconds.
    pub delay: u64,
    /// Longest time until an end learns of a break, in microseconds.
    pub notice: u64,
}

/// A connection: who has opened it, and to whom.
struct Pipe {
    ends: [usize; 2],
    opener: StreamId,
    /// What the receiver calls it, once the greeting has come.
    receiver: Option<StreamId>,
    /// Pieces under way, with the time of their arrival.
    pieces: VecDeque<(u64, Vec<u8>)>,
    under_way: usize,
    /// What has arrived and was not read.
    arrived: VecDeque<u8>,
    /// When each end learns that it has ended: no more bytes come then. None: it knows of none.
    notices: [Option<u64>; 2],
    /// Which ends have closed it, or have been notified.
    closed: [bool; 2],
}

impl Pipe {
    /// It ends for the others at some time.
    fn end(&mut self, rng: &mut Rng, now: u64, notice: u64) {
        for end in 0..2 {
            if self.notices[end].is_none() {
                self.notices[end] = Some(now + rng.below(notice + 1));
            }
        }
    }
}

/// The streams of a world.
pub struct StreamNet {
    rng: Rng,
    faults: StreamFaults,
    pipes: Vec<Pipe>,
    /// When receivers look again at what they could not read yet.
    look: Option<u64>,
    /// Streams that were taken up, and that broke.
    pub opened: u64,
    /// See there.
    pub broken: u64,
}

impl StreamNet {
    /// No streams yet.
    pub fn new(seed: u64, faults: StreamFaults) -> StreamNet {
        StreamNet { rng: Rng::new(seed), faults, pipes: Vec::new(), look: None, opened: 0, broken: 0 }
    }

    /// Changes what happens from now on.
    pub fn set_faults(&mut self, faults: StreamFaults) {
        self.faults = faults;
    }

    /// Settings of an endpoint whose messages of so many bytes behind the RTS go by streams.
    pub fn settings(node: usize, least: u64) -> StreamConfig {
        StreamConfig { port: PORT, secret: [0x1234_5678 + node as u64, 0x9abc_def0], least }
    }

    /// An endpoint has ended: its streams with it.
    pub fn restart(&mut self, node: usize) {
        for pipe in &mut self.pipes {
            for end in 0..2 {
                pipe.closed[end] |= pipe.ends[end] == node;
            }
        }
    }

    /// Breaks all streams.
    pub fn break_all(&mut self, now: u64) {
        let StreamNet { rng, faults, pipes, broken, .. } = self;
        for pipe in pipes {
            pipe.end(rng, now, faults.notice);
            *broken += 1;
        }
    }

    /// Lets every endpoint read and write what it can at this time. Whether anything happened.
    pub fn pump(&mut self, nodes: &mut [Node], now: u64) -> bool {
        let mut any = false;
        self.look = None;
        for at in 0..nodes.len() {
            any |= self.obey(at, nodes, now);
        }
        for (at, node) in nodes.iter_mut().enumerate() {
            for _ in 0..node.host.streams_to_write() {
                any |= self.write(at, node, now);
            }
        }
        for pipe in &mut self.pipes {
            while pipe.pieces.front().is_some_and(|(at, _)| *at <= now)
                && let Some((_, piece)) = pipe.pieces.pop_front()
            {
                pipe.under_way -= piece.len();
                // Behind a break nothing arrives.
                if pipe.notices[1].is_none_or(|notice| notice > now) {
                    pipe.arrived.extend(piece);
                }
                any = true;
            }
        }
        for at in 0..self.pipes.len() {
            any |= self.read(at, nodes, now);
            any |= self.notify(at, nodes, now);
        }
        self.pipes.retain(|pipe| pipe.closed != [true; 2]);
        for node in nodes {
            let before = node.host.has_transmit();
            node.host.send_deferred();
            any |= node.host.has_transmit() != before;
        }
        any
    }

    /// When something happens next.
    pub fn next(&self) -> Option<u64> {
        let arrivals = self.pipes.iter().filter_map(|pipe| pipe.pieces.front().map(|(at, _)| *at));
        let notices = self
            .pipes
            .iter()
            .flat_map(|pipe| (0..2).filter_map(|end| pipe.notices[end].filter(|_| !pipe.closed[end])).collect::<Vec<u64>>());
        arrivals.chain(notices).chain(self.look).min()
    }

    fn obey(&mut self, from: usize, nodes: &mut [Node], now: u64) -> bool {
        let mut any = false;
        while let Some(order) = nodes[from].host.poll_stream() {
            any = true;
            match order {
                StreamOrder::Open(id, to, greeting) => self.open(from, nodes, (id, to, greeting), now),
                StreamOrder::CloseOutgoing(id) => self.close(from, id, 0, now),
                StreamOrder::CloseIncoming(id) => self.close(from, id, 1, now),
            }
        }
        any
    }

    fn open(&mut self, from: usize, nodes: &mut [Node], (id, to, greeting): (StreamId, Endpoint, [u8; GREETING]), now: u64) {
        let target = nodes.iter().position(|node| node.address().address == to.address && to.port == PORT);
        let Some(target) = target.filter(|_| !self.rng.chance(self.faults.refused)) else {
            return nodes[from].host.outgoing_ended(id);
        };
        let arrival = now + self.rng.below(self.faults.delay + 1);
        self.pipes.push(Pipe {
            ends: [from, target],
            opener: id,
            receiver: None,
            pieces: VecDeque::from([(arrival, greeting.to_vec())]),
            under_way: GREETING,
            arrived: VecDeque::new(),
            notices: [None; 2],
            closed: [false; 2],
        });
    }

    /// An end closes a stream: the other learns of it.
    fn close(&mut self, node: usize, id: StreamId, end: usize, now: u64) {
        let StreamNet { rng, faults, pipes, .. } = self;
        let of_end = |pipe: &&mut Pipe| {
            pipe.ends[end] == node && (if end == 0 { Some(pipe.opener) } else { pipe.receiver }) == Some(id) && !pipe.closed[end]
        };
        if let Some(pipe) = pipes.iter_mut().find(of_end) {
            pipe.closed[end] = true;
            pipe.end(rng, now, faults.notice);
        }
    }

    fn write(&mut self, node: usize, at: &mut Node, now: u64) -> bool {
        let StreamNet { rng, faults, pipes, broken, .. } = self;
        let Some(id) = at.host.next_to_write() else { return false };
        let of_stream = |pipe: &&mut Pipe| pipe.ends[0] == node && pipe.opener == id && !pipe.closed[0];
        let Some(pipe) = pipes.iter_mut().find(of_stream) else { return false };
        let room = WINDOW.saturating_sub(pipe.under_way + pipe.arrived.len());
        let Some(outflow) = at.host.outflow(id).filter(|_| room > 0) else { return false };
        let mut bytes = outflow.header.0[outflow.header.1..].to_vec();
        let start = bytes.len();
        bytes.resize(start + outflow.region.length.min(room as u64) as usize, 0);
        assert!(at.memory[..].read(outflow.region.offset, &mut bytes[start..]), "what is sent lies in memory");
        bytes.truncate(1 + rng.below(bytes.len().min(room) as u64) as usize);
        at.host.stream_written(id, bytes.len());
        let last = pipe.pieces.back().map_or(now, |(at, _)| *at);
        pipe.under_way += bytes.len();
        pipe.pieces.push_back((last.max(now + rng.below(faults.delay + 1)), bytes));
        if rng.chance(faults.breaks) {
            pipe.end(rng, now, faults.notice);
            *broken += 1;
        }
        true
    }

    fn read(&mut self, at: usize, nodes: &mut [Node], now: u64) -> bool {
        let StreamNet { rng, pipes, opened, faults, broken, look } = self;
        let pipe = &mut pipes[at];
        let [opener, receiver] = pipe.ends;
        if pipe.closed[1] || pipe.arrived.is_empty() {
            return false;
        }
        let Some(id) = pipe.receiver else {
            let Some(greeting) = pipe.arrived.iter().copied().collect::<Vec<u8>>().first_chunk::<GREETING>().copied() else {
                return false;
            };
            pipe.arrived.drain(..GREETING);
            let from = nodes[opener].address().address;
            match nodes[receiver].host.accept_stream(&from, &greeting) {
                Ok(id) => {
                    pipe.receiver = Some(id);
                    *opened += 1;
                }
                Err(_) => {
                    pipe.closed[1] = true;
                    pipe.end(rng, now, faults.notice);
                }
            }
            return true;
        };
        let node = &mut nodes[receiver];
        let Some(intake) = node.host.intake(id) else { return false };
        let most = match intake {
            Intake::Wait => {
                *look = Some(now + LOOK);
                return false;
            }
            Intake::Hold => return false,
            Intake::Header(missing) => missing,
            Intake::Discard(bytes) => bytes as usize,
            Intake::Place(region) => region.length as usize,
        };
        let count = 1 + rng.below(most.min(pipe.arrived.len()) as u64) as usize;
        let bytes: Vec<u8> = pipe.arrived.drain(..count).collect();
        match intake {
            Intake::Header(_) => node.host.stream_header(id, &bytes),
            Intake::Place(region) => {
                assert!(node.memory[..].write(region.offset, &bytes), "what is received has a place");
                node.host.stream_placed(id, count as u64);
            }
            _ => node.host.stream_placed(id, count as u64),
        }
        if rng.chance(faults.breaks) {
            pipe.end(rng, now, faults.notice);
            *broken += 1;
        }
        true
    }

    /// Notifies the ends of a break for which it is time.
    fn notify(&mut self, at: usize, nodes: &mut [Node], now: u64) -> bool {
        let pipe = &mut self.pipes[at];
        let mut any = false;
        for end in 0..2 {
            if pipe.closed[end] || pipe.notices[end].is_none_or(|notice| notice > now) {
                continue;
            }
            pipe.closed[end] = true;
            any = true;
            match (end, pipe.receiver) {
                (0, _) => nodes[pipe.ends[0]].host.outgoing_ended(pipe.opener),
                (_, Some(id)) => nodes[pipe.ends[1]].host.incoming_ended(id),
                _ => {}
            }
        }
        // An end that was restarted has closed it without saying so.
        if pipe.closed[0] != pipe.closed[1] {
            pipe.end(&mut self.rng, now, self.faults.notice);
        }
        any
    }
}
