//! How connections end: a reset behind the end of a stream, a descriptor that another thread closes, a connection that
//! its program dissolves.

use crate::library::{finish, set_up_loopback};
use crate::scratch::{Scratch, text};
use baton_linux::namespace::Namespace;
use std::process::Command;

/// What a Python program prints, natively or under `baton run` with these arguments.
fn run(how: &[&str], program: &str) -> String {
    let scratch = Scratch::new("ends");
    let namespace = Namespace::new().expect("a namespace");
    let mut command = if how.is_empty() {
        set_up_loopback(&namespace);
        Command::new("python3")
    } else {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--eager", "--log", &scratch.file("log")]).args(how).args(["--", "python3"]);
        command
    };
    command.args(["-c", program]).env("TMPDIR", &scratch.0).env_remove("BATON_SOCKET");
    let ran = finish(&namespace, command);
    let log = std::fs::read_to_string(scratch.file("log")).unwrap_or_default();
    assert!(ran.status.success() && log.is_empty(), "{how:?}: {}{}{log}", text(&ran.stdout), text(&ran.stderr));
    text(&ran.stdout)
}

fn as_natively(program: &str) {
    let native = run(&[], program);
    for how in [["--rule", "never"], ["--rule", "established"], ["--flip", "0..3"]] {
        assert_eq!(run(&how, program), native, "{how:?}");
    }
}

/// Connections whose peer ends its stream and then resets, at once or a moment later, in all ways to find that out.
const RESETS: &str = "
import collections, errno, random, select, socket, struct, time
def attempt(call):
    try: return call()
    except OSError as error: return errno.errorcode[error.errno]
def poll(one, events):
    poll = select.poll()
    poll.register(one, events)
    # The kernel notes a reset's error before the rest (tcp_reset): a poll in between reports the error alone.
    while (found := poll.poll(20000)[0][1]) == select.POLLERR: pass
    return found
listener = socket.create_server(('127.0.0.1', 0), backlog=100)
seen = set()
for round in range(200):
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for _ in range(random.randrange(1, 6)):
        client.sendall(b'x' * 4000); assert len(server.recv(4000, socket.MSG_WAITALL)) == 4000
        server.sendall(b'x' * 4000); assert len(client.recv(4000, socket.MSG_WAITALL)) == 4000
    one, peer = (server, client) if round & 1 else (client, server)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    peer.shutdown(socket.SHUT_WR)
    found = []
    if round & 2: found.append(one.recv(10))
    # Waits: so that the reset comes a moment after the end, in the middle of a move or behind it.
    if round & 4: time.sleep(random.random() * 0.01)
    peer.close()
    found.append(poll(one, 0))
    way = round % 5
    if way == 0: found.append(attempt(lambda: one.send(b'a')))
    if way == 1: found.append(errno.errorcode.get(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
    if way == 2: found.append(attempt(lambda: one.recv(10)))
    if way == 3: found.append(attempt(lambda: one.sendmsg([b'abc', b'd'])))
    if way == 4: found.append(attempt(lambda: one.send(b'')))
    found += [attempt(lambda: one.send(b'a')), attempt(lambda: one.recv(10)), attempt(lambda: one.recv(10))]
    seen.add((way, str(found)))
    one.close()
for one in sorted(seen): print(one)
";

/// A reset in CLOSE-WAIT is EPIPE, wherever the connection is, and if it moves meanwhile.
#[test]
fn a_reset_behind_the_end_is_a_broken_pipe() {
    as_natively(RESETS);
}

/// Connections that both sides have ended while much was unread, which is then read past the library, and by it.
const UNREAD: &str = "
import ctypes, os, select, socket, struct
libc = ctypes.CDLL(None)
libc.fdopen.restype, libc.fdopen.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_char_p]
libc.fread.argtypes, libc.fclose.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p], [ctypes.c_void_p]
listener = socket.create_server(('127.0.0.1', 0), backlog=100)
sent = bytes(range(256)) * 200
def ended():
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for _ in range(5):
        client.sendall(b'x' * 4000); assert len(server.recv(4000, socket.MSG_WAITALL)) == 4000
        server.sendall(b'x' * 4000); assert len(client.recv(4000, socket.MSG_WAITALL)) == 4000
    server.sendall(sent)
    server.shutdown(socket.SHUT_WR)
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    poll.poll(20000)
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b''
    # Until our FIN is acknowledged, too (state 7 is CLOSE).
    while client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != b'\\x07': pass
    return client, server
def receive(one):
    got = b''
    while piece := one.recv(10000): got += piece
    return got
