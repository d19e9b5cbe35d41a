//! What a move asks of the kernel, the NIC, the program and the journal, and what comes of it.

use crate::refusal::Refusal;
use crate::step::{Phase, Step};
use baton_abi::layout::Owner;

/// What a connection is made from when it goes into the kernel's socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// What was read from the socket just before: an offload is undone.
    Exported,
    /// The image that the NIC wrote when it came to rest.
    Rested,
    /// The recovery record of a NIC that has died or, if it never published one, the image in the journal.
    Record,
}

/// Something to be done. Those that ask something of the NIC ([`Action::asks_nic`]) may have the outcome
/// [`Outcome::Sent`]; any may have [`Outcome::NotYet`], and is then repeated.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Kernel and agent: whether the connection may move, by which route; reserve a slot.
    Reserve,
    /// NIC: copy the connection's frames.
    Mirror,
    /// Kernel and NIC: whether the copy covers what the kernel holds out of order.
    Cover,
    /// Kernel: make the socket send its SACK blocks, by which the NIC sees what its copy has to cover.
    Acknowledge,
    /// Program: keep it out of the connection from now on.
    KeepOut,
    /// Program: whether it has left the operation that it was in.
    Leave,
    /// Kernel and NIC: look once more whether the connection may move, then the NIC alone gets its frames, and nothing
    /// of the kernel's leaves.
    Steal,
    /// Journal: write this phase. With [`Phase::Copied`] the image, with [`Phase::Sending`] what the kernel goes on
    /// from.
    Note(Phase),
    /// Kernel: let a filter drop all that the socket receives, enter repair mode, read the numbers twice. A refusal
    /// leaves the socket as it was.
    Export,
    /// Kernel: copy the bytes of both queues into session memory.
    Copy,
    /// Kernel: make the socket a shell. A refusal may leave it neither the one nor the other.
    Purge,
    /// NIC: run the connection, frames held so far first.
    HandOff,
    /// Program: let it in again, at this owner's.
    LetIn(Owner),
    /// Kernel: whether it can take the connection back (route and source address).
    Check,
    /// NIC: write the image, hold what comes, end.
    Rest,
    /// Kernel: import the connection into the socket, which receives but does not send yet.
    Import(Source),
    /// NIC: the frames are the kernel's; replay to it what the peer said last and what was held.
    Release,
    /// Agent: the same without a NIC that has run the connection: replay what the import could not carry, the peer's
    /// FIN too, from the image and, if there is one, the record. The NIC, if it holds frames, gives them up; those that
    /// were mirrored, too, since the kernel's copies went with its out-of-order queue.
    Replay,
    /// NIC: undo a mirror or a steal; what was held goes to the kernel, which has everything that was mirrored.
    Cancel,
    /// Kernel: leave repair mode, send what was unsent, close what was closed.
    Finish,
    /// As [`Action::Finish`], by the next agent: as far as the socket shows that it has not been done.
    FinishAnew,
    /// Kernel: undo [`Action::Export`].
    Abandon,
    /// Agent: give session memory back.
    GiveMemory,
    /// Journal: the entry counts no more.
    Clear,
    /// Agent: give slot and memory back, whatever of them is taken.
    Free,
    /// Agent: take larger memory from the session's heap.
    Enlarge,
    /// Agent and journal: copy what the old memory holds into the larger one, and note where that is.
    Grow,
    /// NIC: go on in the larger memory. The agent gives the old one back.
    Resume,
    /// Agent: give back the memory that a growth took.
    Shrink,
    /// NIC: the next one holds the connection's frames; nothing of it meets the kernel.
    StealAgain,
    /// The connection has ended on the NIC: its frames are nobody's, the slot is free, the shell is closed in silence.
    /// What the program has not read stays where it is.
    End,
    /// The connection cannot go to the kernel and is given up: as [`Action::End`], but what is held goes to the kernel,
    /// which resets the peer.
    GiveUp,
    /// The NIC does not answer, or does what it must not: end it. [`crate::Event::NicDied`] follows.
    EndNic,
    /// The move is over: answer whoever requested it.
    Conclude(Conclusion),
}

/// How a move has ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Conclusion {
    /// The connection is where it was asked to be.
    Moved,
    /// It has more memory, or there was none for it. No answer is due.
    Grown,
    /// It stays where it was, or has ended.
    Stays(Refusal),
    /// Its NIC or its agent had died; it is in the kernel.
    Recovered,
    /// The kernel refused it although everything had been checked. True: in a recovery.
    Lost(Refusal, bool),
}

