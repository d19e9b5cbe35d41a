//! Compares what the lanes of a script have seen, and counts the differences by kind.

use super::meant::{Difference, Meant};
use super::script::{SEGMENT, Script, Step};
use super::stage::Outcome;
use std::collections::BTreeMap;
use std::fmt;

/// What was found so far.
#[derive(Default)]
pub struct Tally {
    played: u64,
    /// Scripts without any difference.
    alike: u64,
    /// The kernel's two connections differed.
    undecided: u64,
    /// How often each entry of the list was met, by the parts that differed, and the first script.
    meant: BTreeMap<(&'static str, String), (u64, u64)>,
    /// Kinds of differences, how often each was seen, and the first scripts.
    differing: BTreeMap<String, (u64, Vec<String>)>,
}

/// Names of the parts in which two lanes differ at a step. SACK blocks are those of the last answer: without a new one
/// the step says nothing of them.
fn parts(kernel: &[Outcome], nic: &[Outcome], at: usize) -> Vec<&'static str> {
    let before = at.checked_sub(1).map(|before| (&kernel[before].wire.sacked, &nic[before].wire.sacked));
    let (kernel, nic) = (&kernel[at], &nic[at]);
    let (k, n) = (&kernel.wire, &nic.wire);
    let reported = before != Some((&k.sacked, &n.sacked));
    let all = [
        ("offered", k.offered != n.offered),
        ("answered", k.answered != n.answered),
        ("reset", k.reset != n.reset),
        ("sent", k.sent != n.sent),
        ("fin", k.fin != n.fin),
        ("acknowledged", k.acknowledged != n.acknowledged),
        ("sacked", k.sacked != n.sacked && reported),
        ("open", k.open != n.open),
        ("shrunk", k.shrunk != n.shrunk),
        ("read", kernel.program.read != nic.program.read),
        ("wrong", kernel.program.wrong != nic.program.wrong),
        ("written", kernel.program.written != nic.program.written),
        ("end", kernel.program.end != nic.program.end),
        ("error", kernel.program.error != nic.program.error),
    ];
    all.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
}

fn kind(step: Option<&Step>) -> String {
    match step {
        Some(Step::Segment(segment)) if segment.length > SEGMENT => format!("large {:?}", segment.flags),
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
        let mut alike = true;
        self.played += 1;
        for at in 0..first.len() {
            if !parts(first, second, at).is_empty() {
                self.undecided += 1;
                return false;
            }
            let parts = parts(first, moved, at);
            if parts.is_empty() {
                continue;
            }
            alike = false;
            let step = script.steps.get(at);
            let difference = Difference { script, at, kernel: first, nic: moved, parts };
            if let Some(meant) = Meant::find(&difference) {
                let parts = format!("{}: {}", kind(step), difference.parts.join(" "));
                for meant in &meant {
                    self.meant.entry((meant.name, parts.clone())).or_insert((0, number)).0 += 1;
                }
                if meant.iter().all(|meant| meant.is_passing()) {
                    continue;
                }
                return false;
            }
            let seen = self.differing.entry(format!("{}: {}", kind(step), difference.parts.join(" "))).or_default();
            seen.0 += 1;
            if seen.1.len() < 3 {
                let before: Vec<String> = script.steps[..at].iter().map(|step| format!("{step:?}")).collect();
                let window = |lane: &[Outcome]| {
                    let before = at.checked_sub(1).map(|before| (lane[before].wire.acknowledged, lane[before].edge));
                    before.map_or_else(String::new, |(left, right)| format!("{left}..{right}"))
                };
                let example = format!(
                    "script {number} ({:?}{}, SO_RCVBUF {:?}), after [{}]: {step:?}\n      kernel (window {}) {:?}\n      \
                     nic    (window {}) {:?}",
                    script.offer,
                    if script.cookie { ", by a SYN cookie" } else { "" },
                    script.receive_buffer,
                    before.join("; "),
                    window(first),
                    first[at],
                    window(moved),
                    moved[at]
                );
                seen.1.push(example);
            }
            return true;
        }
        self.alike += u64::from(alike);
        false
    }

    /// Forgets the differences that are not meant. Returns how many there were.
    pub fn forget_differences(&mut self) -> u64 {
        std::mem::take(&mut self.differing).values().map(|(count, _)| count).sum()
    }

    /// How many scripts differ in one of these parts, without those that are meant to.
    pub fn differing(&self, parts: &[&str]) -> u64 {
        let has = |kind: &str| kind.rsplit(": ").next().unwrap_or_default().split(' ').any(|name| parts.contains(&name));
        self.differing.iter().filter(|(kind, _)| has(kind)).map(|(_, (count, _))| count).sum()
    }

    /// Whether there were no differences but those that are meant, and enough was judged.
    pub fn holds(&self) -> bool {
        self.differing.is_empty() && self.undecided * 10 < self.played
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} scripts, {} alike, {} undecided, meant:", self.played, self.alike, self.undecided)?;
        for ((name, parts), (count, number)) in &self.meant {
            writeln!(out, "{count:6} {name} ({parts}), first in script {number}")?;
        }
        let mut kinds: Vec<_> = self.differing.iter().collect();
        kinds.sort_by_key(|(_, (count, _))| std::cmp::Reverse(*count));
        for (kind, (count, examples)) in kinds {
            writeln!(out, "{count} × {kind}")?;
            examples.iter().try_for_each(|example| writeln!(out, "    {example}"))?;
        }
        Ok(())
    }
}
