//! `--workers`: several workers in the NIC of a test bed.

use baton_lab::testbed::TestbedSettings;
use clap::Args;

#[derive(Args)]
pub struct WorkerArguments {
    /// The NIC's workers. Each has queues of its own at the interface and at the wire, and `baton nic set rss-…` says who gets what.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    workers: u8,
    /// All frames come to the first worker, which gives the others theirs: what is done where BPF may not be used.
    #[arg(long)]
    one_queue: bool,
    /// A copy engine, a thread of its own, gives the host what the workers have for it, each in turn. Without it each worker writes to its own
    /// queue; with one queue for all there always is one.
    #[arg(long)]
    copy_engine: bool,
}

impl WorkerArguments {
    /// Into the settings of a test bed.
    pub fn apply(&self, bed: &mut TestbedSettings) {
        bed.workers = self.workers.into();
        bed.card = self.workers > 1 && !self.one_queue;
        if bed.card
            && let Err(error) = baton_steering::rss::supported()
        {
            eprintln!("All frames come to the first worker, since the kernel cannot distribute them here: {error}");
            bed.card = false;
        }
        if self.workers > 1
            && let Ok(Some(cores)) = crate::placement::own_cores(self.workers.into())
        {
            bed.nic_cores = cores;
        }
        bed.copy_engine = self.copy_engine || self.workers > 1 && !bed.card;
    }
}
