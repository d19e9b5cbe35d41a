//! Fault injection for tests: kills the NIC or the agent, or stops the NIC, after a step of a move.

use baton_abi::layout::nic;
use baton_linux::process;
use baton_log::info;
use baton_moves::Step;
use baton_shm::Region;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Linux's numbers of SIGKILL and SIGSTOP.
const KILL: i32 = 9;
const STOP: i32 = 19;

/// What happens, and after which step of a move.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "(u8, Fault)", into = "(u8, Fault)")]
pub struct Crash {
    /// The step.
    pub after: Step,
    /// What happens then.
    pub fault: Fault,
}

/// What happens to Baton's processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Fault {
    /// The NIC dies.
    NicDies,
    /// The agent dies, and the NIC with it.
    AgentDies,
    /// The NIC is stopped (SIGSTOP); who runs the test lets it go on.
    NicStops,
}

impl From<Crash> for (u8, Fault) {
    fn from(crash: Crash) -> (u8, Fault) {
        (crash.after as u8, crash.fault)
    }
}

impl TryFrom<(u8, Fault)> for Crash {
    type Error = String;

    fn try_from((step, fault): (u8, Fault)) -> Result<Crash, String> {
        let after = Step::from_number(step).ok_or_else(|| format!("a move has no step {step}"))?;
        Ok(Crash { after, fault })
    }
}

/// Makes the fault happen after a step, every third time that the step is made, so that the recovery can make it, also
/// for two connections that go back to the NIC by themselves. The count is in NIC memory, where the next agent finds
/// it.
#[derive(Clone, Debug)]
pub(crate) struct Chaos {
    crash: Option<Crash>,
    nic_memory: Arc<Region>,
}

impl Chaos {
    pub fn new(crash: Option<Crash>, nic_memory: Arc<Region>) -> Chaos {
        Chaos { crash, nic_memory }
    }

    /// Whether the NIC is to be killed now. If it is to stop, or the agent to die, this does it.
    pub fn strikes(&self, step: Step, process_of_nic: u32) -> bool {
        let Some(crash) = self.crash.filter(|crash| crash.after == step) else { return false };
        if !self.nic_memory.word32(nic::CHAOS).fetch_add(1, Ordering::AcqRel).is_multiple_of(3) {
            return false;
        }
        let signalled = match crash.fault {
            Fault::NicDies => return true,
            Fault::AgentDies => process::signal(std::process::id(), KILL),
            Fault::NicStops => process::signal(process_of_nic, STOP),
        };
        if let Err(error) = signalled {
            info!([] "{:?} did not happen: {error}", crash.fault);
        }
        false
    }
}
