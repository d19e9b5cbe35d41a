//! Frames about the NIC's own addresses: ARP and neighbour discovery from the wire, probes and announcements to it. The
//! front worker has the addresses; other workers pass such frames on to it.

use super::Worker;
use crate::addresses::{AddressSettings, Addresses, publish};
use crate::peers::{Call, FRONT};
use baton_abi::layout::Counter;
use baton_abi::{Cid, Control, Message, Operation};
use baton_device::{Checksum, Device, Frame};
use baton_resolution::Received;
use baton_tcp::Instant;
use baton_wire::{Arp, Neighbour};

impl<H: Device, W: Device> Worker<H, W> {
    /// Sets the NIC's own addresses. They are probed for once frames flow.
    pub fn set_addresses(&mut self, settings: &AddressSettings, now: Instant) {
        self.addresses.set(settings, &self.nic_memory, now.0);
        let any = !self.addresses.is_none();
        self.broadcast(|| Call::Addresses(any));
        self.wake_at(now.0);
        self.report_addresses();
    }

    /// In a worker other than the front worker: records whether there are addresses.
    pub(super) fn note_addresses(&mut self, any: bool) {
        self.addresses = if any { Addresses::Elsewhere } else { Addresses::None };
    }

    /// Takes the frame from the wire if it is about one of the NIC's own addresses. False if it is the kernel's.
    #[cold]
    pub(super) fn take_resolution(&mut self, now: Instant) -> bool {
        let Worker { addresses, frame, output, counters, nic_memory, .. } = self;
        let Addresses::Here(resolver) = addresses else { return self.forward_resolution() };
        let verified = frame.checksum != Checksum::Unknown;
        let received = resolver.receive(frame.bytes(), verified, now.0, &mut |answer| {
            let frame = output.frame_mut(counters);
            frame.fill(answer);
            frame.interface = 0;
            output.transmit(counters);
        });
        match received {
            Received::Other => return false,
            Received::Malformed => counters.add(Counter::BadResolution, 1),
            Received::Own => publish(resolver, nic_memory),
        }
        self.report_addresses();
        true
    }

    /// In a worker other than the front worker: passes the frame on if it may be about an address. False if it cannot
    /// be.
    fn forward_resolution(&mut self) -> bool {
        let bytes = self.frame.bytes();
        if Arp::parse(bytes).is_none() && Neighbour::parse(bytes, true).is_none() {
            return false;
        }
        let Some(crossbar) = &mut self.crossbar else { return false };
        if crossbar.peers.has_room(FRONT) {
            crossbar.peers.send(FRONT, Call::Resolution(self.frame.clone()));
        } else {
            self.counters.add(Counter::Dropped, 1);
        }
        true
    }

    /// In the front worker: processes a frame that another worker has received.
    pub(super) fn on_resolution(&mut self, frame: &Frame, now: Instant) {
        self.frame.copy_from(frame);
        if !self.take_resolution(now) {
            self.deliver_to_kernel(now);
        }
    }

    /// Sends the probes and announcements that are due.
    pub(super) fn poll_addresses(&mut self, now: Instant) {
        let Worker { addresses, output, counters, nic_memory, .. } = self;
        let Addresses::Here(resolver) = addresses else { return };
        if resolver.due() > now.0 {
            return;
        }
        resolver.poll(now.0, &mut |bytes| {
            let frame = output.frame_mut(counters);
            frame.fill(bytes);
            frame.interface = 0;
            output.transmit(counters);
        });
        publish(resolver, nic_memory);
        self.report_addresses();
    }

    /// Notifies the agent if an address has changed its state.
    fn report_addresses(&mut self) {
        if let Addresses::Here(resolver) = &mut self.addresses
            && resolver.take_changed()
        {
            self.send_to_agent(Message::control(Operation::OsControl, Control::Addresses, Cid(0), 0, 0));
        }
    }
}
