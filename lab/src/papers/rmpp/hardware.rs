//! The paper's machines as numbers: two 500 MHz Pentium III with an Alteon ACEnic each, on a Gigabit Ethernet cable
//! (sections 1, 2 and 5). Three numbers that it does not say are calibrated, each at one of its results and at no
//! other. One assumption goes with them: a copy by the processor and a DMA exclude each other on the host's memory bus.

use crate::papers::report::{Parameter, Source};

/// Times in microseconds, sizes in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// Frames' payload.
    pub mtu: u16,
    /// Bits per microsecond on the wire.
    pub link: f64,
    /// Bytes on the wire around a frame's payload: header, checksum, preamble and gap.
    pub framing: u32,
    /// One interrupt of the host.
    pub interrupt: f64,
    /// The host's copy of one byte between program and kernel.
    pub copy: f64,
    /// A packet's way through the host's stack, sent or received, without interrupt and copy.
    pub host_packet: f64,
    /// The host's decision on an RTS or RSM: match, pin, push addresses to the NIC, CTS.
    pub clear: f64,
    /// Cycles of the NIC for a packet sent or received.
    pub nic_cycles: f64,
    /// Cycles of the NIC in a microsecond.
    pub nic_clock: f64,
    /// Bytes in a microsecond that the NIC reads from or writes to the host's memory.
    pub dma: f64,
    /// Most packets that one CTS clears.
    pub grant: u16,
    /// Interrupt coalescing: microseconds and packets after which the NIC interrupts; None without.
    pub coalescing: Option<(f64, u32)>,
}

/// Frames of 1500 bytes.
pub const STANDARD: u16 = 1500;
/// "Jumbo" frames.
pub const JUMBO: u16 = 9000;

impl Hardware {
    /// The paper's machines.
    pub const fn of_the_paper(mtu: u16) -> Hardware {
        Hardware {
            mtu,
            link: 1000.0,
            framing: 38,
            interrupt: 8.0,
            copy: 7.5 / 1460.0,
            host_packet: 13.1,
            clear: 34.0,
            nic_cycles: 175.0,
            nic_clock: 88.0,
            dma: 0.85 * 132.0,
            grant: 16,
            coalescing: None,
        }
    }

    /// The same with the ACEnic driver's coalescing: 120 µs or 25 packets, with jumbo frames 30 µs or 6.
    #[must_use]
    pub const fn with_coalescing(mut self) -> Hardware {
        self.coalescing = Some(if self.mtu > STANDARD { (30.0, 6) } else { (120.0, 25) });
        self
    }

    /// The same with this many packets to a CTS.
    #[must_use]
    pub const fn with_grant(mut self, grant: u16) -> Hardware {
        self.grant = grant;
        self
    }

    /// Microseconds of a frame with this payload on the wire.
    pub fn wire(&self, payload: usize) -> f64 {
        (payload as f64 + f64::from(self.framing)) * 8.0 / self.link
    }

    /// Microseconds of the NIC's processor for a packet.
    pub fn nic(&self) -> f64 {
        self.nic_cycles / self.nic_clock
    }

    /// All numbers, with their sources.
    pub fn parameters(&self) -> Vec<Parameter> {
        use Source::{Assumed, Calibrated, Paper};
        vec![
            Parameter::new("link", self.link, "Mb/s", Paper("section 1")),
            Parameter::new("framing", self.framing.into(), "bytes", Assumed("IEEE 802.3")),
            Parameter::new("interrupt", self.interrupt, "µs", Paper("section 2")),
            Parameter::new("copy of 1460 bytes", self.copy * 1460.0, "µs", Paper("section 5.1")),
            Parameter::new("NIC clock", self.nic_clock, "MHz", Paper("section 1")),
            Parameter::new("grant", self.grant.into(), "packets", Paper("section 3")),
            Parameter::new("coalescing delay", 120.0, "µs", Assumed("ACEnic driver, default")),
            Parameter::new("coalescing packets", 25.0, "packets", Assumed("ACEnic driver, default")),
            Parameter::new("DMA", self.dma, "MB/s", Assumed("PCI, 32 bits at 33 MHz: 85 % of its 132 MB/s")),
            Parameter::new("host, a packet", self.host_packet, "µs", Calibrated("40 µs a packet (nothing offloaded)")),
            Parameter::new("host, decide on a CTS", self.clear, "µs", Calibrated("20 µs a packet (both offloaded)")),
            Parameter::new("NIC, a packet", self.nic_cycles, "cycles", Calibrated("15.5 µs a packet (RSM sent early)")),
        ]
    }
}
