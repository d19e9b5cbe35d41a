//! `baton doctor`: what this machine can do for Baton, what it cannot, and what to type; and what a program would gain.

#[cfg(feature = "lab")]
mod carried;
pub mod look;
mod subject;
mod watch;

use crate::bed::temporary;
use crate::run_directory;
use anyhow::{Context, Result, bail};
use baton_client::DEFAULT_SOCKET;
use baton_linux::control::Channel;
use baton_linux::interface::{self, TapOptions};
use baton_linux::namespace::{Namespace, become_root_if_needed};
use baton_linux::netlink::{Changes, NETFILTER, Netlink, ROUTE, ROUTE_CHANGES, RULE_CHANGES, SOCK_DIAG};
use baton_linux::resolution::{self, Released};
use baton_linux::{cgroups, packet_ring, process, rights, rtnetlink, starter};
use baton_steering::front::{self, Front};
use baton_steering::{LOOPBACK, Steering};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use subject::Subject;
use watch::Watch;

pub const EXAMPLES: &str = "Examples:
  baton doctor
  baton doctor --json
  baton doctor --cleanup
  baton doctor 4711
  baton doctor nginx.service --seconds 60
  baton doctor --port 6379 --json
  baton plan --save here.toml && baton doctor nginx.service --plan here.toml

With a program it is only watched: nothing is loaded into it and nothing is moved. It says how many of its connections a Baton beside the
kernel would move, why the others would stay, and which processor time the program takes now; with --plan also what Baton would save. Whether
processes other than the program's hold a connection, too, is not looked for.";

#[derive(Args)]
pub struct DoctorArguments {
    /// A process and what it starts, or a unit of systemd, which is watched. Without it this machine is examined.
    #[arg(value_name = "PID|UNIT", conflicts_with_all = ["cleanup", "port"])]
    program: Option<String>,
    /// Watch who listens at this port, and the connections there.
    #[arg(long, value_name = "N", conflicts_with = "cleanup", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// How long a program is watched.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Predict what a NIC would save the program, with what `baton plan --save` wrote here about this machine.
    #[cfg(feature = "lab")]
    #[arg(long, value_name = "FILE", conflicts_with = "cleanup")]
    plan: Option<PathBuf>,
    /// Print JSON: an array about this machine, an object about a program.
    #[arg(long)]
    json: bool,
    /// Remove what a Baton that was killed with all its processes has left: directories with a socket at which nobody
    /// listens, the temporary files of demo, bench and soak, and its NIC's addresses that no program uses.
    #[arg(long)]
    cleanup: bool,
}

/// One thing that Baton needs.
#[derive(Serialize)]
struct Finding {
    what: &'static str,
    needed_for: &'static str,
    works: bool,
    /// The cause, and what to do about it.
    advice: Option<String>,
}

fn finding(what: &'static str, needed_for: &'static str, result: io::Result<()>) -> Finding {
    Finding { what, needed_for, works: result.is_ok(), advice: result.err().map(|error| error.to_string()) }
}

/// The same of something whose errors are the system's, with what to do about them.
fn advised(what: &'static str, needed_for: &'static str, remedy: &str, result: io::Result<()>) -> Finding {
    let advise = |error: io::Error| match error.raw_os_error() {
        Some(_) => io::Error::new(error.kind(), format!("{error}: {remedy}")),
        None => error,
    };
    finding(what, needed_for, result.map_err(advise))
}

/// Whether this kernel, by its release, is new enough for NICs beside it. `works`: it has what they need in any case.
fn kernel(release: &str, works: bool) -> Finding {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let works = works || version >= (6, 6);
    let advice = (!works).then(|| {
        format!(
            "this is Linux {release}: install 6.6 or later, and start it (on Debian 12: apt install linux-image-6.12-amd64; \
             Debian 13 and Ubuntu 24.04 come with one)"
        )
    });
    Finding { what: "Linux 6.6 or later", needed_for: "run, up, attach", works, advice }
}

