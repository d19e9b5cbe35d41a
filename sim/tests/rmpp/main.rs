//! RMPP between two endpoints in virtual time.

mod everything;
mod faults;
mod hostile;
mod matching;
mod schedule;
mod streams;
mod worlds;
