use super::*;
use crate::web_mix::CLIENT_RATE;
use baton_bed::temporary::{Directory, Kind};
use std::net::TcpListener;

/// A file set of one directory, which is removed when this is dropped.
fn file_set() -> Directory {
    let set = Directory::new(Kind::Files).unwrap();
    files::make(set.path(), 1).unwrap();
    set
}

/// Serves a file set on loopback for as long as the tests run. Returns its address when it listens.
fn serve_files(set: &Directory) -> SocketAddr {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let root = set.path().to_owned();
    std::thread::spawn(move || baton_bed::small_server::run(free, &root));
    while TcpStream::connect(free).is_err() {
        std::thread::yield_now();
    }
    free
}

fn load(server: SocketAddr) -> WebLoad {
    WebLoad {
        url: format!("http://{server}").parse().unwrap(),
        connections: 8,
        threads: 2,
        seconds: 1.0,
        // Slow enough that connections of one request each leave ports for those of other tests.
        rate: 20e6,
        dynamic: 0.0,
        dynamic_path: None,
        directories: 1,
        keep: Keep::Mix,
        seed: 1,
    }
}

/// The request that a head asks for, also where it is for a program.
fn asked(head: &str) -> Option<Request> {
    let target = head.strip_prefix("GET ")?.split(' ').next()?;
    let dynamic = target.contains('?');
    let mut requests = (0..2).flat_map(files::in_directory);
    let found = requests.find(|request| target.ends_with(&format!("/{}", files::path(request))))?;
    Some(Request { dynamic, ..found })
}

/// A server whose answers are made so: what it sends, and whether the connection goes on.
type Answers = fn(&Request) -> (Vec<u8>, bool);

fn converse(mut stream: TcpStream, answers: Answers) -> std::io::Result<()> {
    let (mut received, mut buffer) = (Vec::new(), [0u8; 4096]);
    loop {
        let got = stream.read(&mut buffer)?;
        if got == 0 {
            return Ok(());
        }
        received.extend_from_slice(&buffer[..got]);
        // One request at a time.
        if !received.ends_with(b"\r\n\r\n") {
            continue;
        }
        let head = String::from_utf8_lossy(&std::mem::take(&mut received)).into_owned();
        let Some(request) = asked(&head) else {
            stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        };
        let (answer, goes_on) = answers(&request);
        stream.write_all(&answer)?;
        if !goes_on {
            return Ok(());
        }
    }
}

fn serve(answers: Answers) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || converse(stream, answers));
        }
    });
    address
}

/// An answer with its length.
fn plain(body: &[u8]) -> (Vec<u8>, bool) {
    let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
    answer.extend_from_slice(body);
    (answer, true)
}

fn found(report: &Report, what: &str) -> u64 {
    report.faults.iter().find(|fault| fault.what == what).map_or(0, |fault| fault.count)
}

#[test]
fn a_server_of_the_file_set_is_found_right() {
    let set = file_set();
    let server = serve_files(&set);
    for keep in [Keep::Mix, Keep::Always, Keep::Never] {
        let report = run(&WebLoad { keep, ..load(server) }).unwrap();
        assert!(report.is_clean() && report.wrong_bytes == 0 && report.closed_idle == 0, "{keep:?}: {report:?}");
        assert_eq!(report.classes.iter().sum::<u64>(), report.requests);
        match keep {
            Keep::Mix => assert!(report.opened < report.requests, "{report:?}"),
            Keep::Always => assert_eq!(report.opened, 8, "{report:?}"),
            Keep::Never => assert!(report.opened >= report.requests, "{report:?}"),
        }
    }
}

#[test]
fn no_client_gets_more_than_its_rate() {
    let set = file_set();
    let report = run(&WebLoad { rate: CLIENT_RATE, connections: 4, ..load(serve_files(&set)) }).unwrap();
    assert!(report.is_clean(), "{report:?}");
    // Besides the rate a client may have read one piece, which its line still carries: 2500 bytes.
    let most = 4.0 * (CLIENT_RATE + 2500.0 * 8.0 / report.load.seconds) / 1e6;
    assert!(report.megabits <= most, "{report:?}");
    assert_eq!((report.load.rate, report.load.least), (Some(CLIENT_RATE), 320e3));
    // The line carries the file of a request before the client is done with it.
    assert!(report.answer_ms.p50 > report.first_byte_ms.p50, "{report:?}");
}

#[test]
fn every_wrong_byte_is_found() {
    let set = file_set();
    for request in files::in_directory(0).filter(|request| request.class == 1) {
        let mut bytes = files::content(&request);
        bytes[1000] ^= 0x10;
        std::fs::write(set.path().join(files::path(&request)), bytes).unwrap();
    }
    let report = run(&load(serve_files(&set))).unwrap();
    assert!(!report.is_clean() && report.classes[1] > 0, "{report:?}");
    // What was under way at the end is not counted.
    assert_eq!((report.wrong_bytes, found(&report, "wrong bytes")), (report.classes[1], report.classes[1]), "{report:?}");
    let example = report.faults[0].example.as_deref().unwrap();
    assert!(report.faults.len() == 1 && example.starts_with("/dir00000/class1_"), "{report:?}");
}

#[test]
fn bodies_come_in_every_way() {
    let server = serve(|request| {
        let body = files::content(request);
        match request.class {
            1 => {
                let mut answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
                for chunk in body.chunks(1000) {
                    answer.extend(format!("{:x}\r\n", chunk.len()).bytes());
                    answer.extend_from_slice(chunk);
                    answer.extend_from_slice(b"\r\n");
                }
                answer.extend_from_slice(b"0\r\n\r\n");
                (answer, true)
            }
            2 => ([b"HTTP/1.0 200 OK\r\n\r\n".as_slice(), &body].concat(), false),
            _ => plain(&body),
        }
    });
    let report = run(&load(server)).unwrap();
    assert!(report.is_clean() && report.classes[1] > 0 && report.classes[2] > 0, "{report:?}");
}

