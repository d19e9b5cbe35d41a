//! Opening of sessions: each NIC that is to serve one is asked, and the program is answered when all have answered.

use super::Agent;
use super::messages::Bound;
use crate::connection::Asker;
use crate::session::{Begun, OpenSession, Session};
use crate::texts::shortened;
use anyhow::{Context, Result, bail};
use baton_linux::bell::SessionBell;
use baton_linux::foreign::Foreign;
use baton_log::{debug, info, warning};
use baton_protocol::keeper::Kept;
use baton_protocol::program::{Opening, Reply};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_abi::layout::session as layout;

impl Agent {
    /// Opens a session. None if the answer comes later.
    pub(super) fn open(&mut self, asker: Asker, opening: Opening, socket: Option<Foreign>) -> Option<Reply> {
        let answer = |begun: Result<()>| begun.err().map(|error| Reply::Failed { reason: format!("{error:#}") });
        match (&opening.messages, socket) {
            (Some(messages), Some(socket)) => {
                let ethernet = messages.ethernet;
                let look = move |fd: BorrowedFd<'_>| Bound::read(fd, ethernet);
                self.on_sent(asker, (socket, None), look, move |agent, socket, bound| {
                    answer(bound.and_then(|bound| agent.begin_session(asker, &opening, Some((socket, bound)))))
                })
            }
            _ => answer(self.begin_session(asker, &opening, None)),
        }
    }

    /// Begins to open a session: makes its memory and doorbells, and gives them to the NICs; those of a session for
    /// messages to the first one only.
    fn begin_session(&mut self, (number, tag): Asker, opening: &Opening, socket: Option<(Foreign, Bound)>) -> Result<()> {
        let entry = self.sessions.get(number as usize).and_then(Option::as_ref);
        let entry = entry.filter(|session| session.open.is_none() && session.begun.is_none());
        let (user, name) = entry.map(|session| (session.user, session.name)).context("the session is open already")?;
        let messages = self.examine_messages(number, opening, socket.as_ref())?;
        let socket = socket.map(|(socket, _)| socket);
        let opening = Opening { messages, ..opening.clone() };
        self.users.opens(user).map_err(anyhow::Error::msg)?;
        let begun = self.ask_nics((number, name), opening, socket).inspect_err(|_| self.users.fails_to_open(user))?;
        if let Some(Some(session)) = self.sessions.get_mut(number as usize) {
            session.begun = Some(Box::new(Begun { tag: Some(tag), ..begun }));
        }
        Ok(())
    }

    fn ask_nics(&mut self, session: (u32, u64), opening: Opening, socket: Option<Foreign>) -> Result<Begun> {
        let nics = if opening.messages.is_some() { 1 } else { self.nics.len() };
        let (mut open, theirs) = OpenSession::new(self.settings.session_bytes, nics)?;
        self.has_room_for(Some(session.0), open.further.last().unwrap_or(&open.bell).as_fd(), 0).map_err(anyhow::Error::new)?;
        open.socket = socket.map(Arc::new);
        if self.nics.iter().any(|nic| nic.is_detaching(session.0)) {
            bail!("the NIC has not let go of this session's last memory; try again");
        }
        let mut begun = Begun { open, theirs, opening, tag: None, awaited: 0, attached: 0, failed: None };
        for nic in &mut self.nics[..nics] {
            match nic.attach(session, &begun.open, &begun.opening) {
                Ok(()) => begun.awaited |= 1 << nic.number(),
                Err(error) => begun.failed = Some(format!("{error:#}")),
            }
        }
        Ok(begun)
    }

    /// The session with this number, if it has this name.
    pub(crate) fn named_session(&mut self, (number, name): (u32, u64)) -> Option<&mut Session> {
        self.sessions.get_mut(number as usize)?.as_mut().filter(|session| session.name == name)
    }

    /// Handles a NIC's answer to a session that it was given, which is being opened, or was open before there was this
    /// NIC.
    pub(crate) fn attached(&mut self, nic: usize, at: (u32, u64), starts: Option<u32>, answer: Result<(), String>) {
        let Some(Some(session)) = self.sessions.get_mut(at.0 as usize) else { return };
        if session.name != at.1 {
            return;
        }
        let (open, opening) = match (&mut session.begun, &session.open) {
            (Some(begun), _) => (&begun.open, &begun.opening),
            (None, Some(open)) => (open, &session.opening),
            (None, None) => return,
        };
        match answer {
            Ok(()) => {
                if let Some(starts) = starts {
                    open.memory.word32(layout::NIC_STARTS).store(starts, Ordering::Release);
                    open.bell.ring();
                }
                if opening.fast_path && starts.is_none() {
                    match self.nics[nic].lend(at, open) {
                        Ok(()) => return self.watch_host_tcp(),
                        Err(error) => say_all_is_on_nic(at.0, &format!("{error:#}")),
                    }
                }
                self.serves(nic, at, true);
            }
            Err(why) => {
                match &mut session.begun {
                    Some(begun) => begun.failed = Some(why),
                    // Its connections are restored to the kernel nevertheless, and stay there.
                    None => {
                        warning!(
                            [nic = nic, session = at.0] "the NIC cannot have session {}: {why}", at.0;
                            "its connections stay in the kernel; to have them on the NIC start its program again"
                        );
                    }
                }
                self.serves(nic, at, false);
            }
        }
    }

