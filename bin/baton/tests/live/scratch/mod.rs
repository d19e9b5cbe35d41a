//! Temporary files of tests, and the programs that tests run.
#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of the next directory: each test of a process has its own.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A directory that is removed when this is dropped.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("baton-test-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Scratch(path)
    }

    pub fn file(&self, name: &str) -> String {
        self.0.join(name).to_string_lossy().into_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Path of a program of these tests.
pub fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).to_string_lossy().into_owned()
}

/// Path of the socket of the Baton that was started for a program with its temporary files in `scratch`.
pub fn agent_socket(scratch: &Scratch) -> Option<PathBuf> {
    let entries = std::fs::read_dir(&scratch.0).ok()?;
    let sockets = entries.flatten().map(|entry| entry.path().join("agent.sock"));
    sockets.into_iter().find(|path| path.exists())
}
