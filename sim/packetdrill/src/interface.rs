//! The C interface: `packetdrill_interface_init` and the functions that it hands over.

use crate::addresses;
use crate::call::Adapter;
use crate::errors::Answer;
use crate::receive::Message;
use crate::settings::Flags;
use core::ffi::{CStr, c_char, c_int, c_long, c_longlong, c_short, c_uint, c_ulong, c_void};
use libc::{iovec, loff_t, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t, timeval};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// `struct packetdrill_interface`: what the functions get as their first argument, and the functions.
#[repr(C)]
#[allow(
    missing_docs,
    reason = "each field is the system call of its name; the two of the device and the clock are described below"
)]
pub struct Interface {
    pub userdata: *mut c_void,
    pub free: unsafe extern "C" fn(*mut c_void),
    pub socket: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int) -> c_int,
    pub bind: unsafe extern "C" fn(*mut c_void, c_int, *const sockaddr, socklen_t) -> c_int,
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, c_int) -> c_int,
    pub accept: unsafe extern "C" fn(*mut c_void, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    pub connect: unsafe extern "C" fn(*mut c_void, c_int, *const sockaddr, socklen_t) -> c_int,
    pub read: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, size_t) -> ssize_t,
    pub readv: unsafe extern "C" fn(*mut c_void, c_int, *const iovec, c_int) -> ssize_t,
    pub recv: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, size_t, c_int) -> ssize_t,
    pub recvfrom: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t,
    pub recvmsg: unsafe extern "C" fn(*mut c_void, c_int, *mut msghdr, c_int) -> ssize_t,
    pub write: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, size_t) -> ssize_t,
    pub writev: unsafe extern "C" fn(*mut c_void, c_int, *const iovec, c_int) -> ssize_t,
    pub send: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, size_t, c_int) -> ssize_t,
    pub sendto: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t,
    pub sendmsg: unsafe extern "C" fn(*mut c_void, c_int, *const msghdr, c_int) -> ssize_t,
    /// In C it takes its last argument as a variadic one.
    pub fcntl: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_long) -> c_int,
    /// The same.
    pub ioctl: unsafe extern "C" fn(*mut c_void, c_int, c_ulong, *mut c_int) -> c_int,
    pub close: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    pub shutdown: unsafe extern "C" fn(*mut c_void, c_int, c_int) -> c_int,
    pub getsockopt: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
    pub setsockopt: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    pub poll: unsafe extern "C" fn(*mut c_void, *mut pollfd, nfds_t, c_int) -> c_int,
    /// A packet for the stack, from its IP header on. 0, or -1.
    pub netdev_send: unsafe extern "C" fn(*mut c_void, *const c_void, size_t) -> c_int,
    /// The next packet that the stack sends: into a buffer of the given size, its length, and when it left.
    pub netdev_receive: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut size_t, *mut c_longlong) -> c_int,
    pub usleep: unsafe extern "C" fn(*mut c_void, c_uint) -> c_int,
    pub gettimeofday: unsafe extern "C" fn(*mut c_void, *mut timeval, *mut c_void) -> c_int,
    pub epoll_create: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    pub epoll_ctl: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *mut libc::epoll_event) -> c_int,
    pub epoll_wait: unsafe extern "C" fn(*mut c_void, c_int, *mut libc::epoll_event, c_int, c_int) -> c_int,
    pub pipe: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    pub splice: unsafe extern "C" fn(*mut c_void, c_int, *mut loff_t, c_int, *mut loff_t, size_t, c_uint) -> c_int,
}

/// The adapter in use, for `getsockopt` calls past the interface.
static CURRENT: Mutex<Weak<Adapter>> = Mutex::new(Weak::new());

