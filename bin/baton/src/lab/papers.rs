//! `baton lab`: the papers that Baton began with, repeated.

use crate::numbers::between;
use anyhow::{Context, Result, bail};
use baton_bed::temporary::ResultFile;
use baton_lab::equations::{self, Load};
use baton_lab::papers::report::Report;
use baton_lab::papers::sabotage::Sabotage;
use baton_lab::papers::{self, CHANGES, DOCUMENTS, Document, Run, page, pictures, text};
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// Examples of `baton lab`.
pub const EXAMPLES: &str = "Examples:
  baton lab all                          # every document's models
  baton lab rmpp --output rmpp.html      # one document, with its figures as plots
  baton lab all --pictures figures       # a page for each document, and its figures as SVG
  baton lab all --json | jq '.bars[] | select(.holds | not)'";

#[derive(Subcommand)]
pub enum Lab {
    /// Number and cost of a card's interrupts: the three equations of "Mainstream NUMA and the TCP/IP stack", with the
    /// paper's numbers, this machine's, and yours.
    #[command(
        after_help = "Examples:\n  baton lab equations\n  baton lab equations --paper-only --packet 1500 --per-interrupt 16 --path 20000"
    )]
    Equations {
        /// Bytes per second of your own load.
        #[arg(long, default_value_t = 1e9, value_parser = between(1.0, 1e15))]
        throughput: f64,
        /// Bytes of a packet.
        #[arg(long, default_value_t = 1000.0, value_parser = between(1.0, 1e9))]
        packet: f64,
        /// Share of packets that are received.
        #[arg(long, default_value_t = 0.5, value_parser = between(0.001, 1.0))]
        received: f64,
        /// Packets for each interrupt.
        #[arg(long, default_value_t = 1.0, value_parser = between(0.001, 1e9))]
        per_interrupt: f64,
        /// Cycles of an interrupt, both halves together. With this, your own load is calculated.
        #[arg(long, value_parser = between(0.0, 1e15))]
        path: Option<f64>,
        /// Do not measure this machine.
        #[arg(long)]
        paper_only: bool,
        /// Print one JSON array.
        #[arg(long)]
        json: bool,
    },
    /// TCP connections on the NIC ("TCP offload through connection handoff").
    #[command(after_help = "Examples:\n  baton lab handoff\n  baton lab handoff --callgrind --output handoff.html")]
    Handoff(How),
    /// RMPP, message passing offloaded in steps ("Experience in offloading protocol processing to a programmable NIC").
    #[command(after_help = "Examples:\n  baton lab rmpp\n  baton lab rmpp --output rmpp.html")]
    Rmpp(How),
    /// What an interrupt costs a host ("Mainstream NUMA and the TCP/IP stack").
    #[command(after_help = "Examples:\n  baton lab numa\n  baton lab numa --output numa.html")]
    Numa(How),
    /// TCP on a card with a slow processor ("An evaluation of an attempt at offloading TCP/IP protocol processing onto
    /// an i960RN-based iNIC").
    #[command(after_help = "Examples:\n  baton lab inic\n  baton lab inic --output inic.html")]
    Inic(How),
    /// Large receive on a card of many cores ("Implementation of TCP large receive offload on a multi-core NPU
    /// platform").
    #[command(after_help = "Examples:\n  baton lab lro\n  baton lab lro --output lro.html")]
    Lro(How),
    /// Every document.
    #[command(after_help = "Examples:\n  baton lab all\n  baton lab all --output lab.html")]
    All(How),
    /// Checks that models which are made wrong on purpose change what is reported.
    #[command(after_help = "Example:\n  baton lab sabotage")]
    Sabotage,
}

/// How a document is repeated, and what is printed.
#[derive(Args)]
pub struct How {
    /// Models only, in virtual time: the same on every machine. The default.
    #[arg(long, conflicts_with = "live")]
    quick: bool,
    /// Live runs beside the models, one at a time. They need root, or become it in a namespace, and nothing else that
    /// takes processors.
    #[arg(long)]
    live: bool,
    /// Count our own code on the paper's caches as well (handoff). Needs valgrind, and some minutes.
    #[arg(long)]
    callgrind: bool,
    /// Shorter runs, whose bars mean nothing.
    #[arg(long, hide = true)]
    short: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Write figures, tables and numbers to this HTML page.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write a page in Markdown for each document, and its figures as SVG, into this folder.
    #[arg(long, value_name = "DIR")]
    pictures: Option<PathBuf>,
    /// Make the models wrong in this way.
    #[arg(long, hide = true, value_name = "NAME")]
    sabotage: Option<String>,
}

/// Runs one of them. False if a bar that counts does not hold.
pub fn run(command: &Lab) -> Result<bool> {
    match command {
        Lab::Equations { .. } => run_equations(command),
        Lab::Handoff(how) => one("handoff", how),
        Lab::Rmpp(how) => one("rmpp", how),
        Lab::Numa(how) => one("numa", how),
        Lab::Inic(how) => one("inic", how),
        Lab::Lro(how) => one("lro", how),
        Lab::All(how) => all(how),
        Lab::Sabotage => sabotage(),
    }
}

