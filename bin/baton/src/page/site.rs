//! What is at which path, and who may ask.
//!
//! A page from elsewhere that a browser shows can send requests to this machine. It cannot read the answers unless its
//! own name leads here (DNS rebinding): so only loopback's names are answered.

use super::state::{State, Wanted};
use crate::list::row::Sort;
use crate::serve::http::{Answer, Request};
use crate::serve::server::{Counts, Site};
use clap::ValueEnum;
use std::fs::{Metadata, OpenOptions};
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::UNIX_EPOCH;

const HTML: &str = "text/html; charset=utf-8";

/// The page loads nothing but what is served beside it, and no other page shows it in a frame.
const OWN: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\nReferrer-Policy: no-referrer\r\n\
     Cross-Origin-Resource-Policy: same-origin\r\nCross-Origin-Opener-Policy: same-origin\r\n";

/// A report has its style inside. It runs no script, and loads nothing.
const REPORT: &str = "Content-Security-Policy: sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n";

/// What never changes: path, type and text.
const FILES: [(&str, &str, &str); 3] = [
    ("/", HTML, include_str!("page.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
];

/// Most bytes of a report.
const MOST: u64 = 4 << 20;

/// The page.
pub struct Page {
    state: State,
    /// Where the report of the last bench is, or will be.
    report: Option<PathBuf>,
    /// The report that was read last. All clients are given the same text, which may be long.
    text: Option<Report>,
}

/// A report that was read.
struct Report {
    /// What changes with the file.
    version: Version,
    text: Rc<str>,
}

/// A file's device, number, length, and last change in seconds and nanoseconds.
type Version = (u64, u64, u64, i64, i64);

impl Page {
    /// Shows this state, and the report at this path.
    pub fn new(state: State, report: Option<PathBuf>) -> Page {
        Page { state, report, text: None }
    }

    fn state(&mut self, query: &str, user: Option<u32>) -> Answer {
        let wanted = match wanted(query) {
            Ok(wanted) => wanted,
            Err(why) => return Answer { headers: OWN, ..Answer::line("400 Bad Request", &why) },
        };
        let mut state = self.state.answer(user, &wanted);
        state["report"] = self.report.as_deref().and_then(modified).into();
        Answer { status: "200 OK", content_type: "application/json", headers: OWN, body: state.to_string().into() }
    }

    fn report(&mut self) -> Answer {
        self.text = self.report.as_deref().and_then(|path| read(path, self.text.take()));
        match &self.text {
            Some(report) => Answer { status: "200 OK", content_type: HTML, headers: REPORT, body: report.text.clone() },
            None => Answer::line("404 Not Found", "there is no report yet: `baton bench all` makes one"),
        }
    }
}

impl Site for Page {
    fn answer(&mut self, request: &Request, user: Option<u32>, _: Counts) -> Answer {
        if !request.host.as_deref().is_some_and(is_this_machine) {
            return Answer::line("421 Misdirected Request", "this page is at localhost, 127.0.0.1 and [::1] only");
        }
        if let Some((_, content_type, text)) = FILES.into_iter().find(|(path, ..)| *path == request.path) {
            return Answer { status: "200 OK", content_type, headers: OWN, body: text.into() };
        }
        match request.path.as_str() {
            "/state" => self.state(&request.query, user),
            "/report" => self.report(),
            _ => Answer::line("404 Not Found", "the page is at /"),
        }
    }
}

/// Whether the value of a Host header names loopback. The port may be any: ssh forwards others.
fn is_this_machine(host: &str) -> bool {
    let bracketed = host.strip_prefix('[').and_then(|rest| rest.split_once(']'));
    let (name, port) = bracketed.unwrap_or_else(|| host.split_at(host.find(':').unwrap_or(host.len())));
    let port = port.strip_prefix(':').unwrap_or(port);
    port.chars().all(|digit| digit.is_ascii_digit())
        && (name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback()))
}

/// What a query asks for: `sort`, `from` and `filter`, of which none must be there.
fn wanted(query: &str) -> Result<Wanted, String> {
    let mut wanted = Wanted::default();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let value = decoded(value).ok_or_else(|| format!("{name}: its value is not encoded as that of a form"))?;
        match name {
            "sort" => wanted.sort = Sort::from_str(&value, false)?,
            "from" => wanted.from = value.parse().map_err(|_| format!("from: {value:?} is no number"))?,
            "filter" if value.trim().is_empty() => {}
            "filter" => wanted.filter = Some(value.parse()?),
            _ => return Err(format!("{name:?} is unknown; there are sort, from and filter")),
        }
    }
    Ok(wanted)
}

