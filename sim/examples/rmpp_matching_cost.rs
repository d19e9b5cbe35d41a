//! What a message costs host and NIC when the policy matches, and when the NIC does. For callgrind, which counts the
//! instructions in [`host`] and [`nic`]; `scripts/rmpp-matching-cost` runs it and prints the table.
//!
//! Arguments: `policy` or `nic`, posted receives, bytes of a message, messages.

use baton_rmpp::interface::WORDS;
use baton_rmpp::{Command, Config, Data, Event, Halves, Outgoing, Policy, Region, Request};
use baton_wire::Endpoint;
use std::collections::VecDeque;
use std::hint::black_box;

const BUFFERS: u64 = 1 << 20;
const PACKET: u16 = 1472;

type Records = VecDeque<[u64; WORDS]>;

struct Side {
    policy: Policy,
    data: Data,
    memory: Vec<u8>,
    commands: Records,
    events: Records,
}

impl Side {
    fn new(number: u8, posted_on_nic: u16) -> Side {
        let config = Config {
            endpoint: number.into(),
            receives: 12_000,
            packet: PACKET,
            buffers: BUFFERS,
            memory: BUFFERS + 64 * 1500,
            data_posted: posted_on_nic,
            ..Config::default()
        };
        let data = Data::new(config.data(Halves::BOTH, address(number), 256));
        let policy = Policy::new(config).expect("the settings hold");
        let (commands, events) = (Records::new(), Records::new());
        Side { policy, data, memory: vec![0; config.memory as usize], commands, events }
    }
}

fn address(number: u8) -> Endpoint {
    Endpoint::v4([10, 0, 0, number], 700)
}

/// The receiving host's work: what the NIC has reported, and commands for it.
#[inline(never)]
fn host(side: &mut Side, now: u64) {
    run_policy(side, now);
}

/// The receiving NIC's work: commands, and the packet that has come.
#[inline(never)]
fn nic(side: &mut Side, packet: Option<(&Endpoint, &[u8])>) {
    run_data(side, packet);
}

#[inline(always)]
fn run_policy(side: &mut Side, now: u64) {
    while let Some(words) = side.events.pop_front() {
        let event = Event::from_words(&words).expect("an event");
        side.policy.handle_event(&event, now, &mut side.memory[..]);
    }
    while let Some(command) = side.policy.poll_command() {
        side.commands.push_back(command.to_words());
    }
}

/// Posts a receive: the host's work, too.
#[inline(never)]
fn host_post(side: &mut Side, tag: u64, region: Region, now: u64) {
    let request = Request { source: None, context: 0, tag, ignore: 0, region, token: tag };
    side.policy.post(request, now, &mut side.memory[..]).expect("a receive");
}

#[inline(always)]
fn run_data(side: &mut Side, packet: Option<(&Endpoint, &[u8])>) {
    while let Some(words) = side.commands.pop_front() {
        side.data.handle_command(&Command::from_words(&words).expect("a command"));
    }
    if let Some((from, packet)) = packet {
        side.data.input(from, packet, &mut side.memory[..]);
    }
    while let Some(event) = side.data.poll_event() {
        side.events.push_back(event.to_words());
    }
}

fn settle(sides: &mut [Side; 2], now: u64) {
    let mut packet = vec![0; PACKET.into()];
    let mut begins = true;
    loop {
        let mut idle = true;
        for at in 0..2 {
            let [sender, receiver] = sides;
            run_policy(sender, now);
            run_data(sender, None);
            // A host is woken by an event, or has just posted.
            if !receiver.events.is_empty() || begins {
                host(receiver, now);
                begins = false;
            }
            if !receiver.commands.is_empty() {
                nic(receiver, None);
            }
            let outbound = {
                let side = &mut sides[at];
                side.data.poll_transmit(&side.memory[..], &mut packet)
            };
            if let Some(outbound) = outbound {
                let from = address(at as u8);
                let packet = Some((&from, &packet[..outbound.length]));
                match at {
                    0 => nic(&mut sides[1], packet),
                    _ => run_data(&mut sides[0], packet),
                }
                idle = false;
            }
        }
        if idle && sides.iter().all(|side| side.commands.is_empty() && side.events.is_empty()) {
            break;
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let number = |at: usize| arguments[at].parse::<u64>().expect("a number");
    let (posted, size, messages) = (number(2), number(3), number(4));
    let on_nic = if arguments[1] == "nic" { 12_000 } else { 0 };
    let mut sides = [Side::new(0, 0), Side::new(1, on_nic)];
    let mut now = 1_000_000;
    let region = Region { offset: 0, length: size };
    for tag in 1..posted {
        host_post(&mut sides[1], 1_000 + tag, region, now);
        settle(&mut sides, now);
    }
    let peer = sides[0].policy.open(address(1), 1).expect("a peer");
    for _ in 0..messages {
        now += 1_000;
        host_post(&mut sides[1], 0, region, now);
        settle(&mut sides, now);
        let outgoing = Outgoing { peer, context: 0, tag: 0, data: 0, region, token: 0 };
        sides[0].policy.send(outgoing, now).expect("room for a message");
        settle(&mut sides, now);
        let mut received = 0;
        while let Some(completion) = sides[1].policy.poll_completion() {
            received += u64::from(black_box(completion).result.is_ok());
        }
        assert_eq!(received, 1, "a message came");
        while sides[0].policy.poll_completion().is_some() {}
    }
    assert_eq!(sides[1].policy.matches_in_data(), on_nic > 0);
}
