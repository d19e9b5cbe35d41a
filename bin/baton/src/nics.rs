//! `--nics` and `--device`: several NICs for one agent; `--during-moves`, `--peer-fin`, `--route-change`,
//! `--nic-connections` and its like: what each does with connections that move or end, and what it has room for.

use crate::gain_file;
use anyhow::{Context, Result, bail};
use baton_abi::layout::nic::MAX_NICS;
use baton_agent::{AgentSettings, Choose};
use baton_linux::rtnetlink;
use baton_offloads::{DuringMoves, Offloads, PeerFin, RouteChange, WhenFull};
use baton_protocol::nic::NicSettings;
use clap::Args;

#[derive(Args, Debug)]
pub struct NicsArguments {
    /// If a Baton is started: number of NICs, each a process of its own. A connection is handed to the one whose device
    /// its route leads to. Devices are dealt to them in turn, later ones to the NIC with the fewest.
    #[arg(long, default_value = "1", value_name = "N", value_parser = number)]
    nics: usize,
    /// With --nics: a device that is dealt before all others, the first to NIC 0, the second to NIC 1, and so on. Can
    /// be given several times.
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
    /// If a Baton is started: how it chooses which connections are on the NIC.
    #[arg(long, value_enum, value_name = "HOW")]
    choose: Option<Chosen>,
    #[command(flatten)]
    policy: PolicyArguments,
}

/// What NICs do with connections that move or end, and what they have room for. `baton nic set` changes it at run time.
#[derive(Args, Clone, Debug, Default)]
pub struct PolicyArguments {
    /// What becomes of frames that come while their connection moves; of a Baton that is started (`baton nic set
    /// during-moves=…` changes it). [default: hold]
    #[arg(long, value_enum, value_name = "WHAT")]
    during_moves: Option<WhileMoving>,
    /// What becomes of a connection on the NIC when its peer's FIN has come; of a Baton that is started (`baton nic set
    /// peer-fin=…` changes it). [default: keep]
    #[arg(long, value_enum, value_name = "WHAT")]
    peer_fin: Option<AtFin>,
    /// What becomes of a connection on the NIC whose route leads to another device than before; of a Baton that is
    /// started (`baton nic set route-change=…` changes it). [default: restore]
    #[arg(long, value_enum, value_name = "WHAT")]
    route_change: Option<AtRouteChange>,
    #[command(flatten)]
    limits: LimitArguments,
}

impl PolicyArguments {
    /// Whether anything is given.
    pub fn is_given(&self) -> bool {
        self.during_moves.is_some() || self.peer_fin.is_some() || self.route_change.is_some() || self.limits.is_given()
    }

    /// Whether what becomes of connections at their peers' FINs is given.
    #[cfg(feature = "lab")]
    pub fn has_peer_fin(&self) -> bool {
        self.peer_fin.is_some()
    }

    /// These settings, with what is given in their place.
    pub fn apply(&self, offloads: Offloads) -> Offloads {
        let during_moves = self.during_moves.map_or(offloads.during_moves, WhileMoving::setting);
        let peer_fin = self.peer_fin.map_or(offloads.peer_fin, AtFin::setting);
        let route_change = self.route_change.map_or(offloads.route_change, AtRouteChange::setting);
        self.limits.apply(Offloads { during_moves, peer_fin, route_change, ..offloads })
    }
}

/// Values of `--during-moves`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum WhileMoving {
    /// They are held for the connection's next owner.
    Hold,
    /// They are dropped, and the peer sends them again.
    Drop,
}

impl WhileMoving {
    /// As the NIC has it.
    fn setting(self) -> DuringMoves {
        match self {
            WhileMoving::Hold => DuringMoves::Hold,
            WhileMoving::Drop => DuringMoves::Drop,
        }
    }
}

/// Values of `--peer-fin`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum AtFin {
    /// It stays until it ends.
    Keep,
    /// It returns to the kernel and ends there, and its place on the NIC is free.
    Return,
}

impl AtFin {
    /// As the NIC has it.
    fn setting(self) -> PeerFin {
        match self {
            AtFin::Keep => PeerFin::Keep,
            AtFin::Return => PeerFin::Return,
        }
    }
}

/// Values of `--route-change`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum AtRouteChange {
    /// It returns to the kernel, which follows the route.
    Restore,
    /// It is reset.
    Drop,
}

impl AtRouteChange {
    /// As the agent has it.
    fn setting(self) -> RouteChange {
        match self {
            AtRouteChange::Restore => RouteChange::Restore,
            AtRouteChange::Drop => RouteChange::Drop,
        }
    }
}

