//! Completions of sends with MSG_ZEROCOPY that this library copies.
//!
//! On a socket with SO_ZEROCOPY the kernel numbers these sends, and reports on the socket's error queue when it no
//! longer needs their bytes. Where the route to the peer cannot use the program's pages, as over loopback, the kernel
//! copies them and reports that (SO_EE_CODE_ZEROCOPY_COPIED; Linux, Documentation/networking/msg_zerocopy.rst).
//!
//! On a connection that may go to the NIC the library makes all of these sends as copies, also while the connection is
//! in the kernel. So the library alone numbers them, and a move changes nothing. A copied send is complete when the
//! call returns. So completions come in the order of the sends, and the unread ones form one range: the kernel merges
//! ranges that follow each other (skb_zerocopy_notify_extend).

use libc::c_int;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Who numbers a socket's sends.
const UNDECIDED: u32 = 0;
const KERNEL: u32 = 1;
const LIBRARY: u32 = 2;
const LIBRARY_IPV6: u32 = 3;

/// The numbers of a socket's sends with MSG_ZEROCOPY, and the completions that the program has not read.
#[derive(Default)]
pub(crate) struct Completions {
    by: AtomicU32,
    /// Lower half: sends that this library has numbered in total (wraps). Upper half: the generation of the socket that
    /// they belong to, since this object may represent another socket before a late thread has finished its send.
    made: AtomicU64,
    /// Sends whose completions the program has read.
    read: AtomicU32,
}

impl Completions {
    /// Starts again from zero, for another socket with this generation.
    pub fn forget(&self, generation: u32) {
        self.by.store(UNDECIDED, Ordering::Release);
        self.made.store(u64::from(generation) << 32, Ordering::Release);
        self.read.store(0, Ordering::Release);
    }

    /// In a child of fork: continues the parent's numbering. The completions of the parent's sends are read by the
    /// parent.
    pub fn go_on_from(&self, parents: &Completions) {
        let made = parents.made();
        self.by.store(parents.by.load(Ordering::Acquire), Ordering::Release);
        // No other thread uses the child's counters yet.
        self.made.store(with_count(self.made.load(Ordering::Acquire), made), Ordering::Release);
        self.read.store(made, Ordering::Release);
    }

    /// Whether this library numbers the sends. None if that is not decided.
    pub fn are_ours(&self) -> Option<bool> {
        match self.by.load(Ordering::Acquire) {
            UNDECIDED => None,
            by => Some(by != KERNEL),
        }
    }

    /// Decides who numbers the sends of a socket of this family, unless another thread has. Returns whether it is this
    /// library.
    pub fn decide(&self, ours: bool, is_ipv6: bool) -> bool {
        let by = match (ours, is_ipv6) {
            (false, _) => KERNEL,
            (true, false) => LIBRARY,
            (true, true) => LIBRARY_IPV6,
        };
        let _ = self.by.compare_exchange(UNDECIDED, by, Ordering::AcqRel, Ordering::Acquire);
        self.are_ours() == Some(true)
    }

    /// Numbers a completed send of the socket with this generation. Does nothing if this object represents another
    /// socket by now.
    pub fn add(&self, generation: u32) {
        let more = |made: u64| (made >> 32 == u64::from(generation)).then(|| with_count(made, (made as u32).wrapping_add(1)));
        // SeqCst: a thread that is about to sleep registers first, then reads this counter.
        let _ = self.made.fetch_update(Ordering::SeqCst, Ordering::Relaxed, more);
    }

    /// Sends numbered in total (wraps).
    pub fn made(&self) -> u32 {
        self.made.load(Ordering::Acquire) as u32
    }

    /// Whether the program has a completion to read.
    pub fn are_pending(&self) -> bool {
        self.made.load(Ordering::SeqCst) as u32 != self.read.load(Ordering::Acquire)
    }

