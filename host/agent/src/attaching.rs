//! Attaches the steering's BPF programs to the host's devices, beside the kernel. This begins with the first move to a
//! NIC: until then Baton costs the host's frames nothing. The kernel waits two RCU grace periods a device, some
//! milliseconds each, and a host may have hundreds of devices. So a thread attaches; moves and requests that need the
//! devices are queued here, and everything else goes on.

use crate::agent::Agent;
use crate::calls::Completion;
use crate::connection::Asker;
use crate::devices::Devices;
use crate::ground::Shape;
use crate::moves::{MANY_WAITING, named};
use baton_core::{Key, Stage};
use baton_linux::foreign::{self, Foreign};
use baton_log::warning;
use baton_moves::Refusal;
use baton_protocol::program::{Ask, Opening, Place, Reply};
use baton_steering::{LOOPBACK, Steering};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

/// Limit of queued requests: for the move of one connection, and for all else that one session asks. A program can ask
/// without end.
const MOST: usize = 64;

/// Moves and requests that are queued until the programs are attached.
#[derive(Default)]
pub(crate) struct ForDevices {
    /// Connections to be moved to a NIC, each with the requests to answer then; none for a move that nobody has asked
    /// for.
    moves: BTreeMap<Key, Vec<Asker>>,
    requests: Vec<Request>,
    /// The thread runs.
    begun: bool,
}

impl ForDevices {
    /// What holds up a connection's move, if it is queued here.
    pub fn trouble(&self, key: Key) -> Option<&'static str> {
        self.moves.contains_key(&key).then_some("it waits until the NIC receives at all interfaces")
    }
}

/// A queued request: the session and its name (numbers are reused), the request's tag, the request, the descriptors
/// that came with it.
struct Request {
    session: u32,
    name: u64,
    tag: u32,
    ask: Ask,
    descriptors: Vec<Foreign>,
}

/// Whether a request can be served now: it needs no device, or attaching to the devices that it needs has succeeded or
/// failed.
fn has_devices(ask: &Ask, devices: &mut Devices) -> bool {
    match ask {
        // Clients, or the peer, may be on this host.
        Ask::Listen | Ask::Connect { .. } => devices.are_tried(Some(LOOPBACK)),
        Ask::Reach { .. } | Ask::Open(Opening { messages: Some(_), .. }) => devices.are_tried(None),
        _ => true,
    }
}

/// Attaches to these devices, in the thread. Returns what the agent's loop does with the results.
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
    /// Attaches to new devices, if a move has needed any device before.
    pub(crate) fn follow_devices(&mut self) {
        if matches!(&self.shape, Shape::Beside { devices, .. } if !devices.is_new()) {
            self.attach_devices();
        }
    }

    /// Starts the thread that attaches to every device without the programs: at first all devices by which the kernel
    /// receives. If there is none, what is queued goes on at once. If the thread runs already, it looks for further
    /// devices when it has finished.
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

    /// The thread has finished.
    fn devices_are_attached(&mut self) {
        self.moves.for_devices.begun = false;
        // There may be new devices by now.
        self.attach_devices();
    }

    /// Runs what is queued: attaching has succeeded or failed at every device.
    fn have_devices(&mut self) {
        if let Shape::Beside { steering, devices, .. } = &mut self.shape {
            devices.have_been_tried();
            if let Err(error) = devices.follow(&self.routes, steering) {
                warning!(
                    [] "devices have changed, and could not be looked at: {error}";
                    "devices that are new stay without the NIC until the next change; `baton doctor` names what is missing"
                );
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

    /// Answers every queued request that it has to be made again, since the devices could not be listed or no thread be
    /// started. Connections that a rule wants on the NIC are tried again later.
    fn have_no_devices(&mut self, error: &io::Error) {
        warning!(
            [] "the devices could not be looked at: {error}";
            "it is tried again; free memory, processes or descriptors if the error names them"
        );
        let waiting = std::mem::take(&mut self.moves.for_devices);
        let reply = || Reply::Stayed { reason: Refusal::Attaching.to_string(), transient: true };
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

    /// Begins a queued move, unless its connection has ended or is wanted in the kernel by now.
    pub(crate) fn move_now(&mut self, key: Key, askers: Vec<Asker>) {
        let (session, number, _) = key;
        let wanted = named(&mut self.sessions, key).map(|connection| connection.is_wanted());
        if askers.is_empty() && self.stage(session, number) == Some(Stage::Kernel) && wanted.is_some() {
            // Nobody is to be answered: a move at random, or of a connection whose peer has been silent for too long.
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

    /// Whether a move to a NIC has to be queued. Its first steps ask the kernel about devices, which would wait for the
    /// rtnl lock that the thread holds.
    pub(crate) fn awaits_devices(&self) -> bool {
        matches!(&self.shape, Shape::Beside { devices, .. } if !devices.are_complete())
    }

    /// Queues a connection's move to a NIC until the programs are attached. Requests beyond the limit are answered that
    /// they have to be made again.
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

    /// Queues a request until the programs are attached to the devices that it needs.
    ///
    /// Returns the request if it can be served now. Otherwise the error: None if it is queued, or the answer if its
    /// session has too many queued already.
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
