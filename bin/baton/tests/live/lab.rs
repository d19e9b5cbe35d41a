//! Benches and live runs of the papers, as short as they can be: every cell is there, and what must be so on any
//! machine.

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

/// The table with this title: its rows' names, and their live numbers.
fn live_table(report: &Value, title: &str) -> Vec<(String, Vec<f64>)> {
    let tables = report["tables"].as_array().expect("tables");
    let table = tables.iter().find(|table| table["title"] == title).unwrap_or_else(|| panic!("no table {title}: {report}"));
    let live = |cell: &Value| cell["live"].as_f64().unwrap_or(f64::NAN);
    let row = |row: &Value| {
        let cells = row["cells"].as_array().expect("cells").iter().map(live).collect();
        (row["name"].as_str().expect("a name").to_owned(), cells)
    };
    table["rows"].as_array().expect("rows").iter().map(row).collect()
}

#[test]
fn a_web_server_has_as_many_connections_on_nics_as_they_have_room_for() {
    let found = report(&["lab", "handoff", "--live", "--short", "--json"]);
    let rows = live_table(&found, "Figure 7, live: a web server, CPU of a request");
    assert_eq!(rows.iter().map(|(_, cells)| cells[0]).collect::<Vec<_>>(), [0.0, 16.0, 64.0, 64.0], "{found}");
    for (name, cells) in &rows {
        let [_, rate, server, nics, others, machine] = cells[..] else { panic!("six numbers: {found}") };
        assert!(rate > 0.0 && server > 0.0 && others > 0.0 && machine >= server + nics, "{name}: {cells:?}");
        assert_eq!(nics > 0.0, cells[0] > 0.0, "{name}: {cells:?}");
    }
    let messages = live_table(&found, "Figure 8, live: messages of a request by kind");
    for kind in ["nic_send", "os_recv"] {
        let (_, cells) = messages.iter().find(|(name, _)| name == kind).expect("each kind has a row");
        assert!(cells[0] == 0.0 && cells[1..].iter().all(|count| *count > 0.0), "{kind}: {cells:?}");
    }
    let web = found["comparisons"].as_array().expect("numbers").iter().find(|one| one["name"] == "handoff.fig7.web");
    assert!(web.is_some_and(|web| web["live"].is_f64() && web["paper"].is_f64()), "{found}");
}

#[test]
fn set_ups_and_downloads_run_in_both_ways() {
    let found = report(&["lab", "lro", "--live", "--short", "--json"]);
    let set_ups = live_table(&found, "Section V.B: 64 connections are set up at once");
    assert_eq!(set_ups.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["stack", "queues in turn"]);
    for (name, cells) in &set_ups {
        assert!(cells[0] >= cells[1] && cells[0] <= 64.0 && cells[2] > 0.0, "{name}: {cells:?}");
    }
    let downloads = live_table(&found, "Section V.C: active acknowledgements");
    for ((name, cells), active) in downloads.iter().zip([false, true]) {
        assert!(cells[0] >= 0.0 && cells[2] > 0.0, "{name}: {cells:?}");
        assert_eq!(cells[1] > 0.0, active, "{name}: {cells:?}");
    }
    let names = found["bars"].as_array().expect("bars").iter().filter_map(|bar| bar["name"].as_str());
    assert_eq!(names.filter(|name| name.starts_with("lro.live.")).count(), 3, "{found}");
}

#[test]
fn messages_are_sent_in_each_way_of_the_report_on_the_card() {
    let found = report(&["lab", "inic", "--live", "--short", "--json"]);
    let figures = found["figures"].as_array().expect("figures");
    let bandwidth = figures.iter().find(|figure| figure["title"] == "Bandwidth (ours)").expect("the figure");
    for curve in bandwidth["curves"].as_array().expect("curves") {
        let live = curve["live"].as_array().expect("points");
        assert_eq!(live.iter().filter_map(|point| point[0].as_f64()).collect::<Vec<_>>(), [1.0, 4096.0, 65_536.0], "{curve}");
        assert!(live.iter().all(|point| point[1].as_f64() > Some(0.0)), "{curve}");
    }
}

/// Without MPI, or the provider, which only `make` builds, it says what makes them.
#[test]
fn an_mpi_programs_messages_are_measured_or_what_is_missing_is_named() {
    let ran = baton(&["lab", "rmpp", "--live", "--short", "--json"]);
    if ran.status.code() == Some(2) {
        let says = text(&ran.stderr);
        let missing = ["`make provider` builds it", "scripts/dependencies mpi installs it"];
        assert!(missing.iter().any(|what| says.contains(what)), "{says}");
        assert!(std::env::var_os("CI").is_none(), "nothing is skipped in CI");
        return eprintln!("skipped: {says}");
    }
    let found: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{}", text(&ran.stderr)));
    let figures = found["figures"].as_array().expect("figures");
    let bandwidth =
        figures.iter().find(|figure| figure["title"] == "Figure 7: bandwidth by what is offloaded").expect("a figure");
    for curve in bandwidth["curves"].as_array().expect("curves") {
        let live = curve["live"].as_array().expect("points");
        assert!(matches!(&live[..], [point] if point[0] == 100_000.0 && point[1].as_f64() > Some(0.0)), "{curve}");
    }
    let names = found["bars"].as_array().expect("bars").iter().filter_map(|bar| bar["name"].as_str());
    assert_eq!(names.filter(|name| name.starts_with("rmpp.live.")).count(), 3, "{found}");
}

#[test]
fn a_processors_interrupts_are_in_the_papers_tables() {
    let found = report(&["lab", "numa", "--live", "--short", "--json"]);
    let summary = live_table(&found, "Table 1: NTttcp for 120 s");
    assert!(summary.iter().all(|(name, cells)| cells[0] > 0.0 || name.starts_with("packets sent")), "{summary:?}");
    for title in ["Table 2: deferred halves by module", "Table 3: first halves by module"] {
        let [count, longest, mean, sum] = live_table(&found, title)[0].1[..] else { panic!("four numbers: {found}") };
        assert!(count > 0.0 && mean > 0.0 && longest >= mean && sum >= longest, "{title}: {found}");
    }
    let own = &live_table(&found, "Table 4: processor time by process")[1];
    assert!(own.1[0] > 0.0 && own.1[0] <= 50.0, "{own:?}");
    let figure = &found["figures"][0];
    assert!(figure["curves"].as_array().expect("curves").iter().all(|curve| curve["live"][0].is_array()), "{figure}");
}
