//! Makes short scripts of long sources. Redis makes every function of a script again for each call, and Lua finds each local
//! name that a function uses by a search through all of them. So a script gets the functions that it calls and no others,
//! numbers in place of the names of constants, and the keys that it uses.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// A script as Redis gets it.
pub(crate) struct Linked {
    pub text: String,
    /// The places of its keys among those that the source declares, from 0. What follows those is passed on.
    pub keys: Vec<usize>,
}

/// A part of a source: a name, or what stands between names. Texts in quotes are no names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part<'s> {
    Name(&'s str),
    Other(&'s str),
}

fn parts(source: &str) -> Vec<Part<'_>> {
    let (mut parts, mut rest) = (Vec::new(), source);
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let length = match first {
            '\'' => rest[1..].find('\'').map_or(rest.len(), |end| end + 2),
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ => rest.find(|c| is_word(c) || c == '\'').unwrap_or(rest.len()),
        };
        let (part, after) = rest.split_at(length);
        let is_name = first.is_ascii_alphabetic() || first == '_';
        parts.push(if is_name { Part::Name(part) } else { Part::Other(part) });
        rest = after;
    }
    parts
}

fn is_constant(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_uppercase())
        && name.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The number of a key, `KEYS[7]`.
fn key_number(text: &str) -> Option<usize> {
    text.strip_prefix("KEYS[")?.strip_suffix(']')?.parse().ok()
}

/// Constants of a line `local A, B = 1, KEYS[2]`.
fn constants(line: &str) -> Option<Vec<(String, String)>> {
    let (names, values) = line.strip_prefix("local ")?.split_once(" = ")?;
    let (names, values): (Vec<_>, Vec<_>) = (names.split(", ").collect(), values.split(", ").collect());
    let are_constant = names.iter().all(|name| is_constant(name))
        && values.iter().all(|value| is_number(value) || key_number(value).is_some());
    let pairs = names.iter().zip(&values).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    (are_constant && names.len() == values.len()).then(|| pairs.collect())
}

/// The places of a table, `a = 1, b = 2`, as `NAME.a` and `NAME.b`.
fn places(name: &str, line: &str, found: &mut HashMap<String, String>) {
    for (field, number) in line.split(',').filter_map(|pair| pair.split_once(" = ")) {
        found.insert(format!("{name}.{}", field.trim()), number.trim().to_owned());
    }
}

/// Takes the declarations of constants out of a source, and its indentation.
fn declarations(source: &str) -> (String, HashMap<String, String>) {
    let (mut code, mut found) = (String::new(), HashMap::new());
    let mut table: Option<&str> = None;
    for line in source.lines() {
        if let Some(name) = table {
            match line {
                "}" => table = None,
                line => places(name, line, &mut found),
            }
        } else if let Some(pairs) = constants(line) {
            found.extend(pairs);
        } else if let Some(name) = line.strip_prefix("local ").and_then(|rest| rest.strip_suffix(" = {"))
            && is_constant(name)
        {
            table = Some(name);
        } else {
            code.extend([line.trim_start(), "\n"]);
        }
    }
    (code, found)
}

/// Puts constants in the place of their names.
fn with_constants(code: &str, constants: &HashMap<String, String>) -> String {
    let (mut text, parts) = (String::new(), parts(code));
    let mut at = 0;
    while let Some(part) = parts.get(at) {
        let (Part::Name(word) | Part::Other(word)) = *part;
        let field = match (parts.get(at + 1), parts.get(at + 2)) {
            (Some(Part::Other(".")), Some(Part::Name(field))) => constants.get(&format!("{word}.{field}")),
            _ => None,
        };
        let (known, count) = match (part, field) {
            (Part::Name(_), Some(number)) => (Some(number), 3),
            (Part::Name(_), None) => (constants.get(word), 1),
            (Part::Other(_), _) => (None, 1),
        };
        text.push_str(known.map_or(word, String::as_str));
        at += count;
    }
    text
}

