//! Conversions of the kernel's errors to a [`Refusal`].

use baton_handoff::examine::Stay;
use baton_handoff::import::ImportError;
use baton_moves::Refusal;
use std::io;

/// Refusal for a system call that failed.
pub(crate) fn system(call: &'static str, error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::NotConnected => Refusal::Closed(call),
        _ => Refusal::System(call, error.to_string()),
    }
}

/// Refusal for a connection that could not be restored.
pub(crate) fn lost(failed: &ImportError) -> Refusal {
    Refusal::Lost(failed.step, failed.error.to_string())
}

/// Refusal for a connection that the export says must stay in the kernel.
pub(crate) fn refusal(stay: Stay) -> Refusal {
    match stay {
        Stay::NotTcp => Refusal::NotTcp,
        Stay::Mptcp => Refusal::Mptcp,
        Stay::Signed => Refusal::Signed,
        Stay::OtherNamespace => Refusal::OtherNamespace,
        Stay::ReceivingShut => Refusal::ReceivingShut,
        Stay::Urgent => Refusal::Urgent,
        Stay::MicrosecondClock => Refusal::MicrosecondClock,
        Stay::State(name) => Refusal::State(name),
        Stay::UpperLayer => Refusal::UpperLayer,
        Stay::Option(name) => Refusal::Option(name),
        Stay::Busy => Refusal::Unsettled,
        Stay::System(call, error) => system(call, &error),
    }
}
