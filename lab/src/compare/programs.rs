//! The servers of a comparison, and their clients.

use super::load::{Traffic, WebClient};
use super::way::{Hosts, Way};
use super::wrk::Wrk;
use crate::closed_loop::{self, Progress, Requests};
use anyhow::{Context, Result, ensure};
use baton_bed::server::{Files, Program, Server};
use baton_bed::testbed::{address_a, address_b};
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of the file that a web server is asked for.
pub(super) const LENGTH: usize = 256;
/// Bytes of a message and of its echo.
const MESSAGE: usize = 64;
/// The server's port, and with bulk data out the client's.
const PORT: u16 = 8092;
/// The server's processor with two programs that never sleep. Without a NIC the client has the other one; else the NIC
/// has that.
const SERVER_CORE: usize = 1;

/// A program that receives in bulk, and one that sends: with the C library's calls, which Baton's library stands in
/// front of.
const SINK: &str = "
import socket, sys
connection = socket.create_server((sys.argv[1], int(sys.argv[2]))).accept()[0]
buffer = bytearray(131072)
while connection.recv_into(buffer): pass
";
const SOURCE: &str = "
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b'cubic')
buffer = bytes(131072)
while True: connection.sendall(buffer)
";

/// The server's address.
fn address() -> SocketAddr {
    SocketAddr::new(address_a(false), PORT)
}

/// Where the client waits for bulk data that the server sends.
fn client_address() -> SocketAddr {
    SocketAddr::new(address_b(false), PORT)
}

/// The length of an answer, if what has come is a whole one.
type Complete = fn(&[u8]) -> Option<usize>;

/// A server, and what it is to be asked.
pub(super) struct Programs<'a> {
    pub hosts: &'a Hosts,
    pub files: &'a Files,
    pub way: Way,
    pub traffic: Traffic,
}

impl Programs<'_> {
    /// Starts the server, and prepares the client.
    pub(super) fn start(&self) -> Result<(Server, Client)> {
        // What listens there must do so before a server connects to it.
        let client = self.bulk_client()?;
        let mut server = match self.traffic {
            _ if self.way == Way::Smoltcp => self.smoltcp(),
            Traffic::Http { .. } => self.web(),
            Traffic::Redis { .. } => self.redis(),
            Traffic::Bulk { .. } if matches!(self.way, Way::Library | Way::Buffers) => self.source(),
            Traffic::Bulk { into } => self.script(into),
            Traffic::Rpc { .. } | Traffic::PingPong => self.echo(),
        }?;
        if self.traffic == Traffic::PingPong {
            server.pin(SERVER_CORE);
        }
        if let Some(client) = client {
            return Ok((server, client));
        }
        server.listens(self.hosts.client(), address()).context("the server")?;
        let client = self.requests()?;
        Ok((server, client))
    }

    /// `baton attach` of a server, which goes on until that ends.
    pub(super) fn attach(&self, server: &Server) -> Result<Server> {
        let agent = self.hosts.agent().context("no agent")?;
        let program = std::env::current_exe()?.into_os_string();
        let socket = ["attach".into(), "--socket".into(), agent.into_os_string()];
        let words = ["--after".into(), "0".into(), server.id().to_string().into()];
        let words: Vec<OsString> = [program].into_iter().chain(socket).chain(words).collect();
        Server::start(self.hosts.server(), &words, self.files.root(), None)
    }

    /// Starts a program on the server's host: under `baton run` if that is the way.
    fn run(&self, words: &[OsString]) -> Result<Server> {
        let agent = self.hosts.agent().filter(|_| matches!(self.way, Way::Beside | Way::Gain | Way::Inline));
        Server::start(self.hosts.server(), words, self.files.root(), agent.as_deref())
    }

    /// Starts a hidden command of this program.
    fn own(&self, words: Vec<OsString>) -> Result<Server> {
        let program = std::env::current_exe()?.into_os_string();
        self.run(&[vec![program], words].concat())
    }

    fn web(&self) -> Result<Server> {
        self.run(&Program::find().command(self.files, address(), self.traffic.is_by_wrk())?)
    }

    fn redis(&self) -> Result<Server> {
        let port = address().port().to_string();
        let words = ["redis-server", "--save", "", "--appendonly", "no", "--protected-mode", "no", "--port", &port, "--bind"];
        let words: Vec<OsString> = words.into_iter().map(OsString::from).chain([address().ip().to_string().into()]).collect();
        self.run(&words).context("redis-server (Debian's package of that name)")
    }

    fn script(&self, into: bool) -> Result<Server> {
        let (script, at) = if into { (SINK, address()) } else { (SOURCE, client_address()) };
        let words = ["python3".into(), "-c".into(), script.into(), at.ip().to_string(), at.port().to_string()];
        self.run(&words.map(OsString::from))
    }

    /// Sends by the client library.
    fn source(&self) -> Result<Server> {
        let agent = self.hosts.agent().context("no agent")?;
        let to = client_address().to_string().into();
        let mut words = vec!["serve-source".into(), to, "--ring".into(), agent.into_os_string()];
        words.extend((self.way == Way::Buffers).then(|| OsString::from("--buffers")));
        self.own(words)
    }

    fn echo(&self) -> Result<Server> {
        let spins = self.traffic == Traffic::PingPong;
        let mut words = vec!["serve-echo".into(), address().to_string().into()];
        words.extend(spins.then(|| OsString::from("--spin")));
        words.extend((spins && self.way.has_nic()).then(|| OsString::from("--shares")));
        if let Some(agent) = self.hosts.agent().filter(|_| self.way == Way::Library) {
            words.extend(["--ring".into(), agent.into_os_string()]);
        }
        self.own(words)
    }

    fn smoltcp(&self) -> Result<Server> {
        let mut words = vec!["serve-smoltcp".into(), address().to_string().into()];
        match self.traffic {
            Traffic::Bulk { into: true } => words.push("--sink".into()),
            Traffic::Bulk { into: false } => words.extend(["--source".into(), client_address().to_string().into()]),
            Traffic::PingPong => words.push("--spin".into()),
            _ => {}
        }
        words.extend(["--connections".into(), self.traffic.connections().to_string().into()]);
        self.own(words)
    }

    fn bulk_client(&self) -> Result<Option<Client>> {
        Ok(match self.traffic {
            Traffic::Bulk { into: true } => Some(Client::Sends),
            // smoltcp's program makes the interface with that address, and tries again until there is a listener.
            Traffic::Bulk { into: false } => Some(Client::Receives(self.listener()?)),
            _ => None,
        })
    }

    /// A listener at an address that the client's host may get only later.
    fn listener(&self) -> Result<TcpListener> {
        let any = SocketAddr::new([0, 0, 0, 0].into(), PORT);
        Ok(self.hosts.client().run(|| TcpListener::bind(any))?)
    }

    /// The client of a server that listens.
    fn requests(&self) -> Result<Client> {
        let (request, depth, complete): (Vec<u8>, usize, Complete) = match self.traffic {
            Traffic::PingPong => return Ok(Client::PingPong { shares: self.way.has_nic() }),
            Traffic::Http { client: WebClient::Wrk, connections } => {
                let (url, counter) = (format!("http://{}/0/{LENGTH}", address()), self.files.counter(address()));
                return Ok(Client::Wrk(Wrk { connections, url, counter }));
            }
            Traffic::Http { .. } => (format!("GET /0/{LENGTH} HTTP/1.1\r\nHost: a\r\n\r\n").into_bytes(), 1, http_answer),
            Traffic::Redis { depth } => {
                let set = redis_request(&["SET", "key", "abc"]);
                self.ask(&set, |answer| answer.ends_with(b"\r\n").then_some(0))?;
                (redis_request(&["GET", "key"]), depth, |answer| answer.ends_with(b"abc\r\n").then_some(answer.len()))
            }
            _ => (vec![0x5a; MESSAGE], 1, |answer| (answer.len() >= MESSAGE).then_some(answer.len())),
        };
        let answer = self.ask(&request, complete)?;
        Ok(Client::Requests(Requests { connections: self.traffic.connections(), depth, request, answer }))
    }

    /// One request. Returns the length of its answer.
    fn ask(&self, request: &[u8], complete: Complete) -> Result<usize> {
        self.hosts.client().run(|| Ok(closed_loop::answer_length(address(), request, complete)))?
    }
}

