//! `baton nic attach` and `baton nic detach`: large receive in front of a device that the kernel keeps.

use anyhow::{Result, anyhow, bail};
use baton_front::status::{self, Figures, Status};
use baton_front::{Attached, Choice};
use baton_lro::LroSettings;
use baton_offloads::Offloads;
use clap::Args;
use serde_json::{Value, json};
use std::io::IsTerminal;

pub const EXAMPLES: &str = "Examples:
  baton nic attach eth0
  baton nic attach eth0 lro=reorder lro-usecs=200
  baton nic attach eth0 path=tc
  nohup baton nic attach eth0 > attach.log &
  baton nic attach --list
  baton nic detach eth0

Settings, as they are unless given:
  path=auto                where segments are taken: auto, xdp, tc
  lro=in-order             in-order; reorder: segments are put in order first
  lro-push=flush           whether PSH ends an aggregate: flush (always), bulk (not in the middle of a bulk transfer), ignore (never)
  lro-bytes=65535          most bytes of an aggregate's IP packet: 1500 to 65535
  lro-quiet-usecs=200      an aggregate ends after ten mean intervals without a segment, at the latest after this: 1 to 100000 µs
  lro-usecs=500            an aggregate goes out after this time, however fast segments come: 1 to 100000 µs
  lro-gap-usecs=1000       how long a missing segment is waited for (reorder): 1 to 100000 µs
  lro-held-segments=1024   most segments of one connection that wait behind a missing one (reorder)
  lro-held-bytes=16777216  most bytes of all connections that do (reorder)

The device keeps its addresses, routes, neighbours, queueing disciplines and firewall. TCP segments of connections in bulk are taken in its
driver (path=xdp) or at its ingress (path=tc), merged as `baton nic set lro=...` does it between kernel and wire, and given back as large
frames. If the process is killed or stopped the device receives as before within a tenth of a second. Switch the device's own merging off
to win by it (`ethtool -K eth0 gro off`). It needs root, Linux 6.6 or later, /dev/net/tun, and the kernel's type information
(CONFIG_DEBUG_INFO_BTF). It ends with Ctrl-C, SIGTERM, `baton nic detach`, or the terminal (not under nohup).";

#[derive(Args)]
pub struct AttachArguments {
    /// The device, of this network namespace.
    #[arg(value_name = "DEV", required_unless_present = "list")]
    device: Option<String>,
    /// Settings of large receive, below, as for `baton nic set`. And `path`, where segments are taken: xdp, in the
    /// device's driver if that works; tc, at its ingress; auto, as xdp but for a veth or a TAP, where a program in the
    /// driver harms other traffic.
    #[arg(value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Print what is attached in this network namespace instead. Fails if a process does not answer.
    #[arg(long, conflicts_with_all = ["device", "settings"])]
    list: bool,
    /// Print one JSON object with the figures at the end, and nothing before; with --list one JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct DetachArguments {
    /// The device, by the name that it has now.
    #[arg(value_name = "DEV")]
    device: String,
}

/// Large receive's settings and the path from their names and values.
fn parse(assignments: &[String]) -> Result<(Offloads, Choice)> {
    let (mut offloads, mut paths, mut settings) = (Offloads::default(), Vec::new(), Vec::new());
    offloads.set("lro=in-order").map_err(|why| anyhow!("{why}"))?;
    for assignment in assignments.iter().map(String::as_str) {
        if let Some(path) = assignment.strip_prefix("path=") {
            paths.push(path);
            continue;
        }
        let (key, _) = assignment.split_once('=').unwrap_or((assignment, ""));
        let known = settings_of(&offloads).map(|(key, _)| key).collect::<Vec<_>>();
        if !known.contains(&key) {
            bail!("{key}: no setting of large receive: write KEY=VALUE; known are path, {}", known.join(", "));
        }
        settings.push(assignment);
    }
    offloads.set_all(settings).map_err(|why| anyhow!("{why}"))?;
    let choice = match paths[..] {
        [] => Choice::default(),
        [path] => parse_path(path)?,
        [one, other, ..] => bail!("path={one} and path={other}: leave one of them out"),
    };
    if offloads.lro.mode == baton_lro::Mode::Off {
        bail!("lro=off: nothing would be merged; `baton nic detach` ends what is attached");
    }
    Ok((offloads, choice))
}