    /// Takes the completions that the program has not read.
    pub fn take(&self) -> Option<Completed> {
        loop {
            let read = self.read.load(Ordering::Acquire);
            let made = self.made();
            if read == made {
                return None;
            }
            if self.read.compare_exchange(read, made, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                let is_ipv6 = self.by.load(Ordering::Acquire) == LIBRARY_IPV6;
                return Some(Completed { first: read, last: made.wrapping_sub(1), is_ipv6 });
            }
        }
    }
}

/// The value of `made` with another number of sends.
fn with_count(word: u64, count: u32) -> u64 {
    word & !u64::from(u32::MAX) | u64::from(count)
}

/// Sends that are complete, from one number to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Completed {
    first: u32,
    last: u32,
    is_ipv6: bool,
}

/// SO_EE_ORIGIN_ZEROCOPY and SO_EE_CODE_ZEROCOPY_COPIED (Linux, linux/errqueue.h).
const ORIGIN: u8 = 5;
const COPIED: u8 = 1;

const HEADER: usize = size_of::<libc::cmsghdr>();
/// Room for a control message of either family.
const MOST: usize = HEADER + size_of::<libc::sock_extended_err>() + size_of::<libc::sockaddr_in6>();

const _: () = assert!(HEADER == 16 && size_of::<libc::sock_extended_err>() == 16);

/// The control message that recvmsg(2) returns for completions, as far as there is room for it.
pub(crate) struct Control {
    bytes: [u8; MOST],
    length: usize,
    /// Bytes of the program's buffer that the message takes, with the padding that aligns the next one.
    pub taken: usize,
    /// There was not enough room (MSG_CTRUNC).
    pub is_cut: bool,
}

