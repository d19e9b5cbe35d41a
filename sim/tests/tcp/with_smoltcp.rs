//! Interoperation with smoltcp, another TCP: both ways of opening, data both ways, with and without losses.

use baton_sim::link::{Impairments, Link};
use baton_sim::stream;
use baton_tcp::{Config, Connection, Events, Instant, Segment, State, Transmit};
use baton_wire::frame::{self, Header, Link as Addresses, MAX_HEADER, Template};
use baton_wire::{Endpoint, Flow, TcpFrame};
use smoltcp::iface::{Config as InterfaceConfig, Interface, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant as SmolInstant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr};
use std::collections::VecDeque;

const TOTAL: u64 = 400_000;
const ETHERNET: usize = 14;

#[derive(Default)]
struct Queues {
    incoming: VecDeque<Vec<u8>>,
    outgoing: VecDeque<Vec<u8>>,
}

struct Incoming(Vec<u8>);
struct Outgoing<'a>(&'a mut VecDeque<Vec<u8>>);

impl RxToken for Incoming {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, work: F) -> R {
        work(&self.0)
    }
}

impl TxToken for Outgoing<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, work: F) -> R {
        let mut packet = vec![0; length];
        let result = work(&mut packet);
        self.0.push_back(packet);
        result
    }
}

impl Device for Queues {
    type RxToken<'a> = Incoming;
    type TxToken<'a> = Outgoing<'a>;

    fn receive(&mut self, _: SmolInstant) -> Option<(Incoming, Outgoing<'_>)> {
        self.incoming.pop_front().map(|packet| (Incoming(packet), Outgoing(&mut self.outgoing)))
    }

    fn transmit(&mut self, _: SmolInstant) -> Option<Outgoing<'_>> {
        Some(Outgoing(&mut self.outgoing))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = 1500;
        capabilities
    }
}

/// Our end: a connection, its template, receive memory.
struct Ours {
    connection: Connection,
    template: Template,
    memory: Vec<u8>,
    first: u32,
    queued: u64,
    verified: u64,
    fin: bool,
}

impl Ours {
    fn packet(&self, transmit: &Transmit) -> Vec<u8> {
        let header = Header { ecn: 0, ..transmit.header(0) };
        let length = transmit.length as usize;
        let mut bytes = vec![0; MAX_HEADER + length];
        let headers = self.template.emit(&header, length, &mut bytes);
        bytes.truncate(headers + length);
        let back = u64::from(self.first.wrapping_add(self.queued as u32).wrapping_sub(transmit.seq));
        stream::fill(1, self.queued.wrapping_sub(back), &mut bytes[headers..]);
        assert!(frame::finish_checksum(&mut bytes, self.template.tcp_offset(), 16));
        bytes.split_off(ETHERNET)
    }

    fn receive(&mut self, parsed: &TcpFrame, bytes: &[u8], now: Instant) {
        let received = self.connection.input(&Segment::from(parsed), now);
        let mask = self.memory.len() - 1;
        let placed = &parsed.payload(bytes)[received.skip as usize..][..received.place as usize];
        for (at, byte) in placed.iter().enumerate() {
            self.memory[received.place_seq.wrapping_add(at as u32) as usize & mask] = *byte;
        }
        self.fin |= received.events.contains(Events::FIN);
        let (readable, seq) = (self.connection.readable(), self.connection.rcv_read());
        for at in 0..readable {
            let byte = self.memory[seq.wrapping_add(at) as usize & mask];
            assert_eq!(byte, stream::byte(2, self.verified), "wrong byte at {}", self.verified);
            self.verified += 1;
        }
        assert!(self.connection.consumed(readable));
    }
}

