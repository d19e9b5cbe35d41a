//! Address vectors, fi_av(3). An address is named by its place in the vector, whether that is a map or a table.

use crate::abi::{ADDR_UNSPEC, AV_TABLE, AV_UNSPEC, AvAttr, AvOps, Fid, FidAv, FidDomain, FidOps, class, errno, flags};
use crate::addresses::{self, LENGTH_V4, LENGTH_V6, to_bytes};
use crate::object::{close, failure, hand_out, missing, no_bind, no_control, object};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The addresses, as the vector and its endpoints share them.
#[derive(Debug, Default)]
pub struct Addresses {
    places: Mutex<Places>,
    /// Addresses that were removed so far. What an endpoint remembers of places holds as long as this stands still.
    removals: AtomicU64,
}

#[derive(Debug, Default)]
struct Places {
    /// By fi_addr_t.
    places: Vec<Option<SocketAddr>>,
    /// Places whose address was removed.
    free: Vec<u64>,
    by_address: BTreeMap<SocketAddr, u64>,
}

impl Addresses {
    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of addresses that were removed so far.
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// The address at a place.
    pub fn get(&self, place: u64) -> Option<SocketAddr> {
        *self.lock().places.get(usize::try_from(place).ok()?)?
    }

    /// The place of an address.
    pub fn find(&self, address: &SocketAddr) -> Option<u64> {
        self.lock().by_address.get(address).copied()
    }

    fn insert(&self, address: SocketAddr) -> u64 {
        let mut places = self.lock();
        if let Some(place) = places.by_address.get(&address) {
            return *place;
        }
        let place = places.free.pop().unwrap_or(places.places.len() as u64);
        match places.places.get_mut(place as usize) {
            Some(free) => *free = Some(address),
            None => places.places.push(Some(address)),
        }
        places.by_address.insert(address, place);
        place
    }

    fn remove(&self, place: u64) -> bool {
        let mut places = self.lock();
        let removed = usize::try_from(place).ok().and_then(|place| places.places.get_mut(place)?.take());
        let Some(address) = removed else { return false };
        places.by_address.remove(&address);
        places.free.push(place);
        self.removals.fetch_add(1, Ordering::Release);
        true
    }
}

/// An address vector.
#[repr(C)]
pub struct Vector {
    fid: FidAv,
    pub addresses: Arc<Addresses>,
}

static FID_OPS: FidOps = FidOps {
    size: size_of::<FidOps>(),
    close: close::<Vector>,
    bind: no_bind,
    control: no_control,
    ops_open: missing,
    tostr: missing,
    ops_set: missing,
};

static OPS: AvOps =
    AvOps { size: size_of::<AvOps>(), insert, insertsvc, insertsym: missing, remove, lookup, straddr, av_set: missing };

/// fi_av_open().
pub unsafe extern "C" fn open(_: *mut FidDomain, attr: *mut AvAttr, out: *mut *mut FidAv, context: *mut c_void) -> c_int {
    // SAFETY: null, or the caller's attributes.
    if let Some(attr) = unsafe { attr.as_mut() } {
        if !attr.name.is_null() || attr.flags != 0 || attr.rx_ctx_bits != 0 {
            // Vectors shared by name, insertion in the background, several receive contexts.
            return failure(errno::ENOSYS);
        }
        // Whoever leaves the choice to us gets it as a result.
        if attr.kind == AV_UNSPEC {
            attr.kind = AV_TABLE;
        }
    }
    let fid = FidAv { fid: Fid { class: class::AV, context, ops: &FID_OPS }, ops: &OPS };
    // SAFETY: a `repr(C)` object that begins with a FidAv; `out` is the caller's place for it.
    unsafe { hand_out(Vector { fid, addresses: Arc::default() }, out) }
}

/// The place for the error of each address that is inserted; null if the caller has none (FI_SYNC_ERR).
fn errors(how: u64, context: *mut c_void) -> *mut c_int {
    if how & flags::SYNC_ERR != 0 { context.cast() } else { std::ptr::null_mut() }
}

