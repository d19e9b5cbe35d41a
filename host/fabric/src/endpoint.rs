//! Endpoints, fi_endpoint(3): how they are made, bound and closed.

use crate::abi::{
    AtomicOps, CmOps, CollectiveOps, EpOps, Fid, FidCntr, FidCq, FidDomain, FidEp, FidOps, Info, OPT_ENDPOINT,
    OPT_MIN_MULTI_RECV, caps, class, control, errno, flags,
};
use crate::addresses::{self, LENGTH_V6};
use crate::completion_queue::Queue;
use crate::counter::Counter;
use crate::domain::Domain;
use crate::libfabric::{Level, log};
use crate::object::{attributes, failure, hand_out, missing, object};
use crate::operations::{Counters, Sink, State};
use crate::region::Reach;
use crate::vector::{Vector, write_address};
use crate::{message_calls, rma_calls, settings, tagged_calls};
use baton_linux::events::monotonic_micros;
use baton_messages::{Driver, Endpoint as Messages, Error, Halves, Token};
use std::ffi::{c_int, c_void};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// Longest wait in fi_close() for messages whose sends were already reported as complete, in microseconds.
const LINGER: u64 = 3_000_000;
/// Longest wait for peers to acknowledge the endpoint's end, in microseconds.
const FAREWELL: u64 = 200_000;
/// Longest wait for a NIC's answer whether a receive was cancelled, in microseconds. It normally answers at once; a NIC
/// that has died is replaced.
const ANSWER: u64 = 1_000_000;
/// Least remaining bytes of a multi-receive buffer, unless the program sets another value.
const MIN_MULTI_RECV: usize = 64;

/// An endpoint as queues and counters share it.
pub struct EndpointShared {
    driver: Driver<State>,
    pub address: SocketAddr,
    pub enabled: AtomicBool,
    /// Flags of calls that have none of their own (fi_tx_attr, fi_rx_attr: op_flags).
    pub transmit_flags: AtomicU64,
    pub receive_flags: AtomicU64,
    pub min_multi_recv: AtomicUsize,
    /// Messages of up to so many bytes are copied, and complete at once.
    pub eager: usize,
    pub caps: u64,
}

impl std::fmt::Debug for EndpointShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndpointShared").field("address", &self.address).finish_non_exhaustive()
    }
}

impl EndpointShared {
    /// Drives the endpoint.
    pub fn poll(&self) {
        self.driver.poll();
    }

    /// Notes that the program now waits, so that the endpoint's thread drives it.
    pub fn leave(&self) {
        self.driver.leave();
    }

    /// Calls the endpoint with its lock held, at a time in microseconds.
    pub fn call<R>(&self, work: impl FnOnce(&mut State, u64) -> R) -> R {
        self.driver.call(work)
    }

    /// Waits for messages whose sends were reported as complete, then ends the associations with all peers.
    fn finish(&self) {
        self.wait(LINGER, |state, _| !state.endpoint.is_sending());
        self.call(|state, now| state.endpoint.close_all(now));
        self.wait(FAREWELL, |state, _| !state.endpoint.has_peers());
        let report = self.call(|state, _| state.endpoint.report());
        log(Level::Info, &format!("endpoint at {} closed: {report}", self.address));
    }

