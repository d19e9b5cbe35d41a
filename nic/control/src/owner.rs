//! The owner of a NIC: the process that holds the wire and the filter's rules, and starts the NIC for the host's agent.
//!
//! The host and its agent have no descriptor of the wire, and cannot change the rules. The agent asks the owner over a
//! connection for a NIC on the agent's memory, and gets a control connection to a NIC that has the rules before it
//! receives its first frame. Rules are changed over the owner's socket, with a key. So root on the host cannot get
//! around the rules, as long as the owner runs where the host's root has no rights (docs/operate/filter.md).

mod book;

use anyhow::{Context, Result, bail};
use baton_abi::layout::nic;
use baton_filter::words::{self, UNMATCHED, UNREADABLE, WORDS};
use baton_linux::control::{Channel, Listener, PeerChannel};
use baton_linux::events::{Poller, Trigger};
use baton_linux::foreign::Foreign;
use baton_linux::{process, settings, starter};
use baton_log::warning;
use baton_protocol::filter::{
    AgentAnswer, AgentRequest, FilterAsk, FilterReply, FilterRequest, FromFilter, FromOwner, ListedRule, OwnerDescriptor,
    OwnerSettings, RULES_PER_MESSAGE, RuleCounters, ToFilter, ToOwner,
};
use baton_protocol::nic::NicSettings;
use baton_shm::{Region, WordArray};
use book::{Book, Entry};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

/// The argument with which an owner is started.
pub const OWNER_ARGUMENT: &str = "nic-owner-process";
/// Least bytes of a key.
pub const MIN_KEY: usize = 16;

/// Time after which a NIC that has not put rules in force counts as dead.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
/// Most connections of tools at a time.
const MAX_TOOLS: usize = 32;
/// Largest number of connections that an agent may ask for.
const MAX_SLOTS: usize = 1 << 20;

/// Poller tokens; those of tools follow.
const AGENTS: u64 = 0;
const PARENT: u64 = 1;
const LISTENER: u64 = 2;
const SIGNALS: u64 = 3;
const TOOLS: u64 = 16;

/// A running owner. Dropping this ends it, and its NIC.
#[derive(Debug)]
pub struct Owner {
    child: Child,
    parent: Option<Channel>,
}

impl Owner {
    /// Starts an owner of the devices, and waits until tools can connect. Returns it, and the end of the connection at
    /// which agents ask for NICs; it takes the wire's place among an agent's descriptors. `command` starts this
    /// program.
    ///
    /// # Errors
    /// If it does not start, with how it has ended. It has printed the cause itself.
    pub fn launch(
        mut command: Command,
        settings: &OwnerSettings,
        host: BorrowedFd<'_>,
        wire: BorrowedFd<'_>,
        card: &[OwnedFd],
    ) -> Result<(Owner, OwnedFd)> {
        let (parent, theirs) = Channel::pair()?;
        let (agents, asked) = Channel::pair()?;
        command.arg(OWNER_ARGUMENT);
        let OwnerSettings { rules, .. } = settings;
        settings::send(&parent, baton_protocol::VERSION, &OwnerSettings { rules: Vec::new(), ..settings.clone() })?;
        let mut descriptors = vec![host, wire, asked.as_fd(), theirs.as_fd()];
        descriptors.extend(card.iter().map(AsFd::as_fd));
        process::inherit(&mut command, &descriptors, false);
        command.process_group(0);
        let mut child = command.spawn().context("starting the NIC's owner")?;
        drop((theirs, asked));
        let mut parts = rules.chunks(RULES_PER_MESSAGE).map(<[String]>::to_vec).chain([Vec::new()]);
        let sent = parts.try_for_each(|part| parent.send(&part, &[]));
        match sent.and_then(|()| parent.receive::<bool>()) {
            Ok(_) => Ok((Owner { child, parent: Some(parent) }, agents.into())),
            Err(_) => bail!("the NIC's owner did not start: it has ended ({})", child.wait()?),
        }
    }

    /// Its process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.parent.take();
        let _ = self.child.wait();
    }
}

/// A NIC that runs.
struct Nic {
    child: Child,
    channel: Channel,
}