unsafe extern "C" fn insert(
    av: *mut FidAv,
    addr: *const c_void,
    count: usize,
    out: *mut u64,
    how: u64,
    context: *mut c_void,
) -> c_int {
    let errors = errors(how, context);
    // SAFETY: C's pointer to a vector that is not closed.
    let Some(vector) = (unsafe { object::<Vector, _>(av) }) else { return failure(errno::EINVAL) };
    let (mut at, mut length, mut inserted) = (addr.cast::<u8>(), None, 0);
    for place in 0..count {
        // SAFETY: the caller gives `count` addresses of the endpoint's format one behind the other. Where one begins
        // that follows one of no known family is not known, unless an earlier one had a length.
        let address = if at.is_null() { None } else { unsafe { addresses::read(at.cast(), LENGTH_V6) } };
        if let Some(address) = address {
            length = Some(if address.is_ipv4() { LENGTH_V4 } else { LENGTH_V6 });
            inserted += 1;
        }
        let found = address.map_or(ADDR_UNSPEC, |address| vector.addresses.insert(address));
        // SAFETY: null, or room for `count` results and errors.
        unsafe {
            if !out.is_null() {
                *out.add(place) = found;
            }
            if !errors.is_null() {
                *errors.add(place) = if address.is_some() { 0 } else { errno::EINVAL };
            }
        }
        at = length.map_or(std::ptr::null(), |length| at.wrapping_add(length));
    }
    inserted
}

unsafe extern "C" fn insertsvc(
    av: *mut FidAv,
    node: *const c_char,
    service: *const c_char,
    out: *mut u64,
    how: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: C's pointer to a vector that is not closed, null or C strings, null or a place for a result and an error.
    unsafe {
        let Some(vector) = object::<Vector, _>(av) else { return failure(errno::EINVAL) };
        let found = addresses::resolve(addresses::text(node), addresses::text(service), None);
        if let Some(error) = errors(how, context).as_mut() {
            *error = if found.is_some() { 0 } else { errno::EINVAL };
        }
        let Some(address) = found else { return failure(errno::EINVAL) };
        let place = vector.addresses.insert(address);
        if let Some(out) = out.as_mut() {
            *out = place;
        }
    }
    1
}

unsafe extern "C" fn remove(av: *mut FidAv, addr: *mut u64, count: usize, _: u64) -> c_int {
    // SAFETY: C's pointer to a vector that is not closed, and `count` places.
    let removed = unsafe {
        let Some(vector) = object::<Vector, _>(av).filter(|_| !addr.is_null()) else { return failure(errno::EINVAL) };
        (0..count).all(|at| vector.addresses.remove(*addr.add(at)))
    };
    if removed { 0 } else { failure(errno::EINVAL) }
}

unsafe extern "C" fn lookup(av: *mut FidAv, place: u64, out: *mut c_void, length: *mut usize) -> c_int {
    // SAFETY: C's pointer to a vector that is not closed; `write_address` demands what the caller gives.
    unsafe {
        let Some(vector) = object::<Vector, _>(av) else { return failure(errno::EINVAL) };
        match vector.addresses.get(place) {
            Some(address) => write_address(address, out, length),
            None => failure(errno::EINVAL),
        }
    }
}

/// Writes an address for C, as far as there is room. `length` becomes its length.
///
/// # Safety
/// `length` is null or says how many bytes there are at `out`.
pub unsafe fn write_address(address: SocketAddr, out: *mut c_void, length: *mut usize) -> c_int {
    let bytes = to_bytes(address);
    // SAFETY: this function's `# Safety`; no more is written than there is room for.
    unsafe {
        let Some(room) = length.as_mut() else { return failure(errno::EINVAL) };
        let had = std::mem::replace(room, bytes.len());
        if !out.is_null() {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len().min(had));
        }
        if had < bytes.len() { failure(errno::ETOOSMALL) } else { 0 }
    }
}

