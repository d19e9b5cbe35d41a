//! What the threads of other processes are doing, from /proc.

use std::fmt::Write;

/// What a process or a thread is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    /// It runs, or could.
    Runs,
    /// It waits in a system call, or sleeps.
    Waits,
    /// It is stopped by a signal.
    Stopped,
    /// It is stopped by a tracer.
    Traced,
    /// It has ended, or the system does not report it.
    Unknown,
}

fn read(process: u32, thread: u32, file: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{process}/task/{thread}/{file}")).ok()
}

/// What a thread of a process is doing. The first thread's number is the process's.
pub fn activity(process: u32, thread: u32) -> Activity {
    let status = read(process, thread, "status").unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:")).map(str::trim);
    match state.and_then(|state| state.chars().next()) {
        Some('R') => Activity::Runs,
        Some('S' | 'D' | 'I') => Activity::Waits,
        Some('T') => Activity::Stopped,
        Some('t') => Activity::Traced,
        _ => Activity::Unknown,
    }
}

/// Microseconds of processor time that a thread of a process has used.
pub fn used_micros(process: u32, thread: u32) -> Option<u64> {
    let text = read(process, thread, "schedstat")?;
    Some(text.split_whitespace().next()?.parse::<u64>().ok()? / 1000)
}

/// Whether another process traces this one.
pub fn is_traced(process: u32) -> bool {
    let status = read(process, process, "status").unwrap_or_default();
    status.lines().any(|line| line.strip_prefix("TracerPid:").is_some_and(|tracer| tracer.trim() != "0"))
}

/// Whether a process is in the same process namespace as this one, so that the same numbers stand for the same
/// processes.
pub fn shares_numbers(process: u32) -> bool {
    let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/pid")).ok();
    namespace("self").is_some_and(|ours| namespace(&process.to_string()) == Some(ours))
}

/// Most threads that an account is about, and most bytes of one kernel stack in it.
const THREADS: usize = 24;
const STACK: usize = 2048;

/// What the threads of a process are doing, for a line of the log: state, system call and, where the system shows it,
/// the kernel's stack, innermost function first.
pub fn account(process: u32) -> String {
    let mut account = String::new();
    let entries = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    for thread in entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok()).take(THREADS) {
        let text = |file| read(process, thread, file).unwrap_or_default();
        let (name, call, waits) = (text("comm"), text("syscall"), text("wchan"));
        let used = used_micros(process, thread).unwrap_or(0);
        let _ = write!(
            account,
            "{}thread {thread} ({}): {:?}, {used} us used",
            if account.is_empty() { "" } else { "; " },
            name.trim().escape_debug(),
            activity(process, thread)
        );
        let _ = write!(account, ", system call {}, waits in {}", call.trim(), waits.trim());
        let stack = text("stack");
        let end = stack.char_indices().map(|(at, _)| at).take_while(|at| *at <= STACK).last().unwrap_or(0);
        for frame in stack[..end].lines() {
            let _ = write!(account, " < {}", frame.trim());
        }
    }
    account
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_thread_runs_and_a_sleeping_process_waits() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        let number = child.id();
        while activity(number, number) != Activity::Waits {
            std::thread::yield_now();
        }
        assert!(!is_traced(number) && shares_numbers(number) && used_micros(number, number).is_some());
        crate::process::signal(number, 19).expect("SIGSTOP");
        while activity(number, number) != Activity::Stopped {
            std::thread::yield_now();
        }
        let of_sleep = account(number);
        assert!(of_sleep.starts_with("thread ") && of_sleep.contains("(sleep): Stopped"), "{of_sleep}");
        assert!(!of_sleep.contains('\n'), "it is one line: {of_sleep}");
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert_eq!(activity(number, number), Activity::Unknown);
        assert_eq!(activity(std::process::id(), crate::process::thread()), Activity::Runs);
    }
}
