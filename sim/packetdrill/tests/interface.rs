//! The C interface driven as packetdrill drives it, without packetdrill: a handshake, data both ways, a loss, a close.

use baton_packetdrill::{Interface, packetdrill_interface_init};
use baton_tcp::segment::Transmit;
use baton_wire::checksum::{Sum, pseudo_header};
use baton_wire::{Endpoint, Flags, TcpOptions};
use std::ffi::{CString, c_void};
use std::mem::MaybeUninit;

const LOCAL: [u8; 4] = [192, 168, 0, 1];
const REMOTE: [u8; 4] = [192, 0, 2, 1];
const PORTS: (u16, u16) = (4000, 8080);

/// The adapter, and the peer's side of one connection.
struct Script {
    interface: Interface,
}

/// A packet that the adapter sent.
#[derive(Debug)]
struct Seen {
    seq: u32,
    ack: u32,
    flags: Flags,
    payload: Vec<u8>,
    micros: i64,
}

impl Script {
    fn new(flags: &str) -> Script {
        let flags = CString::new(flags).expect("no NUL");
        let mut interface = MaybeUninit::uninit();
        // SAFETY: a C string, and room for the structure; this thread is the script's.
        unsafe { packetdrill_interface_init(flags.as_ptr(), interface.as_mut_ptr()) };
        // SAFETY: the call has filled it in.
        Script { interface: unsafe { interface.assume_init() } }
    }

    fn listen(&self) -> i32 {
        let i = &self.interface;
        let mut address = libc::sockaddr_in {
            sin_family: libc::AF_INET as u16,
            sin_port: PORTS.1.to_be(),
            sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(LOCAL) },
            sin_zero: [0; 8],
        };
        // SAFETY: the functions are called with the userdata they came with and valid pointers, as packetdrill does.
        unsafe {
            let fd = (i.socket)(i.userdata, libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_TCP);
            assert!(fd >= 0);
            let address = (&raw mut address).cast::<libc::sockaddr>();
            assert_eq!((i.bind)(i.userdata, fd, address, size_of::<libc::sockaddr_in>() as u32), 0);
            assert_eq!((i.listen)(i.userdata, fd, 1), 0);
            fd
        }
    }

    fn accept(&self, fd: i32) -> i32 {
        let i = &self.interface;
        // SAFETY: the adapter's function and its own userdata; null says that no address is asked for.
        unsafe { (i.accept)(i.userdata, fd, std::ptr::null_mut(), std::ptr::null_mut()) }
    }

    fn write(&self, fd: i32, bytes: &[u8]) -> isize {
        let i = &self.interface;
        // SAFETY: the adapter's function and its own userdata; the pointer and the length are those of a live slice.
        unsafe { (i.write)(i.userdata, fd, bytes.as_ptr().cast(), bytes.len()) }
    }

    fn read(&self, fd: i32, most: usize) -> Vec<u8> {
        let i = &self.interface;
        let mut room = vec![0; most];
        // SAFETY: the adapter's function and its own userdata; `room` has `most` bytes.
        let got = unsafe { (i.read)(i.userdata, fd, room.as_mut_ptr().cast::<c_void>(), most) };
        room.truncate(usize::try_from(got).expect("a read without error"));
        room
    }

    fn close(&self, fd: i32) {
        let i = &self.interface;
        // SAFETY: the adapter's function and its own userdata; no other pointer is passed.
        assert_eq!(unsafe { (i.close)(i.userdata, fd) }, 0);
    }

    fn inject(&self, seq: u32, ack: u32, flags: Flags, options: TcpOptions, payload: &[u8]) {
        let packet = packet(&Transmit { seq, ack, flags, window: 60_000, options, ..Transmit::default() }, payload);
        let i = &self.interface;
        // SAFETY: the adapter's function and its own userdata; the pointer and the length are those of `packet`, which
        // lives.
        assert_eq!(unsafe { (i.netdev_send)(i.userdata, packet.as_ptr().cast(), packet.len()) }, 0);
    }

    /// The next packet that is more than an acknowledgement, of which a move may add some.
    fn expect_more(&self, what: &str) -> Seen {
        loop {
            let seen = self.expect(what);
            if seen.flags != Flags::ACK || !seen.payload.is_empty() {
                return seen;
            }
        }
    }

    fn expect(&self, what: &str) -> Seen {
        let i = &self.interface;
        let mut room = vec![0u8; 65_536];
        let (mut length, mut micros) = (room.len(), 0);
        // SAFETY: the adapter's function and its own userdata; `length` is that of `room`, and it and `micros` live.
        assert_eq!(unsafe { (i.netdev_receive)(i.userdata, room.as_mut_ptr().cast(), &mut length, &mut micros) }, 0);
        assert!(length >= 40, "nothing left, expected {what}");
        let word = |at: usize| u32::from_be_bytes(room[at..at + 4].try_into().expect("four bytes"));
        let header = 20 + usize::from(room[32] >> 4) * 4;
        let sum = pseudo_header(&LOCAL, &REMOTE, 6, length - 20).bytes(&room[20..length]).finish();
        assert_eq!(sum, 0, "the checksum of {what}");
        Seen { seq: word(24), ack: word(28), flags: Flags(room[33]), payload: room[header..length].to_vec(), micros }
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // SAFETY: as packetdrill at its end, once.
        unsafe { (self.interface.free)(self.interface.userdata) };
    }
}