/// Tries everything in a network namespace of its own, so that nothing is disturbed.
fn examine() -> Vec<Finding> {
    let namespace = Namespace::new();
    let inside = |work: fn() -> io::Result<()>| match &namespace {
        Ok(namespace) => namespace.run(work),
        Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
    };
    let in_front = inside(|| interface::open_tap("doctor2", TapOptions::default()).and_then(|_| front::supported()));
    let in_drivers = in_front.is_ok().then(|| in_drivers(inside(attach_to_driver)));
    let made = namespace.as_ref().map(|_| ()).map_err(|error| io::Error::new(error.kind(), error.to_string()));
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let at_devices = inside(|| Steering::new(1)?.attach(LOOPBACK).map(drop));
    let found = [
        kernel(release.trim(), at_devices.is_ok()),
        finding("network namespaces", "demo, soak, hosts", made),
        finding("/dev/net/tun", "everything", inside(|| interface::open_tap("doctor0", TapOptions::default()).map(drop))),
        advised(
            "packet sockets",
            "run",
            "run as root (CAP_NET_RAW); a unit must allow AF_PACKET",
            inside(|| interface::open_packet_socket(LOOPBACK).map(drop)),
        ),
        rings(inside(|| interface::open_filtered_packet_socket(LOOPBACK, true, |fd| packet_ring::set_up(fd, true)).map(drop))),
        advised("BPF programs at devices (Linux 6.6)", "run", "CONFIG_BPF_SYSCALL and CONFIG_NET_XGRESS", at_devices),
        finding("large receive in front of devices", "nic attach", in_front),
        finding("taking connections out of the kernel (TCP_REPAIR)", "everything", inside(repair)),
        finding("ports below 1024 (CAP_NET_BIND_SERVICE)", "connections at such ports", inside(bind_low)),
        advised(
            "notification of route changes",
            "everything",
            "a unit must allow AF_NETLINK",
            inside(|| Changes::listen(ROUTE, ROUTE_CHANGES).map(drop)),
        ),
        advised(
            "notification of firewall changes (nftables)",
            "hosts with a firewall",
            "modprobe nfnetlink (CONFIG_NETFILTER_NETLINK)",
            inside(|| Changes::listen(NETFILTER, RULE_CHANGES).map(drop)),
        ),
        nic_rights(),
        other_groups(socket_of_group()),
        finding("the preloaded library", "run", crate::run::find_library().map(drop).map_err(io::Error::other)),
    ];
    found.into_iter().chain(in_drivers).collect()
}

/// Reports how frames come and go beside the kernel. It works without rings, too.
fn rings(result: io::Result<()>) -> Finding {
    let advice = match result {
        Ok(()) => "used on every device: they keep large frames whole, which AF_XDP on a veth does not".into(),
        Err(error) => format!("one system call for each frame instead, which is slower: this kernel gives no rings ({error})"),
    };
    Finding { what: "frames through memory shared with the kernel", needed_for: "run", works: true, advice: Some(advice) }
}

/// Reports whether large receive, where it works, can take segments in a device's driver. It works without that, too.
fn in_drivers(result: io::Result<()>) -> Finding {
    let advice =
        result.err().map(|error| format!("behind the driver (path=tc) instead, which spares the receiver less: {error}"));
    Finding { what: "large receive in devices' drivers (XDP)", needed_for: "nic attach", works: true, advice }
}

fn attach_to_driver() -> io::Result<()> {
    let tap = interface::open_tap("doctor1", TapOptions::default())?;
    let netlink = rtnetlink::open()?;
    let index = rtnetlink::link(&netlink, "doctor1")?.index;
    let attached = Front::attach(front::Path::Driver, index, index).map(drop);
    drop(tap);
    attached
}