/// The sabotage of this name, if a document knows it.
fn sabotage_of(document: &Document, how: &How) -> Result<Option<Sabotage>> {
    let Some(name) = &how.sabotage else { return Ok(None) };
    let known = document.sabotages.iter().find(|sabotage| sabotage.words().0 == name);
    match known {
        Some(sabotage) => Ok(Some(*sabotage)),
        None => bail!(
            "the models of {} know no sabotage {name}; they know {}",
            document.word,
            document.sabotages.iter().map(|sabotage| sabotage.words().0).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// A document's report.
fn report(document: &Document, how: &How) -> Result<Report> {
    let run = Run { sabotage: sabotage_of(document, how)?, short: how.short, callgrind: how.callgrind };
    if how.live {
        document.check_live(run)?;
        // Models may have threads, with which this is not possible any more.
        baton_linux::namespace::become_root_if_needed()?;
    }
    let mut report = (document.quick)(run).with_context(|| format!("the models of {}", document.word))?;
    if how.live {
        document.add_live(&mut report, run, &mut |line| eprintln!("{line}"))?;
    }
    Ok(report)
}

/// Opens the file of the page, and makes the folder of the pictures, if they are wanted: a run takes minutes.
fn open_page(how: &How) -> Result<Option<ResultFile>> {
    if let Some(folder) = &how.pictures {
        std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    how.output.as_deref().map(ResultFile::open).transpose()
}

/// Writes the page and the pictures, if they are wanted.
fn write_pages(how: &How, page: Option<ResultFile>, documents: &[Document], reports: &[Report]) -> Result<()> {
    if let Some(folder) = &how.pictures {
        documents.iter().zip(reports).try_for_each(|(document, report)| pictures::write(folder, document, report))?;
    }
    page.map_or(Ok(()), |file| file.write(page::html(reports)?.as_bytes()))
}

fn one(word: &str, how: &How) -> Result<bool> {
    let document = DOCUMENTS.iter().find(|document| document.word == word).context("the document has a line in DOCUMENTS")?;
    let page = open_page(how)?;
    let report = report(document, how)?;
    write_pages(how, page, std::slice::from_ref(document), std::slice::from_ref(&report))?;
    if how.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print!("{}", text::table(&report));
    }
    Ok(report.holds())
}

fn knows(document: &Document, name: &str) -> bool {
    document.sabotages.iter().any(|sabotage| sabotage.words().0 == name)
}

/// `baton lab all`: one document after the other.
fn all(how: &How) -> Result<bool> {
    if let Some(name) = &how.sabotage
        && !DOCUMENTS.iter().any(|document| knows(document, name))
    {
        bail!("no document's models know a sabotage {name}");
    }
    let page = open_page(how)?;
    if how.live {
        let run = Run { short: how.short, ..Run::default() };
        DOCUMENTS.iter().try_for_each(|document| document.check_live(run))?;
    }
    let mut reports = Vec::new();
    for document in DOCUMENTS {
        let sabotage = how.sabotage.clone().filter(|name| knows(document, name));
        reports.push(report(document, &How { output: None, pictures: None, sabotage, ..*how })?);
    }
    write_pages(how, page, DOCUMENTS, &reports)?;
    let bars: Vec<_> = reports.iter().flat_map(|report| &report.bars).collect();
    if how.json {
        println!("{}", serde_json::json!({ "documents": reports, "bars": bars }));
    } else {
        reports.iter().for_each(|report| println!("{}\n", text::table(report)));
        let counted: Vec<_> = bars.iter().filter(|judged| judged.counted).collect();
        let held = counted.iter().filter(|judged| judged.bar.holds).count();
        println!("{held} of {} bars that count hold; {} do not count.", counted.len(), bars.len() - counted.len());
    }
    Ok(reports.iter().all(Report::holds))
}

/// `baton lab sabotage`. False if a sabotage changes too little.
fn sabotage() -> Result<bool> {
    let mut all_show = true;
    for document in DOCUMENTS {
        let whole = (document.quick)(Run::default())?;
        for change in papers::sabotage(document, &whole, false)? {
            let (name, about) = change.sabotage.words();
            println!("{} {name} ({about}): {} figures and tables change", change.word, change.changed.len());
            change.changed.iter().for_each(|title| println!("    {title}"));
            all_show &= change.changed.len() >= CHANGES;
        }
    }
    Ok(all_show)
}

fn run_equations(command: &Lab) -> Result<bool> {
    let Lab::Equations { throughput, packet, received, per_interrupt, path, paper_only, json } = command else { return Ok(true) };
    let mut loads = equations::of_the_paper().to_vec();
    if let Some(path) = path {
        let (throughput, packet, received, per_interrupt) = (*throughput, *packet, *received, *per_interrupt);
        let name = "yours".into();
        loads.push(Load { name, throughput, packet, received, per_interrupt, path: *path, unit: "cycles" });
    }
    if !paper_only {
        baton_linux::namespace::become_root_if_needed()?;
        loads.extend(equations::of_this_machine()?);
    }
    if *json {
        let list: Vec<serde_json::Value> = loads
            .iter()
            .map(|load| serde_json::json!({ "load": load, "interrupts": load.interrupts(), "cost": load.cost() }))
            .collect();
        println!("{}", serde_json::Value::from(list));
    } else {
        loads.iter().for_each(|load| println!("{}", equations::line(load)));
    }
    Ok(true)
}
