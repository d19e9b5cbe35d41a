//! As much of HTTP/1.1 as `baton metrics` and `baton page` need: one GET or HEAD a connection. Without I/O.

use httparse::{EMPTY_HEADER, Header, Status};
use std::rc::Rc;

/// Most bytes of a request.
pub const MOST: usize = 8192;

/// Most headers of a request.
const HEADERS: usize = 64;

/// A request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Request {
    /// Only the answer's head is wanted.
    pub head: bool,
    /// The path, without the query.
    pub path: String,
    /// What follows the first question mark, as it was sent.
    pub query: String,
    /// The values of the Accept headers, joined by commas.
    pub accept: String,
    /// The value of the Host header; None if there is none, or several.
    pub host: Option<String>,
}

/// What has been received from a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Received {
    /// The request is not whole yet.
    More,
    /// A request.
    Whole(Request),
    /// Nothing that is answered: a status line and the reason.
    Refused(&'static str, &'static str),
}

/// Reads a request from the bytes that have come so far.
pub fn read(bytes: &[u8]) -> Received {
    let mut headers = [EMPTY_HEADER; HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) if bytes.len() < MOST => return Received::More,
        Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Received::Refused("431 Request Header Fields Too Large", "the request is too long");
        }
        Err(_) => return Received::Refused("400 Bad Request", "this is no HTTP request"),
    }
    let head = match request.method {
        Some("GET") => false,
        Some("HEAD") => true,
        _ => return Received::Refused("405 Method Not Allowed", "only GET and HEAD"),
    };
    let target = request.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let host = match &values(request.headers, "host")[..] {
        [only] => Some(only.clone()),
        _ => None,
    };
    let accept = values(request.headers, "accept").join(",");
    Received::Whole(Request { head, path: path.into(), query: query.into(), accept, host })
}

/// The values of the headers with this name.
fn values(headers: &[Header<'_>], name: &str) -> Vec<String> {
    let named = headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
    named.map(|header| String::from_utf8_lossy(header.value).into_owned()).collect()
}

/// The answer to a request. Each answer ends its connection.
pub struct Answer {
    /// Number and text of the status line.
    pub status: &'static str,
    /// The value of the Content-Type header.
    pub content_type: &'static str,
    /// Lines of further headers, each with its end.
    pub headers: &'static str,
    /// The text.
    pub body: Rc<str>,
}

impl Answer {
    /// A line of text.
    pub fn line(status: &'static str, text: &str) -> Answer {
        Answer { status, content_type: "text/plain; charset=utf-8", headers: "", body: format!("{text}\n").into() }
    }

    /// Everything before the body.
    pub fn head(&self) -> String {
        let Answer { status, content_type, headers, body } = self;
        let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n{allow}{headers}Cache-Control: no-store\r\n\
             X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n",
            body.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(bytes: &[u8]) -> &'static str {
        match read(bytes) {
            Received::Refused(status, _) => status,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn requests_are_read() {
        let whole = b"GET /metrics?name=up?x HTTP/1.1\r\nHost: a\r\naccept: text/plain\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(read(&whole[..end]), Received::More, "{end}");
        }
        let (path, query, accept) = ("/metrics".into(), "name=up?x".into(), "text/plain,*/*".into());
        let expected = Request { head: false, path, query, accept, host: Some("a".into()) };
        assert_eq!(read(whole), Received::Whole(expected));
        let head = Request { head: true, path: "/".into(), ..Request::default() };
        assert_eq!(read(b"HEAD / HTTP/1.0\r\n\r\n"), Received::Whole(head));
        let Received::Whole(two) = read(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n") else { panic!("a request") };
        assert_eq!(two.host, None, "two of them are none");
    }

    #[test]
    fn what_is_no_request_is_refused() {
        assert_eq!(status(b"POST /metrics HTTP/1.1\r\n\r\n"), "405 Method Not Allowed");
        assert_eq!(status(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"), "400 Bad Request");
        assert_eq!(status(b"\xff\x00"), "400 Bad Request");
        let long = [b"GET /metrics HTTP/1.1\r\nA: ".to_vec(), vec![b'x'; MOST]].concat();
        assert_eq!(status(&long[..MOST]), "431 Request Header Fields Too Large");
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "A: b\r\n".repeat(HEADERS + 1));
        assert_eq!(status(many.as_bytes()), "431 Request Header Fields Too Large");
        let refused = Answer::line("405 Method Not Allowed", "only GET and HEAD").head();
        assert!(refused.contains("\r\nAllow: GET, HEAD\r\n") && refused.contains("\r\nContent-Length: 18\r\n"), "{refused}");
    }
}
