//! Connections that no program has accepted: where they may be, how they end, and what a NIC needs before their
//! clients' frames flow.

use super::{Listener, Listeners, Waiting, granting};
use crate::agent::Agent;
use crate::answers::After;
use crate::journal;
use baton_abi::Cid;
use baton_handoff::listening::Listening;
use baton_image::Image;
use baton_linux::events::monotonic_micros;
use baton_linux::socket;
use baton_wire::{Endpoint, Flow};
use std::collections::BTreeMap;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

/// Microseconds for which what the NIC has made waits for a process that may have the socket, and has not asked for the
/// queue: the next worker of a server, or one that is started anew. A process that accepts from the kernel alone would
/// have the clients wait for ever.
const LONGEST_UNHAD: u64 = 60_000_000;

/// Where programs have listeners, by port and address; None for any address. Of many flows each is looked up.
pub(crate) struct Ends<'a>(BTreeMap<(u16, Option<IpAddr>), Vec<&'a Listening>>);

impl Listeners {
    /// Where programs have listeners.
    pub fn ends(&self) -> Ends<'_> {
        let mut ends: BTreeMap<_, Vec<&Listening>> = BTreeMap::new();
        for Listener { listening, .. } in self.by_id.values().filter(|listener| !listener.sessions.is_empty()) {
            let address = Some(listening.local.ip()).filter(|address| !address.is_unspecified());
            ends.entry((listening.local.port(), address.map(|address| address.to_canonical()))).or_default().push(listening);
        }
        Ends(ends)
    }
}

impl Ends<'_> {
    /// Whether a program has a listener that accepts connections to an endpoint of this host.
    pub fn accept_at(&self, local: Endpoint) -> bool {
        let address = SocketAddr::from(local).ip();
        let at = |of: Option<IpAddr>| self.0.get(&(local.port, of)).into_iter().flatten();
        at(Some(address)).chain(at(None)).any(|listening| listening.accepts(address))
    }
}

/// What becomes of a connection that a NIC has made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    /// A program accepts it.
    Waits,
    /// The kernel has it. A cookie is accepted once more when the client repeats its first segment after the connection
    /// has left the NIC; a reset would end that one.
    Kernels,
    /// No program will accept it: its listener is gone, perhaps with an agent that has died. Neither its handshake nor
    /// what that agent has steered may be left.
    Nobodys,
}

/// The fate of one with this image, if that can be read. `kernel_has` says whether the kernel has a connection of its
/// 4-tuple.
pub(super) fn fate(image: Option<&Image>, by_cookie: bool, listens: bool, kernel_has: impl FnOnce(&Flow) -> bool) -> Fate {
    match image {
        Some(image) if by_cookie && kernel_has(&image.flow) => Fate::Kernels,
        Some(_) if listens => Fate::Waits,
        Some(_) | None => Fate::Nobodys,
    }
}

/// Drops a connection that no program will accept: its peer is reset, as by a kernel whose listener is closed.
pub(super) fn reset(agent: &mut Agent, waiting: &Waiting) {
    refuse(agent, waiting.cid);
    agent.shape.unsteer(&waiting.image.flow);
}

/// The same of one whose 4-tuple is unknown.
pub(super) fn refuse(agent: &mut Agent, cid: Cid) {
    journal::clear(&agent.hardware[cid.nic()].memory, cid);
    agent.nics[cid.nic()].reset_connection(cid);
}

/// Whether a listener that no session has any more is to end: no connection waits for another session or may still
/// come, or none will be accepted. `ends`: the agent does, and no session gets a listener.
pub(super) fn is_over(listener: &Listener, ends: bool, now: u64) -> bool {
    let may_come = listener.unanswered.values().any(|requests| *requests > 0);
    let waits = may_come || !listener.waiting.is_empty();
    listener.sessions.is_empty() && (ends || !waits || now.saturating_sub(listener.left_at) >= LONGEST_UNHAD)
}

/// Ends a listener that is over.
pub(super) fn end_if_over(agent: &mut Agent, id: u32) {
    let ends = agent.draining;
    if agent.listeners.by_id.get(&id).is_some_and(|listener| is_over(listener, ends, monotonic_micros())) {
        agent.end_listener(id);
    }
}

/// Ends the listeners of a session whose program runs on without Baton, and accepts from the kernel alone. Those that
/// other sessions have, too, stay theirs.
pub(crate) fn end_those_of(agent: &mut Agent, session: u32) {
    let alone = |(id, listener): (&u32, &Listener)| {
        let has_others = listener.sessions.iter().any(|other| *other != session);
        (listener.sessions.contains(&session) && !has_others).then_some(*id)
    };
    let ids: Vec<u32> = agent.listeners.by_id.iter().filter_map(alone).collect();
    ids.into_iter().for_each(|id| agent.end_listener(id));
}

