//! The TCP of an offloaded connection. Any other change of it ends its prediction of the next segment.

use baton_tcp::{Connection, Instant};
use baton_wire::{Acknowledgement, Fields};
use core::ops::{Deref, DerefMut};

/// A connection. Mutable access disables the prediction ([`Connection::enable_prediction`]), so that a predicted
/// segment finds the state that was published last in the record.
#[derive(Debug)]
pub(crate) struct Tcp(Connection);

impl Tcp {
    /// Without a prediction.
    pub fn new(mut connection: Connection) -> Tcp {
        connection.disable_prediction();
        Tcp(connection)
    }

    /// The connection.
    pub fn into_inner(self) -> Connection {
        self.0
    }

    /// See [`Connection::enable_prediction`].
    pub fn enable_prediction(&mut self) -> bool {
        self.0.enable_prediction()
    }

    /// See [`Connection::predict_data`], which leaves the prediction valid.
    #[inline(always)]
    pub fn predict_data(&mut self, segment: &Fields, now: Instant, clock: u32) -> Option<Acknowledgement> {
        self.0.predict_data(segment, now, clock)
    }
}

impl Deref for Tcp {
    type Target = Connection;
    #[inline(always)]
    fn deref(&self) -> &Connection {
        &self.0
    }
}

impl DerefMut for Tcp {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Connection {
        self.0.disable_prediction();
        &mut self.0
    }
}
