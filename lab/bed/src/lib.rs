//! Test beds of network namespaces, servers and clients on them, and the demonstration.
#![forbid(unsafe_code)]

pub mod axis;
pub mod clients;
pub mod container;
pub mod demo;
pub mod http;
pub mod probe;
mod report;
pub mod server;
pub mod small_server;
pub mod statistics;
pub mod temporary;
pub mod testbed;
