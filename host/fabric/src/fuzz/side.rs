//! An endpoint with what belongs to it, as a program has it.

use crate::abi::{
    ADDR_UNSPEC, CqAttr, CqEntry, CqErrEntry, DomainAttr, Fid, FidAv, FidCq, FidDomain, FidEp, FidFabric, Info, Msg, MsgTagged,
    caps, control, cq_format, flags,
};
use crate::addresses::{LENGTH_V4, to_bytes};
use baton_fuzz::Choice;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr};
use std::ptr::null_mut;

/// An entry of a queue, its sender, and if it failed its error and the bytes that had no room.
pub type Ended = (CqEntry, u64, Option<(c_int, usize)>);

/// Calls a function of an object's tables, as libfabric's header does.
macro_rules! call {
    ($object:expr, $($table:ident).+ => $function:ident($($argument:expr),* $(,)?)) => {{
        let object = $object;
        // SAFETY: the world calls only objects that it has opened and not closed, with pointers that are live and as
        // long as it says; buffers are left alone until their operation or their endpoint has ended.
        unsafe { ((*(*object).$($table).+).$function)(object.cast(), $($argument),*) }
    }};
}
pub(super) use call;

/// Whom an address stands for: a side in one of its lives, or nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    Side(usize, u32),
    Nobody,
}

/// The objects of an endpoint. Null is what is closed.
pub struct Side {
    pub fabric: *mut FidFabric,
    pub domain: *mut FidDomain,
    pub av: *mut FidAv,
    pub cq: *mut FidCq,
    pub ep: *mut FidEp,
    /// How often it was opened anew.
    pub life: u32,
    /// FI_SELECTIVE_COMPLETION.
    pub selective: bool,
    pub wait: c_int,
    pub address: SocketAddr,
    /// What the address vector holds.
    pub places: BTreeMap<u64, Target>,
    /// An address was removed.
    pub has_removed: bool,
}

