//! wrk, the client with which people measure web servers. It says what it has measured when it ends; how many requests
//! were answered by then the server says (nginx's stub_status), at a Unix socket that no NIC has.

use crate::closed_loop::Progress;
use anyhow::{Context, Result, bail, ensure};
use baton_bed::server::Program;
use baton_bed::statistics::Percentiles;
use baton_linux::process;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

const SIGINT: i32 = 2;

/// Between two looks at how many requests the server has answered.
const LOOK: Duration = Duration::from_millis(10);

/// How it is started: with as many descriptors as it may have. It is ended long before its time is over.
const START: &str = "ulimit -n \"$(ulimit -Hn)\"; exec wrk -t1 -d 3600s --latency \"$@\"";

/// Checks that wrk and a server that counts are installed.
///
/// # Errors
/// If not, with what to do.
pub(super) fn check() -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there = std::env::split_paths(&path).any(|place| place.join("wrk").is_file());
    ensure!(is_there, "wrk is not installed (Debian's package of that name): install it, or measure with --client own");
    let is_nginx = matches!(Program::find(), Program::Nginx(_));
    ensure!(is_nginx, "wrk measures nginx, which is not installed (nginx-light): install it, or measure with --client own");
    Ok(())
}

/// What it is to ask for.
pub(super) struct Wrk {
    pub connections: usize,
    pub url: String,
    /// Where the server says how many requests it has answered.
    pub counter: PathBuf,
}

impl Wrk {
    /// Runs until it has to stop.
    ///
    /// # Errors
    /// If wrk cannot be started or ends, a connection of its breaks, or the server does not count.
    pub(super) fn run(&self, progress: &Progress) -> Result<()> {
        let mut counter = Counter::at(&self.counter)?;
        let mut running = self.start(progress)?;
        while !progress.stop.load(Ordering::Relaxed) {
            if progress.anew.swap(false, Ordering::Relaxed) {
                running.end()?;
                running = self.start(progress)?;
            }
            running.check()?;
            progress.done.store(counter.requests()?, Ordering::Relaxed);
            std::thread::sleep(LOOK);
        }
        let said = running.end()?;
        let waits = waits(&said).with_context(|| format!("wrk says something else than expected: {said}"))?;
        if let Ok(mut of_all) = progress.waits.lock() {
            *of_all = Some(waits);
        }
        Ok(())
    }

    fn start(&self, progress: &Progress) -> Result<Running> {
        let mut command = Command::new("sh");
        command.args(["-c", START, "sh", "-c"]).arg(self.connections.to_string()).arg(&self.url);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        process::inherit(&mut command, &[], true);
        let child = command.spawn().context("starting wrk")?;
        progress.client_process.store(child.id(), Ordering::Relaxed);
        Ok(Running(Some(child)))
    }
}

/// wrk, which is killed if this is dropped before it has ended.
struct Running(Option<Child>);

impl Running {
    /// Checks that it has not ended.
    fn check(&mut self) -> Result<()> {
        let ended = self.0.as_mut().map(Child::try_wait).transpose()?.flatten().is_some();
        if ended {
            let said = self.finish()?;
            bail!("wrk has ended: {said}");
        }
        Ok(())
    }

    /// Ends it. Returns what it has said.
    fn end(mut self) -> Result<String> {
        if let Some(child) = &self.0 {
            process::signal(child.id(), SIGINT).context("ending wrk")?;
        }
        let said = self.finish()?;
        match broken(&said) {
            Some(line) => bail!("a connection broke: wrk says {line:?}"),
            None => Ok(said),
        }
    }

