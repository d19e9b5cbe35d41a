//! What a command that measures or shows something has in the file system only while it runs. It is removed when it is
//! dropped, and when a signal ends the process. What processes that were killed have left can be found.

use anyhow::{Context, Result};
use baton_linux::{ending, files, process};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// What is removed when a signal ends this process.
static KEPT: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// What a directory is for, as its name says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// The sockets of a test bed.
    Bed,
    /// Files to serve.
    Files,
    /// What callgrind writes.
    Profile,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Bed, Kind::Files, Kind::Profile];

    /// What names of this kind begin with; a process's number follows.
    fn prefix(self) -> &'static str {
        match self {
            Kind::Bed => "baton-bed-",
            Kind::Files => "baton-files-",
            Kind::Profile => "baton-profile-",
        }
    }
}

/// A directory for temporary files, which is removed when this is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// It is locked for as long as this is open, so that nobody in another PID namespace takes it for one that was
    /// left.
    _locked: File,
}

impl Directory {
    /// Makes one. From then on this process has a second thread.
    ///
    /// # Errors
    /// The system's.
    pub fn new(kind: Kind) -> Result<Directory> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("{}{}-{number:x}", kind.prefix(), std::process::id()));
        static WATCHED: Once = Once::new();
        // Without room for a thread a signal leaves what there is.
        WATCHED.call_once(|| drop(ending::before_end(remove_all)));
        keep(&path, || std::fs::create_dir(&path)).with_context(|| format!("making {}", path.display()))?;
        let locked = File::open(&path).with_context(|| format!("opening {}", path.display()));
        let locked = locked.inspect_err(|_| drop(std::fs::remove_dir(&path)))?;
        // A file system without locks has only the process's number.
        let _ = files::try_lock(locked.as_fd());
        Ok(Directory { path, _locked: locked })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
        forget(&self.path);
    }
}

/// A file for a result that takes long. What is there already stays until the result is written.
#[derive(Debug)]
pub struct ResultFile {
    path: PathBuf,
    file: File,
    /// It was not there before, and is empty: it is removed when this is dropped.
    made: bool,
}

impl ResultFile {
    /// Opens it, and makes it if it is not there.
    ///
    /// # Errors
    /// The system's, if it cannot be written.
    pub fn open(path: &Path) -> Result<ResultFile> {
        let make = || File::options().write(true).create_new(true).open(path);
        let opened = match keep(path, make) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                File::options().write(true).create(true).truncate(false).open(path).map(|file| (file, false))
            }
            made => made.map(|file| (file, true)),
        };
        let (file, made) = opened.with_context(|| format!("writing {}", path.display()))?;
        Ok(ResultFile { path: path.to_owned(), file, made })
    }

    /// Writes the result, in place of what was there.
    ///
    /// # Errors
    /// The system's.
    pub fn write(mut self, result: &[u8]) -> Result<()> {
        if std::mem::take(&mut self.made) {
            forget(&self.path);
        }
        let is_file = self.file.metadata().is_ok_and(|of| of.is_file());
        let emptied = if is_file { self.file.set_len(0) } else { Ok(()) };
        emptied.and_then(|()| self.file.write_all(result)).with_context(|| format!("writing {}", self.path.display()))
    }
}

impl Drop for ResultFile {
    fn drop(&mut self) {
        if self.made {
            let _ = std::fs::remove_file(&self.path);
            forget(&self.path);
        }
    }
}

/// Makes something that is removed when a signal ends this process, from the first [`Directory`] on.
fn keep<T>(path: &Path, make: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let made = make()?;
    kept.insert(std::path::absolute(path)?);
    Ok(made)
}

fn forget(path: &Path) {
    if let Ok(path) = std::path::absolute(path) {
        KEPT.lock().unwrap_or_else(PoisonError::into_inner).remove(&path);
    }
}

/// Removes all, when this process is about to end. Other threads may still use it; nothing is made or removed any more.
fn remove_all() {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    for path in kept.iter() {
        if !path.is_dir() {
            let _ = std::fs::remove_file(path);
            continue;
        }
        // Whoever makes a file in it meanwhile does so by its name.
        let mut name = path.clone().into_os_string();
        name.push("-removed");
        let removed = std::fs::rename(path, &name).and_then(|()| std::fs::remove_dir_all(&name));
        if removed.is_err() {
            let _ = std::fs::remove_dir_all(path);
        }
    }
    std::mem::forget(kept);
}

/// The directories that processes of this user's which were killed have left in a directory.
pub fn left_in(place: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(place) else { return Vec::new() };
    let user = process::user();
    let is_left = |entry: &std::fs::DirEntry| {
        let Some(maker) = entry.file_name().to_str().and_then(maker) else { return false };
        // A link's own metadata: links are not followed.
        let is_own = entry.metadata().is_ok_and(|of| of.is_dir() && of.uid() == user);
        is_own && !process::lives(maker) && is_unlocked(&entry.path())
    };
    entries.flatten().filter(is_left).map(|entry| entry.path()).collect()
}

/// The process that has made a directory of this name.
fn maker(name: &str) -> Option<u32> {
    let number = Kind::ALL.into_iter().find_map(|kind| name.strip_prefix(kind.prefix()))?;
    let number = number.split('-').next().filter(|number| number.bytes().all(|digit| digit.is_ascii_digit()))?;
    number.parse().ok()
}

fn is_unlocked(directory: &Path) -> bool {
    File::open(directory).and_then(|file| files::try_lock(file.as_fd())).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_which_process_has_made_it() {
        assert_eq!(maker("baton-bed-4711-a"), Some(4711));
        assert_eq!(maker("baton-files-12-0-removed"), Some(12));
        for other in ["baton-4711-a", "baton-files-", "baton-files-x", "baton-files-+1", "baton-of-0-1", "baton-run-12"] {
            assert_eq!(maker(other), None, "{other}");
        }
    }

    #[test]
    fn only_what_a_dead_process_has_left_is_found() {
        let place = Directory::new(Kind::Bed).expect("a directory");
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        child.wait().expect("its end");
        let dead = child.id();
        let name = |process: u32| place.path().join(format!("{}{process}-0", Kind::Files.prefix()));
        let (left, lives) = (name(dead), name(std::process::id()));
        let (link, other) = (place.path().join(format!("baton-bed-{dead}-1")), place.path().join(format!("baton-of-{dead}-0")));
        [&left, &lives, &other].into_iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
        std::os::unix::fs::symlink(&lives, &link).expect("a link");
        assert_eq!(left_in(place.path()), [left.clone()]);
        // Its maker is in another PID namespace, and has it locked.
        let locked = File::open(&left).expect("a directory");
        assert!(files::try_lock(locked.as_fd()).expect("a lock"));
        assert_eq!(left_in(place.path()), [] as [PathBuf; 0]);
    }

    #[test]
    fn a_result_replaces_what_was_there_only_when_it_is_there() {
        let place = Directory::new(Kind::Bed).expect("a directory");
        let path = place.path().join("result");
        drop(ResultFile::open(&path).expect("a file"));
        assert!(!path.exists(), "an empty file is left");
        ResultFile::open(&path).expect("a file").write(b"a long result").expect("written");
        let next = ResultFile::open(&path).expect("a file");
        assert_eq!(std::fs::read(&path).expect("the file"), b"a long result");
        next.write(b"short").expect("written");
        assert_eq!(std::fs::read(&path).expect("the file"), b"short");
        drop(ResultFile::open(&path).expect("a file"));
        assert_eq!(std::fs::read(&path).expect("the file"), b"short");
        assert!(ResultFile::open(&place.path().join("missing/result")).is_err());
    }
}