/// Fills in the interface. `flags` is what `--so_flags` says.
///
/// # Safety
/// `flags` is null or a C string; `interface` points to a `struct packetdrill_interface`. The calling thread is the one
/// that runs the script; only one other may call in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn packetdrill_interface_init(flags: *const c_char, interface: *mut Interface) {
    let text = if flags.is_null() {
        String::new()
    } else {
        // SAFETY: not null, and then a C string by this function's contract.
        unsafe { CStr::from_ptr(flags) }.to_string_lossy().into_owned()
    };
    let flags = Flags::parse(&text).unwrap_or_else(|error| {
        eprintln!("{error}");
        std::process::exit(2);
    });
    let adapter = Arc::new(Adapter::new(flags));
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&adapter);
    let userdata = Arc::into_raw(adapter).cast_mut().cast::<c_void>();
    // SAFETY: `interface` points to the caller's structure of this layout, by this function's contract.
    unsafe { interface.write(table(userdata)) };
}

fn table(userdata: *mut c_void) -> Interface {
    Interface {
        userdata,
        free: free_adapter,
        socket,
        bind,
        listen,
        accept,
        connect,
        read,
        readv,
        recv,
        recvfrom,
        recvmsg,
        write,
        writev,
        send,
        sendto,
        sendmsg,
        fcntl,
        ioctl,
        close,
        shutdown,
        getsockopt,
        setsockopt,
        poll,
        netdev_send,
        netdev_receive,
        usleep,
        gettimeofday,
        epoll_create,
        epoll_ctl,
        epoll_wait,
        pipe,
        splice,
    }
}

/// The adapter behind `userdata`.
///
/// # Safety
/// `userdata` is what [`packetdrill_interface_init`] handed out and `free` has not taken back.
unsafe fn adapter<'a>(userdata: *mut c_void) -> &'a Adapter {
    // SAFETY: by this function's contract it points to an `Adapter` that an `Arc` still owns.
    unsafe { &*userdata.cast::<Adapter>() }
}

/// What a system call returns in C: -1 and errno for an error.
fn result(answer: Answer<usize>) -> ssize_t {
    match answer {
        Ok(value) => value as ssize_t,
        Err(errno) => {
            // SAFETY: the location is this thread's own errno, always valid.
            unsafe { *libc::__errno_location() = errno };
            -1
        }
    }
}

fn small<T>(answer: Answer<T>) -> c_int {
    result(answer.map(|_| 0)) as c_int
}

/// The bytes that a caller passes in.
///
/// # Safety
/// `data` is null or valid for reads of `length` bytes.
unsafe fn bytes<'a>(data: *const c_void, length: usize) -> &'a [u8] {
    // SAFETY: valid for reads by this function's contract, and an empty slice for null.
    if data.is_null() { &[] } else { unsafe { core::slice::from_raw_parts(data.cast(), length) } }
}

/// Writes to a caller's buffer, as much as it holds.
///
/// # Safety
/// `room` is null or valid for writes of `length` bytes.
unsafe fn put(source: &[u8], room: *mut c_void, length: usize) -> usize {
    if room.is_null() {
        return 0;
    }
    let length = length.min(source.len());
    // SAFETY: `room` is valid for at least `length` bytes by this function's contract, and the source is another
    // object.
    unsafe { core::ptr::copy_nonoverlapping(source.as_ptr(), room.cast(), length) };
    length
}

/// Writes an address and its length.
///
/// # Safety
/// `length` is null or valid; `room` is null or has room for `*length` bytes.
unsafe fn put_address(source: &[u8], room: *mut sockaddr, length: *mut socklen_t) {
    if !length.is_null() {
        // SAFETY: `length` is not null, and `room` has room for `*length` bytes by this function's contract.
        unsafe {
            put(source, room.cast(), *length as usize);
            *length = source.len() as socklen_t;
        }
    }
}

/// The buffers of a call, as slices to fill one after the other.
///
/// # Safety
/// `vectors` is null or points to `count` iovecs, each of which is valid for its length.
unsafe fn vectors<'a>(vectors: *const iovec, count: usize) -> &'a [iovec] {
    // SAFETY: valid by this function's contract.
    if vectors.is_null() { &[] } else { unsafe { core::slice::from_raw_parts(vectors, count) } }
}

