//! Large receive's counters by reason: why it gave to the kernel what it did.

use baton_abi::layout::Counter;
use serde_json::Value;

/// A reason: its name in JSON and as a label, what it means, and the counter of a worker.
pub struct Reason {
    pub name: &'static str,
    pub what: &'static str,
    pub counter: Counter,
}

const fn reason(name: &'static str, what: &'static str, counter: Counter) -> Reason {
    Reason { name, what, counter }
}

/// Why what had waited, an aggregate or a single segment, went to the kernel.
pub const ENDED: [Reason; 7] = [
    reason("full", "it had no room for another segment", Counter::EndedFull),
    reason("fin", "its last segment had FIN", Counter::EndedFin),
    reason("push", "its last segment had PSH", Counter::EndedPush),
    reason("short", "its last segment was shorter than the others", Counter::EndedShort),
    reason("other", "the connection's next frame could not be appended", Counter::EndedOther),
    reason("timeout", "no segment came for a while, or it had waited as long as it may", Counter::EndedTimeout),
    reason("requested", "the settings changed, or the connection went to the NIC", Counter::EndedRequested),
];

/// Why frames were passed on unchanged.
pub const PASSED: [Reason; 10] = [
    reason("large", "they stood for several segments already", Counter::PassedLarge),
    reason("not-ip", "they were not IP", Counter::PassedNotIp),
    reason("not-tcp", "they were not TCP", Counter::PassedNotTcp),
    reason("fragment", "they were fragments", Counter::PassedFragment),
    reason("malformed", "a length or an offset in them was wrong", Counter::PassedMalformed),
    reason("ip-options", "they had IPv4 options", Counter::PassedIpOptions),
    reason("padded", "bytes followed the IP packet", Counter::PassedPadded),
    reason("checksum", "a checksum was wrong", Counter::PassedChecksum),
    reason("flags", "they had SYN, RST, URG or CWR, or no ACK", Counter::PassedFlags),
    reason("no-data", "they carried no data", Counter::PassedNoData),
];

fn count(counters: &[u64], reason: &Reason) -> u64 {
    counters.get(reason.counter as usize).copied().unwrap_or(0)
}

/// Prints the reasons that there were: a line for each.
pub fn print(counters: &[u64]) {
    for (title, reasons) in [("to the kernel after waiting, since", &ENDED[..]), ("passed on at once, since", &PASSED[..])] {
        let mut found = reasons.iter().filter(|reason| count(counters, reason) > 0).peekable();
        if found.peek().is_some() {
            println!("\nlarge receive: {title}");
        }
        for reason in found {
            println!("{:>14}  {}", count(counters, reason), reason.what);
        }
    }
}

/// All reasons.
pub fn to_json(counters: &[u64]) -> Value {
    let of = |reasons: &[Reason]| -> Value {
        reasons.iter().map(|reason| (reason.name.to_string(), Value::from(count(counters, reason)))).collect()
    };
    serde_json::json!({ "ended": of(&ENDED), "passed": of(&PASSED) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::COUNTERS;
    use std::collections::BTreeSet;

    #[test]
    fn each_reason_is_there_once_with_its_count() {
        let counters: Vec<u64> = (0..COUNTERS as u64).map(|at| at + 1).collect();
        let shown = to_json(&counters);
        for (part, reasons) in [("ended", &ENDED[..]), ("passed", &PASSED[..])] {
            for reason in reasons {
                assert_eq!(shown[part][reason.name], counters[reason.counter as usize], "{part}.{}", reason.name);
            }
            assert_eq!(reasons.iter().map(|reason| reason.name).collect::<BTreeSet<_>>().len(), reasons.len());
        }
        // Of an agent that counts less there is nothing.
        assert_eq!(to_json(&[])["ended"]["full"], 0);
    }
}
