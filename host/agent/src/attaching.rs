//! Attaching the steering's programs to the host's devices, beside the kernel. It begins when a first connection is to leave the kernel, so
//! that a host without any pays nothing for Baton. The kernel takes some milliseconds a device, and there may be hundreds: a thread does
//! it, and only what needs the devices waits.

use crate::agent::Agent;
use crate::calls::Completion;
use crate::connection::{Asker, Stage};
use crate::devices::Devices;
use crate::ground::Shape;
use crate::moves::{Key, MANY_WAITING, named};
use baton_linux::foreign::{self, Foreign};
use baton_linux::report;
use baton_moves::Refusal;
use baton_protocol::program::{Ask, Opening, Place, Reply};
use baton_steering::{LOOPBACK, Steering};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

/// Requests of one session that wait at most, for each connection and for everything else: a program can ask as often as it likes.
const MOST: usize = 64;

/// What waits for the devices.
#[derive(Default)]
pub(crate) struct ForDevices {
    /// Connections that are to go to a NIC, with those who asked for that.
    moves: BTreeMap<Key, Vec<Asker>>,
    requests: Vec<Request>,
    /// A thread is attaching.
    begun: bool,
}

struct Request {
    session: u32,
    name: u64,
    tag: u32,
    ask: Ask,
    descriptors: Vec<Foreign>,
}

/// Whether a request can be served: it does not need the devices, or all has been tried to hear at them.
fn has_devices(ask: &Ask, devices: &mut Devices) -> bool {
    match ask {
        // Clients, or the peer, may be on this host.
        Ask::Listen | Ask::Connect { .. } => devices.are_tried(Some(LOOPBACK)),
        Ask::Reach { .. } | Ask::Open(Opening { messages: Some(_), .. }) => devices.are_tried(None),
        _ => true,
    }
}

fn attach_to(steering: &Steering, missing: BTreeSet<u32>) -> Completion {
    let attached: Vec<_> = missing.into_iter().map(|index| (index, steering.attach(index))).collect();
    Box::new(move |agent| {
        if let Shape::Beside { devices, .. } = &mut agent.shape {
            attached.into_iter().for_each(|(index, attached)| devices.take(&agent.keeper, index, attached));
        }
        agent.devices_are_attached();
    })
}

impl Agent {
    /// Has the programs attached to devices that have come, if they are at any.
    pub(crate) fn follow_devices(&mut self) {
        if matches!(&self.shape, Shape::Beside { devices, .. } if !devices.is_new()) {
            self.attach_devices();
        }
    }

    /// Has the programs attached to the devices that lack them. The first time these are all by which connections are received.
    pub(crate) fn attach_devices(&mut self) {
        let Shape::Beside { steering, devices, .. } = &mut self.shape else { return };
        if self.moves.for_devices.begun {
            return;
        }
        let begun = devices.missing(&self.routes, &self.keeper).and_then(|missing| {
            if missing.is_empty() {
                return Ok(false);
            }
            let (steering, calls) = (steering.try_clone()?, self.calls.clone());
            let attach = move || calls.complete(attach_to(&steering, missing));
            thread::Builder::new().name("attach".into()).spawn(attach).map(|_| true)
        });
        match begun {
            Ok(true) => self.moves.for_devices.begun = true,
            Ok(false) => self.have_devices(),
            Err(error) => self.have_no_devices(&error),
        }
    }

    fn devices_are_attached(&mut self) {
        self.moves.for_devices.begun = false;
        // Devices may have come meanwhile.
        self.attach_devices();
    }

    /// All devices that are there have been tried.
    fn have_devices(&mut self) {
        if let Shape::Beside { steering, devices, .. } = &mut self.shape {
            devices.have_been_tried();
            if let Err(error) = devices.follow(&self.routes, steering) {
                report!("baton agent: devices have changed, and could not be looked at: {error}");
            }
        }
        self.find_devices_without_nic();
        let waiting = std::mem::take(&mut self.moves.for_devices);
        waiting.moves.into_iter().for_each(|(key, askers)| self.move_now(key, askers));
        for Request { session, name, tag, ask, descriptors } in waiting.requests {
            let Some(user) = self.named_session((session, name)).filter(|session| !session.ends).map(|session| session.user)
            else {
                continue;
            };
            let _user = foreign::on_behalf_of(user);
            if let Some((body, given)) = self.on_request(session, tag, ask, descriptors) {
                let given: Vec<BorrowedFd<'_>> = given.iter().map(AsFd::as_fd).collect();
                self.answer(session, tag, body, &given);
            }
        }
    }