/// All bytes of several buffers.
///
/// # Safety
/// As for [`vectors`].
unsafe fn gather(from: *const iovec, count: usize) -> Vec<u8> {
    // SAFETY: by this function's contract.
    let parts = unsafe { vectors(from, count) };
    // SAFETY: each part is valid for its length by this function's contract.
    parts.iter().flat_map(|part| unsafe { bytes(part.iov_base, part.iov_len) }.iter().copied()).collect()
}

/// Spreads bytes over several buffers.
///
/// # Safety
/// As for [`vectors`], for writes.
unsafe fn scatter(mut source: &[u8], to: *const iovec, count: usize) {
    // SAFETY: by this function's contract.
    for part in unsafe { vectors(to, count) } {
        // SAFETY: each part is valid for writes of its length by this function's contract.
        let taken = unsafe { put(source, part.iov_base, part.iov_len) };
        source = &source[taken..];
    }
}

fn total(parts: &[iovec]) -> usize {
    parts.iter().map(|part| part.iov_len).sum()
}

impl Adapter {
    fn receive(&self, fd: i32, length: usize, flags: i32) -> Answer<Message> {
        let mut since = None;
        self.call(|world| {
            let since = *since.get_or_insert(world.now);
            world.receive(fd, length, flags, since)
        })
    }

    fn transmit(&self, fd: i32, bytes: &[u8], flags: i32) -> Answer<usize> {
        let (mut since, mut done) = (None, 0);
        self.call(|world| {
            let since = *since.get_or_insert(world.now);
            world.write(fd, bytes, flags, &mut done, since)
        })
    }

    fn transmit_to(&self, fd: i32, bytes: &[u8], flags: i32, address: &[u8]) -> Answer<usize> {
        if flags & libc::MSG_FASTOPEN == 0 {
            return self.transmit(fd, bytes, flags);
        }
        let (mut since, mut done) = (None, 0);
        let mut started = false;
        self.call(|world| {
            let since = *since.get_or_insert(world.now);
            world.write_fast(fd, bytes, flags, address, &mut started, &mut done, since)
        })
    }

    fn option(&self, fd: i32, level: i32, name: i32, length: usize) -> Answer<Vec<u8>> {
        self.now(|world| world.option(fd, level, name, length))
    }
}

/// Answers `getsockopt` for a descriptor of the adapter in use; None for others.
///
/// # Safety
/// As for `getsockopt`.
pub unsafe fn answer_getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> Option<c_int> {
    let adapter = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).upgrade()?;
    if !adapter.lock().world.descriptors.contains_key(&fd) {
        return None;
    }
    // What packetdrill asks for by itself is no event of the script.
    let answer = {
        // SAFETY: `length` points to a length, as getsockopt(2) demands of this function's caller (`# Safety`).
        let room = unsafe { *length } as usize;
        adapter.lock().world.option(fd, level, name, room)
    };
    // SAFETY: `length` points to a length, and `value` has room for so many bytes, as getsockopt(2) demands of this
    // function's caller (`# Safety`).
    Some(unsafe { give_option(answer, value, length) })
}

/// Does `sendfile` to a descriptor of the adapter in use; None for others.
///
/// # Safety
/// As for `sendfile`: `offset` is null or valid.
pub unsafe fn answer_sendfile(to: c_int, from: c_int, offset: *mut loff_t, count: size_t) -> Option<ssize_t> {
    let adapter = CURRENT.lock().unwrap_or_else(PoisonError::into_inner).upgrade()?;
    if !adapter.lock().world.descriptors.contains_key(&to) {
        return None;
    }
    let mut data = vec![0u8; count];
    // SAFETY: `data` has room for `count` bytes; `offset` is null, for the file's own position, or valid by this
    // function's contract.
    let got = unsafe {
        if offset.is_null() {
            libc::read(from, data.as_mut_ptr().cast(), count)
        } else {
            libc::pread(from, data.as_mut_ptr().cast(), count, *offset)
        }
    };
    if got < 0 {
        return Some(got);
    }
    let sent = result(adapter.transmit(to, &data[..got as usize], 0));
    if sent > 0 && !offset.is_null() {
        // SAFETY: not null, and then valid by this function's contract.
        unsafe { *offset += sent as loff_t };
    }
    Some(sent)
}

