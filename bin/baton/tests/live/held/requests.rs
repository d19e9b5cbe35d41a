//! Requests about sockets of every kind while the socket's lock is held, and what the agent does with such a socket
//! afterwards.

use super::{Holder, goes_on, longest_round};
use crate::common::{Scene, answered, scene, wait_until};
use crate::full::{count, on_b};
use crate::hostile_client::Hostile;
use baton_abi::layout::Counter;
use baton_bed::testbed::TestbedSettings;
use baton_linux::process;
use baton_protocol::program::{ConnectionInfo, Place};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The kinds of sockets that the program has, in the order in which it names them.
#[derive(Clone, Copy)]
enum Kind {
    Listener = 1,
    Unconnected,
    Udp,
    Endpoint,
}

/// An honest program of root's, and one of nobody's with a socket of each kind.
struct Kinds {
    scene: Scene,
    hostile: Hostile,
    /// The program's process and its descriptors, by [`Kind`].
    words: Vec<String>,
    peer: SocketAddr,
    before: (u32, u32),
    /// How long a round of the honest program takes when nothing is held.
    usual: Duration,
}

impl Kinds {
    fn new(beside: bool) -> Kinds {
        let mut scene = scene(TestbedSettings { beside, ..TestbedSettings::default() });
        let peer = crate::hostile_client::echo_server(&scene.bed);
        let mut hostile = Hostile::start_at(&scene.bed.host_a, &scene.bed.socket(), &peer.to_string(), "kinds");
        let line = hostile.await_attack();
        let words = line.split_whitespace().skip_while(|word| !word.ends_with("attacking")).skip(1);
        let words = words.map(str::to_owned).collect();
        let usual = longest_round(&mut scene);
        let mut kinds = Kinds { scene, hostile, words, peer, before: (0, 0), usual };
        kinds.before = kinds.processes();
        kinds
    }

    fn processes(&self) -> (u32, u32) {
        let now = answered(&self.scene.bed, |tool| tool.statistics());
        (now.agent_process, now.nic_process)
    }

    fn hold(&self, kind: Kind) -> Holder {
        Holder::new(&self.words[0], &self.words[kind as usize])
    }

    fn ask(&mut self, what: &str) -> String {
        self.hostile.tell(what);
        self.hostile.hear()
    }

    /// Others go on while a socket's lock is held and this is asked for; when it is let go the answer is as it would
    /// have been.
    fn is_asked_while_held(&mut self, what: &str, kind: Kind, expected: &str) {
        let holder = self.hold(kind);
        self.hostile.tell(what);
        goes_on(&mut self.scene, self.usual);
        drop(holder);
        let answer = self.hostile.hear();
        assert!(answer.starts_with(expected), "{what}: {answer}");
        assert_eq!(self.processes(), self.before, "{what}");
    }

