//! The ledger's operations as calls of scripts.

use base64::Engine as _;
use hapax_core::ledger::{TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::policy::{self, LEASE_MS_MAX};
use hapax_core::{
    ClaimEnding, EndClaim, EntryId, Fingerprint, Json, OnDoubt, RecordedOutcome, Renew, Resolution,
};

use super::operators::Decision;
use super::{Asked, LedgerState};
use crate::keys::{Shard, member, shard_of};
use crate::run::Call;
use crate::script::Script;

/// Maximum bytes of the operator's name in the audit.
const BY_BYTES_MAX: usize = 256;

/// A random text of 16 characters.
pub(super) fn nonce() -> String {
    let mut bytes = [0; 12];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes)
}

/// The lease of a renewal, brought into range.
pub(super) fn lease_ms(asked_ms: u64) -> u64 {
    asked_ms.clamp(1, LEASE_MS_MAX)
}

/// An outcome as arguments: whether it failed, its value, the bytes of a value that was too large, how long it is kept.
struct OutcomeArgs {
    failed: &'static str,
    value: Option<Json>,
    omitted: String,
    ttl_ms: String,
}

impl OutcomeArgs {
    fn new(outcome: &RecordedOutcome, ttl_ms: u64) -> Self {
        let outcome = outcome.clone().without_oversize_value();
        Self {
            failed: if outcome.failed { "1" } else { "0" },
            omitted: outcome.omitted_bytes.map_or_else(|| "-1".to_owned(), |bytes| bytes.to_string()),
            value: outcome.value,
            ttl_ms: ttl_ms.clamp(TTL_MS_MIN, TTL_MS_MAX).to_string(),
        }
    }

    fn none() -> Self {
        Self { failed: "0", value: None, omitted: "-1".to_owned(), ttl_ms: "0".to_owned() }
    }

    fn as_args(&self) -> [&[u8]; 4] {
        let value = self.value.as_ref().map_or("", Json::as_str);
        [self.failed.as_bytes(), value.as_bytes(), self.omitted.as_bytes(), self.ttl_ms.as_bytes()]
    }
}

impl LedgerState {
    /// A script about one entry. The clock, the write of its own and the entry's name come first.
    fn call(&self, script: Script, id: &EntryId, args: &[&[u8]]) -> Call {
        let (shard, member) = (shard_of(&id.scope), member(id));
        self.call_member(script, shard, &member, args)
    }

    pub(super) fn call_member(&self, script: Script, shard: Shard, member: &str, args: &[&[u8]]) -> Call {
        let mut keys = self.runner.keys.ledger(shard);
        keys.push(self.runner.keys.entry(shard, member));
        if script == Script::Decide {
            keys.push(self.runner.keys.audit(shard));
        }
        let clock = self.runner.clock();
        let first = [clock.as_bytes(), self.runner.touch(), member.as_bytes()];
        Call::script(script, shard, &keys, &[&first, args].concat())
    }

    pub(super) fn claim_call(&self, asked: &Asked) -> Call {
        let request = &asked.request;
        let fingerprint = request.fingerprint.as_ref().map_or("", Fingerprint::as_str);
        let (lease_ms, max) =
            (request.lease_ms.to_string(), self.runner.options.in_doubt_per_scope_max.to_string());
        let parks: &[u8] = if request.on_doubt == OnDoubt::Park { b"1" } else { b"0" };
        let args = [
            request.id.scope.as_str().as_bytes(),
            request.id.key.as_str().as_bytes(),
            request.owner.as_str().as_bytes(),
            fingerprint.as_bytes(),
            lease_ms.as_bytes(),
            parks,
            asked.nonce.as_bytes(),
            max.as_bytes(),
        ];
        self.call(Script::Claim, &request.id, &args)
    }

    pub(super) fn renew_call(&self, renew: &Renew) -> Call {
        let (fence, nonce) = super::answer::parts(&renew.token);
        let lease_ms = lease_ms(renew.lease_ms).to_string();
        self.call(Script::Renew, &renew.id, &[fence.as_bytes(), nonce.as_bytes(), lease_ms.as_bytes()])
    }

    pub(super) fn end_call(&self, end: &EndClaim) -> Call {
        let (fence, nonce) = super::answer::parts(&end.token);
        let (ending, outcome) = match &end.ending {
            ClaimEnding::Complete { outcome, ttl_ms } => ("complete", OutcomeArgs::new(outcome, *ttl_ms)),
            ClaimEnding::Release => ("release", OutcomeArgs::none()),
            ClaimEnding::Doubt => ("doubt", OutcomeArgs::none()),
        };
        let first = [fence.as_bytes(), nonce.as_bytes(), ending.as_bytes()];
        self.call(Script::Finish, &end.id, &[first.as_slice(), &outcome.as_args()].concat())
    }

    pub(super) fn decide_call(&self, id: &EntryId, decision: &Decision, by: &str) -> Call {
        let (word, outcome, what) = match decision {
            Decision::Forget => ("forget", OutcomeArgs::none(), format!("forgot the ledger's entry {id}")),
            Decision::Resolve(Resolution::Absent) => {
                ("absent", OutcomeArgs::none(), format!("resolved the ledger's entry {id} as absent"))
            }
            Decision::Resolve(Resolution::Completed { outcome, ttl_ms }) => {
                let word = if outcome.failed { "failed" } else { "completed" };
                let what = format!("resolved the ledger's entry {id} as {word}");
                ("completed", OutcomeArgs::new(outcome, *ttl_ms), what)
            }
        };
        let (nonce, by) = (nonce(), policy::truncate(by, BY_BYTES_MAX));
        let last = [nonce.as_bytes(), by.as_bytes(), what.as_bytes()];
        self.call(Script::Decide, id, &[&[word.as_bytes()], outcome.as_args().as_slice(), &last].concat())
    }
}
