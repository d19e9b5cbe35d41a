//! One of the paper's machines in virtual time: a processor, a NIC, and a memory bus that DMA and copies share. They
//! run the real protocol code; only its cost comes from the model.

use super::hardware::Hardware;
use baton_rmpp::{Command, Completion, Config, Data, Disposition, Event, Half, Halves, Policy};
use baton_wire::Endpoint;
use baton_wire::rmpp::{Body, Packet, PacketFlags, envelope};
use std::collections::VecDeque;

/// Bytes of memory for messages.
pub const MESSAGES: u64 = 4 << 20;

/// Something for the processor to do in the kernel.
enum Work {
    /// A frame that the NIC has passed up, by an interrupt of its own or together with one before it.
    Frame { frame: Vec<u8>, interrupt: bool },
    /// Events of the NIC's data half.
    Events(Vec<Event>),
    /// A command whose packet the host makes.
    Command(Command),
    /// A packet of the host's data half.
    Transmit(Vec<u8>),
    /// Time-outs of the protocol.
    Timer,
}

/// Something for the NIC to do.
enum Job {
    /// A frame from the wire.
    Receive(Vec<u8>),
    /// A frame for the wire.
    Send(Vec<u8>),
}

/// What happens at a machine at a time (microseconds).
pub enum Happening {
    /// A frame arrives from the wire.
    Arrival(Vec<u8>),
    /// The NIC's processor is done with a packet, and its DMA begins.
    NicComputed,
    /// The NIC is done with a packet.
    NicDone,
    /// The NIC interrupts the host for what coalescing has held back.
    Coalesced,
    /// The kernel's work is done but for its copy, which begins.
    CpuComputed,
    /// The kernel's work is done.
    CpuDone,
    /// A time-out of the protocol that was set for this time.
    Timeout(u64),
    /// The program's work may be done.
    Program,
}

/// Where a packet goes, or what happens next at this machine.
pub enum Outcome {
    /// This happens here at the time.
    Later(f64, Happening),
    /// A frame enters the wire at the time.
    Wire(f64, Vec<u8>),
}

/// A machine.
pub struct Machine {
    /// Its endpoint.
    pub policy: Policy,
    /// The memory of program and endpoint.
    pub memory: Vec<u8>,
    /// What has completed and the program has not seen.
    pub completions: VecDeque<Completion>,
    hardware: Hardware,
    host: Data,
    nic: Data,
    on_nic: Halves,
    address: Endpoint,
    peer: Endpoint,
    /// The kernel's work that waits, and what is being done.
    cpu: VecDeque<Work>,
    working: Option<Work>,
    /// Bytes that it copies.
    copying: usize,
    began: f64,
    /// Microseconds that the kernel has had the processor.
    pub kernel_time: f64,
    /// Interrupts of the host.
    pub interrupts: u64,
    /// The NIC's frames that wait, and the one that is being handled.
    arrived: VecDeque<Vec<u8>>,
    outgoing: VecDeque<Vec<u8>>,
    handling: Option<Job>,
    /// When the memory bus is free.
    bus: f64,
    /// Frames whose interrupt coalescing holds back.
    held_back: Vec<Vec<u8>>,
    /// Events that wait for one that interrupts.
    reported: Vec<Event>,
    timer: Option<u64>,
    out: Vec<Outcome>,
}

impl Machine {
    /// Machine `number` of two, with these halves on its NIC and RSMs sent `early` packets early.
    pub fn new(number: u8, hardware: Hardware, on_nic: Halves, early: u8) -> Machine {
        let address = |number: u8| envelope::ethernet_address([2, 0, 0, 0, 0, number]);
        let config = Config {
            endpoint: number.into(),
            incarnation: 1,
            memory: MESSAGES + 64 * 9000,
            buffers: MESSAGES,
            buffer_size: 9000,
            packet: hardware.mtu,
            grant: hardware.grant,
            early: u8::try_from(hardware.grant).map_or(early, |grant| early.min(grant - 1)),
            peers: 1,
            ..Config::default()
        };
        let data = |halves| Data::new(config.data(halves, address(number), 1024));
        Machine {
            policy: Policy::new(config).expect("the model's settings hold"),
            memory: vec![0x5a; config.memory as usize],
            completions: VecDeque::new(),
            host: data(Halves { receiving: !on_nic.receiving, sending: !on_nic.sending }),
            nic: data(on_nic),
            hardware,
            on_nic,
            address: address(number),
            peer: address(1 - number),
            cpu: VecDeque::new(),
            working: None,
            copying: 0,
            began: 0.0,
            kernel_time: 0.0,
            interrupts: 0,
            arrived: VecDeque::new(),
            outgoing: VecDeque::new(),
            handling: None,
            bus: 0.0,
            held_back: Vec::new(),
            reported: Vec::new(),
            timer: None,
            out: Vec::new(),
        }
    }

