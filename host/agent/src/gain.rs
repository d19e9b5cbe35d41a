//! Placement by measured gain (`--choose gain`): which class a connection belongs to, where that class is to be now,
//! and what lists say of it. The decisions are made in [`baton_policy::Gain`].

use crate::settings::Choose;
use baton_core::Key;
use baton_linux::events::{monotonic_micros, nanos_of};
use baton_linux::process;
use baton_policy::{Figures, Gain, Row, Seen, Side, Start, Starts, Used, WORTH, Why};
use baton_protocol::program::{ClassInfo, Measured, Place, Reply};
use baton_wire::Flow;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// Most classes, and most of one user: a program may have any name. What belongs to none of them belongs to one more.
const MOST_CLASSES: usize = 128;
const MOST_OF_USER: usize = 64;

/// How many times as long as a look the pause after it is at least: looking takes at most a hundredth of a processor.
const PART: u64 = 100;

/// Names a class: one program over one service.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Service {
    address: SocketAddr,
    /// It is this host's.
    listens: bool,
    user: u32,
    /// Number of the program's name.
    program: u32,
}

impl Service {
    /// Neither a socket nor its registration says who has opened the connection. A service has a lower port than its
    /// clients, which the kernel gives theirs.
    fn of(flow: &Flow, user: u32, program: u32) -> Service {
        let listens = flow.local.port <= flow.remote.port;
        let address = SocketAddr::from(if listens { flow.local } else { flow.remote });
        Service { address, listens, user, program }
    }
}

/// A connection, as it was found at a look.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub key: Key,
    pub class: u32,
    /// Process that has it.
    pub process: u32,
    pub side: Side,
    /// What it has carried there; None in the middle of a move.
    pub carried: Option<u32>,
}

/// Classes by their names, and the policy.
pub(crate) struct Gains {
    policy: Gain,
    classes: HashMap<Service, u32>,
    programs: HashMap<String, u32>,
    last: u32,
    /// Where each class was sent last.
    sent: BTreeMap<u32, Side>,
    /// Connections that are to go to the NIC, since their class is to be there now.
    pub coming: VecDeque<Key>,
    /// When to look again, in microseconds of the monotonic clock.
    due: u64,
}

impl Gains {
    /// None if connections are not placed by what was measured. `before`: what was measured earlier.
    pub fn chosen(choose: Choose, before: &[Measured]) -> Option<Gains> {
        let Choose::Gain { price } = choose else { return None };
        let mut seed = [0; 8];
        // The order of turns is no secret: any seed will do.
        let _ = process::random(&mut seed);
        Some(Gains {
            policy: Gain::new(u64::from_ne_bytes(seed), price).with_starts(Starts::new(before.iter().map(start))),
            classes: HashMap::new(),
            programs: HashMap::new(),
            last: 0,
            sent: BTreeMap::new(),
            coming: VecDeque::new(),
            due: 0,
        })
    }

    /// Number of a program's name.
    pub fn program(&mut self, name: &str) -> u32 {
        if let Some(number) = self.programs.get(name) {
            return *number;
        }
        self.last += 1;
        self.programs.insert(name.to_owned(), self.last);
        self.last
    }

    /// The class of a connection of the program with this number.
    pub fn class(&mut self, flow: &Flow, user: u32, program: u32) -> u32 {
        let service = Service::of(flow, user, program);
        if let Some(class) = self.classes.get(&service) {
            return *class;
        }
        let of_user = || self.classes.keys().filter(|service| service.user == user).count();
        if self.classes.len() >= MOST_CLASSES || of_user() >= MOST_OF_USER {
            return 0;
        }
        self.last += 1;
        self.classes.insert(service, self.last);
        self.last
    }

    /// What a byte of a connection saves on the NIC, as [`baton_policy::Sample`] has it.
    pub fn worth(&self, flow: &Flow, user: u32, program: &str) -> u32 {
        let class = self.programs.get(program).and_then(|program| self.classes.get(&Service::of(flow, user, *program)));
        let figures = class.and_then(|class| self.policy.row(*class, 0)?.figures);
        figures.map_or(WORTH, |Figures { cost: [kernel, nic], .. }| ((kernel - nic) * f64::from(WORTH)).clamp(1.0, 1e9) as u32)
    }

    /// Time until the next look, or until there is something to do.
    pub fn wait(&self) -> Duration {
        let due = if self.coming.is_empty() { self.due.saturating_sub(monotonic_micros()) } else { 0 };
        Duration::from_micros(due)
    }

