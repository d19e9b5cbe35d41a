//! What commands refuse, what they leave behind when they fail or are ended, and how they end.

use crate::library::finish;
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use baton_linux::process;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::chown;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// The command, without what the environment says about Baton.
fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    for variable in ["BATON_SOCKET", "BATON_LOG", "BATON_RUN", "BATON_FILTER_SOCKET", "BATON_FILTER_KEY"] {
        command.env_remove(variable);
    }
    command.args(arguments);
    command
}

fn ran(command: &mut Command) -> Output {
    command.output().expect("baton")
}

/// An empty variable counts as one that is not set: the level is the default, and a path is missing. What is no level
/// is refused.
#[test]
fn an_empty_variable_is_none() {
    let print = ["run", "--print-config"];
    let empty = ran(baton(&print).env("BATON_LOG", "").env("BATON_RUN", ""));
    assert!(empty.status.success() && empty.stderr.is_empty(), "{}", text(&empty.stderr));
    let wrong = ran(baton(&print).env("BATON_LOG", "loud"));
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("write error, warning, info or debug"), "{}", text(&wrong.stderr));
    let filter = ["nic", "filter", "list", "--key", "/dev/null"];
    let nowhere = ran(baton(&filter).env("BATON_FILTER_SOCKET", ""));
    assert_eq!(nowhere.status.code(), Some(2));
    assert!(text(&nowhere.stderr).contains("--socket <PATH>"), "{}", text(&nowhere.stderr));
}

/// A Baton that a limit keeps from starting: the command says what its processes have said, which is the cause, and
/// what to type; and the directories that were made for it are gone.
#[test]
fn a_baton_that_does_not_start_says_why() {
    let scratch = Scratch::new("limits");
    let missing = scratch.file("missing/too/agent.sock");
    // Root without CAP_SYS_RESOURCE cannot lift a limit, as other users cannot.
    let cases = [
        ("ulimit -v 90000", "Cannot allocate memory", "`ulimit -v unlimited`"),
        ("ulimit -f 0", "File too large", "`ulimit -f unlimited`"),
    ];
    for (limit, cause, remedy) in cases {
        for words in [&["run", "--", "true"][..], &["up", "--socket", missing.as_str()]] {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("{limit}; exec setpriv --bounding-set=-sys_resource \"$@\""), "sh"]);
            command.arg(env!("CARGO_BIN_EXE_baton")).args(words).env("TMPDIR", &scratch.0);
            command.env_remove("BATON_SOCKET").env_remove("BATON_LOG");
            let ran = finish(&Namespace::new().expect("a namespace"), command);
            let said = text(&ran.stderr);
            assert_eq!(ran.status.code(), Some(2), "{limit}: {said}");
            for part in ["Baton did not start", "baton keeper: error: NIC memory: ", cause, remedy] {
                assert!(said.contains(part), "{limit}: {part} is not in {said}");
            }
            let left: Vec<_> = std::fs::read_dir(&scratch.0).expect("a directory").flatten().map(|entry| entry.path()).collect();
            assert!(left.is_empty(), "{words:?}: {left:?} is left");
        }
    }
}

/// Where no Baton runs, every command that needs one says so on standard error, and its status is 2; what is to be JSON
/// is an empty list.
#[test]
fn a_command_fails_where_no_baton_runs() {
    for words in [
        &["ls"][..],
        &["ls", "-s"],
        &["ls", "--json"],
        &["stats"],
        &["stats", "--json"],
        &["nic", "show"],
        &["move", "nic", "all"],
    ] {
        // No process of others is seen.
        let mut command = Command::new("unshare");
        command.args(["--fork", "--pid", "--mount-proc", env!("CARGO_BIN_EXE_baton")]).args(words);
        command.env_remove("BATON_SOCKET").env_remove("BATON_LOG");
        let ran = ran(&mut command);
        assert_eq!(ran.status.code(), Some(2), "{words:?}: {}", text(&ran.stderr));
        assert!(text(&ran.stderr).starts_with("baton: no Baton runs here; "), "{words:?}: {}", text(&ran.stderr));
        let printed = if words[words.len() - 1] == "--json" { "[]\n" } else { "" };
        assert_eq!(text(&ran.stdout), printed, "{words:?}");
    }
}

