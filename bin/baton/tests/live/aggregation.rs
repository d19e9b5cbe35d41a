//! Which segments are merged, which end an aggregate, which pass unchanged: one table of cases, run through the NIC's
//! large receive by GRO's rules and, through a TAP, through Linux's GRO. Where the two differ, the case says why.

use crate::common::{before_others, wait_until};
use baton_backends::VnetDevice;
use baton_device::{Checksum, Device, Frame, MAX_FRAME};
use baton_linux::interface::{self, TapOptions};
use baton_linux::namespace::{self, Namespace};
use baton_linux::{process, rtnetlink};
use baton_lro::{Lro, LroSettings, Mode};
use baton_wire::TcpFrame;
use baton_wire::checksum::{Sum, pseudo_header};
use std::time::{Duration, Instant};

const ACK: u16 = 0x10;
const PSH: u16 = 0x08;
const FIN: u16 = 0x01;
const SYN: u16 = 0x02;
const RST: u16 = 0x04;
const URG: u16 = 0x20;
const ECE: u16 = 0x40;
const CWR: u16 = 0x80;
/// A reserved bit, which accurate ECN uses.
const AE: u16 = 0x100;

const TIMESTAMPS: [u8; 12] = [1, 1, 8, 10, 0, 0, 0, 7, 0, 0, 0, 9];
const MSS: usize = 1000;

/// One frame, field by field. Its payload repeats its number, by which it is recognised in an aggregate.
#[derive(Clone)]
struct Piece {
    v6: bool,
    port: u16,
    source: u8,
    mac: u8,
    seq: u32,
    length: usize,
    flags: u16,
    ack: u32,
    window: u16,
    options: Vec<u8>,
    tos: u8,
    ttl: u8,
    fragment: u16,
    ident: u16,
    label: u8,
    ip_options: bool,
    bad_ip_checksum: bool,
    bad_tcp_checksum: bool,
    padding: usize,
    /// Bytes less than the IP header says.
    cut: usize,
    /// Another protocol number, or an extension header of that number (IPv6).
    protocol: u8,
    extension: Option<u8>,
    vlan: bool,
}

const START: u32 = 5000;

/// The `n`th full segment of a connection.
fn segment(n: u32) -> Piece {
    Piece {
        v6: false,
        port: 4000,
        source: 2,
        mac: 1,
        seq: START.wrapping_add(n * MSS as u32),
        length: MSS,
        flags: ACK,
        ack: 77,
        window: 500,
        options: TIMESTAMPS.to_vec(),
        tos: 0,
        ttl: 64,
        fragment: 0x4000,
        ident: 100 + n as u16,
        label: 0,
        ip_options: false,
        bad_ip_checksum: false,
        bad_tcp_checksum: false,
        padding: 0,
        cut: 0,
        protocol: 6,
        extension: None,
        vlan: false,
    }
}