/// Ends all listeners, since the agent ends: what waits is reset.
pub(crate) fn end_all(agent: &mut Agent) {
    let ids: Vec<u32> = agent.listeners.by_id.keys().copied().collect();
    ids.into_iter().for_each(|id| agent.end_listener(id));
}

/// Ends a session's part in a listener. False if it has none. What waits is counted once more: its program may have
/// ended between a byte of the queue and its request for the connection. A program that is between the two now may find
/// none, and waits on.
pub(super) fn leave(listener: &mut Listener, session: u32) -> bool {
    let left = listener.sessions.remove(&session);
    if left {
        announce(listener, usize::MAX);
    }
    left
}

/// Counts what waits once more in the queue of a listener that no session has, before one gets it: a program that is
/// none of its sessions' any more may have read of it since.
pub(super) fn recount_if_unhad(listener: &Listener) {
    if listener.sessions.is_empty() {
        announce(listener, usize::MAX);
    }
}

/// Writes bytes into a listener's queue, at most so many, until it has one for each connection that waits. Those that
/// it has already are counted and not read, whoever has written them: whoever reads from the queue waits for each
/// thread of a program that reads from it into memory which does not come. So there may be more than connections, after
/// an agent's death for example: a program that reads such a byte finds no connection, and waits on.
pub(super) fn announce(listener: &Listener, most: usize) {
    let unread = socket::queue_bytes(listener.theirs.as_fd(), socket::SIOCINQ).unwrap_or(0);
    let missing = listener.waiting.len().saturating_sub(unread as usize).min(most);
    if missing > 0 {
        // There is room for more bytes than connections may wait.
        let _ = (&listener.ours).write(&vec![0; missing]);
    }
}

/// Drops a connection that the NIC has made: its frames are the kernel's. Its listener gets another slot.
pub(super) fn leave_to_kernel(agent: &mut Agent, cid: Cid, listener: u32) {
    journal::clear(&agent.hardware[cid.nic()].memory, cid);
    agent.drop_made(cid);
    granting::grant(agent, listener);
}

/// Waits until the next NIC of this number serves the listeners and has been granted slots for them. This is part of
/// its start: the last one may have answered clients whose segments wait now. Only the first segment of each makes its
/// connection, as the acknowledgement of a SYN cookie, and only if there is a slot; those behind it are held there.
/// Without a connection they would be given to the kernel, which would reset the client. A NIC that does not answer in
/// time is not waited for.
pub(super) fn await_slots(agent: &mut Agent, nic: usize) {
    let in_time = |late: u64| monotonic_micros() < late;
    while awaits(&agent.listeners, nic) && !agent.nics[nic].is_dead() && agent.nics[nic].late_at().is_some_and(in_time) {
        agent.pulse.beat();
        agent.nics[nic].receive();
        for (after, answer) in agent.nics[nic].take_listening() {
            match after {
                After::Listen(id) => {
                    agent.listener_answered(id, nic, Some(answer));
                    // Also while another NIC has not answered.
                    granting::grant(agent, id);
                }
                After::StopListening(id, slots) => agent.stopped_listening(id, nic, slots),
                _ => {}
            }
        }
        std::thread::yield_now();
    }
}

/// Whether a NIC has still to answer that it serves a listener.
fn awaits(listeners: &Listeners, nic: usize) -> bool {
    listeners.by_id.values().any(|listener| listener.wanted.contains(&nic) && !listener.has_answer(nic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_nic_has_made_is_a_programs_the_kernels_or_nobodys() {
        let end = |host| Endpoint::v4([10, 0, 0, host], 80);
        let flow = Flow { local: end(1), remote: end(2), device: 0 };
        let image = Image::open(flow);
        let fate = |by_cookie, listens, kernels| fate(Some(&image), by_cookie, listens, |of| *of == flow && kernels);
        assert_eq!((fate(false, true, false), fate(true, true, false)), (Fate::Waits, Fate::Waits));
        assert_eq!((fate(false, false, false), fate(true, false, false)), (Fate::Nobodys, Fate::Nobodys));
        // Whether anybody listens still or not, the kernel's goes on.
        assert_eq!((fate(true, true, true), fate(true, false, true)), (Fate::Kernels, Fate::Kernels));
        assert_eq!(super::fate(None, true, true, |_| true), Fate::Nobodys);
    }
}