    /// What waits is told why it cannot go on.
    fn have_no_devices(&mut self, error: &io::Error) {
        report!("baton agent: the devices could not be looked at: {error}");
        let waiting = std::mem::take(&mut self.moves.for_devices);
        let reply = || Reply::Stayed { reason: Refusal::Deaf.to_string(), transient: true };
        for (key, askers) in waiting.moves {
            askers.into_iter().for_each(|(session, tag)| self.answer(session, tag, reply(), &[]));
            if named(&mut self.sessions, key).is_some() {
                self.try_later(key.0, key.1);
            }
        }
        for Request { session, name, tag, .. } in waiting.requests {
            self.answer_caller(Some((session, name, tag)), reply(), &[]);
        }
    }

    fn move_now(&mut self, key: Key, askers: Vec<Asker>) {
        let (session, number, _) = key;
        let wanted = named(&mut self.sessions, key).map(|connection| connection.is_wanted());
        if askers.is_empty() && self.stage(session, number) == Some(Stage::Kernel) && wanted.is_some() {
            // Nobody asked: it was drawn, or ends there.
            return self.begin_offload(session, number, None);
        }
        for asker in askers {
            let reply = match wanted {
                Some(true) => self.request_move(session, number, Place::Nic, asker).map(|(reply, _)| reply),
                Some(false) => Some(Reply::Stayed { reason: Refusal::CalledOff.to_string(), transient: false }),
                None => Some(Reply::Stayed { reason: Refusal::Ended.to_string(), transient: false }),
            };
            reply.into_iter().for_each(|reply| self.answer(asker.0, asker.1, reply, &[]));
        }
    }

    /// Whether a move has to wait for the devices. It would ask the kernel about them, which answers no such question while it attaches.
    pub(crate) fn awaits_devices(&self) -> bool {
        matches!(&self.shape, Shape::Beside { devices, .. } if !devices.hear())
    }

    /// A connection goes to the NIC when the NICs hear at the devices.
    pub(crate) fn move_when_attached(&mut self, session: u32, number: u32, askers: Vec<Asker>) {
        let Some(serial) = self.connection_ref(session, number).map(|connection| connection.serial) else { return };
        let waiting = self.moves.for_devices.moves.entry((session, number, serial)).or_default();
        let room = MOST.saturating_sub(waiting.len()).min(askers.len());
        let mut askers = askers.into_iter();
        waiting.extend(askers.by_ref().take(room));
        askers.for_each(|(session, tag)| {
            let reply = Reply::Stayed { reason: MANY_WAITING.into(), transient: true };
            self.answer(session, tag, reply, &[]);
        });
        self.attach_devices();
    }

    /// Puts a request off that needs devices at which the NICs do not hear yet. Returns it if it can be served, or what to answer if too
    /// many of the session's wait.
    pub(crate) fn when_attached(
        &mut self,
        (session, tag): Asker,
        ask: Ask,
        descriptors: Vec<Foreign>,
    ) -> Result<(Ask, Vec<Foreign>), Option<Reply>> {
        let Shape::Beside { devices, .. } = &mut self.shape else { return Ok((ask, descriptors)) };
        if has_devices(&ask, devices) {
            return Ok((ask, descriptors));
        }
        let name = self.sessions.get(session as usize).and_then(Option::as_ref).map(|session| session.name).ok_or(None)?;
        let requests = &mut self.moves.for_devices.requests;
        if requests.iter().filter(|request| request.session == session).count() >= MOST {
            return Err(Some(Reply::Failed { reason: MANY_WAITING.into() }));
        }
        requests.push(Request { session, name, tag, ask, descriptors });
        self.attach_devices();
        Err(None)
    }
}
