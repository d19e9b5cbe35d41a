//! What the next agent does with a connection that it finds in the journal of the last one.

use baton_moves::{Move, Phase};

/// How such a connection continues.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Adopted {
    /// Its move.
    pub machine: Move,
    /// Its bytes are in session memory, which is kept for it. So it is while the kernel is getting the connection back,
    /// since a repeated import needs the bytes again.
    pub keeps_memory: bool,
    /// Its move continues at once. Otherwise it is recovered together with all connections of its NIC.
    pub at_once: bool,
}

impl Adopted {
    /// How a connection at this phase of the journal continues. `fin_acknowledged`: by the image in its slot the peer
    /// has acknowledged our FIN.
    pub fn at(phase: Phase, fin_acknowledged: bool) -> Adopted {
        Adopted {
            machine: Move::adopted(phase, phase == Phase::Sending && fin_acknowledged),
            keeps_memory: phase != Phase::Reading && cfg!(not(feature = "sabotage-forget-memory")),
            at_once: phase != Phase::Copied,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Recovery, Stage};
    use alloc::vec::Vec;
    use baton_moves::{Action, Event, Outcome};

    /// Performs the actions that follow from an event, and records them.
    fn drive(machine: &mut Move, event: Event, done: &mut Vec<Action>) {
        let mut next = machine.on(event, 0);
        while let Some(action) = next {
            done.push(action);
            next = machine.on(Event::Outcome(Outcome::Done), 0);
        }
    }

    /// Whatever the dead agent was doing, the connection is in the kernel when the NIC's death has been recovered from.
    #[test]
    fn every_phase_leads_to_the_kernel() {
        for phase in [Phase::Reading, Phase::Copied, Phase::Sending] {
            let Adopted { mut machine, keeps_memory, at_once } = Adopted::at(phase, true);
            let mut done = Vec::new();
            assert_eq!((keeps_memory, at_once), (phase != Phase::Reading, phase != Phase::Copied), "{phase:?}");
            if at_once {
                drive(&mut machine, Event::Tick, &mut done);
            }
            for event in Recovery::STEPS.into_iter().filter_map(Recovery::event) {
                drive(&mut machine, event, &mut done);
            }
            assert_eq!(Stage::of(machine.step(), machine.goal()), Stage::Kernel, "{phase:?}");
            let gives = done.iter().any(|action| matches!(action, Action::Free | Action::GiveMemory));
            assert!(gives, "{phase:?}: its slot, and what it has of memory, are given back: {done:?}");
            let replays = done.contains(&Action::Replay);
            assert_eq!(replays, phase != Phase::Reading, "{phase:?}: the kernel needs what the NIC held");
        }
    }

    /// The kernel sends its own FIN before the frames are released, if the peer has acknowledged that.
    #[test]
    fn a_fin_that_was_acknowledged_comes_first() {
        for finished in [false, true] {
            let (mut machine, mut done) = (Adopted::at(Phase::Sending, finished).machine, Vec::new());
            drive(&mut machine, Event::Tick, &mut done);
            let at = |wanted: Action| done.iter().position(|action| *action == wanted).expect("it is done");
            assert_eq!(at(Action::FinishAnew) < at(Action::Replay), finished);
        }
    }
}