impl Piece {
    fn tcp(&self, number: u8) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(self.port.to_be_bytes());
        out.extend(80u16.to_be_bytes());
        out.extend(self.seq.to_be_bytes());
        out.extend(self.ack.to_be_bytes());
        let words = (20 + self.options.len()) / 4;
        out.push((words << 4) as u8 | (self.flags >> 8) as u8);
        out.push(self.flags as u8);
        out.extend(self.window.to_be_bytes());
        out.extend([0, 0]);
        out.extend(if self.flags & URG != 0 { [0, 1] } else { [0, 0] });
        out.extend(&self.options);
        out.extend(vec![number; self.length]);
        out
    }

    fn frame(&self, number: u8) -> Vec<u8> {
        let mut tcp = self.tcp(number);
        let (mut source, mut destination) = (vec![10, 9, 0, self.source], vec![10, 9, 0, 1]);
        if self.v6 {
            source = [&[0xfd, 9], &[0; 13][..], &[self.source]].concat();
            destination = [&[0xfd, 9], &[0; 13][..], &[1]].concat();
        }
        let sum = pseudo_header(&source, &destination, self.protocol, tcp.len()).bytes(&tcp).finish();
        tcp[16..18].copy_from_slice(&(if self.bad_tcp_checksum { sum ^ 1 } else { sum }).to_be_bytes());
        let mut out = vec![2, 0, 0, 0, 0, 0x0a, 2, 0, 0, 0, 0, self.mac];
        if self.vlan {
            out.extend([0x81, 0, 0, 5]);
        }
        if self.v6 {
            let extension = self.extension.map_or(Vec::new(), |_| vec![self.protocol, 0, 1, 4, 0, 0, 0, 0]);
            out.extend([0x86, 0xdd, 0x60 | self.tos >> 4, self.tos << 4, 0, self.label]);
            out.extend(((tcp.len() + extension.len()) as u16).to_be_bytes());
            out.extend([self.extension.unwrap_or(self.protocol), self.ttl]);
            out.extend(source.iter().chain(&destination).chain(&extension));
        } else {
            let options: &[u8] = if self.ip_options { &[1, 1, 1, 1] } else { &[] };
            let mut ip = vec![0x45 + (options.len() / 4) as u8, self.tos];
            ip.extend(((20 + options.len() + tcp.len()) as u16).to_be_bytes());
            ip.extend(self.ident.to_be_bytes());
            ip.extend(self.fragment.to_be_bytes());
            ip.extend([self.ttl, self.protocol, 0, 0]);
            ip.extend(source.iter().chain(&destination));
            ip.extend(options);
            let sum = Sum::new().bytes(&ip).finish();
            ip[10..12].copy_from_slice(&(if self.bad_ip_checksum { sum ^ 1 } else { sum }).to_be_bytes());
            out.extend([8, 0]);
            out.extend(ip);
        }
        out.extend(tcp);
        out.truncate(out.len() - self.cut);
        out.extend(vec![number; self.padding]);
        out
    }
}

/// Frames in order of arrival, and what must go to the kernel: numbers from 1, merged ones joined by "+".
struct Case {
    name: &'static str,
    pieces: Vec<Piece>,
    ours: &'static str,
    /// Where it is another (or one of several, by the kernel's version or configuration): which, and why.
    gro: Option<(&'static str, &'static str)>,
}

/// Full segments 0, 1, …, some of them changed.
fn row(count: u32, change: impl Fn(usize, &mut Piece)) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = (0..count).map(segment).collect();
    pieces.iter_mut().enumerate().for_each(|(at, piece)| change(at + 1, piece));
    pieces
}

