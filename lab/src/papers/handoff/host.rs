//! The host of the paper: FreeBSD's network stack as a list of which layer executes how many instructions and touches
//! which structures when something happens, over the simulated caches. What happens, and when, comes from outside.

use super::cache::{Caches, Levels, Served};
use super::memory::{Array, Layout, Lines, shuffled};
use super::numbers as n;
use super::timers::Wheel;
use baton_sim::Rng;
use std::collections::VecDeque;

/// A layer of the host's network stack, as Figure 7 divides it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layer {
    /// System calls and sockets.
    SystemCall,
    /// TCP.
    Tcp,
    /// IP.
    Ip,
    /// Ethernet.
    Ethernet,
    /// The NIC's driver.
    Driver,
    /// The bypass of offloaded connections.
    Bypass,
}

/// The layers and their names.
pub const LAYERS: [(Layer, &str); 6] = [
    (Layer::SystemCall, "System call"),
    (Layer::Tcp, "TCP"),
    (Layer::Ip, "IP"),
    (Layer::Ethernet, "Ethernet"),
    (Layer::Driver, "Driver"),
    (Layer::Bypass, "Bypass"),
];

/// What a layer has done.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Tally {
    /// Instructions.
    pub instructions: f64,
    /// Data accesses that the first level served.
    pub first: f64,
    /// Those that the second level served.
    pub second: f64,
    /// Those that memory served.
    pub memory: f64,
}

impl Tally {
    /// Cycles on a machine.
    pub fn cycles(&self, timing: Timing) -> f64 {
        self.instructions * timing.instruction
            + self.first * timing.first
            + self.second * n::SECOND_LATENCY
            + self.memory * n::MEMORY_LATENCY
    }

    /// All data accesses.
    pub fn accesses(&self) -> f64 {
        self.first + self.second + self.memory
    }

    fn add(&mut self, other: &Tally) {
        self.instructions += other.instructions;
        self.first += other.first;
        self.second += other.second;
        self.memory += other.memory;
    }
}

/// What the layers have done.
#[derive(Clone, Copy, Default, Debug, PartialEq)]
pub struct Profile(pub [Tally; 6]);

impl Profile {
    /// All layers together.
    pub fn total(&self) -> Tally {
        self.0.iter().fold(Tally::default(), |mut sum, tally| {
            sum.add(tally);
            sum
        })
    }

    /// Adds another's work.
    pub fn add(&mut self, other: &Profile) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, tally)| sum.add(tally));
    }

    /// The same for one of `packets` packets.
    #[must_use]
    pub fn per(&self, packets: f64) -> Profile {
        let part = |tally: Tally| Tally {
            instructions: tally.instructions / packets,
            first: tally.first / packets,
            second: tally.second / packets,
            memory: tally.memory / packets,
        };
        Profile(self.0.map(part))
    }
}

/// How many cycles instructions and hits of the first level take; the rest is Table 1's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Cycles of an instruction.
    pub instruction: f64,
    /// Cycles of an access that the first level serves.
    pub first: f64,
}

/// What is different from the paper's host, or wrong with it, on purpose.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Faults {
    /// A miss does not fetch the next line, too.
    pub no_prefetch: bool,
    /// The same, and the levels of cache exclude each other, as the Athlon's do.
    pub exclusive: bool,
    /// A connection's structures are twice as large.
    pub large_state: bool,
    /// The lookup finds a connection only behind many others.
    pub lookup_misses: bool,
    /// Runs are shorter, see [`Faults::of`]: enough for what another fault changes, not for the paper's bars.
    pub short: bool,
}

impl Faults {
    /// Nothing is wrong; runs as long.
    pub fn without(self) -> Faults {
        Faults { short: self.short, ..Faults::default() }
    }

    /// How the levels of cache work together.
    fn levels(self) -> Levels {
        if self.exclusive { Levels::Exclusive } else { Levels::Inclusive { prefetches: !self.no_prefetch } }
    }

