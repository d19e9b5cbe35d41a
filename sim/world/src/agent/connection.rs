//! What the agent knows of a connection.

use super::watch::Asked;
use crate::block::Block;
use crate::journal::{Memory, OnNic};
use crate::keeper::{Kept, Until};
use crate::kernel::Descriptor;
use baton_abi::Cid;
use baton_abi::layout::block;
use baton_core::{Stage, Standing};
use baton_image::{Image, NicState, Stay};
use baton_moves::Move;
use baton_supervision::Retry;
use baton_wire::Flow;

/// An enlargement that is under way.
pub(super) struct Growing {
    /// The cid before it.
    pub cid: Cid,
    /// Blocks of memory that are not in use.
    pub unused: [Option<(u32, u32)>; 2],
    pub larger: Memory,
}

/// What a program wants of a connection that is in the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wish {
    /// It closes it.
    Forget,
    /// Another process is about to have it, too.
    GiveBack,
}

pub(super) struct Connection {
    pub number: u32,
    pub session: u32,
    pub descriptor: Descriptor,
    pub flow: Flow,
    pub until: Until,
    pub block: Block,
    pub machine: Move,
    /// Whether it is in the queue of moves that wait.
    pub under_way: bool,
    /// When it last gave the NIC a command that is to be answered.
    pub asked: Asked,
    pub cid: Option<Cid>,
    pub on_nic: Option<OnNic>,
    /// Bytes of receive and of send memory that the NIC has asked for. None: it rests so that its empty memory can lose
    /// its contents.
    pub wants: Option<(u32, u32)>,
    pub growing: Option<Growing>,
    /// What was read from the socket, until it is in session memory.
    pub exported: Option<Image>,
    /// What an earlier NIC knew beside it, if that holds after the stay in the kernel; until the handoff.
    pub nic: Option<Box<NicState>>,
    /// What the NIC knew when it gave the connection to the kernel.
    pub stay: Option<Box<Stay>>,
    /// The image from which the kernel's socket is made.
    pub image: Option<Image>,
    /// Number of changes to its block.
    pub moves: u32,
    /// What the program wants that needs it in the kernel; attempts to restore it for that.
    pub wish: Option<(Wish, u8)>,
    /// It is to go to the NIC again when it has come to the kernel, or could not go: somebody has asked for that.
    pub wanted: bool,
    /// It has to leave the NIC.
    pub must_return: bool,
    /// When it is tried again to take it to where it should be.
    pub retry: Retry,
    /// There is no connection any more, because it could not be restored.
    pub lost: bool,
}

impl Connection {
    pub fn new(number: u32, kept: &Kept, block: Block) -> Connection {
        Connection {
            number,
            session: kept.session,
            descriptor: kept.descriptor,
            flow: kept.flow,
            until: kept.until,
            moves: block.load(block::MOVES),
            block,
            machine: Move::new(),
            under_way: false,
            asked: Asked::default(),
            cid: None,
            on_nic: None,
            wants: None,
            growing: None,
            exported: None,
            nic: None,
            stay: None,
            image: None,
            wish: None,
            wanted: false,
            must_return: false,
            retry: Retry::default(),
            lost: false,
        }
    }

    /// What the keeper holds of it.
    pub fn kept(&self) -> Kept {
        Kept { session: self.session, descriptor: self.descriptor, flow: self.flow, until: self.until }
    }

    pub fn stage(&self) -> Stage {
        Stage::of(self.machine.step(), self.machine.goal())
    }

    /// Whether the NIC has it, or is about to get it.
    pub fn is_moved(&self) -> bool {
        matches!(self.stage(), Stage::Nic | Stage::Offloading)
    }

    /// As far as it counts for its next move.
    pub fn standing(&self, now: u64) -> Standing {
        let (stage, put_off) = (self.stage(), self.machine.put_off_for(now) > 0);
        Standing { stage, wanted: self.wanted, must_return: self.must_return, put_off, attached: false, onward: false }
    }
}
