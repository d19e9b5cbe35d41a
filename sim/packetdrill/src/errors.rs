//! Results of system calls: errno values as errors.

/// What a system call gives: a value, or an errno.
pub type Answer<T> = Result<T, i32>;

/// One attempt at a call that may have to wait.
pub enum Attempt<T> {
    /// The call is over.
    Done(Answer<T>),
    /// It has to wait, at most until this time if there is one.
    Blocked(Option<u64>),
}
