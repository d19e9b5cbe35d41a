//! Who gets a port: a program under full offload, or one of the kernel's.

use super::Program;
use crate::common::hosts;
use baton_bed::testbed::TestbedSettings;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// A program whose connections the NIC makes and one of the kernel's take the same port at the same moment, one port
/// after the other: each is had by exactly one of them.
fn race_for_ports(count: u16) {
    const TAKE: &str = "
import select, socket, sys
for line in sys.stdin:
    one = socket.socket()
    try:
        one.bind(('', int(line)))
        one.listen()
        poll = select.poll()
        poll.register(one, select.POLLIN)
        poll.poll(0)
        print('taken', flush=True)
    except OSError: print('lost', flush=True)
    sys.stdin.readline()
    one.close()
";
    let bed = hosts(TestbedSettings::default());
    let baton = env!("CARGO_BIN_EXE_baton");
    let socket = bed.socket().to_string_lossy().into_owned();
    let under_baton = [baton, "run", "--socket", &socket, "--offload", "full", "--", "python3", "-c", TAKE];
    let plain = ["python3", "-c", TAKE];
    let mut both: Vec<Program> = [&under_baton[..], &plain]
        .into_iter()
        .map(|line| {
            let mut command = Command::new(line[0]);
            command.args(&line[1..]).env_remove("BATON_RUN").stdin(Stdio::piped()).stdout(Stdio::piped());
            Program(bed.host_a.spawn(&mut command).expect("a program"))
        })
        .collect();
    let mut outputs: Vec<_> = both.iter_mut().map(|one| BufReader::new(one.0.stdout.take().expect("output")).lines()).collect();
    let mut wins = [0u16; 2];
    for port in 20_000..20_000 + count {
        // The program that gets the port first has a little more time.
        let first = usize::from(port) % 2;
        for which in [first, 1 - first] {
            writeln!(both[which].0.stdin.as_mut().expect("input"), "{port}").expect("room");
        }
        let taken: Vec<bool> = outputs.iter_mut().map(|lines| lines.next().expect("a line").expect("text") == "taken").collect();
        assert!(taken[0] != taken[1], "port {port} was had by both, or by nobody: {taken:?}");
        wins[usize::from(taken[1])] += 1;
        both.iter_mut().for_each(|one| writeln!(one.0.stdin.as_mut().expect("input")).expect("room"));
    }
    println!("of {count} ports {} went to the NIC's program and {} to the kernel's", wins[0], wins[1]);
    assert!(wins.iter().all(|wins| *wins > 0), "nobody raced: {wins:?}");
}

/// 400 ports, or as many as BATON_PORTS says: ten thousand take a minute.
#[test]
fn a_port_is_had_by_one_of_two() {
    let count = std::env::var("BATON_PORTS").map_or(400, |count| count.parse().expect("BATON_PORTS: a number"));
    race_for_ports(count);
}
