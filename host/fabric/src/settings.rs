//! Settings of the provider, from environment variables FI_RMPP_NAME, as for libfabric's other providers.

use crate::libfabric::{Level, log};
use baton_messages::{Halves, MAX_AHEAD, MAX_GRANT, Settings, Use};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// Smallest packet: an RTS must carry what fi_inject() promises.
const SMALLEST_PACKET: u16 = 1200;
/// Largest packet over IPv4: what a UDP datagram carries.
const LARGEST_PACKET: u16 = 65_507;
/// Longest packets on a link with long frames (loopback has 64 KB): with larger packets a grant would exceed a socket's
/// receive buffer.
const USUAL_PACKET: u16 = 16_384;
/// Least number of bytes that may be cleared: the longest packet of any peer.
const LEAST_PINNED: u64 = 1 << 16;
/// Bytes of IP and UDP headers.
const HEADERS_V4: u32 = 28;
const HEADERS_V6: u32 = 48;

/// A variable's value, if it is set and reads as a `T` in range.
fn variable<T: FromStr>(name: &str, in_range: impl FnOnce(&T) -> bool) -> Option<T> {
    let text = std::env::var(name).ok()?;
    let value = text.parse().ok().filter(in_range);
    if value.is_none() {
        log(
            Level::Warn,
            &format!("{name}={text} is ignored: it is not a value that this setting can have (docs/reference/settings.md)"),
        );
    }
    value
}

/// The address that endpoints shall have (FI_RMPP_ADDRESS).
pub fn address() -> Option<IpAddr> {
    variable("FI_RMPP_ADDRESS", |_| true)
}

/// Whether a NIC has the data half (FI_RMPP_NIC).
fn nic() -> Use {
    match variable("FI_RMPP_NIC", |value: &String| matches!(value.as_str(), "auto" | "always" | "never")).as_deref() {
        Some("always") => Use::Always,
        Some("never") => Use::Never,
        _ => Use::Auto,
    }
}

/// Which halves a NIC has (FI_RMPP_HALVES): both, as in the paper's step 2, or the receiving one, as in its step 1.
fn halves() -> Halves {
    let value = variable("FI_RMPP_HALVES", |value: &String| matches!(value.as_str(), "both" | "receive"));
    Halves { receiving: true, sending: value.is_none_or(|value| value == "both") }
}

/// Whether a NIC matches (FI_RMPP_MATCH).
fn match_on_nic() -> bool {
    variable("FI_RMPP_MATCH", |value: &String| matches!(value.as_str(), "host" | "nic")).is_some_and(|value| value == "nic")
}

/// Whether long messages go by TCP connections where no NIC takes part (FI_RMPP_STREAM).
fn stream() -> bool {
    variable("FI_RMPP_STREAM", |value: &String| matches!(value.as_str(), "yes" | "no")).is_none_or(|value| value == "yes")
}

/// Settings of an endpoint at `address`, on a link with frames of `mtu` bytes.
pub fn settings(address: SocketAddr, mtu: u32) -> Settings {
    let headers = if address.is_ipv4() { HEADERS_V4 } else { HEADERS_V6 };
    let usual = mtu.saturating_sub(headers).clamp(SMALLEST_PACKET.into(), USUAL_PACKET.into()) as u16;
    let mut settings = Settings {
        address,
        packet: usual,
        nic: nic(),
        halves: halves(),
        match_on_nic: match_on_nic(),
        stream: stream(),
        lend: Some(crate::lending::lend),
        ..Settings::default()
    };
    let packet = |packet: &u16| (SMALLEST_PACKET..=LARGEST_PACKET).contains(packet);
    settings.packet = variable("FI_RMPP_PACKET", packet).unwrap_or(settings.packet);
    settings.grant = variable("FI_RMPP_GRANT", |grant: &u16| (1..=MAX_GRANT).contains(grant)).unwrap_or(settings.grant);
    settings.early = variable("FI_RMPP_EARLY", |early: &u8| u16::from(*early) < MAX_GRANT).unwrap_or(settings.early);
    settings.ahead = variable("FI_RMPP_AHEAD", |packets: &u32| *packets <= MAX_AHEAD);
    settings.nic_buffers = variable("FI_RMPP_NIC_BUFFERS", |packets: &u32| (1..=1 << 16).contains(packets));
    let pinned = variable("FI_RMPP_PINNED", |bytes: &u64| (LEAST_PINNED..=1 << 40).contains(bytes));
    settings.pinned = pinned.unwrap_or(settings.pinned);
    let least = variable("FI_RMPP_STREAM_BYTES", |bytes: &u32| *bytes > 0);
    settings.stream_least = least.unwrap_or(settings.stream_least);
    let dead = variable("FI_RMPP_DEAD_MS", |dead: &u64| (100..=3_600_000).contains(dead));
    settings.dead = dead.map_or(settings.dead, |milliseconds| milliseconds * 1000);
    settings
}