fn cases() -> Vec<Case> {
    let case = |name, ours, pieces| Case { name, pieces, ours, gro: None };
    let differs = |name, ours, gro, why, pieces| Case { name, pieces, ours, gro: Some((gro, why)) };
    let second = |change: fn(&mut Piece)| {
        row(3, move |at, piece| {
            if at == 2 {
                change(piece)
            }
        })
    };
    let all = |change: fn(&mut Piece)| row(3, move |_, piece| change(piece));
    let mut cases = vec![
        case("one segment", "1", row(1, |_, _| {})),
        case("three in order", "1+2+3", row(3, |_, _| {})),
        case("three in order, IPv6", "1+2+3", all(|piece| piece.v6 = true)),
        case("no options", "1+2+3", all(|piece| piece.options.clear())),
        case(
            "64 KB are full",
            &*format!("{} 46", (1..=45).map(|n| n.to_string()).collect::<Vec<_>>().join("+")).leak(),
            // Of more than 64 frames GRO releases what it holds after the 64th.
            row(46, |at, piece| {
                piece.length = 1440;
                piece.seq = START.wrapping_add((at as u32 - 1) * 1440);
            }),
        ),
        // Segments that end an aggregate.
        case("PSH is the last of its aggregate", "1+2 3", second(|piece| piece.flags |= PSH)),
        case(
            "PSH on the first",
            "1 2+3",
            row(3, |at, piece| {
                if at == 1 {
                    piece.flags |= PSH
                }
            }),
        ),
        case(
            "FIN with data",
            "1+2",
            row(2, |at, piece| {
                if at == 2 {
                    piece.flags |= FIN
                }
            }),
        ),
        case(
            "FIN and PSH",
            "1+2+3",
            row(3, |at, piece| {
                if at == 3 {
                    piece.flags |= FIN | PSH
                }
            }),
        ),
        case(
            "a shorter one is the last",
            "1+2 3",
            vec![segment(0), Piece { length: 500, ..segment(1) }, Piece { seq: START + 1500, ..segment(2) }],
        ),
        case(
            "a longer one begins anew",
            "1 2+3",
            vec![
                Piece { length: 500, ..segment(0) },
                Piece { seq: START + 500, ..segment(1) },
                Piece { seq: START + 1500, ..segment(2) },
            ],
        ),
        case("one byte", "1+2", vec![segment(0), Piece { length: 1, ..segment(1) }]),
        case(
            "a short one alone, then full ones",
            "1 2+3",
            vec![
                Piece { length: 10, ..segment(0) },
                Piece { seq: START + 10, ..segment(1) },
                Piece { seq: START + 1010, ..segment(2) },
            ],
        ),
        // Order of segments.
        case("a gap", "1 2+3", vec![segment(0), Piece { ident: 101, ..segment(2) }, Piece { ident: 102, ..segment(3) }]),
        case("a duplicate", "1+2 3", vec![segment(0), segment(1), segment(1)]),
        case("the second comes late", "1 2 3", vec![segment(0), segment(2), segment(1)]),
        case("an overlap", "1 2", vec![segment(0), Piece { seq: START + 500, ..segment(1) }]),
        case(
            "the sequence number wraps",
            "1+2+3",
            row(3, |at, piece| piece.seq = 0u32.wrapping_sub(1500).wrapping_add((at as u32 - 1) * 1000)),
        ),
        case(
            "the sequence number becomes zero exactly",
            "1+2+3",
            row(3, |at, piece| piece.seq = 0u32.wrapping_sub(1000).wrapping_add((at as u32 - 1) * 1000)),
        ),
        // Flags.
        case("SYN", "1 2 3", second(|piece| piece.flags = SYN)),
        case("RST with data", "1 2 3", second(|piece| piece.flags |= RST)),
        case(
            "URG",
            "1 2 3",
            vec![segment(0), Piece { flags: ACK | URG, ..segment(1) }, Piece { flags: ACK | URG, ..segment(2) }],
        ),
        case("CWR is not merged", "1 2 3", second(|piece| piece.flags |= CWR)),
        case(
            "CWR on the first",
            "1 2+3",
            row(3, |at, piece| {
                if at == 1 {
                    piece.flags |= CWR
                }
            }),
        ),
        case("ECE on all", "1+2+3", all(|piece| piece.flags |= ECE)),
        case("ECE on one", "1 2 3", second(|piece| piece.flags |= ECE)),
        case("a reserved bit on all", "1+2+3", all(|piece| piece.flags |= AE)),
        case("a reserved bit on one", "1 2 3", second(|piece| piece.flags |= AE)),
        case("pure acknowledgement", "1", vec![Piece { length: 0, ..segment(0) }]),
        case("an acknowledgement between", "1 2 3", vec![segment(0), Piece { length: 0, ..segment(1) }, segment(1)]),
        case(
            "two equal acknowledgements",
            "1 2",
            vec![Piece { length: 0, ..segment(0) }, Piece { length: 0, ident: 101, ..segment(0) }],
        ),
        case("FIN without data", "1 2", vec![segment(0), Piece { length: 0, flags: ACK | FIN, ..segment(1) }]),
        // Acknowledgement, window, options.
        case(
            "another acknowledgement number",
            "1 2+3",
            row(3, |at, piece| {
                if at > 1 {
                    piece.ack += 1
                }
            }),
        ),
        case("another window", "1 2 3", second(|piece| piece.window = 400)),
        case(
            "another timestamp",
            "1 2+3",
            row(3, |at, piece| {
                if at > 1 {
                    piece.options[7] += 1
                }
            }),
        ),
        case(
            "another echo",
            "1 2+3",
            row(3, |at, piece| {
                if at > 1 {
                    piece.options[11] += 1
                }
            }),
        ),
        case("options on one only", "1 2 3", second(|piece| piece.options.clear())),
        case("the same SACK block on all", "1+2+3", all(|piece| piece.options.extend([1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2]))),
        case("a SACK block on one", "1 2 3", second(|piece| piece.options.extend([1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2]))),
        case("an unknown option on all", "1+2+3", all(|piece| piece.options = vec![200, 4, 1, 2])),
        case("padding options on all", "1+2+3", all(|piece| piece.options = vec![1, 1, 1, 0])),
        case("an urgent pointer without URG", "1+2+3", row(3, |_, _| {})),
        // Network header, IPv4.
        case("another time to live", "1 2 3", second(|piece| piece.ttl = 63)),
        case("another class", "1 2 3", second(|piece| piece.tos = 0x20)),
        case("the same class", "1+2+3", all(|piece| piece.tos = 0x20)),
        case("CE on all", "1+2+3", all(|piece| piece.tos = 3)),
        case("CE on one", "1 2 3", second(|piece| piece.tos = 3)),
        case("ECT(0), then CE", "1 2+3", row(3, |at, piece| piece.tos = if at == 1 { 2 } else { 3 })),
        case("DF on one only", "1 2 3", second(|piece| piece.fragment = 0)),
        case("no DF, numbers count up", "1+2+3", all(|piece| piece.fragment = 0)),
        case("DF, numbers stand still", "1+2+3", all(|piece| piece.ident = 0)),
        differs(
            "no DF, numbers stand still",
            "1 2 3",
            "1+2+3|1 2 3",
            "later kernels merge these, too; a sender that neither counts nor forbids fragments cannot be distinguished from one that repeats itself",
            all(|piece| (piece.ident, piece.fragment) = (7, 0)),
        ),
        case(
            "a number is left out",
            "1+2 3",
            row(3, |at, piece| {
                if at == 3 {
                    piece.ident += 1
                }
            }),
        ),
        case("numbers stand still, then count", "1+2 3", row(3, |at, piece| piece.ident = if at == 3 { 8 } else { 7 })),
        case("numbers wrap", "1+2+3", row(3, |at, piece| piece.ident = 0xfffe_u16.wrapping_add(at as u16))),
        case("IP options", "1 2 3", all(|piece| piece.ip_options = true)),
        case("first fragment", "1 2 3", second(|piece| piece.fragment = 0x2000)),
        case("later fragment", "1 2 3", second(|piece| piece.fragment = 0x0010)),
        case("wrong IP checksum", "1 2 3", second(|piece| piece.bad_ip_checksum = true)),
        case("wrong TCP checksum", "1 2 3", second(|piece| piece.bad_tcp_checksum = true)),
        case("padding after the packet", "1 2 3", second(|piece| piece.padding = 3)),
        case("another sender's link address", "1 2 3", second(|piece| piece.mac = 9)),
        // Network header, IPv6.
        case("another hop limit", "1 2 3", row(3, |at, piece| (piece.v6, piece.ttl) = (true, if at == 2 { 63 } else { 64 }))),
        case("another flow label", "1 2 3", row(3, |at, piece| (piece.v6, piece.label) = (true, u8::from(at == 2)))),
        case(
            "another traffic class",
            "1 2 3",
            row(3, |at, piece| (piece.v6, piece.tos) = (true, if at == 2 { 0x20 } else { 0 })),
        ),
        case("CE on all, IPv6", "1+2+3", all(|piece| (piece.v6, piece.tos) = (true, 3))),
        case("CE on one, IPv6", "1 2 3", row(3, |at, piece| (piece.v6, piece.tos) = (true, if at == 2 { 3 } else { 0 }))),
        differs(
            "an extension header on all",
            "1 2 3",
            "1+2+3",
            "GRO parses the extension headers that it knows; here IPv6 extension headers pass untouched",
            all(|piece| (piece.v6, piece.extension) = (true, Some(60))),
        ),
        // Other protocols, and several connections.
        case("UDP between", "1+3 2", vec![segment(0), Piece { protocol: 17, ..segment(9) }, segment(1)]),
        case(
            "two connections interleaved",
            "1+3 2+4",
            vec![segment(0), Piece { port: 4001, ..segment(0) }, segment(1), Piece { port: 4001, ..segment(1) }],
        ),
        case(
            "the same ports, another address",
            "1+3 2+4",
            vec![segment(0), Piece { source: 3, ..segment(0) }, segment(1), Piece { source: 3, ..segment(1) }],
        ),
        case(
            "IPv4 and IPv6 of the same ports",
            "1+3 2+4",
            vec![segment(0), Piece { v6: true, ..segment(0) }, segment(1), Piece { v6: true, ..segment(1) }],
        ),
    ];
    cases.push(differs(
        "VLAN tags on all",
        "1 2 3",
        "1+2+3|1 2 3",
        "a kernel with VLAN devices merges inside a VLAN; here tagged frames pass untouched",
        all(|piece| piece.vlan = true),
    ));
    cases
}

