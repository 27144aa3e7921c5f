//! Rules on crates: which may depend on which.

use crate::workspace::Package;

const HERE: &str = "xtask/tests/tidy/dependencies.rs";

/// A crate may depend only on those listed before it. A new crate goes after all of its dependencies.
const ORDER: [&str; 20] = [
    "hapax-faults",
    "hapax-core",
    "hapax-observe",
    "hapax-conformance",
    "hapax-embedded",
    "hapax-postgres",
    "hapax-redis",
    "hapax-client",
    "hapax-sqlite",
    "hapax-claim",
    "hapax-net",
    "hapax-worker",
    "hapax-kafka",
    "hapax-relay",
    "hapax-http",
    "hapax",
    "hapax-server",
    "hapax-cli",
    "hapax-verify",
    "xtask",
];

/// Crates for tests only; of our crates they may depend only on the core.
const FOR_TESTS: [&str; 1] = ["hapax-simdisk"];

/// Crates of the order that the tests of any other crate may also use.
const ALSO_FOR_TESTS: [&str; 3] = ["hapax-conformance", "hapax-faults", "hapax-embedded"];

/// The crate that injects faults into the others; it depends on them, and the CLI starts it.
const VERIFY: &str = "hapax-verify";
const CLI: &str = "hapax-cli";

/// Crates with their own lints, and the reason.
const OWN_LINTS: [(&str, &str); 2] = [
    ("hapax-simdisk", "a SQLite VFS is a table of C functions: it needs unsafe"),
    (
        "hapax-kafka",
        "a member's identity in its group is read by a C function of librdkafka: one module needs unsafe",
    ),
];

fn place(name: &str) -> Option<usize> {
    ORDER.iter().position(|known| *known == name)
}

fn is_ours(name: &str) -> bool {
    name == "hapax" || name == "xtask" || name.starts_with("hapax-")
}

/// Dependencies against the order, and crates that are missing in it.
pub fn out_of_order(packages: &[Package]) -> Vec<String> {
    packages.iter().flat_map(wrong_way).collect()
}

fn wrong_way(package: &Package) -> Vec<String> {
    let name = package.name.as_str();
    let place_of_this = match place(name) {
        Some(place) => place,
        None if FOR_TESTS.contains(&name) => place("hapax-core").expect("the core has a place") + 1,
        None => {
            let advice = "put it into ORDER behind everything that it needs, or into FOR_TESTS";
            return vec![format!("{name} has no place in the order of crates; {advice} ({HERE})")];
        }
    };
    let before = |other: &str| place(other).is_some_and(|place| place < place_of_this);
    let for_tests = |other: &str| FOR_TESTS.contains(&other) || ALSO_FOR_TESTS.contains(&other);
    let ours = |needs: &[String]| needs.iter().filter(|other| is_ours(other)).cloned().collect::<Vec<_>>();

    let mut breaches = Vec::new();
    for other in ours(&package.needs) {
        if !before(&other) && (name, other.as_str()) != (CLI, VERIFY) {
            breaches.push(format!("{name} depends on {other}, which is not before it in ORDER ({HERE})"));
        }
    }
    for other in ours(&package.tests_need) {
        if !before(&other) && !for_tests(&other) && other != name {
            breaches
                .push(format!("the tests of {name} use {other}, which is not before it in ORDER ({HERE})"));
        }
    }
    breaches
}

/// Crates other than the CLI that depend on the fault harness.
pub fn on_verify(packages: &[Package]) -> Vec<String> {
    let depends = |package: &&Package| {
        package.name != CLI && package.needs.iter().chain(&package.tests_need).any(|other| other == VERIFY)
    };
    let breach = |package: &Package| format!("{} depends on {VERIFY}; only {CLI} may", package.name);
    packages.iter().filter(depends).map(breach).collect()
}

/// Crates that do not use the workspace's lints without an exception.
pub fn without_lints(packages: &[Package]) -> Vec<String> {
    let excused = |package: &&Package| OWN_LINTS.iter().any(|(name, _why)| *name == package.name);
    let lacking =
        packages.iter().filter(|package| !excused(package) && !takes_workspace_lints(&package.manifest));
    let advice = "add `[lints]` with `workspace = true`, or the crate with its reason to OWN_LINTS";
    lacking.map(|package| format!("{}: {advice} ({HERE})", package.name)).collect()
}

fn takes_workspace_lints(manifest: &str) -> bool {
    let mut section = "";
    for line in manifest.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        }
        let setting = line.split('#').next().unwrap_or_default().replace(' ', "");
        if (section == "[lints]" && setting == "workspace=true") || setting == "lints.workspace=true" {
            return true;
        }
    }
    false
}