    /// Others go on while a socket's lock is held for longer than the time between two of the agent's looks at it.
    fn is_looked_at_while_held(&mut self, kind: Kind) {
        let holder = self.hold(kind);
        let begun = Instant::now();
        while begun.elapsed() < LOOKS {
            goes_on(&mut self.scene, self.usual);
            // Waits: between two rounds; the agent's looks come by themselves.
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(holder);
        assert_eq!(self.processes(), self.before);
    }

    /// The peer does not answer to SYNs until this is undone.
    fn mute_peer(&self, muted: bool) {
        let port = self.peer.port().to_string();
        let rules = match muted {
            true => {
                "add table inet wall; add chain inet wall in { type filter hook input priority 0 ; }; \
                     add rule inet wall in tcp dport PORT tcp flags syn drop"
            }
            false => "delete table inet wall",
        };
        let done = on_b(&self.scene.bed, &["nft", &rules.replace("PORT", &port)]);
        assert!(done.status.success(), "nft: {}", crate::scratch::text(&done.stderr));
    }

    /// What a tool sees of the program's connection.
    fn listed(&self) -> ConnectionInfo {
        let all = answered(&self.scene.bed, |tool| tool.connections());
        all.into_iter().find(|info| info.process.to_string() == self.words[0]).expect("its connection")
    }

    /// The connection that the NIC has opened moves to the kernel as soon as it is open.
    fn moves_to_the_kernel(&mut self) {
        wait_until("it is open, and in the kernel", || {
            let answer = self.ask("kernel");
            let now = self.listed();
            answer == "Done" && now.place == Place::Kernel && now.detail.state == ESTABLISHED
        });
    }

    fn is_shown_as_held(&self) {
        wait_until("the reason", || self.listed().reason.contains("its program holds it"));
    }
}

/// Linux's number of that state.
const ESTABLISHED: u8 = 1;

/// Several times what passes between two looks at sockets of which the kernel sends no notification.
const LOOKS: Duration = Duration::from_secs(5);

#[test]
fn a_listener_whose_lock_is_held_holds_up_no_other() {
    for beside in [false, true] {
        let mut kinds = Kinds::new(beside);
        kinds.is_asked_while_held("listen", Kind::Listener, "Listening");
        kinds.is_looked_at_while_held(Kind::Listener);
        kinds.hostile.expect_success();
    }
}

#[test]
fn a_socket_to_be_connected_whose_lock_is_held_holds_up_no_other() {
    for beside in [false, true] {
        let mut kinds = Kinds::new(beside);
        kinds.is_asked_while_held("connect", Kind::Unconnected, "Registered");
        kinds.moves_to_the_kernel();
        assert_eq!(kinds.ask("echo"), "echoed");
        kinds.hostile.expect_success();
    }
}

/// The NIC has opened a connection whose socket's lock is held: it becomes the connection's when it is let go.
#[test]
fn a_connection_that_the_nic_has_opened_waits_for_its_socket_alone() {
    for beside in [false, true] {
        let mut kinds = Kinds::new(beside);
        kinds.mute_peer(true);
        let answer = kinds.ask("connect");
        assert!(answer.starts_with("Registered"), "{answer}");
        let made = count(&kinds.scene.bed, Counter::Made);
        let holder = kinds.hold(Kind::Unconnected);
        kinds.mute_peer(false);
        wait_until("the NIC has opened it", || count(&kinds.scene.bed, Counter::Made) > made);
        goes_on(&mut kinds.scene, kinds.usual);
        kinds.is_shown_as_held();
        drop(holder);
        kinds.moves_to_the_kernel();
        assert_eq!(kinds.ask("echo"), "echoed");
        assert_eq!(kinds.processes(), kinds.before);
        kinds.hostile.expect_success();
    }
}

/// The kernel is to open a connection instead of the NIC, since its program or the NIC's death wants that, while the
/// socket's lock is held.
#[test]
fn a_connection_that_the_kernel_is_to_open_waits_for_its_socket_alone() {
    for dies in [false, true] {
        let mut kinds = Kinds::new(dies);
        kinds.mute_peer(true);
        let answer = kinds.ask("connect");
        assert!(answer.starts_with("Registered"), "{answer}");
        let holder = kinds.hold(Kind::Unconnected);
        if dies {
            process::signal(kinds.before.1, libc::SIGKILL).expect("the NIC");
            wait_until("the next NIC", || kinds.processes().1 != kinds.before.1);
        } else {
            kinds.hostile.tell("back");
        }
        goes_on(&mut kinds.scene, kinds.usual);
        kinds.is_shown_as_held();
        drop(holder);
        if !dies {
            assert_eq!(kinds.hostile.hear(), "Done");
        }
        kinds.mute_peer(false);
        wait_until("the kernel opens it", || kinds.listed().detail.state == ESTABLISHED);
        assert_eq!(kinds.listed().made_by, Place::Kernel);
        // It has been on its way to the NIC, and goes there some time after it is open.
        kinds.moves_to_the_kernel();
        assert_eq!(kinds.ask("echo"), "echoed");
        assert_eq!(kinds.processes().0, kinds.before.0);
        kinds.hostile.expect_success();
    }
}

#[test]
fn a_udp_socket_whose_lock_is_held_holds_up_no_other() {
    let mut kinds = Kinds::new(false);
    kinds.is_asked_while_held("datagrams", Kind::Udp, "Datagrams");
    kinds.is_looked_at_while_held(Kind::Udp);
    kinds.is_asked_while_held("datagrams", Kind::Udp, "Datagrams");
    kinds.is_asked_while_held("way", Kind::Udp, "Way");
    kinds.hostile.expect_success();
}

#[test]
fn an_endpoint_whose_lock_is_held_holds_up_no_other() {
    for beside in [false, true] {
        let mut kinds = Kinds::new(beside);
        kinds.is_asked_while_held("messages", Kind::Endpoint, "Opened");
        kinds.is_looked_at_while_held(Kind::Endpoint);
        kinds.is_asked_while_held("reach", Kind::Endpoint, "Done");
        kinds.hostile.expect_success();
    }
}
