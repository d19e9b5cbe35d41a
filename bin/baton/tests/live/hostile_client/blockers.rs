//! Programs that do not do what others could wait for.

use super::{Client, PEER, alone, ask_on, move_to_nic};
use baton_protocol::program::{Ask, Opening, Reply};
use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;

/// An attacher whose connection is on the NIC, and that lends nothing when it is asked.
pub fn lend_nothing(socket: &Path, begun: impl Fn()) {
    let client = Client::open(socket, Opening { attacher: true, ..alone() }).expect("a session");
    let peer: SocketAddr = std::env::var(PEER).expect("a peer").parse().expect("an address");
    let stream = TcpStream::connect(peer).expect("a connection to the peer");
    let ask = Ask::Register { inherited: false, process: Some(std::process::id()) };
    let Some((Reply::Registered { connection }, _)) = ask_on(&client.channel, ask, &[stream.as_fd()]) else { panic!("no") };
    move_to_nic(&client, connection, &stream);
    begun();
    // Until its test ends it.
    let _ = std::io::stdin().read(&mut [0]);
}