/// Which pieces a frame is made of.
fn pieces_in(frame: &Frame, case: &Case) -> String {
    let bytes = frame.bytes();
    let numbers: Vec<u8> = match TcpFrame::parse(bytes, 0) {
        Ok(parsed) if parsed.payload_length > 0 => {
            let mut numbers = parsed.payload(bytes).to_vec();
            numbers.dedup();
            numbers
        }
        // Frames without payload are recognised by their bytes.
        Ok(_) => {
            (1..=case.pieces.len() as u8).filter(|at| case.pieces[usize::from(*at) - 1].frame(*at) == bytes).take(1).collect()
        }
        Err(_) => payload_at_the_end(bytes),
    };
    numbers.iter().map(u8::to_string).collect::<Vec<_>>().join("+")
}

/// The repeated numbers at the end of a frame that is not TCP for the NIC.
fn payload_at_the_end(bytes: &[u8]) -> Vec<u8> {
    let mut numbers: Vec<u8> = bytes.chunk_by(|a, b| a == b).rev().take_while(|run| run.len() > 100).map(|run| run[0]).collect();
    numbers.reverse();
    numbers
}

fn in_order(mut groups: Vec<String>) -> String {
    // Different connections may overtake each other.
    groups.sort_by_key(|group| group.split('+').next().and_then(|first| first.parse::<u32>().ok()));
    groups.join(" ")
}

