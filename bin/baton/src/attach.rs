//! `baton attach` and `baton detach`: programs that run already.

use crate::placement::Where;
use crate::start::{FlipArguments, StartArguments};
use crate::tools::SocketArgument;
use anyhow::{Context, Result, bail};
use baton_attach::{AttachSettings, Attacher, Summary, Target};
use baton_client::rules::When;
use baton_linux::events::{Poller, Trigger};
use baton_linux::process;
use baton_protocol::program::{Ask, Reply};
use clap::Args;
use std::io::IsTerminal;
use std::os::fd::AsFd;

pub const EXAMPLES: &str = "Examples:
  baton attach 4711
  baton attach --port 6379
  baton attach --cgroup /system.slice/nginx.service --after 0
  baton attach --port 80 --rule hot:500K
  baton attach --flip 5..50 --flip-report report.json 4711

It stays until Ctrl-C, `baton detach`, or the program's end; then every connection is in the kernel again. The program may be of any kind,
static or in Go: nothing is loaded into it. It stands still for the moment of a move. Each message takes one more hop than under
`baton run`, and costs more CPU than in the kernel (`baton bench rpc`). If no Baton runs, one is started: that needs root, Linux 6.6 or
later, and the kernel's type information (CONFIG_DEBUG_INFO_BTF).";

#[derive(Args)]
#[group(id = "which", required = true, multiple = false)]
pub struct Which {
    /// A process, and what it starts.
    #[arg(value_name = "PID")]
    process: Option<u32>,
    /// Connections with this local port, of whatever process.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Processes of a control group, as /proc/PID/cgroup names it.
    #[arg(long, value_name = "PATH")]
    cgroup: Option<String>,
}

impl Which {
    fn target(&self) -> Result<Target> {
        match (self.process, self.port, &self.cgroup) {
            (Some(number), ..) => Ok(Target::Process(number)),
            (_, Some(port), _) => Ok(Target::Port(port)),
            (.., Some(path)) => {
                let path = path.strip_prefix("/sys/fs/cgroup").unwrap_or(path);
                Ok(Target::Cgroup(format!("/{}", path.trim_matches('/'))))
            }
            _ => bail!("which program? Give a process id, --port or --cgroup"),
        }
    }
}

#[derive(Args)]
pub struct AttachArguments {
    #[command(flatten)]
    which: Which,
    /// Bytes after which a later connection goes to the NIC. Those that exist already go at once.
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 10)]
    after: u32,
    /// When a later connection goes to the NIC: established, bytes:N (as --after), or hot[:N]: whenever it carries N
    /// bytes a second (with K, M or G; 1M if left out), until it carries much less. With hot those that exist already
    /// wait for that, too.
    #[arg(long, value_name = "WHEN", conflicts_with_all = ["after", "flip"])]
    rule: Option<When>,
    #[command(flatten)]
    flip: FlipArguments,
    #[command(flatten)]
    start: StartArguments,
    /// At the end, print one JSON object with the figures.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct DetachArguments {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    socket: SocketArgument,
}

/// Prints a line. The reader of the output may have ended: that must not end an attacher, which has to detach in order.
macro_rules! say {
    ($($part:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), $($part)*);
    }};
}

/// Bytes after which a later connection goes to the NIC, and bytes a second that each has to carry to be there.
fn plan(arguments: &AttachArguments) -> Result<(u32, u32)> {
    match arguments.rule {
        None => Ok((arguments.after, 0)),
        Some(When::Hot(rate)) => Ok((arguments.after, rate)),
        Some(When::Established) => Ok((0, 0)),
        Some(When::Bytes(bytes)) => Ok((bytes.try_into().unwrap_or(u32::MAX), 0)),
        Some(other) => {
            bail!("{:?} is no moment of `baton attach`; use one of: established, bytes:N, hot, hot:N", other.to_string())
        }
    }
}

/// Attaches, and returns after the detach.
pub fn attach(arguments: &AttachArguments) -> Result<()> {
    let target = arguments.which.target()?;
    let (after, hot_from) = plan(arguments)?;
    let (socket, channel) = arguments.start.agent(Where::Anywhere)?;
    let group = arguments.flip.make_group(&channel)?;
    let settings = AttachSettings { target: target.clone(), after, hot_from, flip: arguments.flip.flip(), group };
    let attacher = Attacher::attach(&socket, settings)?;
    drop(channel);
    let (on_nic, known) = attacher.connections();
    if !arguments.json {
        let how = if std::io::stdout().is_terminal() { "; Ctrl-C detaches" } else { "" };
        say!("attached to {target}: {known} connections, {on_nic} of them on the NIC{how}");
    }
    let summary = attacher.run()?;
    if arguments.json {
        say!("{}", serde_json::to_string(&summary)?);
    } else {
        print(&target, &summary);
    }
    Ok(())
}

fn print(target: &Target, summary: &Summary) {
    let Summary { connections, moves, stayed, pauses, pause_p50, pause_p99, pause_max } = summary;
    say!("detached from {target}: {connections} connections, {moves} moves");
    say!("it stood still {pauses} times: p50 {pause_p50} µs, p99 {pause_p99} µs, max {pause_max} µs");
    for (reason, times) in stayed {
        say!("{times} times not moved: {reason}");
    }
}

/// Ends an attacher, and waits until every connection is in the kernel.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    let target = arguments.which.target()?;
    let mut tool = arguments.socket.connect()?;
    let attachers = match tool.ask(Ask::Attachers).context("asking for attachers")? {
        Reply::Attachers(attachers) => attachers,
        other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
    };
    let name = target.to_string();
    let Some((attacher, _)) = attachers.iter().find(|(_, of)| *of == name) else {
        let others: Vec<&str> = attachers.iter().map(|(_, of)| of.as_str()).collect();
        let others = if others.is_empty() { "nothing".into() } else { others.join(", ") };
        bail!("Baton is not attached to {name}; it is attached to: {others}");
    };
    let process = process::open_process(*attacher).context("the attacher")?;
    process::signal(*attacher, libc::SIGTERM).context("ending the attacher")?;
    let poller = Poller::new()?;
    poller.add(process.as_fd(), 0, Trigger::Readable)?;
    let mut ended = Vec::new();
    while ended.is_empty() {
        poller.wait(None, &mut ended)?;
    }
    say!("detached from {name}");
    Ok(())
}
