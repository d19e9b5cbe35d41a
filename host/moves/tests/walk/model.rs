//! A model of one connection's world: the kernel's socket, the NIC, the program, the journal, and the peer. Bytes are
//! counted, not kept: a stream is whole if whoever has the connection knows all that was written, sent, acknowledged
//! and read.

use baton_abi::layout::Owner;
use baton_moves::{Action, Custody, Outcome, Phase, Refusal, Source, Step};

/// How far both streams have come, as somebody knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Streams {
    /// Acknowledged by the peer, sent, written by the program.
    pub una: u32,
    pub nxt: u32,
    pub end: u32,
    /// Read by the program, received.
    pub read: u32,
    pub rcv: u32,
}

/// The kernel's socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Socket {
    /// It receives and sends.
    Live(Streams),
    /// Deaf, in repair mode, whole.
    Read(Streams),
    /// Established, empty, its input blocked.
    Shell,
    /// Established; it receives, and sends nothing.
    Imported(Streams),
    /// Closed in silence.
    Gone,
}

/// The NIC's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Slot {
    Empty,
    Mirrored,
    Held,
    Active(Streams),
    Leaving,
}

/// The world.
#[derive(Clone, Debug)]
pub struct World {
    pub socket: Socket,
    pub slot: Slot,
    pub nic_lives: bool,
    /// Who gets the frames, as the map of flows has it: it survives every death.
    pub custody: Custody,
    pub owner: Owner,
    /// Looks until the program leaves the operation that it is in.
    pub inside: u32,
    /// What survives agent and NIC: the journal, the record, the image in the slot, and how far the program has written
    /// and read.
    pub journal: Option<(Phase, Streams)>,
    pub record: Option<Streams>,
    pub rested: Option<Streams>,
    pub block: (u32, u32),
    /// The NIC is to run the next connection that it is handed, and to die before it answers.
    pub dies_in_handoff: bool,
    /// What the agent has in its own memory.
    pub exported: Option<Streams>,
    pub slot_is_taken: bool,
    pub memory_is_taken: bool,
    pub larger_is_taken: bool,
    /// The truth: what program and peer have done.
    pub written: u32,
    pub peer_got: u32,
    pub peer_sent: u32,
    pub peer_acked: u32,
    pub read: u32,
    pub fin_acknowledged: bool,
    pub finished: bool,
    /// The kernel's socket knows of the peer's FIN, which came before the first move. An import does not carry it, and
    /// the peer does not send it again.
    pub knows_fin: bool,
    /// Everything that was done, for the message of a failure.
    pub done: Vec<Action>,
}

impl World {
    pub fn new() -> World {
        World {
            socket: Socket::Live(Streams::default()),
            slot: Slot::Empty,
            nic_lives: true,
            custody: Custody::Kernel,
            owner: Owner::Kernel,
            inside: 0,
            journal: None,
            record: None,
            rested: None,
            block: (0, 0),
            dies_in_handoff: false,
            exported: None,
            slot_is_taken: false,
            memory_is_taken: false,
            larger_is_taken: false,
            written: 0,
            peer_got: 0,
            peer_sent: 0,
            peer_acked: 0,
            read: 0,
            fin_acknowledged: false,
            finished: false,
            knows_fin: true,
            done: Vec::new(),
        }
    }

    /// The NIC dies: what it held is lost, records and the map of flows stay.
    pub fn kill_nic(&mut self) {
        (self.nic_lives, self.slot) = (false, Slot::Empty);
        if self.custody == Custody::Nic {
            self.custody = Custody::Held;
        }
    }

    /// The agent dies, and its NIC with it; the next one starts its own.
    pub fn kill_agent(&mut self) {
        self.kill_nic();
        (self.exported, self.slot_is_taken, self.memory_is_taken, self.larger_is_taken) = (None, false, false, false);
        self.nic_lives = true;
    }

