//! An endpoint for tests.

use crate::{Access, Endpoint, Regions, Settings};
use baton_linux::events::monotonic_micros;
use std::net::SocketAddr;

struct Nothing;

impl Regions<Vec<u8>> for Nothing {
    fn find(&self, _: u64, _: u64, _: u64, _: Access) -> Option<Vec<u8>> {
        None
    }
}

/// One that has room for so many receives.
pub fn endpoint(receives: u16) -> Endpoint<Vec<u8>> {
    let settings = Settings { address: SocketAddr::from(([127, 0, 0, 1], 0)), receives, stream: false, ..Settings::default() };
    Endpoint::new(&settings, Box::new(Nothing), [7; 32], monotonic_micros()).expect("an endpoint")
}
