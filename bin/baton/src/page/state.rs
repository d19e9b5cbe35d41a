//! What the page shows, as JSON, of what a user may see.

use crate::list::expression::Expression;
use crate::list::looks::Watch;
use crate::list::row::{Key, Rate, Row, Sort};
use crate::tools::SocketArgument;
use crate::top::panels::{Meter, Panels, Program, Worker, count_programs};
use baton_handoff::examine::state_name;
use baton_linux::events::monotonic_micros;
use baton_linux::process;
use baton_linux::terminal::plain;
use baton_protocol::program::{ClassInfo, NicStatistics, Place, Statistics};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Connections on a page of the list: the agent is asked for the details of these only.
const LENGTH: usize = 50;

/// Most programs and workers that are listed.
const PROGRAMS: usize = 20;
const WORKERS: usize = 64;

/// Microseconds for which a look is good, however many clients there are: a bit less than a page's second.
const FRESH: u64 = 900_000;

/// Microseconds between two looks at what changes rarely: users of processes, what connections were measured to cost.
const RARELY: u64 = 5_000_000;

/// Which connections are wanted.
#[derive(Clone, PartialEq, Debug)]
pub struct Wanted {
    /// In which order.
    pub sort: Sort,
    /// Place in that order of the first one.
    pub from: usize,
    /// Only those that match.
    pub filter: Option<Expression>,
}

impl Default for Wanted {
    fn default() -> Wanted {
        Wanted { sort: Sort::Rate, from: 0, filter: None }
    }
}

/// Effective users of processes, each asked for once in a while: a program may change its user.
#[derive(Default)]
struct Users(HashMap<u32, Option<u32>>);

impl Users {
    fn of(&mut self, process: u32) -> Option<u32> {
        *self.0.entry(process).or_insert_with(|| process::users(process).map(|[_, effective, ..]| effective))
    }

    /// Whether a user may see connections of this process: its own, or any as root. None is nobody.
    fn may_see(&mut self, user: Option<u32>, process: u32) -> bool {
        match user {
            None => false,
            Some(0) => true,
            Some(_) => self.of(process) == user,
        }
    }

    /// Whether a user may see the NICs of the agent with this process: its own, root's, or any as root.
    fn may_see_nics(&mut self, user: Option<u32>, agent: u32) -> bool {
        self.may_see(user, agent) || user.is_some() && self.of(agent) == Some(0)
    }
}

/// What is known of all Batons.
pub struct State {
    watch: Watch,
    /// By Baton.
    meters: HashMap<usize, Meter>,
    /// Of the Batons that answer.
    panels: BTreeMap<usize, Panels>,
    users: Users,
    classes: Vec<ClassInfo>,
    /// When to ask next for what changes rarely, microseconds of the monotonic clock.
    rarely_at: u64,
    /// When the last look ended, microseconds of the monotonic clock; 0 before the first one.
    seen_at: u64,
    /// Connections whose details were asked for since then.
    described: HashSet<Key>,
}

impl State {
    /// Of the Batons that are meant.
    pub fn new(argument: SocketArgument) -> State {
        State {
            watch: Watch::new(argument),
            meters: HashMap::new(),
            panels: BTreeMap::new(),
            users: Users::default(),
            classes: Vec::new(),
            rarely_at: 0,
            seen_at: 0,
            described: HashSet::new(),
        }
    }

    /// Looks, if the last look is too old.
    fn renew(&mut self) {
        let now = monotonic_micros();
        if self.seen_at > 0 && now.saturating_sub(self.seen_at) < FRESH {
            return;
        }
        self.watch.refresh();
        if now >= self.rarely_at {
            (self.users, self.classes) = (Users::default(), self.watch.classes());
            self.rarely_at = now + RARELY;
        }
        // Its end counts: where agents do not answer, clients are served between two looks.
        self.seen_at = monotonic_micros();
        (self.described, self.panels) = (HashSet::new(), BTreeMap::new());
        let mut before = std::mem::take(&mut self.meters);
        for (number, statistics) in self.watch.batons() {
            let mut meter = before.remove(&number).unwrap_or_default();
            if let Some(statistics) = statistics {
                let panels = meter.note(self.seen_at, &[(number, statistics)], std::iter::empty());
                self.panels.insert(number, panels);
            }
            self.meters.insert(number, meter);
        }
    }

