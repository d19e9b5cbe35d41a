//! A UDP socket that is on the NIC: the program's ends of its rings, and the hosts that the NIC can send to.

use crate::ring_memory::RingBlock;
use crate::shared::Shared;
use baton_abi::layout::{datagrams, session};
use baton_datagrams::{Direction, Reader, Wish, Writer};
use baton_linux::bell::SessionBell;
use baton_linux::events::monotonic_micros;
use baton_protocol::program::Rings;
use baton_ring::Token;
use baton_shm::Region;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes of the send ring.
const SEND: u32 = 1 << 18;

/// Bounds of the receive ring's bytes.
const LEAST: u32 = 1 << 16;
const MOST: u32 = 1 << 24;

/// Microseconds after which the agent is asked again about a host that the NIC could not send to: while the kernel
/// resolves its link address, and in all other cases.
const ASK_SOON: u64 = 2000;
const ASK_AGAIN: u64 = 1_000_000;

/// Bytes of the IP and UDP headers, by family.
const HEADERS_V4: u32 = 28;
const HEADERS_V6: u32 = 48;

/// What is known of the routes: their version, and for each host the longest packet, or when to ask again.
type Ways = (u32, HashMap<IpAddr, Result<u32, u64>>);

/// A UDP socket on the NIC.
#[derive(Debug)]
pub struct Datagrams {
    memory: Arc<Region>,
    rings: Rings,
    receive: Mutex<Reader>,
    send: Mutex<Writer>,
    wish: Wish,
    nic_wish: Wish,
    bell: SessionBell,
    nic_bell: SessionBell,
    number: AtomicU32,
    agent_starts: AtomicU32,
    ways: Mutex<Ways>,
    /// The rings' memory. It stays taken after the drop as long as a NIC may use it.
    _block: RingBlock,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Datagrams {
    /// Rings in session memory for a socket that may hold `receive` bytes of datagrams. `renumber` may give a
    /// descriptor another number.
    ///
    /// # Errors
    /// `OutOfMemory` if the session has no room left, or too many rings that were given up may still be used by the
    /// NIC; else the failed system call's.
    pub fn new(shared: &Shared, receive: u32, renumber: impl Fn(OwnedFd) -> OwnedFd) -> io::Result<Datagrams> {
        let memory = shared.memory().clone();
        let receive = receive.clamp(LEAST, MOST).next_power_of_two();
        let block = shared.rings.take(receive, SEND)?;
        let place = *block.place();
        let outside = || io::Error::from(io::ErrorKind::OutOfMemory);
        let (bell, nic_bell) = SessionBell::pair()?;
        let [bell, nic_bell] = [bell, nic_bell].map(|bell| SessionBell::from_fd(renumber(bell.into())));
        let wish = Wish::new(&memory, &place, Direction::Receive);
        wish.make();
        Ok(Datagrams {
            rings: Rings { base: place.base, receive, send: SEND },
            receive: Mutex::new(Reader::new(&memory, &place, Direction::Receive).ok_or_else(outside)?),
            send: Mutex::new(Writer::new(&memory, &place, Direction::Send, SEND).ok_or_else(outside)?),
            wish,
            nic_wish: Wish::new(&memory, &place, Direction::Send),
            bell,
            nic_bell,
            memory,
            number: AtomicU32::new(0),
            agent_starts: AtomicU32::new(0),
            ways: Mutex::default(),
            _block: block,
        })
    }

    /// Gives the socket's datagrams to the NIC, with the socket's present address, peer and options.
    ///
    /// # Errors
    /// See [`Shared::take_datagrams`].
    pub fn serve(&self, shared: &Shared, fd: BorrowedFd<'_>) -> io::Result<()> {
        let starts = self.starts();
        let number = shared.take_datagrams(fd, self.nic_bell.as_fd(), self.rings)?;
        self.number.store(number, Ordering::Release);
        self.agent_starts.store(starts, Ordering::Release);
        Ok(())
    }

    fn starts(&self) -> u32 {
        self.memory.word32(session::AGENT_STARTS).load(Ordering::Acquire)
    }

    fn word(&self, offset: usize) -> u32 {
        self.memory.word32(self.rings.base as usize + offset).load(Ordering::Acquire)
    }

    /// Whether the NIC has the socket's datagrams.
    pub fn is_on_nic(&self) -> bool {
        self.word(datagrams::ON_NIC) == 1 && !self.has_new_agent()
    }

    /// Whether the agent was replaced by another one, which does not know the socket.
    pub fn has_new_agent(&self) -> bool {
        self.starts() != self.agent_starts.load(Ordering::Acquire)
    }

    /// The socket's number, from the agent.
    pub fn number(&self) -> u32 {
        self.number.load(Ordering::Acquire)
    }

    /// The doorbell: readable as long as datagrams wait.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Both descriptors of the doorbell, which are this library's.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.bell.as_fd(), self.nic_bell.as_fd()]
    }

