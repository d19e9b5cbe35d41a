//! Header prediction: the next segment of a connection at rest is the expected one, whatever was done to it before.

use crate::stage::{BUFFER, Stage};
use baton_abi::layout::{COUNTERS, Counter, nic, session};
use baton_abi::{ANSWER, Cid, Control, HOLD, MORE, Message, Operation};
use baton_datapath::WorkerSettings;
use baton_device::Device;
use std::sync::atomic::Ordering;

const CID: Cid = Cid::new(0, 1);
const LENGTH: u32 = 100;

/// The victim's connection, whose program and agent do something, and whose peer then sends a segment.
struct Scene {
    stage: Stage,
    /// The next sequence number of the NIC's.
    queued: u32,
}

impl Scene {
    fn new(many: u64) -> Scene {
        let mut scene = Scene { stage: Stage::with(true, many), queued: 1 };
        // The first segment is the one with which the timestamps begin.
        scene.receive();
        scene
    }

    fn unpredicted(&self) -> u64 {
        self.stage.nic_memory.words(nic::counters(0), COUNTERS)[Counter::Unpredicted as usize].load(Ordering::Relaxed)
    }

    fn poll(&mut self) {
        self.stage.now = self.stage.now.after(3);
        for _ in 0..4 {
            self.stage.worker.poll(self.stage.now);
        }
        while self.stage.far.receive(&mut self.stage.frame) {}
        while self.stage.programs[0].events.pop().is_some() {}
        self.stage.programs[0].events.release();
    }

    /// The peer sends a segment that acknowledges all. Returns how many segments were not predicted.
    fn receive(&mut self) -> u64 {
        let before = self.unpredicted();
        self.stage.send_segment(self.stage.seq, self.queued, &[7; LENGTH as usize]);
        self.stage.seq += LENGTH;
        self.poll();
        self.unpredicted() - before
    }

    fn command(&mut self, message: Message) {
        self.stage.programs[0].commands.push(message.to_words()).expect("room");
        self.stage.programs[0].commands.publish();
        self.poll();
    }

    /// The program sends bytes, and the peer acknowledges them.
    fn send(&mut self, kind: u16) {
        let address = session::HEAP as u32 + BUFFER + self.queued;
        self.queued += LENGTH;
        self.command(Message { kind, ..Message::new(Operation::NicSend, CID, address, LENGTH) });
        if kind & (HOLD | MORE) == 0 {
            self.stage.send_segment(self.stage.seq, self.queued, &[]);
            self.poll();
        }
    }
}

#[test]
fn the_next_segment_is_predicted_whatever_was_done_before() {
    let control = |control, value| Message::control(Operation::NicControl, control, CID, value, 0);
    let messages = [
        ("a report of what was read", Message::new(Operation::NicRecvd, CID, 0, LENGTH)),
        ("TCP_NODELAY", control(Control::NoDelay, 1)),
        ("TCP_CORK", control(Control::Cork, 1)),
        ("TCP_CORK off", control(Control::Cork, 0)),
        ("keep-alive", Message { length: 60 | 9 << 16, ..control(Control::KeepAlive, 1 << 31 | 600) }),
        ("TCP_USER_TIMEOUT", control(Control::UserTimeout, 5000)),
        ("a message that is refused", Message::new(Operation::NicRecvd, CID, 0, 1 << 30)),
    ];
    for many in [WorkerSettings::default().many, 1] {
        let mut scene = Scene::new(many);
        assert_eq!([scene.receive(), scene.receive()], [0, 0], "nothing was done");
        for (what, message) in messages {
            scene.command(message);
            assert_eq!(scene.receive(), 0, "{what}");
        }
        for agents in [control(Control::Mtu, 1400), control(Control::Interface, 0)] {
            scene.stage.command(agents);
            assert_eq!(scene.receive(), 0, "{agents:?}");
        }
        for kind in [0, ANSWER] {
            scene.send(kind);
            assert_eq!(scene.receive(), 0, "a message that was sent and acknowledged, {kind}");
        }
        // What the program holds back until more comes.
        scene.send(HOLD);
        scene.send(0);
        assert_eq!(scene.receive(), 0, "bytes that were held back");
        // In bursts, after each of which the program reports what it has read.
        for _ in 0..3 {
            let before = scene.unpredicted();
            for _ in 0..8 {
                scene.stage.send_segment(scene.stage.seq, scene.queued, &[7; LENGTH as usize]);
                scene.stage.seq += LENGTH;
            }
            scene.poll();
            scene.command(Message::new(Operation::NicRecvd, CID, 0, 8 * LENGTH));
            assert_eq!(scene.unpredicted(), before, "a burst");
        }
    }
}
