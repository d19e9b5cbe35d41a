//! The differences between the kernel's answers and the NIC's that are meant.

use super::script::{SEGMENT, Script, Segment, Step};
use super::stage::{OPENING, Outcome};
use baton_wire::Flags;

/// Right edges of the smallest and the largest window of a connection that has just moved.
const FIRST_EDGES: (i32, i32) = (63_500, 120_000);
/// Bytes of SO_RCVBUF that a socket has which does not set it: the test bed's tcp_rmem.
const RECEIVE_BUFFER: i32 = 131_072;
/// Bytes that use up half of the smallest window.
const HALF_A_WINDOW: i32 = 30_000;

/// A difference between the kernel and the NIC in one step of a script.
pub struct Difference<'a> {
    pub script: &'a Script,
    /// The step's number.
    pub at: usize,
    /// What the lanes have seen by the end of each step.
    pub kernel: &'a [Outcome],
    pub nic: &'a [Outcome],
    /// Names of the parts that differ.
    pub parts: Vec<&'static str>,
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
    /// The kernel has acknowledged an earlier FIN, and has sent its own.
    ended: bool,
    has_ended: bool,
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
        self.segment.is_plain()
    }

    /// It begins inside of one of the windows, and ends beyond one of them.
    fn ends_beyond(&self) -> bool {
        self.end > self.edges.0 && self.start <= self.edges.1
    }
}

impl<'a> Difference<'a> {
    fn now(&self) -> (&'a Outcome, &'a Outcome) {
        (&self.kernel[self.at], &self.nic[self.at])
    }

    /// The peer's segments up to this step.
    fn played(&self) -> Vec<Played<'a>> {
        let (mut next, mut newest) = (1i32, 0);
        let (mut all, mut ends) = (Vec::new(), Vec::new());
        for (at, step) in self.script.steps.iter().enumerate().take(self.at + 1) {
            let Step::Segment(segment) = step else { continue };
            let start = next.wrapping_add(segment.at);
            let end = start.wrapping_add(i32::from(segment.length));
            let behind = end.wrapping_add(i32::from(segment.flags.contains(Flags::FIN)));
            if segment.at <= 0 && behind.wrapping_sub(next) > 0 {
                next = behind;
            }
            let before = at.checked_sub(1).map(|before| (&self.kernel[before], &self.nic[before]));
            let has_ended = before.is_some_and(|(kernel, _)| kernel.wire.fin);
            let (sent, acknowledged) =
                before.map_or((OPENING as i32, 1), |(kernel, _)| (kernel.wire.sent, kernel.wire.acknowledged));
            let edges = before.map_or(FIRST_EDGES, |(kernel, nic)| (kernel.edge.min(nic.edge), kernel.edge.max(nic.edge)));
            let sack_edge = before.and_then(|(kernel, _)| kernel.wire.sacked.iter().map(|block| block.1).max());
            let ended = ends.iter().any(|end| *end < acknowledged);
            all.push(Played { segment, start, end, sent, acknowledged, edges, sack_edge, newest, ended, has_ended });
            if segment.flags.contains(Flags::FIN) {
                ends.push(end);
            }
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

    /// The smallest window of the peer's, in bytes.
    fn window(&self) -> u32 {
        let windows = self.played().into_iter().map(|played| u32::from(played.segment.window));
        windows.min().unwrap_or(u32::MAX) << self.scale()
    }

    /// Whether the NIC has sent data beyond the peer's window, which the last segment that it must have taken has set,
    /// a later one, or an earlier one whose window goes on to count: it has a later sequence number (RFC 9293 section
    /// 3.10.7.4, SND.WL1), or the same ones and a larger window (Linux, tcp_may_update_window). A byte may be a probe.
    fn is_beyond_the_window(&self) -> bool {
        let played = self.played();
        let is_taken = |played: &Played<'_>| {
            let is_new = !played.is_old() && !played.segment.bare;
            played.is_plain() && is_new && played.segment.ack == 0 && played.start == played.acknowledged
        };
        let Some(last) = played.iter().rposition(is_taken) else { return false };
        let edge = |played: &Played<'_>| played.ack().saturating_add(i32::from(played.segment.window) << self.scale());
        let start = played[last].start;
        let ahead = played[..last].iter().filter(|early| early.start >= start);
        // The acknowledgement of the opening has the first sequence number of a script.
        let opening = (start <= 1).then(|| OPENING as i32 + (65_535 << self.scale()));
        let edges = played[last..].iter().chain(ahead).filter(|played| played.is_plain()).map(edge);
        let edge = edges.chain(opening).max();
        let nic = &self.now().1.wire;
        edge.is_some_and(|edge| nic.sent - i32::from(nic.fin) > edge.saturating_add(1))
    }