    fn finish(&mut self) -> Result<String> {
        let child = self.0.take().context("wrk has ended before")?;
        let output = child.wait_with_output().context("the end of wrk")?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(text(&output.stdout) + &text(&output.stderr))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The line of wrk's output with its counts of failed connections and of bad answers, if any of them is not 0. Slow
/// answers (`timeout`) are no errors.
fn broken(said: &str) -> Option<&str> {
    let errors = |line: &str| {
        let counts = line.split(',').filter(|count| !count.contains("timeout"));
        counts.filter_map(|count| count.split_whitespace().last()).any(|count| count != "0")
    };
    let mut lines = said.lines().map(str::trim);
    lines.find(|line| line.starts_with("Socket errors:") && errors(line) || line.starts_with("Non-2xx"))
}

/// The waiting times in what wrk has said. None if it has said none.
fn waits(said: &str) -> Option<Percentiles> {
    let after = |word: &str, at: usize| {
        let line = said.lines().map(str::trim).find(|line| line.starts_with(word))?;
        milliseconds(line.split_whitespace().nth(at)?)
    };
    Some(Percentiles { p50: after("50%", 1)?, p99: after("99%", 1)?, max: after("Latency ", 3)? })
}

/// A time as wrk writes it, such as 812.00us.
fn milliseconds(text: &str) -> Option<f64> {
    let units = [("us", 1e-3), ("ms", 1.0), ("s", 1e3), ("m", 6e4), ("h", 3.6e6)];
    units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(*unit)?.parse::<f64>().ok()? * factor))
}

/// A connection to nginx's stub_status.
struct Counter {
    connection: UnixStream,
    /// Requests that were its own.
    own: u64,
}

impl Counter {
    fn at(path: &Path) -> Result<Counter> {
        let connection = UnixStream::connect(path).with_context(|| format!("asking nginx at {}", path.display()))?;
        connection.set_read_timeout(Some(Duration::from_secs(10)))?;
        Ok(Counter { connection, own: 0 })
    }

    /// Requests that the server has answered, but for its own.
    fn requests(&mut self) -> Result<u64> {
        self.connection.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").context("asking nginx how much it has done")?;
        self.own += 1;
        let (mut answer, mut buffer) = (String::new(), [0; 1024]);
        loop {
            let got = self.connection.read(&mut buffer).context("what nginx has done")?;
            ensure!(got > 0, "nginx does not say what it has done (has it stub_status?): {answer}");
            answer += &String::from_utf8_lossy(&buffer[..got]);
            if let Some(requests) = requests(&answer) {
                return Ok(requests.saturating_sub(self.own));
            }
        }
    }
}

/// The number of requests in an answer of stub_status, if that is whole.
fn requests(answer: &str) -> Option<u64> {
    let (_, counts) = answer.split_once("server accepts handled requests")?;
    counts.split_once("Waiting:")?.1.contains('\n').then_some(())?;
    counts.split_whitespace().nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "Running 60m test @ http://10.77.0.1:8092/0/256
  1 threads and 64 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.02ms  310.10us  20.31ms   91.20%
    Req/Sec    63.10k     2.11k   70.02k    71.00%
  Latency Distribution
     50%  812.00us
     75%    1.10ms
     90%    1.41ms
     99%    2.05ms
  313370 requests in 5.00s, 152.10MB read
Requests/sec:  62674.00
";

    #[test]
    fn what_wrk_says_is_read() {
        let waits = waits(SAID).expect("waiting times");
        assert_eq!(waits.p50.to_bits(), (812.0f64 * 1e-3).to_bits());
        assert_eq!([waits.p99, waits.max].map(f64::to_bits), [2.05f64, 20.31].map(f64::to_bits));
        assert_eq!(milliseconds("1.50s"), Some(1500.0));
        assert!(super::waits("unable to connect").is_none());
    }

    #[test]
    fn connections_that_break_are_errors_and_slow_answers_are_not() {
        let with = |line: &str| broken(&format!("{SAID}  {line}\n")).is_some();
        assert!(broken(SAID).is_none() && !with("Socket errors: connect 0, read 0, write 0, timeout 3"));
        assert!(with("Socket errors: connect 0, read 1, write 0, timeout 0"));
        assert!(with("Non-2xx or 3xx responses: 7"));
    }

    #[test]
    fn the_server_counts() {
        let answer = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nActive connections: 65 \n\
            server accepts handled requests\n 66 66 1234 \nReading: 0 Writing: 1 Waiting: 64 \n";
        assert_eq!(requests(answer), Some(1234));
        assert_eq!(requests(&answer[..answer.len() - 4]), None, "it is not whole");
    }
}
