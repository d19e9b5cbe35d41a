//! The placement of a NIC's workers, their queues and their memory on a machine of several NUMA nodes: the device's
//! node first, then balanced.
//!
//! A worker uses three kinds of memory: the device's rings, its connections' state, and its programs' buffers. The
//! first two belong to its own node, so it is best placed near the device. The third is the program's, so programs
//! learn where their connections are and can be placed there, which "Mainstream NUMA and the TCP/IP stack", part III,
//! leaves out. No I/O: the topology comes in as an argument.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use serde::{Deserialize, Serialize};

/// A NUMA node: processors and memory close to each other.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The system's number of the node.
    pub number: usize,
    /// The processors of the node that may be used.
    pub cpus: Vec<usize>,
    /// The node's memory in MB; 0 for none.
    pub megabytes: u64,
    /// Cost of an access from this node to each node of the machine, in their order; 10 is the cost of local memory
    /// (ACPI's SLIT).
    pub distances: Vec<u32>,
}

/// The nodes of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// The nodes.
    #[serde(rename = "node")]
    pub nodes: Vec<Node>,
}

/// The placement of one worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct WorkerPlace {
    /// The processor that it is bound to.
    pub cpu: usize,
    /// The processor's node.
    pub node: usize,
    /// The node of its queues' and its connections' memory.
    pub memory: usize,
    /// The reason, for people.
    pub why: String,
}

/// The placement of all workers, and of programs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Placement {
    /// The placement of each worker.
    pub workers: Vec<WorkerPlace>,
    /// Processors for programs, nearest to the workers first. The workers' own are left out unless there are no others.
    pub programs: Vec<usize>,
}

/// The reason why there is no placement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unplaced {
    /// No processor may be used.
    NoProcessors,
    /// The device's node is not in the topology.
    NoNode(usize),
}

impl core::fmt::Display for Unplaced {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Unplaced::NoProcessors => f.write_str("there is no processor that may be used"),
            Unplaced::NoNode(node) => write!(f, "there is no node {node}"),
        }
    }
}

impl core::error::Error for Unplaced {}

/// Cost of an access from a node to itself, and to a node of unknown distance.
const NEAR: u32 = 10;
const FAR: u32 = 20;

impl Topology {
    /// Cost of an access from one node (by index) to another.
    fn distance(&self, from: usize, to: usize) -> u32 {
        self.nodes[from].distances.get(to).copied().unwrap_or(if from == to { NEAR } else { FAR })
    }

    /// Cost of an access each way. Requests go one way, data the other, and the two may differ.
    fn round_trip(&self, a: usize, b: usize) -> u32 {
        self.distance(a, b) + self.distance(b, a)
    }

    /// Places `workers` workers for a device on the node numbered `device`, if that is known. On each node half of the
    /// processors, rounded up, is left to programs, as long as another node has room.
    ///
    /// # Errors
    /// [`Unplaced`], with the reason.
    pub fn place(&self, workers: usize, device: Option<usize>) -> Result<Placement, Unplaced> {
        if self.nodes.iter().all(|node| node.cpus.is_empty()) {
            return Err(Unplaced::NoProcessors);
        }
        let device = match device {
            Some(number) => Some(self.nodes.iter().position(|node| node.number == number).ok_or(Unplaced::NoNode(number))?),
            None => None,
        };
        let mut taken: Vec<usize> = self.nodes.iter().map(|_| 0).collect();
        let mut places: Vec<WorkerPlace> = Vec::new();
        for _ in 0..workers.max(1) {
            let (at, why) = self.next(&taken, device);
            let node = &self.nodes[at];
            let cpu = node.cpus[taken[at] % node.cpus.len()];
            taken[at] += 1;
            let (memory, where_memory) = self.memory_near(at);
            places.push(WorkerPlace { cpu, node: node.number, memory, why: format!("{why}{where_memory}") });
        }
        let programs = self.programs(&places);
        Ok(Placement { workers: places, programs })
    }

    /// Number of workers that a node takes before others have to: half of its processors, rounded down, but at least
    /// one if it has any.
    fn share(&self, at: usize) -> usize {
        (self.nodes[at].cpus.len() / 2).max(usize::from(!self.nodes[at].cpus.is_empty()))
    }

