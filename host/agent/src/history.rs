//! Records why each move ended as it did: in the connection's events, and in the counts of its program.

use crate::connection::{Connection, Then};
use crate::counts::{Counted, Counts};
use crate::events::Reasons;
use crate::session::Session;
use baton_linux::events::monotonic_micros;
use baton_moves::{Conclusion, Refusal};
use baton_protocol::events::What;
use baton_protocol::program::Place;

/// Why a connection has moved that nobody has asked for, and one that somebody has.
pub(crate) const AT_RANDOM: &str = "at random";
pub(crate) const ASKED_TO: &str = "asked to";

/// Why a connection is in the kernel after a death, or that makes NICs die.
pub(crate) const NIC_DIED: &str = "the NIC died";
pub(crate) const AGENT_DIED: &str = "the agent died";
pub(crate) const KILLS_NIC: &str = "the NIC died each time that it was there";

/// Why a connection is in the kernel that its program has closed.
const CLOSED: &str = "its program has closed it";

/// Why a connection that has moved did, as far as that is known before those who asked for it are answered.
fn cause(connection: &Connection) -> &str {
    let waiting = connection.extra.as_ref().map(|extra| &extra.waiting);
    let (then, askers) = waiting.map_or((&[][..], true), |waiting| (&waiting.then[..], waiting.askers.is_empty()));
    let given_back = then.iter().find_map(|(then, _)| match then {
        Then::GiveBack { reason, .. } if !reason.is_empty() => Some(reason.as_str()),
        Then::Forget(_) => Some(CLOSED),
        _ => None,
    });
    let usual = if askers && then.is_empty() && !connection.is_wanted() { AT_RANDOM } else { ASKED_TO };
    given_back.or(connection.must_return()).unwrap_or(usual)
}

/// Records the end of a move in the connection's events, and counts it. `began`: microseconds of the monotonic clock.
pub(crate) fn record(
    entry: &mut Session,
    number: u32,
    (counts, reasons): (&mut Counts, &mut Reasons),
    conclusion: &Conclusion,
    began: u64,
) {
    let Some(Some(connection)) = entry.connections.get_mut(number as usize) else { return };
    let on_nic = connection.place() == Place::Nic;
    let nic = connection.cid.map(|cid| cid.nic() as u8);
    let made = connection.made_by == Place::Nic && connection.made == 0;
    let (what, counted, reason) = match conclusion {
        Conclusion::Moved if on_nic && made => (What::Made, Some(Counted::ToNic), None),
        Conclusion::Moved if on_nic => (What::ToNic, Some(Counted::ToNic), Some(cause(connection).into())),
        Conclusion::Moved => (What::ToKernel, Some(Counted::Returned), Some(cause(connection).into())),
        Conclusion::Recovered if connection.kills_nic => (What::ToKernel, Some(Counted::Returned), Some(KILLS_NIC.into())),
        Conclusion::Recovered if connection.events.last() == Some(What::AgentDied) => {
            (What::ToKernel, Some(Counted::Returned), Some(AGENT_DIED.into()))
        }
        Conclusion::Recovered => (What::ToKernel, Some(Counted::Returned), Some(NIC_DIED.into())),
        Conclusion::Lost(refusal, _) => (What::Lost, Some(Counted::Lost), Some(refusal.to_string())),
        Conclusion::Stays(Refusal::Ended) if connection.given_up => {
            (What::Lost, Some(Counted::Lost), Some(connection.reason.to_string()))
        }
        Conclusion::Stays(Refusal::Ended) => (What::Ended, None, None),
        // Recorded where it takes effect: most of these are about memory that stays the same.
        Conclusion::Grown => return,
        // Somebody else was faster, or it is tried again by itself in a moment.
        Conclusion::Stays(Refusal::CalledOff | Refusal::Attaching | Refusal::Searching) => return,
        Conclusion::Stays(refusal) if on_nic => (What::StayedOnNic, Some(Counted::Refused), Some(refusal.to_string())),
        Conclusion::Stays(refusal) => (What::StayedInKernel, Some(Counted::Refused), Some(refusal.to_string())),
    };
    if let Some(counted) = counted {
        counts.note(entry.user, &entry.opening.program, counted, reason.as_deref().unwrap_or_default());
    }
    let (now, reason) = (monotonic_micros(), reason.map(|reason: String| reasons.shared(&reason)));
    connection.events.note(now, what, nic, reason, now.saturating_sub(began));
}
