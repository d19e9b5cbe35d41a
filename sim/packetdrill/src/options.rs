//! Socket options, TCP_INFO, ioctl.

use crate::errors::Answer;
use crate::socket::{Kind, Socket};
use crate::stream::Chrono;
use crate::world::World;
use baton_tcp::{Info, State};

/// Options that Linux has and the `libc` crate does not name.
const TCP_CC_INFO: i32 = 26;
const TCP_FASTOPEN_KEY: i32 = 33;
const TCP_FASTOPEN_NO_COOKIE: i32 = 34;
const TCP_INQ: i32 = 36;
const SO_ZEROCOPY: i32 = 60;
/// TCP_MAXSEG's bounds (Linux's TCP_MIN_MSS and MAX_TCP_WINDOW).
const SEGMENTS: core::ops::RangeInclusive<u32> = 88..=32767;

fn integer(value: &[u8]) -> Answer<i32> {
    value.get(..4).map(|four| i32::from_ne_bytes([four[0], four[1], four[2], four[3]])).ok_or(libc::EINVAL)
}

fn micros(value: &[u8]) -> Answer<u64> {
    let half = |at: usize| value.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(i64::from_ne_bytes);
    match (half(0), half(8)) {
        (Some(seconds), Some(rest)) if seconds >= 0 && rest >= 0 => Ok(seconds as u64 * 1_000_000 + rest as u64),
        _ => Err(libc::EINVAL),
    }
}

impl World {
    /// setsockopt().
    pub fn set_option(&mut self, fd: i32, level: i32, name: i32, value: &[u8]) -> Answer<()> {
        let id = self.socket_of(fd)?;
        let now = self.instant();
        self.refresh_sysctls();
        if (level, name) == (libc::SOL_TCP, libc::TCP_FASTOPEN_CONNECT) && self.sysctls.fastopen & 1 == 0 {
            return Err(libc::EOPNOTSUPP);
        }
        let result = match level {
            libc::SOL_SOCKET => self.socket(id)?.set_socket_option(name, value),
            libc::SOL_TCP => self.socket(id)?.set_tcp_option(name, value),
            libc::SOL_IP | libc::SOL_IPV6 => self.socket(id)?.set_ip_option(level, name, value),
            _ => Err(libc::ENOPROTOOPT),
        };
        let socket = self.socket(id)?;
        let options = socket.options.clone();
        if let Some(stream) = socket.stream_mut() {
            let [idle, interval, count] = options.keepalive_times;
            if matches!((level, name), (libc::SOL_SOCKET, libc::SO_KEEPALIVE) | (libc::SOL_TCP, libc::TCP_KEEPIDLE)) {
                stream.tcp.set_keepalive(options.keepalive, idle, interval, count, now);
            }
        }
        self.flush(id);
        if let Some(stream) = self.socket(id)?.stream_mut() {
            stream.tcp.set_cork(options.cork || stream.tcp.is_corked());
        }
        result
    }

    /// getsockopt(): the value.
    pub fn option(&mut self, fd: i32, level: i32, name: i32, length: usize) -> Answer<Vec<u8>> {
        let id = self.socket_of(fd)?;
        let now = self.now;
        let socket = self.socket(id)?;
        let value = match (level, name) {
            (libc::SOL_TCP, libc::TCP_INFO) => {
                let no_space = socket.no_space;
                if let Some(stream) = socket.stream_mut() {
                    stream.account(now, no_space);
                }
                let mut info = socket.tcp_info(now);
                // What later kernels add is not known here.
                info.resize(length.min(512), 0);
                return Ok(info);
            }
            (libc::SOL_TCP, TCP_CC_INFO) => return Ok(Vec::new()),
            (libc::SOL_SOCKET, libc::SO_MEMINFO) => return Ok(socket.memory_info()),
            (libc::SOL_TCP, libc::TCP_CONGESTION) => {
                let mut name = b"cubic".to_vec();
                name.resize(16, 0);
                name.truncate(length);
                return Ok(name);
            }
            (libc::SOL_SOCKET, libc::SO_ERROR) => socket.take_error().err().unwrap_or(0),
            _ => socket.integer_option(level, name)?,
        };
        Ok(value.to_ne_bytes()[..length.min(4)].to_vec())
    }

