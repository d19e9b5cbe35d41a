//! The interface between host and NIC: the commands of Figures 4 and 5 of the handoff paper, and the layout of the
//! memory that both sides share. All of it is fixed at compile time; offsets are in bytes.
#![no_std]
#![forbid(unsafe_code)]

pub mod address;
pub mod layout;
pub mod message;
pub mod record;
pub mod resource;

pub use address::{AddressEntry, AddressState};
pub use message::{
    ALREADY_HERE, ANSWER, Cid, Control, ENDED, EXCEEDED, FETCH, FOR_AGENT, HOLD, LOST_QUEUE, MORE, Message, NOT_YET, OF_ALL,
    Operation, RESET_PEER, RestoreCause, add_length, counts_bytes, is_plain_send, join_sends,
};
pub use record::Record;
pub use resource::{Announcement, Resource};
