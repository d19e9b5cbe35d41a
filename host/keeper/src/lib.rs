//! The keeper holds what must survive agent and NIC (device descriptors, NIC memory, doorbells), starts the agent, and
//! starts the next one when that dies. It makes no decisions about connections, so it has little reason to die.
#![forbid(unsafe_code)]

mod blame;
mod held;
mod launch;
mod watch;

use crate::blame::{Blame, Withhold};
use anyhow::{Context, Result, bail};
use baton_abi::layout::{nic, slot};
use baton_agent::AgentSettings;
use baton_linux::control::{Channel, PeerChannel};
use baton_linux::events::Doorbell;
use baton_linux::{process, settings, starter};
use baton_log::{error, warning};
use baton_protocol::keeper::Kept;
use baton_shm::Region;
use baton_supervision::Cause;
use held::Held;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, ExitStatus};
use std::sync::atomic::Ordering;

use crate::watch::{Remedy, Watched};
pub use launch::{BesideDevices, Devices, launch};
pub use watch::await_end;

/// Descriptors that a keeper inherits from the process that made the devices, numbered from 3 on.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Descriptor {
    /// The TAP that is the kernel's interface.
    Host = 3,
    /// The wire.
    Wire = 4,
    /// The control connection to the process that started the keeper.
    Parent = 5,
}

/// First number of the further descriptors. For NICs beside the kernel: the injector, the link of its program, the
/// steering, and for each NIC but the first its two packet sockets; for one with several queues: the card's. Last, for
/// a keeper that lingers: a pidfd of the process whose end it waits for.
const FURTHER: i32 = Descriptor::Parent as i32 + 1;

/// Runs a keeper until its parent has ended.
///
/// # Errors
/// If a descriptor is missing, or agents die as soon as they start.
pub fn run() -> Result<()> {
    // Lists of processes show it. Without /proc nobody looks.
    let _ = process::set_name(baton_protocol::keeper::KEEPER_NAME);
    let take = |descriptor: Descriptor| {
        process::inherited(descriptor as i32).with_context(|| format!("descriptor {descriptor:?} for the keeper"))
    };
    let (host, wire) = (take(Descriptor::Host)?, take(Descriptor::Wire)?);
    let parent = Channel::from_fd(take(Descriptor::Parent)?);
    let settings = &settings::receive::<AgentSettings>(&parent, baton_protocol::VERSION)
        .context("receiving the settings, which the process that starts a keeper sends")?;
    let mut further = (FURTHER..).map(|number| process::inherited(number).with_context(|| format!("descriptor {number}")));
    let mut next = || further.next().context("descriptors have no end")?;
    let beside = if settings.nic.beside { Some(Beside::inherit(settings, &mut next)?) } else { None };
    let card = (0..settings.nic.card_descriptors()).map(|_| next()).collect::<Result<Vec<OwnedFd>>>()?;
    let signals = process::signal_descriptor(&process::ENDING)?;
    process::raise_descriptor_limit();
    starter::begin().context("the thread that starts agents")?;
    let end = End { parent, process: if settings.lingers { Some(next()?) } else { None }, signals };
    let _socket = Socket(settings);
    let memory = Region::create("baton-nic", nic::bytes(settings.nic.slots)).context("NIC memory")?;
    let (nic_bell, agent_bell) = (Doorbell::new()?, Doorbell::new()?);
    let mut announced = false;
    let mut held = Held::default();
    let mut blame = Blame::default();
    loop {
        let (ours, theirs) = Channel::pair()?;
        settings::send(&ours, baton_protocol::VERSION, settings)?;
        let region = memory.fd().context("NIC memory is shared memory")?;
        let mut descriptors = vec![host.as_fd(), wire.as_fd(), region, nic_bell.as_fd(), agent_bell.as_fd(), theirs.as_fd()];
        if let Some(beside) = &beside {
            descriptors.extend(beside.descriptors()?);
        }
        descriptors.extend(card.iter().map(AsFd::as_fd));
        let mut agent =
            starter::start(baton_protocol::keeper::AGENT_ARGUMENT, &descriptors, false).context("starting the agent")?;
        drop(theirs);
        // It brings programs' descriptors.
        let ours = PeerChannel::from(ours);
        let mut ready = false;
        // If the agent has died already, `watch` notices.
        let _ = hand_over(&ours, &held);
        let mut watched = Watched::new(agent.id(), &memory);
        if watch(&mut agent, ours, &end, &mut held, &mut ready, &mut announced, &mut watched)? {
            return Ok(());
        }
        let attended = memory.word32(nic::ATTENDED).swap(0, Ordering::AcqRel).checked_sub(1);
        // An agent that was killed by a signal from outside has not died of what it was given.
        let ended = reap(agent, settings)?;
        let killed = ended.is_none_or(process::is_killed);
        let by_itself = watched.cause().map_or(!killed, Cause::is_its_own);
        match blame.judge(ready, by_itself, attended) {
            Withhold::Nothing => {}
            Withhold::Groups => {
                warning!(
                    [] "two agents have died before they were ready; the next one makes no random moves";
                    "send what `baton report` writes"
                );
                held.stop_groups();
            }
            Withhold::Session(number) => {
                error!(
                    [session = number] "two agents have died while they served session {number}; the session is dropped";
                    "start its program again, and send what `baton report` writes"
                );
                held.note(Kept::Ended(number), Vec::new());
            }
            Withhold::Everything => {
                error!(
                    [] "agents still die before they are ready; all sessions are dropped";
                    "start their programs again, and send what `baton report` writes"
                );
                held.drop_sessions();
                let further = beside.iter().flat_map(|beside| &beside.further).map(|nic| &nic.memory);
                for memory in [&memory].into_iter().chain(further) {
                    for slot in 0..settings.nic.slots as u32 {
                        memory.word32(nic::slot(slot) + slot::JOURNAL).store(0, Ordering::Release);
                    }
                }
            }
            Withhold::GiveUp => {
                let how = ended.map(|status| format!(" (the last one ended with {status})")).unwrap_or_default();
                bail!("agents still die before they are ready{how}; see their messages above")
            }
        }
    }
}