/// What is in a directory.
fn names_in(place: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(place).expect("a directory").flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A signal ends a command that has two hosts, and nothing of it is left: no directory, and no empty file for its
/// result.
#[test]
fn a_command_that_a_signal_ends_leaves_nothing() {
    let scratch = Scratch::new("ended");
    let (temporary, output) = (scratch.0.join("temporary"), scratch.0.join("output"));
    [&temporary, &output].into_iter().for_each(|path| std::fs::create_dir(path).expect("a directory"));
    let at = output.to_str().expect("a path");
    for (words, line) in [
        (&["hosts", "--", "sh", "-c", "echo ready; exec sleep 600"][..], "ready"),
        (&["demo", "--output", at][..], "HTTP connections to each"),
    ] {
        let mut command = baton(words);
        command.env("TMPDIR", &temporary).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("baton");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines().map_while(Result::ok);
        assert!(lines.any(|said| said.contains(line)), "{words:?} has not begun");
        assert!(!names_in(&temporary).is_empty(), "{words:?} has no directory");
        process::signal(child.id(), libc::SIGTERM).expect("it lives");
        assert_eq!(child.wait().expect("its end").signal(), Some(libc::SIGTERM), "{words:?}");
        for place in [&temporary, &output] {
            assert_eq!(names_in(place), [] as [&str; 0], "{words:?} in {}", place.display());
        }
    }
}

/// `doctor --cleanup` removes what processes have left that were killed, and nothing of those that live, of other
/// users, or behind a link.
#[test]
fn what_killed_commands_have_left_is_removed() {
    let scratch = Scratch::new("left");
    let mut child = baton(&["hosts", "--", "sh", "-c", "echo ready; exec sleep 600"]);
    child.env("TMPDIR", &scratch.0).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = child.spawn().expect("baton");
    let mut ready = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut ready).expect("a line");
    assert_eq!(ready, "ready\n");
    let dead = child.id();
    let directory = |name: String| {
        let path = scratch.0.join(name);
        std::fs::create_dir(&path).expect("a directory");
        path
    };
    directory(format!("baton-files-{}-0", std::process::id()));
    chown(directory(format!("baton-files-{dead}-1")), Some(65534), None).expect("root's right");
    std::os::unix::fs::symlink(directory("else".into()), scratch.0.join(format!("baton-files-{dead}-2"))).expect("a link");
    let cleaned = || {
        let mut doctor = baton(&["doctor", "--cleanup"]);
        doctor.env("TMPDIR", &scratch.0);
        text(&finish(&Namespace::new().expect("a namespace"), doctor).stderr)
    };
    let kept = names_in(&scratch.0);
    cleaned();
    assert_eq!(names_in(&scratch.0), kept, "it lives");
    child.kill().expect("it lives");
    child.wait().expect("its end");
    let said = cleaned();
    let bed = kept.iter().find(|name| name.starts_with("baton-bed-")).expect("its directory");
    assert!(said.contains(&format!("removed {}", scratch.file(bed))), "{said}");
    let left: Vec<String> = kept.iter().filter(|name| *name != bed).cloned().collect();
    assert_eq!(names_in(&scratch.0), left, "{said}");
}

/// A file for a result that cannot be written is an error before anything is measured.
#[test]
fn a_result_without_a_place_is_refused_at_once() {
    let scratch = Scratch::new("results");
    let missing = scratch.file("missing/result");
    for words in [
        &["bench", "lro", "--plot"][..],
        &["bench", "all", "--page"],
        &["ttcp", "--plot"],
        &["plan", "--save"],
        &["lab", "rmpp", "--output"],
        &["lab", "all", "--output"],
    ] {
        let ran = ran(baton(words).arg(&missing));
        assert_eq!(ran.status.code(), Some(2), "{words:?}: {}", text(&ran.stderr));
        let said = text(&ran.stderr);
        assert!(said.starts_with(&format!("baton: writing {missing}")) && said.contains("No such file"), "{words:?}: {said}");
    }
}

/// A number that makes no sense is refused, with those that do.
#[test]
fn a_number_out_of_range_is_refused() {
    for (words, says) in [
        (&["bench", "lro", "--rounds", "0"][..], "from 1 to 1000"),
        (&["bench", "lro", "--verify", "0"][..], "from 0.001 to 1000"),
        (&["bench", "rpc", "--rounds", "0"][..], "from 1 to 1000"),
        (&["bench", "rpc", "--seconds", "nan"][..], "from 0.1 to 3600"),
        (&["bench", "tail", "--connections", "8,0"][..], "from 1 to 4000"),
        (&["soak", "--moves", "0"][..], "1.."),
        (&["soak", "--delay", "nan"][..], "from 0 to 10000"),
        (&["rmpp", "pingpong", "--rate", "18446744073709551615"][..], "..=1000000"),
        (&["lab", "equations", "--received", "2"][..], "from 0.001 to 1"),
        (&["ntttcp", "receive", "--seconds", "0"][..], "from 0.1 to 86400"),
        (&["ntttcp", "receive", "--warming=-1"][..], "from 0 to 86400"),
        (&["plan", "--check", "--seconds", "nan"][..], "from 0.1 to 3600"),
        (&["ls", "--watch=0"][..], "from 0.1 to 86400"),
        (&["run", "--spin", "18446744073709551615", "--", "true"][..], "..=60000000"),
        (&["up", "--namespaces", "0"][..], "from 1 to 65536"),
        (&["doctor", "--port", "0"][..], "1..=65535"),
    ] {
        let ran = ran(&mut baton(words));
        assert_eq!(ran.status.code(), Some(2), "{words:?}: {}", text(&ran.stderr));
        assert!(text(&ran.stderr).contains(says), "{words:?}: {}", text(&ran.stderr));
    }
}