impl Control {
    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl Completed {
    /// The control message that describes these completions, for a buffer of `room` bytes (Linux, ip_recv_error,
    /// ipv6_recv_error, put_cmsg).
    pub fn control(&self, room: usize) -> Control {
        let (level, kind, address) = if self.is_ipv6 {
            (libc::SOL_IPV6, libc::IPV6_RECVERR, size_of::<libc::sockaddr_in6>())
        } else {
            (libc::SOL_IP, libc::IP_RECVERR, size_of::<libc::sockaddr_in>())
        };
        let whole = HEADER + size_of::<libc::sock_extended_err>() + address;
        let room = if room < HEADER { 0 } else { room };
        let length = whole.min(room);
        let mut bytes = [0u8; MOST];
        let mut put = |at: usize, word: &[u8]| bytes[at..at + word.len()].copy_from_slice(word);
        put(0, &length.to_ne_bytes());
        put(8, &c_int::to_ne_bytes(level));
        put(12, &c_int::to_ne_bytes(kind));
        // struct sock_extended_err: no error, and no address behind it.
        put(HEADER + 4, &[ORIGIN, 0, COPIED, 0]);
        put(HEADER + 8, &self.first.to_ne_bytes());
        put(HEADER + 12, &self.last.to_ne_bytes());
        Control { bytes, length, taken: whole.next_multiple_of(size_of::<usize>()).min(room), is_cut: length < whole }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(completed: Option<Completed>) -> Option<(u32, u32)> {
        completed.map(|completed| (completed.first, completed.last))
    }

    #[test]
    fn what_waits_is_one_range_without_a_gap() {
        let completions = Completions::default();
        assert!(completions.are_ours().is_none() && !completions.are_pending() && completions.take().is_none());
        assert!(completions.decide(true, false));
        completions.add(0);
        assert_eq!(range(completions.take()), Some((0, 0)));
        (0..3).for_each(|_| completions.add(0));
        assert!(completions.are_pending() && completions.made() == 4);
        assert_eq!(range(completions.take()), Some((1, 3)));
        assert!(!completions.are_pending() && completions.take().is_none());
    }

    #[test]
    fn numbers_wrap() {
        let completions = Completions::default();
        completions.made.store(u32::MAX.into(), Ordering::Relaxed);
        completions.read.store(u32::MAX, Ordering::Relaxed);
        (0..2).for_each(|_| completions.add(0));
        assert_eq!(range(completions.take()), Some((u32::MAX, 0)));
        assert!(!completions.are_pending());
    }

    /// A thread returns from a send on a socket that another thread has closed meanwhile. The completion is not counted
    /// for the next socket that this object represents.
    #[test]
    fn who_is_late_completes_no_send_of_the_next_socket() {
        let completions = Completions::default();
        completions.forget(7);
        completions.add(7);
        assert!(completions.are_pending());
        completions.forget(8);
        completions.add(7);
        assert!(!completions.are_pending() && completions.take().is_none());
        completions.add(8);
        assert_eq!(range(completions.take()), Some((0, 0)));
    }

    #[test]
    fn who_numbers_is_decided_once() {
        let completions = Completions::default();
        assert!(!completions.decide(false, false) && completions.are_ours() == Some(false));
        assert!(!completions.decide(true, false), "the kernel has numbered one");
        completions.forget(1);
        assert!(completions.are_ours().is_none());
        assert!(completions.decide(true, true) && completions.decide(false, true));
    }

    #[test]
    fn a_child_goes_on_with_its_parents_numbers() {
        let (parents, childs) = (Completions::default(), Completions::default());
        parents.decide(true, false);
        (0..2).for_each(|_| parents.add(0));
        childs.go_on_from(&parents);
        assert!(childs.take().is_none() && parents.are_pending());
        childs.add(0);
        assert_eq!(range(childs.take()), Some((2, 2)));
    }

    /// Threads that send and threads that read: each completion is read once.
    #[test]
    fn each_is_read_once() {
        const SENDS: u32 = 20_000;
        let completions = Completions::default();
        let read = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..SENDS).for_each(|_| completions.add(0)));
                scope.spawn(|| {
                    while read.load(Ordering::Relaxed) < 2 * SENDS {
                        if let Some((first, last)) = range(completions.take()) {
                            read.fetch_add(last - first + 1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!((read.into_inner(), completions.take()), (2 * SENDS, None));
    }

    #[test]
    fn the_message_is_the_kernels() {
        let word = |bytes: &[u8], at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let completed = Completed { first: 7, last: 9, is_ipv6: false };
        let whole = completed.control(1000);
        assert_eq!((whole.bytes().len(), whole.taken, whole.is_cut), (48, 48, false));
        let bytes = whole.bytes();
        assert_eq!(usize::from_ne_bytes(bytes[..8].try_into().expect("eight bytes")), 48);
        assert_eq!((word(bytes, 8), word(bytes, 12)), (0, 11), "SOL_IP, IP_RECVERR");
        assert_eq!((word(bytes, 16), &bytes[20..24]), (0, &[5, 0, 1, 0][..]));
        assert_eq!((word(bytes, 24), word(bytes, 28)), (7, 9));
        assert!(bytes[32..].iter().all(|byte| *byte == 0));
        let six = Completed { is_ipv6: true, ..completed }.control(1000);
        assert_eq!((six.bytes().len(), six.taken, six.is_cut), (60, 64, false));
        assert_eq!((word(six.bytes(), 8), word(six.bytes(), 12)), (41, 25), "SOL_IPV6, IPV6_RECVERR");
    }

    #[test]
    fn what_does_not_fit_is_cut() {
        let completed = Completed { first: 0, last: 0, is_ipv6: true };
        let cut = |room| {
            let control = completed.control(room);
            (control.bytes().len(), control.taken, control.is_cut)
        };
        assert_eq!(cut(0), (0, 0, true));
        assert_eq!(cut(15), (0, 0, true));
        assert_eq!(cut(16), (16, 16, true));
        assert_eq!(cut(59), (59, 59, true));
        assert_eq!(cut(60), (60, 60, false), "without what would align the next one");
        assert_eq!(cut(64), (60, 64, false));
    }
}
