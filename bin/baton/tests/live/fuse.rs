//! Files of a FUSE server that does not answer: whoever asks for something of such a file waits.

use crate::scratch::{Scratch, script};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

/// Numbers of FUSE's operations.
pub const READ: u32 = 15;
const GETATTR: u32 = 3;
const STATFS: u32 = 17;
const FLUSH: u32 = 25;

/// What close(2), fstatfs(2) and, of agents and keepers, fstat(2) wait for.
pub const NEVER_FLUSHED: [u32; 3] = [FLUSH, STATFS, GETATTR];

/// A file of a FUSE server that answers everything but some operations. When this is dropped, all who wait go on.
///
/// The server is a process of its own, which ends with this one: a process whose own thread serves a file that it has
/// could not end.
pub struct FuseFile {
    path: String,
    file: OnceLock<File>,
    server: Child,
    lines: BufReader<ChildStdout>,
    _scratch: Scratch,
}

impl Drop for FuseFile {
    fn drop(&mut self) {
        // The end of its input may not come: a process that another test starts has this end of the pipe, too, and may
        // wait for this very file in execve(2).
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl FuseFile {
    /// A file whose server does not answer these operations. None, and a word why, if this machine or user has no FUSE.
    pub fn new(unanswered: &[u32]) -> Option<FuseFile> {
        let scratch = Scratch::new("fuse");
        let path = scratch.file("file");
        File::create(&path).expect("a file to mount at");
        // In a mount namespace of its own, which goes with it.
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "python3", &script("fuse.py"), &path]);
        command.args(unanswered.iter().map(u32::to_string)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = command.spawn().expect("unshare");
        let mut lines = BufReader::new(server.stdout.take().expect("its output"));
        let mut said = String::new();
        let _ = lines.read_line(&mut said);
        if said.is_empty() {
            let _ = server.wait();
            println!("skipped: no FUSE file system can be mounted here");
            assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
            return None;
        }
        let path = format!("/proc/{}/root{path}", server.id());
        Some(FuseFile { path, file: OnceLock::new(), server, lines, _scratch: scratch })
    }

    /// A descriptor of it. While this process has one every process that it starts begins with one, too, and has to
    /// close it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.get_or_init(|| File::open(&self.path).expect("the file")).as_fd()
    }

    /// A command that runs a program of this user's, which has the file as its descriptor 3.
    pub fn held_by(&self, user: u32, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("python3");
        command.args([&script("holds.py"), &self.path, &user.to_string()]).arg(program.as_ref());
        command
    }

    /// Waits until somebody waits for an answer that does not come.
    pub fn until_waited_for(&mut self) {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line");
        assert_eq!(line, "unanswered\n");
    }
}
