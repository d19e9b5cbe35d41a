//! A program in C, through libbaton: its connection moves while it is used, and every byte comes back.

use crate::common::hosts;
use baton_bed::testbed::{TestbedSettings, address_a};
use baton_linux::process;
use baton_sim::stream;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Bytes in flight at a time: a multiple of the program's buffers, some of which are posted before the bytes arrive.
/// Each move takes two of these pieces, so every other piece finds the connection on the NIC.
const PIECE: usize = 21_000;
const BYTES: usize = 100 * PIECE;

/// Compiles the program against the header and the library that lie next to the `baton` program.
fn compile(into: &Path) -> std::path::PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_baton")).parent().expect("the directory of programs");
    assert!(
        built.join("libbaton.so").exists(),
        "libbaton.so is not built: run `cargo build --release` first, as `make test` does"
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = into.join("echo");
    let status = Command::new("cc")
        .args(["-Wall", "-Wextra", "-Werror", "-std=gnu11", "-o"])
        .arg(&program)
        .arg(root.join("tests/c/echo.c"))
        .arg(format!("-I{}", root.join("../../host/client/capi/include").display()))
        .arg(format!("-L{}", built.display()))
        .args(["-lbaton", &format!("-Wl,-rpath,{}", built.display())])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    program
}

/// Returns how often the connection moved, and how many bytes the NIC put into posted buffers.
fn echoes(arguments: &[&str]) -> [u64; 2] {
    let program = compile(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 8080))).expect("a listener");
    let mut command = Command::new(&program);
    command.arg(bed.socket()).args(arguments).stdout(Stdio::piped());
    process::inherit(&mut command, &[listener.as_fd()], true);
    let echo = command.spawn().expect("the program");
    let address = listener.local_addr().expect("its address");
    let peer = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    let (mut bytes, mut back) = (vec![0; BYTES], vec![0; BYTES]);
    stream::fill(1, 0, &mut bytes);
    for (piece, echoed) in bytes.chunks(PIECE).zip(back.chunks_mut(PIECE)) {
        (&peer).write_all(piece).expect("sending");
        (&peer).read_exact(echoed).expect("the echo");
    }
    peer.shutdown(Shutdown::Write).expect("shutdown");
    assert_eq!((&peer).read(&mut [0]).expect("the end"), 0);
    let output = echo.wait_with_output().expect("its end");
    assert!(output.status.success(), "the program says above what went wrong");
    assert!(back == bytes, "wrong bytes came back");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut counts = text.split_whitespace().map(|word| word.parse().expect("a count"));
    std::array::from_fn(|_| counts.next().expect("two counts"))
}

#[test]
fn a_c_program_echoes_while_its_connection_moves() {
    let [moves, _] = echoes(&[]);
    assert!(moves >= 10, "only {moves} moves");
    let [moves, placed] = echoes(&["posted"]);
    assert!(moves >= 10 && placed > 0, "only {moves} moves, and the NIC put {placed} bytes into buffers");
}
