//! What the keeper holds for the next agent: messages and their descriptors. The time to record a message does not
//! depend on how much is held.

use baton_abi::layout::session::MAX_CONNECTIONS;
use baton_linux::control::{Listening, PeerChannel};
use baton_linux::foreign::{self, Foreign};
use baton_protocol::keeper::Kept;
use baton_protocol::program::Until;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// A message with something to hold, and its descriptors.
type One = (Kept, Vec<Foreign>);

/// Connections with one descriptor, by number. There may be very many: each takes 8 bytes.
type Ours = Vec<Option<(Foreign, Until)>>;
const _: () = assert!(size_of::<Option<(Foreign, Until)>>() == 8);

/// Everything that is held.
#[derive(Default)]
pub(crate) struct Held {
    /// What belongs to no session.
    common: Vec<One>,
    sessions: BTreeMap<u32, Session>,
    /// Where the present agent's clients connect.
    listener: Option<Listening>,
}

/// What is held for a session.
#[derive(Default)]
struct Session {
    /// Its control connection, and its memory.
    itself: Vec<One>,
    ours: Ours,
    /// The other connections.
    others: BTreeMap<u32, One>,
}

impl Session {
    /// What is held of the session with this number.
    fn iter(&self, number: u32) -> impl Iterator<Item = (Cow<'_, Kept>, &[Foreign])> {
        let ours = (0..).zip(&self.ours).filter_map(move |(connection, held)| {
            let (fd, until) = held.as_ref()?;
            Some((Cow::Owned(Kept::Connection(number, connection, *until)), std::slice::from_ref(fd)))
        });
        self.itself.iter().map(as_held).chain(ours).chain(self.others.values().map(as_held))
    }

    /// Records a connection, in place of what is held of it.
    fn note(&mut self, number: u32, kept: Kept, descriptors: Vec<Foreign>) {
        self.forget(number);
        let until = match kept {
            Kept::Connection(.., until) if (number as usize) < MAX_CONNECTIONS => Some(until),
            _ => None,
        };
        match (until, <[Foreign; 1]>::try_from(descriptors)) {
            (Some(until), Ok([fd])) => {
                if self.ours.len() <= number as usize {
                    self.ours.resize_with(number as usize + 1, || None);
                }
                self.ours[number as usize] = Some((fd, until));
            }
            (_, descriptors) => drop(self.others.insert(number, (kept, descriptors.map_or_else(|all| all, Vec::from)))),
        }
    }

    /// Drops all, and ends its control connection, as the agent has.
    fn end(self) {
        for (kept, descriptors) in self.itself {
            let of_program = matches!(kept, Kept::Session(_));
            for fd in descriptors {
                if of_program && let Ok(channel) = PeerChannel::from_foreign(fd) {
                    channel.turn_away();
                }
            }
        }
    }

    /// Whether a program has opened it: tools have a control connection alone.
    fn is_open(&self) -> bool {
        self.itself.iter().any(|(kept, _)| matches!(kept, Kept::Memory(..)))
    }

    /// Drops what is held of a connection. Returns its descriptors.
    fn forget(&mut self, number: u32) -> Vec<Foreign> {
        let ours = self.ours.get_mut(number as usize).and_then(Option::take).map(|(fd, _)| fd);
        let others = self.others.remove(&number).map(|(_, descriptors)| descriptors);
        ours.into_iter().chain(others.into_iter().flatten()).collect()
    }
}

fn as_held((kept, descriptors): &One) -> (Cow<'_, Kept>, &[Foreign]) {
    (Cow::Borrowed(kept), descriptors)
}

fn is_listener(kept: &Kept, id: u32) -> bool {
    matches!(kept, Kept::Listener(held, ..) if *held == id)
}

fn is_address(kept: &Kept, address: IpAddr) -> bool {
    matches!(kept, Kept::Address(held, _) if held.address == address)
}

