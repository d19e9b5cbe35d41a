//! The file with what loads were measured to cost in both places of this machine (`--choose gain`): a Baton begins with
//! that. `baton up` keeps what its agents measure.

use anyhow::{Context, Result};
use baton_linux::process;
use baton_log::warning;
use baton_protocol::program::{ClassInfo, Measured};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Loads that are kept. Those whose programs take the same CPU time for a byte, but for this factor, count as one: see
/// `host/policy/src/starts.rs`.
const MOST: usize = 32;
const ALIKE: f64 = 1.4;

/// Where it is: root's, and another user's.
pub fn path() -> Option<PathBuf> {
    if process::user() == 0 {
        return Some("/var/lib/baton/gain.json".into());
    }
    let from = |name| process::variable(name).map(PathBuf::from);
    let state = from("XDG_STATE_HOME").or_else(|| Some(from("HOME")?.join(".local/state")))?;
    Some(state.join("baton/gain.json"))
}

/// The file's content. It counts as empty if the file does not exist or is invalid, which is logged.
pub fn read(path: &Path) -> Vec<Measured> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
        Err(error) => {
            warning!(
                [] "{}: {error}: it is begun without what was measured before", path.display();
                "see that this user may read it"
            );
            return Vec::new();
        }
    };
    parse(&text).unwrap_or_else(|| {
        warning!([] "{} does not hold what was measured before", path.display(); "remove it");
        Vec::new()
    })
}

/// Makes its directory. Returns the path at which the next one is written.
fn place_of_next(path: &Path) -> Result<PathBuf> {
    let directory = path.parent().context("a file in a directory")?;
    std::fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    Ok(path.with_extension("json.new"))
}

/// Fails if it cannot be written.
#[cfg(feature = "lab")]
pub fn check(path: &Path) -> Result<()> {
    let new = place_of_next(path)?;
    let written = std::fs::write(&new, "").and_then(|()| std::fs::remove_file(&new));
    written.with_context(|| format!("writing {}", path.display()))
}

/// Writes it, at once.
pub fn write(path: &Path, measured: &[Measured]) -> Result<()> {
    let new = place_of_next(path)?;
    let text = format!("{:#}\n", Value::from_iter(measured.iter().map(in_json)));
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, path));
    written.with_context(|| format!("writing {}", path.display()))
}

/// Replaces the known costs of loads like these classes by the newly measured costs. Returns whether anything has
/// changed.
pub fn renew(known: &mut Vec<Measured>, classes: &[ClassInfo]) -> bool {
    let mut changed = false;
    for measured in classes.iter().filter_map(|class| class.measured).filter(makes_sense) {
        if known.contains(&measured) {
            continue;
        }
        let factor = |known: &Measured| {
            let ratio = known.program.0 / measured.program.0;
            ratio.max(1.0 / ratio)
        };
        known.retain(|known| factor(known) >= ALIKE);
        known.push(measured);
        changed = true;
    }
    known.drain(..known.len().saturating_sub(MOST));
    changed
}

fn makes_sense(measured: &Measured) -> bool {
    let Measured { cost, rate, program, .. } = measured;
    [cost, rate, program].iter().all(|(kernel, nic)| [kernel, nic].iter().all(|value| value.is_finite() && **value > 0.0))
}

fn in_json(measured: &Measured) -> Value {
    let pair = |(kernel, nic): (f64, f64)| json!({ "kernel": kernel, "nic": nic });
    json!({
        "pairs": measured.pairs, "cpu_seconds_per_gb": pair(measured.cost), "bytes_per_second": pair(measured.rate),
        "program_seconds_per_gb": pair(measured.program),
    })
}

/// None if the text is something else.
fn parse(text: &str) -> Option<Vec<Measured>> {
    let value: Value = serde_json::from_str(text).ok()?;
    let of = |row: &Value| {
        let pair = |name: &str| Some((row[name]["kernel"].as_f64()?, row[name]["nic"].as_f64()?));
        let pairs = u32::try_from(row["pairs"].as_u64()?).ok()?;
        let (cost, rate) = (pair("cpu_seconds_per_gb")?, pair("bytes_per_second")?);
        let measured = Measured { pairs, cost, rate, program: pair("program_seconds_per_gb")? };
        makes_sense(&measured).then_some(measured)
    };
    value.as_array()?.iter().take(MOST).map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_protocol::program::Place;

    fn measured(program: f64) -> Measured {
        Measured { pairs: 4, cost: (0.5, 0.3), rate: (1e9, 1.1e9), program: (program, program / 3.0) }
    }

    fn class(measured: Option<Measured>) -> ClassInfo {
        ClassInfo {
            service: "10.0.0.1:80".into(),
            listens: true,
            program: "nginx".into(),
            user: 0,
            connections: (1, 0),
            place: Place::Kernel,
            trial: false,
            switches: 0,
            measured,
            reason: String::new(),
            next_us: 0,
        }
    }

    #[test]
    fn what_is_written_is_read_again() {
        let directory = std::env::temp_dir().join(format!("baton-gain-{}", std::process::id()));
        let path = directory.join("state/gain.json");
        assert!(read(&path).is_empty(), "it is not there yet");
        let all = [measured(0.1), measured(30.0)];
        write(&path, &all).expect("written");
        assert_eq!(read(&path), all);
        for wrong in ["", "{}", "[{}]", "[7]"] {
            std::fs::write(&path, wrong).expect("written");
            assert!(read(&path).is_empty(), "{wrong:?}");
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn the_last_measurement_of_a_load_counts() {
        let mut known = vec![measured(0.1), measured(30.0)];
        assert!(!renew(&mut known, &[class(None), class(Some(measured(30.0)))]), "nothing new");
        assert!(renew(&mut known, &[class(Some(measured(0.12))), class(Some(measured(7.0)))]));
        assert_eq!(known, [measured(30.0), measured(0.12), measured(7.0)]);
        let nonsense = Measured { cost: (0.0, 1.0), ..measured(100.0) };
        assert!(!renew(&mut known, &[class(Some(nonsense))]));
        let many: Vec<ClassInfo> = (0..40).map(|at| class(Some(measured(f64::from(at).exp2() * 1000.0)))).collect();
        assert!(renew(&mut known, &many) && known.len() == MOST);
    }
}