unsafe extern "C" fn straddr(_: *mut FidAv, addr: *const c_void, out: *mut c_char, length: *mut usize) -> *const c_char {
    // SAFETY: an address of the endpoint's format; `length` says how many bytes there are at `out`.
    unsafe {
        let text = addresses::read(addr, LENGTH_V6).map_or("no address".to_owned(), |address| match address {
            SocketAddr::V4(v4) => format!("fi_sockaddr_in://{v4}"),
            SocketAddr::V6(v6) => format!("fi_sockaddr_in6://{v6}"),
        });
        let Some(room) = length.as_mut() else { return std::ptr::null() };
        let had = std::mem::replace(room, text.len() + 1);
        if had == 0 || out.is_null() {
            return std::ptr::null();
        }
        let copied = text.len().min(had - 1);
        std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), copied);
        *out.add(copied) = 0;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector() -> *mut FidAv {
        let mut av = std::ptr::null_mut();
        // SAFETY: no domain and no attributes are asked for; there is a place for the result.
        assert_eq!(unsafe { open(std::ptr::null_mut(), std::ptr::null_mut(), &mut av, std::ptr::null_mut()) }, 0);
        av
    }

    fn addresses(ports: &[u16]) -> Vec<u8> {
        let bytes = |port: &u16| to_bytes(SocketAddr::from(([10, 0, 0, 1], *port)));
        ports.iter().flat_map(bytes).collect()
    }

    fn insert_all(av: *mut FidAv, bytes: &[u8], count: usize) -> (c_int, Vec<u64>) {
        let mut out = vec![77; count];
        // SAFETY: a vector that is not closed, `count` addresses, room for as many results.
        let inserted = unsafe { insert(av, bytes.as_ptr().cast(), count, out.as_mut_ptr(), 0, std::ptr::null_mut()) };
        (inserted, out)
    }

    /// fi_av(3): what cannot be inserted is FI_ADDR_NOTAVAIL, and the number of those that were is returned.
    #[test]
    fn addresses_behind_a_bad_one_are_inserted() {
        let av = vector();
        let mut bytes = addresses(&[1, 2, 3, 4]);
        bytes[LENGTH_V4] = 99;
        assert_eq!(insert_all(av, &bytes, 4), (3, vec![0, ADDR_UNSPEC, 1, 2]));
        // Behind a first one of no known family nothing can be found.
        bytes[0] = 99;
        assert_eq!(insert_all(av, &bytes, 4), (0, vec![ADDR_UNSPEC; 4]));
    }

    /// FI_SYNC_ERR: each address has a place for what became of it.
    #[test]
    fn the_errors_of_addresses_are_told_on_request() {
        let (av, mut bytes) = (vector(), addresses(&[1, 2, 3]));
        bytes[LENGTH_V4] = 99;
        let insert_with = |how| {
            let mut errors = [77; 3];
            // SAFETY: a vector that is not closed, three addresses, no place for results, and three for errors.
            let inserted = unsafe { insert(av, bytes.as_ptr().cast(), 3, std::ptr::null_mut(), how, errors.as_mut_ptr().cast()) };
            (inserted, errors)
        };
        assert_eq!(insert_with(flags::SYNC_ERR), (2, [0, errno::EINVAL, 0]));
        // The context is something else otherwise.
        assert_eq!(insert_with(0), (2, [77; 3]));
    }

    /// FI_AV_UNSPEC: the caller gets the kind as a result; whoever wants a certain one has that.
    #[test]
    fn the_kind_of_a_vector_is_a_result() {
        for (asked, expected) in [(AV_UNSPEC, AV_TABLE), (1, 1), (AV_TABLE, AV_TABLE)] {
            // SAFETY: attributes are plain data, for which zero is a value.
            let mut attr: AvAttr = unsafe { std::mem::zeroed() };
            attr.kind = asked;
            let mut av = std::ptr::null_mut();
            // SAFETY: no domain is needed; attributes, and a place for the result.
            assert_eq!(unsafe { open(std::ptr::null_mut(), &mut attr, &mut av, std::ptr::null_mut()) }, 0);
            assert_eq!(attr.kind, expected);
        }
    }

    /// A program whose peers come and go does not need more and more memory, and what it removed is not found again.
    #[test]
    fn places_are_used_again() {
        let av = vector();
        // SAFETY: the vector made above.
        let known = &unsafe { object::<Vector, _>(av) }.expect("a vector").addresses;
        for port in 1..1000 {
            let removals = known.removals();
            let (_, places) = insert_all(av, &addresses(&[port, port + 1000]), 2);
            assert!(places.iter().all(|place| *place < 2), "{places:?}");
            // SAFETY: the vector made above, and two places.
            assert_eq!(unsafe { remove(av, places.clone().as_mut_ptr(), 2, 0) }, 0);
            assert_eq!((known.get(places[0]), known.removals()), (None, removals + 2));
        }
        let (_, places) = insert_all(av, &addresses(&[1]), 1);
        // SAFETY: the vector made above, and one place; one that is free is not removed.
        assert_ne!(unsafe { remove(av, [1 - places[0]].as_mut_ptr(), 1, 0) }, 0);
    }
}
