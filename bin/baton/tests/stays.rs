//! Connections that cannot be moved stay where they are, and say why.

mod common;

use baton_client::protocol::Place;
use baton_kernel::rtnetlink;
use baton_lab::testbed::{TestbedSettings, address_a, address_b};
use common::{hosts, scene};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

#[test]
fn urgent_data_stays() {
    let mut scene = scene(TestbedSettings::default());
    assert_eq!(unsafe { libc::send(scene.peer.as_raw_fd(), b"!".as_ptr().cast(), 1, libc::MSG_OOB) }, 1);
    std::thread::sleep(Duration::from_millis(50));
    let error = scene.session.move_to(scene.id, Place::Nic).expect_err("urgent data");
    assert!(error.to_string().contains("urgent"), "{error}");
    assert_eq!(scene.session.place(scene.id), Some(Place::Kernel));
}

#[test]
fn mptcp_stays() {
    let bed = hosts(TestbedSettings::default());
    let listener = bed.host_a.run(|| TcpListener::bind(SocketAddr::new(address_a(false), 8080))).expect("a listener");
    // SAFETY-free helper: a socket of protocol 262 is Multipath TCP's.
    let fd = bed.host_b.run(|| {
        let raw = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, 262) };
        if raw < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(unsafe { OwnedFd::from_raw_fd(raw) })
    });
    let Ok(fd) = fd else {
        eprintln!("this kernel has no MPTCP: there is nothing that could be moved");
        return;
    };
    use std::os::fd::AsFd;
    baton_kernel::socket::connect(fd.as_fd(), listener.local_addr().expect("an address")).expect("an MPTCP connection");
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let error = session.adopt(fd).expect_err("MPTCP");
    assert!(error.to_string().contains("MPTCP"), "{error}");
}

/// Without a route, or with its source address gone, a connection stays on the side where it is, and goes on when they are back.
#[test]
fn no_route_and_a_changed_source_address_stay() {
    for start in [Place::Kernel, Place::Nic] {
        let mut scene = scene(TestbedSettings::default());
        scene.move_to(start);
        let other = if start == Place::Nic { Place::Kernel } else { Place::Nic };
        let index = scene.bed.host_a.run(|| Ok(rtnetlink::link(&rtnetlink::open()?, "baton0")?.index)).expect("the interface");
        scene.bed.host_a.run(|| rtnetlink::delete_address(&rtnetlink::open()?, index, address_a(false), 24)).expect("delete");
        let error = scene.session.move_to(scene.id, other).expect_err("no source address");
        assert!(error.to_string().contains("source address"), "{error}");
        let restore = || {
            let netlink = rtnetlink::open()?;
            rtnetlink::add_address(&netlink, index, address_a(false), 24)?;
            rtnetlink::set_neighbour(&netlink, index, address_b(false), baton_lab::testbed::MAC_B)
        };
        scene.bed.host_a.run(restore).expect("the address again");
        scene.exchange(10_000, other);
    }
}

#[test]
fn what_is_no_connection_is_refused() {
    let bed = hosts(TestbedSettings::default());
    let mut session = baton_client::Session::connect(&bed.socket()).expect("a session");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let error = session.adopt(OwnedFd::from(listener.try_clone().expect("dup"))).expect_err("a listener");
    assert!(error.to_string().contains("LISTEN"), "{error}");
    let file = std::fs::File::open("/dev/null").expect("/dev/null");
    assert!(session.adopt(OwnedFd::from(file)).is_err());
    // A connection whose route does not lead through the NIC stays in the kernel.
    let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("loopback");
    let id = session.adopt(OwnedFd::from(stream)).expect("adoption");
    let error = session.move_to(id, Place::Nic).expect_err("loopback");
    assert!(error.to_string().contains("interface") || error.to_string().contains("address"), "{error}");
}
