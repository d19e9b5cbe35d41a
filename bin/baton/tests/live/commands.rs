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
/// what to type.
#[test]
fn a_baton_that_does_not_start_says_why() {
    let scratch = Scratch::new("limits");
    // Root without CAP_SYS_RESOURCE cannot lift a limit, as other users cannot.
    let cases = [
        ("ulimit -v 90000", "Cannot allocate memory", "`ulimit -v unlimited`"),
        ("ulimit -f 0", "File too large", "`ulimit -f unlimited`"),
    ];
    for (limit, cause, remedy) in cases {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{limit}; exec setpriv --bounding-set=-sys_resource \"$@\""), "sh"]);
        command.args([env!("CARGO_BIN_EXE_baton"), "run", "--", "true"]).env("TMPDIR", &scratch.0);
        command.env_remove("BATON_SOCKET").env_remove("BATON_LOG");
        let ran = finish(&Namespace::new().expect("a namespace"), command);
        let said = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(2), "{limit}: {said}");
        for part in ["Baton did not start", "baton keeper: error: NIC memory: ", cause, remedy] {
            assert!(said.contains(part), "{limit}: {part} is not in {said}");
        }
    }
}
