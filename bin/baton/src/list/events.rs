//! A connection's events, in words and as JSON.

use super::columns::duration;
use baton_protocol::events::{EventList, Happened, What};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::collections::HashMap;

/// An event of a connection.
#[derive(Clone, Debug)]
pub struct Event {
    happened: Happened,
    reason: Option<String>,
}

impl Event {
    /// The events of each connection, by session and number.
    pub fn by_connection(lists: &[EventList]) -> HashMap<(u32, u32), Vec<Event>> {
        let histories = lists.iter().flat_map(|list| list.histories.iter().map(move |history| (list, history)));
        let event = |list: &EventList, happened: &Happened| Event {
            happened: *happened,
            reason: list.reason(happened).map(str::to_owned),
        };
        histories
            .map(|(list, history)| {
                let events = history.events.iter().map(|happened| event(list, happened)).collect();
                ((history.session, history.connection), events)
            })
            .collect()
    }

    /// Microseconds since then.
    pub fn ago_us(&self) -> u64 {
        self.happened.ago_us
    }

    /// What has happened. `numbers`: there are several NICs.
    pub fn text(&self, numbers: bool) -> String {
        let Happened { what, nic, figure, .. } = self.happened;
        let nic = match nic {
            Some(number) if numbers => format!("NIC {number}"),
            _ => "the NIC".into(),
        };
        let took = duration(u64::from(figure));
        let times = if figure > 1 { format!(" ({figure} times)") } else { String::new() };
        let text = match what {
            What::Made => return format!("{nic} made it"),
            What::ToNic => format!("moved to {nic} in {took}"),
            What::ToKernel => format!("moved to the kernel in {took}"),
            What::StayedInKernel => format!("stayed in the kernel{times}"),
            What::StayedOnNic => format!("stayed on {nic}{times}"),
            What::NicDied => format!("{nic} died"),
            What::AgentDied => format!("the agent died, and {nic} with it"),
            What::Grown(receive, send) => {
                format!("its memory grew to {} for receiving, {} for sending, in {took}", size(receive), size(send))
            }
            What::Ended => format!("ended on {nic}"),
            What::Lost => "was lost".into(),
        };
        self.reason.as_ref().map_or_else(|| text.clone(), |reason| format!("{text}: {reason}"))
    }
}

/// A power of two, in bytes.
fn size(power: u8) -> String {
    match power {
        0..10 => format!("{} bytes", 1 << power),
        10..20 => format!("{} KiB", 1 << (power - 10)),
        _ => format!("{} MiB", 1u64.checked_shl(u32::from(power) - 20).unwrap_or(0)),
    }
}

/// The name of a kind of event in JSON.
fn name(what: What) -> &'static str {
    match what {
        What::Made => "made",
        What::ToNic => "to_nic",
        What::ToKernel => "to_kernel",
        What::StayedInKernel => "stayed_in_kernel",
        What::StayedOnNic => "stayed_on_nic",
        What::NicDied => "nic_died",
        What::AgentDied => "agent_died",
        What::Grown(..) => "grown",
        What::Ended => "ended",
        What::Lost => "lost",
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Happened { ago_us, what, nic, figure, .. } = self.happened;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("ago_us", &ago_us)?;
        map.serialize_entry("what", name(what))?;
        if let Some(nic) = nic {
            map.serialize_entry("nic", &nic)?;
        }
        if what.takes_time() {
            map.serialize_entry("took_us", &figure)?;
        }
        if what.repeats() {
            map.serialize_entry("times", &figure)?;
        }
        if let What::Grown(receive, send) = what {
            let bytes = |power: u8| 1u64.checked_shl(u32::from(power)).unwrap_or(0);
            map.serialize_entry("receive_bytes", &bytes(receive))?;
            map.serialize_entry("send_bytes", &bytes(send))?;
        }
        if let Some(reason) = &self.reason {
            map.serialize_entry("reason", reason)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_protocol::events::History;

    fn events() -> Vec<Event> {
        let mut list = EventList::default();
        let mut happened = |ago_us, what, figure, reason: Option<&str>| Happened {
            ago_us,
            what,
            nic: Some(1),
            reason: reason.map(|reason| list.number_of(reason)),
            figure,
        };
        let events = vec![
            happened(5_000_000, What::ToNic, 412, Some("asked to")),
            happened(4_000_000, What::Grown(19, 21), 80, None),
            happened(3_000_000, What::NicDied, 0, Some("it crashed")),
            happened(2_000_000, What::ToKernel, 13_000, Some("the NIC died")),
            happened(1_000_000, What::StayedInKernel, 3, Some("the NIC has no room for it")),
        ];
        list.histories.push(History { session: 2, connection: 7, events });
        Event::by_connection(&[list]).remove(&(2, 7)).expect("events")
    }

    #[test]
    fn events_are_said_in_plain_words() {
        let texts: Vec<_> = events().iter().map(|event| event.text(false)).collect();
        assert_eq!(
            texts,
            [
                "moved to the NIC in 412us: asked to",
                "its memory grew to 512 KiB for receiving, 2 MiB for sending, in 80us",
                "the NIC died: it crashed",
                "moved to the kernel in 13ms: the NIC died",
                "stayed in the kernel (3 times): the NIC has no room for it",
            ]
        );
        assert_eq!(events()[2].text(true), "NIC 1 died: it crashed");
    }

    #[test]
    fn as_json_each_has_what_it_is_about() {
        let json = serde_json::to_value(events()).expect("JSON");
        assert_eq!(json[0]["took_us"], 412);
        assert_eq!((&json[1]["receive_bytes"], &json[1]["send_bytes"]), (&(1 << 19).into(), &(1 << 21).into()));
        assert_eq!((&json[2]["what"], &json[2]["took_us"]), (&"nic_died".into(), &serde_json::Value::Null));
        assert_eq!((&json[4]["times"], &json[4]["reason"]), (&3.into(), &"the NIC has no room for it".into()));
    }

    /// Sizes are bounded whatever an agent answers.
    #[test]
    fn sizes_are_bounded() {
        assert_eq!(
            (size(9), size(12), size(30), size(255)),
            ("512 bytes".into(), "4 KiB".into(), "1024 MiB".into(), "0 MiB".into())
        );
    }
}