    /// What a user may see.
    pub fn answer(&mut self, user: Option<u32>, wanted: &Wanted) -> Value {
        self.renew();
        let State { watch, users, classes, .. } = self;
        let rows: Vec<&Row> = watch.rows().filter(|row| users.may_see(user, row.info.process)).collect();
        let mut sums = Panels::default();
        count_programs(rows.iter().copied(), &mut sums);
        let programs = programs(&sums, &saved(&rows, classes));
        let rate = rates(&rows);
        let (keys, from, matching) = page(&rows, wanted);
        // Once a look: clients that ask more often do not make the agent work.
        let new: Vec<Key> = keys.iter().copied().filter(|key| self.described.insert(*key)).collect();
        self.watch.describe(&new);
        // Its number may be another's by now.
        let rows = keys.iter().filter_map(|key| self.watch.row(*key));
        let rows: Vec<Value> = rows.filter(|row| self.users.may_see(user, row.info.process)).map(connection).collect();
        let troubles: Vec<String> = match user {
            Some(user) if user == 0 || user == process::user() => self.watch.troubles().iter().map(|text| plain(text)).collect(),
            _ => Vec::new(),
        };
        let (batons, workers) = self.nics(user);
        let [nic, kernel] = sums.connections;
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "user": user,
            "batons": batons,
            "workers": workers.iter().take(WORKERS).map(|(baton, of)| worker(*baton, of)).collect::<Value>(),
            "workers_in_all": workers.len(),
            "programs": programs,
            "programs_in_all": sums.programs.len(),
            "sums": { "nic": nic, "kernel": kernel, "sent": rate.sent, "received": rate.received },
            "connections": { "rows": rows, "from": from, "length": LENGTH, "matching": matching },
            "troubles": troubles,
        })
    }

    /// The Batons that a user may see, and the workers of their NICs.
    fn nics(&mut self, user: Option<u32>) -> (Vec<Value>, Vec<(usize, Worker)>) {
        let (mut batons, mut workers) = (Vec::new(), Vec::new());
        for (number, statistics) in self.watch.batons() {
            let Some((statistics, panels)) = statistics.zip(self.panels.get(&number)) else { continue };
            if !self.users.may_see_nics(user, statistics.agent_process) {
                continue;
            }
            let socket = self.watch.socket((number, 0, 0)).map(|path| path.display().to_string());
            batons.push(baton(number, socket.as_deref(), statistics, panels.moves));
            workers.extend(panels.workers.iter().map(|worker| (number, worker.clone())));
        }
        (batons, workers)
    }
}

/// The keys on the page of the list that is wanted, where it begins, and how many connections match.
fn page(rows: &[&Row], wanted: &Wanted) -> (Vec<Key>, usize, usize) {
    let is_meant = |row: &&Row| wanted.filter.as_ref().is_none_or(|filter| filter.matches(row));
    let mut matching: Vec<&Row> = rows.iter().copied().filter(is_meant).collect();
    wanted.sort.apply(&mut matching);
    // A list that has become shorter still has a last page.
    let from = wanted.from.min(matching.len().saturating_sub(1) / LENGTH * LENGTH);
    (matching.iter().skip(from).take(LENGTH).map(|row| row.key()).collect(), from, matching.len())
}

/// What all of these carry together.
fn rates(rows: &[&Row]) -> Rate {
    rows.iter()
        .filter_map(|row| row.rate)
        .fold(Rate::default(), |sum, rate| Rate { sent: sum.sent + rate.sent, received: sum.received + rate.received })
}

