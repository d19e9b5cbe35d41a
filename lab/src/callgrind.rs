//! Instructions of this program, counted by callgrind.

use anyhow::{Context, Result, ensure};
use baton_bed::temporary::{Directory, Kind};
use std::process::{Command, Stdio};

/// Callgrind's profile of this program, run with `arguments`, of the functions that `measured` names. `valgrind` is the
/// command that starts valgrind, with further options for it.
///
/// # Errors
/// If valgrind is missing, or the program fails.
pub(crate) fn profile(mut valgrind: Command, measured: &str, arguments: &[String]) -> Result<String> {
    let directory = Directory::new(Kind::Profile)?;
    let out = directory.path().join("out");
    let status = valgrind
        .args(["--tool=callgrind", "--collect-atstart=no", "-q"])
        .arg(format!("--toggle-collect={measured}"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(std::env::current_exe()?)
        .args(arguments)
        // Valgrind counts every byte of `rep movsb` as an instruction.
        .env("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1000000000")
        .stderr(Stdio::null())
        .status()
        .context("starting valgrind (Debian's package valgrind)")?;
    ensure!(status.success(), "the workload failed under valgrind (Debian's package valgrind)");
    std::fs::read_to_string(&out).context("callgrind's output")
}
