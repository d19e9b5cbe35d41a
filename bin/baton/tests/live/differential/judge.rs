//! Compares what the lanes of a script have seen, and counts the differences by kind.

use super::script::{Script, Segment, Step};
use super::{OPENING, Outcome};
use baton_wire::Flags;
use std::collections::BTreeMap;
use std::fmt;

/// A difference between the kernel and the NIC in one step of a script.
struct Difference<'a> {
    script: &'a Script,
    /// The step's number.
    at: usize,
    /// What the lanes have seen by the end of each step.
    kernel: &'a [Outcome],
    nic: &'a [Outcome],
    /// Names of the parts that differ.
    parts: String,
}

/// A segment of a script, and what was known before it came.
struct Played<'a> {
    segment: &'a Segment,
    /// Its first sequence number, and the one behind its data.
    start: i32,
    end: i32,
    /// What the kernel had sent and acknowledged, and the smaller and the larger right edge of the two windows.
    sent: i32,
    acknowledged: i32,
    edges: (i32, i32),
    sack_edge: Option<i32>,
    /// The latest clock of the segments before it.
    newest: i32,
}

impl Played<'_> {
    fn has(&self, flags: Flags) -> bool {
        self.segment.flags.intersects(flags)
    }

    /// What it acknowledges.
    fn ack(&self) -> i32 {
        self.sent.wrapping_add(self.segment.ack)
    }

    /// Its timestamp is older than an earlier segment's.
    fn is_old(&self) -> bool {
        self.segment.clock < self.newest && !self.segment.bare
    }

    fn is_plain(&self) -> bool {
        self.has(Flags::ACK) && !self.has(Flags::SYN | Flags::RST)
    }
}

impl<'a> Difference<'a> {
    fn now(&self) -> (&'a Outcome, &'a Outcome) {
        (&self.kernel[self.at], &self.nic[self.at])
    }

