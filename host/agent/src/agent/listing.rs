//! What lists say: of connections, their traffic, the counters.

use super::Agent;
use crate::calls::{flow_of, outsider};
use crate::connection::Connection;
use crate::counts::NicCounts;
use crate::ground::Shape;
use crate::host_tcp::HostTcp;
use crate::record::read_record;
use crate::session::Session;
use crate::traffic::Traffic;
use baton_abi::Cid;
use baton_abi::layout::{COUNTERS, block, nic, slot};
use baton_linux::events::monotonic_micros;
use baton_linux::netlink::Netlink;
use baton_linux::tcp_info::TcpInfo;
use baton_linux::{diagnosis, socket};
use baton_moves::Custody;
use baton_protocol::events::{EventList, History};
use baton_protocol::program::{ConnectionInfo, Detail, Load, NicStatistics, Place, Reply, Statistics};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

/// Most connections listed in one answer.
const LISTED: usize = 128;
/// Most bytes that one listed connection takes besides its texts, and that all in one answer take.
const LISTED_BYTES: usize = 256;
pub(super) const LISTED_IN_ALL: usize = 60_000;

/// Most bytes that a connection, and an event or a reason besides its text, takes in an answer about events.
const HISTORY_BYTES: usize = 16;
const EVENT_BYTES: usize = 24;

/// Most connections whose traffic one answer has: fewer than 60 bytes each.
const LOADS: usize = 1000;

/// Returns the TCP state of a connection that the kernel has. `user` has opened its session. Of a socket whose
/// lock others may hold it is only what can be read without it.
fn kernel_detail(user: u32, connection: &Connection, diagnosis: &Netlink) -> Option<Detail> {
    let fd = connection.fd.as_ref().map(AsFd::as_fd);
    if connection.call().is_some() || outsider(user, connection.process, fd).is_some() {
        let found = diagnosis::describe(diagnosis, &flow_of(connection, fd), connection.cookie).ok()?;
        let unsent = fd.and_then(|fd| socket::queue_bytes(fd, socket::SIOCOUTQNSD).ok()).unwrap_or(0);
        let in_flight = found.unacknowledged.saturating_sub(unsent);
        return Some(Detail { state: found.state, in_flight, unsent, unread: found.unread, ..Detail::default() });
    }
    let info = match fd {
        Some(fd) => TcpInfo::read(fd),
        None => diagnosis::information(diagnosis, &connection.flow, connection.cookie),
    };
    let info = info.ok()?;
    let queue = |request| fd.and_then(|fd| socket::queue_bytes(fd, request).ok()).unwrap_or(0);
    let (queued, unsent) = (queue(socket::SIOCOUTQ), queue(socket::SIOCOUTQNSD));
    let carried = carried_in_kernel(connection, &info);
    Some(Detail {
        state: info.state,
        srtt: info.rtt,
        cwnd: info.snd_cwnd,
        in_flight: queued.saturating_sub(unsent),
        unsent,
        unread: queue(socket::SIOCINQ),
        send_window: info.snd_wnd,
        retransmitted: info.total_retrans,
        mss: info.snd_mss,
        sent: Some(carried.sent),
        received: Some(carried.received),
    })
}

/// What a connection in the kernel has carried, with what the kernel has counted of it.
fn carried_in_kernel(connection: &Connection, info: &TcpInfo) -> Traffic {
    connection.traffic.plus(info.bytes_acked, info.bytes_received)
}

/// Bytes that a connection takes in a list.
fn listed_bytes(session: &Session, connection: &Connection) -> usize {
    LISTED_BYTES + session.opening.program.len() + connection.reason.len()
}

/// What an agent says of what it has.
pub(super) struct Listing<'a>(pub &'a Agent);

