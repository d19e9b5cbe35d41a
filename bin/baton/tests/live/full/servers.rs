//! Servers of different kinds, and several workers, under full offload.

use super::{address, bed, count, on_b, start, statistics, wait_for_server};
use crate::common::hosts;
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{TestbedSettings, address_a};
use std::net::SocketAddr;
use std::process::Command;

in_both_shapes! {
    servers_of_all_kinds_are_served
}

/// With several workers every connection is made, whichever worker owns its bucket, and goes on while buckets change
/// hands.
#[test]
fn several_workers_make_connections() {
    let bed = hosts(TestbedSettings { workers: 3, nic_cores: Vec::new(), ..TestbedSettings::default() });
    let at = address(false, 7000);
    let _server = start(&bed, &["python3", "-c", ASYNCIO]);
    wait_for_server(&bed, at);
    for indirection in ["rss-indir=0", "rss-indir=012", "rss-indir=21", "rss-indir=1"] {
        let mut set = Command::new(env!("CARGO_BIN_EXE_baton"));
        set.args(["nic", "set", "--socket"]).arg(bed.socket()).arg(indirection);
        let set = set.output().expect("baton");
        assert!(set.status.success(), "{}", text(&set.stderr));
        let before = count(&bed, Counter::Made);
        let ran = on_b(&bed, &["python3", "-c", ECHO_CLIENTS, &at.ip().to_string(), "7000", "30"]);
        assert!(ran.status.success() && ran.stdout == b"right", "{}{}", text(&ran.stdout), text(&ran.stderr));
        assert_eq!(count(&bed, Counter::Made), before + 30, "each of the thirty was made by the NIC");
    }
    let end = statistics(&bed);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// Programs of host A, each with a client's script for host B, which is given the address and compares what it gets.
pub(super) const ASYNCIO: &str = "
import asyncio
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, '', 7000) as server:
        await server.serve_forever()
asyncio.run(main())
";

const ECHO_CLIENTS: &str = "
import hashlib, socket, sys, threading
def client(n):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    for round in range(20):
        data = hashlib.sha256(b'%d %d' % (n, round)).digest() * 1000
        sender = threading.Thread(target=one.sendall, args=(data,))
        sender.start()
        got = b''
        while len(got) < len(data): got += one.recv(65536) or sys.exit('the end')
        sender.join()
        assert got == data, 'wrong bytes'
    one.close()
threads = [threading.Thread(target=client, args=(n,)) for n in range(int(sys.argv[3]))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print('right', end='')
";

const REDIS_CLIENT: &str = "
import os, socket, sys
def read_line(stream): return stream.readline().rstrip(b'\\r\\n')
for n in range(20):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    stream = one.makefile('rb')
    value = os.urandom(100_000)
    one.sendall(b'SET key%d ' % n + b'' + b'x\\r\\n')
    assert read_line(stream) == b'+OK'
    one.sendall(b'*3\\r\\n$3\\r\\nSET\\r\\n$1\\r\\nv\\r\\n$%d\\r\\n' % len(value) + value + b'\\r\\n')
    assert read_line(stream) == b'+OK'
    one.sendall(b'GET v\\r\\n')
    assert read_line(stream) == b'$%d' % len(value)
    assert stream.read(len(value)) == value and stream.read(2) == b'\\r\\n'
    one.close()
print('right', end='')
";

const MEMCACHED_CLIENT: &str = "
import os, socket, sys
for n in range(20):
    one = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
    stream = one.makefile('rb')
    value = os.urandom(100_000)
    one.sendall(b'set v 0 0 %d\\r\\n' % len(value) + value + b'\\r\\n')
    assert stream.readline() == b'STORED\\r\\n'
    one.sendall(b'get v\\r\\n')
    assert stream.readline() == b'VALUE v 0 %d\\r\\n' % len(value)
    assert stream.read(len(value)) == value and stream.readline() == b'\\r\\n' and stream.readline() == b'END\\r\\n'
    one.close()
print('right', end='')
";

const HTTP_CLIENTS: &str = "
import hashlib, subprocess, sys
url = 'http://%s:%s/content' % (sys.argv[1], sys.argv[2])
for n in range(5):
    fetched = [subprocess.Popen(['curl', '-sS', '-m', '30', url, url], stdout=subprocess.PIPE) for _ in range(8)]
    for one in fetched:
        content = one.communicate()[0]
        half = len(content) // 2
        assert one.returncode == 0 and content[:half] == content[half:] and hashlib.sha256(content[:half]).hexdigest() == sys.argv[3]
print('right', end='')
";

/// Unmodified servers of different kinds: an event loop, several processes that share a listener, threads.
fn servers_of_all_kinds_are_served(beside: bool) {
    let bed = bed(beside);
    let scratch = Scratch::new("servers");
    let content: Vec<u8> = (0..500_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    let digest = on_b(&bed, &["sha256sum", &scratch.file("content")]);
    let digest = text(&digest.stdout).split_whitespace().next().expect("a digest").to_owned();
    let nginx = format!(
        "daemon off; worker_processes 2; user root; pid {0}/pid; error_log {0}/errors; events {{}}
         http {{ access_log off; server {{ listen 7002; root {0}; }} }}",
        scratch.0.display()
    );
    std::fs::write(scratch.file("nginx.conf"), nginx).expect("a file");
    let address_of_a = address(false, 0).ip().to_string();
    let configuration = scratch.file("nginx.conf");
    let redis = ["redis-server", "--port", "7001", "--save", "", "--protected-mode", "no", "--bind", &address_of_a];
    let servers: [(&[&str], &str, &str, &str); 4] = [
        (&["python3", "-c", ASYNCIO], "7000", ECHO_CLIENTS, "20"),
        (&redis, "7001", REDIS_CLIENT, ""),
        (&["nginx", "-c", &configuration], "7002", HTTP_CLIENTS, &digest),
        (&["memcached", "-u", "root", "-p", "7003", "-t", "2"], "7003", MEMCACHED_CLIENT, ""),
    ];
    for (server, port, client, more) in servers {
        let mut running = start(&bed, server);
        wait_for_server(&bed, SocketAddr::new(address_a(false), port.parse().expect("a port")));
        let before = count(&bed, Counter::Made);
        let ran = on_b(&bed, &["python3", "-c", client, &address_of_a, port, more]);
        assert!(ran.status.success() && ran.stdout == b"right", "{server:?}: {}{}", text(&ran.stdout), text(&ran.stderr));
        assert!(count(&bed, Counter::Made) >= before + 20, "{server:?}: the NIC made {}", count(&bed, Counter::Made) - before);
        let now = statistics(&bed);
        assert_eq!((now.failed_moves, now.lost), (0, 0), "{server:?}");
        running.ends().expect("its end");
    }
}
