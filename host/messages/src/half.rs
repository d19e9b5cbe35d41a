//! The data half: on this host, or on the NIC. With a NIC there is one on this host as well, for peers to which no way
//! leads by the NIC: those of this host, and those behind other devices. Where the NIC has only one of the halves, the
//! one on this host also does the other half's work for the NIC's peers.
//!
//! The policy knows of one data half. Its commands go to the one that has the peer or the message; the buffers for RTS
//! packets are divided between the two.

use crate::arena::{Arena, Buffer};
use crate::streams::Streams;
use baton_client::messages::{Carrier, Link, Local};
use baton_linux::events::{Poller, Trigger};
use baton_rmpp::{Command, Config, Counters, DataConfig, Event, Half, Halves, StreamConfig, handle};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// Events that the data half of this host may keep for the policy.
const EVENTS: u16 = 4096;
/// Buffers for RTS packets that the data half of this host has beside a NIC's: those with the lowest numbers.
const BUFFERS_HERE: u16 = 256;
/// With a NIC: how many times its ring is looked at for each time that the socket is, which takes a system call.
const ROUNDS_BETWEEN: u32 = 32;
/// While streams bring something: looks at them for each at the socket.
const STREAMED: u32 = 4;
/// Tokens of the poller.
pub const SOCKET: u64 = 1;
const BELL: u64 = 2;
const END: u64 = 3;
const STREAMS: u64 = 4;

/// The NIC's data half, and which messages it has.
struct OnNic {
    link: Link,
    /// What it has of the data half.
    halves: Halves,
    /// By slot of the handle: the message is the NIC's.
    sends: Vec<bool>,
    receives: Vec<bool>,
    /// By peer.
    peers: Vec<bool>,
    /// There are peers that the NIC does not reach.
    has_others: bool,
    /// Looks at the ring since the last one at the socket.
    looks: u32,
    /// Baton has ended, or its ring makes no sense.
    ended: bool,
}

/// The data half, or both of them.
pub struct DataHalf {
    local: Local,
    socket: Carrier,
    config: Config,
    nic: Option<OnNic>,
    /// Only without a NIC.
    streams: Option<Streams>,
    /// Looks in a row at which streams brought something.
    streamed: u32,
    /// NICs that have died.
    deaths: u32,
    /// It takes no commands any more.
    #[cfg(test)]
    pub stopped: bool,
}

impl DataHalf {
    /// The data half for a policy with these settings: of this host alone, with streams or without, or also of the NIC
    /// behind `link`.
    pub fn new(
        config: Config,
        socket: Carrier,
        link: Option<(Link, Halves)>,
        streams: Option<(StreamConfig, Streams)>,
    ) -> DataHalf {
        let nic = link.map(|(link, halves)| OnNic {
            link,
            halves,
            sends: vec![false; config.sends.into()],
            receives: vec![false; config.incoming.into()],
            peers: vec![false; config.peers.into()],
            has_others: false,
            looks: 0,
            ended: false,
        });
        let (settings, streams) = streams.unzip();
        DataHalf {
            local: Self::local(&config, &socket, settings),
            socket,
            config,
            nic,
            streams,
            streamed: 0,
            deaths: 0,
            #[cfg(test)]
            stopped: false,
        }
    }

    fn local(config: &Config, socket: &Carrier, streams: Option<StreamConfig>) -> Local {
        // Only a NIC matches: what this host's data half reports, the policy sees at once.
        let config = Config { data_posted: 0, ..*config };
        Local::new(DataConfig { streams, ..config.data(Halves::BOTH, socket.address().into(), EVENTS) })
    }

    /// Address at which it receives.
    pub fn address(&self) -> SocketAddr {
        self.socket.address()
    }

    /// Whether a NIC has it.
    pub fn is_on_nic(&self) -> bool {
        self.nic.is_some()
    }

    /// The streams, which a test breaks.
    #[cfg(test)]
    pub fn streams(&self) -> Option<&Streams> {
        self.streams.as_ref()
    }

    /// Whether the data of long messages goes by streams, to peers that take part.
    pub fn has_streams(&self) -> bool {
        self.streams.is_some()
    }

