//! What has happened to connections: `baton ls -e`; and how often, by reason: `baton stats`.

use crate::common::{Scene, scene, wait_until};
use baton_bed::testbed::TestbedSettings;
use baton_linux::process;
use baton_protocol::nic::LinkSettings;
use baton_protocol::program::Place;
use serde_json::Value;
use std::process::Command;

fn baton(scene: &Scene, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.arg(arguments[0]).arg("--socket").arg(scene.bed.socket()).args(&arguments[1..]).env_remove("BATON_SOCKET");
    let ran = command.output().expect("baton");
    assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).expect("text")
}

fn json(scene: &Scene, arguments: &[&str]) -> Value {
    serde_json::from_str(&baton(scene, arguments)).expect("JSON")
}

/// The events of the scene's connection. None while an agent that has died has no successor.
fn events(scene: &Scene) -> Vec<Value> {
    let listed = json(scene, &["ls", "--json", "-e"]);
    listed[0]["events"].as_array().cloned().unwrap_or_default()
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["what"].as_str().expect("a name")).collect()
}

fn is_answered(scene: &Scene) -> bool {
    scene.bed.tool().and_then(|mut tool| tool.connections()).is_ok_and(|list| list.len() == 1)
}

#[test]
fn moves_and_a_death_are_told_in_order() {
    let mut scene = scene(TestbedSettings::default());
    assert!(baton(&scene, &["ls", "-e"]).contains("nothing has happened to it yet"));
    scene.move_to(Place::Nic);
    scene.move_to(Place::Kernel);
    scene.move_to(Place::Nic);
    let nic = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").nic_process;
    process::signal(nic, libc::SIGKILL).expect("SIGKILL");
    wait_until("it is on the next NIC", || events(&scene).len() == 6);
    let told = events(&scene);
    assert_eq!(names(&told), ["to_nic", "to_kernel", "to_nic", "nic_died", "to_kernel", "to_nic"]);
    assert_eq!(told[3]["reason"], "somebody killed it, or its host's TCP");
    assert_eq!(told[4]["reason"], "the NIC died");
    let ago = |event: &Value| event["ago_us"].as_u64().expect("a time");
    assert!(told.windows(2).all(|two| ago(&two[0]) >= ago(&two[1])), "{told:?}");
    let moves = told.iter().filter(|event| event["what"] != "nic_died");
    assert!(moves.into_iter().all(|event| event["took_us"].as_u64().is_some_and(|took| took > 0)), "{told:?}");
    assert_eq!(json(&scene, &["ls", "--json"])[0]["events"], Value::Null, "only if they are asked for");
    let text = baton(&scene, &["ls", "-e"]);
    let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{words}: {text}"));
    let order =
        [" ago: moved to the NIC in ", "moved to the kernel in ", "the NIC died: somebody killed it", ": the NIC died\n"].map(at);
    assert!(order.is_sorted(), "{text}");
    let returned = &json(&scene, &["stats", "--json"])[0]["programs"][0]["returned"];
    assert_eq!((&returned["asked to"], &returned["the NIC died"]), (&1.into(), &1.into()), "{returned}");
    scene.exchange(10_000, Place::Nic);
}

#[test]
fn the_next_agent_tells_of_the_last_ones_death() {
    let mut scene = scene(TestbedSettings::default());
    scene.move_to(Place::Nic);
    let agent = scene.bed.tool().and_then(|mut tool| tool.statistics()).expect("statistics").agent_process;
    process::signal(agent, libc::SIGKILL).expect("SIGKILL");
    wait_until("it is on the next NIC", || is_answered(&scene) && events(&scene).len() == 3);
    let told = events(&scene);
    assert_eq!(names(&told), ["agent_died", "to_kernel", "to_nic"]);
    assert_eq!(told[1]["reason"], "the agent died");
    assert_eq!(json(&scene, &["stats", "--json"])[0]["programs"][0]["returned"]["the agent died"], 1);
}

#[test]
fn refusals_and_returns_are_counted_by_reason() {
    const TCP_NOTSENT_LOWAT: i32 = 25;
    let mut scene = scene(TestbedSettings::default());
    let before = &json(&scene, &["stats", "--json"])[0]["programs"][0];
    let nothing = serde_json::json!({});
    assert_eq!((&before["refused"], &before["returned"], &before["to_nic"]), (&nothing, &nothing, &0.into()), "{before}");
    scene.move_to(Place::Nic);
    scene.session.set_option(scene.id, libc::IPPROTO_TCP, TCP_NOTSENT_LOWAT, 4096).expect("an option");
    let refusal = scene.session.move_to(scene.id, Place::Nic).expect_err("a refusal").to_string();
    scene.session.move_to(scene.id, Place::Nic).expect_err("a refusal");
    let counted = json(&scene, &["stats", "--json"]);
    let program = &counted[0]["programs"][0];
    assert_eq!((&program["to_nic"], &program["returned"]["option"]), (&1.into(), &1.into()), "{counted}");
    // It is wanted, and tried again by itself, too.
    let refused = program["refused"][&refusal].as_u64().unwrap_or(0);
    assert!(refused >= 2, "{refusal}: {counted}");
    let told = events(&scene);
    assert_eq!(names(&told), ["to_nic", "to_kernel", "stayed_in_kernel"]);
    assert_eq!((&told[1]["reason"], &told[2]["reason"]), (&"option".into(), &refusal.as_str().into()));
    assert!(told[2]["times"].as_u64().is_some_and(|times| times >= refused), "{told:?}");
    let text = baton(&scene, &["stats"]);
    assert!(text.contains(&format!(" refused   {refusal}")) && text.contains("1 returned  option"), "{text}");
}

#[test]
fn growth_is_told() {
    let link = LinkSettings { delay: 10_000, ..LinkSettings::default() };
    let mut scene = scene(TestbedSettings { link, peer_queue: Some(10_000), ..TestbedSettings::default() });
    scene.move_to(Place::Nic);
    wait_until("its memory has grown", || {
        scene.fill(8 << 20);
        scene.drain();
        events(&scene).iter().any(|event| event["what"] == "grown")
    });
    let told = events(&scene);
    let grown = told.iter().rfind(|event| event["what"] == "grown").expect("a growth");
    let bytes = |key: &str| grown[key].as_u64().expect("bytes");
    assert!(bytes("receive_bytes").max(bytes("send_bytes")) > 256 << 10, "{grown}");
    assert!(baton(&scene, &["ls", "-e"]).contains("its memory grew to "));
}
