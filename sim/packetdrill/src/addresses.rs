//! Socket addresses in the C interface's form.

use crate::errors::Answer;
use baton_wire::Endpoint;

/// Reads a `sockaddr_in` or `sockaddr_in6`: its family and the endpoint.
pub fn read(bytes: &[u8]) -> Answer<(i32, Endpoint)> {
    let family = bytes.get(..2).map(|two| u16::from_ne_bytes([two[0], two[1]])).ok_or(libc::EINVAL)?;
    let port = |bytes: &[u8]| u16::from_be_bytes([bytes[2], bytes[3]]);
    match i32::from(family) {
        libc::AF_INET if bytes.len() >= 8 => {
            Ok((libc::AF_INET, Endpoint::v4([bytes[4], bytes[5], bytes[6], bytes[7]], port(bytes))))
        }
        libc::AF_INET6 if bytes.len() >= 24 => {
            let mut address = [0; 16];
            address.copy_from_slice(&bytes[8..24]);
            Ok((libc::AF_INET6, Endpoint::v6(address, port(bytes))))
        }
        libc::AF_UNSPEC => Ok((libc::AF_UNSPEC, Endpoint::v6([0; 16], 0))),
        libc::AF_INET | libc::AF_INET6 => Err(libc::EINVAL),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Writes an endpoint as a socket of `domain` sees it.
pub fn write(domain: i32, endpoint: Endpoint) -> Vec<u8> {
    let mut out = (domain as u16).to_ne_bytes().to_vec();
    out.extend(endpoint.port.to_be_bytes());
    if domain == libc::AF_INET {
        out.extend(endpoint.v4_bytes());
        out.extend([0; 8]);
    } else {
        out.extend([0; 4]);
        out.extend(endpoint.address);
        out.extend([0; 4]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_a_round_trip() {
        let v4 = Endpoint::v4([192, 0, 2, 1], 80);
        assert_eq!(read(&write(libc::AF_INET, v4)), Ok((libc::AF_INET, v4)));
        assert_eq!(read(&write(libc::AF_INET6, v4)), Ok((libc::AF_INET6, v4)), "IPv4-mapped");
        let v6 = Endpoint::v6([7; 16], 81);
        assert_eq!(read(&write(libc::AF_INET6, v6)), Ok((libc::AF_INET6, v6)));
        assert_eq!(read(&[2, 0, 1]), Err(libc::EINVAL));
    }
}
