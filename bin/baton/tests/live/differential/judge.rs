//! Compares what the lanes of a script have seen, and counts the differences by kind.

use super::Outcome;
use super::script::{Script, Segment, Step};
use baton_wire::Flags;
use std::collections::BTreeMap;
use std::fmt;

/// A difference between the kernel and the NIC in one step of a script.
struct Difference<'a> {
    script: &'a Script,
    /// The step's number.
    at: usize,
    kernel: &'a Outcome,
    /// Names of the parts that differ.
    parts: String,
}

impl Difference<'_> {
    fn segment(&self) -> Option<&Segment> {
        match self.script.steps.get(self.at) {
            Some(Step::Segment(segment)) => Some(segment),
            _ => None,
        }
    }

    /// The peer's segments before this step.
    fn earlier(&self) -> impl Iterator<Item = &Segment> {
        self.script.steps[..self.at].iter().filter_map(|step| match step {
            Step::Segment(segment) => Some(segment),
            _ => None,
        })
    }

    fn only(&self, parts: &[&str]) -> bool {
        self.parts.split(' ').all(|part| parts.contains(&part))
    }

    /// The smallest window of the peer's, in bytes.
    fn window(&self) -> u32 {
        let windows = self.earlier().chain(self.segment()).map(|segment| u32::from(segment.window));
        windows.min().unwrap_or(u32::MAX) << self.script.offer.scale.unwrap_or(0)
    }
}

