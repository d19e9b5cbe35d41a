//! Options whose value an environment variable can give.

use baton_linux::process;
use clap::{Arg, Command};

/// A command whose options, and its subcommands', take nothing from variables that are empty: these count as not set
/// ([`process::variable`]), where clap takes the empty text for the value.
pub fn heed(command: Command) -> Command {
    let of_option = |option: Arg| {
        let variable = option.get_env().and_then(|name| name.to_str());
        if variable.is_some_and(|name| process::variable(name).is_none()) { option.env(None::<&str>) } else { option }
    };
    command.mut_args(of_option).mut_subcommands(heed)
}