/// # Safety
/// As for `getsockopt`.
unsafe fn give_option(answer: Answer<Vec<u8>>, value: *mut c_void, length: *mut socklen_t) -> c_int {
    small(answer.map(|bytes| {
        // SAFETY: `value` has room for `*length` bytes by this function's contract.
        unsafe { *length = put(&bytes, value, *length as usize) as socklen_t };
    }))
}

// The functions of the table. Each has packetdrill's promises as its contract: `userdata` is what the table holds,
// pointers are as the system call of the same name takes them.

unsafe extern "C" fn free_adapter(userdata: *mut c_void) {
    // SAFETY: `userdata` came from `Arc::into_raw`, and packetdrill frees it once.
    drop(unsafe { Arc::from_raw(userdata.cast::<Adapter>()) });
}

unsafe extern "C" fn socket(userdata: *mut c_void, domain: c_int, kind: c_int, _protocol: c_int) -> c_int {
    // SAFETY: the table's contract.
    let adapter = unsafe { adapter(userdata) };
    result(adapter.now(|world| world.new_socket(domain, kind)).map(|fd| fd as usize)) as c_int
}

unsafe extern "C" fn bind(userdata: *mut c_void, fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the table's contract.
    let (adapter, address) = unsafe { (adapter(userdata), bytes(address.cast(), length as usize)) };
    small(addresses::read(address).and_then(|(_, endpoint)| adapter.now(|world| world.bind(fd, endpoint))))
}

unsafe extern "C" fn listen(userdata: *mut c_void, fd: c_int, backlog: c_int) -> c_int {
    // SAFETY: the table's contract.
    small(unsafe { adapter(userdata) }.now(|world| world.listen(fd, backlog)))
}

