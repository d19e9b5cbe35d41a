//! Frames in a file of pcapng (draft-ietf-opsawg-pcapng), or in lines.

use super::merge::{Frame, Source};
use anyhow::{Context, Result, anyhow};
use baton_wire::{Endpoint, Flags};
use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::pcapng::blocks::interface_statistics::{InterfaceStatisticsBlock, InterfaceStatisticsOption};
use pcap_file::pcapng::blocks::section_header::{SectionHeaderBlock, SectionHeaderOption};
use pcap_file::{DataLink, Endianness, PcapError};
use std::borrow::Cow;
use std::io::{BufWriter, ErrorKind, Write};
use std::net::SocketAddr;
use std::time::Duration;

/// The destination to which frames are written.
pub type Sink = BufWriter<Box<dyn Write>>;

/// Bits of the flags of a packet's block: it was received, or sent.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;
/// Timestamps are in nanoseconds.
const NANOSECONDS: u8 = 9;

/// What takes the frames.
pub enum Output {
    Pcapng(Box<PcapNgWriter<Sink>>),
    Lines(Sink),
}

/// Whether a write has failed because the reader has closed the pipe.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is = |error: &std::io::Error| error.kind() == ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(is))
}

fn explained(error: PcapError) -> anyhow::Error {
    match error {
        PcapError::IoError(error) => error.into(),
        other => anyhow!("{other}"),
    }
}

fn owned(text: &str) -> Cow<'static, str> {
    Cow::Owned(text.to_owned())
}

/// The number of the block of an interface.
fn interface(source: Source) -> u32 {
    u32::from(source != Source::Nic)
}

impl Output {
    /// A file of pcapng, with a block for the NIC's connections, and if wanted one for the kernel's.
    pub fn pcapng(sink: Sink, snaplen: u32, kernel: bool, filter: Option<&str>) -> Result<Output> {
        let application = format!("baton capture {}", env!("CARGO_PKG_VERSION"));
        let options = vec![SectionHeaderOption::OS(owned("Linux")), SectionHeaderOption::UserApplication(owned(&application))];
        let (endianness, section_length) = (Endianness::Little, -1);
        let section = SectionHeaderBlock { endianness, major_version: 1, minor_version: 0, section_length, options };
        let mut writer = PcapNgWriter::with_section_header(sink, section).map_err(explained)?;
        let nic = ("nic", "what a Baton's NICs send and receive for their connections");
        let others = ("kernel", "what the kernel sends and receives for connections of Baton's programs");
        for (name, what) in [nic].into_iter().chain(kernel.then_some(others)) {
            let mut options = vec![
                InterfaceDescriptionOption::IfName(owned(name)),
                InterfaceDescriptionOption::IfDescription(owned(what)),
                InterfaceDescriptionOption::IfTsResol(NANOSECONDS),
            ];
            // The first byte says that the filter is text.
            let text = filter.map(|filter| [&[0], filter.as_bytes()].concat());
            options.extend(text.map(|text| InterfaceDescriptionOption::IfFilter(Cow::Owned(text))));
            let block = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
            writer.write_pcapng_block(block).map_err(explained)?;
        }
        Ok(Output::Pcapng(Box::new(writer)))
    }

    /// Writes a frame and its comments.
    pub fn write(&mut self, frame: &Frame, comments: &[String]) -> Result<()> {
        match self {
            Output::Pcapng(writer) => {
                let flags = if frame.out { OUTBOUND } else { INBOUND };
                let comments = comments.iter().map(|text| EnhancedPacketOption::Comment(Cow::Borrowed(text.as_str())));
                let block = EnhancedPacketBlock {
                    interface_id: interface(frame.source),
                    timestamp: Duration::from_nanos(frame.at),
                    original_len: frame.length,
                    data: Cow::Borrowed(&frame.bytes),
                    options: comments.chain([EnhancedPacketOption::Flags(flags)]).collect(),
                };
                writer.write_pcapng_block(block).map(drop).map_err(explained)
            }
            Output::Lines(sink) => {
                for comment in comments {
                    writeln!(sink, "{} {comment}", time(frame.at))?;
                }
                Ok(writeln!(sink, "{}", line(frame))?)
            }
        }
    }

    /// Writes how many frames were captured, and dropped, of each interface.
    pub fn end(&mut self, at: u64, counts: &[(u64, u64)]) -> Result<()> {
        if let Output::Pcapng(writer) = self {
            for (interface, (captured, dropped)) in counts.iter().enumerate() {
                let options =
                    vec![InterfaceStatisticsOption::IsbIfRecv(*captured), InterfaceStatisticsOption::IsbIfDrop(*dropped)];
                // The upper half comes first, and pcap-file 2.0.0 writes it as one number of little endian.
                let timestamp = at.rotate_left(32);
                let block = InterfaceStatisticsBlock { interface_id: interface as u32, timestamp, options };
                writer.write_pcapng_block(block).map_err(explained)?;
            }
        }
        self.flush()
    }