impl Listing<'_> {
    /// Returns the TCP state of a connection: from its record on the NIC, or from the kernel.
    pub(super) fn detail(&self, session: u32, number: u32) -> Reply {
        let connection = self.0.sessions.get(session as usize).and_then(Option::as_ref);
        let connection = connection.and_then(|session| session.connections.get(number as usize)?.as_ref());
        let user = self.0.user_of(session);
        match connection.and_then(|connection| self.detail_of(user, connection)) {
            Some(detail) => Reply::Detail(detail),
            None => Reply::Failed { reason: "it is not on the NIC".into() },
        }
    }

    fn detail_of(&self, user: u32, connection: &Connection) -> Option<Detail> {
        let detail = self.known_detail(user, connection)?;
        // In the middle of a move neither side has counted all.
        Some(if connection.goal().is_some() { Detail { sent: None, received: None, ..detail } } else { detail })
    }

    fn known_detail(&self, user: u32, connection: &Connection) -> Option<Detail> {
        let (Some(cid), Some(_)) = (connection.cid, &connection.on_nic) else {
            return kernel_detail(user, connection, &self.0.diagnosis);
        };
        let memory = &self.0.hardware.get(cid.nic())?.memory;
        let record = read_record(memory, nic::slot(cid.slot()))?;
        let carried = connection.carried_on_nic(&record);
        Some(Detail {
            state: record.state,
            srtt: record.srtt,
            cwnd: record.cwnd,
            in_flight: record.snd_nxt.wrapping_sub(record.snd_una),
            // A FIN that was sent lies behind all that is queued.
            unsent: (connection.block.load(block::QUEUED_SEQ).wrapping_sub(record.snd_nxt) as i32).max(0) as u32,
            unread: record.rcv_nxt.wrapping_sub(connection.block.load(block::READ_SEQ)),
            send_window: record.snd_wnd,
            retransmitted: 0,
            mss: u32::from(connection.exported(memory)?.image.mss),
            sent: Some(carried.sent),
            received: Some(carried.received),
        })
    }

    pub(super) fn list(&self, from: (u32, u32)) -> Vec<ConnectionInfo> {
        let (mut list, mut bytes) = (Vec::new(), 0);
        let (first, mut number) = from;
        let now = monotonic_micros();
        for (at, session) in self.0.sessions.iter().enumerate().skip(first as usize) {
            let begin = std::mem::take(&mut number) as usize;
            let Some(session) = session else { continue };
            for connection in session.connections.iter().skip(begin).flatten() {
                bytes += listed_bytes(session, connection);
                if list.len() >= LISTED || bytes > LISTED_IN_ALL {
                    return list;
                }
                list.push(self.info(at as u32, session, connection, now));
            }
        }
        list
    }

    /// Describes these connections, as many as fit into one answer; what there is not is left out.
    pub(super) fn describe(&self, connections: &[(u32, u32)]) -> Vec<ConnectionInfo> {
        let (mut list, mut bytes) = (Vec::new(), 0);
        let now = monotonic_micros();
        for (at, number) in connections.iter().take(LISTED) {
            let Some(Some(session)) = self.0.sessions.get(*at as usize) else { continue };
            let Some(Some(connection)) = session.connections.get(*number as usize) else { continue };
            bytes += listed_bytes(session, connection);
            if bytes > LISTED_IN_ALL {
                break;
            }
            list.push(self.info(*at, session, connection, now));
        }
        list
    }

    /// The events of these connections, as many as fit into one answer; what there is not is left out.
    pub(super) fn events(&self, connections: &[(u32, u32)]) -> EventList {
        let (mut list, mut bytes, now) = (EventList::default(), 0, monotonic_micros());
        for (at, number) in connections.iter().take(LISTED) {
            let Some(Some(session)) = self.0.sessions.get(*at as usize) else { continue };
            let Some(Some(connection)) = session.connections.get(*number as usize) else { continue };
            let events = connection.events.list(now, &mut list);
            bytes += HISTORY_BYTES + EVENT_BYTES * events.len();
            // One that does not fit may have added reasons. The first one always fits.
            if bytes + list.reasons.iter().map(|reason| EVENT_BYTES + reason.len()).sum::<usize>() > LISTED_IN_ALL {
                break;
            }
            list.histories.push(History { session: *at, connection: *number, events });
        }
        list
    }

    /// What connections have carried, from this session and number on.
    pub(super) fn traffic(&self, from: (u32, u32)) -> Vec<Load> {
        let mut list = Vec::new();
        let (first, mut number) = from;
        for (at, session) in self.0.sessions.iter().enumerate().skip(first as usize) {
            let begin = std::mem::take(&mut number) as usize;
            let Some(session) = session else { continue };
            for connection in session.connections.iter().skip(begin).flatten() {
                if list.len() >= LOADS {
                    return list;
                }
                let carried = self.carried(session, connection);
                list.push(Load {
                    session: at as u32,
                    connection: connection.number(),
                    serial: connection.serial,
                    place: connection.place(),
                    nic: connection.cid.filter(|_| connection.place() == Place::Nic).map(|cid| cid.nic() as u32),
                    moves: connection.made,
                    carried: carried.map(|Traffic { sent, received }| (sent, received)),
                });
            }
        }
        list
    }

    /// What a connection has carried, if that can be read without waiting for its socket's lock; not in the middle of a
    /// move.
    fn carried(&self, session: &Session, connection: &Connection) -> Option<Traffic> {
        if connection.goal().is_some() {
            return None;
        }
        if let (Some(cid), Custody::Nic) = (connection.cid, connection.step().custody()) {
            let record = read_record(&self.0.hardware.get(cid.nic())?.memory, nic::slot(cid.slot()))?;
            return Some(connection.carried_on_nic(&record));
        }
        let fd = connection.fd.as_ref().map(AsFd::as_fd);
        if connection.call().is_some() || outsider(session.user, connection.process, fd).is_some() {
            return None;
        }
        let info = match fd {
            Some(fd) => TcpInfo::read(fd),
            None => diagnosis::information(&self.0.diagnosis, &connection.flow, connection.cookie),
        };
        Some(carried_in_kernel(connection, &info.ok()?))
    }

    /// One connection of a list, at `now`, microseconds of the monotonic clock.
    fn info(&self, at: u32, session: &Session, connection: &Connection, now: u64) -> ConnectionInfo {
        let key = (at, connection.number(), connection.serial);
        let waits = self.0.moves.for_devices.trouble(key).or_else(|| self.0.searches.trouble(key));
        let trouble = connection.call().and_then(|call| call.trouble(now)).or(waits);
        ConnectionInfo {
            session: at,
            connection: connection.number(),
            process: connection.process,
            program: session.opening.program.clone(),
            local: connection.local().to_string(),
            peer: connection.peer().to_string(),
            place: connection.place(),
            nic: connection.cid.filter(|_| connection.place() == Place::Nic).map(|cid| cid.nic() as u32),
            made_by: connection.made_by,
            moves: connection.made,
            lent: connection.cid.filter(|_| session.opening.fast_path).map(|cid| self.times_lent(cid)),
            dormant: connection.cid.is_some_and(|cid| self.slot_word(cid, slot::DORMANT) != 0),
            for_us: now.saturating_sub(connection.since),
            detail: self.detail_of(session.user, connection).unwrap_or_default(),
            reason: trouble.unwrap_or(&connection.reason).to_string(),
        }
    }

    /// How often the NIC has lent a connection to the host's TCP, and whether it has now.
    fn times_lent(&self, cid: Cid) -> (u32, bool) {
        let word = self.slot_word(cid, slot::LENT);
        (word.div_ceil(2), word & 1 != 0)
    }

    /// A word that the NIC has written to a connection's slot.
    fn slot_word(&self, cid: Cid, at: usize) -> u32 {
        let memory = self.0.hardware.get(cid.nic()).map(|hardware| &hardware.memory);
        memory.map_or(0, |memory| memory.word32(nic::slot(cid.slot()) + at).load(Ordering::Relaxed))
    }

    /// The counters of agent and NICs.
    pub(super) fn count(&self) -> Statistics {
        let agent = self.0;
        let nics: Vec<NicStatistics> = (0..agent.nics.len()).map(|nic| self.count_of(nic)).collect();
        let workers: Vec<Vec<u64>> = nics.iter().flat_map(|nic| nic.workers.clone()).collect();
        Statistics {
            counters: sums(&workers),
            workers,
            nics,
            nic_process: agent.nics[0].process(),
            host_tcp_process: agent.nics[0].host_tcp().map_or(0, HostTcp::process),
            agent_process: std::process::id(),
            for_us: monotonic_micros().saturating_sub(agent.started),
            sessions: agent.sessions.iter().flatten().count() as u32,
            ..agent.statistics.clone()
        }
    }

    /// The counters of one NIC.
    fn count_of(&self, nic: usize) -> NicStatistics {
        let of = |worker| self.0.earlier.counters(nic, worker, &self.0.hardware[nic].memory);
        let workers: Vec<Vec<u64>> = (0..self.0.settings.nic.workers).map(of).collect();
        let devices = match &self.0.shape {
            Shape::Beside { devices, .. } => devices.of_nic(nic),
            Shape::Inline { .. } => Vec::new(),
        };
        let (starved, hung) = self.0.watch.counts(nic);
        let NicCounts { carried: Traffic { sent, received }, deaths } = self.0.counts.nic(nic);
        let process = self.0.nics[nic].process();
        NicStatistics { process, devices, counters: sums(&workers), workers, starved, hung, deaths, sent, received }
    }
}

/// The sums of workers' counters.
fn sums(workers: &[Vec<u64>]) -> Vec<u64> {
    (0..COUNTERS).map(|at| workers.iter().map(|worker| worker[at]).sum()).collect()
}