fn exchange(we_connect: bool, impairments: Impairments) {
    let flow = Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 };
    let config = Config { receive_buffer: 1 << 17, ..Config::default() };
    let mut now = Instant(5_000_000);
    let mut device = Queues::default();
    let smol_now = |now: Instant| SmolInstant::from_micros(now.0 as i64);
    let mut interface = Interface::new(InterfaceConfig::new(HardwareAddress::Ip), &mut device, smol_now(now));
    interface.update_ip_addrs(|addresses| addresses.push(IpCidr::new(IpAddress::v4(10, 0, 0, 2), 24)).expect("room"));
    let buffer = || tcp::SocketBuffer::new(vec![0; 1 << 17]);
    let mut sockets = SocketSet::new(Vec::new());
    let handle = sockets.add(tcp::Socket::new(buffer(), buffer()));
    let ours = |connection| Ours {
        connection,
        template: Template::new(&flow, &Addresses { ttl: 64, ..Addresses::default() }, true),
        memory: vec![0; 1 << 17],
        first: 78,
        queued: 0,
        verified: 0,
        fin: false,
    };
    let mut end = None;
    if we_connect {
        sockets.get_mut::<tcp::Socket>(handle).listen(4000).expect("listen");
        end = Some(ours(Connection::connect(config, 77, 5, now)));
    } else {
        let socket = sockets.get_mut::<tcp::Socket>(handle);
        socket.connect(interface.context(), (IpAddress::v4(10, 0, 0, 1), 80), 4000).expect("connect");
    }
    let mut links = [Link::new(impairments, 1), Link::new(impairments, 2)];
    let (mut smol_sent, mut smol_verified) = (0u64, 0u64);
    let deadline = now.after(600_000_000);
    while now < deadline {
        interface.poll(smol_now(now), &mut device, &mut sockets);
        let socket = sockets.get_mut::<tcp::Socket>(handle);
        while smol_sent < TOTAL && socket.can_send() {
            let mut piece = vec![0; (TOTAL - smol_sent).min(4096) as usize];
            stream::fill(2, smol_sent, &mut piece);
            let sent = socket.send_slice(&piece).expect("send") as u64;
            smol_sent += sent;
            if sent == 0 {
                break;
            }
        }
        while socket.can_recv() {
            let count = socket
                .recv(|bytes| {
                    assert_eq!(stream::mismatches(1, smol_verified, bytes), 0, "wrong bytes at smoltcp");
                    (bytes.len(), bytes.len())
                })
                .expect("receive");
            smol_verified += count as u64;
        }
        if smol_sent == TOTAL && smol_verified == TOTAL {
            socket.close();
        }
        interface.poll(smol_now(now), &mut device, &mut sockets);
        while let Some(packet) = device.outgoing.pop_front() {
            links[1].push(packet, now.0);
        }
        if let Some(end) = &mut end {
            let open = !matches!(end.connection.state(), State::SynSent | State::SynReceived);
            if open && end.queued < TOTAL {
                assert!(end.connection.queue(TOTAL as u32));
                end.queued = TOTAL;
                end.connection.shutdown();
            }
            while let Some(transmit) = end.connection.poll_transmit(now, 0) {
                let packet = end.packet(&transmit);
                links[0].push(packet, now.0);
            }
            if end.verified == TOTAL && smol_verified == TOTAL && end.fin {
                return;
            }
        }
        let timers = [
            end.as_ref().map(|end| end.connection.next_timeout().0),
            interface.poll_at(smol_now(now), &sockets).map(|at| at.total_micros() as u64),
        ];
        let next = timers.into_iter().flatten().chain(links.iter().filter_map(Link::next_arrival)).min().unwrap_or(now.0 + 1000);
        now = Instant(next.max(now.0 + 1));
        while let Some(packet) = links[0].pop(now.0) {
            device.incoming.push_back(packet);
        }
        while let Some(packet) = links[1].pop(now.0) {
            let mut bytes = vec![0; ETHERNET];
            bytes[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
            bytes.extend_from_slice(&packet);
            let Ok(parsed) = TcpFrame::parse(&bytes, 0) else { continue };
            assert!(parsed.checksum_holds(&bytes));
            match &mut end {
                Some(end) => end.receive(&parsed, &bytes, now),
                None => end = Connection::accept(config, &Segment::from(&parsed), 77, 5, now).map(ours),
            }
        }
        if let Some(end) = &mut end
            && end.connection.next_timeout() <= now
        {
            end.connection.on_timeout(now);
        }
    }
    let end = end.expect("a connection");
    panic!("stuck: we have {} in {:?}, smoltcp {smol_verified}", end.verified, end.connection.state());
}

#[test]
fn we_connect_to_smoltcp() {
    exchange(true, Impairments { delay: 1000, ..Impairments::default() });
}

#[test]
fn smoltcp_connects_to_us() {
    exchange(false, Impairments { delay: 1000, ..Impairments::default() });
}

#[test]
fn losses_and_reordering_do_not_stop_us() {
    for we_connect in [true, false] {
        exchange(we_connect, Impairments { delay: 3000, loss: 10_000, reorder: 20_000, hold: 1500, ..Impairments::default() });
    }
}
