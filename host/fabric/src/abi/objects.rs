//! Structures: attributes, objects, completions.

use super::{
    AtomicOps, AvOps, CmOps, CntrOps, CollectiveOps, CqOps, DomainOps, EpOps, EqOps, FabricOps, FidOps, MrOps, MsgOps, RmaOps,
    TaggedOps,
};
use std::ffi::{c_char, c_int, c_void};

/// struct fid: what every object begins with.
#[repr(C)]
#[derive(Debug)]
pub struct Fid {
    pub class: usize,
    pub context: *mut c_void,
    pub ops: *const FidOps,
}

/// struct fi_provider.
#[repr(C)]
pub struct Provider {
    pub version: u32,
    pub fi_version: u32,
    pub context: [*mut c_void; 4],
    pub name: *const c_char,
    pub getinfo: super::GetInfo,
    pub fabric: super::OpenFabric,
    pub cleanup: unsafe extern "C" fn(),
}

/// struct fi_tx_attr.
#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

/// struct fi_rx_attr.
#[repr(C)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

/// struct fi_ep_attr.
#[repr(C)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order_raw_size: usize,
    pub max_order_war_size: usize,
    pub max_order_waw_size: usize,
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

/// struct fi_domain_attr.
#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut FidDomain,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

/// struct fi_fabric_attr.
#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut FidFabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

/// struct fi_info.
#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

/// struct fid_fabric.
#[repr(C)]
pub struct FidFabric {
    pub fid: Fid,
    pub ops: *const FabricOps,
    pub api_version: u32,
}

/// struct fid_domain.
#[repr(C)]
pub struct FidDomain {
    pub fid: Fid,
    pub ops: *const DomainOps,
    pub mr: *const MrOps,
}

/// struct fid_av.
#[repr(C)]
pub struct FidAv {
    pub fid: Fid,
    pub ops: *const AvOps,
}

/// struct fid_mr.
#[repr(C)]
pub struct FidMr {
    pub fid: Fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

/// struct fid_eq.
#[repr(C)]
pub struct FidEq {
    pub fid: Fid,
    pub ops: *const EqOps,
}

/// struct fid_cq.
#[repr(C)]
pub struct FidCq {
    pub fid: Fid,
    pub ops: *const CqOps,
}

/// struct fid_cntr.
#[repr(C)]
pub struct FidCntr {
    pub fid: Fid,
    pub ops: *const CntrOps,
}

/// struct fid_ep.
#[repr(C)]
pub struct FidEp {
    pub fid: Fid,
    pub ops: *const EpOps,
    pub cm: *const CmOps,
    pub msg: *const MsgOps,
    pub rma: *const RmaOps,
    pub tagged: *const TaggedOps,
    pub atomic: *const AtomicOps,
    pub collective: *const CollectiveOps,
}

/// struct fi_av_attr.
#[repr(C)]
pub struct AvAttr {
    pub kind: c_int,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

/// struct fi_cq_attr.
#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

/// struct fi_cntr_attr.
#[repr(C)]
pub struct CntrAttr {
    pub events: c_int,
    pub wait_obj: c_int,
    pub wait_set: *mut c_void,
    pub flags: u64,
}

/// struct fi_mr_attr, as far as it is read.
#[repr(C)]
pub struct MrAttr {
    pub iov: *const libc::iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
}

/// struct fi_cq_tagged_entry. The shorter formats are its beginnings.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CqEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
}

/// struct fi_cq_err_entry of 1.17; 1.20 has appended `src_addr`, which only programs look at that asked for
/// `FI_SOURCE_ERR`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CqErrEntry {
    pub entry: CqEntry,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}

/// struct fi_msg.
#[repr(C)]
pub struct Msg {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub context: *mut c_void,
    pub data: u64,
}

/// struct fi_msg_tagged.
#[repr(C)]
pub struct MsgTagged {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub tag: u64,
    pub ignore: u64,
    pub context: *mut c_void,
    pub data: u64,
}

/// struct fi_rma_iov.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaIov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

/// struct fi_msg_rma.
#[repr(C)]
pub struct MsgRma {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub rma_iov: *const RmaIov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}