    /// This number of packets, or in a short run a part of it.
    pub fn of(self, packets: u64) -> u64 {
        if self.short { packets / 8 } else { packets }
    }
}

/// Whether the processor touches data that is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Data {
    /// The system call copies it.
    pub copied: bool,
    /// IP computes its checksum.
    pub summed: bool,
}

impl Data {
    /// Zero-copy and checksum offload.
    pub const UNTOUCHED: Data = Data { copied: false, summed: false };
}

/// The host.
pub struct Host {
    caches: Caches,
    profile: Profile,
    /// 1, or 2 if a connection's structures are twice as large.
    scale: u64,
    files: Array,
    sockets: Array,
    blocks: Array,
    /// Where a connection's structures lie in these.
    places: Vec<[u64; 3]>,
    buckets: Array,
    /// Bucket of each connection, and the connections of each bucket, the latest first.
    bucket: Vec<u64>,
    chains: Vec<Vec<usize>>,
    wheel_heads: Array,
    wheel: Wheel,
    buffers: Array,
    free: Vec<u64>,
    /// Buffers with data that a connection has sent, and their bytes that are not acknowledged; buffers with headers
    /// that the NIC has read.
    sent: Vec<VecDeque<(u64, u64)>>,
    spent: Vec<u64>,
    clusters: Array,
    receive_ring: Array,
    receive_buffers: Vec<u64>,
    transmit_ring: Array,
    commands: Array,
    events: Array,
    /// Memory of the program, and of the kernel's copies of its data.
    program_data: Array,
    kernel_data: Array,
    shared: Array,
    received: u64,
    transmitted: u64,
    commanded: u64,
    reported: u64,
    copied: u64,
}

/// Which of a connection's timers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Timer {
    /// Retransmission.
    Retransmit = 0,
    /// Keep-alive.
    Keep = 2,
}

impl Host {
    /// A host with this many connections.
    pub fn new(connections: usize, faults: Faults) -> Host {
        let mut layout = Layout::default();
        let mut rng = Rng::new(connections as u64 + 1);
        let scale = 1 + u64::from(faults.large_state);
        let count = connections as u64;
        // Inpcb, tcpcb and timers are one object, the first padded to 32 bytes (FreeBSD's inp_tp).
        let block = n::INPCB.next_multiple_of(32) + n::TCPCB + n::CALLOUTS * n::CALLOUT;
        let orders = [(); 3].map(|()| shuffled(&mut rng, count));
        let buckets = if faults.lookup_misses { n::BUCKETS / 32 } else { n::BUCKETS };
        let bucket: Vec<u64> = (0..connections).map(|_| rng.below(buckets)).collect();
        let mut chains = vec![Vec::new(); buckets as usize];
        for (connection, bucket) in bucket.iter().enumerate() {
            chains[*bucket as usize].insert(0, connection);
        }
        let buffers = 4 * n::RING + 64 * count;
        Host {
            caches: Caches::new(n::FIRST, n::SECOND, faults.levels()),
            profile: Profile::default(),
            scale,
            files: layout.array(n::FILE, count),
            sockets: layout.array(n::SOCKET * scale, count),
            blocks: layout.array(block * scale, count),
            places: (0..connections).map(|at| [orders[0][at], orders[1][at], orders[2][at]]).collect(),
            buckets: layout.array(8, buckets),
            bucket,
            chains,
            wheel_heads: layout.array(8, n::WHEEL),
            wheel: Wheel::new(n::WHEEL as usize, connections * n::CALLOUTS as usize),
            buffers: layout.array(n::BUFFER, buffers),
            free: (n::RING..buffers).rev().collect(),
            sent: vec![VecDeque::new(); connections],
            spent: Vec::new(),
            clusters: layout.array(2048, n::RING),
            receive_ring: layout.array(n::RECEIVE_DESCRIPTOR, n::RING),
            receive_buffers: (0..n::RING).collect(),
            transmit_ring: layout.array(n::TRANSMIT_DESCRIPTOR, n::RING),
            commands: layout.array(n::MESSAGE, n::RING),
            events: layout.array(n::MESSAGE, n::RING),
            program_data: layout.array(2048, 2048),
            kernel_data: layout.array(2048, 2048),
            shared: layout.array(1024, 1),
            received: 0,
            transmitted: 0,
            commanded: 0,
            reported: 0,
            copied: 0,
        }
    }

