//! The NIC has died: every connection that it had goes back to the kernel, from its record, its block and its memory.

use crate::agent::Agent;
use crate::back::{hand_to_kernel, speak};
use crate::connection::{Connection, OnNic, Stage};
use crate::forth::queues;
use crate::ground::Shape;
use crate::journal;
use crate::memory;
use crate::nic::NicProcess;
use crate::session::OpenSession;
use crate::step::{Chaos, Step};
use baton_abi::layout::{block, nic as layout, slot};
use baton_abi::{Control, Record, record};
use baton_backends::{Kernel, VnetDevice};
use baton_device::{Device, Frame, MAX_FRAME};
use baton_handoff::import::{ImportError, Importer};
use baton_image::{Image, State};
use baton_linux::events::monotonic_micros;
use baton_recovery::{Replay, gather, posts_of};
use baton_shm::Region;
use baton_steering::Path;
use baton_wire::{Flow, TcpFrame};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// Microseconds that programs may take to leave operations on connections that were on the NIC.
const QUIESCE_LIMIT: u64 = 20_000;

/// More frames than a TAP's queue holds.
const MOST_STALE_FRAMES: usize = 8192;

/// The record that counts, if the NIC ever published one.
pub(crate) fn read_record(nic_memory: &Region, base: usize) -> Option<Record> {
    let published = nic_memory.words(base + slot::PUBLISHED, 1)[0].load(Ordering::Acquire);
    if published == 0 {
        return None;
    }
    let copy = base + slot::RECORDS + (published & 1) as usize * record::WORDS * 8;
    let words = nic_memory.words(copy, record::WORDS);
    Some(Record::from_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed))))
}

pub(crate) fn read_ranges(nic_memory: &Region, base: usize, record: &Record) -> Vec<(u32, u32)> {
    let table = base + slot::RANGES + usize::from(record.ranges_table & 1) * slot::RANGES_BYTES;
    let count = usize::from(record.ranges).min(slot::RANGES_BYTES / 8);
    let words = nic_memory.words(table, count);
    words.iter().map(|word| word.load(Ordering::Relaxed)).map(|word| (word as u32, (word >> 32) as u32)).collect()
}

/// The image at the moment of death. What the program did is in its block; it is believed only as far as it can be true.
fn image_at_death(on_nic: &OnNic, record: &Record, connection: &Connection) -> Option<Image> {
    let handed = &on_nic.image;
    let mut state = State::from_number(record.state)?;
    let flags = connection.block.load(block::FLAGS);
    if flags & 2 != 0 {
        state = match state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            other => other,
        };
    }
    let acked_all = state.fin_acknowledged();
    let queued = connection.block.load(block::QUEUED_SEQ);
    let plausible = queued.wrapping_sub(record.snd_una) <= on_nic.memory.send.1 && queued.wrapping_sub(record.snd_end) < 1 << 31;
    let snd_end = if acked_all || !plausible { record.snd_end } else { queued };
    let data_end = record.rcv_nxt.wrapping_sub(u32::from(state.fin_received()));
    let unread = unread_by_program(connection, data_end, data_end.wrapping_sub(record.rcv_read));
    let elapsed = (monotonic_micros() - on_nic.handed_off_at) / 1000;
    Some(Image {
        state,
        snd_una: record.snd_una,
        snd_nxt: record.snd_nxt,
        snd_end,
        snd_wnd: record.snd_wnd,
        snd_wl1: record.snd_wl1,
        max_window: record.max_window,
        rcv_nxt: record.rcv_nxt,
        rcv_adv: record.rcv_adv,
        unread,
        ts_recent: record.ts_recent,
        // Later than anything the NIC can have sent.
        ts_clock: handed.ts_clock.wrapping_add(elapsed as u32 + 1),
        cwnd: record.cwnd,
        srtt: record.srtt,
        ..*handed
    })
}

/// Bytes that the program has not read, where the NIC believes that `told` are left before `data_end`: it hears of reading late.
pub(crate) fn unread_by_program(connection: &Connection, data_end: u32, told: u32) -> u32 {
    data_end.wrapping_sub(connection.block.load(block::READ_SEQ)).min(told)
}

impl Agent {
    /// Whether the NIC process has died.
    pub(crate) fn nic_is_dead(&mut self) -> bool {
        self.nic.is_dead()
    }