/// By program, how much of a processor its connections on NICs save: their bytes a second, times what a byte was
/// measured to cost less there. Programs of which nothing was measured are missing.
fn saved<'a>(rows: &[&'a Row], classes: &[ClassInfo]) -> HashMap<&'a str, f64> {
    let costs = classes.iter().filter_map(|class| {
        let service = (class.listens, class.service.as_str(), class.program.as_str());
        Some((service, class.measured?.cost))
    });
    let costs: HashMap<_, _> = costs.collect();
    let mut saved = HashMap::new();
    if costs.is_empty() {
        return saved;
    }
    for row in rows.iter().copied().filter(|row| row.info.place == Place::Nic) {
        let program = row.info.program.as_str();
        let ends = [(true, row.info.local.as_str(), program), (false, row.info.peer.as_str(), program)];
        if let Some((kernel, nic)) = ends.iter().find_map(|end| costs.get(end)) {
            // Seconds for a GB.
            *saved.entry(row.name.as_str()).or_insert(0.0) += (kernel - nic) / 1e9 * row.rate.map_or(0.0, Rate::sum);
        }
    }
    saved
}

fn programs(sums: &Panels, saved: &HashMap<&str, f64>) -> Value {
    let one = |program: &Program| {
        let [nic, kernel] = program.connections;
        json!({
            "name": program.name, "nic": nic, "kernel": kernel, "sent": program.rate.sent, "received": program.rate.received,
            "saved": saved.get(program.name.as_str()),
        })
    };
    sums.programs.iter().take(PROGRAMS).map(one).collect()
}

fn baton(number: usize, socket: Option<&str>, statistics: &Statistics, moves_per_second: f64) -> Value {
    let nic = |(number, of): (usize, &NicStatistics)| {
        let deaths: u64 = of.deaths.values().sum();
        json!({ "number": number, "process": of.process, "devices": of.devices, "deaths": deaths })
    };
    json!({
        "number": number, "socket": socket, "agent": statistics.agent_process, "for_us": statistics.for_us,
        "nics": statistics.nics.iter().enumerate().map(nic).collect::<Value>(),
        "moves": statistics.moves, "moves_per_second": moves_per_second, "failed": statistics.failed_moves,
        "recovered": statistics.recovered, "lost": statistics.lost,
    })
}

fn worker(baton: usize, of: &Worker) -> Value {
    let Worker { name, busy, connections, frames, doorbells } = of;
    json!({
        "baton": baton, "name": name, "busy": busy, "connections": connections, "frames": frames, "doorbells": doorbells,
    })
}

