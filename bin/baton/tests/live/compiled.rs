//! C programs of these tests. Many tests run the same ones: in a run of the tests each is compiled once.

use crate::scratch::{Scratch, text};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Where they are, by the words of their compilation. Whoever comes while another thread compiles one waits for it.
static COMPILED: Mutex<BTreeMap<String, Arc<OnceLock<PathBuf>>>> = Mutex::new(BTreeMap::new());

/// Compiles a C program.
pub fn compile(name: &str, scratch: &Scratch) -> PathBuf {
    let options = ["-O2", "-Wall", "-Wextra", "-Werror", "-std=gnu11", "-pthread"];
    build(scratch, "cc", name, &format!("{name}.c"), &options)
}

/// The same with this compiler, from this source and with these options.
pub fn build(scratch: &Scratch, compiler: &str, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let key = [&[compiler, source][..], options].concat().join(" ");
    let known = COMPILED.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default().clone();
    let kept = known.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("c");
        std::fs::create_dir_all(&directory).expect("a directory");
        let kept = directory.join(key.replace(['/', ' '], "_"));
        // Another run of the tests may use the file meanwhile.
        let fresh = directory.join(format!("{}-{name}", std::process::id()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source);
        let built = Command::new(compiler).arg("-o").arg(&fresh).arg(source).args(options).output();
        let built = built.expect("a C compiler (scripts/dependencies tests installs gcc and musl-tools)");
        assert!(built.status.success(), "{key}: {}", text(&built.stderr));
        std::fs::rename(&fresh, &kept).expect("the program");
        kept
    });
    let program = scratch.0.join(name);
    // Not by this process: a child that another test forks meanwhile would have the copy open for writing, too, and it
    // could not be started.
    let copied = Command::new("cp").arg(kept).arg(&program).status();
    assert!(copied.expect("cp").success(), "{name}");
    program
}