    /// Starts the next NIC, so that other traffic flows again, and gives the connections of the last one to the kernel. Until then
    /// their shells are deaf and mute: no peer hears anything but the connections themselves.
    pub(crate) fn recover(&mut self) -> anyhow::Result<()> {
        self.nic.end();
        let leaving = self.take_leaving();
        self.keep_programs_out();
        self.start_next_nic()?;
        self.hold_frames();
        if let Err(error) = self.drop_stale_frames() {
            eprintln!("baton agent: frames of the kernel's may be among those that go out: {error:#}");
        }
        self.nic.let_frames_flow()?;
        self.fetch_what_was_on_the_nic();
        let mut kernel = self.shape.kernel(&self.hardware.host)?;
        for at in 0..self.sessions.len() {
            self.attend(at as u32);
            let Some(session) = self.sessions[at].as_mut() else { continue };
            let Some(open) = session.open.as_mut() else { continue };
            for connection in session.connections.iter_mut().flatten() {
                match recover_one(&mut self.nic, &self.hardware.memory, &self.shape, &mut kernel, &self.chaos, open, connection) {
                    Ok(true) => self.statistics.recovered += 1,
                    Ok(false) => {}
                    Err(error) => {
                        eprintln!("baton agent: {} is lost: {error}", connection.flow);
                        self.statistics.lost += 1;
                        self.groups.get(session.opening.group).into_iter().for_each(|group| group.report.resets += 1);
                    }
                }
            }
        }
        self.attend_nobody();
        self.give_up_moves(leaving);
        self.return_what_was_lent();
        Ok(())
    }

    /// Steals the flows again, under new names: while a socket is being restored nothing of its connection may meet the kernel.
    fn hold_frames(&mut self) {
        for connection in self.sessions.iter_mut().flatten().flat_map(|session| session.connections.iter_mut().flatten()) {
            if let Stage::Nic(on_nic) = &mut connection.stage {
                on_nic.cid = on_nic.cid.next_generation();
                let way = on_nic.way.map(|way| way.path);
                let wherever = Path { leaves_by: on_nic.image.link.interface, anywhere: true, ..Path::default() };
                self.shape.steal_again(&connection.flow, &way.unwrap_or(wherever));
                // The flow is in the slot since the handoff. Should this NIC die, too, the next round goes on from here.
                let _ = self.nic.control(Control::Mirror, on_nic.cid, 0);
                let _ = self.nic.control(Control::Steal, on_nic.cid, 0);
            }
        }
    }

    /// Frames that the kernel sent while no NIC was there. Those of connections that may have been between two owners just then are
    /// dropped: they can lie beyond the numbers that were read, and the kernel, restored from those, would never believe their
    /// acknowledgement. All others go out.
    fn drop_stale_frames(&mut self) -> anyhow::Result<()> {
        if matches!(self.shape, Shape::Beside { .. }) {
            // They never left the kernel.
            return Ok(());
        }
        // The card's are its registers, then the host's and the wire's queues in turn.
        let further = self.hardware.card.iter().skip(1).step_by(2);
        let mut wire = VnetDevice::new(self.hardware.wire.try_clone()?, false);
        let connections = self.sessions.iter().flatten().flat_map(|session| session.connections.iter().flatten());
        let ours: HashSet<Flow> = connections.map(|connection| connection.flow).collect();
        let mut frame = Frame::with_capacity(MAX_FRAME);
        for queue in further.chain([&self.hardware.host]) {
            let mut kernel = VnetDevice::new(queue.try_clone()?, false);
            for _ in 0..MOST_STALE_FRAMES {
                if !kernel.receive(&mut frame) {
                    break;
                }
                if !TcpFrame::parse(frame.bytes()).is_ok_and(|parsed| ours.contains(&parsed.flow.reversed())) {
                    wire.transmit(&mut frame);
                }
            }
        }
        Ok(())
    }