/// Values of `--when-full`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum AtLimits {
    /// The busiest are there: colder ones return to the kernel for them.
    Coldest,
    /// Whoever is there stays; others wait in the kernel.
    Refuse,
    /// The same; and what a lower limit leaves no room for is reset instead of returned.
    Drop,
}

impl AtLimits {
    /// As the agent has it.
    fn setting(self) -> WhenFull {
        match self {
            AtLimits::Coldest => WhenFull::Coldest,
            AtLimits::Refuse => WhenFull::Refuse,
            AtLimits::Drop => WhenFull::Drop,
        }
    }
}

/// Values of `--choose`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Chosen {
    /// By the programs' rules; while the NIC has not room for all, the busiest (the default).
    #[value(alias = "heat")]
    Rules,
    /// Of those, only where it was measured to be no worse than the kernel (`baton nic gain`).
    Gain,
}

impl Chosen {
    /// As the agent has it.
    pub fn choose(self) -> Choose {
        match self {
            Chosen::Rules => Choose::Rules,
            Chosen::Gain => Choose::Gain { price: 1.0 },
        }
    }
}

/// What a NIC has room for.
#[derive(Args, Clone, Debug, Default)]
struct LimitArguments {
    /// Most connections that each NIC of a Baton that is started has at a time, the busiest of those that are to go
    /// there.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = limit("connections"))]
    nic_connections: Option<String>,
    /// Most bytes of send and receive memory that they have there, such as 64M.
    #[arg(long, value_name = "BYTES", allow_hyphen_values = true, value_parser = limit("memory"))]
    nic_memory: Option<String>,
    /// Most (address, length) pairs that their send queues have there; a connection has 16.
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = limit("pairs"))]
    nic_pairs: Option<String>,
    /// Percent of its time for which a NIC may be busy: while it is busier, no further connection goes there.
    #[arg(long, value_name = "PERCENT", allow_hyphen_values = true, value_parser = limit("processor"))]
    nic_processor: Option<String>,
    /// Who is on a NIC that is full; of a Baton that is started (`baton nic set when-full=…` changes it). [default:
    /// coldest]
    #[arg(long, value_enum, value_name = "WHO")]
    when_full: Option<AtLimits>,
}

impl LimitArguments {
    /// These settings, with the limits that are given.
    fn apply(&self, mut offloads: Offloads) -> Offloads {
        let given = [
            ("connections", &self.nic_connections),
            ("memory", &self.nic_memory),
            ("pairs", &self.nic_pairs),
            ("processor", &self.nic_processor),
        ];
        for (key, value) in given {
            // That it can be read was checked when it was given.
            let _ = value.as_ref().map(|value| offloads.set(&format!("{key}={value}")));
        }
        offloads.limits.when_full = self.when_full.map_or(offloads.limits.when_full, AtLimits::setting);
        offloads
    }

    /// Whether any is given.
    fn is_given(&self) -> bool {
        let limits = [&self.nic_connections, &self.nic_memory, &self.nic_pairs, &self.nic_processor];
        self.when_full.is_some() || limits.iter().any(|value| value.is_some())
    }
}

/// Checks the value of a limit: of this key of `baton nic set`.
fn limit(key: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone + Send + Sync + 'static {
    move |value| {
        let setting = format!("{key}={value}");
        let wrong = |why: String| why.strip_prefix(&format!("{setting}: ")).map(ToOwned::to_owned).unwrap_or(why);
        Offloads::default().set(&setting).map(|()| value.to_owned()).map_err(|why| wrong(why.to_string()))
    }
}

fn number(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_NICS).contains(number));
    number.ok_or_else(|| format!("a Baton has 1 to {MAX_NICS} NICs"))
}

impl NicsArguments {
    /// Number of NICs.
    pub fn count(&self) -> usize {
        self.nics
    }

    /// Whether connections are placed by what is measured.
    pub fn measures(&self) -> bool {
        self.choose == Some(Chosen::Gain)
    }

    /// Whether anything but the usual one NIC is asked for.
    pub fn is_given(&self) -> bool {
        self.nics > 1 || !self.devices.is_empty() || self.choose.is_some() || self.policy.is_given()
    }

