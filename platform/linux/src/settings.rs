//! The settings that a newly started process gets. In front of them is the version of the protocol, which holds for the
//! settings and all later messages.

use crate::control::Channel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

/// Sends a process that was just started the version of the protocol and its settings.
///
/// # Errors
/// The system's.
pub fn send<T: Serialize>(channel: &Channel, version: u32, settings: &T) -> io::Result<()> {
    channel.send(&version, &[])?;
    channel.send(settings, &[])
}

/// Receives the settings that [`send`] has sent, in a process that was built with this version of the protocol.
///
/// # Errors
/// The system's, or `InvalidData` if the other process has another version.
pub fn receive<T: DeserializeOwned>(channel: &Channel, version: u32) -> io::Result<T> {
    let (theirs, _) = channel.receive::<u32>()?;
    if theirs != version {
        let text = format!(
            "the process that started this one speaks version {theirs} of their protocol, this one {version}: baton was replaced while it \
             ran; end it (SIGTERM to `baton up` or `baton run`) and start it again"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    channel.receive::<T>().map(|(settings, _)| settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_a_clear_error() {
        let (one, other) = Channel::pair().expect("a pair");
        send(&one, 3, &7u8).expect("sent");
        assert_eq!(receive::<u8>(&other, 3).expect("settings"), 7);
        send(&one, 4, &7u8).expect("sent");
        let error = receive::<u8>(&other, 3).expect_err("another version");
        assert!(error.kind() == io::ErrorKind::InvalidData && error.to_string().contains("start it again"), "{error}");
    }
}