/// Reports which protections around the NIC are missing. The NIC works without them, too.
fn nic_rights() -> Finding {
    let mut missing = Vec::new();
    if rights::landlock_version().is_none() {
        missing.push("this kernel has no Landlock (it needs Linux 5.13, and lsm=landlock,... on its command line): only the NIC's user id keeps it from files");
    }
    if !rights::has_other_users() {
        missing.push("this user namespace has only one user: the NIC keeps the agent's user id");
    }
    let advice = (!missing.is_empty()).then(|| missing.join("; "));
    Finding { what: "a NIC without rights (user, seccomp, Landlock)", needed_for: "everything", works: true, advice }
}

/// Reports whether BPF programs of control groups can be asked about a connect(2): by a socket that a process in the
/// group makes. All else works without that, too.
fn other_groups(result: io::Result<()>) -> Finding {
    let advice = result.err().map(|error| {
        format!(
            "connections of groups whose BPF programs judge a connect(2) stay in the kernel, since no process can be started \
             in another group ({error}); in a unit it is RestrictNamespaces= that takes clone3(2) away"
        )
    });
    Finding { what: "sockets of other control groups", needed_for: "groups whose programs judge connect(2)", works: true, advice }
}

fn socket_of_group() -> io::Result<()> {
    // Without the unified hierarchy there are no such programs.
    let Some(group) = process::cgroup(std::process::id()) else { return Ok(()) };
    let directory = cgroups::open(cgroups::root()?, &group)?;
    starter::socket_of_group(directory.as_fd(), false).map(drop)
}

/// A connection gets its port again when it is restored.
fn bind_low() -> io::Result<()> {
    match std::net::TcpListener::bind("0.0.0.0:1") {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let advice = "give it CAP_NET_BIND_SERVICE, or connections at ports below 1024 stay in the kernel";
            Err(io::Error::new(error.kind(), format!("{error}: {advice}")))
        }
        bound => bound.map(drop),
    }
}

fn repair() -> io::Result<()> {
    const TCP_REPAIR: i32 = 19;
    let socket = baton_linux::socket::stream(false, 0)?;
    baton_linux::socket::set(socket.as_fd(), 6, TCP_REPAIR, 1).map_err(|error| {
        io::Error::new(error.kind(), format!("{error}: run as root (CAP_NET_ADMIN), on a kernel with CONFIG_CHECKPOINT_RESTORE"))
    })
}

/// Directories that processes of Baton's have left which were killed before they could clean up: of Batons that were
/// started for one program, and of the commands that show or measure something.
fn leftovers() -> Vec<PathBuf> {
    let mut left = temporary::left_in(&std::env::temp_dir());
    let places = run_directory::existing().into_iter().chain([std::env::temp_dir()]).collect::<BTreeSet<_>>();
    let entries = places.into_iter().filter_map(|place| std::fs::read_dir(place).ok()).flatten();
    // A link may lead anywhere.
    let directories = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let named = directories.map(|entry| entry.path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("baton-")) && path.join("agent.sock").exists()
    });
    let silent = named.filter(|path| !Channel::is_listened_at(&path.join("agent.sock")));
    left.extend(silent);
    left.sort();
    left.dedup();
    left
}

