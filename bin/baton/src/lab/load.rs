//! `baton load`: clients for servers that know nothing of Baton.

use anyhow::{Context, Result, bail};
use baton_lab::web_load::{self, Keep, Url, WebLoad, files};
use baton_lab::web_mix;
use clap::{Args, Subcommand, ValueEnum};
use std::path::{Path, PathBuf};

/// Examples of `baton load web`.
pub const WEB_EXAMPLES: &str = "Examples:
  baton load web --make-files /srv/files --directories 10     # 51 MB, for a server to serve
  baton load web --url http://10.0.0.1:8080 --directories 10
  baton load web --url http://10.0.0.1 --connections 1000 --seconds 60 --json
  baton load web --url http://10.0.0.1 --rate none --keep-alive always
  baton load web --url http://10.0.0.1 --dynamic-path /cgi-bin/get --dynamic 30%

The files: 36 a directory (5.1 MB), nine of each of four classes: 0.1 to 0.9 KB, 1 to 9, 10 to 90, 100 to 900, which get
35, 50, 14 and 1 % of the requests. Directories are asked for by Zipf's law. A file's bytes follow from its name, so that each
is checked.
A client conforms if it got four fifths of its rate (320 kb/s of 400), and fewer errors than one in a hundred requests.
The exit status is 1 if anything went wrong, or nothing was answered. docs/guide/web-load.md has a server's configuration.";

#[derive(Subcommand)]
pub enum Load {
    /// A load like SPECweb99's: files of four classes, by Zipf's law, at the rate of a client's line. Every byte is
    /// checked. Also makes the files.
    #[command(after_help = WEB_EXAMPLES)]
    Web(WebArguments),
}

#[derive(Args)]
pub struct WebArguments {
    /// Where a server serves the files: `http://HOST[:PORT][/PATH]`.
    #[arg(long, value_name = "URL", required_unless_present = "make_files")]
    url: Option<Url>,
    /// Clients, each with one connection at a time.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    connections: u32,
    /// Seconds that the load lasts.
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    seconds: f64,
    /// Bits per second that a client receives at most, such as 400k or 2M; `none`: any number.
    #[arg(long, value_name = "RATE", default_value = "400k", value_parser = parse_rate)]
    rate: f64,
    /// Share of requests that go to the program of --dynamic-path: 30% or 0.3. Default with --dynamic-path: 30%.
    #[arg(long, value_name = "SHARE", value_parser = parse_share, requires = "dynamic_path")]
    dynamic: Option<f64>,
    /// Path of a program on the server, which answers `PATH?/dir00000/class0_0` with that file's bytes.
    #[arg(long, value_name = "PATH")]
    dynamic_path: Option<String>,
    /// Directories of the file set. Default: as many as SPECweb99 has for so many connections: 25, and about two for
    /// every three connections.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=files::MOST_DIRECTORIES as i64))]
    directories: Option<u32>,
    /// Which requests share a connection: as in SPECweb99 (70 % are on connections with 5 to 15), all, or none.
    #[arg(long, value_enum, default_value = "mix")]
    keep_alive: KeepAlive,
    /// Threads that run the clients.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// Decides which files are asked for.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Instead, make the files below this directory. What is there and not of the file set is left as it is.
    #[arg(
        long,
        value_name = "DIRECTORY",
        conflicts_with_all = ["url", "seconds", "rate", "dynamic", "dynamic_path", "keep_alive", "threads", "seed"]
    )]
    make_files: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Values of `--keep-alive`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KeepAlive {
    Mix,
    Always,
    Never,
}

/// A number of bits per second.
fn parse_rate(text: &str) -> Result<f64, String> {
    if text == "none" {
        return Ok(f64::INFINITY);
    }
    let (number, unit) = match text.char_indices().next_back() {
        Some((at, 'k' | 'K')) => (&text[..at], 1e3),
        Some((at, 'M')) => (&text[..at], 1e6),
        Some((at, 'G')) => (&text[..at], 1e9),
        _ => (text, 1.0),
    };
    match number.parse::<f64>() {
        Ok(number) if (1e3..=1e12).contains(&(number * unit)) => Ok(number * unit),
        _ => Err("a rate is a number of bits per second from 1k to 1000G, such as 400k, or none".to_owned()),
    }
}

/// A share, from 0 to 1.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>().map(|percent| percent / 100.0),
        None => text.parse::<f64>(),
    };
    match share {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share is from 0 to 1 or from 0% to 100%, such as 0.3 or 30%".to_owned()),
    }
}

/// Runs one of them. False if something went wrong with a request.
pub fn run(command: &Load) -> Result<bool> {
    let Load::Web(arguments) = command;
    let connections = arguments.connections as usize;
    let directories = match arguments.directories {
        Some(directories) => directories as usize,
        None => web_mix::directories(connections).min(files::MOST_DIRECTORIES),
    };
    if let Some(root) = &arguments.make_files {
        return make_files(root, directories, arguments.json).map(|()| true);
    }
    let Some(url) = arguments.url.clone() else { bail!("--url says where the server is") };
    let load = WebLoad {
        url,
        connections,
        threads: arguments.threads.into(),
        seconds: arguments.seconds,
        rate: arguments.rate,
        dynamic: arguments.dynamic.unwrap_or(if arguments.dynamic_path.is_some() { web_mix::DYNAMIC } else { 0.0 }),
        dynamic_path: arguments.dynamic_path.clone(),
        directories,
        keep: match arguments.keep_alive {
            KeepAlive::Mix => Keep::Mix,
            KeepAlive::Always => Keep::Always,
            KeepAlive::Never => Keep::Never,
        },
        seed: arguments.seed,
    };
    let report = web_load::run(&load)?;
    if arguments.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        report.lines().iter().for_each(|line| println!("{line}"));
    }
    Ok(report.is_clean())
}

fn make_files(root: &Path, directories: usize, json: bool) -> Result<()> {
    let made = files::make(root, directories).with_context(|| format!("making the files below {}", root.display()))?;
    let files::Made { written, kept, bytes } = made;
    if json {
        println!("{}", serde_json::json!({ "root": root, "directories": directories, "made": made }));
    } else {
        let megabytes = bytes as f64 / 1e6;
        println!("{}: {directories} directories, {megabytes:.1} MB", root.display());
        println!("{written} files written, {kept} there already");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_shares_are_read() {
        for (text, rate) in [("400k", 400e3), ("2M", 2e6), ("1.5G", 1.5e9), ("64000", 64e3), ("none", f64::INFINITY)] {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        for text in ["", "k", "999", "-4k", "4m", "nan", "400 k", "inf"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
        for (text, share) in [("30%", 0.3), ("0.3", 0.3), ("0", 0.0), ("100%", 1.0)] {
            assert_eq!(parse_share(text), Ok(share), "{text}");
        }
        for text in ["30", "-1%", "101%", "%", "nan"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }
}
