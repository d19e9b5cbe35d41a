//! `baton ttcp`: every way and direction, with all bytes compared by the program and its peer.

use std::process::{Command, Output};

fn ttcp(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).arg("ttcp").args(arguments).env_remove("BATON_SOCKET").output().expect("baton")
}

/// A short run has every cell, and its data are right: a wrong byte or a connection that hangs fails the command.
/// Messages of 3000 bytes end in the middle of segments.
#[test]
fn every_way_transfers_what_was_sent() {
    let output = ttcp(&["--sizes", "1,3000,65536", "--messages", "1500", "--rounds", "1", "--json"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    // 1: a bound is not kept, which so short a run on a busy machine cannot decide.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{stderr}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let cells = report["cells"].as_array().expect("cells");
    let full = ["full", "full-handshake", "full-aggregated"];
    let other_nagle = ["full-nagle-host", "full-handshake-nagle-host", "full-aggregated-nagle-nic"];
    for way in ["none", "veth", "handoff", "fast-path", "fast-path-no-nagle"].into_iter().chain(full).chain(other_nagle) {
        for direction in ["transmit", "receive"] {
            for (size, bytes) in [(1, 1500), (3000, 4_500_000), (65_536, 98_304_000)] {
                let same =
                    |cell: &&serde_json::Value| cell["way"] == way && cell["direction"] == direction && cell["size"] == size;
                let cell = cells.iter().find(same).unwrap_or_else(|| panic!("{way} {direction} {size} is missing: {stderr}"));
                assert_eq!(cell["bytes"], bytes, "{cell}");
                assert!(cell["megabits"].as_f64() > Some(0.0) && cell["host_ms"].as_f64() > Some(0.0), "{cell}");
            }
        }
    }
    // Where sends are kept back is seen in the messages that cross to the NIC.
    let messages = |way: &str| {
        let one = |cell: &&serde_json::Value| cell["way"] == way && cell["direction"] == "transmit" && cell["size"] == 1;
        cells.iter().find(one).and_then(|cell| cell["messages"].as_f64()).expect("messages")
    };
    for way in ["full", "full-handshake"] {
        assert!(messages(way) >= 1500.0, "{way}: each byte is a message, and there were {}", messages(way));
    }
    for way in ["full-nagle-host", "full-handshake-nagle-host", "full-aggregated"] {
        assert!(messages(way) < 750.0, "{way}: {} messages for 1500 bytes", messages(way));
    }
    let bars = report["bars"].as_array().expect("bars");
    for name in ["ttcp.host_ratio_batched_1B", "ttcp.host_ratio_batched_64KB", "ttcp.events_ratio_64KB"] {
        assert!(bars.iter().any(|bar| bar["name"] == name), "{name} is missing: {bars:?}");
    }
}

#[test]
fn an_unknown_way_is_refused() {
    let output = ttcp(&["--ways", "none,half"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("--ways \"half\": use some of none, veth, handoff"), "{stderr}");
}