    fn scale(&self) -> u8 {
        self.script.agreed().scale.unwrap_or(0)
    }

    /// Whether the segments cost Linux more than SO_RCVBUF, which it doubles where it is set, at up to 2 KB each beside
    /// their bytes; those of a large frame are in pages, too.
    fn fills_the_buffer(&self) -> bool {
        let beside = |length| if length > SEGMENT { 2048 + 4096 } else { 2048 };
        let cost = |played: &Played<'_>| beside(played.segment.length) + i32::from(played.segment.length);
        let cost: i32 = self.played().iter().map(cost).sum();
        cost > self.script.receive_buffer.map_or(RECEIVE_BUFFER, |bytes| 2 * bytes)
    }

    /// Whether the peer has sent so much that how large a window is, and when it opens, makes a difference.
    fn uses_the_window(&self) -> bool {
        self.played().iter().map(|played| i32::from(played.segment.length)).sum::<i32>() > HALF_A_WINDOW
    }

    /// One of the two has sent less than the program has written.
    fn something_waits(&self) -> bool {
        let waits = |outcome: &Outcome| {
            outcome.wire.sent < (OPENING + outcome.program.written) as i32 || outcome.wire.sent != self.now().0.wire.sent
        };
        waits(self.now().0) || waits(self.now().1)
    }
}

/// A difference that is meant. docs/internals/conformance.md has the same list.
pub struct Meant {
    pub name: &'static str,
    /// What the difference is about, and what lets the NIC answer as it does.
    pub rfc: &'static str,
    pub nic: &'static str,
    pub linux: &'static str,
    /// What may differ.
    pub parts: &'static [&'static str],
    /// Whether it is about this script, by what the peer has sent so far.
    holds: fn(&Difference<'_>) -> bool,
}

