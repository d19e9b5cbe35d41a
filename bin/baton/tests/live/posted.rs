//! Buffers that the NIC fills: every byte arrives once, in order, wherever the connection is, through a link with
//! faults and across the NIC's death.

use crate::common::{Scene, scene, wait_until};
use baton_abi::layout::POSTS;
use baton_bed::testbed::TestbedSettings;
use baton_client::{Buffer, Filled};
use baton_linux::tcp_info::TcpInfo;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use baton_sim::{Rng, stream};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// State of the reader of the peer's stream.
const KEY: u64 = 1 << 40;

struct Reader {
    scene: Scene,
    rng: Rng,
    received: u64,
    placed: u64,
    waiting: usize,
}

impl Reader {
    fn new(settings: TestbedSettings) -> Reader {
        Reader { scene: scene(settings), rng: Rng::new(5), received: 0, placed: 0, waiting: 0 }
    }

    fn post(&mut self, length: usize) {
        let buffer: Buffer = self.scene.session.buffer(length).expect("a buffer");
        self.scene.session.post(self.scene.id, buffer).expect("posted");
        self.waiting += 1;
    }

    /// Posts as many buffers as the NIC fills at a time, and more, of all lengths.
    fn post_several(&mut self) {
        while self.waiting < POSTS + 8 {
            let most = 1 << (6 + self.rng.below(14));
            let length = 1 + self.rng.below(most);
            self.post(length as usize);
        }
    }

    fn check(&mut self, filled: &Filled) {
        let mut bytes = vec![0; filled.length];
        filled.buffer.read(0, &mut bytes);
        assert_eq!(stream::mismatches(KEY, self.received, &bytes), 0, "wrong bytes at {}", self.received);
        self.received += filled.length as u64;
        self.placed += filled.placed as u64;
        self.waiting -= 1;
    }

    /// Takes full buffers. False if the stream has ended.
    fn take(&mut self) -> bool {
        loop {
            match self.scene.session.take_posted(self.scene.id) {
                Ok(filled) => {
                    let full = filled.length == filled.buffer.bytes().len();
                    self.check(&filled);
                    if !full {
                        return false;
                    }
                }
                Err(error) if [io::ErrorKind::WouldBlock, io::ErrorKind::InvalidInput].contains(&error.kind()) => return true,
                Err(error) => panic!("the connection broke: {error}"),
            }
        }
    }

    /// Receives `bytes` more, the peer sending all it can.
    fn receive(&mut self, bytes: u64) {
        let end = self.received + bytes;
        self.receive_until(|reader| reader.received >= end);
    }

    /// Receives until the NIC has put `bytes` more into posted buffers. What lay in the receive circle before they were
    /// posted comes first.
    fn receive_placed(&mut self, bytes: u64) {
        let end = self.placed + bytes;
        self.receive_until(|reader| reader.placed >= end);
    }

    fn receive_until(&mut self, done: impl Fn(&Reader) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut ready = Vec::new();
        while !done(self) {
            assert!(
                Instant::now() < deadline,
                "stuck with {} bytes received, {} of them placed by the NIC, {:?}",
                self.received,
                self.placed,
                self.scene.session.place(self.scene.id)
            );
            self.scene.peer_sends(1 << 16);
            self.post_several();
            assert!(self.take(), "the stream has ended");
            self.scene.session.poll(Some(Duration::from_millis(1)), &mut ready).expect("poll");
        }
    }
}

#[test]
fn buffers_are_filled_wherever_the_connection_is() {
    let faults = LinkSettings { loss: 5_000, reorder: 20_000, hold: 300, duplicate: 5_000, ..LinkSettings::default() };
    for link in [LinkSettings::default(), faults] {
        let mut reader = Reader::new(TestbedSettings { link, ..TestbedSettings::default() });
        for round in 0..40 {
            reader.scene.try_to_move(if round % 2 == 0 { Place::Nic } else { Place::Kernel });
            reader.receive(100_000);
            if reader.scene.settled_place() == Some(Place::Nic) {
                reader.receive_placed(20_000);
            }
        }
        assert!(reader.placed >= 200_000, "{} of {} bytes were put in place by the NIC", reader.placed, reader.received);
        // The stream ends in the middle of a buffer.
        reader.scene.try_to_move(Place::Nic);
        reader.scene.peer.shutdown(Shutdown::Write).expect("shut down");
        let deadline = Instant::now() + Duration::from_secs(20);
        while {
            if reader.waiting == 0 {
                // As many as it takes: the peer's kernel may still hold megabytes.
                reader.post(1 << 20);
            }
            reader.take()
        } {
            let (received, waiting) = (reader.received, reader.waiting);
            assert!(
                Instant::now() < deadline,
                "no end of the stream: {received} of {} received, {waiting} wait",
                reader.scene.sent[1]
            );
            reader.scene.session.poll(Some(Duration::from_millis(1)), &mut Vec::new()).expect("poll");
        }
        assert_eq!(reader.received, reader.scene.sent[1]);
    }
}

#[test]
fn what_lies_in_buffers_survives_the_nic() {
    let mut reader = Reader::new(TestbedSettings::default());
    for _ in 0..5 {
        reader.scene.try_to_move(Place::Nic);
        reader.receive(300_000);
        reader.receive_placed(20_000);
        // Bytes are in buffers that have not been taken.
        let acknowledged = |reader: &Reader| TcpInfo::read(reader.scene.peer.as_fd()).expect("TCP_INFO").bytes_acked;
        reader.scene.peer_sends(1 << 16);
        // Linux counts the SYN.
        wait_until("the NIC has more than the program", || acknowledged(&reader) > reader.received + 1);
        let mut tool = reader.scene.bed.tool().expect("a tool");
        let before = tool.statistics().expect("statistics");
        baton_linux::process::signal(before.nic_process, libc::SIGKILL).expect("SIGKILL");
        while tool.statistics().expect("statistics").nic_starts == before.nic_starts {
            std::thread::yield_now();
        }
        reader.receive(100_000);
    }
}

#[test]
fn mistakes_are_explained() {
    let mut reader = Reader::new(TestbedSettings::default());
    let session = &mut reader.scene.session;
    assert_eq!(session.buffer(0).expect_err("no bytes").kind(), io::ErrorKind::InvalidInput);
    let all: Vec<Buffer> = std::iter::from_fn(|| session.buffer(1 << 28).ok()).collect();
    assert!(!all.is_empty());
    assert_eq!(session.buffer(1 << 28).expect_err("too many").kind(), io::ErrorKind::OutOfMemory);
    drop(all);
    assert_eq!(session.take_posted(reader.scene.id).expect_err("nothing is posted").kind(), io::ErrorKind::InvalidInput);
    reader.post(100);
    let error = reader.scene.session.receive(reader.scene.id, &mut [0; 10]).expect_err("a buffer is posted");
    assert!(error.to_string().contains("posted"), "{error}");
}
