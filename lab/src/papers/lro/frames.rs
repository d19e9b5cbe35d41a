//! Frames of the models' connections, as a wire has them.

use baton_device::{Checksum, Frame};
use baton_wire::frame::{Header, Link, MAX_HEADER, TCP_CHECKSUM, Template};
use baton_wire::{Endpoint, Flow};

/// The server's 4-tuple of connection `number`: ports of the client one after the other, from `first` on.
pub fn flow(first: u16, number: usize) -> Flow {
    let client = Endpoint::v4([10, 0, 0, 2], first.wrapping_add(number as u16));
    Flow { local: Endpoint::v4([10, 0, 0, 1], 5001), remote: client, device: 0 }
}

/// The headers of the segments that the owner of this 4-tuple sends.
pub fn template(flow: &Flow) -> Template {
    let (source, destination) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    Template::new(flow, &Link { source, destination, ttl: 64, ..Link::default() }, true)
}

/// Writes a segment with `length` zero bytes into `frame`, whose checksum the device vouches for.
pub fn write(template: &Template, header: &Header<'_>, length: usize, frame: &mut Frame) {
    frame.set_length(MAX_HEADER + length);
    let headers = template.emit(header, length, frame.bytes_mut());
    frame.set_length(headers + length);
    frame.segmentation = None;
    frame.checksum = Checksum::Partial { start: template.tcp_offset() as u16, offset: TCP_CHECKSUM as u16 };
}
