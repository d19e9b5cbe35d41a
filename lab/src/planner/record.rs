//! A load from counters: what connections carried in a stretch of time, and what their program used. Pure.

use super::costs::{Line, SIZES};
use super::load::Load;
use anyhow::{Result, ensure};

/// What connections of a program carried while they were watched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Carried {
    /// Connections that carried something.
    pub connections: u32,
    /// How long they were watched.
    pub seconds: f64,
    /// Bytes that came.
    pub received: u64,
    /// Bytes that went.
    pub sent: u64,
    /// Exchanges, see [`exchanges`].
    pub exchanges: u64,
    /// Nanoseconds of CPU that their program used, all of it.
    pub program: u64,
}

/// Exchanges of a connection that received and sent so many segments with data and bytes. A request and its answer are
/// taken to be a segment each way at least, so the direction with fewer segments counts; what goes one way alone, or in
/// bulk, counts as one exchange for each 512 KiB.
pub fn exchanges(segments: [u64; 2], bytes: u64) -> u64 {
    let [one, other] = segments;
    one.min(other).max(bytes.div_ceil(SIZES[3] as u64))
}

/// The same of all connections of a NIC together, which counts segments that came and frames that went, with data and
/// without. Where nearly all bytes go one way in large segments it is taken to be bulk data.
pub fn exchanges_of_nic(segments: [u64; 2], received: u64, sent: u64) -> u64 {
    /// Full segments have about so many bytes.
    const FULL: u64 = 1000;
    let (less, more) = (received.min(sent), received.max(sent));
    let is_bulk = less * 64 < more && more / segments[0].max(segments[1]).max(1) >= FULL;
    exchanges(if is_bulk { [0; 2] } else { segments }, received + sent)
}

impl Carried {
    /// The load. `program` is what an exchange costs the program on the way on which it was watched: what it used more
    /// is its own work.
    ///
    /// # Errors
    /// If nothing was carried.
    pub fn load(&self, name: &str, program: &Line) -> Result<Load> {
        ensure!(
            self.exchanges > 0 && self.connections > 0 && self.seconds > 0.0,
            "its connections carried nothing in {:.0} s: watch it while it is at work",
            self.seconds
        );
        let count = self.exchanges as f64;
        let (request, answer) = (self.received as f64 / count, self.sent as f64 / count);
        let calls = program.of(request, answer, self.connections.into());
        let load = Load {
            rate: Some(count / self.seconds),
            program: (self.program as f64 / count - calls).max(0.0),
            peer_here: false,
            ..Load::closed(name, self.connections, 1.0, request, answer)
        };
        load.check()?;
        Ok(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::load::Size;

    #[test]
    fn exchanges_are_counted_by_segments_and_bulk_by_bytes() {
        assert_eq!(exchanges([100, 120], 20_000), 100);
        assert_eq!(exchanges([700_000, 0], 1 << 30), 2048);
        assert_eq!(exchanges([0, 0], 0), 0);
        assert_eq!(exchanges_of_nic([1000, 1200], 64_000, 256_000), 1000);
        assert_eq!(exchanges_of_nic([700_000, 350_000], 1 << 30, 100), 2049);
    }

    #[test]
    fn what_calls_do_not_explain_is_the_programs_own_work() {
        let line = Line { exchange: 7000.0, ..Line::default() };
        let carried = Carried { connections: 8, seconds: 2.0, received: 6400, sent: 25_600, exchanges: 100, program: 1_000_000 };
        let load = carried.load("a", &line).unwrap();
        assert_eq!((load.rate, load.program), (Some(50.0), 3000.0));
        assert_eq!(load.sizes, [Size { share: 1.0, request: 64.0, answer: 256.0 }]);
        assert_eq!(Carried { program: 1000, ..carried }.load("a", &line).unwrap().program, 0.0);
        let error = Carried { exchanges: 0, ..carried }.load("a", &line).unwrap_err().to_string();
        assert!(error.contains("carried nothing in 2 s"), "{error}");
    }
}
