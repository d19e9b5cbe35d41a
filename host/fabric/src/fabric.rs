//! fi_fabric(3).

use crate::abi::{FabricAttr, FabricOps, Fid, FidCq, FidDomain, FidFabric, FidOps, Info, class, errno};
use crate::completion_queue::Queue;
use crate::object::{close, failure, hand_out, missing, no_bind, no_control, object};
use crate::{domain, event_queue};
use std::ffi::{c_int, c_void};

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<FidFabric>,
    bind: no_bind,
    control: no_control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: FabricOps = FabricOps {
    size: size_of::<FabricOps>(),
    domain: domain::open,
    passive_ep: missing,
    eq_open: event_queue::open,
    wait_open: missing,
    trywait,
    domain2: open_domain_with_flags,
};

/// The fabric function of the provider.
pub unsafe extern "C" fn open(attr: *mut FabricAttr, out: *mut *mut FidFabric, context: *mut c_void) -> c_int {
    // SAFETY: libfabric's promise: null or live attributes.
    let api_version = unsafe { attr.as_ref() }.map_or(0, |attr| attr.api_version);
    let fabric = FidFabric { fid: Fid { class: class::FABRIC, context, ops: &FID_OPS }, ops: &OPS, api_version };
    // SAFETY: the object is a FidFabric; `out` is the caller's place for it.
    unsafe { hand_out(fabric, out) }
}

unsafe extern "C" fn open_domain_with_flags(
    fabric: *mut FidFabric,
    info: *mut Info,
    out: *mut *mut FidDomain,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return failure(errno::ENOSYS);
    }
    // SAFETY: the caller's arguments, as they came.
    unsafe { domain::open(fabric, info, out, context) }
}

/// fi_trywait(3): whether the program may wait on the descriptors of these queues.
unsafe extern "C" fn trywait(_: *mut FidFabric, fids: *mut *mut Fid, count: c_int) -> c_int {
    let Ok(count) = usize::try_from(count) else { return failure(errno::EINVAL) };
    if fids.is_null() && count > 0 {
        return failure(errno::EINVAL);
    }
    for at in 0..count {
        // SAFETY: the caller gives `count` objects that are not closed; the class says which type one has.
        let ready = unsafe {
            let fid = *fids.add(at);
            match fid.as_ref().map(|fid| fid.class) {
                Some(class::CQ) => object::<Queue, _>(fid.cast::<FidCq>()).is_some_and(|queue| queue.shared.is_ready_to_wait()),
                // An event queue never has events, so the program may always wait.
                Some(class::EQ) => true,
                _ => return failure(errno::EINVAL),
            }
        };
        if !ready {
            return failure(errno::EAGAIN);
        }
    }
    0
}
