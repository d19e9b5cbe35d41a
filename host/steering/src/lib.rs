//! Steering for the *beside* shape: the kernel keeps its devices, and the NIC shares them.
//!
//! One map holds the flows that the NIC owns (4-tuples, with the device of those that are link-local or bound to one),
//! the addresses of its sessions for messages (RMPP), and the endpoints at which it makes connections; another the
//! devices at which the kernel accepts packets whose answers leave by other devices; a third the 4-tuples of
//! handshakes, which the program at a device's ingress enters itself. Four small programs use them. Two at the devices
//! (tc) keep the kernel from receiving and from sending those connections' frames; two at packet sockets let the NIC
//! receive exactly those. A fifth gives frames to the kernel as if a device had received them. All of it exists as long
//! as a process holds its descriptors.

mod assembler;
mod bpf;
mod btf;
mod bypass;
mod cgroups;
pub mod front;
mod interrupts;
mod programs;
mod ring_buffer;
pub mod rss;

use baton_wire::{Endpoint, Flow};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use bpf::supported;
pub use bypass::{READ_EVERY, SocketBypass, SocketEvent};
pub use cgroups::{Group, programs_of};
pub use interrupts::{InterruptTrace, ProcessorTimes, RunTimes};

/// What happens to a connection's frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Steer {
    /// The NIC gets copies of the frames that come in, and of those that the kernel sends.
    Mirror = 1,
    /// The NIC gets the frames that come in, the kernel gets none, and none of the kernel's leave.
    Steal = 2,
}

/// What stands in the map for a session for messages, which receives datagrams at `local` from any address.
pub fn messages_flow(local: Endpoint) -> Flow {
    Flow { local, remote: Endpoint { address: [0; 16], port: 0 }, device: 0 }
}

/// What stands in the map for a listener whose connections the NIC makes: the remote endpoint is none that a client can
/// have, and differs from that of [`messages_flow`].
pub fn listener_flow(local: Endpoint) -> Flow {
    Flow { local, remote: Endpoint { address: [0; 16], port: LISTENER_PORT }, device: 0 }
}

const LISTENER_PORT: u16 = 1;

/// Handshakes that are remembered: of more, the oldest are forgotten, so that a flood of SYNs takes no more memory.
const HANDSHAKES: u32 = 1 << 16;

/// Mark on frames that the NIC sends, which distinguishes them from the kernel's.
pub const MARK: u32 = 0x4e49_4301;

/// Mark on them once they have a route, on the loopback device.
const ROUTED: u32 = 0x4e49_4302;

/// Mark on frames that are injected: the kernel gets them whatever the steering does with their connection.
const INJECTED: u32 = 0x4e49_4303;

/// Mark on frames that large receive in front of a device gives to it ([`front`]): they are not taken again.
const AGGREGATED: u32 = 0x4e49_4304;

/// Index of the loopback device in every network namespace.
pub const LOOPBACK: u32 = 1;

/// Descriptors of a steering, in the order in which [`Steering::from_fds`] takes them.
pub const DESCRIPTORS: usize = 6;

/// Devices at which a connection can be received, besides those in the map of devices and the one by which its frames
/// leave.
pub const FURTHER: usize = 5;

/// Entries of the map of devices.
const MOST_DEVICES: u32 = 4096;

/// Devices by which a connection's frames leave, and at which its peer's are received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Path {
    /// The device by which they leave, and at which they are received in any case.
    pub leaves_by: u32,
    /// They are received at every device in the map of devices, too: the socket is bound to none.
    pub anywhere: bool,
    /// They are also received at these devices; 0 for none.
    pub also_at: [u32; FURTHER],
    /// Number of the NIC that receives them.
    pub nic: u32,
}

/// Families for which the kernel accepts a connection's packets at a device by which its own do not leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepts {
    /// IPv4: there is no strict reverse path filter.
    pub v4: bool,
    /// IPv6.
    pub v6: bool,
}

const V4: u32 = 1;
const V6: u32 = 2;

