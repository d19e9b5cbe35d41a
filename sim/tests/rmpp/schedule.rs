//! A schedule: two RMPP endpoints that send and receive, and all that can befall them. Each message is delivered at
//! most once, what was acknowledged was delivered, and all state is given back.
#![allow(dead_code, reason = "each user takes some of it")]

use crate::worlds::{clean, config};
use baton_rmpp::{Completion, Config, Counters, Outgoing, Region, Request, Side};
use baton_sim::rmpp::{Carrier, Node, World, halves_on_nic};
use baton_sim::rmpp_streams::{StreamFaults, StreamNet};
use baton_sim::{Impairments, Rng, stream};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of a place in memory that one message is sent from or received into.
const PLACE: u64 = 1 << 16;
/// Places for sending, and as many behind them for receiving.
const PLACES: u64 = 8;

/// What a forged message says it is. It is delivered like any other if its sender knew the receiver's incarnation and
/// came before the peer.
pub const FORGED: u64 = 1 << 40;

/// What a schedule has shown, so that the test can say that it saw what it is for.
#[derive(Default, Debug)]
pub struct Seen {
    pub delivered: u64,
    pub truncated: u64,
    pub forged: u64,
    pub errors: BTreeMap<String, u64>,
    pub nic_deaths: u64,
    pub restarts: u64,
    pub refused: u64,
    pub streams: u64,
    pub streams_broken: u64,
    pub streamed: u64,
}

/// A schedule that is being run.
pub struct Schedule {
    pub world: World,
    pub rng: Rng,
    pub configs: [Config; 2],
    step: u8,
    /// Bytes from which on the data of a message goes by a stream, if an endpoint has any.
    streams: [Option<u64>; 2],
    /// Number of the next message, and the lengths of all.
    lengths: Vec<u64>,
    /// Per endpoint: the messages being sent, by place; the places being received into, with their bytes.
    sending: [BTreeMap<u64, u64>; 2],
    receiving: [BTreeMap<u64, (u64, baton_rmpp::ReceiveId)>; 2],
    delivered: BTreeSet<u64>,
    pub seen: Seen,
}

fn faults(rng: &mut Rng) -> Impairments {
    let upto = |rng: &mut Rng, most| if rng.chance(500_000) { rng.below(most) as u32 } else { 0 };
    Impairments {
        rate: 1_000_000_000,
        delay: rng.below(200),
        loss: upto(rng, 100_000),
        reorder: upto(rng, 100_000),
        hold: 1 + rng.below(3_000),
        duplicate: upto(rng, 100_000),
        corrupt: upto(rng, 30_000),
        ..clean()
    }
}

fn stream_faults(rng: &mut Rng) -> StreamFaults {
    let upto = |rng: &mut Rng, most| if rng.chance(500_000) { rng.below(most) as u32 } else { 0 };
    let notice = [10, 5_000, 1_000_000][rng.below(3) as usize];
    StreamFaults { refused: upto(rng, 500_000), breaks: upto(rng, 100_000), delay: rng.below(3_000), notice }
}

impl Schedule {
    /// With `streams` every endpoint has some, else a few of those at step 0.
    pub fn new(seed: u64, streams: bool) -> Schedule {
        let mut rng = Rng::new(seed);
        let step = if streams { 0 } else { rng.below(4) as u8 };
        let carrier = [Carrier::Ethernet, Carrier::Udp4, Carrier::Udp6][rng.below(3) as usize];
        let most = if rng.chance(700_000) { [16, 24] } else { [128, 128] };
        let configs = [0, 1].map(|node| Config {
            early: if step == 3 { rng.below(most[0]) as u8 } else { 0 },
            grant: 1 + rng.below(most[1]) as u16,
            ahead: [0, 0, 5, 100, 2048][rng.below(5) as usize],
            nic_buffers: 1 + if rng.chance(500_000) { rng.below(40) } else { rng.below(400) } as u32,
            pinned: 1406 + rng.below(100_000),
            buffer_count: 8 + rng.below(8) as u16,
            buffers_per_peer: 1 + rng.below(8) as u16,
            incoming: 2 + rng.below(20) as u16,
            timeout: 5_000,
            dead: 3_000_000,
            data_posted: if rng.chance(500_000) { 1 + rng.below(12) as u16 } else { 0 },
            data_unexpected: 1 + rng.below(12) as u16,
            ..config(node)
        });
        let lagging = rng.chance(500_000);
        let nodes = configs.map(|config| {
            let mut node = Node::new(config, halves_on_nic(step), carrier.address(config.endpoint.into()));
            node.lag = lagging.then(|| Rng::new(seed ^ u64::from(config.endpoint)));
            node
        });
        let mut nodes: Vec<Node> = nodes.into();
        let impairments = faults(&mut rng);
        let least = [0, 1].map(|_| (streams || step == 0 && rng.chance(500_000)).then(|| 1 + rng.below(20_000)));
        for (at, node) in nodes.iter_mut().enumerate() {
            least[at].into_iter().for_each(|least| node.use_streams(StreamNet::settings(at, least)));
        }
        let mut world = World::new(nodes, carrier, impairments, seed);
        world.streams = Some(StreamNet::new(seed, stream_faults(&mut rng)));
        Schedule {
            world,
            rng,
            configs,
            step,
            streams: least,
            lengths: Vec::new(),
            sending: Default::default(),
            receiving: Default::default(),
            delivered: BTreeSet::new(),
            seen: Seen::default(),
        }
    }

