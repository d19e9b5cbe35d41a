//! What a NIC process may do: nothing but to move frames between the descriptors that it has, and to map the memory that it is given.
//!
//! It parses what the network sends and what programs write, so a mistake in it must not become a way into the host. Before its first frame it
//! is a user of its own, without capabilities; Landlock keeps it from every file, and from connections of its own; seccomp from every system
//! call that it does not need.

use anyhow::{Context, Result};
use baton_linux::process;
use baton_linux::rights::{self, User};
use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, Scope};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

/// Gives up what can be given up before there are threads.
///
/// # Errors
/// If the system refuses what it never refuses.
pub(crate) fn give_up_rights() -> Result<()> {
    process::drop_bounds().context("giving up capabilities")?;
    if let User::Same(user) = rights::give_up_user(true).context("giving up the user")?
        && rights::has_other_users()
    {
        eprintln!("baton nic: it stays user {user}, since it may not become another (CAP_SETUID)");
    }
    process::drop_capabilities().context("giving up capabilities")?;
    rights::hide_memory().context("hiding memory")?;
    forbid_files().context("Landlock")
}

/// No file can be opened, no connection made and no process signalled from here on, as far as this kernel knows Landlock.
fn forbid_files() -> Result<()> {
    let all = ABI::V6;
    let rules = Ruleset::default().handle_access(AccessFs::from_all(all))?.handle_access(AccessNet::from_all(all))?;
    rules.scope(Scope::from_all(all))?.create()?.restrict_self()?;
    Ok(())
}

/// System calls that are allowed whatever their arguments.
const ALLOWED: &[libc::c_long] = &[
    // Frames, doorbells, the agent's messages.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    // The memory of sessions.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fcntl,
    libc::SYS_close,
    libc::SYS_munmap,
    libc::SYS_mbind,
    // The allocator and the threads.
    libc::SYS_brk,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_futex,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigreturn,
    libc::SYS_restart_syscall,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_setaffinity,
    libc::SYS_set_mempolicy,
    libc::SYS_getcpu,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    // The end, also that of a worker that panics.
    libc::SYS_exit,
    libc::SYS_exit_group,
];

fn only_if(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<Vec<SeccompRule>> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// From here on any other system call fails with EPERM, in every thread that there is; and none can be started.
///
/// # Errors
/// If the kernel does not filter system calls.
pub(crate) fn allow_only_what_is_needed() -> Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    // Memory, but no code.
    let data = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    rules.insert(libc::SYS_mmap, only_if(2, data.clone(), 0)?);
    rules.insert(libc::SYS_mprotect, only_if(2, data, 0)?);
    // A thread's name.
    rules.insert(libc::SYS_prctl, only_if(0, SeccompCmpOp::Eq, libc::PR_SET_NAME as u64)?);
    // A panic's abort signals its own thread.
    rules.insert(libc::SYS_tgkill, only_if(0, SeccompCmpOp::Eq, u64::from(std::process::id()))?);
    let architecture: TargetArch = std::env::consts::ARCH.try_into().context("no filter for this processor")?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let program: BpfProgram = SeccompFilter::new(rules, refuse, SeccompAction::Allow, architecture)?.try_into()?;
    seccompiler::apply_filter_all_threads(&program).context("seccomp")
}
