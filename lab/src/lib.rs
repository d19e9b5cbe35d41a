//! Test beds, loads, measurements and reports.
#![forbid(unsafe_code)]

mod axis;
pub mod bars;
pub mod beside;
pub mod bypass;
mod closed_loop;
pub mod connections;
pub mod container;
pub mod datapath;
pub mod demo;
pub mod echo;
pub mod equations;
pub mod fast_path;
pub mod filter;
pub mod front;
pub mod http;
pub mod lro;
pub mod messages;
pub mod moderation;
pub mod moves;
pub mod ntttcp;
pub mod options;
pub mod page;
pub mod probe;
pub mod recovery;
mod report;
pub mod rmpp;
pub mod rss;
pub mod server;
pub mod small_server;
pub mod soak;
pub mod statistics;
pub mod tail;
pub mod testbed;
pub mod ttcp;
pub mod wan;
pub mod wire;