    fn send(&mut self, from: usize) {
        let Some(place) = (0..PLACES).find(|place| !self.sending[from].contains_key(place)) else { return };
        let (address, now) = (self.world.address(1 - from), self.world.now);
        let node = &mut self.world.nodes[from];
        let peer = node.policy.open(address, 1 - from as u16).expect("there is room for one peer");
        let length = if self.rng.chance(300_000) { self.rng.below(PLACE + 1) } else { self.rng.below(3_000) };
        let number = self.lengths.len() as u64;
        let region = Region { offset: place * PLACE, length };
        stream::fill(number, 0, &mut node.memory[region.offset as usize..][..length as usize]);
        let outgoing = Outgoing { peer, context: 0, tag: number % 3, data: number, region, token: place };
        if node.policy.send(outgoing, now).is_ok() {
            self.lengths.push(length);
            self.sending[from].insert(place, number);
        }
    }

    fn receive(&mut self, at: usize, any: bool) {
        let Some(place) = (PLACES..2 * PLACES).find(|place| !self.receiving[at].contains_key(place)) else { return };
        let length = if self.rng.chance(200_000) { self.rng.below(3_000) } else { PLACE };
        let region = Region { offset: place * PLACE, length };
        let ignore = if any || self.rng.chance(300_000) { u64::MAX } else { 0 };
        let request = Request { source: None, context: 0, tag: self.rng.below(3), ignore, region, token: place };
        let now = self.world.now;
        let node = &mut self.world.nodes[at];
        if let Ok(id) = node.policy.post(request, now, &mut node.memory[..]) {
            self.receiving[at].insert(place, (length, id));
        }
    }

    /// Looks at what has completed: receives first, so that a message which was acknowledged is known to have been
    /// delivered.
    pub fn collect(&mut self) {
        for (node, config) in self.world.nodes.iter().zip(&self.configs) {
            let (packets, bytes) = node.policy.cleared();
            assert!(
                packets <= config.nic_buffers && bytes <= config.pinned,
                "{packets} packets of {bytes} bytes are cleared: {config:?}"
            );
        }
        let completions = [0, 1].map(|at| std::mem::take(&mut self.world.nodes[at].completions));
        for side in [Side::Receive, Side::Send] {
            for (at, completion) in completions.iter().enumerate().flat_map(|(at, list)| list.iter().map(move |one| (at, one))) {
                if completion.side != side {
                    continue;
                }
                if let Err(error) = completion.result {
                    *self.seen.errors.entry(format!("{side:?} {error:?}")).or_default() += 1;
                }
                match side {
                    Side::Send => self.sent(at, completion),
                    Side::Receive => self.received(at, completion),
                }
            }
        }
    }

    fn sent(&mut self, at: usize, completion: &Completion) {
        let number = self.sending[at].remove(&completion.token).expect("a send completes once");
        if completion.result.is_ok() {
            assert!(self.delivered.contains(&number), "message {number} was acknowledged and not delivered");
        }
    }

    fn received(&mut self, at: usize, completion: &Completion) {
        let (room, _) = self.receiving[at].remove(&completion.token).expect("a receive completes once");
        let Ok(delivered) = completion.result else { return };
        if delivered.data == FORGED {
            self.seen.forged += 1;
            return;
        }
        let length = self.lengths[delivered.data as usize];
        assert_eq!((delivered.length, delivered.placed), (length, length.min(room)));
        let memory = &self.world.nodes[at].memory[(completion.token * PLACE) as usize..];
        assert_eq!(stream::mismatches(delivered.data, 0, &memory[..delivered.placed as usize]), 0, "message {}", delivered.data);
        assert!(self.delivered.insert(delivered.data), "message {} was delivered twice", delivered.data);
        self.seen.delivered += 1;
        self.seen.truncated += u64::from(delivered.placed < length);
    }

