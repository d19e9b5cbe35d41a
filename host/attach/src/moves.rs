//! Moves while programs are stopped, messages from the agent, and sockets that appear and disappear.

use crate::batches::LENDING;
use crate::relay::{self, Joined, Next};
use crate::unfit::Unfit;
use crate::{Attacher, ME, stays};
use anyhow::{Result, bail};
use baton_abi::layout::Owner;
use baton_client::{LIMIT, note_hot_from};
use baton_linux::control::Channel;
use baton_linux::events::{Trigger, monotonic_micros};
use baton_linux::foreign::{self, Foreign};
use baton_linux::freeze::take_descriptor;
use baton_linux::tcp_info::TcpInfo;
use baton_linux::{buffers, diagnosis, process, socket};
use baton_protocol::program::{Answer, Ask, Place, Reply, Request, Until};
use baton_wire::Flow;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;
use std::time::Duration;

/// Reason of a move that was put off because the agent did not accept the request in time.
const SILENT: &str = "the agent does not answer";

const ESTABLISHED: u8 = 1;
const CLOSE: u8 = 7;

/// Whether a socket is in another map of sockets.
fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EBUSY)
}

/// A duplicate of a process's descriptor of a socket. None if the process has another file at that number by now:
/// closing such a file may block for any time.
fn copy(process: u32, fd: i32, inode: u64, cookie: u64) -> Option<Foreign> {
    if !process::has_socket(process, fd, inode) {
        return None;
    }
    let _user = foreign::on_behalf_of(process::user_of(process).unwrap_or(u32::MAX));
    let copy = take_descriptor(process::open_process(process).ok()?.as_fd(), fd).ok()?;
    (socket::cookie(copy.as_fd()).ok()? == cookie).then_some(copy)
}

impl Attacher {
    /// Handles messages that the agent sends without a request.
    pub(crate) fn receive_from_agent(&mut self) -> Result<()> {
        let shared = self.shared.clone();
        let channel = shared.channel().lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match channel.try_receive::<Answer>() {
                Ok((answer, _)) => {
                    self.silent = false;
                    self.on_message(&channel, answer.body)?
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => bail!("the agent has ended ({error})"),
            };
        }
        drop(channel);
        self.thaw();
        Ok(())
    }

    /// Handles one such message. Returns whether the agent has restarted, so that requests must be repeated.
    fn on_message(&mut self, channel: &Channel, body: Reply) -> Result<bool> {
        match body {
            Reply::Wanted { connection, to } => {
                self.work.wanted.insert(connection, to);
                Ok(false)
            }
            Reply::Fetch { connections } => self.lend(channel, connections),
            Reply::Restarted { .. } => Ok(true),
            _ => Ok(false),
        }
    }

    pub(crate) fn ask(&mut self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> Result<Reply> {
        Ok(self.ask_within(body, descriptor, None)?.unwrap_or(Reply::Done))
    }

    /// As `ask`, for requests made while a program is stopped. None if the agent did not take up the request in time;
    /// it is then withdrawn.
    fn ask_or_withdraw(&mut self, body: &Ask, descriptor: Option<BorrowedFd<'_>>) -> Result<Option<Reply>> {
        self.ask_within(body, descriptor, Some(LIMIT))
    }

    fn ask_within(&mut self, body: &Ask, descriptor: Option<BorrowedFd<'_>>, limit: Option<Duration>) -> Result<Option<Reply>> {
        let shared = self.shared.clone();
        let channel = shared.channel().lock().unwrap_or_else(PoisonError::into_inner);
        let descriptors: Vec<_> = descriptor.into_iter().collect();
        loop {
            let tag = match limit {
                Some(_) => shared.begin_withdrawable(),
                None => {
                    self.next_tag += 1;
                    self.next_tag
                }
            };
            channel.send(&Request { tag, body: body.clone() }, &descriptors)?;
            let mut left = limit;
            loop {
                let early = self.early_answers.iter().position(|answer| answer.tag == tag);
                let answer = match (early, left) {
                    (Some(at), _) => self.early_answers.swap_remove(at),
                    (None, None) => channel.receive::<Answer>()?.0,
                    (None, Some(limit)) => match channel.receive_within::<Answer>(limit) {
                        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                            if shared.withdraw(tag) {
                                self.silent = true;
                                return Ok(None);
                            }
                            // The agent has taken the request up, so its answer will come.
                            left = None;
                            continue;
                        }
                        received => received?.0,
                    },
                };
                self.silent = false;
                if answer.tag == tag {
                    self.early_answers.clear();
                    return Ok(Some(answer.body));
                }
                if self.on_message(&channel, answer.body)? {
                    break;
                }
            }
        }
    }

