//! The Lua scripts, with the names of their keys and arguments.

use std::sync::LazyLock;

use hapax_core::ledger::DOUBT_RETENTION_MS;
use hapax_core::policy;

/// A script. Its text stands in `scripts/`; its header lists KEYS and ARGV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
    Claim,
    Renew,
    Finish,
    Look,
    Decide,
    Sweep,
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
}

/// The script of a restarted server. It is sent as text: the others are loaded after it has run.
pub(crate) const BOOT: &str = include_str!("scripts/boot.lua");

impl Script {
    pub const ALL: [Self; 21] = [
        Self::Claim,
        Self::Renew,
        Self::Finish,
        Self::Look,
        Self::Decide,
        Self::Sweep,
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
    ];

    fn source(self) -> &'static str {
        match self {
            Self::Claim => include_str!("scripts/claim.lua"),
            Self::Renew => include_str!("scripts/renew.lua"),
            Self::Finish => include_str!("scripts/finish.lua"),
            Self::Look => include_str!("scripts/look.lua"),
            Self::Decide => include_str!("scripts/decide.lua"),
            Self::Sweep => include_str!("scripts/sweep.lua"),
            Self::DocumentPut => include_str!("scripts/document_put.lua"),
            Self::DocumentDelete => include_str!("scripts/document_delete.lua"),
            Self::Queue(script) => script.source(),
        }
    }

    /// What stands in front of it.
    fn common(self) -> &'static str {
        match self {
            Self::DocumentPut | Self::DocumentDelete => "",
            Self::Queue(_) => include_str!("scripts/queue/common.lua"),
            _ => include_str!("scripts/common.lua"),
        }
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
            Self::DocumentPut => "put_document",
            Self::DocumentDelete => "delete_document",
            Self::Queue(script) => script.name(),
        }
    }

    fn loaded(self) -> &'static Loaded {
        static LOADED: LazyLock<Vec<Loaded>> = LazyLock::new(|| Script::ALL.map(Loaded::new).into());
        &LOADED[Self::ALL.iter().position(|script| *script == self).expect("every script is in the list")]
    }

    /// The whole text.
    pub fn text(self) -> &'static str {
        &self.loaded().text
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
        }
    }
}

struct Loaded {
    text: String,
    sha: String,
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
        ];
        for (name, number) in numbers {
            text = text.replace(name, &number.to_string());
        }
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::QUEUE_KEYS;

    fn header<'t>(source: &'t str, what: &str) -> Vec<&'t str> {
        let line = source.lines().find_map(|line| line.strip_prefix(what));
        line.unwrap_or_else(|| panic!("no {what} in {source}")).split_whitespace().collect()
    }

    /// Undeclared keys work on one node and fail on a Cluster: each call names KEYS, or a local name of one.
    #[test]
    fn every_key_in_a_script_is_declared() {
        let ledger = ["KEYS[", "META", "ALL", "OPEN", "DUE", "SCOPES", "key)", "key,", "entry"];
        let queues: Vec<String> =
            QUEUE_KEYS.iter().map(|name| format!("{}{}", name.to_uppercase(), ',')).collect();
        let known: Vec<&str> = ledger
            .into_iter()
            .chain(queues.iter().map(String::as_str))
            .chain(["INFO)", "REDRIVES)"])
            .collect();
        let texts = Script::ALL.map(Script::text).into_iter().chain([BOOT]);
        let mut calls = 0;
        for text in texts {
            for call in text.split("redis.call(").skip(1) {
                calls += 1;
                let command = call.split(['\'']).nth(1).expect("the command is a literal");
                let rest = call.split_once(&format!("'{command}'")).unwrap().1.trim_start_matches(", ");
                let declared = known.iter().any(|name| rest.starts_with(name));
                assert!(
                    command == "TIME" || declared,
                    "the key of {command} is not declared: {}",
                    &rest[..20]
                );
            }
            // A name of a key is bound to KEYS and nothing else.
            for binding in text.lines().filter(|line| line.starts_with("local entry")) {
                assert!(binding.contains("= KEYS[6]"), "{binding}");
            }
            // The queues' helpers take no keys.
            let helpers: &[&str] =
                if text.contains("QUEUES") { &[] } else { &["load(", "note_lapse(", "write("] };
            for helper in helpers {
                for call in text.split(*helper).skip(1).filter(|call| !call.starts_with("key")) {
                    assert!(
                        call.starts_with("entry") || call.starts_with("KEYS["),
                        "{helper}{}",
                        &call[..20]
                    );
                }
            }
        }
        assert!(calls > 20, "the lint found only {calls} calls");
    }

    #[test]
    fn every_script_uses_all_its_keys_and_arguments_and_no_others() {
        for script in Script::ALL {
            let (source, text) = (script.source(), script.text());
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
