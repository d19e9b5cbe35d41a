//! Who is believed: sockets are what they were when they were registered, and an agent is root's or one's own.

use crate::common::{Scene, answered, connect, hosts, listen_at_freed};
use crate::fuse::{FuseFile, NEVER_FLUSHED};
use crate::hostile_client::{Hostile, echo, listen, swap, take_datagrams};
use crate::scratch::{Scratch, text};
use crate::stopped::in_time;
use baton_bed::container::Container;
use baton_bed::testbed::{TestbedSettings, address_a, address_b};
use baton_client::Session;
use baton_client::tool::Tool;
use baton_linux::control::Channel;
use baton_linux::namespace::Namespace;
use baton_linux::netlink::{self, Netlink};
use baton_linux::{diagnosis, process, socket};
use baton_protocol::program::{Place, Reply};
use baton_wire::Flow;
use std::fs::Permissions;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any of it takes on a loaded machine.
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_socket_with_another_connection_moves_nobody_elses() {
    for elsewhere in [true, false] {
        for beside in [false, true] {
            let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
            let (reply, victim) = swap(&bed, elsewhere);
            let Reply::Stayed { reason, .. } = reply else { panic!("{reply:?}") };
            assert!(!elsewhere || reason.contains("does not have the connection any more"), "{reason}");
            echo(&victim);
        }
    }
}

/// A program that disconnects its socket past the library while the NIC has the connection: the 4-tuple is free again.
#[test]
fn a_disconnected_sockets_connection_ends() {
    let (mut scene, duplicate) = scene_with_duplicate(false);
    socket::disconnect(duplicate.as_fd()).expect("disconnected");
    expect_abort(&mut scene);
}

/// A connection on the NIC, and a duplicate of its program's descriptor.
fn scene_with_duplicate(beside: bool) -> (Scene, TcpStream) {
    let bed = hosts(TestbedSettings { beside, ..TestbedSettings::default() });
    let (server, peer) = connect(&bed, false, 8080);
    let duplicate = server.try_clone().expect("a duplicate");
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let id = session.adopt(OwnedFd::from(server)).expect("adoption");
    let mut scene = Scene { session, id, peer, bed, sent: [0; 2], received: [0; 2] };
    scene.move_to(Place::Nic);
    (scene, duplicate)
}

/// `ss --kill` has its usual effect: the program gets ECONNABORTED, the peer a RST.
#[test]
fn an_administrators_cut_counts() {
    for beside in [false, true] {
        let (mut scene, duplicate) = scene_with_duplicate(beside);
        scene.exchange(10_000, Place::Nic);
        destroy(&scene, &duplicate);
        expect_abort(&mut scene);
    }
}

/// The same of a connection that leaves the NIC just then, as with `--flip`: its socket is not made a connection again.
#[test]
fn a_connection_that_an_administrator_has_cut_does_not_come_back() {
    for beside in [false, true] {
        let (mut scene, duplicate) = scene_with_duplicate(beside);
        scene.exchange(10_000, Place::Nic);
        destroy(&scene, &duplicate);
        let moved = scene.session.move_to(scene.id, Place::Kernel);
        assert!(moved.is_err(), "it has moved");
        expect_abort(&mut scene);
    }
}

/// The same of a connection whose NIC dies just then.
#[test]
fn a_cut_outlives_the_nic() {
    for beside in [false, true] {
        let (mut scene, duplicate) = scene_with_duplicate(beside);
        scene.exchange(10_000, Place::Nic);
        let nic = answered(&scene.bed, Tool::statistics).nic_process;
        destroy(&scene, &duplicate);
        process::signal(nic, libc::SIGKILL).expect("SIGKILL");
        expect_abort(&mut scene);
    }
}

/// Destroys a connection of the first host's in its kernel, as `ss --kill` does.
fn destroy(scene: &Scene, socket: &TcpStream) {
    let ends = [socket.local_addr(), socket.peer_addr()];
    let [local, remote] = ends.map(|address| address.expect("an address").into());
    let flow = Flow { local, remote, device: 0 };
    let netlink = scene.bed.host_a.run(|| Netlink::open(netlink::SOCK_DIAG)).expect("netlink");
    diagnosis::destroy(&netlink, &flow, None).expect("destroyed");
}

