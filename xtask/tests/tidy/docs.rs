//! Rules on the pages for users.

use std::collections::{BTreeMap, BTreeSet};

use crate::workspace::{Workspace, has_extension};

const START: &str = "README.md";

/// The first commands that a reader runs, in order.
const COMMANDS: [&str; 2] = ["cargo run --release -- serve", "cargo xtask test"];

/// Pages under `docs/` that cannot be reached by links from the README.
pub fn unreachable(workspace: &Workspace) -> Vec<String> {
    unreachable_of(&pages(workspace))
}

/// Links to files that do not exist.
pub fn broken_links(workspace: &Workspace) -> Vec<String> {
    let exists = |file: &str| {
        let folder = format!("{}/", file.trim_end_matches('/'));
        workspace.files.iter().any(|known| known == file || known.starts_with(&folder))
    };
    broken_links_of(&pages(workspace), exists)
}

fn pages(workspace: &Workspace) -> BTreeMap<String, String> {
    let pages = workspace.files.iter().filter(|file| has_extension(file, &["md"]));
    pages.map(|file| (file.clone(), workspace.text(file))).collect()
}

fn unreachable_of(pages: &BTreeMap<String, String>) -> Vec<String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![START.to_owned()];
    while let Some(page) = next.pop() {
        if let Some(text) = pages.get(&page).filter(|_| reached.insert(page.clone())) {
            next.extend(links(&page, text));
        }
    }
    let lost = pages.keys().filter(|page| page.starts_with("docs/") && !reached.contains(*page));
    lost.map(|page| format!("{page}: no links lead to it from {START}")).collect()
}

fn broken_links_of(pages: &BTreeMap<String, String>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let all =
        pages.iter().flat_map(|(page, text)| links(page, text).into_iter().map(move |link| (page, link)));
    let broken = all.filter(|(_, link)| !exists(link));
    broken.map(|(page, link)| format!("{page}: links to {link}, which is not there")).collect()
}

/// The files that a page links to, by their path from the root. Links to the web and within the page are left out.
fn links(page: &str, text: &str) -> Vec<String> {
    let folder: Vec<&str> =
        page.rsplit_once('/').map_or(Vec::new(), |(folder, _)| folder.split('/').collect());
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let files = targets.map(|target| target.split('#').next().unwrap_or_default());
    let here = files.filter(|file| !file.is_empty() && !file.contains(':'));
    here.map(|file| {
        let mut path = folder.clone();
        for part in file.split('/') {
            match part {
                "." => {}
                ".." => drop(path.pop()),
                part => path.push(part),
            }
        }
        path.join("/")
    })
    .collect()
}

/// Steps of the followed requests that name a file or a function which does not exist. A step names a file as
/// `crate/file.rs`, and behind it the functions in that file.
pub fn missing_functions(architecture: &str, source: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let steps = architecture.split("## Three requests, followed").nth(1).unwrap_or_default();
    let steps = steps.split("\n## ").next().unwrap_or_default();
    let mut missing = Vec::new();
    let mut seen = 0;
    for place in steps.lines().filter_map(|line| line.strip_prefix('|')?.split('|').nth(1)) {
        let mut file = None;
        for name in place.split('`').skip(1).step_by(2) {
            if let Some((package, path)) = name.split_once('/') {
                file = has_extension(path, &["rs"]).then(|| format!("crates/{package}/src/{path}"));
                if let Some(file) = file.as_ref().filter(|file| source(file).is_none()) {
                    missing.push(format!("docs/ARCHITECTURE.md: {file} does not exist"));
                }
            } else {
                let function = format!("fn {}", name.rsplit("::").next().unwrap_or(name));
                let text = file.as_deref().and_then(&source).unwrap_or_default();
                let is_there = text.split(&function).skip(1).any(|rest| rest.starts_with(['(', '<']));
                if !is_there {
                    missing.push(format!("docs/ARCHITECTURE.md: {name} is not in {file:?}"));
                }
            }
            seen += 1;
        }
    }
    if seen == 0 {
        missing.push("docs/ARCHITECTURE.md: the followed requests name nothing".to_owned());
    }
    missing
}

/// The problem if the README does not start with the two commands.
pub fn first_commands(readme: &str) -> Vec<String> {
    let found: Vec<&str> = shell_lines(readme).into_iter().take(COMMANDS.len()).collect();
    if found == COMMANDS {
        return Vec::new();
    }
    vec![format!("{START}: its first shell commands are {COMMANDS:?}, in this order, not {found:?}")]
}

