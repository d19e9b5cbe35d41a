//! Cost of the ring bypass to a program: a send and a receive of 64 bytes on a connection that is on the NIC, from the
//! program's call to its return. The copy of the 64 bytes, which the C library makes, is not counted.
//!
//! Instructions are counted by callgrind in the preloaded library. The same work is done with N and with 3N messages,
//! and the difference is divided by 2N. The program has no influence on when messages arrive, so the median of three
//! such figures counts. It is an ordinary program that uses loopback; Baton runs beside the kernel.

use crate::callgrind;
use anyhow::{Context, Result};
use serde::Serialize;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

/// Bytes of a message.
const SIZE: usize = 64;
/// Messages that wait when the receiver looks.
const BURST: u64 = 16;
/// Messages of the smaller run.
const MESSAGES: u64 = 1600;

/// The figures.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Bypass {
    /// Instructions of a send of 64 bytes.
    #[serde(rename = "bypass.instr_send")]
    pub send: f64,
    /// Instructions of a receive of 64 bytes.
    #[serde(rename = "bypass.instr_recv")]
    pub receive: f64,
}

/// Measures them.
///
/// # Errors
/// If valgrind or `baton run` does not start.
pub fn run() -> Result<Bypass> {
    let per_message = |function: &str| -> Result<f64> {
        let mut figures = [0.0; 3];
        for figure in &mut figures {
            let (few, many) = (count(function, MESSAGES)?, count(function, 3 * MESSAGES)?);
            *figure = (many as f64 - few as f64) / (2 * MESSAGES) as f64;
        }
        figures.sort_by(f64::total_cmp);
        Ok(figures[1])
    };
    Ok(Bypass { send: per_message("send")?, receive: per_message("recv")? })
}

fn count(function: &str, messages: u64) -> Result<u64> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let port = listener.local_addr()?.port().to_string();
    let peer = std::thread::spawn(move || answer(&listener));
    let mut valgrind = Command::new(std::env::current_exe()?);
    valgrind.args(["run", "--rule", "established", "--spin", "1000000", "--", "valgrind"]);
    let arguments = ["bench-bypass-workload", "--messages", &messages.to_string(), "--port", &port].map(str::to_owned);
    // A workload that never connected leaves the peer waiting until this process ends.
    let profile = callgrind::profile(valgrind, function, &arguments).context("`baton run`")?;
    peer.join().map_err(|_| anyhow::anyhow!("the peer panicked"))??;
    without_copies(&profile).context("callgrind's output cannot be parsed")
}

/// The total of a callgrind profile, without the C library's copying functions themselves.
fn without_copies(profile: &str) -> Option<u64> {
    let total: u64 = profile.lines().find_map(|line| line.strip_prefix("totals: ")?.trim().parse().ok())?;
    // A function's name is given once, with its number; its cost lines follow. Those of calls follow a `calls=` line.
    let (mut copying, mut copies, mut called, mut spent) = (false, std::collections::BTreeSet::new(), false, 0);
    for line in profile.lines() {
        if let Some((number, name)) =
            line.strip_prefix("fn=").or(line.strip_prefix("cfn=")).map(|of| of.split_once(' ').unwrap_or((of, "")))
        {
            if name.contains("memcpy") || name.contains("memmove") {
                copies.insert(number);
            }
            if line.starts_with("fn=") {
                copying = copies.contains(number);
            }
        } else if line.starts_with("calls=") {
            called = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost: u64 = line.split_once(' ')?.1.trim().parse().ok()?;
            if copying && !std::mem::take(&mut called) {
                spent += cost;
            }
            called = false;
        }
    }
    total.checked_sub(spent)
}

/// The program that is measured.
///
/// # Errors
/// The failed system call's, or if its connection does not get to the NIC.
pub fn workload(messages: u64, port: u16) -> Result<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let mut message = [ECHO; SIZE];
    // It moves while it is used: by calls that are not counted, since how often they wait is different each time.
    for _ in 0..200 {
        let mut left = stream.write_vectored(&[IoSlice::new(&message)])?;
        while left > 0 {
            let got = stream.read_vectored(&mut [IoSliceMut::new(&mut message[..left])])?;
            left = left.checked_sub(got).filter(|_| got > 0).context("the peer has ended")?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..messages / BURST {
        for _ in 1..BURST {
            stream.write_all(&[HOLD; SIZE])?;
        }
        stream.write_all(&[ECHO; SIZE])?;
        // Polling for them would be counted, or do part of the work.
        std::thread::sleep(Duration::from_millis(10));
        for _ in 0..BURST {
            stream.read_exact(&mut message)?;
        }
    }
    Ok(())
}

/// First byte of a message that is answered at once, and of one that is answered together with the next.
const ECHO: u8 = 1;
const HOLD: u8 = 2;

/// The peer of the measured program, over the kernel's TCP: it answers each message with one.
fn answer(listener: &TcpListener) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let (mut message, mut held) = ([0; SIZE], 0);
    loop {
        match stream.read_exact(&mut message) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        held += 1;
        if message[0] == ECHO {
            for _ in 0..std::mem::take(&mut held) {
                stream.write_all(&message)?;
            }
        }
    }
}
