//! What a recovery takes from record, block and memory of a connection of this agent's.

use crate::connection::{Connection, Exported, Memory, OnNic};
use baton_abi::Record;
use baton_abi::layout::block;
use baton_image::Image;
use baton_linux::events::monotonic_micros;
use baton_linux::socket::Pieces;
use baton_recovery::Progress;
use baton_shm::Region;

pub(crate) use baton_recovery::{read_image, read_image_with, read_ranges, read_record, unpublish, write_image};

fn progress(connection: &Connection) -> Progress {
    let load = |field| connection.block.load(field);
    Progress { flags: load(block::FLAGS), queued: load(block::QUEUED_SEQ), read: load(block::READ_SEQ) }
}

/// Makes the image of a connection at its NIC's death, from the one that was handed off.
pub(crate) fn image_at_death(from: &Exported, on_nic: &OnNic, record: &Record, connection: &Connection) -> Option<Image> {
    let elapsed = monotonic_micros() - from.handed_off_at;
    baton_recovery::image_at_death(&from.image, on_nic.memory().send.1, elapsed, record, &progress(connection))
}

/// Returns the bytes that the program has not read, where the NIC believes that `counted` are left before `data_end`.
pub(crate) fn unread_by_program(connection: &Connection, data_end: u32, counted: u32) -> u32 {
    progress(connection).unread(data_end, counted)
}

/// Returns the memory pieces of an image's unread and unacknowledged bytes.
pub(crate) fn queues<'a>(region: &'a Region, memory: Memory, image: &Image) -> Option<(Pieces<'a>, Pieces<'a>)> {
    let unread = Pieces::of(region, memory.receive, image.read_seq(), image.unread)?;
    let unacknowledged = Pieces::of(region, memory.send, image.snd_una, image.send_queue())?;
    Some((unread, unacknowledged))
}
