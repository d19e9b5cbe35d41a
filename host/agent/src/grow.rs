//! More memory for a connection on the NIC. It rests for as long as its bytes are copied: the program is kept out, what comes is held.
//! Until it goes on both memories hold the same, so that whoever recovers it may use either.

use crate::connection::{Connection, Memory, Stage};
use crate::ground::Ground;
use crate::journal;
use crate::memory;
use crate::recovery::{read_ranges, read_record};
use crate::session::OpenSession;
use crate::step::Step;
use baton_abi::layout::{Owner, block, nic, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_handoff::examine::Stay;
use baton_image::{Image, MAX_ENCODED};
use baton_linux::events::monotonic_micros;
use baton_shm::{Circle, Region};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Microseconds that a program may take to leave an operation on the connection.
const QUIESCE_LIMIT: u64 = 1_000;
/// Bytes copied at a time.
const PIECE: usize = 1 << 16;

/// Gives a connection more memory, if there is any: `receive` and `send` are what it could use, in bytes, 0 for no more.
///
/// # Errors
/// [`Stay::NicGone`] if the NIC has died, or must not go on.
pub(crate) fn grow(
    ground: &mut Ground<'_>,
    session: &mut OpenSession,
    connection: &mut Connection,
    receive: u32,
    send: u32,
) -> Result<(), Stay> {
    let Stage::Nic(on_nic) = &connection.stage else { return Ok(()) };
    if on_nic.leaving.is_some() {
        return Ok(());
    }
    let (cid, old, limits) = (on_nic.cid, on_nic.memory, on_nic.limits);
    let larger_receive = memory::enlarge(&mut session.heap, old.receive.1, receive, limits.receive);
    let larger_send = memory::enlarge(&mut session.heap, old.send.1, send, limits.send);
    let taken = [larger_receive, larger_send];
    if taken == [None; 2] {
        return Ok(());
    }
    let new = Memory { receive: larger_receive.unwrap_or(old.receive), send: larger_send.unwrap_or(old.send) };
    let give_all = |session: &mut OpenSession, blocks: [Option<(u32, u32)>; 2]| {
        blocks.into_iter().flatten().for_each(|block| memory::give_block(session, block));
    };
    if !keep_program_out(connection) {
        // It will ask again.
        give_all(session, taken);
        connection.block.set_owner(Owner::Nic);
        return Ok(());
    }
    if let Err(stay) = ground.nic.command(Message::new(Operation::NicRestore, cid, 0, 0)) {
        give_all(session, taken);
        if matches!(stay, Stay::NicGone) {
            return Err(stay);
        }
        // It has just ended.
        connection.block.set_owner(Owner::Nic);
        return Ok(());
    }
    let base = nic::slot(cid.slot());
    let mut bytes = [0u8; MAX_ENCODED];
    let _ = ground.nic_memory.read(base + slot::IMAGE, &mut bytes);
    // A NIC that writes such images, or refuses what follows, must not go on.
    let image = Image::decode(&bytes).map_err(|_| Stay::NicGone)?;
    let next = cid.next_generation();
    copy(ground.nic_memory, base, &session.memory, &image, old, new).ok_or(Stay::NicGone)?;
    journal::grown(ground.nic_memory, cid.slot(), next, new);
    let Stage::Nic(on_nic) = &mut connection.stage else { return Ok(()) };
    (on_nic.cid, on_nic.memory) = (next, new);
    rename(ground, cid, next);
    write_down(ground.nic_memory, base, connection, &image, new, next);
    ground.passed(Step::Grown);
    // What the NIC says under the new name may be heard before this is over.
    session.note_move(connection.block.number());
    ground.nic.control(Control::Resume, cid, next.0).map_err(|_| Stay::NicGone)?;
    connection.block.set_owner(Owner::Nic);
    session.announce_move(connection.block.number());
    let replaced = [larger_receive.map(|_| old.receive), larger_send.map(|_| old.send)];
    give_all(session, replaced);
    Ok(())
}

/// Waits for as long as a program copies what it sends or receives, and not for one that does not run.
fn keep_program_out(connection: &Connection) -> bool {
    if connection.block.keep_out() {
        return true;
    }
    let end = monotonic_micros() + QUIESCE_LIMIT;
    while monotonic_micros() < end {
        if connection.block.is_left() {
            return true;
        }
        std::thread::yield_now();
    }
    false
}

/// What the NIC has said of the connection under its old name it has said of the new one.
fn rename(ground: &mut Ground<'_>, old: Cid, new: Cid) {
    ground.nic.inbox.iter_mut().filter(|message| message.cid == old).for_each(|message| message.cid = new);
}

/// Copies all that a resting connection holds: unread bytes, those behind holes, those that are not acknowledged.
fn copy(nic_memory: &Region, base: usize, region: &Arc<Region>, image: &Image, old: Memory, new: Memory) -> Option<()> {
    let circle = |(offset, size)| region.circle(offset, size);
    if new.receive != old.receive {
        let (from, to) = (circle(old.receive)?, circle(new.receive)?);
        copy_bytes(&from, &to, image.read_seq(), image.unread);
        let record = read_record(nic_memory, base);
        for (left, right) in record.map(|record| read_ranges(nic_memory, base, &record)).unwrap_or_default() {
            copy_bytes(&from, &to, left, right.wrapping_sub(left).min(from.length()));
        }
    }
    if new.send != old.send {
        copy_bytes(&circle(old.send)?, &circle(new.send)?, image.snd_una, image.send_queue());
    }
    Some(())
}

fn copy_bytes(from: &Circle, to: &Circle, mut seq: u32, length: u32) {
    let mut piece = [0u8; PIECE];
    let mut left = length as usize;
    while left > 0 {
        let part = &mut piece[..left.min(PIECE)];
        from.read(seq, part);
        to.write(seq, part);
        seq = seq.wrapping_add(part.len() as u32);
        left -= part.len();
    }
}

/// Tells the NIC and the program where the connection's memory is now, and how far it has come.
fn write_down(nic_memory: &Region, base: usize, connection: &mut Connection, image: &Image, memory: Memory, cid: Cid) {
    let b = &connection.block;
    for (at, value) in [memory.receive.0, memory.receive.1, memory.send.0, memory.send.1].into_iter().enumerate() {
        nic_memory.word32(base + slot::PARAMETERS + 4 + 4 * at).store(value, Ordering::Release);
    }
    nic_memory.word32(base + slot::READ).store(b.load(block::READ_SEQ), Ordering::Release);
    let fin = u32::from(image.state.fin_received());
    b.store(block::CID, cid.0);
    b.store(block::RECEIVE_BASE, memory.receive.0);
    b.store(block::RECEIVE_SIZE, memory.receive.1);
    b.store(block::SEND_BASE, memory.send.0);
    b.store(block::SEND_SIZE, memory.send.1);
    b.store(block::RECEIVE_SEQ, image.rcv_nxt.wrapping_sub(fin));
    b.store(block::ACKED_SEQ, if image.state.fin_acknowledged() { image.snd_end } else { image.snd_una });
    b.store(block::QUEUED_SEQ, image.snd_end);
    b.store(block::FLAGS, b.load(block::FLAGS) & !3 | fin | u32::from(image.state.fin_queued()) << 1);
    connection.moves += 1;
    connection.block.store(block::MOVES, connection.moves);
}
