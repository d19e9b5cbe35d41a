//! `--workers`: several workers in the NIC of a test bed.

use baton_bed::testbed::TestbedSettings;
use clap::Args;

#[derive(Args)]
pub struct WorkerArguments {
    /// Number of the NIC's workers. Each has queues of its own at the interface and at the wire; `baton nic set rss-…`
    /// divides the frames.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    workers: u8,
    /// One queue: all frames come to the first worker, which gives the others theirs. This is used where BPF is not
    /// allowed.
    #[arg(long)]
    one_queue: bool,
    /// A copy engine, which is a thread of its own, writes all workers' frames to the host, each worker's in turn.
    /// Without it each worker writes to its own queue; with --one-queue there always is one.
    #[arg(long)]
    copy_engine: bool,
}

impl WorkerArguments {
    /// Applies them to the settings of a test bed.
    pub fn apply(&self, bed: &mut TestbedSettings) {
        bed.workers = self.workers.into();
        bed.card = self.workers > 1 && !self.one_queue;
        if bed.card
            && let Err(error) = baton_steering::rss::supported()
        {
            eprintln!("All frames come to the first worker, since the kernel cannot distribute them here ({error})");
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
