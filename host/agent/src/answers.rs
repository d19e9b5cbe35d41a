//! What follows the answers to requests on the NICs' control connections. It is done between two steps of the agent's
//! loop, never inside what has sent a request. A NIC that does not answer delays those who asked, and for [`LIMIT`] at
//! most.

use crate::agent::Agent;
use crate::datagrams::Place;
use crate::nic::NicProcess;
use crate::nic_requests::Answered;
use baton_abi::Cid;
use baton_linux::events::monotonic_micros;
use baton_log::warning;
use baton_offloads::Offloads;
use baton_protocol::keeper::Kept;
use baton_protocol::program::Reply;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use crate::nic_requests::LIMIT;

/// Why a request is refused that needs a NIC which does not answer.
pub(crate) const NO_ANSWER: &str = "the NIC does not answer";

/// A request of a program or tool that waits for a NIC: session, its name, tag. None when it has been answered.
pub(crate) type Caller = Option<(u32, u64, u32)>;

/// What is to be done with a NIC's answer.
pub(crate) enum After {
    /// The NIC has a session; for messages with the number of its start.
    Attach { session: u32, name: u64, starts: Option<u32> },
    /// The host's TCP has a session.
    Lent { session: u32, name: u64 },
    /// The NIC keeps only the fast path of a session's connections.
    FastPath { session: u32, name: u64 },
    /// The host's TCP is ready.
    HostTcpReady,
    /// The offloads are in force.
    Offloads(Box<Offloads>, Caller),
    /// The NIC serves a listener.
    Listen(u32),
    /// It serves one no longer: these slots were granted, and are free if it has not made connections in them.
    StopListening(u32, Vec<Cid>),
    /// It knows the way of a session for messages to a host.
    Reach(IpAddr, Caller),
    /// It serves a UDP socket.
    Datagrams(u32, Caller),
    /// It knows the way of a socket's datagrams, with this MTU.
    DatagramWay(u32, u32, Caller),
    /// It has ended to serve one; what its program sees is at that place. A failure means that the NIC has ended, since
    /// none refuses it: the rings are nobody's either way.
    EndDatagrams(Arc<Place>, Caller),
    /// It lets somebody look at the frames that pass.
    Capture(u32),
    /// Only a failure is of interest.
    Report(&'static str),
}

impl After {
    /// The session that has to be known to the NIC before it is asked to forget it.
    pub fn session(&self) -> Option<u32> {
        match self {
            After::Attach { session, .. } | After::Lent { session, .. } | After::FastPath { session, .. } => Some(*session),
            _ => None,
        }
    }
}

/// Whoever is to get an error because a NIC does not answer.
enum Late {
    Session((u32, u64)),
    Listener(u32),
    Datagrams(u32, Caller),
    Caller(Caller),
    Capture(u32),
}

/// Answers the one who captures when the last NIC has answered.
fn answer_capturer(agent: &mut Agent, id: u32, answer: Result<(), String>) {
    let Some(((number, tag), given)) = agent.captures.answered(id, answer) else { return };
    let (nics, workers) = (agent.nics.len() as u32, agent.settings.nic.workers as u32);
    match given {
        Ok((memory, devices)) => {
            let memory = memory.iter().filter_map(|memory| memory.fd());
            let given: Vec<BorrowedFd<'_>> = memory.chain(devices.as_ref().map(AsFd::as_fd)).collect();
            agent.answer(number, tag, Reply::Capturing { nics, workers }, &given);
        }
        Err(reason) => agent.answer(number, tag, Reply::Failed { reason }, &[]),
    }
}

impl Agent {
    /// Who has sent the request with this tag.
    pub(crate) fn caller(&self, session: u32, tag: u32) -> Caller {
        let name = self.sessions.get(session as usize)?.as_ref()?.name;
        Some((session, name, tag))
    }

