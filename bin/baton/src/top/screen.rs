//! Draws what `baton top` shows. Without I/O: the same state gives the same screen.

use super::app::{App, Mode};
use super::panels::{Program, Worker};
use crate::list::columns::{Column, bytes, duration, shortened, table};
use crate::list::expression;
use crate::list::lines::{place, rate};
use crate::list::row::{Key, Row};
use baton_handoff::examine::state_name;
use baton_protocol::program::Place;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};

/// The smallest screen that shows anything.
const SMALLEST: (u16, u16) = (40, 12);

/// Lines above the list, between the panels and the list, and below it.
const HEADING: u16 = 1;
const TABLE_HEADING: u16 = 2;
const BELOW: u16 = 4;

const KEYS: &str = "q quit  ? help  / filter  s sort  m move to kernel or NIC  arrows select";

const HELP: &str = "q, Ctrl-C       quit
? h             this page; any key closes it
arrows, j k     select a connection; PageUp, PageDown, Home, End
m               move the selected one to the NIC, or back to the kernel
s, S            sort by the next, the previous key
/               filter; Enter applies it, an empty one or Esc ends it
space           look again now

SENT/s, RECV/s  bytes that the peer has acknowledged, and received, a second
RETR            segments retransmitted in the kernel
BUSY, BELLS/s   share of a processor; doorbells rung for programs
";

/// Lines of the panels.
fn panel_height(height: u16) -> u16 {
    if height >= 36 { 9 } else { 5 }
}

/// Connections on a screen of this height.
pub fn page(height: u16) -> usize {
    usize::from(height.saturating_sub(HEADING + panel_height(height) + TABLE_HEADING + BELOW)).max(1)
}

/// Colours and attributes.
struct Theme {
    color: bool,
}

impl Theme {
    fn of(&self, color: Color) -> Style {
        if self.color { Style::new().fg(color) } else { Style::new() }
    }

    fn heading(&self) -> Style {
        self.of(Color::Cyan).add_modifier(Modifier::BOLD)
    }

    fn trouble(&self) -> Style {
        self.of(Color::Red).add_modifier(Modifier::BOLD)
    }
}

/// Draws the state.
pub fn draw(frame: &mut Frame<'_>, app: &App) {
    let area = frame.area();
    let theme = Theme { color: app.color };
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        frame.render_widget(Paragraph::new("the terminal is too small; 80x24 is enough"), area);
        return;
    }
    let height = panel_height(area.height);
    let at = |y: u16, height: u16| Rect { x: area.x, y: area.y + y, width: area.width, height };
    let width = usize::from(area.width);
    frame.render_widget(Paragraph::new(Line::styled(shortened(&heading(app), width), theme.heading())), at(0, HEADING));
    draw_panels(frame, app, &theme, at(HEADING, height));
    let length = page(area.height) as u16;
    draw_list(frame, app, &theme, at(HEADING + height + 1, length + 1));
    draw_below(frame, app, &theme, at(area.height - BELOW, BELOW));
    if app.mode == Mode::Help {
        draw_help(frame, area);
    }
}

fn heading(app: &App) -> String {
    let [nic, kernel] = app.panels.connections;
    let several = |count: usize, one: &str| if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") };
    let mut text = format!(
        "baton top  {}  {}: {nic} nic, {kernel} kernel  {} moves/s  by {}",
        several(app.panels.batons, "Baton"),
        several(nic + kernel, "connection"),
        bytes(app.panels.moves),
        app.sort.name(),
    );
    if !app.filter_text.is_empty() {
        text = format!("{text}  {} match: {}", app.order.len(), app.filter_text);
    }
    text
}

/// Workers at the left, programs at the right.
fn draw_panels(frame: &mut Frame<'_>, app: &App, theme: &Theme, area: Rect) {
    let left = Rect { width: area.width / 2 - 1, ..area };
    let right = Rect { x: area.x + area.width / 2 + 1, width: area.width - area.width / 2 - 1, ..area };
    let workers = app.panels.workers.iter().map(worker_cells).collect();
    let programs = app.panels.programs.iter().map(program_cells).collect();
    let number = Column::number;
    let columns = [Column::cut("NIC", 5), number("BUSY"), number("CONNS"), number("FRAMES/s"), number("BELLS/s")];
    draw_panel(frame, theme, left, &columns, workers);
    let columns = [Column::cut("PROGRAM", 6), number("NIC"), number("KERNEL"), number("SENT/s"), number("RECV/s")];
    draw_panel(frame, theme, right, &columns, programs);
}

fn worker_cells(worker: &Worker) -> Vec<String> {
    let busy = format!("{:.0}%", worker.busy * 100.0);
    vec![worker.name.clone(), busy, worker.connections.to_string(), bytes(worker.frames), bytes(worker.doorbells)]
}

fn program_cells(program: &Program) -> Vec<String> {
    let [nic, kernel] = program.connections;
    vec![program.name.clone(), nic.to_string(), kernel.to_string(), bytes(program.rate.sent), bytes(program.rate.received)]
}

/// A table that says how many lines it has no room for.
fn draw_panel(frame: &mut Frame<'_>, theme: &Theme, area: Rect, columns: &[Column], mut cells: Vec<Vec<String>>) {
    let room = usize::from(area.height) - 1;
    let more = cells.len().saturating_sub(room);
    if more > 0 {
        cells.truncate(room - 1);
    }
    let mut lines: Vec<Line<'_>> = table(columns, &cells, Some(usize::from(area.width))).into_iter().map(Line::from).collect();
    lines[0] = lines[0].clone().style(theme.heading());
    if more > 0 {
        lines.push(Line::from(format!("… {} more", more + 1)));
    }
    frame.render_widget(Paragraph::new(lines), area);
}

