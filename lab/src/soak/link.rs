//! The link between the hosts goes down for a while, now and then: at its near end, which takes the route away, or at
//! its far end.

use super::{Mover, SoakReport};
use anyhow::{Context, Result};
use baton_bed::testbed::{INTERFACE_A, INTERFACE_B, Testbed};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use baton_linux::rtnetlink;
use std::time::Duration;

/// Longest time for which it is down, microseconds: several time-outs of retransmissions.
const LONGEST: u64 = 1_000_000;

/// The devices at its ends.
pub(super) struct Link<'a> {
    ends: [(&'a Namespace, &'static str); 2],
}

impl<'a> Link<'a> {
    /// Those of a test bed.
    pub fn of(bed: &'a Testbed, ipv6: bool) -> Result<Link<'a>> {
        let ends = [(&bed.host_a, INTERFACE_A), (&bed.host_b, INTERFACE_B)];
        for (host, _) in ends.iter().filter(|_| ipv6) {
            // A device that goes down loses its addresses of IPv6 otherwise.
            let keep = || std::fs::write("/proc/sys/net/ipv6/conf/all/keep_addr_on_down", "1");
            host.run(keep).context("addresses that outlive their device's going down")?;
        }
        Ok(Link { ends })
    }

    /// Takes one end down, or up again.
    fn set(&self, end: usize, up: bool) -> Result<()> {
        let (host, name) = self.ends[end];
        let set = || {
            let netlink = rtnetlink::open()?;
            let index = rtnetlink::link(&netlink, name)?.index;
            if up { rtnetlink::set_up(&netlink, index, None, None) } else { rtnetlink::set_down(&netlink, index) }
        };
        host.run(set).with_context(|| format!("taking {name} {}", if up { "up" } else { "down" }))
    }
}

impl Mover<'_> {
    /// Takes the link down for a random time, every other time with moves under way. Returns how many of these were
    /// done. That a connection stays then, since it has no route, is no failure.
    pub(super) fn take_link_down(&mut self, tool: &mut Tool, report: &mut SoakReport) -> Result<u64> {
        let (end, moving) = (self.rng.below(2) as usize, self.rng.below(2) == 0);
        if moving {
            self.ask_some(tool, self.ids.len())?;
        }
        self.set_link(end, false)?;
        std::thread::sleep(Duration::from_micros(self.rng.below(LONGEST)));
        self.set_link(end, true)?;
        report.link_downs += 1;
        self.take_all_answers(tool, report)
    }

    fn set_link(&self, end: usize, up: bool) -> Result<()> {
        self.link.as_ref().map_or(Ok(()), |link| link.set(end, up))
    }
}
