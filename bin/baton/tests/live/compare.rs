//! The benches that compare ways of serving, for a moment each: every way runs, its connections are where they should
//! be, and the CPU time is that of those who take part.

use serde_json::Value;
use std::process::Command;

/// Runs a bench with rounds as short as they can be. Its figures mean nothing, so its bounds may be missed.
fn bench(arguments: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg("bench").args(arguments).args(["--json", "--rounds", "1", "--seconds", "0.2"]);
    let output = command.env_remove("BATON_SOCKET").output().expect("baton");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    for row in report["rows"].as_array().expect("rows") {
        assert_eq!(row["failures"], Value::Array(Vec::new()), "{said}");
        row["columns"].as_array().expect("columns").iter().for_each(|column| only_who_takes_part(column, &said));
    }
    report
}

fn only_who_takes_part(column: &Value, said: &str) {
    let figure = |name: &str| column["medians"][name].as_f64().expect("a figure");
    let way = column["way"].as_str().expect("a way");
    let baton = !matches!(way, "kernel" | "smoltcp");
    let used = ["rate", "client", "server", "nic", "attacher"].map(|name| figure(name) > 0.0);
    assert_eq!(used, [true, true, true, baton, way == "attached"], "{way}: {said}");
    let parts = ["client", "server", "agent", "attacher", "nic", "kernel"].map(figure);
    assert!((parts.iter().sum::<f64>() - figure("machine")).abs() < 1e-6 * figure("machine"), "{way}: {said}");
}

/// Checks which ways a row has, in their order, and that those with a NIC have their connections there.
fn check(row: &Value, connections: f64, ways: &[&str]) {
    let columns = row["columns"].as_array().expect("columns");
    assert_eq!(columns.iter().map(|column| &column["way"]).collect::<Vec<_>>(), ways, "{row}");
    for column in columns {
        let expected = if matches!(column["way"].as_str(), Some("kernel" | "smoltcp")) { 0.0 } else { connections };
        assert_eq!(column["medians"]["on_nic"], expected, "{column}");
    }
}

/// The ways that only messages have; the others are those of the benches below.
#[test]
fn messages_take_the_ways_of_written_programs() {
    let report = bench(&["rpc", "--ways", "library,smoltcp"]);
    for (row, connections) in report["rows"].as_array().expect("rows").iter().zip([64.0, 1024.0]) {
        check(row, connections, &["kernel", "library", "smoltcp"]);
    }
    let names = report["bars"].as_array().expect("bars").iter().map(|bar| &bar["name"]).collect::<Vec<_>>();
    assert_eq!(names, ["rpc.host_ratio_1024"], "bars of the ways that were measured");
}

#[test]
fn programs_that_never_sleep_and_bulk_data() {
    let ways = ["kernel", "beside", "inline", "attached", "smoltcp"];
    check(&bench(&["pingpong"])["rows"][0], 1.0, &ways);
    // A program that sends more than the attacher takes at once is made to wait by the kernel, for a second each time.
    let unattached = &["bulk", "--ways", "beside,inline,smoltcp"];
    for row in bench(unattached)["rows"].as_array().expect("rows") {
        check(row, 1.0, &["kernel", "beside", "inline", "smoltcp"]);
    }
}

/// What a program of the client library sends, with and without a copy.
#[test]
fn bulk_data_of_a_written_program() {
    let report = bench(&["bulk", "--ways", "library,buffers"]);
    let rows = report["rows"].as_array().expect("rows");
    check(&rows[0], 1.0, &["kernel"]);
    check(&rows[1], 1.0, &["kernel", "library", "buffers"]);
    let names = report["bars"].as_array().expect("bars").iter().map(|bar| &bar["name"]).collect::<Vec<_>>();
    assert_eq!(names, ["bulk_out.host_ratio_buffers", "bulk_out.machine_ratio_buffers_to_library"]);
}

#[test]
fn whole_programs() {
    let (http, redis) = (&["http", "--client", "own"][..], &["redis"][..]);
    for (what, connections) in [(http, [64.0, 512.0]), (redis, [50.0, 50.0])] {
        let report = bench(&[what, &["--ways", "beside,attached"]].concat());
        for (row, connections) in report["rows"].as_array().expect("rows").iter().zip(connections) {
            check(row, connections, &["kernel", "beside", "attached"]);
        }
    }
}

/// wrk is a program of its own, whose CPU time counts, and which says itself how long it has waited.
#[test]
fn a_web_server_is_asked_by_wrk_too() {
    // Each takes both processors for seconds; that there are the three is a test of the loads'.
    let report = bench(&["http", "--client", "wrk", "--connections", "512", "--ways", "beside"]);
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 1, "{report}");
    let row = &rows[0];
    assert!(row["load"].as_str().is_some_and(|load| load.contains("wrk")), "{row}");
    check(row, 512.0, &["kernel", "beside"]);
    for column in row["columns"].as_array().expect("columns") {
        let [p50, p99] = ["p50", "p99"].map(|name| column["medians"][name].as_f64().expect("a time"));
        assert!(0.0 < p50 && p50 <= p99, "{column}");
    }
}

/// Without wrk the bench ends before it has measured anything, and says what to do.
#[test]
fn without_wrk_the_bench_says_what_to_install() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.args(["bench", "http", "--rounds", "1"]).env("PATH", "/nonexistent");
    let output = command.output().expect("baton");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("wrk is not installed") && said.contains("--client own"), "{said}");
}

#[test]
fn an_unknown_way_is_an_error_that_names_the_others() {
    let output = Command::new(env!("CARGO_BIN_EXE_baton")).args(["bench", "rpc", "--ways", "sideways"]).output().expect("baton");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the ways are kernel, beside, library, inline, attached, smoltcp"), "{said}");
}
