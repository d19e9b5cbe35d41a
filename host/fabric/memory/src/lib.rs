//! Large blocks of an unmodified MPI program's malloc(3) in memory that the NIC reaches, so that its messages need no
//! copy.
//!
//! A library for LD_PRELOAD, which `baton mpi` sets. Until the provider `rmpp` has a session with a NIC and lends a
//! part of its memory here ([`rmpp_memory_lend`]), and for small blocks for ever, every call goes on to the C library.
//!
//! | file | what |
//! |---|---|
//! | `lib.rs` | the functions that programs call |
//! | `lent.rs` | the lent memory and its blocks |
//! | `fork.rs` | a child process gets copies of the blocks |

mod fork;
mod lent;

use libc::{c_int, c_void, size_t};
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The C library's own functions: it exports them under these names for libraries like this one.
mod real {
    use libc::{c_void, size_t};

    unsafe extern "C" {
        #[link_name = "__libc_malloc"]
        pub fn malloc(size: size_t) -> *mut c_void;
        #[link_name = "__libc_calloc"]
        pub fn calloc(count: size_t, size: size_t) -> *mut c_void;
        #[link_name = "__libc_realloc"]
        pub fn realloc(block: *mut c_void, size: size_t) -> *mut c_void;
        #[link_name = "__libc_free"]
        pub fn free(block: *mut c_void);
        #[link_name = "__libc_memalign"]
        pub fn memalign(alignment: size_t, size: size_t) -> *mut c_void;
    }
}

/// Lends `length` bytes at `start`, which the NIC reaches: from now on large blocks lie there. They are zero, and are
/// the part from `at` on of the shared memory behind `fd`. False if there is such memory already; then nothing has
/// happened.
///
/// # Safety
/// The memory stays mapped until the process ends, and nobody else in this process writes to it. `fd` is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rmpp_memory_lend(start: *mut c_void, length: size_t, fd: c_int, at: u64) -> bool {
    // SAFETY: this function's `# Safety`.
    unsafe { lent::lend(start.cast(), length, BorrowedFd::borrow_raw(fd), at) }
}

/// malloc(3).
///
/// # Safety
/// None is needed: it is a C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(size: size_t) -> *mut c_void {
    match lent::take(size) {
        Some(block) => block.as_ptr().cast(),
        // SAFETY: the C library's function of the same type.
        None => unsafe { real::malloc(size) },
    }
}

/// calloc(3).
///
/// # Safety
/// As [`malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: size_t, size: size_t) -> *mut c_void {
    match count.checked_mul(size).and_then(lent::take_cleared) {
        Some(block) => block.as_ptr().cast(),
        // SAFETY: the C library's function of the same type, which refuses a product that is too large.
        None => unsafe { real::calloc(count, size) },
    }
}

/// free(3).
///
/// # Safety
/// As free(3) demands of a program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(block: *mut c_void) {
    if !lent::give(block.cast()) {
        // SAFETY: this function's `# Safety`; the block is not one of ours, so it is the C library's.
        unsafe { real::free(block) }
    }
}

/// realloc(3). A block stays in the kind of memory that it began in, unless there is no room.
///
/// # Safety
/// As realloc(3) demands of a program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(block: *mut c_void, size: size_t) -> *mut c_void {
    let Some(held) = lent::size_of(block.cast()) else {
        // SAFETY: this function's `# Safety`; the block is null or the C library's.
        return unsafe { real::realloc(block, size) };
    };
    if size > 0 && size <= held && size > held / 2 {
        return block;
    }
    // SAFETY: `block` is a live block of `held` bytes, and the new one has `size` and is another.
    unsafe {
        let new = if size > 0 { malloc(size) } else { std::ptr::null_mut() };
        if !new.is_null() {
            std::ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), held.min(size));
        }
        if !new.is_null() || size == 0 {
            free(block);
        }
        new
    }
}