fn zeroed<T>() -> T {
    // SAFETY: used for structures of C only, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

impl Side {
    pub fn open(life: u32, choice: &mut Choice) -> Side {
        let messages = caps::MSG | caps::TAGGED | caps::DIRECTED_RECV | caps::MULTI_RECV | caps::SOURCE | caps::SEND | caps::RECV;
        Side::with(messages, 0, life, choice)
    }

    /// With these capabilities, and this mode of registered memory.
    pub fn with(caps: u64, mr_mode: c_int, life: u32, choice: &mut Choice) -> Side {
        let (selective, wait) = (choice.one_in(4), choice.of(&[0, 1, 3]));
        let mut side = Side {
            fabric: null_mut(),
            domain: null_mut(),
            av: null_mut(),
            cq: null_mut(),
            ep: null_mut(),
            life,
            selective,
            wait,
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            places: BTreeMap::new(),
            has_removed: false,
        };
        let mut source = to_bytes(side.address);
        let mut info: Info = zeroed();
        let mut memory: DomainAttr = zeroed();
        memory.mr_mode = mr_mode;
        (info.caps, info.domain_attr) = (caps, &raw mut memory);
        (info.src_addr, info.src_addrlen) = (source.as_mut_ptr().cast(), source.len());
        let mut attr: CqAttr = zeroed();
        (attr.format, attr.wait_obj) = (cq_format::TAGGED, wait);
        // SAFETY: null attributes, and a place for the result.
        assert_eq!(unsafe { crate::fabric::open(null_mut(), &mut side.fabric, null_mut()) }, 0);
        assert_eq!(call!(side.fabric, ops => domain(&mut info, &mut side.domain, null_mut())), 0);
        assert_eq!(call!(side.domain, ops => av_open(null_mut(), &mut side.av, null_mut())), 0);
        assert_eq!(call!(side.domain, ops => cq_open(&mut attr, &mut side.cq, null_mut())), 0);
        assert_eq!(call!(side.domain, ops => endpoint(&mut info, &mut side.ep, null_mut())), 0);
        // Without a vector and a queue it cannot be enabled, and not be used before.
        assert!(call!(side.ep, fid.ops => control(control::ENABLE, null_mut())) < 0);
        assert!(call!(side.ep, msg => inject(null_mut(), 0, 0)) < 0);
        assert_eq!(call!(side.ep, fid.ops => bind(side.av.cast(), 0)), 0);
        let selective = if selective { flags::SELECTIVE_COMPLETION } else { 0 };
        assert!(call!(side.ep, fid.ops => bind(side.cq.cast(), 1)) < 0);
        assert_eq!(call!(side.ep, fid.ops => bind(side.cq.cast(), caps::SEND | caps::RECV | selective)), 0);
        assert_eq!(call!(side.ep, fid.ops => control(control::ENABLE, null_mut())), 0);
        let (mut name, mut length) = ([0u8; 64], 64);
        assert_eq!(call!(side.ep, cm => getname(name.as_mut_ptr().cast(), &mut length)), 0);
        // SAFETY: the call has written an address of that length.
        side.address = unsafe { crate::addresses::read(name.as_ptr().cast(), length) }.expect("a name");
        side
    }

    /// Inserts an address. Returns its place.
    pub fn insert(&mut self, address: SocketAddr, target: Target) -> u64 {
        let (bytes, mut place) = (to_bytes(address), 0);
        assert_eq!(call!(self.av, ops => insert(bytes.as_ptr().cast(), 1, &mut place, 0, null_mut())), 1);
        assert!(self.places.insert(place, target).is_none_or(|before| before == target), "a place has one address");
        let (mut out, mut length) = ([0u8; LENGTH_V4], LENGTH_V4);
        assert_eq!(call!(self.av, ops => lookup(place, out.as_mut_ptr().cast(), &mut length)), 0);
        assert_eq!(out[..], bytes[..]);
        place
    }

    /// Inserts what is no address.
    pub fn insert_bad(&mut self, choice: &mut Choice) {
        let mut bytes = to_bytes(self.address);
        bytes[..2].copy_from_slice(&choice.of(&[0u16, 1, 3, 99, u16::MAX]).to_ne_bytes());
        bytes.resize(64, 0);
        let mut place = 7;
        assert_eq!(call!(self.av, ops => insert(bytes.as_ptr().cast(), 1, &mut place, 0, null_mut())), 0);
        assert_eq!(place, ADDR_UNSPEC);
    }

    /// A place that has an address, if any has, or one that has none.
    pub fn place(&self, choice: &mut Choice) -> (u64, Option<Target>) {
        let known: Vec<u64> = self.places.keys().copied().collect();
        let place = match choice.one_in(16) || known.is_empty() {
            true => choice.of(&[0, 1, 2, 3, 100, 1 << 40, u64::MAX - 1, u64::MAX]),
            false => choice.of(&known),
        };
        (place, self.places.get(&place).copied())
    }

    /// Removes a place, known or not.
    pub fn remove(&mut self, choice: &mut Choice) {
        let (mut place, target) = self.place(choice);
        let expected = if target.is_some() { 0 } else { -libc::EINVAL };
        assert_eq!(call!(self.av, ops => remove(&mut place, 1, 0)), expected);
        self.has_removed |= self.places.remove(&place).is_some();
    }

    pub fn send(
        &self,
        tagged: Option<u64>,
        iov: &[libc::iovec],
        address: u64,
        context: *mut c_void,
        data: u64,
        flags: u64,
    ) -> isize {
        match tagged {
            Some(tag) => {
                let message = MsgTagged {
                    iov: iov.as_ptr(),
                    desc: null_mut(),
                    iov_count: iov.len(),
                    addr: address,
                    tag,
                    ignore: 0,
                    context,
                    data,
                };
                call!(self.ep, tagged => sendmsg(&message, flags))
            }
            None => call!(self.ep, msg => sendmsg(&plain(iov, address, context, data), flags)),
        }
    }

    pub fn receive(
        &self,
        tagged: Option<(u64, u64)>,
        iov: &[libc::iovec],
        source: u64,
        context: *mut c_void,
        flags: u64,
    ) -> isize {
        match tagged {
            Some((tag, ignore)) => {
                let message = MsgTagged {
                    iov: iov.as_ptr(),
                    desc: null_mut(),
                    iov_count: iov.len(),
                    addr: source,
                    tag,
                    ignore,
                    context,
                    data: 0,
                };
                call!(self.ep, tagged => recvmsg(&message, flags))
            }
            None => call!(self.ep, msg => recvmsg(&plain(iov, source, context, 0), flags)),
        }
    }

    pub fn cancel(&self, context: *mut c_void) -> isize {
        call!(self.ep, ops => cancel(context))
    }

    /// Takes what has ended: entries with their senders, or an error.
    pub fn read(&self, choice: &mut Choice) -> Vec<Ended> {
        const NONE: CqEntry = CqEntry { op_context: null_mut(), flags: 0, len: 0, buf: null_mut(), data: 0, tag: 0 };
        let (mut entries, mut sources) = ([NONE; 8], [ADDR_UNSPEC; 8]);
        let (out, count) = (entries.as_mut_ptr().cast(), choice.below(9) as usize);
        let timeout = choice.below(3) as c_int;
        let got = match choice.below(12) {
            0 => {
                assert_eq!(call!(self.cq, ops => signal()), 0);
                call!(self.cq, ops => sread(out, count, null_mut(), if self.wait == 0 { 0 } else { -1 }))
            }
            1 => call!(self.cq, ops => sreadfrom(out, count, sources.as_mut_ptr(), null_mut(), timeout)),
            2 => call!(self.cq, ops => read(out, count)),
            3 => call!(self.cq, ops => read(null_mut(), 0)),
            _ => call!(self.cq, ops => readfrom(out, count, sources.as_mut_ptr())),
        };
        let mut error = CqErrEntry { entry: NONE, olen: 0, err: 0, prov_errno: 0, err_data: null_mut(), err_data_size: 0 };
        let failed = got == -(crate::abi::errno::EAVAIL as isize);
        if failed || choice.one_in(16) {
            let read = call!(self.cq, ops => readerr(&mut error, 0));
            if read == 1 {
                let text = call!(self.cq, ops => strerror(error.prov_errno, null_mut(), null_mut(), 0));
                assert!(!text.is_null());
                let mut all: Vec<_> = (0..got.max(0) as usize).map(|at| (entries[at], sources[at], None)).collect();
                all.push((error.entry, ADDR_UNSPEC, Some((error.err, error.olen))));
                return all;
            }
            assert!(read == -(libc::EAGAIN as isize) && !failed, "fi_cq_readerr: {read}");
        }
        let nothing = [-(libc::EAGAIN as isize), -(libc::ENOSYS as isize), -(crate::abi::errno::EAVAIL as isize)];
        assert!((0..=count as isize).contains(&got) || nothing.contains(&got), "fi_cq_read: {got}");
        (0..got.max(0) as usize).map(|at| (entries[at], sources[at], None)).collect()
    }

    /// Closes one of its objects, if it is open.
    pub fn close_one(&mut self, which: u64) {
        let object: *mut Fid = match which {
            0 => std::mem::replace(&mut self.ep, null_mut()).cast(),
            1 => std::mem::replace(&mut self.cq, null_mut()).cast(),
            2 => std::mem::replace(&mut self.av, null_mut()).cast(),
            3 => std::mem::replace(&mut self.domain, null_mut()).cast(),
            _ => std::mem::replace(&mut self.fabric, null_mut()).cast(),
        };
        if !object.is_null() {
            assert_eq!(call!(object, ops => close()), 0);
        }
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        (0..5).for_each(|which| self.close_one(which));
    }
}

fn plain(iov: &[libc::iovec], addr: u64, context: *mut c_void, data: u64) -> Msg {
    Msg { iov: iov.as_ptr(), desc: null_mut(), iov_count: iov.len(), addr, context, data }
}

/// A call succeeds, or is refused for one of the reasons that hold.
pub fn expect(result: isize, refusals: &[(bool, c_int)]) {
    let mut reasons = refusals.iter().filter(|(holds, _)| *holds).peekable();
    match reasons.peek() {
        None => assert_eq!(result, 0, "there is no reason to refuse this"),
        Some(_) => assert!(reasons.any(|(_, error)| result == -(*error as isize)), "{result} is the answer, of {refusals:?}"),
    }
}
