//! `baton enable` and `baton disable`: a systemd unit whose program is started by `baton run`.

mod text;

use crate::run::{self, RunArguments};
use anyhow::{Context, Result, bail};
use baton_linux::executable::{self, Start};
use clap::{Args, Command as Line};
use std::ffi::{CString, OsStr};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const ENABLE_EXAMPLES: &str = "Examples:
  baton enable nginx
  baton enable nginx.service --restart
  baton enable --dry-run redis-server
  baton enable nginx -- --rule accepted,local-port=80 --rule never
  baton enable getty@tty1.service

Writes /etc/systemd/system/UNIT.d/50-baton.conf, in which every ExecStart= of the unit begins with `baton run`. The unit is restarted by
you, or with --restart. While no Baton is up its program starts without one. Units are refused that have no ExecStart=, have a root
directory of their own, or start a program that `baton run` cannot serve; the reason is said.";

pub const DISABLE_EXAMPLES: &str = "Examples:
  baton disable nginx
  baton disable nginx --restart
  baton disable --all

A program that runs goes on as it is until its unit is restarted.";

/// Where an administrator's units and drop-ins are.
const UNITS: &str = "/etc/systemd/system";
/// The drop-in's name. What others write comes before or after it by name.
const NAME: &str = "50-baton.conf";
/// Where systemd looks for a program without a path.
const PATHS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Args)]
pub struct EnableArguments {
    /// The unit; `.service` can be left out.
    #[arg(value_parser = service)]
    unit: String,
    /// Print the drop-in instead of writing it.
    #[arg(long)]
    dry_run: bool,
    /// Restart the unit, if it runs.
    #[arg(long, conflicts_with = "dry_run")]
    restart: bool,
    /// Options of `baton run` for its program.
    #[arg(last = true, value_name = "OPTIONS")]
    options: Vec<String>,
}

#[derive(Args)]
pub struct DisableArguments {
    /// The units; `.service` can be left out.
    #[arg(value_parser = service, required_unless_present = "all")]
    units: Vec<String>,
    /// All units that `baton enable` has changed.
    #[arg(long, conflicts_with = "units")]
    all: bool,
    /// Restart the units that run.
    #[arg(long)]
    restart: bool,
}

/// The full name of a service.
fn service(text: &str) -> Result<String, String> {
    let is_allowed = |character: char| character.is_ascii_alphanumeric() || ":-_.\\@".contains(character);
    if text.is_empty() || text.starts_with(['-', '.']) || !text.chars().all(is_allowed) {
        return Err("this is no name of a unit: write for example nginx.service".into());
    }
    let kinds = ["socket", "target", "timer", "mount", "automount", "swap", "path", "slice", "scope", "device"];
    match text.rsplit_once('.') {
        Some((_, "service")) => Ok(text.into()),
        Some((name, kind)) if kinds.contains(&kind) => {
            Err(format!("a {kind} starts no program: give the service that it belongs to ({name}.service?)"))
        }
        _ => Ok(format!("{text}.service")),
    }
}

fn drop_in_of(unit: &str) -> PathBuf {
    Path::new(UNITS).join(format!("{unit}.d")).join(NAME)
}

/// The unit's own name, if this is another one for it. A template has one name.
fn own_name(unit: &str) -> String {
    let own = systemctl(&["show", "--property=Id", "--value", "--", unit]).unwrap_or_default();
    if unit.contains("@.") || !own.trim().ends_with(".service") { unit.to_owned() } else { own.trim().to_owned() }
}