    /// Program and peer do what they can: write, read, send, acknowledge. Not every acknowledgement arrives.
    pub fn traffic(&mut self, acknowledgements_arrive: bool) {
        self.program_runs();
        self.peer_sent += 1;
        let (hears, speaks) = (self.kernel_hears(), self.kernel_speaks());
        match &mut self.socket {
            Socket::Live(streams) | Socket::Imported(streams) if hears => {
                streams.rcv = self.peer_sent;
                if speaks {
                    self.peer_acked = streams.rcv;
                    send(streams, &mut self.peer_got, acknowledgements_arrive);
                }
            }
            _ => {}
        }
        if let (true, Slot::Active(streams)) = (self.nic_lives, &mut self.slot) {
            streams.rcv = self.peer_sent;
            streams.nxt = streams.end;
            // Before anything of it leaves.
            self.record = Some(*streams);
            self.peer_acked = streams.rcv;
            send(streams, &mut self.peer_got, acknowledgements_arrive);
        }
    }

    fn kernel_hears(&self) -> bool {
        matches!(self.custody, Custody::Kernel | Custody::Mirrored)
    }

    fn kernel_speaks(&self) -> bool {
        self.kernel_hears() && matches!(self.socket, Socket::Live(_))
    }

    fn program_runs(&mut self) {
        let streams = match (self.owner, &mut self.socket, &mut self.slot) {
            (Owner::Kernel, Socket::Live(streams), _) => streams,
            (Owner::Kernel, other, _) => panic!("the program is let in at a socket that is {other:?}: {:?}", self.done),
            (Owner::Nic, _, Slot::Active(streams)) => streams,
            // It waits, or its NIC is dead and it writes into its memory all the same.
            _ => return,
        };
        (self.written, self.read) = (self.written + 1, streams.rcv);
        (streams.end, streams.read) = (self.written, self.read);
        self.block = (streams.end, streams.read);
    }

    /// At most one of kernel and NIC acts.
    pub fn check_senders(&self, step: Step) {
        assert!(!(self.kernel_speaks() && matches!(self.slot, Slot::Active(_))), "two speak at {step:?}: {:?}", self.done);
    }

    /// Whoever has the connection's bytes at a step knows everything.
    pub fn check(&self, step: Step, lost: bool) {
        if lost {
            return;
        }
        assert_eq!(self.owner, step.owner(), "the owner at {step:?}: {:?}", self.done);
        let dead = !self.nic_lives && step.custody() == Custody::Nic;
        let custody = if dead { Custody::Held } else { step.custody() };
        // A NIC that has died cannot replay: until the agent does, the kernel receives only what arrives.
        let released = matches!(self.done.last(), Some(Action::Release)) && self.custody == Custody::Kernel;
        assert!(released || self.custody == custody, "the frames at {step:?} are {:?}'s: {:?}", self.custody, self.done);
        assert_eq!(self.journal.map(|(phase, _)| phase), step.journal(), "the journal at {step:?}: {:?}", self.done);
        let holder = self.holder(step).unwrap_or_else(|| panic!("nobody has the bytes at {step:?}: {self:?}"));
        self.is_whole(&holder, step);
        if let Socket::Live(streams) = self.socket {
            self.is_whole(&streams, step);
        }
    }

    fn holder(&self, step: Step) -> Option<Streams> {
        let journalled = self.journal.map(|(_, streams)| streams);
        let at_death = self.record.or(journalled).map(|streams| Streams { end: self.block.0, read: self.block.1, ..streams });
        use Step::*;
        match step {
            Ended => None,
            Purged => journalled,
            HandedOff | Nic | Leaving | Left => match self.slot {
                Slot::Active(streams) => Some(streams),
                _ => at_death,
            },
            Rested | Grown => self.rested,
            Orphaned | Barred | Retaken | Vacated => at_death,
            _ => match self.socket {
                Socket::Live(streams) | Socket::Read(streams) | Socket::Imported(streams) => Some(streams),
                Socket::Shell | Socket::Gone => None,
            },
        }
    }