/// Takes the status of an agent that has ended. None if a thread of it still waits in the kernel for something that a
/// program holds, or for a file that does not close: its process goes when that has come, and is not waited for.
fn reap(mut agent: Child, settings: &AgentSettings) -> Result<Option<ExitStatus>> {
    let status = await_end(&mut agent)?;
    if status.is_none() {
        let process = agent.id();
        warning!(
            [] "a thread of the agent that has ended (process {process}) waits in the kernel";
            "it ends with the program that holds it up; `ps -L -o wchan= -p {process}` shows where it waits"
        );
        // It has the socket open, on which nobody answers.
        let _ = std::fs::remove_file(&settings.socket);
        std::thread::spawn(move || agent.wait());
    }
    Ok(status)
}

/// What NICs beside the kernel need.
struct Beside {
    injector: OwnedFd,
    /// The program is attached as long as this is open.
    injector_link: OwnedFd,
    steering: [OwnedFd; baton_steering::DESCRIPTORS],
    /// Of each NIC but the first.
    further: Vec<FurtherNic>,
}

/// What a NIC has for itself.
struct FurtherNic {
    host: OwnedFd,
    wire: OwnedFd,
    memory: Region,
    bell: Doorbell,
}

impl Beside {
    fn inherit(settings: &AgentSettings, next: &mut impl FnMut() -> Result<OwnedFd>) -> Result<Beside> {
        let (injector, injector_link) = (next()?, next()?);
        let steering = [next()?, next()?, next()?, next()?, next()?, next()?];
        let mut further = Vec::new();
        for _ in 1..settings.nics {
            let memory = Region::create("baton-nic", nic::bytes(settings.nic.slots)).context("NIC memory")?;
            further.push(FurtherNic { host: next()?, wire: next()?, memory, bell: Doorbell::new()? });
        }
        Ok(Beside { injector, injector_link, steering, further })
    }

    /// The agent's descriptors, in the order in which it takes them.
    fn descriptors(&self) -> Result<Vec<BorrowedFd<'_>>> {
        let mut all = vec![self.injector.as_fd()];
        all.extend(self.steering.iter().map(AsFd::as_fd));
        all.push(self.injector_link.as_fd());
        for nic in &self.further {
            let memory = nic.memory.fd().context("NIC memory is shared memory")?;
            all.extend([nic.host.as_fd(), nic.wire.as_fd(), memory, nic.bell.as_fd()]);
        }
        Ok(all)
    }
}