/// Runs systemctl, and returns what it prints.
fn systemctl(arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("systemctl");
    let done = command.args(arguments).env("SYSTEMD_PAGER", "").stdin(Stdio::null()).output();
    let done = done.context("systemctl (this command is for hosts with systemd)")?;
    if !done.status.success() {
        bail!("systemctl {}: {}", arguments.join(" "), String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The files of a unit in the order in which systemd reads them, without Baton's own.
fn files_of(unit: &str) -> Result<Vec<PathBuf>> {
    let shown = systemctl(&["cat", "--no-pager", "--", unit])?;
    let is_one = |path: &Path| {
        let in_drop_ins = path.parent().and_then(Path::extension).is_some_and(|kind| kind == "d");
        path.is_absolute() && (in_drop_ins || path.extension().is_some_and(|kind| kind == "service")) && path.exists()
    };
    // Each file's path stands before its text, as a comment.
    let paths = shown.lines().filter_map(|line| line.strip_prefix("# ")).map(PathBuf::from).filter(|path| is_one(path));
    let own = drop_in_of(unit);
    let files: Vec<PathBuf> = paths.filter(|path| *path != own).collect();
    if files.is_empty() {
        bail!("{unit} has no file (see `systemctl cat {unit}`)");
    }
    Ok(files)
}

/// The text of the drop-in, and what to be careful about.
fn plan(unit: &str, options: &[String]) -> Result<(String, Vec<String>)> {
    // They are checked now, not when the unit starts.
    let line = RunArguments::augment_args(Line::new("baton run").no_binary_name(true));
    line.try_get_matches_from(options)
        .map_err(|error| anyhow::anyhow!("of the options after `--`: {}", error.to_string().trim()))?;
    let mut all = Vec::new();
    for path in files_of(unit)? {
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        let read = text::assignments(&text);
        let is_later = path.parent().and_then(Path::extension).is_some_and(|kind| kind == "d")
            && path.file_name().is_some_and(|name| name > OsStr::new(NAME));
        if is_later && read.iter().any(|one| one.section == "Service" && one.key == "ExecStart") {
            bail!("{} is read after {NAME}, and sets ExecStart=: rename it so that it comes before", path.display());
        }
        all.extend(read);
    }
    if let Some(why) = text::refusal(&all) {
        bail!("{unit} cannot be run by Baton: {why}");
    }
    let mut commands = Vec::new();
    for value in text::values(&all, "ExecStart") {
        commands.extend(text::commands(value)?);
    }
    if commands.is_empty() {
        bail!("{unit} has no ExecStart=: there is no program that Baton could run");
    }
    for command in &commands {
        if command.is_baton() {
            bail!("{unit} starts Baton itself, or its program by `baton run`, by a file of its own");
        }
        if let Some(why) = command.program().and_then(|program| unserved(&program)) {
            bail!("{unit} cannot be run by Baton: {why}");
        }
    }
    let baton = std::env::current_exe().context("finding this program's own path")?;
    let baton = baton.to_str().context("this program's own path is no UTF-8")?;
    let library = run::find_library()?;
    let library = library.parent().and_then(Path::to_str).context("the library's path is no UTF-8")?;
    Ok((text::drop_in(unit, &all, &commands, baton, library, options), text::cautions(&all)))
}

/// Why a program runs natively under `baton run`; None if it is served, or if that is unknown.
fn unserved(program: &str) -> Option<String> {
    let name = CString::new(program).ok()?;
    let found = executable::search(&name, Some(PATHS.as_bytes()))?;
    match executable::of_path(None, found.as_c_str()).1 {
        Start::Static => Some(format!("{program} is statically linked (`baton attach` serves such a program)")),
        Start::Go => {
            Some(format!("{program} is a Go program, which makes its system calls past the C library (`baton attach` serves it)"))
        }
        Start::Musl(linker) => {
            let linker = OsStr::from_bytes(linker.as_bytes()).display().to_string();
            Some(format!("{program} is linked with musl ({linker}), and Baton's library with glibc"))
        }
        Start::Glibc | Start::Sanitized(_) | Start::Unknown => None,
    }
}

/// Writes a file as a whole, or not at all: with the first half of its drop-in a unit would have no program.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    // systemd reads what ends in .conf.
    let next = path.with_extension("new");
    let written = fs::write(&next, text).and_then(|()| fs::rename(&next, path));
    if written.is_err() {
        let _ = fs::remove_file(&next);
    }
    written
}

/// An error of the system's, with what failed, and what to do where a right is missing.
fn explained(error: io::Error, doing: &str, path: &Path) -> anyhow::Error {
    let hint = if error.kind() == ErrorKind::PermissionDenied { " (it needs root)" } else { "" };
    anyhow::Error::new(error).context(format!("{doing} {}{hint}", path.display()))
}

/// `baton enable`.
///
/// # Errors
/// Why the unit cannot be run by Baton, or what did not work.
pub fn enable(arguments: &EnableArguments) -> Result<()> {
    let unit = &own_name(&arguments.unit);
    let (text, cautions) = plan(unit, &arguments.options)?;
    for caution in cautions {
        eprintln!("baton: {unit}: {caution}");
    }
    let path = drop_in_of(unit);
    if arguments.dry_run {
        print!("{text}");
        return Ok(());
    }
    let directory = path.parent().unwrap_or(Path::new(UNITS));
    let written = fs::create_dir_all(directory).and_then(|()| write_whole(&path, &text));
    if written.is_err() {
        // Others may have drop-ins there.
        let _ = fs::remove_dir(directory);
    }
    written.map_err(|error| explained(error, "writing", &path))?;
    println!("wrote {}", path.display());
    applied(std::slice::from_ref(unit), arguments.restart)
}

/// `baton disable`.
///
/// # Errors
/// What did not work.
pub fn disable(arguments: &DisableArguments) -> Result<()> {
    let units = if arguments.all { enabled()? } else { arguments.units.iter().map(|unit| own_name(unit)).collect() };
    for unit in &units {
        let path = drop_in_of(unit);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!("{unit} is not enabled: there is no {}", path.display()),
            removed => removed.map_err(|error| explained(error, "removing", &path))?,
        }
        // Others may have drop-ins there.
        let _ = path.parent().map(fs::remove_dir);
        println!("removed {}", path.display());
    }
    if units.is_empty() {
        println!("no unit is enabled");
        return Ok(());
    }
    applied(&units, arguments.restart)
}

/// The units that have the drop-in.
fn enabled() -> Result<Vec<String>> {
    let entries = match fs::read_dir(UNITS) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("reading {UNITS}"))?,
    };
    let mut units: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().join(NAME).exists())
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".d").map(str::to_owned))
        .collect();
    units.sort();
    Ok(units)
}

