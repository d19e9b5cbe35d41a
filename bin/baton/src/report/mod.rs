//! `baton report`: one archive that says what somebody who looks into a fault wants to know.

mod archive;
mod collect;
mod hide;

use crate::tools::SocketArgument;
use anyhow::{Context, Result, bail};
use archive::Archive;
use clap::Args;
use hide::Hider;
use std::io;
use std::path::PathBuf;

pub const EXAMPLES: &str = "Examples:
  baton report
  baton report -o /tmp/baton.tar.gz
  sudo baton report --addresses

In it: versions, the kernel and its TCP settings, what `baton doctor` says, Baton's configuration, each agent's counters, connections with
their last events and settings of its NICs, the processes and their limits, the last lines of the service's log. Not in it: bytes that
connections carry, keys, host names, and, without --addresses, IP and MAC addresses: each is replaced by a number, the same everywhere in
the archive. Names of programs and ports are in it. Look through it before you send it: it is text.

An agent that does not answer within a second is named, and the rest is there. As an ordinary user some things of other users cannot be
read; the archive says which.";

#[derive(Args)]
pub struct ReportArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// The archive, which must not exist. Without it: baton-report-DATE.tar.gz in the current directory.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Leave IP and MAC addresses as they are.
    #[arg(long)]
    addresses: bool,
    /// Print one JSON object about the archive.
    #[arg(long)]
    json: bool,
}

/// Makes the archive.
///
/// # Errors
/// If it exists, or cannot be written.
pub fn run(arguments: &ReportArguments) -> Result<()> {
    let now = collect::now();
    let name = format!("baton-report-{}", collect::date(now));
    let path = arguments.output.clone().unwrap_or_else(|| PathBuf::from(format!("{name}.tar.gz")));
    if path.as_os_str() == "-" {
        bail!("-o -: the archive goes into a file, of which only you have the rights: -o FILE");
    }
    // Before anything is collected: what must not be overwritten is known at once.
    let mut archive = match Archive::create(&path, &name, now) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            bail!("{} exists, and nothing is overwritten: remove it, or name another file with -o FILE", path.display())
        }
        made => made.with_context(|| format!("the archive {}: -o FILE writes it elsewhere", path.display()))?,
    };
    let (parts, silent) = collect::everything(&arguments.socket);
    let mut hider = Hider::new(!arguments.addresses);
    let written = (|| {
        for (file, text) in &parts {
            archive.add(file, &hider.hide(text))?;
        }
        archive.finish()
    })();
    if let Err(error) = written {
        // Half an archive is of no use.
        let _ = std::fs::remove_file(&path);
        return Err(error).with_context(|| format!("writing {}", path.display()));
    }
    let hidden = hider.count();
    if arguments.json {
        let files: Vec<&String> = parts.iter().map(|(file, _)| file).collect();
        let said = serde_json::json!({
            "archive": path, "files": files, "unanswered": silent, "addresses": arguments.addresses, "addresses_replaced": hidden,
        });
        println!("{said}");
        return Ok(());
    }
    println!("{}: {} files, without payload and keys", path.display(), parts.len());
    match (arguments.addresses, hidden) {
        (true, _) => println!("addresses are in it"),
        (false, count) => println!("{count} addresses are replaced by numbers (--addresses leaves them)"),
    }
    silent.iter().for_each(|what| println!("missing: {what}"));
    Ok(())
}