/// The maps, and the two programs that are attached to devices.
#[derive(Debug)]
pub struct Steering {
    flows: OwnedFd,
    devices: OwnedFd,
    handshakes: OwnedFd,
    /// Two words: whether there are listeners, and whether there has been a flow that is bound to a device and not
    /// link-local.
    kinds: OwnedFd,
    ingress: OwnedFd,
    egress: OwnedFd,
}

/// The two programs at one device. They are detached when this is dropped everywhere.
#[derive(Debug)]
pub struct Attached {
    /// Descriptors of the two links, ingress first.
    pub links: [OwnedFd; 2],
}

impl Steering {
    /// Makes a map for so many connections, and loads the programs.
    ///
    /// # Errors
    /// With what to do about it, if this process may not load BPF programs; else the system's.
    pub fn new(connections: u32) -> io::Result<Steering> {
        let flows = bpf::create_map(programs::KEY_BYTES as u32, programs::VALUE_BYTES as u32, connections.max(1))?;
        let devices = bpf::create_map(4, programs::DEVICE_BYTES as u32, MOST_DEVICES)?;
        let kind = bpf::MapKind::LeastRecentlyUsedHash;
        let handshakes = bpf::create_map_of(kind, programs::KEY_BYTES as u32, programs::VALUE_BYTES as u32, HANDSHAKES)?;
        let kinds = bpf::create_map_of(bpf::MapKind::Array, 4, 4, 2)?;
        let maps = programs::Maps::of([&flows, &devices, &handshakes, &kinds]);
        let ingress = bpf::load(bpf::ProgramKind::Device, &programs::ingress(maps))?;
        let egress = bpf::load(bpf::ProgramKind::Device, &programs::egress(maps))?;
        Ok(Steering { flows, devices, handshakes, kinds, ingress, egress })
    }

    /// A steering that another process made.
    pub fn from_fds([flows, devices, handshakes, kinds, ingress, egress]: [OwnedFd; DESCRIPTORS]) -> Steering {
        Steering { flows, devices, handshakes, kinds, ingress, egress }
    }