fn ours(case: &Case) -> String {
    let settings = LroSettings { mode: Mode::InOrder, ..LroSettings::default() };
    let (mut lro, mut groups) = (Lro::new(settings, 0), Vec::new());
    for (at, piece) in case.pieces.iter().enumerate() {
        let mut frame = Frame::with_capacity(MAX_FRAME);
        frame.fill(&piece.frame(at as u8 + 1));
        lro.receive(&mut frame, 0, &mut |frame| groups.push(pieces_in(frame, case)));
    }
    lro.flush_all(0, &mut |frame| groups.push(pieces_in(frame, case)));
    in_order(groups)
}

/// A TAP whose frames GRO sees all at once, and a socket that receives from it. GRO releases what it holds at the end
/// of a round of the kernel's, or after a tick of its clock; so the kernel's thread that runs the rounds has the
/// writer's processor, and runs only when the writer, which goes before all others, waits.
struct Gro {
    _host: Namespace,
    tap: VnetDevice,
    listener: VnetDevice,
    /// The kernel's thread that runs the rounds.
    rounds: u32,
}

impl Gro {
    /// The calling thread, which goes before all others, is the writer.
    fn new() -> Gro {
        let host = Namespace::new().expect("a namespace (root is needed)");
        let name = format!("g{}", std::process::id());
        let made = host.run(|| {
            let tap = interface::open_tap(&name, TapOptions { napi: true, ..TapOptions::default() })?;
            let netlink = rtnetlink::open()?;
            let link = rtnetlink::link(&netlink, &name)?;
            std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1")?;
            rtnetlink::set_up(&netlink, link.index, Some([2, 0, 0, 0, 0, 0x0a]), None)?;
            let listener = interface::open_packet_socket(link.index)?;
            namespace::mount_own_sysfs()?;
            assert!(interface::set_threaded_napi(&name), "this kernel has no threaded NAPI");
            Ok((tap, listener))
        });
        let (tap, listener) = made.expect("a TAP with GRO");
        let processor = process::allowed_cpus()[0];
        let rounds = process::napi_threads(&name);
        assert_eq!(rounds.len(), 1, "threads of {name}");
        for thread in [0, rounds[0] as i32] {
            assert!(process::pin(thread, processor), "one processor for writer and kernel");
        }
        Gro { _host: host, tap: VnetDevice::new(tap, false), listener: VnetDevice::new(listener, true), rounds: rounds[0] }
    }

