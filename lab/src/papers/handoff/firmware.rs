//! The NIC's firmware on one of its processors and on two (section 4.1, Table 2): each packet passes through the layers
//! of Table 2, on whichever processor is free.

use super::numbers as n;

/// Layers of Table 2 in the order in which a received packet passes them: other (the device), IP and Ethernet, TCP,
/// handoff. A sent packet passes them the other way.
const ORDER: [usize; 4] = [3, 2, 1, 0];
/// Packets that are run.
const PACKETS: u64 = 20_000;

/// Megabits of data a second that a NIC with so many processors sends, with an acknowledgement for each segment. The
/// device and the message rings serve one processor at a time, and so does a connection.
pub fn throughput(processors: usize) -> f64 {
    // Table 2's shares of the calibrated cycles.
    let scale = n::CYCLES_PER_SEGMENT / 2.0 / n::TABLE_2[0][4];
    let connections = n::CONNECTIONS_OF_A_NIC;
    let mut free_at = vec![0.0f64; 2 + connections];
    // When each processor is free, which packet it has, and how many layers of it are done.
    let mut processor = vec![(0.0f64, 0u64, 0usize); processors];
    let mut next = 0;
    for one in &mut processor {
        one.1 = next;
        next += 1;
    }
    let mut end = 0.0f64;
    while let Some(at) =
        (0..processors).filter(|at| processor[*at].1 < PACKETS).min_by(|a, b| processor[*a].0.total_cmp(&processor[*b].0))
    {
        let (now, packet, done) = processor[at];
        let layer = if packet % 2 == 0 { ORDER[3 - done] } else { ORDER[done] };
        let owner = match layer {
            3 => Some(0),
            0 => Some(1),
            1 => Some(2 + (packet / 2) as usize % connections),
            _ => None,
        };
        let start = owner.map_or(now, |owner| now.max(free_at[owner]));
        let finished = start + scale * n::TABLE_2[0][layer];
        if let Some(owner) = owner {
            free_at[owner] = finished;
        }
        end = end.max(finished);
        processor[at] = if done < 3 { (finished, packet, done + 1) } else { (finished, next, 0) };
        next += u64::from(done == 3);
    }
    let segments = PACKETS as f64 / 2.0;
    segments * f64::from(n::SEGMENT) * 8.0 / (end / n::NIC_CLOCK) / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_processor_has_the_calibrated_rate_and_several_are_limited_by_what_they_share() {
        assert!((throughput(1) - 110.0).abs() < 0.5);
        let [two, many] = [throughput(2), throughput(16)];
        assert!(two > 1.5 * 110.0 && two < 220.0, "{two}");
        // The device alone takes 1417 of 6773 cycles.
        assert!(many < 110.0 * 6773.0 / 1417.0 + 0.5, "{many}");
    }
}