/// The commands in the fenced shell blocks, without comments.
fn shell_lines(text: &str) -> Vec<&str> {
    let (mut in_fence, mut in_shell) = (false, false);
    let mut lines = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(language) = line.strip_prefix("```") {
            in_shell = !in_fence && matches!(language, "sh" | "bash" | "shell" | "console");
            in_fence = !in_fence;
        } else if in_shell {
            let command = line.trim_start_matches("$ ").split(" #").next().unwrap_or_default().trim();
            if !command.is_empty() && !command.starts_with('#') {
                lines.push(command);
            }
        }
    }
    lines
}

/// A CI file that does not run the test command.
pub fn runs_the_tests(file: &str, text: &str) -> Vec<String> {
    let runs = |line: &str| {
        let command = line.trim().trim_start_matches("- ").trim_start_matches("run: ");
        command.trim_start_matches("exec ") == COMMANDS[1]
    };
    let breach = || format!("{file}: does not run `{}`", COMMANDS[1]);
    (!text.lines().any(runs)).then(breach).into_iter().collect()
}

#[cfg(test)]
mod samples {
    use super::*;

    fn pages(texts: &[(&str, &str)]) -> BTreeMap<String, String> {
        texts.iter().map(|(page, text)| ((*page).to_owned(), (*text).to_owned())).collect()
    }

    #[test]
    fn a_page_that_nothing_links_to() {
        let sample = pages(&[
            ("README.md", "[how](docs/ARCHITECTURE.md#flow) [web](https://example.com/docs/lost.md)"),
            ("docs/ARCHITECTURE.md", "[errors](errors/index.md) [home](../README.md)"),
            ("docs/errors/index.md", "[one](./one.md)"),
            ("docs/errors/one.md", ""),
            ("docs/lost.md", "[how](ARCHITECTURE.md)"),
        ]);
        assert_eq!(unreachable_of(&sample), ["docs/lost.md: no links lead to it from README.md"]);
    }

    #[test]
    fn a_link_that_leads_nowhere() {
        let sample = pages(&[("docs/a.md", "[b](b.md) [c](../c.md) [top](#top)")]);
        let found = broken_links_of(&sample, |file| file == "c.md");
        assert_eq!(found, ["docs/a.md: links to docs/b.md, which is not there"]);
    }

    #[test]
    fn a_followed_request_with_old_names() {
        let source =
            |file: &str| (file == "crates/net/src/a.rs").then(|| "fn accept() {}\nfn served<T>()".to_owned());
        let page = |step: &str| {
            format!("## Three requests, followed\n| step | {step} |\n\n## Next\n| x | `net/x.rs` |")
        };
        let missing = |step: &str| missing_functions(&page(step), source).len();
        assert_eq!(missing("`net/a.rs` `accept`, `Server::served`; `net/`"), 0);
        assert_eq!(missing("`net/a.rs` `serve`"), 1);
        assert_eq!(missing("`net/gone.rs` `accept`"), 2);
        assert_eq!(missing("nothing"), 1);
    }

    #[test]
    fn a_readme_with_other_commands() {
        let good =
            "# Hapax\n```sh\n# starts it\ncargo run --release -- serve  # on 9324\ncargo xtask test\n```\n";
        assert_eq!(first_commands(good), [""; 0]);
        let two = "```rust\nlet a = 1;\n```\n```console\n$ cargo run --release -- serve\n```\n```sh\ncargo xtask test\n```";
        assert_eq!(first_commands(two), [""; 0]);
        assert_eq!(first_commands("```sh\ncargo install hapax\ncargo xtask test\n```\n").len(), 1);
        assert_eq!(first_commands("cargo run --release -- serve\ncargo xtask test\n").len(), 1);
    }

    #[test]
    fn a_ci_with_a_command_of_its_own() {
        assert_eq!(runs_the_tests("ci", "steps:\n  - run: cargo test\n").len(), 1);
        assert_eq!(runs_the_tests("ci", "# cargo xtask test\n").len(), 1);
        assert_eq!(runs_the_tests("ci", "  - run: cargo xtask test\n"), [""; 0]);
        assert_eq!(runs_the_tests("ci", "set -e\nexec cargo xtask test\n"), [""; 0]);
    }
}
