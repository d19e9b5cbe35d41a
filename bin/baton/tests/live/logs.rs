//! The log of `baton up`: entries with fields in systemd's journal, lines elsewhere; levels; limits. Whoever does not
//! read it holds nothing up.

use crate::common::wait_until;
use crate::scratch::{Scratch, text};
use baton_client::Session;
use baton_client::tool::Tool;
use baton_linux::control::Channel;
use baton_linux::namespace::Namespace;
use baton_linux::process;
use baton_protocol::program::{Answer, Reply};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Longer than anything takes that is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// A `baton up` in a host of its own.
struct Up {
    child: Child,
    scratch: Scratch,
    _host: Namespace,
}

impl Up {
    /// Starts one. `before`: what its command line begins with; `arguments`: what it ends with.
    fn start(scratch: Scratch, before: Command, arguments: &[&str]) -> Up {
        let (mut command, host) = (before, Namespace::new().expect("a namespace"));
        command.args(["up", "--socket", &scratch.file("door/agent.sock")]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = host.spawn(&mut command).expect("baton");
        Up { child, scratch, _host: host }
    }

    /// Has it refuse a client, which comes from another network namespace, the test's. Waits until it is up.
    fn refuse(&self) {
        let socket = self.scratch.0.join("door/agent.sock");
        let mut client = None;
        wait_until("its socket", || {
            client = Channel::connect(&socket).ok();
            client.is_some()
        });
        let (answer, _) = client.expect("a channel").receive_within::<Answer>(PATIENCE).expect("an answer");
        assert!(matches!(answer.body, Reply::Failed { .. }), "{answer:?}");
    }

    /// Path of the agent.
    fn agent(&self) -> PathBuf {
        let entries = std::fs::read_dir(self.scratch.0.join("door")).expect("a directory").flatten();
        let mut paths = entries.map(|entry| entry.path());
        paths.find(|path| path.extension().is_some_and(|number| number != "sock")).expect("an agent")
    }

    /// Ends it in order. Returns what it has written to standard error, if that is a pipe.
    fn end(&mut self) -> String {
        process::signal(self.child.id(), libc::SIGTERM).expect("a signal");
        assert!(self.child.wait().expect("its end").success());
        let mut said = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            errors.read_to_string(&mut said).expect("text");
        }
        said
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = process::signal(self.child.id(), libc::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

/// The command, without what the environment says about logs.
fn baton() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.env_remove("BATON_LOG").env_remove("JOURNAL_STREAM").stderr(Stdio::piped());
    command
}

/// The next entry of a journal that counts.
fn entry(journal: &UnixDatagram, counts: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
    let mut bytes = vec![0; 1 << 16];
    loop {
        let length = journal.recv(&mut bytes).expect("an entry in time");
        let entry = text(&bytes[..length]);
        let fields = entry.lines().filter_map(|line| line.split_once('='));
        let fields: BTreeMap<String, String> = fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        if counts(&fields["MESSAGE"]) {
            return fields;
        }
    }
}

/// Under systemd, where the standard error of a unit is the journal's, `baton up`, agent and keeper write entries with
/// fields, and no line.
#[test]
fn under_systemd_the_journal_gets_entries_with_fields() {
    let scratch = Scratch::new("journal");
    let directory = scratch.0.join("journal");
    std::fs::create_dir(&directory).expect("a directory");
    let journal = UnixDatagram::bind(directory.join("socket")).expect("a socket");
    journal.set_read_timeout(Some(PATIENCE)).expect("a limit");
    let stream = File::create(scratch.file("stream")).expect("a file");
    let of = stream.metadata().expect("its numbers");
    let line = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && \
                mount --bind \"$0\" /run/systemd/journal && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", line]).arg(&directory).arg(env!("CARGO_BIN_EXE_baton"));
    command.env("JOURNAL_STREAM", format!("{}:{}", of.dev(), of.ino())).env_remove("BATON_LOG").stderr(stream);
    let mut up = Up::start(scratch, command, &["--log-level", "debug"]);

    let is_up = entry(&journal, |message| message.starts_with("up: it is up at "));
    assert_eq!((is_up["PRIORITY"].as_str(), is_up["SYSLOG_IDENTIFIER"].as_str()), ("6", "baton"), "{is_up:?}");
    assert!(is_up["CODE_FILE"].ends_with("up.rs"), "{is_up:?}");

    let session = Session::connect(&up.agent()).expect("a session");
    let opened = entry(&journal, |message| message.starts_with("agent: session ") && message.contains("is open"));
    let (number, user) = (session.number().to_string(), process::user().to_string());
    assert_eq!((&opened["SESSION"], &opened["USER"]), (&number, &user), "{opened:?}");
    assert_eq!(opened["PRIORITY"], "7", "{opened:?}");

