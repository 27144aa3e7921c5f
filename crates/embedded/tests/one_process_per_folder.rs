//! Only one process may open a folder at a time; the second one is told which process has it open.

mod common;

use common::{child_folder, say, start_child};
use hapax_embedded::{Embedded, OpenError, Options};

/// The other process: keeps the folder open until its input ends.
#[test]
fn child() {
    let Some(folder) = child_folder() else { return };
    let _store = Embedded::open(folder, Options::default()).unwrap();
    say("\nopen");
    let _ = std::io::stdin().lines().count();
}

#[test]
fn a_second_process_is_refused_and_told_who_holds_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = start_child("child", folder.path());
    child.wait_for_line("open");

    for _ in 0..2 {
        let error = Embedded::open(folder.path(), Options::default()).err().unwrap();
        assert!(matches!(error, OpenError::InUse { .. }));
        let text = error.to_string();
        assert!(text.contains(&format!("process {}", child.id())), "{text}");
        let backup = tempfile::tempdir().unwrap().path().join("none.db");
        assert!(matches!(Embedded::restore(backup, folder.path()), Err(OpenError::InUse { .. })));
    }

    child.kill();
    Embedded::open(folder.path(), Options::default())
        .expect("the operating system let go of a dead holder's lock");
}
