//! The NIC process: workers on cores of their own, without capabilities, controlled by the agent.
#![forbid(unsafe_code)]

mod company;
mod copy;
mod heap;
pub mod host_tcp;
mod key;
mod line;
mod nic;
pub mod owner;
mod rest;
mod rules;
mod sandbox;

pub use nic::{handles_frames, run};
