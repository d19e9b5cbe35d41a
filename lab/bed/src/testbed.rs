//! Two hosts with a link between them: namespaces, interfaces, and on the first host a Baton of its own (keeper, agent,
//! NIC).
//!
//! ```text
//!   host A (namespace)                              host B (namespace)
//!   programs, kernel ── TAP baton0 ── NIC ── link ── TAP eth0 ── kernel, clients
//! ```
//!
//! The link is the NIC's wire: a TAP in host B, with an emulated link before it when faults are wanted. All but the
//! directory of the sockets is held by descriptors, so only that is left behind by a process that is killed.

use crate::container::{Container, ROOT};
use crate::temporary::{Directory, Kind};
use anyhow::{Context, Result, bail};
use baton_agent::{AgentSettings, Choose, Crash};
use baton_client::tool::Tool;
use baton_control::owner::Owner;
use baton_datapath::Registers;
use baton_keeper::Devices;
use baton_linux::control::Channel;
use baton_linux::interface::{self, TapOptions};
use baton_linux::namespace::Namespace;
use baton_linux::{process, rtnetlink, socket};
use baton_offloads::Offloads;
use baton_protocol::address::OwnAddress;
use baton_protocol::filter::OwnerSettings;
use baton_protocol::nic::{LinkSettings, NicSettings, STANDARD_PROBES};
use baton_rss::From;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

/// MAC address of host A's interface.
pub const MAC_A: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0a];
/// MAC address of host B's interface.
pub const MAC_B: [u8; 6] = [0x02, 0, 0, 0, 0, 0x0b];

