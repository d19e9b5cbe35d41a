//! A host whose root has no rights outside of it: user, PID, mount and network namespaces of its own, as a container
//! has.

use anyhow::{Context, Result, bail};
use baton_linux::namespace::Namespace;
use baton_linux::process;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The host's root outside of it, and the number of users that it has.
pub const ROOT: u32 = 100_000;
const USERS: u32 = 65_536;

/// Such a host. Dropping it kills all its processes.
#[derive(Debug)]
pub struct Container {
    /// Kills the host's first process when it is killed.
    unshare: Child,
    /// The host's first process, which does nothing.
    init: u32,
}

impl Container {
    /// Makes one.
    ///
    /// # Errors
    /// If this process may not: it needs root.
    pub fn new() -> Result<Container> {
        let mut command = Command::new("unshare");
        command.args(["--user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]);
        command.arg("echo; exec sleep infinity").stdin(Stdio::null()).stdout(Stdio::piped());
        // It would outlive this process otherwise, with all namespaces.
        process::inherit(&mut command, &[], true);
        let mut unshare = command.spawn().context("starting unshare (Debian's package util-linux)")?;
        let output = unshare.stdout.take().context("its output")?;
        let ready = BufReader::new(output).lines().next();
        let mut container = Container { unshare, init: 0 };
        let [init] = process::children(container.unshare.id())[..] else { bail!("unshare has made no namespaces") };
        if ready.is_none() {
            bail!("unshare has made no namespaces");
        }
        container.init = init;
        for map in ["uid_map", "gid_map"] {
            std::fs::write(format!("/proc/{init}/{map}"), format!("0 {ROOT} {USERS}"))
                .context("users of a container need root")?;
        }
        Ok(container)
    }

    /// Its network namespace, which root outside can enter.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn network(&self) -> std::io::Result<Namespace> {
        Namespace::of_process(self.init)
    }

    /// A command that is run by the host's root.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.init.to_string(), "-U", "-n", "-p", "-m", "--"]).arg(program);
        command
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}
