//! The configuration file of `baton up`. Its keys are the names of the command's options, and their values are read as
//! the options are: there is one definition of both, `UpArguments`.

use crate::environment;
use crate::up::UpArguments;
use anyhow::{Context, Result, anyhow, bail};
use baton_linux::process;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, Args, Command, FromArgMatches};
use std::any::TypeId;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use toml::de::{DeTable, DeValue};

/// The file that is read without `--config`, if it is there.
pub const DEFAULT: &str = "/etc/baton/config.toml";

/// The option that names the file, which cannot name another one.
const CONFIG: &str = "config";

/// Adds what the configuration file says to the command line of this process, which is that of `baton up`. An option
/// that is on the command line, or that the environment sets, counts instead of the file's.
///
/// # Errors
/// Names the file, the line, and what is wrong with it.
pub fn with_file(given: UpArguments) -> Result<UpArguments> {
    let (path, needed) = match &given.config {
        Some(path) => (path.as_path(), true),
        None => (Path::new(DEFAULT), false),
    };
    let text = match std::fs::read_to_string(path) {
        Err(error) if !needed && error.kind() == ErrorKind::NotFound => return Ok(given),
        read => read.with_context(|| format!("reading {}", path.display()))?,
    };
    // What stands before is the program's own name and `up`.
    let line: Vec<OsString> = std::env::args_os().skip(2).collect();
    let socket = baton_client::named_socket().map(|_| "socket");
    let level = process::variable(baton_log::VARIABLE).map(|_| "log-level");
    let by_environment: Vec<&str> = socket.into_iter().chain(level).collect();
    merged(&text, path, &line, &by_environment)
}

/// The arguments of a command line and of the text of a file.
fn merged(text: &str, path: &Path, line: &[OsString], by_environment: &[&str]) -> Result<UpArguments> {
    let given = options().try_get_matches_from(line)?;
    let from_file = read(text).map_err(|why| anyhow!("{}:{why}", path.display()))?;
    let counts = |(key, _): &(String, OsString)| {
        let id = options().get_arguments().find(|option| option.get_long() == Some(key)).map(|option| option.get_id().clone());
        let on_line = id.is_some_and(|id| given.value_source(id.as_str()) == Some(ValueSource::CommandLine));
        !on_line && !by_environment.contains(&key.as_str())
    };
    let all = from_file.into_iter().filter(counts).map(|(_, option)| option).chain(line.iter().cloned());
    Ok(UpArguments::from_arg_matches(&options().try_get_matches_from(all)?)?)
}

/// The options, without a program's name before them.
fn options() -> Command {
    environment::heed(UpArguments::augment_args(Command::new("baton up").no_binary_name(true)))
}

/// The keys and their options, such as `--spin=100`. An error begins with the number of the line.
fn read(text: &str) -> Result<Vec<(String, OsString)>> {
    let line_at = |at: usize| 1 + text[..at].bytes().filter(|byte| *byte == b'\n').count();
    let table = DeTable::parse(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_at(span.start.min(text.len())));
        anyhow!("{line}: {}", error.message())
    })?;
    let options = options();
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut all = Vec::new();
    for (key, value) in entries {
        let (name, line) = (key.get_ref().as_ref(), line_at(key.span().start));
        let known = || options.get_arguments().filter(|option| option.get_long().is_some_and(|long| long != CONFIG));
        let Some(option) = known().find(|option| option.get_long() == Some(name)) else {
            let mut names: Vec<_> = known().filter_map(Arg::get_long).collect();
            names.sort_unstable();
            let hint = if name == "rule" { " (rules are a program's: `baton run --config FILE`)" } else { "" };
            bail!("{line}: there is no key {name:?}{hint}; the keys are the options of `baton up`: {}", names.join(", "));
        };
        for text in values(option, value.get_ref()).map_err(|why| anyhow!("{line}: {name}: {why}"))? {
            let argument = OsString::from(format!("--{name}{text}"));
            // Each by itself: so an error is that of this line.
            if let Err(error) = self::options().try_get_matches_from([&argument]) {
                let why = error.to_string();
                bail!("{line}: {}", why.lines().next().unwrap_or_default().trim_start_matches("error: "));
            }
            all.push((name.to_owned(), argument));
        }
    }
    Ok(all)
}

/// What stands behind an option's name on the command line, once for each of its values.
fn values(option: &Arg, value: &DeValue<'_>) -> Result<Vec<String>> {
    let several = matches!(option.get_action(), ArgAction::Append);
    let is_switch = matches!(option.get_action(), ArgAction::SetTrue);
    let is_path = option.get_value_parser().type_id() == TypeId::of::<PathBuf>();
    Ok(match value {
        DeValue::String(text) if is_path => vec![format!("={text}")],
        _ if is_path => bail!("write a path in quotes"),
        DeValue::Boolean(value) if is_switch => value.then(String::new).into_iter().collect(),
        _ if is_switch => bail!("write true or false"),
        DeValue::Array(list) if several => {
            list.iter().map(|one| Ok(format!("={}", single(one.get_ref())?))).collect::<Result<_>>()?
        }
        DeValue::Array(_) => bail!("it has one value, not a list"),
        one => vec![format!("={}", single(one)?)],
    })
}