    /// The node of the next worker, and the reason.
    fn next(&self, taken: &[usize], device: Option<usize>) -> (usize, String) {
        let with_processors = || (0..self.nodes.len()).filter(|at| !self.nodes[*at].cpus.is_empty());
        let number = |at: usize| self.nodes[at].number;
        if let Some(device) = device.filter(|device| taken[*device] < self.share(*device)) {
            return (device, format!("node {} is the device's", number(device)));
        }
        let free: Vec<usize> = with_processors().filter(|at| taken[*at] < self.share(*at)).collect();
        // Workers per thousand processors with one worker more; then the distance to the device.
        let fullness = |at: usize| (taken[at] + 1) * 1000 / self.nodes[at].cpus.len();
        let far = |at: usize| device.map_or(0, |device| self.round_trip(device, at));
        if let Some(nearest) = free.iter().map(|at| far(*at)).min() {
            let same = free.iter().copied().filter(|at| far(*at) == nearest);
            if let Some(at) = same.min_by_key(|at| (fullness(*at), *at)) {
                let why = match device {
                    Some(device) if self.nodes[device].cpus.is_empty() => {
                        format!("node {} is nearest to the device's node {}, which has no processors", number(at), number(device))
                    }
                    Some(device) => format!(
                        "node {} is full with {}, and node {} is the nearest with room (distance {})",
                        number(device),
                        taken[device],
                        number(at),
                        nearest / 2
                    ),
                    None => {
                        format!("the device's node is not known, and node {} has fewest workers for its processors", number(at))
                    }
                };
                return (at, why);
            }
        }
        // More workers than half of the machine's processors: the programs' half is used, evenly over the nodes.
        let at = with_processors().min_by_key(|at| (fullness(*at), far(*at), *at)).unwrap_or(0);
        let shared = if taken[at] >= self.nodes[at].cpus.len() { ", and shares a processor" } else { "" };
        (at, format!("every node has its share, and node {} is the least full{shared}", number(at)))
    }

    /// The node whose memory a worker on node `at` uses, and the reason if it is another node.
    fn memory_near(&self, at: usize) -> (usize, String) {
        if self.nodes[at].megabytes > 0 {
            return (self.nodes[at].number, String::new());
        }
        let with_memory = (0..self.nodes.len()).filter(|other| self.nodes[*other].megabytes > 0);
        match with_memory.min_by_key(|other| (self.round_trip(at, *other), *other)) {
            Some(other) => {
                let number = self.nodes[other].number;
                (number, format!("; it has no memory, and node {number} is the nearest that has"))
            }
            None => (self.nodes[at].number, String::new()),
        }
    }

    /// Processors for programs, nearest to the workers first.
    fn programs(&self, workers: &[WorkerPlace]) -> Vec<usize> {
        let position = |number: usize| self.nodes.iter().position(|node| node.number == number).unwrap_or(0);
        let nearest = |at: usize| workers.iter().map(|place| self.round_trip(at, position(place.node))).min().unwrap_or(0);
        let mut nodes: Vec<usize> = (0..self.nodes.len()).collect();
        nodes.sort_by_key(|at| (nearest(*at), *at));
        let all = || nodes.iter().flat_map(|at| self.nodes[*at].cpus.iter().copied());
        let others: Vec<usize> = all().filter(|cpu| workers.iter().all(|place| place.cpu != *cpu)).collect();
        if others.is_empty() { all().collect() } else { others }
    }

