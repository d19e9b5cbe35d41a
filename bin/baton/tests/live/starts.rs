//! Programs that the preloaded library cannot be in, or that want to be before it, in C (`c/starts.c`): linked with
//! musl, statically linked, with AddressSanitizer, with a library of their own in LD_PRELOAD. Each succeeds natively.

use crate::attach::listed;
use crate::common::wait_until;
use crate::compiled::{self, compile};
use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Every way in which `starts exec` becomes another program.
const BECOMES: [&str; 11] = [
    "execve",
    "execv",
    "execvp",
    "execvpe",
    "fexecve",
    "execl",
    "execlp",
    "execle",
    "execveat",
    "execveat of the C library",
    "syscall",
];

/// Every way in which it starts another one.
const STARTS: [&str; 4] = ["posix_spawn", "posix_spawnp", "vfork", "fork twice"];

/// Every way in which a shell starts it.
const SHELLS: [&str; 2] = ["system", "popen"];

fn build(scratch: &Scratch, compiler: &str, name: &str, source: &str, options: &[&str]) -> String {
    let options = [&["-O1", "-Wall", "-Wextra", "-std=gnu11"][..], options].concat();
    compiled::build(scratch, compiler, name, source, &options).to_string_lossy().into_owned()
}

fn glibc(scratch: &Scratch) -> String {
    build(scratch, "cc", "glibc", "starts.c", &[])
}

fn musl(scratch: &Scratch) -> String {
    build(scratch, "musl-gcc", "musl", "starts.c", &[])
}

/// Where a command runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Natively,
    Run,
}

fn run_with(scratch: &Scratch, how: How, words: &[&str], environment: &[(&str, &str)]) -> Output {
    let namespace = Namespace::new().expect("a namespace");
    let mut command = if how == How::Natively {
        set_up_loopback(&namespace);
        Command::new(words[0])
    } else {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--eager", "--rule", "established", "--log", &scratch.file("log"), "--", words[0]]);
        command
    };
    command.args(&words[1..]).envs(environment.iter().copied());
    command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    finish(&namespace, command)
}

/// Runs a command that succeeds. Returns what it has written to standard error.
fn succeeds(scratch: &Scratch, how: How, words: &[&str]) -> String {
    let ran = run_with(scratch, how, words, &[]);
    assert!(ran.status.success(), "{words:?}: {} {}{}", ran.status, text(&ran.stdout), text(&ran.stderr));
    text(&ran.stderr)
}

fn without(name: &str, why: &str) -> String {
    format!("baton: {name} runs without Baton: {why}\n")
}

const MUSL: &str = "it is linked with musl (/lib/ld-musl-x86_64.so.1), and the library that it would need is one for glibc";
const STATIC: &str = "it is statically linked, and no library can be loaded into it; `baton attach` moves its connections";

const GO: &str = "it is a Go program, which makes its system calls past the C library; `baton attach` moves its connections";

/// A Go program's own calls pass the library by, though it may be loaded: `baton run` says so, and so does the library
/// of a program that starts one. What C code in it connects is served.
#[test]
fn a_go_program_is_said_to_run_natively() {
    let scratch = Scratch::new("starts");
    let (glibc, go) = (glibc(&scratch), build(&scratch, "cc", "go", "starts.c", &["-DGO"]));
    assert_eq!(succeeds(&scratch, How::Natively, &[&go, "serve"]), "");
    assert_eq!(succeeds(&scratch, How::Run, &[&go, "serve"]), without(&go, GO));
    assert_eq!(succeeds(&scratch, How::Run, &[&glibc, "exec", "execv", &go, "serve"]), without(&go, GO));
    assert_eq!(succeeds(&scratch, How::Run, &[&go, "serve", "moved"]), without(&go, GO));
}