    pub fn is_due(&self, now: u64) -> bool {
        self.due <= now
    }

    /// Looks at all connections that may be on the NIC. `nics` are its processes. Returns those that are to leave it.
    pub fn look(&mut self, found: &[Found], nics: &[u32], now: u64) -> Vec<Key> {
        let nanos = |process: u32| nanos_of(process).unwrap_or(0);
        let processes: BTreeSet<(u32, u32)> = found.iter().map(|found| (found.process, found.class)).collect();
        let programs: Vec<_> = processes.into_iter().map(|(process, class)| (process, class, nanos(process))).collect();
        let seen =
            |Found { key, class, side, carried, .. }: &Found| Seen { key: key.2, class: *class, side: *side, carried: *carried };
        let seen: Vec<Seen> = found.iter().map(seen).collect();
        let interrupts = process::interrupt_nanos().unwrap_or(0);
        let used = Used { programs: &programs, nics: nics.iter().copied().map(nanos).sum(), interrupts };
        let next = self.policy.look(now, &seen, used);
        let mut sent = BTreeMap::new();
        let mut leave = Vec::new();
        self.coming.clear();
        for Found { key, class, side, .. } in found.iter().filter(|found| found.carried.is_some()) {
            let to = self.policy.place(*class);
            sent.insert(*class, to);
            match (side, to) {
                (Side::Nic, Side::Kernel) => leave.push(*key),
                // One that could not go there then is tried again as others are.
                (Side::Kernel, Side::Nic) if self.sent.get(class) != Some(&to) => self.coming.push_back(*key),
                _ => {}
            }
        }
        // A class all of whose connections are on their way is where it was sent.
        for (class, side) in std::mem::take(&mut self.sent) {
            if self.policy.knows(class) {
                sent.entry(class).or_insert(side);
            }
        }
        self.sent = sent;
        self.classes.retain(|_, class| self.policy.knows(*class));
        self.programs.retain(|_, program| self.classes.keys().any(|service| service.program == *program));
        let after = monotonic_micros();
        self.due = next.max(after + PART * after.saturating_sub(now));
        leave
    }

    /// Why a connection of this class may not go to the NIC now; None if it may.
    pub fn refuses(&self, class: u32) -> Option<String> {
        (self.policy.place(class) == Side::Kernel).then(|| self.text(class))
    }

    /// Where a class belongs, and why; None while it is being tried.
    pub fn settled(&self, class: u32) -> Option<(Side, String)> {
        let row = self.policy.row(class, 0).filter(|row| !row.trial && row.figures.is_some())?;
        Some((row.home, text(&row)))
    }

    fn text(&self, class: u32) -> String {
        self.policy.row(class, 0).map_or_else(|| NEW.into(), |row| text(&row))
    }

    /// The classes, those that have carried most first.
    pub fn list(&self) -> Vec<ClassInfo> {
        let now = monotonic_micros();
        let programs: BTreeMap<u32, &String> = self.programs.iter().map(|(name, number)| (*number, name)).collect();
        let known = |(service, class): (&Service, &u32)| Some((*service, self.policy.row(*class, now)?));
        let mut rows: Vec<(Service, Row)> = self.classes.iter().filter_map(known).collect();
        rows.sort_by_key(|(service, row)| (std::cmp::Reverse(row.bytes), service.address));
        let info = |(service, row): &(Service, Row)| ClassInfo {
            service: service.address.to_string(),
            listens: service.listens,
            program: programs.get(&service.program).map_or_else(String::new, |name| name.to_string()),
            user: service.user,
            connections: (row.on[0], row.on[1]),
            place: place(row.home),
            trial: row.trial,
            switches: row.switches,
            measured: row.figures.map(measured),
            reason: text(row),
            next_us: row.next,
        };
        rows.iter().map(info).collect()
    }
}

/// Figures as they are shown, and kept for other agents.
fn measured(Figures { pairs, cost, rate, program }: Figures) -> Measured {
    Measured { pairs, cost: cost.into(), rate: rate.into(), program: program.into() }
}

/// What such figures say about a load like it.
fn start(Measured { cost, rate, program, .. }: &Measured) -> Start {
    Start { program: [program.0, program.1], cost: cost.1 / cost.0, rate: rate.1 / rate.0 }
}

/// What is known of classes, as an answer.
pub(crate) fn reply(gain: Option<&Gains>) -> Reply {
    let none = "this Baton places connections by rules: `--choose gain` of baton up or run measures";
    gain.map_or_else(|| Reply::Failed { reason: none.into() }, |gain| Reply::Gain(gain.list()))
}

