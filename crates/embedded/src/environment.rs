//! Examines the environment of a store: the disk, the file system, the machine's clock.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hapax_core::Examination;
use hapax_core::policy::tier::{Finding, Severity};

use crate::engine::NearDoubtLimit;
use crate::medium::{Medium, medium};
use crate::storage::sqlite::free_bytes;
use crate::{DATABASE, Options};

const fn refusal(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Refusal)
}

const fn warning(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Warning)
}

/// Every code that an examination of the store can find, with how grave it is.
pub const FINDING_CODES: &[(&str, Severity)] = &[
    refusal("network-file-system"),
    warning("volatile-file-system"),
    warning("disk-nearly-full"),
    warning("clock-behind"),
    warning("many-in-doubt"),
];

/// Scopes that the finding about keys in doubt names; of the others it says how many there are.
const SCOPES_NAMED_MAX: usize = 10;

/// A clock that is corrected in small steps is no finding.
const AHEAD_MS_MAX: u64 = 60_000;

/// A folder and its medium. The folder need not hold a store yet, and nothing is opened.
#[derive(Debug, Clone)]
pub struct Environment {
    pub(crate) folder: PathBuf,
    pub(crate) medium: Option<Medium>,
    pub(crate) reserve_bytes: u64,
}

/// The measurements; `None` for unknown values.
#[derive(Debug, Default)]
struct Measurements {
    medium: Option<Medium>,
    free_bytes: Option<u64>,
    reserve_bytes: u64,
    /// How far the last write lies in the machine's future, in ms.
    ahead_ms: Option<u64>,
}

impl Environment {
    /// For a folder in which a store would be opened with `options`.
    pub fn of(folder: impl AsRef<Path>, options: &Options) -> Self {
        let folder = folder.as_ref().to_owned();
        let medium = options.medium.clone().or_else(|| medium(&folder));
        Self { folder, medium, reserve_bytes: options.reserve_bytes }
    }

    /// Measures the environment now.
    pub fn examine(&self) -> Examination {
        let file = |name: &str| self.folder.join(name).metadata().ok();
        let log = format!("{DATABASE}-wal");
        let written = [DATABASE, &log].into_iter().filter_map(|name| file(name)?.modified().ok()).max();
        let ahead = written.and_then(|last| last.duration_since(SystemTime::now()).ok());
        let measured = Measurements {
            medium: self.medium.clone(),
            free_bytes: free_bytes(&self.folder),
            reserve_bytes: self.reserve_bytes,
            ahead_ms: ahead.map(|ahead| ahead.as_millis() as u64),
        };
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok();
        let numbers = [
            ("free_bytes", measured.free_bytes),
            ("database_bytes", file(DATABASE).map(|file| file.len())),
            ("log_bytes", file(&log).map(|file| file.len())),
            ("clock_ms", since_1970.map(|now| now.as_millis() as u64)),
        ];
        let mut facts: BTreeMap<String, serde_json::Value> =
            numbers.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.into()))).collect();
        if let Some(medium) = &measured.medium {
            facts.insert("file_system".to_owned(), medium.kind.clone().into());
        }
        Examination { facts, findings: measured.findings() }
    }
}

fn finding(code: &'static str, message: String, remedy: &str) -> Finding {
    let (_, severity) = FINDING_CODES.iter().find(|(known, _)| *known == code).expect("a known code");
    Finding { code: code.into(), severity: *severity, message, remedy: remedy.to_owned() }
}

/// What there is to say about scopes that come near their bound of keys in doubt.
pub(crate) fn many_in_doubt(near: &[NearDoubtLimit]) -> Option<Finding> {
    let max = near.first()?.max;
    let name = |near: &NearDoubtLimit| format!("{} ({})", near.scope, near.in_doubt);
    let named: Vec<_> = near.iter().take(SCOPES_NAMED_MAX).map(name).collect();
    let more = near.len() - named.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let message = format!(
        "keys are in doubt in scope {}{more}; at {max} open claims a scope gets no more, until some are resolved",
        named.join(", ")
    );
    let remedy = "find out what their effects came to and resolve them: `hapax ledger list --state in_doubt`";
    Some(finding("many-in-doubt", message, remedy))
}

