//! Completion queues, fi_cq(3).

use crate::abi::{
    ADDR_UNSPEC, CqAttr, CqEntry, CqErrEntry, CqOps, Fid, FidCq, FidDomain, FidOps, class, control, cq_format, errno, wait,
};
use crate::endpoint::EndpointShared;
use crate::object::{close, failure, hand_out, missing, no_bind, object};
use crate::operations::error_text;
use baton_linux::events::{Doorbell, monotonic_micros};
use std::collections::VecDeque;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How an operation ended.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// Well; with the fi_addr_t of the sender.
    Done(CqEntry, u64),
    /// With an error.
    Failed(CqErrEntry),
}

// SAFETY: the pointers inside are the program's, which gets them back; nobody follows them here.
unsafe impl Send for Event {}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// fi_cq_signal() was called, and no waiter has seen it.
    signalled: bool,
    /// Threads that wait in fi_cq_sread().
    waiting: usize,
}

/// A queue as endpoints share it.
pub struct QueueShared {
    state: Mutex<State>,
    /// Number of events in the queue, readable without its lock.
    count: AtomicUsize,
    /// Whether the last read has returned events. MPI libraries read until there are none: the read that ends such a
    /// series drives no endpoint, so that the program handles its events first.
    in_series: AtomicBool,
    changed: Condvar,
    /// Readable when there are events, if the program asked for a descriptor.
    bell: Option<Doorbell>,
    /// Bytes of an entry.
    entry: usize,
    wait: c_int,
    endpoints: Mutex<Vec<Weak<EndpointShared>>>,
}

impl QueueShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoints whose operations end here.
    fn endpoints(&self) -> Vec<Arc<EndpointShared>> {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|endpoint| endpoint.strong_count() > 0);
        endpoints.iter().filter_map(Weak::upgrade).collect()
    }

    /// Makes reads of this queue drive an endpoint.
    pub fn drive(&self, endpoint: &Arc<EndpointShared>) {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        let new = Arc::downgrade(endpoint);
        if !endpoints.iter().any(|known| known.ptr_eq(&new)) {
            endpoints.push(new);
        }
    }

    /// Undoes `drive`.
    pub fn drive_no_longer(&self, endpoint: &Arc<EndpointShared>) {
        let mut endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        endpoints.retain(|known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(endpoint)));
    }

    /// Adds an event.
    pub fn push(&self, event: Event) {
        let mut state = self.lock();
        state.events.push_back(event);
        self.count.store(state.events.len(), Ordering::Release);
        if state.waiting > 0 {
            self.changed.notify_all();
        }
        if let Some(bell) = self.bell.as_ref().filter(|_| state.events.len() == 1) {
            bell.ring();
        }
    }

    fn poll(&self) {
        let endpoints = self.endpoints.lock().unwrap_or_else(PoisonError::into_inner);
        // A single endpoint, the usual case with MPI libraries, is driven without allocating a list.
        let (first, several) = (endpoints.first().and_then(Weak::upgrade), endpoints.len() > 1);
        drop(endpoints);
        if several {
            self.endpoints().iter().for_each(|endpoint| endpoint.poll());
        } else if let Some(endpoint) = first {
            endpoint.poll();
        }
    }

    /// Whether the queue is empty, so that the program may wait for the descriptor.
    pub fn is_ready_to_wait(&self) -> bool {
        self.poll();
        let state = self.lock();
        if !state.events.is_empty() {
            return false;
        }
        if let Some(bell) = &self.bell {
            bell.clear();
        }
        drop(state);
        self.endpoints().iter().for_each(|endpoint| endpoint.leave());
        self.lock().events.is_empty()
    }

    /// Takes up to `count` events that ended well, to `out` and, if not null, their senders to `sources`.
    ///
    /// # Safety
    /// There is room for `count` entries of the queue's format at `out`, and for as many senders.
    unsafe fn take(&self, out: *mut c_void, count: usize, sources: *mut u64) -> isize {
        if self.count.load(Ordering::Acquire) == 0 {
            return -(errno::EAGAIN as isize);
        }
        let mut state = self.lock();
        let mut taken = 0;
        while taken < count
            && let Some(Event::Done(entry, source)) = state.events.front()
        {
            // SAFETY: this function's `# Safety`; every format is the beginning of `CqEntry`.
            unsafe {
                let place = out.cast::<u8>().add(taken * self.entry);
                std::ptr::copy_nonoverlapping((&raw const *entry).cast::<u8>(), place, self.entry);
                if !sources.is_null() {
                    *sources.add(taken) = *source;
                }
            }
            state.events.pop_front();
            taken += 1;
        }
        self.note_taken(&state);
        if taken > 0 {
            self.in_series.store(true, Ordering::Relaxed);
        }
        match (taken, state.events.front()) {
            (0, None) => -(errno::EAGAIN as isize),
            (0, Some(Event::Failed(_))) => -(errno::EAVAIL as isize),
            _ => taken as isize,
        }
    }

    /// Takes the error that is next, if one is.
    fn take_error(&self) -> Option<CqErrEntry> {
        let mut state = self.lock();
        let Some(Event::Failed(entry)) = state.events.front().copied() else { return None };
        state.events.pop_front();
        self.note_taken(&state);
        Some(entry)
    }

    /// Clears the descriptor after events were taken, if the queue is empty.
    fn note_taken(&self, state: &State) {
        if let Some(bell) = self.bell.as_ref().filter(|_| state.events.is_empty()) {
            bell.clear();
        }
        self.count.store(state.events.len(), Ordering::Release);
    }

    /// Called by a read that finds no events: whether the read before it has returned some.
    fn ends_series(&self) -> bool {
        self.in_series.load(Ordering::Relaxed) && self.in_series.swap(false, Ordering::Relaxed)
    }

    /// Waits until there is an event, a signal, or the time is over. `timeout` is in milliseconds, negative for ever.
    fn wait(&self, timeout: c_int) {
        let until = u64::try_from(timeout).ok().map(|milliseconds| monotonic_micros() + milliseconds * 1000);
        // Endpoints may be closed while this thread waits, so it keeps no reference to them.
        self.endpoints().iter().for_each(|endpoint| endpoint.leave());
        let mut state = self.lock();
        state.waiting += 1;
        while state.events.is_empty() && !state.signalled {
            let left = until.map_or(u64::MAX, |until| until.saturating_sub(monotonic_micros()));
            if left == 0 {
                break;
            }
            // Each endpoint's thread drives it meanwhile.
            let limit = Duration::from_micros(left.min(100_000));
            state = self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiting -= 1;
        state.signalled = false;
    }
}

