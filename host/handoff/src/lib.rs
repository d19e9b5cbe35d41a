//! Takes an established connection out of the kernel and puts it back on the same descriptor, with TCP_REPAIR: what may
//! be moved ([`examine`]), the way out ([`export`]), the socket that stays behind ([`shell`]), the way back
//! ([`import`]).

pub mod examine;
pub mod export;
pub mod import;
pub mod listening;
pub mod send_buffer;
pub mod shell;
pub mod unenforced;