    /// What the layers have done since the last call.
    pub fn take_profile(&mut self) -> Profile {
        std::mem::take(&mut self.profile)
    }

    /// Instructions, whose data accesses are served by the first level but for those that [`Host::touch`] finds.
    pub fn execute(&mut self, layer: Layer, instructions: u64) {
        let tally = &mut self.profile.0[layer as usize];
        tally.instructions += instructions as f64;
        tally.first += instructions as f64 * n::ACCESSES;
    }

    /// The first access to each line of a structure. It is one of the accesses of the instructions around it.
    fn touch(&mut self, layer: Layer, address: u64, bytes: u64) {
        for line in Lines::of(address, bytes) {
            let tally = &mut self.profile.0[layer as usize];
            match self.caches.access(line) {
                Served::First => continue,
                Served::Second => tally.second += 1.0,
                Served::Memory => tally.memory += 1.0,
            }
            tally.first -= 1.0;
        }
    }

    fn socket(&self, connection: usize) -> u64 {
        self.sockets.at(self.places[connection][1])
    }

    fn block(&self, connection: usize) -> u64 {
        self.blocks.at(self.places[connection][2])
    }

    fn tcpcb(&self, connection: usize) -> u64 {
        self.block(connection) + n::INPCB.next_multiple_of(32) * self.scale
    }

    fn timer(&self, timer: usize) -> u64 {
        let (connection, number) = (timer / n::CALLOUTS as usize, timer as u64 % n::CALLOUTS);
        self.tcpcb(connection) + (n::TCPCB + number * n::CALLOUT) * self.scale
    }

    /// A system call finds its connection: descriptor, file, socket.
    fn enter(&mut self, connection: usize) {
        self.touch(Layer::SystemCall, self.files.at(self.places[connection][0]), n::FILE);
        self.touch(Layer::SystemCall, self.socket(connection), n::SOCKET * self.scale);
    }

    fn take_buffer(&mut self, layer: Layer) -> u64 {
        let buffer = self.free.pop().expect("there are buffers for all that sockets may hold");
        self.touch(layer, self.buffers.at(buffer), n::BUFFER_HEADER);
        buffer
    }

    /// The processor reads or writes data in passing.
    fn pass(&mut self, layer: Layer, address: u64, bytes: u64) {
        self.execute(layer, bytes / n::WORD);
        self.touch(layer, address, bytes);
    }

    /// The program writes `bytes` bytes, which go into a buffer for each page.
    pub fn write(&mut self, connection: usize, bytes: u64, data: Data) {
        self.execute(Layer::SystemCall, n::SYSTEM_CALL);
        self.enter(connection);
        let mut left = bytes;
        while left > 0 {
            let bytes = left.min(n::PAGE);
            left -= bytes;
            let buffer = self.take_buffer(Layer::SystemCall);
            self.sent[connection].push_back((buffer, bytes));
            for part in 0..bytes.div_ceil(2048) * u64::from(data.copied) {
                self.copied += 1;
                let bytes = (bytes - 2048 * part).min(2048);
                self.pass(Layer::SystemCall, self.program_data.at(self.copied), bytes);
                self.touch(Layer::SystemCall, self.kernel_data.at(self.copied), bytes);
            }
            self.copied += u64::from(!data.copied);
        }
    }

