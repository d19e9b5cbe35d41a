//! `baton up`: a Baton that stays. Programs of every network namespace find it at one path. Each namespace gets an
//! agent and a NIC of its own with its first program, since devices, routes and firewall are each namespace's own.

use crate::addresses::{self, AddressArguments};
use crate::gain_file;
use crate::nics::NicsArguments;
use crate::numbers::{MOST_SPIN, whole};
use crate::start::{SLOTS, beside_settings};
use anyhow::{Context, Result, bail};
use baton_agent::{AgentSettings, Limits};
use baton_client::tool::Tool;
use baton_keeper::Devices;
use baton_linux::control::{Channel, Listener, PeerChannel};
use baton_linux::events::{Poller, Trigger};
use baton_linux::foreign;
use baton_linux::namespace::Namespace;
use baton_linux::{process, service, socket, starter};
use baton_log::{Level, info, warning};
use baton_protocol::program::{Answer, Ask, Reply};
use clap::Args;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

pub const EXAMPLES: &str = "Examples:
  baton up &
  baton up --nics 2 --device eth0 --device eth1 &
  baton up --choose gain &
  baton up --address 10.1.0.50/24 --address fd00::50/64 &
  baton up --config ./baton.toml &
  systemctl start baton                      (installed from the package)
  baton run -- nginx -g 'daemon off;'
  docker run -v /run/baton:/run/baton … baton run -- ./server

Programs find it by themselves at /run/baton/agent.sock, those in containers too if that directory is mounted there. Each network
namespace's agent also listens at that path followed by the namespace's number (for `baton ls --socket`). It needs root, and ends with
Ctrl-C or SIGTERM: every connection is in the kernel then. `baton status` says whether one is up.

Every option can stand in the configuration file, as a key without dashes: spin = 50, device = [\"eth0\", \"eth1\"]. An option on the
command line counts instead of the key, and so do BATON_SOCKET and BATON_LOG.";

/// Interval of the checks whether a namespace is still used. Its Baton ends when it was unused at two checks in a row.
const LOOK: Duration = Duration::from_secs(10);

/// Number of refused clients whose connections stay open, so that each can still read the reason.
const REFUSED: usize = 16;

/// Most namespaces that can be served; each has processes and memory of its own.
const MOST_NAMESPACES: usize = 65_536;

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;

#[derive(Args, Debug)]
pub struct UpArguments {
    /// File with options: TOML, each key an option of this command. Without it: /etc/baton/config.toml, if it is there.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Path at which programs find it. The default is what BATON_SOCKET says, if anything.
    #[arg(long, default_value_os_t = baton_client::agent_socket(), value_name = "PATH")]
    socket: PathBuf,
    /// The least that is logged, of this and what it starts: error, warning, info or debug.
    #[arg(long, value_name = "LEVEL", env = baton_log::VARIABLE, hide_env_values = true, default_value_t = Level::Info)]
    log_level: Level,
    /// Microseconds that a NIC polls without work before it sleeps.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(..=MOST_SPIN))]
    spin: u64,
    #[command(flatten)]
    addresses: AddressArguments,
    /// Most network namespaces that are served at a time.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = whole(1, MOST_NAMESPACES))]
    namespaces: usize,
    /// Most of those that may be one user's. Root may have all.
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = whole(1, MOST_NAMESPACES))]
    namespaces_per_user: usize,
    /// Most open sessions (processes with connections) of a user in one namespace. Root may have any number.
    #[arg(long, default_value_t = Limits::default().sessions, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    sessions_per_user: u32,
    /// Most groups of sessions (programs started by `baton run`) of a user in one namespace. Root may have any number.
    #[arg(long, default_value_t = Limits::default().groups, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    groups_per_user: u32,
    #[command(flatten)]
    nics: NicsArguments,
}

impl UpArguments {
    fn limits(&self) -> Limits {
        Limits { sessions: self.sessions_per_user, groups: self.groups_per_user }
    }
}

/// A namespace's Baton.
struct Served {
    keeper: Child,
    /// Closing this ends it.
    parent: Channel,
    agent: Tool,
    socket: PathBuf,
    unused: u32,
    /// User id of the program for which it was started.
    user: u32,
}

impl Served {
    /// Starts one in the calling thread's namespace.
    /// `own`: it is the namespace of this process, whose NICs have the addresses of the command line.
    fn start(socket: &Path, user: u32, arguments: &UpArguments, own: bool) -> Result<Served> {
        let devices = Devices::beside(SLOTS, arguments.nics.count())?;
        let settings = arguments.nics.apply(beside_settings(socket.to_owned(), false, arguments.spin)?);
        let mut settings = AgentSettings { limits: arguments.limits(), ..settings };
        if own {
            settings.nic.addresses = arguments.addresses.addresses()?;
            settings.nic.between_probes = arguments.addresses.between_probes();
        }
        let mut command = starter::own_command()?;
        command.env(baton_log::VARIABLE, arguments.log_level.to_string());
        let (mut keeper, parent) = baton_keeper::launch(command, &settings, &devices, None)?;
        let agent = match Tool::connect(socket).context("the agent that was just started") {
            Ok(agent) => agent,
            Err(error) => {
                // Its socket is in a directory that may have been made for it, which can be removed then.
                drop(parent);
                let _ = keeper.wait();
                return Err(error);
            }
        };
        Ok(Served { keeper, parent, agent, socket: socket.to_owned(), unused: 0, user })
    }

