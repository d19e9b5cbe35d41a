//! This machine's NUMA nodes, from sysfs, as placement wants them.

use baton_linux::process;
use baton_placement::{Node, Topology};
use std::io;
use std::path::Path;

/// The numbers of a list such as `0-3,8`.
fn list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()?)
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

/// The nodes below a directory such as `/sys/devices/system/node`, with those of their processors that are in `may`. A
/// system without nodes counts as one.
///
/// # Errors
/// If the directory exists but cannot be read.
pub fn read(directory: &Path, may: &[usize]) -> io::Result<Topology> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(single(may)),
        Err(error) => return Err(error),
    };
    let mut nodes = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let Some(number) = name.strip_prefix("node").and_then(|number| number.parse().ok()) else { continue };
        let text = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        let cpus = list(&text("cpulist")).into_iter().filter(|cpu| may.contains(cpu)).collect();
        let distances = text("distance").split_whitespace().filter_map(|distance| distance.parse().ok()).collect();
        let total = text("meminfo").lines().find_map(|line| {
            let (_, kilobytes) = line.split_once("MemTotal:")?;
            kilobytes.split_whitespace().next()?.parse::<u64>().ok()
        });
        nodes.push(Node { number, cpus, megabytes: total.unwrap_or(0) / 1024, distances });
    }
    nodes.sort_by_key(|node| node.number);
    Ok(if nodes.is_empty() { single(may) } else { Topology { nodes } })
}

fn single(may: &[usize]) -> Topology {
    Topology { nodes: vec![Node { number: 0, cpus: may.to_vec(), megabytes: 1, distances: vec![10] }] }
}

/// This machine's nodes, with the processors that this process may use.
///
/// # Errors
/// See [`read`].
pub fn here() -> io::Result<Topology> {
    read(Path::new("/sys/devices/system/node"), &process::allowed_cpus())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read() {
        let root = std::env::temp_dir().join(format!("baton-topology-{}", std::process::id()));
        for (node, cpus, distance, memory) in
            [("node0", "0-1,4\n", "10 21\n", "Node 0 MemTotal:       2048000 kB\n"), ("node2", "2-3\n", "21 10\n", "")]
        {
            let directory = root.join(node);
            std::fs::create_dir_all(&directory).unwrap();
            for (file, text) in [("cpulist", cpus), ("distance", distance), ("meminfo", memory)] {
                std::fs::write(directory.join(file), text).unwrap();
            }
        }
        std::fs::write(root.join("online"), "0,2\n").unwrap();
        let found = read(&root, &[0, 1, 2, 3]);
        std::fs::remove_dir_all(&root).unwrap();
        let node = |number, cpus: &[usize], megabytes, distances: &[u32]| Node {
            number,
            cpus: cpus.to_vec(),
            megabytes,
            distances: distances.to_vec(),
        };
        let wanted = vec![node(0, &[0, 1], 2000, &[10, 21]), node(2, &[2, 3], 0, &[21, 10])];
        assert_eq!(found.unwrap().nodes, wanted);
        assert_eq!(read(Path::new("/nowhere/at/all"), &[5]).unwrap().nodes[0].cpus, [5]);
    }

    #[test]
    fn this_machine_has_processors() {
        let cpus: usize = here().unwrap().nodes.iter().map(|node| node.cpus.len()).sum();
        assert_eq!(cpus, process::allowed_cpus().len());
    }
}
