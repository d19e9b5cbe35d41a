//! Listening sockets whose connections the NIC makes, and those connections.

use baton_abi::layout::Owner;
use baton_bed::testbed::{Testbed, address_a};
use baton_client::{Connection, Entered, Listener, Shared};
use baton_linux::socket;
use baton_protocol::program::Opening;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

/// The listeners' port.
pub const PORT: u16 = 8081;

/// Token of the one thread that uses the session.
const ME: u32 = 1;

/// A listening socket that the NIC serves.
struct Served {
    number: u32,
    /// Has a byte for each connection that waits.
    queue: UnixStream,
    _listener: TcpListener,
}

/// A session with a listener for each family.
pub struct Listening {
    shared: Arc<Shared>,
    served: [Served; 2],
}

/// The program's end of a connection that the NIC has made.
pub struct Made {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    fd: OwnedFd,
}

impl Listening {
    /// Listens on host A. Until the NIC has slots for the listeners its kernel answers their clients.
    pub fn new(bed: &Testbed) -> Listening {
        let shared = Shared::connect(&bed.socket(), Opening::alone(), Listener(Box::new(|_| ()))).expect("a session");
        let shared = Arc::new(shared);
        let listen = |ipv6| {
            let at = SocketAddr::new(address_a(ipv6), PORT);
            let listener = bed.host_a.run(|| TcpListener::bind(at)).expect("a listener");
            // Its connections have it from the listener.
            socket::set(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1).expect("TCP_NODELAY");
            let (number, queue) = shared.listen(listener.as_fd()).expect("the NIC has it");
            let queue = UnixStream::from(queue);
            queue.set_nonblocking(true).expect("non-blocking");
            Served { number, queue, _listener: listener }
        };
        Listening { served: [listen(false), listen(true)], shared }
    }

    /// Takes the next connection that the NIC has made, and the port of its peer.
    pub fn accept(&self, ipv6: bool) -> Option<(Made, u16)> {
        let Served { number, queue, .. } = &self.served[usize::from(ipv6)];
        let mut queue: &UnixStream = queue;
        if !matches!(queue.read(&mut [0]), Ok(1)) {
            return None;
        }
        let (connection, mut descriptor) = (self.shared.unregistered(), None);
        let accepted = self.shared.accept(*number, ME, |fd| {
            descriptor = Some(fd);
            connection.clone()
        });
        accepted.expect("an answer")?;
        let fd = descriptor?;
        let peer = socket::peer_address(fd.as_fd()).expect("its peer").port();
        Some((Made { shared: self.shared.clone(), connection, fd }, peer))
    }

    /// Handles the NIC's events.
    pub fn catch_up(&self) {
        self.shared.catch_up(ME);
    }
}

impl Made {
    /// Begins a call; an error while it is moving.
    fn enter(&self) -> io::Result<Entered<'_>> {
        self.shared.catch_up(ME);
        self.shared.enter(&self.connection, ME).ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Queues bytes for sending.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        let entered = self.enter()?;
        if entered.owner == Owner::Nic {
            return self.shared.send(&self.connection, ME, bytes);
        }
        socket::send(self.fd.as_fd(), bytes)
    }

    /// Receives bytes.
    pub fn receive(&self, out: &mut [u8]) -> io::Result<usize> {
        let entered = self.enter()?;
        if entered.owner == Owner::Nic {
            return self.shared.receive(&self.connection, ME, out);
        }
        socket::receive(self.fd.as_fd(), out)
    }

    /// Ends the sending side.
    pub fn shutdown(&self) -> io::Result<()> {
        let entered = self.enter()?;
        if entered.owner == Owner::Nic {
            return self.shared.shutdown(&self.connection, ME);
        }
        socket::shutdown_write(self.fd.as_fd())
    }

    /// Whether it is not moving.
    pub fn is_settled(&self) -> bool {
        self.connection.owner() != Owner::Moving
    }

    /// Closes it.
    pub fn close(self) {
        self.shared.forget(&self.connection, std::time::Duration::ZERO).expect("close");
    }
}
