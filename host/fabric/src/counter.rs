//! Counters, fi_cntr(3).

use crate::abi::{CntrAttr, CntrOps, Fid, FidCntr, FidDomain, FidOps, class, errno, wait};
use crate::endpoint::EndpointShared;
use crate::object::{close, failure, hand_out, missing, no_bind, object};
use baton_linux::events::monotonic_micros;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

#[derive(Debug, Default)]
struct State {
    value: u64,
    errors: u64,
    endpoints: Vec<Weak<EndpointShared>>,
}

/// A counter as endpoints share it.
#[derive(Default)]
pub struct CounterShared {
    state: Mutex<State>,
    changed: Condvar,
}

impl CounterShared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn endpoints(&self) -> Vec<Arc<EndpointShared>> {
        self.lock().endpoints.iter().filter_map(Weak::upgrade).collect()
    }

    /// Makes reads of this counter drive an endpoint.
    pub fn drive(&self, endpoint: &Arc<EndpointShared>) {
        self.lock().endpoints.push(Arc::downgrade(endpoint));
    }

    /// Undoes `drive`.
    pub fn drive_no_longer(&self, endpoint: &Arc<EndpointShared>) {
        self.lock().endpoints.retain(|known| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(endpoint)));
    }

    /// Counts an operation.
    pub fn count(&self, well: bool) {
        self.change(|state| if well { state.value += 1 } else { state.errors += 1 });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn poll(&self) {
        self.endpoints().iter().for_each(|endpoint| endpoint.poll());
    }
}

/// A counter.
#[repr(C)]
pub struct Counter {
    fid: FidCntr,
    pub shared: Arc<CounterShared>,
}

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<Counter>,
    bind: no_bind,
    control: crate::object::no_control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: CntrOps = CntrOps { size: size_of::<CntrOps>(), read, readerr, add, set, wait: wait_for, adderr, seterr };

/// fi_cntr_open().
pub unsafe extern "C" fn open(_: *mut FidDomain, attr: *mut CntrAttr, out: *mut *mut FidCntr, context: *mut c_void) -> c_int {
    // SAFETY: null, or the caller's attributes.
    let wait = unsafe { attr.as_ref() }.map_or(wait::NONE, |attr| attr.wait_obj);
    if !matches!(wait, wait::NONE | wait::UNSPEC) {
        return failure(errno::ENOSYS);
    }
    let fid = FidCntr { fid: Fid { class: class::CNTR, context, ops: &FID_OPS }, ops: &OPS };
    // SAFETY: a `repr(C)` object that begins with a FidCntr; `out` is the caller's place for it.
    unsafe { hand_out(Counter { fid, shared: Arc::default() }, out) }
}

/// The counter behind a pointer of C.
///
/// # Safety
/// C's pointer to a counter that is not closed.
unsafe fn shared<'a>(counter: *mut FidCntr) -> Option<&'a CounterShared> {
    // SAFETY: this function's `# Safety`.
    unsafe { object::<Counter, _>(counter) }.map(|counter| &*counter.shared)
}

unsafe extern "C" fn read(counter: *mut FidCntr) -> u64 {
    // SAFETY: C's pointer.
    unsafe { shared(counter) }.map_or(0, |shared| {
        shared.poll();
        shared.lock().value
    })
}

unsafe extern "C" fn readerr(counter: *mut FidCntr) -> u64 {
    // SAFETY: C's pointer.
    unsafe { shared(counter) }.map_or(0, |shared| shared.lock().errors)
}

/// Changes a counter for C.
///
/// # Safety
/// As [`shared`].
unsafe fn change(counter: *mut FidCntr, change: impl FnOnce(&mut State)) -> c_int {
    // SAFETY: this function's `# Safety`.
    match unsafe { shared(counter) } {
        Some(shared) => {
            shared.change(change);
            0
        }
        None => failure(errno::EINVAL),
    }
}

unsafe extern "C" fn add(counter: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: C's pointer.
    unsafe { change(counter, |state| state.value = state.value.wrapping_add(value)) }
}

unsafe extern "C" fn set(counter: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: C's pointer.
    unsafe { change(counter, |state| state.value = value) }
}

unsafe extern "C" fn adderr(counter: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: C's pointer.
    unsafe { change(counter, |state| state.errors = state.errors.wrapping_add(value)) }
}

unsafe extern "C" fn seterr(counter: *mut FidCntr, value: u64) -> c_int {
    // SAFETY: C's pointer.
    unsafe { change(counter, |state| state.errors = value) }
}

/// fi_cntr_wait(): until the value is reached, an operation fails, or `timeout` milliseconds are over (negative: for
/// ever).
unsafe extern "C" fn wait_for(counter: *mut FidCntr, threshold: u64, timeout: c_int) -> c_int {
    // SAFETY: C's pointer.
    let Some(shared) = (unsafe { shared(counter) }) else { return failure(errno::EINVAL) };
    let until = u64::try_from(timeout).ok().map(|milliseconds| monotonic_micros() + milliseconds * 1000);
    shared.poll();
    shared.endpoints().iter().for_each(|endpoint| endpoint.leave());
    let mut state = shared.lock();
    let errors = state.errors;
    while state.value < threshold {
        if state.errors != errors {
            return failure(errno::EAVAIL);
        }
        let left = until.map_or(u64::MAX, |until| until.saturating_sub(monotonic_micros()));
        if left == 0 {
            return failure(errno::ETIMEDOUT);
        }
        let limit = Duration::from_micros(left.min(100_000));
        state = shared.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
    }
    0
}
