//! IPsec policies: whether a connection's packets are blocked or transformed, which only the kernel can do.

use crate::netlink::{DUMP, Netlink, Request, attributes};
use baton_wire::{Endpoint, Flow};
use std::io;

const XFRM_MSG_GETPOLICY: u16 = 0x15;
const XFRM_MSG_GETDEFAULT: u16 = 0x28;
const XFRMA_TMPL: u16 = 5;
const XFRMA_MARK: u16 = 21;
const XFRMA_IF_ID: u16 = 31;
/// Bytes of `struct xfrm_userpolicy_info`.
const POLICY: usize = 168;
/// XFRM_USERPOLICY_BLOCK.
const BLOCK: u8 = 1;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;

/// Directions of policies (XFRM_POLICY_IN, XFRM_POLICY_OUT, XFRM_POLICY_FWD). For policies of single sockets,
/// [`OF_SOCKET`] is added.
const IN: u8 = 0;
const OUT: u8 = 1;
const FORWARD: u8 = 2;
const OF_SOCKET: u8 = 3;

/// One policy.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Policy {
    /// Addresses, prefix lengths, ports and masks: of the packet's source, then of its destination.
    source: Selector,
    destination: Selector,
    v4: bool,
    protocol: u8,
    /// 0 for any.
    device: u32,
    priority: u32,
    direction: u8,
    action: Action,
    /// Value and mask of the packet's mark.
    mark: (u32, u32),
    /// Index of an IPsec interface, through which packets of the NIC's connections do not go; 0 for none.
    interface: u32,
}

/// What happens to packets that a policy covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    Allow,
    Transform,
    Block,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Selector {
    address: [u8; 16],
    prefix: u8,
    port: u16,
    port_mask: u16,
}

impl Selector {
    fn covers(&self, end: &Endpoint, v4: bool) -> bool {
        let address: &[u8] = if v4 { &end.address[12..] } else { &end.address };
        let same = (0..usize::from(self.prefix).min(address.len() * 8))
            .step_by(8)
            .all(|bit| (self.address[bit / 8] ^ address[bit / 8]) >> (8 - (usize::from(self.prefix) - bit).min(8)) == 0);
        same && (end.port ^ self.port) & self.port_mask == 0
    }
}

/// The policies of a network namespace.
#[derive(Clone, Debug, Default)]
pub struct Policies {
    policies: Vec<Policy>,
    /// Whether packets that no policy covers are blocked: incoming packets, and outgoing packets.
    blocks: [bool; 2],
}

impl Policies {
    /// Reads all policies. `netlink` is of family [`crate::netlink::XFRM`].
    ///
    /// # Errors
    /// The failed system call's.
    pub fn read(netlink: &Netlink) -> io::Result<Policies> {
        let mut all = Policies::default();
        netlink.ask(Request::new(XFRM_MSG_GETPOLICY, DUMP, &[]), |body| all.policies.extend(parse(body)))?;
        // Kernels before 5.14 have no defaults.
        let _ = netlink.ask(Request::new(XFRM_MSG_GETDEFAULT, 0, &[0; 4]), |body| {
            if let [input, _, output, ..] = body {
                all.blocks = [*input == BLOCK, *output == BLOCK];
            }
        });
        Ok(all)
    }

    /// What happens to a connection's packets, which leave by `device` with `mark`. If it is not clear which of several
    /// policies applies, a policy that acts is assumed to.
    pub fn judge(&self, flow: &Flow, device: u32, mark: u32) -> Verdict {
        let [input, output] = [(IN, flow.reversed()), (OUT, *flow)].map(|(direction, packet)| {
            let matching = |policy: &&Policy| {
                policy.v4 == packet.is_v4()
                    && (policy.protocol == 0 || policy.protocol == IPPROTO_TCP)
                    && (policy.device == 0 || policy.device == device)
                    && policy.interface == 0
                    && mark & policy.mark.1 == policy.mark.0
                    && policy.source.covers(&packet.local, policy.v4)
                    && policy.destination.covers(&packet.remote, policy.v4)
            };
            let of = |wanted: u8| self.policies.iter().filter(move |policy| policy.direction == wanted).filter(matching);
            // The kernel does not report which socket's policy it is.
            let of_socket = of(direction + OF_SOCKET).map(|policy| policy.action);
            let first = of(direction).map(|policy| policy.priority).min();
            let default = if self.blocks[usize::from(direction)] { Action::Block } else { Action::Allow };
            let of_host = match first {
                Some(first) => of(direction).filter(|policy| policy.priority == first).map(|policy| policy.action).max(),
                None => Some(default),
            };
            of_socket.chain(of_host).max().unwrap_or(Action::Allow)
        });
        match (input, output) {
            (Action::Allow, Action::Allow) => Verdict::Clear,
            (_, Action::Block) => Verdict::BlockedOut,
            _ => Verdict::Covered,
        }
    }

    /// Whether any packet of TCP or UDP that this host sends without a mark, or receives, is transformed or blocked.
    pub fn judge_any(&self) -> bool {
        let may_meet = |policy: &Policy| {
            matches!(policy.protocol, 0 | IPPROTO_TCP | IPPROTO_UDP) && policy.interface == 0 && policy.mark.0 == 0
        };
        let acts = |policy: &Policy| policy.action != Action::Allow && policy.direction != FORWARD;
        self.blocks != [false; 2] || self.policies.iter().any(|policy| acts(policy) && may_meet(policy))
    }
}