    /// Whether a NIC may match: all peers' packets come by it.
    pub fn may_match(&self) -> bool {
        self.nic.as_ref().is_some_and(|nic| !nic.uses_socket())
    }

    /// What this host's data half has counted; datagrams that the socket did not take; packets of the NIC's, and NICs
    /// that died.
    pub fn report(&self) -> (&Counters, u64, u64, u32) {
        let on_nic = self.nic.as_ref().map_or(0, |nic| nic.link.packets()[..2].iter().sum());
        (self.local.data.counters(), self.socket.dropped(), on_nic, self.deaths)
    }

    /// Begins to use another NIC if the last one has died, or this host's data half alone if Baton has ended. True: the
    /// data half knows nothing of what there is ([`baton_rmpp::Policy::restart`]).
    pub fn renew(&mut self) -> bool {
        let Some(nic) = &mut self.nic else { return false };
        if nic.ended {
            self.nic = None;
        } else if nic.link.renew() {
            nic.has_others = false;
            self.deaths = nic.link.starts().saturating_sub(1);
        } else {
            return false;
        }
        self.local = Self::local(&self.config, &self.socket, None);
        true
    }

    /// Takes packets from the socket. Returns whether there were any.
    pub fn receive<B: Buffer>(&mut self, memory: &mut Arena<B>) -> bool {
        if let Some(nic) = &mut self.nic {
            nic.looks += 1;
            if nic.looks >= ROUNDS_BETWEEN {
                nic.looks = 0;
                nic.ended |= nic.link.has_ended();
            } else if !nic.uses_socket() {
                return false;
            }
        }
        let streamed = self.streams.as_mut().is_some_and(|streams| streams.receive(&mut self.local.data, memory));
        // Where bytes come by a stream, the next ones are more likely than a packet.
        self.streamed = if streamed { self.streamed.wrapping_add(1) } else { 0 };
        if !self.streamed.is_multiple_of(STREAMED) {
            return true;
        }
        self.local.receive(&mut self.socket, memory) > 0 || streamed
    }

    /// The next event for the policy.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(nic) = &mut self.nic {
            match nic.link.poll_event() {
                Ok(None) => {}
                Ok(event) => return event,
                Err(_) => nic.ended = true,
            }
        }
        self.local.data.poll_event()
    }

    /// Whether commands can be carried out.
    pub fn has_room(&mut self) -> bool {
        #[cfg(test)]
        if self.stopped {
            return false;
        }
        self.local.data.has_room() && self.nic.as_mut().is_none_or(|nic| nic.link.has_room())
    }

    /// Carries out a command, or has the NIC do it. Call it only if there is room.
    pub fn handle_command(&mut self, command: &Command, now: u64) {
        if let Some(nic) = &mut self.nic
            && nic.takes(command, now)
        {
            nic.link.push(command, now);
            // Peers are known to both where each has a half.
            if !nic.is_parted() || command.half().is_some() {
                return;
            }
        }
        self.local.data.handle_command(command);
    }

    /// Gives the socket what there is to be sent, which leaves with [`DataHalf::transmit`].
    pub fn emit<B: Buffer>(&mut self, memory: &Arena<B>) {
        self.local.emit(&mut self.socket, memory);
    }

    /// Sends what is to be sent. Returns whether there was anything.
    pub fn transmit<B: Buffer>(&mut self, memory: &Arena<B>) -> bool {
        if let Some(nic) = &mut self.nic {
            nic.link.publish();
        }
        let sent = self.local.transmit(&mut self.socket, memory) > 0;
        let streamed = self.streams.as_mut().is_some_and(|streams| streams.transmit(&mut self.local.data, memory));
        sent || streamed
    }

    /// Asks again for ways to hosts that were not known. The kernel finds a neighbour when there is something to send
    /// to it, so it is given an empty datagram, which is no packet.
    pub fn retry(&mut self, now: u64) {
        let Some(nic) = self.nic.as_mut().filter(|nic| nic.link.next_retry().is_some_and(|at| at <= now)) else { return };
        let unreached = nic.link.retry(now);
        self.socket.probe(&unreached);
    }

    /// When [`DataHalf::retry`] has something to do.
    pub fn next_retry(&self) -> Option<u64> {
        self.nic.as_ref().and_then(|nic| nic.link.next_retry())
    }

    /// Makes a poller watch what wakes a sleeping program.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn watch(&self, poller: &Poller) -> io::Result<()> {
        for socket in self.socket.sockets() {
            poller.add(socket, SOCKET, Trigger::Readable)?;
        }
        if let Some(streams) = &self.streams {
            poller.add(streams.poller(), STREAMS, Trigger::Readable)?;
        }
        if let Some(nic) = &self.nic {
            poller.add(nic.link.bell(), BELL, Trigger::Readable)?;
            poller.add(nic.link.hangs_up(), END, Trigger::HangUp)?;
        }
        Ok(())
    }

    /// Announces to the NIC that the program is going to sleep. False if it must not. [`DataHalf::end_sleep`] follows.
    pub fn prepare_sleep(&mut self) -> bool {
        let Some(nic) = &mut self.nic else {
            return self.streams.as_mut().is_none_or(|streams| streams.may_sleep(&self.local.data));
        };
        nic.looks = ROUNDS_BETWEEN;
        nic.link.prepare_sleep()
    }

    /// The program is awake; `tokens` are those of the poller.
    pub fn end_sleep(&mut self, tokens: &[u64]) {
        if tokens.contains(&SOCKET) {
            self.socket.look_at_all();
        }
        if let Some(streams) = self.streams.as_mut().filter(|_| tokens.contains(&STREAMS)) {
            streams.wake();
        }
        if let Some(nic) = &mut self.nic {
            nic.link.end_sleep();
            if tokens.contains(&BELL) {
                nic.link.clear_bell();
            }
            nic.ended |= tokens.contains(&END) && nic.link.has_ended();
        }
    }
}