    /// ioctl() with an integer to be written.
    pub fn ioctl(&mut self, fd: i32, request: u64) -> Answer<i32> {
        let id = self.socket_of(fd)?;
        let socket = self.socket(id)?;
        if matches!(socket.kind, Kind::Listener(_)) {
            return Err(libc::EINVAL);
        }
        let Some(stream) = socket.stream() else { return Ok(0) };
        match request {
            // SIOCINQ: a FIN at the front of an empty queue counts (Linux's tcp_inq).
            libc::FIONREAD => Ok(stream.tcp.readable() as i32),
            // SIOCOUTQ, SIOCOUTQNSD.
            libc::TIOCOUTQ => Ok(stream.queued_bytes() as i32),
            0x894b => Ok(stream.unsent() as i32),
            _ => Err(libc::EINVAL),
        }
    }
}

impl Socket {
    fn set_socket_option(&mut self, name: i32, value: &[u8]) -> Answer<()> {
        match name {
            libc::SO_RCVTIMEO => return micros(value).map(|limit| self.options.receive_timeout = limit),
            libc::SO_SNDTIMEO => return micros(value).map(|limit| self.options.send_timeout = limit),
            libc::SO_LINGER => {
                let (on, seconds) = (integer(value)?, integer(value.get(4..).unwrap_or(&[]))?);
                self.options.linger = (on != 0).then_some(seconds as u32);
                return Ok(());
            }
            _ => {}
        }
        let number = integer(value)?;
        let o = &mut self.options;
        match name {
            libc::SO_REUSEADDR => o.reuse_address = i32::from(number != 0),
            libc::SO_KEEPALIVE => o.keepalive = number != 0,
            // The kernel doubles it, for its own overhead.
            libc::SO_SNDBUF => {
                o.send_buffer = (number.max(0) as u32 * 2).max(4608);
                o.fixed_send_buffer = true;
            }
            libc::SO_RCVBUF => {
                o.receive_buffer = (number.max(0) as u32 * 2).max(2304);
                o.fixed_receive_buffer = true;
            }
            SO_ZEROCOPY => o.zerocopy = number != 0,
            libc::SO_TIMESTAMPING => o.timestamping = number as u32,
            libc::SO_MARK => o.mark = number as u32,
            libc::SO_PRIORITY | libc::SO_REUSEPORT | libc::SO_RCVLOWAT | libc::SO_BUSY_POLL | libc::SO_MAX_PACING_RATE => {}
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    fn set_tcp_option(&mut self, name: i32, value: &[u8]) -> Answer<()> {
        if name == TCP_FASTOPEN_KEY {
            return self.set_keys(value);
        }
        if matches!(name, libc::TCP_CONGESTION | libc::TCP_ULP) {
            return Ok(());
        }
        let number = integer(value)?;
        let unsigned = number.max(0) as u32;
        let o = &mut self.options;
        match name {
            libc::TCP_NODELAY => o.nodelay = number != 0,
            libc::TCP_CORK => o.cork = number != 0,
            libc::TCP_USER_TIMEOUT => o.user_timeout = unsigned,
            libc::TCP_MAXSEG if number != 0 && !SEGMENTS.contains(&unsigned) => return Err(libc::EINVAL),
            libc::TCP_MAXSEG => o.max_segment = unsigned,
            libc::TCP_SYNCNT if (1..=127).contains(&number) => o.syn_retries = number as u8,
            libc::TCP_SYNCNT => return Err(libc::EINVAL),
            libc::TCP_NOTSENT_LOWAT => o.notsent_lowat = number as u32,
            libc::TCP_KEEPIDLE => o.keepalive_times[0] = unsigned,
            libc::TCP_KEEPINTVL => o.keepalive_times[1] = unsigned,
            libc::TCP_KEEPCNT => o.keepalive_times[2] = unsigned,
            TCP_INQ => o.inq = number != 0,
            libc::TCP_FASTOPEN => o.fastopen_queue = unsigned,
            libc::TCP_FASTOPEN_CONNECT => o.fastopen_connect = number != 0,
            TCP_FASTOPEN_NO_COOKIE => o.fastopen_no_cookie = number != 0,
            libc::TCP_DEFER_ACCEPT => o.defer_accept = unsigned,
            libc::TCP_QUICKACK | libc::TCP_LINGER2 | libc::TCP_WINDOW_CLAMP | libc::TCP_THIN_LINEAR_TIMEOUTS => {}
            _ => return Err(libc::ENOPROTOOPT),
        }
        self.notify_connection(name, number);
        Ok(())
    }

    fn notify_connection(&mut self, name: i32, number: i32) {
        let cork = self.options.cork;
        let Some(stream) = self.stream_mut() else { return };
        match name {
            libc::TCP_NODELAY => {
                stream.tcp.set_nodelay(number != 0);
                // Linux pushes what waits, corked or not; the cork is put back behind it.
                if number != 0 {
                    stream.tcp.set_cork(false);
                }
            }
            libc::TCP_CORK => {
                stream.tcp.set_cork(cork);
            }
            libc::TCP_USER_TIMEOUT => stream.tcp.set_user_timeout(number.max(0) as u32),
            libc::TCP_QUICKACK => stream.tcp.set_quick_ack(number != 0),
            _ => {}
        }
    }

    fn set_keys(&mut self, value: &[u8]) -> Answer<()> {
        if !matches!(value.len(), 16 | 32) {
            return Err(libc::EINVAL);
        }
        self.options.fastopen_keys = value.chunks_exact(16).filter_map(|key| key.try_into().ok()).collect();
        Ok(())
    }

    fn set_ip_option(&mut self, level: i32, name: i32, value: &[u8]) -> Answer<()> {
        let number = integer(value).or_else(|_| value.first().map(|byte| i32::from(*byte)).ok_or(libc::EINVAL))?;
        match (level, name) {
            (libc::SOL_IP, libc::IP_TOS) | (libc::SOL_IPV6, libc::IPV6_TCLASS) => self.options.tos = number as u8,
            _ => {}
        }
        Ok(())
    }

    fn integer_option(&mut self, level: i32, name: i32) -> Answer<i32> {
        let o = &self.options;
        let listens = matches!(self.kind, Kind::Listener(_));
        Ok(match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => o.reuse_address,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => i32::from(o.keepalive),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => o.send_buffer as i32,
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => o.receive_buffer as i32,
            (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => self.domain,
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => i32::from(listens),
            (libc::SOL_SOCKET, SO_ZEROCOPY) => i32::from(o.zerocopy),
            (libc::SOL_SOCKET, libc::SO_MARK) => o.mark as i32,
            (libc::SOL_TCP, libc::TCP_NODELAY) => i32::from(o.nodelay),
            (libc::SOL_TCP, libc::TCP_CORK) => i32::from(o.cork),
            (libc::SOL_TCP, libc::TCP_USER_TIMEOUT) => o.user_timeout as i32,
            (libc::SOL_TCP, libc::TCP_MAXSEG) => self.segment_size() as i32,
            (libc::SOL_TCP, libc::TCP_SYNCNT) => i32::from(o.syn_retries),
            (libc::SOL_TCP, libc::TCP_NOTSENT_LOWAT) => o.notsent_lowat as i32,
            (libc::SOL_TCP, libc::TCP_KEEPIDLE) => o.keepalive_times[0] as i32,
            (libc::SOL_TCP, libc::TCP_KEEPINTVL) => o.keepalive_times[1] as i32,
            (libc::SOL_TCP, libc::TCP_KEEPCNT) => o.keepalive_times[2] as i32,
            (libc::SOL_TCP, TCP_INQ) => i32::from(o.inq),
            (libc::SOL_TCP, libc::TCP_FASTOPEN) => o.fastopen_queue as i32,
            (libc::SOL_TCP, libc::TCP_FASTOPEN_CONNECT) => i32::from(o.fastopen_connect),
            (libc::SOL_IP, libc::IP_TOS) | (libc::SOL_IPV6, libc::IPV6_TCLASS) => i32::from(o.tos),
            _ => return Err(libc::ENOPROTOOPT),
        })
    }

    fn segment_size(&self) -> u32 {
        match self.stream() {
            Some(stream) => stream.tcp.segment_size(),
            None if self.options.max_segment > 0 => self.options.max_segment,
            None => 536,
        }
    }

    /// SO_MEMINFO: nine words, of which only the buffers' sizes and what lies in them are known here.
    fn memory_info(&self) -> Vec<u8> {
        let queued = self.stream().map_or(0, |stream| stream.queued_bytes());
        let unread = self.stream().map_or(0, |stream| stream.tcp.readable());
        let words = [unread, self.options.receive_buffer, queued, self.options.send_buffer, 0, queued, 0, 0, 0];
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// TCP_INFO as Linux lays it out.
    fn tcp_info(&self, now: u64) -> Vec<u8> {
        let Some(stream) = self.stream() else {
            let mut out = vec![0; 248];
            out[0] = if matches!(self.kind, Kind::Listener(_)) { 10 } else { 7 };
            return out;
        };
        let info = stream.tcp.info();
        let mut layout = Layout::new(&info, stream.syn_data_acked);
        let most = if stream.flow.is_v4() { stream.mtu - 40 } else { stream.mtu - 60 };
        let advertised = if self.options.max_segment > 0 { most.min(self.options.max_segment) } else { most };
        layout.word(20, stream.largest_received.clamp(536.min(info.snd_mss), advertised));
        layout.word(84, advertised);
        layout.times(&stream.chrono);
        layout.fill(&info, now, stream.last_data_received, stream.unsent())
    }
}

/// `struct tcp_info` being filled.
struct Layout(Vec<u8>);

impl Layout {
    fn new(info: &Info, syn_data: bool) -> Layout {
        let mut out = vec![0; 248];
        out[0] = info.state as u8;
        out[1] = info.phase as u8;
        out[2] = info.backoff;
        out[3] = info.probes;
        out[4] = info.backoff;
        let scaled = info.snd_wscale > 0 || info.rcv_wscale > 0;
        let flags = [info.timestamps, info.sack, scaled, info.ecn, false, syn_data];
        out[5] = flags.iter().enumerate().map(|(bit, on)| u8::from(*on) << bit).sum();
        out[6] = info.snd_wscale | info.rcv_wscale << 4;
        Layout(out)
    }

    fn word(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    /// tcpi_busy_time, tcpi_rwnd_limited and tcpi_sndbuf_limited.
    fn times(&mut self, chrono: &Chrono) {
        for (at, value) in [(168, chrono.busy), (176, chrono.window_limited), (184, chrono.buffer_limited)] {
            self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        }
    }

    fn fill(mut self, info: &Info, now: u64, last_data: u64, unsent: u32) -> Vec<u8> {
        let millis = |at: u64| (now.saturating_sub(at) / 1000) as u32;
        let established = !matches!(info.state, State::SynSent | State::SynReceived);
        let words = [
            (8, info.rto as u32),
            (12, 40_000),
            (16, info.snd_mss),
            (24, info.unacked),
            (28, info.sacked),
            (32, info.lost),
            (36, info.retrans),
            (44, millis(info.last_sent.0)),
            (52, millis(last_data)),
            (56, millis(info.last_heard.0)),
            (60, 1500),
            (68, info.srtt),
            (72, info.rttvar),
            (76, info.ssthresh.min(0x7fff_ffff)),
            (80, info.cwnd),
            (88, info.reordering),
            (100, info.total_retrans as u32),
            (144, unsent),
            (148, if info.min_rtt == 0 && !established { u32::MAX } else { info.min_rtt }),
            (192, info.delivered),
            (228, info.snd_wnd),
        ];
        for (at, value) in words {
            self.word(at, value);
        }
        self.0
    }
}