    fn is_whole(&self, has: &Streams, step: Step) {
        let whole = has.end == self.written
            && has.una <= self.peer_got
            && has.nxt >= self.peer_got
            && has.read == self.read
            && has.rcv >= self.peer_acked;
        assert!(whole, "bytes are lost, or come twice, at {step:?}: {has:?} in {self:?}");
    }

    /// Nothing is left behind of a move that is over.
    pub fn check_rest(&self, step: Step) {
        let taken = (self.slot_is_taken, self.memory_is_taken, self.larger_is_taken);
        match step {
            Step::Kernel => {
                assert!(matches!(self.socket, Socket::Live(_) | Socket::Gone), "{self:?}");
                assert!(self.knows_fin || self.socket == Socket::Gone, "the peer's FIN is lost: {:?}", self.done);
                assert_eq!((taken, self.slot, self.journal), ((false, false, false), Slot::Empty, None), "{self:?}");
            }
            Step::Nic => assert_eq!((taken, self.socket), ((true, true, false), Socket::Shell), "{self:?}"),
            other => panic!("a move ends at {other:?}: {:?}", self.done),
        }
    }

    fn nic(&mut self, from: &[Slot], to: Slot) -> Outcome {
        if !self.nic_lives {
            return Outcome::Refused(Refusal::NicGone);
        }
        assert!(from.contains(&self.slot), "the NIC's slot is {:?}: {:?}", self.slot, self.done);
        self.slot = to;
        Outcome::Done
    }

    /// Performs an action. The world refuses only what it cannot do.
    pub fn perform(&mut self, action: &Action) -> Outcome {
        self.done.push(action.clone());
        match action {
            Action::Reserve => {
                assert!(!self.slot_is_taken);
                // Whatever record is in the slot is of an earlier occupant.
                (self.slot_is_taken, self.record) = (true, None);
            }
            Action::Mirror => return self.steer(&[Slot::Empty], Slot::Mirrored, Custody::Mirrored),
            Action::Steal => return self.steer(&[Slot::Mirrored], Slot::Held, Custody::Held),
            Action::Cover | Action::Acknowledge | Action::Check | Action::Conclude(_) => {}
            Action::KeepOut => self.owner = Owner::Moving,
            Action::Leave => {
                if self.inside > 0 {
                    self.inside -= 1;
                    return Outcome::NotYet;
                }
            }
            Action::LetIn(owner) => self.owner = *owner,
            Action::Note(phase) => self.note(*phase),
            Action::Clear => self.journal = None,
            Action::Export | Action::Copy | Action::Purge | Action::Abandon => self.read_socket(action),
            Action::HandOff => {
                let streams = self.journal.expect("an entry").1;
                self.block = (streams.end, streams.read);
                let handed = self.steer(&[Slot::Held], Slot::Active(streams), Custody::Nic);
                if std::mem::take(&mut self.dies_in_handoff) {
                    self.traffic(false);
                    self.kill_nic();
                    return Outcome::Refused(Refusal::NicGone);
                }
                return handed;
            }
            Action::Rest => {
                let Slot::Active(streams) = self.slot else { return self.nic(&[], Slot::Leaving) };
                self.rested = Some(streams);
                return self.steer(&[self.slot], Slot::Leaving, Custody::Held);
            }
            Action::Import(source) => return self.import(*source),
            Action::Release => {
                self.custody = Custody::Kernel;
                let released = self.nic(&[Slot::Leaving], Slot::Empty);
                self.knows_fin |= released == Outcome::Done;
                return released;
            }
            Action::Replay => (self.custody, self.slot, self.knows_fin) = (Custody::Kernel, Slot::Empty, true),
            Action::Cancel => (self.custody, self.slot) = (Custody::Kernel, Slot::Empty),
            Action::Finish | Action::FinishAnew => self.finish(),
            Action::GiveMemory => self.memory_is_taken = false,
            Action::Free => (self.slot_is_taken, self.memory_is_taken) = (false, false),
            Action::Enlarge => self.larger_is_taken = true,
            Action::Shrink => self.larger_is_taken = false,
            Action::Grow => assert!(self.larger_is_taken && self.rested.is_some()),
            Action::Resume => {
                let streams = self.rested.expect("an image");
                let resumed = self.steer(&[Slot::Leaving], Slot::Active(streams), Custody::Nic);
                self.larger_is_taken &= resumed != Outcome::Done;
                return resumed;
            }
            Action::StealAgain => {
                assert!(self.nic_lives);
                (self.slot_is_taken, self.memory_is_taken) = (true, true);
                return self.steer(&[Slot::Empty], Slot::Held, Custody::Held);
            }
            Action::End | Action::GiveUp => {
                (self.custody, self.slot, self.journal) = (Custody::Kernel, Slot::Empty, None);
                (self.socket, self.slot_is_taken, self.memory_is_taken) = (Socket::Gone, false, false);
            }
            Action::EndNic => self.kill_nic(),
        }
        Outcome::Done
    }

