//! The state that `baton top` shows, and the effects of keys on it. Without I/O.

use super::panels::Panels;
use crate::list::expression::Expression;
use crate::list::row::{Key, Row, Sort};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// What the caller has to do after a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Draw again.
    Draw,
    /// Sort and filter again.
    Arrange,
    /// Look at the agents now.
    Refresh,
    /// Move this connection to the other side.
    Move(Key),
    /// End.
    Quit,
}

/// What keys are about.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Mode {
    /// The list.
    #[default]
    List,
    /// A filter is being typed; and why what was entered is none.
    Filter { text: String, error: Option<String> },
    /// The explanation of the keys.
    Help,
}

/// Most characters of a filter.
const LONGEST_FILTER: usize = 500;

/// The state.
#[derive(Clone, Debug)]
pub struct App {
    /// Colours may be used.
    pub color: bool,
    /// See [`Mode`].
    pub mode: Mode,
    /// By what the list is sorted.
    pub sort: Sort,
    /// Only connections that match are listed.
    pub filter: Option<Expression>,
    /// The same as it was typed.
    pub filter_text: String,
    /// The connections that are listed, in order.
    pub order: Vec<Key>,
    /// The one that is selected.
    pub selected: Option<Key>,
    /// Place in the list of the first one on the screen.
    pub offset: usize,
    /// The connections on the screen.
    pub page: Vec<Row>,
    /// Of all connections and NICs.
    pub panels: Panels,
    /// Agents that do not answer.
    pub troubles: Vec<String>,
    /// The result of the last move.
    pub message: Option<String>,
}

impl App {
    /// At the beginning.
    pub fn new(color: bool, sort: Sort) -> App {
        App {
            color,
            mode: Mode::List,
            sort,
            filter: None,
            filter_text: String::new(),
            order: Vec::new(),
            selected: None,
            offset: 0,
            page: Vec::new(),
            panels: Panels::default(),
            troubles: Vec::new(),
            message: None,
        }
    }

