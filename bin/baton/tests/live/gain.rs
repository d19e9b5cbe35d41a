//! Placement by measured gain: a class of connections is tried in both places while it is in use, and is where it was
//! measured to be better served.

use crate::common::{answered, hosts, wait_for};
use crate::full::{ECHO, Program, address, connect, exchange};
use baton_agent::Choose;
use baton_bed::testbed::{Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_linux::process;
use baton_protocol::program::{Ask, ClassInfo, ConnectionInfo, Place, Reply};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

const SIGKILL: i32 = 9;

/// Factors for the NIC's measured cost and time, before the policy compares them with the kernel's.
const DEAR: f64 = 3.0;
const CHEAP: f64 = 0.1;

/// An unmodified server on host A whose connections are placed by gain, and clients of it.
struct Scene {
    clients: Vec<TcpStream>,
    _server: Program,
    bed: Testbed,
}

impl Scene {
    /// As if whatever the NIC does cost, and took, `price` times as much.
    fn new(settings: TestbedSettings, price: f64) -> Scene {
        let bed = hosts(TestbedSettings { choose: Choose::Gain { price }, ..settings });
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.args(["run", "--eager", "--rule", "established", "--socket"]).arg(bed.socket());
        command.args(["--", "python3", "-c", ECHO]);
        let server = Program(bed.host_a.spawn(&mut command).expect("baton run"));
        let at = address(false, 7000);
        crate::lifecycle::wait_for("the server", || connect(&bed, at).is_ok());
        let clients = (0..6).map(|_| connect(&bed, at).expect("a connection")).collect();
        Scene { clients, _server: server, bed }
    }

    /// Loads all connections until they are as expected.
    fn load_until(&self, what: &str, holds: impl Fn(&[ConnectionInfo]) -> bool) {
        // On a machine that is very busy a trial may end without an answer; the next one follows seconds later, or
        // minutes if it has measured nothing.
        let mut seen = Vec::new();
        wait_for(Duration::from_secs(240), what, || {
            (0..20).for_each(|_| self.clients.iter().for_each(|client| exchange(client, 7)));
            let listed = answered(&self.bed, Tool::connections);
            let ours = |one: &ConnectionInfo| self.clients.iter().any(|client| at(client) == one.peer);
            let listed: Vec<ConnectionInfo> = listed.into_iter().filter(ours).collect();
            let now: Vec<_> = listed.iter().map(|one| (one.place, one.reason.clone())).collect();
            if seen != now {
                println!("{now:?}, {:?}", answered(&self.bed, |tool| tool.ask(Ask::Gain)));
                seen = now;
            }
            listed.len() == self.clients.len() && holds(&listed)
        });
    }

    /// The only class.
    fn class(&self) -> ClassInfo {
        let Reply::Gain(mut classes) = answered(&self.bed, |tool| tool.ask(Ask::Gain)) else { panic!("no classes") };
        assert_eq!(classes.len(), 1, "{classes:?}");
        classes.remove(0)
    }
}

fn at(client: &TcpStream) -> String {
    client.local_addr().expect("its address").to_string()
}

fn beside() -> TestbedSettings {
    TestbedSettings { beside: true, ..TestbedSettings::default() }
}

fn all_are_at(place: Place, listed: &[ConnectionInfo], why: &str) -> bool {
    listed.iter().all(|one| one.place == place && one.reason.contains(why))
}

fn dear(settings: TestbedSettings) {
    let scene = Scene::new(settings, DEAR);
    // It was on the NIC, is back, and says why.
    scene.load_until("a NIC that is dear is not used", |listed| {
        all_are_at(Place::Kernel, listed, "er in the kernel (") && listed.iter().any(|one| one.moves >= 2)
    });
    let class = scene.class();
    let measured = class.measured.expect("figures");
    assert!(class.listens && class.service.ends_with(":7000") && measured.pairs >= 3, "{class:?}");
    assert_eq!((class.place, class.switches), (Place::Kernel, 0), "{class:?}");
    let mut shown = Command::new(env!("CARGO_BIN_EXE_baton"));
    shown.args(["nic", "gain", "--socket"]).arg(scene.bed.socket());
    let shown = String::from_utf8(shown.output().expect("baton nic gain").stdout).expect("text");
    assert!(shown.contains(":7000") && shown.contains("er in the kernel ("), "{shown}");
    // A later connection stays there at once.
    let later = connect(&scene.bed, address(false, 7000)).expect("a connection");
    exchange(&later, 5);
    let listed = answered(&scene.bed, Tool::connections);
    let one = listed.into_iter().find(|one| one.peer == at(&later)).expect("the connection");
    assert_eq!((one.place, one.moves), (Place::Kernel, 0), "{one:?}");
}

#[test]
fn a_dear_nic_beside_the_kernel_is_not_used() {
    dear(beside());
}

#[test]
fn a_dear_inline_nic_is_not_used() {
    dear(TestbedSettings::default());
}

#[test]
fn a_cheap_nic_is_used() {
    let scene = Scene::new(beside(), CHEAP);
    scene.load_until("all are on the NIC", |listed| all_are_at(Place::Nic, listed, "er on the NIC ("));
    assert_eq!((scene.class().place, scene.class().switches), (Place::Nic, 1));
    // The next agent knows nothing of it, and measures anew.
    let agent = answered(&scene.bed, Tool::statistics).agent_process;
    process::signal(agent, SIGKILL).expect("a signal");
    crate::lifecycle::wait_for("the next agent", || {
        let found = scene.bed.tool().and_then(|mut tool| tool.statistics());
        found.is_ok_and(|statistics| statistics.agent_process != agent)
    });
    scene.load_until("all are there again", |listed| all_are_at(Place::Nic, listed, "er on the NIC ("));
    let statistics = answered(&scene.bed, Tool::statistics);
    assert_eq!((statistics.lost, statistics.failed_moves), (0, 0));
}

#[test]
fn by_rules_nothing_is_measured() {
    let bed = hosts(beside());
    let reply = answered(&bed, |tool| tool.ask(Ask::Gain));
    assert!(matches!(&reply, Reply::Failed { reason } if reason.contains("--choose gain")), "{reply:?}");
}
