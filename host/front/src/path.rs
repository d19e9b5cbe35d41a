//! Where segments are taken at a device: in its driver (XDP) if that works and does other traffic no harm, else at its ingress (tc).

use anyhow::{Result, bail};
use baton_linux::interface;
use baton_linux::rtnetlink::LinkInfo;
use baton_steering::front::{self, Front, Path};

/// The setting `path`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// In the driver if that works there and does other traffic no harm.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Driver,
    /// At the ingress.
    Ingress,
}

impl Choice {
    /// The values of the setting.
    pub const WORDS: [(&str, Choice); 3] = [("auto", Choice::Auto), ("xdp", Choice::Driver), ("tc", Choice::Ingress)];
}

/// Largest MTU of a device, in bytes, whose segments are taken in the driver: a larger frame comes in several pieces (a page, without
/// what the kernel keeps in front of and behind a frame), which a TAP does not take.
const MOST: u32 = 3400;

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
    let why = match choice {
        Choice::Ingress => None,
        Choice::Auto if link.veth => Some("on a veth XDP takes large sends from its peer".into()),
        Choice::Auto | Choice::Driver => match in_driver(device, link, tap) {
            Ok(front) => return Ok((front, Chosen { path: Path::Driver, text: "xdp".into() })),
            Err(why) if choice == Choice::Driver => {
                bail!("path=xdp at {device}: {why}; path=tc takes segments behind the driver")
            }
            Err(why) => Some(why),
        },
    };
    Ok((Front::attach(Path::Ingress, link.index, tap)?, Chosen::ingress(why)))
}

/// The filter that takes the place of one in a device's driver whose MTU has become too large for that; None if it has not.
pub(crate) fn follow(chosen: &Chosen, link: &LinkInfo, tap: u32) -> Result<Option<(Front, Chosen)>> {
    match fits(link) {
        Err(why) if chosen.path == Path::Driver => {
            Ok(Some((Front::attach(Path::Ingress, link.index, tap)?, Chosen::ingress(Some(why)))))
        }
        _ => Ok(None),
    }
}

fn fits(link: &LinkInfo) -> Result<(), String> {
    if link.mtu > MOST { Err(format!("an MTU of {} is too large for XDP, {MOST} is not", link.mtu)) } else { Ok(()) }
}

/// Puts it into the device's driver. Or says why not.
fn in_driver(device: &str, link: &LinkInfo, tap: u32) -> Result<Front, String> {
    fits(link)?;
    // A frame whose tag the program cannot see would be taken for one of another network.
    if link.veth {
        front::tag_function().map_err(|error| format!("{error}, by which a veth tells of VLAN tags"))?;
    } else if interface::strips_tags(device).unwrap_or(true) {
        return Err(format!("it takes VLAN tags out of frames (`ethtool -K {device} rxvlan off`)"));
    }
    Front::attach(Path::Driver, link.index, tap).map_err(|error| error.to_string())
}