/// A completion queue.
#[repr(C)]
pub struct Queue {
    fid: FidCq,
    pub shared: Arc<QueueShared>,
}

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<Queue>,
    bind: no_bind,
    control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: CqOps = CqOps { size: size_of::<CqOps>(), read, readfrom, readerr, sread, sreadfrom, signal, strerror };

/// fi_cq_open().
pub unsafe extern "C" fn open(_: *mut FidDomain, attr: *mut CqAttr, out: *mut *mut FidCq, context: *mut c_void) -> c_int {
    // SAFETY: null, or the caller's attributes.
    let (format, wait) = unsafe { attr.as_ref() }.map_or((cq_format::UNSPEC, wait::NONE), |attr| (attr.format, attr.wait_obj));
    let entry = match format {
        cq_format::UNSPEC | cq_format::TAGGED => size_of::<CqEntry>(),
        cq_format::CONTEXT => std::mem::offset_of!(CqEntry, flags),
        cq_format::MSG => std::mem::offset_of!(CqEntry, buf),
        cq_format::DATA => std::mem::offset_of!(CqEntry, tag),
        _ => return failure(errno::EINVAL),
    };
    let bell = match wait {
        wait::NONE | wait::UNSPEC => None,
        wait::FD => match Doorbell::new() {
            Ok(bell) => Some(bell),
            Err(error) => return failure(error.raw_os_error().unwrap_or(errno::EIO)),
        },
        _ => return failure(errno::ENOSYS),
    };
    let shared = QueueShared {
        state: Mutex::default(),
        count: AtomicUsize::new(0),
        in_series: AtomicBool::new(false),
        changed: Condvar::new(),
        bell,
        entry,
        wait,
        endpoints: Mutex::default(),
    };
    let fid = FidCq { fid: Fid { class: class::CQ, context, ops: &FID_OPS }, ops: &OPS };
    // SAFETY: a `repr(C)` object that begins with a FidCq; `out` is the caller's place for it.
    unsafe { hand_out(Queue { fid, shared: Arc::new(shared) }, out) }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: C's pointer to a queue that is not closed.
    let Some(queue) = (unsafe { object::<Queue, _>(fid) }) else { return failure(errno::EINVAL) };
    let value = match (command, &queue.shared.bell) {
        (control::GETWAIT, Some(bell)) => bell.as_fd().as_raw_fd(),
        (control::GETWAIT, None) => return failure(errno::ENODATA),
        (control::GETWAITOBJ, _) => queue.shared.wait,
        _ => return failure(errno::ENOSYS),
    };
    if arg.is_null() {
        return failure(errno::EINVAL);
    }
    // SAFETY: both commands have a place for an int.
    unsafe { *arg.cast::<c_int>() = value };
    0
}