fn single(value: &DeValue<'_>) -> Result<String> {
    match value {
        DeValue::String(text) => Ok(text.to_string()),
        DeValue::Integer(number) => {
            let read = i128::from_str_radix(number.as_str(), number.radix());
            Ok(read.map_err(|_| anyhow!("{number} is too large a number"))?.to_string())
        }
        DeValue::Float(number) => Ok(number.to_string()),
        _ => bail!("write a number, or a text in quotes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKAGED: &str = include_str!("../../../packaging/config.toml");

    fn line(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    fn keys(text: &str) -> Vec<String> {
        read(text).expect("it is right").into_iter().map(|(_, option)| option.into_string().expect("UTF-8")).collect()
    }

    fn why(text: &str) -> String {
        read(text).expect_err("it is wrong").to_string()
    }

    #[test]
    fn a_file_becomes_options() {
        let text = "# a comment\nspin = 50\nnics = 2\ndevice = [\"eth0\", \"eth1\"]\naddress = \"10.1.0.50/24\"\n";
        assert_eq!(keys(text), ["--spin=50", "--nics=2", "--device=eth0", "--device=eth1", "--address=10.1.0.50/24"]);
        assert_eq!(keys(""), [""; 0]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let unknown = why("spin = 1\n\nspins = 2\n");
        assert!(unknown.starts_with("3: there is no key \"spins\"") && unknown.contains("namespaces-per-user"), "{unknown}");
        assert!(!unknown.contains("config"), "{unknown}");
        assert!(why("[[rule]]\nwhen = \"never\"\n").contains("baton run --config"));
        assert!(why("\nnics = 9\n").starts_with("2: invalid value '9'"), "{}", why("\nnics = 9\n"));
        assert!(why("spin = [1, 2]").contains("one value"));
        assert!(why("socket = 7").starts_with("1: socket: write a path"), "{}", why("socket = 7"));
        assert!(
            why("nic-connections = \"many\"").starts_with("1: invalid value 'many'"),
            "{}",
            why("nic-connections = \"many\"")
        );
        assert!(why("log-level = \"loud\"").contains("write error, warning, info or debug"), "{}", why("log-level = \"loud\""));
        assert!(why("spin = {}").contains("a number, or a text"));
        assert!(why("device = [\"a\", []]").contains("a number, or a text"));
        assert!(why("spin = 1\nspin = 2").starts_with("2: "), "{}", why("spin = 1\nspin = 2"));
        assert!(why("spin = 1\nnics =").starts_with("2: "));
        assert!(why("config = \"other.toml\"").contains("no key"));
    }

    #[test]
    fn the_command_line_wins() {
        let text = "spin = 50\nnamespaces = 3\nlog-level = \"debug\"\nsocket = \"/from/file\"\naddress = [\"10.1.0.50/24\"]\n";
        let path = Path::new("/etc/baton/config.toml");
        let of = |words: &[&str], environment: &[&str]| {
            let options = merged(text, path, &line(words), environment).expect("both are right");
            format!("{options:?}")
        };
        let both = of(&["--spin", "7", "--address=10.1.0.51/24"], &[]);
        for part in ["spin: 7,", "namespaces: 3,", "log_level: Debug,", "/from/file", "10.1.0.51"] {
            assert!(both.contains(part), "{part} in {both}");
        }
        assert!(!both.contains("10.1.0.50"), "{both}");
        assert!(!of(&[], &["socket"]).contains("/from/file"));
        assert!(of(&[], &["log-level"]).contains("log_level: Info,"));
        let error = merged("nics = 0", path, &[], &[]).expect_err("it is wrong").to_string();
        assert!(error.starts_with("/etc/baton/config.toml:1: "), "{error}");
    }

    /// The packaged file changes nothing as it is, and names every option with its default.
    #[test]
    fn the_packaged_file_has_every_key() {
        assert_eq!(keys(PACKAGED), [""; 0]);
        let keys_of = |prefix: &str| {
            let mut keys: Vec<String> = PACKAGED
                .lines()
                .filter_map(|line| line.strip_prefix(prefix)?.split_once(" = ").map(|(key, _)| key.to_owned()))
                .filter(|key| !key.contains(' '))
                .collect();
            keys.sort_unstable();
            keys
        };
        let command = options();
        let mut known: Vec<_> = command.get_arguments().filter_map(Arg::get_long).filter(|long| *long != CONFIG).collect();
        known.sort_unstable();
        assert_eq!(keys_of("#"), known);
        let uncommented: String = PACKAGED
            .lines()
            .map(|line| line.strip_prefix('#').filter(|rest| !rest.starts_with(' ')).unwrap_or(line).to_owned() + "\n")
            .collect();
        assert!(read(&uncommented).is_ok(), "{:?}", read(&uncommented).err());
    }
}
