//! Findings about a store as a whole, regardless of its queues.

use super::{Finding, Severity};
use crate::store::StoreStatus;

/// The facts that are known about any store. A store reports facts about itself and its environment through
/// [`QueueAdmin::examine`](crate::QueueAdmin::examine).
#[derive(Debug, Clone, Default)]
pub struct StoreFacts {
    /// The store's own status.
    pub status: StoreStatus,
    /// The versions of the calling program and of the server.
    pub versions: Option<(String, String)>,
    /// Keys whose effect may or may not have happened and that wait for a decision; a listing may end at 1,000.
    pub in_doubt: u64,
    /// Requests that ran without protection because the ledger could not be reached, since the process started.
    pub ran_unprotected: u64,
    /// Claims refused because their key was used for another request, since the ledger was opened.
    pub mismatches: u64,
}

type RuleResult = Vec<(String, String)>;

struct Rule {
    code: &'static str,
    severity: Severity,
    find: fn(&StoreFacts) -> RuleResult,
}

const fn refusal(code: &'static str, find: fn(&StoreFacts) -> RuleResult) -> Rule {
    Rule { code, severity: Severity::Refusal, find }
}

const fn warning(code: &'static str, find: fn(&StoreFacts) -> RuleResult) -> Rule {
    Rule { code, severity: Severity::Warning, find }
}

const RULES: &[Rule] = &[
    refusal("store-stopped", stopped),
    warning("store-paused", paused),
    warning("store-warning", warnings),
    warning("version-differs", versions),
    warning("doubt-waits", doubt_waits),
    warning("ran-unprotected", ran_unprotected),
    warning("keys-reused", keys_reused),
];

/// Checks a store as a whole. Refusals come first; an empty result means no problem, as far as the facts show.
///
/// ```
/// use hapax_core::StoreStatus;
/// use hapax_core::policy::tier::{StoreFacts, check_store};
///
/// let status = StoreStatus { paused: Some("restored from a backup".into()), ..StoreStatus::default() };
/// let findings = check_store(&StoreFacts { status, ..StoreFacts::default() });
/// assert_eq!(findings[0].code, "store-paused");
/// ```
pub fn check_store(facts: &StoreFacts) -> Vec<Finding> {
    let each = |rule: &Rule| {
        let (code, severity) = (rule.code, rule.severity);
        let finding = move |(message, remedy)| Finding { code: code.into(), severity, message, remedy };
        (rule.find)(facts).into_iter().map(finding)
    };
    RULES.iter().flat_map(each).collect()
}

/// All codes of [`check_store`].
pub(super) fn codes() -> impl Iterator<Item = (&'static str, Severity)> {
    RULES.iter().map(|rule| (rule.code, rule.severity))
}

fn one(message: String, remedy: &str) -> RuleResult {
    vec![(message, remedy.to_owned())]
}

fn stopped(facts: &StoreFacts) -> RuleResult {
    let remedy = "see to the cause, then start the server again: it recovers what was committed";
    facts.status.stopped.iter().flat_map(|why| one(format!("the store has stopped: {why}"), remedy)).collect()
}

fn paused(facts: &StoreFacts) -> RuleResult {
    let remedy = "purge what must not be repeated, then `hapax resume`";
    facts
        .status
        .paused
        .iter()
        .flat_map(|why| one(format!("the store hands out nothing: {why}"), remedy))
        .collect()
}

fn warnings(facts: &StoreFacts) -> RuleResult {
    // A paused store also warns about its pause; report that only once.
    let said =
        |warning: &&String| facts.status.paused.as_ref().is_none_or(|paused| !warning.contains(paused));
    let remedy = "look at what it names; `hapax parked list` shows damaged messages";
    facts.status.warnings.iter().filter(said).flat_map(|warning| one(warning.clone(), remedy)).collect()
}

fn versions(facts: &StoreFacts) -> RuleResult {
    match &facts.versions {
        Some((ours, theirs)) if ours != theirs => one(
            format!("this program is version {ours}, the server {theirs}"),
            "use the same version for both, so that this report knows what the server knows",
        ),
        _ => Vec::new(),
    }
}

fn doubt_waits(facts: &StoreFacts) -> RuleResult {
    match facts.in_doubt {
        0 => Vec::new(),
        1 => one("1 key is in doubt: whether its effect happened is not known".to_owned(), DOUBT_REMEDY),
        many => one(
            format!("{many} keys are in doubt: whether their effects happened is not known"),
            DOUBT_REMEDY,
        ),
    }
}