unsafe extern "C" fn read(cq: *mut FidCq, out: *mut c_void, count: usize) -> isize {
    // SAFETY: as the caller promises of `readfrom`, which allows null.
    unsafe { readfrom(cq, out, count, std::ptr::null_mut()) }
}

unsafe extern "C" fn readfrom(cq: *mut FidCq, out: *mut c_void, count: usize, sources: *mut u64) -> isize {
    // SAFETY: C's pointer to a queue that is not closed, and room for `count` entries.
    unsafe {
        let Some(queue) = object::<Queue, _>(cq).filter(|_| !out.is_null() || count == 0) else {
            return -(errno::EINVAL as isize);
        };
        let taken = queue.shared.take(out, count, sources);
        // A read without entries is a request for progress.
        if count > 0 && (taken != -(errno::EAGAIN as isize) || queue.shared.ends_series()) {
            return taken;
        }
        queue.shared.poll();
        queue.shared.take(out, count, sources)
    }
}

unsafe extern "C" fn readerr(cq: *mut FidCq, out: *mut CqErrEntry, _flags: u64) -> isize {
    // SAFETY: C's pointer to a queue that is not closed.
    let (Some(queue), false) = (unsafe { object::<Queue, _>(cq) }, out.is_null()) else { return -(errno::EINVAL as isize) };
    let Some(entry) = queue.shared.take_error() else { return -(errno::EAGAIN as isize) };
    // SAFETY: room for an entry, as the caller promises.
    unsafe { *out = entry };
    1
}

unsafe extern "C" fn sread(cq: *mut FidCq, out: *mut c_void, count: usize, condition: *const c_void, timeout: c_int) -> isize {
    // SAFETY: as the caller promises of `sreadfrom`, which allows null.
    unsafe { sreadfrom(cq, out, count, std::ptr::null_mut(), condition, timeout) }
}

unsafe extern "C" fn sreadfrom(
    cq: *mut FidCq,
    out: *mut c_void,
    count: usize,
    sources: *mut u64,
    _condition: *const c_void,
    timeout: c_int,
) -> isize {
    // SAFETY: the caller has not closed the queue, and has room for `count` entries at `out`, and at `sources`, which
    // may be null, for as many addresses.
    unsafe {
        let first = readfrom(cq, out, count, sources);
        let Some(queue) = object::<Queue, _>(cq).filter(|_| first == -(errno::EAGAIN as isize)) else { return first };
        if queue.shared.wait == wait::NONE {
            return -(errno::ENOSYS as isize);
        }
        queue.shared.wait(timeout);
        readfrom(cq, out, count, sources)
    }
}

unsafe extern "C" fn signal(cq: *mut FidCq) -> c_int {
    // SAFETY: C's pointer to a queue that is not closed.
    let Some(queue) = (unsafe { object::<Queue, _>(cq) }) else { return failure(errno::EINVAL) };
    queue.shared.lock().signalled = true;
    queue.shared.changed.notify_all();
    if let Some(bell) = &queue.shared.bell {
        bell.ring();
    }
    0
}

unsafe extern "C" fn strerror(_: *mut FidCq, number: c_int, _: *const c_void, out: *mut c_char, length: usize) -> *const c_char {
    let text = error_text(number);
    if !out.is_null() && length > 0 {
        let text = CString::from(text);
        let bytes = text.as_bytes();
        let copied = bytes.len().min(length - 1);
        // SAFETY: the caller has room for `length` bytes at `out`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), copied);
            *out.add(copied) = 0;
        }
    }
    text.as_ptr()
}

