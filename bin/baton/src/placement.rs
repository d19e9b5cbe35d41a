//! Placement of the NIC's workers, and of programs near them.

use anyhow::{Context, Result};
use baton_client::tool::Tool;
use baton_linux::{process, rtnetlink, topology};
use baton_placement::Topology;
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct PlacementArguments {
    /// Print where workers, their queues and their memory belong on this machine, and why.
    #[arg(long)]
    pub explain_placement: bool,
    /// Number of workers.
    #[arg(long, default_value_t = 1, requires = "explain_placement", value_parser = clap::value_parser!(u16).range(1..=16))]
    workers: u16,
    /// The interface whose device they serve. Its node is unknown if it has no device, like a TAP or a veth.
    #[arg(long, value_name = "NAME", requires = "explain_placement", conflicts_with = "device_node")]
    interface: Option<String>,
    /// The node of the device, instead of --interface.
    #[arg(long, value_name = "NODE", requires = "explain_placement")]
    device_node: Option<usize>,
    /// A file that describes another machine: for each node `[[node]]` with `number`, `cpus`, `megabytes` and
    /// `distances`.
    #[arg(long, value_name = "FILE", requires = "explain_placement")]
    topology: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long = "placement-json", requires = "explain_placement")]
    json: bool,
}

fn topology_of(file: Option<&Path>) -> Result<Topology> {
    let Some(path) = file else { return crate::topology::here().context("reading this machine's nodes") };
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
    toml::from_str(&text).with_context(|| path.display().to_string())
}

/// Prints the placement.
pub fn explain(arguments: &PlacementArguments) -> Result<bool> {
    let topology = topology_of(arguments.topology.as_deref())?;
    if let Some(name) = &arguments.interface {
        let netlink = rtnetlink::open().context("asking the kernel for the device")?;
        rtnetlink::link(&netlink, name).with_context(|| format!("the interface {name} (`ip link` lists those there are)"))?;
    }
    let device = arguments.device_node.or_else(|| topology::node_of_interface(arguments.interface.as_deref()?));
    let placement = topology.place(arguments.workers.into(), device)?;
    if arguments.json {
        println!("{}", serde_json::json!({ "topology": topology, "placement": placement }));
        return Ok(true);
    }
    for node in &topology.nodes {
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        println!(
            "node {}: {} processors ({}), {} MB, distances {}",
            node.number,
            node.cpus.len(),
            ranges(&node.cpus),
            node.megabytes,
            distances.join(" ")
        );
    }
    println!();
    for (number, place) in placement.workers.iter().enumerate() {
        println!("worker {number}: processor {}, memory of node {}: {}", place.cpu, place.memory, place.why);
    }
    for (number, _) in placement.workers.iter().enumerate() {
        println!("programs of worker {number}'s connections: processors {}", ranges(&topology.near(&placement, number)));
    }
    Ok(true)
}

/// The numbers as ranges, as in `0-3,8`.
fn ranges(cpus: &[usize]) -> String {
    let mut cpus = cpus.to_vec();
    cpus.sort_unstable();
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for cpu in cpus {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => parts.push((cpu, cpu)),
        }
    }
    let text = |(first, last): (usize, usize)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    parts.into_iter().map(text).collect::<Vec<_>>().join(",")
}

/// Where a program's threads run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Where {
    /// On any processor.
    Anywhere,
    /// On processors near the NIC's, but not on those that it uses.
    NearNic,
}

/// Processors for this many workers. None if some would have to share one, or programs near them would have no other.
pub fn own_cores(workers: usize) -> Result<Option<Vec<usize>>> {
    let topology = crate::topology::here().context("reading this machine's nodes")?;
    let placement = topology.place(workers, None)?;
    let cores: Vec<usize> = placement.workers.iter().map(|place| place.cpu).collect();
    let shared = cores.iter().enumerate().any(|(at, core)| cores[..at].contains(core));
    let others = topology.near(&placement, 0).iter().any(|cpu| !cores.contains(cpu));
    Ok((others && !shared).then_some(cores))
}

/// Binds this process, and what it starts, to processors near those on which the NICs of a running Baton were last
/// seen.
pub fn go_near(socket: &Path) -> Result<()> {
    let nics = Tool::connect(socket)?.statistics()?.nics;
    let topology = crate::topology::here().context("reading this machine's nodes")?;
    let of_nic = |nic: u32| {
        process::last_cpus(nic, baton_control::handles_frames)
            .with_context(|| format!("the processors of the NIC, process {nic}"))
    };
    let used = nics.into_iter().map(|nic| of_nic(nic.process)).collect::<Result<Vec<_>>>()?.concat();
    let of_node = |node: &&baton_placement::Node| node.cpus.iter().any(|cpu| used.contains(cpu));
    let near: Vec<usize> = topology.nodes.iter().filter(of_node).flat_map(|node| node.cpus.iter().copied()).collect();
    let free: Vec<usize> = near.iter().copied().filter(|cpu| !used.contains(cpu)).collect();
    process::pin_to(if free.is_empty() { &near } else { &free });
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn processors_are_written_as_the_system_does() {
        assert_eq!(super::ranges(&[3, 0, 1, 7, 2, 9]), "0-3,7,9");
        assert_eq!(super::ranges(&[]), "");
    }
}
