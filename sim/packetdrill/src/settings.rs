//! What scripts set from outside: `--so_flags`, and the sysctls of the network namespace that packetdrill runs in.

use std::fs;

/// The flags given with `--so_flags`, separated by commas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    /// Connections are moved through an image before every event whose number is a multiple of this; 0 for never.
    pub move_every: u32,
    /// They move as through a kernel: without what only a NIC knows.
    pub by_kernel: bool,
    /// Use the values of [`Sysctls::default`] and not the namespace's.
    pub no_sysctls: bool,
    /// MTU of the device in bytes, as packetdrill's `--mtu` says.
    pub mtu: u32,
}

impl Default for Flags {
    fn default() -> Self {
        Flags { move_every: 0, by_kernel: false, no_sysctls: false, mtu: 1500 }
    }
}

impl Flags {
    /// Reads the flags.
    ///
    /// # Errors
    /// A flag that is not known, or whose number is none.
    pub fn parse(text: &str) -> Result<Flags, String> {
        let mut flags = Flags::default();
        for flag in text.split(',').map(str::trim).filter(|flag| !flag.is_empty()) {
            let number = |text: &str| text.parse().map_err(|_| format!("--so_flags: {flag}: not a number"));
            match flag.split_once('=') {
                Some(("move", value)) => flags.move_every = number(value)?,
                Some(("mtu", value)) => flags.mtu = number(value)?,
                None if flag == "by-kernel" => flags.by_kernel = true,
                None if flag == "no-sysctls" => flags.no_sysctls = true,
                _ => return Err(format!("--so_flags: {flag} is not known: move=N, by-kernel, mtu=N and no-sysctls are")),
            }
        }
        Ok(flags)
    }
}

/// The values under /proc/sys/net/ipv4 that this stack heeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sysctls {
    /// tcp_rmem: smallest, first and largest receive buffer in bytes.
    pub rmem: [u32; 3],
    /// tcp_wmem: the same for send buffers.
    pub wmem: [u32; 3],
    /// tcp_timestamps.
    pub timestamps: bool,
    /// tcp_sack.
    pub sack: bool,
    /// tcp_window_scaling.
    pub window_scaling: bool,
    /// tcp_ecn: 0 never, 1 always, 2 when asked.
    pub ecn: u32,
    /// tcp_syn_retries.
    pub syn_retries: u8,
    /// tcp_synack_retries.
    pub synack_retries: u8,
    /// tcp_fastopen, a mask.
    pub fastopen: u32,
    /// tcp_fastopen_key: one or two keys.
    pub fastopen_keys: Vec<[u8; 16]>,
    /// tcp_min_tso_segs.
    pub min_tso_segments: u32,
    /// tcp_notsent_lowat in bytes.
    pub notsent_lowat: u32,
    /// tcp_slow_start_after_idle.
    pub slow_start_after_idle: bool,
    /// tcp_keepalive_time, _intvl and _probes.
    pub keepalive: [u32; 3],
    /// tcp_fin_timeout in seconds.
    pub fin_timeout: u32,
}

impl Default for Sysctls {
    fn default() -> Self {
        Sysctls {
            rmem: [4096, 131_072, 6 << 20],
            wmem: [4096, 16_384, 4 << 20],
            timestamps: true,
            sack: true,
            window_scaling: true,
            ecn: 2,
            syn_retries: 6,
            synack_retries: 5,
            fastopen: 1,
            fastopen_keys: vec![[0xa1; 16]],
            min_tso_segments: 2,
            notsent_lowat: u32::MAX,
            slow_start_after_idle: true,
            keepalive: [7200, 75, 9],
            fin_timeout: 60,
        }
    }
}

fn text(name: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()
}

fn number(name: &str, otherwise: u32) -> u32 {
    text(name).and_then(|text| text.trim().parse().ok()).unwrap_or(otherwise)
}

fn three(name: &str, otherwise: [u32; 3]) -> [u32; 3] {
    let Some(text) = text(name) else { return otherwise };
    let values: Vec<u32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    values.try_into().unwrap_or(otherwise)
}

/// A Fast Open key as the sysctl writes it: four 32-bit words in hexadecimal, each little-endian in the key.
pub fn parse_key(text: &str) -> Option<[u8; 16]> {
    let mut key = [0; 16];
    let mut words = text.trim().split('-');
    for at in 0..4 {
        let word = u32::from_str_radix(words.next()?, 16).ok()?;
        key[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
    }
    words.next().is_none().then_some(key)
}

impl Sysctls {
    /// Reads those of the namespace.
    pub fn read() -> Sysctls {
        let d = Sysctls::default();
        let keys: Vec<_> =
            text("tcp_fastopen_key").iter().flat_map(|text| text.trim().split(',').map(parse_key)).flatten().collect();
        Sysctls {
            rmem: three("tcp_rmem", d.rmem),
            wmem: three("tcp_wmem", d.wmem),
            timestamps: number("tcp_timestamps", 1) != 0,
            sack: number("tcp_sack", 1) != 0,
            window_scaling: number("tcp_window_scaling", 1) != 0,
            ecn: number("tcp_ecn", d.ecn),
            syn_retries: number("tcp_syn_retries", 6) as u8,
            synack_retries: number("tcp_synack_retries", 5) as u8,
            fastopen: number("tcp_fastopen", d.fastopen),
            fastopen_keys: if keys.is_empty() { d.fastopen_keys } else { keys },
            min_tso_segments: number("tcp_min_tso_segs", 2),
            notsent_lowat: number("tcp_notsent_lowat", u32::MAX),
            slow_start_after_idle: number("tcp_slow_start_after_idle", 1) != 0,
            keepalive: [number("tcp_keepalive_time", 7200), number("tcp_keepalive_intvl", 75), number("tcp_keepalive_probes", 9)],
            fin_timeout: number("tcp_fin_timeout", 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_read_or_refused() {
        assert_eq!(Flags::parse(""), Ok(Flags::default()));
        let all = Flags { move_every: 3, by_kernel: true, no_sysctls: true, mtu: 1280 };
        assert_eq!(Flags::parse("move=3, by-kernel,no-sysctls,mtu=1280"), Ok(all));
        assert!(Flags::parse("move=x").is_err());
        assert!(Flags::parse("shake=3").is_err());
    }

    #[test]
    fn a_key_is_four_little_endian_words() {
        let key = parse_key("a1a2a3a4-b1b2b3b4-c1c2c3c4-d1d2d3d4").expect("a key");
        assert_eq!(key[..5], [0xa4, 0xa3, 0xa2, 0xa1, 0xb4]);
        assert_eq!(parse_key("a1-b2-c3"), None);
    }
}
