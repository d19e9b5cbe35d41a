//! The sandbox of a NIC process: it may only move frames between the descriptors that it has, and map the memory that
//! it gets.
//!
//! The process parses what the network sends and what programs write, so a bug in it must not open a way into the host.
//! Before its first frame it becomes a user of its own without capabilities. Landlock denies it all files and new
//! connections; seccomp denies all system calls that it does not need.

use anyhow::{Context, Result};
use baton_linux::process;
use baton_linux::rights::{self, User};
use baton_log::warning;
use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, Scope};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

/// Gives up user, capabilities and files. To be called before threads are started.
///
/// # Errors
/// If the system refuses one of the steps.
pub(crate) fn drop_rights() -> Result<()> {
    process::drop_bounds().context("giving up capabilities")?;
    if let User::Same(user) = rights::give_up_user(true).context("giving up the user")?
        && rights::has_other_users()
    {
        warning!(
            [user = user] "it runs as user {user}, whose other processes can reach it: changing the user needs CAP_SETUID";
            "start Baton with that capability"
        );
    }
    process::drop_capabilities().context("giving up capabilities")?;
    rights::hide_memory().context("hiding memory")?;
    forbid_files().context("Landlock")
}

/// Denies opening files, connecting, and signalling processes, as far as this kernel's Landlock supports that.
fn forbid_files() -> Result<()> {
    let all = ABI::V6;
    let rules = Ruleset::default().handle_access(AccessFs::from_all(all))?.handle_access(AccessNet::from_all(all))?;
    rules.scope(Scope::from_all(all))?.create()?.restrict_self()?;
    Ok(())
}

/// System calls that are allowed with any arguments.
const ALLOWED: &[libc::c_long] = &[
    // Frames, doorbells, messages of the agent.
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
    libc::SYS_ppoll,
    // Mapping the memory of sessions.
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
    // Exit, also after a worker's panic.
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// A rule that allows a call if one of its arguments passes a comparison.
fn only_if(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<Vec<SeccompRule>> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?;
    Ok(vec![SeccompRule::new(vec![condition])?])
}

/// Makes all other system calls fail with EPERM, in all threads. No thread can be started after this.
///
/// # Errors
/// If the kernel cannot filter system calls.
pub(crate) fn restrict_system_calls() -> Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    // Memory may be mapped, but not as code.
    let not_executable = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    rules.insert(libc::SYS_mmap, only_if(2, not_executable.clone(), 0)?);
    rules.insert(libc::SYS_mprotect, only_if(2, not_executable, 0)?);
    // Setting a thread's name.
    rules.insert(libc::SYS_prctl, only_if(0, SeccompCmpOp::Eq, libc::PR_SET_NAME as u64)?);
    // The abort after a panic signals its own thread.
    rules.insert(libc::SYS_tgkill, only_if(0, SeccompCmpOp::Eq, u64::from(std::process::id()))?);
    let architecture: TargetArch = std::env::consts::ARCH.try_into().context("no filter for this processor")?;
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let program: BpfProgram = SeccompFilter::new(rules, refuse, SeccompAction::Allow, architecture)?.try_into()?;
    seccompiler::apply_filter_all_threads(&program).context("seccomp")
}
