//! NUMA nodes of processors and interfaces, from sysfs.

use std::path::Path;

/// The NUMA node of a processor. None if the system does not know it.
pub fn node_of_cpu(cpu: usize) -> Option<usize> {
    let entries = std::fs::read_dir(format!("/sys/devices/system/cpu/cpu{cpu}")).ok()?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("node")?.parse().ok()).next()
}

/// The NUMA node of a network interface's device. None if it has none, or the system does not know it.
pub fn node_of_interface(name: &str) -> Option<usize> {
    let text = std::fs::read_to_string(Path::new("/sys/class/net").join(name).join("device/numa_node")).ok()?;
    // -1 means that the node is not known.
    text.trim().parse().ok()
}
