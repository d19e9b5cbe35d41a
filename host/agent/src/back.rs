//! A move back to the kernel: quiesce, rest, import, release, speak.

use crate::connection::{Connection, OnNic, Path, Stage};
use crate::forth::queues;
use crate::ground::{Ground, Shape};
use crate::journal;
use crate::memory;
use crate::recovery::{read_ranges, read_record, unread_by_program};
use crate::session::OpenSession;
use crate::step::Step;
use baton_abi::layout::{Owner, block, nic, slot};
use baton_abi::{Cid, Control, Message, Operation};
use baton_handoff::examine::Stay;
use baton_handoff::import::{ImportError, Importer};
use baton_image::{Image, MAX_ENCODED};
use baton_recovery::Replay;
use baton_shm::{Circle, Region};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

/// How a move back ended, if not well.
pub(crate) enum Failure {
    /// It stays on the NIC.
    Stays(Stay),
    /// The NIC died on the way: recovery goes on from here.
    NicGone,
    /// The kernel refused it although everything had been checked: the connection is lost.
    Lost(ImportError),
}

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        Failure::Lost(error)
    }
}

/// Whether a connection can go to the kernel now.
pub(crate) fn check(ground: &mut Ground<'_>, connection: &Connection) -> Result<(), Stay> {
    connection.fd()?;
    // Without a route the import would close the socket for good: then the connection waits on the NIC. Where the NIC could not go itself,
    // the kernel can.
    ground.route_of(connection).map(|_| ())
}

/// Moves a connection back to the kernel, whose program is kept out. It was checked before.
pub(crate) fn complete(ground: &mut Ground<'_>, session: &mut OpenSession, connection: &mut Connection) -> Result<(), Failure> {
    let route = ground.route_of(connection);
    let Stage::Nic(on_nic) = &connection.stage else { return Ok(()) };
    let cid = on_nic.cid;
    // What the NIC says to the kernel last has to come by a device at which the socket listens now.
    if let Ok((routing, route)) = route {
        let comes_by = ground.device_of_last_words(on_nic, &routing, &route);
        if comes_by != on_nic.image.link.interface || on_nic.muted {
            let _ = ground.nic.control(Control::Interface, cid, comes_by);
        }
    }
    if let Err(stay) = ground.nic.command(Message::new(Operation::NicRestore, cid, 0, 0)) {
        if matches!(stay, Stay::NicGone) {
            return Err(Failure::NicGone);
        }
        connection.block.set_owner(Owner::Nic);
        return Err(Failure::Stays(stay));
    }
    ground.passed(Step::Rested);
    let mut bytes = [0u8; MAX_ENCODED];
    let _ = ground.nic_memory.read(nic::slot(cid.slot()) + slot::IMAGE, &mut bytes);
    let image = match Image::decode(&bytes) {
        Ok(image) => image,
        Err(error) => {
            // A NIC that writes such images must not go on.
            eprintln!("baton agent: the NIC's image of {} cannot be used: {error}", connection.flow);
            return Err(Failure::NicGone);
        }
    };
    let unread = unread_by_program(connection, image.read_seq().wrapping_add(image.unread), image.unread);
    let image = Image { unread, ..image };
    let result = import(ground, session, connection, on_nic, &image);
    connection.path = Some(Path::of(&image));
    finish(ground, session, connection);
    result
}

fn import(
    ground: &mut Ground<'_>,
    session: &OpenSession,
    connection: &Connection,
    on_nic: &OnNic,
    image: &Image,
) -> Result<(), Failure> {
    let lost = |step| Failure::Lost(ImportError { step, error: std::io::ErrorKind::InvalidData.into() });
    let (unread, unacknowledged) = queues(&session.memory, on_nic.memory, image).ok_or(lost("queues"))?;
    let saved = on_nic.saved.with_keepalive(connection.block.load(block::FLAGS) & 4 != 0);
    let fd = connection.fd().map_err(Failure::Stays)?;
    let imported = Importer::begin(fd, image, connection.local, connection.peer, &unread, &unacknowledged, &saved);
    ground.passed(Step::Imported);
    // Even when the import failed the NIC lets go: no filter outlives its connection.
    let (nic_memory, cid) = (ground.nic_memory, on_nic.cid);
    let release = || {
        if matches!(ground.release(on_nic.cid, &connection.flow), Err(Stay::NicGone)) {
            let receive = session.memory.circle(on_nic.memory.receive.0, on_nic.memory.receive.1);
            say_last_words(ground.nic_memory, ground.shape, ground.host, on_nic.cid, receive, image);
        }
        ground.passed(Step::Released);
    };
    speak(image, imported, release, || journal::speaking(nic_memory, cid, image))?;
    Ok(())
}

/// What a NIC that died in the middle of a restore can no longer say to the kernel: data that it held out of order, and a FIN.
pub(crate) fn say_last_words(
    nic_memory: &Region,
    shape: &Shape,
    host: &OwnedFd,
    cid: Cid,
    receive: Option<Circle>,
    image: &Image,
) {
    let base = nic::slot(cid.slot());
    let ranges = read_record(nic_memory, base).map(|record| read_ranges(nic_memory, base, &record)).unwrap_or_default();
    nic_memory.words(base + slot::PUBLISHED, 1)[0].store(0, Ordering::Release);
    let (Ok(mut kernel), Some(receive)) = (shape.kernel(host), receive) else { return };
    let replay = Replay { image, ranges: &ranges, fin_behind_hole: None };
    replay.send(&mut kernel, |seq, out| receive.read(seq, out));
}

/// The last two steps of a restore: the NIC lets go and says what the peer said last, the kernel speaks. Where our FIN has been
/// acknowledged the kernel sends its own first, which the NIC still silences, and then hears that it is acknowledged. From the NIC's
/// last words on the kernel may acknowledge what it hears: an agent that takes over must not start from the image again.
pub(crate) fn speak<T>(
    image: &Image,
    imported: Result<Importer<'_>, ImportError>,
    release: impl FnOnce() -> T,
    speaks: impl FnOnce(),
) -> Result<(), ImportError> {
    if image.state.fin_acknowledged() {
        speaks();
        let finished = imported.and_then(Importer::finish);
        release();
        return finished;
    }
    speaks();
    release();
    imported.and_then(Importer::finish)
}

/// The connection is the kernel's, for better or worse.
fn finish(ground: &mut Ground<'_>, session: &mut OpenSession, connection: &mut Connection) {
    let stage = std::mem::replace(&mut connection.stage, Stage::Kernel);
    if let Stage::Nic(on_nic) = stage {
        journal::clear(ground.nic_memory, on_nic.cid);
        memory::give(session, on_nic.memory);
        ground.nic.give_slot(on_nic.cid);
    }
    hand_to_kernel(session, connection);
}

/// Lets the program at the connection in the kernel.
pub(crate) fn hand_to_kernel(session: &OpenSession, connection: &mut Connection) {
    connection.moves += 1;
    connection.block.store(block::MOVES, connection.moves);
    connection.block.set_owner(Owner::Kernel);
    session.announce_move(connection.block.number());
}
