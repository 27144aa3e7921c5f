//! A configuration file: all problems in it are reported at once, each with its line.

use std::error::Error;
use std::fmt::{self, Write as _};
use std::ops::Range;
use std::path::Path;

use anyhow::Context as _;
use serde::Serialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::text::escape;

/// Maximum number of reported problems: with more, the file is probably meant for something else.
const PROBLEMS_MAX: usize = 50;

/// Renamed keys: the old and the new path, without the indexes of list elements.
const RENAMED_KEYS: [(&str, &str); 19] = [
    ("queue.dead_letter.max_attempts", "queue.retry.max_attempts"),
    ("store.reserve_bytes", "store.embedded.reserve_bytes"),
    ("store.messages_max", "store.embedded.messages_max"),
    ("store.bytes_max", "store.embedded.bytes_max"),
    ("store.memory_bytes_max", "store.embedded.memory_bytes_max"),
    ("store.allow_network_file_system", "store.embedded.allow_network_file_system"),
    ("limits.bodies_bytes_max", "limits.arriving_bytes_max"),
    ("proxy.limits.pool_idle_ms", "proxy.limits.pool_idle_timeout_ms"),
    ("proxy.limits.pool_idle_max", "proxy.limits.pool_idle_connections_max"),
    ("proxy.policy.required", "proxy.policy.key_required"),
    ("proxy.policy.counted_headers", "proxy.policy.fingerprint_headers"),
    ("proxy.policy.excluded", "proxy.policy.fingerprint_excluded_fields"),
    ("proxy.policy.released", "proxy.policy.released_statuses"),
    ("proxy.policy.doubtful", "proxy.policy.doubtful_statuses"),
    ("proxy.route.required", "proxy.route.key_required"),
    ("proxy.route.counted_headers", "proxy.route.fingerprint_headers"),
    ("proxy.route.excluded", "proxy.route.fingerprint_excluded_fields"),
    ("proxy.route.released", "proxy.route.released_statuses"),
    ("proxy.route.doubtful", "proxy.route.doubtful_statuses"),
];

/// The names of Rust's types in messages to users who write TOML.
const TYPE_NAMES: [(&str, &str); 6] = [
    ("expected u64", "expected a whole number, 0 or more"),
    ("expected usize", "expected a whole number, 0 or more"),
    ("expected u32", "expected a whole number, 0 or more"),
    ("expected a boolean", "expected true or false"),
    ("expected path string", "expected a path"),
    ("expected a map", "expected a table"),
];

/// A problem with a value. The path is written with dots, list elements by their index from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    path: String,
    message: String,
    /// The path of another value that it conflicts with.
    other: Option<String>,
}

impl Problem {
    /// A problem with the value at `path`.
    pub fn at(path: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { path: path.into(), message: message.to_string(), other: None }
    }

    /// Two conflicting values: the later one, and the earlier one that it conflicts with.
    pub fn conflict(path: impl Into<String>, other: impl Into<String>, message: impl fmt::Display) -> Self {
        Self { other: Some(other.into()), ..Self::at(path, message) }
    }
}

/// All problems with a configuration, one line for each.
#[derive(Debug)]
pub struct Problems {
    what: String,
    lines: Vec<String>,
}

impl Problems {
    /// The lines to print.
    pub fn lines(&self) -> Vec<String> {
        match self.lines.as_slice() {
            [only] => vec![only.clone()],
            lines => {
                let heading = format!("{} has {} problems:", self.what, lines.len());
                std::iter::once(heading).chain(lines.iter().map(|line| format!("  {line}"))).collect()
            }
        }
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.lines().join("\n"))
    }
}

impl Error for Problems {}

/// A file's text with the position of each key, and the problems found so far.
#[derive(Debug, Default)]
pub struct ConfigFile<'t> {
    /// `None`: there is no file, only flags and environment.
    name: Option<String>,
    text: &'t str,
    /// The valid part of the file.
    tree: DeTable<'t>,
    found: Vec<(usize, String)>,
}

/// The name (for messages) and the text of a configuration file.
pub fn read(file: Option<&Path>) -> anyhow::Result<Option<(String, String)>> {
    let Some(file) = file else { return Ok(None) };
    let name = file.display().to_string();
    let text = std::fs::read_to_string(file).with_context(|| name.clone())?;
    Ok(Some((name, text)))
}

