//! The settings of a NIC's offloads as `KEY=VALUE`, with ethtool's names where it has any.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use baton_lro::{Mode, Push};
use baton_moderation::Mode as Moderation;
use core::fmt::Display;
use serde::{Deserialize, Serialize};

/// Which connections a full NIC keeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum WhenFull {
    /// The busiest connections: the coldest ones return to the kernel to make room for hotter ones.
    #[default]
    Coldest,
    /// The connections that are on the NIC: new ones are refused.
    Refuse,
    /// As `Refuse`; in addition, connections for which a lowered limit leaves no room are reset instead of returned to
    /// the kernel.
    Drop,
}

/// What is done with a connection on the NIC when its route changes to another device (the paper on connection handoff,
/// section 3.3: it is restored, or dropped).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum RouteChange {
    /// It returns to the kernel, which follows the route.
    #[default]
    Restore,
    /// It is reset.
    Drop,
}

/// What is done with frames that arrive while their connection moves between two owners (the paper on connection
/// handoff, section 3.3: they are forwarded, or dropped).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum DuringMoves {
    /// The NIC holds them for the next owner.
    #[default]
    Hold,
    /// They are dropped, and the peer sends them again.
    Drop,
}

/// What is done with a connection on the NIC when its peer's FIN has come: it will carry less, and its slot could serve
/// another one (the paper on connection handoff, Figure 6 (6)).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum PeerFin {
    /// It stays until it ends.
    #[default]
    Keep,
    /// It returns to the kernel, and ends there.
    Return,
}

/// The limits of a NIC. None means as much as there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Limits {
    /// Connections; 0 ends offloading.
    pub connections: Option<u32>,
    /// Bytes of send and receive memory of these.
    pub memory: Option<u64>,
    /// (address, length) pairs of the connections' send queues. Each connection takes a fixed number of pairs.
    #[serde(default)]
    pub pairs: Option<u32>,
    /// Percent of the workers' time: while they are busy for more of it, no further connection moves to the NIC.
    pub processor: Option<u8>,
    /// Which connections it keeps when it is full.
    pub when_full: WhenFull,
}

/// The NIC's offloads for connections that the kernel runs, and the NIC's limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Offloads {
    /// Large sends: the kernel hands over frames of up to 64 KB, which the NIC cuts if the wire does not take them.
    pub large_sends: bool,
    /// Large receive.
    pub lro: baton_lro::LroSettings,
    /// Active acknowledgements: the NIC acknowledges what large receive holds for the kernel.
    pub active_ack: bool,
    /// When frames that wait for the kernel are delivered.
    pub moderation: Moderation,
    /// When the doorbells of sleeping programs are rung.
    pub doorbells: Moderation,
    /// How frames are spread over the NIC's workers.
    pub rss: baton_rss::RssSettings,
    /// The NIC's limits.
    #[serde(default)]
    pub limits: Limits,
    /// What is done with frames that arrive during moves.
    #[serde(default)]
    pub during_moves: DuringMoves,
    /// What is done with connections whose peer has sent its FIN.
    #[serde(default)]
    pub peer_fin: PeerFin,
    /// What is done with connections whose route changes to another device.
    #[serde(default)]
    pub route_change: RouteChange,
}

impl Default for Offloads {
    /// Nothing, but that programs under load are woken at the end of a burst.
    fn default() -> Self {
        Offloads {
            large_sends: false,
            lro: baton_lro::LroSettings::default(),
            active_ack: false,
            moderation: Moderation::Off,
            doorbells: Moderation::Burst,
            rss: baton_rss::RssSettings::default(),
            limits: Limits::default(),
            during_moves: DuringMoves::default(),
            peer_fin: PeerFin::default(),
            route_change: RouteChange::default(),
        }
    }
}

/// The values of settings that are words.
const ON_OFF: &[(&str, bool)] = &[("off", false), ("on", true)];
const BELLS: &[(&str, Option<Moderation>)] =
    &[("off", None), ("on", Some(Moderation::Adaptive)), ("burst", Some(Moderation::Burst))];
