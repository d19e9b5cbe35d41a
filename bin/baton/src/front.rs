//! `baton nic attach` and `baton nic detach`: large receive in front of a device that the kernel keeps.

use anyhow::{Result, anyhow, bail};
use baton_front::status::{self, Figures, Status};
use baton_front::{Attached, Choice};
use baton_offloads::Offloads;
use clap::Args;
use std::io::IsTerminal;

pub const EXAMPLES: &str = "Examples:
  baton nic attach eth0
  baton nic attach eth0 lro=reorder lro-usecs=200
  baton nic attach eth0 path=tc
  baton nic attach --list
  baton nic detach eth0

The device keeps its addresses, routes, neighbours, queueing disciplines and firewall. TCP segments of connections in bulk are taken in its
driver (path=xdp) or at its ingress (path=tc), merged as `baton nic set lro=...` does it between kernel and wire, and given back as large
frames. If the process is killed or stopped the device receives as before within a tenth of a second. Switch the device's own merging off
to win by it (`ethtool -K eth0 gro off`). It needs root, Linux 6.6 or later, /dev/net/tun, and the kernel's type information
(CONFIG_DEBUG_INFO_BTF).";

#[derive(Args)]
pub struct AttachArguments {
    /// The device, of this network namespace.
    #[arg(value_name = "DEV", required_unless_present = "list")]
    device: Option<String>,
    /// Settings of large receive: `lro` (in-order unless given, or reorder), `lro-push`, `lro-usecs`, …, as for `baton nic set`. And
    /// `path`, where segments are taken: xdp, in the device's driver if that works; tc, at its ingress; auto, as xdp but for a veth or
    /// a TAP, where a program in the driver harms other traffic.
    #[arg(value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// Print what is attached in this network namespace instead.
    #[arg(long, conflicts_with_all = ["device", "settings"])]
    list: bool,
    /// At the end print one JSON object with the figures; with --list one JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct DetachArguments {
    /// The device.
    #[arg(value_name = "DEV")]
    device: String,
}

/// Large receive's settings and the path from their names and values.
fn parse(assignments: &[String]) -> Result<(Offloads, Choice)> {
    let (mut offloads, mut choice) = (Offloads::default(), Choice::default());
    for assignment in ["lro=in-order"].into_iter().chain(assignments.iter().map(String::as_str)) {
        if let Some(path) = assignment.strip_prefix("path=") {
            choice = parse_path(path)?;
            continue;
        }
        if !assignment.starts_with("lro") {
            let keys: Vec<&str> = offloads.list().iter().map(|(key, _)| *key).filter(|key| key.starts_with("lro")).collect();
            bail!("{assignment}: only large receive can be in front of a device: path, {}", keys.join(", "));
        }
        offloads.set(assignment).map_err(|why| anyhow!("{why}"))?;
    }
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

/// Attaches, and returns after the detach.
pub fn attach(arguments: &AttachArguments) -> Result<()> {
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
    Ok(())
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
        text += &format!("; {lapses} times too late, {lost} frames lost");
    }
    text
}

fn list(json: bool) -> Result<()> {
    let all = status::list()?;
    if json {
        println!("{}", serde_json::to_string(&all)?);
        return Ok(());
    }
    if all.is_empty() {
        println!("nothing is attached in this network namespace");
    }
    for Status { device, tap, path, process, settings, figures } in &all {
        let offloads = Offloads { lro: *settings, ..Offloads::default() };
        println!("{device}: process {process}, {} by {tap}, path={path}", text(&offloads));
        println!("    {}", summary(figures));
    }
    Ok(())
}

/// Ends what is attached to a device.
pub fn detach(arguments: &DetachArguments) -> Result<()> {
    let process = status::detach(&arguments.device)?;
    println!("detached from {} (process {process})", arguments.device);
    Ok(())
}
