//! A compressed tar archive that only its owner can read.

use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// An archive that is being written.
pub struct Archive {
    tar: tar::Builder<GzEncoder<File>>,
    directory: String,
    /// Seconds since 1970.
    now: u64,
}

impl Archive {
    /// Creates the file, at `now`, seconds since 1970. All that is added lies in this directory.
    ///
    /// # Errors
    /// `AlreadyExists` if there is something, a link that leads nowhere too; else the failed system call's.
    pub fn create(path: &Path, directory: &str, now: u64) -> io::Result<Archive> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Archive { tar: tar::Builder::new(GzEncoder::new(file, Compression::default())), directory: directory.into(), now })
    }

    /// Adds a text.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn add(&mut self, name: &str, text: &str) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(self.now);
        self.tar.append_data(&mut header, format!("{}/{name}", self.directory), text.as_bytes())
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// The failed system call's.
    pub fn finish(&mut self) -> io::Result<()> {
        self.tar.finish()?;
        let zip = self.tar.get_mut();
        zip.try_finish()?;
        zip.get_ref().sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn nothing_is_overwritten_and_only_the_owner_reads() {
        let path = std::env::temp_dir().join(format!("baton-archive-{}.tar.gz", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut archive = Archive::create(&path, "here", 0).expect("a file");
        archive.add("a/b.txt", "text\n").expect("an entry");
        archive.finish().expect("its end");
        assert_eq!(std::fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        let error = Archive::create(&path, "here", 0).err().expect("a refusal");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        let file = flate2::read::GzDecoder::new(File::open(&path).expect("a file"));
        let mut archive = tar::Archive::new(file);
        let names: Vec<_> =
            archive.entries().expect("entries").map(|entry| entry.expect("one").path().expect("a path").into_owned()).collect();
        assert_eq!(names, [Path::new("here/a/b.txt")]);
        std::fs::remove_file(&path).expect("its removal");
    }
}
