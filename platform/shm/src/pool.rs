//! Objects of one type, close to each other: the first ones in ordinary pages, further ones in huge pages. Pages that
//! hold no object any more go back to the system.

use crate::lines::{HUGE, advise, discard};
use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{Layout, alloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// A type whose objects all lie in one pool. A handle to an object is then a pointer alone, without a reference to the
/// pool.
pub trait Shared: Sized + 'static {
    /// The pool.
    fn pool() -> &'static Pool<Self>;
}

/// Places for objects of type `T`. An object gets the lowest place that is free, so that few objects are close to each
/// other even after many have come and gone. Taking a place and giving it back takes a lock, so neither should be done
/// for every packet.
pub struct Pool<T: 'static>(Mutex<Places<T>>);

struct Places<T> {
    chunks: Vec<Chunk<T>>,
    /// Index of the chunk at each address.
    by_address: BTreeMap<usize, u32>,
    /// All chunks before this one are full.
    lowest: usize,
}

/// Places whose pages go back to the system when all of them are free.
struct Chunk<T> {
    base: NonNull<T>,
    bytes: usize,
    /// Number of places that are taken, and a bit for each place: 1 if it is.
    taken: usize,
    bits: Box<[u64]>,
}

// SAFETY: the places are memory that only their takers reach; the pool hands each to one taker at a time.
unsafe impl<T> Send for Places<T> {}

/// Bytes of the first block, in ordinary pages: few objects do not take a huge page. And bytes of its chunks.
const FIRST: usize = HUGE;
const FIRST_CHUNK: usize = 1 << 16;
/// Bytes of each block behind the first, whose chunks are huge pages.
const BLOCK: usize = 4 * HUGE;
/// Bytes of an ordinary page.
const PAGE: usize = 4096;

impl<T> Pool<T> {
    /// Makes an empty pool.
    pub const fn new() -> Pool<T> {
        Pool(Mutex::new(Places { chunks: Vec::new(), by_address: BTreeMap::new(), lowest: 0 }))
    }

    /// The lowest place that is free.
    pub(crate) fn take(&self) -> NonNull<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Gives a place back, which holds no object any more.
    pub(crate) fn give_back(&self, place: NonNull<T>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).give_back(place);
    }
}

impl<T> Default for Pool<T> {
    fn default() -> Self {
        Pool::new()
    }
}

impl<T> Chunk<T> {
    /// Number of its places.
    fn room(&self) -> usize {
        self.bytes / size_of::<T>()
    }
}

impl<T> Places<T> {
    fn take(&mut self) -> NonNull<T> {
        while self.chunks.get(self.lowest).is_some_and(|chunk| chunk.taken == chunk.room()) {
            self.lowest += 1;
        }
        if self.lowest == self.chunks.len() {
            self.add_block();
        }
        let chunk = &mut self.chunks[self.lowest];
        let (word, bits) = chunk.bits.iter_mut().enumerate().find(|(_, bits)| **bits != u64::MAX).expect("a place is free");
        let bit = bits.trailing_ones();
        *bits |= 1 << bit;
        chunk.taken += 1;
        // SAFETY: the first bit that is not set belongs to a place of the chunk, since not all of its places are taken.
        unsafe { chunk.base.add(word * 64 + bit as usize) }
    }

    fn give_back(&mut self, place: NonNull<T>) {
        let (_, at) = self.by_address.range(..=place.addr().get()).next_back().expect("the place is in one of the chunks");
        let at = *at as usize;
        let chunk = &mut self.chunks[at];
        let index = (place.addr().get() - chunk.base.addr().get()) / size_of::<T>();
        chunk.bits[index / 64] &= !(1 << (index % 64));
        chunk.taken -= 1;
        self.lowest = self.lowest.min(at);
        // The first chunk is kept: where few objects come and go it is the only one that is used.
        if chunk.taken == 0 && at > 0 {
            // SAFETY: the chunk is whole pages of the pool's own memory, and no place of it holds an object.
            unsafe { discard(chunk.base.as_ptr().cast(), chunk.bytes) };
        }
    }