unsafe extern "C" fn accept(userdata: *mut c_void, fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int {
    // SAFETY: the table's contract.
    let answer = unsafe { adapter(userdata) }.call(|world| world.accept(fd));
    result(answer.map(|(fd, peer)| {
        // SAFETY: the table's contract.
        unsafe { put_address(&peer, address, length) };
        fd as usize
    })) as c_int
}

unsafe extern "C" fn connect(userdata: *mut c_void, fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: the table's contract.
    let (adapter, address) = unsafe { (adapter(userdata), bytes(address.cast(), length as usize)) };
    let mut started = false;
    small(addresses::read(address).and_then(|(family, endpoint)| {
        let remote = (family != libc::AF_UNSPEC).then_some(endpoint);
        adapter.call(|world| world.connect(fd, remote, &mut started))
    }))
}

unsafe extern "C" fn read(userdata: *mut c_void, fd: c_int, room: *mut c_void, length: size_t) -> ssize_t {
    // SAFETY: `userdata` is the table's, and `room` has room for `length` bytes, as read(2) demands: all that `recv`
    // asks for.
    unsafe { recv(userdata, fd, room, length, 0) }
}

unsafe extern "C" fn readv(userdata: *mut c_void, fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the table's contract.
    let length = total(unsafe { vectors(parts, count as usize) });
    // SAFETY: the table's contract.
    let answer = unsafe { adapter(userdata) }.receive(fd, length, 0);
    result(answer.map(|message| {
        // SAFETY: the table's contract.
        unsafe { scatter(&message.bytes, parts, count as usize) };
        message.length
    }))
}

unsafe extern "C" fn recv(userdata: *mut c_void, fd: c_int, room: *mut c_void, length: size_t, flags: c_int) -> ssize_t {
    if room.is_null() && length > 0 {
        return result(Err(libc::EFAULT));
    }
    // SAFETY: the table's contract.
    let answer = unsafe { adapter(userdata) }.receive(fd, length, flags);
    result(answer.map(|message| {
        // SAFETY: `room` has room for `length` bytes by the table's contract.
        unsafe { put(&message.bytes, room, length) };
        message.length
    }))
}

unsafe extern "C" fn recvfrom(
    userdata: *mut c_void,
    fd: c_int,
    room: *mut c_void,
    length: size_t,
    flags: c_int,
    _address: *mut sockaddr,
    address_length: *mut socklen_t,
) -> ssize_t {
    if !address_length.is_null() {
        // SAFETY: not null, and then valid by the table's contract. A stream gives no address.
        unsafe { *address_length = 0 };
    }
    // SAFETY: `userdata` is the table's, and `room` has room for `length` bytes, as recvfrom(2) demands: all that
    // `recv` asks for.
    unsafe { recv(userdata, fd, room, length, flags) }
}

unsafe extern "C" fn recvmsg(userdata: *mut c_void, fd: c_int, header: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the table's contract: a valid header, whose buffers are valid.
    let (adapter, header) = unsafe { (adapter(userdata), &mut *header) };
    // SAFETY: the header has `msg_iovlen` iovecs at `msg_iov`, each of which is valid for its length, as recvmsg(2)
    // demands.
    let length = total(unsafe { vectors(header.msg_iov, header.msg_iovlen) });
    result(adapter.receive(fd, length, flags).map(|message| {
        // SAFETY: the header has `msg_iovlen` iovecs at `msg_iov`, each of which may be written for its length, as
        // recvmsg(2) demands.
        unsafe { scatter(&message.bytes, header.msg_iov, header.msg_iovlen) };
        header.msg_namelen = 0;
        header.msg_flags = message.flags;
        // SAFETY: the header's control buffer has room for `msg_controllen` bytes, as recvmsg(2) demands.
        unsafe { put_control(header, &message) };
        message.length
    }))
}

/// Writes control messages.
///
/// # Safety
/// `header`'s control buffer is valid for its length.
unsafe fn put_control(header: &mut msghdr, message: &Message) {
    let mut out = Vec::new();
    for (level, kind, data) in &message.control {
        let start = out.len();
        out.extend((size_of::<libc::cmsghdr>() + data.len()).to_ne_bytes());
        out.extend(level.to_ne_bytes());
        out.extend(kind.to_ne_bytes());
        out.extend(data);
        let aligned = (out.len() - start).next_multiple_of(size_of::<usize>());
        out.resize(start + aligned, 0);
    }
    if out.len() > header.msg_controllen {
        header.msg_flags |= libc::MSG_CTRUNC;
    }
    // SAFETY: by this function's contract.
    header.msg_controllen = unsafe { put(&out, header.msg_control, header.msg_controllen) };
}

unsafe extern "C" fn write(userdata: *mut c_void, fd: c_int, data: *const c_void, length: size_t) -> ssize_t {
    // SAFETY: `userdata` is the table's, and `length` bytes at `data` can be read, as write(2) demands: all that `send`
    // asks for.
    unsafe { send(userdata, fd, data, length, 0) }
}

unsafe extern "C" fn writev(userdata: *mut c_void, fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the table's contract.
    let (adapter, data) = unsafe { (adapter(userdata), gather(parts, count as usize)) };
    result(adapter.transmit(fd, &data, 0))
}

unsafe extern "C" fn send(userdata: *mut c_void, fd: c_int, data: *const c_void, length: size_t, flags: c_int) -> ssize_t {
    if data.is_null() && length > 0 {
        return result(Err(libc::EFAULT));
    }
    // SAFETY: the table's contract.
    let (adapter, data) = unsafe { (adapter(userdata), bytes(data, length)) };
    result(adapter.transmit(fd, data, flags))
}

unsafe extern "C" fn sendto(
    userdata: *mut c_void,
    fd: c_int,
    data: *const c_void,
    length: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_length: socklen_t,
) -> ssize_t {
    if data.is_null() && length > 0 {
        return result(Err(libc::EFAULT));
    }
    // SAFETY: the table's contract.
    let (adapter, data, address) =
        unsafe { (adapter(userdata), bytes(data, length), bytes(address.cast(), address_length as usize)) };
    result(adapter.transmit_to(fd, data, flags, address))
}

unsafe extern "C" fn sendmsg(userdata: *mut c_void, fd: c_int, header: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the table's contract: a valid header, whose buffers are valid.
    let (adapter, header) = unsafe { (adapter(userdata), &*header) };
    // SAFETY: the header has `msg_iovlen` iovecs at `msg_iov`, each of which can be read for its length, as sendmsg(2)
    // demands.
    let data = unsafe { gather(header.msg_iov, header.msg_iovlen) };
    // SAFETY: `msg_name` is null, or points to the `msg_namelen` bytes of an address, as sendmsg(2) demands.
    let address = unsafe { bytes(header.msg_name, header.msg_namelen as usize) };
    result(adapter.transmit_to(fd, &data, flags, address))
}

unsafe extern "C" fn fcntl(userdata: *mut c_void, fd: c_int, command: c_int, argument: c_long) -> c_int {
    // SAFETY: the table's contract. The last argument is variadic in C: on x86-64 and AArch64 Linux an integer is
    // passed there as any other, and none at all leaves some value, of which F_GETFL makes no use.
    let adapter = unsafe { adapter(userdata) };
    result(adapter.now(|world| {
        let id = world.socket_of(fd)?;
        let socket = world.socket(id)?;
        match command {
            libc::F_SETFL => {
                socket.nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
                Ok(0)
            }
            libc::F_GETFL => Ok((libc::O_RDWR | if socket.nonblocking { libc::O_NONBLOCK } else { 0 }) as usize),
            _ => Err(libc::EINVAL),
        }
    })) as c_int
}

unsafe extern "C" fn ioctl(userdata: *mut c_void, fd: c_int, request: c_ulong, value: *mut c_int) -> c_int {
    // SAFETY: `userdata` is the table's, as its contract says. C passes the variadic last argument as any other one.
    let answer = unsafe { adapter(userdata) }.now(|world| world.ioctl(fd, request));
    small(answer.map(|number| {
        if !value.is_null() {
            // SAFETY: not null, and then where the number goes.
            unsafe { *value = number };
        }
    }))
}

unsafe extern "C" fn close(userdata: *mut c_void, fd: c_int) -> c_int {
    // SAFETY: the table's contract.
    small(unsafe { adapter(userdata) }.now(|world| world.close(fd)))
}

unsafe extern "C" fn shutdown(userdata: *mut c_void, fd: c_int, how: c_int) -> c_int {
    // SAFETY: the table's contract.
    small(unsafe { adapter(userdata) }.now(|world| world.shutdown(fd, how)))
}

unsafe extern "C" fn getsockopt(
    userdata: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: *mut socklen_t,
) -> c_int {
    // SAFETY: the table's contract.
    let answer = unsafe { adapter(userdata).option(fd, level, name, *length as usize) };
    // SAFETY: `length` points to a length, and `value` has room for so many bytes, as getsockopt(2) demands.
    unsafe { give_option(answer, value, length) }
}

unsafe extern "C" fn setsockopt(
    userdata: *mut c_void,
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    length: socklen_t,
) -> c_int {
    // SAFETY: the table's contract.
    let (adapter, value) = unsafe { (adapter(userdata), bytes(value, length as usize)) };
    small(adapter.now(|world| world.set_option(fd, level, name, value)))
}

unsafe extern "C" fn poll(userdata: *mut c_void, entries: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the table's contract.
    let (adapter, entries) = unsafe { (adapter(userdata), core::slice::from_raw_parts_mut(entries, count as usize)) };
    let wanted: Vec<(c_int, c_short)> = entries.iter().map(|entry| (entry.fd, entry.events)).collect();
    let mut found = vec![0; wanted.len()];
    let mut since = None;
    let answer = adapter.call(|world| {
        let since = *since.get_or_insert(world.now);
        world.poll(&wanted, &mut found, timeout, since)
    });
    entries.iter_mut().zip(found).for_each(|(entry, events)| entry.revents = events);
    result(answer) as c_int
}

unsafe extern "C" fn netdev_send(userdata: *mut c_void, packet: *const c_void, length: size_t) -> c_int {
    // SAFETY: the table's contract.
    let (adapter, packet) = unsafe { (adapter(userdata), bytes(packet, length)) };
    adapter.now(|world| world.input(packet));
    0
}

unsafe extern "C" fn netdev_receive(
    userdata: *mut c_void,
    room: *mut c_void,
    length: *mut size_t,
    time: *mut c_longlong,
) -> c_int {
    // SAFETY: the table's contract.
    let (at, packet) = unsafe { adapter(userdata) }.next_packet().unwrap_or_default();
    // SAFETY: the table's contract. A packet of no bytes, which packetdrill reports as an error, if none will ever
    // come.
    unsafe {
        *length = put(&packet, room, *length);
        *time = at as c_longlong;
    }
    0
}

unsafe extern "C" fn usleep(userdata: *mut c_void, micros: c_uint) -> c_int {
    // SAFETY: the table's contract.
    unsafe { adapter(userdata) }.sleep(u64::from(micros));
    0
}

unsafe extern "C" fn gettimeofday(userdata: *mut c_void, time: *mut timeval, _zone: *mut c_void) -> c_int {
    // SAFETY: the table's contract.
    let now = unsafe { adapter(userdata) }.time();
    // SAFETY: the table's contract.
    unsafe { *time = timeval { tv_sec: (now / 1_000_000) as i64, tv_usec: (now % 1_000_000) as i64 } };
    0
}

unsafe extern "C" fn epoll_create(userdata: *mut c_void, size: c_int) -> c_int {
    // SAFETY: the table's contract.
    result(unsafe { adapter(userdata) }.now(|world| world.epoll_create(size)).map(|fd| fd as usize)) as c_int
}

unsafe extern "C" fn epoll_ctl(
    userdata: *mut c_void,
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut libc::epoll_event,
) -> c_int {
    // SAFETY: null, or valid by the table's contract.
    let (events, data) = if event.is_null() { (0, 0) } else { unsafe { ((*event).events, (*event).u64) } };
    // SAFETY: the table's contract.
    small(unsafe { adapter(userdata) }.now(|world| world.epoll_ctl(set, operation, fd, events, data)))
}

unsafe extern "C" fn epoll_wait(
    userdata: *mut c_void,
    set: c_int,
    events: *mut libc::epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the table's contract.
    let adapter = unsafe { adapter(userdata) };
    let mut since = None;
    let answer = adapter.call(|world| {
        let since = *since.get_or_insert(world.now);
        world.epoll_wait(set, most.max(0) as usize, timeout, since)
    });
    result(answer.map(|found| {
        for (at, (mask, data)) in found.iter().enumerate() {
            // SAFETY: `events` has room for `most` entries by the table's contract, and no more were found.
            unsafe { events.add(at).write(libc::epoll_event { events: *mask, u64: *data }) };
        }
        found.len()
    })) as c_int
}

unsafe extern "C" fn pipe(_userdata: *mut c_void, _ends: *mut c_int) -> c_int {
    small::<()>(Err(libc::ENOSYS))
}

unsafe extern "C" fn splice(
    _userdata: *mut c_void,
    _from: c_int,
    _from_at: *mut loff_t,
    _to: c_int,
    _to_at: *mut loff_t,
    _length: size_t,
    _flags: c_uint,
) -> c_int {
    small::<()>(Err(libc::ENOSYS))
}
