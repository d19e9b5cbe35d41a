//! Benches, as short as they can be: every cell is there, and what must be so on any machine.

use crate::scratch::text;
use serde_json::Value;
use std::process::{Command, Output};

fn baton(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_baton")).args(arguments).env_remove("BATON_SOCKET").output().expect("baton")
}

/// What a command prints that may miss bounds, which so short a run on a busy machine cannot decide.
fn report(arguments: &[&str]) -> Value {
    let ran = baton(arguments);
    assert!(matches!(ran.status.code(), Some(0 | 1)), "{}", text(&ran.stderr));
    serde_json::from_slice(&ran.stdout).expect("JSON")
}

#[test]
fn large_receive_is_measured_with_several_workers_at_a_rate() {
    const MEGABITS: f64 = 200.0;
    let rate = MEGABITS.to_string();
    let few = ["--connections", "4", "--reorder", "0", "--rounds", "1"];
    let found = report(&[&["bench", "lro", "--workers", "2", "--rate", &rate, "--json"], &few[..]].concat());
    assert_eq!((&found["workers"], &found["rate"]), (&2.into(), &MEGABITS.into()), "{found}");
    // A slower machine may send less.
    for (cell, way) in found["cells"].as_array().expect("cells").iter().zip(["plain", "gro", "in-order", "reorder"]) {
        assert_eq!((&cell["way"], &cell["connections"]), (&way.into(), &4.into()), "{cell}");
        let [gigabits, busiest] = ["gigabits", "busiest"].map(|name| cell[name].as_f64().expect("a number"));
        assert!(gigabits > 0.0 && gigabits * 1000.0 <= MEGABITS * 1.1, "{cell}");
        assert!((1.0..=2.0).contains(&busiest), "{cell}");
    }
    assert_eq!(found["cells"].as_array().map(Vec::len), Some(4), "{found}");
    assert_eq!(found["bars"], Value::Array(Vec::new()), "the bounds are about one worker and no limit: {found}");
}

#[test]
fn a_rate_that_cannot_be_is_refused() {
    for (option, value, says) in
        [("--rate", "0", "from 0.1"), ("--reorder", "101", "0 to 100 percent"), ("--workers", "17", "1..=16")]
    {
        let ran = baton(&["bench", "lro", option, value]);
        assert!(ran.status.code() == Some(2) && text(&ran.stderr).contains(says), "{option} {value}: {}", text(&ran.stderr));
    }
}
