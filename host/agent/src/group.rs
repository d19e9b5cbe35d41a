//! Groups of sessions: a program and what it starts. Their connections may be moved to and fro at random, and are reported together.

use crate::connection::Connection;
use baton_client::protocol::{Flip, Report};
use baton_kernel::events::monotonic_micros;
use baton_kernel::examine::Stay;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;

/// A group.
pub(crate) struct Group {
    pub flip: Option<Flip>,
    pub report: Report,
    file: Option<File>,
    random: u64,
}

impl Group {
    pub fn new(flip: Option<Flip>, file: Option<OwnedFd>) -> Group {
        let random = flip.map_or(0, |flip| flip.seed);
        Group { flip, report: Report::default(), file: file.map(File::from), random }
    }

    /// Microseconds until a connection's next move, if its group moves them at random.
    pub fn interval(&mut self) -> Option<u64> {
        let flip = self.flip?;
        let random = splitmix(&mut self.random);
        Some(flip.min + random % (flip.max.saturating_sub(flip.min) + 1))
    }

    /// A move has not taken place.
    pub fn stayed(&mut self, stay: &Stay) {
        *self.report.stayed.entry(stay.to_string()).or_default() += 1;
        match stay {
            Stay::Lost(..) => self.report.resets += 1,
            // It was closed just then.
            Stay::System(_, error) if error.kind() == io::ErrorKind::NotConnected => {}
            Stay::System(..) => self.report.errors += 1,
            _ => {}
        }
    }

    /// A connection is the program's alone again.
    pub fn forgotten(&mut self, connection: &Connection) {
        *self.report.connections_by_moves.entry(connection.made).or_default() += 1;
        if connection.made == 0 {
            let longest = self.report.unmoved.entry(connection.reason.clone()).or_default();
            *longest = (monotonic_micros().saturating_sub(connection.since) / 1000).max(*longest);
        }
    }

    /// Writes the report as one line into its file, in place of what is there.
    pub fn write(&mut self) -> io::Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let line = serde_json::to_string(&self.report)?;
        file.rewind()?;
        file.write_all(line.as_bytes())?;
        file.write_all(b"\n")?;
        let end = file.stream_position()?;
        file.set_len(end)
    }
}

/// The next of a sequence of numbers (Steele, Lea and Flood's SplitMix64).
fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The groups by name.
#[derive(Default)]
pub(crate) struct Groups {
    groups: HashMap<u64, Group, std::hash::BuildHasherDefault<std::hash::DefaultHasher>>,
}

impl Groups {
    pub fn add(&mut self, name: u64, group: Group) {
        self.groups.insert(name, group);
    }

    pub fn has(&self, name: u64) -> bool {
        self.groups.contains_key(&name)
    }

    pub fn get(&mut self, name: u64) -> Option<&mut Group> {
        self.groups.get_mut(&name)
    }

    /// Something of a group has come to an end: its report is brought up to date.
    pub fn write(&mut self, name: u64) {
        if let Some(Err(error)) = self.get(name).map(Group::write) {
            eprintln!("baton agent: the report cannot be written: {error}");
        }
    }
}