/// Settings of a test bed.
#[derive(Clone, Debug)]
pub struct TestbedSettings {
    /// MTU of both hosts.
    pub mtu: u32,
    /// The wire is a veth pair whose end the NIC drives through a packet socket, instead of a TAP in host B.
    pub packet_socket: bool,
    /// The NIC is beside the kernel: host A's interface is a veth of its own, and there is no emulated link.
    pub beside: bool,
    /// The emulated link.
    pub link: LinkSettings,
    /// Let the kernels hand over frames of 64 KB, all the way to the other kernel.
    pub segmentation: bool,
    /// The NIC's offloads for host A's kernel.
    pub offloads: Offloads,
    /// GRO by host A's kernel; it needs `threaded_napi`.
    pub gro: bool,
    /// Receive frames in kernel threads of their own, so that each host's work is accounted separately.
    pub threaded_napi: bool,
    /// Number of connections that the NIC can hold.
    pub slots: usize,
    /// Microseconds that the NIC polls before it sleeps.
    pub spin: u64,
    /// Number of the NIC's workers.
    pub workers: usize,
    /// Each worker has queues of its own, which the kernels fill according to the NIC's indirection table; otherwise
    /// the first takes every frame.
    pub card: bool,
    /// A copy engine writes the workers' frames to the host.
    pub copy_engine: bool,
    /// Cores to which the NIC's workers are bound, if any.
    pub nic_cores: Vec<usize>,
    /// Core of the agent.
    pub agent_core: Option<usize>,
    /// Seed of the lookup's key and the link's faults.
    pub seed: u64,
    /// Number of NICs; several are beside the kernel.
    pub nics: usize,
    /// Devices that are dealt to them in turn; host A's interface and others are dealt as they appear.
    pub devices: Vec<String>,
    /// Path of the `baton` program, if it is not the running one.
    pub program: Option<PathBuf>,
    /// Most frames that wait at host B's interface, instead of the kernel's default. A TAP does not hold its senders
    /// back as a card's driver does, so where they may send much the wire loses what its queue does not hold.
    pub peer_queue: Option<u16>,
    /// Settings below /proc/sys/net of host B, by path.
    pub peer_sysctls: Vec<(&'static str, String)>,
    /// How it is chosen which connections are on the NIC.
    pub choose: Choose,
    /// For tests: which process is killed, after which step of a move.
    pub crash: Option<Crash>,
    /// nftables rules for host A, if any.
    pub firewall: Option<String>,
    /// Addresses that are the NIC's own; its owner's to choose, if it has one.
    pub addresses: Vec<OwnAddress>,
    /// Microseconds between two probes for them, at least.
    pub between_probes: u64,
    /// The NIC is not host A's, but an owner's, who filters its frames.
    pub control_point: Option<ControlPoint>,
}

/// What the owner of the NIC starts with (docs/operate/filter.md).
#[derive(Clone, Debug)]
pub struct ControlPoint {
    /// The key with which the rules can be changed.
    pub key: Vec<u8>,
    /// The first rules.
    pub rules: Vec<String>,
    /// Host A is a container: its root has no rights over the owner. Needs root.
    pub contained: bool,
}

impl Default for TestbedSettings {
    fn default() -> Self {
        let several = process::cores() > 1;
        TestbedSettings {
            mtu: 1500,
            packet_socket: false,
            beside: false,
            link: LinkSettings::default(),
            segmentation: true,
            offloads: Offloads::default(),
            gro: true,
            threaded_napi: false,
            slots: 4096,
            spin: 200,
            workers: 1,
            card: false,
            copy_engine: false,
            nic_cores: if several { vec![0] } else { Vec::new() },
            agent_core: several.then_some(1),
            seed: 1,
            nics: 1,
            devices: Vec::new(),
            program: None,
            peer_queue: None,
            peer_sysctls: Vec::new(),
            crash: None,
            choose: Choose::default(),
            firewall: None,
            addresses: Vec::new(),
            between_probes: STANDARD_PROBES,
            control_point: None,
        }
    }
}

impl TestbedSettings {
    /// The same with connections where they are measured to be better served.
    #[must_use]
    pub fn by_gain(self) -> TestbedSettings {
        TestbedSettings { choose: Choose::Gain { price: 1.0 }, ..self }
    }
}

/// Two hosts and a Baton.
pub struct Testbed {
    /// Host A: the server's, with the NIC.
    pub host_a: Namespace,
    /// Host B: the clients'.
    pub host_b: Namespace,
    /// Present if the NIC has one.
    pub owner: Option<Owner>,
    keeper: Child,
    /// Present if host A is one.
    pub container: Option<Container>,
    parent: Option<Channel>,
    directory: Directory,
}

/// Host A's addresses, IPv4 then IPv6.
pub fn address_a(ipv6: bool) -> IpAddr {
    if ipv6 { IpAddr::from([0xfd00, 0xba70, 0, 0, 0, 0, 0, 1]) } else { IpAddr::from([10, 77, 0, 1]) }
}

/// Name of host A's interface.
pub const INTERFACE_A: &str = "baton0";
/// Name of host B's interface.
pub const INTERFACE_B: &str = "eth0";

/// Host B's addresses.
pub fn address_b(ipv6: bool) -> IpAddr {
    if ipv6 { IpAddr::from([0xfd00, 0xba70, 0, 0, 0, 0, 0, 2]) } else { IpAddr::from([10, 77, 0, 2]) }
}

struct Host {
    name: &'static str,
    mac: [u8; 6],
    peer_mac: [u8; 6],
    addresses: [IpAddr; 2],
    peers: [IpAddr; 2],
}

/// Makes the calling thread's network namespace use CUBIC, as the NIC does; or Reno, where the machine's owner reserves
/// CUBIC to the first namespace (`net.ipv4.tcp_allowed_congestion_control`), which is the same as long as nothing is
/// lost. A machine's own default may be one that paces, which costs the kernel more.
pub fn use_loss_based() {
    let set = |name| std::fs::write("/proc/sys/net/ipv4/tcp_congestion_control", name);
    if ["cubic", "reno"].into_iter().all(|name| set(name).is_err()) {
        eprintln!("baton: the kernel's congestion control is the machine's default: neither CUBIC nor Reno may be used");
    }
}

fn make_interface<T: Send>(
    namespace: &Namespace,
    host: &Host,
    settings: &TestbedSettings,
    open: impl FnOnce() -> io::Result<T> + Send,
) -> Result<T> {
    namespace.run(|| set_interface(host, settings, open)).with_context(|| format!("making interface {}", host.name))
}

/// Sets up the network namespace of the calling thread, and the interface in it that `open` makes.
fn set_interface<T>(host: &Host, settings: &TestbedSettings, open: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    // The settings of interfaces are in this namespace's /proc and /sys.
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0");
    let _ = std::fs::write("/proc/sys/net/ipv6/conf/all/accept_dad", "0");
    let _ = std::fs::write("/proc/sys/net/ipv4/tcp_rmem", "4096 131072 8388608");
    let _ = std::fs::write("/proc/sys/net/ipv4/tcp_wmem", "4096 65536 8388608");
    // No metrics are cached from one connection to the next, so that measurements do not depend on their order.
    let _ = std::fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1");
    use_loss_based();
    let fd = open()?;
    let netlink = rtnetlink::open()?;
    let link = rtnetlink::link(&netlink, host.name)?;
    rtnetlink::set_up(&netlink, link.index, Some(host.mac), Some(settings.mtu))?;
    for (address, prefix) in host.addresses.into_iter().zip([24, 64]) {
        // IPv6 needs an MTU of 1280.
        if address.is_ipv4() || settings.mtu >= 1280 {
            rtnetlink::add_address(&netlink, link.index, address, prefix)?;
        }
    }
    for peer in host.peers {
        if peer.is_ipv4() || settings.mtu >= 1280 {
            rtnetlink::set_neighbour(&netlink, link.index, peer, host.peer_mac)?;
        }
    }
    if settings.threaded_napi {
        let name = host.name;
        // If it cannot be set, the work is accounted to the writer; the report says which it was.
        let thread =
            std::thread::spawn(move || baton_linux::namespace::mount_own_sysfs().map(|()| interface::set_threaded_napi(name)));
        let _ = thread.join();
    }
    Ok(fd)
}

/// Sets up host B's interface, which is there already, and its host, whose network namespace must be the calling
/// thread's.
pub fn set_interface_b() -> Result<()> {
    let [_, b] = hosts();
    set_interface(&b, &TestbedSettings::default(), || Ok(())).with_context(|| format!("setting up {}", b.name))
}

/// Descriptors that only a card with several queues has, see [`Devices::card`]. The kernels of both hosts do the card's
/// work.
fn make_card(
    settings: &TestbedSettings,
    hosts: [&Namespace; 2],
    taps: [&OwnedFd; 2],
    options: [TapOptions; 2],
) -> Result<Vec<OwnedFd>> {
    let registers = baton_steering::rss::registers(Registers::BYTES).context("a card's registers")?;
    for (tap, from) in taps.into_iter().zip([From::Host, From::Wire]) {
        let program = baton_steering::rss::distribute(registers.as_fd(), from).context("a card's hash")?;
        interface::set_steering(tap.as_fd(), program.as_fd()).context("a card's queues")?;
    }
    let mut card = vec![registers];
    for _ in 1..settings.workers {
        for ((host, tap), options) in hosts.into_iter().zip(taps).zip(options) {
            let name = interface::tap_name(tap.as_fd())?;
            card.push(host.run(|| interface::open_tap(&name, options)).context("a further queue")?);
        }
    }
    Ok(card)
}

/// Makes a veth pair whose one end is host B's interface, and a packet socket on the other, in a namespace that
/// contains nothing else: it lives as long as the socket.
fn open_veth(name: &str, host: &Namespace, mtu: u32) -> io::Result<OwnedFd> {
    Namespace::new()?.run(|| {
        let netlink = rtnetlink::open()?;
        rtnetlink::add_veth(&netlink, "wire0", name, host.as_fd())?;
        let link = rtnetlink::link(&netlink, "wire0")?;
        rtnetlink::set_up(&netlink, link.index, None, Some(mtu))?;
        interface::open_packet_socket(link.index)
    })
}

/// Hosts A and B with a veth pair between them and without Baton: what a Baton is compared with. Addresses, MTU and
/// sysctls are those of a test bed.
///
/// # Errors
/// If something is missing; the message says what to do.
pub fn without_baton(settings: &TestbedSettings) -> Result<[Namespace; 2]> {
    let (host_a, host_b) = (Namespace::new()?, Namespace::new()?);
    let [a, b] = hosts();
    let veth = || rtnetlink::add_veth(&rtnetlink::open()?, b.name, a.name, host_a.as_fd());
    make_interface(&host_b, &b, settings, veth)?;
    make_interface(&host_a, &a, settings, || Ok(()))?;
    Ok([host_a, host_b])
}

/// Hosts A and B, of which the first one has a Baton or none.
pub enum Hosts {
    /// Of [`without_baton`].
    Without([Namespace; 2]),
    /// Of a test bed.
    Baton(Box<Testbed>),
}

impl Hosts {
    /// Both.
    pub fn both(&self) -> [&Namespace; 2] {
        match self {
            Hosts::Without([host_a, host_b]) => [host_a, host_b],
            Hosts::Baton(bed) => [&bed.host_a, &bed.host_b],
        }
    }
}

/// Hosts A and B, whose interfaces are TAPs, and nothing between them: whoever has the TAPs carries the frames.
///
/// # Errors
/// If something is missing; the message says what to do.
pub fn by_hand(settings: &TestbedSettings) -> Result<([Namespace; 2], [OwnedFd; 2])> {
    let namespaces = [Namespace::new()?, Namespace::new()?];
    let open = |namespace: &Namespace, host: &Host| {
        make_interface(namespace, host, settings, || interface::open_tap(host.name, TapOptions::default()))
    };
    let [a, b] = hosts();
    let taps = [open(&namespaces[0], &a)?, open(&namespaces[1], &b)?];
    Ok((namespaces, taps))
}

/// Host A and host B.
fn hosts() -> [Host; 2] {
    let addresses = |host: fn(bool) -> IpAddr| [host(false), host(true)];
    let a = Host { name: INTERFACE_A, mac: MAC_A, peer_mac: MAC_B, addresses: addresses(address_a), peers: addresses(address_b) };
    let b = Host { name: INTERFACE_B, mac: MAC_B, peer_mac: MAC_A, addresses: addresses(address_b), peers: addresses(address_a) };
    [a, b]
}

impl Testbed {
    /// Makes the hosts and starts Baton on host A.
    ///
    /// # Errors
    /// If something is missing; the message says what to do.
    pub fn new(settings: &TestbedSettings) -> Result<Testbed> {
        let container = match &settings.control_point {
            Some(ControlPoint { contained: true, .. }) => Some(Container::new().context("a container for host A")?),
            _ => None,
        };
        let host_a = container.as_ref().map_or_else(Namespace::new, Container::network)?;
        let host_b = Namespace::new()?;
        let clean = settings.link == LinkSettings { seed: settings.link.seed, ..LinkSettings::default() };
        let segmentation = settings.segmentation && clean;
        let host_options = TapOptions {
            segmentation: segmentation || settings.offloads.large_sends,
            datagrams: false,
            napi: settings.threaded_napi,
            multi_queue: settings.card,
        };
        // Host B's device takes large sends of UDP, too, as a veth does.
        let options = TapOptions { segmentation, datagrams: segmentation, ..host_options };
        let [a, b] = hosts();
        let devices = if settings.beside {
            let veth = || rtnetlink::add_veth(&rtnetlink::open()?, b.name, a.name, host_a.as_fd());
            make_interface(&host_b, &b, settings, veth)?;
            make_interface(&host_a, &a, settings, || Devices::beside(settings.slots, settings.nics).map_err(io::Error::other))?
        } else {
            let host = make_interface(&host_a, &a, settings, || interface::open_tap(a.name, host_options))?;
            if !settings.gro {
                host_a.run(|| interface::set_gro(a.name, false)).context("turning GRO off")?;
            }
            let wire = if settings.packet_socket {
                make_interface(&host_b, &b, settings, || open_veth(b.name, &host_b, settings.mtu))?
            } else {
                make_interface(&host_b, &b, settings, || interface::open_tap(b.name, options))?
            };
            let card = if settings.card {
                make_card(settings, [&host_a, &host_b], [&host, &wire], [host_options, options])?
            } else {
                Vec::new()
            };
            Devices { host, wire, beside: None, card }
        };
        host_b.run(|| {
            if let Some(frames) = settings.peer_queue {
                interface::set_queue_length(b.name, frames)?;
            }
            for (path, value) in &settings.peer_sysctls {
                std::fs::write(format!("/proc/sys/net/{path}"), value)?;
            }
            Ok(())
        })?;
        if let Some(rules) = &settings.firewall {
            install_firewall(&host_a, rules)?;
        }
        let directory = Directory::new(Kind::Bed)?;
        let nic = nic_settings(settings, segmentation);
        let (owner, devices, nic) = match &settings.control_point {
            None => (None, devices, nic),
            Some(control_point) => {
                let (owner, devices, nic) = hand_over(control_point, devices, nic, settings, directory.path())?;
                (Some(owner), devices, nic)
            }
        };
        let agent = AgentSettings {
            limits: Default::default(),
            crash: settings.crash,
            choose: settings.choose,
            measured: Vec::new(),
            socket: directory.path().join("agent.sock"),
            interface: (!settings.beside).then(|| a.name.into()),
            session_bytes: 2 << 30,
            lingers: false,
            core: settings.agent_core,
            patience: 500_000,
            nic,
            nics: settings.nics,
            devices: settings.devices.clone(),
        };
        let program = program(settings)?;
        let (keeper, parent) = match &container {
            None => {
                let launch = || baton_keeper::launch(Command::new(program), &agent, &devices, None).map_err(io::Error::other);
                host_a.run(launch).context("starting Baton on host A")?
            }
            Some(container) => {
                // The agent's socket is made by the host's root.
                chown(directory.path(), Some(ROOT), Some(ROOT))?;
                baton_keeper::launch(container.command(program), &agent, &devices, None).context("starting Baton on host A")?
            }
        };
        Ok(Testbed { host_a, host_b, owner, keeper, container, parent: Some(parent), directory })
    }

