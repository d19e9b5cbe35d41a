//! The NIC's large receive in front of a device that the kernel keeps, for connections that the kernel runs.
//!
//! The device keeps its addresses, routes, neighbours, queueing disciplines and firewall: segments are taken at its
//! ingress ([`baton_steering::front`]) to a TAP, merged by the code of the inline shape ([`baton_lro`]), and come back
//! at the same place by the same TAP, as if the device had received the aggregates. Everything ends with the process,
//! however it ends, since programs and TAP live as long as its descriptors.
#![forbid(unsafe_code)]

mod merger;
mod path;
pub mod status;

pub use path::Choice;

use anyhow::{Context, Result, bail};
use baton_linux::events::{Poller, Trigger, monotonic_nanos};
use baton_linux::interface::{self, TapOptions};
use baton_linux::netlink::{Changes, LINK_CHANGES, Netlink, ROUTE};
use baton_linux::rtnetlink::{LinkInfo, Wire};
use baton_linux::{process, rtnetlink};
use baton_lro::LroSettings;
use baton_steering::front::{self, Front, Path};
use merger::Merger;
use path::Chosen;
use status::{Clients, Figures, Status};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

/// Frames between two looks at the clock.
const BATCH: usize = 64;
/// How often the heartbeat is published at least while the process sleeps, in nanoseconds.
const IDLE_BEAT: u64 = 10_000_000;
/// How often it is published at most, in nanoseconds.
const BEAT: u64 = 500_000;
/// Longest time between two looks for aggregates that have waited long enough, in nanoseconds.
const LATEST: u64 = 200_000;
/// How often signals, clients and links are looked at under load, in nanoseconds.
const LOOK: u64 = 10_000_000;
/// While frames come, an empty queue is looked at again after this time, whatever is due: so each look finds several,
/// no frame has to wake the process, and few sleeps are paid for.
const NAP: Duration = Duration::from_micros(100);
/// How long after the last frame that ends, in nanoseconds.
const LINGER: u64 = 300_000;
/// A frame that is decided about at one moment is in the queue so many nanoseconds later: a driver hands on what its
/// round has found at the end of it. Less than [`LINGER`], so that the last frame before a sleep is reported, too.
const MARGIN: u64 = 200_000;

/// Frames that wait for this process at most: at 2.5 Gb/s, some 70 ms of segments of 1500 bytes.
const QUEUE: u16 = 16_384;

/// Longest time for what is in the queue at the end, in nanoseconds.
const DRAINING: u64 = 50_000_000;

const SIGNAL: u64 = 0;
const FRAMES: u64 = 1;
const LINKS: u64 = 2;
const CLIENT: u64 = 3;

/// Large receive at a device, until this is dropped.
pub struct Attached {
    /// Its name when it was attached.
    device: String,
    index: u32,
    tap: String,
    tap_index: u32,
    front: Front,
    chosen: Chosen,
    merger: Merger,
    settings: LroSettings,
    clients: Clients,
    links: Changes,
    signals: OwnedFd,
    poller: Poller,
    /// When the heartbeat was published last.
    beat: u64,
    /// When it was looked for aggregates that have waited long enough.
    expired: u64,
    /// Times that the filter took this process for dead, and frames in the queue that were lost thereby.
    lapses: u64,
    lost: u64,
}

impl Attached {
    /// Puts large receive in front of a device of the calling thread's network namespace. Nothing is taken before
    /// [`Attached::run`].
    ///
    /// # Errors
    /// If there is no such device, it is not of a kind that wins by this, another process is attached there, or this
    /// process may not or the kernel cannot; the message says what to do.
    pub fn attach(device: &str, settings: LroSettings, choice: Choice) -> Result<Attached> {
        baton_steering::supported()?;
        let netlink = rtnetlink::open()?;
        let link = suitable(&netlink, device)?;
        // It may have been given by an alternative name.
        let device = &rtnetlink::name_of(&netlink, link.index)?;
        // From here on signals wait: everything is taken down in order.
        let signals = process::signal_descriptor(&process::ENDING)?;
        let (name, tap) = make_tap(&netlink, device, link.index)?;
        let tap_index = set_up(&netlink, &name, tap.as_fd()).with_context(|| format!("setting up {name}"))?;
        let listener = status::listen(&netlink, link.index, tap_index).context("listening for `baton nic attach --list`")?;
        let links = Changes::listen(ROUTE, LINK_CHANGES)?;
        let (front, chosen) = path::attach(choice, device, &link, tap_index).with_context(|| format!("in front of {device}"))?;
        // A program in the driver does not see that the checksum was left to whoever receives the frame.
        let partial = link.wire != Wire::Other && chosen.path == Path::Driver;
        let poller = Poller::new()?;
        poller.add(signals.as_fd(), SIGNAL, Trigger::Readable)?;
        poller.add(links.as_fd(), LINKS, Trigger::Readable)?;
        let clients = Clients::new(listener, &poller, CLIENT)?;
        Ok(Attached {
            device: device.clone(),
            index: link.index,
            tap: name,
            tap_index,
            front,
            chosen,
            merger: Merger::new(settings, tap, partial, monotonic_nanos() / 1000)?,
            settings,
            clients,
            links,
            signals,
            poller,
            beat: 0,
            expired: 0,
            lapses: 0,
            lost: 0,
        })
    }

