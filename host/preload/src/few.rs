//! Lists of the sockets that one call concerns, of which there are usually few: such a list is on the stack. If it were
//! on the heap, every call that waits would take the heap's lock several times, in each thread.

use smallvec::SmallVec;

/// A list that lies on the stack while it has at most eight entries.
pub(crate) type Few<T> = SmallVec<[T; 8]>;