/// The program gets ECONNABORTED, the peer a RST.
pub(crate) fn expect_abort(scene: &mut Scene) {
    let deadline = Instant::now() + LONG;
    let error = loop {
        scene.session.poll(Some(Duration::from_millis(10)), &mut Vec::new()).expect("a poll");
        match scene.session.receive(scene.id, &mut [0; 100]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => assert!(Instant::now() < deadline, "no error"),
            Err(error) => break error,
            Ok(count) => panic!("{count} bytes"),
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::ECONNABORTED), "{error}");
    scene.peer.set_nonblocking(false).expect("a flag");
    scene.peer.set_read_timeout(Some(LONG)).expect("a time-out");
    let reset = scene.peer.read(&mut [0; 100]).expect_err("a reset");
    assert_eq!(reset.raw_os_error(), Some(libc::ECONNRESET), "{reset}");
}

#[test]
fn an_attacher_holds_no_addresses_without_a_socket() {
    let bed = hosts(TestbedSettings::default());
    Hostile::start(&bed, "attacher").expect_success();
}

/// A listener that its program has closed without a word: the next one at its port gets its clients.
#[test]
fn a_closed_listeners_port_is_the_next_ones() {
    let bed = hosts(TestbedSettings::default());
    let address = SocketAddr::new(address_a(false), 8081);
    let listener = bed.host_a.run(|| TcpListener::bind(address)).expect("a listener");
    let (_client, reply) = listen(&bed, &listener);
    assert!(matches!(reply, Reply::Listening { .. }), "{reply:?}");
    drop(listener);
    let next = listen_at_freed(&bed, address, "the next listener");
    next.set_nonblocking(true).expect("a flag");
    // Waits: until the NIC no longer makes the first listener's connections. The clients are fewer than its queue has
    // room for: with more, the kernel would get them in any case.
    for _ in 0..100 {
        // Waits: one try of a hundred.
        let client = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(2)));
        if client.is_ok() && next.accept().is_ok() {
            return;
        }
        // Waits: between two of a hundred tries.
        std::thread::sleep(Duration::from_millis(200));
    }
    panic!("clients do not reach it");
}

/// A UDP socket that has lost the port which the kernel had chosen for it: the next one gets its datagrams.
#[test]
fn a_disconnected_udp_sockets_port_is_the_next_ones() {
    let bed = hosts(TestbedSettings::default());
    let far = bed.host_b.run(|| UdpSocket::bind((address_b(false), 0))).expect("a socket");
    let udp = bed.host_a.run(|| UdpSocket::bind((address_a(false), 0))).expect("a socket");
    let address = udp.local_addr().expect("its address");
    let (_client, reply) = take_datagrams(&bed, &udp);
    assert!(matches!(reply, Reply::Datagrams { .. }), "{reply:?}");
    socket::disconnect(udp.as_fd()).expect("disconnected");
    let next = bed.host_a.run(|| UdpSocket::bind(address)).expect("its port is free");
    // Waits: one look of many; the loop has a deadline of its own.
    next.set_read_timeout(Some(Duration::from_millis(100))).expect("a time-out");
    let deadline = Instant::now() + LONG;
    loop {
        far.send_to(b"hello", address).expect("sent");
        if next.recv(&mut [0; 10]).is_ok() {
            return;
        }
        assert!(Instant::now() < deadline, "datagrams do not reach it");
    }
}

fn baton(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(arguments).env_remove("BATON_SOCKET");
    command
}

