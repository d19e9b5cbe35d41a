//! How many bytes a connection has carried since the agent has it, wherever it was.
//!
//! In the kernel TCP_INFO counts in 64 bits, from zero after each import. On the NIC there are sequence numbers only:
//! differences modulo 2³² are added up at each poll.

/// Bytes of a connection.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct Traffic {
    /// Sent, and acknowledged by the peer.
    pub sent: u64,
    /// Received in order.
    pub received: u64,
}

impl Traffic {
    /// With this many more.
    pub fn plus(self, sent: u64, received: u64) -> Traffic {
        Traffic { sent: self.sent.saturating_add(sent), received: self.received.saturating_add(received) }
    }

    /// With what lies between these sequence numbers, received and acknowledged: less than 4 GiB each.
    pub fn after(self, from: (u32, u32), to: (u32, u32)) -> Traffic {
        self.plus(u64::from(to.1.wrapping_sub(from.1)), u64::from(to.0.wrapping_sub(from.0)))
    }

    /// What lies between an earlier state and this one.
    pub fn since(self, earlier: Traffic) -> Traffic {
        Traffic { sent: self.sent.saturating_sub(earlier.sent), received: self.received.saturating_sub(earlier.received) }
    }

    /// Without the last bytes received, which are counted once more.
    pub fn without_received(self, bytes: u32) -> Traffic {
        Traffic { received: self.received.saturating_sub(u64::from(bytes)), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_numbers_wrap() {
        let traffic = Traffic { sent: 5, received: 7 };
        let after = traffic.after((u32::MAX - 1, u32::MAX), (8, 0));
        assert_eq!(after, Traffic { sent: 6, received: 17 });
        assert_eq!(after.without_received(10), Traffic { sent: 6, received: 7 });
        assert_eq!(after.since(traffic), Traffic { sent: 1, received: 10 });
        assert_eq!(traffic.since(after), Traffic::default());
        assert_eq!(after.plus(1 << 40, 0).sent, (1 << 40) + 6);
        assert_eq!(Traffic::default().without_received(1).received, 0);
    }
}
