//! TAP interfaces and packet sockets: the descriptors that backends drive.

use crate::socket::{self, check};
use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const IFF_TAP: i16 = 2;
const IFF_NAPI: i16 = 0x10;
const IFF_NO_PI: i16 = 0x1000;
const IFF_VNET_HDR: i16 = 0x4000;
const IFF_MULTI_QUEUE: i16 = 0x100;
const TUN_F_CSUM: libc::c_ulong = 1;
const TUN_F_TSO4: libc::c_ulong = 2;
const TUN_F_TSO6: libc::c_ulong = 4;
const TUN_F_TSO_ECN: libc::c_ulong = 8;
const TUN_F_USO4: libc::c_ulong = 0x20;
const TUN_F_USO6: libc::c_ulong = 0x40;

/// How a TAP is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct TapOptions {
    /// The kernel may hand over frames of up to 64 KB (large sends) of TCP.
    pub segmentation: bool,
    /// It may also hand over runs of UDP datagrams in one frame (UDP_SEGMENT), if it can: Linux 6.2.
    pub datagrams: bool,
    /// Frames written are received in a NAPI context, which can run in a thread of its own.
    pub napi: bool,
    /// The interface can have several queues; further calls with its name open them.
    pub multi_queue: bool,
}

fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= libc::IFNAMSIZ {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("interface name {name:?} is longer than 15 bytes")));
    }
    for (slot, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *slot = byte as libc::c_char;
    }
    Ok(request)
}

/// Makes a TAP in the calling thread's network namespace, or opens another queue of it. The TAP vanishes when its last
/// descriptor is closed.
///
/// # Errors
/// The failed system call's; if /dev/net/tun is missing or may not be used, the error's message says what to do.
pub fn open_tap(name: &str, options: TapOptions) -> io::Result<OwnedFd> {
    let explain = |error: io::Error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => io::Error::new(
            io::ErrorKind::NotFound,
            "there is no /dev/net/tun: load it (modprobe tun) or, in a container, pass it in (--device /dev/net/tun)",
        ),
        Some(libc::EACCES | libc::EPERM) => io::Error::new(
            io::ErrorKind::PermissionDenied,
            "no right to use /dev/net/tun: run as root, or let users open it (chmod 666 /dev/net/tun, as most distributions \
             have it); a container needs --device /dev/net/tun and --cap-add NET_ADMIN, a unit DeviceAllow=/dev/net/tun rw",
        ),
        Some(libc::ENOTTY | libc::EINVAL | libc::EISDIR) => io::Error::new(
            error.kind(),
            format!("/dev/net/tun is not the TUN device ({error}): make it anew (rm /dev/net/tun; mknod /dev/net/tun c 10 200)"),
        ),
        _ => io::Error::new(error.kind(), format!("/dev/net/tun: {error}")),
    };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")
        .map_err(explain)?;
    let mut request = interface_request(name)?;
    let mut flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    flags |= if options.napi { IFF_NAPI } else { 0 };
    flags |= if options.multi_queue { IFF_MULTI_QUEUE } else { 0 };
    request.ifr_ifru.ifru_flags = flags;
    // SAFETY: TUNSETIFF reads and writes one ifreq.
    check(unsafe { libc::ioctl(file.as_raw_fd(), TUNSETIFF as _, &mut request) }).map_err(explain)?;
    if !(options.datagrams && set_offloads(file.as_fd(), LARGE_TCP | TUN_F_USO4 | TUN_F_USO6).is_ok()) {
        set_large_sends(file.as_fd(), options.segmentation)?;
    }
    Ok(file.into())
}

/// Sets whether the kernel may hand over frames of up to 64 KB at a TAP.
///
/// # Errors
/// The failed system call's.
pub fn set_large_sends(tap: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    set_offloads(tap, if on { LARGE_TCP } else { 0 })
}

const LARGE_TCP: libc::c_ulong = TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;

fn set_offloads(tap: BorrowedFd<'_>, large: libc::c_ulong) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETOFFLOAD as _, TUN_F_CSUM | large) }).map(|_| ())
}

/// Lets a BPF program (a socket filter) choose the queue of every frame that the kernel sends through a TAP.
///
/// # Errors
/// The failed system call's.
pub fn set_steering(tap: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    const TUNSETSTEERINGEBPF: libc::c_ulong = 0x8004_54e0;
    let raw = program.as_raw_fd();
    // SAFETY: TUNSETSTEERINGEBPF reads one int.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETSTEERINGEBPF as _, &raw) }).map(|_| ())
}

/// The name of a TAP descriptor's interface.
///
/// # Errors
/// The failed system call's.
pub fn tap_name(tap: BorrowedFd<'_>) -> io::Result<String> {
    const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
    let mut request = interface_request("")?;
    // SAFETY: TUNGETIFF writes one ifreq.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), TUNGETIFF as _, &mut request) })?;
    Ok(request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect())
}

/// The name of the interface with this index.
///
/// # Errors
/// The failed system call's: `ENODEV` if there is none.
pub fn name_of(index: u32) -> io::Result<String> {
    let socket = socket::stream(false, 0)?;
    Ok(rustix::net::netdevice::index_to_name(socket, index)?)
}

