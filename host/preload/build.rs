//! Links the preloaded library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The library's own calls of functions that it intercepts go to its own, not to those of a program's library which
    // comes before it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // Replaces Rust's personality routine: src/unwinding.rs.
    if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|target| target == "x86_64") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap=rust_eh_personality");
    }
}
