//! The library with faults of disk and clock, which is part of no release.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the library in a folder.
pub fn library(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../verify/preload/faults.c");
    let library = folder.join("faults.so");
    let mut compile = Command::new("cc");
    compile.args(["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", "-o"]);
    let done = compile.arg(&library).arg(&source).arg("-ldl").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    library
}
