//! systemd's journal, which takes entries with fields as datagrams.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::Path;

const SOCKET: &str = "/run/systemd/journal/socket";

/// Set by systemd for a process whose standard output or error is the journal's: that stream's device and inode, so
/// that a process notices when its own leads elsewhere (systemd.exec(5)).
const STREAM: &str = "JOURNAL_STREAM";

/// A connection to the journal. A process makes it before it gives up the right to do so.
#[derive(Debug)]
pub(crate) struct Journal(UnixDatagram);

impl Journal {
    /// Connects to the journal if standard error leads there.
    pub fn of_standard_error() -> Option<Journal> {
        let stream = std::env::var(STREAM).ok()?;
        if is_stream(io::stderr(), &stream) { Journal::at(Path::new(SOCKET)).ok() } else { None }
    }

    fn at(path: &Path) -> io::Result<Journal> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.connect(path)?;
        Ok(Journal(socket))
    }

    /// Sends an entry, if that does not wait. Returns whether it was sent.
    pub fn send(&self, entry: &[u8]) -> bool {
        self.0.send(entry).is_ok()
    }
}

/// Whether a descriptor is of the stream with this name: device and inode.
fn is_stream(descriptor: impl AsFd, name: &str) -> bool {
    rustix::fs::fstat(descriptor).is_ok_and(|of| name == format!("{}:{}", of.st_dev, of.st_ino))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    /// A journal for a test, and the socket that receives its entries.
    pub(crate) fn connected(name: &str) -> (Journal, UnixDatagram) {
        let path = std::env::temp_dir().join(format!("baton-journal-{name}-{}", std::process::id()));
        let receiver = UnixDatagram::bind(&path).expect("a socket");
        let journal = Journal::at(&path).expect("a journal");
        std::fs::remove_file(&path).expect("its removal");
        receiver.set_nonblocking(true).expect("its mode");
        (journal, receiver)
    }

    /// Neither a journal that reads nothing nor one that has ended blocks the process that logs.
    #[test]
    fn a_journal_that_does_not_read_holds_nobody_up() {
        let (journal, receiver) = connected("full");
        let sent = (0..1_000_000).take_while(|_| journal.send(b"MESSAGE=x\n")).count();
        assert!((1..1_000_000).contains(&sent), "{sent} entries");
        let mut entry = [0; 32];
        assert_eq!(receiver.recv(&mut entry).expect("an entry"), 10);
        assert!(journal.send(b"MESSAGE=y\n"), "there is room again");
        drop(receiver);
        assert!(!journal.send(b"MESSAGE=z\n"));
    }

    /// The stream's name is in the environment of all that a service starts, wherever their standard error leads.
    #[test]
    fn a_stream_is_known_by_device_and_inode() {
        let file = File::open("/dev/null").expect("a file");
        let of = file.metadata().expect("its numbers");
        assert!(is_stream(&file, &format!("{}:{}", of.dev(), of.ino())));
        for other in [format!("{}:{}", of.dev(), of.ino() + 1), format!("{}:{}", of.dev() + 1, of.ino()), String::new()] {
            assert!(!is_stream(&file, &other), "{other}");
        }
        assert!(Journal::at(Path::new("/nobody/is/here")).is_err());
    }
}
