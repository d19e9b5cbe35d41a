//! Who looks at the frames that pass the NICs' wires: the memory of their rings, which outlives a NIC.

use crate::nic_requests::Answered;
use baton_capture::MOST_CAPTURES;
use baton_protocol::nic::{Capture, ToNic};
use baton_shm::Region;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The tag of a request of a session.
type At = (u32, u32);

/// One who looks.
struct Looker {
    /// Number of the session.
    session: u32,
    wanted: Capture,
    /// Of each NIC.
    memory: Vec<Arc<Region>>,
    /// The devices' frames, until they have been handed over.
    devices: Option<OwnedFd>,
    /// Tag of the request, until it has been answered.
    tag: Option<u32>,
    /// NICs that have not answered.
    awaited: usize,
}

/// All who look.
#[derive(Default)]
pub(crate) struct Captures {
    last: u32,
    all: Vec<Looker>,
}

/// The answer to the one who asked: the memory of the rings, then the socket with the devices' frames; or why
/// there are none.
pub(crate) type ToCapturer = (At, Result<(Vec<Arc<Region>>, Option<OwnedFd>), String>);

impl Captures {
    /// Begins to let a session look. Returns its id; the requests to the NICs follow.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn begin(
        &mut self,
        (session, tag): At,
        wanted: Capture,
        (nics, bytes): (usize, usize),
        devices: Option<OwnedFd>,
    ) -> Result<u32, String> {
        if self.all.iter().any(|one| one.session == session) {
            return Err("this connection has its capture".into());
        }
        if self.all.len() >= MOST_CAPTURES {
            return Err(format!("{} captures run already, which is the most at a time", self.all.len()));
        }
        let region = |_| Region::create("baton-capture", bytes).map(Arc::new);
        let memory = (0..nics).map(region).collect::<io::Result<Vec<_>>>();
        let memory = memory.map_err(|error| format!("no memory for what is captured: {error}"))?;
        self.last = self.last.wrapping_add(1);
        let wanted = Capture { id: self.last, ..wanted };
        self.all.push(Looker { session, wanted, memory, devices, tag: Some(tag), awaited: nics });
        Ok(self.last)
    }

    /// The requests to a NIC of this number: of the one with this id, or of all.
    pub fn requests(&self, nic: usize, id: Option<u32>) -> impl Iterator<Item = (ToNic, BorrowedFd<'_>)> {
        let meant = self.all.iter().filter(move |one| id.is_none_or(|id| one.wanted.id == id));
        meant.filter_map(move |one| Some((ToNic::Capture(one.wanted), one.memory.get(nic)?.fd()?)))
    }

    /// A NIC has answered. Returns the answer to the one who asked, if it is the last NIC, or has refused.
    pub fn answered(&mut self, id: u32, answer: Answered) -> Option<ToCapturer> {
        let one = self.all.iter_mut().find(|one| one.wanted.id == id)?;
        one.awaited = one.awaited.saturating_sub(1);
        let done = one.awaited == 0 || answer.is_err();
        let at = (one.session, one.tag.take_if(|_| done)?);
        let (memory, devices) = (one.memory.clone(), one.devices.take());
        Some((at, answer.map(|()| (memory, devices))))
    }

    /// A session has ended. Returns the id of what it looked at, if it did.
    pub fn end(&mut self, session: u32) -> Option<u32> {
        let at = self.all.iter().position(|one| one.session == session)?;
        Some(self.all.swap_remove(at).wanted.id)
    }
}
