//! Code that agent and NIC share to restore a connection to the kernel: the NIC at a normal restore, the agent after
//! the NIC's death.
#![forbid(unsafe_code)]

mod posted;
mod record;
mod replay;
mod sent;

pub use posted::{Post, gather, pieces, posts_of};
pub use record::{
    Progress, clear_records, empty_memory, image_at_death, pages_of, published, read_image, read_image_with, read_ranges,
    read_record, unpublish, write_image,
};
pub use replay::Replay;
pub use sent::sends_of;
