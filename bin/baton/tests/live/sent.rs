//! Sends from a program's own buffers: every byte arrives once, in order, wherever the connection is, through a link
//! with faults and across the NIC's death; and what was released is never read again.

use crate::common::{Scene, scene};
use baton_bed::testbed::TestbedSettings;
use baton_client::Buffer;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use baton_sim::{Rng, stream};
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// State of the reader of the program's stream.
const KEY: u64 = crate::common::KEYS[0];

struct Writer {
    scene: Scene,
    rng: Rng,
    /// Parts that have not been released, and what they lie in.
    parts: VecDeque<(Rc<Buffer>, Range<usize>)>,
    released: usize,
    /// Parts that were still to be acknowledged when they were queued: not copied.
    apart: usize,
}

impl Writer {
    fn new(settings: TestbedSettings) -> Writer {
        Writer { scene: scene(settings), rng: Rng::new(7), parts: VecDeque::new(), released: 0, apart: 0 }
    }

    /// Sends a buffer of a random length, in as many parts as it takes, or some bytes as usual. False if there is no
    /// room.
    fn send(&mut self) -> bool {
        if self.rng.below(3) == 0 {
            let most = 1 << self.rng.below(12);
            return self.scene.send(most) > 0;
        }
        let most = 1 << (4 + self.rng.below(14));
        let length = 1 + self.rng.below(most) as usize;
        let buffer = Rc::new(self.scene.session.buffer(length).expect("a buffer"));
        let mut bytes = vec![0; length];
        stream::fill(KEY, self.scene.sent[0], &mut bytes);
        buffer.write(0, &bytes);
        let mut at = 0;
        while at < length {
            match self.scene.session.send_buffer(self.scene.id, &buffer, at..length) {
                Ok(sent) => {
                    self.parts.push_back((buffer.clone(), at..at + sent));
                    self.scene.sent[0] += sent as u64;
                    at += sent;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(error) => panic!("a send from a buffer: {error}"),
            }
        }
        true
    }

    /// Overwrites what nobody needs any more.
    fn release(&mut self) {
        let done = self.scene.session.take_sent(self.scene.id).expect("a count");
        assert!(done <= self.parts.len(), "{done} parts of {} were released", self.parts.len());
        for (buffer, range) in self.parts.drain(..done) {
            buffer.write(range.start, &vec![0xee; range.len()]);
        }
        self.released += done;
        self.apart = self.apart.max(self.parts.len());
    }

    /// Sends until the peer has `bytes` more, which it checks.
    fn transfer(&mut self, bytes: u64) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let end = self.scene.received[1] + bytes;
        while self.scene.received[1] < end {
            assert!(Instant::now() < deadline, "stuck at {:?} with {} bytes", self.scene.settled_place(), self.scene.received[1]);
            // Some of it is on its way when the peer reads next.
            while self.rng.below(8) > 0 && self.send() {}
            self.release();
            if self.scene.peer_receives() == 0 {
                self.scene.session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
            }
        }
    }

    /// Everything arrives, and is released.
    fn ends_well(mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.scene.received[1] < self.scene.sent[0] || !self.parts.is_empty() {
            assert!(Instant::now() < deadline, "{} parts are not released", self.parts.len());
            self.scene.peer_receives();
            self.scene.session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
            self.release();
        }
    }
}

#[test]
fn bytes_are_taken_from_buffers_wherever_the_connection_is() {
    let faults = LinkSettings { loss: 5_000, reorder: 20_000, hold: 300, duplicate: 5_000, ..LinkSettings::default() };
    for (link, beside) in [(LinkSettings::default(), false), (faults, false), (LinkSettings::default(), true)] {
        let mut writer = Writer::new(TestbedSettings { link, beside, ..TestbedSettings::default() });
        for round in 0..60 {
            writer.scene.try_to_move(if round % 2 == 0 { Place::Nic } else { Place::Kernel });
            writer.transfer(60_000);
        }
        assert!(writer.apart > 0 && writer.released > 60, "{} parts were released", writer.released);
        writer.ends_well();
    }
}

#[test]
fn what_was_sent_from_buffers_survives_the_nic() {
    for beside in [false, true] {
        let mut writer = Writer::new(TestbedSettings { beside, ..TestbedSettings::default() });
        for _ in 0..10 {
            writer.scene.try_to_move(Place::Nic);
            writer.transfer(200_000);
            // The peer does not read any more: much is unacknowledged in the end.
            while writer.send() {}
            let mut tool = writer.scene.bed.tool().expect("a tool");
            let before = tool.statistics().expect("statistics");
            baton_linux::process::signal(before.nic_process, libc::SIGKILL).expect("SIGKILL");
            while tool.statistics().expect("statistics").nic_starts == before.nic_starts {
                std::thread::yield_now();
            }
            writer.transfer(100_000);
        }
        writer.ends_well();
    }
}

/// Memory of a buffer that is dropped while the NIC still sends from it is no other buffer's.
#[test]
fn a_dropped_buffer_is_sent_as_it_was() {
    let mut writer = Writer::new(TestbedSettings::default());
    writer.scene.try_to_move(Place::Nic);
    let mut others = Vec::new();
    for _ in 0..50 {
        let length = 50_000;
        let buffer = writer.scene.session.buffer(length).expect("a buffer");
        let mut bytes = vec![0; length];
        stream::fill(KEY, writer.scene.sent[0], &mut bytes);
        buffer.write(0, &bytes);
        if let Ok(sent) = writer.scene.session.send_buffer(writer.scene.id, &buffer, 0..length) {
            writer.scene.sent[0] += sent as u64;
        }
        drop(buffer);
        let other = writer.scene.session.buffer(length).expect("a buffer");
        other.write(0, &vec![0xee; length]);
        others.push(other);
        writer.scene.peer_receives();
    }
    while writer.scene.received[1] < writer.scene.sent[0] {
        writer.scene.session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
        writer.scene.peer_receives();
    }
}

#[test]
fn mistakes_are_explained() {
    let mut writer = Writer::new(TestbedSettings::default());
    let (session, id) = (&mut writer.scene.session, writer.scene.id);
    let buffer = session.buffer(100).expect("a buffer");
    for range in [0..0, 0..101, 100..101] {
        assert_eq!(session.send_buffer(id, &buffer, range).expect_err("no bytes").kind(), io::ErrorKind::InvalidInput);
    }
    assert_eq!(session.send_buffer(id + 1, &buffer, 0..1).expect_err("no connection").kind(), io::ErrorKind::NotFound);
    assert_eq!(session.take_sent(id).expect("a count"), 0);
}