fn draw_list(frame: &mut Frame<'_>, app: &App, theme: &Theme, area: Rect) {
    let (text, number) = (Column::text, Column::number);
    let columns = [
        text("PLACE"),
        number("SENT/s"),
        number("RECV/s"),
        number("RTT"),
        number("RETR"),
        Column::cut("LOCAL", 15),
        Column::cut("PEER", 15),
        Column::optional("PROGRAM", 10),
        Column::optional("WHY", 10),
    ];
    let numbers = app.panels.numbers;
    let cells: Vec<Vec<String>> = app.page.iter().map(|row| connection_cells(row, numbers)).collect();
    let mut lines = table(&columns, &cells, Some(usize::from(area.width))).into_iter();
    let mut shown = vec![Line::styled(lines.next().unwrap_or_default(), theme.heading())];
    for (line, row) in lines.zip(&app.page) {
        let style = if row.info.place == Place::Nic { theme.of(Color::Green) } else { Style::new() };
        if app.selected == Some(row.key()) {
            let line = format!("{line:<width$}", width = usize::from(area.width));
            shown.push(Line::styled(line, style.add_modifier(Modifier::REVERSED)));
        } else {
            shown.push(Line::styled(line, style));
        }
    }
    if app.page.is_empty() {
        shown.push(Line::from(nothing(app)));
    }
    frame.render_widget(Paragraph::new(shown), area);
}

/// Why the list is empty.
fn nothing(app: &App) -> &'static str {
    if app.panels.batons == 0 {
        "no Baton answers here; `baton run -- PROGRAM` or `baton up` starts one"
    } else if app.filter.is_some() && app.panels.connections != [0; 2] {
        "no connection matches the filter; Esc ends it"
    } else {
        "no connections"
    }
}

fn connection_cells(row: &Row, numbers: bool) -> Vec<String> {
    let detail = &row.info.detail;
    let known = |value: u32, text: String| if value == 0 { "-".into() } else { text };
    vec![
        place(row, numbers),
        rate(row.rate, |rate| rate.sent),
        rate(row.rate, |rate| rate.received),
        known(detail.srtt, duration(u64::from(detail.srtt))),
        known(detail.retransmitted, detail.retransmitted.to_string()),
        row.info.local.clone(),
        row.info.peer.clone(),
        format!("{}/{}", row.name, row.info.process),
        row.info.reason.clone(),
    ]
}

/// Everything about the selected connection, and the keys, or what is the matter.
fn draw_below(frame: &mut Frame<'_>, app: &App, theme: &Theme, area: Rect) {
    let width = usize::from(area.width);
    let about = Rect { height: area.height - 1, ..area };
    frame.render_widget(Paragraph::new(selected(app, app.selected)).wrap(Wrap { trim: true }), about);
    let line = match &app.mode {
        Mode::Filter { text, error: None } => {
            Line::from(vec![Span::styled("filter: ", theme.heading()), Span::raw(tail(text, width))])
        }
        Mode::Filter { error: Some(why), .. } => Line::styled(shortened(why, width), theme.trouble()),
        _ => match (trouble(app), &app.message) {
            (Some(trouble), _) => Line::styled(shortened(&trouble, width), theme.trouble()),
            (None, Some(message)) => Line::from(shortened(message, width)),
            (None, None) => Line::from(shortened(KEYS, width)),
        },
    };
    frame.render_widget(Paragraph::new(line), Rect { y: area.y + area.height - 1, height: 1, ..area });
}

/// What does not answer, in one line.
fn trouble(app: &App) -> Option<String> {
    let first = app.troubles.first()?;
    let more = app.troubles.len() - 1;
    Some(if more > 0 { format!("(and {more} more) {first}") } else { first.clone() })
}

/// The end of what is typed, with a cursor.
fn tail(text: &str, width: usize) -> String {
    let room = width.saturating_sub(10);
    let skipped = text.chars().count().saturating_sub(room);
    text.chars().skip(skipped).chain(['_']).collect()
}

fn selected(app: &App, key: Option<Key>) -> String {
    let Some(row) = app.page.iter().find(|row| Some(row.key()) == key) else { return String::new() };
    let (info, d) = (&row.info, &row.info.detail);
    let carried = |count: Option<u64>| count.map_or_else(|| "?".into(), |count| bytes(count as f64));
    let why = if info.reason.is_empty() { String::new() } else { format!(": {}", info.reason) };
    let state = format!(
        "{}.{} {} cwnd {} in flight {} unsent {} unread {} sent {} received {}",
        info.session,
        info.connection,
        state_name(d.state),
        d.cwnd,
        d.in_flight,
        d.unsent,
        d.unread,
        carried(d.sent),
        carried(d.received),
    );
    let moves = if info.moves == 1 { "1 move".into() } else { format!("{} moves", info.moves) };
    let (side, since) = (place(row, app.panels.numbers), duration(info.for_us));
    format!("{state}\n{}/{} {moves}, {side} for {since}{why}", row.name, info.process)
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let text = format!("{HELP}\n{}", expression::HELP);
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: false }).block(Block::bordered().title("baton top")), area);
}