/// `cargo run` without a name must find one binary: the CLI's. Not checked if the CLI does not exist.
pub fn ambiguous_run(packages: &[Package], default_members: &[String]) -> Vec<String> {
    let cli_exists = packages.iter().any(|package| package.name == CLI);
    let runs = |package: &&Package| package.has_binary && default_members.contains(&package.name);
    let run: Vec<&str> = packages.iter().filter(runs).map(|package| package.name.as_str()).collect();
    if !cli_exists || run == [CLI] {
        return Vec::new();
    }
    let found = run.join(", ");
    vec![format!(
        "`cargo run` finds the binaries of: {found}; set `default-members = [\"crates/cli\"]` in Cargo.toml"
    )]
}

/// A container image that is built with another Rust than `rust-version`: its build proves that this version is
/// sufficient.
pub fn other_rust(manifest: &str, image: &str) -> Vec<String> {
    let version = manifest.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let version = version.map_or("(none)", |version| version.trim_matches('"'));
    let from = format!("FROM rust:{version}-");
    let breach = || format!("packaging/Dockerfile: has no line that starts with `{from}`");
    (!image.lines().any(|line| line.starts_with(&from))).then(breach).into_iter().collect()
}

#[cfg(test)]
mod samples {
    use super::*;

    fn package(name: &str, needs: &[&str], tests_need: &[&str]) -> Package {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Package {
            name: name.into(),
            needs: owned(needs),
            tests_need: owned(tests_need),
            has_binary: name == CLI || name == "xtask",
            manifest: String::new(),
        }
    }

    #[test]
    fn a_dependency_that_points_the_wrong_way() {
        let found = out_of_order(&[package("hapax-core", &["serde", "hapax-embedded"], &[])]);
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("hapax-core depends on hapax-embedded"), "{}", found[0]);
        assert_eq!(out_of_order(&[package("hapax-embedded", &["hapax-core", "bytes"], &[])]), [""; 0]);
    }

    #[test]
    fn tests_that_use_too_much() {
        let found = out_of_order(&[package("hapax-core", &[], &["hapax-server"])]);
        assert_eq!(found.len(), 1);
        let fine = package("hapax-core", &[], &["hapax-conformance", "hapax-simdisk", "proptest"]);
        assert_eq!(out_of_order(&[fine]), [""; 0]);
    }

    #[test]
    fn test_only_crates_are_no_dependencies() {
        assert_eq!(out_of_order(&[package("hapax-embedded", &["hapax-simdisk"], &[])]).len(), 1);
        assert_eq!(out_of_order(&[package("hapax-simdisk", &["hapax-embedded"], &[])]).len(), 1);
        assert_eq!(out_of_order(&[package("hapax-simdisk", &["hapax-core"], &[])]), [""; 0]);
    }

    #[test]
    fn a_crate_without_a_place() {
        let found = out_of_order(&[package("hapax-sonar", &[], &[])]);
        assert!(found[0].contains(HERE) && found[0].contains("ORDER"), "{}", found[0]);
    }

    #[test]
    fn someone_else_on_verify() {
        let found = on_verify(&[package("xtask", &[VERIFY], &[]), package(CLI, &[VERIFY], &[])]);
        assert_eq!(found, ["xtask depends on hapax-verify; only hapax-cli may"]);
        assert_eq!(out_of_order(&[package(CLI, &[VERIFY], &[])]), [""; 0]);
    }

    #[test]
    fn lints_of_its_own() {
        let with =
            |name: &str, manifest: &str| Package { manifest: manifest.into(), ..package(name, &[], &[]) };
        let lax = with("hapax-core", "[dependencies]\nworkspace = true\n[lints.rust]\nunused = \"allow\"\n");
        assert_eq!(without_lints(&[lax]).len(), 1);
        let fine = with("hapax-core", "[package]\n[lints]\nworkspace = true\n");
        assert_eq!(without_lints(&[fine, with("hapax-simdisk", "")]), [""; 0]);
    }

    #[test]
    fn a_run_that_finds_two_binaries() {
        let (cli, xtask) = (package(CLI, &[], &[]), package("xtask", &[], &[]));
        let names = [CLI.to_owned(), "xtask".to_owned()];
        assert_eq!(ambiguous_run(&[cli.clone(), xtask.clone()], &names).len(), 1);
        assert_eq!(ambiguous_run(&[cli, xtask.clone()], &names[..1]), [""; 0]);
        assert_eq!(ambiguous_run(&[xtask], &names[1..]), [""; 0]);
    }

    #[test]
    fn an_image_with_another_rust() {
        let manifest = "[workspace.package]\nrust-version = \"1.91\"\n";
        assert_eq!(other_rust(manifest, "FROM rust:1.91-slim AS build\n"), [""; 0]);
        assert_eq!(other_rust(manifest, "# FROM rust:1.91-slim\nFROM rust:1.95-slim AS build\n").len(), 1);
        assert_eq!(other_rust("", "FROM rust:1.91-slim\n").len(), 1);
    }
}
