//! The files and packages of the workspace, as the rules see them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Folders without files of this project, in addition to hidden ones.
const FOREIGN: [&str; 4] = ["hapax-data", "node_modules", "proptest-regressions", "target"];

/// Hidden folders with files of this project.
const HIDDEN: [&str; 3] = [".cargo", ".ci", ".github"];

/// The folder of these rules, with samples of forbidden text.
const TIDY: &str = "xtask/tests/tidy/";

/// The input of all rules.
pub struct Workspace {
    root: PathBuf,
    /// Every file, by its path from the root, sorted.
    pub files: Vec<String>,
    /// Every package of the workspace.
    pub packages: Vec<Package>,
    /// Names of the packages that cargo uses by default.
    pub default_members: Vec<String>,
}

/// A crate of the workspace.
#[derive(Debug, Clone, Default)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its manifest's text.
    pub manifest: String,
    /// Crates it needs to be built, as named in their own manifest.
    pub needs: Vec<String>,
    /// Crates that its tests need.
    pub tests_need: Vec<String>,
    /// Whether it has a binary.
    pub has_binary: bool,
}

impl Workspace {
    /// Reads the workspace of these rules.
    pub fn load() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a folder above").to_owned();
        let mut files = Vec::new();
        walk(&root, "", &mut files);
        files.sort();
        let (packages, default_members) = packages(&root);
        Self { root, files, packages, default_members }
    }

    /// The text of an existing file.
    pub fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    /// The results of `rule` for every file with one of these extensions.
    pub fn each(&self, extensions: &[&str], rule: fn(&str, &str) -> Vec<String>) -> Vec<String> {
        let files = self.files.iter().filter(|file| has_extension(file, extensions));
        let found: Vec<&String> = files.collect();
        assert!(!found.is_empty(), "no file ends in {extensions:?}: the rule looks at nothing");
        found.into_iter().flat_map(|file| rule(file, &self.text(file))).collect()
    }

    /// The same, without the rules' own samples.
    pub fn each_but_tidy(&self, extensions: &[&str], rule: fn(&str, &str) -> Vec<String>) -> Vec<String> {
        let mut breaches = self.each(extensions, rule);
        breaches.retain(|breach| !breach.starts_with(TIDY));
        breaches
    }
}

/// Whether the file has one of these extensions.
pub fn has_extension(file: &str, extensions: &[&str]) -> bool {
    Path::new(file).extension().is_some_and(|found| extensions.iter().any(|wanted| found == *wanted))
}

fn walk(root: &Path, folder: &str, files: &mut Vec<String>) {
    for entry in fs::read_dir(root.join(folder)).expect("a readable folder") {
        let entry = entry.expect("a readable folder");
        let name = entry.file_name().into_string().expect("a file name in UTF-8");
        let path = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let kind = entry.file_type().expect("a file type");
        if kind.is_file() {
            files.push(path);
        } else if kind.is_dir() && is_ours(&name) {
            walk(root, &path, files);
        }
    }
}

fn is_ours(folder: &str) -> bool {
    if folder.starts_with('.') { HIDDEN.contains(&folder) } else { !FOREIGN.contains(&folder) }
}

/// The packages, and the names of the default members, from cargo's metadata.
fn packages(root: &Path) -> (Vec<Package>, Vec<String>) {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root).args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let output = command.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON");

    let all = metadata["packages"].as_array().expect("packages");
    let defaults = metadata["workspace_default_members"].as_array().expect("default members");
    let default_members =
        all.iter().filter(|package| defaults.contains(&package["id"])).map(|package| text(&package["name"]));
    (all.iter().map(package).collect(), default_members.collect())
}

fn package(json: &Value) -> Package {
    let of_kind = |wanted: fn(&Value) -> bool| {
        let dependencies = json["dependencies"].as_array().expect("dependencies").iter();
        dependencies.filter(|it| wanted(&it["kind"])).map(|it| text(&it["name"])).collect()
    };
    let is_binary =
        |target: &Value| target["kind"].as_array().is_some_and(|kinds| kinds.contains(&"bin".into()));
    Package {
        name: text(&json["name"]),
        manifest: fs::read_to_string(text(&json["manifest_path"])).expect("a readable manifest"),
        needs: of_kind(|kind| kind != "dev"),
        tests_need: of_kind(|kind| kind == "dev"),
        has_binary: json["targets"].as_array().expect("targets").iter().any(is_binary),
    }
}

fn text(json: &Value) -> String {
    json.as_str().expect("text").to_owned()
}
