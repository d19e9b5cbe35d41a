//! A load like SPECweb99's: which file a client asks for next, and when. Pure: a seed decides.
//!
//! Four classes of files, from 0.1 to 900 KB, 35, 50, 14 and 1 % of the requests; nine files in each class and
//! directory, of which the one in the middle is asked for most (Zipf's law); directories by Zipf's law, too, and as
//! many as the number of connections makes them; a share of requests whose answer is made by a program. A client
//! receives at most 400 Kb/s.

use baton_sim::Rng;

/// Of a thousand requests, those for each class.
pub const CLASSES: [u64; 4] = [350, 500, 140, 10];
/// Files of a class in a directory.
pub const FILES: usize = 9;
/// Place of each file in the order of how often it is asked for.
const RANKS: [u64; FILES] = [9, 6, 4, 2, 1, 3, 5, 7, 8];
/// Bits per second of a client at most.
pub const CLIENT_RATE: f64 = 400e3;
/// Share of requests whose answer is made by a program.
pub const DYNAMIC: f64 = 0.3;
/// Of a thousand connections, those that carry several requests: so many that 70 % of the requests are on them.
const KEPT: u64 = 189;
/// Requests of such a connection: this many, and up to as many more.
const REQUESTS: (u64, u64) = (5, 10);

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// The file's directory.
    pub directory: usize,
    /// Its class, from 0.
    pub class: usize,
    /// Its number in the class, from 0.
    pub file: usize,
    /// Whether a program makes the answer.
    pub dynamic: bool,
}

impl Request {
    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        file_bytes(self.class, self.file)
    }
}

/// Bytes of a file: tenths of a KB, times ten for each class.
pub fn file_bytes(class: usize, file: usize) -> u64 {
    (file as u64 + 1) * 10u64.pow(class as u32) * 1024 / 10
}

/// Directories for this many connections, as SPECweb99 has them.
pub fn directories(connections: usize) -> usize {
    25 + (400.0 / 122.0 * connections as f64 / 5.0) as usize
}

/// Microseconds in which a client receives so many bytes at its rate.
pub fn pause(bytes: u64) -> u64 {
    (bytes as f64 * 8e6 / CLIENT_RATE) as u64
}

/// A client's line, which is busy while it carries what the client receives. Times are microseconds of any clock.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    rate: f64,
    free_at: u64,
}

impl Line {
    /// A line of so many bits per second; [`f64::INFINITY`] is one that is never busy.
    pub fn new(rate: f64) -> Line {
        Line { rate, free_at: 0 }
    }

    /// Carries `bytes` that begin to come at `now`, or when the line is free. Returns when it is free again.
    pub fn carry(&mut self, bytes: u64, now: u64) -> u64 {
        self.free_at = self.free_at.max(now) + (bytes as f64 * 8e6 / self.rate) as u64;
        self.free_at
    }

    /// When it is free.
    pub fn free_at(&self) -> u64 {
        self.free_at
    }
}

/// Chooses requests.
#[derive(Clone, Debug)]
pub struct Mix {
    rng: Rng,
    /// Sums of the directories' weights.
    directories: Vec<f64>,
    files: Vec<f64>,
    dynamic: f64,
}

/// Sums of Zipf's weights of these ranks.
fn zipf(ranks: impl Iterator<Item = u64>) -> Vec<f64> {
    let mut sum = 0.0;
    ranks
        .map(|rank| {
            sum += 1.0 / rank as f64;
            sum
        })
        .collect()
}

impl Mix {
    /// A load of `connections` clients, a share of whose requests is `dynamic`.
    pub fn new(connections: usize, dynamic: f64, seed: u64) -> Mix {
        Mix::over(directories(connections), dynamic, seed)
    }

    /// A load of files in so many directories, at least one, a share of whose requests is `dynamic`.
    pub fn over(directories: usize, dynamic: f64, seed: u64) -> Mix {
        let directories = zipf(1..=directories.max(1) as u64);
        Mix { rng: Rng::new(seed), directories, files: zipf(RANKS.into_iter()), dynamic }
    }

    /// A number from 0 up to 1.
    fn share(&mut self) -> f64 {
        self.rng.below(1 << 53) as f64 / (1u64 << 53) as f64
    }

    fn choose(&mut self, directories: bool) -> usize {
        let share = self.share();
        let sums = if directories { &self.directories } else { &self.files };
        let at = share * sums.last().copied().unwrap_or(0.0);
        sums.partition_point(|sum| *sum <= at).min(sums.len() - 1)
    }

    /// The next request of a client.
    pub fn request(&mut self) -> Request {
        let mut left = self.rng.below(CLASSES.iter().sum());
        let class = CLASSES.iter().position(|share| {
            let found = left < *share;
            left = left.saturating_sub(*share);
            found
        });
        let (directory, file) = (self.choose(true), self.choose(false));
        Request { directory, class: class.unwrap_or(0), file, dynamic: self.share() < self.dynamic }
    }

