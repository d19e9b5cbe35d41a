//! Code for processors with wide registers: the program is compiled for any x86-64, and the code that runs for every
//! frame is compiled a second time for these processors.

/// Proof that the processor has AVX2, BMI and MOVBE, as all but the oldest have.
#[derive(Clone, Copy, Debug)]
pub struct Wide(());

impl Wide {
    /// The proof, if the processor has them.
    #[cfg(target_arch = "x86_64")]
    pub fn detect() -> Option<Wide> {
        use std::is_x86_feature_detected as has;
        (has!("avx2") && has!("bmi1") && has!("bmi2") && has!("movbe")).then_some(Wide(()))
    }

    /// The proof; other processors than x86-64 have no such second set of instructions.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn detect() -> Option<Wide> {
        None
    }

    /// Runs `work`, which is compiled for such a processor as far as it is inlined.
    #[inline(always)]
    pub fn run<R>(self, work: impl FnOnce() -> R) -> R {
        #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,bmi1,bmi2,movbe"))]
        fn with<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        // SAFETY: a `Wide` is only made once the processor was found to have these instructions.
        unsafe { with(work) }
    }
}
