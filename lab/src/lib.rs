//! Loads, measurements and their reports.
#![forbid(unsafe_code)]

pub mod bars;
pub mod bypass;
mod callgrind;
mod closed_loop;
pub mod compare;
pub mod connections;
pub mod datapath;
pub mod echo;
pub mod equations;
pub mod fast_path;
pub mod filter;
pub mod front;
pub mod heat;
pub mod lro;
pub mod memory_cost;
pub mod messages;
pub mod moderation;
pub mod moves;
pub mod ntttcp;
pub mod options;
pub mod page;
pub mod papers;
pub mod planner;
pub mod processor_trace;
pub mod recovery;
pub mod rss;
pub mod smoltcp_server;
pub mod soak;
pub mod source;
mod status;
pub mod tail;
pub mod ttcp;
pub mod wan;
pub mod web_load;
pub mod web_mix;
pub mod wire;