    /// Address of the other machine.
    pub fn peer(&self) -> Endpoint {
        self.peer
    }

    /// Microseconds that the kernel has had the processor until `now`.
    pub fn kernel_time_until(&self, now: f64) -> f64 {
        self.kernel_time + if self.working.is_some() { now - self.began } else { 0.0 }
    }

    /// Lets something happen. What follows from it is added to `out`.
    pub fn happen(&mut self, happening: Happening, now: f64, out: &mut Vec<Outcome>) {
        match happening {
            Happening::Arrival(frame) => self.arrived.push_back(frame),
            Happening::NicComputed => self.begin_dma(now),
            Happening::NicDone => self.finish_job(now),
            Happening::Coalesced => self.interrupt_for_held_back(),
            Happening::CpuComputed => self.begin_copy(now),
            Happening::CpuDone => self.finish_work(now),
            Happening::Timeout(due) if self.timer == Some(due) => self.cpu.push_back(Work::Timer),
            // An earlier one was set since.
            Happening::Timeout(_) => {}
            Happening::Program => {}
        }
        self.proceed(now);
        out.append(&mut self.out);
    }

    /// Starts whatever can start: called after anything has happened, and after calls of the program.
    pub fn start(&mut self, now: f64, out: &mut Vec<Outcome>) {
        self.proceed(now);
        out.append(&mut self.out);
    }

    fn proceed(&mut self, now: f64) {
        self.take_commands();
        self.completions.extend(std::iter::from_fn(|| self.policy.poll_completion()));
        let mut packet = vec![0; self.hardware.mtu.into()];
        while self.host.has_transmit()
            && let Some(sent) = self.host.poll_transmit(&self.memory[..], &mut packet)
        {
            self.cpu.push_back(Work::Transmit(packet[..sent.length].to_vec()));
        }
        self.start_job(now);
        self.start_work(now);
        if let Some(next) = self.policy.next_timeout()
            && self.timer.is_none_or(|timer| next < timer)
        {
            self.timer = Some(next);
            self.out.push(Outcome::Later(next as f64, Happening::Timeout(next)));
        }
    }

    /// Hands the policy's commands on. Those whose packet the host makes cost it time first.
    fn take_commands(&mut self) {
        while let Some(command) = self.policy.poll_command() {
            match command {
                Command::Send { .. } | Command::Resend { .. } | Command::Control { .. } if self.on_nic.sending => {
                    self.cpu.push_back(Work::Command(command));
                }
                _ => self.carry_out(&command),
            }
        }
    }

    fn carry_out(&mut self, command: &Command) {
        let on_nic = |half| if half == Half::Receiving { self.on_nic.receiving } else { self.on_nic.sending };
        if command.half().is_none_or(on_nic) {
            self.nic.handle_command(command);
        }
        if command.half().is_none_or(|half| !on_nic(half)) {
            self.host.handle_command(command);
        }
    }

    /// Starts the NIC's next packet: received ones first, then the host's, then its own.
    fn start_job(&mut self, now: f64) {
        if self.handling.is_some() {
            return;
        }
        let mut packet = vec![0; self.hardware.mtu.into()];
        let job = if let Some(frame) = self.arrived.pop_front() {
            Job::Receive(frame)
        } else if let Some(frame) = self.outgoing.pop_front() {
            Job::Send(frame)
        } else if let Some(sent) = self.nic.poll_transmit(&self.memory[..], &mut packet) {
            Job::Send(packet[..sent.length].to_vec())
        } else {
            return;
        };
        self.handling = Some(job);
        self.out.push(Outcome::Later(now + self.hardware.nic(), Happening::NicComputed));
    }

    fn begin_dma(&mut self, now: f64) {
        let Some(Job::Receive(frame) | Job::Send(frame)) = &self.handling else { return };
        self.bus = self.bus.max(now) + frame.len() as f64 / self.hardware.dma;
        self.out.push(Outcome::Later(self.bus, Happening::NicDone));
    }

    fn finish_job(&mut self, now: f64) {
        match self.handling.take() {
            Some(Job::Send(frame)) => self.out.push(Outcome::Wire(now, frame)),
            Some(Job::Receive(frame)) => {
                if self.nic.input(&self.peer, &frame, &mut self.memory[..]) == Disposition::PassUp {
                    self.pass_up(frame, now);
                } else {
                    self.report();
                }
            }
            None => {}
        }
    }

    /// Interrupts the host for a frame, now or when coalescing allows.
    fn pass_up(&mut self, frame: Vec<u8>, now: f64) {
        self.held_back.push(frame);
        match self.hardware.coalescing {
            Some((_, packets)) if self.held_back.len() >= packets as usize => self.interrupt_for_held_back(),
            Some((delay, _)) if self.held_back.len() == 1 => {
                self.out.push(Outcome::Later(now + delay, Happening::Coalesced));
            }
            Some(_) => {}
            None => self.interrupt_for_held_back(),
        }
    }

