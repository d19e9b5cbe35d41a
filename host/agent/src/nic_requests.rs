//! Requests on the control connection to the NIC, or to the host's TCP, whose answers are handled when they come. The
//! process at the other end answers in order; as long as it does not, nobody waits for it: neither to send nor to
//! receive.

use baton_linux::control::Channel;
use baton_linux::events::monotonic_micros;
use baton_linux::foreign::Foreign;
use baton_protocol::nic::{ToAgent, ToNic};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Most requests under way, so that the other end never waits for room to answer in.
const MOST_UNDER_WAY: usize = 64;
/// Most requests of programs, tools and listeners that wait to be sent, or for their answers.
const MOST: usize = 4096;

/// Time after which a request without an answer is reported as such to its caller, in microseconds.
pub(crate) const LIMIT: u64 = 2_000_000;

/// A request that has not been answered.
struct Pending<A> {
    after: A,
    asked_at: u64,
    /// Whoever asked has got the error that there is no answer.
    late: bool,
}

/// A request that has not been sent, with what is to be done with its answer, if it gets one.
struct Waiting<A> {
    message: ToNic,
    descriptors: Vec<Foreign>,
    pending: Option<Pending<A>>,
}

/// The requests on one control connection; `A` is what is to be done with an answer.
pub(crate) struct Requests<A> {
    channel: Channel,
    /// In the order in which they are answered.
    under_way: VecDeque<Pending<A>>,
    waiting: VecDeque<Waiting<A>>,
}

/// An answer: why there is none, if the request failed.
pub(crate) type Answered = Result<(), String>;

impl<A> Requests<A> {
    pub fn new(channel: Channel) -> Requests<A> {
        Requests { channel, under_way: VecDeque::new(), waiting: VecDeque::new() }
    }

    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Expects an answer without a request: the process says that it has started.
    pub fn expect(&mut self, after: A) {
        self.under_way.push_back(Pending { after, asked_at: monotonic_micros(), late: false });
    }

    /// Sends a request, or queues it. `after`: what is to be done with the answer, if there is one to it. Returns
    /// whether the other end has to be woken.
    ///
    /// # Errors
    /// That the other end has closed the connection, with `after`.
    pub fn send(&mut self, message: ToNic, descriptors: &[BorrowedFd<'_>], after: Option<A>) -> Result<bool, Option<A>> {
        let pending = after.map(|after| Pending { after, asked_at: monotonic_micros(), late: false });
        if self.waiting.is_empty() && self.under_way.len() < MOST_UNDER_WAY {
            match self.channel.try_send(&message, descriptors) {
                Ok(()) => {
                    self.under_way.extend(pending);
                    return Ok(true);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(pending.map(|pending| pending.after)),
            }
        }
        let owned = descriptors.iter().map(|fd| Foreign::duplicate(*fd)).collect::<io::Result<Vec<_>>>();
        let Ok(descriptors) = owned else { return Err(pending.map(|pending| pending.after)) };
        self.waiting.push_back(Waiting { message, descriptors, pending });
        Ok(false)
    }

    /// Sends what waits, as far as there is room. Returns whether the other end has to be woken.
    pub fn flush(&mut self) -> bool {
        let mut sent = false;
        while self.under_way.len() < MOST_UNDER_WAY
            && let Some(Waiting { message, descriptors, pending }) = self.waiting.pop_front()
        {
            let given: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            match self.channel.try_send(&message, &given) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.waiting.push_front(Waiting { message, descriptors, pending });
                    return sent;
                }
                // If the other end has ended, the request counts as one that it has not answered.
                _ => self.under_way.extend(pending),
            }
            sent = true;
        }
        sent
    }

    /// Takes the next answer that is there, with what is to be done with it. Without a request under way nothing is
    /// read.
    pub fn receive(&mut self) -> Option<(A, Answered)> {
        while !self.under_way.is_empty() {
            let answer = match self.channel.try_receive::<ToAgent>() {
                Ok((ToAgent::Failed(reason), _)) => Err(reason),
                Ok((ToAgent::OwnAddresses { .. }, _)) => continue,
                Ok(_) => Ok(()),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => Err("the answer makes no sense".into()),
                Err(_) => return None,
            };
            return self.under_way.pop_front().map(|pending| (pending.after, answer));
        }
        None
    }