    /// Writes the frames that are still buffered.
    pub fn flush(&mut self) -> Result<()> {
        let sink = match self {
            Output::Pcapng(writer) => writer.get_mut(),
            Output::Lines(sink) => sink,
        };
        sink.flush().context("what was captured")
    }
}

/// The time of day, in UTC.
fn time(at: u64) -> String {
    let seconds = at / 1_000_000_000 % 86_400;
    format!("{:02}:{:02}:{:02}.{:06}", seconds / 3600, seconds / 60 % 60, seconds % 60, at % 1_000_000_000 / 1000)
}

fn flags(flags: Flags) -> String {
    let letters = [(Flags::SYN, 'S'), (Flags::FIN, 'F'), (Flags::RST, 'R'), (Flags::PSH, 'P'), (Flags::URG, 'U')];
    let ack = flags.contains(Flags::ACK).then_some('.');
    letters.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, letter)| letter).chain(ack).collect()
}

/// A frame in a line, much as tcpdump shows it.
fn line(frame: &Frame) -> String {
    let place = if frame.source == Source::Nic { "nic   " } else { "kernel" };
    let begin = format!("{} {place} {}", time(frame.at), if frame.out { "Out" } else { "In " });
    let end = |end: Endpoint| SocketAddr::from(end);
    let Some(packet) = frame.packet else { return format!("{begin} {} bytes", frame.length) };
    let ends = format!("{} > {}", end(packet.source), end(packet.destination));
    let Some(segment) = packet.segment else { return format!("{begin} {ends}: UDP, {} bytes", frame.length) };
    let seq = match segment.length {
        0 => segment.seq.to_string(),
        length => format!("{}:{}", segment.seq, segment.seq.wrapping_add(length)),
    };
    let (ack, window, length) = (segment.ack, segment.window, segment.length);
    format!("{begin} {ends}: Flags [{}], seq {seq}, ack {ack}, win {window}, length {length}", flags(segment.flags))
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_capture::Seen;
    use pcap_file::pcapng::{Block, PcapNgReader};

    fn frame(kernel: bool) -> Frame {
        let mut bytes = vec![0; 54];
        bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
        bytes[16..18].copy_from_slice(&1040u16.to_be_bytes());
        bytes[23] = 6;
        bytes[26..38].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2, 0, 80, 16, 0]);
        bytes[41] = 5;
        (bytes[46], bytes[47]) = (0x50, 0x18);
        let seen = Seen { at: 0, length: 1054, out: true, kernel, interface: 0 };
        Frame::of_nic(&seen, 1_700_000_000_123_456_789, bytes)
    }

    #[test]
    fn a_line_says_what_tcpdump_says() {
        let said = "22:13:20.123456 kernel Out 10.0.0.1:80 > 10.0.0.2:4096: Flags [P.], seq 5:1005, ack 0, win 0, length 1000";
        assert_eq!(line(&frame(true)), said);
    }

    /// A file whose contents the test can read after it was written.
    #[derive(Clone, Default)]
    struct Shared(std::sync::Arc<std::sync::Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no panic").write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let file = Shared::default();
        let mut output = Output::pcapng(BufWriter::new(Box::new(file.clone())), 256, true, Some("tcp")).expect("a file");
        output.write(&frame(false), &["moved".into(), "because".into()]).expect("a frame");
        output.write(&frame(true), &[]).expect("a frame");
        output.end(1 << 33 | 5, &[(7, 1), (8, 0)]).expect("the end");
        let bytes = file.0.lock().expect("no panic").clone();
        let mut reader = PcapNgReader::new(&bytes[..]).expect("a file");
        let mut blocks = Vec::new();
        while let Some(block) = reader.next_block() {
            blocks.push(block.expect("a block").into_owned());
        }
        let (Block::InterfaceDescription(nic), Block::EnhancedPacket(first)) = (&blocks[0], &blocks[2]) else {
            panic!("{blocks:?}")
        };
        assert!(nic.options.contains(&InterfaceDescriptionOption::IfName("nic".into())), "{nic:?}");
        assert_eq!((first.interface_id, first.original_len, first.data.len()), (0, 1054, 54));
        assert_eq!(first.timestamp, Duration::from_nanos(frame(false).at));
        let comments = ["moved", "because"].map(|text| EnhancedPacketOption::Comment(text.into()));
        assert_eq!(first.options, [&comments[..], &[EnhancedPacketOption::Flags(OUTBOUND)]].concat());
        assert!(matches!(&blocks[3], Block::EnhancedPacket(second) if second.interface_id == 1));
        let Block::InterfaceStatistics(counts) = &blocks[4] else { panic!("{blocks:?}") };
        assert_eq!(counts.timestamp.rotate_left(32), 1 << 33 | 5);
        assert!(counts.options.contains(&InterfaceStatisticsOption::IsbIfDrop(1)));
    }
}
