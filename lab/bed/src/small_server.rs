//! A small web server for machines without nginx: one thread, epoll, ordinary sockets, persistent connections, GET
//! only. It knows nothing of Baton. A request costs it little, so that what is measured is the network.

use anyhow::{Context, Result};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

const LISTENER: Token = Token(usize::MAX);
/// Most bytes of a request's head.
const HEAD: usize = 8192;

/// A client's connection.
struct Client {
    socket: TcpStream,
    /// Received, not yet answered.
    request: Vec<u8>,
    /// Answers that are not yet sent, and how much of the first is.
    answers: std::collections::VecDeque<Rc<[u8]>>,
    sent: usize,
}

/// Files with their answer's head, read once.
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

impl Client {
    /// Sends answers, then reads requests, until neither goes on: a client that does not read its answers is not read
    /// either. False if the connection has ended.
    fn serve(&mut self, files: &mut Files, buffer: &mut [u8]) -> io::Result<bool> {
        loop {
            while let Some(answer) = self.answers.front() {
                match self.socket.write(&answer[self.sent..]) {
                    Ok(written) => self.sent += written,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                    Err(error) => return Err(error),
                }
                if self.sent == answer.len() {
                    self.answers.pop_front();
                    self.sent = 0;
                }
            }
            match self.socket.read(buffer) {
                Ok(0) => return Ok(false),
                Ok(read) => self.request.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
            self.take_requests(files)?;
        }
    }

    fn take_requests(&mut self, files: &mut Files) -> io::Result<()> {
        while let Some(end) = self.request.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&self.request[..end]).into_owned();
            self.request.drain(..end + 4);
            let Some(path) = head.strip_prefix("GET ").and_then(|rest| rest.split(' ').next()) else {
                return Err(io::Error::new(ErrorKind::InvalidData, "only GET is known"));
            };
            self.answers.push_back(files.answer(path));
        }
        if self.request.len() > HEAD { Err(io::Error::new(ErrorKind::InvalidData, "the request is too long")) } else { Ok(()) }
    }
}

/// Serves the files below `root` at `address` until it is killed.
///
/// # Errors
/// If it cannot listen.
pub fn run(address: SocketAddr, root: &Path) -> Result<()> {
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::bind(address).with_context(|| format!("listening at {address}"))?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut files = Files { root: root.into(), known: HashMap::new() };
    let mut clients: HashMap<Token, Client> = HashMap::new();
    let (mut events, mut buffer, mut next) = (Events::with_capacity(256), vec![0; 65536], 0);
    loop {
        match poll.poll(&mut events, None) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            polled => polled?,
        }
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut socket, _)) = listener.accept() {
                    let token = Token(next);
                    next += 1;
                    let _ = socket.set_nodelay(true);
                    poll.registry().register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
                    clients.insert(token, Client { socket, request: Vec::new(), answers: Default::default(), sent: 0 });
                }
            } else if let Some(client) = clients.get_mut(&event.token())
                && !client.serve(&mut files, &mut buffer).unwrap_or(false)
            {
                clients.remove(&event.token());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::Files as Served;
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