impl Nic {
    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends rules, and waits until they are in force.
    fn apply(&self, rules: &[Entry], key: [u64; 4], generation: u32) -> Result<()> {
        for part in rules.chunks(RULES_PER_MESSAGE) {
            let part = part.iter().map(|entry| (entry.slot, entry.text())).collect();
            self.channel.send(&ToFilter::Rules(part), &[])?;
        }
        self.channel.send(&ToFilter::Apply { key, generation }, &[])?;
        let poller = Poller::new()?;
        poller.add(self.channel.as_fd(), 0, Trigger::Readable)?;
        let mut ready = Vec::new();
        poller.wait(Some(ANSWER_LIMIT), &mut ready)?;
        match self.channel.try_receive::<FromFilter>()?.0 {
            FromFilter::InForce => Ok(()),
            FromFilter::Failed(reason) => bail!("{reason}"),
        }
    }
}

/// A connection of a tool, and the rules that it has sent so far for a load.
struct Tool {
    channel: PeerChannel,
    parts: Vec<String>,
}

struct Process {
    settings: OwnerSettings,
    host: OwnedFd,
    wire: OwnedFd,
    card: Vec<OwnedFd>,
    memory: Arc<Region>,
    words: WordArray<WORDS>,
    book: Book,
    /// Key of the flows' hashes.
    key: [u64; 4],
    nic: Option<Nic>,
    poller: Poller,
    tools: BTreeMap<u64, Tool>,
    next_tool: u64,
}

fn take(number: i32) -> Result<OwnedFd> {
    process::inherited(number)
        .with_context(|| format!("descriptor {number} is missing: this process is started by baton, not by hand"))
}

/// Runs an owner until its parent has ended.
///
/// # Errors
/// If a descriptor is missing, the first rules are refused, or a system call fails.
pub fn run() -> Result<()> {
    let parent = Channel::from_fd(take(OwnerDescriptor::Parent as i32)?);
    let settings = settings::receive::<OwnerSettings>(&parent, baton_protocol::VERSION).context("receiving the settings")?;
    let agents = PeerChannel::from(Channel::from_fd(take(OwnerDescriptor::Agents as i32)?));
    let card = OwnerDescriptor::Card as i32..;
    let card = card.take(settings.nic.card_descriptors()).map(take).collect::<Result<Vec<OwnedFd>>>()?;
    let signals = process::signal_descriptor(&process::ENDING)?;
    // Before any descriptor comes from the host or a tool: a file that does not close must not be inherited by a NIC's
    // process.
    starter::begin().context("the thread that starts NICs")?;
    let memory = Arc::new(Region::create("baton-filter", 8 * WORDS).context("the filter's memory")?);
    let mut random = [0u8; 32];
    process::random(&mut random).context("random numbers")?;
    let key = std::array::from_fn(|at| u64::from_ne_bytes(std::array::from_fn(|byte| random[8 * at + byte])));
    let listener = Listener::bind(&settings.socket).with_context(|| format!("listening at {}", settings.socket.display()))?;
    let listener = listener.without_descriptors();
    let mut rules = Vec::new();
    loop {
        match parent.receive::<Vec<String>>()?.0 {
            part if part.is_empty() => break,
            part => rules.extend(part),
        }
    }
    let mut book = Book::new();
    let planned = book.replaced(rules)?;
    book.commit(planned);
    let poller = Poller::new()?;
    for (fd, token) in
        [(agents.as_fd(), AGENTS), (parent.as_fd(), PARENT), (listener.as_fd(), LISTENER), (signals.as_fd(), SIGNALS)]
    {
        poller.add(fd, token, Trigger::Readable)?;
    }
    let words = memory.shared_array(0);
    let (host, wire) = (take(OwnerDescriptor::Host as i32)?, take(OwnerDescriptor::Wire as i32)?);
    let (tools, next_tool) = (BTreeMap::new(), TOOLS);
    let mut owner = Process { settings, host, wire, card, memory, words, book, key, nic: None, poller, tools, next_tool };
    parent.send(&true, &[])?;
    owner.main_loop(&agents, &listener)
}