    /// Lends descriptors to the agent, which needs them to restore connections after its own or the NIC's death.
    fn lend(&mut self, channel: &Channel, mut connections: Vec<u32>) -> Result<bool> {
        let mut lent = Vec::new();
        let until = monotonic_micros() + LENDING;
        // Only these connections end: their processes may be using them.
        let mut restless = BTreeSet::new();
        loop {
            for number in std::mem::take(&mut connections) {
                let process = self.entries.get(&number).map(|entry| entry.process);
                if let Some(process) = process
                    && (restless.contains(&process) || !self.stop_for_lending(process, until))
                {
                    restless.insert(process);
                    self.note_stay("its process did not stop when the NIC had died");
                    // The agent cannot restore the connection.
                    self.work.lost_ones.insert(number);
                    continue;
                }
                match self.take_out(number)? {
                    Some(fd) => {
                        channel.send(&Request { tag: 0, body: Ask::Lend { connection: number } }, &[fd.as_fd()])?;
                        lent.push((number, fd));
                    }
                    None => {
                        let entry = self.entries.get_mut(&number);
                        let abort = entry.as_ref().and_then(|entry| entry.closed).unwrap_or(false);
                        if let Some(entry) = entry {
                            entry.settle(&self.shared, &self.bypass, &mut self.piece, None)?;
                        }
                        channel.send(&Request { tag: 0, body: Ask::Closed { connection: number, abort } }, &[])?;
                        self.drop_entry(number);
                    }
                }
            }
            let (answer, _) = channel.receive::<Answer>()?;
            let restarted = match answer.body {
                Reply::Fetch { connections: more } => {
                    connections = more;
                    continue;
                }
                Reply::Returned => false,
                Reply::Restarted { .. } => true,
                // An answer to a request from before the NIC's death.
                _ if answer.tag != 0 => {
                    self.early_answers.push(answer);
                    continue;
                }
                // Other messages are dropped: the agent asks for moves again.
                _ => continue,
            };
            for (number, fd) in lent {
                self.returned(number, fd.as_fd())?;
            }
            return Ok(restarted);
        }
    }

    /// A duplicate of a connection's descriptor, if any process still has it.
    fn descriptor(&mut self, number: u32) -> Option<Foreign> {
        let entry = self.entries.get(&number)?;
        let (process, fd, cookie, inode) = (entry.process, entry.fd, entry.cookie, entry.inode);
        if let Some(copy) = copy(process, fd, inode, cookie) {
            return Some(copy);
        }
        // The descriptor may have another number now, or only a child of the process may still have it.
        let holders = std::iter::once(process).chain(process::children(process));
        for holder in holders.collect::<Vec<_>>() {
            for (at, found) in process::sockets_of(holder) {
                if found == inode
                    && let Some(copy) = copy(holder, at, inode, cookie)
                {
                    let entry = self.entries.get_mut(&number)?;
                    (entry.process, entry.fd) = (holder, at);
                    return Some(copy);
                }
            }
        }
        None
    }

    /// A duplicate of the descriptor, if its process still has it under the known number.
    fn known_descriptor(&self, number: u32) -> Option<Foreign> {
        let entry = self.entries.get(&number)?;
        copy(entry.process, entry.fd, entry.inode, entry.cookie)
    }

