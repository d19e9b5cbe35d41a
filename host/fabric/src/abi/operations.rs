//! Tables of functions. The header's inline functions call through them without a check, so no entry may be null.

use super::{
    AvAttr, CntrAttr, CqAttr, CqErrEntry, FabricAttr, Fid, FidAv, FidCntr, FidCq, FidDomain, FidEp, FidEq, FidFabric, FidMr,
    Info, MrAttr, Msg, MsgRma, MsgTagged,
};
use std::ffi::{c_char, c_int, c_void};

/// A function that is not supported. It takes no arguments: in C's calling conventions on Linux the caller passes and
/// removes them, so a function that reads none can stand for any. Its result serves for `int` and for `ssize_t`.
pub type Missing = unsafe extern "C" fn() -> isize;

/// The getinfo function of a provider.
pub type GetInfo = unsafe extern "C" fn(u32, *const c_char, *const c_char, u64, *const Info, *mut *mut Info) -> c_int;
/// The fabric function of a provider.
pub type OpenFabric = unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, *mut c_void) -> c_int;

/// struct fi_ops.
#[repr(C)]
#[derive(Debug)]
pub struct FidOps {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
    pub ops_open: Missing,
    pub tostr: Missing,
    pub ops_set: Missing,
}

/// struct fi_ops_fabric.
#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain: unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, *mut c_void) -> c_int,
    pub passive_ep: Missing,
    pub eq_open: unsafe extern "C" fn(*mut FidFabric, *mut c_void, *mut *mut FidEq, *mut c_void) -> c_int,
    pub wait_open: Missing,
    pub trywait: unsafe extern "C" fn(*mut FidFabric, *mut *mut Fid, c_int) -> c_int,
    pub domain2: unsafe extern "C" fn(*mut FidFabric, *mut Info, *mut *mut FidDomain, u64, *mut c_void) -> c_int,
}

/// struct fi_ops_domain.
#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open: unsafe extern "C" fn(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, *mut c_void) -> c_int,
    pub cq_open: unsafe extern "C" fn(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, *mut c_void) -> c_int,
    pub endpoint: unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, *mut c_void) -> c_int,
    pub scalable_ep: Missing,
    pub cntr_open: unsafe extern "C" fn(*mut FidDomain, *mut CntrAttr, *mut *mut FidCntr, *mut c_void) -> c_int,
    pub poll_open: Missing,
    pub stx_ctx: Missing,
    pub srx_ctx: Missing,
    pub query_atomic: Missing,
    pub query_collective: Missing,
    pub endpoint2: unsafe extern "C" fn(*mut FidDomain, *mut Info, *mut *mut FidEp, u64, *mut c_void) -> c_int,
}

/// struct fi_ops_mr.
#[repr(C)]
pub struct MrOps {
    pub size: usize,
    pub reg: unsafe extern "C" fn(*mut Fid, *const c_void, usize, u64, u64, u64, u64, *mut *mut FidMr, *mut c_void) -> c_int,
    pub regv:
        unsafe extern "C" fn(*mut Fid, *const libc::iovec, usize, u64, u64, u64, u64, *mut *mut FidMr, *mut c_void) -> c_int,
    pub regattr: unsafe extern "C" fn(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int,
}

/// struct fi_ops_av.
#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert: unsafe extern "C" fn(*mut FidAv, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
    pub insertsvc: unsafe extern "C" fn(*mut FidAv, *const c_char, *const c_char, *mut u64, u64, *mut c_void) -> c_int,
    pub insertsym: Missing,
    pub remove: unsafe extern "C" fn(*mut FidAv, *mut u64, usize, u64) -> c_int,
    pub lookup: unsafe extern "C" fn(*mut FidAv, u64, *mut c_void, *mut usize) -> c_int,
    pub straddr: unsafe extern "C" fn(*mut FidAv, *const c_void, *mut c_char, *mut usize) -> *const c_char,
    pub av_set: Missing,
}