/// A packet from the peer.
fn packet(transmit: &Transmit, payload: &[u8]) -> Vec<u8> {
    let mut options = [0; 40];
    let length = transmit.options.emit(&mut options);
    let mut tcp = [PORTS.0.to_be_bytes(), PORTS.1.to_be_bytes()].concat();
    tcp.extend(transmit.seq.to_be_bytes());
    tcp.extend(transmit.ack.to_be_bytes());
    tcp.extend([((20 + length) << 2) as u8, transmit.flags.0]);
    tcp.extend(transmit.window.to_be_bytes());
    tcp.extend([0; 4]);
    tcp.extend(&options[..length]);
    tcp.extend(payload);
    let sum = pseudo_header(&REMOTE, &LOCAL, 6, tcp.len()).bytes(&tcp).finish();
    tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    let mut ip = vec![0x45, 0];
    ip.extend(((20 + tcp.len()) as u16).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    ip.extend(Endpoint::v4(REMOTE, 0).v4_bytes());
    ip.extend(LOCAL);
    let sum = Sum::new().bytes(&ip).finish();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    [ip, tcp].concat()
}

/// One connection from its SYN to the acknowledgement of the peer's FIN, with a segment of ours lost on the way.
fn handshake_data_loss_and_close(flags: &str) {
    let script = Script::new(flags);
    let listener = script.listen();
    let options = TcpOptions { mss: Some(1000), sack_permitted: true, ..TcpOptions::default() };
    script.inject(100, 0, Flags::SYN, options, &[]);
    let syn = script.expect("a SYN-ACK");
    assert_eq!((syn.flags, syn.ack), (Flags::SYN | Flags::ACK, 101));
    let start = syn.seq.wrapping_add(1);
    script.inject(101, start, Flags::ACK, TcpOptions::default(), &[]);
    let fd = script.accept(listener);
    assert!(fd >= 0);

    script.inject(101, start, Flags::ACK | Flags::PSH, TcpOptions::default(), b"request");
    assert_eq!(script.expect("an acknowledgement").ack, 108);
    assert_eq!(script.read(fd, 100), b"request");

    let answer: Vec<u8> = (0..3000u32).map(|at| at as u8).collect();
    assert_eq!(script.write(fd, &answer), 3000);
    let mut sent = Vec::new();
    while sent.len() < 3000 {
        let seen = script.expect_more("data");
        assert_eq!(seen.seq, start.wrapping_add(sent.len() as u32));
        sent.extend(seen.payload);
    }
    assert_eq!(sent, answer);

    // The first segment is lost: what follows it is SACKed, and a time-out at the latest brings it again.
    let mut sack = TcpOptions::default();
    sack.sack.push(start.wrapping_add(1000), start.wrapping_add(3000));
    script.inject(108, start, Flags::ACK, sack, &[]);
    let again = script.expect_more("a retransmission");
    assert_eq!((again.seq, &again.payload[..]), (start, &answer[..1000]));
    assert!(again.micros - syn.micros < 2_000_000, "after {} us", again.micros - syn.micros);
    script.inject(108, start.wrapping_add(3000), Flags::ACK, TcpOptions::default(), &[]);

    script.close(fd);
    let fin = script.expect_more("a FIN");
    assert_eq!((fin.seq, fin.flags), (start.wrapping_add(3000), Flags::FIN | Flags::ACK));
    script.inject(108, fin.seq.wrapping_add(1), Flags::FIN | Flags::ACK, TcpOptions::default(), &[]);
    assert_eq!(script.expect("the acknowledgement of the peer's FIN").ack, 109);
}

#[test]
fn a_connection_lives_from_syn_to_fin() {
    handshake_data_loss_and_close("no-sysctls");
}

/// The same while the connection passes through its image before every call, every second one, every third one.
#[test]
fn a_connection_that_moves_lives_as_well() {
    for every in 1..=3 {
        handshake_data_loss_and_close(&format!("no-sysctls,move={every}"));
        handshake_data_loss_and_close(&format!("no-sysctls,by-kernel,move={every}"));
    }
}

/// Two runs give the same packets at the same times.
#[test]
fn time_is_virtual_and_every_run_the_same() {
    let run = || {
        let script = Script::new("no-sysctls");
        script.listen();
        script.inject(100, 0, Flags::SYN, TcpOptions::default(), &[]);
        (0..4).map(|_| script.expect("a SYN-ACK")).map(|seen| (seen.seq, seen.micros)).collect::<Vec<_>>()
    };
    let (first, second) = (run(), run());
    assert_eq!(first, second);
    // RFC 6298 section 5.5: each time-out is twice the one before.
    let gaps: Vec<i64> = first.windows(2).map(|two| two[1].1 - two[0].1).collect();
    assert_eq!(gaps, [1_000_000, 2_000_000, 4_000_000]);
}