    /// Bytes of the next datagram.
    pub fn next_length(&self) -> Option<u32> {
        locked(&self.receive).peek().map(|record| record.length)
    }

    /// Takes the next datagram, or leaves it in the ring if `only_look`. `take` gets its sender, its length, and a
    /// function that copies its bytes from an offset on. False if there is none: the doorbell then rings for the next
    /// one.
    pub fn receive(
        &self,
        shared: &Shared,
        token: Token,
        only_look: bool,
        take: impl FnOnce(SocketAddr, u32, &dyn Fn(u32, &mut [u8])),
    ) -> bool {
        let mut reader = locked(&self.receive);
        let Some(record) = reader.peek() else { return false };
        take(record.other.into(), record.length, &|skip, out| reader.read(&record, skip, out));
        if !only_look {
            reader.pop(&record);
            if reader.peek().is_none() && !self.wish.is_made() {
                self.bell.clear();
                self.wish.make();
                if reader.peek().is_some() {
                    // The NIC may have queued a datagram before it saw the request for the doorbell, so it
                    // gets the command to look.
                    let _ = shared.announce_datagrams(self.number(), token);
                }
            }
        }
        true
    }

    /// Whether the NIC can send a datagram of `length` bytes to a host: else the kernel does.
    pub fn reaches(&self, shared: &Shared, host: IpAddr, length: usize) -> bool {
        let host = host.to_canonical();
        let headers = if host.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
        let fits = |mtu: u32| length + headers as usize <= mtu as usize;
        let version = self.word(datagrams::WAYS);
        let mut ways = locked(&self.ways);
        if ways.0 != version || ways.1.len() >= datagrams::MOST_HOSTS {
            *ways = (version, HashMap::new());
        }
        match ways.1.get(&host) {
            Some(Ok(mtu)) => fits(*mtu),
            Some(Err(again)) if monotonic_micros() < *again => false,
            _ => {
                let found = shared.datagram_way(self.number(), host).map_err(|error| {
                    let soon = error.kind() == io::ErrorKind::WouldBlock;
                    monotonic_micros() + if soon { ASK_SOON } else { ASK_AGAIN }
                });
                ways.1.insert(host, found);
                found.is_ok_and(fits)
            }
        }
    }

    /// Queues a datagram for sending. False if there is no room.
    pub fn send<'a>(
        &self,
        shared: &Shared,
        token: Token,
        to: SocketAddr,
        pieces: impl Iterator<Item = &'a [u8]> + Clone,
    ) -> bool {
        let sent = locked(&self.send).push(&to.into(), pieces);
        if self.nic_wish.take() && shared.announce_datagrams(self.number(), token).is_err() {
            self.nic_wish.make();
        }
        sent
    }

    /// Gives the socket to the kernel, with `replay` also its unread datagrams. No other thread may use the rings
    /// meanwhile. If the agent does not confirm in time, the rings' memory stays taken until it does.
    pub fn end(&self, shared: &Shared, replay: bool) {
        let reader = locked(&self.receive);
        let _ = shared.end_datagrams(self.number(), replay);
        drop(reader);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket is closed while its NIC may still use its rings: they are not reused until the NIC has left them.
    #[test]
    fn rings_that_a_nic_may_use_are_nobody_elses() {
        let memory = Arc::new(Region::private(session::HEAP + (16 << 20)).expect("memory"));
        let shared = Shared::on(memory.clone());
        let free = || shared.buffers.lock().expect("the heap").free_bytes();
        let socket = || Datagrams::new(&shared, 0, |fd| fd).expect("rings");
        let all = free();
        // This socket was never given to the agent.
        drop(socket());
        assert_eq!(free(), all);
        let first = socket();
        let base = first.rings.base;
        let held = memory.word32(base as usize + datagrams::HELD);
        held.store(datagrams::held(first.starts()), Ordering::Release);
        drop(first);
        let second = socket();
        assert_ne!(second.rings.base, base);
        assert!(free() < all);
        held.store(0, Ordering::Release);
        drop(second);
        assert_eq!(free(), all);
    }
}
