//! The Lua scripts, with the names of their keys and arguments.

use std::sync::LazyLock;

use hapax_core::ledger::DOUBT_RETENTION_MS;
use hapax_core::policy;
use hapax_core::transfer::IMPORTED_MS_MIN;

use crate::layout::LAYOUT;
use crate::link::{Linked, link};

/// A script. Its text stands in `scripts/`; its header lists KEYS and ARGV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
    Claim,
    Renew,
    Finish,
    Look,
    Decide,
    Sweep,
    Import,
    Shard,
    DocumentPut,
    DocumentDelete,
    Queue(QueueScript),
}

/// A script of the queues. All of them have the same keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueScript {
    Send,
    Receive,
    Settle,
    Extend,
    Tick,
    Configure,
    Clear,
    Decide,
    View,
    Stats,
    Move,
    Arrive,
    Redrive,
    Import,
}

/// Redrives that are listed of each shard; what runs is listed beyond that.
const REDRIVES_KEPT: u64 = 100;

/// The script of a restarted server. It is sent as text: the others are loaded after it has run.
pub(crate) const BOOT: &str = include_str!("scripts/ledger/boot.lua");

impl Script {
    pub const ALL: [Self; 24] = [
        Self::Claim,
        Self::Renew,
        Self::Finish,
        Self::Look,
        Self::Decide,
        Self::Sweep,
        Self::Import,
        Self::Shard,
        Self::DocumentPut,
        Self::DocumentDelete,
        Self::Queue(QueueScript::Send),
        Self::Queue(QueueScript::Receive),
        Self::Queue(QueueScript::Settle),
        Self::Queue(QueueScript::Extend),
        Self::Queue(QueueScript::Tick),
        Self::Queue(QueueScript::Configure),
        Self::Queue(QueueScript::Clear),
        Self::Queue(QueueScript::Decide),
        Self::Queue(QueueScript::View),
        Self::Queue(QueueScript::Stats),
        Self::Queue(QueueScript::Move),
        Self::Queue(QueueScript::Arrive),
        Self::Queue(QueueScript::Redrive),
        Self::Queue(QueueScript::Import),
    ];

    fn source(self) -> &'static str {
        match self {
            Self::Claim => include_str!("scripts/ledger/claim.lua"),
            Self::Renew => include_str!("scripts/ledger/renew.lua"),
            Self::Finish => include_str!("scripts/ledger/finish.lua"),
            Self::Look => include_str!("scripts/ledger/look.lua"),
            Self::Decide => include_str!("scripts/ledger/decide.lua"),
            Self::Sweep => include_str!("scripts/ledger/sweep.lua"),
            Self::Import => include_str!("scripts/ledger/import.lua"),
            Self::Shard => include_str!("scripts/ledger/shard.lua"),
            Self::DocumentPut => include_str!("scripts/document_put.lua"),
            Self::DocumentDelete => include_str!("scripts/document_delete.lua"),
            Self::Queue(script) => script.source(),
        }
    }

    /// What stands in front of it.
    fn common(self) -> String {
        let (keys, common) = match self {
            Self::DocumentPut | Self::DocumentDelete | Self::Shard => return String::new(),
            Self::Queue(_) => {
                (include_str!("scripts/queue/keys.lua"), include_str!("scripts/queue/common.lua"))
            }
            _ => (include_str!("scripts/ledger/keys.lua"), include_str!("scripts/ledger/common.lua")),
        };
        [keys, include_str!("scripts/clock.lua"), include_str!("scripts/entries.lua"), common].concat()
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Renew => "renew",
            Self::Finish => "end",
            Self::Look => "entry",
            Self::Decide => "decide",
            Self::Sweep => "sweep",
            Self::Import => "import",
            Self::Shard => "shard",
            Self::DocumentPut => "put_document",
            Self::DocumentDelete => "delete_document",
            Self::Queue(script) => script.name(),
        }
    }

    fn loaded(self) -> &'static Loaded {
        static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| Script::ALL.map(Loaded::new).into());
        &LOADED[Self::ALL.iter().position(|script| *script == self).expect("every script is in the list")]
    }

    /// The text that Redis gets.
    pub fn text(self) -> &'static str {
        &self.loaded().linked.text
    }

    /// Those of its keys that the text uses, in its order. All others follow.
    pub fn keys(self, keys: &[String]) -> impl Iterator<Item = &String> + Clone {
        let Loaded { linked, declared, .. } = self.loaded();
        linked.keys.iter().map(|place| &keys[*place]).chain(&keys[*declared..])
    }

    /// The name by which Redis knows the text.
    pub fn sha(self) -> &'static str {
        &self.loaded().sha
    }
}

