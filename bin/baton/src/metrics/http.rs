//! As much of HTTP/1.1 as a scrape needs: one GET or HEAD a connection. Without I/O.

use super::text::Format;
use httparse::{EMPTY_HEADER, Request, Status};

/// Most bytes of a request.
pub const MOST: usize = 8192;

/// Most headers of a request.
const HEADERS: usize = 64;

/// What a client wants.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// The request is not whole yet.
    More,
    /// The counters in this format. `head`: only the answer's head.
    Metrics { format: Format, head: bool },
    /// What can be had here.
    Index,
    /// Nothing that there is: a status line and the reason.
    Refused(&'static str, &'static str),
}

/// Reads a request from the bytes that have come so far.
pub fn read(bytes: &[u8]) -> Wanted {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut request = Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) if bytes.len() < MOST => return Wanted::More,
        Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Wanted::Refused("431 Request Header Fields Too Large", "the request is too long");
        }
        Err(_) => return Wanted::Refused("400 Bad Request", "this is no HTTP request"),
    }
    let head = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Wanted::Refused("405 Method Not Allowed", "only GET and HEAD"),
    };
    let path = request.path.unwrap_or_default();
    match path.split('?').next().unwrap_or_default() {
        "/metrics" => {
            let accept = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
            let accept: Vec<_> = accept.map(|header| String::from_utf8_lossy(header.value)).collect();
            Wanted::Metrics { format: Format::accepted(&accept.join(",")), head }
        }
        "/" => Wanted::Index,
        _ => Wanted::Refused("404 Not Found", "the counters are at /metrics"),
    }
}

/// The head of an answer with a body of so many bytes. Each answer ends its connection.
pub fn head(status: &str, content_type: &str, length: usize) -> String {
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{allow}Cache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(bytes: &[u8]) -> &'static str {
        match read(bytes) {
            Wanted::Refused(status, _) => status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_are_read() {
        let whole = b"GET /metrics?name=up HTTP/1.1\r\nHost: a\r\naccept: application/openmetrics-text\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(read(&whole[..end]), Wanted::More, "{end}");
        }
        assert_eq!(read(whole), Wanted::Metrics { format: Format::OpenMetrics, head: false });
        assert_eq!(read(b"HEAD /metrics HTTP/1.0\r\n\r\n"), Wanted::Metrics { format: Format::Prometheus, head: true });
        assert_eq!(read(b"GET / HTTP/1.1\r\n\r\n"), Wanted::Index);
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert_eq!(status(b"POST /metrics HTTP/1.1\r\n\r\n"), "405 Method Not Allowed");
        assert_eq!(status(b"GET /etc/passwd HTTP/1.1\r\n\r\n"), "404 Not Found");
        assert_eq!(status(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), "400 Bad Request");
        assert_eq!(status(b"\xff\x00"), "400 Bad Request");
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".to_vec(), vec![b'x'; MOST]].concat();
        assert_eq!(status(&long[..MOST]), "431 Request Header Fields Too Large");
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(HEADERS + 1));
        assert_eq!(status(many.as_bytes()), "431 Request Header Fields Too Large");
        assert!(head("405 Method Not Allowed", "text/plain", 3).contains("\r\nAllow: GET, HEAD\r\n"));
    }
}