/// The code outside of functions, and the functions by name, in their order.
fn functions(source: &str) -> Vec<(Option<&str>, String)> {
    let mut blocks: Vec<(Option<&str>, String)> = vec![(None, String::new())];
    for line in source.lines() {
        let begins = line.strip_prefix("local function ").and_then(|rest| rest.split_once('('));
        if let Some((name, _)) = begins {
            blocks.push((Some(name), String::new()));
        }
        let (name, block) = blocks.last_mut().expect("there is one");
        block.extend([line, "\n"]);
        if name.is_some() && line == "end" {
            blocks.push((None, String::new()));
        }
    }
    blocks
}

/// The source without the functions that nothing calls.
fn without_unused(source: &str) -> String {
    let blocks = functions(source);
    let (mut used, mut open): (HashSet<&str>, Vec<&str>) = (HashSet::new(), Vec::new());
    open.extend(blocks.iter().filter(|(name, _)| name.is_none()).map(|(_, text)| text.as_str()));
    while let Some(text) = open.pop() {
        for part in parts(text) {
            let Part::Name(name) = part else { continue };
            let named = blocks.iter().filter(|(known, _)| *known == Some(name));
            for (_, text) in named.filter(|_| used.insert(name)) {
                open.push(text);
            }
        }
    }
    let is_used = |name: Option<&str>| name.is_none_or(|name| used.contains(name));
    blocks.iter().filter(|(name, _)| is_used(*name)).map(|(_, text)| text.as_str()).collect()
}

/// The keys that a text uses, and the text with their numbers among those. `declared` is the number of keys of the source;
/// others are numbered by the script itself, behind `@KEYS@`.
fn with_own_keys(text: &str, declared: usize) -> Linked {
    let mut numbers: Vec<usize> = text
        .split("KEYS[")
        .skip(1)
        .filter_map(|rest| rest.split_once(']')?.0.parse().ok())
        .filter(|number| *number <= declared)
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    let mut pieces = text.split("KEYS[");
    let mut linked = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let own = piece.split_once(']').and_then(|(number, rest)| Some((number.parse().ok()?, rest)));
        let place = own.and_then(|(number, rest)| Some((numbers.binary_search(&number).ok()?, rest)));
        match place {
            Some((place, rest)) => write!(linked, "KEYS[{}]{rest}", place + 1).expect("a text can grow"),
            None => linked.extend(["KEYS[", piece]),
        }
    }
    let keys: Vec<usize> = numbers.iter().map(|number| number - 1).collect();
    Linked { text: linked.replace("@KEYS@", &keys.len().to_string()), keys }
}

/// Links a source whose first line says what it is.
pub(crate) fn link(source: &str, declared: usize) -> Linked {
    let (first, rest) = source.split_once('\n').unwrap_or((source, ""));
    let is_code = |line: &&str| !line.trim_start().starts_with("--");
    let code: String = rest.lines().filter(is_code).flat_map(|line| [line, "\n"]).collect();
    // A function ends where a line is `end` without spaces before it, so indentation is removed after that.
    let code = without_unused(&code);
    let (code, constants) = declarations(&code);
    let text = format!("{first}\n{}", with_constants(&code, &constants));
    with_own_keys(&text, declared)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "#!lua
-- What it is.
local A, B, C = KEYS[1], KEYS[2], KEYS[3]
local MAX, F = 5, KEYS[4]
local P = {
  id = 1, name = 2,
}
local function unused(x)
  return redis.call('GET', A) + also_unused(x)
end
local function deep(m)
  if m then
    return m[P.name]
  end
  return 'MAX of A'
end
local function outer(m)
  return deep(m) + MAX
end
redis.call('SET', C, outer(ARGV[1]))
return redis.call('GET', KEYS[@KEYS@ + 1])
";

    #[test]
    fn a_script_has_what_it_uses() {
        let linked = link(SOURCE, 4);
        let expected = "#!lua
local function deep(m)
if m then
return m[2]
end
return 'MAX of A'
end
local function outer(m)
return deep(m) + 5
end
redis.call('SET', KEYS[1], outer(ARGV[1]))
return redis.call('GET', KEYS[1 + 1])
";
        assert_eq!((linked.text.as_str(), linked.keys.as_slice()), (expected, [2].as_slice()));
    }

    #[test]
    fn names_in_quotes_are_no_names() {
        let all = parts("x = 'it is A' .. A");
        assert_eq!(all.iter().filter(|part| **part == Part::Name("A")).count(), 1);
    }
}
