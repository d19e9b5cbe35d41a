//! What one worker's TCP takes on a wire in memory: segments in order, put into the program's memory, announced and
//! acknowledged, as in [`crate::datapath`], by time.

use crate::bars::Bar;
use crate::datapath::{Workload, run_workload};
use crate::status::StatusLine;
use anyhow::Result;
use baton_bed::statistics::quantile;
use serde::Serialize;

/// Segments that wait when the worker looks.
const BURST: u32 = 16;
/// Connections, served in turn.
const CONNECTIONS: u32 = 16;
/// Segments of a run.
const SEGMENTS: u64 = 1_600_000;

/// The bench's result.
#[derive(Clone, Debug, Serialize)]
pub struct WireReport {
    /// Nanoseconds a segment of 1448 bytes: median, least and greatest of the rounds.
    pub nanos_1448: [f64; 3],
    /// The same of 64 bytes.
    pub nanos_64: [f64; 3],
    /// The figures with bounds.
    pub bars: Vec<Bar>,
}

/// Measures both sizes, in turn.
///
/// # Errors
/// If the worker does not do what it should.
pub fn run(rounds: usize) -> Result<WireReport> {
    let (mut nanos, rounds, status) = ([Vec::new(), Vec::new()], rounds.max(1), StatusLine::new());
    for round in 1..=rounds {
        for (size, nanos) in [1448, 64].into_iter().zip(&mut nanos) {
            status.show(format_args!("segments of {size} bytes on a wire in memory: round {round} of {rounds}"));
            let workload = Workload { connections: CONNECTIONS, size, burst: BURST };
            nanos.push(run_workload(workload, SEGMENTS)? as f64 / SEGMENTS as f64);
        }
    }
    let [nanos_1448, nanos_64] = nanos.map(|mut nanos| [0.5, 0.0, 1.0].map(|share| quantile(&mut nanos, share)));
    let bars = vec![
        Bar::least("wire.gbps_1448", 25.0, 1448.0 * 8.0 / nanos_1448[0]),
        Bar::least("wire.mpps_64", 4.0, 1e3 / nanos_64[0]),
    ];
    Ok(WireReport { nanos_1448, nanos_64, bars })
}
