//! Rules on the text of single files. Each returns `path:line: problem`.

const LINES_MAX: usize = 800;

fn at(file: &str, index: usize, what: &str) -> String {
    format!("{file}:{}: {what}", index + 1)
}

/// Files that are too long and should be split into parts that change together.
pub fn too_long(file: &str, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let breach =
        || format!("{file}: {lines} lines, the most is {LINES_MAX}; split it by what changes together");
    (lines > LINES_MAX).then(breach).into_iter().collect()
}

/// Macros that mark unfinished work or debugging.
pub fn unfinished(file: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for macro_call in ["todo!(", "unimplemented!(", "dbg!("] {
            if line.contains(macro_call) {
                breaches.push(at(file, index, &format!("{macro_call}...) does not belong in a commit")));
            }
        }
    }
    breaches
}

/// Tests and examples that are ignored without a reason.
pub fn ignored_without_reason(file: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if ignores_silently(line) {
            breaches.push(at(file, index, "an ignored test says why: `#[ignore = \"the reason\"]`"));
        }
        if line.contains("```ignore") {
            breaches.push(at(
                file,
                index,
                "an example compiles (`no_run`) or is no Rust (`text`), never `ignore`",
            ));
        }
    }
    breaches
}

fn ignores_silently(line: &str) -> bool {
    let conditional =
        line.find("cfg_attr(").map(|start| &line[start..]).and_then(|rest| behind(rest, "ignore"));
    let Some(rest) = behind(line, "#[ignore").or(conditional) else { return false };
    let reason = rest.trim_start().strip_prefix('=').and_then(|rest| rest.trim_start().strip_prefix('"'));
    reason.is_none_or(|reason| reason.trim_start().starts_with('"'))
}

fn behind<'a>(text: &'a str, what: &str) -> Option<&'a str> {
    text.find(what).map(|start| &text[start + what.len()..])
}

/// Absolute paths that exist on one machine only.
pub fn machine_paths(file: &str, text: &str) -> Vec<String> {
    // Written so that this line does not break the rule itself.
    let folder = concat!("/", "work/");
    let mut breaches = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let absolute =
            |start: usize| !line[..start].ends_with(|c: char| c.is_alphanumeric() || "_-.~}>/".contains(c));
        if line.match_indices(folder).any(|(start, _)| absolute(start)) {
            breaches.push(at(file, index, &format!("{folder}... exists on one machine only")));
        }
    }
    breaches
}

/// Log fields called `message`: that is the name of the text itself, so such a field loses its name in a line, and stands
/// twice in JSON.
pub fn log_field_called_message(file: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    let levels = ["error", "warn", "info", "debug", "trace"];
    for macro_call in
        levels.iter().flat_map(|level| [format!("tracing::{level}!("), format!("{level}_span!(")])
    {
        for (start, _) in text.match_indices(&macro_call) {
            let call = &text[start + macro_call.len()..];
            let call = &call[..call.find(");").unwrap_or(call.len())];
            let fields = call.split(['"', ',']).map(str::trim);
            if fields
                .into_iter()
                .any(|field| matches!(field, "%message" | "?message") || field.starts_with("message ="))
            {
                let line = text[..start].matches('\n').count();
                breaches.push(at(
                    file,
                    line,
                    "a log field called `message`; name it message_id or what it is",
                ));
            }
        }
    }
    breaches
}

/// Tabs, and blanks at the end of a line or file.
pub fn stray_whitespace(file: &str, text: &str) -> Vec<String> {
    let mut breaches = Vec::new();
    for (index, line) in text.split('\n').enumerate() {
        if line.contains('\t') {
            breaches.push(at(file, index, "a tab; use spaces"));
        } else if line.ends_with(char::is_whitespace) {
            breaches.push(at(file, index, "whitespace at the end of the line"));
        }
    }
    if !text.is_empty() && (!text.ends_with('\n') || text.ends_with("\n\n")) {
        breaches.push(format!("{file}: ends in one newline, neither none nor more"));
    }
    breaches
}

#[cfg(test)]
mod samples {
    use super::*;

    #[test]
    fn a_file_that_is_too_long() {
        assert_eq!(too_long("a.rs", &"x\n".repeat(801)).len(), 1);
        assert_eq!(too_long("a.rs", &"x\n".repeat(800)), [""; 0]);
    }

    #[test]
    fn a_log_field_that_loses_its_name() {
        for bad in [
            "tracing::warn!(%queue, %message, \"it failed\");",
            "\n    tracing::error!(\n        message = %job.id,\n        \"it failed\"\n    );",
            "tracing::info_span!(\"delivery\", %queue, ?message);",
        ] {
            assert_eq!(log_field_called_message("a.rs", bad).len(), 1, "{bad}");
        }
        let good = "tracing::warn!(message_id = %message, \"a message = failed\");\nlet message = 7;";
        assert_eq!(log_field_called_message("a.rs", good), [""; 0]);
    }

    #[test]
    fn unfinished_code() {
        let found =
            unfinished("a.rs", "fn a() {\n    todo!()\n}\nlet b = dbg!(1);\nunimplemented!(\"later\")\n");
        assert_eq!(found.len(), 3);
        assert!(found[0].starts_with("a.rs:2: todo!("), "{}", found[0]);
        assert_eq!(unfinished("a.rs", "// a list of todos\n"), [""; 0]);
    }

    #[test]
    fn a_test_ignored_without_a_word() {
        for bad in [
            "#[ignore]",
            "#[ignore = \"\"]",
            "#[cfg_attr(miri, ignore)]",
            "#[cfg_attr(not(unix), test, ignore)]",
            "/// ```ignore",
        ] {
            assert_eq!(ignored_without_reason("a.rs", bad).len(), 1, "{bad}");
        }
        for good in
            ["#[ignore = \"an hour long\"]", "#[cfg_attr(miri, ignore = \"uses files\")]", "let ignore = 1;"]
        {
            assert_eq!(ignored_without_reason("a.rs", good), [""; 0], "{good}");
        }
    }

    #[test]
    fn a_path_of_one_machine() {
        let folder = concat!("/", "work/");
        for bad in [
            format!("see {folder}a.rs"),
            format!("({folder}b)"),
            format!("{folder}c"),
            format!("\"{folder}\""),
        ] {
            assert_eq!(machine_paths("a.md", &bad).len(), 1, "{bad}");
        }
        for good in [format!("crates/cli/src{folder}mod.rs"), format!("https://host.example{folder}x")] {
            assert_eq!(machine_paths("a.md", &good), [""; 0], "{good}");
        }
    }

    #[test]
    fn stray_blanks() {
        assert_eq!(stray_whitespace("a.md", "a\tb\nc \nd\n").len(), 2);
        assert_eq!(stray_whitespace("a.md", "a\n\n").len(), 1);
        assert_eq!(stray_whitespace("a.md", "a").len(), 1);
        assert_eq!(stray_whitespace("a.md", "a\n\n  b\n"), [""; 0]);
    }
}
