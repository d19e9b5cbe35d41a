//! `librmpp_fi.so`: the libfabric provider `rmpp`. MPI libraries find it through FI_PROVIDER_PATH
//! (docs/internals/mpi.md).
//!
//! Here are libfabric's objects and its C interface; messages themselves are `baton_messages`. libfabric's manual pages
//! say what each function does; comments here say what they leave open.
//!
//! | file | what |
//! |---|---|
//! | `abi/` | libfabric's structures and tables of functions |
//! | `libfabric.rs` | the libfabric that has loaded us: its version, its log |
//! | `info.rs`, `settings.rs`, `addresses.rs` | fi_getinfo: what there is, for which addresses, with which settings |
//! | `fabric.rs`, `domain.rs`, `event_queue.rs` | the objects that own others |
//! | `region.rs` | registered memory |
//! | `lending.rs` | memory that the NIC reaches, for the program's malloc(3) |
//! | `vector.rs` | address vectors |
//! | `completion_queue.rs`, `counter.rs` | how operations end |
//! | `endpoint.rs`, `operations.rs` | an endpoint, its operations and their completions |
//! | `transfers.rs` | send, receive, read and write |
//! | `message_calls.rs`, `tagged_calls.rs`, `rma_calls.rs` | their many forms in C |
//! | `fuzz/` | random calls, with a model of what must come of them |

mod abi;
mod addresses;
mod buffer;
mod completion_queue;
mod counter;
mod domain;
mod endpoint;
mod event_queue;
mod fabric;
#[cfg(test)]
mod fuzz;
mod info;
mod lending;
mod libfabric;
mod message_calls;
mod object;
mod operations;
mod region;
mod rma_calls;
mod settings;
mod tagged_calls;
mod transfers;
mod vector;

use abi::Provider;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The provider's own version: FI_VERSION(1, 0).
const VERSION: u32 = 1 << 16;

static PROVIDER: AtomicPtr<Provider> = AtomicPtr::new(std::ptr::null_mut());

/// The provider that [`fi_prov_ini`] has returned; null before.
fn provider() -> *mut Provider {
    PROVIDER.load(Ordering::Acquire)
}

unsafe extern "C" fn cleanup() {}

/// The function that libfabric calls when it has loaded this library (`rdma/providers/fi_prov.h`).
#[unsafe(no_mangle)]
extern "C" fn fi_prov_ini() -> *mut Provider {
    libfabric::find();
    if provider().is_null() {
        let made = Box::into_raw(Box::new(Provider {
            version: VERSION,
            // libfabric accepts providers of its own major version. The part that is used here is the same in 1.17 and
            // 2.x.
            fi_version: libfabric::version(),
            context: [std::ptr::null_mut(); 4],
            name: c"rmpp".as_ptr(),
            getinfo: info::getinfo,
            fabric: fabric::open,
            cleanup,
        }));
        // A second thread that comes at the same time leaks a few bytes, and uses the first one's structure.
        let _ = PROVIDER.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire);
    }
    provider()
}