/// A difference that is meant, with the reason.
struct Meant {
    name: &'static str,
    holds: fn(&Difference<'_>) -> bool,
}

/// The list of differences.
const MEANT: &[Meant] = &[
    Meant {
        // RFC 5961 section 5.2 lets acknowledgements of up to MAX.SND.WND before SND.UNA in, RFC 9293 section 3.10.7.4 those of old data.
        // Linux since 6.6 counts what it has sent since the connection was opened, and takes none of what lies before that.
        name: "an acknowledgement of what was sent before the connection was opened",
        holds: |it| {
            it.segment()
                .is_some_and(|segment| segment.flags.contains(Flags::ACK) && it.kernel.wire.sent.saturating_add(segment.ack) < 0)
        },
    },
    Meant {
        // RFC 9293 section 3.10.7.4: in CLOSE-WAIT and later "this should not occur": the text is ignored and the segment acknowledged.
        // Linux resets the connection, or says nothing.
        name: "data behind the peer's end",
        holds: |it| it.earlier().any(|segment| segment.flags.contains(Flags::FIN)) && it.segment().is_some(),
    },
    Meant {
        // RFC 9293 section 3.10.7.4 looks at the sequence number first, and acknowledges what is unacceptable; Linux at the flag.
        name: "a segment without ACK",
        holds: |it| {
            it.only(&["answered", "sacked"])
                && it.segment().is_some_and(|segment| !segment.flags.intersects(Flags::ACK | Flags::SYN | Flags::RST))
        },
    },
    Meant {
        // RFC 2018 is about data: Linux counts a FIN as a byte, and forgets what it would report of a duplicate when one comes.
        name: "SACK blocks and a FIN",
        holds: |it| it.only(&["sacked"]) && it.earlier().chain(it.segment()).any(|segment| segment.flags.contains(Flags::FIN)),
    },
    Meant {
        // RFC 9293 section 3.8.6.2.1 (1): the NIC waits for half of the largest window, or for the override time-out. Linux sends at once.
        name: "a window smaller than a segment",
        holds: |it| it.only(&["answered", "sent", "fin"]) && it.window() < 1500,
    },
    Meant {
        // The connection goes to the kernel, which the out-of-order data is given to again, before the reset: it acknowledges it once more.
        name: "a reset behind data out of order",
        holds: |it| {
            it.only(&["answered"])
                && it.segment().is_some_and(|segment| segment.flags.contains(Flags::RST))
                && it.earlier().any(|segment| segment.at > 0)
        },
    },
];

/// What was found so far.
#[derive(Default)]
pub struct Tally {
    alike: u64,
    /// The kernel's two connections differed.
    undecided: u64,
    meant: BTreeMap<&'static str, u64>,
    /// Kinds of differences, how often each was seen, and the first scripts.
    differing: BTreeMap<String, (u64, Vec<String>)>,
}

/// Names of the parts in which two outcomes differ.
fn parts(kernel: &Outcome, nic: &Outcome) -> String {
    let (k, n) = (&kernel.wire, &nic.wire);
    let all = [
        ("answered", k.answered != n.answered),
        ("reset", k.reset != n.reset),
        ("sent", k.sent != n.sent),
        ("fin", k.fin != n.fin),
        ("acknowledged", k.acknowledged != n.acknowledged),
        ("sacked", k.sacked != n.sacked),
        ("open", k.open != n.open),
        ("shrunk", k.shrunk != n.shrunk),
        ("read", kernel.program.read != nic.program.read),
        ("wrong", kernel.program.wrong != nic.program.wrong),
        ("written", kernel.program.written != nic.program.written),
        ("end", kernel.program.end != nic.program.end),
        ("error", kernel.program.error != nic.program.error),
    ];
    all.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect::<Vec<_>>().join(" ")
}

fn kind(step: Option<&Step>) -> String {
    match step {
        Some(Step::Segment(segment)) => format!("{:?}", segment.flags),
        Some(Step::Write(_)) => "write".into(),
        Some(Step::Read(_)) => "read".into(),
        Some(Step::Shutdown) => "shutdown".into(),
        None => "the last read".into(),
    }
}

impl Tally {
    /// Judges one script by what its two connections in the kernel and the one on the NIC have seen.
    pub fn judge(&mut self, number: u64, script: &Script, lanes: [&[Outcome]; 3]) {
        let [first, second, nic] = lanes;
        for (at, ((one, other), nic)) in first.iter().zip(second).zip(nic).enumerate() {
            if one != other {
                self.undecided += 1;
                return;
            }
            if one == nic {
                continue;
            }
            let step = script.steps.get(at);
            let difference = Difference { script, at, kernel: one, parts: parts(one, nic) };
            if let Some(meant) = MEANT.iter().find(|meant| (meant.holds)(&difference)) {
                *self.meant.entry(meant.name).or_default() += 1;
                return;
            }
            let seen = self.differing.entry(format!("{}: {}", kind(step), difference.parts)).or_default();
            seen.0 += 1;
            if seen.1.len() < 3 {
                let before: Vec<String> = script.steps[..at].iter().map(|step| format!("{step:?}")).collect();
                let example = format!(
                    "script {number} ({:?}, SO_RCVBUF {:?}), after [{}]: {step:?}\n      kernel {one:?}\n      nic    {nic:?}",
                    script.offer,
                    script.receive_buffer,
                    before.join("; ")
                );
                seen.1.push(example);
            }
            return;
        }
        self.alike += 1;
    }

    /// Whether there were no differences but those that are meant, and enough was judged. Unless `on_the_wire`, only what the program sees
    /// counts.
    pub fn holds(&self, on_the_wire: bool) -> bool {
        const PROGRAMS: [&str; 5] = ["read", "wrong", "written", "end", "error"];
        let all = self.alike
            + self.undecided
            + self.meant.values().sum::<u64>()
            + self.differing.values().map(|(count, _)| count).sum::<u64>();
        let seen = |kind: &str| kind.rsplit(": ").next().unwrap_or_default().split(' ').any(|part| PROGRAMS.contains(&part));
        let differs = self.differing.keys().any(|kind| on_the_wire || seen(kind));
        !differs && self.undecided * 10 < all
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} alike, {} undecided, meant: {:?}", self.alike, self.undecided, self.meant)?;
        let mut kinds: Vec<_> = self.differing.iter().collect();
        kinds.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
        for (kind, (count, examples)) in kinds {
            writeln!(out, "{count} × {kind}")?;
            examples.iter().try_for_each(|example| writeln!(out, "    {example}"))?;
        }
        Ok(())
    }
}
