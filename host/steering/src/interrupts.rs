//! What the halves of interrupts and the processes take of one processor, counted where it happens: programs at
//! tracepoints add up how often each ran, how long in all, and how long at most.

use crate::assembler::{Assembler, Helper, R, Size};
use crate::bpf::{self, MapKind};
use crate::btf;
use baton_shm::Region;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

/// What is counted of an interrupt: its first half, whatever the device, then soft interrupts in the kernel's order.
const HALVES: [&str; 11] =
    ["first half", "HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"];
/// Soft interrupts.
const VECTORS: i32 = HALVES.len() as i32 - 1;

/// A row of the counts: when what runs now began, then count, sum and the longest, in nanoseconds; eight bytes each.
const ROW: usize = 32;
const COUNT: i16 = 8;
const SUM: i16 = 16;
const LONGEST: i16 = 24;
/// The row of NAPI's polls, whose sum is of frames; then when the process that runs now began.
const POLLS: usize = ROW * HALVES.len();
const SWITCHED: usize = POLLS + ROW;
const COUNTS: usize = SWITCHED + 8;

/// A process: such a row, then its name.
const PROCESS: usize = ROW + NAME;
const NAME: usize = 16;
/// Processes that are told apart.
const PROCESSES: u32 = 4096;

/// How often something ran, for how many nanoseconds in all, and at most.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RunTimes {
    /// Times.
    pub count: u64,
    /// Nanoseconds in all; of NAPI's polls: frames.
    pub sum: u64,
    /// Nanoseconds of the longest; of NAPI's polls: frames of the largest.
    pub longest: u64,
}

/// What the processor did in some time.
#[derive(Clone, Debug, Default)]
pub struct ProcessorTimes {
    /// By half: the first half of all devices' interrupts, then each soft interrupt. What interrupts another counts in
    /// both.
    pub halves: Vec<(&'static str, RunTimes)>,
    /// NAPI's polls of devices, in soft interrupts and in threads.
    pub polls: RunTimes,
    /// By process: its number (0: the idle loop), its name, and its turns. One counts when it leaves the processor,
    /// with the interrupts that came meanwhile.
    pub processes: Vec<(u32, String, RunTimes)>,
}

/// The programs and maps. Dropping this removes them.
#[derive(Debug)]
pub struct InterruptTrace {
    counts: Region,
    processes: OwnedFd,
    _links: Vec<OwnedFd>,
}

impl InterruptTrace {
    /// Counts on a processor from now on.
    ///
    /// # Errors
    /// The failed system call's. If this process may not load BPF programs, or this kernel lacks a tracepoint, the
    /// message says so.
    pub fn new(processor: usize) -> io::Result<InterruptTrace> {
        let processor = i32::try_from(processor).map_err(|_| io::ErrorKind::InvalidInput)?;
        let map = bpf::create_mappable_array(COUNTS as u32, 1)?;
        let processes = bpf::create_map_of(MapKind::Hash, 4, PROCESS as u32, PROCESSES)?;
        let counts = Region::map_fixed(map.try_clone()?, COUNTS)?;
        let map = map.as_fd();
        let links = [
            ("irq_handler_entry", begun(processor, map, false)),
            ("irq_handler_exit", ended(processor, map, false)),
            ("softirq_entry", begun(processor, map, true)),
            ("softirq_exit", ended(processor, map, true)),
            ("napi_poll", polled(processor, map)),
            ("sched_switch", switched(processor, map, processes.as_fd())),
        ]
        .map(|(name, program)| bpf::attach_to_tracepoint(btf::tracepoint(name)?, &program));
        let links = links.into_iter().collect::<io::Result<Vec<_>>>()?;
        Ok(InterruptTrace { counts, processes, _links: links })
    }

