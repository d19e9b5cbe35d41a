//! Receive buffers of any size that a program can set: an upload goes on, however late the program is in reporting what
//! it has read, and whatever scale was agreed on before.

use baton_sim::Impairments;
use baton_sim::pair::Pair;
use baton_tcp::{Config, State};

const SECOND: u64 = 1_000_000;
/// Windows of the buffer's size that an upload takes, behind the first one, which is advertised before the buffer is
/// set.
const WINDOWS: u64 = 60;

/// Uploads over a path of 200 µs to a connection whose receive buffer is set to `buffer` when its handshake is over.
/// How long it took.
fn upload(buffer: u32, receive_limit: u32, mtu: u32, timestamps: bool) -> Result<u64, String> {
    let config = Config { receive_buffer: 1 << 18, receive_limit, mtu, timestamps, ..Config::default() };
    let mut pair = Pair::new([config; 2], Impairments { delay: 100, ..Impairments::default() }, 5);
    assert!(pair.run_until(SECOND, |pair| pair.ends.iter().all(|end| end.connection.state() == State::Established)));
    let receiver = &mut pair.ends[1];
    receiver.connection.limit_window(buffer);
    // An eighth of the window, as programs do by REPORT_SHIFT.
    receiver.reports_every = (buffer / 8).clamp(1, 8192);
    let bytes = 65_536 + WINDOWS * u64::from(buffer);
    pair.ends[0].send(bytes, false);
    let started = pair.now;
    // The last bytes are acknowledged whether or not the program has reported that they are read.
    let whole = pair.run_until(600 * SECOND, |pair| pair.ends[1].verified == bytes && pair.ends[0].acknowledged() == bytes);
    let took = pair.now.since(started);
    let verified = pair.ends[1].verified;
    if whole { Ok(took) } else { Err(format!("{verified} bytes after {took} µs: {:?}", pair.ends[1].connection)) }
}

#[test]
fn an_upload_into_a_receive_buffer_of_any_size_goes_on() {
    let sizes =
        (1..64).chain((64..4096).step_by(211)).chain((4096..70_000).step_by(3989)).chain([2304, 3000, 4608, 6000, 65_535]);
    let mut random = 1u32;
    for buffer in sizes {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let scale = [0, 1 << 18, 6 << 20, 1 << 30][random as usize >> 10 & 3];
        let mtu = [576, 1500, 9000][(random >> 20) as usize % 3];
        let took = upload(buffer, scale, mtu, random >> 30 & 1 == 1);
        let took = took.unwrap_or_else(|stuck| panic!("buffer {buffer}, scale for {scale}, MTU {mtu}: {stuck}"));
        // Each takes a round trip, or the sender's wait for more room (RFC 9293 section 3.8.6.2.1) and an
        // acknowledgement that is delayed.
        assert!(took < (WINDOWS + 20) * SECOND / 2, "buffer {buffer}, scale for {scale}, MTU {mtu}: {took} µs");
    }
}
