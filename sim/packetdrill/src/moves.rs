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
        let now = self.instant();
        for stream in self.sockets.values_mut().filter_map(Socket::stream_mut) {
            stream.pass_through_image(now);
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
    /// opening stays as it is.
    fn pass_through_image(&mut self, now: Instant) {
        let Some(image) = self.tcp.to_image(&Image::open(self.flow), now) else { return };
        let mut bytes = [0; MAX_ENCODED];
        let Ok(length) = image.encode(&mut bytes) else { return };
        let Ok(image) = Image::decode(&bytes[..length]) else { return };
        let memory = self.tcp.receive_memory();
        self.moved = true;
        let segment = self.tcp.max_segment();
        self.tcp = Connection::from_image(&image, memory, now);
        // What the host has set is not in an image: it sets it anew.
        self.tcp.limit_window(FIRST_WINDOW);
        self.tcp.set_max_segment(segment);
    }
}
