//! The filter's rules in a NIC that has an owner: a thread that receives and compiles them, and the workers that put
//! them in force.

use anyhow::{Context, Result, bail};
use baton_datapath::Gate;
use baton_filter::words::WORDS;
use baton_filter::{Filter, Installed, Table};
use baton_linux::control::Channel;
use baton_linux::events::Doorbell;
use baton_protocol::filter::{FromFilter, ToFilter};
use baton_shm::{Region, WordArray};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The rules in force.
#[derive(Clone)]
struct Current {
    table: Arc<Table>,
    key: [u64; 4],
}

/// The state that the thread and the workers share.
pub(crate) struct Rules {
    current: Mutex<Option<Current>>,
    /// Notified when the first rules have arrived.
    arrived: Condvar,
    /// Number of sets of rules so far, and how many of them each worker has seen.
    published: AtomicU32,
    seen: Vec<AtomicU32>,
    words: WordArray<WORDS>,
}

impl Rules {
    /// Rules for this many workers; none yet. `memory` has [`WORDS`] words.
    pub fn new(memory: &Arc<Region>, workers: usize) -> Rules {
        let seen = (0..workers).map(|_| AtomicU32::new(0)).collect();
        let (current, arrived, published) = (Mutex::new(None), Condvar::new(), AtomicU32::new(0));
        Rules { current, arrived, published, seen, words: memory.shared_array(0) }
    }

    fn current(&self) -> MutexGuard<'_, Option<Current>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there are rules.
    pub fn wait_for_first(&self) {
        let _first = self.arrived.wait_while(self.current(), |current| current.is_none());
    }

    /// The new gate for worker `me`, if the rules have changed. To be called before each round.
    #[inline]
    pub fn changed(&self, me: usize) -> Option<Gate> {
        let published = self.published.load(Ordering::Acquire);
        if self.seen[me].load(Ordering::Relaxed) == published { None } else { self.take(me, published) }
    }

    #[cold]
    fn take(&self, me: usize, published: u32) -> Option<Gate> {
        let current = self.current().clone()?;
        self.seen[me].store(published, Ordering::Release);
        Some(match current.table.is_empty() {
            true => Gate::Open,
            false => Gate::Filtered(Box::new(Filter::new(current.table, current.key)), self.words.clone()),
        })
    }

    /// Puts rules in force.
    fn publish(&self, current: Current) {
        *self.current() = Some(current);
        self.published.fetch_add(1, Ordering::AcqRel);
        self.arrived.notify_all();
    }

    /// Waits until all workers have the rules.
    fn wait_for_workers(&self, bells: &[Doorbell]) {
        let published = self.published.load(Ordering::Acquire);
        while self.seen.iter().any(|seen| seen.load(Ordering::Acquire) != published) {
            bells.iter().for_each(Doorbell::ring);
            // A worker sees the rules at the beginning of its next round.
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
    }
}

/// Receives rules from the owner and puts them in force, until the owner ends.
///
/// # Errors
/// That the owner has ended.
pub(crate) fn serve(owner: &Channel, rules: &Rules, bells: &[Doorbell]) -> Result<()> {
    let mut installed = Vec::new();
    let mut first = true;
    loop {
        match owner.receive::<ToFilter>().context("the owner of this NIC has ended")?.0 {
            ToFilter::Rules(part) => installed.extend(part),
            ToFilter::Apply { key, generation } => match compile(std::mem::take(&mut installed), generation, key) {
                Ok(table) => {
                    rules.publish(Current { table: Arc::new(table), key });
                    // Workers begin to run when the first rules are there.
                    if !std::mem::take(&mut first) {
                        rules.wait_for_workers(bells);
                    }
                    owner.send(&FromFilter::InForce, &[])?;
                }
                Err(error) if first => bail!("the first rules: {error:#}"),
                Err(error) => owner.send(&FromFilter::Failed(format!("{error:#}")), &[])?,
            },
        }
    }
}

fn compile(rules: Vec<(u16, String)>, generation: u32, seeds: [u64; 4]) -> Result<Table> {
    let parse = |(slot, text): (u16, String)| {
        let rule = baton_filter::parse(&text).map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(Installed { rule, slot })
    };
    let rules = rules.into_iter().map(parse).collect::<Result<Vec<_>>>()?;
    Table::new(rules, generation, seeds).map_err(|refused| anyhow::anyhow!("{refused}"))
}
