//! Kernel features that judge packets between a socket and the wire, and that a connection on the NIC bypasses: IPsec
//! policies, firewall rules whose verdict changes from packet to packet, traffic-control filters. They are read once
//! for each change.

use baton_handoff::examine::system;
use baton_linux::events::monotonic_micros;
use baton_linux::firewall::Firewall;
use baton_linux::netlink::{Changes, NETFILTER, Netlink, POLICY_CHANGES, ROUTE, TRAFFIC_CONTROL_CHANGES, XFRM};
use baton_linux::rtnetlink;
use baton_linux::xfrm::{Policies, Verdict};
use baton_moves::Refusal;
use baton_wire::Flow;
use std::collections::HashMap;

const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// Microseconds for which it counts which tables of iptables-legacy there were.
const TABLES_LAST: u64 = 20_000;

/// Which tables of iptables-legacy there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Tables {
    /// Some judge every packet.
    judge_packets: bool,
    /// There are some: those of `nat` judge, and translate, only the first packet of a connection.
    any: bool,
}

impl Tables {
    /// Those of the agent's network namespace.
    fn read() -> Tables {
        let names = |path| std::fs::read_to_string(path).unwrap_or_default();
        Tables::named(&(names("/proc/self/net/ip_tables_names") + &names("/proc/self/net/ip6_tables_names")))
    }

    /// Those of these names, one a line.
    fn named(names: &str) -> Tables {
        Tables { judge_packets: names.lines().any(|name| name != "nat"), any: !names.is_empty() }
    }
}

/// What is known of the tables of iptables-legacy, of which the kernel sends no notification.
struct Legacy {
    tables: Tables,
    /// When they were read, in microseconds of the monotonic clock.
    read_at: u64,
    /// Those at the last poll.
    polled: Tables,
}

impl Legacy {
    fn new(tables: Tables, now: u64) -> Legacy {
        Legacy { tables, read_at: now, polled: tables }
    }

    /// Those that there are, or were [`TABLES_LAST`] before `now` or later.
    fn tables(&mut self, now: u64, read: impl FnOnce() -> Tables) -> Tables {
        if now.saturating_sub(self.read_at) > TABLES_LAST {
            (self.tables, self.read_at) = (read(), now);
        }
        self.tables
    }

    /// Whether they are others than at the last poll, whoever has seen that meanwhile.
    fn have_changed(&mut self, now: u64, read: impl FnOnce() -> Tables) -> bool {
        (self.tables, self.read_at) = (read(), now);
        std::mem::replace(&mut self.polled, self.tables) != self.tables
    }
}

/// State of the kernel's guards, as read last.
pub(crate) struct Guards {
    /// None where the kernel has no IPsec.
    xfrm: Option<Xfrm>,
    /// None where it has no netfilter.
    netfilter: Option<Netlink>,
    /// None when the rules have to be read again.
    firewall: Option<Firewall>,
    legacy: Legacy,
    /// Notifications of changed traffic-control filters.
    traffic: Option<Changes>,
    /// Whether a device has filters at its ingress, for the devices looked at so far.
    filtered: HashMap<u32, bool>,
}

struct Xfrm {
    netlink: Netlink,
    changes: Changes,
    /// None when they have to be read again.
    policies: Option<Policies>,
}

impl Guards {
    /// Subscribes to changes, in the calling thread's network namespace.
    pub fn new() -> Guards {
        let netlink = Netlink::open(XFRM);
        let changes = Changes::listen(XFRM, POLICY_CHANGES);
        let traffic = Changes::listen(ROUTE, TRAFFIC_CONTROL_CHANGES).ok();
        let filtered = HashMap::new();
        let xfrm = netlink.ok().zip(changes.ok()).map(|(netlink, changes)| Xfrm { netlink, changes, policies: None });
        let legacy = Legacy::new(Tables::read(), monotonic_micros());
        Guards { xfrm, netfilter: Netlink::open(NETFILTER).ok(), firewall: None, legacy, traffic, filtered }
    }

    /// The socket for requests to netfilter. None where the kernel has none.
    pub fn netfilter(&self) -> Option<&Netlink> {
        self.netfilter.as_ref()
    }

    /// Notifications of changed traffic-control filters.
    pub fn traffic_changes(&self) -> Option<&Changes> {
        self.traffic.as_ref()
    }

    /// Reads the notifications of filters. Returns whether filters have changed.
    pub fn traffic_changed(&mut self) -> bool {
        self.filtered.clear();
        self.traffic.as_ref().is_some_and(Changes::any)
    }

    /// Discards the firewall's rules, which have changed.
    pub fn forget_rules(&mut self) {
        self.firewall = None;
    }

    /// Looks for tables of iptables-legacy. Returns whether there are others than at the last look.
    pub fn tables_changed(&mut self) -> bool {
        self.legacy.have_changed(monotonic_micros(), Tables::read)
    }