def stream(one):
    file = libc.fdopen(os.dup(one.fileno()), b'r')
    room = ctypes.create_string_buffer(2 * len(sent))
    got = room.raw[:libc.fread(room, 1, len(room), file)]
    libc.fclose(file)
    return got
def splice(one):
    out, into = os.pipe()
    got = b''
    while moved := os.splice(one.fileno(), into, 10000): got += os.read(out, moved)
    os.close(out); os.close(into)
    return got
def child(one):
    out, into = os.pipe()
    if os.fork() == 0:
        os.close(out)
        got = receive(one)
        while got: got = got[os.write(into, got):]
        os._exit(0)
    os.close(into)
    got = b''
    while piece := os.read(out, 65536): got += piece
    os.close(out); os.wait()
    return got
for round in range(5):
    for way in receive, stream, splice, child:
        one, peer = ended()
        print(way.__name__, way(one) == sent, one.recv(10), flush=True)
        try: one.send(b'a')
        except OSError as error: print(error)
        one.close(); peer.close()
";

/// What was received before both sides ended a connection can be read from wherever programs read.
#[test]
fn what_is_unread_when_both_sides_have_ended_can_be_read_in_every_way() {
    as_natively(UNREAD);
}

/// One thread sleeps in recv, another one closes the descriptor, whose number the next connection gets. Then both peers
/// send.
const CLOSES: &str = "
import errno, os, socket, sys, threading
listener = socket.create_server(('127.0.0.1', 0), backlog=100)
def pair():
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for _ in range(5):
        client.sendall(b'x' * 40000); assert len(server.recv(40000, socket.MSG_WAITALL)) == 40000
        server.sendall(b'x' * 40000); assert len(client.recv(40000, socket.MSG_WAITALL)) == 40000
    return client, server
def asleep(thread): return open(f'/proc/self/task/{thread.native_id}/stat').read().rsplit(') ')[1][0] == 'S'
results = set()
for round in range(20):
    client, server = pair()
    number, got = server.fileno(), []
    def receive():
        try: got.append(server.recv(3))
        except OSError as error: got.append(errno.errorcode[error.errno])
    thread = threading.Thread(target=receive)
    thread.start()
    while sum(asleep(thread) for _ in range(3)) < 3: pass
    os.close(number)
    other, _ = pair_of_next = pair()
    assert number in (one.fileno() for one in pair_of_next), 'the number is not used again'
    pair_of_next[0].sendall(b'new')
    try: client.sendall(b'old')
    except OSError: pass
    thread.join(20)
    assert not thread.is_alive() and got[0] in (b'old', 'EBADF'), got
    assert pair_of_next[1].recv(3, socket.MSG_WAITALL) == b'new'
    server.detach()
    for one in (client, *pair_of_next): one.close()
print('right')
";

/// It gets what was sent over its connection, as natively, or EBADF; never what another connection brings.
#[test]
fn a_descriptor_that_another_thread_closes() {
    as_natively(CLOSES);
}

/// A connection that was made by connect(2), and is dissolved: its socket is as one that was never connected.
const DISSOLVES: &str = "
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    try: return call() or 0
    except OSError as error: return errno.errorcode[error.errno]
for bound in (False, True):
    for then in ('bind', 'listen', 'connect'):
        listener = socket.create_server(('127.0.0.1', 0))
        client = socket.socket()
        if bound: client.bind(('127.0.0.1', 0))
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        for _ in range(5):
            client.sendall(b'x' * 40000); assert len(server.recv(40000, socket.MSG_WAITALL)) == 40000
            server.sendall(b'x' * 40000); assert len(client.recv(40000, socket.MSG_WAITALL)) == 40000
        assert libc.connect(client.fileno(), ctypes.create_string_buffer(16), 16) == 0
        found = [bound, then, client.getsockname()[0]]
        if then == 'bind': found.append(attempt(lambda: client.bind(('127.0.0.1', 0))))
        if then != 'connect':
            found.append(attempt(lambda: client.listen(5)))
            again = socket.create_connection(('127.0.0.1', client.getsockname()[1]))
            accepted, _ = client.accept()
        else:
            found.append(attempt(lambda: client.connect(listener.getsockname())))
            again, (accepted, _) = client, listener.accept()
        again.sendall(b'hello')
        found.append(accepted.recv(5, socket.MSG_WAITALL))
        print(*found)
";

/// It can be bound, listen and connect anew.
#[test]
fn a_dissolved_connection_leaves_nothing() {
    as_natively(DISSOLVES);
}