impl Held {
    /// Records a message from an agent.
    pub fn note(&mut self, kept: Kept, descriptors: Vec<Foreign>) {
        match kept {
            Kept::Ready => self.listener = descriptors.into_iter().next().and_then(|fd| Listening::from_foreign(fd).ok()),
            Kept::WasStopped => {}
            Kept::Offloads(..) | Kept::Ending | Kept::Group(..) | Kept::Device(_) => {
                // There is one current setting of each NIC's offloads, and one request to end; the others accumulate.
                let set = |held: &Kept| match (&kept, held) {
                    (Kept::Offloads(nic, _), Kept::Offloads(other, _)) => nic == other,
                    (new, held) => *new == Kept::Ending && *held == Kept::Ending,
                };
                self.common.retain(|(held, _)| !set(held));
                self.common.push((kept, descriptors));
            }
            Kept::Listener(id, ..) => {
                self.common.retain(|(held, _)| !is_listener(held, id));
                self.common.push((kept, descriptors));
            }
            Kept::Address(address, _) => {
                self.common.retain(|(held, _)| !is_address(held, address.address));
                self.common.push((kept, descriptors));
            }
            Kept::AddressGone(address) => self.common.retain(|(held, _)| !is_address(held, address)),
            Kept::ListenerGone(id) => self.common.retain(|(held, _)| !is_listener(held, id)),
            Kept::DeviceGone(index) => self.common.retain(|(held, _)| *held != Kept::Device(index)),
            Kept::Session(number) => {
                self.sessions.insert(number, Session { itself: vec![(kept, descriptors)], ..Session::default() });
            }
            Kept::Memory(number, _) => self.sessions.entry(number).or_default().itself.push((kept, descriptors)),
            Kept::Connection(session, number, _) | Kept::Attached(session, number, ..) => {
                self.sessions.entry(session).or_default().note(number, kept, descriptors);
            }
            Kept::Forgotten(session, number) => {
                let mut held = self.sessions.get_mut(&session).map(|session| session.forget(number)).unwrap_or_default();
                // Its program waits for the end of the message's descriptor, until the socket has been closed here.
                if let (Some(socket), Some(closed)) = (held.pop(), { descriptors }.pop()) {
                    socket.close_before(closed);
                }
            }
            Kept::GroupEnded(name) => {
                let is_it = |(held, _): &mut One| matches!(held, Kept::Group(other, ..) if *other == name);
                for (group, file) in self.common.extract_if(.., is_it) {
                    let Kept::Group(_, user, _) = group else { continue };
                    let _user = foreign::on_behalf_of(user);
                    drop(file);
                }
            }
            Kept::Ended(session) => {
                if let Some(ended) = self.sessions.remove(&session) {
                    ended.end();
                }
                // An agent may die before it says so, and the number is another session's soon.
                self.common.retain_mut(|(held, _)| match held {
                    Kept::Listener(_, of, _) => {
                        of.retain(|other| *other != session);
                        !of.is_empty()
                    }
                    _ => true,
                });
            }
        }
    }

    /// Turns away whoever connects to an agent that has ended, and who has connected and was not accepted. Its process
    /// may not be gone for long: what it has open is open until then, and nobody answers there.
    pub fn end_listener(&mut self) {
        if let Some(listener) = self.listener.take() {
            listener.end();
        }
    }

    /// Stops groups' random moves and reports.
    pub fn stop_groups(&mut self) {
        for (kept, descriptors) in &mut self.common {
            if let Kept::Group(.., flip) = kept {
                *flip = None;
                descriptors.clear();
            }
        }
    }

    /// Drops everything that is held for sessions.
    pub fn drop_sessions(&mut self) {
        self.sessions.clear();
        self.common.retain(|(held, _)| !matches!(held, Kept::Listener(..)));
    }

    /// Whether any program or tool has a control connection.
    pub fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Whether any program has opened a session. A tool that looks again and again is none.
    pub fn has_programs(&self) -> bool {
        self.sessions.values().any(Session::is_open)
    }

