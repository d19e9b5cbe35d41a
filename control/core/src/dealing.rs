//! The assignment of devices to NICs, for an agent with several NICs.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;

/// The devices and their NICs.
#[derive(Debug, Default)]
pub struct Dealing {
    nics: usize,
    /// Devices that are dealt in turn, by name: the first to NIC 0, the second to NIC 1, …
    names: Vec<String>,
    /// Number of the NIC, by index of the device.
    nic_of: BTreeMap<u32, usize>,
}

impl Dealing {
    /// Deals devices to `nics` NICs, those with these names in turn.
    pub fn new(nics: usize, names: Vec<String>) -> Dealing {
        Dealing { nics, names, nic_of: BTreeMap::new() }
    }

    /// Names of the devices that are dealt in turn.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether there is only one NIC, which has all devices.
    pub fn is_trivial(&self) -> bool {
        self.nics < 2
    }

    /// Assigns the devices that NICs can serve (`usable`, by index), and forgets devices that do not exist any more.
    /// `named` has the index of each device with a name, if it exists. A device keeps its NIC for as long as it exists;
    /// each new one without a name goes to the NIC with the fewest.
    pub fn deal(&mut self, named: &[Option<u32>], existing: &[u32], usable: &[u32]) {
        self.nic_of.retain(|device, _| existing.contains(device));
        for (at, device) in named.iter().enumerate() {
            if let Some(device) = device {
                self.nic_of.insert(*device, at % self.nics.max(1));
            }
        }
        for device in usable {
            if !self.nic_of.contains_key(device) {
                let fewest = (0..self.nics).min_by_key(|nic| self.nic_of.values().filter(|of| *of == nic).count());
                self.nic_of.insert(*device, fewest.unwrap_or(0));
            }
        }
    }

    /// Number of a device's NIC. None if the device is not assigned: the loopback device never is.
    pub fn nic_of(&self, device: u32) -> Option<usize> {
        if self.is_trivial() { Some(0) } else { self.nic_of.get(&device).copied() }
    }

    /// Indices of a NIC's devices.
    pub fn devices_of(&self, nic: usize) -> impl Iterator<Item = u32> {
        self.nic_of.iter().filter(move |(_, of)| **of == nic).map(|(device, _)| *device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dealt(dealing: &Dealing, devices: &[u32]) -> Vec<Option<usize>> {
        devices.iter().map(|device| dealing.nic_of(*device)).collect()
    }

    #[test]
    fn one_nic_has_all_devices() {
        let dealing = Dealing::new(1, Vec::new());
        assert_eq!(dealt(&dealing, &[1, 7]), [Some(0); 2]);
    }

    #[test]
    fn devices_are_dealt_in_turn_and_keep_their_nic() {
        let mut dealing = Dealing::new(2, Vec::new());
        dealing.deal(&[], &[2, 3, 4], &[2, 3, 4]);
        assert_eq!(dealt(&dealing, &[2, 3, 4, 1]), [Some(0), Some(1), Some(0), None]);
        // The first goes away, the second is down, and there is a new one: NIC 1 has one, and so has NIC 0.
        dealing.deal(&[], &[3, 4, 5], &[4, 5]);
        assert_eq!(dealt(&dealing, &[2, 3, 4, 5]), [None, Some(1), Some(0), Some(0)]);
        dealing.deal(&[], &[3, 4, 5, 6], &[3, 4, 5, 6]);
        assert_eq!(dealing.nic_of(6), Some(1), "it has the fewest");
        assert_eq!(dealing.devices_of(1).collect::<Vec<_>>(), [3, 6]);
    }

    #[test]
    fn names_come_first() {
        let names = ["b", "a", "c"].map(String::from).to_vec();
        let mut dealing = Dealing::new(2, names);
        // "c" does not exist yet.
        dealing.deal(&[Some(9), Some(2), None], &[2, 5, 9], &[2, 5, 9]);
        assert_eq!(dealt(&dealing, &[9, 2, 5]), [Some(0), Some(1), Some(0)]);
        // "a" is another device now.
        dealing.deal(&[Some(9), Some(12), Some(11)], &[5, 9, 11, 12], &[5, 9, 11, 12]);
        assert_eq!(dealt(&dealing, &[9, 12, 11, 2]), [Some(0), Some(1), Some(0), None]);
    }
}
