//! Watches over NICs, and the host's TCP: one that hangs is ended, and its connections go on in the kernel until the
//! next one is there.

use crate::agent::Agent;
use baton_linux::events::monotonic_micros;
use baton_linux::tasks;
use baton_log::{info, warning};

impl Agent {
    /// Looks at all NICs, if it is time. One that hangs is ended and its connections recovered.
    ///
    /// # Errors
    /// If the next NIC does not start.
    pub(crate) fn watch_nics(&mut self) -> anyhow::Result<()> {
        let has_sessions = self.sessions.iter().flatten().any(|session| session.open.is_some());
        let Some(due) = self.watch.begin(monotonic_micros(), has_sessions) else { return Ok(()) };
        for number in 0..self.nics.len() {
            for (process, sample) in self.nics[number].samples(due) {
                let Some(cause) = self.watch.judge(number, process, &sample) else { continue };
                warning!(
                    [nic = number] "NIC {number} (process {process}) hangs and is ended: {cause}";
                    "if it comes again, send what `baton report` writes"
                );
                info!([nic = number] "what the threads of NIC {number} were doing: {}", tasks::account(process));
                self.recover(number)?;
                break;
            }
        }
        Ok(())
    }
}