    /// Everything, in an order in which nothing comes before what it depends on.
    pub fn iter(&self) -> impl Iterator<Item = (Cow<'_, Kept>, &[Foreign])> {
        let sessions = self.sessions.iter().flat_map(|(number, session)| session.iter(*number));
        self.common.iter().map(as_held).chain(sessions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_linux::control::Channel;
    use baton_protocol::program::{Opening, Until};
    use std::os::fd::{AsFd, OwnedFd};

    fn held(held: &Held) -> Vec<Kept> {
        held.iter().map(|(kept, _)| kept.into_owned()).collect()
    }

    #[test]
    fn what_ends_is_dropped_and_nothing_else() {
        let mut all = Held::default();
        let messages = [
            Kept::Session(2),
            Kept::Session(1),
            Kept::Memory(1, Opening::alone()),
            Kept::Connection(1, 2, Until::Again),
            Kept::Connection(1, 3, Until::Again),
            Kept::Connection(2, 2, Until::Again),
            Kept::Group(7, 0, None),
            Kept::Group(8, 0, None),
        ];
        messages.into_iter().for_each(|kept| all.note(kept, Vec::new()));
        assert!(all.has_sessions());
        all.note(Kept::Forgotten(1, 2), Vec::new());
        all.note(Kept::GroupEnded(8), Vec::new());
        all.note(Kept::Ready, Vec::new());
        let of_first = [Kept::Session(1), Kept::Memory(1, Opening::alone()), Kept::Connection(1, 3, Until::Again)];
        let of_second = [Kept::Session(2), Kept::Connection(2, 2, Until::Again)];
        assert_eq!(held(&all), [&[Kept::Group(7, 0, None)], &of_first[..], &of_second[..]].concat());
        all.note(Kept::Ended(2), Vec::new());
        assert_eq!(held(&all), [&[Kept::Group(7, 0, None)], &of_first[..]].concat());
        all.note(Kept::Ended(1), Vec::new());
        assert!(!all.has_sessions());
    }

    /// For its program a session's control connection ends with it, also if another process has that open still.
    #[test]
    fn a_session_ends_with_its_control_connection() {
        let (ours, theirs) = Channel::pair().expect("two sockets");
        let _agents = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let mut all = Held::default();
        all.note(Kept::Session(1), vec![Foreign::from(OwnedFd::from(ours))]);
        assert!(!theirs.is_hung_up());
        all.note(Kept::Ended(1), Vec::new());
        assert!(theirs.is_hung_up());
    }

    /// A Baton that ends with its programs is not kept by a tool that looks at it.
    #[test]
    fn a_tool_is_no_program() {
        let mut all = Held::default();
        all.note(Kept::Session(1), Vec::new());
        assert!(all.has_sessions() && !all.has_programs());
        all.note(Kept::Session(2), Vec::new());
        all.note(Kept::Memory(2, Opening::alone()), Vec::new());
        assert!(all.has_programs());
        all.note(Kept::Ended(2), Vec::new());
        assert!(all.has_sessions() && !all.has_programs());
    }

    /// A connection that another process holds is not to move once the next agent has it.
    #[test]
    fn a_connection_is_held_as_it_was_last() {
        let mut all = Held::default();
        let connection = |until| Kept::Connection(1, 2, until);
        [Until::Again, Until::Never, Until::Alone].into_iter().for_each(|until| all.note(connection(until), Vec::new()));
        assert_eq!(held(&all), [connection(Until::Alone)]);
    }

    #[test]
    fn a_listener_is_held_as_it_was_last() {
        let mut all = Held::default();
        let listener = |id, session| Kept::Listener(id, vec![session], Vec::new());
        [listener(1, 1), listener(2, 1), listener(1, 2)].into_iter().for_each(|kept| all.note(kept, Vec::new()));
        assert_eq!(held(&all), [listener(2, 1), listener(1, 2)]);
        all.note(Kept::ListenerGone(2), Vec::new());
        assert_eq!(held(&all), [listener(1, 2)]);
    }

    #[test]
    fn a_listener_that_no_session_has_is_not_held() {
        let mut all = Held::default();
        let listener = |id, sessions: &[u32]| Kept::Listener(id, sessions.to_vec(), Vec::new());
        for kept in [Kept::Session(1), Kept::Session(2), listener(7, &[1]), listener(8, &[1, 2])] {
            all.note(kept, Vec::new());
        }
        all.note(Kept::Ended(1), Vec::new());
        assert_eq!(held(&all), [listener(8, &[2]), Kept::Session(2)]);
        // Another program's, which has no part in the listener.
        all.note(Kept::Session(1), Vec::new());
        all.note(Kept::Ended(2), Vec::new());
        assert_eq!(held(&all), [Kept::Session(1)]);
        all.note(listener(9, &[1]), Vec::new());
        all.drop_sessions();
        assert!(held(&all).is_empty());
    }

    #[test]
    fn an_address_is_held_with_its_last_device() {
        let mut all = Held::default();
        let address = |text: &str, interface| Kept::Address(text.parse().expect("an address"), interface);
        for kept in [address("10.0.0.5", 1), address("fd00::5", 1), address("10.0.0.5", 2)] {
            all.note(kept, Vec::new());
        }
        assert_eq!(held(&all), [address("fd00::5", 1), address("10.0.0.5", 2)]);
        all.note(Kept::AddressGone("10.0.0.5".parse().expect("an address")), Vec::new());
        assert_eq!(held(&all), [address("fd00::5", 1)]);
    }

    #[test]
    fn offloads_are_held_once() {
        let mut all = Held::default();
        for _ in 0..3 {
            all.note(Kept::Offloads(0, Box::default()), Vec::new());
            all.note(Kept::Offloads(1, Box::default()), Vec::new());
            all.note(Kept::Device(1), Vec::new());
        }
        assert_eq!(held(&all).iter().filter(|kept| matches!(kept, Kept::Offloads(..))).count(), 2);
        assert_eq!(held(&all).len(), 5);
        all.note(Kept::DeviceGone(2), Vec::new());
        all.note(Kept::DeviceGone(1), Vec::new());
        assert_eq!(held(&all).len(), 2);
    }
}
