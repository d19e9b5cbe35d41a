//! A small web server for machines without nginx: one thread, epoll, ordinary sockets, persistent connections, GET
//! only. It knows nothing of Baton. A request costs it little, so that what is measured is the network.

use crate::clients::{Client, read, serve, write};
use anyhow::Result;
use mio::net::TcpStream;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

/// Most bytes of a request's head.
const HEAD: usize = 8192;

/// A client and its requests.
#[derive(Default)]
struct Requests {
    files: Rc<RefCell<Files>>,
    /// Received, not yet answered.
    request: Vec<u8>,
    /// Answers that are not yet sent, and how much of the first is.
    answers: VecDeque<Rc<[u8]>>,
    sent: usize,
}

/// Files with their answer's head, read once.
#[derive(Default)]
struct Files {
    root: PathBuf,
    known: HashMap<String, Rc<[u8]>>,
}

impl Files {
    /// Returns the whole answer for a path.
    fn answer(&mut self, path: &str) -> Rc<[u8]> {
        if let Some(answer) = self.known.get(path) {
            return answer.clone();
        }
        let relative = Path::new(path.trim_start_matches('/'));
        let below = relative.components().all(|part| matches!(part, Component::Normal(_)));
        let Some(body) = below.then(|| std::fs::read(self.root.join(relative)).ok()).flatten() else {
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".as_slice().into();
        };
        let mut answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len()).into_bytes();
        answer.extend(body);
        let answer: Rc<[u8]> = answer.into();
        self.known.insert(path.into(), answer.clone());
        answer
    }
}

impl Client for Requests {
    /// Sends answers, then reads requests: a client that does not read its answers is not read either.
    fn serve(&mut self, stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<()> {
        loop {
            while let Some(answer) = self.answers.front() {
                let Some(written) = write(stream, &answer[self.sent..])? else { return Ok(()) };
                self.sent += written;
                if self.sent == answer.len() {
                    self.answers.pop_front();
                    self.sent = 0;
                }
            }
            let Some(got) = read(stream, buffer)? else { return Ok(()) };
            self.request.extend_from_slice(&buffer[..got]);
            self.take()?;
        }
    }

    fn waits(&self) -> bool {
        !self.answers.is_empty()
    }
}

impl Requests {
    /// Takes note of the requests that have come whole.
    fn take(&mut self) -> io::Result<()> {
        while let Some(end) = self.request.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&self.request[..end]).into_owned();
            self.request.drain(..end + 4);
            let Some(path) = head.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()) else {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "only GET is known"));
            };
            self.answers.push_back(self.files.borrow_mut().answer(path));
        }
        if self.request.len() > HEAD {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the request is too long"));
        }
        Ok(())
    }
}

/// Serves the files below `root` at `address` until it is killed.
///
/// # Errors
/// If it cannot listen.
pub fn run(address: SocketAddr, root: &Path) -> Result<()> {
    let files = Rc::new(RefCell::new(Files { root: root.into(), known: HashMap::new() }));
    serve(address, 65536, || Requests { files: files.clone(), ..Requests::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Files as Served;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    /// Sends a request and returns what comes back until `length` bytes are there or the server closes.
    fn exchange(address: SocketAddr, request: &[u8], length: usize) -> Vec<u8> {
        let mut socket = loop {
            match TcpStream::connect(address) {
                Ok(socket) => break socket,
                // The server's thread does not listen yet.
                Err(_) => std::thread::yield_now(),
            }
        };
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(request).unwrap();
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        while answer.len() < length {
            match socket.read(&mut buffer) {
                Ok(0) | Err(_) => break,
                Ok(read) => answer.extend_from_slice(&buffer[..read]),
            }
        }
        answer
    }

    #[test]
    fn files_are_served_and_nothing_else() {
        let files = Served::new().unwrap();
        files.add(7, 100).unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let root = files.root().to_path_buf();
        std::thread::spawn(move || run(free, &root));
        let mut expected = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n".to_vec();
        expected.extend(std::fs::read(files.root().join("7/100")).unwrap());
        let get = b"GET /7/100 HTTP/1.1\r\nHost: a\r\n\r\n";
        assert_eq!(exchange(free, get, expected.len()), expected);
        assert_eq!(exchange(free, &get.repeat(3), 3 * expected.len()), expected.repeat(3), "several requests at once");
        for path in ["/7/101", "/../../etc/passwd", "//etc/passwd/..", "/"] {
            let answer = exchange(free, format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes(), 12);
            assert!(answer.starts_with(b"HTTP/1.1 404"), "{path}: {}", String::from_utf8_lossy(&answer));
        }
        assert_eq!(exchange(free, b"POST / HTTP/1.1\r\n\r\n", 1), b"", "the connection is closed");
        assert_eq!(exchange(free, &[b'a'; 2 * HEAD], 1), b"", "the connection is closed");
    }
}
