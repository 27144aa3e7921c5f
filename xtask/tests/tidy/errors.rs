//! Every error code has a page under `docs/errors/`, and every page has a code.

use std::collections::{BTreeMap, BTreeSet};

use crate::workspace::{Workspace, has_extension};

const FOLDER: &str = "docs/errors/";
const INDEX: &str = "docs/errors/README.md";

/// The files with findings: there, calls of `refusal` and `warning` have a code.
const FINDINGS: &[&str] = &[
    "crates/core/src/policy/tier/",
    "crates/embedded/src/environment.rs",
    "crates/kafka/src/processor/counts.rs",
    "crates/postgres/src/findings.rs",
    "crates/redis/src/guard.rs",
];

/// Codes without a page, pages without a code, and pages with a wrong form.
pub fn unexplained(workspace: &Workspace) -> Vec<String> {
    let sources = workspace.files.iter().filter(|file| is_source(file));
    let found = sources.flat_map(|file| {
        let found = codes(file, &workspace.text(file));
        found.into_iter().map(|(code, kind)| (code, (kind, file.clone()))).collect::<Vec<_>>()
    });
    let mut codes = BTreeMap::new();
    for (code, place) in found {
        // The code of a finding may be that of an error too; its page explains the finding, whatever the files' names.
        let known = codes.entry(code).or_insert_with(|| place.clone());
        *known = place.min(known.clone());
    }
    assert!(codes.len() > 50, "the rule looks at nothing: {codes:?}");
    let pages =
        workspace.files.iter().filter(|file| file.starts_with(FOLDER) && has_extension(file, &["md"]));
    let pages = pages.map(|file| (file.clone(), workspace.text(file))).collect();
    compare(&codes, &pages)
}

fn is_source(file: &str) -> bool {
    file.starts_with("crates/")
        && file.contains("/src/")
        && !file.contains("/tests")
        && has_extension(file, &["rs"])
}

/// The kind of a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Refusal,
    Warning,
    Error,
}

impl Kind {
    /// The first word of the second paragraph of its page.
    fn word(self) -> &'static str {
        match self {
            Self::Refusal => "Refusal",
            Self::Warning => "Warning",
            Self::Error => "Error",
        }
    }
}

/// The codes in a Rust file, without its tests.
fn codes(file: &str, text: &str) -> BTreeSet<(String, Kind)> {
    let text = text.split("\n#[cfg(test)]").next().unwrap_or_default();
    let mut found = BTreeSet::new();
    for body in text.split("fn code(&self) -> &'static str {").skip(1) {
        let body = body.split("\n    }").next().unwrap_or_default();
        // An attribute contains the name of a feature, not a code.
        let lines = body.lines().filter(|line| !line.trim_start().starts_with("#["));
        found.extend(lines.flat_map(literals).map(|code| (code, Kind::Error)));
    }
    let first = |call: &str, kind| {
        let calls = text.split(call).skip(1).filter_map(code_among);
        calls.map(|code| (code, kind)).collect::<Vec<_>>()
    };
    found.extend(first("Problem::new(", Kind::Error));
    if FINDINGS.iter().any(|place| file.starts_with(place)) {
        found.extend(first("refusal(", Kind::Refusal));
        found.extend(first("warning(", Kind::Warning));
    }
    found
}

/// The code among a call's arguments: the first one, or the one after the status.
fn code_among(arguments: &str) -> Option<String> {
    let mut arguments = arguments.split(',').map(str::trim);
    let first = arguments.next()?;
    let code = if first.starts_with("StatusCode::") { arguments.next()? } else { first };
    let code = code.strip_prefix('"')?.split('"').next()?;
    (!code.is_empty()).then(|| code.to_owned())
}

fn literals(text: &str) -> impl Iterator<Item = String> {
    text.split('"').skip(1).step_by(2).map(ToOwned::to_owned)
}

fn compare(codes: &BTreeMap<String, (Kind, String)>, pages: &BTreeMap<String, String>) -> Vec<String> {
    let mut breaches = Vec::new();
    let index = pages.get(INDEX).map_or("", String::as_str);
    for (code, (kind, file)) in codes {
        let page = format!("{FOLDER}{code}.md");
        let Some(text) = pages.get(&page) else {
            breaches.push(format!("{file}: the code {code} has no page {page}"));
            continue;
        };
        if !text.starts_with(&format!("# `{code}`\n\n{}", kind.word())) {
            breaches.push(format!("{page}: begins with its code as heading, then {:?}", kind.word()));
        }
        if !text.contains("\n**What happened.** ") || !text.contains("\n**What to do.** ") {
            breaches.push(format!("{page}: says what happened and what to do"));
        }
        if !index.contains(&format!("| [`{code}`]({code}.md) | ")) {
            breaches.push(format!("{INDEX}: does not list {code}"));
        }
    }
    let known = |page: &&String| {
        let code = page.trim_start_matches(FOLDER).trim_end_matches(".md");
        *page != INDEX && !codes.contains_key(code)
    };
    breaches.extend(pages.keys().filter(known).map(|page| format!("{page}: nothing gives out this code")));
    breaches
}

#[cfg(test)]
mod samples {
    use super::*;

    #[test]
    fn codes_are_found_where_they_are_given_out() {
        let source = "impl E {\n    pub fn code(&self) -> &'static str {\n        match self {\n            \
                      Self::A => \"no-a\",\n            Self::B(e) => e.code(),\n        }\n    }\n}\n\
                      let p = Problem::new(\"no-b\", \"x\", true);\nProblem::new(code, \"y\", false);\n\
                      Problem::new(\n    \"no-c\",\n    \"z\");\nProblem::new(\"\", why, false);\n\
                      Problem::new(StatusCode::CONFLICT, \"no-d\", t, d);\n\
                      warning(\"not-here\", f);\n\n#[cfg(test)]\nmod tests {\n    Problem::new(\"test\", 1)\n}\n";
        let found: Vec<_> = codes("crates/server/src/a.rs", source).into_iter().collect();
        let error = |code: &str| (code.to_owned(), Kind::Error);
        assert_eq!(found, [error("no-a"), error("no-b"), error("no-c"), error("no-d")]);
        let found = codes("crates/core/src/policy/tier/rules.rs", "refusal(\"a\", f),\nwarning(\"b\", g),\n");
        let expected = [("a".to_owned(), Kind::Refusal), ("b".to_owned(), Kind::Warning)];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_code_without_a_page_and_a_page_without_a_code() {
        let code = |code: &str, kind| (code.to_owned(), (kind, "a.rs".to_owned()));
        let codes = BTreeMap::from([
            code("good", Kind::Error),
            code("bare", Kind::Warning),
            code("lost", Kind::Error),
        ]);
        let page = |code: &str, text: &str| (format!("{FOLDER}{code}.md"), text.to_owned());
        let good = "# `good`\n\nError: 404.\n\n**What happened.** It.\n\n**What to do.** That.\n";
        let pages = BTreeMap::from([
            page("README", "| [`good`](good.md) | fine |\n"),
            page("good", good),
            page("bare", "# `bare`\n"),
            page("old", "# `old`\n"),
        ]);
        let found = compare(&codes, &pages);
        let has = |text: &str| found.iter().any(|breach| breach.contains(text));
        assert_eq!(found.len(), 5, "{found:?}");
        assert!(
            has("lost has no page") && has("old.md: nothing gives out") && has("not list bare"),
            "{found:?}"
        );
        assert!(has("bare.md: begins with") && has("bare.md: says what"), "{found:?}");
    }
}