    /// A request that a client is in the midst of, when one looks at it at any time, and the bytes that are still to
    /// come: large answers take longer, so they are met more often.
    pub fn in_progress(&mut self) -> (Request, u64) {
        let most = file_bytes(CLASSES.len() - 1, FILES - 1) as f64;
        loop {
            let request = self.request();
            if self.share() < request.bytes() as f64 / most {
                let left = (self.share() * request.bytes() as f64) as u64;
                return (request, left);
            }
        }
    }

    /// Requests of the next connection.
    pub fn requests(&mut self) -> u64 {
        if self.rng.below(1000) < KEPT { REQUESTS.0 + self.rng.below(REQUESTS.1 + 1) } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_is_as_it_is_said_to_be() {
        let mut mix = Mix::new(1024, DYNAMIC, 3);
        let requests: Vec<Request> = (0..200_000).map(|_| mix.request()).collect();
        let share =
            |of: &dyn Fn(&Request) -> bool| requests.iter().filter(|request| of(request)).count() as f64 / requests.len() as f64;
        for (class, expected) in [0.35, 0.5, 0.14, 0.01].into_iter().enumerate() {
            let found = share(&|request| request.class == class);
            assert!((found - expected).abs() < 0.005, "class {class}: {found}");
        }
        assert!((share(&|request| request.dynamic) - DYNAMIC).abs() < 0.005);
        // The fifth of nine files has 1 / (1 + 1/2 + ... + 1/9) of its class.
        assert!((share(&|request| request.file == 4) - 0.3535).abs() < 0.005);
        // The first directory is asked for twice as often as the second.
        let ratio = share(&|request| request.directory == 0) / share(&|request| request.directory == 1);
        assert!((ratio - 2.0).abs() < 0.1, "{ratio}");
        assert!(requests.iter().all(|request| request.directory < directories(1024)));
        let (few, many) = (file_bytes(0, 0), file_bytes(3, 8));
        assert_eq!((few, many), (102, 921_600));
        let mean = requests.iter().map(Request::bytes).sum::<u64>() as f64 / requests.len() as f64;
        assert!((14_000.0..16_500.0).contains(&mean), "{mean}");
    }

    #[test]
    fn seventy_percent_of_the_requests_share_a_connection() {
        let mut mix = Mix::new(64, 0.0, 5);
        let connections: Vec<u64> = (0..100_000).map(|_| mix.requests()).collect();
        let all: u64 = connections.iter().sum();
        let alone = connections.iter().filter(|requests| **requests == 1).count() as f64;
        assert!((alone / all as f64 - 0.3).abs() < 0.01);
    }

    #[test]
    fn large_answers_are_met_more_often() {
        let mut mix = Mix::new(64, 0.0, 7);
        let met: Vec<(Request, u64)> = (0..20_000).map(|_| mix.in_progress()).collect();
        // A class has its share of the requests, weighted by its bytes: 1 % of 500 KB against 50 % of 5 KB.
        let of = |class| met.iter().filter(|one| one.0.class == class).count() as f64;
        assert!((of(3) / of(1) - 2.0).abs() < 0.15, "{}", of(3) / of(1));
        assert!(met.iter().all(|(request, left)| left <= &request.bytes()));
    }

    #[test]
    fn a_client_takes_no_more_than_its_rate() {
        assert_eq!(pause(50_000), 1_000_000);
        let mut line = Line::new(CLIENT_RATE);
        assert_eq!(line.carry(50_000, 7), 1_000_007);
        // What comes while the line is busy waits; what comes later does not make up for the time between.
        assert_eq!(line.carry(50, 500_000), 1_001_007);
        assert_eq!(line.carry(50, 3_000_000), 3_001_000);
        let mut unlimited = Line::new(f64::INFINITY);
        assert_eq!((unlimited.carry(1 << 30, 5), unlimited.free_at()), (5, 5));
    }

    #[test]
    fn a_small_file_set_has_all_of_its_directories() {
        let mut one = Mix::over(1, 0.0, 9);
        assert!((0..1000).all(|_| one.request().directory == 0));
        let mut three = Mix::over(3, 0.0, 9);
        let counts = (0..110_000).fold([0u32; 3], |mut counts, _| {
            counts[three.request().directory] += 1;
            counts
        });
        // By ranks 1, 2 and 3: shares of 6, 3 and 2 elevenths.
        for (count, expected) in counts.into_iter().zip([60_000.0, 30_000.0, 20_000.0]) {
            assert!((f64::from(count) / expected - 1.0).abs() < 0.04, "{counts:?}");
        }
    }

    #[test]
    fn a_seed_decides_everything() {
        let list = |seed| {
            let mut mix = Mix::over(40, DYNAMIC, seed);
            (0..100).map(|_| (mix.requests(), mix.request())).collect::<Vec<_>>()
        };
        assert_eq!(list(1), list(1));
        assert_ne!(list(1), list(2));
    }
}
