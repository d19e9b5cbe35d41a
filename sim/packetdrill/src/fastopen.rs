//! TCP Fast Open (RFC 7413): cookies of our own as a server, others' as a client.

use crate::addresses;
use crate::errors::{Answer, Attempt};
use crate::packet::{CookieOption, TcpIn};
use crate::send::Opening;
use crate::socket::{Kind, SocketId};
use crate::stream::{Stream, Watch, Watched};
use crate::world::World;
use baton_tcp::segment::Transmit;
use baton_wire::{Endpoint, Flags};
use std::collections::BTreeMap;

/// Bits of the sysctl tcp_fastopen.
const CLIENT: u32 = 1;
const SERVER: u32 = 2;
const CLIENT_NO_COOKIE: u32 = 4;
const SERVER_NO_COOKIE: u32 = 0x200;

/// What a client knows of a server: its cookie and its MSS.
#[derive(Clone, Debug, Default)]
struct Known {
    cookie: CookieOption,
    mss: u16,
    /// Cookie requests with the standard option went unanswered: try the experimental one.
    try_experimental: bool,
}

/// What a client knows of servers, by address.
#[derive(Default)]
pub struct Cache(BTreeMap<[u8; 16], Known>);

/// SipHash-2-4 (Aumasson, Bernstein 2012), with which Linux makes cookies.
pub fn siphash(key: &[u8; 16], data: &[u8]) -> u64 {
    let word = |bytes: &[u8]| u64::from_le_bytes(std::array::from_fn(|at| bytes.get(at).copied().unwrap_or(0)));
    let (k0, k1) = (word(&key[..8]), word(&key[8..]));
    let mut v = [k0 ^ 0x736f_6d65_7073_6575, k1 ^ 0x646f_7261_6e64_6f6d, k0 ^ 0x6c79_6765_6e65_7261, k1 ^ 0x7465_6462_7974_6573];
    let round = |v: &mut [u64; 4]| {
        v[0] = v[0].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].wrapping_add(v[3]);
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].wrapping_add(v[1]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[2] = v[2].rotate_left(32);
    };
    let whole = data.len() / 8 * 8;
    let tail = word(&data[whole..]) | (data.len() as u64) << 56;
    for m in data[..whole].chunks_exact(8).map(word).chain([tail]) {
        v[3] ^= m;
        round(&mut v);
        round(&mut v);
        v[0] ^= m;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

/// The cookie for a client: a hash of both addresses, the client's first.
fn cookie_for_client(key: &[u8; 16], tcp: &TcpIn<'_>) -> Vec<u8> {
    let (client, server) = (&tcp.flow.remote, &tcp.flow.local);
    let addresses = if tcp.flow.is_v4() {
        [&client.v4_bytes()[..], &server.v4_bytes()].concat()
    } else {
        [&client.address[..], &server.address].concat()
    };
    siphash(key, &addresses).to_le_bytes().to_vec()
}

impl Stream {
    /// The Fast Open option of a segment: the first SYN has one, a repeated one does not; each SYN-ACK has it.
    pub fn cookie_for(&self, transmit: &Transmit) -> Option<CookieOption> {
        if !transmit.flags.contains(Flags::SYN) {
            return None;
        }
        let repeated = self.tcp.retransmissions_of_syn() > 0;
        let answer = transmit.flags.contains(Flags::ACK);
        let passive = self.parent.is_some() || self.queued;
        self.cookie.clone().filter(|_| if answer { passive } else { !repeated })
    }

    /// Notes what a segment carries.
    pub fn note_sent(&mut self, transmit: &Transmit) {
        if transmit.flags.contains(Flags::SYN) && transmit.length > 0 {
            self.syn_data = transmit.length;
        }
    }

    /// Nothing is known of a segment before it is fed in.
    pub fn learn_cookie(&mut self, _tcp: &TcpIn<'_>) {}
}

impl World {
    /// As a server: whether the data of a SYN is taken at once (section 4.2.2), and which option the SYN-ACK has.
    pub fn consider_fast_open(&mut self, listener: SocketId, child: SocketId, tcp: &TcpIn<'_>) {
        let sysctl = self.sysctls.fastopen;
        let options = &self.sockets[&listener].options;
        let keys =
            if options.fastopen_keys.is_empty() { self.sysctls.fastopen_keys.clone() } else { options.fastopen_keys.clone() };
        let (queue, no_cookie) = (options.fastopen_queue, options.fastopen_no_cookie || sysctl & SERVER_NO_COOKIE != 0);
        let pending = self.sockets.values().filter_map(|socket| socket.stream());
        let pending = pending.filter(|stream| stream.parent == Some(listener) && stream.tcp.is_fast_open()).count();
        let has_data = tcp.segment.length > 0;
        if sysctl & SERVER == 0 || queue == 0 || pending >= queue as usize || !has_data && tcp.cookie.is_none() {
            return;
        }
        if no_cookie {
            return self.take_syn_data(child, tcp, None);
        }
        let Some(option) = &tcp.cookie else { return };
        let answer =
            keys.first().map(|key| CookieOption { cookie: cookie_for_client(key, tcp), experimental: option.experimental });
        let matching = keys.iter().position(|key| cookie_for_client(key, tcp) == option.cookie);
        match matching {
            // A cookie of the second key is good, and the client is given the first key's.
            Some(at) => self.take_syn_data(child, tcp, answer.filter(|_| at > 0)),
            None => self.set_cookie(child, answer),
        }
    }

    fn set_cookie(&mut self, child: SocketId, cookie: Option<CookieOption>) {
        if let Some(stream) = self.sockets.get_mut(&child).and_then(|socket| socket.stream_mut()) {
            stream.cookie = cookie;
        }
    }

    fn take_syn_data(&mut self, child: SocketId, tcp: &TcpIn<'_>, answer: Option<CookieOption>) {
        let now = self.now;
        self.set_cookie(child, answer);
        if let Some(stream) = self.sockets.get_mut(&child).and_then(|socket| socket.stream_mut()) {
            let received = stream.tcp.take_data_of_syn(tcp.segment.length);
            stream.apply(&received, tcp.payload, now);
            stream.syn_data_acked = tcp.segment.length > 0;
        }
        self.enqueue(child);
    }

    /// The server's address of a socket whose connect() was put off until its first write (TCP_FASTOPEN_CONNECT).
    pub fn deferred(&self, id: SocketId) -> Option<Endpoint> {
        let socket = self.sockets.get(&id)?;
        matches!(socket.kind, Kind::Fresh).then_some(())?;
        socket.options.deferred
    }

    /// Whether connect() is put off: there is a cookie, or none is needed.
    pub fn defers_connect(&mut self, id: SocketId, remote: Endpoint) -> bool {
        let known = self.cookies.0.get(&remote.address).is_some_and(|known| !known.cookie.cookie.is_empty());
        let free = self.sysctls.fastopen & CLIENT_NO_COOKIE != 0 || self.sockets[&id].options.fastopen_no_cookie;
        let defers = self.sysctls.fastopen & CLIENT != 0 && (known || free);
        if defers && let Some(socket) = self.sockets.get_mut(&id) {
            socket.options.deferred = Some(remote);
        }
        defers
    }

    /// As a client: the option of the SYN, and how much data goes with it (section 4.2.1).
    pub fn prepare_fast_open(&mut self, id: SocketId, stream: &mut Stream, opening: &Opening) -> Answer<usize> {
        if !opening.fast {
            return Ok(0);
        }
        if self.sysctls.fastopen & CLIENT == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        stream.fast_opened = true;
        let known = self.cookies.0.get(&stream.flow.remote.address).cloned().unwrap_or_default();
        let free = self.sysctls.fastopen & CLIENT_NO_COOKIE != 0 || self.sockets[&id].options.fastopen_no_cookie;
        if known.cookie.cookie.is_empty() && !free {
            let experimental = known.try_experimental;
            stream.cookie = Some(CookieOption { cookie: Vec::new(), experimental });
            return Ok(0);
        }
        stream.cookie = Some(known.cookie).filter(|option| !option.cookie.is_empty());
        let header = if stream.flow.is_v4() { 40 } else { 60 };
        let most = self.flags.mtu - header;
        let user = self.sockets[&id].options.max_segment;
        let most = if user > 0 { most.min(user) } else { most };
        let mss = if known.mss == 0 { most } else { u32::from(known.mss).min(most) };
        // Room for the most options that a header holds.
        let room = mss.saturating_sub(40) as usize;
        let carried = opening.data.len().min(room);
        stream.write(&opening.data[..carried], false);
        stream.pushed = stream.write_end().0;
        stream.tcp.send_data_in_syn(room as u32);
        Ok(carried)
    }

    /// The first write after a connect() that was put off.
    pub fn write_deferred(&mut self, id: SocketId, remote: Endpoint, bytes: &[u8], flags: i32, done: &mut usize) -> Answer<bool> {
        self.open_fast(id, remote, bytes, flags, done)
    }

    /// sendto() with MSG_FASTOPEN, or the first write after a deferred connect(): the SYN leaves with as much as it may
    /// carry. Whether the call is over.
    pub fn open_fast(&mut self, id: SocketId, remote: Endpoint, bytes: &[u8], flags: i32, done: &mut usize) -> Answer<bool> {
        let opening = Opening { data: bytes.to_vec(), fast: true };
        let carried = self.open_stream(id, remote, &opening)?;
        let socket = self.socket(id)?;
        socket.options.deferred = None;
        *done = carried;
        if socket.options.zerocopy && flags & libc::MSG_ZEROCOPY != 0 && carried > 0 {
            let number = socket.zerocopy_sends;
            socket.zerocopy_sends += 1;
            if let Some(stream) = socket.stream_mut() {
                let end = stream.write_end().0;
                stream.watched.push(Watched { end, what: Watch::ZeroCopy(number) });
            }
        }
        if socket.nonblocking || flags & libc::MSG_DONTWAIT != 0 {
            return if carried > 0 { Ok(true) } else { Err(libc::EINPROGRESS) };
        }
        // A blocking call waits for the handshake, with the rest ready to go.
        let lowat = u32::MAX;
        loop {
            let socket = self.socket(id)?;
            let taken = (socket.room(lowat) as usize).min(bytes.len() - *done);
            if taken == 0 {
                return Ok(false);
            }
            socket.put(&bytes[*done..*done + taken], flags, *done + taken == bytes.len());
            *done += taken;
        }
    }

    /// sendto() and sendmsg() with MSG_FASTOPEN; `started` says that the SYN has left.
    #[allow(clippy::too_many_arguments, reason = "a system call's arguments, and what is kept over its attempts")]
    pub fn write_fast(
        &mut self,
        fd: i32,
        bytes: &[u8],
        flags: i32,
        address: &[u8],
        started: &mut bool,
        done: &mut usize,
        since: u64,
    ) -> Attempt<usize> {
        if *started {
            return self.write_after_syn(fd, bytes, flags, done, since);
        }
        *started = true;
        let established = |world: &mut World| {
            let id = world.socket_of(fd).ok()?;
            Some(world.sockets[&id].stream()?.connect_is_over())
        };
        if established(self) == Some(true) {
            return self.write(fd, bytes, flags & !libc::MSG_FASTOPEN, done, since);
        }
        match self.begin_fast(fd, bytes, flags, address, done) {
            Ok(true) => Attempt::Done(Ok(*done)),
            Ok(false) => Attempt::Blocked(None),
            Err(error) => Attempt::Done(Err(error)),
        }
    }

    fn begin_fast(&mut self, fd: i32, bytes: &[u8], flags: i32, address: &[u8], done: &mut usize) -> Answer<bool> {
        self.refresh_sysctls();
        let id = self.socket_of(fd)?;
        if self.sysctls.fastopen & CLIENT == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let (family, remote) = addresses::read(address)?;
        if family == libc::AF_UNSPEC {
            return Err(libc::EOPNOTSUPP);
        }
        match &self.socket(id)?.kind {
            Kind::Fresh => self.open_fast(id, remote, bytes, flags, done),
            Kind::Stream(stream) if stream.tcp.state() == baton_tcp::State::SynSent => Err(libc::EALREADY),
            _ => Err(libc::EISCONN),
        }
    }

    /// A blocking call goes on when the handshake is over.
    fn write_after_syn(&mut self, fd: i32, bytes: &[u8], flags: i32, done: &mut usize, since: u64) -> Attempt<usize> {
        let Ok(id) = self.socket_of(fd) else { return Attempt::Done(Err(libc::EBADF)) };
        let Some(socket) = self.sockets.get_mut(&id) else { return Attempt::Done(Err(libc::EBADF)) };
        match socket.stream().map(|stream| stream.tcp.state()) {
            Some(baton_tcp::State::SynSent | baton_tcp::State::SynReceived) => Attempt::Blocked(None),
            Some(baton_tcp::State::Closed) | None => Attempt::Done(Err(socket.take_error().err().unwrap_or(libc::EPIPE))),
            _ if *done == bytes.len() => Attempt::Done(Ok(*done)),
            _ => self.write(fd, bytes, flags & !libc::MSG_FASTOPEN, done, since),
        }
    }

    /// What a SYN-ACK says of its server.
    pub fn remember_cookie(&mut self, id: SocketId, tcp: &TcpIn<'_>) {
        let Some(stream) = self.sockets.get(&id).and_then(|socket| socket.stream()) else { return };
        if !tcp.segment.flags.contains(Flags::SYN | Flags::ACK) || stream.tcp.state() == baton_tcp::State::SynSent {
            return;
        }
        if !stream.fast_opened {
            return;
        }
        let (repeated, asked) = (stream.tcp.retransmissions_of_syn() > 0, stream.cookie.clone());
        let known = self.cookies.0.entry(stream.flow.remote.address).or_default();
        if let Some(mss) = tcp.segment.options.mss {
            known.mss = mss;
        }
        let Some(asked) = asked else { return };
        match &tcp.cookie {
            Some(option) if !option.cookie.is_empty() => known.cookie = option.clone(),
            None if asked.cookie.is_empty() && !repeated => known.try_experimental = !asked.experimental,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vector of the SipHash paper, appendix A.
    #[test]
    fn siphash_gives_the_papers_value() {
        let key: [u8; 16] = std::array::from_fn(|at| at as u8);
        let data: Vec<u8> = (0..15).collect();
        assert_eq!(siphash(&key, &data), 0xa129_ca61_49be_45e5);
    }
}
