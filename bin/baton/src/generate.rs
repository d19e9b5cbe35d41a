//! `baton generate`: what a package has besides the programs: manual pages and shell completions, from the definitions
//! of the commands.

use anyhow::{Context, Result};
use clap::{Command, Subcommand};
use clap_complete::Shell;
use std::fs;
use std::path::{Path, PathBuf};

#[derive(Subcommand)]
pub enum Generate {
    /// Writes a manual page of every command into a directory.
    Man { directory: PathBuf },
    /// Writes completions for bash, zsh and fish into a directory.
    Completions { directory: PathBuf },
}

/// Writes the files.
///
/// # Errors
/// If a file cannot be written.
pub fn run(what: &Generate, command: Command) -> Result<()> {
    match what {
        Generate::Man { directory } => {
            make(directory)?;
            let mut command = command;
            command.build();
            manual(&command, directory)
        }
        Generate::Completions { directory } => {
            make(directory)?;
            let mut command = shown(&command);
            for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
                clap_complete::generate_to(shell, &mut command, "baton", directory)
                    .with_context(|| format!("writing into {}", directory.display()))?;
            }
            Ok(())
        }
    }
}

/// A command without those below it that its help does not show: completions would name them.
fn shown(command: &Command) -> Command {
    let below = command.get_subcommands().filter(|below| !below.is_hide_set()).map(shown);
    // As long as this process, which ends soon.
    let lasting = |text: &str| -> &'static str { text.to_owned().leak() };
    let mut only = Command::new(lasting(command.get_name())).args(command.get_arguments().cloned()).subcommands(below);
    if let Some(about) = command.get_about() {
        only = only.about(about.clone());
    }
    if let Some(version) = command.get_version() {
        only = only.version(lasting(version));
    }
    only
}

fn make(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))
}

/// The pages of a command and of those below it: `baton-nic-set.1`.
fn manual(command: &Command, directory: &Path) -> Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help") {
        manual(below, directory)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut page = Vec::new();
    // Without a date: the same program gives the same page.
    clap_mangen::Man::new(command.clone())
        .title(name.to_uppercase())
        .source(concat!("baton ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)?;
    let page = String::from_utf8(page).context("a manual page is text")?;
    let path = directory.join(format!("{name}.1"));
    fs::write(&path, with_examples(&page)).with_context(|| format!("writing {}", path.display()))
}

/// A page whose section behind the options is headed EXAMPLES, with which that begins. clap_mangen calls it EXTRA.
fn with_examples(page: &str) -> String {
    let page = page.replace("\n.SH EXTRA\nExamples:\n", "\n.SH EXAMPLES\n");
    page.replace("\n.SH EXTRA\nExample:\n", "\n.SH EXAMPLES\n").replace("\n.SH EXTRA\n", "\n.SH EXAMPLES\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_have_a_section_of_examples() {
        let command = Command::new("detach").after_help("Example:\n  baton detach 4711");
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page).expect("memory");
        let page = with_examples(std::str::from_utf8(&page).expect("text"));
        assert!(page.contains("\n.SH EXAMPLES\n  baton detach 4711"), "{page}");
        assert!(!page.contains("EXTRA"), "{page}");
    }
}