impl Process {
    fn main_loop(&mut self, agents: &PeerChannel, listener: &Listener) -> Result<()> {
        let mut tokens = Vec::new();
        loop {
            self.poller.wait(None, &mut tokens)?;
            for token in std::mem::take(&mut tokens) {
                match token {
                    AGENTS => self.serve_agent(agents)?,
                    PARENT | SIGNALS => {
                        self.end_nic();
                        return Ok(());
                    }
                    LISTENER => {
                        if let Err(error) = self.admit(listener) {
                            warning!(
                                [] "a tool is turned away: {error:#}";
                                "end a `baton nic filter` that is not needed any more"
                            );
                        }
                    }
                    tool => self.serve_tool(tool),
                }
            }
        }
    }

    fn end_nic(&mut self) {
        if let Some(mut nic) = self.nic.take() {
            nic.end();
        }
    }

    /// Serves one request of an agent. The host is not trusted: its requests are checked.
    fn serve_agent(&mut self, agents: &PeerChannel) -> Result<()> {
        let (answer, descriptor) = match agents.try_receive_foreign::<AgentRequest>() {
            Ok(((tag, ToOwner::Start(asked)), descriptors)) => match self.start_nic(&asked, descriptors) {
                Ok((process, end)) => ((tag, FromOwner::Started(process)), Some(end)),
                Err(error) => {
                    self.end_nic();
                    ((tag, FromOwner::Failed(format!("{error:#}"))), None)
                }
            },
            Ok(((tag, ToOwner::End), _)) => {
                self.end_nic();
                ((tag, FromOwner::Ended), None)
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                // The host has ended.
                self.end_nic();
                return Ok(self.poller.remove(agents.as_fd())?);
            }
            // Not a request.
            Err(_) => return Ok(()),
        };
        let answer: AgentAnswer = answer;
        let descriptors: Vec<BorrowedFd<'_>> = descriptor.iter().map(AsFd::as_fd).collect();
        // An answer for which there is no room, since the agent does not read, is lost.
        let _ = agents.try_send(&answer, &descriptors);
        Ok(())
    }

    /// Starts a NIC with the rules in force. Returns its process and the agent's end of its control connection.
    fn start_nic(&mut self, asked: &NicSettings, descriptors: Vec<Foreign>) -> Result<(u32, Channel)> {
        self.end_nic();
        let Ok([memory, nic_bell, agent_bell]) = <[Foreign; 3]>::try_from(descriptors) else {
            bail!("a NIC needs three descriptors: its memory and two doorbells")
        };
        // The new process, and the thread that starts it, close their copies of the descriptors, which must not block.
        if !memory.is_memory() || nic_bell.has_path() || agent_bell.has_path() {
            bail!("a NIC needs memory and two doorbells, not other files");
        }
        let region = Region::map(memory.as_fd().try_clone_to_owned()?).context("NIC memory")?;
        if asked.slots > MAX_SLOTS || region.len() < nic::bytes(asked.slots) {
            bail!("NIC memory has no room for {} connections", asked.slots);
        }
        asked.offloads.check().map_err(|why| anyhow::anyhow!("{why}"))?;
        let settings = NicSettings {
            slots: asked.slots,
            offloads: asked.offloads,
            hash_key: asked.hash_key,
            beside: false,
            owned: true,
            ..self.settings.nic.clone()
        };
        let (ours, theirs) = Channel::pair()?;
        let (agents, nics) = Channel::pair()?;
        settings::send(&agents, baton_protocol::VERSION, &settings)?;
        let filter = self.memory.fd().context("the filter's memory is shared memory")?;
        let mut inherited =
            vec![self.host.as_fd(), self.wire.as_fd(), memory.as_fd(), nic_bell.as_fd(), agent_bell.as_fd(), nics.as_fd()];
        inherited.extend(self.card.iter().map(AsFd::as_fd));
        inherited.extend([theirs.as_fd(), filter]);
        let child = starter::start("nic-process", &inherited, true).context("starting the NIC process")?;
        let nic = Nic { child, channel: ours };
        drop((theirs, nics));
        let process = nic.child.id();
        let generation = self.book.next_generation();
        self.nic.insert(nic).apply(self.book.entries(), self.key, generation)?;
        Ok((process, agents))
    }