    fn steer(&mut self, from: &[Slot], to: Slot, custody: Custody) -> Outcome {
        let outcome = self.nic(from, to);
        if outcome == Outcome::Done {
            self.custody = custody;
        }
        outcome
    }

    fn note(&mut self, phase: Phase) {
        self.journal = match (phase, self.socket) {
            (Phase::Copied, _) => Some((phase, self.exported.expect("what was read"))),
            (_, Socket::Imported(streams) | Socket::Live(streams) | Socket::Read(streams)) => Some((phase, streams)),
            (_, socket) => panic!("{phase:?} of a socket that is {socket:?}: {:?}", self.done),
        };
    }

    fn read_socket(&mut self, action: &Action) {
        assert_eq!(self.owner, Owner::Moving, "the program is inside: {:?}", self.done);
        self.socket = match (action, self.socket) {
            (Action::Export, Socket::Live(streams)) => {
                self.exported = Some(streams);
                Socket::Read(streams)
            }
            (Action::Copy, Socket::Read(streams)) => {
                self.memory_is_taken = true;
                Socket::Read(streams)
            }
            (Action::Purge, Socket::Read(_)) => Socket::Shell,
            (Action::Abandon, Socket::Read(streams) | Socket::Live(streams)) => Socket::Live(streams),
            (action, socket) => panic!("{action:?} of a socket that is {socket:?}: {:?}", self.done),
        };
    }

    fn import(&mut self, source: Source) -> Outcome {
        assert_eq!(self.custody, Custody::Held, "the socket would hear in the middle of an import: {:?}", self.done);
        let (_, journalled) = self.journal.expect("an entry");
        let streams = match source {
            Source::Exported => journalled,
            Source::Rested => self.rested.expect("an image"),
            Source::Record => {
                let (end, read) = self.block;
                Streams { end, read, ..self.record.unwrap_or(journalled) }
            }
        };
        (self.socket, self.finished, self.knows_fin) = (Socket::Imported(streams), false, false);
        if self.fin_acknowledged && source == Source::Rested { Outcome::DoneFinAcknowledged } else { Outcome::Done }
    }

    fn finish(&mut self) {
        if let Socket::Imported(streams) | Socket::Live(streams) = self.socket {
            (self.socket, self.finished) = (Socket::Live(streams), true);
            return;
        }
        panic!("a socket that is {:?} cannot speak: {:?}", self.socket, self.done);
    }
}

fn send(streams: &mut Streams, peer_got: &mut u32, acknowledgement_arrives: bool) {
    assert!(streams.una <= *peer_got, "the peer would see a hole");
    (streams.nxt, *peer_got) = (streams.end, streams.end);
    if acknowledgement_arrives {
        streams.una = *peer_got;
    }
}
