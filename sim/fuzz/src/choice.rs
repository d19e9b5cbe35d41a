//! What a word of a script decides.

use baton_netem::Rng;

/// The choices of one step.
#[derive(Clone, Debug)]
pub struct Choice(Rng);

impl Choice {
    /// The choices that a word stands for.
    pub fn new(word: u64) -> Choice {
        Choice(Rng::new(word))
    }

    /// A number below `bound`, which must not be 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.below(bound)
    }

    /// Any 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Any 32 bits.
    pub fn number(&mut self) -> u32 {
        self.0.next_u64() as u32
    }

    /// Small numbers are as likely as large ones: a number of up to so many bits, at most 32.
    pub fn magnitude(&mut self, bits: u64) -> u32 {
        let bits = self.below(bits + 1);
        (self.number() as u64 & ((1 << bits) - 1)) as u32
    }

    /// True once in so many times.
    #[inline]
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of these.
    #[inline]
    pub fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}