    /// The same maps and programs, for another thread.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn try_clone(&self) -> io::Result<Steering> {
        let [flows, devices, handshakes, kinds, ingress, egress] = self.fds().map(|fd| fd.try_clone_to_owned());
        Ok(Steering {
            flows: flows?,
            devices: devices?,
            handshakes: handshakes?,
            kinds: kinds?,
            ingress: ingress?,
            egress: egress?,
        })
    }

    /// Its descriptors, for another process.
    pub fn fds(&self) -> [BorrowedFd<'_>; DESCRIPTORS] {
        let Steering { flows, devices, handshakes, kinds, ingress, egress } = self;
        [flows, devices, handshakes, kinds, ingress, egress].map(AsFd::as_fd)
    }

    /// Attaches the programs to a device of the calling thread's network namespace. For each of the two the kernel
    /// waits until no processor is in what was there before, some milliseconds.
    ///
    /// # Errors
    /// The failed system call's; `EINVAL` from kernels before 6.6, which have no tcx links.
    pub fn attach(&self, interface: u32) -> io::Result<Attached> {
        let ingress = bpf::attach_to_device(self.ingress.as_fd(), interface, bpf::Hook::Ingress)?;
        let egress = bpf::attach_to_device(self.egress.as_fd(), interface, bpf::Hook::Egress)?;
        Ok(Attached { links: [ingress, egress] })
    }

    /// Attaches the injecting program to a device: a frame that this device receives counts as received by the device
    /// that the frame names.
    ///
    /// # Errors
    /// See [`Steering::attach`].
    pub fn make_injector(&self, interface: u32) -> io::Result<OwnedFd> {
        let program = bpf::load(bpf::ProgramKind::Device, &programs::inject(self.devices.as_fd()))?;
        bpf::attach_to_device(program.as_fd(), interface, bpf::Hook::Ingress)
    }

    /// Sets a packet socket's filter, so that it receives what comes in for a NIC's connections, and all ICMP. None:
    /// for all connections, where there is one NIC.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn filter_incoming(&self, socket: BorrowedFd<'_>, nic: Option<u32>) -> io::Result<()> {
        let program = programs::incoming(self.maps(), nic);
        bpf::attach_to_socket(&bpf::load(bpf::ProgramKind::Socket, &program)?, socket)
    }

    /// Sets a packet socket's filter, so that it receives what the kernel sends for a NIC's connections that are being
    /// mirrored.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn filter_outgoing(&self, socket: BorrowedFd<'_>, nic: Option<u32>) -> io::Result<()> {
        bpf::attach_to_socket(&bpf::load(bpf::ProgramKind::Socket, &programs::outgoing(self.maps(), nic))?, socket)
    }

    fn maps(&self) -> programs::Maps<'_> {
        programs::Maps::of([&self.flows, &self.devices, &self.handshakes, &self.kinds])
    }

    /// Sets what happens to a connection's frames. The first of those that are bound to a device makes the programs
    /// look for such flows, which costs each frame one more search from then on.
    ///
    /// # Errors
    /// The failed system call's; `E2BIG` if the map is full.
    pub fn set(&self, flow: &Flow, path: &Path, steer: Steer) -> io::Result<()> {
        if flow.device != 0 && !flow.is_link_local() && !self.has_bound() {
            bpf::update(self.kinds.as_fd(), &programs::BOUND.to_ne_bytes(), &1u32.to_ne_bytes())?;
        }
        let family = if flow.is_v4() { V4 } else { V6 };
        let words = [steer as u32, path.leaves_by, if path.anywhere { family } else { 0 }].into_iter().chain(path.also_at);
        let words = words.chain([path.nic]);
        let mut value = [0u8; programs::VALUE_BYTES];
        for (bytes, word) in value.chunks_exact_mut(4).zip(words) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        bpf::update(self.flows.as_fd(), &key(flow), &value)
    }

    /// Sets for which families connections are received at a device by which their frames do not leave, and the
    /// device's address, to which injected frames are sent.
    ///
    /// # Errors
    /// The failed system call's; `E2BIG` if the map is full.
    pub fn accept_at(&self, device: u32, accepts: Accepts, address: [u8; 6]) -> io::Result<()> {
        let families = if accepts.v4 { V4 } else { 0 } | if accepts.v6 { V6 } else { 0 };
        let mut value = [0u8; programs::DEVICE_BYTES];
        value[..4].copy_from_slice(&families.to_ne_bytes());
        value[4..10].copy_from_slice(&address);
        bpf::update(self.devices.as_fd(), &device.to_ne_bytes(), &value)
    }

    /// Removes a device that does not exist any more.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn forget_device(&self, device: u32) -> io::Result<()> {
        bpf::delete(self.devices.as_fd(), &device.to_ne_bytes())
    }

    /// Removes a connection: the kernel alone handles its frames.
    ///
    /// # Errors
    /// The failed system call's. A flow that is not in the map is no error.
    pub fn remove(&self, flow: &Flow) -> io::Result<()> {
        bpf::delete(self.flows.as_fd(), &key(flow))
    }

    /// Sets whether there are listeners ([`listener_flow`]). Without any, frames of the kernel's connections cost no
    /// search for their handshake. The handshakes known so far are forgotten when there are none any more.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn set_listening(&self, listening: bool) -> io::Result<()> {
        if !listening {
            bpf::clear(self.handshakes.as_fd(), programs::BYTES, |_| true);
        }
        bpf::update(self.kinds.as_fd(), &programs::LISTENERS.to_ne_bytes(), &u32::from(listening).to_ne_bytes())
    }

    /// Forgets the handshakes at these endpoints: the kernel gets what their clients send. However many endpoints there
    /// are, all handshakes are looked at once.
    pub fn forget_handshakes(&self, locals: &[Endpoint]) {
        let parts: BTreeSet<[u8; 18]> = locals.iter().map(|local| local_part(&key(&listener_flow(*local)))).collect();
        let is_there = |key: &[u8]| parts.contains(&local_part(key));
        bpf::clear(self.handshakes.as_fd(), programs::BYTES, is_there);
    }

    /// Forgets a handshake, since its connection is the kernel's.
    ///
    /// # Errors
    /// The failed system call's. One that is not known is no error.
    pub fn forget_handshake(&self, flow: &Flow) -> io::Result<()> {
        bpf::delete(self.handshakes.as_fd(), &key(flow))
    }

    /// Whether there may be flows that are bound to a device and not link-local.
    pub fn has_bound(&self) -> bool {
        let mut bound = [0; 4];
        bpf::read(self.kinds.as_fd(), &programs::BOUND.to_ne_bytes(), &mut bound) && bound != [0; 4]
    }

    /// Whether a flow is steered.
    pub fn has(&self, flow: &Flow) -> bool {
        bpf::has(self.flows.as_fd(), &key(flow), programs::VALUE_BYTES)
    }

    /// What happens to a flow's frames. None if it is not steered.
    pub fn steer_of(&self, flow: &Flow) -> Option<Steer> {
        let mut value = [0; programs::VALUE_BYTES];
        let found = bpf::read(self.flows.as_fd(), &key(flow), &mut value);
        let steals = value[..4] == (Steer::Steal as u32).to_ne_bytes();
        found.then_some(if steals { Steer::Steal } else { Steer::Mirror })
    }

    /// The flows that are steered, [`messages_flow`]s and [`listener_flow`]s among them.
    pub fn flows(&self) -> Vec<Flow> {
        let mut flows = Vec::new();
        bpf::for_each_key(self.flows.as_fd(), programs::BYTES, |key| flows.extend(key.try_into().map(flow_of)));
        flows
    }

    /// Number of flows that are steered.
    pub fn count(&self) -> usize {
        bpf::count(self.flows.as_fd(), programs::BYTES)
    }
}

