//! Grants of slots in which NICs make listeners' next connections.

use super::{Listener, MOST_WAITING, share};
use crate::agent::Agent;
use crate::nic::{Hardware, NicProcess};
use crate::numbers::turn;
use crate::record::unpublish;
use baton_abi::{Cid, Control, Message, Operation};

/// Slots that are granted at most in one poll of the listeners, and listeners that get some.
const MOST_GRANTED: usize = 256;

/// Grants a NIC a slot for a listener's next connection. None if it has no slot, or no room for the command.
fn grant_slot(nic: &mut NicProcess, hardware: &Hardware, listener: u32) -> Option<Cid> {
    let cid = nic.take_slot_to_grant()?;
    // A record that is there is of an earlier occupant.
    unpublish(&hardware.memory, cid.slot());
    if nic.post(Message::control(Operation::NicControl, Control::Grant, cid, listener, 0)).is_err() {
        nic.give_slot(cid);
        return None;
    }
    Some(cid)
}

/// Grants each NIC that has answered as many slots as a listener's accept queue has room for.
pub(super) fn grant(agent: &mut Agent, id: u32) {
    let mut left = agent.listeners.left(agent.nics.len(), agent.settings.nic.slots);
    grant_some(agent, id, MOST_WAITING, &mut left);
}

/// Grants each NIC that has answered up to `most` more slots for a listener, as far as its accept queue has room and
/// some are `left`. Returns how many were granted.
fn grant_some(agent: &mut Agent, id: u32, most: usize, left: &mut [usize]) -> usize {
    let Some(listener) = agent.listeners.by_id.get_mut(&id) else { return 0 };
    // Linux accepts one more than the backlog says.
    let room = (listener.listening.backlog as usize + 1).min(MOST_WAITING);
    let served: Vec<usize> = listener.served.iter().copied().filter(|nic| listener.has_answer(*nic)).collect();
    let before = listener.granted.len();
    listener.lacks_slots = false;
    for at in served {
        let nic = &mut agent.nics[at];
        let had = listener.granted.iter().filter(|cid| cid.nic() == at).count();
        let wanted = room.saturating_sub(had + listener.waiting.len());
        let quarter = agent.settings.nic.slots / 4;
        let granted = wanted.min(most).min(share::of(left[at], had + listener.waiting.len(), wanted, quarter));
        let granted = (0..granted).map_while(|_| grant_slot(nic, &agent.hardware[at], id));
        listener.granted.extend(granted);
        let has = listener.granted.iter().filter(|cid| cid.nic() == at).count();
        left[at] -= has - had;
        listener.lacks_slots |= has - had < wanted;
    }
    listener.granted.len() - before
}

/// Whether a listener has fewer slots than its accept queue has room for, and may get them: all NICs that are to serve
/// it have answered, and its clients come to them.
fn lacks_slots(listener: &Listener) -> bool {
    listener.lacks_slots && listener.wanted.iter().all(|nic| listener.has_answer(*nic))
}

/// Grants the next listeners the slots for which NICs had no room earlier. No event says that they have room now, and a
/// listener without any slot gets no connection whose acceptance would ask for more.
pub(super) fn grant_what_is_missing(agent: &mut Agent) {
    let listeners = &mut agent.listeners;
    let (lacking, next) = turn(&listeners.by_id, listeners.lacking_from, MOST_GRANTED, lacks_slots);
    listeners.lacking_from = next;
    let granted = |id: &u32| listeners.by_id.get(id).map_or(0, |listener| listener.granted.len());
    let mut lacking: Vec<(usize, u32)> = lacking.iter().map(|id| (granted(id), *id)).collect();
    // One each in turn, beginning with those that have the fewest, since there may not be enough for all.
    lacking.sort_unstable();
    let mut of_nics = agent.listeners.left(agent.nics.len(), agent.settings.nic.slots);
    let mut left = MOST_GRANTED;
    while left > 0 && !lacking.is_empty() {
        lacking.retain(|(_, id)| {
            let granted = if left > 0 { grant_some(agent, *id, 1, &mut of_nics) } else { 0 };
            left = left.saturating_sub(granted);
            granted > 0
        });
    }
}
