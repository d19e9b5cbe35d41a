//! Receive → lookup → TCP → transmit: one worker, run to completion, without locks and without types of the operating
//! system, so that the simulator runs it unchanged.
//!
//! A [`Worker`] stands between two devices, the *host* (the kernel's interface) and the *wire*. Frames of connections
//! that it does not own pass through it. It runs TCP for the connections that it owns: it writes received payload into
//! session memory, reads payload to be sent from there, and exchanges commands and events with the program through
//! rings.
#![forbid(unsafe_code)]

mod addresses;
mod backlog;
mod balance;
mod captures;
mod closed;
mod counters;
mod custody;
mod datagrams;
mod delivery;
mod dormant;
mod fragments;
mod frame_ring;
mod gate;
mod growth;
mod held;
mod icmp;
mod listeners;
mod messages;
mod offloaded;
mod partial;
mod peers;
mod posted;
mod resources;
mod send_queue;
mod transmit;
mod worker;

pub use addresses::AddressSettings;
pub use captures::CaptureSettings;
pub use custody::Refusal;
pub use datagrams::{DatagramSettings, DatagramWay};
pub use gate::Gate;
pub use listeners::ListenerSettings;
pub use messages::MessageEndpoint;
pub use peers::{Peers, Registers, crossbar, owner_of_messages};
pub use resources::Limits;
pub use send_queue::{References, SendQueue};
pub use worker::{HostWire, NoKernel, Worker, WorkerOffloads, WorkerSettings, capture, end_capture};