    /// One interrupt for the frames that were held back.
    fn interrupt_for_held_back(&mut self) {
        self.interrupts += u64::from(!self.held_back.is_empty());
        for (number, frame) in self.held_back.drain(..).enumerate() {
            self.cpu.push_back(Work::Frame { frame, interrupt: number == 0 });
        }
    }

    /// Interrupts the host for what the data half on the NIC reports. That all packets have been placed can wait for
    /// the END, which follows.
    fn report(&mut self) {
        let mut urgent = false;
        while let Some(event) = self.nic.poll_event() {
            urgent |= !matches!(event, Event::Placed { .. } | Event::Released { .. });
            self.reported.push(event);
        }
        if urgent {
            self.interrupts += 1;
            self.cpu.push_back(Work::Events(std::mem::take(&mut self.reported)));
        }
    }

    /// What work costs: microseconds of the processor, and bytes that are copied after that.
    fn cost(&self, work: &Work) -> (f64, usize) {
        let hardware = &self.hardware;
        let decision = |needed: bool| if needed { hardware.clear } else { 0.0 };
        match work {
            Work::Frame { frame, interrupt } => {
                let entry = if *interrupt { hardware.interrupt } else { 0.0 };
                let (asks, bytes) = self.read(frame);
                (entry + hardware.host_packet + decision(asks), bytes)
            }
            Work::Events(events) => {
                let costs = events.iter().map(|event| match event {
                    Event::Rts { length, .. } => (hardware.clear, usize::from(*length)),
                    Event::More { .. } => (hardware.clear, 0),
                    Event::Control { .. } => (hardware.host_packet, 0),
                    Event::Gap { .. } | Event::Placed { .. } | Event::Released { .. } | Event::OtherVersion { .. } => (0.0, 0),
                    // The paper's NIC does not match.
                    Event::Arrived(_) | Event::Cancelled { .. } | Event::Matcher(_) => (0.0, 0),
                });
                costs.fold((hardware.interrupt, 0), |sum, cost| (sum.0 + cost.0, sum.1 + cost.1))
            }
            Work::Command(Command::Send { first, .. }) => (hardware.host_packet, usize::from(*first)),
            Work::Command(_) => (hardware.host_packet, 0),
            Work::Transmit(frame) => (hardware.host_packet, self.read(frame).1),
            Work::Timer => (0.0, 0),
        }
    }

    /// Whether a packet asks for a CTS, and the bytes of message in it.
    fn read(&self, packet: &[u8]) -> (bool, usize) {
        let (from, to) = (self.address, self.peer);
        let parsed = Packet::parse(packet, &from, &to).or_else(|_| Packet::parse(packet, &to, &from));
        match parsed {
            Ok(Packet { header, body: Body::Data(data) }) => (header.flags.contains(PacketFlags::RSM), data.len()),
            Ok(Packet { body: Body::Rts(_, first), .. }) => (true, first.len()),
            _ => (false, 0),
        }
    }

    fn start_work(&mut self, now: f64) {
        if self.working.is_some() {
            return;
        }
        if let Some(work) = self.cpu.pop_front() {
            let (fixed, bytes) = self.cost(&work);
            (self.began, self.copying) = (now, bytes);
            self.working = Some(work);
            self.out.push(Outcome::Later(now + fixed, Happening::CpuComputed));
        }
    }

    /// The processor copies while no DMA has the memory bus, and waits while one has.
    fn begin_copy(&mut self, now: f64) {
        if self.copying == 0 {
            return self.out.push(Outcome::Later(now, Happening::CpuDone));
        }
        self.bus = self.bus.max(now) + self.copying as f64 * self.hardware.copy;
        self.out.push(Outcome::Later(self.bus, Happening::CpuDone));
    }

    fn finish_work(&mut self, now: f64) {
        self.kernel_time += now - self.began;
        let micros = now as u64;
        match self.working.take() {
            Some(Work::Frame { frame, .. }) => {
                self.host.input(&self.peer, &frame, &mut self.memory[..]);
                while let Some(event) = self.host.poll_event() {
                    self.policy.handle_event(&event, micros, &mut self.memory[..]);
                }
            }
            Some(Work::Events(events)) => {
                for event in events {
                    self.policy.handle_event(&event, micros, &mut self.memory[..]);
                }
            }
            Some(Work::Command(command)) => self.carry_out(&command),
            Some(Work::Transmit(frame)) => self.outgoing.push_back(frame),
            Some(Work::Timer) => {
                self.policy.on_timeout(micros);
                self.timer = None;
            }
            None => {}
        }
    }
}
