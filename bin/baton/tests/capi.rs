//! A program in C, through libbaton: its connection moves under it, and every byte comes back.

mod common;

use baton_kernel::process;
use baton_lab::testbed::{TestbedSettings, address_a};
use baton_sim::stream;
use common::hosts;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const BYTES: usize = 4 << 20;

/// Compiles the program against the header and the library that lie beside the `baton` program.
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

#[test]
fn a_c_program_echoes_while_its_connection_moves() {
    let program = compile(Path::new(env!("CARGO_TARGET_TMPDIR")));
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 8080))).expect("a listener");
    let mut command = Command::new(&program);
    command.arg(bed.socket()).stdout(Stdio::piped());
    process::inherit(&mut command, &[listener.as_fd()], true);
    let echo = command.spawn().expect("the program");
    let address = listener.local_addr().expect("its address");
    let peer = bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(10))).expect("a connection");
    peer.set_read_timeout(Some(Duration::from_secs(20))).expect("a time-out");
    let (mut writer, mut reader) = (peer.try_clone().expect("a second handle"), peer);
    let sender = std::thread::spawn(move || {
        let mut bytes = vec![0; BYTES];
        stream::fill(1, 0, &mut bytes);
        // In pieces, so that moves fall between them and into them.
        for piece in bytes.chunks(5000) {
            writer.write_all(piece).expect("sending");
        }
        writer.shutdown(Shutdown::Write).expect("shutdown");
    });
    let mut back = Vec::new();
    reader.read_to_end(&mut back).expect("the echo");
    sender.join().expect("the sender");
    let output = echo.wait_with_output().expect("its end");
    assert!(output.status.success(), "the program says above what went wrong");
    assert_eq!(back.len(), BYTES);
    assert_eq!(stream::mismatches(1, 0, &back), 0);
    let moves: u32 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("its count of moves");
    assert!(moves >= 10, "only {moves} moves");
}
