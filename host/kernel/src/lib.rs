//! The Linux kernel's side of a move: exporting an established connection and importing it again on the same descriptor, routes
//! and neighbours, namespaces and interfaces, descriptors over Unix sockets.

pub mod bell;
pub mod conntrack;
pub mod control;
pub mod diagnosis;
pub mod events;
pub mod examine;
pub mod export;
pub mod files;
pub mod firewall;
pub mod freeze;
pub mod icmp;
pub mod import;
pub mod interface;
pub mod namespace;
pub mod netlink;
pub mod process;
pub mod rights;
pub mod route;
pub mod rtnetlink;
pub mod shell;
pub mod socket;
pub mod tcp_info;
pub mod topology;
pub mod unenforced;
pub mod xfrm;
