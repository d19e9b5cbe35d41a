//! Descriptors that nobody receives: they wait in the queues of sockets that agent, keeper or NIC close, or more of
//! them come than with any message of Baton's. Each is the last one of its file, which takes long to close.

use super::blockers::lingering;
use super::{Client, PEER, alone, ask_on};
use baton_abi::layout::session as at;
use baton_linux::control::{Channel, MOST_RECEIVED, try_send_bytes};
use baton_linux::socket;
use baton_protocol::program::{Ask, Reply, Request, Rings};
use baton_shm::Region;
use std::io::Read;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::mpsc::channel;

/// A program that sends them.
struct Sender<'a> {
    agent: &'a Path,
    peer: SocketAddr,
    /// Sent along with each of them, if there is one. It is never closed, which would take for ever.
    file: Option<&'static OwnedFd>,
}

impl Sender<'_> {
    fn connect(&self) -> Channel {
        Channel::connect(self.agent).expect("the agent")
    }

    /// Sends a socket that lingers, behind so many descriptors of what is closed at once. Returns whether it was taken.
    fn send(&self, to: BorrowedFd<'_>, behind: usize) -> bool {
        self.send_after(None, to, behind)
    }

    /// The same, as soon as something else was sent.
    fn send_after(&self, first: Option<&'static [u8]>, to: BorrowedFd<'_>, behind: usize) -> bool {
        let (memory, socket) = (Region::create("hostile", 4096).expect("memory"), lingering(self.peer));
        let (to, file) = (to.try_clone_to_owned().expect("a descriptor"), self.file);
        let (sender, receiver) = channel();
        // If whoever gets it is faster, this is the thread that closes the last one, and it stays there.
        std::thread::spawn(move || {
            let taken = {
                let mut descriptors = vec![memory.fd().expect("its descriptor"); behind];
                descriptors.push(socket.as_fd());
                descriptors.extend(file.map(AsFd::as_fd));
                let _ = first.map(|first| try_send_bytes(to.as_fd(), first, &[]));
                try_send_bytes(to.as_fd(), b"x", &descriptors).is_ok()
            };
            drop(to);
            let _ = sender.send(taken);
            drop(socket);
        });
        receiver.recv().expect("a word")
    }

    /// More than there are in any message of Baton's, though not more than a message may have.
    fn many_at_once(&self) {
        for behind in [30, 32, 100, MOST_RECEIVED - 2] {
            // With files that do not close the user is turned away in the end.
            assert!(self.send(self.connect().as_fd(), behind) || self.file.is_some(), "behind {behind}");
        }
    }

    /// Behind an empty message, which looks as if this program were gone, and behind words that are no request.
    fn behind_what_is_no_request(&self) {
        for round in 0..40 {
            let first: &[u8] = if round % 2 == 0 { b"" } else { b"\xff\xff\xff" };
            // It may have been cut off by now.
            let _ = self.send_after(Some(first), self.connect().as_fd(), 0);
        }
    }

    /// With requests whose answers it does not read, until it is cut off. All have the same socket: the last descriptor
    /// of that is in a request which was not received.
    fn without_reading(&self) -> Channel {
        let channel = self.connect();
        let request = Request { tag: 9, body: Ask::Statistics };
        for _ in 0..60 {
            let _ = channel.try_send(&request, &[]);
        }
        let socket = lingering(self.peer);
        let _ = (0..1000).take_while(|_| channel.try_send(&request, &[socket.as_fd()]).is_ok()).count();
        // As in `send`.
        std::thread::spawn(move || drop(socket));
        channel
    }

    /// On the queue of a listener on the NIC, from which it is only to read.
    fn on_a_listeners_queue(&self, client: &Client) {
        let listener = TcpListener::bind(SocketAddr::from(([0; 4], 0))).expect("a listener");
        let (reply, mut given) = ask_on(&client.channel, Ask::Listen, &[listener.as_fd()]).expect("an answer");
        assert!(matches!(reply, Reply::Listening { .. }), "{reply:?}");
        let queue = given.pop().expect("the queue");
        assert!(!self.send(queue.as_fd(), 0), "the queue takes descriptors");
    }

    /// On its doorbells, which the NIC reads. Before Linux 6.16 nobody can refuse them.
    fn on_doorbells(&self, client: &Client) {
        for bell in &client.bells {
            assert!(!socket::refuse_descriptors(bell.as_fd()) || !self.send(bell.as_fd(), 0), "a doorbell takes descriptors");
        }
    }

    /// On the doorbell of a UDP socket, whose end it has filled before the NIC gets it.
    fn on_its_own_doorbell(&self, client: &Client) {
        let udp = UdpSocket::bind(SocketAddr::from(([0; 4], 0))).expect("a socket");
        let (bell, theirs) = UnixDatagram::pair().expect("a doorbell");
        assert!(self.send(bell.as_fd(), 0), "its own doorbell takes none");
        let rings = Rings { base: at::heap_end(client.memory.len()) as u32, receive: 4096, send: 4096 };
        let ask = Ask::Datagrams { rings };
        let (reply, _) = ask_on(&client.channel, ask, &[udp.as_fd(), theirs.as_fd()]).expect("an answer");
        assert!(matches!(reply, Reply::Datagrams { .. }), "{reply:?}");
    }
}

/// Sends them everywhere.
pub fn run(agent: &Path, begun: impl Fn(), file: Option<OwnedFd>) {
    let peer = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let sender = Sender { agent, peer, file: file.map(|file| &*Box::leak(Box::new(file))) };
    // Its session ends before the agent turns away whose files do not close.
    let client = Client::open(agent, alone()).expect("a session");
    sender.on_a_listeners_queue(&client);
    sender.on_doorbells(&client);
    sender.on_its_own_doorbell(&client);
    drop(client);
    sender.many_at_once();
    let _channel = sender.without_reading();
    sender.behind_what_is_no_request();
    begun();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}