    /// The program reads `bytes` bytes, which are copied to it, or finds that there are none.
    pub fn read(&mut self, connection: usize, bytes: u64) {
        self.execute(Layer::SystemCall, n::SYSTEM_CALL);
        self.enter(connection);
        if bytes > 0 {
            self.copied += 1;
            self.pass(Layer::SystemCall, self.kernel_data.at(self.copied), bytes);
            self.touch(Layer::SystemCall, self.program_data.at(self.copied), bytes);
        }
    }

    /// TCP sends a segment with `bytes` bytes of data.
    pub fn send_segment(&mut self, connection: usize, bytes: u64, data: Data) {
        self.execute(Layer::Tcp, n::TCP);
        self.touch(Layer::Tcp, self.block(connection), n::INPCB / 2 * self.scale);
        self.touch(Layer::Tcp, self.tcpcb(connection), n::TCPCB * self.scale);
        let buffer = self.take_buffer(Layer::Tcp);
        self.touch(Layer::Tcp, self.buffers.at(buffer) + 64, 64);
        if data.summed && bytes > 0 {
            let memory = if data.copied { self.kernel_data } else { self.program_data };
            self.pass(Layer::Ip, memory.at(self.copied), bytes);
        }
        self.execute(Layer::Ip, n::IP);
        self.touch(Layer::Ip, self.shared.at(0), 256);
        self.execute(Layer::Ethernet, n::IP_AND_ETHERNET - n::IP);
        self.touch(Layer::Ethernet, self.shared.at(0) + 256, 128);
        self.execute(Layer::Driver, n::DRIVER);
        // A descriptor for the headers, and one for the data.
        for _ in 0..1 + u64::from(bytes > 0) {
            self.transmitted += 1;
            self.touch(Layer::Driver, self.transmit_ring.at(self.transmitted), n::TRANSMIT_DESCRIPTOR);
        }
        self.touch(Layer::Driver, self.shared.at(0) + 384, 192);
        self.spent.push(buffer);
    }

    /// A segment of a connection arrives, `bytes` bytes of data in it.
    pub fn receive_segment(&mut self, connection: usize, bytes: u64, data: Data, now: u64) {
        let slot = self.received % n::RING;
        let (cluster, descriptor) = (self.clusters.at(slot), self.receive_ring.at(slot));
        self.received += 1;
        self.caches.overwritten(Lines::of(cluster, n::HEADERS + bytes));
        self.caches.overwritten(Lines::of(descriptor, n::RECEIVE_DESCRIPTOR));
        self.execute(Layer::Driver, n::DRIVER);
        self.interrupt();
        self.touch(Layer::Driver, descriptor, n::RECEIVE_DESCRIPTOR);
        let buffer = self.receive_buffers[slot as usize];
        self.touch(Layer::Driver, self.buffers.at(buffer), n::BUFFER_HEADER);
        self.receive_buffers[slot as usize] = self.take_buffer(Layer::Driver);
        self.execute(Layer::Ethernet, n::IP_AND_ETHERNET - n::IP);
        self.touch(Layer::Ethernet, cluster, n::HEADERS);
        self.execute(Layer::Ip, n::IP);
        self.touch(Layer::Ip, self.shared.at(0), 256);
        if data.summed && bytes > 0 {
            self.pass(Layer::Ip, cluster + n::HEADERS, bytes);
        }
        self.execute(Layer::Tcp, n::TCP);
        self.look_up(connection);
        self.touch(Layer::Tcp, self.block(connection), n::INPCB / 2 * self.scale);
        self.touch(Layer::Tcp, self.tcpcb(connection), n::TCPCB * self.scale);
        self.touch(Layer::Tcp, self.socket(connection), n::SOCKET * self.scale);
        self.set_timer(connection, Timer::Keep, Some(now + n::KEEP_IDLE * 1_000_000), now);
        self.free.push(buffer);
    }