/// A program that is linked with musl, or statically, runs natively, and `baton run` says so.
#[test]
fn programs_without_glibc_run_natively() {
    let scratch = Scratch::new("starts");
    let fixed = build(&scratch, "cc", "static", "starts.c", &["-static"]);
    let movable = build(&scratch, "cc", "static-pie", "starts.c", &["-static-pie"]);
    let script = scratch.file("script");
    let musl = musl(&scratch);
    std::fs::write(&script, format!("#! {musl} serve\n")).expect("a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a script");
    let cases = [
        (&[&musl[..], "serve"][..], without(&musl, MUSL)),
        (&[&fixed, "serve"], without(&fixed, STATIC)),
        (&[&movable, "serve"], without(&movable, STATIC)),
        (&[&script[..]], without(&musl, MUSL)),
    ];
    for (words, said) in cases {
        assert_eq!(succeeds(&scratch, How::Natively, words), "", "{words:?}");
        assert_eq!(succeeds(&scratch, How::Run, words), said, "{words:?}");
    }
}

/// What cannot be served holds nothing of Baton's: as many descriptors and threads as natively.
#[test]
fn what_runs_natively_holds_nothing() {
    let scratch = Scratch::new("starts");
    let (glibc, musl) = (glibc(&scratch), musl(&scratch));
    let fixed = build(&scratch, "cc", "static", "starts.c", &["-static"]);
    // One that becomes another user when it is executed: no library is loaded into it that its starter names.
    let other = build(&scratch, "cc", "other", "starts.c", &[]);
    std::os::unix::fs::chown(&other, Some(65_534), None).expect("its owner");
    std::fs::set_permissions(&other, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).expect("its mode");
    let filtered = compile("sandbox", &scratch).to_string_lossy().into_owned();
    let holds = |how, words: &[&str]| {
        let ran = run_with(&scratch, how, words, &[]);
        assert!(ran.status.success(), "{words:?}: {} {}{}", ran.status, text(&ran.stdout), text(&ran.stderr));
        text(&ran.stdout)
    };
    let cases = [
        &[&musl[..], "held"][..],
        &[&fixed, "held"],
        &[&other, "held"],
        &[&filtered, "under", "no eventfd", &glibc, "held"],
        &[&glibc, "held", "ring"],
    ];
    for words in cases {
        assert_eq!(holds(How::Run, words), holds(How::Natively, words), "{words:?}");
    }
    let served = [&glibc[..], "held"];
    assert_ne!(holds(How::Run, &served), holds(How::Natively, &served), "a session's descriptors are seen");
}

/// A soft limit on the size of files (`ulimit -S -f 0`), of which shared memory is one for the kernel, and standard
/// error may be one: neither Baton nor a program is ended by it, though both have something to say.
#[test]
fn a_limit_on_files_ends_nothing() {
    let scratch = Scratch::new("starts");
    let (glibc, musl, said) = (glibc(&scratch), musl(&scratch), scratch.file("said"));
    let cases = [&[&glibc[..], "serve", "moved"][..], &[&musl, "serve"], &[&glibc, "exec", "execv", &musl, "serve"]];
    for words in cases {
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -S -f 0; exec \"$@\" 2>\"$SAID\"", "sh", env!("CARGO_BIN_EXE_baton"), "run"]);
        command.args(["--eager", "--rule", "established", "--"]).args(words);
        command.env("SAID", &said).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
        let ran = finish(&Namespace::new().expect("a namespace"), command);
        assert!(ran.status.success(), "{words:?}: {} {}", ran.status, text(&ran.stderr));
        assert_eq!(std::fs::metadata(&said).expect("standard error").len(), 0, "{words:?}");
    }
}

/// A program under Baton starts one that is linked with musl, whichever way: it runs natively, which is said once.
#[test]
fn programs_start_programs_of_musl() {
    let scratch = Scratch::new("starts");
    let (glibc, musl) = (glibc(&scratch), musl(&scratch));
    for way in BECOMES.iter().chain(&STARTS) {
        let words = [&glibc[..], "exec", way, &musl, "serve"];
        assert_eq!(succeeds(&scratch, How::Natively, &words), "", "{way}");
        let name = if *way == "fexecve" { "a program" } else { &musl };
        assert_eq!(succeeds(&scratch, How::Run, &words), without(name, MUSL), "{way}");
    }
    // A shell is started, which starts the program.
    for way in SHELLS {
        assert_eq!(succeeds(&scratch, How::Run, &[&glibc, "exec", way, &musl, "serve"]), without(&musl, MUSL), "{way}");
    }
}