/// What another user listens at is no agent: neither library nor tool sends it anything, and a list does not wait for
/// it.
#[test]
fn a_listener_of_another_user_is_not_believed() {
    let bed = hosts(TestbedSettings::default());
    let place = std::env::temp_dir().join(format!("baton-impostor-{}", std::process::id()));
    let path = place.join("agent.sock");
    for attack in ["impostor", "liar", "giver"] {
        // Whoever gets this file cannot close it.
        let file = if attack == "giver" { FuseFile::new(&NEVER_FLUSHED) } else { None };
        if attack == "giver" && file.is_none() {
            break;
        }
        let mut hostile = Hostile::start_with(&bed.host_a, &path, "", (attack, 1), file);
        hostile.await_attack();
        let refused = Channel::connect(&path).expect_err("another user's");
        assert!(refused.to_string().contains("by user 65534"), "{refused}");
        let socket = path.to_str().expect("a path");
        let ran = baton(&["run", "--socket", socket, "--", "true"]).output().expect("baton");
        assert!(!ran.status.success() && text(&ran.stderr).contains("by user 65534"), "{}", text(&ran.stderr));
        // It runs as what calls itself an agent, too.
        for arguments in [&["ls"][..], &["ls", "--json"], &["ls", "--socket", socket]] {
            let began = Instant::now();
            let mut list = baton(arguments);
            let listed = in_time("a list", move || list.output().expect("baton"));
            assert!(began.elapsed() < LONG, "it took {:?}", began.elapsed());
            let all = [listed.stdout, listed.stderr].concat();
            assert!(!all.contains(&0x1b) && !all.contains(&7), "{}", text(&all));
            let all = text(&all);
            let says = ["has not answered in time", "has no end", "\\u{1b}"].iter().any(|what| all.contains(what));
            assert!(says, "{arguments:?}: {all}");
        }
        drop(hostile);
        let _ = std::fs::remove_file(&path);
    }
    let _ = std::fs::remove_dir_all(&place);
}

/// The directory of the Baton that `baton run` starts with this TMPDIR, from inside of it: its path, owner and mode.
fn run_directory(temporary: &str) -> (String, String) {
    let host = Namespace::new().expect("a namespace (root is needed)");
    let mut command = baton(&["run", "--", "sh", "-c", "d=$(dirname $BATON_SOCKET); echo $d; stat -c '%u %a' $d"]);
    let ran = host
        .spawn(command.env("TMPDIR", temporary).stdout(Stdio::piped()))
        .expect("baton")
        .wait_with_output()
        .expect("its output");
    assert!(ran.status.success());
    let said = text(&ran.stdout);
    let (path, rest) = said.split_once('\n').expect("two lines");
    (path.to_owned(), rest.trim().to_owned())
}

/// The directory of a Baton that `run` has started is in one that only its user can write: nobody else can make it
/// again.
#[test]
fn a_run_directory_is_where_nobody_else_can_make_it() {
    let scratch = Scratch::new("run-directory");
    let [own, shared, foreign, link] = ["own", "shared", "foreign", "link"].map(|name| scratch.file(name));
    for (path, mode) in [(&own, 0o755), (&shared, 0o1777), (&foreign, 0o755)] {
        std::fs::create_dir(path).expect("a directory");
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode");
    }
    std::os::unix::fs::chown(&foreign, Some(65_534), Some(65_534)).expect("another owner");
    std::os::unix::fs::symlink(&own, &link).expect("a link");
    let below = format!("{shared}/below");
    std::fs::create_dir(&below).expect("a directory");
    for (temporary, taken) in [(&own, true), (&shared, false), (&foreign, false), (&link, false), (&below, true)] {
        let (path, owner_and_mode) = run_directory(temporary);
        assert_eq!(owner_and_mode, "0 711", "{path}");
        assert_eq!(path.starts_with(&format!("{temporary}/baton-run-")), taken, "{path} with {temporary}");
        assert!(taken || path.starts_with("/run/baton/baton-run-"), "{path}");
    }
}

/// Another user listens where an agent has listened, and says what it is sent.
const IMPOSTOR: &str = "
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[1])
s.listen(8)
print('ready', flush=True)
while True:
    c = s.accept()[0]
    got = c.recv(65536)
    print('sent' if got else 'nothing', flush=True)
    c.close()
";

/// A program with a connection.
const CONNECTS: &str = "
import socket
s = socket.create_server(('127.0.0.1', 0))
c = socket.create_connection(s.getsockname())
c.sendall(b'hello')
assert s.accept()[0].recv(5) == b'hello'
";

