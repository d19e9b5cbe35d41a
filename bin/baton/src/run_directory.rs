//! Where the socket of a Baton lies that `baton run` has started for a program: in a directory of this user's alone. In
//! a directory that every user can write, another user could create the path again after it was removed, and listen
//! there for programs that know it.

use anyhow::{Context, Result, bail};
use baton_linux::{process, trust};
use std::fs::{DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Root's directory, beside the socket of `baton up`.
const OF_ROOT: &str = "/run/baton";
/// Every user may connect to a socket in it, also a program that has changed its user; other users may not create or
/// list sockets.
const MODE: u32 = 0o711;
/// Names that are tried for a directory that stays.
const NAMES: u32 = 8;
/// How often another name is tried.
const TRIES: u32 = 100;

/// A directory of this user's for Batons of single programs, in the order in which they are used.
enum Base {
    /// It is there, by the environment.
    Given(PathBuf),
    /// It is made if it is not there, and stays.
    Own(PathBuf),
}

fn bases() -> Vec<Base> {
    let user = process::user();
    let mut bases = Vec::new();
    let given = |variable| process::variable(variable).map(PathBuf::from).map(Base::Given);
    bases.extend(given("TMPDIR"));
    // Only its owner can reach into it, and a program of root's may change its user.
    bases.extend(if user == 0 { Some(Base::Own(OF_ROOT.into())) } else { given("XDG_RUNTIME_DIR") });
    // Another user may have taken the name: in a container that shares the directory, or out of malice.
    bases.extend((0..NAMES).map(|number| Base::Own(std::env::temp_dir().join(format!("baton-of-{user}-{number}")))));
    bases
}

impl Base {
    /// The directory, if only root and this user can write to it or replace it.
    fn get(&self) -> std::io::Result<&Path> {
        let path = match self {
            Base::Given(path) => path,
            Base::Own(path) => match DirBuilder::new().mode(MODE).create(path) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
                _ => path,
            },
        };
        trust::check_own(path)?;
        Ok(path)
    }
}

/// The directories in which [`make`] makes some, those that are there.
pub fn existing() -> Vec<PathBuf> {
    let there = bases().into_iter().map(|base| match base {
        Base::Given(path) | Base::Own(path) => path,
    });
    there.filter(|path| path.is_dir()).collect()
}

/// A directory of this user's that stays, made if it is not there: /run/baton for root.
///
/// # Errors
/// If there is none that is this user's alone; for each one that was looked at, why it is not.
pub fn lasting() -> Result<PathBuf> {
    let mut refused = Vec::new();
    // TMPDIR may be a directory of few processes.
    let temporary = std::env::var_os("TMPDIR").map(PathBuf::from);
    for base in bases() {
        let (Base::Given(path) | Base::Own(path)) = &base;
        if matches!(&base, Base::Given(given) if Some(given) == temporary.as_ref()) {
            continue;
        }
        match base.get() {
            Ok(base) => return Ok(base.to_owned()),
            Err(error) => refused.push(format!("{}: {error}", path.display())),
        }
    }
    bail!("no directory for a socket that is this user's alone: {}", refused.join("; "));
}

/// Makes a directory for a Baton that ends with this process. An existing one belongs to another: an earlier program
/// with the same process id.
///
/// # Errors
/// If there is no place for it that is this user's alone; for each one that was looked at, why it is not.
pub fn make() -> Result<PathBuf> {
    let mut refused = Vec::new();
    for base in bases() {
        match base.get() {
            Ok(base) => return make_in(base),
            Err(error) => {
                let (Base::Given(path) | Base::Own(path)) = base;
                refused.push(format!("{}: {error}", path.display()));
            }
        }
    }
    bail!("no directory for the Baton's socket that is this user's alone (set TMPDIR to one): {}", refused.join("; "));
}

fn make_in(base: &Path) -> Result<PathBuf> {
    for attempt in 0..TRIES {
        let again = if attempt == 0 { String::new() } else { format!("-{attempt}") };
        let directory = base.join(format!("baton-run-{}{again}", std::process::id()));
        match DirBuilder::new().mode(MODE).create(&directory) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            made => {
                made.with_context(|| format!("making {}", directory.display()))?;
                // The mode is set explicitly, since the umask may have removed bits.
                std::fs::set_permissions(&directory, Permissions::from_mode(MODE))?;
                return Ok(directory);
            }
        }
    }
    bail!("{} has {TRIES} directories of earlier programs with this process id", base.display());
}