    /// Fails if the devices cannot be dealt in the calling thread's network namespace.
    pub fn check(&self) -> Result<()> {
        if self.nics == 1 && !self.devices.is_empty() {
            bail!("--device says which of several NICs has a device, and one NIC has them all: add --nics 2");
        }
        for (at, name) in self.devices.iter().enumerate() {
            if self.devices[..at].contains(name) {
                bail!("--device {name} is given twice: a device belongs to one NIC");
            }
        }
        if self.devices.is_empty() {
            return Ok(());
        }
        let routes = rtnetlink::open().context("the list of devices")?;
        for name in &self.devices {
            if rtnetlink::link(&routes, name).is_err() {
                bail!("--device {name}: there is no such device here (see `ip link`)");
            }
        }
        Ok(())
    }

    /// Adds them to an agent's settings. They have been checked.
    pub fn apply(&self, settings: AgentSettings) -> AgentSettings {
        let offloads = self.policy.apply(settings.nic.offloads);
        let nic = NicSettings { offloads, ..settings.nic };
        let choose = self.choose.map_or(settings.choose, Chosen::choose);
        let known = gain_file::path().filter(|_| self.measures());
        let measured = known.map_or_else(Vec::new, |path| gain_file::read(&path));
        AgentSettings { nics: self.nics, devices: self.devices.clone(), choose, measured, nic, ..settings }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_offloads::Limits;

    #[test]
    fn a_number_of_nics_is_checked() {
        assert_eq!(number("1"), Ok(1));
        assert_eq!(number(&MAX_NICS.to_string()), Ok(MAX_NICS));
        for wrong in ["0", "5", "-1", "two", ""] {
            assert!(number(wrong).is_err_and(|why| why.contains("1 to 4")), "{wrong}");
        }
    }

    #[test]
    fn limits_are_checked() {
        let wrong = |key, value: &str| limit(key)(value).expect_err("it is wrong");
        assert!(wrong("connections", "many").starts_with("expected a number"), "{}", wrong("connections", "many"));
        assert!(wrong("connections", "16385").contains("16384"), "{}", wrong("connections", "16385"));
        assert!(wrong("memory", "-1").starts_with("expected a number of bytes"), "{}", wrong("memory", "-1"));
        assert!(limit("processor")("101").is_err() && limit("processor")("80").is_ok());
        assert!(wrong("pairs", "262145").contains("262144"), "{}", wrong("pairs", "262145"));
        let given = |text: &str| Some(text.to_owned());
        let arguments = LimitArguments {
            nic_connections: given("0"),
            nic_memory: given("64M"),
            nic_pairs: given("32"),
            nic_processor: None,
            when_full: Some(AtLimits::Drop),
        };
        let limits = |arguments: &LimitArguments| arguments.apply(Offloads::default()).limits;
        let (memory, when_full) = (Some(64 << 20), WhenFull::Drop);
        let expected = Limits { connections: Some(0), memory, pairs: Some(32), when_full, ..Limits::default() };
        assert_eq!(limits(&arguments), expected);
        assert_eq!(limits(&LimitArguments::default()), Limits::default());
    }

    #[test]
    fn what_is_not_given_stays() {
        let before = Offloads { during_moves: DuringMoves::Drop, peer_fin: PeerFin::Return, ..Offloads::default() };
        let before = Offloads { limits: Limits { processor: Some(50), ..Limits::default() }, ..before };
        assert!(PolicyArguments::default().apply(before) == before && !PolicyArguments::default().is_given());
        let given = PolicyArguments { during_moves: Some(WhileMoving::Hold), ..PolicyArguments::default() };
        assert!(given.is_given());
        assert_eq!(given.apply(before), Offloads { during_moves: DuringMoves::Hold, ..before });
        let given = PolicyArguments { route_change: Some(AtRouteChange::Drop), ..PolicyArguments::default() };
        assert_eq!((given.is_given(), given.apply(before)), (true, Offloads { route_change: RouteChange::Drop, ..before }));
    }

    #[test]
    fn devices_are_checked() {
        let arguments = |nics, devices: &[&str]| {
            let devices = devices.iter().map(ToString::to_string).collect();
            NicsArguments { nics, devices, choose: None, policy: PolicyArguments::default() }
        };
        let why = |nics, devices| arguments(nics, devices).check().expect_err("it is wrong").to_string();
        assert!(why(1, &["lo"]).contains("--nics 2"));
        assert!(why(2, &["lo", "lo"]).contains("twice"));
        assert!(why(2, &["lo", "nosuchdevice"]).contains("no such device"));
        assert!(arguments(2, &["lo"]).check().is_ok() && arguments(1, &[]).check().is_ok());
    }
}
