//! What an endpoint is made of: a socket, and if there is one a session with a NIC.

use crate::arena::{Arena, Buffer, SPACE, Slot};
use crate::half::DataHalf;
use crate::settings::{Halves, Lend, Settings, Use};
use crate::staging::Staging;
use crate::streams::Streams;
use baton_abi::layout::session;
use baton_client::messages::{Carrier, Link, request};
use baton_linux::datagrams::Datagrams;
use baton_protocol::program::Messages;
use baton_rmpp::data::first_bytes;
use baton_rmpp::{Config, StreamConfig};
use baton_shm::Region;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Buffers for RTS packets.
pub(crate) const RTS_BUFFERS: u16 = 512;
/// Incoming messages that the policy keeps, unexpected ones included.
pub(crate) const INCOMING: u16 = 8192;
/// Bytes of an RTS buffer at least, so that peers on links with longer frames get through.
const RTS_BYTES: u16 = 16_384;
/// Packets that the NIC may have room for: it places them as they come.
const NIC_PACKETS: u32 = 1024;
/// Packets of a message that the NIC may clear without this process.
const NIC_AHEAD: u32 = 2048;
/// Packets of a message that this host's data half may clear by itself, which come by a stream in one run.
const AHEAD: u32 = 2048;
/// Receives and unexpected messages that a NIC keeps which matches; with more, this process matches.
const NIC_POSTED: u16 = 16_384;
const NIC_UNEXPECTED: u16 = 1024;

/// The parts of an endpoint.
pub struct Opened<B> {
    pub config: Config,
    pub half: DataHalf,
    pub arena: Arena<B>,
    /// Why there is no NIC, if one was to be used.
    pub without_nic: Option<String>,
}

/// Opens the socket, and a session with the NIC if there is one.
///
/// # Errors
/// The failed system call's; if a NIC must be used, why it cannot be.
pub fn open<B: Buffer>(settings: &Settings, random: [u8; 32], now: u64) -> io::Result<Opened<B>> {
    let mut socket = Datagrams::bind(settings.address, settings.socket_buffer, settings.packet.into())?;
    let config = config(settings, random, now);
    let (link, without_nic) = match settings.nic {
        Use::Never => (None, None),
        Use::Auto | Use::Always => match connect(settings, &config, &socket) {
            Ok(link) => (Some(link), None),
            Err(error) if settings.nic == Use::Auto => (None, Some(error.to_string())),
            Err(error) => return Err(error),
        },
    };
    let Some(link) = link else {
        // The kernel counts a datagram with an overhead of its own: up to its length again, and 768 bytes.
        let room = socket.receive_buffer() / (2 * usize::from(settings.packet) + 768);
        let room = (room as u32).max(settings.grant.into());
        let config = Config { nic_buffers: settings.nic_buffers.unwrap_or(room), ..config };
        // Without a NIC all packets come by the socket.
        socket.add_partner()?;
        // Without streams there are packets: that is no reason to fail.
        let streams = settings.stream.then(|| streams(settings, &config, &socket)).and_then(Result::ok);
        let ahead = if streams.is_some() { AHEAD } else { config.ahead };
        let config = Config { ahead: settings.ahead.unwrap_or(ahead), ..config };
        let arena = Arena::new(Slot::Own(vec![0; buffers(&config) as usize]), None);
        return Ok(Opened { half: DataHalf::new(config, Carrier::Udp(socket), None, streams), config, arena, without_nic });
    };
    let config = on_nic(&config, settings);
    let memory = link.memory().clone();
    let end = settings.lend.and_then(|lend| lend_part(memory.region(), lend)).unwrap_or(memory.region().len());
    let staging = Staging::new(config.buffers + buffers(&config), end as u64);
    let arena = Arena::new(Slot::Shared(memory), Some(staging));
    let half = DataHalf::new(config, Carrier::Udp(socket), Some((link, settings.halves)), None);
    Ok(Opened { half, config, arena, without_nic })
}

fn config(settings: &Settings, random: [u8; 32], now: u64) -> Config {
    let word = |at: usize| u64::from_le_bytes(random[8 * at..8 * at + 8].try_into().unwrap_or_default());
    Config {
        incarnation: (now / 1000) as u32,
        hash_key: [word(0), word(1), word(2), word(3)],
        memory: SPACE,
        peers: settings.peers,
        sends: settings.sends,
        receives: settings.receives,
        incoming: INCOMING,
        buffer_count: RTS_BUFFERS,
        buffer_size: settings.packet.max(RTS_BYTES),
        buffers_per_peer: 64,
        packet: settings.packet,
        grant: settings.grant,
        early: settings.early,
        pinned: settings.pinned,
        dead: settings.dead,
        ..Config::default()
    }
}

