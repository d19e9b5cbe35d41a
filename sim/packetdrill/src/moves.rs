//! Moves through the connection image: before every N-th event each connection ends in an image and is made anew from it.

use crate::socket::Socket;
use crate::stream::{FIRST_WINDOW, Stream};
use crate::world::World;
use baton_image::{Image, MAX_ENCODED};
use baton_tcp::{Connection, Instant};

impl World {
    /// An event begins: a call or a packet. Connections move if it is one of those before which they do.
    pub fn begin_event(&mut self) {
        self.events += 1;
        let every = u64::from(self.flags.move_every);
        if every == 0 || !self.events.is_multiple_of(every) {
            return;
        }
        let (now, by_kernel) = (self.instant(), self.flags.by_kernel);
        for stream in self.sockets.values_mut().filter_map(Socket::stream_mut) {
            if stream.pass_through_image(by_kernel, now) {
                // What the host has set is not in an image: it sets it anew.
                stream.tcp.limit_window(FIRST_WINDOW);
                stream.tcp.set_slow_start_after_idle(self.sysctls.slow_start_after_idle);
            }
        }
    }

    /// Deadlines that have passed are not timers any more: who waits sees the time itself.
    pub fn expire_deadlines(&mut self) {
        let now = self.now;
        self.deadlines.retain(|_, at| *at > now);
    }
}

impl Stream {
    /// Writes the connection down, encoded as between host and NIC, and goes on with what is made from that. A connection that is
    /// opening stays as it is, and false is returned.
    fn pass_through_image(&mut self, by_kernel: bool, now: Instant) -> bool {
        let Some(image) = self.tcp.to_image(&Image::open(self.flow), now) else { return false };
        let nic = (!by_kernel).then(|| self.tcp.nic_state(now));
        let mut bytes = [0; MAX_ENCODED];
        let length = image.encode_with(nic.as_ref(), &mut bytes).expect("an image fits its room");
        let (image, nic) = Image::decode_with(&bytes[..length]).expect("an image that was written reads back");
        let (memory, segment) = (self.tcp.receive_memory(), self.tcp.max_segment());
        // What was received out of order goes beside the image; its bytes stay where they are.
        let ranges: Vec<(u32, u32)> = self.tcp.out_of_order().collect();
        let fin = self.tcp.fin_behind_hole();
        self.tcp = Connection::from_image(&image, nic.as_ref(), memory, now);
        self.tcp.hold(ranges.into_iter(), fin);
        self.tcp.set_max_segment(segment);
        self.moved = by_kernel;
        true
    }
}