    /// Processors near a worker's, for the programs of its connections. The workers' own are left out unless there are
    /// no others.
    pub fn near(&self, placement: &Placement, worker: usize) -> Vec<usize> {
        let Some(place) = placement.workers.get(worker) else { return Vec::new() };
        let Some(node) = self.nodes.iter().find(|node| node.number == place.node) else { return Vec::new() };
        let free: Vec<usize> =
            node.cpus.iter().copied().filter(|cpu| placement.workers.iter().all(|other| other.cpu != *cpu)).collect();
        if free.is_empty() { placement.programs.clone() } else { free }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;
    use proptest::prelude::*;

    /// A machine of `nodes` nodes with `cpus` processors each, numbered one after the other, with the distances that
    /// `distance` gives.
    fn machine(nodes: usize, cpus: usize, distance: impl Fn(usize, usize) -> u32) -> Topology {
        let node = |number: usize| Node {
            number,
            cpus: (number * cpus..(number + 1) * cpus).collect(),
            megabytes: 1000,
            distances: (0..nodes).map(|other| distance(number, other)).collect(),
        };
        Topology { nodes: (0..nodes).map(node).collect() }
    }

    fn flat(nodes: usize, cpus: usize) -> Topology {
        machine(nodes, cpus, |a, b| if a == b { 10 } else { 21 })
    }

    /// Nodes in a ring: the cost grows with the distance around it.
    fn ring(nodes: usize, cpus: usize) -> Topology {
        machine(nodes, cpus, |a, b| {
            let around = a.abs_diff(b).min(nodes - a.abs_diff(b)) as u32;
            10 + 6 * around
        })
    }

    fn nodes_of(placement: &Placement) -> Vec<usize> {
        placement.workers.iter().map(|place| place.node).collect()
    }

    #[test]
    fn the_devices_node_comes_first() {
        for nodes in [2, 4, 8] {
            for device in 0..nodes {
                let placement = flat(nodes, 8).place(4, Some(device)).unwrap();
                assert_eq!(nodes_of(&placement), [device; 4], "{nodes} nodes");
                assert!(placement.workers.iter().all(|place| place.memory == device && place.why.contains("the device's")));
                let first = &placement.programs[..4];
                assert!(first.iter().all(|cpu| cpu / 8 == device), "programs have the rest of that node first");
            }
        }
    }

    #[test]
    fn then_the_nearest_then_balanced() {
        // Half of the device's node, half of its two neighbours' in turn, then the two beyond, then the last.
        let placement = ring(6, 4).place(12, Some(2)).unwrap();
        assert_eq!(nodes_of(&placement), [2, 2, 1, 3, 1, 3, 0, 4, 0, 4, 5, 5]);
        let why = &placement.workers[2].why;
        assert!(why.contains("node 2 is full with 2") && why.contains("distance 16"), "{why}");
        // More than half of all processors: the programs' half is used evenly.
        let crowded = ring(6, 4).place(24, Some(2)).unwrap();
        let mut cpus: Vec<usize> = crowded.workers.iter().map(|place| place.cpu).collect();
        cpus.sort_unstable();
        assert_eq!(cpus, (0..24).collect::<Vec<_>>(), "each processor once");
        assert_eq!(crowded.programs.len(), 24, "programs share all");
    }

    #[test]
    fn distances_may_differ_by_direction() {
        // Both other nodes are equally far from 0, but the way back from 1 costs more.
        let mut lopsided = flat(3, 2);
        lopsided.nodes[1].distances[0] = 40;
        assert_eq!(nodes_of(&lopsided.place(2, Some(0)).unwrap()), [0, 2]);
    }

    #[test]
    fn without_a_known_device_workers_are_spread() {
        let placement = flat(4, 4).place(4, None).unwrap();
        assert_eq!(nodes_of(&placement), [0, 1, 2, 3]);
        let mut uneven = flat(2, 4);
        uneven.nodes[1].cpus = (4..16).collect();
        assert_eq!(nodes_of(&uneven.place(4, None).unwrap()), [1, 1, 0, 1], "by their processors");
    }

    #[test]
    fn a_device_on_a_node_without_processors_or_memory() {
        let mut machine = ring(4, 2);
        machine.nodes[0].cpus.clear();
        machine.nodes[3].megabytes = 0;
        let placement = machine.place(2, Some(0)).unwrap();
        assert_eq!(nodes_of(&placement), [1, 3]);
        assert!(placement.workers[0].why.contains("has no processors"));
        assert_eq!(placement.workers[1].memory, 0, "{}", placement.workers[1].why);
        assert!(placement.workers[1].why.contains("has no memory"));
    }

    #[test]
    fn what_cannot_be_placed_is_an_error() {
        assert_eq!(Topology::default().place(1, None), Err(Unplaced::NoProcessors));
        assert_eq!(flat(2, 2).place(1, Some(7)), Err(Unplaced::NoNode(7)));
        assert!(Unplaced::NoNode(7).to_string().contains("node 7"));
        // One processor does everything.
        let one = flat(1, 1).place(3, Some(0)).unwrap();
        assert_eq!((nodes_of(&one), one.programs), (vec![0; 3], vec![0]));
        assert!(one.workers[2].why.contains("shares a processor"));
    }

    proptest! {
        #[test]
        fn no_node_is_fuller_than_it_must_be(
            sizes in proptest::collection::vec(0usize..9, 1..9), workers in 1usize..20, device in 0usize..9, seed in any::<u32>(),
        ) {
            let mut first = 0;
            let nodes = sizes.iter().enumerate().map(|(number, size)| {
                first += size;
                let distances = (0..sizes.len()).map(|other| if other == number { 10 } else { 11 + (seed >> (3 * other + number) % 29) % 40 });
                Node { number, cpus: (first - size..first).collect(), megabytes: 1, distances: distances.collect() }
            });
            let topology = Topology { nodes: nodes.collect() };
            let device = Some(device).filter(|device| *device < sizes.len());
            match topology.place(workers, device) {
                Err(error) => prop_assert!(error == Unplaced::NoProcessors && sizes.iter().all(|size| *size == 0)),
                Ok(placement) => {
                    let total: usize = sizes.iter().sum();
                    let mut used: Vec<usize> = placement.workers.iter().map(|place| place.cpu).collect();
                    used.sort_unstable();
                    used.dedup();
                    prop_assert_eq!(used.len(), workers.min(total), "no processor twice before all are used");
                    prop_assert!(!placement.programs.is_empty());
                    if workers < total {
                        prop_assert!(placement.programs.iter().all(|cpu| !used.contains(cpu)));
                    }
                }
            }
        }
    }
}
