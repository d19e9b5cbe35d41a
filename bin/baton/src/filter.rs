//! `baton nic filter`: the rules of a NIC that has an owner.

use anyhow::{Context, Result, bail};
use baton_control::owner::MIN_KEY;
use baton_filter::{Rule, parse, parse_all};
use baton_linux::control::Channel;
use baton_protocol::filter::{FilterAsk, FilterReply, FilterRequest, ListedRule, RULES_PER_MESSAGE, RuleCounters};
use clap::{Args, Subcommand};
use serde_json::json;
use std::path::{Path, PathBuf};

pub const EXAMPLES: &str = "Examples:
  baton nic filter add in tcp dport 22 ip saddr 10.0.0.0/8 limit 10mbit burst 64kb
  baton nic filter add --before 3 out udp dport 53 ip6 daddr fd00::/8 accept
  baton nic filter list --json
  baton nic filter delete 7
  baton nic filter load rules.txt        (a rule on each line; replaces all others)
  baton nic filter flush

A rule is: [in|out] [ip|ip6|arp|ether TYPE] [tcp|udp|icmp|icmpv6|proto N] [saddr|daddr PREFIX] [sport|dport PORT[-PORT]]
[state new|established] and accept, drop, reject, count, or limit RATE [burst SIZE]. The first rule that matches decides; a frame that none
matches passes. The NIC must have been started with a filter: see `baton hosts --help` and docs/operate/filter.md.";

#[derive(Args)]
pub struct FilterArguments {
    #[command(subcommand)]
    command: FilterCommand,
}

#[derive(Args)]
struct OwnerArguments {
    /// Path of the socket of the NIC's owner. Without it: what BATON_FILTER_SOCKET says.
    #[arg(long, env = "BATON_FILTER_SOCKET", value_name = "PATH")]
    socket: PathBuf,
    /// File with the key with which the NIC was started. Without it: what BATON_FILTER_KEY says.
    #[arg(long, env = "BATON_FILTER_KEY", value_name = "FILE")]
    key: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum FilterCommand {
    /// Adds a rule, which applies from the next frame on.
    #[command(
        after_help = "Examples:\n  baton nic filter add in tcp dport 22 drop\n  baton nic filter add --before 3 out udp dport 53 ip6 daddr fd00::/8 accept"
    )]
    Add {
        /// Put it before the rule with this number, instead of at the end.
        #[arg(long, value_name = "NUMBER")]
        before: Option<u32>,
        /// The rule.
        #[arg(required = true, value_name = "RULE")]
        rule: Vec<String>,
        #[command(flatten)]
        owner: OwnerArguments,
    },
    /// Lists the rules, with their numbers and counters.
    #[command(after_help = "Examples:\n  baton nic filter list\n  baton nic filter list --json")]
    List {
        #[command(flatten)]
        owner: OwnerArguments,
    },
    /// Deletes rules.
    #[command(after_help = "Examples:\n  baton nic filter delete 7\n  baton nic filter delete 3 4 5")]
    Delete {
        /// Their numbers, as `list` shows them.
        #[arg(required = true, value_name = "NUMBER")]
        numbers: Vec<u32>,
        #[command(flatten)]
        owner: OwnerArguments,
    },
    /// Replaces all rules by those of a file, at once.
    #[command(after_help = "Example:\n  baton nic filter load rules.txt")]
    Load {
        /// The file: a rule on each line, comments after `#`.
        #[arg(value_name = "FILE")]
        file: PathBuf,
        #[command(flatten)]
        owner: OwnerArguments,
    },
    /// Deletes all rules: every frame passes.
    #[command(after_help = "Example:\n  baton nic filter flush")]
    Flush {
        #[command(flatten)]
        owner: OwnerArguments,
    },
}

/// A connection to the owner.
struct Owner {
    channel: Channel,
    key: Vec<u8>,
}

impl OwnerArguments {
    fn connect(&self) -> Result<Owner> {
        let key = read_key(&self.key)?;
        let channel = Channel::connect(&self.socket).with_context(|| {
            format!("no owner of a NIC listens at {} (a NIC has one if it was started with --filter-key)", self.socket.display())
        })?;
        Ok(Owner { channel, key })
    }
}

/// Reads a key.
///
/// # Errors
/// If there is none, or it is too short to be secret.
pub fn read_key(path: &Path) -> Result<Vec<u8>> {
    let key = std::fs::read(path).with_context(|| format!("reading the key {}", path.display()))?;
    if key.len() < MIN_KEY || key.len() > 4096 {
        let path = path.display();
        bail!(
            "the key {path} must have {MIN_KEY} to 4096 bytes: make one with `head -c 32 /dev/urandom > {path}; chmod 600 {path}`"
        );
    }
    Ok(key)
}