fn parse_path(path: &str) -> Result<Choice> {
    let known = Choice::WORDS.iter().find(|(word, _)| *word == path);
    let words = || Choice::WORDS.map(|(word, _)| word).join(", ");
    known.map(|(_, choice)| *choice).ok_or_else(|| anyhow!("path={path}: expected one of {}", words()))
}

/// Attaches, and returns after the detach. With `--list` returns whether every process has answered.
pub fn attach(arguments: &AttachArguments) -> Result<bool> {
    let Some(device) = &arguments.device else { return list(arguments.json) };
    let (offloads, choice) = parse(&arguments.settings)?;
    let attached = Attached::attach(device, offloads.lro, choice)?;
    if !arguments.json {
        let how = if std::io::stdout().is_terminal() { "; Ctrl-C detaches" } else { "" };
        println!("attached to {device}: {} by {}, path={}{how}", text(&offloads), attached.tap(), attached.path());
    }
    let figures = attached.run()?;
    if arguments.json {
        println!("{}", serde_json::to_string(&figures)?);
    } else {
        println!("detached from {device}: {}", summary(&figures));
    }
    Ok(true)
}

/// The settings of large receive by their names.
fn settings_of(offloads: &Offloads) -> impl Iterator<Item = (&'static str, String)> {
    offloads.list().into_iter().filter(|(key, _)| key.starts_with("lro"))
}

/// The settings of large receive that are not what they are without being set, and its mode.
fn text(offloads: &Offloads) -> String {
    let usual = Offloads::default().list();
    let changed = offloads.list().into_iter().filter(|setting| !usual.contains(setting));
    changed.map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(" ")
}

fn summary(figures: &Figures) -> String {
    let Figures { taken, given, merged, aggregates, aggregate_bytes, dropped, refused, lapses, lost } = figures;
    let mean = *aggregate_bytes as f64 / (*aggregates).max(1) as f64;
    let mut text = format!("{taken} frames in, {given} out; {merged} merged into {aggregates} of {mean:.0} bytes");
    if dropped + refused > 0 {
        text += &format!("; {dropped} dropped at the full queue, {refused} refused by the kernel");
    }
    if *lapses > 0 {
        text += &format!("; passed by while late, {lapses} times, and {lost} frames lost by that");
    }
    text
}

/// Prints what is attached. Returns whether every process has answered.
fn list(json: bool) -> Result<bool> {
    let (all, errors) = status::list()?;
    if json {
        println!("{}", all.iter().map(to_json).collect::<Value>());
    } else if all.is_empty() && errors.is_empty() {
        println!("nothing is attached in this network namespace");
    } else {
        for Status { device, tap, path, process, settings, figures } in &all {
            println!("{device}: process {process}, {} by {tap}, path={path}", text(&offloads(settings)));
            println!("    {}", summary(figures));
        }
    }
    for error in &errors {
        eprintln!("baton: {error:#}");
    }
    Ok(errors.is_empty())
}

fn offloads(settings: &LroSettings) -> Offloads {
    Offloads { lro: *settings, ..Offloads::default() }
}

/// One attached process, its settings by their names.
fn to_json(status: &Status) -> Value {
    let Status { device, tap, path, process, settings, figures } = status;
    let settings: Value = settings_of(&offloads(settings)).map(|(key, value)| (key.to_string(), Value::from(value))).collect();
    json!({ "device": device, "tap": tap, "path": path, "process": process, "settings": settings, "figures": figures })
}

/// Ends what is attached to a device.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    let process = status::detach(&arguments.device)?;
    println!("detached from {} (process {process})", arguments.device);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_every_setting_and_its_value() {
        let (offloads, choice) = parse(&[]).expect("no settings");
        assert_eq!(choice, Choice::Auto);
        for (key, value) in settings_of(&offloads).chain([("path", "auto".into())]) {
            assert!(EXAMPLES.lines().any(|line| line.starts_with(&format!("  {key}={value} "))), "{key}={value}");
        }
    }
}