    /// Answers a request that has waited for a NIC, if its session is still there.
    pub(crate) fn answer_caller(&mut self, caller: Caller, reply: Reply, descriptors: &[BorrowedFd<'_>]) {
        let Some((session, name, tag)) = caller else { return };
        if self.named_session((session, name)).is_some_and(|session| !session.ends) {
            self.answer(session, tag, reply, descriptors);
        }
    }

    /// Time until a request is late; none if there are answers that have been read.
    pub(crate) fn answers_wait(&self) -> Option<Duration> {
        if self.nics.iter().any(NicProcess::has_answered) {
            return Some(Duration::ZERO);
        }
        let late = self.nics.iter().filter_map(|nic| nic.late_at()).min()?;
        Some(Duration::from_micros(late.saturating_sub(monotonic_micros())))
    }

    /// Does what follows the answers that have come, and sends an error to those who have waited too long.
    pub(crate) fn settle_answers(&mut self) {
        for nic in 0..self.nics.len() {
            while let Some((after, answer)) = self.nics[nic].take_answered() {
                self.settle_answer(nic, after, answer);
            }
            if self.nics[nic].late_at().is_some_and(|late| late <= monotonic_micros()) {
                self.settle_late(nic);
            }
        }
    }

    fn settle_answer(&mut self, nic: usize, after: After, answer: Answered) {
        match after {
            After::Attach { session, name, starts } => self.attached(nic, (session, name), starts, answer),
            After::Lent { session, name } => self.lent_session(nic, (session, name), answer),
            After::FastPath { session, name } => self.keeps_fast_path(nic, (session, name), answer),
            After::HostTcpReady => {}
            After::Offloads(offloads, caller) => {
                let reply = match answer {
                    Ok(()) => {
                        self.nics[nic].has_set(&offloads);
                        self.moves.placements[nic].look_now();
                        self.keep(&Kept::Offloads(nic, offloads), &[]);
                        Reply::Done
                    }
                    Err(reason) => Reply::Failed { reason },
                };
                self.answer_caller(caller, reply, &[]);
            }
            After::Listen(id) => self.listener_answered(id, nic, Some(answer)),
            After::StopListening(id, slots) => self.stopped_listening(id, nic, slots),
            After::Reach(host, caller) => {
                let reply = match answer {
                    Ok(()) => Reply::Done,
                    Err(reason) => Reply::Stayed { reason: format!("the NIC has no way to {host}: {reason}"), transient: true },
                };
                self.answer_caller(caller, reply, &[]);
            }
            After::Datagrams(id, caller) => self.datagrams_answered(id, caller, answer),
            After::DatagramWay(id, mtu, caller) => self.datagram_way_answered(id, mtu, caller, answer),
            After::EndDatagrams(place, caller) => {
                place.publish(false);
                // Before the answer, with which the program gives up the rings.
                drop(place);
                self.answer_caller(caller, Reply::Done, &[]);
            }
            After::Capture(id) => answer_capturer(self, id, answer),
            After::Report(what) => {
                if let Err(why) = answer {
                    warning!([nic = nic] "{what}: {why}"; "ask for it again, or restart Baton");
                }
            }
        }
    }

    fn settle_late(&mut self, nic: usize) {
        let late = |after: &mut After| match after {
            After::Attach { session, name, .. } | After::Lent { session, name } | After::FastPath { session, name } => {
                Some(Late::Session((*session, *name)))
            }
            After::Listen(id) => Some(Late::Listener(*id)),
            After::Capture(id) => Some(Late::Capture(*id)),
            After::Datagrams(id, caller) => Some(Late::Datagrams(*id, caller.take())),
            After::Offloads(_, caller)
            | After::Reach(_, caller)
            | After::DatagramWay(_, _, caller)
            | After::EndDatagrams(_, caller) => Some(Late::Caller(caller.take())),
            After::StopListening(..) | After::HostTcpReady | After::Report(_) => None,
        };
        let late: Vec<Late> = self.nics[nic].become_late(monotonic_micros()).filter_map(late).collect();
        let stayed = || Reply::Stayed { reason: NO_ANSWER.into(), transient: true };
        for late in late {
            match late {
                Late::Session(at) => {
                    let begun = self.named_session(at).and_then(|session| session.begun.as_mut());
                    if let Some(tag) = begun.and_then(|begun| begun.tag.take()) {
                        self.answer(at.0, tag, Reply::Failed { reason: NO_ANSWER.into() }, &[]);
                    }
                }
                Late::Listener(id) => self.listener_answered(id, nic, None),
                Late::Datagrams(id, caller) => {
                    if let Some((session, ..)) = caller {
                        let _ = self.end_datagrams(session, Some(id), false, None);
                    }
                    self.answer_caller(caller, stayed(), &[]);
                }
                Late::Capture(id) => answer_capturer(self, id, Err(NO_ANSWER.into())),
                Late::Caller(caller) => self.answer_caller(caller, stayed(), &[]),
            }
        }
    }
}
