//! The network between the hosts: a link in each direction between each pair, through routers with an MTU.

use crate::icmp;
use baton_device::Frame;
use baton_sim::link::{Carried, Counters, Impairments, Link};
use baton_wire::TcpFrame;

/// Bytes of an Ethernet header, which no link damages: its frame check sequence would show that.
const ETHERNET: usize = 14;

/// A frame on a link.
#[derive(Clone)]
struct Packet(Frame);

impl Carried for Packet {
    fn size(&self) -> usize {
        self.0.bytes().len()
    }

    fn corrupt(&mut self, random: u64) {
        let bytes = self.0.bytes_mut();
        let bits = bytes.len().saturating_sub(ETHERNET) as u64 * 8;
        if bits > 0 {
            let bit = ETHERNET * 8 + (random % bits) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

/// One direction between two hosts.
struct Path {
    from: usize,
    to: usize,
    /// The link as it is now; a link with other impairments replaces it, and the last one empties itself.
    links: Vec<Link<Packet>>,
    mtu: u16,
    cut: bool,
}

pub(crate) struct Network {
    paths: Vec<Path>,
    /// Counters of links that are empty and gone.
    past: Counters,
    pub too_big: u64,
}

fn add(sum: &mut Counters, more: Counters) {
    sum.offered += more.offered;
    sum.lost += more.lost;
    sum.overflowed += more.overflowed;
    sum.reordered += more.reordered;
    sum.duplicated += more.duplicated;
    sum.corrupted += more.corrupted;
}

impl Network {
    pub fn new(hosts: usize, impairments: Impairments, seed: u64) -> Network {
        let pairs = (0..hosts).flat_map(|from| (0..hosts).map(move |to| (from, to))).filter(|(from, to)| from != to);
        let path = |(at, (from, to)): (usize, (usize, usize))| Path {
            from,
            to,
            links: vec![Link::new(impairments, seed.wrapping_add(at as u64 * 77))],
            mtu: 1500,
            cut: false,
        };
        Network { paths: pairs.enumerate().map(path).collect(), past: Counters::default(), too_big: 0 }
    }

    /// Sends a frame of a host's. Returns the answer of a router that cannot pass it on.
    pub fn send(&mut self, from: usize, frame: Frame, to: usize, now: u64) -> Option<Frame> {
        let path = self.paths.iter_mut().find(|path| (path.from, path.to) == (from, to))?;
        if path.cut {
            return None;
        }
        let large = frame.bytes().len() > usize::from(path.mtu) + ETHERNET;
        if large && TcpFrame::parse(frame.bytes(), 0).is_ok() {
            self.too_big += 1;
            return Some(icmp::too_big(frame.bytes(), path.mtu));
        }
        if let Some(link) = path.links.last_mut() {
            link.push(Packet(frame), now);
        }
        None
    }

    /// The next frame that has arrived at a host by `now`.
    pub fn receive(&mut self, now: u64) -> Option<(usize, Frame)> {
        self.paths.iter_mut().find_map(|path| {
            let Path { to, links, .. } = path;
            links.iter_mut().find_map(|link| link.pop(now)).map(|packet| (*to, packet.0))
        })
    }

    pub fn next_arrival(&self) -> u64 {
        let links = self.paths.iter().flat_map(|path| &path.links);
        links.filter_map(Link::next_arrival).min().unwrap_or(u64::MAX)
    }

    /// Gives all links other impairments. What is on them arrives as it would have.
    pub fn set(&mut self, impairments: Impairments, seed: u64) {
        for (at, path) in self.paths.iter_mut().enumerate() {
            let past = &mut self.past;
            path.links.retain(|link| {
                let gone = link.next_arrival().is_none();
                if gone {
                    add(past, link.counters());
                }
                !gone
            });
            path.links.push(Link::new(impairments, seed.wrapping_add(at as u64 * 77)));
        }
    }

    /// Cuts all paths from and to a host, or repairs them.
    pub fn cut(&mut self, host: usize, cut: bool) {
        self.paths.iter_mut().filter(|path| path.from == host || path.to == host).for_each(|path| path.cut = cut);
    }

    /// Sets the MTU of the paths from a host, in bytes of IP packet.
    pub fn set_mtu(&mut self, host: usize, mtu: u16) {
        self.paths.iter_mut().filter(|path| path.from == host).for_each(|path| path.mtu = mtu);
    }

    pub fn counters(&self) -> Counters {
        let mut sum = self.past;
        self.paths.iter().flat_map(|path| &path.links).for_each(|link| add(&mut sum, link.counters()));
        sum
    }
}
