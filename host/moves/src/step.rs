//! Where a connection is on its way between kernel and NIC. Everything else that is said of a connection's place, the
//! program's [`Owner`] word, who gets its frames ([`Custody`]), what the journal holds ([`Phase`]), and what a death
//! leads to ([`Fate`]), is a view of the step.

use crate::action::{Action, Source};
use baton_abi::layout::Owner;

macro_rules! steps {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// The last step that has been made.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum Step { $($(#[doc = $doc])* $name,)* }

        impl Step {
            /// All of them.
            pub const ALL: &[Step] = &[$(Step::$name,)*];
        }
    };
}

steps! {
    /// The kernel has the connection, and no move is under way.
    Kernel,
    /// Offload: the connection may move, its route is known, a slot of the NIC is reserved.
    Reserved,
    /// The NIC copies the connection's frames; the kernel still gets them.
    Mirrored,
    /// The copy covers everything that the kernel may hold out of order, which cannot be read.
    Covered,
    /// The program is kept out of the connection, and may still be inside an operation.
    Quiescing,
    /// The program has left.
    Quiesced,
    /// The NIC alone gets the connection's frames and holds them; none of the kernel's leaves.
    Stolen,
    /// The journal says that the socket is being read.
    Reading,
    /// A filter drops all that the socket receives, it is in repair mode, its numbers are read.
    Read,
    /// The bytes of both queues are in session memory, too.
    Copied,
    /// The journal holds the image: the connection can be made anew from it, whatever becomes of the socket.
    Recorded,
    /// The socket is a shell.
    Purged,
    /// The NIC runs the connection; its program is still kept out.
    HandedOff,
    /// The NIC has the connection, and no move is under way.
    Nic,
    /// Restore or growth: the program is kept out, and may still be inside an operation.
    Leaving,
    /// The program has left.
    Left,
    /// The NIC has written the image and holds what comes.
    Rested,
    /// The kernel's socket has numbers and queues and can receive. It does not send, and the NIC still holds the
    /// frames.
    Imported,
    /// The journal says that the kernel is to go on from its own numbers: an import from the image would go back in
    /// time.
    Sending,
    /// The frames are the kernel's again, and what was held is replayed to it.
    Released,
    /// As [`Step::Sending`], but the kernel sends already, silenced: the peer has acknowledged our FIN, and the kernel
    /// accepts that only after it has sent its own.
    Finished,
    /// The kernel receives and sends.
    Back,
    /// The journal holds nothing; frames are the kernel's, the program is kept out, slot and memory are taken.
    Cleared,
    /// Only the program is still kept out.
    Freed,
    /// Growth: the journal says where the larger memory is; it and the old one hold the same bytes.
    Grown,
    /// The NIC that had the connection has died.
    Orphaned,
    /// The program is kept out of a connection whose NIC has died.
    Barred,
    /// The next NIC holds the connection's frames.
    Retaken,
    /// The program has left, or has had its time.
    Vacated,
    /// As [`Step::Imported`], from the recovery record.
    Restored,
    /// The connection ended on the NIC: its program may still read what is in session memory.
    Ended,
}

/// Who gets the frames that the peer sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Custody {
    /// The kernel.
    Kernel,
    /// The kernel; the NIC has copies.
    Mirrored,
    /// Nobody: the NIC holds them, and the kernel is silenced. Without a NIC they are lost, and the peer sends them
    /// again.
    Held,
    /// The NIC.
    Nic,
}

/// What the journal says of a connection, for the next agent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Phase {
    /// The socket is being read: its input may be blocked and it may be in repair mode, but nothing of it is gone.
    Reading = 1,
    /// The queues' bytes are in session memory: whatever the socket has become, the connection can be made anew from
    /// them.
    Copied = 2,
    /// The connection is in the kernel again; what it had not sent is being sent.
    Sending = 3,
}

impl Phase {
    /// The phase of this number, as the journal holds it.
    pub fn from_number(number: u32) -> Option<Phase> {
        [Phase::Reading, Phase::Copied, Phase::Sending].into_iter().find(|phase| *phase as u32 == number)
    }

    /// The step at which a next agent takes the connection over.
    pub fn resumes_at(self) -> Step {
        match self {
            Phase::Reading => Step::Read,
            Phase::Copied => Step::Orphaned,
            Phase::Sending => Step::Sending,
        }
    }
}

/// Who dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Death {
    /// The NIC alone.
    Nic,
    /// The agent, and its NIC with it.
    Agent,
}

/// What a death leads to. In every case the connection goes on in the kernel, unless it had ended before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It has not left the kernel: what was done is undone.
    Undone,
    /// It is made anew from image or recovery record and from session memory ([`Source::Record`]).
    Recovered,
    /// The restore goes on; the agent replays to the kernel what the NIC no longer can.
    Continued,
    /// It had ended.
    Ended,
}