/// The path of the agent's socket, which is removed when the keeper ends, however its agents have ended.
struct Socket<'a>(&'a AgentSettings);

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        let path = &self.0.socket;
        if !Channel::is_listened_at(path) {
            let _ = std::fs::remove_file(path);
        }
        // A directory that was made only for this socket is removed with it.
        if self.0.lingers
            && let Some(directory) = path.parent()
        {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// What ends a keeper.
struct End {
    /// The process that started it has ended.
    parent: Channel,
    /// If given, this process has ended, instead.
    process: Option<OwnedFd>,
    /// A signal asks for it. While the process lives its connections go to the kernel, and the keeper waits for it.
    signals: OwnedFd,
}

impl End {
    fn fd(&self) -> BorrowedFd<'_> {
        self.process.as_ref().map_or(self.parent.as_fd(), AsFd::as_fd)
    }
}

/// Gives an agent everything that is held.
fn hand_over(agent: &PeerChannel, held: &Held) -> Result<()> {
    for (kept, descriptors) in held.iter() {
        let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        agent.send(&*kept, &descriptors)?;
    }
    Ok(agent.send(&Kept::Ready, &[])?)
}

/// Records what the agent sends, until the agent or the parent has ended. True if the parent has ended; then the agent
/// has restored everything and ended, too.
fn watch(
    agent: &mut Child,
    channel: PeerChannel,
    end: &End,
    held: &mut Held,
    ready: &mut bool,
    announced: &mut bool,
    watched: &mut Watched<'_>,
) -> Result<bool> {
    let poller = baton_linux::events::Poller::new()?;
    poller.add(channel.as_fd(), 0, baton_linux::events::Trigger::Readable)?;
    poller.add(end.fd(), 1, baton_linux::events::Trigger::Readable)?;
    poller.add(end.signals.as_fd(), 2, baton_linux::events::Trigger::Readable)?;
    let mut tokens = Vec::new();
    let mut over = false;
    loop {
        // Programs that the watched process has started, and that outlive it, keep their connections. Tools do not keep
        // a Baton: `baton page` looks for as long as somebody has the page open.
        if over && !(end.process.is_some() && held.has_programs()) {
            channel.end();
            await_end(agent)?;
            held.end_listener();
            return Ok(true);
        }
        poller.wait(Some(watched.wait()), &mut tokens)?;
        baton_log::settle();
        match watched.look(*ready, held.has_sessions()) {
            Remedy::None => {}
            Remedy::Resume => {
                // Before the signal: the agent is to know when it looks at its NICs.
                let _ = channel.try_send(&Kept::WasStopped, &[]);
                let _ = process::resume(agent.id());
            }
            Remedy::End => agent.kill()?,
        }
        if watched.has_ended() {
            // Its channel may be open still. What it has sent before its end counts.
            while let Ok((kept, descriptors)) = channel.try_receive_foreign::<Kept>() {
                held.note(kept, descriptors);
            }
            held.end_listener();
            return Ok(false);
        }
        for token in tokens.drain(..) {
            if token == 1 {
                over = true;
                poller.remove(end.fd())?;
                continue;
            }
            if token == 2 {
                process::take_signals(&end.signals);
                over |= end.process.is_none();
                // If the agent has died already, that is noticed below, and the next agent is given this message.
                let _ = channel.send(&Kept::Ending, &[]);
                held.note(Kept::Ending, Vec::new());
                continue;
            }
            match channel.try_receive_foreign::<Kept>() {
                Ok((Kept::Ready, listener)) => {
                    held.note(Kept::Ready, listener);
                    *ready = true;
                    if !std::mem::replace(announced, true) {
                        end.parent.send(&true, &[])?;
                    }
                }
                Ok((kept, descriptors)) => {
                    over |= kept == Kept::Ending && end.process.is_none();
                    held.note(kept, descriptors);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => {
                    held.end_listener();
                    await_end(agent)?;
                    return Ok(false);
                }
            }
        }
    }
}