    /// The table's bucket, and the connections before this one in it.
    fn look_up(&mut self, connection: usize) {
        let bucket = self.bucket[connection];
        self.touch(Layer::Tcp, self.buckets.at(bucket), 8);
        let chain = std::mem::take(&mut self.chains[bucket as usize]);
        for other in chain.iter().take_while(|other| **other != connection) {
            self.touch(Layer::Tcp, self.block(*other), 64);
        }
        self.chains[bucket as usize] = chain;
    }

    /// One interrupt: buffers that the NIC has read are free.
    fn interrupt(&mut self) {
        for buffer in std::mem::take(&mut self.spent) {
            self.touch(Layer::Driver, self.buffers.at(buffer), n::BUFFER_HEADER);
            self.free.push(buffer);
        }
    }

    /// The peer has acknowledged `bytes` bytes of the connection's: buffers are free.
    pub fn release(&mut self, layer: Layer, connection: usize, mut bytes: u64) {
        while let Some((buffer, left)) = self.sent[connection].front_mut() {
            let buffer = *buffer;
            if *left > bytes {
                *left -= bytes;
                return;
            }
            bytes -= *left;
            self.sent[connection].pop_front();
            self.touch(layer, self.buffers.at(buffer), n::BUFFER_HEADER);
            self.free.push(buffer);
        }
    }

    /// The program asks which of `open` connections are ready: the kernel looks at each.
    pub fn select(&mut self, open: impl Iterator<Item = usize>) {
        self.execute(Layer::SystemCall, n::SYSTEM_CALL);
        for connection in open {
            self.execute(Layer::SystemCall, n::SELECT);
            self.enter(connection);
        }
    }

    /// A system call that makes or ends a connection: its structures are written.
    pub fn make_or_end(&mut self, connection: usize) {
        self.execute(Layer::SystemCall, n::SYSTEM_CALL);
        self.enter(connection);
        let block = n::INPCB.next_multiple_of(32) + n::TCPCB + n::CALLOUTS * n::CALLOUT;
        self.touch(Layer::Tcp, self.block(connection), block * self.scale);
    }

    /// A timer is set to a time in microseconds, or stopped. Its neighbours in the wheel are touched, too.
    pub fn set_timer(&mut self, connection: usize, timer: Timer, expires: Option<u64>, now: u64) {
        let timer = connection * n::CALLOUTS as usize + timer as usize;
        let bucket = expires.map(|expires| (expires.max(now) / n::TICK) % n::WHEEL);
        self.touch(Layer::Tcp, self.timer(timer), n::CALLOUT * self.scale);
        for neighbour in self.wheel.set(timer, bucket.map(|bucket| bucket as usize)).into_iter().flatten() {
            self.touch(Layer::Tcp, self.timer(neighbour), n::CALLOUT * self.scale);
        }
        if let Some(bucket) = bucket {
            self.touch(Layer::Tcp, self.wheel_heads.at(bucket), 8);
        }
    }

    /// A message to the NIC about a connection that is there.
    pub fn command(&mut self, connection: usize) {
        self.execute(Layer::Bypass, n::BYPASS);
        self.touch(Layer::Bypass, self.socket(connection), n::SOCKET * self.scale);
        self.execute(Layer::Driver, n::DRIVER_MESSAGE);
        self.touch(Layer::Driver, self.commands.at(self.commanded), n::MESSAGE);
        self.touch(Layer::Driver, self.shared.at(0) + 384, 192);
        self.commanded += 1;
    }

    /// A message from the NIC about a connection that is there.
    pub fn event(&mut self, connection: usize) {
        let message = self.events.at(self.reported);
        self.reported += 1;
        self.caches.overwritten(Lines::of(message, n::MESSAGE));
        self.execute(Layer::Driver, n::DRIVER_MESSAGE);
        self.touch(Layer::Driver, message, n::MESSAGE);
        self.execute(Layer::Bypass, n::BYPASS);
        self.touch(Layer::Bypass, self.socket(connection), n::SOCKET * self.scale);
    }
}
