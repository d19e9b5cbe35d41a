//! Rights of Baton's processes, and what others can see of them.

use crate::common::scene;
use baton_bed::testbed::TestbedSettings;
use baton_linux::process;
use baton_linux::rights;
use baton_protocol::program::Place;

fn status(process: u32, thread: u32) -> impl Fn(&str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).expect("a status");
    move |field: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect(field);
        line.trim().to_owned()
    }
}

/// Whatever the network or a program makes it do: the NIC has a user id of its own, and no capabilities, files or
/// system calls that it does not need. It works nevertheless, with several workers and a copy engine, too.
#[test]
fn the_nic_has_no_rights() {
    for settings in [
        TestbedSettings::default(),
        TestbedSettings { workers: 3, copy_engine: true, offloads: Default::default(), ..TestbedSettings::default() },
    ] {
        let mut scene = scene(settings);
        scene.exchange(50_000, Place::Nic);
        scene.exchange(50_000, Place::Kernel);
        let statistics = scene.bed.tool().expect("a tool").statistics().expect("statistics");
        let nic = statistics.nic_process;
        let threads: Vec<u32> = std::fs::read_dir(format!("/proc/{nic}/task"))
            .expect("its threads")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .collect();
        for thread in threads {
            let of = status(nic, thread);
            assert_eq!((of("NoNewPrivs").as_str(), of("Seccomp").as_str()), ("1", "2"));
            for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                let bounds_stay = set == "CapBnd" && process::user() != 0;
                assert!(bounds_stay || u64::from_str_radix(&of(set), 16) == Ok(0), "{set}: {}", of(set));
            }
            if rights::has_other_users() {
                let users: Vec<String> = of("Uid").split_whitespace().map(str::to_owned).collect();
                assert!(users.iter().all(|user| *user == users[0] && *user != process::user().to_string()), "{users:?}");
                assert_ne!(users[0], "65534", "others of that user could end it");
                assert_eq!(of("Gid").split_whitespace().next(), Some(users[0].as_str()));
                assert_eq!(of("Groups"), "");
            }
        }
    }
}

/// Any user can read a process's arguments. They contain neither the key of the lookup's hash, with which an attacker
/// could aim at one bucket, nor any other setting.
#[test]
fn arguments_contain_no_settings() {
    let scene = scene(TestbedSettings::default());
    let statistics = scene.bed.tool().expect("a tool").statistics().expect("statistics");
    let keeper = process::parent(statistics.agent_process).expect("the keeper");
    for (process, name) in
        [(keeper, "keeper-process"), (statistics.agent_process, "agent-process"), (statistics.nic_process, "nic-process")]
    {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).expect("its arguments");
        let words: Vec<String> = line
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| String::from_utf8_lossy(word).into())
            .collect();
        assert_eq!(words[1..], [name], "{words:?}");
    }
}