/// The entry of an operation that failed.
pub fn failed(entry: CqEntry, olen: usize, error: c_int, number: c_int) -> Event {
    Event::Failed(CqErrEntry { entry, olen, err: error, prov_errno: number, err_data: std::ptr::null_mut(), err_data_size: 0 })
}

/// The sender of a message that came from no address in the vector.
pub const NOBODY: u64 = ADDR_UNSPEC;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz::side::Side;
    use baton_fuzz::Choice;

    fn entry() -> CqEntry {
        CqEntry { op_context: std::ptr::null_mut(), flags: 0, len: 0, buf: std::ptr::null_mut(), data: 0, tag: 0 }
    }

    /// Whether a program that polls the queue's descriptor is woken.
    fn is_readable(cq: *mut FidCq) -> bool {
        let mut fd: c_int = -1;
        // SAFETY: a queue that is not closed, and a place for an int.
        assert_eq!(unsafe { control(cq.cast(), control::GETWAIT, (&raw mut fd).cast()) }, 0);
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one live descriptor.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 }
    }

    /// After the last event was taken, by whichever call, the descriptor is not readable; otherwise the program would
    /// loop.
    #[test]
    fn an_empty_queue_is_not_readable() {
        // SAFETY: attributes are plain data, for which zero is a value.
        let mut attr: CqAttr = unsafe { std::mem::zeroed() };
        attr.wait_obj = wait::FD;
        let mut cq = std::ptr::null_mut();
        // SAFETY: no domain is needed; attributes, and a place for the result.
        assert_eq!(unsafe { open(std::ptr::null_mut(), &mut attr, &mut cq, std::ptr::null_mut()) }, 0);
        // SAFETY: the queue made above.
        let shared = &unsafe { object::<Queue, _>(cq) }.expect("a queue").shared;
        let mut errors = [const { std::mem::MaybeUninit::<CqErrEntry>::uninit() }; 1];
        let mut entries = [const { std::mem::MaybeUninit::<CqEntry>::uninit() }; 4];
        // SAFETY: the queue made above, and room for what is read.
        let mut read_error = || unsafe { readerr(cq, errors.as_mut_ptr().cast(), 0) };
        // SAFETY: the queue made above, and room for four entries.
        let mut read_four = || unsafe { read(cq, entries.as_mut_ptr().cast(), 4) };
        assert!(!is_readable(cq));
        shared.push(failed(entry(), 0, errno::EIO, 0));
        assert!(is_readable(cq));
        assert_eq!((read_error(), is_readable(cq)), (1, false));
        shared.push(Event::Done(entry(), NOBODY));
        shared.push(failed(entry(), 0, errno::EIO, 0));
        assert_eq!((read_error(), read_four(), is_readable(cq)), (-(errno::EAGAIN as isize), 1, true));
        assert_eq!((read_four(), read_error(), is_readable(cq)), (-(errno::EAVAIL as isize), 1, false));
        shared.push(Event::Done(entry(), NOBODY));
        assert_eq!((read_four(), is_readable(cq)), (1, false));
        assert_eq!(read_error(), -(errno::EAGAIN as isize));
    }

    /// A closed endpoint is freed although a thread waits in a queue: it must not continue to receive into buffers that
    /// the program uses again.
    #[test]
    fn a_thread_that_waits_does_not_keep_a_closed_endpoint() {
        // SAFETY: tests of this program read the environment by the standard library only, which has a lock for it.
        unsafe { std::env::set_var("FI_RMPP_NIC", "never") };
        let mut sides = (0..).map(|word| Side::open(0, &mut Choice::new(word)));
        let mut side = sides.find(|side| side.wait == wait::UNSPEC).expect("a queue at which threads can wait");
        // SAFETY: the side's queue, which is open.
        let shared = unsafe { object::<Queue, _>(side.cq) }.expect("a queue").shared.clone();
        let endpoint = shared.endpoints.lock().expect("no thread has panicked")[0].clone();
        let theirs = shared.clone();
        let waiter = std::thread::spawn(move || theirs.wait(-1));
        while shared.lock().waiting == 0 {
            std::thread::yield_now();
        }
        side.close_one(0);
        assert_eq!(endpoint.strong_count(), 0);
        shared.lock().signalled = true;
        shared.changed.notify_all();
        waiter.join().expect("it has been woken");
    }
}