    /// Checks that no rule or filter of the kernel has to judge each packet of a connection that comes in at a device.
    ///
    /// # Errors
    /// Which one has to; or that they cannot be read.
    pub fn pass(&mut self, routes: &Netlink, flow: &Flow, device: u32) -> Result<(), Refusal> {
        if self.legacy.tables(monotonic_micros(), Tables::read).judge_packets {
            return Err(Refusal::LegacyRules);
        }
        let filtered = match self.filtered.get(&device) {
            Some(known) => *known,
            None => {
                let found = rtnetlink::has_ingress_filter(routes, device);
                let found = found.map_err(|error| system("RTM_GETTFILTER", &error))?;
                self.filtered.insert(device, found);
                found
            }
        };
        if filtered {
            return Err(Refusal::Filtered(device));
        }
        self.read_rules()?;
        match self.firewall.as_ref().and_then(|firewall| firewall.judge(flow)) {
            Some(rule) => Err(Refusal::Rules(rule)),
            None => Ok(()),
        }
    }

    /// Checks that no rule or IPsec policy of the kernel's judges or changes the first packets of connections, or
    /// datagrams.
    ///
    /// # Errors
    /// Which may do so; or that they cannot be read.
    pub fn pass_openings(&mut self) -> Result<(), Refusal> {
        if self.legacy.tables(monotonic_micros(), Tables::read).any {
            return Err(Refusal::LegacyRules);
        }
        self.read_rules()?;
        if self.firewall.as_ref().is_some_and(Firewall::judges_openings) {
            return Err(Refusal::RulesForOpenings);
        }
        if self.policies()?.is_some_and(Policies::judge_any) {
            return Err(Refusal::Policy);
        }
        Ok(())
    }

    /// Reads the firewall's rules unless they are known.
    fn read_rules(&mut self) -> Result<(), Refusal> {
        if self.firewall.is_none()
            && let Some(netfilter) = &self.netfilter
        {
            self.firewall = Some(match Firewall::read(netfilter) {
                Ok(firewall) => firewall,
                // The kernel has no nftables.
                Err(error) if matches!(error.raw_os_error(), Some(EINVAL | EOPNOTSUPP)) => Firewall::default(),
                Err(error) => return Err(system("NFT_MSG_GETRULE", &error)),
            });
        }
        Ok(())
    }

    /// Notifications of changed IPsec policies.
    pub fn policy_changes(&self) -> Option<&Changes> {
        self.xfrm.as_ref().map(|xfrm| &xfrm.changes)
    }

    /// Whether policies have changed since the last call.
    pub fn policies_changed(&mut self) -> bool {
        let Some(xfrm) = &mut self.xfrm else { return false };
        let changed = xfrm.changes.any();
        if changed {
            xfrm.policies = None;
        }
        changed
    }

    /// Returns the verdict of the IPsec policies on a connection whose packets leave by a device.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn verdict(&mut self, flow: &Flow, device: u32, mark: u32) -> Result<Verdict, Refusal> {
        Ok(self.policies()?.map_or(Verdict::Clear, |policies| policies.judge(flow, device, mark)))
    }

    /// The IPsec policies, read unless they are known. None where the kernel has no IPsec.
    fn policies(&mut self) -> Result<Option<&Policies>, Refusal> {
        let Some(Xfrm { netlink, policies, .. }) = &mut self.xfrm else { return Ok(None) };
        if policies.is_none() {
            // A change during the read sends a notification, after which every connection is checked again.
            *policies = Some(Policies::read(netlink).map_err(|error| system("XFRM_MSG_GETPOLICY", &error))?);
        }
        Ok(policies.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Tables = Tables { judge_packets: false, any: false };
    const NAT: Tables = Tables { judge_packets: false, any: true };
    const FILTER: Tables = Tables { judge_packets: true, any: true };

    /// A table that translates first packets concerns only connections that a NIC would make.
    #[test]
    fn tables_judge_first_packets_or_all() {
        let named = ["", "nat\n", "nat\nnat\n", "filter\n", "nat\nmangle\n"].map(Tables::named);
        assert_eq!(named, [NONE, NAT, NAT, FILTER, FILTER]);
    }

    /// Tables come and go while nothing is polled: whoever asks then finds that, and the next poll does, too.
    #[test]
    fn tables_are_seen_although_nothing_is_polled() {
        let mut legacy = Legacy::new(NONE, 1_000);
        assert_eq!(legacy.tables(1_000 + TABLES_LAST, || FILTER), NONE, "asked a moment ago");
        assert_eq!(legacy.tables(1_001 + TABLES_LAST, || FILTER), FILTER);
        let now = 1_000_000;
        assert!(legacy.have_changed(now, || FILTER), "those on the NIC have not been notified");
        assert!(!legacy.have_changed(now + 1, || FILTER) && legacy.have_changed(now + 2, || NAT));
        assert_eq!(legacy.tables(now + 3, || FILTER), NAT);
        assert_eq!(legacy.tables(2 * now, || NONE), NONE, "they have gone");
    }
}
