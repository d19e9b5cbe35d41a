//! Starts a Baton: its devices and its keeper.

use anyhow::{Context, Result, bail};
use baton_agent::AgentSettings;
use baton_linux::control::Channel;
use baton_linux::interface::{self, TapOptions};
use baton_linux::{packet_ring, process, rtnetlink, settings};
use baton_log::warning;
use baton_steering::Steering;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

/// Descriptors of the devices between a NIC and its host's network.
#[derive(Debug)]
pub struct Devices {
    /// The TAP that is the kernel's interface; beside the kernel, the packet socket that receives what the kernel
    /// sends.
    pub host: OwnedFd,
    /// The wire; beside the kernel, the packet socket on all devices.
    pub wire: OwnedFd,
    /// Descriptors that only a NIC beside the kernel needs.
    pub beside: Option<BesideDevices>,
    /// Descriptors that only a NIC with several workers needs: the card's registers, and for each worker but the first
    /// a queue of the host's interface and one of the wire's.
    pub card: Vec<OwnedFd>,
}

/// Descriptors that NICs beside the kernel need.
#[derive(Debug)]
pub struct BesideDevices {
    injector: OwnedFd,
    injector_link: OwnedFd,
    steering: Steering,
    /// The two packet sockets of each NIC but the first.
    further: Vec<[OwnedFd; 2]>,
}

/// Sessions for messages that there is room for in the steering, besides the connections.
const MESSAGE_SESSIONS: u32 = 1024;

impl Devices {
    /// Makes those of `nics` NICs beside the kernel, for this many connections each, in the calling thread's network
    /// namespace.
    ///
    /// # Errors
    /// With what is missing, and what to do about it.
    pub fn beside(connections: usize, nics: usize) -> Result<Devices> {
        let steering = Steering::new((connections * nics) as u32 + MESSAGE_SESSIONS)?;
        let sockets = |nic: usize| packet_sockets(&steering, (nics > 1).then_some(nic as u32)).context("AF_PACKET (CAP_NET_RAW)");
        let [host, wire] = sockets(0)?;
        let further = (1..nics).map(sockets).collect::<Result<Vec<_>>>()?;
        let injector = interface::open_tap("baton%d", TapOptions { segmentation: true, ..TapOptions::default() })?;
        let name = interface::tap_name(injector.as_fd())?;
        // The host's own packets are not to be sent through it.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        let routes = rtnetlink::open()?;
        let index = rtnetlink::link(&routes, &name)?.index;
        let injector_link = steering.make_injector(index)?;
        rtnetlink::set_up(&routes, index, None, None)?;
        let beside = BesideDevices { injector, injector_link, steering, further };
        Ok(Devices { host, wire, beside: Some(beside), card: Vec::new() })
    }
}

/// The two packet sockets of a NIC: for what the kernel sends, and for the wire. They receive what is steered to this
/// NIC, or to any.
fn packet_sockets(steering: &Steering, nic: Option<u32>) -> io::Result<[OwnedFd; 2]> {
    let host = interface::open_deaf_packet_socket(false, |fd| {
        baton_linux::socket::set(fd, 1, SO_MARK, baton_steering::MARK as i32)?;
        set_up_rings(fd, false);
        steering.filter_outgoing(fd, nic)
    });
    let wire = interface::open_deaf_packet_socket(true, |fd| {
        baton_linux::socket::set(fd, 1, SO_MARK, baton_steering::MARK as i32)?;
        set_up_rings(fd, true);
        steering.filter_incoming(fd, nic)
    });
    Ok([host?, wire?])
}

const SO_MARK: i32 = 36;

/// Gives the socket its rings. Without them, which need some megabytes, each frame costs a system call.
fn set_up_rings(socket: BorrowedFd<'_>, sending: bool) {
    if let Err(error) = packet_ring::set_up(socket, sending) {
        warning!(
            [] "frames are received and sent one by one: no rings ({error})";
            "free some memory, and restart Baton"
        );
    }
}

/// Starts a keeper in the calling thread's network namespace, and waits until programs can connect. It ends when the
/// returned channel is closed; or, if `process` (a pidfd) is given, when that process and the last session have ended.
///
/// # Errors
/// If it does not start, with how its keeper has ended; of an orphan's end nothing is known. It has written the cause
/// to the command's standard error.
pub fn launch(
    mut command: Command,
    settings: &AgentSettings,
    devices: &Devices,
    process: Option<BorrowedFd<'_>>,
) -> Result<(Child, Channel)> {
    let (parent, theirs) = Channel::pair()?;
    command.arg("keeper-process");
    settings::send(&parent, baton_protocol::VERSION, settings)?;
    let mut descriptors = vec![devices.host.as_fd(), devices.wire.as_fd(), theirs.as_fd()];
    if let Some(beside) = &devices.beside {
        descriptors.extend([beside.injector.as_fd(), beside.injector_link.as_fd()]);
        descriptors.extend(beside.steering.fds());
        descriptors.extend(beside.further.iter().flatten().map(AsFd::as_fd));
    }
    descriptors.extend(devices.card.iter().map(AsFd::as_fd));
    descriptors.extend(process);
    process::inherit(&mut command, &descriptors, false);
    // In another process group: when Ctrl-C interrupts the starter, the keeper still restores everything.
    if process.is_some() {
        process::orphan(&mut command);
    } else {
        command.process_group(0);
    }
    let mut keeper = command.spawn().context("starting the keeper")?;
    drop(theirs);
    match parent.receive::<bool>() {
        Ok(_) => Ok((keeper, parent)),
        Err(error) => match keeper.wait() {
            Ok(ended) if process.is_none() => bail!("Baton did not start: its keeper has ended ({ended})"),
            _ if error.kind() == io::ErrorKind::UnexpectedEof => bail!("Baton did not start"),
            _ => bail!("Baton did not start ({error})"),
        },
    }
}