/// Starts a program again and again, each time with something else as descriptor 2. All that but the last, which is
/// this program's own, stays empty.
const ELSEWHERE: &str = "
import os, socket, sys, tempfile
def start(prepare):
    child = os.fork()
    if child == 0:
        prepare()
        os.execv(sys.argv[1], sys.argv[1:])
    assert os.waitpid(child, 0)[1] == 0

listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server = listener.accept()[0]
start(lambda: os.dup2(server.fileno(), 2))
server.close()
assert client.recv(1000) == b'', 'to the peer'

kept = tempfile.NamedTemporaryFile()
def reopen():
    os.close(2)
    assert os.open(kept.name, os.O_WRONLY) == 2
    os.set_inheritable(2, True)
start(lambda: os.dup2(kept.fileno(), 2))
start(reopen)
assert os.path.getsize(kept.name) == 0, 'into the file'

reader, writer = os.pipe()
start(lambda: os.dup2(writer, 2))
os.close(writer)
assert os.read(reader, 1000) == b'', 'into the pipe'

start(lambda: None)
";

/// That a program runs natively is written to what `baton run` had as its standard error, and to nothing else that the
/// program has as descriptor 2: a connection, a file or a pipe.
#[test]
fn nothing_is_said_into_a_programs_own_descriptors() {
    let scratch = Scratch::new("starts");
    let fixed = build(&scratch, "cc", "static", "starts.c", &["-static"]);
    let words = ["python3", "-W", "ignore", "-c", ELSEWHERE, &fixed, "serve"];
    assert_eq!(succeeds(&scratch, How::Natively, &words), "");
    assert_eq!(succeeds(&scratch, How::Run, &words), without(&fixed, STATIC));
}

/// Becomes a program in another root directory.
const ROOTED: &str = "
import os, sys
os.chroot(sys.argv[1])
os.chdir('/')
os.execv(sys.argv[2], sys.argv[2:])
";

/// In another root directory, where the library is not, the dynamic linker says nothing of it.
#[test]
fn a_program_in_another_root_misses_no_library() {
    let scratch = Scratch::new("starts");
    let (glibc, root) = (glibc(&scratch), scratch.file("root"));
    let needs = Command::new("ldd").arg(&glibc).output().expect("ldd");
    let needs = text(&needs.stdout);
    for path in needs.split_whitespace().filter(|word| word.starts_with('/')).chain([&glibc[..]]) {
        let copy = format!("{root}{path}");
        std::fs::create_dir_all(Path::new(&copy).parent().expect("a directory")).expect("a directory");
        std::fs::copy(path, &copy).expect("a copy");
    }
    for how in [How::Natively, How::Run] {
        assert_eq!(succeeds(&scratch, how, &["python3", "-c", ROOTED, &root, &glibc, "serve"]), "");
    }
}

/// A program that is linked with glibc is served, also if one that is not has started it.
#[test]
fn programs_of_musl_start_programs_of_glibc() {
    let scratch = Scratch::new("starts");
    let (glibc, musl) = (glibc(&scratch), musl(&scratch));
    for way in ["execve", "execvp", "posix_spawn", "vfork", "system"] {
        assert_eq!(succeeds(&scratch, How::Natively, &[&musl, "exec", way, &glibc, "serve"]), "", "{way}");
        let said = succeeds(&scratch, How::Run, &[&musl, "exec", way, &glibc, "serve", "moved"]);
        assert_eq!(said, without(&musl, MUSL), "{way}");
    }
}

/// A program with AddressSanitizer is served, however it is started and however that is linked.
#[test]
fn programs_with_address_sanitizer_are_served() {
    let scratch = Scratch::new("starts");
    let glibc = glibc(&scratch);
    let shared = build(&scratch, "cc", "sanitized", "starts.c", &["-fsanitize=address"]);
    let inside = build(&scratch, "cc", "sanitized-inside", "starts.c", &["-fsanitize=address", "-static-libasan"]);
    let threads = build(&scratch, "cc", "threads", "starts.c", &["-fsanitize=thread"]);
    for program in [&shared, &inside, &threads] {
        assert_eq!(succeeds(&scratch, How::Natively, &[program, "serve"]), "", "{program}");
        assert_eq!(succeeds(&scratch, How::Run, &[program, "serve", "moved"]), "", "{program}");
    }
    for way in BECOMES.iter().chain(&STARTS).chain(&SHELLS) {
        assert_eq!(succeeds(&scratch, How::Run, &[&glibc, "exec", way, &shared, "serve", "moved"]), "", "{way}");
    }
}

