//! Where segments are taken at a device: in its driver (XDP) if that works and does other traffic no harm, else at its
//! ingress (tc).

use anyhow::Result;
use baton_linux::interface;
use baton_linux::rtnetlink::{LinkInfo, Wire};
use baton_steering::front::{self, Front, LARGEST_MTU, Path};

/// The setting `path`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// In the driver if that works there, but where frames come from software at the ingress.
    #[default]
    Auto,
    /// In the driver if that works there.
    Driver,
    /// At the ingress.
    Ingress,
}

impl Choice {
    /// The values of the setting.
    pub const WORDS: [(&str, Choice); 3] = [("auto", Choice::Auto), ("xdp", Choice::Driver), ("tc", Choice::Ingress)];
}

/// The path that was chosen, by the setting's name, and why if it is not where `path=auto` looks first.
pub(crate) struct Chosen {
    pub path: Path,
    pub text: String,
}

impl Chosen {
    fn ingress(why: Option<String>) -> Chosen {
        Chosen { path: Path::Ingress, text: why.map_or_else(|| "tc".into(), |why| format!("tc ({why})")) }
    }
}

/// Puts the filter in front of a device.
pub(crate) fn attach(choice: Choice, device: &str, link: &LinkInfo, tap: u32) -> Result<(Front, Chosen)> {
    match wanted(choice, link.wire).and_then(|()| in_driver(device, link, tap).map_err(Some)) {
        Ok(front) => Ok((front, Chosen { path: Path::Driver, text: "xdp".into() })),
        Err(why) => Ok((Front::attach(Path::Ingress, link.index, tap)?, Chosen::ingress(why))),
    }
}

/// The filter that takes the place of one in a device's driver whose MTU has become too large for that; None if it has
/// not.
pub(crate) fn follow(chosen: &Chosen, link: &LinkInfo, tap: u32) -> Result<Option<(Front, Chosen)>> {
    match fits(link) {
        Err(why) if chosen.path == Path::Driver => {
            Ok(Some((Front::attach(Path::Ingress, link.index, tap)?, Chosen::ingress(Some(why)))))
        }
        _ => Ok(None),
    }
}

fn fits(link: &LinkInfo) -> Result<(), String> {
    if link.mtu > LARGEST_MTU {
        return Err(format!("an MTU of {} is too large for XDP, {LARGEST_MTU} is not", link.mtu));
    }
    Ok(())
}

/// Whether the driver is tried. If not, says why, unless the ingress was asked for.
fn wanted(choice: Choice, wire: Wire) -> Result<(), Option<String>> {
    let why = match (choice, wire) {
        (Choice::Ingress, _) => return Err(None),
        (Choice::Driver, _) | (Choice::Auto, Wire::Other) => return Ok(()),
        (Choice::Auto, Wire::Veth) => "on a veth XDP takes large sends from its peer",
        (Choice::Auto, Wire::Tap) => "on a TAP XDP copies large frames",
    };
    Err(Some(format!("{why}; path=xdp does it all the same")))
}

/// Puts it into the device's driver. Or says why not.
fn in_driver(device: &str, link: &LinkInfo, tap: u32) -> Result<Front, String> {
    fits(link)?;
    // A frame whose tag the program cannot see would be taken for one of another network.
    if link.wire == Wire::Veth {
        front::tag_function().map_err(|error| format!("{error}, by which a veth tells of VLAN tags"))?;
    } else if interface::strips_tags(device).unwrap_or(true) {
        return Err(format!("it takes VLAN tags out of frames (`ethtool -K {device} rxvlan off`)"));
    }
    Front::attach(Path::Driver, link.index, tap).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_tried_where_it_does_no_harm() {
        for (choice, wire, tried) in [
            (Choice::Auto, Wire::Other, true),
            (Choice::Auto, Wire::Veth, false),
            (Choice::Auto, Wire::Tap, false),
            (Choice::Driver, Wire::Veth, true),
            (Choice::Driver, Wire::Tap, true),
            (Choice::Ingress, Wire::Other, false),
        ] {
            assert_eq!(wanted(choice, wire).is_ok(), tried, "{choice:?} {wire:?}");
        }
    }
}
