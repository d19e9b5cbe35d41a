//! A move to the NIC, step by step: reserve, mirror, (wait until the copy covers what the kernel holds out of order), quiesce, steal,
//! read, purge, hand off. Each step that fails is undone by those before it.

use crate::back::hand_to_kernel;
use crate::changes::UNKNOWN;
use crate::connection::{Asker, Connection, Memory, OnNic, Stage};
use crate::ground::Ground;
use crate::journal::{self, Entry, Phase};
use crate::memory::{self, Limits};
use crate::session::OpenSession;
use crate::step::Step;
use crate::way::Way;
use baton_abi::layout::{Owner, block, nic, slot};
use baton_abi::{Cid, Message, Operation};
use baton_handoff::examine::{self, Stay};
use baton_handoff::export::Exporter;
use baton_handoff::import::Importer;
use baton_handoff::shell::{self, Saved};
use baton_handoff::unenforced;
use baton_image::{Image, MAX_ENCODED};
use baton_linux::events::monotonic_micros;
use baton_linux::socket::{self, Pieces};
use baton_linux::tcp_info::{OPTION_SACK, TcpInfo};
use baton_linux::{conntrack, diagnosis};
use baton_shm::Region;
use baton_wire::Flow;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

/// Microseconds of mirroring after which the kernel is asked what it holds out of order.
pub(crate) const QUIET: u64 = 5_000;
const SOL_SOCKET: i32 = 1;
const SO_MEMINFO: i32 = 55;

/// Reserves a slot and lets the NIC copy the connection's frames.
pub(crate) fn begin(ground: &mut Ground<'_>, connection: &mut Connection, askers: Vec<Asker>) -> Result<(), Stay> {
    let info = examine::examine(connection.fd()?)?;
    unenforced::check(connection.fd()?)?;
    if connection.unproved == Some(UNKNOWN) {
        connection.unproved = Some((info.bytes_acked, info.bytes_received));
    }
    if let Some((acked, received)) = connection.unproved {
        // What comes in shows that it may; what is acknowledged, that it may go out, too.
        let passes = info.bytes_acked != acked || info.bytes_received != received && info.retransmits == 0;
        if !passes {
            return Err(Stay::Unproved);
        }
        connection.unproved = None;
    }
    if connection.inherited && ground.others_hold(connection) {
        return Err(Stay::Shared);
    }
    if diagnosis::has_md5_key(ground.diagnosis, &connection.flow).unwrap_or(false) {
        return Err(Stay::Signed);
    }
    if conntrack::is_translated(&connection.flow).unwrap_or(false) {
        return Err(Stay::Translated);
    }
    let way = ground.way_of(connection)?;
    let cid = ground.nic.take_slot().ok_or(Stay::NoRoom)?;
    let base = nic::slot(cid.slot());
    let _ = ground.nic_memory.write(base + slot::FLOW, &connection.flow.to_bytes());
    ground.nic_memory.word32(base + slot::COVERED).store(0, Ordering::Release);
    if let Err(stay) = ground.mirror(cid, &connection.flow, &way.path) {
        ground.nic.give_slot(cid);
        return Err(stay);
    }
    ground.passed(Step::Mirrored);
    // Its segments will bypass the host's connection tracker.
    let _ = conntrack::be_liberal(&connection.flow);
    connection.stage = Stage::Mirroring { since: monotonic_micros(), cid, askers, asked: false, quiescing: None };
    Ok(())
}

/// Whether the NIC's copy covers everything that the kernel may hold out of order.
pub(crate) fn covered(nic_memory: &Region, connection: &Connection, cid: Cid) -> bool {
    let Ok(fd) = connection.fd() else { return false };
    let Ok(info) = TcpInfo::read(fd) else { return false };
    // Nothing came out of order since the socket was (re)connected, or nothing that came could have been SACKed.
    if info.options & OPTION_SACK == 0 || info.rcv_ooopack == 0 {
        return true;
    }
    // Receive memory that is not the receive queue's is the out-of-order queue's.
    let mut memory = [0u8; 36];
    let unread = socket::queue_bytes(fd, socket::SIOCINQ).unwrap_or(u32::MAX);
    if unread == 0 && socket::get_bytes(fd, SOL_SOCKET, SO_MEMINFO, &mut memory).is_ok() && memory[..4] == [0; 4] {
        return true;
    }
    nic_memory.word32(nic::slot(cid.slot()) + slot::COVERED).load(Ordering::Acquire) == 1
}

/// Calls a move off before the steal.
pub(crate) fn call_off(ground: &mut Ground<'_>, connection: &mut Connection, cid: Cid) {
    ground.cancel(cid, &connection.flow, false);
    ground.nic.give_slot(cid);
    let stage = std::mem::replace(&mut connection.stage, Stage::Kernel);
    if matches!(stage, Stage::Mirroring { quiescing: Some(_), .. }) {
        connection.block.set_owner(Owner::Kernel);
    }
}