/// A value as a form encodes it.
fn decoded(value: &str) -> Option<String> {
    let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
    let (mut bytes, mut rest) = (Vec::with_capacity(value.len()), value.bytes());
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => (16 * digit(rest.next())? + digit(rest.next())?) as u8,
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

fn is_report(metadata: &Metadata) -> bool {
    metadata.is_file() && metadata.len() <= MOST
}

/// When a report was written, seconds since 1970. None if there is none, or one that is too long.
pub fn modified(path: &Path) -> Option<u64> {
    let metadata = std::fs::metadata(path).ok().filter(is_report)?;
    Some(metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_secs())
}

/// Reads a report, if that has changed since the `last` time.
fn read(path: &Path, last: Option<Report>) -> Option<Report> {
    // The open of a FIFO, which somebody may have put there, does not wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
    let found = file.metadata().ok().filter(is_report)?;
    let version = (found.dev(), found.ino(), found.len(), found.ctime(), found.ctime_nsec());
    if let Some(last) = last.filter(|last| last.version == version) {
        return Some(last);
    }
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text).ok()?;
    Some(Report { version, text: String::from_utf8_lossy(&text).into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::tests::nowhere;

    fn ask(page: &mut Page, path: &str, host: Option<&str>) -> Answer {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let request = Request { path: path.into(), query: query.into(), host: host.map(str::to_owned), ..Request::default() };
        page.answer(&request, Some(0), Counts::default())
    }

    #[test]
    fn every_path_is_answered() {
        let mut page = Page::new(State::new(nowhere()), None);
        for (path, status, content_type) in [
            ("/", "200 OK", HTML),
            ("/page.css", "200 OK", "text/css; charset=utf-8"),
            ("/page.js", "200 OK", "text/javascript; charset=utf-8"),
            ("/state", "200 OK", "application/json"),
            ("/state?sort=rtt&from=50&filter=place+%3D+nic", "200 OK", "application/json"),
            ("/state?sort=colour", "400 Bad Request", "text/plain; charset=utf-8"),
            ("/state?filter=colour+%3D+red", "400 Bad Request", "text/plain; charset=utf-8"),
            ("/report", "404 Not Found", "text/plain; charset=utf-8"),
            ("/etc/passwd", "404 Not Found", "text/plain; charset=utf-8"),
            ("http://localhost/", "404 Not Found", "text/plain; charset=utf-8"),
        ] {
            let answer = ask(&mut page, path, Some("localhost:9465"));
            assert_eq!((answer.status, answer.content_type), (status, content_type), "{path}: {}", answer.body);
        }
    }

    /// A name of somebody else's, which leads to this machine, gets nothing.
    #[test]
    fn only_names_of_loopback_are_answered() {
        for host in ["localhost", "LocalHost:9465", "127.0.0.1:9465", "127.8.0.1", "[::1]", "[::1]:9465", "localhost:"] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "[::2]:1",
            "localhost:1@evil",
            "::1",
        ] {
            assert!(!is_this_machine(host), "{host}");
        }
        let mut page = Page::new(State::new(nowhere()), None);
        for (path, _, _) in FILES {
            assert!(ask(&mut page, path, Some("evil.example")).status.starts_with("421"));
        }
        assert!(ask(&mut page, "/state", None).status.starts_with("421"));
    }

    #[test]
    fn queries_are_read() {
        assert_eq!(wanted(""), Ok(Wanted::default()));
        let filter = "program = \"é\" and sport = :443";
        let read = wanted("sort=moves&from=100&filter=program+%3D+%22%c3%A9%22+and+sport+%3d+%3A443").expect("a query");
        assert_eq!((read.sort, read.from, read.filter), (Sort::Moves, 100, Some(filter.parse().expect("a filter"))));
        for query in ["from=x", "from=-1", "filter=%", "filter=%zz", "filter=%ff", "sort", "colour=red", "sort=rate&sort=Rate"] {
            assert!(wanted(query).is_err(), "{query}");
        }
        assert_eq!(wanted("filter=+&").map(|wanted| wanted.filter), Ok(None));
    }

    #[test]
    fn a_report_is_shown_without_rights() {
        let path = std::env::temp_dir().join(format!("baton-page-report-{}.html", std::process::id()));
        let mut page = Page::new(State::new(nowhere()), Some(path.clone()));
        assert!(ask(&mut page, "/report", Some("localhost")).status.starts_with("404"));
        assert!(ask(&mut page, "/state", Some("localhost")).body.contains("\"report\":null"));
        std::fs::write(&path, "<h1>Benches</h1><script>1</script>").expect("a file");
        let report = ask(&mut page, "/report", Some("localhost"));
        assert!(report.body.contains("Benches") && report.head().contains("sandbox; default-src 'none'"), "{}", report.head());
        let again = ask(&mut page, "/report", Some("localhost"));
        assert!(Rc::ptr_eq(&report.body, &again.body), "all clients have the same text");
        std::fs::write(&path, "<h1>Benches of today</h1>").expect("a file");
        assert!(ask(&mut page, "/report", Some("localhost")).body.contains("today") && report.body.contains("Benches"));
        let state = ask(&mut page, "/state", Some("localhost"));
        let state: serde_json::Value = serde_json::from_str(&state.body).expect("JSON");
        assert!(state["report"].as_u64().is_some_and(|at| at > 1_700_000_000), "{state}");
        std::fs::remove_file(&path).expect("its removal");
        let read = |path: &Path| read(path, None).map(|report| report.text);
        assert_eq!(read(&std::env::temp_dir()), None, "a directory is no report");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo");
        assert!(made.success());
        assert_eq!(read(&path), None, "a FIFO is no report");
        std::fs::remove_file(&path).expect("its removal");
        std::fs::write(&path, vec![b'x'; MOST as usize + 1]).expect("a file");
        assert_eq!((read(&path), modified(&path)), (None, None), "it is too long");
        std::fs::remove_file(&path).expect("its removal");
    }

    /// Programs choose their names. What they write is text, whatever is in it: nothing makes HTML of it, or runs it.
    #[test]
    fn nothing_is_made_html() {
        let [(_, _, html), (_, _, css), (_, _, script)] = FILES;
        for maker in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "setAttribute(\"style"]
        {
            assert!(!script.contains(maker), "{maker}");
        }
        // The policy refuses these, and the page would not work.
        let is_handler = |rest: &str| rest.split([' ', '<', '>']).next().is_some_and(|word| word.contains('='));
        assert!(!html.split(" on").skip(1).any(is_handler), "an inline handler");
        assert!(!html.contains("style=") && html.matches("<script").count() == 1);
        assert!(html.contains("<script src=\"page.js\" defer></script>"));
        for text in [html, css, script] {
            let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains("//www") && !elsewhere.contains("http") && !elsewhere.contains("url("), "{elsewhere}");
        }
    }

    /// What a screen reader and the keyboard need.
    #[test]
    fn the_page_is_accessible() {
        let [(_, _, html), (_, _, css), _] = FILES;
        let tables = html.matches("<table").count();
        assert_eq!((html.matches("<caption").count(), tables), (tables, 3));
        assert_eq!(html.matches("<th ").count(), html.matches("<th scope=\"col\"").count());
        assert!(
            html.contains("<html lang=\"en\">") && html.contains("aria-live=\"polite\"") && html.contains("name=\"viewport\"")
        );
        for control in html.split("<input").skip(1).chain(html.split("<select").skip(1)) {
            let id = control.split("id=\"").nth(1).and_then(|rest| rest.split('"').next()).expect("an id");
            assert!(html.contains(&format!("<label for=\"{id}\">")), "{id} has no label");
        }
        for part in [":focus-visible", "prefers-color-scheme: dark", "prefers-reduced-motion"] {
            assert!(css.contains(part), "{part}");
        }
    }

    /// The buttons that turn the list's pages are disabled until the first answer has come, which says how long a page
    /// is.
    #[test]
    fn pages_are_turned_behind_the_first_answer_only() {
        for id in ["previous", "next"] {
            assert!(FILES[0].2.contains(&format!("<button id=\"{id}\" type=\"button\" disabled>")), "{id}");
        }
    }

    /// Every order that there is can be chosen.
    #[test]
    fn the_page_offers_every_order() {
        for sort in Sort::ALL {
            assert!(FILES[0].2.contains(&format!("<option value=\"{}\"", sort.name())), "{}", sort.name());
        }
    }
}