/// Makes systemd read its files again, and restarts units, or says how.
fn applied(units: &[String], restart: bool) -> Result<()> {
    // In an image, or while packages are removed there, no systemd runs.
    if !Path::new("/run/systemd/system").exists() {
        return Ok(());
    }
    systemctl(&["daemon-reload"])?;
    let running: Vec<&str> =
        units.iter().map(String::as_str).filter(|unit| systemctl(&["is-active", "--quiet", "--", unit]).is_ok()).collect();
    if restart && !running.is_empty() {
        systemctl(&[&["restart", "--"], &running[..]].concat())?;
        println!("restarted {}", running.join(" "));
    } else if !running.is_empty() {
        println!("it takes effect with: systemctl restart {}", running.join(" "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_units_are_checked() {
        assert_eq!(service("nginx"), Ok("nginx.service".into()));
        assert_eq!(service("nginx.service"), Ok("nginx.service".into()));
        assert_eq!(service("postgresql@15-main"), Ok("postgresql@15-main.service".into()));
        assert_eq!(service("my.app"), Ok("my.app.service".into()));
        assert!(service("ssh.socket").expect_err("no service").contains("ssh.service"));
        for wrong in ["", "../x", "-a", "a b", "a/b"] {
            assert!(service(wrong).is_err(), "{wrong}");
        }
    }

    /// A file where a directory would have to be stands for a full disk here: the second step fails.
    #[test]
    fn a_drop_in_is_written_whole_or_not_at_all() {
        let folder = std::env::temp_dir().join(format!("baton-drop-in-{}", std::process::id()));
        let path = folder.join(NAME);
        fs::create_dir_all(&path).expect("a directory in its place");
        write_whole(&path, "[Service]\n").expect_err("a directory is there");
        assert_eq!(fs::read_dir(&folder).expect("a directory").count(), 1, "a part is left");
        fs::remove_dir(&path).expect("its removal");
        for text in ["[Service]\n", "[Unit]\n"] {
            write_whole(&path, text).expect("written");
            assert_eq!(fs::read_to_string(&path).expect("a text"), text);
        }
        assert_eq!(fs::read_dir(&folder).expect("a directory").count(), 1);
        fs::remove_dir_all(&folder).expect("its removal");
        let error = explained(ErrorKind::PermissionDenied.into(), "writing", &path);
        assert!(format!("{error:#}").contains(&format!("writing {} (it needs root): ", path.display())), "{error:#}");
        let error = explained(io::Error::from_raw_os_error(28), "writing", &path);
        assert!(!format!("{error:#}").contains("root"), "{error:#}");
    }

    #[test]
    fn static_programs_are_refused() {
        assert_eq!(unserved("/bin/sh"), None);
        assert_eq!(unserved("/nowhere/at/all"), None);
    }
}