const MODES: &[(&str, Mode)] = &[("off", Mode::Off), ("in-order", Mode::InOrder), ("reorder", Mode::Reorder)];
const FULL: &[(&str, WhenFull)] = &[("coldest", WhenFull::Coldest), ("refuse", WhenFull::Refuse), ("drop", WhenFull::Drop)];
const MOVING: &[(&str, DuringMoves)] = &[("hold", DuringMoves::Hold), ("drop", DuringMoves::Drop)];
const FINS: &[(&str, PeerFin)] = &[("keep", PeerFin::Keep), ("return", PeerFin::Return)];
const ROUTES: &[(&str, RouteChange)] = &[("restore", RouteChange::Restore), ("drop", RouteChange::Drop)];
const PUSHES: &[(&str, Push)] = &[("flush", Push::Flush), ("bulk", Push::Bulk), ("ignore", Push::Ignore)];

/// Largest limit of connections: a NIC has so many slots.
pub const MOST_CONNECTIONS: u64 = 16_384;
/// Largest limit of (address, length) pairs: the pairs of the largest number of connections.
pub const MOST_PAIRS: u64 = 16 * MOST_CONNECTIONS;
/// Largest limit of bytes of memory that a NIC's announcements can express.
const MOST_MEMORY: u64 = 1 << 42;

const KEYS: &str = "expected random, microsoft, symmetric, or 40 bytes in hexadecimal with colons between them";
const TABLES: &str = "expected balanced, even, or up to 64 hexadecimal digits, each the worker of a bucket, repeated for all 128";

/// Parses a value that is one of `words`.
fn word<T: Copy>(key: &str, value: &str, words: &[(&str, T)]) -> Result<T, String> {
    words.iter().find(|(word, _)| *word == value).map(|(_, meant)| *meant).ok_or_else(|| {
        let allowed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        format!("{key}={value}: expected one of {}", allowed.join(", "))
    })
}

/// Parses a value that is a number from `least` to `most`.
fn number(key: &str, value: &str, least: u64, most: u64) -> Result<u64, String> {
    let found = value.parse().ok().filter(|found| (least..=most).contains(found));
    let unit = [("-usecs", " (microseconds)"), ("-bytes", " (bytes)")].iter().find(|(of, _)| key.ends_with(of));
    let unit = unit.map_or("", |(_, unit)| unit);
    found.ok_or_else(|| format!("{key}={value}: expected a number from {least} to {most}{unit}"))
}

/// Parses a value that is a number from `least` to `most`, or `all` for no limit.
fn limit(key: &str, value: &str, least: u64, most: u64) -> Result<Option<u64>, String> {
    if value == "all" {
        return Ok(None);
    }
    number(key, value, least, most).map(Some).map_err(|why| format!("{why}, or all"))
}

/// Parses a number of bytes, with K, M or G for their powers of 1024.
fn bytes(key: &str, value: &str) -> Result<u64, String> {
    let (digits, shift) = match value.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&value[..at], 10),
        Some((at, 'M' | 'm')) => (&value[..at], 20),
        Some((at, 'G' | 'g')) => (&value[..at], 30),
        _ => (value, 0),
    };
    let found = digits.parse::<u64>().ok().and_then(|found| found.checked_mul(1 << shift)).filter(|found| *found <= MOST_MEMORY);
    found.ok_or_else(|| format!("{key}={value}: expected a number of bytes, such as 64M or 2G, or all"))
}

