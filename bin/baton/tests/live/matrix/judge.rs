//! What comes of a case, and which differences from the kernel are meant.

use std::collections::BTreeMap;
use std::fmt;

/// A line of the program.
#[derive(Clone, Debug)]
pub struct Answer {
    pub number: u32,
    /// The call with its flags; the shape of its arguments; the mode; the situation.
    case: [String; 4],
    /// How often the peer has acted until the call returned.
    pub acts: Option<u8>,
    /// What came of it: words, most of them `name=value`.
    pub what: String,
}

impl Answer {
    pub fn parse(line: &str) -> Option<Answer> {
        let (case, what) = line.split_once(" |")?;
        let (number, case) = case.split_once(' ')?;
        let mut parts = case.splitn(4, "; ").map(str::to_owned);
        let case = [parts.next()?, parts.next()?, parts.next()?, parts.next()?];
        let mut answer = Answer { number: number.parse().ok()?, case, acts: None, what: what.trim().to_owned() };
        answer.acts = answer.field("acts").and_then(|acts| acts.parse().ok());
        if answer.has("room") {
            // Whether a call waits for room is not compared.
            answer.what = answer.what.split(' ').filter(|word| !word.starts_with("acts=")).collect::<Vec<_>>().join(" ");
        }
        Some(answer)
    }

    /// The answer of a case that has ended the program.
    pub fn of(number: u32, what: &str) -> Answer {
        Answer { number, case: Default::default(), acts: None, what: what.replace('\n', " ") }
    }

    pub fn has(&self, word: &str) -> bool {
        self.what.split(' ').any(|other| other == word)
    }

    pub fn field(&self, name: &str) -> Option<&str> {
        self.what.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

/// A case that has ended otherwise than natively.
pub struct Found {
    pub column: &'static str,
    pub native: Vec<Answer>,
    pub ours: Answer,
}

impl Found {
    /// The call with its flags, the shape of its arguments, the mode, the situation.
    fn case(&self) -> [&str; 4] {
        self.native[0].case.each_ref().map(String::as_str)
    }

    fn is_call(&self, names: &[&str]) -> bool {
        let call = self.case()[0];
        names.iter().any(|name| call.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(' ')))
    }

    fn is_shape(&self, shapes: &[&str]) -> bool {
        shapes.contains(&self.case()[1])
    }

    /// Whether a native answer and ours are the same but for these words.
    fn only(&self, names: &[&str]) -> bool {
        let rest = |answer: &Answer| {
            let is_named = |word: &&str| names.contains(&word.split('=').next().unwrap_or(word));
            answer.what.split(' ').filter(|word| !is_named(word)).map(str::to_owned).collect::<Vec<_>>()
        };
        self.native.iter().any(|native| rest(native) == rest(&self.ours))
    }

    fn on_nic(&self) -> bool {
        self.column != "library"
    }

    fn ours(&self, name: &str) -> &str {
        self.ours.field(name).unwrap_or("")
    }
}

const SENDS: &[&str] = &["write", "writev", "send", "sendto", "sendmsg", "sendmmsg"];
/// Lengths that no buffer of the program's has.
const TOO_LONG: &[&str] = &["length -1", "length SSIZE_MAX", "length INT_MAX", "pieces SSIZE_MAX"];
/// What sends, and brings a connection back to the kernel, which has queues of its own.
const RETURNS: &[&str] = &["dprintf", "fdopen", "pwritev2", "splice out", "sendfile"];
/// What waits for events; those of its flags that ask for room.
const WAITS: &[&str] =
    &["poll", "ppoll", "__poll_chk", "__ppoll_chk", "select", "pselect", "epoll_wait", "epoll_pwait", "epoll_pwait2"];
const ROOM: &[&str] = &["OUT", "WRNORM", "write"];

/// A difference that is meant.
struct Difference {
    /// Why it is.
    why: &'static str,
    /// Whether a case is one of this kind, and differs in nothing else.
    is: fn(&Found) -> bool,
}

const DIFFERENCES: &[Difference] = &[
    Difference {
        why: "a send of more than 32 KB of which the end cannot be read sends nothing; the kernel sends what it has copied by then",
        is: |found| {
            found.on_nic()
                && found.is_call(SENDS)
                && found.is_shape(TOO_LONG)
                && found.ours("errno") == "14"
                && found.only(&["result", "errno", "peer", "lengths"])
        },
    },
    Difference {
        why: "how much fits into a full queue differs a little, natively too; one that returns to the kernel may have room there",
        is: |found| {
            found.case()[3].starts_with("full")
                && (found.is_call(SENDS) || found.is_call(RETURNS))
                && found.only(&["result", "errno", "lengths", "ready", "offset", "peer"])
        },
    },
    Difference {
        why: "the same, where a reset comes natively: the call has found room before, and what comes after differs, too",
        is: |found| {
            found.case()[3] == "full, RST comes"
                && (found.is_call(SENDS) || found.is_call(RETURNS))
                && found.ours("result") == "some"
                && found.only(&["result", "errno", "lengths", "ready", "offset", "rest", "shut", "peer"])
        },
    },
    Difference {
        why: "the same, of events that tell of room",
        is: |found| {
            found.case()[3].starts_with("full")
                && found.is_call(WAITS)
                && found.case()[0].split(' ').any(|flag| ROOM.contains(&flag))
                && found.only(&["result", "errno", "revents", "sets", "ready"])
        },
    },
];

/// What was played, and what differed.
pub struct Tally {
    played: usize,
    suspects: usize,
    known: BTreeMap<&'static str, usize>,
    wrong: Vec<Found>,
}

impl Tally {
    pub fn new(played: usize, suspects: usize) -> Tally {
        Tally { played, suspects, known: BTreeMap::new(), wrong: Vec::new() }
    }

    /// Counts a case that has differed twice.
    pub fn note(&mut self, found: Found) {
        match DIFFERENCES.iter().find(|difference| (difference.is)(&found)) {
            Some(difference) => *self.known.entry(difference.why).or_default() += 1,
            None => self.wrong.push(found),
        }
    }

    pub fn holds(&self) -> bool {
        self.wrong.is_empty()
    }
}

impl fmt::Display for Found {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.ours.number;
        writeln!(out, "{}: case {number}: {}", self.column, self.native[0].case.join("; "))?;
        let mut ways: Vec<_> = self.native.iter().map(|answer| answer.what.as_str()).collect();
        ways.sort_unstable();
        ways.dedup();
        ways.iter().try_for_each(|way| writeln!(out, "    natively {way}"))?;
        writeln!(out, "    here     {}", self.ours.what)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} cases; {} differed once", self.played, self.suspects)?;
        self.known.iter().try_for_each(|(why, count)| writeln!(out, "{count} as meant: {why}"))?;
        for found in self.wrong.iter().take(100) {
            write!(out, "{found}")?;
        }
        if !self.wrong.is_empty() {
            writeln!(out, "{} differ. BATON_FIRST_CASE=NUMBER BATON_CASES=1 plays one of them again.", self.wrong.len())?;
        }
        Ok(())
    }
}