    /// Takes a connection's socket out of the map, while its program is stopped. None if the program has closed it.
    fn take_out(&mut self, number: u32) -> Result<Option<Foreign>> {
        let Some(fd) = self.descriptor(number) else { return Ok(None) };
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(None) };
        // The shutdown is read from the state here, since the tracepoint's event may come too late: the move changes
        // the socket's state.
        entry.shut |= entry.joined.is_some() && TcpInfo::read(fd.as_fd()).is_ok_and(|info| info.state != ESTABLISHED);
        let unread = socket::queue_bytes(fd.as_fd(), socket::SIOCINQ).ok();
        entry.settle(&self.shared, &self.bypass, &mut self.piece, unread)?;
        if let Some(joined) = entry.joined.take() {
            self.bypass.part(entry.cookie, &entry.flow, &joined.engine_flow);
            let _ = self.poller.remove(joined.engine.as_fd());
        }
        Ok(Some(fd))
    }

    /// Puts a socket into the map, with a new engine.
    fn join(&mut self, number: u32, fd: BorrowedFd<'_>) -> io::Result<()> {
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(()) };
        let joined = self.work.engines.pop().map_or_else(Joined::new, Ok)?;
        self.poller.add(joined.engine.as_fd(), number.into(), Trigger::Edge)?;
        self.bypass.join(entry.cookie, (&entry.flow, fd), (&joined.engine_flow, joined.engine.as_fd()))?;
        entry.joined = Some(joined);
        // A program for which poll has reported data must find it when it runs again.
        entry.carry(&self.shared, &self.bypass, &mut self.piece)?;
        // The remaining bytes are handled together with the NIC's events.
        self.notified.lock().unwrap_or_else(PoisonError::into_inner).push(number);
        Ok(())
    }

    /// Handles a connection that is in the kernel again: bytes that the program had sent and for which the NIC had no
    /// room are sent now.
    fn returned(&mut self, number: u32, fd: BorrowedFd<'_>) -> Result<()> {
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(()) };
        let stash = std::mem::take(&mut entry.stash);
        match buffers::send_beyond_limit(fd, &stash) {
            Ok(()) => {}
            // The peer has reset it; the socket reports that to the program.
            Err(error) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {}
            // Bytes that the program has sent are lost: the stream must not continue as if they had arrived.
            Err(error) => {
                self.note_stay(&format!("reset, since the kernel does not take what the program has sent: {error}"));
                let _ = socket::reset(fd);
                return Ok(());
            }
        }
        if std::mem::take(&mut entry.shut) {
            let _ = socket::shutdown_write(fd);
        }
        Ok(())
    }

    pub(crate) fn move_to_nic(&mut self, number: u32) -> Result<()> {
        let Some(entry) = self.entries.get(&number) else { return Ok(()) };
        if entry.joined.is_some() {
            return Ok(());
        }
        let process = entry.process;
        // The program need not be stopped for this.
        if let Some(unfit) = self.unfit(number) {
            return self.decline(number, unfit);
        }
        if let Err(error) = self.stop_users(process) {
            self.note_stay(&format!("{error:#}"));
            if self.settings.flip.is_none() {
                // Kept for the next batch, since the agent does not ask again.
                self.work.wanted.insert(number, Place::Nic);
            }
            return Ok(());
        }
        let Some(fd) = self.descriptor(number) else { return self.forget(number) };
        if TcpInfo::read(fd.as_fd()).map_or(0, |info| info.state) != ESTABLISHED {
            return Ok(());
        }
        if socket::is_blocking(fd.as_fd())? {
            return self.decline(number, Unfit::Blocking);
        }
        let flow = self.entries.get(&number).map(|entry| entry.flow);
        if flow.is_some_and(|flow| self.bypass.may_join(&flow, fd.as_fd()).is_err_and(|error| is_busy(&error))) {
            return self.decline(number, Unfit::Attached);
        }
        let Some(reply) = self.ask_or_withdraw(&Ask::Move { connection: number, to: Place::Nic }, Some(fd.as_fd()))? else {
            self.work.wanted.insert(number, Place::Nic);
            return Ok(());
        };
        self.shared.catch_up(ME);
        if let Some(reason) = stays(&reply) {
            self.note_stay(reason);
            return Ok(());
        }
        self.summary.moves += 1;
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.declined = None;
        }
        if let Err(error) = self.join(number, fd.as_fd()) {
            self.note_stay(&format!("the map of sockets: {error}"));
            self.give_back(number, fd.as_fd(), Some(("sockmap", Until::Never)))?;
        }
        Ok(())
    }

    /// Restores a connection; with a cause, if the attacher requests it and not the agent.
    pub(crate) fn move_to_kernel(&mut self, number: u32, cause: Option<(&str, Until)>) -> Result<()> {
        if self.entries.get(&number).is_none_or(|entry| entry.joined.is_none()) {
            return Ok(());
        }
        let process = self.entries.get(&number).map_or(0, |entry| entry.process);
        if self.stop_users(process).is_err() {
            self.work.postponed.insert(number, cause.map(|(reason, until)| (reason.to_owned(), until)));
            return Ok(());
        }
        match self.take_out(number)? {
            Some(fd) => self.give_back(number, fd.as_fd(), cause),
            // The program has closed the socket, and the event of that was not read yet.
            None => self.state_changed(number),
        }
    }

    fn give_back(&mut self, number: u32, fd: BorrowedFd<'_>, cause: Option<(&str, Until)>) -> Result<()> {
        let ask = match cause {
            None => Ask::Move { connection: number, to: Place::Kernel },
            Some((reason, until)) => Ask::GiveBack { connection: number, reason: reason.into(), until },
        };
        let reply = self.ask_or_withdraw(&ask, Some(fd))?.unwrap_or(Reply::Stayed { reason: SILENT.into(), transient: true });
        self.shared.catch_up(ME);
        let on_nic = self.entries.get(&number).is_some_and(|entry| entry.connection.owner() == Owner::Nic);
        match stays(&reply) {
            None => {
                self.summary.moves += 1;
                self.returned(number, fd)
            }
            // The NIC has just died, and the connection was restored from its record.
            Some(_) if !on_nic => self.returned(number, fd),
            Some(reason) => {
                self.note_stay(reason);
                // The connection is still on the NIC, and the restore will be tried again.
                if let Err(error) = self.join(number, fd) {
                    bail!("a connection that cannot leave the NIC ({reason}) cannot stay there: {error}");
                }
                if cause.is_some() || self.silent {
                    self.work.postponed.insert(number, cause.map(|(reason, until)| (reason.to_owned(), until)));
                }
                Ok(())
            }
        }
    }

    /// Copies a connection's bytes, and handles the result.
    pub(crate) fn carry(&mut self, number: u32) -> Result<()> {
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(()) };
        let next = entry.carry(&self.shared, &self.bypass, &mut self.piece)?;
        if entry.closed.is_some() && entry.is_drained() {
            return self.close(number);
        }
        match next {
            Next::GoesOn => return Ok(()),
            // The connection has ended on the NIC: bytes that still wait for it cannot be sent any more.
            Next::Ended => self.forget(number)?,
            _ if entry.closed.is_some() => return Ok(()),
            Next::AtEnd => self.work.postpone(number, ("end of stream", Until::Never)),
            Next::TooMuch => self.work.postpone(number, ("backlog", Until::Again)),
        }
        Ok(())
    }

    /// Resets a connection that could not be restored when the NIC died.
    pub(crate) fn end_lost(&mut self, number: u32) -> Result<()> {
        let Some(process) = self.entries.get(&number).map(|entry| entry.process) else { return Ok(()) };
        if self.stop_users(process).is_err() {
            self.work.lost_ones.insert(number);
            return Ok(());
        }
        if let Some(fd) = self.take_out(number)? {
            let _ = socket::reset(fd.as_fd());
        }
        self.forget(number)
    }

    /// Handles a change of a socket's state: the program has shut it down, or closed it.
    pub(crate) fn state_changed(&mut self, number: u32) -> Result<()> {
        let Some(entry) = self.entries.get(&number) else { return Ok(()) };
        let known = diagnosis::state_and_holder(&self.diagnosis, &entry.flow);
        let (state, held) = known.map_or((None, false), |(state, held)| (Some(state), held));
        // Moves change the state, too, for a moment.
        if state == Some(ESTABLISHED) {
            return Ok(());
        }
        // The program has closed it, and need not be stopped again.
        if entry.closed.is_some() {
            return self.carry(number);
        }
        let on_nic = entry.joined.is_some();
        if self.stop_users(entry.process).is_err() {
            // The change may be from the move in progress: check again later.
            self.work.changed.insert(number);
            return Ok(());
        }
        // If the kernel says that no process has the socket, thousands of descriptors need not be searched.
        let fd = if held { self.descriptor(number) } else { self.known_descriptor(number) };
        match (fd, on_nic) {
            // The connection has ended, and there will be no event when the program closes the socket.
            (Some(fd), false) if TcpInfo::read(fd.as_fd()).is_ok_and(|info| info.state == CLOSE) => self.forget(number)?,
            (Some(_), false) => {}
            (Some(fd), true) => {
                drop(fd);
                if let Some(entry) = self.entries.get_mut(&number) {
                    entry.shut = true;
                }
                self.move_to_kernel(number, Some(("shutdown", Until::Never)))?;
            }
            (None, false) => self.forget(number)?,
            (None, true) => {
                if let Some(entry) = self.entries.get_mut(&number) {
                    // If it was closed in order, a FIN has to be delivered; if it was reset, nothing is left to do.
                    entry.closed.get_or_insert(state.is_none());
                }
                return self.carry(number);
            }
        }
        Ok(())
    }

    /// Asks the agent to end a connection that its program has closed and whose bytes are all in session memory.
    fn close(&mut self, number: u32) -> Result<()> {
        let Some(entry) = self.entries.get_mut(&number) else { return Ok(()) };
        let abort = entry.closed.unwrap_or(false);
        entry.settle(&self.shared, &self.bypass, &mut self.piece, None)?;
        let reply = self.ask(&Ask::Closed { connection: number, abort }, None)?;
        self.drop_unless_refused(number, &reply);
        Ok(())
    }

    /// Forgets a connection that is in the kernel or does not exist any more.
    fn forget(&mut self, number: u32) -> Result<()> {
        let reply = self.ask(&Ask::Forget { connection: number }, None)?;
        self.drop_unless_refused(number, &reply);
        Ok(())
    }

    /// Asks again for the end of connections that the agent has refused to end for now. Their programs need not be
    /// stopped for that.
    pub(crate) fn end_what_is_over(&mut self) -> Result<()> {
        if self.silent {
            return Ok(());
        }
        for number in self.work.take_over(monotonic_micros()) {
            match self.entries.get(&number).map(|entry| entry.closed.is_some()) {
                Some(true) => self.carry(number)?,
                Some(false) => self.forget(number)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Drops a connection that the agent has ended or forgotten, unless the agent has refused for now: it is restoring
    /// connections of a dead NIC, and still has the connection's number and memory.
    fn drop_unless_refused(&mut self, number: u32, reply: &Reply) {
        if let Some(reason) = stays(reply) {
            self.note_stay(reason);
        }
        // The connection may have been lent and dropped while the answer was awaited.
        let known = self.entries.contains_key(&number);
        match reply {
            Reply::Stayed { transient: true, .. } if known => self.work.end_later(number, monotonic_micros()),
            _ => self.drop_entry(number),
        }
    }

    fn drop_entry(&mut self, number: u32) {
        // The agent may give the number to another connection now.
        self.work.over.remove(&number);
        let Some(entry) = self.entries.remove(&number) else { return };
        if let Some(joined) = &entry.joined {
            self.bypass.part(entry.cookie, &entry.flow, &joined.engine_flow);
        }
        self.bypass.forget(entry.cookie);
        self.by_cookie.remove(&entry.cookie);
        self.known.remove(entry.inode);
        self.shared.let_go(&entry.connection);
    }

    /// Examines a socket of a stopped process.
    pub(crate) fn discover(&mut self, process: u32, fd: i32, inode: u64) -> Result<()> {
        if !process::has_socket(process, fd, inode) {
            return Ok(());
        }
        let _user = foreign::on_behalf_of(process::user_of(process).unwrap_or(u32::MAX));
        let Ok(opened) = process::open_process(process) else { return Ok(()) };
        let Ok(copy) = take_descriptor(opened.as_fd(), fd) else { return Ok(()) };
        self.consider(process, fd, inode, copy.as_fd())
    }

    /// Registers a socket with the agent, if it is a selected connection.
    fn consider(&mut self, process: u32, fd: i32, inode: u64, copy: BorrowedFd<'_>) -> Result<()> {
        const SO_PROTOCOL: i32 = 38;
        // MPTCP sockets are offered, too: the agent refuses them, and lists that.
        let protocol = socket::get(copy, libc::SOL_SOCKET, SO_PROTOCOL).ok();
        if !matches!(protocol, Some(libc::IPPROTO_TCP | libc::IPPROTO_MPTCP)) {
            self.known.dismiss(inode);
            return Ok(());
        }
        let (Ok(local), Ok(peer)) = (socket::local_address(copy), socket::peer_address(copy)) else { return Ok(()) };
        let established = TcpInfo::read(copy).is_ok_and(|info| info.state == ESTABLISHED);
        if !established {
            return Ok(());
        }
        if !self.settings.target.fits(local.port()) {
            self.known.dismiss(inode);
            return Ok(());
        }
        let number = match self.ask_or_withdraw(&Ask::Register { inherited: false, process: Some(process) }, Some(copy))? {
            Some(Reply::Registered { connection }) => connection,
            // The agent has no time, or no NIC, now.
            None | Some(Reply::Stayed { transient: true, .. }) => {
                self.work.search_later(process);
                return Ok(());
            }
            Some(other) => {
                self.known.dismiss(inode);
                self.note_stay(stays(&other).unwrap_or("unexpected answer from the agent"));
                return Ok(());
            }
        };
        self.known.register(inode);
        self.work.delay = 0;
        // The agent puts a 0 there when it gives the number to a connection.
        note_hot_from(&self.shared, number, self.settings.hot_from);
        let connection = self.shared.unregistered();
        self.shared.take_charge(&connection, number);
        let cookie = socket::cookie(copy)?;
        let flow = Flow { local: local.into(), remote: peer.into(), device: socket::device(copy)? };
        self.bypass.watch(cookie)?;
        self.by_cookie.insert(cookie, number);
        let (joined, stash, declined, shut, closed, carried) = (None, Vec::new(), None, false, None, 0);
        let entry = relay::Entry { connection, process, fd, inode, cookie, flow, joined, stash, declined, shut, closed, carried };
        self.entries.insert(number, entry);
        self.summary.connections += 1;
        if self.settings.flip.is_none() {
            self.work.wanted.insert(number, Place::Nic);
        }
        Ok(())
    }
}
