//! `baton ls` with filters and figures, and `baton top` in a terminal.

use crate::common::{Scene, scene, wait_until};
use baton_bed::testbed::TestbedSettings;
use baton_protocol::program::Place;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

const BATON: &str = env!("CARGO_BIN_EXE_baton");

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ls(scene: &Scene, arguments: &[&str]) -> Output {
    let mut command = Command::new(BATON);
    command.arg("ls").arg("--socket").arg(scene.bed.socket()).args(arguments);
    command.env_remove("BATON_SOCKET").output().expect("baton ls")
}

#[test]
fn a_list_is_filtered_as_by_ss() {
    let scene = scene(TestbedSettings::default());
    let port = scene.peer.local_addr().expect("its address").port();
    let process = std::process::id();
    let peer = format!("dport = :{port}");
    let meant = ["sport = :8080", "( sport = :1 or src 10.77.0.0/24 ) and place = kernel", &peer, &format!("pid = {process}")];
    for filter in meant {
        let listed = text(&ls(&scene, &[filter]).stdout);
        assert_eq!(listed.lines().count(), 2, "{filter}: {listed}");
        assert!(listed.contains("10.77.0.1:8080"), "{filter}: {listed}");
        // As words of their own, as a shell hands them over.
        let words: Vec<&str> = filter.split(' ').collect();
        assert_eq!(text(&ls(&scene, &words).stdout).lines().count(), 2, "{filter}");
    }
    for filter in ["sport = :1", "place = nic", "not src 10.77.0.1", "program = nobody"] {
        assert_eq!(text(&ls(&scene, &[filter]).stdout).lines().count(), 1, "{filter}: only the heading");
        assert_eq!(text(&ls(&scene, &["--json", filter]).stdout), "[]\n", "{filter}");
    }
    let wrong = ls(&scene, &["sport = :http"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(text(&wrong.stderr).contains("\":http\" is not a port"), "{}", text(&wrong.stderr));
    let details = text(&ls(&scene, &["-ip"]).stdout);
    assert!(details.contains("ESTABLISHED rtt") && details.contains(&format!("/{process}")), "{details}");
    let summary = text(&ls(&scene, &["-s"]).stdout);
    assert!(summary.starts_with("0 on the NIC, 1 in the kernel, 0 moves"), "{summary}");
}

/// What a connection has carried is counted on, wherever it is.
#[test]
fn bytes_are_counted_across_moves() {
    let mut scene = scene(TestbedSettings::default());
    for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
        scene.exchange(300_000, to);
        // The last acknowledgement comes a moment later.
        wait_until("the bytes are counted", || {
            let listed: serde_json::Value = serde_json::from_slice(&ls(&scene, &["--json"]).stdout).expect("JSON");
            let detail = &listed[0]["detail"];
            let counted = ["sent", "received"].map(|key| detail[key].as_u64().expect("a number"));
            let carried = [scene.sent[0], scene.received[0]];
            // SYN and FIN have sequence numbers, too.
            let exceeds = counted.iter().zip(carried).any(|(counted, carried)| *counted > carried + 2);
            assert!(!exceeds, "{counted:?} bytes are counted of {carried:?}");
            counted.iter().zip(carried).all(|(counted, carried)| *counted >= carried)
        });
    }
}

/// What a terminal of 80 columns shows, as far as `baton top` uses one: text, moves of the cursor, erasing.
struct Screen {
    cells: Vec<Vec<char>>,
    at: (usize, usize),
    unfinished: String,
}

const ROWS: usize = 24;
const COLUMNS: usize = 80;

impl Screen {
    fn new() -> Screen {
        Screen { cells: vec![vec![' '; COLUMNS]; ROWS], at: (0, 0), unfinished: String::new() }
    }

    fn take(&mut self, written: &str) {
        let text = std::mem::take(&mut self.unfinished) + written;
        let mut rest = text.as_str();
        while let Some(letter) = rest.chars().next() {
            if letter != '\x1b' {
                self.put(letter);
                rest = &rest[letter.len_utf8()..];
                continue;
            }
            let end = rest.char_indices().skip(2).find(|(_, letter)| ('@'..='~').contains(letter));
            let Some((end, what)) = end.filter(|_| rest.starts_with("\x1b[")) else {
                self.unfinished = rest.into();
                return;
            };
            let numbers: Vec<usize> = rest[2..end].split(';').map(|number| number.parse().unwrap_or(1)).collect();
            match what {
                'H' => self.at = (numbers[0] - 1, numbers.get(1).copied().unwrap_or(1) - 1),
                'J' => self.cells = Screen::new().cells,
                _ => {}
            }
            rest = &rest[end + 1..];
        }
    }

    fn put(&mut self, letter: char) {
        let (row, column) = self.at;
        match letter {
            '\r' => self.at.1 = 0,
            '\n' => self.at.0 += 1,
            _ => {
                if let Some(cell) = self.cells.get_mut(row).and_then(|row| row.get_mut(column)) {
                    *cell = letter;
                }
                self.at.1 += 1;
            }
        }
    }

    fn text(&self) -> String {
        self.cells.iter().map(|row| row.iter().collect::<String>().trim_end().to_owned() + "\n").collect()
    }
}

/// `baton top` in a terminal.
struct Top {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<Screen>>,
    all: Arc<Mutex<String>>,
}

impl Top {
    fn start(socket: PathBuf) -> Top {
        let inside = format!("stty cols {COLUMNS} rows {ROWS}; exec \"$BATON\" top --socket \"$SOCKET\"");
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &inside, "/dev/null"]);
        command.env("BATON", BATON).env("SOCKET", socket).env("TERM", "xterm").env_remove("NO_COLOR");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script (Debian's bsdutils)");
        let (keys, mut output) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
        let (screen, all) = (Arc::new(Mutex::new(Screen::new())), Arc::new(Mutex::new(String::new())));
        let (drawn, written) = (screen.clone(), all.clone());
        std::thread::spawn(move || {
            let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                bytes.extend_from_slice(&buffer[..length]);
                // A letter may be in two reads.
                let whole = std::str::from_utf8(&bytes).map_or_else(|error| error.valid_up_to(), str::len);
                let text = text(&bytes[..whole]);
                bytes.drain(..whole);
                drawn.lock().unwrap_or_else(PoisonError::into_inner).take(&text);
                written.lock().unwrap_or_else(PoisonError::into_inner).push_str(&text);
            }
        });
        Top { child, keys, screen, all }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).text()
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("it reads");
    }

    /// Waits until a line of the list is about the connection and begins so.
    fn until_line(&self, begins: &str) {
        wait_until(&format!("a line that begins with {begins:?}"), || {
            self.text().lines().any(|line| line.starts_with(begins) && line.contains("10.77.0.1:8080"))
        });
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the screen:\n{}", self.text());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn top_shows_and_moves_a_connection() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(10_000, Place::Nic);
    let mut top = Top::start(scene.bed.socket());
    top.until_line("nic ");
    let screen = top.text();
    for part in ["baton top  1 Baton  1 connection: 1 nic, 0 kernel", "PROGRAM", "nic0", "q quit"] {
        assert!(screen.contains(part), "{part:?} is not in\n{screen}");
    }
    println!("{screen}");
    top.press("m");
    top.until_line("kernel ");
    assert_eq!(scene.settled_place(), Some(Place::Kernel));
    top.press("m");
    top.until_line("nic ");
    top.press("/place = kernel\r");
    wait_until("the filter holds", || top.text().contains("no connection matches the filter"));
    top.press("?");
    wait_until("the help is there", || top.text().contains("Filters, as of ss(8)"));
    top.press(" ");
    wait_until("it is gone", || !top.text().contains("Filters, as of ss(8)"));
    top.press("q");
    assert_eq!(top.child.wait().expect("its end").code(), Some(0));
    wait_until("the terminal is put back", || {
        let all = top.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.contains("\x1b[?1049l")
    });
}