fn streams(settings: &Settings, config: &Config, socket: &Datagrams) -> io::Result<(StreamConfig, Streams)> {
    let streams = Streams::new(socket.address())?;
    let [a, b, c, d] = config.hash_key;
    let secret = [a ^ c.rotate_left(32), b ^ d.rotate_left(32)];
    let least = u64::from(settings.stream_least).saturating_sub(first_bytes(config.packet).into()).max(1);
    Ok((StreamConfig { port: streams.port()?, secret, least }, streams))
}

/// The settings within a NIC's limits.
fn on_nic(config: &Config, settings: &Settings) -> Config {
    // Who matches sends what answers a message as well.
    let matching = settings.match_on_nic && settings.halves == Halves::BOTH;
    Config {
        data_posted: if matching { config.receives.min(NIC_POSTED) } else { 0 },
        data_unexpected: NIC_UNEXPECTED,
        sends: config.sends.min(Messages::MOST),
        buffers: (session::HEAP as u64).next_multiple_of(4096),
        nic_buffers: settings.nic_buffers.unwrap_or(NIC_PACKETS),
        ahead: settings.ahead.unwrap_or(NIC_AHEAD),
        ..*config
    }
}

/// Lends the last quarter of session memory to the program. Returns where it begins, if the program takes it.
fn lend_part(memory: &Arc<Region>, lend: Lend) -> Option<usize> {
    let begin = (memory.len() - memory.len() / 4).next_multiple_of(4096);
    let length = memory.len() - begin;
    let taken = lend(memory.span(begin, length)?, length, memory.fd()?, begin as u64);
    taken.then(|| {
        // The program may have blocks there until the process ends.
        std::mem::forget(memory.clone());
        begin
    })
}

/// Bytes of the buffers for RTS packets, in whole pages.
fn buffers(config: &Config) -> u64 {
    (u64::from(config.buffer_count) * u64::from(config.buffer_size)).next_multiple_of(4096)
}

fn connect(settings: &Settings, config: &Config, socket: &Datagrams) -> io::Result<Link> {
    if !Messages::PACKET.contains(&settings.packet) {
        let reason = format!("packets of {} bytes do not fit into the frames of a NIC", settings.packet);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    let config = on_nic(config, settings);
    let messages = request(&config, settings.halves, socket.address());
    Link::connect(&settings.agent, messages, socket.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{exchange, with};
    use baton_linux::events::monotonic_micros;

    /// What of the limits is given, and what is not.
    #[test]
    fn limits_are_the_settings_or_what_there_is_room_for() {
        let limits = |settings: &Settings| {
            let config = open::<Vec<u8>>(settings, [7; 32], monotonic_micros()).expect("an endpoint").config;
            (config.grant, config.early, config.ahead, config.nic_buffers, config.pinned)
        };
        let usual = Settings { stream: false, ..Settings::default() };
        let (grant, early, ahead, buffers, pinned) = limits(&usual);
        assert_eq!((grant, early, ahead, pinned), (128, 64, 0, 1 << 30));
        assert!(buffers >= 128, "{buffers}");
        assert_eq!(limits(&Settings { stream: true, ..usual.clone() }).2, AHEAD);
        let paper =
            Settings { grant: 16, early: 0, ahead: Some(0), nic_buffers: Some(32), pinned: 1 << 16, stream: true, ..usual };
        assert_eq!(limits(&paper), (16, 0, 0, 32, 1 << 16));
    }

    /// A NIC that has one of the halves does not match, and its limits can be set, too.
    #[test]
    fn limits_of_a_nic_are_the_settings_or_the_usual_ones() {
        let of = |settings: &Settings| {
            let config = on_nic(&config(settings, [7; 32], 0), settings);
            (config.data_posted > 0, config.nic_buffers, config.ahead)
        };
        let usual = Settings { match_on_nic: true, ..Settings::default() };
        assert_eq!(of(&usual), (true, NIC_PACKETS, NIC_AHEAD));
        let receiving = Halves { receiving: true, sending: false };
        assert_eq!(of(&Settings { halves: receiving, nic_buffers: Some(16), ahead: Some(0), ..usual }), (false, 16, 0));
    }

    /// With few buffers and little memory messages wait for each other, and all come.
    #[test]
    fn messages_come_within_narrow_limits() {
        let narrow = Settings {
            grant: 16,
            early: 0,
            ahead: Some(0),
            nic_buffers: Some(16),
            pinned: 1 << 16,
            stream: false,
            ..Settings::default()
        };
        exchange(&mut [with(&narrow), with(&narrow)], 300_000, |_| ());
    }
}