/// The word of a value.
fn name<T: PartialEq>(of: &T, words: &[(&'static str, T)]) -> &'static str {
    words.iter().find(|(_, meant)| meant == of).map_or("?", |(word, _)| *word)
}

/// Microseconds and frames of a moderation, as they are listed; 0 µs means at once.
fn limits(of: Moderation) -> (u32, u32) {
    match of {
        Moderation::Static { time, frames } => (time, frames),
        Moderation::Off | Moderation::Adaptive | Moderation::Burst => (0, 64),
    }
}

/// Sets `adaptive-…` to one of `words`, or `…-usecs` or `…-frames` of a moderation.
fn moderate(of: &mut Moderation, key: &str, value: &str, words: &[(&str, Option<Moderation>)]) -> Result<(), String> {
    let (time, frames) = limits(*of);
    let fixed = |time: u32, frames: u32| if time == 0 { Moderation::Off } else { Moderation::Static { time, frames } };
    *of = if key.starts_with("adaptive-") {
        word(key, value, words)?.unwrap_or_else(|| fixed(time, frames))
    } else if key.ends_with("-usecs") {
        fixed(number(key, value, 0, 10_000)? as u32, frames)
    } else {
        fixed(time.max(1), number(key, value, 1, 64)? as u32)
    };
    Ok(())
}

impl Offloads {
    /// Applies one `KEY=VALUE`.
    ///
    /// # Errors
    /// A message that names the key and the allowed values; then nothing is changed.
    pub fn set(&mut self, assignment: &str) -> Result<(), String> {
        let Some((key, value)) = assignment.split_once('=') else {
            return Err(format!("{assignment}: write KEY=VALUE, such as lro=reorder"));
        };
        match key {
            "tso" => self.large_sends = word(key, value, ON_OFF)?,
            "lro" => self.lro.mode = word(key, value, MODES)?,
            "lro-push" => self.lro.push = word(key, value, PUSHES)?,
            "lro-bytes" => self.lro.most = number(key, value, 1500, 65_535)? as usize,
            "lro-quiet-usecs" => {
                let most = number(key, value, 1, 100_000)?;
                self.lro.quiet = (self.lro.quiet.0.min(most), most);
            }
            "lro-usecs" => self.lro.age = number(key, value, 1, 100_000)?,
            "lro-gap-usecs" => self.lro.gap = number(key, value, 1, 100_000)?,
            "lro-held-segments" => self.lro.held_segments = number(key, value, 1, 1 << 20)? as usize,
            "lro-held-bytes" => self.lro.held_bytes = number(key, value, 1 << 16, 1 << 30)? as usize,
            "active-ack" => self.active_ack = word(key, value, ON_OFF)?,
            "adaptive-rx" | "rx-usecs" | "rx-frames" => moderate(&mut self.moderation, key, value, &BELLS[..2])?,
            "adaptive-bell" | "bell-usecs" | "bell-frames" => moderate(&mut self.doorbells, key, value, BELLS)?,
            "queues" => self.rss.queues = if value == "all" { 0 } else { number(key, value, 1, 16)? as u8 },
            "rss-key" if value == "random" => self.rss.key = None,
            "rss-key" => self.rss.key = Some(value.parse().map_err(|_| format!("{key}={value}: {KEYS}"))?),
            "rss-indir" => self.rss.indirection = value.parse().map_err(|_| format!("{key}={value}: {TABLES}"))?,
            "connections" => self.limits.connections = limit(key, value, 0, MOST_CONNECTIONS)?.map(|most| most as u32),
            "memory" => self.limits.memory = if value == "all" { None } else { Some(bytes(key, value)?) },
            "pairs" => self.limits.pairs = limit(key, value, 0, MOST_PAIRS)?.map(|most| most as u32),
            "when-full" => self.limits.when_full = word(key, value, FULL)?,
            "during-moves" => self.during_moves = word(key, value, MOVING)?,
            "peer-fin" => self.peer_fin = word(key, value, FINS)?,
            "route-change" => self.route_change = word(key, value, ROUTES)?,
            "processor" => self.limits.processor = limit(key, value, 1, 99)?.map(|most| most as u8),
            _ => {
                let known: Vec<&str> = self.list().iter().map(|(key, _)| *key).collect();
                return Err(format!("{key}: unknown setting; known are {}", known.join(", ")));
            }
        }
        Ok(())
    }

    /// Applies several `KEY=VALUE`s, all of them or none.
    ///
    /// # Errors
    /// As [`Offloads::set`]; also if two of them contradict each other. After an error nothing has changed.
    pub fn set_all<'a>(&mut self, assignments: impl IntoIterator<Item = &'a str>) -> Result<(), String> {
        let mut all = *self;
        let mut done: Vec<&str> = Vec::new();
        for assignment in assignments {
            all.set(assignment)?;
            if let Some(other) = done.iter().find(|other| !all.has(other)) {
                return Err(format!("{other} and {assignment} contradict each other: leave one of them out"));
            }
            done.push(assignment);
        }
        let given = |key: &str| done.iter().find(|assignment| assignment.split('=').next() == Some(key));
        if all.lro.quiet.1 > all.lro.age
            && let (Some(quiet), Some(age)) = (given("lro-quiet-usecs"), given("lro-usecs"))
        {
            return Err(format!("{quiet} and {age} contradict each other: an aggregate goes out after {age} in any case"));
        }
        *self = all;
        Ok(())
    }

    /// Whether a `KEY=VALUE` is in force.
    fn has(&self, assignment: &str) -> bool {
        let mut again = *self;
        again.set(assignment).is_ok() && again == *self
    }

    /// Checks settings that came in another form than by [`Offloads::set`].
    ///
    /// # Errors
    /// A message that names the first value that [`Offloads::set`] would not accept.
    pub fn check(&self) -> Result<(), String> {
        let between = |what: &str, value: u64, least: u64, most: u64| {
            let inside = (least..=most).contains(&value);
            inside.then_some(()).ok_or_else(|| format!("{what}={value}: expected a number from {least} to {most}"))
        };
        let lro = &self.lro;
        between("lro-bytes", lro.most as u64, 1500, 65_535)?;
        between("lro-quiet-usecs", lro.quiet.1, 1, 100_000)?;
        between("lower limit of lro-quiet-usecs", lro.quiet.0, 0, lro.quiet.1)?;
        between("lro-usecs", lro.age, 1, 100_000)?;
        between("lro-gap-usecs", lro.gap, 1, 100_000)?;
        between("lro-held-segments", lro.held_segments as u64, 1, 1 << 20)?;
        between("lro-held-bytes", lro.held_bytes as u64, 1 << 16, 1 << 30)?;
        between("lro connections", lro.connections as u64, 1, 1 << 20)?;
        between("lro aggregates", lro.aggregates as u64, 1, 1 << 16)?;
        for moderation in [self.moderation, self.doorbells] {
            if let Moderation::Static { time, frames } = moderation {
                between("usecs", time.into(), 1, 10_000)?;
                between("frames", frames.into(), 1, 64)?;
            }
        }
        if self.moderation == Moderation::Burst {
            return Err("adaptive-rx=burst: expected one of off, on".into());
        }
        let Limits { connections, memory, pairs, processor, when_full: _ } = self.limits;
        between("connections", connections.unwrap_or(0).into(), 0, MOST_CONNECTIONS)?;
        between("memory", memory.unwrap_or(0), 0, MOST_MEMORY)?;
        between("pairs", pairs.unwrap_or(0).into(), 0, MOST_PAIRS)?;
        between("processor", processor.unwrap_or(1).into(), 1, 99)?;
        between("queues", self.rss.queues.into(), 0, 16)
    }

    /// All settings as (key, value), in the form that [`Offloads::set`] takes.
    pub fn list(&self) -> Vec<(&'static str, String)> {
        let on = |on: bool| if on { "on" } else { "off" };
        let ((time, frames), (bell_time, bell_frames)) = (limits(self.moderation), limits(self.doorbells));
        let text = |value: &dyn Display| value.to_string();
        [
            ("tso", text(&on(self.large_sends))),
            ("lro", text(&name(&self.lro.mode, MODES))),
            ("lro-push", text(&name(&self.lro.push, PUSHES))),
            ("lro-bytes", text(&self.lro.most)),
            ("lro-quiet-usecs", text(&self.lro.quiet.1)),
            ("lro-usecs", text(&self.lro.age)),
            ("lro-gap-usecs", text(&self.lro.gap)),
            ("lro-held-segments", text(&self.lro.held_segments)),
            ("lro-held-bytes", text(&self.lro.held_bytes)),
            ("active-ack", text(&on(self.active_ack))),
            ("adaptive-rx", text(&on(self.moderation == Moderation::Adaptive))),
            ("rx-usecs", text(&time)),
            ("rx-frames", text(&frames)),
            (
                "adaptive-bell",
                text(&BELLS.iter().find(|(_, mode)| *mode == Some(self.doorbells)).map_or("off", |(word, _)| word)),
            ),
            ("bell-usecs", text(&bell_time)),
            ("bell-frames", text(&bell_frames)),
            ("queues", if self.rss.queues == 0 { text(&"all") } else { text(&self.rss.queues) }),
            ("rss-key", self.rss.key.map_or(text(&"random"), |key| text(&key))),
            ("rss-indir", text(&self.rss.indirection)),
            ("connections", self.limits.connections.map_or(text(&"all"), |most| text(&most))),
            ("memory", self.limits.memory.map_or(text(&"all"), |most| text(&most))),
            ("pairs", self.limits.pairs.map_or(text(&"all"), |most| text(&most))),
            ("processor", self.limits.processor.map_or(text(&"all"), |most| text(&most))),
            ("when-full", text(&name(&self.limits.when_full, FULL))),
            ("during-moves", text(&name(&self.during_moves, MOVING))),
            ("peer-fin", text(&name(&self.peer_fin, FINS))),
            ("route-change", text(&name(&self.route_change, ROUTES))),
        ]
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_can_be_set() {
        let mut wanted = Offloads { large_sends: true, active_ack: true, ..Offloads::default() };
        (wanted.during_moves, wanted.peer_fin, wanted.route_change) = (DuringMoves::Drop, PeerFin::Return, RouteChange::Drop);
        wanted.rss =
            baton_rss::RssSettings { queues: 3, key: Some(baton_rss::Key::SYMMETRIC), indirection: "0012".parse().unwrap() };
        wanted.limits = Limits {
            connections: Some(0),
            memory: Some(3 << 30),
            pairs: Some(100),
            processor: Some(70),
            when_full: WhenFull::Refuse,
        };
        wanted.lro = baton_lro::LroSettings { mode: Mode::Reorder, push: Push::Bulk, most: 9000, gap: 7, ..wanted.lro };
        for moderation in [Moderation::Off, Moderation::Static { time: 50, frames: 8 }] {
            (wanted.moderation, wanted.doorbells) = (moderation, moderation);
            let mut set = Offloads::default();
            for (key, value) in wanted.list() {
                if !(key.ends_with("-frames") && moderation == Moderation::Off) {
                    set.set(&format!("{key}={value}")).unwrap();
                }
            }
            assert_eq!(set, wanted);
        }
        let mut set = Offloads::default();
        set.set("adaptive-rx=on").unwrap();
        assert_eq!(set.moderation, Moderation::Adaptive);
        set.set("adaptive-bell=on").unwrap();
        assert_eq!(set.doorbells, Moderation::Adaptive);
        set.set("adaptive-bell=burst").unwrap();
        assert_eq!(set, Offloads { moderation: Moderation::Adaptive, ..Offloads::default() });
        set.set("rx-usecs=0").unwrap();
        assert_eq!(set.moderation, Moderation::Off);
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        for both in [
            ["lro=reorder", "lro=in-order"],
            ["connections=5", "connections=all"],
            ["adaptive-rx=on", "rx-usecs=50"],
            ["rx-usecs=50", "adaptive-rx=on"],
            ["rx-usecs=0", "rx-frames=8"],
            ["adaptive-bell=burst", "bell-frames=8"],
            ["lro-quiet-usecs=2000", "lro-usecs=1000"],
        ] {
            let mut set = Offloads::default();
            let error = set.set_all(both).unwrap_err();
            assert!(both.iter().all(|one| error.contains(one)) && error.contains("contradict"), "{error}");
            assert_eq!(set, Offloads::default());
        }
        for both in [["adaptive-rx=off", "rx-usecs=50"], ["rx-usecs=50", "rx-frames=8"], ["lro=reorder", "lro=reorder"]] {
            let (mut set, mut one_by_one) = (Offloads::default(), Offloads::default());
            set.set_all(both).unwrap();
            both.iter().for_each(|one| one_by_one.set(one).unwrap());
            assert_eq!(set, one_by_one);
        }
        let mut set = Offloads::default();
        assert!(set.set_all(["tso=on", "lro=yes"]).is_err());
        assert_eq!(set, Offloads::default());
    }

    #[test]
    fn a_wrong_setting_is_explained_and_changes_nothing() {
        let mut set = Offloads::default();
        for (wrong, says) in [
            ("lro", "KEY=VALUE"),
            ("lro=yes", "off, in-order, reorder"),
            ("lro-bytes=70000", "1500 to 65535"),
            ("rx-usecs=-1", "0 to 10000"),
            ("adaptive-rx=burst", "off, on"),
            ("adaptive-bell=maybe", "off, on, burst"),
            ("queues=0", "1 to 16"),
            ("rss-key=abc", "40 bytes"),
            ("rss-indir=0,1", "balanced"),
            ("connections=-1", "0 to 16384, or all"),
            ("pairs=many", "0 to 262144, or all"),
            ("memory=32X", "such as 64M"),
            ("memory=", "such as 64M"),
            ("memory=99999999999G", "such as 64M"),
            ("when-full=return", "coldest, refuse, drop"),
            ("route-change=keep", "restore, drop"),
            ("processor=0", "1 to 99, or all"),
            ("rings=4", "known are tso, lro,"),
        ] {
            let error = set.set(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
            assert_eq!(set, Offloads::default());
        }
    }
}