impl QueueScript {
    fn source(self) -> &'static str {
        match self {
            Self::Send => include_str!("scripts/queue/send.lua"),
            Self::Receive => include_str!("scripts/queue/receive.lua"),
            Self::Settle => include_str!("scripts/queue/settle.lua"),
            Self::Extend => include_str!("scripts/queue/extend.lua"),
            Self::Tick => include_str!("scripts/queue/tick.lua"),
            Self::Configure => include_str!("scripts/queue/configure.lua"),
            Self::Clear => include_str!("scripts/queue/clear.lua"),
            Self::Decide => include_str!("scripts/queue/decide.lua"),
            Self::View => include_str!("scripts/queue/view.lua"),
            Self::Stats => include_str!("scripts/queue/stats.lua"),
            Self::Move => include_str!("scripts/queue/move.lua"),
            Self::Arrive => include_str!("scripts/queue/arrive.lua"),
            Self::Redrive => include_str!("scripts/queue/redrive.lua"),
            Self::Import => include_str!("scripts/queue/import.lua"),
        }
    }

    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Settle => "settle",
            Self::Extend => "extend",
            Self::Tick => "sweep of a queue",
            Self::Configure => "queue",
            Self::Clear => "purge",
            Self::Decide => "discard or release",
            Self::View => "browse",
            Self::Stats => "stats",
            Self::Move => "move",
            Self::Arrive => "arrival",
            Self::Redrive => "redrive",
            Self::Import => "import",
        }
    }
}

struct Loaded {
    /// What it was linked from.
    #[cfg(test)]
    whole: String,
    linked: Linked,
    /// Keys that the header declares by name.
    declared: usize,
    sha: String,
}

/// The names that a header declares.
fn header<'t>(source: &'t str, what: &str) -> Vec<&'t str> {
    let line = source.lines().find_map(|line| line.strip_prefix(what));
    line.unwrap_or_else(|| panic!("no {what} in {source}")).split_whitespace().collect()
}