    #[cold]
    fn add_block(&mut self) {
        const { assert!(size_of::<T>() > 0 && size_of::<T>() <= FIRST_CHUNK && align_of::<T>() <= PAGE) };
        let first = self.chunks.is_empty();
        let (bytes, align, chunk) = if first { (FIRST, PAGE, FIRST_CHUNK) } else { (BLOCK, HUGE, HUGE) };
        let layout = Layout::from_size_align(bytes, align).expect("a block's size and alignment are constants that fit");
        // SAFETY: the layout's size is not 0.
        let block = unsafe { alloc(layout) };
        let Some(block) = NonNull::new(block) else { handle_alloc_error(layout) };
        if !first {
            advise(block.as_ptr(), bytes);
        }
        for at in (0..bytes).step_by(chunk) {
            // SAFETY: the offset is less than the block's length.
            let base = unsafe { block.add(at) }.cast::<T>();
            self.by_address.insert(base.addr().get(), self.chunks.len() as u32);
            let bits = vec![0; (chunk / size_of::<T>()).div_ceil(64)].into();
            self.chunks.push(Chunk { base, bytes: chunk, taken: 0, bits });
        }
    }
}

/// An object in a [`Pool`].
pub struct Pooled<T: Shared> {
    place: NonNull<T>,
}

// SAFETY: it owns its object, as a Box does.
unsafe impl<T: Shared + Send> Send for Pooled<T> {}
// SAFETY: through a shared reference to it only `&T` can be had, and `T` is Sync.
unsafe impl<T: Shared + Sync> Sync for Pooled<T> {}

impl<T: Shared> Pooled<T> {
    /// Puts an object into a place of its own.
    pub fn new(value: T) -> Pooled<T> {
        let place = T::pool().take();
        // SAFETY: the place is aligned memory for a `T`, and no other object has this place.
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
        // SAFETY: the place holds an object from `Pooled::new` until `drop`, and it belongs to this handle alone, which
        // is borrowed mutably.
        unsafe { self.place.as_mut() }
    }
}

impl<T: Shared> Drop for Pooled<T> {
    fn drop(&mut self) {
        // SAFETY: the place holds an object, to which no reference exists any more.
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

    struct Small([u8; 1600]);

    static SMALL: Pool<Small> = Pool::new();

    impl Shared for Small {
        fn pool() -> &'static Pool<Small> {
            &SMALL
        }
    }

    /// Resident bytes of a chunk.
    fn resident<T>(pool: &Pool<T>, at: usize) -> usize {
        let places = pool.0.lock().unwrap();
        let chunk = &places.chunks[at];
        let mut pages = vec![0u8; chunk.bytes / PAGE];
        // SAFETY: the chunk is mapped, and the vector has a byte for each of its pages.
        let asked = unsafe { libc::mincore(chunk.base.as_ptr().cast(), chunk.bytes, pages.as_mut_ptr()) };
        assert_eq!(asked, 0);
        pages.iter().filter(|page| **page & 1 != 0).count() * PAGE
    }

    #[test]
    fn the_lowest_places_are_taken_and_empty_chunks_have_no_pages() {
        let take = |n| Pooled::new(Small([n; 1600]));
        let each = FIRST_CHUNK / 1600;
        let mut objects: Vec<_> = (0..each * 4).map(|n| take(n as u8)).collect();
        assert!((0..4).all(|at| resident(&SMALL, at) > FIRST_CHUNK / 2));
        // All objects of the third chunk, and all but one of the second, in random order.
        let kept = objects.swap_remove(each + 7);
        let place = kept.place.addr();
        let rest = objects.split_off(each);
        drop(rest);
        let after = [0, 1, 2, 3].map(|at| resident(&SMALL, at) > 0);
        assert_eq!(after, [true, true, false, false]);
        assert_eq!(kept.0, [(each + 7) as u8; 1600]);
        // The lowest places are taken first: the second chunk is full before the third one gets any.
        objects.extend((0..each - 1).map(|_| take(1)));
        assert_eq!(kept.place.addr(), place);
        assert_eq!(resident(&SMALL, 2), 0);
        objects.push(take(2));
        assert!(resident(&SMALL, 2) > 0);
        drop((objects, kept));
        assert_eq!([1, 2, 3].map(|at| resident(&SMALL, at)), [0; 3]);
        assert!(resident(&SMALL, 0) > 0);
    }
}
