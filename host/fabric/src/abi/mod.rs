//! libfabric's C interface, written by hand from the headers `rdma/*.h` of libfabric 1.17; the fields that 2.x has
//! added come after those used here. Names are the headers' without `FI_` and `fi_`.
//!
//! Structures that libfabric allocates or reads with its own size (`fi_info` and its parts) are only accessed through
//! pointers, and fields that it may not have allocated are not touched. Every table of functions begins with its size,
//! so a table that is shorter than the caller's is what 1.17 had.

#![expect(dead_code, reason = "fields and constants stand for what C has, used or not")]

mod objects;
mod operations;

pub use objects::*;
pub use operations::*;

/// `FI_MSG` and so on: capabilities.
pub mod caps {
    pub const MSG: u64 = 1 << 1;
    pub const RMA: u64 = 1 << 2;
    pub const TAGGED: u64 = 1 << 3;
    pub const READ: u64 = 1 << 8;
    pub const WRITE: u64 = 1 << 9;
    pub const RECV: u64 = 1 << 10;
    pub const SEND: u64 = 1 << 11;
    pub const REMOTE_READ: u64 = 1 << 12;
    pub const REMOTE_WRITE: u64 = 1 << 13;
    pub const MULTI_RECV: u64 = 1 << 16;
    pub const LOCAL_COMM: u64 = 1 << 51;
    pub const REMOTE_COMM: u64 = 1 << 52;
    pub const RMA_EVENT: u64 = 1 << 56;
    pub const SOURCE: u64 = 1 << 57;
    pub const DIRECTED_RECV: u64 = 1 << 59;
}

/// Flags of calls and completions.
pub mod flags {
    pub const REMOTE_CQ_DATA: u64 = 1 << 17;
    pub const PEEK: u64 = 1 << 19;
    pub const COMPLETION: u64 = 1 << 24;
    pub const INJECT: u64 = 1 << 25;
    pub const INJECT_COMPLETE: u64 = 1 << 26;
    pub const TRANSMIT_COMPLETE: u64 = 1 << 27;
    pub const DELIVERY_COMPLETE: u64 = 1 << 28;
    pub const MATCH_COMPLETE: u64 = 1 << 31;
    pub const NUMERICHOST: u64 = 1 << 55;
    pub const SOURCE: u64 = 1 << 57;
    pub const DISCARD: u64 = 1 << 58;
    pub const CLAIM: u64 = 1 << 59;
    /// Of fi_ep_bind().
    pub const SELECTIVE_COMPLETION: u64 = 1 << 59;
    /// Of fi_av_insert() and fi_av_insertsvc().
    pub const SYNC_ERR: u64 = 1 << 58;
    /// Of fi_domain_bind() and others: `FI_PROV_ATTR_ONLY` of fi_getinfo().
    pub const PROV_ATTR_ONLY: u64 = 1 << 54;
}

/// `FI_FORMAT_UNSPEC` and so on.
pub mod format {
    pub const UNSPEC: u32 = 0;
    pub const SOCKADDR: u32 = 1;
    pub const SOCKADDR_IN: u32 = 2;
    pub const SOCKADDR_IN6: u32 = 3;
}

/// `FI_CLASS_FABRIC` and so on.
pub mod class {
    pub const FABRIC: usize = 1;
    pub const DOMAIN: usize = 2;
    pub const EP: usize = 3;
    pub const AV: usize = 11;
    pub const MR: usize = 12;
    pub const EQ: usize = 13;
    pub const CQ: usize = 14;
    pub const CNTR: usize = 15;
}

/// Of enum fi_ep_type.
pub const EP_RDM: i32 = 3;
/// Of enum fi_av_type.
pub const AV_UNSPEC: i32 = 0;
pub const AV_TABLE: i32 = 2;
/// Of enum fi_progress.
pub const PROGRESS_AUTO: i32 = 1;
/// Of enum fi_threading.
pub const THREAD_SAFE: i32 = 1;
/// Of enum fi_resource_mgmt.
pub const RM_ENABLED: i32 = 2;
/// `FI_ORDER_SAS`: sends to one peer arrive in their order.
pub const ORDER_SAS: u64 = 1 << 8;
/// `FI_ADDR_UNSPEC`, `FI_ADDR_NOTAVAIL`.
pub const ADDR_UNSPEC: u64 = u64::MAX;
/// `FI_OPT_ENDPOINT`, a level of fi_setopt().
pub const OPT_ENDPOINT: i32 = 0;
/// `FI_OPT_MIN_MULTI_RECV`.
pub const OPT_MIN_MULTI_RECV: i32 = 0;

/// Of enum fi_wait_obj.
pub mod wait {
    pub const NONE: i32 = 0;
    pub const UNSPEC: i32 = 1;
    pub const FD: i32 = 3;
}

/// Of enum fi_cq_format.
pub mod cq_format {
    pub const UNSPEC: i32 = 0;
    pub const CONTEXT: i32 = 1;
    pub const MSG: i32 = 2;
    pub const DATA: i32 = 3;
    pub const TAGGED: i32 = 4;
}

/// Commands of fi_control().
pub mod control {
    pub const GETWAIT: i32 = 5;
    pub const ENABLE: i32 = 6;
    pub const GETWAITOBJ: i32 = 16;
    pub const GETOPSFLAG: i32 = 2;
    pub const SETOPSFLAG: i32 = 3;
}

/// `FI_MR_VIRT_ADDR` and so on.
pub mod mr {
    pub const BASIC: i32 = 1;
    pub const SCALABLE: i32 = 2;
    pub const VIRT_ADDR: i32 = 1 << 4;
    pub const ALLOCATED: i32 = 1 << 5;
    pub const PROV_KEY: i32 = 1 << 6;
}

/// Error numbers; results are their negatives.
pub mod errno {
    pub use libc::{
        EADDRNOTAVAIL, EAGAIN, ECANCELED, ECONNABORTED, ECONNRESET, EINVAL, EIO, EKEYREJECTED, EMSGSIZE, ENODATA, ENODEV, ENOENT,
        ENOMEM, ENOMSG, ENOPROTOOPT, ENOSYS, EOPNOTSUPP, EPROTONOSUPPORT, ETIMEDOUT,
    };
    pub const ETOOSMALL: i32 = 257;
    pub const EOPBADSTATE: i32 = 258;
    pub const EAVAIL: i32 = 259;
    pub const EBADFLAGS: i32 = 260;
    pub const ENOCQ: i32 = 263;
    pub const ETRUNC: i32 = 265;
    pub const ENOKEY: i32 = 266;
    pub const ENOAV: i32 = 267;
}