/// struct fi_ops_eq.
#[repr(C)]
pub struct EqOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidEq, *mut u32, *mut c_void, usize, u64) -> isize,
    pub readerr: unsafe extern "C" fn(*mut FidEq, *mut c_void, u64) -> isize,
    pub write: Missing,
    pub sread: unsafe extern "C" fn(*mut FidEq, *mut u32, *mut c_void, usize, c_int, u64) -> isize,
    pub strerror: unsafe extern "C" fn(*mut FidEq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

/// struct fi_ops_cq.
#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize) -> isize,
    pub readfrom: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize, *mut u64) -> isize,
    pub readerr: unsafe extern "C" fn(*mut FidCq, *mut CqErrEntry, u64) -> isize,
    pub sread: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize, *const c_void, c_int) -> isize,
    pub sreadfrom: unsafe extern "C" fn(*mut FidCq, *mut c_void, usize, *mut u64, *const c_void, c_int) -> isize,
    pub signal: unsafe extern "C" fn(*mut FidCq) -> c_int,
    pub strerror: unsafe extern "C" fn(*mut FidCq, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

/// struct fi_ops_cntr.
#[repr(C)]
pub struct CntrOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidCntr) -> u64,
    pub readerr: unsafe extern "C" fn(*mut FidCntr) -> u64,
    pub add: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub set: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub wait: unsafe extern "C" fn(*mut FidCntr, u64, c_int) -> c_int,
    pub adderr: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
    pub seterr: unsafe extern "C" fn(*mut FidCntr, u64) -> c_int,
}

/// struct fi_ops_ep.
#[repr(C)]
pub struct EpOps {
    pub size: usize,
    pub cancel: unsafe extern "C" fn(*mut Fid, *mut c_void) -> isize,
    pub getopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *mut c_void, *mut usize) -> c_int,
    pub setopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int,
    pub tx_ctx: Missing,
    pub rx_ctx: Missing,
    pub rx_size_left: Missing,
    pub tx_size_left: Missing,
}

/// struct fi_ops_cm.
#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: Missing,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
    pub getpeer: Missing,
    pub connect: Missing,
    pub listen: Missing,
    pub accept: Missing,
    pub reject: Missing,
    pub shutdown: Missing,
    pub join: Missing,
}

/// struct fi_ops_msg.
#[repr(C)]
pub struct MsgOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
    pub recvv: unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, *mut c_void) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, u64) -> isize,
    pub send: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, *mut c_void) -> isize,
    pub sendv: unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, *mut c_void) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut FidEp, *const Msg, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64) -> isize,
    pub senddata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, *mut c_void) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, u64) -> isize,
}

/// struct fi_ops_tagged.
#[repr(C)]
pub struct TaggedOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize,
    pub recvv: unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, u64) -> isize,
    pub send: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, *mut c_void) -> isize,
    pub sendv: unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, u64, *mut c_void) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut FidEp, *const MsgTagged, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, u64) -> isize,
    pub senddata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, u64, u64) -> isize,
}

/// struct fi_ops_rma.
#[repr(C)]
pub struct RmaOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut FidEp, *mut c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize,
    pub readv: unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize,
    pub readmsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub write: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, *mut c_void) -> isize,
    pub writev:
        unsafe extern "C" fn(*mut FidEp, *const libc::iovec, *mut *mut c_void, usize, u64, u64, u64, *mut c_void) -> isize,
    pub writemsg: unsafe extern "C" fn(*mut FidEp, *const MsgRma, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, u64, u64) -> isize,
    pub writedata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, *mut c_void, u64, u64, u64, u64, *mut c_void) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut FidEp, *const c_void, usize, u64, u64, u64, u64) -> isize,
}

/// struct fi_ops_atomic, of which nothing is supported.
#[repr(C)]
pub struct AtomicOps {
    pub size: usize,
    pub transfers: [Missing; 10],
    pub valid: [Missing; 3],
}

/// struct fi_ops_collective, of which nothing is supported.
#[repr(C)]
pub struct CollectiveOps {
    pub size: usize,
    pub all: [Missing; 11],
}