/// A program that has become `nobody` since `baton run` started it does not believe what another one of that user
/// listens at.
#[test]
fn a_program_that_changes_its_user_believes_who_started_it() {
    let scratch = Scratch::new("changed-user");
    std::fs::set_permissions(&scratch.0, Permissions::from_mode(0o1777)).expect("its mode");
    let host = Namespace::new().expect("a namespace (root is needed)");
    assert!(host.spawn(Command::new("ip").args(["link", "set", "lo", "up"])).expect("ip").wait().expect("its status").success());
    let socket = scratch.file("agent.sock");
    let mut up = host.spawn(baton(&["up", "--socket", &socket]).stderr(Stdio::piped())).expect("baton");
    BufReader::new(up.stderr.take().expect("its messages")).read_line(&mut String::new()).expect("a line");
    let mut shown = baton(&["run", "--socket", &socket, "--rule", "connected", "--", "env"]);
    let shown = host.spawn(shown.stdout(Stdio::piped())).expect("baton").wait_with_output().expect("its output");
    process::signal(up.id(), libc::SIGTERM).expect("our child");
    let _ = up.wait();
    let environment = text(&shown.stdout);
    let value = |name: &str| environment.lines().find_map(|line| line.strip_prefix(name)).expect("the variable").to_owned();
    let (run, library) = (value("BATON_RUN="), value("LD_PRELOAD="));
    // The control: one that was started by the same user.
    for (run, sends) in [(run.replace("\"user\":0", "\"user\":65534"), true), (run, false)] {
        let mut impostor = Command::new("setpriv");
        impostor
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", IMPOSTOR, &socket])
            .stdout(Stdio::piped());
        let mut impostor = host.spawn(&mut impostor).expect("python3");
        let mut said = BufReader::new(impostor.stdout.take().expect("its output")).lines().map_while(Result::ok);
        assert_eq!(said.next().as_deref(), Some("ready"));
        let mut program = Command::new("setpriv");
        program
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", CONNECTS])
            .env("LD_PRELOAD", &library)
            .env("BATON_RUN", &run);
        assert!(host.spawn(&mut program).expect("python3").wait().expect("its status").success());
        impostor.kill().expect("our child");
        let _ = impostor.wait();
        assert_eq!(said.any(|line| line == "sent"), sends, "{run}");
        std::fs::remove_file(&socket).expect("the socket");
    }
}

/// In a container, whose users are all others outside: what the administrator has put where nobody inside can write is
/// believed, what anybody can have put into a shared directory is not.
#[test]
fn in_a_container_the_path_decides() {
    let container = Container::new().expect("a container (root is needed)");
    let place = Path::new("/run").join(format!("baton-test-trust-{}", std::process::id()));
    std::fs::create_dir_all(&place).expect("a directory that only root can write");
    let scratch = Scratch::new("trust");
    let shared = scratch.file("agent.sock");
    for (path, believed) in [(place.join("agent.sock"), true), (Path::new(&shared).to_owned(), false)] {
        let socket = path.to_str().expect("a path");
        let host = baton_linux::namespace::Namespace::new().expect("a namespace");
        let mut command = baton(&["up", "--socket", socket]);
        let mut up = host.spawn(command.stderr(Stdio::piped())).expect("baton");
        let mut messages = BufReader::new(up.stderr.take().expect("its messages"));
        messages.read_line(&mut String::new()).expect("a line");
        let mut inside = container.command(env!("CARGO_BIN_EXE_baton"));
        let ran = inside.args(["run", "--socket", socket, "--", "true"]).output().expect("baton");
        let said = text(&ran.stderr);
        let refused = said.contains("is listened at by user 65534, who is neither root");
        process::signal(up.id(), libc::SIGTERM).expect("our child");
        let _ = up.wait();
        assert_eq!(refused, !believed, "{}: {said}", path.display());
        assert!(!believed || ran.status.success(), "{said}");
    }
    let _ = std::fs::remove_dir_all(&place);
}
