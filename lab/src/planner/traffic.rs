//! The client of what the planner measures, over ordinary sockets: each connection sends requests in a write, and the
//! next ones when all are answered.

use super::load::Size;
use super::server::{HEAD, head};
use anyhow::{Context, Result, bail};
use baton_linux::events::{Poller, Trigger};
use baton_linux::socket;
use baton_sim::Rng;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What is sent.
#[derive(Clone, Debug)]
pub struct Traffic {
    /// Connections.
    pub connections: usize,
    /// Requests in a write.
    pub depth: usize,
    /// Their sizes and answers' sizes, by chance.
    pub sizes: Vec<Size>,
    /// Calls on its socket that the program makes besides for each request.
    pub calls: u32,
    /// Instead of a request in the planner's own form: this one, and bytes of its answer.
    pub fixed: Option<(Vec<u8>, u64)>,
}

/// What the client shares with whoever measures it.
#[derive(Debug, Default)]
pub struct Progress {
    /// Requests answered.
    pub done: AtomicU64,
    /// The client is to end.
    pub stop: AtomicBool,
}

struct Client {
    socket: TcpStream,
    /// Requests that are not written yet.
    out: Vec<u8>,
    written: usize,
    /// Bytes of answers that are still to come.
    missing: u64,
}

impl Traffic {
    /// Runs until it is to end.
    ///
    /// # Errors
    /// If a connection cannot be made, or breaks.
    pub fn run(&self, server: SocketAddr, progress: &Progress) -> Result<()> {
        let (poller, mut rng) = (Poller::new()?, Rng::new(1));
        let mut clients = Vec::new();
        for at in 0..self.connections {
            let socket = TcpStream::connect_timeout(&server, Duration::from_secs(10)).context("connecting to the server")?;
            socket::use_cubic(socket.as_fd())?;
            socket.set_nodelay(true)?;
            socket.set_nonblocking(true)?;
            poller.add(socket.as_fd(), at as u64, Trigger::Edge)?;
            clients.push(Client { socket, out: Vec::new(), written: 0, missing: 0 });
        }
        for client in &mut clients {
            self.ask(client, &mut rng)?;
        }
        let (mut tokens, mut buffer) = (Vec::new(), vec![0u8; 1 << 18]);
        while !progress.stop.load(Ordering::Relaxed) {
            poller.wait(Some(Duration::from_millis(20)), &mut tokens)?;
            for token in tokens.drain(..) {
                let client = &mut clients[token as usize];
                client.write()?;
                if client.missing == 0 || !client.answered(&mut buffer)? {
                    continue;
                }
                progress.done.fetch_add(self.depth as u64, Ordering::Relaxed);
                self.ask(client, &mut rng)?;
            }
        }
        Ok(())
    }

    fn ask(&self, client: &mut Client, rng: &mut Rng) -> Result<()> {
        client.out.clear();
        (client.written, client.missing) = (0, 0);
        for at in 0..self.depth {
            if let Some((request, answer)) = &self.fixed {
                client.out.extend_from_slice(request);
                client.missing += answer;
                continue;
            }
            let size = self.choose(rng);
            let (request, answer) = ((size.request as usize).max(HEAD), (size.answer as u32).max(1));
            let begin = client.out.len();
            let calls = if at == 0 { self.calls } else { 0 };
            client.out.extend_from_slice(&head(request as u32, answer, calls));
            client.out.resize(begin + request, 0x5a);
            client.missing += u64::from(answer);
        }
        client.write()
    }

    fn choose(&self, rng: &mut Rng) -> Size {
        let all: f64 = self.sizes.iter().map(|size| size.share).sum();
        let mut left = all * rng.below(1 << 53) as f64 / (1u64 << 53) as f64;
        let found = self.sizes.iter().find(|size| {
            left -= size.share;
            left < 0.0
        });
        found.or(self.sizes.last()).copied().unwrap_or(Size { share: 1.0, request: HEAD as f64, answer: 1.0 })
    }
}

impl Client {
    fn write(&mut self) -> Result<()> {
        while self.written < self.out.len() {
            match socket::send(self.socket.as_fd(), &self.out[self.written..]) {
                Ok(sent) => self.written += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("sending a request"),
            }
        }
        Ok(())
    }

    /// Reads what has come. Whether nothing is missing any more.
    fn answered(&mut self, buffer: &mut [u8]) -> Result<bool> {
        while self.missing > 0 {
            match socket::receive(self.socket.as_fd(), buffer) {
                Ok(0) => bail!("the server closed a connection"),
                Ok(got) => match self.missing.checked_sub(got as u64) {
                    Some(left) => self.missing = left,
                    None => bail!("an answer is longer than it was asked for"),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error).context("a connection broke"),
            }
        }
        Ok(true)
    }
}
