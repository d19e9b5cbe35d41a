//! The file set: 36 files a directory, named as SPECweb99's. A file's bytes follow from its name, so that a client can
//! check each of them.

use crate::status::StatusLine;
use crate::web_mix::{CLASSES, FILES, Request};
use anyhow::{Context, Result, ensure};
use baton_sim::stream;
use serde::Serialize;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Most directories of a file set: some 10 GB.
pub const MOST_DIRECTORIES: usize = 2000;

/// A file's path below the root of the file set.
pub fn path(request: &Request) -> String {
    format!("dir{:05}/class{}_{}", request.directory, request.class, request.file)
}

/// Key of the stream whose first bytes are the file's.
pub fn key(request: &Request) -> u64 {
    let number = (request.directory * CLASSES.len() + request.class) * FILES + request.file;
    // A stream is the stretch of one sequence of words of 8 bytes that begins at its key. The longest file has 115,200
    // words, so no two files have a word in common.
    (number as u64 + 1) << 20
}

/// A directory's files.
pub fn in_directory(directory: usize) -> impl Iterator<Item = Request> {
    let request = move |number: usize| {
        let (class, file) = (number / FILES, number % FILES);
        Request { directory, class, file, dynamic: false }
    };
    (0..CLASSES.len() * FILES).map(request)
}

/// A file's bytes.
pub fn content(request: &Request) -> Vec<u8> {
    let mut bytes = vec![0; request.bytes() as usize];
    stream::fill(key(request), 0, &mut bytes);
    bytes
}

/// What was made.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Made {
    /// Files that were written.
    pub written: usize,
    /// Files that were there already.
    pub kept: usize,
    /// Bytes of all.
    pub bytes: u64,
}

/// Makes the file set of so many directories below `root`. What is there of it already is kept, so that a run that was
/// interrupted can be repeated, and a file set can be made larger.
///
/// # Errors
/// If a file cannot be written, or something else has its name: nothing is overwritten.
pub fn make(root: &Path, directories: usize) -> Result<Made> {
    ensure!((1..=MOST_DIRECTORIES).contains(&directories), "{directories} directories: from 1 to {MOST_DIRECTORIES}");
    fs::create_dir_all(root).with_context(|| format!("making {}", root.display()))?;
    let (status, mut made) = (StatusLine::new(), Made::default());
    for directory in 0..directories {
        status.update(format_args!("directory {} of {directories}", directory + 1));
        make_directory(&root.join(format!("dir{directory:05}")))?;
        for request in in_directory(directory) {
            let (path, bytes) = (root.join(path(&request)), content(&request));
            made.bytes += bytes.len() as u64;
            if is_made(&path, &bytes)? {
                made.kept += 1;
            } else {
                write(&path, &bytes).with_context(|| format!("writing {}", path.display()))?;
                made.written += 1;
            }
        }
    }
    Ok(made)
}

fn make_directory(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            // Not through a link: it may lead to anything.
            ensure!(
                fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()),
                "{} is there, and no directory: remove it, or name another place",
                path.display()
            );
            Ok(())
        }
        made => made.with_context(|| format!("making {}", path.display())),
    }
}

/// Whether a file is there.
///
/// # Errors
/// If something else is.
fn is_made(path: &Path, bytes: &[u8]) -> Result<bool> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        found => found.with_context(|| format!("looking at {}", path.display()))?,
    };
    let same = found.is_file() && found.len() == bytes.len() as u64 && fs::read(path).is_ok_and(|there| there == bytes);
    ensure!(
        same,
        "{} is there, and not as the file set has it: nothing is overwritten. Remove it, or name another place",
        path.display()
    );
    Ok(true)
}

/// Writes a file that is not there. It gets its name when it is whole.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let part = path.with_extension("part");
    if let Ok(found) = fs::symlink_metadata(&part) {
        // Left by a run that was interrupted.
        let ours =
            found.is_file() && found.len() <= bytes.len() as u64 && fs::read(&part).is_ok_and(|there| bytes.starts_with(&there));
        ensure!(ours, "{} is there, and not a part of the file: remove it", part.display());
        fs::remove_file(&part)?;
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&part)?;
    let written = file.write_all(bytes).and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        // The disk is full, most likely.
        let _ = fs::remove_file(&part);
    }
    Ok(written?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_bed::temporary::{Directory, Kind};
    use std::collections::BTreeSet;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_directory_has_nine_files_of_each_class() {
        let files: Vec<Request> = in_directory(7).collect();
        assert_eq!(files.len(), 36);
        let names: BTreeSet<String> = files.iter().map(path).collect();
        assert_eq!(names.first().map(String::as_str), Some("dir00007/class0_0"));
        assert_eq!(names.last().map(String::as_str), Some("dir00007/class3_8"));
        let keys: BTreeSet<u64> = files.iter().chain(&in_directory(8).collect::<Vec<_>>()).map(key).collect();
        assert_eq!(keys.len(), 72);
        let sizes: Vec<u64> = [0, 8, 9, 27, 35].map(|at| files[at].bytes()).to_vec();
        assert_eq!(sizes, [102, 921, 1024, 102_400, 921_600]);
        assert_ne!(content(&files[0]), content(&Request { directory: 8, ..files[0] }));
    }

    #[test]
    fn a_file_set_is_made_kept_and_enlarged() {
        let scratch = Directory::new(Kind::Files).unwrap();
        let first = make(scratch.path(), 1).unwrap();
        assert_eq!((first.written, first.kept), (36, 0));
        assert_eq!(first.bytes, in_directory(0).map(|request| request.bytes()).sum::<u64>());
        let one = Request { directory: 0, class: 2, file: 4, dynamic: false };
        assert_eq!(fs::read(scratch.path().join(path(&one))).unwrap(), content(&one));
        // A run was interrupted before, in the middle of a file.
        let other = Request { directory: 1, class: 0, file: 0, dynamic: false };
        fs::create_dir(scratch.path().join("dir00001")).unwrap();
        fs::write(scratch.path().join("dir00001/class0_0.part"), &content(&other)[..50]).unwrap();
        let second = make(scratch.path(), 2).unwrap();
        assert_eq!((second.written, second.kept), (36, 36));
        assert_eq!(fs::read_dir(scratch.path().join("dir00001")).unwrap().count(), 36, "nothing else is left");
    }

    #[test]
    fn nothing_else_is_overwritten() {
        let spoils: [fn(&Path); 4] = [
            |root| fs::write(root.join("dir00000/class1_0"), b"mine").unwrap(),
            |root| symlink("/dev/null", root.join("dir00000/class1_0")).unwrap(),
            |root| fs::write(root.join("dir00000/class1_0.part"), b"mine").unwrap(),
            |root| {
                fs::remove_dir(root.join("dir00000")).unwrap();
                symlink("/", root.join("dir00000")).unwrap();
            },
        ];
        for (at, spoil) in spoils.into_iter().enumerate() {
            let scratch = Directory::new(Kind::Files).unwrap();
            fs::create_dir_all(scratch.path().join("dir00000")).unwrap();
            spoil(scratch.path());
            let refused = format!("{:#}", make(scratch.path(), 1).unwrap_err());
            assert!(refused.contains("remove it") || refused.contains("Remove it"), "{at}: {refused}");
        }
        let scratch = Directory::new(Kind::Files).unwrap();
        let missing = scratch.path().join("missing");
        assert!(make(&missing, 0).is_err() && make(&missing, MOST_DIRECTORIES + 1).is_err());
        assert!(!missing.exists());
    }
}