    /// An endpoint ends and begins anew: all that it had to do is gone.
    fn restart(&mut self, at: usize) {
        self.note(at);
        self.configs[at].incarnation += 1000;
        let address = self.world.address(at);
        let mut node = Node::new(self.configs[at], halves_on_nic(self.step), address);
        self.streams[at].into_iter().for_each(|least| node.use_streams(StreamNet::settings(at, least)));
        self.world.nodes[at] = node;
        self.world.streams.iter_mut().for_each(|streams| streams.restart(at));
        self.sending[at].clear();
        self.receiving[at].clear();
        self.seen.restarts += 1;
    }

    fn note(&mut self, at: usize) {
        let node = &self.world.nodes[at];
        let refused = |counters: &Counters| counters.refused.iter().sum::<u64>();
        self.seen.refused += refused(node.host.counters()) + refused(node.nic.counters());
        self.seen.streamed += node.host.counters().streamed[0];
    }

    pub fn act(&mut self) {
        let at = self.rng.below(2) as usize;
        let now = self.world.now;
        match self.rng.below(100) {
            0..35 => self.send(at),
            35..70 => self.receive(at, false),
            70..76 => {
                self.world.nodes[at].kill_nic(now);
                self.seen.nic_deaths += 1;
            }
            76..78 => self.restart(at),
            78 => {
                // Silence, long enough for a peer to count as dead.
                self.world.set_impairments(Impairments { loss: 1_000_000, ..clean() });
                let silence = self.rng.below(5_000_000);
                self.world.run_until(silence, |_| false);
                let impairments = faults(&mut self.rng);
                self.world.set_impairments(impairments);
            }
            79 => {
                let address = self.world.address(1 - at);
                let peer = self.world.nodes[at].policy.open(address, 1 - at as u16).expect("there is room for one peer");
                self.world.nodes[at].policy.close(peer, now);
            }
            80 => {
                let impairments = faults(&mut self.rng);
                self.world.set_impairments(impairments);
                let faults = stream_faults(&mut self.rng);
                self.world.streams.iter_mut().for_each(|streams| streams.set_faults(faults));
            }
            81 => self.world.streams.iter_mut().for_each(|streams| streams.break_all(now)),
            _ => {
                let pause = self.rng.below(20_000);
                self.world.run_until(pause, |_| false);
            }
        }
        self.world.settle();
        self.collect();
    }

    /// Takes back the receives that have matched nothing.
    fn cancel_receives(&mut self) {
        for at in 0..2 {
            for (_, id) in self.receiving[at].values() {
                self.world.nodes[at].policy.cancel(*id);
            }
        }
        self.world.settle();
        self.collect();
    }

    /// Lets everything end: without faults, with receives for whatever comes.
    pub fn finish(&mut self) {
        self.world.set_impairments(Impairments { rate: 1_000_000_000, delay: 20, ..clean() });
        let faults = StreamFaults { delay: 100, notice: 1000, ..StreamFaults::default() };
        self.world.streams.iter_mut().for_each(|streams| streams.set_faults(faults));
        self.cancel_receives();
        for _ in 0..400 {
            for at in 0..2 {
                self.receive(at, true);
            }
            self.world.run_until(100_000, |_| false);
            self.collect();
            if self.sending.iter().all(BTreeMap::is_empty) {
                break;
            }
        }
        let left = [0, 1].map(|at| self.world.nodes[at].leftovers());
        assert!(
            self.sending.iter().all(BTreeMap::is_empty),
            "sends that never ended: {:?}, left: {left:?}, {:?}, {:?}",
            self.sending,
            self.receiving,
            self.configs
        );
        // Messages whose sender restarted may still be coming: the receives that wait for nothing are taken back last.
        self.world.run_until(20_000_000, |world| world.nodes.iter().all(|node| node.leftovers()[1] == 0));
        self.collect();
        self.cancel_receives();
        self.world.run_until(10_000_000, |world| world.nodes.iter().all(|node| node.leftovers() == [0; 7]));
        self.collect();
        for at in 0..2 {
            assert_eq!(self.world.nodes[at].leftovers(), [0; 7], "endpoint {at}");
            assert!(self.receiving[at].is_empty());
            self.note(at);
        }
        if let Some(streams) = &self.world.streams {
            (self.seen.streams, self.seen.streams_broken) = (streams.opened, streams.broken);
        }
    }
}