    /// The TAP by which segments go, and come back merged.
    pub fn tap(&self) -> &str {
        &self.tap
    }

    /// Where segments are taken, as the setting `path` names it, and why if it is not where `path=auto` looks first.
    pub fn path(&self) -> &str {
        &self.chosen.text
    }

    /// Merges until a signal asks it to end. Returns what it has done.
    ///
    /// # Errors
    /// If the device or the TAP is gone.
    pub fn run(mut self) -> Result<Figures> {
        // Time-outs of large receive are tens of microseconds.
        process::wake_in_time();
        // Whoever uses the device waits for this process as for an interrupt.
        process::raise_priority();
        self.publish(monotonic_nanos());
        let (mut worked, mut looked) = (self.beat, self.beat);
        loop {
            let now = monotonic_nanos();
            self.live(now);
            let got = self.batch(now);
            if now - looked >= LOOK {
                looked = now;
                if self.look(Duration::ZERO)? {
                    return Ok(self.end());
                }
            }
            if got > 0 {
                worked = now;
            }
            if got == BATCH {
                continue;
            }
            if self.merger.next_expiry().is_none() {
                self.front.clear_until(now.saturating_sub(MARGIN));
            }
            if now - worked < LINGER {
                std::thread::sleep(NAP);
            } else {
                looked = now;
                if self.sleep(now)? {
                    return Ok(self.end());
                }
            }
        }
    }

    /// Publishes the heartbeat when it is time. If that is too late, the filter has given frames to the kernel which
    /// came later than those in the queue: these are out of date, and lost.
    #[inline]
    fn live(&mut self, now: u64) {
        let age = now - self.beat;
        if age < BEAT {
            return;
        }
        if age >= front::DEAD_AFTER {
            self.lapses += 1;
            self.lost += self.merger.forget(now / 1000);
            self.front.clear_until(now);
        }
        self.publish(now);
    }

    fn publish(&mut self, now: u64) {
        self.beat = now;
        self.front.beat(now);
    }

    /// Merges up to a batch of frames, and gives to the kernel what is due. Returns the number of frames.
    #[inline]
    fn batch(&mut self, now: u64) -> usize {
        let mut got = 0;
        while got < BATCH && self.merger.receive(now / 1000) {
            got += 1;
        }
        // What waits in the queue may belong to what would be given away.
        if got < BATCH || now - self.expired > LATEST {
            self.expired = now;
            self.merger.expire(now / 1000);
        }
        got
    }

    fn most_sleep(&self, now: u64) -> Duration {
        let beat = (self.beat + IDLE_BEAT).saturating_sub(now);
        let due = self.merger.next_expiry().map_or(u64::MAX, |due| (due * 1000).saturating_sub(now));
        Duration::from_nanos(beat.min(due))
    }

    /// Sleeps until a frame comes, or something is due. Returns whether to end. Only meanwhile is the TAP watched: else
    /// each frame would wake nobody at a price.
    fn sleep(&mut self, now: u64) -> Result<bool> {
        self.poller.add(self.merger.fd(), FRAMES, Trigger::Readable)?;
        let ends = self.look(self.most_sleep(now));
        self.poller.remove(self.merger.fd())?;
        ends
    }

    /// Waits, and looks after everything but frames. Returns whether to end.
    fn look(&mut self, wait: Duration) -> Result<bool> {
        let mut ready = Vec::new();
        self.poller.wait(Some(wait), &mut ready)?;
        for token in ready {
            match token {
                SIGNAL => {
                    process::take_signals(&self.signals);
                    return Ok(true);
                }
                FRAMES => {}
                LINKS => self.check_links()?,
                _ => {
                    let status = self.status();
                    self.clients.serve(&status);
                }
            }
        }
        Ok(false)
    }