    /// What has come since the last call.
    pub fn take(&self) -> ProcessorTimes {
        let row = |at: usize| {
            let words = self.counts.words(at, ROW / 8);
            let [count, sum, longest] = [COUNT, SUM, LONGEST].map(|of| words[of as usize / 8].swap(0, Ordering::Relaxed));
            RunTimes { count, sum, longest }
        };
        let mut keys = Vec::new();
        bpf::for_each_key(self.processes.as_fd(), (4, PROCESS), |key| keys.extend(<[u8; 4]>::try_from(key)));
        let process = |key: [u8; 4]| {
            let mut found = [0; PROCESS];
            bpf::take(self.processes.as_fd(), &key, &mut found).then(|| {
                let word = |at: i16| u64::from_ne_bytes(std::array::from_fn(|byte| found[at as usize + byte]));
                let name = found[ROW..].split(|byte| *byte == 0).next().unwrap_or_default();
                let times = RunTimes { count: word(COUNT), sum: word(SUM), longest: word(LONGEST) };
                (u32::from_ne_bytes(key), String::from_utf8_lossy(name).into_owned(), times)
            })
        };
        ProcessorTimes {
            halves: HALVES.iter().enumerate().map(|(at, name)| (*name, row(at * ROW))).collect(),
            polls: row(POLLS),
            processes: keys.into_iter().filter_map(process).collect(),
        }
    }
}

/// A program that keeps its context in R6 and ends at once on any other processor.
fn on(processor: i32) -> Assembler {
    let mut a = Assembler::default();
    a.mov(R::R6, R::R1).call(Helper::CurrentProcessor).jump_unless(R::R0, processor, "done");
    a
}

fn done(mut a: Assembler) -> Vec<u8> {
    a.label("done").set(R::R0, 0).exit();
    a.finish()
}

/// R8: the row of the first half; or of a soft interrupt, whose number is the tracepoint's argument.
fn find_row(a: &mut Assembler, counts: BorrowedFd<'_>, soft: bool) {
    if soft {
        a.load(Size::Double, R::R7, R::R6, 0).jump_if_above(R::R7, VECTORS - 1, "done").shift_left(R::R7, 5);
        a.map_value(R::R8, counts, ROW as i32).add_register(R::R8, R::R7);
    } else {
        a.map_value(R::R8, counts, 0);
    }
}

/// Adds R0 to the row at R8, and goes on, or to the end if it is not the longest.
fn add_up(a: &mut Assembler) {
    a.set(R::R1, 1).atomic_add(R::R8, COUNT, R::R1).atomic_add(R::R8, SUM, R::R0);
    a.load(Size::Double, R::R1, R::R8, LONGEST).jump_unless_below_register(R::R1, R::R0, "done");
    a.store(Size::Double, R::R8, LONGEST, R::R0);
}

fn begun(processor: i32, counts: BorrowedFd<'_>, soft: bool) -> Vec<u8> {
    let mut a = on(processor);
    find_row(&mut a, counts, soft);
    a.call(Helper::MonotonicNanoseconds).store(Size::Double, R::R8, 0, R::R0);
    done(a)
}

fn ended(processor: i32, counts: BorrowedFd<'_>, soft: bool) -> Vec<u8> {
    let mut a = on(processor);
    find_row(&mut a, counts, soft);
    // Of what began before the trace did, only the end is seen.
    a.load(Size::Double, R::R7, R::R8, 0).jump_if(R::R7, 0, "done");
    a.set(R::R1, 0).store(Size::Double, R::R8, 0, R::R1);
    a.call(Helper::MonotonicNanoseconds).subtract_register(R::R0, R::R7);
    add_up(&mut a);
    done(a)
}

/// After a poll of NAPI's, whose arguments are (device, frames, most frames).
fn polled(processor: i32, counts: BorrowedFd<'_>) -> Vec<u8> {
    let mut a = on(processor);
    a.load(Size::Double, R::R0, R::R6, 8).shift_left(R::R0, 32).shift_right(R::R0, 32);
    a.map_value(R::R8, counts, POLLS as i32);
    add_up(&mut a);
    done(a)
}

/// Stack offsets: a process's number, and its entry.
const NUMBER: i16 = -4;
const ENTRY: i16 = -8 - PROCESS as i16;

/// Before a process leaves the processor, which is still the current one.
fn switched(processor: i32, counts: BorrowedFd<'_>, processes: BorrowedFd<'_>) -> Vec<u8> {
    let mut a = on(processor);
    a.map_value(R::R8, counts, SWITCHED as i32).call(Helper::MonotonicNanoseconds).mov(R::R7, R::R0);
    a.load(Size::Double, R::R1, R::R8, 0).store(Size::Double, R::R8, 0, R::R7).jump_if(R::R1, 0, "done");
    a.subtract_register(R::R7, R::R1);
    a.call(Helper::CurrentProcess).shift_right(R::R0, 32).store(Size::Word, R::R10, NUMBER, R::R0);
    let key = |a: &mut Assembler| {
        a.map(R::R1, processes).mov(R::R2, R::R10).add(R::R2, i32::from(NUMBER));
    };
    key(&mut a);
    a.call(Helper::MapLookup).jump_if(R::R0, 0, "new").mov(R::R8, R::R0).mov(R::R0, R::R7);
    add_up(&mut a);
    a.jump("done").label("new");
    a.set(R::R1, 0).store(Size::Double, R::R10, ENTRY, R::R1).set(R::R1, 1).store(Size::Double, R::R10, ENTRY + COUNT, R::R1);
    a.store(Size::Double, R::R10, ENTRY + SUM, R::R7).store(Size::Double, R::R10, ENTRY + LONGEST, R::R7);
    a.mov(R::R1, R::R10).add(R::R1, i32::from(ENTRY) + ROW as i32).set(R::R2, NAME as i32).call(Helper::CurrentName);
    key(&mut a);
    a.mov(R::R3, R::R10).add(R::R3, i32::from(ENTRY)).set(R::R4, 0).call(Helper::MapUpdate);
    done(a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;

    /// Needs the right to load BPF programs. Datagrams over loopback are soft interrupts of the processor that sends
    /// them, and who waits for a thread on the same one leaves it.
    #[test]
    fn a_processors_interrupts_and_processes_are_counted() {
        if let Err(error) = crate::supported() {
            eprintln!("skipped: {error}");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return;
        }
        let worker = || {
            // SAFETY: the call takes no arguments.
            let processor = unsafe { libc::sched_getcpu() } as usize;
            // SAFETY: a set of processors is a field of bits, for which zero is a value.
            let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set lives through both calls; 0 is the calling thread.
            let bound = unsafe {
                libc::CPU_SET(processor, &mut set);
                libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
            };
            assert_eq!(bound, 0);
            let trace = InterruptTrace::new(processor).unwrap();
            let [from, to] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
            for _ in 0..50 {
                from.send_to(&[1], to.local_addr().unwrap()).unwrap();
                // It inherits the processor.
                std::thread::spawn(|| ()).join().unwrap();
            }
            trace.take()
        };
        let traced = std::thread::spawn(worker).join().unwrap();
        let (_, received) = traced.halves.iter().find(|(name, _)| *name == "NET_RX").unwrap();
        assert!(received.count > 0 && received.longest <= received.sum, "{traced:?}");
        assert!(traced.polls.count > 0 && traced.polls.sum >= 25, "{traced:?}");
        let (_, name, own) = traced.processes.iter().find(|one| one.0 == std::process::id()).unwrap();
        assert!(!name.is_empty() && own.count >= 50 && own.longest <= own.sum, "{traced:?}");
    }

    #[test]
    fn rows_do_not_overlap() {
        assert_eq!((POLLS, SWITCHED, COUNTS), (352, 384, 392));
        assert!(i32::from(ENTRY) % 8 == 0 && usize::try_from(-i32::from(ENTRY)).unwrap() >= PROCESS + 4);
    }
}