/// The local address and port in a key.
fn local_part(key: &[u8]) -> [u8; 18] {
    let mut part = [0; 18];
    part[..16].copy_from_slice(&key[..16]);
    part[16..].copy_from_slice(&key[32..34]);
    part
}

/// A flow in the byte order in which the programs read it from a frame: see [`ends`]; then the device.
fn key(flow: &Flow) -> [u8; programs::KEY_BYTES] {
    let mut key = [0; programs::KEY_BYTES];
    key[..programs::ENDS].copy_from_slice(&ends(flow));
    key[programs::ENDS..].copy_from_slice(&flow.device.to_ne_bytes());
    key
}

/// The flow with this [`key`].
fn flow_of(key: &[u8; programs::KEY_BYTES]) -> Flow {
    let end = |address: usize, port: usize| Endpoint {
        address: std::array::from_fn(|byte| key[address + byte]),
        port: u16::from_be_bytes([key[port], key[port + 1]]),
    };
    let device = u32::from_ne_bytes(std::array::from_fn(|byte| key[programs::ENDS + byte]));
    Flow { local: end(0, 32), remote: end(16, 34), device }
}

/// A 4-tuple in that order: addresses, then ports in network order.
fn ends(flow: &Flow) -> [u8; programs::ENDS] {
    let mut key = [0; programs::ENDS];
    key[..16].copy_from_slice(&flow.local.address);
    key[16..32].copy_from_slice(&flow.remote.address);
    key[32..34].copy_from_slice(&flow.local.port.to_be_bytes());
    key[34..].copy_from_slice(&flow.remote.port.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_has_one_key() {
        let local = Endpoint::v6(std::array::from_fn(|byte| byte as u8 + 1), 0x1234);
        for remote in [Endpoint::v4([10, 0, 0, 1], 80), Endpoint::v6([0xfe; 16], 65_535)] {
            let flow = Flow { local, remote, device: 0x0102_0304 };
            assert_eq!(flow_of(&key(&flow)), flow);
        }
    }

    /// Whether this test may load BPF programs.
    fn may_load() -> bool {
        let Err(error) = supported() else { return true };
        eprintln!("skipped: {error}");
        assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
        false
    }

    /// Needs the right to load BPF programs.
    #[test]
    fn the_kernel_takes_the_programs() {
        if !may_load() {
            return;
        }
        let steering = Steering::new(8).unwrap();
        let (devices, maps) = (steering.devices.as_fd(), steering.maps());
        for nic in [None, Some(1)] {
            for way in [programs::incoming(maps, nic), programs::outgoing(maps, nic)] {
                bpf::load(bpf::ProgramKind::Socket, &way).unwrap();
            }
        }
        bpf::load(bpf::ProgramKind::Device, &programs::inject(devices)).unwrap();
        let flow = Flow { local: Endpoint::v4([127, 0, 0, 1], 1), remote: Endpoint::v4([127, 0, 0, 1], 2), device: 0 };
        let path = Path { leaves_by: 1, ..Path::default() };
        steering.set(&flow, &path, Steer::Mirror).unwrap();
        steering.set(&flow, &path, Steer::Steal).unwrap();
        steering.set(&flow.reversed(), &path, Steer::Steal).unwrap();
        steering.accept_at(7, Accepts { v4: true, v6: true }, [2; 6]).unwrap();
        steering.forget_device(7).unwrap();
        assert_eq!(steering.count(), 2);
        assert!(steering.has(&flow));
        steering.remove(&flow).unwrap();
        steering.remove(&flow).unwrap();
        assert!(!steering.has(&flow) && steering.has(&flow.reversed()));
        assert_eq!(steering.count(), 1);
        assert!(!steering.has_bound());
        steering.set(&flow.by(7), &path, Steer::Steal).unwrap();
        assert!(steering.has(&flow.by(7)) && !steering.has(&flow) && !steering.has(&flow.by(8)) && steering.has_bound());
        steering.remove(&flow.by(7)).unwrap();
        steering.set_listening(true).unwrap();
        steering.forget_handshake(&flow).unwrap();
        let elsewhere = Flow { local: Endpoint::v4([127, 0, 0, 3], 1), ..flow };
        let three = [flow, flow.reversed(), elsewhere];
        three.iter().for_each(|one| bpf::update(steering.handshakes.as_fd(), &key(one), &[0; programs::VALUE_BYTES]).unwrap());
        steering.forget_handshakes(&[flow.local, flow.remote]);
        let known = |one: Flow| bpf::has(steering.handshakes.as_fd(), &key(&one), programs::VALUE_BYTES);
        assert_eq!(three.map(known), [false, false, true]);
        steering.set(&listener_flow(flow.local), &path, Steer::Steal).unwrap();
        steering.set(&messages_flow(flow.local), &path, Steer::Steal).unwrap();
        let mut all = vec![flow.reversed(), listener_flow(flow.local), messages_flow(flow.local)];
        all.sort_unstable();
        let mut found = steering.flows();
        found.sort_unstable();
        assert_eq!(found, all);
        steering.set(&flow, &path, Steer::Mirror).unwrap();
        let steers = [flow, flow.reversed(), flow.by(7)].map(|one| steering.steer_of(&one));
        assert_eq!(steers, [Some(Steer::Mirror), Some(Steer::Steal), None]);
        steering.set_listening(false).unwrap();
    }

    /// Needs that right, too. In a flood of SYNs handshakes take the places of others, also of the one that was looked
    /// at last: each is looked at once, and that comes to an end.
    #[test]
    fn handshakes_are_looked_at_once_in_a_flood_of_them() {
        const MANY: u32 = 10_000;
        if !may_load() {
            return;
        }
        let steering = Steering::new(8).unwrap();
        let (map, local) = (steering.handshakes.as_fd(), Endpoint::v4([127, 0, 0, 1], 80));
        let of = |number: u32| {
            let [_, _, high, low] = number.to_be_bytes();
            key(&Flow { local, remote: Endpoint::v4([10, 0, high, low], 4000), device: 0 })
        };
        let enter = |number| bpf::update(map, &of(number), &[0; programs::VALUE_BYTES]).unwrap();
        (0..MANY).for_each(enter);
        let mut found = Vec::new();
        bpf::for_each_key(map, programs::BYTES, |one| found.push(one.to_vec()));
        found.sort_unstable();
        let mut all: Vec<Vec<u8>> = (0..MANY).map(|number| of(number).to_vec()).collect();
        all.sort_unstable();
        assert!(found == all, "{} are shown", found.len());
        let mut looked_at = 0;
        bpf::for_each_key(map, programs::BYTES, |one| {
            bpf::delete(map, one).unwrap();
            enter(MANY + looked_at);
            looked_at += 1;
        });
        assert!((MANY..3 * MANY).contains(&looked_at), "{looked_at}");
        steering.forget_handshakes(&[local]);
        assert_eq!(bpf::count(map, programs::BYTES), 0);
    }
}