    /// The peer's segments up to this step.
    fn played(&self) -> Vec<Played<'a>> {
        let (mut next, mut newest) = (1i32, 0);
        let mut all = Vec::new();
        for (at, step) in self.script.steps.iter().enumerate().take(self.at + 1) {
            let Step::Segment(segment) = step else { continue };
            let start = next.wrapping_add(segment.at);
            let end = start.wrapping_add(i32::from(segment.length));
            if segment.at <= 0 && end.wrapping_sub(next) > 0 {
                next = end;
            }
            let before = at.checked_sub(1).map(|before| (&self.kernel[before], &self.nic[before]));
            let (sent, acknowledged) =
                before.map_or((OPENING as i32, 1), |(kernel, _)| (kernel.wire.sent, kernel.wire.acknowledged));
            let edges = before.map_or((1, i32::MAX), |(kernel, nic)| (kernel.edge.min(nic.edge), kernel.edge.max(nic.edge)));
            let sack_edge = before.and_then(|(kernel, _)| kernel.wire.sacked.iter().map(|block| block.1).max());
            all.push(Played { segment, start, end, sent, acknowledged, edges, sack_edge, newest });
            newest = newest.max(segment.clock);
        }
        all
    }

    /// The segment of this step, if it is one.
    fn last(&self) -> Option<Played<'a>> {
        let is_segment = matches!(self.script.steps.get(self.at), Some(Step::Segment(_)));
        self.played().pop().filter(|_| is_segment)
    }

    fn any(&self, holds: impl Fn(&Played<'a>) -> bool) -> bool {
        self.played().iter().any(holds)
    }

    fn only(&self, parts: &[&str]) -> bool {
        self.parts.split(' ').all(|part| parts.contains(&part))
    }

    /// The smallest window of the peer's, in bytes.
    fn window(&self) -> u32 {
        let windows = self.played().into_iter().map(|played| u32::from(played.segment.window));
        windows.min().unwrap_or(u32::MAX) << self.scale()
    }

    fn scale(&self) -> u8 {
        self.script.offer.scale.unwrap_or(0)
    }

    /// Whether the segments cost Linux more than SO_RCVBUF, which it doubles, at up to 2 KB each beside their bytes.
    fn fills_the_buffer(&self) -> bool {
        let cost: i32 = self.played().iter().map(|played| 2048 + i32::from(played.segment.length)).sum();
        self.script.receive_buffer.is_some_and(|bytes| cost > 2 * bytes)
    }

    /// One of the two has sent less than the program has written.
    fn something_waits(&self) -> bool {
        let waits = |outcome: &Outcome| {
            outcome.wire.sent < (OPENING + outcome.program.written) as i32 || outcome.wire.sent != self.now().0.wire.sent
        };
        waits(self.now().0) || waits(self.now().1)
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
        // RFC 5961 section 5.2 lets acknowledgements of up to MAX.SND.WND before SND.UNA in, RFC 9293 section 3.10.7.4
        // those of old data. Linux since 6.6 counts what it has sent since the connection was opened, and takes none of
        // what lies before that.
        name: "an acknowledgement of what was sent before the connection was opened",
        holds: |it| it.any(|played| played.is_plain() && played.ack() < 0 && played.ack() >= -(65_535 << it.scale())),
    },
    Meant {
        // RFC 7323 section 5.3 needs a valid TS.Recent. The kernel does not tell it: on the NIC it is valid from the
        // first segment on that it is taken from (section 4.3).
        name: "an old timestamp before the NIC knows the peer's",
        holds: |it| {
            let mut known = !it.script.offer.timestamps;
            it.played().iter().any(|played| {
                let met = !known && played.is_old();
                let acceptable = played.ack() <= played.sent && played.ack() >= -(65_535 << it.scale());
                let covers =
                    played.start.wrapping_sub(played.acknowledged) <= 0 && played.end.wrapping_sub(played.acknowledged) >= 0;
                let counts = played.is_plain() && !played.segment.bare && !played.is_old();
                known |= counts && acceptable && covers;
                met
            })
        },
    },
    Meant {
        // RFC 7323 section 4.3: the timestamp of any segment at the left edge counts. Linux takes none beside an old
        // acknowledgement.
        name: "a clock that jumps ahead beside an old acknowledgement",
        holds: |it| {
            it.script.offer.timestamps && it.any(|played| played.is_plain() && played.segment.ack < 0 && played.segment.clock > 0)
        },
    },
    Meant {
        // RFC 5961 section 5.2: a segment with an ancient acknowledgement is dropped as a whole. Linux takes its data
        // where its header prediction holds.
        name: "the next data beside an ancient acknowledgement",
        holds: |it| {
            it.only(&["answered", "acknowledged", "sacked"])
                && it.last().is_some_and(|played| {
                    let next = played.start == played.acknowledged && played.segment.length > 0;
                    next && played.is_plain() && played.ack() < -(65_535 << it.scale()) + played.sent
                })
        },
    },
    Meant {
        // RFC 7323 section 5.3, R1. The NIC takes a bare acknowledgement whose timestamp is no older than a time-out
        // and a fifth: it was overtaken. Linux only one that says nothing new; and the time-outs differ after something
        // was sent again.
        name: "an acknowledgement that was overtaken",
        holds: |it| {
            let overtaken = |played: &Played<'_>| {
                let bare = played.segment.length == 0 && played.is_plain() && !played.has(Flags::FIN);
                bare && played.is_old() && played.start == played.acknowledged && played.newest - played.segment.clock < 2000
            };
            it.only(&["answered", "sacked", "sent", "fin"]) && it.any(overtaken)
        },
    },
    Meant {
        // RFC 7323 section 5.3, R1: what has an old timestamp is answered. Linux says nothing to an old acknowledgement
        // without data.
        name: "an old acknowledgement with an old timestamp",
        holds: |it| {
            it.only(&["answered", "sacked"])
                && it.any(|played| {
                    let bare = played.segment.length == 0 && !played.has(Flags::SYN | Flags::FIN | Flags::RST);
                    bare && played.is_old() && played.start < played.acknowledged
                })
        },
    },
    Meant {
        // RFC 9293 section 3.10.7.4: in CLOSE-WAIT and later "this should not occur": the text is ignored and the
        // segment acknowledged. Linux resets the connection, or says nothing.
        name: "data behind the peer's end",
        holds: |it| {
            let mut ended = false;
            it.played().iter().any(|played| {
                let met = ended && (played.segment.length > 0 || played.has(Flags::FIN));
                ended |= played.has(Flags::FIN);
                met
            })
        },
    },
    Meant {
        // RFC 9293 section 3.10.7.4 looks at the sequence number first, and acknowledges what is unacceptable; Linux at
        // the flag.
        name: "a segment without ACK",
        holds: |it| it.only(&["answered", "sacked"]) && it.any(|played| !played.has(Flags::ACK | Flags::SYN | Flags::RST)),
    },
    Meant {
        // RFC 2018 is about data: Linux counts a FIN as a byte, and forgets what it would report of a duplicate when
        // one comes.
        name: "SACK blocks and a FIN",
        holds: |it| it.only(&["sacked"]) && it.any(|played| played.has(Flags::FIN)),
    },
    Meant {
        // RFC 9293 section 3.8.6.2.1 (1): the NIC waits for half of the largest window, or for the override time-out.
        // Linux sends at once.
        name: "a window smaller than a segment",
        holds: |it| it.only(&["answered", "sent", "fin", "sacked"]) && it.window() < 1500 && it.something_waits(),
    },
    Meant {
        // What the congestion window lets out after a time-out: Linux takes it back by F-RTO (RFC 5682, which is not
        // offered), counts what is in flight in other segments where they have SACK blocks, and holds a FIN back that
        // the NIC lets out.
        name: "how much is sent after data was sent again",
        holds: |it| {
            let (kernel, nic) = it.now();
            let apart = (kernel.wire.sent - nic.wire.sent).unsigned_abs();
            it.only(&["answered", "sent", "fin", "sacked"])
                && kernel.resent
                && nic.resent
                && it.something_waits()
                && apart <= 10 * 1460
        },
    },
    Meant {
        // RFC 9293 section 3.10.7.4: what lies inside of the window is taken, and a reset at RCV.NXT counts (RFC 5961
        // section 3.2). Linux takes a segment that ends beyond its window whole, if its queue is empty, or else drops
        // it. How large a window is differs.
        name: "a segment that ends beyond a window",
        holds: |it| it.any(|played| played.end > played.edges.0 && played.start <= played.edges.1),
    },
    Meant {
        // RFC 2018 section 8 lets a receiver drop what it has reported and not acknowledged, RFC 9293 section 3.8.6
        // advises against taking back a window. Linux does both when the segments cost more than SO_RCVBUF, and does
        // not answer what it has no room for. The NIC takes all that lies in its window, and keeps it.
        name: "data that Linux has no memory for",
        holds: |it| {
            let (kernel, nic) = it.now();
            let has = |outcome: &Outcome, start: i32, end: i32| {
                let sacked = outcome.wire.sacked.iter().any(|block| block.0 <= start && end <= block.1);
                sacked || end <= outcome.wire.acknowledged
            };
            let lacks = |played: &Played<'_>| {
                let next = kernel.wire.acknowledged.max(played.start);
                let is_new = played.segment.length > 0 && played.is_plain() && next < played.end;
                is_new && !has(kernel, next, played.end) && has(nic, next, played.end)
            };
            let of_data = ["answered", "sacked", "acknowledged", "read", "open", "shrunk"];
            let parts = if kernel.wire.shrunk { &of_data[..] } else { &of_data[..4] };
            it.only(parts) && it.fills_the_buffer() && it.any(lacks)
        },
    },
    Meant {
        // RFC 2883 section 4: a segment that brings again what was held is reported. Linux does not look behind the
        // block that it merges the segment with.
        name: "a duplicate in a segment that adjoins what is held",
        holds: |it| {
            let (kernel, nic) = it.now();
            let Some((duplicate, rest)) = nic.wire.sacked.split_first() else { return false };
            let before = it.at.checked_sub(1).map(|before| &it.kernel[before].wire.sacked[..]).unwrap_or_default();
            it.only(&["sacked"])
                && kernel.wire.sacked == rest
                && it.last().is_some_and(|played| {
                    let adjoins = before.iter().any(|block| block.1 == played.start);
                    adjoins && played.start < duplicate.0 && duplicate.1 <= played.end
                })
        },
    },
    Meant {
        // The connection goes to the kernel, which has nothing of what was out of order, before the reset: it
        // acknowledges once more.
        name: "a reset behind data out of order",
        holds: |it| {
            let ahead = |played: &Played<'_>| played.start > played.acknowledged && played.start <= played.edges.1;
            it.only(&["answered", "sacked"]) && it.last().is_some_and(|played| played.has(Flags::RST)) && it.any(ahead)
        },
    },
    Meant {
        // RFC 5961 section 7 leaves the limit open; it is half a second on both sides, which about two steps take.
        name: "how often challenges go out",
        holds: |it| {
            let limited = |played: &Played<'_>| {
                let far = played.ack() > played.sent || played.ack() < played.sent - (65_535 << it.scale());
                far || played.has(Flags::SYN | Flags::RST) || played.segment.length == 0 && played.start != played.acknowledged
            };
            let earlier = it.played().iter().filter(|played| limited(played)).count();
            it.only(&["answered", "sacked"]) && earlier > 1 && it.last().is_some_and(|played| limited(&played))
        },
    },
    Meant {
        // RFC 5961 section 3.2: only a reset at RCV.NXT counts, any other one in the window is challenged. Linux also
        // takes the one that is next behind all that was received out of order.
        name: "a reset at the right edge of what is held",
        holds: |it| it.any(|played| played.has(Flags::RST) && played.sack_edge == Some(played.start)),
    },
    Meant {
        // RFC 9293 section 3.10.7.4: the acknowledgement that answers a segment may ride on data that is sent again at
        // that moment.
        name: "an answer on data that is sent again",
        holds: |it| {
            // Such data says nothing of SACK blocks: those of an earlier answer still stand.
            let rides = |lane: &[Outcome]| {
                let now = &lane[it.at];
                let stand = it.at.checked_sub(1).is_some_and(|before| lane[before].wire.sacked == now.wire.sacked);
                now.resent_now && (!now.wire.answered || stand)
            };
            it.only(&["answered", "sacked"]) && (rides(it.kernel) || rides(it.nic))
        },
    },
    Meant {
        // Nothing follows the peer's end: what the window is then says nothing. A socket of Linux's in TIME-WAIT has a
        // small one.
        name: "the window behind the peer's end",
        holds: |it| {
            it.only(&["shrunk", "open"]) && it.any(|played| played.has(Flags::FIN) && played.end < it.now().0.wire.acknowledged)
        },
    },
    Meant {
        // RFC 9293 section 3.10.7.4: <SEQ=SND.NXT>. Where the peer has taken back its window, Linux acknowledges with
        // the number at its edge, as a probe does.
        name: "an acknowledgement while the window has shrunk",
        holds: |it| {
            let shrunk = |played: &Played<'_>| played.segment.ack < 0 && u32::from(played.segment.window) << it.scale() < 1500;
            it.only(&["answered", "sacked"]) && !it.now().0.wire.answered && it.any(shrunk)
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
    /// Judges one script by what its two connections in the kernel and the one on the NIC have seen. Whether they
    /// differ as is not meant.
    pub fn judge(&mut self, number: u64, script: &Script, lanes: [&[Outcome]; 3]) -> bool {
        let [first, second, moved] = lanes;
        for (at, ((one, other), nic)) in first.iter().zip(second).zip(moved).enumerate() {
            if !parts(one, other).is_empty() {
                self.undecided += 1;
                return false;
            }
            let parts = parts(one, nic);
            if parts.is_empty() {
                continue;
            }
            let step = script.steps.get(at);
            let difference = Difference { script, at, kernel: first, nic: moved, parts };
            if let Some(meant) = MEANT.iter().find(|meant| (meant.holds)(&difference)) {
                *self.meant.entry(meant.name).or_default() += 1;
                return false;
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
            return true;
        }
        self.alike += 1;
        false
    }

    /// Forgets the differences that are not meant. Returns how many there were.
    pub fn forget_differences(&mut self) -> u64 {
        std::mem::take(&mut self.differing).values().map(|(count, _)| count).sum()
    }

    /// How many scripts differ in a part, without those that are meant to.
    pub fn differing(&self, part: &str) -> u64 {
        let has = |kind: &str| kind.rsplit(": ").next().unwrap_or_default().split(' ').any(|name| name == part);
        self.differing.iter().filter(|(kind, _)| has(kind)).map(|(_, (count, _))| count).sum()
    }

    /// Whether there were no differences but those that are meant, and enough was judged. Unless `on_the_wire`, only
    /// what the program sees counts.
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
