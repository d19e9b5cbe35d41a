//! Fault injection for tests: kills the NIC or the agent after a step of a move.

use baton_abi::layout::nic;
use baton_moves::Step;
use baton_shm::Region;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Which process dies, and after which step of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "(u8, bool)", into = "(u8, bool)")]
pub struct Crash {
    /// The step.
    pub after: Step,
    /// Whether the agent dies (and the NIC with it), not the NIC alone.
    pub agent: bool,
}

impl From<Crash> for (u8, bool) {
    fn from(crash: Crash) -> (u8, bool) {
        (crash.after as u8, crash.agent)
    }
}

impl TryFrom<(u8, bool)> for Crash {
    type Error = String;

    fn try_from((step, agent): (u8, bool)) -> Result<Crash, String> {
        let after = Step::from_number(step).ok_or_else(|| format!("a move has no step {step}"))?;
        Ok(Crash { after, agent })
    }
}

/// Kills the NIC or the agent after a step, every second time that the step is made, so that the recovery can make it. The count
/// is in NIC memory, where the next agent finds it.
#[derive(Clone, Debug)]
pub(crate) struct Chaos {
    crash: Option<Crash>,
    nic_memory: Arc<Region>,
}

impl Chaos {
    pub fn new(crash: Option<Crash>, nic_memory: Arc<Region>) -> Chaos {
        Chaos { crash, nic_memory }
    }

    /// Whether the NIC is to be killed now. If the agent is to die, this kills it.
    pub fn strikes(&self, step: Step) -> bool {
        let Some(crash) = self.crash.filter(|crash| crash.after == step) else { return false };
        let strikes = self.nic_memory.word32(nic::CHAOS).fetch_add(1, Ordering::AcqRel).is_multiple_of(2);
        if strikes && crash.agent {
            let _ = baton_linux::process::signal(std::process::id(), 9);
        }
        strikes && !crash.agent
    }
}
