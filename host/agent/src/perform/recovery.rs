//! Actions that restore a connection whose NIC has died.

use super::Performer;
use super::restore::damaged;
use crate::calls::Stop;
use crate::journal;
use crate::record::{image_at_death, read_record};
use baton_abi::layout::nic;
use baton_abi::{Control, Message, Operation};
use baton_moves::{Action, Outcome};
use baton_recovery::{gather, posts_of, sends_of};
use baton_steering::Path;

impl Performer<'_> {
    /// Makes the next NIC hold the connection's frames, under a new cid: none may reach the kernel while the socket is
    /// being restored.
    pub(super) fn steal_again(&mut self) -> Outcome {
        let exported = self.connection.exported(self.ground.nic_memory);
        let (Some(cid), Some(on_nic), Some(exported)) = (self.connection.cid, &self.connection.on_nic, exported) else {
            return Outcome::Done;
        };
        let next = cid.next_generation();
        let (leaves_by, nic) = (exported.image.link.interface, cid.nic() as u32);
        let wherever = Path { leaves_by, nic, anywhere: self.connection.flow.device == 0, ..Path::default() };
        let path = on_nic.way.as_ref().map_or(wherever, |way| way.path);
        self.ground.shape.steal_again(&self.connection.flow, &path);
        // The slot has held the flow since the handoff. Should this NIC die, too, the next round starts from here.
        self.connection.cid = Some(next);
        journal::note_next_name(self.ground.nic_memory, next.next_generation());
        let _ = self.ground.nic().post(Message::control(Operation::NicControl, Control::Mirror, next, 0, 0));
        self.ask(Action::StealAgain, Control::Steal, 0)
    }

    /// Restores the connection from record, block and memory; or, if its NIC never ran it, from the image that was
    /// handed off.
    pub(super) fn import_record(&mut self) -> Result<(), Stop> {
        let cid = self.cid()?;
        let on_nic = self.connection.on_nic.as_deref().ok_or_else(|| damaged("journal"))?;
        let handed_off = self.connection.exported(self.ground.nic_memory).ok_or_else(|| damaged("journal"))?;
        let image = match read_record(self.ground.nic_memory, nic::slot(cid.slot())) {
            None => handed_off.image,
            Some(record) => {
                let (offset, size) = on_nic.memory().receive;
                if let Some(circle) = self.open.memory.circle(offset, size) {
                    gather(&posts_of(self.ground.nic_memory, cid.slot()), &self.open.memory, &circle, record.rcv_read);
                }
                let (offset, size) = on_nic.memory().send;
                if let Some(circle) = self.open.memory.circle(offset, size) {
                    gather(&sends_of(&self.open.memory, self.connection.number()), &self.open.memory, &circle, record.snd_una);
                }
                image_at_death(&handed_off, on_nic, &record, self.connection).ok_or_else(|| damaged("record"))?
            }
        };
        image.check().map_err(|_| damaged("record"))?;
        self.begin_import(image, None)
    }
}
