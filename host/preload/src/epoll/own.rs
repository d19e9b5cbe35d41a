//! The library's own registrations in the kernel's epoll sets, and which of the kernel's events a program gets.

use libc::{c_int, epoll_event};

/// Data of this library's own registrations: addresses of its own statics, which no program has a reason to use.
static BELL: u8 = 0;
static WAKE: u8 = 1;
static END: u8 = 2;

pub(super) fn bell_data() -> u64 {
    std::ptr::from_ref(&BELL) as u64
}

pub(super) fn wake_data() -> u64 {
    std::ptr::from_ref(&WAKE) as u64
}

/// Whether an event's data belongs to one of this library's own registrations.
pub(super) fn is_own(data: u64) -> bool {
    data == bell_data() || data == wake_data() || data == end_data()
}

/// Data for the session's control connection, which hangs up when the session ends.
pub(super) fn end_data() -> u64 {
    std::ptr::from_ref(&END) as u64
}

/// Keeps the first `got` events whose data `data_of` knows, with the program's data. Returns their number.
pub(super) fn keep(out: &mut [epoll_event], got: c_int, data_of: impl Fn(u64) -> Option<u64>) -> c_int {
    let mut kept = 0;
    for at in 0..got.max(0) as usize {
        let event = out[at];
        if let Some(data) = data_of(event.u64) {
            out[kept] = epoll_event { events: event.events, u64: data };
            kept += 1;
        }
    }
    kept as c_int
}