/// AddressSanitizer goes on to find what it is for: in a call on a connection that the NIC has, too.
#[test]
fn address_sanitizer_finds_errors_in_calls_on_the_nic() {
    let scratch = Scratch::new("starts");
    let program = build(&scratch, "cc", "sanitized", "starts.c", &["-fsanitize=address"]);
    let ran = run_with(&scratch, How::Run, &[&program, "overflow"], &[]);
    let said = text(&ran.stderr);
    assert!(!ran.status.success() && said.contains("AddressSanitizer: heap-buffer-overflow"), "{} {said}", ran.status);
}

/// What a program with AddressSanitizer starts has the environment of any other program's children.
#[test]
fn the_sanitizer_stays_out_of_other_programs() {
    let scratch = Scratch::new("starts");
    let (glibc, shared) = (glibc(&scratch), build(&scratch, "cc", "sanitized", "starts.c", &["-fsanitize=address"]));
    let environment = |program: &str| {
        let ran = run_with(&scratch, How::Run, &[program, "exec", "execve", "/usr/bin/env"], &[]);
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        let mut lines: Vec<String> = text(&ran.stdout).lines().map(str::to_owned).collect();
        lines.retain(|line| !line.starts_with("BATON_RUN=") && !line.starts_with("BATON_SOCKET="));
        lines.sort();
        lines
    };
    assert_eq!(environment(&shared), environment(&glibc));
}

/// A program's own library in LD_PRELOAD sees each of the program's calls, and no others, on the NIC, too.
#[test]
fn a_programs_own_library_sees_its_calls() {
    let scratch = Scratch::new("starts");
    let glibc = glibc(&scratch);
    let shim = build(&scratch, "cc", "shim.so", "shim.c", &["-shared", "-fPIC", "-ldl"]);
    let seen = |how, case| {
        let ran = run_with(&scratch, how, &[&glibc, "serve", case], &[("LD_PRELOAD", &shim)]);
        assert!(ran.status.success(), "{case}: {} {}{}", ran.status, text(&ran.stdout), text(&ran.stderr));
        text(&ran.stdout)
    };
    assert_eq!(seen(How::Run, "moved"), seen(How::Natively, "kernel"));
}

/// A program that is started by a link of another name: a rule may name either.
#[test]
fn a_rule_names_a_program_as_it_was_started_or_by_its_file() {
    const TALK: &str = "
import socket, sys
listener = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(listener.getsockname())
server = listener.accept()[0]
server.sendall(b'x')
print(client.recv(1).decode(), flush=True)
sys.stdin.read()
";
    let scratch = Scratch::new("starts-names");
    let which = Command::new("python3").args(["-c", "import os, sys; print(os.path.realpath(sys.executable))"]).output();
    let python = text(&which.expect("python3").stdout).trim().to_owned();
    let link = scratch.file("talker");
    std::os::unix::fs::symlink(&python, &link).expect("a link");
    let file = Path::new(&python).file_name().expect("a name").to_string_lossy().into_owned();
    for (name, expected) in [("talker", 1), (&file, 1), ("other", 0)] {
        let namespace = Namespace::new().expect("a namespace");
        let rule = format!("accepted,program={name}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args([
            "run",
            "--log",
            &scratch.file("log"),
            "--eager",
            "--rule",
            &rule,
            "--rule",
            "never",
            "--",
            &link,
            "-c",
            TALK,
        ]);
        command.env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = namespace.spawn(&mut command).expect("baton");
        let mut line = String::new();
        BufReader::new(running.stdout.as_mut().expect("its output")).read_line(&mut line).expect("a line");
        assert_eq!(line, "x\n");
        let known = || listed(&scratch).len();
        if expected > 0 {
            wait_until("the rule matches", || known() == expected);
        }
        assert_eq!(known(), expected, "{name}");
        drop(running.stdin.take());
        assert!(running.wait().expect("our child").success());
    }
}