    /// How GRO groups a case's frames.
    fn run(&mut self, case: &Case) -> String {
        // Waits: until the kernel's thread has got them all at once. Threads that go before all others may not have all
        // of a processor (sched_rt_runtime_us): then it runs while they are written.
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (groups, at_once) = self.play(case);
            if at_once {
                return groups;
            }
            assert!(Instant::now() < deadline, "{}: the kernel's thread runs each time while the frames are written", case.name);
        }
    }

    /// Returns also whether the kernel's thread has not run while the frames were written.
    fn play(&mut self, case: &Case) -> (String, bool) {
        // If this thread has interrupted the kernel's last round, that round would still take the first frame in.
        wait_until("the kernel's thread rests", || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", self.rounds)).expect("a thread's status");
            status.contains("State:\tS") || status.contains("State:\tI")
        });
        let mut frame = Frame::with_capacity(MAX_FRAME + 100);
        while self.listener.receive(&mut frame) {}
        // The third number says how often it was given a processor.
        let runs = || {
            let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.rounds)).expect("a thread's schedstat");
            text.split_whitespace().nth(2).map(str::to_owned)
        };
        let before = runs();
        for (at, piece) in case.pieces.iter().enumerate() {
            let mut frame = Frame::with_capacity(MAX_FRAME);
            frame.fill(&piece.frame(at as u8 + 1));
            frame.checksum = Checksum::Unknown;
            assert!(self.tap.transmit(&mut frame), "{}: the TAP refuses frame {}", case.name, at + 1);
        }
        let at_once = runs() == before;
        let (mut groups, mut missing) = (Vec::new(), case.pieces.len());
        wait_until(case.name, || {
            while self.listener.receive(&mut frame) {
                let group = pieces_in(&frame, case);
                missing = missing.saturating_sub(group.split('+').count());
                groups.push(group);
            }
            missing == 0
        });
        (in_order(groups), at_once)
    }
}

#[test]
fn aggregates_are_those_of_linux() {
    let cases = cases();
    assert!(cases.len() >= 60, "{} cases", cases.len());
    let mut wrong = Vec::new();
    before_others(|| {
        let mut gro = Gro::new();
        for case in &cases {
            let got = ours(case);
            if got != case.ours {
                wrong.push(format!("{}: ours gives {got}, not {}", case.name, case.ours));
            }
            let expected = case.gro.map_or(case.ours, |(gro, _)| gro);
            let got = gro.run(case);
            if !expected.split('|').any(|expected| got == expected) {
                wrong.push(format!("{}: GRO gives {got}, not {expected}", case.name));
            }
        }
    });
    assert!(wrong.is_empty(), "{} of {} cases:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}