    fn keep_programs_out(&mut self) {
        let on_nic = || {
            let all = self.sessions.iter().flatten().flat_map(|session| session.connections.iter().flatten());
            all.filter(|connection| matches!(connection.stage, Stage::Nic(_)))
        };
        let mut busy: Vec<&Connection> = on_nic().filter(|connection| !connection.block.keep_out()).collect();
        // A program that is stuck inside an operation is dying itself; its connection goes back all the same. All are waited for at once.
        let deadline = monotonic_micros() + QUIESCE_LIMIT;
        while !busy.is_empty() && monotonic_micros() < deadline {
            std::thread::sleep(std::time::Duration::from_micros(100));
            busy.retain(|connection| !connection.block.is_left());
        }
        for session in self.sessions.iter().flatten() {
            if let Some(open) = &session.open {
                open.forget_commands();
            }
        }
    }
}

/// Whether the connection was on the NIC and is in the kernel again.
#[allow(clippy::too_many_arguments, reason = "what a restore needs")]
fn recover_one(
    nic: &mut NicProcess,
    nic_memory: &Region,
    shape: &Shape,
    kernel: &mut Kernel,
    chaos: &Chaos,
    session: &mut OpenSession,
    connection: &mut Connection,
) -> Result<bool, ImportError> {
    let on_nic = match std::mem::replace(&mut connection.stage, Stage::Kernel) {
        Stage::Nic(on_nic) => on_nic,
        // Whoever asked for a move that has only begun still waits for an answer.
        other => {
            connection.stage = other;
            return Ok(false);
        }
    };
    let base = layout::slot(on_nic.cid.slot());
    let record = read_record(nic_memory, base);
    let image = record.as_ref().map_or(Some(on_nic.image), |record| image_at_death(&on_nic, record, connection));
    if let (Some(record), Some(circle)) = (&record, session.memory.circle(on_nic.memory.receive.0, on_nic.memory.receive.1)) {
        gather(&posts_of(nic_memory, base), &session.memory, &circle, record.rcv_read);
    }
    let result = match image {
        Some(image) => {
            let ranges = record.map(|record| read_ranges(nic_memory, base, &record)).unwrap_or_default();
            import(nic, nic_memory, shape, kernel, chaos, session, connection, &on_nic, &image, &ranges)
        }
        None => Err(ImportError { step: "record", error: std::io::ErrorKind::InvalidData.into() }),
    };
    if result.is_err() {
        // Nothing is held for a connection that is lost.
        shape.unsteer(&connection.flow);
        let _ = nic.control(Control::Cancel, on_nic.cid, 0);
    }
    // Only now: should this agent die, too, the next one starts from the record again.
    journal::clear(nic_memory, on_nic.cid);
    nic_memory.words(base + slot::PUBLISHED, 1)[0].store(0, Ordering::Release);
    nic.give_slot(on_nic.cid);
    memory::give(session, on_nic.memory);
    connection.reason = "the NIC died".into();
    hand_to_kernel(session, connection);
    result.map(|()| true)
}

#[allow(clippy::too_many_arguments, reason = "what a restore needs")]
fn import(
    nic: &mut NicProcess,
    nic_memory: &Region,
    shape: &Shape,
    kernel: &mut Kernel,
    chaos: &Chaos,
    session: &OpenSession,
    connection: &Connection,
    on_nic: &OnNic,
    image: &Image,
    ranges: &[(u32, u32)],
) -> Result<(), ImportError> {
    let damaged = || ImportError { step: "record", error: std::io::ErrorKind::InvalidData.into() };
    image.check().map_err(|_| damaged())?;
    let (unread, unacknowledged) = queues(&session.memory, on_nic.memory, image).ok_or_else(damaged)?;
    let saved = on_nic.saved.with_keepalive(connection.block.load(block::FLAGS) & 4 != 0);
    let gone = |_| ImportError { step: "its program's descriptor", error: std::io::ErrorKind::NotFound.into() };
    let fd = connection.fd().map_err(gone)?;
    let imported = Importer::begin(fd, image, connection.local, connection.peer, &unread, &unacknowledged, &saved);
    chaos.strikes(Step::Restored);
    let receive = session.memory.circle(on_nic.memory.receive.0, on_nic.memory.receive.1).ok_or_else(damaged)?;
    let release = || {
        shape.unsteer(&connection.flow);
        Replay { image, ranges, fin_behind_hole: None }.send(kernel, |seq, out| receive.read(seq, out));
        // What was held since goes to the kernel, and nothing is held any more.
        let _ = nic.control(Control::Cancel, on_nic.cid, 0);
    };
    speak(image, imported, release, || journal::speaking(nic_memory, on_nic.cid, image))
}
