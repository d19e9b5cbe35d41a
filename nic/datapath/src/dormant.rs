//! The short form of a connection that has carried nothing for a while.
//!
//! All of the NIC's state of the connection is in its image and in its slot. The image is kept in its short form; the
//! rest is read from the slot when the connection wakes up. The NIC that wakes it up is the one that put it to sleep,
//! with the same clock: so a time that the image holds as an age is exactly the same time afterwards.

use crate::growth::{Growth, largest_window};
use crate::offloaded::{Memory, Offloaded};
use crate::partial::Path;
use baton_image::{Image, MAX_SHORT};
use baton_shm::{Region, ThinBytes};
use baton_tcp::{Connection, Instant};
use baton_wire::Flow;
use std::sync::Arc;

/// Bytes in front of the image: the time, the IPv4 identification, and flags.
const HEAD: usize = 8 + 2 + 1;

/// Flags: the path is the fast one; the program announces what it has queued; the valid table of out-of-order ranges.
const FAST: u8 = 1;
const FETCHES: u8 = 2;
const TABLE: u8 = 4;

/// A dormant connection. Behind a pointer of one word, so that a slot stays a cache line.
pub(crate) struct Dormant(ThinBytes);

/// A connection's data that is kept in its slot and session.
pub(crate) struct Place {
    pub memory: Memory,
    pub limits: [u32; 2],
    pub session: u32,
    pub session_memory: Arc<Region>,
    pub nic_memory: Arc<Region>,
    pub slot: u32,
}

impl Dormant {
    /// The dormant form of a connection at `now`. None if the connection has work pending, or has carried anything in
    /// the last `patience` microseconds.
    pub fn of(offloaded: &Offloaded, patience: u64, now: Instant) -> Option<Dormant> {
        let flag = match offloaded.path {
            Path::Whole => 0,
            Path::Fast => FAST,
            Path::Pinned => return None,
        };
        let tcp = &offloaded.tcp;
        if tcp.silent_for(now) < patience || !tcp.is_idle() || !offloaded.is_idle() {
            return None;
        }
        let image = tcp.to_image(&offloaded.image, now)?;
        let mut bytes = [0; HEAD + MAX_SHORT];
        let length = image.shorten(Some(&tcp.nic_state(now)), &mut bytes[HEAD..]).ok()?;
        bytes[..8].copy_from_slice(&now.0.to_le_bytes());
        bytes[8..10].copy_from_slice(&offloaded.ident.to_le_bytes());
        let table = if offloaded.ranges_table() == 0 { 0 } else { TABLE };
        bytes[10] = flag | table | if offloaded.fetches { FETCHES } else { 0 };
        ThinBytes::new(&bytes[..HEAD + length]).map(Dormant)
    }

    /// The connection's full state again. None if the bytes are damaged, or its memory is not inside the session's.
    pub fn wake(&self, flow: Flow, place: Place) -> Option<Offloaded> {
        let (time, rest) = self.0.split_first_chunk()?;
        let (ident, rest) = rest.split_first_chunk()?;
        let (flags, short) = rest.split_first()?;
        let (image, nic) = Image::lengthen(short, flow).ok()?;
        let Place { memory, limits, session, session_memory, nic_memory, slot } = place;
        if !memory.fits(&session_memory) || !memory.holds(&image) {
            return None;
        }
        let slept_at = Instant(u64::from_le_bytes(*time));
        let tcp = Connection::from_image(&image, Some(&nic?), memory.receive_size, slept_at);
        let mut offloaded = Offloaded::new(tcp, &image, memory, session, session_memory, nic_memory, slot)?;
        if let Some(most) = largest_window(limits) {
            offloaded.tcp.limit_window(most);
        }
        offloaded.growth = Growth::new(memory, limits, offloaded.flags_of_block());
        offloaded.continue_record(u32::from(flags & TABLE != 0));
        offloaded.ident = u16::from_le_bytes(*ident);
        offloaded.fetches = flags & FETCHES != 0;
        offloaded.path = if flags & FAST != 0 { Path::Fast } else { Path::Whole };
        Some(offloaded)
    }

    /// Bytes that it takes.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::layout::{nic, session};
    use baton_image::NicState;
    use baton_tcp::Segment;
    use baton_tcp::seq::before;
    use baton_wire::{Endpoint, Flags, TcpOptions};
    use proptest::prelude::*;

    const MEMORY: Memory = Memory {
        receive_base: session::HEAP as u32,
        receive_size: 1 << 18,
        send_base: session::HEAP as u32 + (1 << 18),
        send_size: 1 << 18,
        block: 3,
    };
    const PATIENCE: u64 = 2_000_000;
    const DAY: u64 = 86_400_000_000;

