//! Every socket option that a move must not change, across a move both ways.

use crate::common::{connect, hosts};
use baton_bed::testbed::TestbedSettings;
use baton_client::Session;
use baton_lab::options::{Fate, OPTIONS, SocketOption, markdown};
use baton_linux::socket;
use baton_protocol::program::Place;
use std::os::fd::{AsFd, OwnedFd};

fn read(fd: &OwnedFd, option: &SocketOption) -> Option<Vec<u8>> {
    let mut raw = [0u8; 64];
    let length = socket::get_bytes(fd.as_fd(), option.level, option.number, &mut raw).ok()?;
    Some(raw[..length.min(64)].to_vec())
}

#[test]
fn the_document_is_the_table() {
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/socket-options.md");
    assert_eq!(
        std::fs::read_to_string(document).expect("the document"),
        markdown(),
        "run `baton options > docs/reference/socket-options.md`"
    );
}

#[test]
fn options_survive_moves_both_ways() {
    let bed = hosts(TestbedSettings::default());
    let mut session = Session::connect(&bed.socket()).expect("a session");
    let mut wrong = Vec::new();
    let mut taken = 0;
    for ipv6 in [false, true] {
        for option in OPTIONS.iter().filter(|option| matches!(option.fate, Fate::Kept | Fate::Carried | Fate::ReadOnly)) {
            if option.level == 41 && !ipv6 {
                continue;
            }
            // Any port: the last connection, which may not let others bind its own, may still be closing.
            let (server, _peer) = connect(&bed, ipv6, 0);
            let server = OwnedFd::from(server);
            // The test's own descriptor of the socket.
            let view = server.try_clone().expect("a duplicate");
            let id = session.adopt(server).expect("adoption");
            if let Some(value) = option.value
                && session.set_option(id, option.level, option.number, value).is_err()
            {
                // This kernel does not have it, or not for this family.
                session.close(id).expect("close");
                continue;
            }
            let before = read(&view, option);
            let names = (socket::local_address(view.as_fd()).ok(), socket::peer_address(view.as_fd()).ok());
            for to in [Place::Nic, Place::Kernel, Place::Nic, Place::Kernel] {
                session.move_to(id, to).unwrap_or_else(|error| panic!("{}: {error}", option.name));
                // The shell has no keep-alive on the NIC; the session answers for it.
                let now = if (option.level, option.number) == (1, 9) {
                    session.option(id, 1, 9).ok().map(|value| value.to_ne_bytes().to_vec())
                } else if to == Place::Nic && (option.level, option.number) == (1, 26) {
                    before.clone()
                } else if to == Place::Nic && matches!((option.level, option.number), (1, 2) | (6, 2) | (6, 10)) {
                    // Repair mode, which the shell is in, shows values of its own.
                    before.clone()
                } else {
                    read(&view, option)
                };
                let names_now = (socket::local_address(view.as_fd()).ok(), socket::peer_address(view.as_fd()).ok());
                assert_eq!(names_now, names, "{} in {to:?}", option.name);
                if now != before {
                    wrong.push(format!("{} after a move to {to:?}: {before:?} became {now:?} (IPv6 {ipv6})", option.name));
                }
            }
            taken += 1;
            session.close(id).expect("close");
        }
    }
    assert!(wrong.is_empty(), "{} options changed:\n{}", wrong.len(), wrong.join("\n"));
    assert!(taken > 100, "only {taken} options could be taken across");
}
