//! Linux: system calls on sockets, netlink and its families, namespaces and interfaces, processes, descriptors over
//! Unix sockets.

/// Writes a line to standard error, as `eprintln!` does, but waits for nothing. A line that cannot be written is lost:
/// the process that reads the log may have ended or stopped, or its disk may be full, and that must neither end nor
/// block a process of Baton's.
#[macro_export]
macro_rules! report {
    ($($text:tt)*) => {
        $crate::report::line(format_args!($($text)*))
    };
}

pub mod bell;
pub mod buffers;
mod cgroup_socket;
pub mod cgroups;
pub mod conntrack;
pub mod control;
pub mod datagrams;
pub mod device_frames;
pub mod diagnosis;
pub mod ending;
pub mod events;
pub mod executable;
pub mod files;
pub mod firewall;
pub mod foreign;
pub mod frames;
pub mod freeze;
pub mod holders;
pub mod icmp;
pub mod interface;
pub mod namespace;
pub mod netlink;
pub mod packet_ring;
mod partner;
pub mod pcap_filter;
pub mod process;
mod raw_address;
pub mod reading;
pub mod report;
pub mod resolution;
pub mod rights;
pub mod route;
pub mod rtnetlink;
pub mod seccomp;
pub mod service;
pub mod settings;
pub mod socket;
pub mod starter;
pub mod stream;
pub mod tasks;
pub mod tcp_info;
pub mod terminal;
pub mod topology;
pub mod trust;
pub mod xfrm;