    /// Takes everything that has no answer, since the other end has ended.
    pub fn take_all(&mut self) -> Vec<A> {
        let waiting = std::mem::take(&mut self.waiting).into_iter().filter_map(|waiting| waiting.pending);
        std::mem::take(&mut self.under_way).into_iter().chain(waiting).map(|pending| pending.after).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Pending<A>> {
        self.under_way.iter().chain(self.waiting.iter().filter_map(|waiting| waiting.pending.as_ref()))
    }

    /// Whether an answer is awaited for which `of` is true.
    pub fn awaits(&self, of: impl Fn(&A) -> bool) -> bool {
        self.all().any(|pending| of(&pending.after))
    }

    /// Whether so many requests are without an answer that no further one is accepted from a program or tool.
    pub fn is_full(&self) -> bool {
        self.under_way.len() + self.waiting.len() >= MOST
    }

    /// When the next request is late, in microseconds of the monotonic clock.
    pub fn late_at(&self) -> Option<u64> {
        self.all().find(|pending| !pending.late).map(|pending| pending.asked_at + LIMIT)
    }

    /// What is to be done with the answers that have become late, each once.
    pub fn become_late(&mut self, now: u64) -> impl Iterator<Item = &mut A> {
        let waiting = self.waiting.iter_mut().filter_map(|waiting| waiting.pending.as_mut());
        let overdue =
            self.under_way.iter_mut().chain(waiting).filter(move |pending| !pending.late && now >= pending.asked_at + LIMIT);
        overdue.map(|pending| {
            pending.late = true;
            &mut pending.after
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_linux::events::Doorbell;

    fn requests() -> (Requests<u32>, Channel) {
        let (ours, theirs) = Channel::pair().expect("two sockets");
        (Requests::new(ours), theirs)
    }

    /// Nothing waits for an end that does not read; all requests reach it in order, with their descriptors, when it
    /// does.
    #[test]
    fn an_end_that_does_not_read_holds_up_nobody() {
        let (mut requests, theirs) = requests();
        let bell = Doorbell::new().expect("a doorbell");
        for number in 0..1000 {
            requests.send(ToNic::FastPath(number), &[bell.as_fd()], Some(number)).expect("it is there");
        }
        assert!(requests.receive().is_none());
        let mut answered = Vec::new();
        while answered.len() < 1000 {
            let (ToNic::FastPath(number), descriptors) = theirs.try_receive().expect("a request") else { panic!("another one") };
            assert_eq!((number as usize, descriptors.len()), (answered.len(), 1));
            let failed = ToAgent::Failed(number.to_string());
            theirs.send(if number % 2 == 0 { &ToAgent::Attached } else { &failed }, &[]).expect("an answer");
            answered.push(requests.receive().expect("an answer"));
            requests.flush();
        }
        let expected =
            (0..1000).map(|number: u32| (number, if number.is_multiple_of(2) { Ok(()) } else { Err(number.to_string()) }));
        assert_eq!(answered, expected.collect::<Vec<_>>());
    }

    #[test]
    fn what_an_ended_process_was_asked_is_taken_back() {
        let (mut requests, theirs) = requests();
        for number in 0..100 {
            requests.send(ToNic::FastPath(number), &[], Some(number)).expect("it is there");
        }
        drop(theirs);
        assert!(requests.receive().is_none());
        requests.flush();
        assert_eq!(requests.take_all(), (0..100).collect::<Vec<_>>());
        assert_eq!(requests.send(ToNic::Start, &[], None), Err(None));
    }

    #[test]
    fn a_request_is_late_once() {
        let (mut requests, _theirs) = requests();
        requests.send(ToNic::FastPath(7), &[], Some(7)).expect("it is there");
        let late = requests.late_at().expect("one is under way");
        assert_eq!(requests.become_late(late - 1).count(), 0);
        assert_eq!(requests.become_late(late).map(|after| *after).collect::<Vec<_>>(), [7]);
        assert_eq!((requests.become_late(late + LIMIT).count(), requests.late_at()), (0, None));
        assert!(requests.awaits(|after| *after == 7));
    }
}
