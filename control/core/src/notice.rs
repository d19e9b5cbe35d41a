//! The events of a NIC that are not answers to commands.

use baton_abi::{Control, Message, Operation, RestoreCause};

/// The reason for restoring a connection whose frames would take another route now.
pub const ELSEWHERE: &str = "its route has changed";

/// An event, about the message's connection unless another subject is named.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// The command ring of the session with this number makes no sense.
    CutOff(u32),
    /// The NIC has opened the connection, as requested.
    Opened,
    /// The connection could not be opened; the error number.
    NotOpened(u32),
    /// The NIC refuses to open it: the kernel may.
    OpensNone,
    /// The NIC has made the connection.
    Made {
        /// Number of the listener.
        listener: u32,
        /// From a SYN cookie.
        by_cookie: bool,
    },
    /// A slot for such a connection was granted too late.
    NotGranted,
    /// The states of its own addresses have changed.
    Addresses,
    /// The connection has to go to the kernel.
    Leaves {
        /// The reason.
        why: &'static str,
        /// It stays in the kernel afterwards.
        for_good: bool,
    },
    /// The connection has ended.
    Ended,
    /// The connection could use more memory: wanted bytes of receive and of send memory, 0 for no change.
    Larger(u32, u32),
}

impl Notice {
    /// The event in a message. None if it is an answer, or unknown.
    pub fn of(message: &Message) -> Option<Notice> {
        let leaves = |why, for_good| Some(Notice::Leaves { why, for_good });
        match message.operation {
            Operation::OsRestore if message.address == RestoreCause::Urgent as u32 => leaves("urgent data from its peer", false),
            // For good: the slot is for other connections.
            Operation::OsRestore if message.address == RestoreCause::PeerFin as u32 => leaves("its peer has sent its FIN", true),
            Operation::OsRestore => leaves("its peer has ended it", false),
            Operation::OsControl => match Control::from_number(message.kind)? {
                Control::Detach => Some(Notice::CutOff(message.address)),
                // Without a listener it is a connection that a program opens.
                Control::Made if message.address == 0 => Some(Notice::Opened),
                Control::Made => Some(Notice::Made { listener: message.address, by_cookie: message.length != 0 }),
                Control::NotMade => Some(Notice::NotOpened(message.address)),
                Control::Addresses => Some(Notice::Addresses),
                Control::Closed => Some(Notice::Ended),
                Control::Grow => Some(Notice::Larger(message.address, message.length)),
                Control::Refused => match Control::from_number(u16::try_from(message.length).ok()?)? {
                    Control::Grant => Some(Notice::NotGranted),
                    Control::Connect => Some(Notice::OpensNone),
                    Control::Close => leaves("the NIC cannot close it", false),
                    Control::Mtu => leaves(ELSEWHERE, false),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_abi::Cid;

    const CID: Cid = Cid::new(3, 1);

    fn control(control: Control, address: u32, length: u32) -> Option<Notice> {
        Notice::of(&Message::control(Operation::OsControl, control, CID, address, length))
    }

    #[test]
    fn a_connection_leaves_for_what_only_the_kernel_can_do() {
        let restore = |cause: RestoreCause| match Notice::of(&Message::new(Operation::OsRestore, CID, cause as u32, 0)) {
            Some(Notice::Leaves { for_good, .. }) => Some(for_good),
            _ => None,
        };
        let causes = [RestoreCause::Ended, RestoreCause::Reset, RestoreCause::Urgent, RestoreCause::PeerFin];
        assert_eq!(causes.map(restore), [false, false, false, true].map(Some));
        for refused in [Control::Close, Control::Mtu] {
            assert!(matches!(control(Control::Refused, 1, refused as u32), Some(Notice::Leaves { for_good: false, .. })));
        }
    }

    #[test]
    fn each_notice_has_its_message() {
        assert_eq!(control(Control::Detach, 7, 0), Some(Notice::CutOff(7)));
        assert_eq!(control(Control::Made, 0, 0), Some(Notice::Opened));
        assert_eq!(control(Control::Made, 5, 1), Some(Notice::Made { listener: 5, by_cookie: true }));
        assert_eq!(control(Control::Made, 5, 0), Some(Notice::Made { listener: 5, by_cookie: false }));
        assert_eq!(control(Control::NotMade, 111, 0), Some(Notice::NotOpened(111)));
        assert_eq!(control(Control::Closed, 0, 0), Some(Notice::Ended));
        assert_eq!(control(Control::Grow, 1 << 17, 0), Some(Notice::Larger(1 << 17, 0)));
        assert_eq!(control(Control::Addresses, 0, 0), Some(Notice::Addresses));
        assert_eq!(control(Control::Refused, 1, Control::Grant as u32), Some(Notice::NotGranted));
        assert_eq!(control(Control::Refused, 1, Control::Connect as u32), Some(Notice::OpensNone));
    }

    /// Answers to commands, and messages that no NIC sends.
    #[test]
    fn nothing_else_is_a_notice() {
        assert_eq!(control(Control::Done, 0, Control::Mirror as u32), None);
        assert_eq!(control(Control::Refused, 1, Control::Mirror as u32), None);
        assert_eq!(control(Control::Refused, 1, u32::MAX), None);
        assert_eq!(Notice::of(&Message { kind: u16::MAX, ..Message::new(Operation::OsControl, CID, 0, 0) }), None);
        assert_eq!(Notice::of(&Message::new(Operation::OsResource, CID, 0, 0)), None);
    }
}
