//! `baton run --offload fast-path`: the NIC keeps the fast path of unmodified programs' connections, the host's TCP has
//! the rest.

use crate::common::{hosts, wait_until};
use crate::scratch::{Scratch, text};
use baton_abi::layout::Counter;
use baton_bed::testbed::{Testbed, TestbedSettings, address_a};
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::{Place, Statistics};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A program of host A's, which ends with this.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts Python's web server on host A with partial offload, and waits until it listens.
fn serve(bed: &Testbed, scratch: &Scratch) -> Program {
    let directory = scratch.0.to_string_lossy().into_owned();
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("run").arg("--socket").arg(bed.socket()).args([
        "--offload",
        "fast-path",
        "--rule",
        "established",
        "--eager",
        "--",
    ]);
    command.args(["python3", "-m", "http.server", "8000", "--directory", &directory]);
    command.env_remove("BATON_RUN").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let program = Program(bed.host_a.spawn(&mut command).expect("baton run"));
    let address = SocketAddr::new(address_a(false), 8000);
    wait_until("the server", || bed.host_b.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).is_ok());
    program
}

/// curl on host B, for a file of the server's.
fn curl(bed: &Testbed) -> Child {
    let url = format!("http://{}:8000/content", address_a(false));
    let mut command = Command::new("curl");
    command.args(["-sS", "-m", "60", &url]).stdout(Stdio::piped()).stderr(Stdio::piped());
    bed.host_b.spawn(&mut command).expect("curl")
}

fn statistics(bed: &Testbed) -> Statistics {
    bed.tool().expect("a tool").statistics().expect("statistics")
}

fn count(statistics: &Statistics, counter: Counter) -> u64 {
    statistics.counters[counter as usize]
}

/// A bed with a link, and a file of random content to fetch.
fn bed(loss: u32, scratch: &Scratch) -> (Testbed, Vec<u8>) {
    let link = LinkSettings { delay: 500, loss, seed: 3, ..LinkSettings::default() };
    let content: Vec<u8> = (0..6_000_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    std::fs::write(scratch.file("content"), &content).expect("a file");
    (hosts(TestbedSettings { link, ..TestbedSettings::default() }), content)
}

fn check(answer: &Output, content: &[u8]) {
    assert!(answer.status.success(), "{}", text(&answer.stderr));
    assert!(answer.stdout == content, "{} bytes of {} arrived right", answer.stdout.len(), content.len());
}

/// Over a link that loses frames connections leave their fast path and come back to it, and every byte arrives.
#[test]
fn a_lossy_link_lends_connections_and_brings_them_back() {
    let scratch = Scratch::new("partial");
    let (bed, content) = bed(10_000, &scratch);
    let _server = serve(&bed, &scratch);
    // Waits: until the NIC has received so many segments. How many it receives between two losses depends on how busy
    // the machine is.
    for transfer in 0..10 {
        check(&curl(&bed).wait_with_output().expect("its output"), &content);
        if transfer >= 2 && count(&statistics(&bed), Counter::Segments) > 1000 {
            break;
        }
    }
    let end = statistics(&bed);
    let [lent, back, segments] = [Counter::Lent, Counter::TakenBack, Counter::Segments].map(|counter| count(&end, counter));
    assert!(lent > 3 && back > 3 && segments > 1000, "lent {lent}, taken back {back}, {segments} segments");
    assert_ne!(end.host_tcp_process, 0);
    assert_eq!((end.failed_moves, end.lost), (0, 0));
}

/// Whichever of NIC and host's TCP is killed, the connection goes on in the kernel.
#[test]
fn the_death_of_either_side_is_survived() {
    let scratch = Scratch::new("partial-death");
    let (bed, content) = bed(10_000, &scratch);
    let _server = serve(&bed, &scratch);
    let victims: [fn(&Statistics) -> u32; 2] = [|statistics| statistics.host_tcp_process, |statistics| statistics.nic_process];
    for victim in victims {
        let before = statistics(&bed);
        let fetched = curl(&bed);
        wait_until("a transition", || count(&statistics(&bed), Counter::Lent) > count(&before, Counter::Lent));
        baton_linux::process::signal(victim(&statistics(&bed)), 9).expect("a process to kill");
        check(&fetched.wait_with_output().expect("its output"), &content);
        let after = statistics(&bed);
        assert_eq!(after.nic_starts, before.nic_starts + 1);
        assert_eq!((after.failed_moves, after.lost), (0, 0));
        assert_ne!(after.host_tcp_process, 0, "the next NIC has a host's TCP again");
    }
}

/// A list shows who has the connection.
#[test]
fn a_list_shows_the_transitions() {
    let scratch = Scratch::new("partial-list");
    let (bed, content) = bed(20_000, &scratch);
    let _server = serve(&bed, &scratch);
    let fetched = curl(&bed);
    wait_until("a connection that was lent", || {
        let list = bed.tool().expect("a tool").connections().expect("a list");
        list.iter().any(|info| info.place == Place::Nic && info.lent.is_some_and(|(times, _)| times > 0))
    });
    check(&fetched.wait_with_output().expect("its output"), &content);
}
