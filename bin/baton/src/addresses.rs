//! `--address`: addresses that are the NIC's own; and their part of `baton nic show`.

use anyhow::{Result, bail};
use baton_abi::layout::nic::MOST_ADDRESSES;
use baton_client::tool::Tool;
use baton_protocol::address::{AddressInfo, OwnAddress, Standing};
use baton_protocol::program::{Ask, Reply};
use clap::Args;

#[derive(Args, Debug)]
pub struct AddressArguments {
    /// An address that is to be the NIC's own on its link, for example 10.1.0.50/24 or fd00::50/64: the NIC probes for
    /// it, announces it and answers for it, and programs can bind to it. Can be given several times.
    #[arg(long = "address", value_name = "ADDRESS[/PREFIX]")]
    addresses: Vec<OwnAddress>,
    /// Milliseconds between two of the three probes for such an address, which is used when nobody has answered: four
    /// to seven times as long after the start. RFC 5227 has a second.
    #[arg(long, default_value_t = 1000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    probe_interval: u64,
}

impl AddressArguments {
    /// The addresses.
    ///
    /// # Errors
    /// If one is given twice, or there are more than a NIC can have.
    pub fn addresses(&self) -> Result<Vec<OwnAddress>> {
        for (at, one) in self.addresses.iter().enumerate() {
            if self.addresses[..at].iter().any(|other| other.address == one.address) {
                bail!("--address {one} is given twice");
            }
        }
        if self.addresses.len() > MOST_ADDRESSES {
            bail!("--address: a NIC has at most {MOST_ADDRESSES} addresses of its own");
        }
        Ok(self.addresses.clone())
    }

    /// Whether there are any.
    pub fn any(&self) -> bool {
        !self.addresses.is_empty()
    }

    /// Microseconds between two probes.
    pub fn between_probes(&self) -> u64 {
        self.probe_interval * 1000
    }
}

fn ask(tool: &mut Tool, settled: bool) -> Result<Vec<AddressInfo>> {
    match tool.ask(Ask::Addresses { settled })? {
        Reply::Addresses(list) => Ok(list),
        Reply::Failed { reason } => bail!("{reason}"),
        other => bail!("unexpected answer from the agent: {other:?} (are both of the same version?)"),
    }
}

/// Waits until the NIC uses its addresses.
///
/// # Errors
/// The reason why the NIC cannot use one of them.
pub fn settle(tool: &mut Tool) -> Result<()> {
    for one in ask(tool, true)? {
        if one.standing != Standing::Used {
            bail!("--address {}: {}", one.address, one.reason);
        }
    }
    Ok(())
}

/// The NIC's addresses.
///
/// # Errors
/// If the agent does not answer.
pub fn list(tool: &mut Tool) -> Result<Vec<AddressInfo>> {
    ask(tool, false)
}

/// The addresses as JSON.
pub fn to_json(list: &[AddressInfo]) -> serde_json::Value {
    list.iter()
        .map(|one| {
            serde_json::json!({
                "address": one.address.to_string(), "device": one.device, "state": one.standing.to_string(), "reason": one.reason,
                "probes": one.probes, "announcements": one.announcements, "answers": one.answers, "unanswered": one.unanswered,
                "conflicts": one.conflicts,
            })
        })
        .collect()
}

/// Prints the addresses, if there are any.
pub fn print(list: &[AddressInfo]) {
    if list.is_empty() {
        return;
    }
    println!("\nthe NIC's own address                    device   state      probes  announced  answered  unanswered  conflicts");
    for one in list {
        let AddressInfo { address, device, probes, announcements, answers, unanswered, conflicts, reason, .. } = one;
        // Padding does not apply to a value that formats itself.
        let (address, state) = (address.to_string(), one.standing.to_string());
        println!(
            "{address:<40} {device:<8} {state:<9} {probes:>7} {announcements:>10} {answers:>9} {unanswered:>11} {conflicts:>10}  {reason}"
        );
    }
}
