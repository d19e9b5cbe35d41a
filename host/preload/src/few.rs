//! Lists of what one call is about, which is little most of the time: such a list lies on the stack. With memory of the
//! heap each thread of the program would need the heap's lock several times in every call that waits.

use smallvec::SmallVec;

/// A list that lies on the stack while it has at most eight entries.
pub(crate) type Few<T> = SmallVec<[T; 8]>;