/// A request as redis's clients send it.
fn redis_request(words: &[&str]) -> Vec<u8> {
    let head = format!("*{}\r\n", words.len());
    words.iter().fold(head, |all, word| all + &format!("${}\r\n{word}\r\n", word.len())).into_bytes()
}

/// The length of a whole answer with a body of [`LENGTH`] bytes.
fn http_answer(answer: &[u8]) -> Option<usize> {
    let head = answer.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    (answer.len() == head + LENGTH).then_some(answer.len())
}

/// The other end of the link.
pub(super) enum Client {
    Requests(Requests),
    Wrk(Wrk),
    /// With whether it shares its core with the server.
    PingPong {
        shares: bool,
    },
    Sends,
    Receives(TcpListener),
}

impl Client {
    /// Runs until it has to stop. The server may end after that.
    pub(super) fn run(&self, progress: &Progress) -> Result<()> {
        // wrk ends by itself, before the server, and says then what it has measured.
        let may_fail = || !matches!(self, Client::Wrk(_)) && progress.stop.load(Ordering::Relaxed);
        self.work(progress).or_else(|error| if may_fail() { Ok(()) } else { Err(error) })
    }

    fn work(&self, progress: &Progress) -> Result<()> {
        match self {
            Client::Requests(requests) => requests.run(address(), progress),
            Client::Wrk(wrk) => wrk.run(progress),
            Client::PingPong { shares } => {
                process::pin(0, if *shares { SERVER_CORE } else { 0 });
                closed_loop::ping_pong(address(), MESSAGE, *shares, progress)
            }
            Client::Sends => {
                let deadline = monotonic_micros() + 20_000_000;
                let stream = loop {
                    match TcpStream::connect(address()) {
                        Ok(stream) => break stream,
                        Err(error) => ensure!(monotonic_micros() < deadline, "the server does not listen: {error}"),
                    }
                    std::thread::sleep(Duration::from_millis(10));
                };
                closed_loop::bulk(stream, true, progress)
            }
            Client::Receives(listener) => closed_loop::bulk(listener.accept()?.0, false, progress),
        }
    }
}
