//! Connections that the NIC has made are closed by it.

use super::{
    ECHO, Program, address, bed, connect, connections, count, exchange, start, start_printing, statistics, wait_for_server,
    wait_until,
};
use crate::scratch::text;
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, address_b};
use baton_linux::{process, socket};
use baton_protocol::program::{Ask, Place, Reply};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::Duration;

in_both_shapes! {
    the_nic_closes_what_it_has_made
    a_death_while_the_nic_closes_loses_nothing
    a_death_before_the_close_loses_nothing
    a_closed_listener_resets_its_clients
    a_listener_that_another_process_has_resets_nobody
}

/// A server that sends what it is asked for, so many bytes, and closes at once.
const SEND_AND_CLOSE: &str = "
import socket, threading
listener = socket.create_server(('', 7000), backlog=100)
def serve(one):
    length = int(one.makefile('rb').readline())
    one.sendall(bytes(n * 7 & 255 for n in range(256)) * (length // 256))
    one.close()
while True: threading.Thread(target=serve, args=(listener.accept()[0],)).start()
";

/// Asks such a server for so many bytes.
fn ask_for(bed: &Testbed, length: usize) -> TcpStream {
    let mut client = connect(bed, address(false, 7000)).expect("a connection");
    client.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
    writeln!(client, "{length}").expect("room");
    client
}

/// Reads to the end of the stream, and compares.
fn read_all(mut client: TcpStream, length: usize) {
    let mut received = Vec::new();
    client.read_to_end(&mut received).expect("an orderly end");
    assert_eq!(received.len(), length);
    assert!(received.iter().enumerate().all(|(at, byte)| *byte == (at * 7) as u8));
}

fn kernels_sockets(bed: &Testbed, filter: &str) -> String {
    let mut command = Command::new("ss");
    command.arg("-Htan").args(filter.split(' ')).stdout(Stdio::piped());
    text(&bed.host_a.spawn(&mut command).expect("ss").wait_with_output().expect("its output").stdout).to_owned()
}

/// The NIC closes what it has made: no connection goes to the kernel for that, and none waits there.
fn the_nic_closes_what_it_has_made(beside: bool) {
    let bed = bed(beside);
    let _server = start(&bed, &["python3", "-c", SEND_AND_CLOSE]);
    wait_for_server(&bed, address(false, 7000));
    let before = statistics(&bed);
    let resets = crate::moves::resets_sent(&bed.host_a);
    for _ in 0..300 {
        read_all(ask_for(&bed, 10_240), 10_240);
    }
    let closes_late = ask_for(&bed, 10_240);
    read_all(closes_late.try_clone().expect("a descriptor"), 10_240);
    wait_until("the end of all connections", || connections(&bed).iter().all(|one| one.made_by != Place::Nic));
    drop(closes_late);
    // One more, behind the FIN.
    read_all(ask_for(&bed, 2560), 2560);
    assert_eq!(crate::moves::resets_sent(&bed.host_a) - resets, 0, "segments of the NIC's connections have reached the kernel");
    let now = statistics(&bed);
    assert_eq!(now.counters[Counter::Made as usize], before.counters[Counter::Made as usize] + 302);
    assert_eq!((now.failed_moves, now.lost), (0, 0));
    // To the NIC, when they are accepted.
    assert!(now.moves - before.moves < 310, "{} moves", now.moves - before.moves);
    assert_eq!(kernels_sockets(&bed, "state time-wait sport = :7000"), "");
    // The same 4-tuple at once: the NIC lets it follow one that waits (RFC 6191).
    let from = SocketAddr::new(address_b(false), 33_000);
    for _ in 0..3 {
        let mut client = None;
        // The last one's end may be on its way to host B.
        wait_until("the next connection", || {
            client = bed.host_b.run(|| connect_from(from, address(false, 7000))).ok();
            client.is_some()
        });
        let mut client = client.expect("a connection");
        client.set_read_timeout(Some(Duration::from_secs(30))).expect("a limit");
        writeln!(client, "2560").expect("room");
        read_all(client, 2560);
    }
}

/// Connects from an address and port.
fn connect_from(from: SocketAddr, to: SocketAddr) -> std::io::Result<TcpStream> {
    const SOL_SOCKET: i32 = 1;
    const SO_REUSEADDR: i32 = 2;
    let stream = socket::stream(false, 0)?;
    socket::set(stream.as_fd(), SOL_SOCKET, SO_REUSEADDR, 1)?;
    socket::bind(stream.as_fd(), from)?;
    socket::connect(stream.as_fd(), to)?;
    Ok(TcpStream::from(stream))
}

/// A program closes, and the NIC or the agent dies before the peer has everything: the kernel sends the rest and the
/// FIN.
fn a_death_while_the_nic_closes_loses_nothing(beside: bool) {
    // More than the peer's window until it reads, and not more than that and send memory: all is closed when the death
    // comes.
    a_death_while_some_is_unread(beside, 256 << 10, "its program has closed it");
}

/// The program is still sending at the death, and closes at the next NIC or in the kernel.
fn a_death_before_the_close_loses_nothing(beside: bool) {
    a_death_while_some_is_unread(beside, 4 << 20, "");
}

/// Four peers ask for so many bytes and read none. When the agent gives the reason for each of their connections, NIC
/// or agent dies.
fn a_death_while_some_is_unread(beside: bool, length: usize, reason: &str) {
    for agent_dies in [false, true] {
        let bed = bed(beside);
        let _server = start(&bed, &["python3", "-c", SEND_AND_CLOSE]);
        wait_for_server(&bed, address(false, 7000));
        let clients: Vec<TcpStream> = (0..4).map(|_| ask_for(&bed, length)).collect();
        wait_until("all connections in that state", || {
            let there = |client: &TcpStream| client.peek(&mut [0]).is_ok_and(|count| count > 0);
            clients.iter().all(there) && connections(&bed).iter().filter(|one| one.reason.contains(reason)).count() == 4
        });
        let first = statistics(&bed);
        process::signal(if agent_dies { first.agent_process } else { first.nic_process }, 9).expect("a signal");
        wait_until("the next NIC", || {
            let answer = bed.tool().and_then(|mut tool| tool.ask(Ask::Statistics));
            matches!(answer, Ok(Reply::Statistics(now)) if now.nic_process != first.nic_process)
        });
        for client in clients {
            read_all(client, length);
        }
        wait_until("the end of all connections", || connections(&bed).is_empty());
        assert_eq!(statistics(&bed).lost, 0);
        read_all(ask_for(&bed, 2560), 2560);
    }
}

/// A server that accepts nobody, and closes its listener when it is sent a line on standard input.
const CLOSES: &str = "
import select, socket, sys
listener = socket.create_server(('', int(sys.argv[1])), backlog=100)
select.select([listener], [], [])
sys.stdin.readline()
listener.close()
sys.stdin.readline()
";

/// What was not accepted when a listener is closed is reset, whether it has sent anything or not: as natively.
fn a_closed_listener_resets_its_clients(beside: bool) {
    let bed = bed(beside);
    for (with_baton, port) in [(false, 7001), (true, 7000)] {
        let at = address(false, port);
        let mut server = if with_baton {
            start(&bed, &["python3", "-c", CLOSES, &port.to_string()])
        } else {
            let mut command = Command::new("python3");
            command.args(["-c", CLOSES, &port.to_string()]).stdin(Stdio::piped());
            Program(bed.host_a.spawn(&mut command).expect("a program"))
        };
        wait_until("a server", || connect(&bed, at).is_ok());
        if with_baton {
            wait_for_server(&bed, at);
        }
        let before = statistics(&bed).counters[Counter::Made as usize];
        let clients: Vec<TcpStream> = (0..4).map(|_| connect(&bed, at).expect("a connection")).collect();
        for mut client in clients.iter().take(2) {
            client.write_all(&[7; 1000]).expect("room");
        }
        let made = if with_baton { 4 } else { 0 };
        wait_until("all connections", || statistics(&bed).counters[Counter::Made as usize] == before + made);
        server.0.stdin.as_mut().expect("its input").write_all(b"close\n").expect("a server");
        for mut client in clients {
            client.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
            let read = client.read(&mut [0; 10]);
            assert!(
                read.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset),
                "{read:?}, with Baton: {with_baton}"
            );
        }
    }
    assert_eq!(statistics(&bed).lost, 0);
}

/// A child waits for the listener and accepts nobody. At the first line on standard input it leaves the listener, by
/// close(2) or by its end; at the second one its parent, which has waited for nothing until then, goes on as [`ECHO`].
const RELOADS: &str = "
import os, select, socket, sys
listener = socket.create_server(('', 7000), backlog=100)
orders, order = os.pipe()
child = os.fork()
if child == 0:
    select.select([listener], [], [])
    os.read(orders, 1)
    if sys.argv[1] == 'closes': listener.close()
    os._exit(0)
sys.stdin.readline()
os.write(order, b'x')
os.waitpid(child, 0)
print('left', flush=True)
sys.stdin.readline()
";

/// The last process that has waited for a listener leaves it, as nginx's workers do at a reload, while another one has
/// it: what waits to be accepted is accepted by that one.
fn a_listener_that_another_process_has_resets_nobody(beside: bool) {
    let program = RELOADS.to_owned() + &ECHO.replace("listener = socket.create_server(('', 7000), backlog=20)\n", "");
    for how in ["closes", "ends"] {
        let bed = bed(beside);
        let at = address(false, 7000);
        let (mut server, mut lines) = start_printing(&bed, &["python3", "-c", &program, how]);
        let mut orders = server.0.stdin.take().expect("its input");
        wait_for_server(&bed, at);
        let made = count(&bed, Counter::Made);
        let clients: Vec<TcpStream> = (0..4).map(|_| connect(&bed, at).expect("a connection")).collect();
        (&clients[0]).write_all(&[7; 1000]).expect("room");
        wait_until("all connections", || count(&bed, Counter::Made) == made + 4);
        writeln!(orders, "leave").expect("a server");
        assert_eq!(lines.next().expect("a line").expect("text"), "left");
        // Waits: the agent looks five times a second whether the socket still listens; there is no event if it does.
        std::thread::sleep(Duration::from_millis(500));
        writeln!(orders, "accept").expect("a server");
        let mut received = [0; 1000];
        clients[0].set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
        (&clients[0]).read_exact(&mut received).expect("the echo");
        assert_eq!(received, [7; 1000]);
        for (client, byte) in clients.iter().zip(1..) {
            exchange(client, byte);
        }
        // The listener is the parent's now, and the NIC's again.
        wait_for_server(&bed, at);
        assert_eq!(statistics(&bed).lost, 0, "{how}");
    }
}