impl Meant {
    /// The entries that a difference is of: each part of it has one that names it. None if a part has none.
    pub fn find(difference: &Difference<'_>) -> Option<Vec<&'static Meant>> {
        let mut found: Vec<&'static Meant> = Vec::new();
        for part in &difference.parts {
            let names = |meant: &&Meant| meant.parts.contains(part);
            if !found.iter().any(|meant| names(meant)) {
                found.push(MEANT.iter().find(|meant| names(meant) && (meant.holds)(difference))?);
            }
        }
        Some(found)
    }

    /// It is about an answer that was or was not given, or whether a window is open, and changes nothing: what follows
    /// in a script is compared as well.
    pub fn is_passing(&self) -> bool {
        self.parts.iter().all(|part| ["answered", "sacked", "open"].contains(part))
    }

    /// Its row in the document.
    pub fn row(&self) -> String {
        format!("| {} | {} | {} | {} | {} |", self.name, self.rfc, self.nic, self.linux, self.parts.join(", "))
    }
}

/// The list of differences. The first one that names a part and fits counts: those that say most stand first.
pub const MEANT: &[Meant] = &[
    Meant {
        name: "a reset at the right edge of what is held",
        rfc: "RFC 5961 section 3.2",
        nic: "only a reset at RCV.NXT counts, any other one in the window is challenged: the program goes on",
        linux: "the one behind all that was received out of order counts, too: calls fail, segments are answered with RST",
        parts: &["answered", "reset", "sacked", "sent", "fin", "written", "error"],
        holds: |it| {
            let fails = it.now().0.program.error.is_some() && it.now().1.program.error.is_none();
            let seen = it.parts.iter().any(|part| ["written", "error"].contains(part));
            (fails || !seen) && it.any(|played| played.has(Flags::RST) && played.sack_edge == Some(played.start))
        },
    },
    Meant {
        name: "SACK blocks and a FIN",
        rfc: "RFC 2018 section 3",
        nic: "blocks are of data alone",
        linux: "a FIN counts as a byte; when one comes, what would be reported of a duplicate is forgotten",
        parts: &["sacked"],
        holds: |it| it.any(|played| played.is_plain() && played.has(Flags::FIN)),
    },
    Meant {
        name: "a segment without ACK",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "its sequence number is looked at first: an unacceptable one is acknowledged",
        linux: "dropped",
        parts: &["answered", "sacked"],
        holds: |it| it.last().is_some_and(|played| !played.has(Flags::ACK | Flags::SYN | Flags::RST)),
    },
    Meant {
        name: "an answer on data that is sent again",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "an acknowledgement may ride on such data, which has no SACK blocks",
        linux: "the same, at other moments",
        parts: &["answered", "sacked"],
        holds: |it| {
            // Such data says nothing of SACK blocks: those of an earlier answer still stand.
            let rides = |lane: &[Outcome]| {
                let now = &lane[it.at];
                let stand = it.at.checked_sub(1).is_some_and(|before| lane[before].wire.sacked == now.wire.sacked);
                now.resent_now && (!now.wire.answered || stand)
            };
            rides(it.kernel) || rides(it.nic)
        },
    },
    Meant {
        name: "an old acknowledgement with an old timestamp",
        rfc: "RFC 7323 section 5.3, R1",
        nic: "what has an old timestamp is answered",
        linux: "an old acknowledgement without data is not",
        parts: &["answered", "sacked"],
        holds: |it| {
            it.any(|played| {
                let bare = played.segment.length == 0 && !played.has(Flags::SYN | Flags::FIN | Flags::RST);
                bare && played.is_old() && played.start < played.acknowledged
            })
        },
    },
    Meant {
        name: "a duplicate in a segment that adjoins what is held",
        rfc: "RFC 2883 section 4",
        nic: "what was held and comes again is reported",
        linux: "not looked for behind the block that the segment is merged with",
        parts: &["sacked"],
        holds: |it| {
            let (kernel, nic) = it.now();
            let Some((duplicate, rest)) = nic.wire.sacked.split_first() else { return false };
            kernel.wire.sacked == rest
                && it.last().is_some_and(|played| {
                    // What adjoins has been made one block with a large frame, too, wherever that begins.
                    let adjoins =
                        it.any(|early| early.segment.length > 0 && early.end == played.start || early.segment.length > SEGMENT);
                    adjoins && played.start <= duplicate.0 && duplicate.1 <= played.end
                })
        },
    },
    Meant {
        name: "how often challenges go out",
        rfc: "RFC 5961 section 7",
        nic: "two a second; which one is left out depends on the moment",
        linux: "the same",
        parts: &["answered", "sacked"],
        holds: |it| {
            let limited = |played: &Played<'_>| {
                let far = played.ack() > played.sent || played.ack() < played.sent - (65_535 << it.scale());
                far || played.has(Flags::SYN | Flags::RST) || played.segment.length == 0 && played.start != played.acknowledged
            };
            let earlier = it.played().iter().filter(|played| limited(played)).count();
            earlier > 1 && it.last().is_some_and(|played| limited(&played))
        },
    },
    Meant {
        name: "a reset with data out of order",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "the kernel that gets the connection, without that data, acknowledges once more",
        linux: "no answer",
        parts: &["answered", "sacked"],
        holds: |it| {
            let ahead = |played: &Played<'_>| played.start > played.acknowledged && played.start <= played.edges.1;
            it.last().is_some_and(|played| played.has(Flags::RST)) && it.any(ahead)
        },
    },
    Meant {
        name: "an acknowledgement while the peer's window has shrunk",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "has the sequence number SND.NXT",
        linux: "that of the window's edge, as a probe",
        parts: &["answered", "sacked"],
        holds: |it| {
            let edge = |played: &Played<'_>| played.ack().wrapping_add(i32::from(played.segment.window) << it.scale());
            let shrunk = |played: &Played<'_>| {
                played.is_plain() && played.segment.ack < 0 && played.ack() >= 0 && edge(played) < it.now().0.wire.sent
            };
            !it.now().0.wire.answered && it.any(shrunk)
        },
    },
    Meant {
        name: "the window behind the peer's end",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "as before",
        linux: "small in TIME-WAIT: no data is taken any more",
        parts: &["shrunk", "open"],
        holds: |it| it.any(|played| played.has(Flags::FIN) && played.end < it.now().0.wire.acknowledged),
    },
    Meant {
        name: "the next data beside an ancient acknowledgement",
        rfc: "RFC 5961 section 5.2",
        nic: "dropped",
        linux: "taken, where header prediction holds",
        parts: &["answered", "acknowledged", "sacked"],
        holds: |it| {
            it.last().is_some_and(|played| {
                let next = played.start == played.acknowledged && played.segment.length > 0;
                next && played.is_plain() && played.ack() < -(65_535 << it.scale()) + played.sent
            })
        },
    },
    Meant {
        name: "both sides have ended, the peer before its last acknowledgement",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "as in TIME-WAIT until the program closes, so that what is unread can return to the kernel, which acknowledges once more",
        linux: "no answer; CLOSED if the peer was first: what follows is answered with RST",
        parts: &["answered", "reset"],
        holds: |it| {
            let lasts = |played: &&Played<'_>| played.has_ended && played.is_plain() && played.ack() == played.sent;
            it.played().iter().find(lasts).is_some_and(|played| played.ended)
        },
    },
    Meant {
        name: "data behind the peer's end",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "ignored, and acknowledged",
        linux: "the connection is reset, or no answer; another FIN is taken",
        parts: &["answered", "reset", "acknowledged", "sacked", "sent"],
        holds: |it| {
            // Before a reset the acknowledgement does not count.
            let resets = it.now().0.wire.reset.is_some() || !it.parts.contains(&"sent");
            resets && it.any(|played| played.ended && (played.segment.length > 0 || played.has(Flags::FIN)))
        },
    },
    Meant {
        name: "data behind an end that came out of order",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "not taken",
        linux: "taken, if the segment that fills the gap goes beyond the end: the program reads it, and no end",
        parts: &["answered", "acknowledged", "sacked", "read", "end"],
        holds: |it| {
            let all = it.played();
            let ends = |early: &Played<'_>| early.is_plain() && early.has(Flags::FIN) && early.start > early.acknowledged;
            all.iter().any(|early| ends(early) && all.iter().any(|played| played.is_plain() && played.end > early.end))
        },
    },
    Meant {
        name: "a window smaller than a segment",
        rfc: "RFC 9293 section 3.8.6.2.1",
        nic: "waits for half of the largest window, or for the override time-out",
        linux: "used at once",
        parts: &["answered", "sent", "fin"],
        holds: |it| it.window() < 1500 && it.something_waits() && !it.is_beyond_the_window(),
    },
    Meant {
        name: "how much is sent after data was sent again",
        rfc: "RFC 5681 section 3.1, RFC 6298 section 5",
        nic: "what the congestion window lets out after a time-out; a FIN is not held back",
        linux: "F-RTO (RFC 5682) takes it back, what is in flight is counted otherwise; a FIN is held back",
        parts: &["answered", "sent", "fin"],
        holds: |it| {
            let (kernel, nic) = it.now();
            let apart = (kernel.wire.sent - nic.wire.sent).unsigned_abs();
            kernel.resent && nic.resent && it.something_waits() && apart <= 10 * 1460 && !it.is_beyond_the_window()
        },
    },
    Meant {
        name: "an acknowledgement that was overtaken",
        rfc: "RFC 7323 section 5.3, R1",
        nic: "a bare one counts if its timestamp is no older than a time-out and a fifth",
        linux: "only if it says nothing new",
        parts: &["answered", "sent", "fin"],
        holds: |it| {
            it.any(|played| {
                let bare = played.segment.length == 0 && played.is_plain() && !played.has(Flags::FIN);
                bare && played.is_old() && played.start == played.acknowledged && played.newest - played.segment.clock < 2000
            })
        },
    },
    Meant {
        name: "an acknowledgement of what was sent before the connection was opened",
        rfc: "RFC 5961 section 5.2",
        nic: "up to MAX.SND.WND before SND.UNA counts, and what comes with it is taken",
        linux: "none is taken, nor what comes with it",
        parts: &["answered", "acknowledged", "sacked"],
        holds: |it| it.any(|played| played.is_plain() && played.ack() < 0 && played.ack() >= -(65_535 << it.scale())),
    },
    Meant {
        name: "an old timestamp before the NIC knows the peer's",
        rfc: "RFC 7323 sections 4.3 and 5.3",
        nic: "TS.Recent is valid from the first segment on that it is taken from: the kernel does not show its own",
        linux: "valid from the handshake on",
        parts: &["answered", "acknowledged", "sacked"],
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
        name: "a clock that jumps ahead beside an old acknowledgement",
        rfc: "RFC 7323 section 4.3",
        nic: "the timestamp of any segment at the left edge counts",
        linux: "none beside an old acknowledgement",
        parts: &["answered", "acknowledged", "sacked"],
        holds: |it| {
            it.script.offer.timestamps && it.any(|played| played.is_plain() && played.segment.ack < 0 && played.segment.clock > 0)
        },
    },
    Meant {
        name: "a segment that ends beyond a window",
        rfc: "RFC 9293 section 3.10.7.4, RFC 5961 section 3.2",
        nic: "what lies inside of the window is taken, and a reset at RCV.NXT counts; windows differ in size",
        linux: "taken whole, if the queue is empty, or dropped",
        parts: &["answered", "acknowledged", "sacked", "open"],
        holds: |it| it.any(Played::ends_beyond),
    },
    Meant {
        name: "an acknowledgement beside data that ends beyond a window",
        rfc: "RFC 9293 section 3.10.7.4",
        nic: "counts, with what lies inside of the window",
        linux: "dropped with the segment, unless that is taken whole",
        parts: &["answered", "sent", "fin"],
        holds: |it| it.something_waits() && it.any(|played| played.ends_beyond() && played.is_plain()),
    },
    Meant {
        name: "when a window update goes out",
        rfc: "RFC 9293 section 3.8.6.2.2",
        nic: "when a quarter of receive memory was read since, and less than half of it is offered",
        linux: "when the window can be doubled; a segment's room is free when all of it was read",
        parts: &["answered", "sacked"],
        holds: |it| matches!(it.script.steps.get(it.at), Some(Step::Read(_))) && it.uses_the_window(),
    },
    Meant {
        name: "how much there is room for",
        rfc: "RFC 9293 section 3.8.6.2.2",
        nic: "as much as receive memory holds",
        linux: "an estimate by what segments have cost so far: of large frames the same memory holds more",
        parts: &["open"],
        holds: |it| !it.now().0.wire.shrunk && it.uses_the_window(),
    },
    Meant {
        name: "data that Linux has no memory for",
        rfc: "RFC 2018 section 8, RFC 9293 section 3.8.6",
        nic: "what lies in the window is taken and kept",
        linux: "dropped without an answer when segments cost more than SO_RCVBUF, also after it was reported; the window is taken back",
        parts: &["answered", "sacked", "acknowledged", "open", "shrunk"],
        holds: |it| {
            let (kernel, nic) = it.now();
            let has = |outcome: &Outcome, start: i32, end: i32| {
                let acknowledged = outcome.wire.acknowledged;
                // A block into which an acknowledgement points was reported earlier, and is not held any more.
                let is_held = |block: &(i32, i32)| !(block.0 < acknowledged && acknowledged < block.1);
                let sacked = outcome.wire.sacked.iter().any(|block| is_held(block) && block.0 <= start && end <= block.1);
                sacked || end <= acknowledged
            };
            let lacks = |played: &Played<'_>| {
                let next = kernel.wire.acknowledged.max(played.start);
                let end = played.end.wrapping_add(i32::from(played.has(Flags::FIN)));
                let is_new = played.start < end && played.is_plain() && next < end;
                is_new && !has(kernel, next, end) && has(nic, next, end)
            };
            // What Linux drops it does not compare with what it holds.
            let reports_more = nic.wire.sacked.split_first().is_some_and(|(_, rest)| *rest == kernel.wire.sacked);
            // Of what it had before, and without SACK blocks, only the answer shows it.
            let is_data = |played: Played<'_>| played.segment.length > 0 && played.is_plain();
            let of_answers = it.parts.iter().all(|part| ["answered", "sacked"].contains(part));
            let silent = !kernel.wire.answered && nic.wire.answered || kernel.wire.answered && reports_more;
            let silent = of_answers && silent && it.last().is_some_and(is_data);
            let of_window = it.parts.iter().any(|part| ["open", "shrunk"].contains(part));
            (kernel.wire.shrunk || !of_window) && it.fills_the_buffer() && (silent || it.any(lacks))
        },
    },
];