    /// Handles the answer of the host's TCP to a session: the NIC may lend it connections from now on.
    pub(crate) fn lent_session(&mut self, nic: usize, at: (u32, u64), answer: Result<(), String>) {
        match answer {
            Ok(()) => self.nics[nic].keep_fast_path(at),
            Err(why) => {
                say_all_is_on_nic(at.0, &why);
                self.serves(nic, at, true);
            }
        }
    }

    /// Handles the NIC's answer to the request to keep only the fast path of a session's connections.
    pub(crate) fn keeps_fast_path(&mut self, nic: usize, at: (u32, u64), answer: Result<(), String>) {
        if let Err(why) = answer {
            say_all_is_on_nic(at.0, &why);
        }
        self.serves(nic, at, true);
    }

    /// Notes that a NIC serves a session, or does not. The last one's answer opens it.
    fn serves(&mut self, nic: usize, at: (u32, u64), attached: bool) {
        let Some(session) = self.named_session(at) else { return };
        let Some(begun) = &mut session.begun else { return };
        let bit = 1 << nic;
        begun.awaited &= !bit;
        begun.attached |= if attached { bit } else { 0 };
        if begun.awaited == 0 {
            self.finish_session(at);
        }
    }

    fn finish_session(&mut self, at: (u32, u64)) {
        let number = at.0;
        let Some(session) = self.named_session(at) else { return };
        let (Some(begun), user, ends) = (session.begun.take(), session.user, session.ends) else { return };
        let Begun { open, theirs, opening, tag, attached, failed, .. } = *begun;
        if ends && failed.is_none() {
            // The NICs forget it as they forget any other, and its number is free then.
            (session.open, session.opening) = (Some(open), Opening { group: 0, messages: None, ..opening });
            return;
        }
        let reply = match (failed, tag) {
            (None, Some(tag)) => self.install(number, open, theirs, &opening).map(|given| (tag, given)),
            (Some(why), _) => Err(anyhow::Error::msg(why)),
            (None, None) => Err(anyhow::Error::msg("nobody waits for it any more")),
        };
        match reply {
            Ok((tag, given)) => {
                let given: Vec<_> = given.iter().map(AsFd::as_fd).collect();
                self.answer(number, tag, Reply::Opened { session: number }, &given);
            }
            Err(error) => {
                self.nics.iter_mut().filter(|nic| attached & 1 << nic.number() != 0).for_each(|nic| _ = nic.detach(number));
                self.users.fails_to_open(user);
                self.answer(number, tag.unwrap_or(0), Reply::Failed { reason: format!("{error:#}") }, &[]);
            }
        }
    }

    /// Opens a session that all its NICs serve. Returns the program's descriptors.
    fn install(&mut self, number: u32, open: OpenSession, theirs: Vec<SessionBell>, opening: &Opening) -> Result<Vec<OwnedFd>> {
        if let Some(messages) = &opening.messages
            && let Err(refusal) = self.steal_messages(messages.address, &open)
        {
            bail!("the NIC cannot receive messages beside the kernel: {refusal}");
        }
        if opening.messages.is_some() {
            self.looks.begin_sockets();
        }
        // Ours: the agent has made it.
        let memory = open.memory.fd().context("session memory is shared memory")?.try_clone_to_owned()?;
        let given: Vec<OwnedFd> = [memory].into_iter().chain(theirs.into_iter().map(OwnedFd::from)).collect();
        let bell = open.bell.try_clone()?;
        let socket = open.socket.as_ref().map(|socket| Foreign::duplicate(socket.as_fd())).transpose()?;
        let further = open.further.iter().map(SessionBell::try_clone).collect::<io::Result<Vec<_>>>()?;
        // Groups of an agent before this one's keeper was started do not exist any more.
        let group = if self.groups.has(opening.group) { opening.group } else { 0 };
        let opening = Opening { group, program: shortened(&opening.program), ..opening.clone() };
        let Some(Some(session)) = self.sessions.get_mut(number as usize) else { bail!("no session") };
        session.open = Some(open);
        session.opening.clone_from(&opening);
        debug!(
            [session = number, user = session.user]
            "session {number} is open: process {} ({}), user {}", session.process, opening.program, session.user
        );
        self.groups.joined(group);
        let kept = [given[0].as_fd(), bell.as_fd()].into_iter().chain(socket.as_ref().map(AsFd::as_fd));
        let kept: Vec<_> = kept.chain(further.iter().map(AsFd::as_fd)).collect();
        self.keep(&Kept::Memory(number, opening), &kept);
        Ok(given)
    }
}

fn say_all_is_on_nic(session: u32, why: &str) {
    info!([session = session] "the NIC has all of session {session}'s connections: {why}");
}
