//! What commands refuse, what they leave behind when they fail or are ended, and how they end.

use crate::library::finish;
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::process::{Command, Output};

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