fn place(side: Side) -> Place {
    match side {
        Side::Kernel => Place::Kernel,
        Side::Nic => Place::Nic,
    }
}

/// Why a connection stays of whose class nothing is known, nor of any like it.
const NEW: &str = "not measured yet: its class begins in the kernel";

/// Why a class is where it is.
fn text(row: &Row) -> String {
    if row.trial {
        return "its class is being measured in both places".into();
    }
    let here = if row.home == Side::Kernel { "in the kernel" } else { "on the NIC" };
    let figures = row.figures.unwrap_or_default();
    // That of its own place first.
    let order = |[kernel, nic]: [f64; 2]| if row.home == Side::Kernel { (kernel, nic) } else { (nic, kernel) };
    // Nanoseconds for a byte are seconds for a GB.
    let (cost, other_cost) = order(figures.cost);
    let (rate, other_rate) = order(figures.rate.map(|rate| rate / 1e6));
    match row.why {
        Why::New => NEW.into(),
        Why::Start => format!("it begins {here}, where loads like it were measured to be better served"),
        Why::Little => "a turn in which its class was measured carried too little, or was cut short".into(),
        Why::Stuck => "not all of its class could be moved to measure it (baton stats says why)".into(),
        Why::Begun => "its class was measured too briefly so far: its turns took long, and more of them follow".into(),
        Why::Cheaper => format!("cheaper {here} ({cost:.2} against {other_cost:.2} s/GB)"),
        Why::Faster => format!("faster {here} ({rate:.1} against {other_rate:.1} MB/s)"),
        Why::Equal => format!("no difference that is certain ({cost:.2} {here} against {other_cost:.2} s/GB)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_wire::Endpoint;
    use std::net::IpAddr;

    #[test]
    fn a_service_has_the_lower_port() {
        let end = |port| Endpoint::from(SocketAddr::new(IpAddr::from([10, 0, 0, 1]), port));
        let service = |local, remote| Service::of(&Flow { local: end(local), remote: end(remote), device: 0 }, 0, 1);
        assert!(service(80, 40_000).listens && service(80, 40_000) == service(80, 40_001));
        assert!(!service(40_000, 80).listens && service(40_000, 80) == service(40_001, 80));
        assert_ne!(service(80, 40_000), service(40_000, 80));
    }

    #[test]
    fn the_text_says_what_was_measured() {
        let figures = Figures { pairs: 4, cost: [0.33, 0.41], rate: [1e9, 0.7e9], program: [0.3, 0.2] };
        let row = |home, why| Row { home, trial: false, why, figures: Some(figures), switches: 0, on: [1, 0], next: 0, bytes: 0 };
        assert_eq!(text(&row(Side::Kernel, Why::Cheaper)), "cheaper in the kernel (0.33 against 0.41 s/GB)");
        assert_eq!(text(&row(Side::Kernel, Why::Faster)), "faster in the kernel (1000.0 against 700.0 MB/s)");
        assert_eq!(text(&row(Side::Nic, Why::Equal)), "no difference that is certain (0.41 on the NIC against 0.33 s/GB)");
        let begins = "it begins on the NIC, where loads like it were measured to be better served";
        assert_eq!(text(&row(Side::Nic, Why::Start)), begins);
        let kept = start(&measured(figures));
        assert_eq!((kept.program, kept.cost.to_bits(), kept.rate), ([0.3, 0.2], (0.41f64 / 0.33).to_bits(), 0.7));
    }

    #[test]
    fn classes_are_bounded() {
        let mut gains = Gains::chosen(Choose::Gain { price: 1.0 }, &[]).expect("chosen");
        let flow = |port| {
            let end = |port| SocketAddr::new(IpAddr::from([10, 0, 0, 1]), port).into();
            Flow { local: end(port), remote: end(50_000), device: 0 }
        };
        let mut of = |user| (0..1000).map(|port| gains.class(&flow(port), user, 1)).collect::<BTreeSet<u32>>();
        assert_eq!((of(7).len(), of(0).len()), (MOST_OF_USER + 1, MOST_OF_USER + 1), "one user leaves classes to others");
        assert_eq!(of(8).len(), 1);
        assert_eq!((gains.classes.len(), gains.class(&flow(1), 9, 1)), (MOST_CLASSES, 0));
        assert!(gains.refuses(0).is_some());
        assert_eq!(gains.worth(&flow(1), 7, "of which nothing was measured"), WORTH);
    }
}