    /// Filters and sorts the connections anew. `length` of them are on the screen.
    pub fn arrange<'a>(&mut self, rows: impl Iterator<Item = &'a Row>, length: usize) {
        let filter = &self.filter;
        let mut rows: Vec<&Row> = rows.filter(|row| filter.as_ref().is_none_or(|filter| filter.matches(row))).collect();
        self.sort.apply(&mut rows);
        let before = self.place();
        self.order = rows.iter().map(|row| row.key()).collect();
        if self.selected.is_none_or(|selected| !self.order.contains(&selected)) {
            // The connection that has moved up to its place.
            self.selected = self.order.get(before.min(self.order.len().saturating_sub(1))).copied();
        }
        self.scroll(length);
    }

    /// The keys of the connections on the screen.
    pub fn visible(&self, length: usize) -> &[Key] {
        let end = (self.offset + length).min(self.order.len());
        self.order.get(self.offset..end).unwrap_or_default()
    }

    /// Place of the selected connection in the list.
    fn place(&self) -> usize {
        let of = |selected: Key| self.order.iter().position(|key| *key == selected);
        self.selected.and_then(of).unwrap_or(0)
    }

    /// Scrolls as far as it takes to have the selected one on the screen.
    fn scroll(&mut self, length: usize) {
        let (place, length) = (self.place(), length.max(1));
        self.offset = self.offset.min(self.order.len().saturating_sub(length)).clamp((place + 1).saturating_sub(length), place);
    }

    fn select(&mut self, place: usize, length: usize) -> Action {
        self.selected = self.order.get(place.min(self.order.len().saturating_sub(1))).copied();
        self.scroll(length);
        Action::Draw
    }

    /// What a key does. `length` connections are on the screen.
    pub fn on_key(&mut self, key: KeyEvent, length: usize) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Draw;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return Action::Quit;
        }
        match std::mem::take(&mut self.mode) {
            Mode::List => self.on_list_key(key.code, length),
            Mode::Filter { text, .. } => self.on_filter_key(key.code, control, text),
            Mode::Help if key.code == KeyCode::Char('q') => Action::Quit,
            Mode::Help => Action::Draw,
        }
    }

    fn on_list_key(&mut self, key: KeyCode, length: usize) -> Action {
        let place = self.place();
        self.message = None;
        match key {
            KeyCode::Char('q') => Action::Quit,
            KeyCode::Char('?' | 'h') => {
                self.mode = Mode::Help;
                Action::Draw
            }
            KeyCode::Char('/') => {
                self.mode = Mode::Filter { text: self.filter_text.clone(), error: None };
                Action::Draw
            }
            KeyCode::Esc if self.filter.is_some() => {
                (self.filter, self.filter_text) = (None, String::new());
                Action::Arrange
            }
            KeyCode::Char('s') => self.sort_by(1),
            KeyCode::Char('S') => self.sort_by(Sort::ALL.len() - 1),
            KeyCode::Char('m') => self.selected.map_or(Action::Draw, Action::Move),
            KeyCode::Char(' ') => Action::Refresh,
            KeyCode::Up | KeyCode::Char('k') => self.select(place.saturating_sub(1), length),
            KeyCode::Down | KeyCode::Char('j') => self.select(place + 1, length),
            KeyCode::PageUp => self.select(place.saturating_sub(length), length),
            KeyCode::PageDown => self.select(place + length, length),
            KeyCode::Home => self.select(0, length),
            KeyCode::End => self.select(usize::MAX, length),
            _ => Action::Draw,
        }
    }

    /// Sorts by the key that is so many behind the one in use.
    fn sort_by(&mut self, further: usize) -> Action {
        let at = Sort::ALL.iter().position(|sort| *sort == self.sort).unwrap_or(0);
        self.sort = Sort::ALL[(at + further) % Sort::ALL.len()];
        Action::Arrange
    }

    fn on_filter_key(&mut self, key: KeyCode, control: bool, mut text: String) -> Action {
        match key {
            KeyCode::Esc => return Action::Draw,
            KeyCode::Enter if text.trim().is_empty() => {
                (self.filter, self.filter_text) = (None, String::new());
                return Action::Arrange;
            }
            KeyCode::Enter => match text.parse() {
                Ok(filter) => {
                    (self.filter, self.filter_text) = (Some(filter), text);
                    return Action::Arrange;
                }
                Err(why) => {
                    self.mode = Mode::Filter { text, error: Some(why) };
                    return Action::Draw;
                }
            },
            KeyCode::Char('u') if control => text.clear(),
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Char(letter) if !control && !letter.is_control() && text.len() < LONGEST_FILTER => text.push(letter),
            _ => {}
        }
        self.mode = Mode::Filter { text, error: None };
        Action::Draw
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::list::row::tests::row;

    fn rows(count: u32) -> Vec<Row> {
        let one = |number| {
            let mut row = row("10.0.0.1:443", &format!("10.0.0.2:{}", 50_000 + number));
            row.info.connection = number;
            row
        };
        (0..count).map(one).collect()
    }

    fn press(app: &mut App, keys: &str) -> Action {
        let mut last = Action::Draw;
        for letter in keys.chars() {
            let code = if letter == '\n' { KeyCode::Enter } else { KeyCode::Char(letter) };
            last = app.on_key(KeyEvent::new(code, KeyModifiers::NONE), 10);
        }
        last
    }

    #[test]
    fn the_selected_one_stays_on_the_screen() {
        let (mut app, mut rows) = (App::new(true, Sort::Number), rows(25));
        app.arrange(rows.iter(), 10);
        assert_eq!((app.selected, app.offset), (Some((0, 0, 0)), 0));
        press(&mut app, "jjjjjjjjjjjj");
        assert_eq!((app.selected, app.offset), (Some((0, 0, 12)), 3));
        // The selected connection ends: the next one is selected in its place.
        rows.remove(12);
        app.arrange(rows.iter(), 10);
        assert_eq!((app.selected, app.visible(10).len()), (Some((0, 0, 13)), 10));
        app.on_key(KeyEvent::new(KeyCode::End, KeyModifiers::NONE), 10);
        assert_eq!((app.selected, app.offset), (Some((0, 0, 24)), 14));
        rows.truncate(3);
        app.arrange(rows.iter(), 10);
        assert_eq!((app.selected, app.offset, app.visible(10).len()), (Some((0, 0, 2)), 0, 3));
        app.arrange([].iter(), 10);
        assert_eq!((app.selected, app.visible(10).len(), press(&mut app, "jkm")), (None, 0, Action::Draw));
    }

    #[test]
    fn keys_sort_filter_and_move() {
        let (mut app, rows) = (App::new(true, Sort::Rate), rows(5));
        app.arrange(rows.iter(), 10);
        assert_eq!((press(&mut app, "s"), app.sort), (Action::Arrange, Sort::Bytes));
        assert_eq!((press(&mut app, "SS"), app.sort), (Action::Arrange, Sort::Number));
        assert_eq!(press(&mut app, "/dport = :50002\n"), Action::Arrange);
        app.arrange(rows.iter(), 10);
        assert_eq!((app.order.clone(), press(&mut app, "m")), (vec![(0, 0, 2)], Action::Move((0, 0, 2))));
        app.on_key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE), 10);
        app.arrange(rows.iter(), 10);
        assert_eq!((app.order.len(), app.selected), (5, Some((0, 0, 2))), "what was selected stays so");
        press(&mut app, "/qm\n");
        assert!(matches!(&app.mode, Mode::Filter { error: Some(why), .. } if why.contains("no filter")), "{:?}", app.mode);
        app.on_key(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE), 10);
        assert_eq!((press(&mut app, "?x"), &app.mode), (Action::Draw, &Mode::List));
        assert_eq!(press(&mut app, "q"), Action::Quit);
        assert_eq!(app.on_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), 10), Action::Quit);
    }
}