    /// Drives the endpoint until something holds, for at most `limit` microseconds.
    fn wait(&self, limit: u64, holds: impl Fn(&mut State, u64) -> bool) {
        let until = monotonic_micros() + limit;
        while !self.call(|state, now| {
            state.endpoint.progress(now);
            holds(state, now)
        }) && monotonic_micros() < until
        {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// An endpoint.
#[repr(C)]
pub struct Endpoint {
    fid: FidEp,
    pub shared: Arc<EndpointShared>,
}

static FID_OPS: FidOps =
    FidOps { size: size_of::<FidOps>(), close, bind, control, ops_open: missing, tostr: missing, ops_set: missing };

static OPS: EpOps = EpOps {
    size: size_of::<EpOps>(),
    cancel,
    getopt,
    setopt,
    tx_ctx: missing,
    rx_ctx: missing,
    rx_size_left: missing,
    tx_size_left: missing,
};

static CM_OPS: CmOps = CmOps {
    size: size_of::<CmOps>(),
    setname: missing,
    getname,
    getpeer: missing,
    connect: missing,
    listen: missing,
    accept: missing,
    reject: missing,
    shutdown: missing,
    join: missing,
};

static ATOMIC_OPS: AtomicOps = AtomicOps { size: size_of::<AtomicOps>(), transfers: [missing; 10], valid: [missing; 3] };
static COLLECTIVE_OPS: CollectiveOps = CollectiveOps { size: size_of::<CollectiveOps>(), all: [missing; 11] };

/// fi_endpoint().
pub unsafe extern "C" fn open(domain: *mut FidDomain, info: *mut Info, out: *mut *mut FidEp, context: *mut c_void) -> c_int {
    // SAFETY: C's pointer to a domain that is not closed, and an info of fi_getinfo() or made like one.
    unsafe {
        let (Some(domain), Some(info)) = (object::<Domain, _>(domain), attributes(info)) else { return failure(errno::EINVAL) };
        if attributes(info.ep_attr).is_some_and(|ep| !matches!(ep.kind, 0 | crate::abi::EP_RDM)) {
            return failure(errno::EOPNOTSUPP);
        }
        let shared = match start(domain, info) {
            Ok(shared) => Arc::new(shared),
            Err(error) => {
                log(Level::Warn, &format!("an endpoint cannot be opened: {error}"));
                // An error without a number is from the NIC's agent, which is missing or refuses.
                return failure(error.raw_os_error().unwrap_or(errno::ENODEV));
            }
        };
        let fid = FidEp {
            fid: Fid { class: class::EP, context, ops: &FID_OPS },
            ops: &OPS,
            cm: &CM_OPS,
            msg: &message_calls::OPS,
            rma: &rma_calls::OPS,
            tagged: &tagged_calls::OPS,
            atomic: &ATOMIC_OPS,
            collective: &COLLECTIVE_OPS,
        };
        hand_out(Endpoint { fid, shared }, out)
    }
}

/// Binds the socket and starts the endpoint's thread.
///
/// # Safety
/// The pointers of `info` are null or valid.
unsafe fn start(domain: &Domain, info: &Info) -> io::Result<EndpointShared> {
    // SAFETY: this function's `# Safety`.
    let source = unsafe { addresses::read(info.src_addr, info.src_addrlen.min(LENGTH_V6)) };
    let mut address = source.unwrap_or(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
    let all = addresses::all();
    if address.ip().is_unspecified() {
        // Packets are checked against their destination address, so the endpoint needs one.
        let first = settings::address().or_else(|| all.first().map(|local| local.address));
        address.set_ip(first.ok_or_else(|| io::Error::from_raw_os_error(errno::EADDRNOTAVAIL))?);
    }
    let mtu = all.iter().find(|local| local.address == address.ip()).map_or(1500, |local| local.mtu);
    let settings = settings::settings(address, mtu);
    let mut random = [0; 32];
    baton_linux::process::random(&mut random)?;
    let regions = Box::new(Reach(domain.shared.clone()));
    let now = monotonic_micros();
    let mut messages = Messages::new(&settings, regions, random, now)?;
    if info.caps & caps::RMA != 0 {
        messages.enable_rma(now).map_err(|_| io::Error::from_raw_os_error(errno::ENOMEM))?;
    }
    let address = messages.address();
    let eager = messages.eager();
    let half = match (messages.is_on_nic(), messages.without_nic()) {
        (true, _) if settings.halves != Halves::BOTH => "on the NIC, its receiving half alone".to_owned(),
        (true, _) => "on the NIC".to_owned(),
        (false, Some(reason)) => format!("on this host, since {reason}"),
        (false, None) => "on this host (FI_RMPP_NIC=never)".to_owned(),
    };
    let carrier = messages.encapsulation();
    log(
        Level::Info,
        &format!("endpoint at {address}, packets of {} bytes, long messages by {carrier}, data half {half}", settings.packet),
    );
    let state = State {
        endpoint: messages,
        addresses: None,
        peers: Vec::new(),
        removals: 0,
        operations: Default::default(),
        next: 0,
        claims: Default::default(),
        transmit: Sink::default(),
        receive: Sink::default(),
        counters: Counters::default(),
        rma_events: info.caps & caps::RMA_EVENT != 0,
    };
    // SAFETY: this function's `# Safety`.
    let [transmit, receive] =
        unsafe { [attributes(info.tx_attr).map_or(0, |tx| tx.op_flags), attributes(info.rx_attr).map_or(0, |rx| rx.op_flags)] };
    Ok(EndpointShared {
        driver: Driver::start(state)?,
        address,
        enabled: AtomicBool::new(false),
        transmit_flags: AtomicU64::new(transmit),
        receive_flags: AtomicU64::new(receive),
        min_multi_recv: AtomicUsize::new(MIN_MULTI_RECV),
        eager,
        caps: info.caps,
    })
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: C's pointer to an endpoint that is not closed.
    if let Some(endpoint) = unsafe { object::<Endpoint, _>(fid) } {
        endpoint.shared.finish();
        leave_queues(&endpoint.shared);
    }
    // SAFETY: C's pointer to an endpoint that is not closed, and that C does not use after this call.
    unsafe { crate::object::close::<Endpoint>(fid) }
}

/// Removes the endpoint from queues and counters, and waits for threads that are just driving it: after the close no
/// bytes may be received into the program's buffers.
fn leave_queues(shared: &Arc<EndpointShared>) {
    let (queues, counters) =
        shared.call(|state, _| ([state.transmit.queue.clone(), state.receive.queue.clone()], state.counters.0.clone()));
    queues.iter().flatten().for_each(|queue| queue.drive_no_longer(shared));
    counters.iter().for_each(|(_, counter)| counter.drive_no_longer(shared));
    while Arc::strong_count(shared) > 1 {
        std::thread::yield_now();
    }
}

unsafe extern "C" fn bind(fid: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    // SAFETY: C's pointers to an endpoint and another object, neither of which is closed; the class says which type it
    // has.
    unsafe {
        let (Some(endpoint), Some(class)) = (object::<Endpoint, _>(fid), other.as_ref().map(|other| other.class)) else {
            return failure(errno::EINVAL);
        };
        match class {
            class::AV => object::<Vector, _>(other).map_or(failure(errno::EINVAL), |vector| {
                endpoint.shared.call(|state, _| state.addresses = Some(vector.addresses.clone()));
                0
            }),
            class::CQ => object::<Queue, _>(other.cast::<FidCq>())
                .map_or(failure(errno::EINVAL), |queue| bind_queue(endpoint, queue, flags)),
            class::CNTR => object::<Counter, _>(other.cast::<FidCntr>()).map_or(failure(errno::EINVAL), |counter| {
                endpoint.shared.call(|state, _| state.counters.0.push((flags, counter.shared.clone())));
                counter.shared.drive(&endpoint.shared);
                0
            }),
            // No events are reported to an event queue.
            class::EQ => 0,
            _ => failure(errno::EINVAL),
        }
    }
}

fn bind_queue(endpoint: &Endpoint, queue: &Queue, flags: u64) -> c_int {
    if flags & !(caps::SEND | caps::RECV | flags::SELECTIVE_COMPLETION) != 0 {
        return failure(errno::EBADFLAGS);
    }
    let selective = flags & flags::SELECTIVE_COMPLETION != 0;
    endpoint.shared.call(|state, _| {
        for (side, sink) in [(caps::SEND, &mut state.transmit), (caps::RECV, &mut state.receive)] {
            if flags & side != 0 {
                *sink = Sink { queue: Some(queue.shared.clone()), selective };
            }
        }
    });
    queue.shared.drive(&endpoint.shared);
    0
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: C's pointer to an endpoint that is not closed.
    let Some(endpoint) = (unsafe { object::<Endpoint, _>(fid) }) else { return failure(errno::EINVAL) };
    let shared = &endpoint.shared;
    match command {
        control::ENABLE => {
            let bound = shared.call(|state, _| {
                let queues = [&state.transmit, &state.receive];
                (state.addresses.is_some(), queues.iter().any(|sink| sink.queue.is_some()) || !state.counters.0.is_empty())
            });
            match bound {
                (false, _) => failure(errno::ENOAV),
                (_, false) => failure(errno::ENOCQ),
                _ => {
                    shared.enabled.store(true, Ordering::Release);
                    0
                }
            }
        }
        // SAFETY: both commands have a place for 64 bits of flags.
        control::GETOPSFLAG | control::SETOPSFLAG => match unsafe { arg.cast::<u64>().as_mut() } {
            Some(flags) => operation_flags(shared, command, flags),
            None => failure(errno::EINVAL),
        },
        _ => failure(errno::ENOSYS),
    }
}

/// FI_GETOPSFLAG and FI_SETOPSFLAG: `flags` names one side, and gets or gives the rest.
fn operation_flags(shared: &EndpointShared, command: c_int, flags: &mut u64) -> c_int {
    let side = match *flags & (caps::SEND | caps::RECV) {
        caps::SEND => &shared.transmit_flags,
        caps::RECV => &shared.receive_flags,
        _ => return failure(errno::EINVAL),
    };
    match command {
        control::GETOPSFLAG => *flags = side.load(Ordering::Relaxed),
        _ => side.store(*flags & !(caps::SEND | caps::RECV), Ordering::Relaxed),
    }
    0
}

/// Whether a receive was cancelled: if the NIC matches, it is asked, and a message may match the receive before.
fn is_taken_back(state: &mut State, token: Token) -> bool {
    let until = monotonic_micros() + ANSWER;
    loop {
        if let Some(outcome) = state.endpoint.outcome(token) {
            return matches!(outcome, Err(Error::Cancelled));
        }
        let now = monotonic_micros();
        if now > until {
            return false;
        }
        if !state.endpoint.progress(now) {
            std::thread::yield_now();
        }
    }
}

/// fi_cancel(): 0 if the operation's completion says that it was cancelled. MPI libraries then wait for that
/// completion, so for an operation that has matched, is in progress or has ended this returns an error.
unsafe extern "C" fn cancel(fid: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: C's pointer to an endpoint that is not closed.
    let Some(endpoint) = (unsafe { object::<Endpoint, _>(fid) }) else { return failure(errno::EINVAL) as isize };
    let cancelled = endpoint.shared.call(|state, now| {
        let named = |operation: &crate::operations::Operation| {
            operation.context == context && operation.flags & (caps::RECV | caps::SEND) != 0
        };
        let found =
            state.operations.iter().find(|(_, operation)| named(operation)).map(|(token, operation)| (*token, *operation));
        match found {
            Some((token, operation)) if operation.flags & caps::RECV != 0 => {
                state.endpoint.cancel(operation.number, token, now) && is_taken_back(state, token)
            }
            Some((token, _)) => state.endpoint.cancel_send(token, now),
            None => false,
        }
    });
    if cancelled { 0 } else { failure(errno::ENOENT) as isize }
}

unsafe extern "C" fn getopt(fid: *mut Fid, level: c_int, name: c_int, value: *mut c_void, length: *mut usize) -> c_int {
    // SAFETY: C's pointer to an endpoint that is not closed; `length` says how many bytes there are at `value`.
    unsafe {
        let (Some(endpoint), Some(length)) = (object::<Endpoint, _>(fid), length.as_mut()) else { return failure(errno::EINVAL) };
        if (level, name) != (OPT_ENDPOINT, OPT_MIN_MULTI_RECV) {
            return failure(errno::ENOPROTOOPT);
        }
        if *length < size_of::<usize>() || value.is_null() {
            return failure(errno::ETOOSMALL);
        }
        value.cast::<usize>().write_unaligned(endpoint.shared.min_multi_recv.load(Ordering::Relaxed));
        *length = size_of::<usize>();
    }
    0
}

unsafe extern "C" fn setopt(fid: *mut Fid, level: c_int, name: c_int, value: *const c_void, length: usize) -> c_int {
    // SAFETY: C's pointer to an endpoint that is not closed; there are `length` bytes at `value`.
    unsafe {
        let Some(endpoint) = object::<Endpoint, _>(fid) else { return failure(errno::EINVAL) };
        if (level, name) != (OPT_ENDPOINT, OPT_MIN_MULTI_RECV) {
            return failure(errno::ENOPROTOOPT);
        }
        if length < size_of::<usize>() || value.is_null() {
            return failure(errno::EINVAL);
        }
        endpoint.shared.min_multi_recv.store(value.cast::<usize>().read_unaligned(), Ordering::Relaxed);
    }
    0
}

unsafe extern "C" fn getname(fid: *mut Fid, out: *mut c_void, length: *mut usize) -> c_int {
    // SAFETY: C's pointer to an endpoint that is not closed; `write_address` demands what the caller gives.
    unsafe {
        match object::<Endpoint, _>(fid) {
            Some(endpoint) => write_address(endpoint.shared.address, out, length),
            None => failure(errno::EINVAL),
        }
    }
}