/// The agent dies, and the next one shows what it has. A signal ends the command, and puts the terminal back.
#[test]
fn top_goes_on_with_the_next_agent() {
    let mut scene = scene(TestbedSettings::default());
    scene.exchange(10_000, Place::Nic);
    let top = Top::start(scene.bed.socket());
    top.until_line("nic ");
    let statistics = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("its counters");
    baton_linux::process::signal(statistics.agent_process, libc::SIGKILL).expect("it lives");
    wait_until("another agent is there", || {
        let of = scene.bed.tool().and_then(|mut tool| tool.statistics());
        of.is_ok_and(|of| of.agent_process != statistics.agent_process)
    });
    // Its program goes on, and with it the connection.
    scene.exchange(10_000, Place::Kernel);
    top.until_line("kernel ");
    let shell = baton_linux::process::children(top.child.id());
    let ends = shell.iter().filter(|process| baton_linux::process::signal(**process, libc::SIGTERM).is_ok()).count();
    assert_eq!(ends, 1, "{shell:?}");
    wait_until("the terminal is put back", || top.all.lock().unwrap_or_else(PoisonError::into_inner).contains("\x1b[?1049l"));
}

#[test]
fn top_needs_a_terminal() {
    let ran = Command::new(BATON).arg("top").env_remove("BATON_SOCKET").stdin(Stdio::null()).output().expect("baton");
    assert_eq!(ran.status.code(), Some(2));
    assert!(text(&ran.stderr).contains("baton ls --watch"), "{}", text(&ran.stderr));
}