/// What has come of an action.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is done.
    Done,
    /// Of [`Action::Import`]: it is done, and the peer had acknowledged our FIN. With the acknowledgement that is
    /// replayed the kernel's socket may be over, and its entry for TIME-WAIT has the options that the socket has then:
    /// so [`Action::Finish`], which puts the program's back, comes before the frames are released.
    DoneFinAcknowledged,
    /// Not yet: ask again a moment later.
    NotYet,
    /// The NIC has been sent a command. [`crate::Event::Answered`] says what has come of it.
    Sent,
    /// It is performed elsewhere, since it may take as long as the program likes: [`crate::Move::complete`] goes on
    /// when it is done, and no event comes before.
    Later,
    /// It cannot be done.
    Refused(Refusal),
}

impl From<Result<(), Refusal>> for Outcome {
    fn from(result: Result<(), Refusal>) -> Outcome {
        match result {
            Ok(()) => Outcome::Done,
            Err(refusal) => Outcome::Refused(refusal),
        }
    }
}

/// Kernel, NIC, program, agent and journal, as one connection's move sees them.
pub trait World {
    /// Performs an action of the connection. One whose outcome was [`Outcome::Later`] is performed again when what it
    /// waits for is done.
    fn perform(&mut self, action: &Action) -> Outcome;

    /// Completes an action whose outcome was [`Outcome::Sent`], now that the NIC has answered.
    fn answered(&mut self, action: &Action, answer: Result<(), Refusal>) -> Outcome;

    /// The time, microseconds of a clock that does not run back. Performing takes time: a program's time to leave
    /// begins when it is kept out.
    fn now(&self) -> u64;

    /// A step has been made. Tests let somebody die here.
    fn reached(&mut self, step: Step) {
        let _ = step;
    }
}

impl Action {
    /// Whether the NIC is sent a command for it: then its outcome may be [`Outcome::Sent`].
    pub fn asks_nic(&self) -> bool {
        matches!(
            self,
            Action::Mirror
                | Action::Steal
                | Action::HandOff
                | Action::Rest
                | Action::Release
                | Action::Replay
                | Action::Cancel
                | Action::Resume
                | Action::StealAgain
                | Action::End
        )
    }

    /// The step that the action leads to from another one, if it leads anywhere.
    pub(crate) fn reaches(&self, from: Step) -> Step {
        use Step::*;
        match (self, from) {
            (Action::Reserve, _) => Reserved,
            (Action::Mirror, _) => Mirrored,
            (Action::Cover, _) => Covered,
            (Action::KeepOut, Covered) => Quiescing,
            (Action::KeepOut, Orphaned) => Barred,
            (Action::KeepOut, _) => Leaving,
            (Action::Leave, Quiescing) => Quiesced,
            (Action::Leave, Retaken) => Vacated,
            (Action::Leave, _) => Left,
            (Action::Steal, _) => Stolen,
            (Action::Note(Phase::Reading), Recorded) => Copied,
            (Action::Note(Phase::Reading), _) => Reading,
            (Action::Note(Phase::Copied), _) => Recorded,
            (Action::Note(Phase::Sending), _) => Sending,
            (Action::Export | Action::GiveMemory, _) => Read,
            (Action::Copy, _) => Copied,
            (Action::Purge, _) => Purged,
            (Action::HandOff | Action::Resume, _) => HandedOff,
            (Action::LetIn(Owner::Nic), _) => Nic,
            (Action::LetIn(_), _) => Kernel,
            (Action::Rest, _) => Rested,
            (Action::Import(Source::Record), _) => Restored,
            (Action::Import(_), _) => Imported,
            (Action::Release | Action::Replay, Sending) => Released,
            (Action::Release | Action::Replay, _) => Back,
            (Action::Finish | Action::FinishAnew, Sending) => Finished,
            (Action::Finish | Action::FinishAnew, _) => Back,
            (Action::Cancel, Mirrored | Covered) => Reserved,
            (Action::Cancel, _) => Cleared,
            (Action::Abandon, _) => Reading,
            (Action::Clear, Reading) => Stolen,
            (Action::Clear, _) => Cleared,
            (Action::Free, Reserved) | (Action::GiveUp, _) => Kernel,
            (Action::Free, _) => Freed,
            (Action::Grow, _) => Grown,
            (Action::StealAgain, _) => Retaken,
            (Action::End, _) => Ended,
            (
                Action::Acknowledge | Action::Check | Action::Enlarge | Action::Shrink | Action::EndNic | Action::Conclude(_),
                step,
            ) => step,
        }
    }
}
