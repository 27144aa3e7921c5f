//! Every counter that is declared is counted: a number that stays 0 tells an operator that all is well.

use crate::workspace::{Workspace, has_extension};

/// Where the counters of a struct are counted: the files, by how their paths begin, and the fields or variables through
/// which code there reaches the struct. A name that stands in two structs is looked for in each.
struct Place {
    of: &'static str,
    files: &'static str,
    through: &'static [&'static str],
}

const fn place(of: &'static str, files: &'static str, through: &'static [&'static str]) -> Place {
    Place { of, files, through }
}

/// What the seams in `core` declare is counted by the embedded store.
const PLACES: &[Place] = &[
    place("QueueTotals", "crates/embedded/src/engine/", &["totals"]),
    place("LedgerStats", "crates/embedded/src/engine/ledger.rs", &["stats"]),
    place("StoreTotals", "crates/embedded/src/writer", &["stats"]),
    place("Counts", "crates/worker/src/", &["stats", "self"]),
    place("Counters", "crates/http/src/", &["counters"]),
    place("DeliveryFigures", "crates/observe/src/", &["figures"]),
    place("HistoryFigures", "crates/observe/src/observer.rs", &["history"]),
    place("RelayCounts", "crates/relay/src/", &["counts"]),
    place("ProcessorCounts", "crates/kafka/src/processor/", &["counts"]),
];

/// A counter, and what declares it.
#[derive(Debug, PartialEq)]
struct Declared<'a> {
    file: &'a str,
    of: &'a str,
    counter: &'a str,
}

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
    all.iter().filter_map(|one| breach(one, PLACES, &sources)).collect()
}

fn breach(one: &Declared<'_>, places: &[Place], sources: &[(&str, String)]) -> Option<String> {
    let Declared { file, of, counter } = one;
    let Some(place) = places.iter().find(|place| place.of == *of) else {
        return Some(format!("{file}: where the counters of {of} are counted is not listed in {}", file!()));
    };
    let mut texts = sources.iter().filter(|(file, _)| file.starts_with(place.files)).map(|(_, text)| text);
    let counted = texts.any(|text| place.through.iter().any(|through| is_counted(text, through, counter)));
    (!counted).then(|| {
        let (through, files) = (place.through.join("` or `"), place.files);
        format!("{file}: the counter `{counter}` of {of} is counted nowhere in {files}* through `{through}`")
    })
}

/// The counters that a file declares by `metrics!` or `process_counters!`; its comments declare nothing.
fn declared<'a>(file: &'a str, text: &'a str) -> Vec<Declared<'a>> {
    let (mut found, mut within, mut of) = (Vec::new(), None, "");
    for line in text.lines() {
        let code = line.trim_start();
        match within {
            None if code.starts_with("//") => {}
            None if code.ends_with("process_counters! {") => within = Some(""),
            None if code.ends_with("metrics! {") && !code.starts_with('$') => within = Some("counter "),
            Some(_) if line == "}" => within = None,
            Some(keyword) => {
                if let Some((_, rest)) = code.split_once("struct ").filter(|_| !code.starts_with("//")) {
                    of = rest.split([' ', ',', ';']).next().unwrap_or_default();
                }
                let name = code.strip_prefix(keyword).and_then(|rest| rest.strip_suffix(','));
                let is_name =
                    |name: &&str| name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
                found.extend(name.filter(is_name).map(|counter| Declared { file, of, counter }));
            }
            None => {}
        }
    }
    found
}

/// Whether a text adds to a counter that it reaches through this field or variable.
fn is_counted(text: &str, through: &str, counter: &str) -> bool {
    let reached = format!("{through}.{counter}");
    let whole = |at: usize| {
        let before = text[..at].chars().next_back();
        !before.is_some_and(|before| before.is_ascii_alphanumeric() || before == '_')
    };
    let adds = |at: usize| {
        let after = &text[at + reached.len()..];
        [".add();", ".add(),", ".add_many(", " += "].iter().any(|add| after.starts_with(add))
    };
    text.match_indices(&reached).any(|(at, _)| whole(at) && adds(at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_found_and_examples_are_not() {
        let text = "//! metrics! {\n//!     counter example,\n//! }\n\ncrate::metrics! {\n    pub struct A;\n    /// Sent.\n    \
                    counter sent,\n    /// Waiting.\n    gauge waiting,\n}\nhapax_core::process_counters! {\n    pub \
                    struct B, is \"b\";\n    /// Done.\n    done,\n}\nlet x = [\n    y,\n];\n";
        let declared_by = |of, counter| Declared { file: "a.rs", of, counter };
        assert_eq!(declared("a.rs", text), [declared_by("A", "sent"), declared_by("B", "done")]);
    }

    #[test]
    fn only_what_is_added_to_is_counted() {
        for counted in [
            "self.stats.done.add();",
            "x => stats.done.add(),",
            "stats.done.add_many(2)",
            "let a = stats.done; stats.done += 1;",
        ] {
            assert!(is_counted(counted, "stats", "done"), "{counted}");
        }
        for idle in [
            "let done = stats.done;",
            "stats.undone.add();",
            "report.done == 1",
            "totals.done += 1;",
            "mystats.done += 1;",
            "stats.done_late += 1;",
        ] {
            assert!(!is_counted(idle, "stats", "done"), "{idle}");
        }
    }

    #[test]
    fn a_name_of_two_structs_is_looked_for_in_each() {
        let places =
            [place("Queue", "crates/a/src/", &["totals"]), place("Ledger", "crates/a/src/", &["stats"])];
        let sources = [("crates/a/src/engine.rs", "self.totals.stale += 1;".to_owned())];
        let of = |of| Declared { file: "crates/core/src/store.rs", of, counter: "stale" };
        assert_eq!(breach(&of("Queue"), &places, &sources), None);
        let found = breach(&of("Ledger"), &places, &sources).unwrap();
        assert!(found.contains("`stale` of Ledger is counted nowhere"), "{found}");
        let found = breach(&of("Relay"), &places, &sources).unwrap();
        assert!(found.contains("where the counters of Relay are counted is not listed"), "{found}");
    }
}
