//! Tells the linker to keep one copy of functions whose code is the same.

use std::env::var;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RUSTC_LINKER");
    let is = |name: &str, value: &str| var(name).is_ok_and(|found| found == value);
    // Rust's own linker, the default of this target, can do it; a linker of the user's choice may not know the option.
    let own_linker = is("TARGET", "x86_64-unknown-linux-gnu")
        && var("RUSTC_LINKER").is_err()
        && !var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("link"));
    if own_linker && is("PROFILE", "release") {
        println!("cargo:rustc-link-arg-bins=-Wl,--icf=all");
    }
}