/// Reads a file of rules.
///
/// # Errors
/// Where a rule does not parse, contradicts itself or another.
pub fn read_rules(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("reading the rules {}", path.display()))?;
    let rules = parse_all(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    Ok(rules.iter().map(Rule::to_string).collect())
}

impl Owner {
    fn ask(&self, ask: FilterAsk) -> Result<FilterReply> {
        self.channel.send(&FilterRequest { key: self.key.clone(), ask }, &[]).context("the NIC's owner has ended")?;
        match self.channel.receive::<FilterReply>().context("the NIC's owner has ended")?.0 {
            FilterReply::Failed(reason) => bail!("{reason}"),
            reply => Ok(reply),
        }
    }

    fn load(&self, rules: &[String]) -> Result<()> {
        let mut parts = rules.chunks(RULES_PER_MESSAGE).peekable();
        while let Some(part) = parts.next() {
            self.ask(FilterAsk::Load { rules: part.to_vec(), last: parts.peek().is_none() })?;
        }
        if rules.is_empty() {
            self.ask(FilterAsk::Load { rules: Vec::new(), last: true })?;
        }
        Ok(())
    }

    /// All rules, and what was counted for frames that no rule decided about, and that could not be judged.
    fn list(&self) -> Result<(Vec<ListedRule>, [RuleCounters; 2])> {
        let mut all = Vec::new();
        loop {
            let FilterReply::Rules { rules, total, unmatched, unreadable } = self.ask(FilterAsk::List(all.len()))? else {
                bail!("unexpected answer from the NIC's owner (are both of the same version?)")
            };
            let done = rules.is_empty();
            all.extend(rules);
            if done || all.len() >= total {
                return Ok((all, [unmatched, unreadable]));
            }
        }
    }
}

pub fn run(arguments: &FilterArguments) -> Result<bool> {
    match &arguments.command {
        FilterCommand::Add { before, rule, owner } => {
            // Parsed here, too, so that the error shows the rule as it was typed.
            let rule = parse(&rule.join(" "))?.to_string();
            let FilterReply::Added(number) = owner.connect()?.ask(FilterAsk::Add { rule, before: *before })? else {
                bail!("unexpected answer from the NIC's owner (are both of the same version?)")
            };
            done(owner, json!({ "number": number }), &format!("rule {number}"));
        }
        FilterCommand::List { owner } => list(owner)?,
        FilterCommand::Delete { numbers, owner } => {
            let connection = owner.connect()?;
            for number in numbers {
                connection.ask(FilterAsk::Delete(*number))?;
            }
            done(owner, json!({ "deleted": numbers }), "");
        }
        FilterCommand::Load { file, owner } => {
            let rules = read_rules(file)?;
            owner.connect()?.load(&rules)?;
            done(owner, json!({ "rules": rules.len() }), &format!("{} rules", rules.len()));
        }
        FilterCommand::Flush { owner } => {
            owner.connect()?.load(&[])?;
            done(owner, json!({ "rules": 0 }), "");
        }
    }
    Ok(true)
}

fn done(arguments: &OwnerArguments, value: serde_json::Value, text: &str) {
    if arguments.json {
        println!("{value}");
    } else if !text.is_empty() {
        println!("{text}");
    }
}

fn list(arguments: &OwnerArguments) -> Result<()> {
    let (rules, [unmatched, unreadable]) = arguments.connect()?.list()?;
    if arguments.json {
        let counted =
            |RuleCounters { packets, bytes, over }: RuleCounters| json!({ "packets": packets, "bytes": bytes, "over": over });
        let rules: Vec<serde_json::Value> = rules
            .iter()
            .map(|ListedRule { number, rule, counters: RuleCounters { packets, bytes, over } }| {
                json!({ "number": number, "rule": rule, "packets": packets, "bytes": bytes, "over": over })
            })
            .collect();
        println!("{}", json!({ "rules": rules, "unmatched": counted(unmatched), "unreadable": counted(unreadable) }));
        return Ok(());
    }
    println!("{:>6} {:>12} {:>15} {:>10}  rule", "number", "packets", "bytes", "over limit");
    for ListedRule { number, rule, counters: RuleCounters { packets, bytes, over } } in &rules {
        println!("{number:>6} {packets:>12} {bytes:>15} {over:>10}  {rule}");
    }
    for (counted, what) in
        [(unmatched, "(no rule matched: passed)"), (unreadable, "(damaged, or a fragment without its first: dropped)")]
    {
        println!("{:>6} {:>12} {:>15} {:>10}  {what}", "", counted.packets, counted.bytes, "");
    }
    Ok(())
}
