//! What an access of memory costs from each node to each: a chase of pointers that lie in a random order in more memory
//! than caches hold, by a thread that is bound to a processor of the one node, through memory of the other.

use anyhow::{Context, Result, anyhow, ensure};
use baton_linux::events::monotonic_micros;
use baton_linux::{process, topology};
use baton_shm::Region;
use baton_sim::Rng;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a cache line, each of which holds one pointer.
const LINE: usize = 64;
/// Bytes that are chased through, and accesses that are timed; the least of so many runs counts.
const BYTES: usize = 128 << 20;
const ACCESSES: u64 = 1 << 21;
const RUNS: usize = 3;

/// The cost of memory by node.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MemoryCosts {
    /// Nodes that have processors, in the order of rows and columns.
    pub nodes: Vec<usize>,
    /// Nanoseconds of an access from each node (row) to memory of each (column).
    pub nanos: Vec<Vec<f64>>,
    /// The distances that the firmware names for the same (SLIT); None where it names none.
    pub distances: Vec<Vec<Option<u32>>>,
}

/// A processor that this process may use on each node.
fn nodes() -> BTreeMap<usize, usize> {
    let mut nodes = BTreeMap::new();
    for cpu in process::allowed_cpus() {
        nodes.entry(topology::node_of_cpu(cpu).unwrap_or(0)).or_insert(cpu);
    }
    nodes
}

/// The distances from a node, to all nodes in the order of their numbers.
fn distances(text: &str) -> Vec<u32> {
    text.split_whitespace().filter_map(|distance| distance.parse().ok()).collect()
}

/// Makes the first word of each line the number of the next one, so that one way leads through all of them and back to
/// the first (Sattolo's algorithm).
fn link(region: &Region, lines: usize, random: &mut Rng) {
    let word = |line: usize| &region.words(line * LINE, 1)[0];
    (0..lines).for_each(|line| word(line).store(line as u64, Ordering::Relaxed));
    for line in (1..lines).rev() {
        let other = random.below(line as u64) as usize;
        let (one, two) = (word(line).load(Ordering::Relaxed), word(other).load(Ordering::Relaxed));
        word(line).store(two, Ordering::Relaxed);
        word(other).store(one, Ordering::Relaxed);
    }
}

/// Follows `steps` pointers. Returns the line at which it ends.
fn chase(words: &[AtomicU64], mut line: u64, steps: u64) -> u64 {
    for _ in 0..steps {
        line = words[line as usize * (LINE / 8)].load(Ordering::Relaxed);
    }
    line
}

/// Nanoseconds of an access from a processor to memory of a node.
fn cost(cpu: usize, node: usize, several: bool) -> Result<f64> {
    let measured = || -> Result<f64> {
        ensure!(process::pin(0, cpu), "this process may not run on processor {cpu}");
        let region = Region::private(BYTES)?;
        if several {
            region.prefer_node(node).with_context(|| format!("memory of node {node}"))?;
        }
        link(&region, BYTES / LINE, &mut Rng::new(1));
        let (words, mut line, mut least) = (region.words(0, BYTES / 8), 0, u64::MAX);
        for _ in 0..RUNS {
            let began = monotonic_micros();
            line = std::hint::black_box(chase(words, line, ACCESSES));
            least = least.min(monotonic_micros() - began);
        }
        Ok(least as f64 * 1e3 / ACCESSES as f64)
    };
    // A thread of its own: it stays bound.
    std::thread::scope(|scope| scope.spawn(measured).join()).map_err(|_| anyhow!("the thread that measures panicked"))?
}

/// Measures every node against every node; half a second for each pair.
///
/// # Errors
/// If there is no memory, or a node's processors may not be used.
pub fn measure() -> Result<MemoryCosts> {
    let nodes = nodes();
    ensure!(!nodes.is_empty(), "this process may not run on any processor");
    let several = nodes.len() > 1;
    let row = |cpu: usize| nodes.keys().map(|memory| cost(cpu, *memory, several)).collect::<Result<Vec<f64>>>();
    let slit = |node: &usize| {
        let path = format!("/sys/devices/system/node/node{node}/distance");
        let all = distances(&std::fs::read_to_string(path).unwrap_or_default());
        nodes.keys().map(|other| all.get(*other).copied()).collect()
    };
    Ok(MemoryCosts {
        nanos: nodes.values().map(|cpu| row(*cpu)).collect::<Result<_>>()?,
        distances: nodes.keys().map(slit).collect(),
        nodes: nodes.keys().copied().collect(),
    })
}

impl MemoryCosts {
    /// A line for each node.
    pub fn table(&self) -> String {
        let mut text = format!("{:<10}", "from, to");
        self.nodes.iter().for_each(|node| _ = write!(text, "{:>24}", format!("node {node}")));
        for ((node, nanos), distances) in self.nodes.iter().zip(&self.nanos).zip(&self.distances) {
            let _ = write!(text, "\n{:<10}", format!("node {node}"));
            for (nanos, distance) in nanos.iter().zip(distances) {
                let distance = distance.map_or_else(String::new, |distance| format!(" (SLIT {distance})"));
                let _ = write!(text, "{:>24}", format!("{nanos:.1} ns{distance}"));
            }
        }
        if self.nodes.len() == 1 {
            text += "\nThis machine has one node: there is no other memory.";
        }
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_way_leads_through_all_lines() {
        let lines = 1000;
        let region = Region::private(lines * LINE).unwrap();
        link(&region, lines, &mut Rng::new(7));
        let words = region.words(0, lines * LINE / 8);
        let mut seen = vec![false; lines];
        let mut line = 0;
        for _ in 0..lines {
            assert!(!std::mem::replace(&mut seen[line as usize], true));
            line = chase(words, line, 1);
        }
        assert_eq!(line, 0);
    }

    #[test]
    fn costs_stand_beside_the_firmwares_distances() {
        let costs = MemoryCosts {
            nodes: vec![0, 2],
            nanos: vec![vec![80.0, 140.0], vec![150.5, 90.0]],
            distances: vec![vec![Some(10), Some(21)], vec![None, Some(10)]],
        };
        let table = costs.table();
        assert!(
            table.contains("140.0 ns (SLIT 21)") && table.contains("150.5 ns\u{20}") && !table.contains("one node"),
            "{table}"
        );
        assert_eq!(distances("10 21\n"), [10, 21]);
    }

    #[test]
    fn this_machine_has_a_cost_for_each_pair_of_nodes() {
        let costs = measure().unwrap();
        let count = costs.nodes.len();
        assert!(count > 0 && costs.nanos.len() == count && costs.distances.len() == count, "{costs:?}");
        assert!(costs.nanos.iter().all(|row| row.len() == count && row.iter().all(|nanos| *nanos > 0.0)), "{costs:?}");
    }
}