impl<'t> ConfigFile<'t> {
    /// The values of a file, or the defaults without one.
    pub fn parse_or_default<T>(read: Option<&'t (String, String)>) -> Result<(T, Self), Problems>
    where
        T: DeserializeOwned + Default,
    {
        read.map_or_else(|| Ok(Default::default()), |(name, text)| Self::parse(text, name))
    }

    /// Parses a file's text; `name` is used in messages. Wrong values are left out of the result and kept for
    /// [`ConfigFile::check`].
    pub fn parse<T: DeserializeOwned>(text: &'t str, name: &str) -> Result<(T, Self), Problems> {
        let (tree, broken) = DeTable::parse_recoverable(text);
        let (span, tree) = (tree.span(), tree.into_inner());
        let mut file = Self { name: Some(name.to_owned()), text, tree, ..Self::default() };
        for error in &broken {
            file.add(error.span(), error.message().trim().replace('\n', "; "));
        }
        if !broken.is_empty() {
            return Err(file.problems());
        }
        let mut removed: Vec<String> = Vec::new();
        loop {
            let left = Spanned::new(span.clone(), file.tree.clone());
            let error = match T::deserialize(toml::Deserializer::from(left)) {
                Ok(value) => return Ok((value, file)),
                Err(error) => error,
            };
            let place = error.span().and_then(|span| file.wrong_value(&span, error.message()));
            let Some((path, span)) = place.filter(|_| removed.len() < PROBLEMS_MAX) else {
                file.add(error.span(), explain(error.message(), ""));
                return Err(file.problems());
            };
            // A required key with a wrong value is now missing; do not report it twice.
            let missing =
                error.message().strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
            if !missing.is_some_and(|key| removed.contains(&format!("{path}.{key}"))) {
                file.add(Some(span), explain(error.message(), &path));
            }
            remove(&mut file.tree, &path);
            removed.push(path);
        }
    }

    /// Decides whether the file can be used, given the problems with the effective values. `is_overridden` tells
    /// whether the value at a path comes from a flag or the environment, so that the file is not the cause.
    pub fn check(
        mut self,
        problems: Vec<Problem>,
        is_overridden: impl Fn(&str) -> bool,
    ) -> Result<(), Problems> {
        let mut elsewhere = Vec::new();
        for Problem { path, message, other } in problems {
            match self.span_of(&path).filter(|_| !is_overridden(&path)) {
                Some(span) => {
                    let other = other.and_then(|other| self.span_of(&other));
                    let see = other.map(|span| format!("; see line {}", self.line(span.start)));
                    self.add(Some(span), message + &see.unwrap_or_default());
                }
                None => elsewhere.push(message),
            }
        }
        if self.found.is_empty() && elsewhere.is_empty() {
            return Ok(());
        }
        let mut problems = self.problems();
        problems.lines.extend(elsewhere);
        Err(problems)
    }

    /// The position of a value, or of the innermost table that it belongs to.
    fn span_of(&self, path: &str) -> Option<Range<usize>> {
        let mut found = None;
        for end in path.match_indices('.').map(|(end, _)| end).chain([path.len()]) {
            found = span_at(&self.tree, &path[..end]).or(found);
        }
        found
    }

    /// The path and position of the value that an error is about.
    fn wrong_value(&self, span: &Range<usize>, message: &str) -> Option<(String, Range<usize>)> {
        let (mut path, mut span) = (path_of(&self.tree, span)?, span.clone());
        // Some errors name only the table around the key.
        let unknown = message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        if let Some(key) = unknown.filter(|key| path.rsplit('.').next() != Some(key))
            && let Some(below) = path_below(value_at(&self.tree, &path)?, key)
        {
            path = format!("{path}.{below}");
            span = span_at(&self.tree, &path)?;
        }
        Some((path, span))
    }

    fn add(&mut self, span: Option<Range<usize>>, message: String) {
        let line = self.line(span.map_or(0, |span| span.start));
        self.found.push((line, message));
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text[..at.min(self.text.len())].matches('\n').count()
    }

    fn problems(&mut self) -> Problems {
        self.found.sort_by_key(|(line, _)| *line);
        let what = self.name.clone().unwrap_or_else(|| "the configuration".to_owned());
        let found = std::mem::take(&mut self.found).into_iter();
        Problems { lines: found.map(|(line, message)| format!("{what}:{line}: {message}")).collect(), what }
    }
}

/// Returns a test for paths whose value differs between the file and the effective configuration: those come from flags
/// or the environment.
pub fn changed_paths<T: Serialize>(before: &T, after: &T) -> anyhow::Result<impl Fn(&str) -> bool + use<T>> {
    let (before, after) = (toml::Value::try_from(before)?, toml::Value::try_from(after)?);
    let at = |tree: &toml::Value, path: &str| {
        path.split('.').try_fold(tree.clone(), |value, step| match step.parse::<usize>() {
            Ok(at) => value.get(at).cloned(),
            Err(_) => value.get(step).cloned(),
        })
    };
    Ok(move |path: &str| at(&before, path) != at(&after, path))
}

/// The path of the key or value at a span.
fn path_of(table: &DeTable<'_>, span: &Range<usize>) -> Option<String> {
    table.iter().find_map(|(key, value)| {
        let name = key.get_ref().as_ref();
        if key.span() == *span {
            return Some(name.to_owned());
        }
        let below = path_in(value.get_ref(), span).map(|rest| format!("{name}.{rest}"));
        below.or_else(|| (value.span() == *span).then(|| name.to_owned()))
    })
}

fn path_in(value: &DeValue<'_>, span: &Range<usize>) -> Option<String> {
    if let Some(table) = value.as_table() {
        return path_of(table, span);
    }
    value.as_array()?.iter().enumerate().find_map(|(at, element)| {
        let below = path_in(element.get_ref(), span).map(|rest| format!("{at}.{rest}"));
        below.or_else(|| (element.span() == *span).then(|| at.to_string()))
    })
}

/// The path from a value to the first key of that name inside it.
fn path_below(value: &DeValue<'_>, key: &str) -> Option<String> {
    if let Some(table) = value.as_table() {
        if table.contains_key(key) {
            return Some(key.to_owned());
        }
        return table.iter().find_map(|(name, value)| {
            path_below(value.get_ref(), key).map(|rest| format!("{}.{rest}", name.get_ref()))
        });
    }
    let mut elements = value.as_array()?.iter().enumerate();
    elements.find_map(|(at, element)| path_below(element.get_ref(), key).map(|rest| format!("{at}.{rest}")))
}

/// The position of a key; for a list element, of the element itself.
fn span_at(tree: &DeTable<'_>, path: &str) -> Option<Range<usize>> {
    let Some((parent, last)) = path.rsplit_once('.') else {
        return tree.get_key_value(path).map(|(key, _)| key.span());
    };
    let parent = value_at(tree, parent)?;
    if let Some(table) = parent.as_table() {
        return table.get_key_value(last).map(|(key, _)| key.span());
    }
    Some(parent.as_array()?.get(last.parse::<usize>().ok()?)?.span())
}

fn value_at<'a, 'i>(tree: &'a DeTable<'i>, path: &str) -> Option<&'a DeValue<'i>> {
    let mut steps = path.split('.');
    let mut value = tree.get(steps.next()?)?.get_ref();
    for step in steps {
        value = match value {
            DeValue::Table(table) => table.get(step)?.get_ref(),
            DeValue::Array(array) => array.get(step.parse::<usize>().ok()?)?.get_ref(),
            _ => return None,
        };
    }
    Some(value)
}

/// Removes a key or an element.
fn remove(table: &mut DeTable<'_>, path: &str) {
    let Some((first, rest)) = path.split_once('.') else {
        table.remove(path);
        return;
    };
    if let Some(value) = table.get_mut(first) {
        remove_in(value.get_mut(), rest);
    }
}

fn remove_in(value: &mut DeValue<'_>, path: &str) {
    match value {
        DeValue::Table(table) => remove(table, path),
        DeValue::Array(array) => {
            let (first, rest) = path.split_once('.').map_or((path, None), |(at, rest)| (at, Some(rest)));
            let Ok(wanted) = first.parse::<usize>() else { return };
            match (rest, array.get_mut(wanted)) {
                (Some(rest), Some(element)) => remove_in(element.get_mut(), rest),
                (None, Some(_)) => {
                    let mut kept = DeArray::new();
                    let all = std::mem::replace(array, DeArray::new()).into_iter().enumerate();
                    all.filter(|(at, _)| *at != wanted).for_each(|(_, element)| kept.push(element));
                    *array = kept;
                }
                (_, None) => {}
            }
        }
        _ => {}
    }
}

/// Turns serde's "unknown field `x`, expected one of `a`, `b`" into a helpful message.
fn explain(message: &str, path: &str) -> String {
    let keys: Vec<&str> = path.split('.').filter(|step| step.parse::<usize>().is_err()).collect();
    if let Some((old, new)) = RENAMED_KEYS.iter().find(|(old, _)| *old == keys.join(".")) {
        return format!("`{old}` is now `{new}`");
    }
    let quoted: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    let unknown = message.starts_with("unknown field") || message.starts_with("unknown variant");
    let (Some((given, known)), true) = (quoted.split_first(), unknown) else {
        let mut text = message.trim().replace('\n', "; ");
        for (rust, plain) in TYPE_NAMES {
            text = text.replace(rust, plain);
        }
        return if path.is_empty() { text } else { format!("{path}: {text}") };
    };
    let what = if message.starts_with("unknown field") { "key" } else { "value" };
    let mut text = format!("unknown {what} `{}`", escape(given));
    match nearest(given, known) {
        Some(meant) => write!(text, "; did you mean `{meant}`?"),
        None => write!(text, "; known here: {}", known.join(", ")),
    }
    .expect("a string takes everything");
    text
}

/// The known word that a misspelt one probably means.
pub fn nearest<'a>(given: &str, known: &[&'a str]) -> Option<&'a str> {
    let likeness = |word: &str| {
        // A missing unit (`lease` for `lease_ms`) is the most common mistake, but far by edit distance.
        let stem = word.strip_prefix(given).is_some_and(|rest| rest.starts_with('_'));
        if stem { 1.0 } else { strsim::jaro_winkler(given, word) }
    };
    let best = known.iter().map(|word| (likeness(word), *word)).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(likeness, _)| *likeness > 0.8).map(|(_, word)| word)
}
