//! The rules that an owner has, with their numbers and slots. A change is first planned and checked, then put in force,
//! then committed.

use anyhow::{Result, anyhow, bail};
use baton_filter::words::SLOTS;
use baton_filter::{Installed, Rule, Table, check, parse};
use baton_protocol::filter::MAX_RULE;

/// A rule, its number and the slot of its counters.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub number: u32,
    pub slot: u16,
    rule: Rule,
    /// The rule is not committed yet: its slot still holds another rule's counters.
    new: bool,
}

impl Entry {
    /// The rule in the form in which it is parsed.
    pub fn text(&self) -> String {
        self.rule.to_string()
    }

    pub fn is_new(&self) -> bool {
        self.new
    }
}

/// All rules, in order.
pub(super) struct Book {
    entries: Vec<Entry>,
    next_number: u32,
    generation: u32,
}

impl Book {
    pub fn new() -> Book {
        Book { entries: Vec::new(), next_number: 1, generation: 0 }
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The number of the next set of rules.
    pub fn next_generation(&mut self) -> u32 {
        self.generation += 1;
        self.generation
    }

    /// The rules with one more, at the end or before the rule with a number; and its number.
    pub fn added(&mut self, text: &str, before: Option<u32>) -> Result<(u32, Vec<Entry>)> {
        let at = before.map_or(Ok(self.entries.len()), |number| self.position(number))?;
        let mut planned = self.entries.clone();
        let [entry] = self.entries_of([text.to_owned()])?[..] else { bail!("one rule") };
        planned.insert(at, entry);
        self.check(&planned)?;
        Ok((entry.number, planned))
    }

    /// The rules without the one with this number.
    pub fn without(&self, number: u32) -> Result<Vec<Entry>> {
        let mut planned = self.entries.clone();
        planned.remove(self.position(number)?);
        Ok(planned)
    }

    /// New rules in place of all.
    pub fn replaced(&mut self, texts: Vec<String>) -> Result<Vec<Entry>> {
        let planned = self.entries_of(texts)?;
        self.check(&planned)?;
        Ok(planned)
    }

    /// Records that the planned rules are in force.
    pub fn commit(&mut self, mut planned: Vec<Entry>) {
        planned.iter_mut().for_each(|entry| entry.new = false);
        self.entries = planned;
    }

    fn position(&self, number: u32) -> Result<usize> {
        let at = self.entries.iter().position(|entry| entry.number == number);
        at.ok_or_else(|| anyhow!("there is no rule {number}: see `baton nic filter list`"))
    }

    /// Entries for new rules, in slots that no rule in force has.
    fn entries_of(&mut self, texts: impl IntoIterator<Item = String>) -> Result<Vec<Entry>> {
        let mut taken = vec![false; SLOTS];
        self.entries.iter().for_each(|entry| taken[usize::from(entry.slot)] = true);
        let mut free = (0..SLOTS).filter(|slot| !taken[*slot]);
        let mut entry = |text: String| {
            if text.len() > MAX_RULE {
                bail!("a rule of more than {MAX_RULE} bytes");
            }
            let rule = parse(&text).map_err(|error| anyhow!("{error}"))?;
            let slot = free.next().ok_or_else(|| anyhow!("too many rules: delete some first"))? as u16;
            let number = self.next_number;
            self.next_number += 1;
            Ok(Entry { number, slot, rule, new: true })
        };
        texts.into_iter().map(&mut entry).collect()
    }

    /// Fails unless the rules can be put in force together.
    fn check(&self, planned: &[Entry]) -> Result<()> {
        let rules: Vec<Rule> = planned.iter().map(|entry| entry.rule).collect();
        if let Some((later, earlier)) = check(&rules) {
            let (later, earlier) = (&planned[later], &planned[earlier]);
            let [number, text] = [earlier.number.to_string(), later.text()];
            bail!("{text:?} would never match: rule {number}, {:?}, has the same matches", earlier.text());
        }
        let installed = planned.iter().map(|entry| Installed { rule: entry.rule, slot: entry.slot }).collect();
        Table::new(installed, 0, [0; 4]).map(|_| ()).map_err(|refused| anyhow!("{refused}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(book: &Book) -> Vec<u32> {
        book.entries().iter().map(|entry| entry.number).collect()
    }

    #[test]
    fn rules_keep_numbers_and_slots_while_others_change() {
        let mut book = Book::new();
        let planned = book.replaced(vec!["in tcp dport 1 drop".into(), "in drop".into()]).expect("rules");
        book.commit(planned);
        let (number, planned) = book.added("in tcp dport 2 drop", Some(2)).expect("a rule");
        assert!(number == 3 && numbers(&book) == [1, 2]);
        book.commit(planned);
        assert_eq!(numbers(&book), [1, 3, 2]);
        let slots: Vec<u16> = book.entries().iter().map(|entry| entry.slot).collect();
        assert_eq!(slots, [0, 2, 1]);
        let planned = book.without(1).expect("rule 1");
        book.commit(planned);
        let planned = book.replaced(vec!["out drop".into()]).expect("rules");
        assert!(planned[0].slot == 0 && planned[0].is_new());
        book.commit(planned);
        assert_eq!(numbers(&book), [4]);
    }

    #[test]
    fn what_cannot_be_put_in_force_changes_nothing() {
        let mut book = Book::new();
        let planned = book.replaced(vec!["in tcp dport 1 drop".into()]).expect("rules");
        book.commit(planned);
        for (text, why) in [("in tcp dport 1 accept", "never match"), ("in tpc drop", "tpc"), (&"x".repeat(300), "256")] {
            assert!(book.added(text, None).expect_err(text).to_string().contains(why));
        }
        assert!(book.without(9).expect_err("no rule 9").to_string().contains("no rule 9"));
        assert!(book.added("drop", Some(9)).is_err());
        assert_eq!(numbers(&book), [1]);
    }
}
