//! `baton top`: connections by what they carry, NICs and programs, on a terminal.

mod app;
pub mod panels;
mod screen;
#[cfg(test)]
mod snapshots;

use crate::list::expression::{self, Expression};
use crate::list::looks::Watch;
use crate::list::row::{Key, Sort};
use crate::tools::{SocketArgument, ask_to_move};
use anyhow::{Context, Result, anyhow, bail};
use app::{Action, App};
use baton_client::tool::Tool;
use baton_linux::events::{Poller, Trigger, monotonic_micros};
use baton_linux::process;
use baton_linux::terminal::plain;
use baton_protocol::program::Place;
use clap::Args;
use panels::Meter;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

const EXAMPLES: &str = "Examples:
  baton top
  baton top --sort rtt
  baton top 'place = kernel and sport = :443'

It needs a terminal; without one `baton ls --watch` shows the same connections. With NO_COLOR set it uses no colours.";

/// The end of `baton top --help`.
pub fn help() -> String {
    format!("{EXAMPLES}\n\n{}", expression::HELP)
}

/// The arguments of `baton top`.
#[derive(Args)]
pub struct TopArguments {
    #[command(flatten)]
    socket: SocketArgument,
    /// By what the list is sorted at first.
    #[arg(long, value_name = "KEY", default_value = "rate")]
    sort: Sort,
    /// Only connections that this filter matches, at first.
    #[arg(value_name = "FILTER", trailing_var_arg = true)]
    filter: Vec<String>,
}

/// Time between two looks, microseconds.
const PERIOD: u64 = 1_000_000;

/// An event for the main loop.
enum Happened {
    /// At the terminal.
    Input(Event),
    /// A signal asks this process to end, or the terminal is gone.
    End,
    /// A move is over, or did not happen.
    Moved(String),
}

/// Puts the terminal back, however this ends.
struct Restores;

impl Drop for Restores {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// `baton top`.
pub fn top(arguments: TopArguments) -> Result<()> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        bail!("`baton top` needs a terminal as its input and output; without one: `baton ls --watch`");
    }
    let color = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut app = App::new(color, arguments.sort);
    let text = arguments.filter.join(" ");
    if !text.trim().is_empty() {
        let filter: Expression = text.parse().map_err(|why| anyhow!("the filter `{text}`: {why} (`baton top --help`)"))?;
        (app.filter, app.filter_text) = (Some(filter), text);
    }
    let (sender, happened) = mpsc::channel();
    // Before any thread is there: each has the signals blocked.
    end_on_signals(sender.clone()).context("waiting for signals")?;
    let restores = Restores;
    let mut terminal = ratatui::try_init().context("setting up the terminal")?;
    read_input(sender.clone());
    let mut top = Top { app, watch: Watch::new(arguments.socket), meter: Meter::default(), sender };
    let ended = top.run(&mut terminal, &happened);
    drop(restores);
    ended
}

/// A thread says when a signal asks this process to end.
fn end_on_signals(sender: Sender<Happened>) -> Result<()> {
    let signals = process::signal_descriptor(&process::ENDING)?;
    std::thread::spawn(move || {
        let (mut tokens, poller) = (Vec::new(), Poller::new());
        if let Ok(poller) = poller
            && poller.add(signals.as_fd(), 0, Trigger::Readable).is_ok()
            && poller.wait(None, &mut tokens).is_ok()
        {
            let _ = sender.send(Happened::End);
        }
    });
    Ok(())
}

/// Starts a thread that reads the keys.
fn read_input(sender: Sender<Happened>) {
    std::thread::spawn(move || {
        loop {
            let happened = event::read().map_or(Happened::End, Happened::Input);
            let ends = matches!(happened, Happened::End);
            if sender.send(happened).is_err() || ends {
                return;
            }
        }
    });
}

struct Top {
    app: App,
    watch: Watch,
    meter: Meter,
    sender: Sender<Happened>,
}

impl Top {
    fn run(&mut self, terminal: &mut DefaultTerminal, happened: &mpsc::Receiver<Happened>) -> Result<()> {
        let mut next = 0;
        loop {
            let length = screen::page(terminal.size()?.height);
            if monotonic_micros() >= next {
                self.refresh();
                self.arrange(length);
                next = monotonic_micros() + PERIOD;
            }
            self.fill(length);
            terminal.draw(|frame| screen::draw(frame, &self.app))?;
            let left = Duration::from_micros(next.saturating_sub(monotonic_micros()));
            let action = match happened.recv_timeout(left) {
                Ok(Happened::Input(Event::Key(key))) => self.app.on_key(key, length),
                Ok(Happened::Input(_)) => Action::Draw,
                Ok(Happened::Moved(message)) => {
                    self.app.message = Some(message);
                    Action::Refresh
                }
                Ok(Happened::End) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => continue,
            };
            match action {
                Action::Quit => return Ok(()),
                Action::Draw => {}
                Action::Arrange => self.arrange(length),
                Action::Refresh => next = 0,
                Action::Move(key) => self.relocate(key),
            }
        }
    }

    /// Looks at all agents.
    fn refresh(&mut self) {
        self.watch.refresh();
        let batons: Vec<_> = self.watch.batons().filter_map(|(number, statistics)| Some((number, statistics?))).collect();
        self.app.panels = self.meter.note(monotonic_micros(), &batons, self.watch.rows());
        self.app.troubles = self.watch.troubles().iter().map(|trouble| plain(trouble)).collect();
    }

    fn arrange(&mut self, length: usize) {
        self.app.arrange(self.watch.rows(), length);
    }

    /// Gets the details of the connections on the screen.
    fn fill(&mut self, length: usize) {
        let keys: Vec<Key> = self.app.visible(length).to_vec();
        self.watch.describe(&keys);
        self.app.page = keys.iter().filter_map(|key| self.watch.row(*key).cloned()).collect();
    }

    /// Has a thread move a connection to the other side: the agent answers when it is there.
    fn relocate(&mut self, key: Key) {
        let Some((row, socket)) = self.watch.row(key).zip(self.watch.socket(key)) else { return };
        let to = if row.info.place == Place::Nic { Place::Kernel } else { Place::Nic };
        let (name, there) = if to == Place::Nic { ("the NIC", "on the NIC") } else { ("the kernel", "in the kernel") };
        let what = format!("{} -> {}", row.info.local, row.info.peer);
        self.app.message = Some(format!("{what} is on its way to {name}"));
        let (socket, sender) = (socket.to_owned(), self.sender.clone());
        std::thread::spawn(move || {
            let (_, session, connection) = key;
            let moved = Tool::connect(&socket).and_then(|mut tool| ask_to_move(&mut tool, (session, connection), to, None));
            let message = match moved {
                Ok(None) => format!("{what} is {there} now"),
                Ok(Some(reason)) => format!("{what} stayed: {reason}"),
                Err(error) => format!("{what} stayed: {error:#}"),
            };
            let _ = sender.send(Happened::Moved(plain(&message)));
        });
    }
}
