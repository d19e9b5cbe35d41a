//! Registered memory, fi_mr(3), and how peers reach it.

use crate::abi::{Fid, FidMr, FidOps, MrAttr, caps, class, control, errno, mr};
use crate::buffer::ProgramBuffer;
use crate::domain::{Domain, DomainShared};
use crate::object::{failure, hand_out, missing, object};
use baton_messages::{Access, Regions};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Longest region that is assumed to be fully mapped; longer ones may be partly unmapped (MPI_Win_create_dynamic).
const PLAUSIBLE: usize = 1 << 46;

/// A region that peers may reach.
#[derive(Clone, Copy, Debug)]
struct Registered {
    /// Address of its first byte in this process, and for peers.
    start: usize,
    remote: u64,
    length: usize,
    access: u64,
}

/// The regions of a domain, by key.
#[derive(Debug, Default)]
pub struct Registry(Mutex<Keys>);

#[derive(Debug, Default)]
struct Keys {
    regions: BTreeMap<u64, Registered>,
    next: u64,
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a region under the program's key, or under one that the provider chooses. None if the key is taken.
    fn insert(&self, key: Option<u64>, region: Registered) -> Option<u64> {
        let mut keys = self.lock();
        let key = key.unwrap_or_else(|| {
            keys.next += 1;
            keys.next
        });
        if keys.regions.contains_key(&key) {
            return None;
        }
        keys.regions.insert(key, region);
        Some(key)
    }
}

/// An endpoint's access to the registry.
pub struct Reach(pub Arc<DomainShared>);

impl Regions<ProgramBuffer> for Reach {
    fn find(&self, key: u64, address: u64, length: u64, access: Access) -> Option<ProgramBuffer> {
        let region = *self.0.registry.lock().regions.get(&key)?;
        let needed = match access {
            Access::Read => caps::REMOTE_READ,
            Access::Write => caps::REMOTE_WRITE,
        };
        let at = usize::try_from(address.checked_sub(region.remote)?).ok()?;
        let (end, length) = (at.checked_add(usize::try_from(length).ok()?)?, length as usize);
        if end > region.length || region.access & needed == 0 {
            return None;
        }
        let start = region.start.wrapping_add(at) as *mut c_void;
        // SAFETY: the program keeps a region's memory until it has closed it (fi_mr(3)), and peers may write to it
        // meanwhile. A region that is longer than memory is guarded.
        Some(unsafe {
            if region.length > PLAUSIBLE { ProgramBuffer::guarded(start, length) } else { ProgramBuffer::new(start, length) }
        })
    }
}

/// Registered memory.
#[repr(C)]
struct Region {
    fid: FidMr,
    domain: Arc<DomainShared>,
}

impl Drop for Region {
    fn drop(&mut self) {
        self.domain.registry.lock().regions.remove(&self.fid.key);
    }
}

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: crate::object::close::<Region>,
    bind,
    control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

/// Endpoints and counters may be bound to regions; here a region belongs to all endpoints of its domain.
unsafe extern "C" fn bind(_: *mut Fid, _: *mut Fid, _: u64) -> c_int {
    0
}

unsafe extern "C" fn control(_: *mut Fid, command: c_int, _: *mut c_void) -> c_int {
    // A region is enabled from the beginning.
    if command == control::ENABLE { 0 } else { failure(errno::ENOSYS) }
}

/// What is registered.
struct Request {
    start: usize,
    length: usize,
    access: u64,
    offset: u64,
    key: u64,
    context: *mut c_void,
}

/// # Safety
/// `domain` is C's pointer to a domain that is not closed, `out` its place for a region.
unsafe fn register(domain: *mut Fid, request: &Request, out: *mut *mut FidMr) -> c_int {
    // SAFETY: this function's `# Safety`.
    let Some(domain) = (unsafe { object::<Domain, _>(domain) }) else { return failure(errno::EINVAL) };
    let shared = domain.shared.clone();
    // FI_MR_BASIC is the old name of the three together.
    let bit = |bit| shared.mr_mode & (bit | mr::BASIC) != 0;
    let remote = if bit(mr::VIRT_ADDR) { request.start as u64 } else { request.offset };
    let region = Registered { start: request.start, remote, length: request.length, access: request.access };
    let Some(key) = shared.registry.insert((!bit(mr::PROV_KEY)).then_some(request.key), region) else {
        return failure(errno::ENOKEY);
    };
    let fid = Fid { class: class::MR, context: request.context, ops: &FID_OPS };
    let made = Region { fid: FidMr { fid, mem_desc: std::ptr::null_mut(), key }, domain: shared };
    // SAFETY: a `repr(C)` object that begins with a FidMr; this function's `# Safety`.
    unsafe { hand_out(made, out) }
}

/// fi_mr_reg().
pub unsafe extern "C" fn reg(
    domain: *mut Fid,
    start: *const c_void,
    length: usize,
    access: u64,
    offset: u64,
    key: u64,
    _flags: u64,
    out: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    let request = Request { start: start as usize, length, access, offset, key, context };
    // SAFETY: the caller's arguments.
    unsafe { register(domain, &request, out) }
}

/// fi_mr_regv(), for one part: peers reach a region by one range of addresses.
pub unsafe extern "C" fn regv(
    domain: *mut Fid,
    iov: *const libc::iovec,
    count: usize,
    access: u64,
    offset: u64,
    key: u64,
    flags: u64,
    out: *mut *mut FidMr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the caller gives `count` parts.
    match unsafe { iov.as_ref() }.filter(|_| count == 1) {
        // SAFETY: the caller's arguments.
        Some(part) => unsafe { reg(domain, part.iov_base, part.iov_len, access, offset, key, flags, out, context) },
        None => failure(errno::EINVAL),
    }
}

/// fi_mr_regattr().
pub unsafe extern "C" fn regattr(domain: *mut Fid, attr: *const MrAttr, flags: u64, out: *mut *mut FidMr) -> c_int {
    // SAFETY: null or the caller's attributes, whose `iov` has `iov_count` parts.
    match unsafe { attr.as_ref() } {
        // SAFETY: `iov` has `iov_count` parts, as the caller's attributes say; its other fields are the arguments of
        // the call `regv`.
        Some(MrAttr { iov, iov_count, access, offset, requested_key, context }) => unsafe {
            regv(domain, *iov, *iov_count, *access, *offset, *requested_key, flags, out, *context)
        },
        None => failure(errno::EINVAL),
    }
}