    /// Passes a client to the agent. Returns whether that serves it; if not, it has sent the client the reason.
    fn admit(&mut self, client: &PeerChannel) -> Result<bool> {
        self.unused = 0;
        match self.agent.ask_with(Ask::Admit, &[client.as_fd()])? {
            Reply::Done => Ok(true),
            Reply::Failed { reason } => {
                info!([] "a client is refused: {reason}");
                Ok(false)
            }
            other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
        }
    }

    /// Whether it has been unused for a while.
    fn is_idle(&mut self) -> bool {
        let used = self.agent.statistics().is_ok_and(|of| of.sessions > 1);
        self.unused = if used { 0 } else { self.unused + 1 };
        self.unused > 1
    }

    fn end(mut self) {
        drop(self.parent);
        if let Ok(None) = baton_keeper::await_end(&mut self.keeper) {
            // It has files of programs that do not close.
            std::thread::spawn(move || self.keeper.wait());
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

struct Up<'a> {
    arguments: &'a UpArguments,
    /// By the namespace's cookie.
    served: BTreeMap<u64, Served>,
    refused: VecDeque<PeerChannel>,
    own: u64,
}

/// The directories that were made for the socket, the innermost one first. They are removed if `baton up` cannot start.
/// After that they stay: a container may have one mounted, where it finds the next Baton.
struct Made(Vec<PathBuf>);

impl Made {
    fn for_socket(path: &Path) -> Result<Made> {
        let Some(directory) = path.parent() else { return Ok(Made(Vec::new())) };
        let missing = directory.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = Made(missing.map(Path::to_owned).collect());
        std::fs::create_dir_all(directory).map_err(|error| explained(error, format!("making {}", directory.display())))?;
        Ok(made)
    }

    fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for directory in &self.0 {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// An error of the system's, with what failed, and what to do where a right is missing.
fn explained(error: io::Error, what: String) -> anyhow::Error {
    let hint = if error.kind() == io::ErrorKind::PermissionDenied { " (`baton up` needs root)" } else { "" };
    anyhow::Error::new(error).context(what + hint)
}

/// Serves until a signal asks it to end.
pub fn up(arguments: &UpArguments) -> Result<()> {
    baton_log::begin("up", arguments.log_level);
    arguments.nics.check()?;
    let path = &arguments.socket;
    let mut made = Made::for_socket(path)?;
    let listener = Listener::bind(path).map_err(|error| explained(error, format!("listening at {}", path.display())))?;
    let signals = process::signal_descriptor(&process::ENDING)?;
    process::raise_descriptor_limit();
    let own = socket::namespace(listener.as_fd())?;
    let mut up = Up { arguments, served: BTreeMap::new(), refused: VecDeque::new(), own };
    let mut first = Served::start(&up.socket_of(own), 0, arguments, true).context("starting a Baton")?;
    if arguments.addresses.any()
        && let Err(why) = addresses::settle(&mut first.agent)
    {
        first.end();
        return Err(why);
    }
    up.served.insert(own, first);
    made.keep();
    if arguments.nics.measures()
        && let Some(path) = gain_file::path().filter(|path| !path.exists())
    {
        info!([] "nothing was measured on this machine yet ({}): baton nic gain --measure", path.display());
    }
    info!([] "it is up at {}: baton run -- PROGRAM (see baton ls, baton doctor)", path.display());
    notify_manager(&format!("READY=1\nSTATUS=Serves programs at {}", path.display()));
    let poller = Poller::new()?;
    poller.add(listener.as_fd(), LISTENER, Trigger::Readable)?;
    poller.add(signals.as_fd(), SIGNALS, Trigger::Readable)?;
    let mut tokens = Vec::new();
    loop {
        let look = (up.served.len() > 1 || arguments.nics.measures()).then_some(LOOK);
        poller.wait(look, &mut tokens)?;
        if tokens.contains(&SIGNALS) {
            break;
        }
        if tokens.drain(..).count() == 0 {
            up.end_what_is_idle();
            up.keep_what_was_measured();
            continue;
        }
        let client = match listener.accept() {
            Ok(client) => client,
            Err(error) => {
                warning!(
                    [] "a client cannot be served: {error}";
                    "raise the limit on open files (LimitNOFILE=, `ulimit -n`) if it is reached"
                );
                continue;
            }
        };
        if client.peer_user().is_ok_and(foreign::is_stuck) {
            refuse(&client, foreign::STUCK.into());
            client.turn_away();
            continue;
        }
        match up.admit(&client) {
            Ok(true) => {}
            Ok(false) => client.turn_away(),
            Err(error) => {
                warning!(
                    [] "a client cannot be served: {error:#}";
                    "its program runs without Baton; `baton doctor`, run beside it, names what is missing"
                );
                refuse(&client, format!("{error:#}"));
                // It may not have sent its first request yet, so its connection stays open for a while.
                up.refused.push_back(client);
                if up.refused.len() > REFUSED
                    && let Some(oldest) = up.refused.pop_front()
                {
                    oldest.turn_away();
                }
            }
        }
    }
    notify_manager("STOPPING=1\nSTATUS=Every connection goes back to the kernel");
    // Before all else: programs that are disconnected would connect again at once, and wait for an answer.
    drop(listener);
    up.keep_what_was_measured();
    std::mem::take(&mut up.served).into_values().for_each(Served::end);
    Ok(())
}

/// Answers the first request of a client, for which it waits, that it is not served.
fn refuse(client: &PeerChannel, reason: String) {
    let _ = client.try_send(&Answer { tag: 1, body: Reply::Failed { reason } }, &[]);
}

/// Notifies the service manager, if one has started this process, of its progress.
fn notify_manager(lines: &str) {
    if let Err(error) = service::notify(lines) {
        warning!(
            [] "nothing can be sent to the service manager at NOTIFY_SOCKET: {error}";
            "let this process reach that socket, or its unit does not count as started"
        );
    }
}

impl Up<'_> {
    fn socket_of(&self, namespace: u64) -> PathBuf {
        let mut path = self.arguments.socket.clone().into_os_string();
        path.push(format!(".{namespace}"));
        path.into()
    }

    /// Passes a client to the agent of its network namespace. Returns whether that serves it.
    fn admit(&mut self, client: &PeerChannel) -> Result<bool> {
        let namespace = socket::namespace(client.as_fd())?;
        if let Some(served) = self.served.get_mut(&namespace) {
            let error = match served.admit(client) {
                Err(error) => error,
                admitted => return admitted,
            };
            warning!(
                [] "the Baton of namespace {namespace} does not answer ({error:#}): another one is started";
                "if it comes again, send what `baton report` writes"
            );
            if let Some(served) = self.served.remove(&namespace) {
                served.end();
            }
        }
        let user = client.peer_user()?;
        if self.has_no_room(user).is_some() {
            self.end_what_is_idle();
        }
        if let Some(why) = self.has_no_room(user) {
            bail!(why);
        }
        let mut served =
            self.serve(client.peer_process()?, namespace, user).context("starting a Baton for a network namespace")?;
        let admitted = served.admit(client);
        self.served.insert(namespace, served);
        admitted
    }

    /// The reason why no other namespace can be served for a user; None if one can.
    fn has_no_room(&self, user: u32) -> Option<String> {
        let UpArguments { namespaces, namespaces_per_user, .. } = *self.arguments;
        let theirs = self.served.values().filter(|served| served.user == user).count();
        if user != 0 && theirs >= namespaces_per_user {
            return Some(format!(
                "user {user} has a Baton in {theirs} network namespaces, the most that one user may have: raise --namespaces-per-user of `baton up`"
            ));
        }
        (self.served.len() >= namespaces).then(|| {
            format!("{namespaces} network namespaces are served already, the most allowed: raise --namespaces of `baton up`")
        })
    }

    /// Starts a Baton in the namespace of a process.
    fn serve(&self, process: u32, namespace: u64, user: u32) -> Result<Served> {
        let socket = self.socket_of(namespace);
        let started = Namespace::of_process(process)?.run(|| {
            // The process may have ended, and its process id may be another's.
            if socket::namespace(socket::stream(false, 0)?.as_fd())? != namespace {
                return Err(io::Error::other("the client has ended"));
            }
            Ok(Served::start(&socket, user, self.arguments, false))
        });
        started?
    }

    /// Keeps what the agents have measured for those that are started later, also by another `baton up`.
    fn keep_what_was_measured(&mut self) {
        let Some(path) = gain_file::path().filter(|_| self.arguments.nics.measures()) else { return };
        let mut known = gain_file::read(&path);
        let mut changed = false;
        for served in self.served.values_mut() {
            if let Ok(Reply::Gain(classes)) = served.agent.ask(Ask::Gain) {
                changed |= gain_file::renew(&mut known, &classes);
            }
        }
        if changed && let Err(error) = gain_file::write(&path, &known) {
            warning!(
                [] "what was measured is not kept: {error:#}";
                "see that there is room, and that this user may write there"
            );
        }
    }

    fn end_what_is_idle(&mut self) {
        let own = self.own;
        let idle = self.served.iter_mut().filter_map(|(at, of)| (*at != own && of.is_idle()).then_some(*at));
        let idle: Vec<u64> = idle.collect();
        for namespace in idle {
            if let Some(served) = self.served.remove(&namespace) {
                served.end();
            }
        }
    }
}