const DOUBT_REMEDY: &str = "`hapax ledger list --state in_doubt` shows them; ask the system behind each what happened, then \
                            `hapax ledger resolve`; a handler that passes the derived key on can use on_doubt = retry";

fn ran_unprotected(facts: &StoreFacts) -> RuleResult {
    match facts.ran_unprotected {
        0 => Vec::new(),
        many => one(
            format!(
                "{many} requests ran without protection, because the ledger could not be reached (on_outage = open)"
            ),
            "look for repeated effects of that time; set on_outage to closed where they cost more than a refused request",
        ),
    }
}

fn keys_reused(facts: &StoreFacts) -> RuleResult {
    match facts.mismatches {
        0 => Vec::new(),
        many => one(
            format!("{many} claims had a key that was used before for another request; they were refused"),
            "find the caller: a key must be made for each intended effect, and not from a constant or a counter that restarts",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn sound() -> StoreFacts {
        StoreFacts { versions: Some(("1.0.0".into(), "1.0.0".into())), ..StoreFacts::default() }
    }

    #[test]
    fn a_sound_store_and_one_of_which_nothing_is_known_have_no_findings() {
        assert_eq!(check_store(&sound()), []);
        assert_eq!(check_store(&StoreFacts::default()), []);
    }

    #[test]
    fn each_finding_is_made_alone() {
        type Change = fn(&mut StoreFacts);
        let cases: [(&str, Change); 7] = [
            ("store-stopped", |f| f.status.stopped = Some("an I/O error".into())),
            ("store-paused", |f| {
                f.status.paused = Some("restored".into());
                f.status.warnings.push("the store is paused: restored".into());
            }),
            ("store-warning", |f| f.status.warnings.push("3 messages were found damaged".into())),
            ("version-differs", |f| f.versions.as_mut().unwrap().1 = "1.0.1".into()),
            ("doubt-waits", |f| f.in_doubt = 1),
            ("ran-unprotected", |f| f.ran_unprotected = 1),
            ("keys-reused", |f| f.mismatches = 1),
        ];
        for (code, change) in cases {
            let mut facts = sound();
            change(&mut facts);
            let found: Vec<_> = check_store(&facts).into_iter().map(|finding| finding.code).collect();
            assert_eq!(found, [code]);
        }
        let known: BTreeSet<_> = codes().map(|(code, _)| code).collect();
        assert_eq!(known, cases.iter().map(|(code, _)| *code).collect());
    }

    #[test]
    fn each_finding_has_its_evidence_and_a_change() {
        let status = StoreStatus {
            stopped: Some("an I/O error".into()),
            paused: Some("restored".into()),
            warnings: vec!["3 messages were found damaged".into(), "it is paused: restored".into()],
            ..StoreStatus::default()
        };
        let versions = Some(("1.0.0".into(), "1.0.1".into()));
        let facts = StoreFacts { status, versions, in_doubt: 2, ran_unprotected: 3, mismatches: 4 };
        let found = check_store(&facts);
        let refused: Vec<_> = found.iter().map(Finding::is_refusal).collect();
        assert_eq!(refused, [true, false, false, false, false, false, false]);
        let said: Vec<_> = found.into_iter().map(|finding| (finding.message, finding.remedy)).collect();
        let expected = [
            (
                "the store has stopped: an I/O error",
                "see to the cause, then start the server again: it recovers what was committed",
            ),
            ("the store hands out nothing: restored", "purge what must not be repeated, then `hapax resume`"),
            (
                "3 messages were found damaged",
                "look at what it names; `hapax parked list` shows damaged messages",
            ),
            (
                "this program is version 1.0.0, the server 1.0.1",
                "use the same version for both, so that this report knows what the server knows",
            ),
            ("2 keys are in doubt: whether their effects happened is not known", DOUBT_REMEDY),
            (
                "3 requests ran without protection, because the ledger could not be reached (on_outage = open)",
                "look for repeated effects of that time; set on_outage to closed where they cost more than a refused request",
            ),
            (
                "4 claims had a key that was used before for another request; they were refused",
                "find the caller: a key must be made for each intended effect, and not from a constant or a counter that \
                 restarts",
            ),
        ];
        assert_eq!(said, expected.map(|(message, remedy)| (message.to_owned(), remedy.to_owned())));
    }

    #[test]
    fn refusals_come_first() {
        assert!(codes().map(|(_, severity)| severity).is_sorted());
    }
}