/// From the steal to the handoff: the connection's blackout. The program is kept out.
pub(crate) fn complete(
    ground: &mut Ground<'_>,
    session: &mut OpenSession,
    session_number: u32,
    connection: &mut Connection,
    cid: Cid,
) -> Result<(), Stay> {
    // The firewall may have changed since the move began.
    let way = if connection.unproved.is_some() { Err(Stay::Unproved) } else { ground.way_of(connection) };
    let way = match way {
        Ok(way) => way,
        Err(stay) => {
            call_off(ground, connection, cid);
            connection.block.set_owner(Owner::Kernel);
            return Err(stay);
        }
    };
    // The program may have done so since the move began.
    if let Err(stay) = connection.fd().and_then(|fd| examine::check_receiving(fd).and_then(|()| unenforced::check(fd))) {
        call_off(ground, connection, cid);
        connection.block.set_owner(Owner::Kernel);
        return Err(stay);
    }
    ground.passed(Step::Quiesced);
    connection.moves += 1;
    let moved = steal_and_hand_off(ground, session, session_number, connection, cid, way);
    let result = match moved {
        Ok(on_nic) => {
            connection.stage = Stage::Nic(Box::new(on_nic));
            connection.block.set_owner(Owner::Nic);
            Ok(())
        }
        Err(stay) => {
            connection.stage = Stage::Kernel;
            ground.nic.give_slot(cid);
            // It counts as a move: what the kernel reported of the socket meanwhile is not to be believed.
            connection.block.store(block::MOVES, connection.moves);
            connection.block.set_owner(Owner::Kernel);
            Err(stay)
        }
    };
    session.announce_move(connection.block.number());
    result
}

fn steal_and_hand_off(
    ground: &mut Ground<'_>,
    session: &mut OpenSession,
    session_number: u32,
    connection: &Connection,
    cid: Cid,
    way: Way,
) -> Result<OnNic, Stay> {
    let fd = connection.fd()?;
    ground.steal(cid, &connection.flow, &way.path)?;
    ground.passed(Step::Stolen);
    let begun = Saved::read(fd).map_err(|_| Stay::Filter).and_then(|saved| {
        let entry = Entry::new(session_number, connection.number, cid, saved);
        note(ground, Phase::Reading, &entry)?;
        Ok((Exporter::begin(fd, connection.flow, way.link, &entry.saved)?, entry))
    });
    let (exporter, entry) = match begun {
        Ok(begun) => begun,
        Err(stay) => return Err(never_left(ground, cid, &connection.flow, stay)),
    };
    let mut image = *exporter.image();
    if connection.attached {
        // A program that corks its socket uncorks it, too; better a segment early than one that waits for what nobody sees.
        (image.nodelay, image.cork) = (true, false);
    }
    if let Some(path) = connection.path {
        path.remember(&mut image);
    }
    let limits = Limits::of(fd);
    let Some(memory) = memory::take(session, &image, limits) else {
        let _ = exporter.abandon();
        return Err(never_left(ground, cid, &connection.flow, Stay::NoRoom));
    };
    let region = session.memory.clone();
    let queues = queues(&region, memory, &image).ok_or(Stay::NoRoom);
    let copied = queues.and_then(|(unread, unacknowledged)| exporter.copy_queues(&unread, &unacknowledged));
    let handed_off_at = monotonic_micros();
    let entry = entry.copied(&image, memory, handed_off_at);
    if let Err(stay) = copied.and_then(|()| note(ground, Phase::Copied, &entry)) {
        let _ = exporter.abandon();
        memory::give(session, memory);
        return Err(never_left(ground, cid, &connection.flow, stay));
    }
    ground.passed(Step::Read);
    let (saved, result) = match exporter.purge() {
        Ok(saved) => {
            ground.passed(Step::Purged);
            limits.write(ground.nic_memory, cid);
            let written = write_down(ground.nic_memory, session_number, connection, cid, &image, memory, &saved);
            let result = written.and_then(|()| {
                // An event of the NIC's may reach the program before the move is over. Noted any earlier the program would look at its
                // block, find no move there, and not look again when the event comes.
                session.note_move(connection.block.number());
                ground.nic.command(Message::new(Operation::NicHandoff, cid, 0, 0)).map(|_| ())
            });
            match result {
                Ok(()) => {
                    ground.passed(Step::HandedOff);
                    if connection.attached {
                        let _ = shell::show_closing(fd);
                    }
                    return Ok(OnNic {
                        cid,
                        image,
                        saved,
                        memory,
                        limits,
                        handed_off_at,
                        muted: false,
                        leaving: None,
                        way: Some(way),
                        dropped: None,
                    });
                }
                Err(stay) => (saved, stay),
            }
        }
        Err((saved, stay)) => (saved, stay),
    };
    // Past the purge there is one way back: what was read goes in again.
    put_back(ground, connection, cid, &image, &region, memory, &saved)?;
    memory::give(session, memory);
    Err(result)
}

/// Writes the journal; an entry that is too long has a filter too long to be kept.
fn note(ground: &Ground<'_>, phase: Phase, entry: &Entry) -> Result<(), Stay> {
    journal::write(ground.nic_memory, phase, entry).then_some(()).ok_or(Stay::Filter)
}

