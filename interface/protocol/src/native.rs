//! Why the kernel alone serves a program, or some of its connections (*natively*), for `baton ls`. These connections
//! have no lines there, since they are not registered with the agent; registered ones have their own reason.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Why a program linked with musl runs natively; this text follows its dynamic linker's path.
pub const MUSL: &str = "), and the library that it would need is one for glibc";

/// Why a statically linked program runs natively.
pub const STATIC: &str = "it is statically linked, and no library can be loaded into it; `baton attach` moves its connections";

/// Why a Go program runs natively.
pub const GO: &str = "it is a Go program, which makes its system calls past the C library; `baton attach` moves its connections";

/// Why a program, or one of its connections, is served natively.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Native {
    /// The program is statically linked.
    Static,
    /// The program is in Go.
    Go,
    /// The program is linked with musl; by this dynamic linker.
    Musl(String),
    /// The program filters its system calls.
    Filters,
    /// The program cannot reach the agent any more.
    OutOfReach,
    /// The program uses io_uring.
    IoUring,
    /// The program creates processes past the C library.
    RawFork,
    /// A connection has options by which a receive returns more than bytes.
    ReceivesMore,
    /// A connection is one of MPTCP.
    Mptcp,
    /// The agent does not take a connection, for this reason.
    Refused(String),
    /// The program's library is of another version than the agent.
    OtherVersion,
}

impl Native {
    /// Whether the reason applies to single connections only.
    pub fn is_of_connections(&self) -> bool {
        matches!(self, Native::ReceivesMore | Native::Mptcp | Native::Refused(_))
    }

    /// The cause in reports for connections that were on the NIC.
    pub fn cause(&self) -> &'static str {
        match self {
            Native::Static => "static",
            Native::Go => "Go",
            Native::Musl(_) => "musl",
            Native::Filters => "seccomp",
            Native::OutOfReach => "out of reach",
            Native::IoUring => "io_uring",
            Native::RawFork => "raw fork",
            Native::ReceivesMore => "TCP_INQ",
            Native::Mptcp => "MPTCP",
            Native::Refused(_) => "refused",
            Native::OtherVersion => "version",
        }
    }
}

impl fmt::Display for Native {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Native::Static => f.write_str(STATIC),
            Native::Go => f.write_str(GO),
            Native::Musl(linker) => write!(f, "it is linked with musl ({linker}{MUSL}"),
            Native::Filters => f.write_str("seccomp: it filters its system calls"),
            Native::OutOfReach => f.write_str(
                "out of reach: it has changed its root directory, namespaces or user before it had a TCP socket, and cannot reach Baton any more",
            ),
            Native::IoUring => f.write_str("io_uring: the kernel makes its calls, where no library sees them"),
            Native::RawFork => f.write_str("raw fork: it makes processes past the C library, which share its connections"),
            Native::ReceivesMore => {
                f.write_str("receiving returns more than bytes (TCP_INQ, time stamps and the like), which only the kernel knows")
            }
            Native::Mptcp => f.write_str(
                "MPTCP: the kernel cannot export it (start the program with MPTCP off, e.g. GODEBUG=multipathtcp=0)",
            ),
            Native::Refused(reason) => f.write_str(reason),
            Native::OtherVersion => {
                f.write_str("version: its library is of another version of Baton than this one; start the program anew")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_says_what_it_is_about() {
        assert!([Native::Static, Native::Go].iter().all(|why| why.to_string().contains("baton attach")));
        assert!(Native::Musl("ld-musl-x86_64.so.1".into()).to_string().contains("(ld-musl-x86_64.so.1)"));
        for why in [Native::Filters, Native::OutOfReach, Native::IoUring, Native::RawFork, Native::OtherVersion] {
            assert!(why.to_string().starts_with(&format!("{}: ", why.cause())) && !why.is_of_connections(), "{why}");
        }
        assert!(Native::Mptcp.to_string().starts_with("MPTCP: ") && Native::Mptcp.is_of_connections());
        assert!(Native::Refused("it is so".into()).is_of_connections());
    }
}