    /// Path at which programs on host A find the agent.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("agent.sock")
    }

    /// Path at which tools find the NIC's owner, if it has one.
    pub fn filter_socket(&self) -> PathBuf {
        self.directory.path().join("filter.sock")
    }

    /// Connects a tool to the agent.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn tool(&self) -> Result<Tool> {
        Tool::connect(&self.socket())
    }
}

/// The settings of the NIC. `segmentation`: the wire takes frames of 64 KB.
fn nic_settings(settings: &TestbedSettings, segmentation: bool) -> NicSettings {
    NicSettings {
        number: 0,
        slots: settings.slots,
        workers: settings.workers,
        cores: settings.nic_cores.clone(),
        card: settings.card,
        copy_engine: settings.copy_engine,
        spin: settings.spin,
        segmentation,
        offloads: settings.offloads,
        beside: settings.beside,
        owned: false,
        addresses: settings.addresses.clone(),
        between_probes: settings.between_probes,
        link: settings.link,
        hash_key: std::array::from_fn(|n| (settings.seed ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    }
}

/// Gives the devices to an owner. Returns it, and what is left for the host: its own interface, the way to the owner,
/// and settings.
fn hand_over(
    control_point: &ControlPoint,
    devices: Devices,
    nic: NicSettings,
    settings: &TestbedSettings,
    directory: &Path,
) -> Result<(Owner, Devices, NicSettings)> {
    let ControlPoint { key, rules, contained: _ } = control_point.clone();
    let owned = OwnerSettings { socket: directory.join("filter.sock"), key, rules, nic: nic.clone() };
    let command = Command::new(program(settings)?);
    let (owner, agents) = Owner::launch(command, &owned, devices.host.as_fd(), devices.wire.as_fd(), &devices.card)?;
    let devices = Devices { host: devices.host, wire: agents, beside: None, card: Vec::new() };
    Ok((owner, devices, NicSettings { owned: true, card: false, addresses: Vec::new(), ..nic }))
}

/// Path of the program that is to be started.
fn program(settings: &TestbedSettings) -> io::Result<PathBuf> {
    settings.program.clone().map_or_else(std::env::current_exe, Ok)
}

fn install_firewall(host: &Namespace, rules: &str) -> Result<()> {
    use std::io::Write;
    let mut command = Command::new("nft");
    command.args(["-f", "-"]).stdin(std::process::Stdio::piped());
    let mut child = host.spawn(&mut command).context("starting nft (Debian's package nftables)")?;
    child.stdin.take().context("nft's input")?.write_all(rules.as_bytes())?;
    if !child.wait()?.success() {
        bail!("nft refused the rules");
    }
    Ok(())
}

impl Drop for Testbed {
    fn drop(&mut self) {
        // The keeper ends when its parent's connection is closed, after everything has been restored.
        self.parent.take();
        let _ = self.keeper.wait();
    }
}

/// A counter of a host's /proc/net/netstat or /proc/net/snmp.
///
/// # Errors
/// If there is none of that name.
pub fn counter(host: &Namespace, table: &str, row: &str, name: &str) -> Result<u64> {
    let text = host.run(|| std::fs::read_to_string(format!("/proc/thread-self/net/{table}")))?;
    let mut rows = text.lines().filter(|line| line.starts_with(row)).map(str::split_whitespace);
    let (mut names, mut values) = rows.next().zip(rows.next()).with_context(|| format!("no {row} rows in {table}"))?;
    let at = names.position(|found| found == name).with_context(|| format!("no counter {name} in {table}"))?;
    Ok(values.nth(at).context("a row is short")?.parse()?)
}

/// Connections between two test hosts: the accepted sockets on host A, the connecting ones on host B.
///
/// # Errors
/// The system's.
pub fn connect_pairs(bed: &Testbed, connections: usize, ipv6: bool) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(ipv6), 0)))?;
    let address = listener.local_addr()?;
    let (mut servers, mut clients) = (Vec::new(), Vec::new());
    for _ in 0..connections {
        let client = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(20))).context("connecting")?;
        let (server, _) = listener.accept()?;
        for side in [&client, &server] {
            side.set_nonblocking(true)?;
            side.set_nodelay(true)?;
            socket::use_cubic(side.as_fd())?;
        }
        servers.push(server);
        clients.push(client);
    }
    Ok((servers, clients))
}