/// The connection is whole in the kernel: the NIC gives up what it holds of it.
fn never_left(ground: &mut Ground<'_>, cid: Cid, flow: &Flow, stay: Stay) -> Stay {
    journal::clear(ground.nic_memory, cid);
    ground.cancel(cid, flow, false);
    stay
}

fn put_back(
    ground: &mut Ground<'_>,
    connection: &Connection,
    cid: Cid,
    image: &Image,
    region: &Region,
    memory: Memory,
    saved: &Saved,
) -> Result<(), Stay> {
    let (unread, unacknowledged) = queues(region, memory, image).ok_or(Stay::NoRoom)?;
    let fd = connection.fd()?;
    let imported = Importer::begin(fd, image, connection.local, connection.peer, &unread, &unacknowledged, saved);
    journal::speaking(ground.nic_memory, cid, image);
    // Even when the import failed: nothing is held for a connection that is lost.
    ground.cancel(cid, &connection.flow, true);
    let finished = imported.and_then(Importer::finish);
    journal::clear(ground.nic_memory, cid);
    finished.map_err(|failed| Stay::Lost(failed.step, failed.error))
}

/// Where the unread and the unacknowledged bytes of an image lie.
pub(crate) fn queues<'a>(region: &'a Region, memory: Memory, image: &Image) -> Option<(Pieces<'a>, Pieces<'a>)> {
    let unread = Pieces::of(region, memory.receive, image.read_seq(), image.unread)?;
    let unacknowledged = Pieces::of(region, memory.send, image.snd_una, image.send_queue())?;
    Some((unread, unacknowledged))
}

/// Writes down what the NIC needs in the connection's slot, and what the program needs in its block.
fn write_down(
    nic_memory: &Region,
    session_number: u32,
    connection: &Connection,
    cid: Cid,
    image: &Image,
    memory: Memory,
    saved: &Saved,
) -> Result<(), Stay> {
    let base = nic::slot(cid.slot());
    let block_number = connection.block.number();
    let parameters = [session_number, memory.receive.0, memory.receive.1, memory.send.0, memory.send.1, block_number];
    for (at, value) in parameters.into_iter().enumerate() {
        nic_memory.word32(base + slot::PARAMETERS + 4 * at).store(value, Ordering::Release);
    }
    let mut bytes = [0u8; MAX_ENCODED];
    image.encode(&mut bytes).map_err(|_| Stay::NoRoom)?;
    let _ = nic_memory.write(base + slot::IMAGE, &bytes);
    let fin = u32::from(image.state.fin_received());
    let b = &connection.block;
    b.store(block::CID, cid.0);
    b.store(block::PROCESSOR, 0);
    b.store(block::RECEIVE_BASE, memory.receive.0);
    b.store(block::RECEIVE_SIZE, memory.receive.1);
    b.store(block::SEND_BASE, memory.send.0);
    b.store(block::SEND_SIZE, memory.send.1);
    b.store(block::READ_SEQ, image.read_seq());
    b.store(block::RECEIVE_SEQ, image.rcv_nxt.wrapping_sub(fin));
    b.store(block::ACKED_SEQ, if image.state.fin_acknowledged() { image.snd_end } else { image.snd_una });
    b.store(block::QUEUED_SEQ, image.snd_end);
    b.store(block::FLAGS, fin | u32::from(image.state.fin_queued()) << 1 | u32::from(saved.keepalive()) << 2);
    // Before the NIC runs: what it tells the program must find its connection.
    b.store(block::MOVES, connection.moves);
    Ok(())
}

/// Session and number of the connection that was handed off last under the slot of this name.
pub(crate) fn handed_off(nic_memory: &Region, slots: usize, cid: Cid) -> Option<(u32, u32)> {
    if cid.slot() as usize >= slots {
        return None;
    }
    let parameter = |at: usize| nic_memory.word32(nic::slot(cid.slot()) + slot::PARAMETERS + 4 * at).load(Ordering::Acquire);
    Some((parameter(0), parameter(5)))
}

/// A connection without traffic sends no acknowledgement that would tell what the kernel holds out of order: it is made to send one.
pub(crate) fn ask_for_sack_blocks(session: &OpenSession, connection: &mut Connection) {
    let Some(fd) = &connection.fd else { return };
    if !connection.block.keep_out() {
        // Another time.
        connection.block.set_owner(Owner::Kernel);
        return;
    }
    let _ = shell::acknowledge(fd.as_fd());
    if let Stage::Mirroring { asked, .. } = &mut connection.stage {
        *asked = true;
    }
    hand_to_kernel(session, connection);
}

/// Those who wait for a move's end, who then have to be told.
pub(crate) fn take_askers(connection: &mut Connection) -> Vec<Asker> {
    match &mut connection.stage {
        Stage::Mirroring { askers, .. } => std::mem::take(askers),
        _ => Vec::new(),
    }
}