fn connection(row: &Row) -> Value {
    let (info, detail) = (&row.info, &row.info.detail);
    // Of another user's connection in the kernel they are not known; every other one has a largest segment.
    let known = |value: u32| (detail.mss != 0).then_some(value);
    json!({
        "key": [row.baton as u64, u64::from(info.session), u64::from(info.connection)],
        "local": info.local, "peer": info.peer, "place": info.place, "nic": info.nic,
        "program": row.name, "process": info.process, "state": state_name(detail.state),
        "moves": info.moves, "for_us": info.for_us, "reason": info.reason,
        "rtt_us": known(detail.srtt), "retransmitted": known(detail.retransmitted), "unsent": detail.unsent, "unread": detail.unread,
        "sent": detail.sent, "received": detail.received,
        "sent_per_second": row.rate.map(|rate| rate.sent), "received_per_second": row.rate.map(|rate| rate.received),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::row::tests::row;
    use crate::tools::tests::nowhere;
    use baton_protocol::program::Measured;

    /// As many connections, each slower than the one before it.
    fn rows(count: u32) -> Vec<Row> {
        let one = |number: u32| {
            let mut row = row("10.0.0.1:443", &format!("10.0.0.2:{}", 40_000 + number));
            row.info.connection = number;
            row.rate = Some(Rate { sent: f64::from(count - number) * 1e6, received: 0.0 });
            row
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn a_list_has_pages() {
        let rows = rows(120);
        let rows: Vec<&Row> = rows.iter().collect();
        let numbers = |wanted: &Wanted| {
            let (keys, from, matching) = page(&rows, wanted);
            let numbers: Vec<u32> = keys.iter().map(|(_, _, number)| *number).collect();
            (numbers, from, matching)
        };
        assert_eq!(numbers(&Wanted::default()), ((0..50).collect(), 0, 120), "those that carry most are first");
        assert_eq!(numbers(&Wanted { from: 100, ..Wanted::default() }), ((100..120).collect(), 100, 120));
        // Behind the end there is the last page.
        assert_eq!(numbers(&Wanted { from: usize::MAX, ..Wanted::default() }), ((100..120).collect(), 100, 120));
        let filter = Some("dport >= :40110".parse().expect("a filter"));
        assert_eq!(numbers(&Wanted { from: 50, filter, ..Wanted::default() }), ((110..120).collect(), 0, 10));
        let none = Some("place = nic".parse().expect("a filter"));
        assert_eq!(numbers(&Wanted { filter: none, ..Wanted::default() }), (Vec::new(), 0, 0));
    }

    #[test]
    fn a_user_sees_its_own() {
        let mut users = Users([(1, Some(0)), (2, Some(33)), (3, Some(1000)), (4, None)].into());
        let mut seen = |user| -> Vec<u32> { (1..=4).filter(|process| users.may_see(user, *process)).collect() };
        assert_eq!((seen(Some(0)), seen(Some(33)), seen(Some(1000))), (vec![1, 2, 3, 4], vec![2], vec![3]));
        // Neither somebody unknown sees anything, nor is a process seen whose user is unknown.
        assert_eq!((seen(None), seen(Some(7))), (vec![], vec![]));
        let mut nics = |user| -> Vec<u32> { (1..=4).filter(|agent| users.may_see_nics(user, *agent)).collect() };
        assert_eq!((nics(Some(0)), nics(Some(33)), nics(None)), (vec![1, 2, 3, 4], vec![1, 2], vec![]));
    }

    #[test]
    fn what_was_measured_is_multiplied() {
        let class = ClassInfo {
            service: "10.0.0.1:443".into(),
            listens: true,
            program: "/usr/bin/server".into(),
            user: 0,
            connections: (0, 2),
            place: Place::Nic,
            trial: false,
            switches: 0,
            measured: Some(Measured { pairs: 4, cost: (0.5, 0.3), rate: (1e9, 1e9), program: (0.4, 0.1) }),
            reason: String::new(),
            next_us: 0,
        };
        let mut rows = rows(3);
        rows[1].info.place = Place::Nic;
        rows[2].info.place = Place::Nic;
        let rows: Vec<&Row> = rows.iter().collect();
        // 2 and 1 MB/s on the NIC, where a GB costs 0.2 s less.
        let found = saved(&rows, std::slice::from_ref(&class))["server"];
        assert!((found - 0.0006).abs() < 1e-9, "{found}");
        assert!(saved(&rows, &[]).is_empty() && saved(&rows, &[ClassInfo { listens: false, ..class }]).is_empty());
        assert_eq!(rates(&rows), Rate { sent: 6e6, received: 0.0 });
    }

    /// What a program is called is a string of JSON, whatever is in it.
    #[test]
    fn texts_stay_texts() {
        let mut row = row("10.0.0.1:1", "[fd00::1]:2");
        row.name = "</script><b>\"&\u{2603}".into();
        row.info.detail.mss = 0;
        let value = connection(&row);
        let read: Value = serde_json::from_str(&value.to_string()).expect("JSON");
        assert_eq!((read["program"].as_str(), &read["place"]), (Some(row.name.as_str()), &json!("kernel")));
        assert!(read["rtt_us"].is_null() && read["sent_per_second"].is_null(), "what is not known is not 0: {read}");
    }

    #[test]
    fn no_agent_is_a_trouble() {
        let mut state = State::new(nowhere());
        let root = state.answer(Some(0), &Wanted::default());
        assert!(root["troubles"][0].as_str().is_some_and(|text| text.contains("/nowhere")), "{root}");
        assert_eq!((&root["batons"], &root["connections"]["matching"]), (&json!([]), &json!(0)));
        assert_eq!(state.answer(None, &Wanted::default())["troubles"], json!([]));
    }
}
