//! `--nics` and `--device`: several NICs for one agent.

use anyhow::{Context, Result, bail};
use baton_abi::layout::nic::MAX_NICS;
use baton_agent::AgentSettings;
use baton_linux::rtnetlink;
use clap::Args;

#[derive(Args, Debug)]
pub struct NicsArguments {
    /// If a Baton is started: number of NICs, each a process of its own. A connection is handed to the one whose device
    /// its route leads to. Devices are dealt to them in turn, later ones to the NIC with the fewest.
    #[arg(long, default_value = "1", value_name = "N", value_parser = number)]
    nics: usize,
    /// With --nics: a device that is dealt before all others, the first to NIC 0, the second to NIC 1, and so on. Can
    /// be given several times.
    #[arg(long = "device", value_name = "NAME")]
    devices: Vec<String>,
}

fn number(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_NICS).contains(number));
    number.ok_or_else(|| format!("a Baton has 1 to {MAX_NICS} NICs"))
}

impl NicsArguments {
    /// Number of NICs.
    pub fn count(&self) -> usize {
        self.nics
    }

    /// Whether anything but the usual one NIC is asked for.
    pub fn is_given(&self) -> bool {
        self.nics > 1 || !self.devices.is_empty()
    }

    /// Fails if the devices cannot be dealt in the calling thread's network namespace.
    pub fn check(&self) -> Result<()> {
        if self.nics == 1 && !self.devices.is_empty() {
            bail!("--device says which of several NICs has a device, and one NIC has them all: add --nics 2");
        }
        for (at, name) in self.devices.iter().enumerate() {
            if self.devices[..at].contains(name) {
                bail!("--device {name} is given twice: a device belongs to one NIC");
            }
        }
        if self.devices.is_empty() {
            return Ok(());
        }
        let routes = rtnetlink::open().context("the list of devices")?;
        for name in &self.devices {
            if rtnetlink::link(&routes, name).is_err() {
                bail!("--device {name}: there is no such device here (see `ip link`)");
            }
        }
        Ok(())
    }

    /// Adds them to an agent's settings.
    pub fn apply(&self, settings: AgentSettings) -> AgentSettings {
        AgentSettings { nics: self.nics, devices: self.devices.clone(), ..settings }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_nics_is_checked() {
        assert_eq!(number("1"), Ok(1));
        assert_eq!(number(&MAX_NICS.to_string()), Ok(MAX_NICS));
        for wrong in ["0", "5", "-1", "two", ""] {
            assert!(number(wrong).is_err_and(|why| why.contains("1 to 4")), "{wrong}");
        }
    }

    #[test]
    fn devices_are_checked() {
        let arguments =
            |nics, devices: &[&str]| NicsArguments { nics, devices: devices.iter().map(ToString::to_string).collect() };
        let why = |nics, devices| arguments(nics, devices).check().expect_err("it is wrong").to_string();
        assert!(why(1, &["lo"]).contains("--nics 2"));
        assert!(why(2, &["lo", "lo"]).contains("twice"));
        assert!(why(2, &["lo", "nosuchdevice"]).contains("no such device"));
        assert!(arguments(2, &["lo"]).check().is_ok() && arguments(1, &[]).check().is_ok());
    }
}