    let nic = Tool::connect(&up.agent()).and_then(|mut tool| tool.statistics()).expect("statistics").nic_process;
    process::signal(nic, libc::SIGKILL).expect("a signal");
    let died = entry(&journal, |message| message.contains("has died"));
    assert_eq!((died["NIC"].as_str(), died["PRIORITY"].as_str()), ("0", "4"), "{died:?}");
    assert!(died["MESSAGE"].ends_with("send what `baton report` writes"), "{died:?}");
    drop(session);
    up.end();
    let lines = std::fs::read_to_string(up.scratch.file("stream")).expect("the stream");
    assert_eq!(lines, "", "these are not in the journal");
}

/// What `baton up` writes until it has refused a client and ended.
fn said(command: Command, arguments: &[&str]) -> String {
    let mut up = Up::start(Scratch::new("levels"), command, &[arguments, &["--namespaces", "1"]].concat());
    up.refuse();
    up.end()
}

/// The level is that of the command line, else that of the environment, else that of the configuration file.
#[test]
fn a_level_leaves_out_what_matters_less() {
    let by_environment = |level: &str| {
        let mut command = baton();
        command.env("BATON_LOG", level);
        command
    };
    let usual = said(baton(), &[]);
    let lines: Vec<&str> = usual.lines().collect();
    assert!(lines[0].starts_with("baton up: it is up at /"), "{usual}");
    assert!(lines[1].starts_with("baton up: warning: a client cannot be served: 1 network namespaces"), "{usual}");
    assert!(!usual.contains('\u{1b}'), "colours in a pipe: {usual}");
    let warnings = said(by_environment("warning"), &[]);
    assert!(!warnings.contains("is up") && warnings.contains("cannot be served"), "{warnings}");
    assert_eq!(said(by_environment("debug"), &["--log-level", "error"]), "");

    let scratch = Scratch::new("level");
    let config = scratch.file("config.toml");
    std::fs::write(&config, "log-level = \"error\"\n").expect("a file");
    assert_eq!(said(baton(), &["--config", &config]), "");
    assert!(said(by_environment("info"), &["--config", &config]).contains("is up"));

    let wrong = by_environment("loud").arg("up").output().expect("baton");
    let why = text(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && why.contains("write error, warning, info or debug"), "{why}");
}

/// Clients that cause lines without end get few of them written, and the others counted.
#[test]
fn a_flood_of_lines_is_counted() {
    const CLIENTS: usize = 200;
    let mut up = Up::start(Scratch::new("flood"), baton(), &["--namespaces", "1"]);
    (0..CLIENTS).for_each(|_| up.refuse());
    let said = up.end();
    let about: Vec<&str> = said.lines().filter(|line| line.contains("a client cannot be served")).collect();
    let count = |line: &str| line.split_once('(')?.1.split_once(" more like this were left out")?.0.parse::<usize>().ok();
    let counts: Vec<usize> = about.iter().filter_map(|line| count(line)).collect();
    let written = about.len() - counts.len();
    assert_eq!(written + counts.iter().sum::<usize>(), CLIENTS, "{said}");
    assert!(!counts.is_empty() && written < CLIENTS / 2, "{said}");
}

/// Standard error is a stream whose reader stands still, and which is full: it starts, serves, and ends.
#[test]
fn a_log_that_nobody_reads_holds_nothing_up() {
    let (_reader, mut writer) = UnixStream::pair().expect("a pair");
    writer.set_nonblocking(true).expect("its mode");
    while writer.write(&[b'x'; 4096]).is_ok() {}
    writer.set_nonblocking(false).expect("its mode");
    let mut command = baton();
    command.stderr(OwnedFd::from(writer));
    let mut up = Up::start(Scratch::new("unread"), command, &["--namespaces", "1"]);
    (0..20).for_each(|_| up.refuse());
    let nic = |up: &Up| Tool::connect(&up.agent()).and_then(|mut tool| tool.statistics()).map(|all| all.nic_process).ok();
    let before = nic(&up).expect("a NIC");
    process::signal(before, libc::SIGKILL).expect("a signal");
    wait_until("the next NIC", || nic(&up).is_some_and(|now| now != before));
    up.end();
}

/// A person who reads the log of `baton up` in a pipe sees each line as it is written.
#[test]
fn a_nics_death_is_a_line_that_says_what_to_do() {
    let mut up = Up::start(Scratch::new("death"), baton(), &[]);
    let mut lines = BufReader::new(up.child.stderr.take().expect("its messages"));
    let mut next = || {
        let mut line = String::new();
        lines.read_line(&mut line).expect("a line");
        line
    };
    assert!(next().contains("is up"));
    let nic = Tool::connect(&up.agent()).and_then(|mut tool| tool.statistics()).expect("statistics").nic_process;
    process::signal(nic, libc::SIGKILL).expect("a signal");
    let line = next();
    assert!(line.starts_with(&format!("baton agent: warning: NIC 0 (process {nic}) has died: ")), "{line}");
    assert!(line.ends_with("send what `baton report` writes\n"), "{line}");
    up.end();
}
