//! Screens, as they are drawn.

use super::app::{App, Mode};
use super::panels::{Panels, Program, Worker};
use super::screen;
use crate::list::row::tests::row;
use crate::list::row::{Rate, Row, Sort};
use baton_protocol::program::Place;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent};
use ratatui::style::Color;

/// A host with 40 connections, every third in the kernel.
fn busy() -> App {
    let rows: Vec<Row> = (0..40u32)
        .map(|number| {
            let mut row = row(&format!("10.77.0.1:{}", 8000 + number % 2), &format!("10.77.0.2:{}", 40_000 + number));
            row.info.connection = number;
            row.note(0, Some((0, 0)));
            row.note(1_000_000, Some((u64::from(40 - number) * 1_234_567, u64::from(number) * 1000)));
            (row.info.detail.sent, row.info.detail.received) = (Some(5_000_000_000), Some(1234));
            if number % 3 > 0 {
                (row.info.place, row.info.nic) = (Place::Nic, Some(0));
            } else {
                row.info.reason = "the program has set an option that the NIC cannot keep (TCP_INQ)".into();
                row.info.detail.retransmitted = number;
            }
            row
        })
        .collect();
    let mut app = App::new(true, Sort::Rate);
    let worker = |at: usize| Worker {
        name: format!("nic0/{at}"),
        busy: 0.43 / (1 + at) as f64,
        connections: 13,
        frames: 123_456.0,
        doorbells: 17.0,
    };
    let program =
        |name: &str, nic| Program { name: name.into(), connections: [nic, 7], rate: Rate { sent: 9.9e8, received: 4e4 } };
    app.panels = Panels {
        batons: 1,
        connections: [26, 14],
        moves: 12.3,
        numbers: false,
        workers: (0..2).map(worker).collect(),
        programs: ["nginx", "a-program-with-a-long-name", "redis", "node", "java", "sshd"].map(|name| program(name, 20)).to_vec(),
    };
    app.arrange(rows.iter(), 100);
    app.page = app.order.iter().map(|key| rows.iter().find(|row| row.key() == *key).cloned().expect("it is there")).collect();
    app
}

fn screen(app: &App, width: u16, height: u16) -> (String, Terminal<TestBackend>) {
    let mut app = app.clone();
    app.page.truncate(screen::page(height));
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("memory");
    terminal.draw(|frame| screen::draw(frame, &app)).expect("memory");
    let cells = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| cells[(x, y)].symbol()).collect::<String>().trim_end().to_owned() + "\n";
    ((0..height).map(line).collect(), terminal)
}

fn check(name: &str, drawn: &str, expected: &str) {
    assert!(drawn == expected, "{name} is drawn as\n{drawn}\nand not as\n{expected}");
}

#[test]
fn a_busy_host() {
    let app = busy();
    check("80x24", &screen(&app, 80, 24).0, include_str!("snapshots/80x24.txt"));
    check("120x40", &screen(&app, 120, 40).0, include_str!("snapshots/120x40.txt"));
}

#[test]
fn help_fits() {
    let app = App { mode: Mode::Help, ..busy() };
    check("help", &screen(&app, 80, 24).0, include_str!("snapshots/help.txt"));
}

#[test]
fn nothing_and_troubles() {
    let mut app = App::new(true, Sort::Rate);
    app.arrange([].iter(), 10);
    assert!(screen(&app, 80, 24).0.contains("no Baton answers here"));
    app.troubles = vec!["/run/baton/agent.sock: no agent".into()];
    assert!(screen(&app, 80, 24).0.ends_with("/run/baton/agent.sock: no agent\n"));
    assert!(screen(&app, 30, 5).0.contains("too small"));
    app.on_key(KeyEvent::from(KeyCode::Char('/')), 10);
    "place x"
        .chars()
        .for_each(|letter| assert_eq!(app.on_key(KeyEvent::from(KeyCode::Char(letter)), 10), super::app::Action::Draw));
    assert!(screen(&app, 80, 24).0.ends_with("filter: place x_\n"));
    app.on_key(KeyEvent::from(KeyCode::Enter), 10);
    assert!(screen(&app, 80, 24).0.contains("\"x\" is no place"));
}

/// Every size draws something, and no line is longer than the screen.
#[test]
fn all_sizes() {
    for app in [busy(), App { mode: Mode::Help, ..busy() }] {
        for (width, height) in (1..140).step_by(7).flat_map(|width| (1..50).step_by(3).map(move |height| (width, height))) {
            screen(&app, width, height);
        }
    }
}

#[test]
fn without_colours_there_are_none() {
    let app = App { color: false, ..busy() };
    let colours = |app: &App| {
        let (_, terminal) = screen(app, 80, 24);
        terminal.backend().buffer().content().iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(colours(&busy()) && !colours(&app));
}