impl Loaded {
    fn new(script: Script) -> Self {
        let source = script.source();
        let (first, rest) = source.split_once('\n').expect("a script has a first line");
        let mut text = format!("{first}\n{}{rest}", script.common());
        let numbers = [
            ("@DOUBT_RETENTION_MS@", DOUBT_RETENTION_MS),
            ("@LEASE_MS_MAX@", policy::LEASE_MS_MAX),
            ("@HISTORY_MAX@", policy::HISTORY_MAX.into()),
            ("@ATTEMPT_ID_MS@", policy::ATTEMPT_ID_MS),
            ("@DELIVER_AHEAD_MS_MAX@", policy::DELIVER_AHEAD_MS_MAX),
            ("@IN_FLIGHT_MAX@", policy::IN_FLIGHT_MAX),
            ("@INTERVAL_MS_MAX@", policy::INTERVAL_MS_MAX),
            ("@IMPORTED_MS_MIN@", IMPORTED_MS_MIN),
            ("@REDRIVES_KEPT@", REDRIVES_KEPT),
            ("@LAYOUT@", LAYOUT),
            // The places of two fields of a message in `queue/common.lua`.
            ("@MESSAGE_ID@", 1),
            ("@MESSAGE_NEEDS@", 27),
        ];
        for (name, number) in numbers {
            text = text.replace(name, &number.to_string());
        }
        let declared = header(source, "-- KEYS:").iter().filter(|name| !name.ends_with("...")).count();
        let linked = link(&text, declared);
        let sha = redis::Script::new(&linked.text).get_hash().to_owned();
        Self {
            #[cfg(test)]
            whole: text,
            linked,
            declared,
            sha,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names that are bound to keys, in one line or several: `local A, B = KEYS[1], KEYS[2]`.
    fn bound(text: &str) -> Vec<String> {
        let mut names = Vec::new();
        for line in text.lines() {
            let Some((left, right)) =
                line.trim().strip_prefix("local ").and_then(|rest| rest.split_once(" = "))
            else {
                continue;
            };
            for (name, value) in left.split(", ").zip(right.split(", ")) {
                if value.starts_with("KEYS[") {
                    names.push(name.to_owned());
                }
            }
        }
        names
    }

    /// Functions that take an entry's key: what is passed to them is a key.
    const TAKE_KEYS: [&str; 6] =
        ["load_entry(", "write_entry(", "note_lapse(", "resume(", "finish(", "need(m, "];

    /// What is wrong with the keys that a script uses. Undeclared keys work on one node and fail on a Cluster: each call
    /// names KEYS, or a local name of one.
    fn undeclared(text: &str) -> Vec<String> {
        let code: String =
            text.lines().filter(|line| !line.trim_start().starts_with("--")).collect::<Vec<_>>().join("\n");
        let names = bound(&code);
        let is_key = |what: &str| {
            let word: String = what.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            what.starts_with("KEYS[") || names.contains(&word) || word == "entry"
        };
        let mut problems = Vec::new();
        for (at, call) in code.match_indices("call(").chain(code.match_indices("later(")) {
            if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let call = &code[at + call.len()..];
            // What the functions themselves pass on was named by their callers.
            let is_passed_on = ["command, key, ", "unpack(command)"].iter().any(|own| call.starts_with(own));
            let Some((command, rest)) = call.strip_prefix('\'').and_then(|rest| rest.split_once('\'')) else {
                if !is_passed_on {
                    problems.push(format!("a command {}", &call[..call.len().min(20)]));
                }
                continue;
            };
            let key = rest.trim_start_matches(", ");
            // A list of names.
            let of_list = key.starts_with("key,") || key.starts_with("key)");
            let has_no_key = command == "TIME" || (command == "SPUBLISH" && key.starts_with("WAKE,"));
            if !has_no_key && !is_key(key) && !of_list {
                problems.push(format!("{command} of {}", &key[..key.len().min(20)]));
            }
        }
        for list in code.split("for _, key in ipairs({").skip(1) {
            let list = list.split_once('}').unwrap().0;
            problems.extend(list.split(", ").filter(|name| !is_key(name.trim())).map(str::to_owned));
        }
        for function in TAKE_KEYS {
            for (at, _) in code.match_indices(function) {
                let before = code[..at].chars().next_back();
                let called = &code[at + function.len()..];
                let is_name = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
                if !is_name && !is_key(called.trim_start()) && !called.starts_with("m,") {
                    problems.push(format!("{function}{}", &called[..called.len().min(20)]));
                }
            }
        }
        problems
    }

    #[test]
    fn every_key_in_a_script_is_declared() {
        for text in Script::ALL.map(Script::text).into_iter().chain([BOOT]) {
            assert_eq!(undeclared(text), Vec::<String>::new(), "{text}");
            // The one name that is not a key by itself.
            for line in text.lines().filter(|line| line.trim().starts_with("local entry")) {
                assert!(line.contains("= KEYS["), "{line}");
            }
        }
    }

    #[test]
    fn the_lint_finds_a_key_that_is_not_declared() {
        for wrong in [
            "redis.call('GET', 'hapax:x')",
            "redis.call('GET', ARGV[1])",
            "redis.call(ARGV[1], KEYS[1])",
            "later('HSET', ARGV[1], 1, 2)",
            "call('HSET', prefix .. 'x', 1, 2)",
            "redis.call('SPUBLISH', ARGV[1], 7)",
            "local key = ARGV[1]\nredis.call('DEL', prefix .. key)",
            "local A = ARGV[1]\nredis.call('DEL', A)",
            "for _, key in ipairs({ A }) do redis.call('DEL', key) end",
            "load_entry(ARGV[2])",
        ] {
            assert!(!undeclared(wrong).is_empty(), "{wrong}");
        }
        assert!(
            undeclared("local A, B = KEYS[1], KEYS[2]\nredis.call('GET', B)\nload_entry(KEYS[3])").is_empty()
        );
    }

    #[test]
    fn a_script_gets_the_keys_that_it_uses() {
        for script in Script::ALL {
            let loaded = script.loaded();
            for key in loaded.whole.split("KEYS[").skip(1).filter_map(|rest| rest.split_once(']')) {
                let is_number = key.0.bytes().all(|byte| byte.is_ascii_digit());
                let is_own = !key.0.starts_with(|first: char| first.is_ascii_digit());
                assert!(
                    is_number || is_own,
                    "{script:?}: KEYS[{}] counts keys that it may not get; use @KEYS@",
                    key.0
                );
            }
            for number in 1..=loaded.linked.keys.len() {
                assert!(script.text().contains(&format!("KEYS[{number}]")), "{script:?}: {number}");
            }
            let all: Vec<String> = (0..=loaded.declared).map(|number| number.to_string()).collect();
            let own: Vec<&String> = script.keys(&all).collect();
            assert_eq!(own.len(), loaded.linked.keys.len() + 1, "{script:?}");
            assert_eq!(own.last(), all.last().as_ref(), "what is not declared by name is passed on");
        }
        // A key that no message of a standard queue needs is not sent with each message.
        let send = Script::Queue(QueueScript::Send);
        assert!(send.loaded().linked.keys.len() < send.loaded().declared);
    }

    #[test]
    fn every_script_uses_all_its_keys_and_arguments_and_no_others() {
        for script in Script::ALL {
            let (source, text) = (script.source(), script.loaded().whole.as_str());
            for (what, declared) in
                [("KEYS", header(source, "-- KEYS:")), ("ARGV", header(source, "-- ARGV:"))]
            {
                if declared.last().is_some_and(|last| last.ends_with("...")) {
                    continue;
                }
                for number in 1..=declared.len() {
                    assert!(
                        text.contains(&format!("{what}[{number}]")),
                        "{script:?} ignores {what}[{number}]"
                    );
                }
                let beyond = declared.len() + 1;
                assert!(!text.contains(&format!("{what}[{beyond}]")), "{script:?} has no {what}[{beyond}]");
            }
        }
    }

    #[test]
    fn a_call_has_as_many_keys_and_arguments_as_its_script_declares() {
        for script in Script::ALL {
            let (keys, args) = (header(script.source(), "-- KEYS:"), header(script.source(), "-- ARGV:"));
            let (expected_keys, expected_args) = crate::run::contract(script);
            assert_eq!((keys, args), (expected_keys.to_vec(), expected_args.to_vec()), "{script:?}");
        }
    }
}