    /// Checks that device and TAP are there, and follows the device's MTU.
    fn check_links(&mut self) -> Result<()> {
        if !self.links.any() {
            return Ok(());
        }
        let netlink = rtnetlink::open()?;
        let link = match rtnetlink::link_at(&netlink, self.index) {
            Err(error) if is_gone(&error) => bail!("device {} is gone: it was removed, or is in another namespace", self.device),
            other => other?,
        };
        match rtnetlink::link_at(&netlink, self.tap_index) {
            Ok(tap) if tap.up => {}
            Err(error) if !is_gone(&error) => return Err(error.into()),
            _ => bail!("{} was removed or taken down: without it segments cannot leave {} and come back", self.tap, self.device),
        }
        if let Some((front, chosen)) = path::follow(&self.chosen, &link, self.tap_index)? {
            self.stop_taking();
            (self.front, self.chosen) = (front, chosen);
            self.publish(monotonic_nanos());
        }
        Ok(())
    }

    fn end(mut self) -> Figures {
        self.stop_taking();
        self.figures()
    }

    /// Takes nothing any more, and gives to the kernel what waits.
    fn stop_taking(&mut self) {
        // What passes from then on overtakes what is in the queue, so that is emptied before, too.
        self.drain();
        self.front.stop();
        self.drain();
        self.merger.flush(monotonic_nanos() / 1000);
    }

    /// Merges what is in the queue, as far as that is possible in time.
    fn drain(&mut self) {
        let limit = monotonic_nanos() + DRAINING;
        loop {
            let now = monotonic_nanos();
            if self.batch(now) < BATCH || now > limit {
                return;
            }
        }
    }

    fn figures(&self) -> Figures {
        let dropped = rtnetlink::open().and_then(|netlink| rtnetlink::dropped_sends(&netlink, self.tap_index)).unwrap_or(0);
        Figures { dropped, lapses: self.lapses, lost: self.lost, ..self.merger.figures() }
    }

    fn status(&self) -> Status {
        Status {
            device: self.device.clone(),
            tap: self.tap.clone(),
            path: self.chosen.text.clone(),
            process: std::process::id(),
            settings: self.settings,
            figures: self.figures(),
        }
    }
}

/// Whether an error says that there is no such device.
fn is_gone(error: &io::Error) -> bool {
    const ENODEV: i32 = 19;
    error.raw_os_error() == Some(ENODEV)
}

/// A device, if large receive in front of it makes sense.
fn suitable(netlink: &Netlink, device: &str) -> Result<LinkInfo> {
    let link = match rtnetlink::link(netlink, device) {
        Err(error) if is_gone(&error) => {
            bail!("there is no device {device} in this network namespace; `ip link` lists those there are")
        }
        other => other.with_context(|| format!("looking up {device}"))?,
    };
    match link.kind {
        rtnetlink::ETHERNET => Ok(link),
        rtnetlink::LOOPBACK => bail!("{device} is the loopback device: what it carries is merged already (frames of 64 KB)"),
        _ => bail!("{device} has no Ethernet headers: large receive works in front of Ethernet devices only"),
    }
}

/// Makes the TAP. Its name has the device's index (in hexadecimal: a name has room for 15 bytes), so that only one
/// process can be at the device, and nobody who may not make devices can keep it from that.
fn make_tap(netlink: &Netlink, device: &str, index: u32) -> Result<(String, OwnedFd)> {
    let name = format!("baton-in{index:x}");
    match interface::open_tap(&name, TapOptions { segmentation: true, ..TapOptions::default() }) {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            let by = status::process_at(netlink, index).map_or_else(String::new, |process| format!(" (process {process})"));
            bail!("another `baton nic attach`{by} is at {device} already; `baton nic detach {device}` ends it")
        }
        other => Ok((name, other.context("making the TAP for the segments")?)),
    }
}

/// MTU of the TAP, its greatest: what comes from a driver must fit.
const TAP_MTU: u32 = 65_521;

/// Prepares the TAP: what is taken gets there on the shortest way, and nothing of the kernel's own leaves by it.
fn set_up(netlink: &Netlink, name: &str, tap: BorrowedFd<'_>) -> io::Result<u32> {
    // It needs no addresses. Without IPv6 the file is missing.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
    interface::set_queue_length(name, QUEUE)?;
    let link = rtnetlink::link(netlink, name)?;
    rtnetlink::set_up(netlink, link.index, None, Some(TAP_MTU))?;
    interface::set_steering(tap, front::only_queue()?.as_fd())?;
    // A kernel without queueing disciplines has none to be removed.
    let _ = rtnetlink::send_at_once(netlink, link.index);
    Ok(link.index)
}
