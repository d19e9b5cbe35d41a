//! Links the preloaded library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The library's own calls of functions that it intercepts go to its own, not to those of a program's library which comes before it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
}
