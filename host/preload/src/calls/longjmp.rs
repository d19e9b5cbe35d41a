//! Functions that jump out of other functions, possibly out of one of this library's in which the thread sleeps.

use crate::leaving::jump;
use libc::{c_int, c_void};

macro_rules! jumps {
    ($($name:ident, $checked:expr;)*) => {$(
        /// Intercepts the C library's function of this name.
        ///
        /// # Safety
        /// As for the C library's function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(to: *mut c_void, value: c_int) -> ! {
            // SAFETY: the program's own arguments (`# Safety`).
            unsafe { jump(to, value, $checked) }
        }
    )*};
}

jumps! {
    longjmp, false;
    _longjmp, false;
    siglongjmp, false;
    __longjmp_chk, true;
}
