//! Settings that an agent receives from the keeper when it starts.

use crate::chaos::Crash;
use baton_core::Limits;
use baton_protocol::nic::NicSettings;
use baton_protocol::program::Measured;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

fn one() -> usize {
    1
}

/// How it is chosen which connections are on the NIC.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub enum Choose {
    /// Those that a rule or a request names; the busiest of them where the NIC has not room for all.
    #[default]
    Rules,
    /// Of these, those whose class was measured to be better served there.
    Gain {
        /// 1. For tests: as if whatever a NIC does cost, and took, so many times as much.
        price: f64,
    },
}

/// Settings of an agent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AgentSettings {
    /// Path of the socket to which programs connect.
    pub socket: PathBuf,
    /// Name of the kernel's interface behind the NIC; none if the NIC is beside the kernel.
    pub interface: Option<String>,
    /// Bytes of memory that a session may use.
    pub session_bytes: usize,
    /// The keeper ends with the process named to it and the last session, not with the process that started it.
    #[serde(default)]
    pub lingers: bool,
    /// Core that the agent runs on, if it is bound to one.
    pub core: Option<usize>,
    /// Microseconds that a move may wait for out-of-order data to be covered.
    pub patience: u64,
    /// What each user may have.
    pub limits: Limits,
    /// How it is chosen which connections are on the NIC.
    #[serde(default)]
    pub choose: Choose,
    /// What was measured of loads before, for [`Choose::Gain`].
    #[serde(default)]
    pub measured: Vec<Measured>,
    /// For tests: which process dies after which step of a move.
    #[serde(default)]
    pub crash: Option<Crash>,
    /// The settings of the NIC; of each of them if there are several.
    pub nic: NicSettings,
    /// Number of NICs, 1 to `baton_abi::layout::nic::MAX_NICS`. More than one are beside the kernel.
    #[serde(default = "one")]
    pub nics: usize,
    /// Names of devices that are dealt to the NICs in this order; all others go to the NIC with the fewest.
    #[serde(default)]
    pub devices: Vec<String>,
}

impl AgentSettings {
    /// The settings of the NIC with this number: its workers have cores of their own, as far as there are enough.
    pub(crate) fn of_nic(&self, number: usize) -> NicSettings {
        let workers = self.nic.workers;
        let cores = match self.nics {
            1 => self.nic.cores.clone(),
            _ => self.nic.cores.iter().skip(number * workers).take(workers).copied().collect(),
        };
        NicSettings { number, cores, ..self.nic.clone() }
    }
}
