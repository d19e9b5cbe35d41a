//! What the ring bypass costs a program: a send and a receive of 64 bytes on a connection that the NIC has, from the program's call to
//! its return, copying included.
//!
//! Instructions are counted by callgrind in the preloaded library: the same work is done with N and with 3N messages, and the
//! difference is divided by 2N. The program is an ordinary one that talks to itself over loopback; Baton runs beside the kernel.

use anyhow::{Context, Result, bail};
use serde::Serialize;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes of a message.
const SIZE: usize = 64;
/// Messages that wait when the receiver looks.
const BURST: u64 = 16;
/// Messages of the smaller run.
const MESSAGES: u64 = 1600;

/// What was measured.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bypass {
    /// Instructions of a send of 64 bytes.
    #[serde(rename = "bypass.instr_send")]
    pub send: f64,
    /// Instructions of a receive of 64 bytes.
    #[serde(rename = "bypass.instr_recv")]
    pub receive: f64,
}

/// Counts.
///
/// # Errors
/// If valgrind or `baton run` does not start.
pub fn run() -> Result<Bypass> {
    let per_message = |function: &str| -> Result<f64> {
        let (few, many) = (count(function, MESSAGES)?, count(function, 3 * MESSAGES)?);
        Ok((many as f64 - few as f64) / (2 * MESSAGES) as f64)
    };
    Ok(Bypass { send: per_message("send")?, receive: per_message("recv")? })
}

fn count(function: &str, messages: u64) -> Result<u64> {
    let directory = std::env::temp_dir().join(format!("baton-bypass-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let out = directory.join("out");
    let baton = std::env::current_exe()?;
    let status = Command::new(&baton)
        .args([
            "run",
            "--rule",
            "established",
            "--spin",
            "1000000",
            "--",
            "valgrind",
            "--tool=callgrind",
            "--collect-atstart=no",
            "-q",
        ])
        .arg(format!("--toggle-collect={function}"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(&baton)
        .args(["bench-bypass-workload", "--messages", &messages.to_string()])
        .env("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=1000000000")
        .stderr(Stdio::null())
        .status()
        .context("starting the workload")?;
    let text = std::fs::read_to_string(&out);
    let _ = std::fs::remove_dir_all(&directory);
    if !status.success() {
        bail!("the workload failed under `baton run` and valgrind (Debian's package valgrind)");
    }
    let totals = text?.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok());
    totals.context("callgrind's output has no totals")
}

/// The program that is measured.
///
/// # Errors
/// The system's, or if its connections do not get to the NIC.
pub fn workload(messages: u64) -> Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let (mut receiver, _) = listener.accept()?;
    sender.set_nodelay(true)?;
    let mut message = [7u8; SIZE];
    // Both ends move while they are used.
    for _ in 0..200 {
        sender.write_all(&message)?;
        receiver.read_exact(&mut message)?;
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..messages / BURST {
        for _ in 0..BURST {
            sender.write_all(&message)?;
        }
        // Asking whether they have come would be counted, or take over part of the work.
        std::thread::sleep(Duration::from_millis(2));
        for _ in 0..BURST {
            receiver.read_exact(&mut message)?;
        }
    }
    Ok(())
}
