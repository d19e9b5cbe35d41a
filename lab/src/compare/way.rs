//! Ways on which a server gets its connections' bytes, and the hosts of each.

use super::CompareSettings;
use super::load::Traffic;
use anyhow::Result;
use baton_bed::testbed::{self, Testbed, TestbedSettings};
use baton_client::tool::Tool;
use baton_linux::namespace::Namespace;
use serde::Serialize;
use std::path::PathBuf;

/// Microseconds that a NIC polls that is not to sleep.
const NEVER_SLEEPS: u64 = 10_000_000;

/// A way on which a server gets its connections' bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The kernel's TCP over a veth, without any Baton.
    #[default]
    Kernel,
    /// `baton run`, with the NIC beside the kernel on the veth, and rings in shared memory between NIC and program.
    Beside,
    /// The same, and connections are where they were measured to be better served.
    Gain,
    /// As beside, for a program that is written for the client library.
    Library,
    /// The same, for one that sends from a buffer, which the library does not copy.
    Buffers,
    /// `baton run`, with the NIC between the kernel's device and the wire (both TAPs).
    Inline,
    /// `baton attach`, with the NIC beside the kernel on the veth, and the kernel's map of sockets between attacher and
    /// program.
    Attached,
    /// smoltcp, another TCP for programs, on a TAP: the program contains its stack, and the kernel has no part in it.
    Smoltcp,
}

impl Way {
    /// All of them, the one that the others are compared with first.
    pub const ALL: [Way; 8] =
        [Way::Kernel, Way::Beside, Way::Library, Way::Inline, Way::Attached, Way::Smoltcp, Way::Buffers, Way::Gain];

    /// Its name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Way::Kernel => "kernel",
            Way::Beside => "beside",
            Way::Gain => "gain",
            Way::Library => "library",
            Way::Buffers => "buffers",
            Way::Inline => "inline",
            Way::Attached => "attached",
            Way::Smoltcp => "smoltcp",
        }
    }

    /// What it is, in a few words.
    pub fn about(self) -> &'static str {
        match self {
            Way::Kernel => "the kernel's TCP over a veth, without Baton",
            Way::Beside => "baton run, the NIC beside the kernel on the veth",
            Way::Gain => "as beside, with --choose gain: connections where they were measured to be better served",
            Way::Library => "as beside, the program written for the client library",
            Way::Buffers => "as library, sending from a buffer without a copy by the program",
            Way::Inline => "baton run, the NIC between the kernel's device and the wire (TAPs)",
            Way::Attached => "baton attach, the NIC beside the kernel, a map of sockets between attacher and program",
            Way::Smoltcp => "a program that contains smoltcp, on a TAP without offloads; the kernel's TCP only at the client",
        }
    }

    /// Whether the connections are to be on a NIC.
    pub(super) fn has_nic(self) -> bool {
        !matches!(self, Way::Kernel | Way::Smoltcp)
    }
}

/// The two hosts of a round, and what is between them. Every round has its own, so that nothing of one way's runs in
/// another's turn.
pub(super) enum Hosts {
    Without([Namespace; 2]),
    Baton(Box<Testbed>),
    /// The client's alone: the server's is a program with a TAP in it.
    Smoltcp(Namespace),
}

impl Hosts {
    pub(super) fn new(way: Way, traffic: Traffic, settings: &CompareSettings) -> Result<Hosts> {
        let never_sleeps = traffic == Traffic::PingPong;
        let bed = if way == Way::Gain { settings.bed.clone().by_gain() } else { settings.bed.clone() };
        let bed = TestbedSettings {
            beside: way != Way::Inline,
            spin: if never_sleeps { NEVER_SLEEPS } else { settings.bed.spin },
            nic_cores: if never_sleeps { vec![0] } else { Vec::new() },
            agent_core: None,
            ..bed
        };
        Ok(match way {
            Way::Kernel => Hosts::Without(testbed::without_baton(&bed)?),
            Way::Smoltcp => Hosts::Smoltcp(Namespace::new()?),
            _ => Hosts::Baton(Box::new(Testbed::new(&bed)?)),
        })
    }

    /// Where the server is started.
    pub(super) fn server(&self) -> &Namespace {
        match self {
            Hosts::Without([host_a, _]) => host_a,
            Hosts::Baton(bed) => &bed.host_a,
            Hosts::Smoltcp(host_b) => host_b,
        }
    }

    /// Where the client runs.
    pub(super) fn client(&self) -> &Namespace {
        match self {
            Hosts::Without([_, host_b]) | Hosts::Smoltcp(host_b) => host_b,
            Hosts::Baton(bed) => &bed.host_b,
        }
    }

    /// Path of the agent's socket, if there is a Baton.
    pub(super) fn agent(&self) -> Option<PathBuf> {
        match self {
            Hosts::Baton(bed) => Some(bed.socket()),
            _ => None,
        }
    }

    /// A tool at the agent, if there is a Baton.
    pub(super) fn tool(&self) -> Result<Option<Tool>> {
        match self {
            Hosts::Baton(bed) => bed.tool().map(Some),
            _ => Ok(None),
        }
    }
}
