//! Every message between programs, agent, keeper and NIC, each once. Messages are encoded with postcard, which does not
//! say what it encodes: so each control connection begins with a version.
#![forbid(unsafe_code)]

pub mod address;
pub mod events;
pub mod filter;
pub mod keeper;
pub mod native;
pub mod nic;
pub mod program;
pub mod texts;

use baton_linux::control::Channel;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

/// Version of the messages between keeper, agent and NIC, and of the layout of NIC memory and session memory. Each is
/// started from the file that its starter runs (`baton_linux::starter::own_command`), whatever has taken that file's
/// place since, so they differ only if somebody starts one by hand. An agent takes the sessions of the last one over,
/// whose memory is as that has made it.
pub const VERSION: u32 = 10;

/// Sends a process that was just started the version and its settings.
///
/// # Errors
/// The system's.
pub fn send_settings<T: Serialize>(channel: &Channel, settings: &T) -> io::Result<()> {
    channel.send(&VERSION, &[])?;
    channel.send(settings, &[])
}

/// Receives what [`send_settings`] sends.
///
/// # Errors
/// The system's, or `InvalidData` if the other process has another version of the protocol.
pub fn receive_settings<T: DeserializeOwned>(channel: &Channel) -> io::Result<T> {
    let (version, _) = channel.receive::<u32>()?;
    if version != VERSION {
        let text = format!(
            "the process that started this one speaks version {version} of their protocol, this one {VERSION}: baton was replaced while it \
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
        send_settings(&one, &7u8).expect("sent");
        assert_eq!(receive_settings::<u8>(&other).expect("settings"), 7);
        one.send(&(VERSION + 1), &[]).expect("sent");
        one.send(&7u8, &[]).expect("sent");
        let error = receive_settings::<u8>(&other).expect_err("another version");
        assert!(error.kind() == io::ErrorKind::InvalidData && error.to_string().contains("start it again"), "{error}");
    }
}