impl OnNic {
    /// Whether it has only one of the halves.
    fn is_parted(&self) -> bool {
        self.halves != Halves::BOTH
    }

    /// Whether packets come by the socket, too.
    fn uses_socket(&self) -> bool {
        self.has_others || self.is_parted()
    }

    /// Whether a command is for the NIC. Messages go with their peer, and stay where they are until they are forgotten.
    fn takes(&mut self, command: &Command, now: u64) -> bool {
        let ip = |address: &baton_wire::Endpoint| -> IpAddr { SocketAddr::from(*address).ip() };
        match command {
            Command::SetPeer { peer, address, .. } => {
                let here = self.link.leads_to(ip(address), now);
                self.has_others |= !here;
                self.peers[usize::from(*peer)] = here;
                here
            }
            Command::DropPeer { peer } => self.peers[usize::from(*peer)],
            Command::PostBuffer { buffer } => self.halves.receiving && *buffer >= BUFFERS_HERE,
            Command::Send { peer, handle, .. } => {
                let here = self.halves.sending && self.peers[usize::from(*peer)];
                self.sends[handle::slot(*handle)] = here;
                here
            }
            Command::Clear { peer, handle, .. } => {
                let here = self.halves.receiving && self.peers[usize::from(*peer)];
                self.receives[handle::slot(*handle)] = here;
                here
            }
            Command::Resend { handle, .. } => self.sends[handle::slot(*handle)],
            Command::Release { handle, half: Half::Sending, .. } => self.sends[handle::slot(*handle)],
            Command::Release { handle, half: Half::Receiving, .. } => self.receives[handle::slot(*handle)],
            Command::Control { to, .. } => {
                let here = self.link.leads_to(ip(to), now);
                self.has_others |= !here;
                self.halves.sending && here
            }
            Command::Place { handle } => {
                self.receives[handle::slot(*handle)] = true;
                true
            }
            Command::SetMatcher { .. }
            | Command::Post { .. }
            | Command::Cancel { .. }
            | Command::Unexpected { .. }
            | Command::Discard { .. }
            | Command::Credit { .. } => true,
        }
    }
}
