//! The library's own registrations in the kernel's epoll sets, and the filter that keeps their events from the program.

use libc::{c_int, epoll_event};

/// Data of this library's own registrations: addresses of statics in this library, which a program has no reason to use
/// as its data.
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
fn keep(out: &mut [epoll_event], got: c_int, data_of: impl Fn(u64) -> Option<u64>) -> c_int {
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

/// How many times the set is asked again after an epoll_wait's time limit, while the kernel reports events of the
/// library's only.
const LAST_ROUNDS: u32 = 50;

/// Completes an epoll_wait that has `got` events in `out`. Keeps those for which `data_of` has the program's data, and
/// asks the kernel again until there is one, or the time limit is over.
pub(super) fn only_programs(
    out: &mut [epoll_event],
    mut got: c_int,
    data_of: impl Fn(u64) -> Option<u64>,
    is_over: impl Fn() -> bool,
    mut ask: impl FnMut(&mut [epoll_event]) -> c_int,
) -> c_int {
    let mut rounds = 0;
    loop {
        let kept = keep(out, got, &data_of);
        if got < 0 || kept > 0 {
            return if got < 0 { got } else { kept };
        }
        // Two reasons to ask again: the kernel may have been asked without waiting, since the library had something to
        // check; and dropped events may have taken the room of the program's, which the kernel reports before it
        // repeats the dropped ones.
        if is_over() {
            if got == 0 || rounds > 0 && (got as usize) < out.len() || rounds == LAST_ROUNDS {
                return 0;
            }
            rounds += 1;
        }
        got = ask(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The time is over, and there is room for one event: the library's own come first, and hide none of the program's.
    #[test]
    fn the_librarys_events_hide_none_of_the_programs() {
        let wait = |reported: &[u64]| {
            let (mut reported, mut out) = (reported.iter(), [epoll_event { events: 1, u64: 0 }]);
            let mut ask = |out: &mut [epoll_event]| -> c_int {
                let Some(data) = reported.next() else { return 0 };
                out[0].u64 = *data;
                1
            };
            let got = ask(&mut out);
            let kept = only_programs(&mut out, got, |data| (!is_own(data)).then_some(data), || true, ask);
            (kept, out[0].u64)
        };
        assert_eq!(wait(&[7]), (1, 7));
        assert_eq!(wait(&[wake_data(), bell_data(), 7]), (1, 7));
        assert_eq!(wait(&[wake_data(), end_data()]).0, 0, "the program's are not ready");
        assert_eq!(wait(&[end_data(); 1000]).0, 0, "it ends, whatever is reported");
    }
}
