//! The commands that wait for the data half. Packets without data leave after all other commands, also after an RTS: so
//! replies for which no sender waits can be postponed without delaying a message.

use crate::interface::Command;
use crate::queue::take_first;
use alloc::collections::VecDeque;
use baton_wire::Endpoint;
use baton_wire::rmpp::Kind;

/// Two queues of commands, and the number of commands of each kind in them.
pub(super) struct Commands {
    /// All but packets.
    first: VecDeque<Command>,
    /// [`Command::Control`].
    packets: VecDeque<Command>,
    /// Commands that cannot wait.
    urgent: usize,
    acknowledgements: usize,
    cleanups: usize,
}

impl Commands {
    /// None, with room for `room` of each sort.
    pub fn new(room: usize) -> Commands {
        let queue = || VecDeque::with_capacity(room);
        Commands { first: queue(), packets: queue(), urgent: 0, acknowledgements: 0, cleanups: 0 }
    }

    pub fn len(&self) -> usize {
        self.first.len() + self.packets.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether all commands can wait: there are only ACKs, CLEANUPs, and releases of memory.
    pub fn can_wait(&self) -> bool {
        self.urgent == 0
    }

    /// ACKs among them.
    pub fn acknowledgements(&self) -> usize {
        self.acknowledgements
    }

    /// Adds a command.
    pub fn push(&mut self, command: Command) {
        self.count(Sort::of(&command), |count| count + 1);
        let queue = if matches!(command, Command::Control { .. }) { &mut self.packets } else { &mut self.first };
        queue.push_back(command);
    }

    /// Takes the next one.
    pub fn pop(&mut self) -> Option<Command> {
        let (sort, from_first) = (Sort::of(self.first.front().or(self.packets.front())?), !self.first.is_empty());
        self.count(sort, |count| count - 1);
        take_first(if from_first { &mut self.first } else { &mut self.packets })
    }

    /// Drops the CLEANUPs that are for an address.
    pub fn drop_cleanups(&mut self, address: Endpoint) {
        if self.cleanups > 0 {
            self.retain(|command| match command {
                Command::Control { to, header } => header.kind != Kind::Cleanup || *to != address,
                _ => true,
            });
        }
    }

    /// Drops the commands for which `keep` is false.
    pub fn retain(&mut self, keep: impl Fn(&Command) -> bool) {
        for _ in 0..self.first.len() {
            if let Some(command) = self.first.pop_front() {
                if keep(&command) { self.first.push_back(command) } else { self.count(Sort::of(&command), |count| count - 1) }
            }
        }
        for _ in 0..self.packets.len() {
            if let Some(command) = self.packets.pop_front() {
                if keep(&command) { self.packets.push_back(command) } else { self.count(Sort::of(&command), |count| count - 1) }
            }
        }
    }

    /// Counts a command of a sort, or no longer.
    fn count(&mut self, sort: Sort, number: fn(usize) -> usize) {
        let counter = match sort {
            Sort::Urgent => &mut self.urgent,
            Sort::Acknowledgement => &mut self.acknowledgements,
            Sort::Cleanup => &mut self.cleanups,
            Sort::Release => return,
        };
        *counter = number(*counter);
    }
}

/// Kinds of commands, by whether they can wait.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Urgent,
    Acknowledgement,
    Cleanup,
    /// A release of memory.
    Release,
}

impl Sort {
    fn of(command: &Command) -> Sort {
        match command {
            Command::Control { header, .. } if header.kind == Kind::Ack => Sort::Acknowledgement,
            Command::Control { header, .. } if header.kind == Kind::Cleanup => Sort::Cleanup,
            Command::Release { confirm: false, .. } => Sort::Release,
            _ => Sort::Urgent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interface::Half;
    use baton_wire::rmpp::Header;

    fn packet(kind: Kind, to: u8) -> Command {
        Command::Control { to: Endpoint::v4([10, 0, 0, to], 1), header: Header::new(kind, [0, 1], [1, 1]) }
    }

    fn release(handle: u32, confirm: bool) -> Command {
        Command::Release { handle, half: Half::Sending, confirm }
    }

    #[test]
    fn packets_leave_last_and_replies_can_wait() {
        let mut commands = Commands::new(8);
        assert!(commands.can_wait() && commands.is_empty());
        commands.push(packet(Kind::Ack, 1));
        commands.push(release(1, false));
        commands.push(packet(Kind::Cleanup, 1));
        commands.push(packet(Kind::Cleanup, 2));
        assert!(commands.can_wait() && (commands.len(), commands.acknowledgements()) == (4, 1));
        commands.drop_cleanups(Endpoint::v4([10, 0, 0, 1], 1));
        commands.push(packet(Kind::Hold, 1));
        commands.push(release(2, true));
        assert!(!commands.can_wait() && commands.len() == 5);
        assert_eq!((commands.pop(), commands.pop()), (Some(release(1, false)), Some(release(2, true))));
        assert!(!commands.can_wait());
        let left: [Option<Command>; 4] = core::array::from_fn(|_| commands.pop());
        assert_eq!(left, [Some(packet(Kind::Ack, 1)), Some(packet(Kind::Cleanup, 2)), Some(packet(Kind::Hold, 1)), None]);
        assert!(commands.can_wait() && commands.acknowledgements() == 0 && commands.cleanups == 0);
    }

    #[test]
    fn what_is_not_kept_is_not_counted() {
        let mut commands = Commands::new(8);
        commands.push(release(1, true));
        commands.push(packet(Kind::Ack, 1));
        commands.retain(|command| matches!(command, Command::Control { .. }));
        assert!(commands.can_wait() && (commands.len(), commands.acknowledgements()) == (1, 1));
        commands.retain(|_| false);
        assert!(commands.is_empty() && commands.acknowledgements() == 0);
    }
}
