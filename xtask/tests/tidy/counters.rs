//! Every counter that is declared is counted: a number that stays 0 tells an operator that all is well.

use crate::workspace::{Workspace, has_extension};

/// The crate that has to count what the seams in `core` declare.
const STORE: &str = "embedded";

/// Counters that are declared in the sources of a crate and counted nowhere.
pub fn uncounted(workspace: &Workspace) -> Vec<String> {
    let sources: Vec<(&str, String)> = workspace
        .files
        .iter()
        .filter(|file| has_extension(file, &["rs"]) && file.starts_with("crates/") && file.contains("/src/"))
        .filter(|file| !file.contains("/tests/"))
        .map(|file| (file.as_str(), workspace.text(file)))
        .collect();
    let all: Vec<_> = sources.iter().flat_map(|(file, text)| declared(file, text)).collect();
    assert!(all.len() > 50, "{} counters were found: the rule looks at nothing", all.len());
    let breaches = all.iter().filter_map(|(file, counter)| {
        let declares = file.split('/').nth(1).unwrap_or_default();
        let counts = format!("crates/{}/src/", if declares == "core" { STORE } else { declares });
        let mut texts = sources.iter().filter(|(file, _)| file.starts_with(&counts)).map(|(_, text)| text);
        (!texts.any(|text| is_counted(text, counter)))
            .then(|| format!("{file}: the counter `{counter}` is counted nowhere in {counts}"))
    });
    breaches.collect()
}

/// The counters that a file declares by `metrics!` or `process_counters!`; its comments declare nothing.
fn declared<'a>(file: &'a str, text: &'a str) -> Vec<(&'a str, &'a str)> {
    let (mut found, mut within) = (Vec::new(), None);
    for line in text.lines() {
        let code = line.trim_start();
        match within {
            None if code.starts_with("//") => {}
            None if code.ends_with("process_counters! {") => within = Some(""),
            None if code.ends_with("metrics! {") && !code.starts_with('$') => within = Some("counter "),
            Some(_) if line == "}" => within = None,
            Some(keyword) => {
                let name = code.strip_prefix(keyword).and_then(|rest| rest.strip_suffix(','));
                let is_name =
                    |name: &&str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
                found.extend(name.filter(is_name).map(|name| (file, name)));
            }
            None => {}
        }
    }
    found
}

fn is_counted(text: &str, counter: &str) -> bool {
    ["add();", "add(),", "add_many("].iter().any(|add| text.contains(&format!(".{counter}.{add}")))
        || text.contains(&format!(".{counter} += "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_found_and_examples_are_not() {
        let text = "//! metrics! {\n//!     counter example,\n//! }\n\ncrate::metrics! {\n    pub struct A;\n    /// Sent.\n    \
                    counter sent,\n    /// Waiting.\n    gauge waiting,\n}\nhapax_core::process_counters! {\n    pub \
                    struct B, is \"b\";\n    /// Done.\n    done,\n}\nlet x = [\n    y,\n];\n";
        assert_eq!(declared("a.rs", text), [("a.rs", "sent"), ("a.rs", "done")]);
    }

    #[test]
    fn only_what_is_added_to_is_counted() {
        for counted in ["self.stats.done.add();", "x => s.done.add(),", "s.done.add_many(2)", "t.done += 1;"]
        {
            assert!(is_counted(counted, "done"), "{counted}");
        }
        for idle in ["let done = stats.done;", "stats.undone.add();", "report.done == 1"] {
            assert!(!is_counted(idle, "done"), "{idle}");
        }
    }
}