    /// What a connection does before it sleeps.
    #[derive(Clone, Copy, Debug)]
    enum Act {
        /// Bytes come, and the program reads them.
        Receive(u16),
        /// The program sends bytes, and the peer acknowledges them after some microseconds.
        Send(u16, u32),
        /// Time passes, and timers run out.
        Wait(u32),
    }

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        let act = prop_oneof![
            (1..1448u16).prop_map(Act::Receive),
            (1..20_000u16, 1..300_000u32).prop_map(|(bytes, after)| Act::Send(bytes, after)),
            (1..3_000_000u32).prop_map(Act::Wait),
        ];
        prop::collection::vec(act, 0..40)
    }

    fn regions() -> (Arc<Region>, Arc<Region>) {
        let of = |bytes: usize| Arc::new(Region::private(bytes).unwrap());
        (of(session::HEAP + (1 << 20)), of(nic::bytes(4).next_multiple_of(4096)))
    }

    fn offloaded(image: &Image, (session_memory, nic_memory): &(Arc<Region>, Arc<Region>)) -> Offloaded {
        let tcp = Connection::from_image(image, None, MEMORY.receive_size, Instant(1_000));
        let mut offloaded = Offloaded::new(tcp, image, MEMORY, 7, session_memory.clone(), nic_memory.clone(), 2).unwrap();
        offloaded.tcp.limit_window(1 << 17);
        offloaded.growth = Growth::new(MEMORY, [1 << 17, 1 << 20], 0);
        offloaded
    }

    /// Sends all there is to send, and publishes the record as a worker does.
    fn send_all(offloaded: &mut Offloaded, now: Instant) {
        while offloaded.tcp.poll_transmit(now, 0).is_some() {
            offloaded.publish(now);
            offloaded.next_ident();
        }
    }

    fn run(offloaded: &mut Offloaded, acts: &[Act], now: &mut Instant) {
        let mut echo = 1000;
        for act in acts {
            let tcp = &mut offloaded.tcp;
            let options = TcpOptions { timestamps: Some((echo, now.millis())), ..TcpOptions::default() };
            let mut segment = Segment {
                seq: tcp.rcv_nxt(),
                ack: tcp.snd_una(),
                flags: Flags::ACK,
                window: 5000,
                options,
                ..Segment::default()
            };
            match *act {
                Act::Receive(length) => {
                    segment.length = length.into();
                    tcp.input(&segment, *now);
                    let readable = tcp.readable();
                    assert!(tcp.consumed(readable));
                }
                Act::Send(length, after) => {
                    assert!(tcp.queue(length.into()));
                    send_all(offloaded, *now);
                    *now = now.after(after.into());
                    segment.ack = offloaded.tcp.snd_nxt();
                    offloaded.tcp.input(&segment, *now);
                }
                Act::Wait(micros) => *now = now.after(micros.into()),
            }
            while offloaded.tcp.next_timeout() <= *now {
                offloaded.tcp.on_timeout(*now);
            }
            send_all(offloaded, *now);
            echo += 1;
        }
    }

    /// Acknowledges all that is on the way, so that the connection is idle.
    fn settle(offloaded: &mut Offloaded, now: &mut Instant) {
        for _ in 0..200 {
            *now = now.after(100_000);
            while offloaded.tcp.next_timeout() <= *now {
                offloaded.tcp.on_timeout(*now);
            }
            send_all(offloaded, *now);
            let tcp = &mut offloaded.tcp;
            if tcp.snd_una() != tcp.snd_end() {
                let segment =
                    Segment { seq: tcp.rcv_nxt(), ack: tcp.snd_nxt(), flags: Flags::ACK, window: 5000, ..Segment::default() };
                tcp.input(&segment, *now);
                send_all(offloaded, *now);
            }
        }
    }

    fn flow() -> Flow {
        Flow { local: Endpoint::v4([10, 0, 0, 1], 80), remote: Endpoint::v4([10, 0, 0, 2], 4000), device: 0 }
    }

    fn place((session_memory, nic_memory): &(Arc<Region>, Arc<Region>)) -> Place {
        let (session_memory, nic_memory) = (session_memory.clone(), nic_memory.clone());
        Place { memory: MEMORY, limits: [1 << 17, 1 << 20], session: 7, session_memory, nic_memory, slot: 2 }
    }

    /// What a NIC knows beside the image. Sequence numbers at which something ends count as over from the oldest
    /// unacknowledged one on.
    fn nic_state(tcp: &Connection, now: Instant) -> NicState {
        let mut state = tcp.nic_state(now);
        let (recovery, congestion) = (&mut state.recovery, &mut state.congestion);
        let ends = [&mut recovery.high_seq, &mut recovery.usage_end, &mut congestion.round_end, &mut state.sending.small_end];
        for end in ends {
            *end = if before(*end, tcp.snd_una()) { tcp.snd_una() } else { *end };
        }
        state
    }

    proptest! {
        #[test]
        fn a_connection_that_wakes_up_is_the_one_that_slept(
            acts in acts(), later in acts(), keepalive in any::<bool>(), fetches in any::<bool>(),
            slept in prop_oneof![0..10_000_000u64, 0..100 * DAY],
        ) {
            let image = Image { keepalive, timestamps: true, snd_nxt: 1, ts_clock: 500, ..Image::open(flow()) };
            let regions = regions();
            let mut awake = offloaded(&image, &regions);
            awake.publish(Instant(1_000));
            let mut now = Instant(1_000);
            run(&mut awake, &acts, &mut now);
            settle(&mut awake, &mut now);
            // What it has queued is in send memory, as the block says.
            let queued = session::block(3) + baton_abi::layout::block::QUEUED_SEQ;
            regions.0.word32(queued).store(awake.tcp.snd_end(), core::sync::atomic::Ordering::Release);
            awake.fetches = fetches;
            awake.path = Path::Fast;
            awake.drop_acked_pairs();
            let dormant = Dormant::of(&awake, PATIENCE, now).expect("it is idle");
            prop_assert!(dormant.bytes() < 320, "{} bytes", dormant.bytes());
            now = now.after(slept);
            let mut woken = dormant.wake(flow(), place(&regions)).expect("it wakes up");
            prop_assert_eq!((woken.ident, woken.fetches, woken.path), (awake.ident, awake.fetches, awake.path));
            prop_assert_eq!(woken.growth.limits(), awake.growth.limits());
            for _ in 0..2 {
                // Both say all that a connection consists of.
                prop_assert_eq!(woken.tcp.to_image(&woken.image, now), awake.tcp.to_image(&awake.image, now));
                prop_assert_eq!(nic_state(&woken.tcp, now), nic_state(&awake.tcp, now));
                prop_assert_eq!(woken.tcp.next_timeout(), awake.tcp.next_timeout());
                prop_assert_eq!((woken.tcp.segment_size(), woken.tcp.cwnd()), (awake.tcp.segment_size(), awake.tcp.cwnd()));
                prop_assert_eq!(woken.tcp.record(now), awake.tcp.record(now));
                let mut at = now;
                run(&mut awake, &later, &mut at);
                run(&mut woken, &later, &mut now);
            }
        }
    }

    /// The peer's clock has gone so far that its timestamps compare as older than the last one (RFC 7323 section 5.5).
    #[test]
    fn weeks_of_sleep_keep_no_segment_out() {
        let regions = regions();
        for days in [1, 24, 25, 30, 49, 51, 90] {
            let image = Image { timestamps: true, snd_nxt: 1, ts_clock: 500, ..Image::open(flow()) };
            let mut now = Instant(1_000);
            let mut idle = offloaded(&image, &regions);
            idle.publish(now);
            run(&mut idle, &[Act::Receive(100)], &mut now);
            settle(&mut idle, &mut now);
            let dormant = Dormant::of(&idle, PATIENCE, now).expect("it is idle");
            now = now.after(days * DAY);
            let mut woken = dormant.wake(flow(), place(&regions)).expect("it wakes up");
            for nth in 0..3 {
                let options =
                    TcpOptions { timestamps: Some(((days * DAY / 1000) as u32 + 1000 + nth, 0)), ..TcpOptions::default() };
                let (seq, ack) = (woken.tcp.rcv_nxt(), woken.tcp.snd_una());
                let segment = Segment { seq, ack, flags: Flags::ACK, window: 5000, options, length: 10, ..Segment::default() };
                assert_eq!(woken.tcp.input(&segment, now).delivered, 10, "segment {nth} after {days} days");
                send_all(&mut woken, now);
                now = now.after(10_000);
            }
        }
    }

    #[test]
    fn a_connection_that_is_not_idle_stays_awake() {
        let regions = regions();
        let image = Image { timestamps: true, ..Image::open(flow()) };
        let mut now = Instant(1_000);
        let mut busy = offloaded(&image, &regions);
        settle(&mut busy, &mut now);
        assert!(Dormant::of(&busy, u64::MAX, now).is_none(), "it has carried something not long ago");
        assert!(Dormant::of(&busy, PATIENCE, now).is_some());
        busy.pending.fin = true;
        assert!(Dormant::of(&busy, PATIENCE, now).is_none(), "its program is to be told something");
        busy.pending.fin = false;
        assert!(busy.tcp.queue(1));
        assert!(Dormant::of(&busy, PATIENCE, now).is_none(), "a byte waits to be sent");
        send_all(&mut busy, now);
        assert!(Dormant::of(&busy, PATIENCE, now).is_none(), "it is not acknowledged");
    }

    #[test]
    fn damaged_bytes_wake_nothing() {
        let regions = regions();
        let mut now = Instant(1_000);
        let mut idle = offloaded(&Image::open(flow()), &regions);
        settle(&mut idle, &mut now);
        let Dormant(bytes) = Dormant::of(&idle, PATIENCE, now).unwrap();
        for at in HEAD..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0x15;
            let wakes = |bytes| Dormant(ThinBytes::new(bytes).unwrap()).wake(flow(), place(&regions)).is_some();
            assert!(!wakes(&damaged), "byte {at}");
            assert!(!wakes(&bytes[..at]), "cut at {at}");
        }
    }
}
