//! Why a connection stays where it is.

use alloc::string::String;
use core::net::IpAddr;

/// Why a move does not take place. Its text names the cause and, where there is one, the remedy.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// Not a TCP socket.
    #[error("it is not a TCP connection")]
    NotTcp,
    /// Multipath TCP: the kernel offers no repair for it.
    #[error(
        "it is an MPTCP connection, which the kernel cannot export (start the program with MPTCP off, e.g. GODEBUG=multipathtcp=0)"
    )]
    Mptcp,
    /// TCP MD5 or TCP-AO signs its segments with a key that the kernel does not give away.
    #[error("its segments are signed (TCP MD5 or TCP-AO)")]
    Signed,
    /// Its socket is of another network namespace, where its addresses mean something else.
    #[error("its socket belongs to another network namespace (start a Baton there: ip netns exec … baton up)")]
    OtherNamespace,
    /// Its receiving side is shut down, which nothing would put back: by its program, or by an agent before this one.
    #[error("its receiving side is shut down")]
    ReceivingShut,
    /// The agent has shut its receiving side down: its peer has ended the stream, and the kernel could not be given the
    /// FIN.
    #[error("Baton has shut its receiving side down, since its peer's FIN did not get to the kernel (does a rule drop it?)")]
    FinLost,
    /// Urgent data is pending.
    #[error("urgent data is pending")]
    Urgent,
    /// Its timestamp clock runs in microseconds.
    #[error("its timestamp clock runs in microseconds (its route has the feature tcp_usec_ts: see ip route show)")]
    MicrosecondClock,
    /// It is in a state that cannot be moved; its name as in RFC 9293.
    #[error("it is in state {0}, only ESTABLISHED to LAST-ACK can be moved")]
    State(&'static str),
    /// An upper layer protocol (kTLS, …) owns its payload.
    #[error("an upper layer protocol (TCP_ULP) is attached to it")]
    UpperLayer,
    /// Its program has set an option that the NIC does not act on.
    #[error("its {0} is set, which only the kernel acts on")]
    Option(&'static str),
    /// A socket filter that cannot be read back, or is too long for the journal.
    #[error("it has a socket filter that cannot be saved")]
    Filter,
    /// There is no route to its peer.
    #[error("there is no route to its peer (ip route get <peer>)")]
    NoRoute,
    /// Its route does not lead through the NIC.
    #[error("its route leads through interface {0}, which is not the NIC's")]
    OtherInterface(u32),
    /// Its device has no Ethernet headers.
    #[error("its route leads through interface {0}, which is neither Ethernet nor loopback")]
    NotEthernet(u32),
    /// Its packets carry a mark, which the kernel's rules, queues and filters match.
    #[error("its packets carry a mark (SO_MARK {0}), and the NIC's do not: where nothing goes by the mark, do not set it")]
    Marked(u32),
    /// It is bound to a device, and its route leads through another.
    #[error("it is bound to interface {0} (SO_BINDTODEVICE), and its route leads through interface {1}")]
    Bound(u32, u32),
    /// A connection has the same addresses and ports and is on a NIC, and no device tells the two apart: one of them is
    /// bound to none, or both are to the same.
    #[error(
        "a connection with the same addresses and ports is on a NIC, and no interface to which both are bound tells them apart"
    )]
    Twin,
    /// Its addresses are link-local, and its socket is bound to no device.
    #[error(
        "its addresses are link-local, and its socket is bound to no interface (SO_BINDTODEVICE): another link may have the same"
    )]
    NoLink,
    /// It belongs to a VRF.
    #[error("it belongs to a VRF (interface {0}), whose rules only the kernel follows")]
    Vrf(u32),
    /// Its route adds headers.
    #[error("its route adds headers of its own (ip route … encap), which only the kernel can")]
    Encapsulated,
    /// There are more paths to its peer than can be listened to.
    #[error("its route has {0} equal paths, more than the NIC can receive at")]
    ManyPaths(usize),
    /// A rule of the firewall judges it by what changes from packet to packet.
    #[error(
        "the firewall judges it by {0}, and only the kernel's packets count for that; a rule before it that accepts what is established \
         lets it move"
    )]
    Rules(String),
    /// The firewall may judge the first packets of connections, which the kernel alone sends.
    #[error("the firewall has chains that may stop or translate a connection's first packet")]
    RulesForOpenings,
    /// BPF programs of its control group judge it, and would not see what the NIC does, or refuse what a move does.
    #[error("its control group has BPF programs {0} (bpftool cgroup tree, systemctl show)")]
    Group(String),
    /// Its control group cannot be opened: BPF programs may judge it there.
    #[error(
        "its control group is outside of what Baton sees, so that nobody knows which BPF programs judge it \
         (start Baton in the host's control group namespace)"
    )]
    GroupUnseen,
    /// There are rules whose changes cannot be observed.
    #[error(
        "there are rules of iptables-legacy, whose changes the kernel does not report; use iptables-nft (update-alternatives --config iptables)"
    )]
    LegacyRules,
    /// Filters of traffic control judge what comes in.
    #[error("filters of traffic control judge what comes in at interface {0} (tc filter show dev … ingress)")]
    Filtered(u32),
    /// IPsec covers it.
    #[error("an IPsec policy covers it (see ip xfrm policy)")]
    Policy,
    /// IPsec blocks it on the way out: the kernel could not even take it back.
    #[error("an IPsec policy blocks it (see ip xfrm policy)")]
    PolicyBlocks,
    /// Its source address is not the host's any more: an import would close the socket for good.
    #[error("its source address {0} is not one of this host's any more")]
    SourceGone(IpAddr),
    /// The link address of its next hop is unknown.
    #[error("the link address of its next hop is not known yet")]
    NoNeighbour,
    /// The link address of its next hop is unknown, and nobody can ask for it.
    #[error("its device has no carrier")]
    NoCarrier,
    /// The steering's BPF programs are being attached to the devices.
    #[error("the NIC does not receive at all interfaces yet; try again")]
    Attaching,
    /// The kernel holds data out of order that the NIC's copy does not cover yet.
    #[error("it holds data out of order that has not been copied in time; try again")]
    OutOfOrder,
    /// The program is inside an operation on it.
    #[error("its program is in the middle of an operation on it; try again")]
    Busy,
    /// Its numbers moved while they were read, twice, from a socket that nobody should be using.
    #[error("its sequence numbers moved while they were read; try again")]
    Unsettled,
    /// The kernel has not got all that the NIC has acknowledged for it.
    #[error("the kernel lacks something that the NIC has acknowledged for it; try again")]
    Acknowledged,
    /// Somebody asked for it in the kernel before its move was made.
    #[error("it was asked to be in the kernel before it had moved")]
    CalledOff,
    /// The firewall, or a program of its control group, has changed since it was last seen to let the connection
    /// through.
    #[error("the firewall has changed (or a program of its control group), and no traffic of it has been seen to pass since")]
    Unproved,
    /// It was to end on the NIC, which knows for how long its peer has not answered, and its peer has answered.
    #[error("its peer answers again")]
    Answered,
    /// The agent may not bind its port: the kernel would not give the connection back to its socket. The port.
    #[error("Baton may not use its port {0} (its agent lacks CAP_NET_BIND_SERVICE), so it could not come back")]
    LowPort(u16),
    /// This host translates its addresses (NAT).
    #[error("this host translates its addresses (NAT)")]
    Translated,
    /// Its route leads to another NIC than when its move began.
    #[error("its route leads to another NIC now; try again")]
    AnotherNic,
    /// Its socket has been bound to another device since the move began.
    #[error("its program has bound its socket to another interface meanwhile (SO_BINDTODEVICE); try again")]
    Rebound,
    /// Another process holds the same socket.
    #[error("another process holds the same socket")]
    Shared,
    /// Its socket has another connection than the one that was registered, or is another socket: its program has
    /// disconnected it, say.
    #[error("its socket does not have the connection any more that its program has registered")]
    Swapped,
    /// It belongs to another user than the attacher; to which.
    #[error("it belongs to user {0}: only that user and root may attach to it")]
    Foreign(u32),
    /// Calls on its socket wait for the socket's lock.
    #[error("its socket does not answer: its program holds it")]
    Held,
    /// Its descriptor is its program's alone.
    #[error("its program has its socket alone")]
    Elsewhere,
    /// Other processes may hold its socket: they are being searched.
    #[error("it is being found out whether another process holds its socket; try again")]
    Searching,
    /// A process that may hold its socket does not let anybody look.
    #[error("whether another process holds its socket cannot be found out just now; try again")]
    Unsearched,
    /// The NIC, or its session's memory, has no room.
    #[error("the NIC has no room for it")]
    NoRoom,
    /// The NIC has announced no room for it, or others carry more.
    #[error("the NIC is full: it goes there when there is room, or when it carries more than others there")]
    Full,
    /// It has to carry more to be on the NIC.
    #[error("it waits in the kernel: it is not hot enough (rule hot)")]
    Cold,
    /// Its class is better served by the kernel, or is being measured there; what was found.
    #[error("{0}")]
    Placed(String),
    /// The agent needs the descriptors that it has left for itself; how many it may have.
    #[error(
        "the agent has no descriptor left for it: it may have {0} (raise the hard limit, ulimit -Hn, of whoever starts Baton)"
    )]
    NoDescriptors(u64),
    /// The user has as many of the agent's descriptors as the agent has left.
    #[error(
        "user {0} has as many of the agent's descriptors as are left for all others (raise the hard limit, ulimit -Hn, of whoever starts Baton)"
    )]
    ShareTaken(u32),
    /// The NIC has something of an earlier connection with the same 4-tuple, or a repeated segment of it.
    #[error("the NIC still holds something with the same addresses and ports; try again")]
    StillThere,
    /// The NIC does not serve datagram sockets itself.
    #[error("only a NIC between kernel and wire serves datagram sockets")]
    CannotOpen,
    /// The NIC refused a command, with this number.
    #[error("the NIC refused it ({0})")]
    Refused(u32),
    /// The NIC does not answer, or must not go on.
    #[error("the NIC does not answer")]
    NicGone,
    /// It ended while it was on the NIC.
    #[error("it has ended")]
    Ended,
    /// The connection was closed just then, found out by this call.
    #[error("{0}: it has been closed")]
    Closed(&'static str),
    /// The kernel refused what was to bring it back: there is no connection any more. The call, and what the kernel
    /// said.
    #[error("it is lost: {0}: {1}")]
    Lost(&'static str, String),
    /// The kernel refused a call. The call, and what the kernel said.
    #[error("{0}: {1}")]
    System(&'static str, String),
}

impl Refusal {
    /// Whether trying again a moment later may work without anybody changing anything.
    pub fn is_transient(&self) -> bool {
        use Refusal::*;
        matches!(
            self,
            OutOfOrder
                | Acknowledged
                | StillThere
                | Busy
                | Unsettled
                | Searching
                | Unsearched
                | NoNeighbour
                | NoCarrier
                | Attaching
                | NoRoom
                | Full
                | NicGone
                | AnotherNic
                | Rebound
        )
    }

    /// Whether the kernel could not send the connection's segments either.
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Refusal::NoRoute | Refusal::NoCarrier | Refusal::SourceGone(_) | Refusal::PolicyBlocks)
    }

    /// Whether the socket does not have the connection any more.
    pub fn is_of_lost_socket(&self) -> bool {
        matches!(self, Refusal::Swapped | Refusal::Closed(_))
    }

    /// Whether it stays true for the connection's life, so that trying again is of no use. Everything else may pass: a
    /// route, a rule, an option, a lack of room.
    pub fn is_for_good(&self) -> bool {
        use Refusal::*;
        matches!(
            self,
            NotTcp
                | Mptcp
                | Signed
                | OtherNamespace
                | ReceivingShut
                | FinLost
                | MicrosecondClock
                | UpperLayer
                | CannotOpen
                | Ended
                | Closed(_)
                | Lost(..)
        )
    }

    /// Whether nothing is wrong with the connection: somebody else was faster.
    pub fn is_overtaken(&self) -> bool {
        matches!(self, Refusal::CalledOff | Refusal::Ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn a_refusal_names_cause_and_remedy() {
        for refusal in [Refusal::NoDescriptors(1024), Refusal::ShareTaken(1000)] {
            assert!(refusal.to_string().contains("ulimit -Hn"), "{refusal}");
        }
        assert!(Refusal::LegacyRules.to_string().contains("update-alternatives --config iptables"));
        let system = Refusal::System("TCP_REPAIR", "Operation not permitted".into());
        assert_eq!(system.to_string(), "TCP_REPAIR: Operation not permitted");
        assert!(!system.is_transient());
    }

    /// A transient refusal says "try again", or names a cause that passes.
    #[test]
    fn what_asks_to_try_again_is_transient() {
        for refusal in
            [Refusal::OutOfOrder, Refusal::Busy, Refusal::Unsettled, Refusal::Acknowledged, Refusal::AnotherNic, Refusal::Rebound]
        {
            assert!(refusal.is_transient() && refusal.to_string().ends_with("try again"), "{refusal}");
        }
        for refusal in [Refusal::Mptcp, Refusal::Unproved, Refusal::CalledOff, Refusal::Ended, Refusal::NoRoute] {
            assert!(!refusal.is_transient() && !refusal.to_string().contains("try again"), "{refusal}");
        }
    }

    #[test]
    fn what_may_pass_is_not_for_good() {
        for refusal in [
            Refusal::NoRoom,
            Refusal::Full,
            Refusal::Cold,
            Refusal::Busy,
            Refusal::NoNeighbour,
            Refusal::NoRoute,
            Refusal::Unproved,
            Refusal::Shared,
            Refusal::GroupUnseen,
        ] {
            assert!(!refusal.is_for_good(), "{refusal}");
        }
        assert!(Refusal::ReceivingShut.is_for_good() && Refusal::FinLost.is_for_good());
        assert!(Refusal::Mptcp.is_for_good() && Refusal::Lost("connect", "refused".into()).is_for_good());
    }
}