#[test]
fn broken_answers_are_told_apart() {
    let server = serve(|request| {
        let body = files::content(request);
        match (request.class, request.file) {
            (1, 0..4) => (plain(&body).0[..200].to_vec(), false),
            (1, _) => plain(&[&body[..], b"x"].concat()),
            (2, _) => plain(&body[1..]),
            (0, 1..) => (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec(), true),
            _ => plain(&body),
        }
    });
    let report = run(&WebLoad { connections: 32, ..load(server) }).unwrap();
    let cut_off = "the server closed a connection before its answer was whole";
    for what in [cut_off, "an answer is longer than the file", "status 503"] {
        assert!(found(&report, what) > 0, "{what}: {report:?}");
    }
    // Its bytes are shifted, so they are wrong as well.
    assert!(found(&report, "an answer is shorter than the file") > 0 && report.wrong_bytes > 0, "{report:?}");
    assert!(report.conforming < 32, "{report:?}");
}

#[test]
fn a_server_may_close_a_connection_between_requests() {
    // Its answers do not say so.
    let server = serve(|request| (plain(&files::content(request)).0, false));
    let report = run(&WebLoad { keep: Keep::Always, ..load(server) }).unwrap();
    // Where its end comes while the next request is being sent, the connection is reset instead.
    let resets = report.faults.iter().filter(|fault| fault.what.starts_with("the connection broke"));
    let resets: u64 = resets.map(|fault| fault.count).sum();
    assert!(report.requests > 0 && report.closed_idle > 0 && report.errors == resets, "{report:?}");
}

/// A server whose answers have headers behind the body without end: the load ends nevertheless.
#[test]
fn an_answer_without_end_does_not_hold_up_the_load() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let lines = b"A: b\r\n".repeat(10_000);
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n");
                // Until the client is gone.
                while stream.write_all(&lines).is_ok() {}
            });
        }
    });
    let report = run(&WebLoad { rate: f64::INFINITY, connections: 1, ..load(server) }).unwrap();
    assert_eq!(report.requests, 0, "{report:?}");
}

#[test]
fn a_load_that_is_observed_ends_when_it_is_to() {
    let set = file_set();
    let progress = Progress::default();
    let load = WebLoad { seconds: 600.0, ..load(serve_files(&set)) };
    let report = std::thread::scope(|scope| {
        let running = scope.spawn(|| observed(&load, &progress));
        while progress.requests.load(Ordering::Relaxed) == 0 && !running.is_finished() {
            std::thread::yield_now();
        }
        progress.stop.store(true, Ordering::Relaxed);
        running.join().unwrap().unwrap()
    });
    assert!(report.is_clean() && report.load.seconds < 600.0, "{report:?}");
}

#[test]
fn programs_are_asked_for_their_share() {
    let server = serve(|request| plain(&files::content(request)));
    let report = run(&WebLoad { dynamic: 0.5, dynamic_path: Some("/cgi/get".to_owned()), ..load(server) }).unwrap();
    assert!(report.is_clean() && report.dynamic_requests > 0 && report.dynamic_requests < report.requests, "{report:?}");
}

#[test]
fn a_server_that_is_none_is_named_before_the_load_begins() {
    let set = file_set();
    let server = serve_files(&set);
    let refused = |load: WebLoad| format!("{:#}", run(&load).unwrap_err());
    let two = refused(WebLoad { directories: 2, ..load(server) });
    assert!(two.contains("/dir00001/class0_0 (404)") && two.contains("--make-files DIRECTORY --directories 2"), "{two}");
    let program = WebLoad { dynamic: 0.1, dynamic_path: Some("/none".to_owned()), ..load(server) };
    let program = refused(program);
    assert!(program.contains("no program at /none?/dir00000/class0_0 (404)"), "{program}");
    let other = refused(load(serve(|_| plain(b"It works!"))));
    assert!(other.contains("has 9 bytes, and in the file set 102"), "{other}");
    let no_web = refused(load(serve(|_| (b"220 mail\r\n\r\n".to_vec(), false))));
    assert!(no_web.contains("this is no HTTP answer"), "{no_web}");
    let nobody = refused(load(SocketAddr::from(([127, 0, 0, 1], 1))));
    assert!(nobody.contains("connecting to 127.0.0.1:1"), "{nobody}");
}

#[test]
fn loads_that_cannot_be_are_refused() {
    let server = SocketAddr::from(([127, 0, 0, 1], 9));
    let wrong: [(fn(&mut WebLoad), &str); 8] = [
        (|load| load.connections = 0, "at least one connection"),
        (|load| load.connections = usize::MAX / 2, "limit on open files"),
        (|load| load.seconds = f64::NAN, "from 0.1 to 86400"),
        (|load| load.rate = 10.0, "at least 1k"),
        (|load| load.dynamic = 1.5, "from 0 to 1"),
        (|load| load.dynamic = 0.5, "need the path of a program"),
        (|load| load.dynamic_path = Some("get it".to_owned()), "must begin with /"),
        (|load| load.directories = 0, "from 1 to 2000"),
    ];
    for (spoil, says) in wrong {
        let mut load = load(server);
        spoil(&mut load);
        let refused = format!("{:#}", run(&load).unwrap_err());
        assert!(refused.contains(says), "{refused}");
    }
}
