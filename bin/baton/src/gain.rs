//! `baton nic gain`: what classes of connections cost in the kernel and on the NIC.

#[cfg(feature = "lab")]
use crate::gain_file;
use crate::tools::SocketArgument;
#[cfg(feature = "lab")]
use anyhow::Context;
use anyhow::{Result, bail};
use baton_protocol::program::{Ask, ClassInfo, Measured, Place, Reply};
use clap::Args;
use serde_json::{Value, json};

pub const EXAMPLES: &str = "Examples:
  baton run --choose gain -- nginx -g 'daemon off;'
  baton nic gain
  baton nic gain --json
  baton nic gain --measure

A class is the connections of one program over one service: a listener of this host, or a peer. s/GB is CPU seconds for each GB, of the
program, the NICs and interrupts, and MB/s the rate; each in the kernel and on the NIC, in turns of a quarter of a second.";

#[derive(Args)]
pub struct GainArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
    /// Instead, measure what bulk data and requests cost in both places of this machine, which takes twenty seconds,
    /// and keep that: Batons that are started with `--choose gain` begin with it.
    #[cfg(feature = "lab")]
    #[arg(long, conflicts_with_all = ["socket", "json"])]
    measure: bool,
}

/// Measures, and keeps the results.
#[cfg(feature = "lab")]
fn measure() -> Result<bool> {
    // This must come before the process becomes root of a user namespace.
    let path = gain_file::path().context("there is no directory for it: set XDG_STATE_HOME or HOME")?;
    gain_file::check(&path)?;
    let classes = crate::lab::bench::measure_classes()?;
    let mut known = gain_file::read(&path);
    if !gain_file::renew(&mut known, &classes) {
        bail!("no load was measured long enough: is the machine too busy?");
    }
    gain_file::write(&path, &known)?;
    for class in &classes {
        println!("{}", line(class));
    }
    println!("Kept in {}", path.display());
    Ok(true)
}

pub fn show(arguments: &GainArguments) -> Result<bool> {
    #[cfg(feature = "lab")]
    if arguments.measure {
        return measure();
    }
    let classes = match arguments.socket.connect()?.ask(Ask::Gain)? {
        Reply::Gain(classes) => classes,
        Reply::Failed { reason } => bail!("{reason}"),
        other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
    };
    if arguments.json {
        println!("{}", classes.iter().map(in_json).collect::<Value>());
        return Ok(true);
    }
    println!(
        "{:<22} {:<12} {:<6} {:>6} {:>6} {:>15} {:>17} {:>5}  WHY",
        "SERVICE", "PROGRAM", "PLACE", "KERNEL", "NIC", "s/GB KERN/NIC", "MB/s KERN / NIC", "PAIRS"
    );
    for class in &classes {
        println!("{}", line(class));
    }
    Ok(true)
}

fn name(place: Place) -> &'static str {
    match place {
        Place::Kernel => "kernel",
        Place::Nic => "nic",
    }
}

fn line(class: &ClassInfo) -> String {
    let pair = |(kernel, nic): (f64, f64), digits| format!("{kernel:.digits$} / {nic:.digits$}");
    let (cost, rate, pairs) = match class.measured {
        Some(Measured { pairs, cost, rate: (kernel, nic), .. }) => {
            (pair(cost, 2), pair((kernel / 1e6, nic / 1e6), 1), pairs.to_string())
        }
        None => ("-".into(), "-".into(), "-".into()),
    };
    let service = format!("{}{}", if class.listens { "" } else { "to " }, class.service);
    let program = class.program.rsplit('/').next().unwrap_or_default();
    let (kernel, nic) = class.connections;
    let place = name(class.place);
    format!("{service:<22} {program:<12} {place:<6} {kernel:>6} {nic:>6} {cost:>15} {rate:>17} {pairs:>5}  {}", class.reason)
}

fn in_json(class: &ClassInfo) -> Value {
    let pair = |(kernel, nic): (f64, f64)| json!({ "kernel": kernel, "nic": nic });
    let measured = class.measured;
    json!({
        "service": class.service, "listens": class.listens, "program": class.program, "user": class.user,
        "place": name(class.place), "trial": class.trial, "switches": class.switches, "reason": class.reason,
        "connections": { "kernel": class.connections.0, "nic": class.connections.1 },
        "pairs": measured.map(|measured| measured.pairs),
        "cpu_seconds_per_gb": measured.map(|measured| pair(measured.cost)),
        "bytes_per_second": measured.map(|measured| pair(measured.rate)),
        "program_seconds_per_gb": measured.map(|measured| pair(measured.program)),
        "next_try_seconds": class.next_us as f64 / 1e6,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_measured() {
        let class = ClassInfo {
            service: "10.0.0.1:80".into(),
            listens: true,
            program: "/usr/sbin/nginx".into(),
            user: 0,
            connections: (64, 0),
            place: Place::Kernel,
            trial: false,
            switches: 0,
            measured: Some(Measured { pairs: 4, cost: (0.33, 0.41), rate: (1e9, 0.7e9), program: (0.3, 0.2) }),
            reason: "cheaper in the kernel (0.33 against 0.41 s/GB)".into(),
            next_us: 30_000_000,
        };
        let line = line(&class);
        assert!(line.contains("nginx") && line.contains("0.33 / 0.41") && line.contains("1000.0 / 700.0"), "{line}");
        assert_eq!(in_json(&class)["cpu_seconds_per_gb"]["nic"], 0.41);
    }
}