/// What the policies do to a connection's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its packets pass unchanged.
    Clear,
    /// The packets are transformed, or blocked when they come in: each must pass through the kernel.
    Covered,
    /// Outgoing packets are blocked: the kernel would refuse to connect.
    BlockedOut,
}

fn parse(body: &[u8]) -> Option<Policy> {
    let body_of_policy = body.get(..POLICY)?;
    let half = |at: usize| u16::from_be_bytes([body_of_policy[at], body_of_policy[at + 1]]);
    let native = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?));
    let selector = |address: usize, port: usize, prefix: usize| Selector {
        address: std::array::from_fn(|at| body_of_policy[address + at]),
        prefix: body_of_policy[prefix],
        port: half(port),
        port_mask: half(port + 2),
    };
    let mut policy = Policy {
        destination: selector(0, 32, 42),
        source: selector(16, 36, 43),
        v4: i32::from(u16::from_ne_bytes([body[40], body[41]])) == libc::AF_INET,
        protocol: body[44],
        device: native(&body[48..])?,
        priority: native(&body[152..])?,
        direction: body[160],
        action: if body[161] == BLOCK { Action::Block } else { Action::Allow },
        mark: (0, 0),
        interface: 0,
    };
    for (kind, value) in attributes(body, POLICY) {
        match kind {
            XFRMA_TMPL if !value.is_empty() => policy.action = policy.action.max(Action::Transform),
            XFRMA_MARK => policy.mark = (native(value)?, native(value.get(4..)?)?),
            XFRMA_IF_ID => policy.interface = native(value)?,
            _ => {}
        }
    }
    Some(policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(prefix: u8, address: [u8; 4], port: u16) -> Selector {
        let mut whole = [0; 16];
        whole[..4].copy_from_slice(&address);
        Selector { address: whole, prefix, port, port_mask: if port == 0 { 0 } else { 0xffff } }
    }

    fn policy(direction: u8, source: Selector, destination: Selector, priority: u32, action: Action) -> Policy {
        let (protocol, device, mark, interface) = (0, 0, (0, 0), 0);
        Policy { source, destination, v4: true, protocol, device, priority, direction, action, mark, interface }
    }

    /// Packets whose addresses and ports are not known yet.
    #[test]
    fn a_policy_that_acts_may_meet_any_packet() {
        let everything = any(0, [0; 4], 0);
        let one = |direction, action| policy(direction, everything, everything, 5, action);
        let judged = |policies: Vec<Policy>| Policies { policies, blocks: [false; 2] }.judge_any();
        assert!(!judged(Vec::new()) && !judged(vec![one(IN, Action::Allow), one(FORWARD, Action::Block)]));
        assert!(judged(vec![one(OUT, Action::Allow), one(IN, Action::Transform)]) && judged(vec![one(OUT, Action::Block)]));
        let block = one(IN, Action::Block);
        let others = [Policy { protocol: 50, ..block.clone() }, Policy { mark: (1, 1), ..block.clone() }];
        assert!(!judged(others.to_vec()) && !judged(vec![Policy { interface: 7, ..block.clone() }]));
        assert!(judged(vec![Policy { protocol: IPPROTO_UDP, mark: (0, 1), ..block }]));
        assert!(Policies { policies: Vec::new(), blocks: [true, false] }.judge_any());
    }

    #[test]
    fn the_first_policy_that_covers_a_packet_counts() {
        use Action::{Allow, Block, Transform};
        use Verdict::{BlockedOut, Clear, Covered};
        let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 9, 2], 5000), device: 0 };
        let everything = any(0, [0; 4], 0);
        let judged = |policies: Vec<Policy>| Policies { policies, blocks: [false; 2] }.judge(&flow, 2, 0);
        assert_eq!(judged(Vec::new()), Clear);
        assert_eq!(judged(vec![policy(OUT, everything, everything, 5, Block)]), BlockedOut);
        assert_eq!(judged(vec![policy(OUT, everything, everything, 5, Transform)]), Covered);
        assert_eq!(
            judged(vec![policy(IN, any(21, [10, 0, 8, 0], 0), everything, 5, Block)]),
            Covered,
            "10.0.9.2 is in 10.0.8.0/21"
        );
        assert_eq!(judged(vec![policy(IN, any(24, [10, 0, 8, 0], 0), everything, 5, Block)]), Clear);
        assert_eq!(judged(vec![policy(OUT, any(0, [0; 4], 81), everything, 5, Block)]), Clear, "another port");
        // A lower number goes first: an exception.
        let exception = policy(OUT, any(32, [10, 0, 0, 1], 80), everything, 1, Allow);
        assert_eq!(judged(vec![policy(OUT, everything, everything, 5, Block), exception.clone()]), Clear);
        assert_eq!(judged(vec![policy(OUT, everything, everything, 1, Block), exception]), BlockedOut);
        assert_eq!(judged(vec![policy(OUT + OF_SOCKET, everything, everything, 0, Transform)]), Covered);
        let blocks = |blocks| Policies { policies: Vec::new(), blocks }.judge(&flow, 2, 0);
        assert_eq!([[true, false], [false, true], [false, false]].map(blocks), [Covered, BlockedOut, Clear]);
    }
}
