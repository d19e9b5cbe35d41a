//! Partial offload: code that NIC and host's TCP share. The NIC *lends* a connection that leaves its fast path to the
//! host's TCP, which runs it and gives it back when it is quiet. Both are workers over the same slots and the same
//! session memory; only the state of the protocol changes hands, through memory that the two share.

use crate::growth::largest_window;
use crate::offloaded::{Memory, Offloaded, Tcp};
use baton_abi::layout::host_tcp;
use baton_abi::{Control, Message};
use baton_image::{Image, MAX_ENCODED, NicState};
use baton_shm::{Pooled, Region};
use baton_tcp::{Connection, Instant, State as TcpState};
use core::sync::atomic::Ordering;

/// Where the TCP of a connection runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Path {
    /// All of it is in this worker.
    #[default]
    Whole,
    /// Only the fast path is in this worker; the connection is lent when it leaves that.
    Fast,
    /// As [`Path::Fast`], but the connection is not lent, since it is about to leave the NIC.
    Pinned,
}

/// A connection that the host's TCP has.
pub(crate) struct Lent {
    /// Its state at the time when it was lent, except the events that wait for its program.
    pub offloaded: Pooled<Offloaded>,
    /// It was recalled: its frames are held, and so are commands and messages.
    pub recalled: bool,
    /// The agent's commands and the program's messages that wait until it is back.
    pub commands: Vec<Message>,
    pub messages: Vec<Message>,
}

/// Parts of a connection's state that arrive as messages before the image: ranges received behind a hole, and a FIN
/// behind them.
#[derive(Default)]
pub(crate) struct Arriving {
    ranges: Vec<(u32, u32)>,
    fin: Option<u32>,
}

impl Arriving {
    /// Takes such a message. False if it is another one.
    pub fn take(&mut self, message: &Message) -> bool {
        match Control::from_number(message.kind) {
            Some(Control::Range) => self.ranges.push((message.address, message.length)),
            Some(Control::FinBehindHole) => self.fin = Some(message.address),
            _ => return false,
        }
        true
    }
}

/// The state of a connection that changes hands.
pub(crate) struct State {
    image: Image,
    nic: NicState,
    pub session: u32,
    pub memory: Memory,
    pub limits: [u32; 2],
    /// See [`Offloaded::continue_record`].
    pub ranges_table: u32,
}

/// 4-byte words behind the image: session, memory (5), limits (2), table of ranges.
const WORDS: usize = 9;
const _: () = assert!(MAX_ENCODED + 4 * WORDS <= host_tcp::STATE_BYTES && MAX_ENCODED.is_multiple_of(4));

impl State {
    /// Reads the state of a slot's connection. None if there is none.
    pub fn read(memory: &Region, slot: u32) -> Option<State> {
        let base = host_tcp::state(slot);
        let mut bytes = [0u8; MAX_ENCODED];
        memory.read(base, &mut bytes).ok()?;
        let (image, nic) = Image::decode_with(&bytes).ok()?;
        let words: [u32; WORDS] =
            core::array::from_fn(|word| memory.word32(base + MAX_ENCODED + 4 * word).load(Ordering::Acquire));
        let [session, receive_base, receive_size, send_base, send_size, block, receive_limit, send_limit, ranges_table] = words;
        Some(State {
            image,
            nic: nic?,
            session,
            memory: Memory { receive_base, receive_size, send_base, send_size, block },
            limits: [receive_limit, send_limit],
            ranges_table,
        })
    }

    /// The image, which says which connection it is.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The connection as it goes on from here.
    pub fn connection(&self, arrived: Arriving, now: Instant) -> Connection {
        let mut tcp = Connection::from_image(&self.image, Some(&self.nic), self.memory.receive_size, now);
        tcp.hold(arrived.ranges.into_iter(), arrived.fin);
        if let Some(most) = largest_window(self.limits) {
            tcp.limit_window(most);
        }
        tcp
    }
}

impl Offloaded {
    /// Writes the state for the next owner to the slot's place in `shared`, after sending the parts that do not fit
    /// there as messages with `send`. False, with nothing sent, if the connection has ended.
    pub fn pass_on(&self, shared: &Region, now: Instant, mut send: impl FnMut(Control, u32, u32)) -> bool {
        // A reset may have ended it just now.
        let image = Some(&self.tcp).filter(|tcp| tcp.state() != TcpState::Closed).and_then(|tcp| tcp.to_image(&self.image, now));
        let Some(image) = image else { return false };
        let mut bytes = [0u8; MAX_ENCODED];
        if image.encode_with(Some(&self.tcp.nic_state(now)), &mut bytes).is_err() {
            return false;
        }
        let base = host_tcp::state(self.slot());
        let _ = shared.write(base, &bytes);
        let Memory { receive_base, receive_size, send_base, send_size, block } = self.memory;
        let [receive_limit, send_limit] = self.growth.limits();
        let words = [
            self.session,
            receive_base,
            receive_size,
            send_base,
            send_size,
            block,
            receive_limit,
            send_limit,
            self.ranges_table(),
        ];
        for (at, word) in words.into_iter().enumerate() {
            shared.word32(base + MAX_ENCODED + 4 * at).store(word, Ordering::Release);
        }
        for (left, right) in self.tcp.out_of_order() {
            send(Control::Range, left, right);
        }
        if let Some(at) = self.tcp.fin_behind_hole() {
            send(Control::FinBehindHole, at, 0);
        }
        true
    }

    /// Continues with the state that the last owner has passed on. (A connection of partial offload has no posted
    /// buffers.)
    pub fn go_on(&mut self, state: &State, arrived: Arriving, now: Instant) {
        self.tcp = Tcp::new(state.connection(arrived, now));
        self.image = state.image;
        self.set_mtu(state.image.mtu);
        self.replace_send_queue(&state.image, state.memory);
        self.continue_record(state.ranges_table);
    }

    /// Whether the connection is on its fast path, and lent when it leaves that.
    #[inline(always)]
    pub fn is_on_fast_path(&self) -> bool {
        // The host's TCP does not know which connections their programs have closed.
        self.path == Path::Fast && !self.closing
    }
}