/// memalign(3).
///
/// # Safety
/// As [`malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(alignment: size_t, size: size_t) -> *mut c_void {
    match Some(size).filter(|_| alignment <= lent::ALIGNMENT).and_then(lent::take) {
        Some(block) => block.as_ptr().cast(),
        // SAFETY: the C library's function of the same type.
        None => unsafe { real::memalign(alignment, size) },
    }
}

/// aligned_alloc(3).
///
/// # Safety
/// As [`malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(alignment: size_t, size: size_t) -> *mut c_void {
    // SAFETY: aligned_alloc(3) takes the same two numbers as memalign(3), any of which are allowed.
    unsafe { memalign(alignment, size) }
}

/// posix_memalign(3).
///
/// # Safety
/// There is room for a pointer at `out`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, alignment: size_t, size: size_t) -> c_int {
    if !alignment.is_power_of_two() || !alignment.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    // SAFETY: this function's `# Safety`.
    unsafe {
        let block = memalign(alignment, size);
        if block.is_null() {
            return libc::ENOMEM;
        }
        *out = block;
    }
    0
}

/// malloc_usable_size(3).
///
/// # Safety
/// Null, or a live block of these functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> size_t {
    type UsableSize = unsafe extern "C" fn(*mut c_void) -> size_t;
    static REAL: AtomicUsize = AtomicUsize::new(0);
    if let Some(size) = lent::size_of(block.cast()) {
        return size;
    }
    let mut real = REAL.load(Ordering::Relaxed);
    if real == 0 {
        // SAFETY: a C string, and a valid handle.
        real = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc_usable_size".as_ptr()) } as usize;
        REAL.store(real, Ordering::Relaxed);
    }
    match NonNull::new(real as *mut c_void) {
        // SAFETY: the C library's function of this name has this type; this function's `# Safety`.
        Some(real) => unsafe { std::mem::transmute::<*mut c_void, UsableSize>(real.as_ptr())(block) },
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_shm::Region;
    use std::hint::black_box;
    use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

    const MEGABYTE: usize = 1 << 20;

    /// The lent memory. Memory can be lent to a process only once, so the tests share it and use it one at a time.
    static MEMORY: LazyLock<Mutex<Region>> = LazyLock::new(|| {
        let memory = Region::create("test", 64 * MEGABYTE).unwrap();
        let (start, fd) = (memory.span(0, memory.len()).unwrap(), memory.fd().unwrap());
        // SAFETY: the region lives as long as the process, and nobody else writes to it.
        let lend = || unsafe { rmpp_memory_lend(start.as_ptr().cast(), memory.len(), std::os::fd::AsRawFd::as_raw_fd(&fd), 0) };
        assert!(lend() && !lend(), "a process is lent memory once");
        Mutex::new(memory)
    });

    struct Memory(MutexGuard<'static, Region>);

    impl Memory {
        fn alone() -> Self {
            Self(MEMORY.lock().unwrap_or_else(PoisonError::into_inner))
        }

        fn holds(&self, block: *const c_void) -> bool {
            let start = self.0.span(0, 0).unwrap().addr().get();
            (start..start + self.0.len()).contains(&block.addr())
        }
    }

    #[test]
    fn large_blocks_lie_in_lent_memory() {
        let memory = Memory::alone();
        // SAFETY: blocks are used inside their sizes, and freed once.
        unsafe {
            let (large, small) = (malloc(MEGABYTE), malloc(100));
            assert!(memory.holds(large) && !memory.holds(small));
            assert_eq!(malloc_usable_size(large), MEGABYTE);
            assert!(malloc_usable_size(small) >= 100);
            large.cast::<u8>().write_bytes(7, MEGABYTE);
            let grown = realloc(large, 3 * MEGABYTE);
            assert!(memory.holds(grown) && grown != large);
            assert!(std::slice::from_raw_parts(grown.cast::<u8>(), MEGABYTE).iter().all(|byte| *byte == 7));
            let shrunk = realloc(grown, 200);
            assert!(!memory.holds(shrunk) && *shrunk.cast::<u8>() == 7);
            free(shrunk);
            free(small);
            assert!(black_box(realloc(black_box(malloc(MEGABYTE)), 0)).is_null());
            let (mut aligned, mut far) = (std::ptr::null_mut(), std::ptr::null_mut());
            assert_eq!(posix_memalign(&mut aligned, 4096, MEGABYTE), 0);
            assert_eq!(posix_memalign(&mut far, 1 << 21, MEGABYTE), 0);
            assert!(memory.holds(aligned) && aligned.addr() % 4096 == 0 && far.addr() % (1 << 21) == 0);
            assert_eq!(posix_memalign(&mut far.clone(), 24, MEGABYTE), libc::EINVAL);
            free(aligned);
            free(far);
        }
    }

    #[test]
    fn cleared_blocks_are_zero_wherever_they_lay() {
        let memory = Memory::alone();
        for size in [MEGABYTE, 8 * MEGABYTE] {
            // SAFETY: the blocks are used inside their sizes, and freed once.
            unsafe {
                let block = malloc(size);
                block.cast::<u8>().write_bytes(9, size);
                free(block);
                let block = calloc(size / 8, 8);
                assert!(memory.holds(block));
                assert!(std::slice::from_raw_parts(block.cast::<u8>(), size).iter().all(|byte| *byte == 0), "{size}");
                free(block);
                // The compiler may remove a calloc whose block is not used.
                assert!(black_box(calloc(black_box(usize::MAX), 2)).is_null());
            }
        }
    }

    #[test]
    fn a_full_part_sends_programs_to_the_c_library() {
        let memory = Memory::alone();
        // SAFETY: the blocks are not used, and freed once.
        unsafe {
            let blocks: Vec<_> = (0..5).map(|_| malloc(16 * MEGABYTE)).collect();
            assert!(blocks.iter().all(|block| !block.is_null()) && !blocks.iter().all(|block| memory.holds(*block)));
            blocks.into_iter().for_each(|block| free(block));
        }
    }

    #[test]
    fn a_child_has_its_own_copy() {
        const SIZE: usize = 8 * MEGABYTE;
        let memory = Memory::alone();
        // SAFETY: the block is used inside its size, and freed once. The child calls only what is allowed after a fork
        // of a process with threads, and ends.
        unsafe {
            // Its second half has no pages yet.
            let block = calloc(SIZE, 1).cast::<u8>();
            assert!(memory.holds(block.cast()));
            block.write_bytes(1, SIZE / 2);
            let (mut to_child, mut to_parent) = ([0; 2], [0; 2]);
            assert_eq!((libc::pipe(to_child.as_mut_ptr()), libc::pipe(to_parent.as_mut_ptr())), (0, 0));
            let mut byte = 0u8;
            let process = libc::fork();
            if process == 0 {
                // The parent has written since.
                libc::read(to_child[0], (&raw mut byte).cast(), 1);
                let kept = *block == 1 && *block.add(SIZE - 1) == 0;
                block.write_bytes(3, SIZE);
                // A child of the child gets what the child has, and a new block lies elsewhere.
                let grandchild = libc::fork();
                if grandchild == 0 {
                    libc::_exit(i32::from(*block != 3));
                }
                let mut status = -1;
                libc::waitpid(grandchild, &mut status, 0);
                libc::write(to_parent[1], (&raw const byte).cast(), 1);
                libc::_exit(i32::from(!kept || status != 0));
            }
            block.write_bytes(2, SIZE);
            libc::write(to_child[1], (&raw const byte).cast(), 1);
            libc::read(to_parent[0], (&raw mut byte).cast(), 1);
            assert!(*block == 2 && *block.add(SIZE - 1) == 2, "the child has written into its own copy");
            let mut status = -1;
            libc::waitpid(process, &mut status, 0);
            assert_eq!(status, 0, "the child has seen what there was when it began");
            free(block.cast());
            for fd in to_child.into_iter().chain(to_parent) {
                libc::close(fd);
            }
        }
    }
}