/// Prints the findings. Returns whether everything works.
pub fn run(arguments: &DoctorArguments) -> Result<bool> {
    let (json, seconds) = (arguments.json, arguments.seconds);
    #[cfg(feature = "lab")]
    let plan = arguments.plan.as_deref();
    #[cfg(not(feature = "lab"))]
    let plan = None;
    if plan.is_some() && arguments.program.is_none() && arguments.port.is_none() {
        bail!("--plan is about a program: name it, or give --port");
    }
    if let Some(name) = &arguments.program {
        watch::run(&Watch { name, subject: Subject::named(name)?, port: None, seconds, json, plan })?;
        return Ok(true);
    }
    if let Some(port) = arguments.port {
        let (name, subject) = (format!("port {port}"), Subject::listening(port)?);
        watch::run(&Watch { name: &name, subject, port: Some(port), seconds, json, plan })?;
        return Ok(true);
    }
    become_root_if_needed()?;
    let findings = examine();
    let works = findings.iter().all(|finding| finding.works);
    if arguments.json {
        println!("{}", serde_json::to_string(&findings)?);
    } else {
        for finding in &findings {
            let Finding { what, needed_for, works, advice } = finding;
            println!("{}  {what:<52} for {needed_for}", if *works { "ok     " } else { "MISSING" });
            if let Some(advice) = advice {
                println!("         {advice}");
            }
        }
        let running = Channel::is_listened_at(Path::new(DEFAULT_SOCKET));
        let advice = if running { "" } else { " (`baton up` starts one; `baton run` needs none)" };
        println!("\n{} runs at {DEFAULT_SOCKET}{advice}", if running { "A Baton" } else { "No Baton" });
    }
    for path in leftovers() {
        if !arguments.cleanup {
            eprintln!("{} was left by a Baton that was killed; `baton doctor --cleanup` removes it", path.display());
            continue;
        }
        match std::fs::remove_dir_all(&path) {
            Ok(()) => eprintln!("removed {}", path.display()),
            // Others are removed even if this one cannot be.
            Err(error) => eprintln!("{} cannot be removed: {error}", path.display()),
        }
    }
    match leftover_addresses(arguments.cleanup).context("addresses that a Baton may have left cannot be looked at") {
        Err(error) if arguments.cleanup => return Err(error),
        // A finding says why.
        Err(error) => eprintln!("{error:#}"),
        Ok(()) => {}
    }
    Ok(works)
}

/// Removes the addresses of NICs that killed Batons have left in this network namespace, or says that they are there.
fn leftover_addresses(cleanup: bool) -> Result<()> {
    let (routes, diagnosis) = (rtnetlink::open()?, Netlink::open(SOCK_DIAG)?);
    for (interface, address) in rtnetlink::own_addresses(&routes)? {
        // Another running Baton has claimed this address.
        if resolution::claim(address).is_err() {
            continue;
        }
        if !cleanup {
            eprintln!("{address} was left by a Baton that had a NIC with this address; `baton doctor --cleanup` removes it");
            continue;
        }
        match resolution::release(&routes, &diagnosis, interface, address)? {
            Released::Removed => eprintln!("removed {address}"),
            Released::Expires => eprintln!("{address} will be removed when the last connections have ended"),
            Released::Stays => eprintln!("{address} is left by a Baton, but programs use it: end them first"),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_is_named_with_one_to_install() {
        for release in ["6.6.0", "6.12.107+deb12-amd64", "6.18.44-fc", "7.0", "10.1.2"] {
            assert!(kernel(release, false).works, "{release}");
        }
        for release in ["6.1.0-50-amd64", "5.15.0", "6.5-rc1", "", "x"] {
            assert!(!kernel(release, false).works, "{release}");
        }
        assert!(kernel("5.14.0-503.el9", true).works, "what is needed may be there in an older one, too");
        let advice = kernel("6.1.0-50-amd64", false).advice.expect("advice");
        assert!(advice.contains("6.1.0-50-amd64") && advice.contains("linux-image-6.12-amd64"), "{advice}");
    }

    /// It is no reason to count a machine as unfit.
    #[test]
    fn groups_that_cannot_be_asked_are_named() {
        let found = other_groups(Err(io::Error::from_raw_os_error(38)));
        let advice = found.advice.expect("advice");
        assert!(found.works && advice.contains("(os error 38)") && advice.contains("RestrictNamespaces="), "{advice}");
        assert!(other_groups(Ok(())).advice.is_none());
    }

    #[test]
    fn errors_of_the_system_get_a_remedy() {
        let advice = |error: io::Error| advised("x", "y", "do this", Err(error)).advice.expect("advice");
        assert_eq!(advice(io::Error::from_raw_os_error(1)), "Operation not permitted (os error 1): do this");
        assert_eq!(advice(io::Error::other("as it says")), "as it says");
        assert!(advised("x", "y", "do this", Ok(())).advice.is_none());
    }
}