/// Switches an interface's generic receive offload (`ethtool -K NAME gro`).
///
/// # Errors
/// The failed system call's.
pub fn set_gro(name: &str, on: bool) -> io::Result<()> {
    const ETHTOOL_SGRO: u32 = 0x2c;
    set_offload(name, ETHTOOL_SGRO, on)
}

/// Switches an interface's segmentation offloads (`ethtool -K NAME tso gso`).
///
/// # Errors
/// The failed system call's.
pub fn set_segmentation(name: &str, on: bool) -> io::Result<()> {
    const ETHTOOL_STSO: u32 = 0x1f;
    const ETHTOOL_SGSO: u32 = 0x24;
    set_offload(name, ETHTOOL_STSO, on)?;
    set_offload(name, ETHTOOL_SGSO, on)
}

/// Whether an interface takes VLAN tags out of the frames that it receives (`ethtool -k NAME`: rx-vlan-offload).
///
/// # Errors
/// The failed system call's.
pub fn strips_tags(name: &str) -> io::Result<bool> {
    const ETHTOOL_GFLAGS: u32 = 0x25;
    const RXVLAN: u32 = 1 << 8;
    Ok(ethtool(name, ETHTOOL_GFLAGS, 0)? & RXVLAN != 0)
}

/// Switches one offload by the number of its ethtool command.
fn set_offload(name: &str, command: u32, on: bool) -> io::Result<()> {
    ethtool(name, command, u32::from(on)).map(|_| ())
}

/// Runs an ethtool command that takes or gives one number, and returns that.
fn ethtool(name: &str, command: u32, number: u32) -> io::Result<u32> {
    const SIOCETHTOOL: libc::c_ulong = 0x8946;
    let mut value = [command, number];
    let mut request = interface_request(name)?;
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let socket = socket::stream(false, 0)?;
    // SAFETY: the request points to an ethtool_value that lives through the call.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), SIOCETHTOOL as _, &mut request) })?;
    Ok(value[1])
}

/// Sets the greatest number of frames that wait at an interface for its driver (`ip link set NAME txqueuelen`); at a
/// TAP: that wait to be read.
///
/// # Errors
/// The failed system call's.
pub fn set_queue_length(name: &str, frames: u16) -> io::Result<()> {
    let mut request = interface_request(name)?;
    request.ifr_ifru.ifru_metric = frames.into();
    let socket = socket::stream(false, 0)?;
    // SAFETY: SIOCSIFTXQLEN reads one ifreq, whose length is in the field of the metric.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFTXQLEN as _, &mut request) }).map(|_| ())
}

/// Makes an interface's NAPI run in a kernel thread of its own (`/sys/class/net/NAME/threaded`, in the calling thread's
/// namespace if /sys is mounted for it). Returns whether it worked.
pub fn set_threaded_napi(name: &str) -> bool {
    std::fs::write(format!("/sys/class/net/{name}/threaded"), "1").is_ok()
}

/// Opens a packet socket on an interface, with virtio headers (PACKET_VNET_HDR), for all protocols.
///
/// # Errors
/// The failed system call's.
pub fn open_packet_socket(interface: u32) -> io::Result<OwnedFd> {
    open_filtered_packet_socket(interface, true, |_| Ok(()))
}

/// As [`open_packet_socket`], on all interfaces if the index is 0, with a filter that `attach` sets before the socket
/// receives anything.
///
/// # Errors
/// The failed system call's.
pub fn open_filtered_packet_socket(
    interface: u32,
    ignore_outgoing: bool,
    attach: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    let fd = open_deaf_packet_socket(ignore_outgoing, attach)?;
    receive_at(fd.as_fd(), interface)?;
    Ok(fd)
}

/// As [`open_filtered_packet_socket`], but it receives nothing before [`receive_at`], and costs no frame of the host
/// anything.
///
/// # Errors
/// The failed system call's.
pub fn open_deaf_packet_socket(
    ignore_outgoing: bool,
    attach: impl FnOnce(BorrowedFd<'_>) -> io::Result<()>,
) -> io::Result<OwnedFd> {
    const PACKET_VNET_HDR: i32 = 15;
    // With protocol 0 it receives nothing until it is bound.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let fd = rustix::net::socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
    let set = |option, value| socket::set(fd.as_fd(), libc::SOL_PACKET, option, value);
    set(PACKET_VNET_HDR, 1)?;
    self::ignore_outgoing(fd.as_fd(), ignore_outgoing)?;
    set_socket_recv_buffer_size_force(&fd, 8 << 20)?;
    set_socket_send_buffer_size_force(&fd, 8 << 20)?;
    attach(fd.as_fd())?;
    Ok(fd)
}

/// Makes a packet socket receive at an interface, or at all interfaces if the index is 0. Nothing changes for a socket
/// that does so already.
///
/// # Errors
/// The failed system call's.
pub fn receive_at(socket: BorrowedFd<'_>, interface: u32) -> io::Result<()> {
    // SAFETY: sockaddr_ll is plain data, for which zero is a value.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = interface as i32;
    // SAFETY: the pointer and length describe `address`.
    check(unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t)
    })
    .map(|_| ())
}

/// Sets whether a packet socket receives no copies of the frames that this host sends. It can be changed at any time.
///
/// # Errors
/// The failed system call's.
pub fn ignore_outgoing(socket: BorrowedFd<'_>, ignore: bool) -> io::Result<()> {
    const PACKET_IGNORE_OUTGOING: i32 = 23;
    socket::set(socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, i32::from(ignore))
}