    /// Puts a changed set of rules in force: in the NIC, if one runs, and for later NICs.
    fn put_in_force(&mut self, planned: Vec<Entry>) -> Result<()> {
        let slots: Vec<u16> = planned.iter().filter(|entry| entry.is_new()).map(|entry| entry.slot).collect();
        slots.into_iter().for_each(|slot| words::clear(&self.words[..], slot.into()));
        let generation = self.book.next_generation();
        if let Some(nic) = &mut self.nic
            && let Err(error) = nic.apply(&planned, self.key, generation)
        {
            // A NIC that has not answered might run with other rules than those that are listed, so it is ended. The
            // next NIC gets the new rules.
            warning!(
                [] "the NIC does not answer ({error:#}): it is ended";
                "the next one gets the new rules, and until then nothing passes; if it comes again, send what `baton report` writes"
            );
            self.end_nic();
        }
        self.book.commit(planned);
        Ok(())
    }

    fn admit(&mut self, listener: &Listener) -> Result<()> {
        let channel = listener.accept()?;
        if self.tools.len() >= MAX_TOOLS {
            bail!("{MAX_TOOLS} tools are connected already");
        }
        self.poller.add(channel.as_fd(), self.next_tool, Trigger::Readable)?;
        self.tools.insert(self.next_tool, Tool { channel, parts: Vec::new() });
        self.next_tool += 1;
        Ok(())
    }

    /// Serves one request of a tool. A tool without the key is cut off.
    fn serve_tool(&mut self, number: u64) {
        let Some(tool) = self.tools.get_mut(&number) else { return };
        let Ok((request, _)) = tool.channel.try_receive_foreign::<FilterRequest>() else {
            self.cut_off(number);
            return;
        };
        let mut parts = std::mem::take(&mut tool.parts);
        let allowed = is_key(&request.key, &self.settings.key);
        let reply = match allowed {
            true => self.answer(request.ask, &mut parts).unwrap_or_else(|error| FilterReply::Failed(format!("{error:#}"))),
            false => {
                FilterReply::Failed("the key is not the one with which this NIC was started: its rules are not yours".into())
            }
        };
        let Some(tool) = self.tools.get_mut(&number) else { return };
        tool.parts = parts;
        if tool.channel.try_send(&reply, &[]).is_err() || !allowed {
            self.cut_off(number);
        }
    }

    /// Ends a tool's connection. It is closed a moment later, and reports nothing until then.
    fn cut_off(&mut self, number: u64) {
        if let Some(tool) = self.tools.remove(&number) {
            let _ = self.poller.remove(tool.channel.as_fd());
            tool.channel.end();
        }
    }

    fn answer(&mut self, ask: FilterAsk, parts: &mut Vec<String>) -> Result<FilterReply> {
        match ask {
            FilterAsk::Add { rule, before } => {
                let (number, planned) = self.book.added(&rule, before)?;
                self.put_in_force(planned)?;
                return Ok(FilterReply::Added(number));
            }
            FilterAsk::Delete(number) => {
                let planned = self.book.without(number)?;
                self.put_in_force(planned)?;
            }
            FilterAsk::Load { rules, last } => {
                parts.extend(rules);
                if parts.len() > words::RULES {
                    parts.clear();
                    bail!("at most {} rules fit", words::RULES);
                }
                if last {
                    let planned = self.book.replaced(std::mem::take(parts))?;
                    self.put_in_force(planned)?;
                }
            }
            FilterAsk::List(from) => return Ok(self.list(from)),
        }
        Ok(FilterReply::Done)
    }

    fn list(&self, from: usize) -> FilterReply {
        let counters = |slot: usize| {
            let words::Counted { packets, bytes, over } = words::counted(&self.words[..], slot);
            RuleCounters { packets, bytes, over }
        };
        let entries = self.book.entries();
        let rules = entries.iter().skip(from).take(RULES_PER_MESSAGE).map(|entry| ListedRule {
            number: entry.number,
            rule: entry.text(),
            counters: counters(entry.slot.into()),
        });
        FilterReply::Rules {
            rules: rules.collect(),
            total: entries.len(),
            unmatched: counters(UNMATCHED),
            unreadable: counters(UNREADABLE),
        }
    }
}

/// Compares keys in a time that does not depend on where they differ.
fn is_key(presented: &[u8], key: &[u8]) -> bool {
    let differences = presented.iter().zip(key).fold(0, |all, (one, other)| all | (one ^ other));
    presented.len() == key.len() && std::hint::black_box(differences) == 0
}