impl Step {
    /// Those of an offload and a restore after which a death tests most, in order.
    pub const OF_A_MOVE: [Step; 11] = [
        Step::Mirrored,
        Step::Quiesced,
        Step::Stolen,
        Step::Read,
        Step::Recorded,
        Step::Purged,
        Step::HandedOff,
        Step::Rested,
        Step::Imported,
        Step::Sending,
        Step::Released,
    ];

    /// The step of this number.
    pub fn from_number(number: u8) -> Option<Step> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// What the program's block says.
    pub fn owner(self) -> Owner {
        match self {
            Step::Kernel | Step::Reserved | Step::Mirrored | Step::Covered => Owner::Kernel,
            Step::Nic | Step::Ended => Owner::Nic,
            _ => Owner::Moving,
        }
    }

    /// Who gets the connection's frames.
    pub fn custody(self) -> Custody {
        use Step::*;
        match self {
            Kernel | Reserved | Released | Back | Cleared | Freed | Ended => Custody::Kernel,
            Mirrored | Covered | Quiescing | Quiesced => Custody::Mirrored,
            HandedOff | Nic | Leaving | Left => Custody::Nic,
            Stolen | Reading | Read | Copied | Recorded | Purged | Rested | Imported | Sending | Finished | Grown | Orphaned
            | Barred | Retaken | Vacated | Restored => Custody::Held,
        }
    }

    /// What the journal says.
    pub fn journal(self) -> Option<Phase> {
        use Step::*;
        match self {
            Kernel | Reserved | Mirrored | Covered | Quiescing | Quiesced | Stolen | Cleared | Freed | Ended => None,
            Reading | Read | Copied => Some(Phase::Reading),
            Recorded | Purged | HandedOff | Nic | Leaving | Left | Rested | Imported | Grown | Orphaned | Barred | Retaken
            | Vacated | Restored => Some(Phase::Copied),
            Sending | Released | Finished | Back => Some(Phase::Sending),
        }
    }

    /// Whether the connection counts as the NIC's: handed off, and not yet the kernel's again.
    pub fn is_on_nic(self) -> bool {
        use Step::*;
        matches!(
            self,
            HandedOff
                | Nic
                | Leaving
                | Left
                | Rested
                | Grown
                | Orphaned
                | Barred
                | Retaken
                | Vacated
                | Restored
                | Imported
                | Sending
                | Released
                | Finished
                | Back
                | Cleared
        )
    }

    /// The action that undoes this step of an offload, or leads on from it to the kernel.
    pub fn inverse(self) -> Option<Action> {
        Some(match self {
            Step::Reserved | Step::Cleared => Action::Free,
            Step::Mirrored | Step::Covered | Step::Quiescing | Step::Quiesced | Step::Stolen => Action::Cancel,
            Step::Reading | Step::Back => Action::Clear,
            Step::Read => Action::Abandon,
            Step::Copied => Action::GiveMemory,
            Step::Recorded => Action::Note(Phase::Reading),
            Step::Purged => Action::Import(Source::Exported),
            Step::HandedOff => Action::LetIn(Owner::Nic),
            Step::Nic => Action::KeepOut,
            Step::Leaving | Step::Retaken => Action::Leave,
            Step::Left => Action::Rest,
            Step::Rested => Action::Import(Source::Rested),
            Step::Grown => Action::Resume,
            Step::Imported | Step::Restored => Action::Note(Phase::Sending),
            Step::Released => Action::Finish,
            Step::Freed => Action::LetIn(Owner::Kernel),
            Step::Orphaned => Action::KeepOut,
            Step::Barred => Action::StealAgain,
            Step::Vacated => Action::Import(Source::Record),
            // What lets the frames go depends on how the connection came here.
            Step::Kernel | Step::Sending | Step::Finished | Step::Ended => return None,
        })
    }

    /// What becomes of the connection if somebody dies just after this step of an offload, a restore or a recovery. A
    /// growth that has rested is recovered when its NIC dies.
    pub fn fate(self, death: Death) -> Fate {
        use Step::*;
        match (death, self) {
            (_, Ended) => Fate::Ended,
            (Death::Agent, _) => match self.journal() {
                None | Some(Phase::Reading) => Fate::Undone,
                Some(Phase::Copied) => Fate::Recovered,
                Some(Phase::Sending) => Fate::Continued,
            },
            // Before the steal the NIC's death is noticed in time. Between steal and handoff nothing checks for it,
            // unless calls are made elsewhere, and then it is undone; and a handoff that is not answered may have taken
            // place.
            (Death::Nic, Kernel | Reserved | Mirrored | Covered | Quiescing | Quiesced) => Fate::Undone,
            (Death::Nic, Stolen | Reading | Read | Copied | Recorded | Purged) => Fate::Recovered,
            (Death::Nic, HandedOff | Nic | Leaving | Left | Grown | Orphaned | Barred | Retaken | Vacated) => Fate::Recovered,
            (Death::Nic, Rested | Imported | Restored | Sending | Released | Finished | Back | Cleared | Freed) => {
                Fate::Continued
            }
        }
    }
}
