//! Large receive in front of a device that the kernel keeps: a program takes the TCP segments that may be merged off
//! the kernel's path, and queues them at a TAP, where the NIC's process reads them. No byte of them is copied until
//! then. What that process makes of them it writes to the same TAP, whose program gives each frame to the kernel as if
//! the device had received it.
//!
//! **Where.** The program is in the device's driver, or at its ingress ([`Path`]), with the same decisions.
//!
//! **Which connections.** Only a connection whose segments come close together is taken: a request and its answer would
//! wait for the process, and win nothing. So the first segments of a burst pass.
//!
//! **Order.** Once a segment of a connection is in the queue, later ones must not overtake it. They all go through the
//! queue, too, until the process reports that everything that came before a given moment is with the kernel
//! ([`Front::clear_until`]). Connections are told apart by a hash alone: connections that share an entry are taken or
//! left together, which is harmless. Pure acknowledgements pass, since nothing in them depends on the data before them.
//! A connection begins to pass only after [`PAUSE`] without a segment: a process that has read none for so long can
//! take the next one for the first.
//!
//! **Death.** The process writes the time into memory shared with the program, its heartbeat. If that is [`DEAD_AFTER`]
//! old, the program passes everything. Until then segments are queued however late the process is. If the queue is full
//! the TAP drops them, as a card drops what does not fit its ring, and counts them as dropped.

mod programs;

use crate::assembler::{Assembler, R};
use crate::{AGGREGATED, bpf, btf};
use baton_shm::Region;
use programs::{Maps, Place};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

/// Age of the heartbeat, in nanoseconds, from which on the process counts as dead.
pub const DEAD_AFTER: u64 = 70_000_000;

/// Largest MTU of a device, in bytes, whose segments are taken in the driver. A larger frame comes in several pieces: a
/// page, without what the kernel keeps in front of and behind a frame.
pub const LARGEST_MTU: u32 = 3400;

/// Time without a segment, in nanoseconds, after which segments of a connection may pass that was taken before.
pub const PAUSE: u64 = CLOSE as u64;

/// Entries of the table of connections, and the bits of their index.
const FLOWS: u32 = 1 << FLOW_BITS;
const FLOW_BITS: i32 = 14;
/// Bytes of an entry: when the last segment came; how many have come close together.
const FLOW: u32 = 16;
const COUNT: i16 = 8;
/// Segments that come close together before the next is taken.
const ENOUGH: i32 = 4;
/// Longest time between such segments, in nanoseconds.
const CLOSE: i32 = 1_000_000;
/// Least payload of such a segment, in bytes.
const LEAST: i32 = 256;

/// Memory shared with the process: the offsets of its words, on lines of their own where different sides write them.
const HEARTBEAT: usize = 0;
const CLEAR: usize = 8;
const SHARED: usize = 4096;

/// The filter at a device, and the way back. Dropping this detaches both.
#[derive(Debug)]
pub struct Front {
    shared: Region,
    _taking: OwnedFd,
    _giving: OwnedFd,
}

/// Where segments are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Path {
    /// In the device's driver, before the kernel makes a packet of its own of them (XDP).
    Driver,
    /// At the device's ingress (tc), on the processor that receives them.
    Ingress,
}

impl Front {
    /// Puts it in front of `device`. What is taken is sent by `tap`; frames that `tap` receives count as received by
    /// the device. Nothing is taken before the first [`Front::beat`].
    ///
    /// # Errors
    /// If this process may not load BPF programs, or this kernel or the device lacks something; the message says what
    /// to do.
    pub fn attach(path: Path, device: u32, tap: u32) -> io::Result<Front> {
        let shared = bpf::create_mappable_array(SHARED as u32, 1)?;
        let flows = bpf::create_array(FLOW, FLOWS)?;
        let maps = Maps { flows: flows.as_fd(), shared: shared.as_fd() };
        // At the ingress aggregates come by the program that takes segments, which removes the mark.
        let mark = if path == Path::Ingress { AGGREGATED } else { 0 };
        let give = bpf::load(bpf::ProgramKind::Device, &programs::give(device, mark))?;
        let giving = bpf::attach_to_device(give.as_fd(), tap, bpf::Hook::Ingress)?;
        let taking = match path {
            Path::Driver => take_in_driver(maps, device, tap)?,
            // Before Baton's steering: that recognizes frames by their mark which are not to be taken here, and removes
            // it.
            Path::Ingress => bpf::attach_to_device_first(load_ingress(maps, tap)?.as_fd(), device, bpf::Hook::Ingress)?,
        };
        Ok(Front { shared: Region::map_fixed(shared, SHARED)?, _taking: taking, _giving: giving })
    }

    /// Takes nothing any more, from this moment on: detaching the program can take the kernel tens of milliseconds.
    /// What is queued can still be read.
    pub fn stop(&self) {
        self.beat(0);
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.shared.words(at, 1)[0]
    }

    /// Publishes the time, in nanoseconds of the monotonic clock: the process is alive.
    #[inline]
    pub fn beat(&self, now: u64) {
        self.word(HEARTBEAT).store(now, Ordering::Release);
    }

    /// Reports that all frames that came before this moment are with the kernel.
    #[inline]
    pub fn clear_until(&self, moment: u64) {
        self.word(CLEAR).store(moment, Ordering::Release);
    }
}

fn load_ingress(maps: Maps<'_>, tap: u32) -> io::Result<OwnedFd> {
    bpf::load(bpf::ProgramKind::Device, &programs::take(Place::Ingress { tap }, maps))
}

/// Loads the program for a device's driver, and attaches it.
fn take_in_driver(maps: Maps<'_>, device: u32, tap: u32) -> io::Result<OwnedFd> {
    let devices = bpf::create_map_of(bpf::MapKind::Devices, 4, 4, 1)?;
    bpf::update(devices.as_fd(), &[0; 4], &tap.to_ne_bytes())?;
    let place = Place::Driver { devices: devices.as_fd(), tag: tag_function().ok() };
    bpf::attach_to_driver(bpf::load_for_driver(device, &programs::take(place, maps))?.as_fd(), device)
}

/// The function by which a driver reports a VLAN tag that it has taken out of a frame.
///
/// # Errors
/// If this kernel has none: Linux before 6.8.
pub fn tag_function() -> io::Result<u32> {
    btf::function("bpf_xdp_metadata_rx_vlan_tag")
}

/// Whether the kernel takes the programs of [`Front`] for a device's ingress.
///
/// # Errors
/// Why not.
pub fn supported() -> io::Result<()> {
    let (flows, shared) = (bpf::create_array(FLOW, FLOWS)?, bpf::create_mappable_array(SHARED as u32, 1)?);
    bpf::load(bpf::ProgramKind::Device, &programs::give(crate::LOOPBACK, AGGREGATED))?;
    load_ingress(Maps { flows: flows.as_fd(), shared: shared.as_fd() }, crate::LOOPBACK).map(drop)
}

/// The program that selects the queue of a TAP with one queue, for TUNSETSTEERINGEBPF: without one the TAP hashes the
/// addresses of each frame, on the processor that should be spared.
///
/// # Errors
/// The failed system call's.
pub fn only_queue() -> io::Result<OwnedFd> {
    let mut a = Assembler::default();
    a.set(R::R0, 0).exit();
    bpf::load(bpf::ProgramKind::Socket, &a.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Needs the right to load BPF programs.
    #[test]
    fn the_kernel_takes_the_programs() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        supported().unwrap();
    }
}