impl Measurements {
    fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut found = |code, message, remedy| findings.push(finding(code, message, remedy));
        if let Some(Medium { kind, network: true, .. }) = &self.medium {
            let problem = "whose locks and syncs cannot be relied on";
            found(
                "network-file-system",
                format!("the embedded store is on a network file system ({kind}), {problem}"),
                "move its folder to a disk of this machine",
            );
        }
        if let Some(Medium { kind, volatile: true, .. }) = &self.medium {
            found(
                "volatile-file-system",
                format!("the store is on a file system in memory ({kind}): nothing survives a reboot"),
                "move its folder to a disk, unless the messages may be lost",
            );
        }
        if let Some(free) = self.free_bytes.filter(|free| *free < self.reserve_bytes.saturating_mul(2)) {
            let (free, reserve) = (free >> 20, self.reserve_bytes >> 20);
            found(
                "disk-nearly-full",
                format!("the disk has {free} MiB left; below {reserve} MiB the store accepts no messages"),
                "make room, or move the store to a larger disk",
            );
        }
        if let Some(ahead_ms) = self.ahead_ms.filter(|ahead_ms| *ahead_ms > AHEAD_MS_MAX) {
            let ahead = ahead_ms / 1000;
            found(
                "clock-behind",
                format!(
                    "the store was written to {ahead} s in this machine's future: its clock was set back"
                ),
                "set the clock; the store continues from its own later time, so times in it are ahead of the machine's",
            );
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Measurements {
        Measurements {
            medium: Some(Medium { kind: "ext4".into(), network: false, volatile: false }),
            free_bytes: Some(128 << 20),
            reserve_bytes: 64 << 20,
            ahead_ms: Some(60_000),
        }
    }

    #[test]
    fn each_finding_is_made_alone() {
        type Change = fn(&mut Measurements);
        assert_eq!(sound().findings(), []);
        assert_eq!(Measurements::default().findings(), [], "nothing is known");
        let changes: [(Change, &str, &str); 4] = [
            (
                |m| m.medium.as_mut().unwrap().network = true,
                "the embedded store is on a network file system (ext4), whose locks and syncs cannot be relied on",
                "move its folder to a disk of this machine",
            ),
            (
                |m| m.medium.as_mut().unwrap().volatile = true,
                "the store is on a file system in memory (ext4): nothing survives a reboot",
                "move its folder to a disk, unless the messages may be lost",
            ),
            (
                |m| m.free_bytes = Some((128 << 20) - 1),
                "the disk has 127 MiB left; below 64 MiB the store accepts no messages",
                "make room, or move the store to a larger disk",
            ),
            (
                |m| m.ahead_ms = Some(60_001),
                "the store was written to 60 s in this machine's future: its clock was set back",
                "set the clock; the store continues from its own later time, so times in it are ahead of the machine's",
            ),
        ];
        for ((change, message, remedy), (code, severity)) in changes.iter().zip(FINDING_CODES) {
            let mut measured = sound();
            change(&mut measured);
            let found = measured.findings();
            assert_eq!((found.len(), &*found[0].code, found[0].severity), (1, *code, *severity));
            assert_eq!((found[0].message.as_str(), found[0].remedy.as_str()), (*message, *remedy));
        }
    }

    #[test]
    fn scopes_near_their_bound_are_named_with_their_keys() {
        let near = |number: u64| NearDoubtLimit {
            scope: format!("s{number}").parse().unwrap(),
            in_doubt: 80 + number,
            max: 100,
        };
        assert_eq!(many_in_doubt(&[]), None);
        let found = many_in_doubt(&[near(1), near(2)]).unwrap();
        assert_eq!((&*found.code, found.severity), ("many-in-doubt", Severity::Warning));
        assert_eq!(
            found.message,
            "keys are in doubt in scope s1 (81), s2 (82); at 100 open claims a scope gets no more, until some are resolved"
        );
        assert_eq!(
            found.remedy,
            "find out what their effects came to and resolve them: `hapax ledger list --state in_doubt`"
        );
        let many: Vec<_> = (1..=12).map(near).collect();
        assert!(many_in_doubt(&many).unwrap().message.contains("s9 (89), s10 (90) and 2 more; at 100"));
    }

    #[test]
    fn either_file_of_a_store_tells_that_the_clock_was_set_back() {
        for ahead in [DATABASE, &format!("{DATABASE}-wal")] {
            let folder = tempfile::tempdir().unwrap();
            let examine = || Environment::of(folder.path(), &Options::default()).examine();
            let is_behind =
                |seen: &Examination| seen.findings.iter().any(|found| found.code == "clock-behind");
            for name in [DATABASE, &format!("{DATABASE}-wal")] {
                std::fs::write(folder.path().join(name), "").unwrap();
            }
            assert!(!is_behind(&examine()), "{ahead}");
            let file = std::fs::File::options().append(true).open(folder.path().join(ahead)).unwrap();
            file.set_modified(SystemTime::now() + std::time::Duration::from_hours(1)).unwrap();
            assert!(is_behind(&examine()), "{ahead}");
        }
    }

    #[test]
    fn a_folder_is_described_before_a_store_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let facts = Environment::of(folder.path(), &Options::default()).examine().facts;
        assert!(facts["free_bytes"].as_u64().is_some() && facts["clock_ms"].as_u64().is_some(), "{facts:?}");
        assert!(!facts.contains_key("database_bytes"), "{facts:?}");
    }
}
