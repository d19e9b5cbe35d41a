//! fi_domain(3).

use crate::abi::{DomainOps, Fid, FidDomain, FidEp, FidFabric, FidOps, Info, MrOps, class, errno};
use crate::object::{close, failure, hand_out, missing, no_bind, no_control};
use crate::region::{self, Registry};
use crate::{completion_queue, counter, endpoint, vector};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// What a domain's objects share.
#[derive(Debug)]
pub struct DomainShared {
    pub registry: Registry,
    pub mr_mode: c_int,
}

/// A domain.
#[repr(C)]
pub struct Domain {
    fid: FidDomain,
    pub shared: Arc<DomainShared>,
}

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<Domain>,
    bind: no_bind,
    control: no_control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: DomainOps = DomainOps {
    size: size_of::<DomainOps>(),
    av_open: vector::open,
    cq_open: completion_queue::open,
    endpoint: endpoint::open,
    scalable_ep: missing,
    cntr_open: counter::open,
    poll_open: missing,
    stx_ctx: missing,
    srx_ctx: missing,
    query_atomic: missing,
    query_collective: missing,
    endpoint2,
};

static MR_OPS: MrOps = MrOps { size: size_of::<MrOps>(), reg: region::reg, regv: region::regv, regattr: region::regattr };

/// fi_domain().
pub unsafe extern "C" fn open(_: *mut FidFabric, info: *mut Info, out: *mut *mut FidDomain, context: *mut c_void) -> c_int {
    // SAFETY: the caller's info, from fi_getinfo().
    let mr_mode = unsafe { info.as_ref().and_then(|info| info.domain_attr.as_ref()) }.map_or(0, |attr| attr.mr_mode);
    let fid = FidDomain { fid: Fid { class: class::DOMAIN, context, ops: &FID_OPS }, ops: &OPS, mr: &MR_OPS };
    let shared = Arc::new(DomainShared { registry: Registry::default(), mr_mode });
    // SAFETY: a `repr(C)` object that begins with a FidDomain; `out` is the caller's place for it.
    unsafe { hand_out(Domain { fid, shared }, out) }
}

unsafe extern "C" fn endpoint2(
    domain: *mut FidDomain,
    info: *mut Info,
    out: *mut *mut FidEp,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    if flags != 0 {
        return failure(errno::ENOSYS);
    }
    // SAFETY: the caller's arguments, as they came.
    unsafe { endpoint::open(domain, info, out, context) }
}
