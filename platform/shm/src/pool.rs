//! Objects of one type, close to each other: the first ones in ordinary pages, the many that follow in huge ones.

use crate::lines::{HUGE, advise};
use core::fmt;
use core::mem::MaybeUninit;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{Layout, alloc, handle_alloc_error};
use std::sync::{Mutex, PoisonError};

/// An object whose places are a pool's, which all objects of its type share: so that a pointer to one is all there is to it.
pub trait Shared: Sized + 'static {
    /// The pool.
    fn pool() -> &'static Pool<Self>;
}

/// Places for objects of type `T`. What an object leaves free another one takes; the memory of all stays the pool's. Taking a place and
/// giving it back takes a lock, which is not for what happens with every packet.
pub struct Pool<T: 'static>(Mutex<Places<T>>);

struct Places<T> {
    /// Places that are free: those that were given back.
    free: Vec<NonNull<MaybeUninit<T>>>,
    /// The places of the last block that have never been taken: the next one, and how many there are.
    next: NonNull<MaybeUninit<T>>,
    left: usize,
    /// Blocks so far.
    blocks: usize,
}

// SAFETY: the places are memory that only their takers reach; the pool hands each to one taker at a time.
unsafe impl<T> Send for Places<T> {}

/// Bytes of each block behind the first.
const BLOCK: usize = 4 * HUGE;
/// Bytes of the first block, in ordinary pages: few objects do not take a huge page.
const FIRST: usize = HUGE;

impl<T> Pool<T> {
    /// Makes an empty pool.
    pub const fn new() -> Pool<T> {
        Pool(Mutex::new(Places { free: Vec::new(), next: NonNull::dangling(), left: 0, blocks: 0 }))
    }

    fn give_back(&self, place: NonNull<T>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free.push(place.cast());
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool::new()
    }
}

impl<T> Places<T> {
    fn take(&mut self) -> NonNull<MaybeUninit<T>> {
        if let Some(place) = self.free.pop() {
            return place;
        }
        if self.left == 0 {
            self.add_block();
        }
        let place = self.next;
        self.left -= 1;
        if self.left > 0 {
            // SAFETY: the block has another place behind this one.
            self.next = unsafe { place.add(1) };
        }
        place
    }

    #[cold]
    fn add_block(&mut self) {
        const { assert!(size_of::<T>() > 0 && size_of::<T>() <= FIRST && align_of::<T>() <= HUGE) };
        let bytes = if self.blocks == 0 { FIRST } else { BLOCK };
        let layout = Layout::from_size_align(bytes, if self.blocks == 0 { align_of::<T>() } else { HUGE });
        let layout = layout.expect("a block's size and alignment are constants that fit");
        // SAFETY: the layout's size is not 0.
        let block = unsafe { alloc(layout) };
        let Some(block) = NonNull::new(block) else { handle_alloc_error(layout) };
        if self.blocks > 0 {
            advise(block.as_ptr(), bytes);
        }
        self.blocks += 1;
        (self.next, self.left) = (block.cast(), bytes / size_of::<T>());
    }
}

/// An object in a [`Pool`].
pub struct Pooled<T: Shared> {
    place: NonNull<T>,
}

// SAFETY: it owns its object, as a Box does.
unsafe impl<T: Shared + Send> Send for Pooled<T> {}
// SAFETY: as above.
unsafe impl<T: Shared + Sync> Sync for Pooled<T> {}

impl<T: Shared> Pooled<T> {
    /// Puts an object into a place of its own.
    pub fn new(value: T) -> Pooled<T> {
        let place = T::pool().0.lock().unwrap_or_else(PoisonError::into_inner).take().cast::<T>();
        // SAFETY: the place is aligned memory for a `T` that nobody else has.
        unsafe { place.write(value) };
        Pooled { place }
    }

    /// Takes the object out, and gives its place back.
    pub fn into_inner(self) -> T {
        // The place is given back here instead of by `drop`.
        let place = self.place;
        core::mem::forget(self);
        // SAFETY: the place holds an object, which is read once and never reached there again.
        let value = unsafe { place.read() };
        T::pool().give_back(place);
        value
    }
}

impl<T: Shared> Deref for Pooled<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the place holds an object from `Pooled::new` until `drop`, and it is this one's alone.
        unsafe { self.place.as_ref() }
    }
}

impl<T: Shared> DerefMut for Pooled<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { self.place.as_mut() }
    }
}

impl<T: Shared> Drop for Pooled<T> {
    fn drop(&mut self) {
        // SAFETY: the place holds an object, which nobody reaches any more.
        unsafe { self.place.drop_in_place() };
        T::pool().give_back(self.place);
    }
}

impl<T: Shared + fmt::Debug> fmt::Debug for Pooled<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Arc;

    struct Object {
        _counted: Arc<()>,
        words: [u64; 8191],
    }

    static POOL: Pool<Object> = Pool::new();

    impl Shared for Object {
        fn pool() -> &'static Pool<Object> {
            &POOL
        }
    }

    #[test]
    fn objects_have_places_of_their_own_and_leave_them_to_others() {
        let counted = Arc::new(());
        let mut objects: Vec<_> = (0..200).map(|n| Pooled::new(Object { _counted: counted.clone(), words: [n; 8191] })).collect();
        assert!(objects.iter().enumerate().all(|(n, object)| object.words.iter().all(|word| *word == n as u64)));
        let place = |object: &Pooled<Object>| object.place.addr();
        let places: HashSet<_> = objects.iter().map(place).collect();
        assert_eq!((places.len(), Arc::strong_count(&counted)), (200, 201));
        objects.truncate(101);
        assert!(objects.pop().is_some_and(|object| object.into_inner().words[0] == 100));
        assert_eq!(Arc::strong_count(&counted), 101, "what an object holds is let go");
        objects.extend((0..100).map(|n| Pooled::new(Object { _counted: counted.clone(), words: [n; 8191] })));
        assert!(objects.iter().all(|object| places.contains(&place(object))), "no new memory");
        let thread = std::thread::spawn(move || drop(objects));
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&counted), 1);
    }
}
