//! The ledger's operations as calls of scripts.

use base64::Engine as _;
use hapax_core::ledger::{TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::policy::{self, LEASE_MS_MAX};
use hapax_core::transfer::IMPORTED_MS_MIN;
use hapax_core::{
    ClaimEnding, ClaimRequest, EndClaim, EntryId, ExportedEntry, ExportedStage, Fingerprint, Json, OnDoubt,
    QueueName, RecordedOutcome, Renew, Resolution,
};

use super::operators::Decision;
use super::{Asked, LedgerState};
use crate::keys::{Shard, member, shard_of, shard_of_queue};
use crate::queues::DeliveryRef;
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

/// The end of a claim as arguments: fence, nonce, ending, failed, value, omitted, ttl_ms.
pub(crate) fn end_arguments(end: &EndClaim) -> [Vec<u8>; 7] {
    let (fence, nonce) = super::answer::parts(&end.token);
    let (ending, outcome) = match &end.ending {
        ClaimEnding::Complete { outcome, ttl_ms } => ("complete", OutcomeArgs::new(outcome, *ttl_ms)),
        ClaimEnding::Release => ("release", OutcomeArgs::none()),
        ClaimEnding::Doubt => ("doubt", OutcomeArgs::none()),
    };
    let [failed, value, omitted, ttl_ms] = outcome.as_args().map(<[u8]>::to_vec);
    [fence.into(), nonce.into(), ending.into(), failed, value, omitted, ttl_ms]
}

/// The message that a claim is made for, if it is in the shard of the entry: the entry is kept as long as it lives.
fn linked(request: &ClaimRequest) -> Option<(&QueueName, DeliveryRef)> {
    let (queue, receipt) = request.delivery.as_ref()?;
    let place = DeliveryRef::of(queue, receipt).ok()?;
    (shard_of_queue(queue) == shard_of(&request.id.scope)).then_some((queue, place))
}

impl LedgerState {
    /// A script about one entry. The clock and the write of its own come first.
    fn call(&self, script: Script, id: &EntryId, args: &[&[u8]]) -> Call {
        let (shard, member) = (shard_of(&id.scope), member(id));
        self.call_member(script, shard, &member, args)
    }

    pub(super) fn call_member(&self, script: Script, shard: Shard, member: &str, args: &[&[u8]]) -> Call {
        let mut keys = self.runner.keys.ledger(shard);
        keys.push(self.runner.keys.entry(shard, member));
        match script {
            Script::Decide => keys.push(self.runner.keys.audit(shard)),
            Script::Claim => keys.extend(self.runner.keys.no_messages(shard)),
            _ => {}
        }
        let clock = self.runner.clock();
        let first = [clock.as_bytes(), self.runner.touch()];
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
        let Some((queue, place)) = linked(request) else {
            return self.call(Script::Claim, &request.id, &[args.as_slice(), &[b"", b"", b""]].concat());
        };
        let shard = shard_of(&request.id.scope);
        let mut keys = self.runner.keys.ledger(shard);
        keys.push(self.runner.keys.entry(shard, &asked.member));
        keys.extend(self.runner.keys.messages(queue));
        let (clock, message) = (self.runner.clock(), place.id.to_string());
        // As the scripts of the queues write it.
        let sequence = format!("{:016}", place.sequence);
        let first = [clock.as_bytes(), self.runner.touch()];
        let last = [queue.as_str().as_bytes(), sequence.as_bytes(), message.as_bytes()];
        Call::script(Script::Claim, shard, &keys, &[first.as_slice(), &args, &last].concat())
    }

    pub(super) fn renew_call(&self, renew: &Renew) -> Call {
        let (fence, nonce) = super::answer::parts(&renew.token);
        let lease_ms = lease_ms(renew.lease_ms).to_string();
        self.call(Script::Renew, &renew.id, &[fence.as_bytes(), nonce.as_bytes(), lease_ms.as_bytes()])
    }

    pub(super) fn end_call(&self, end: &EndClaim) -> Call {
        let args = end_arguments(end);
        self.call(Script::Finish, &end.id, &args.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    pub(super) fn import_call(&self, entry: &ExportedEntry) -> Call {
        let (stage, at_ms, outcome, parks) = match &entry.stage {
            ExportedStage::InDoubt { since_ms, on_doubt } => {
                ("1", since_ms, OutcomeArgs::none(), *on_doubt == OnDoubt::Park)
            }
            ExportedStage::Completed { at_ms, ttl_ms, outcome } => {
                let args = OutcomeArgs { ttl_ms: ttl_ms.to_string(), ..OutcomeArgs::new(outcome, *ttl_ms) };
                (if outcome.failed { "3" } else { "2" }, at_ms, args, false)
            }
        };
        let numbers = [entry.claimed_ms, entry.takeovers.into(), *at_ms, IMPORTED_MS_MIN, TTL_MS_MAX];
        let [claimed, takeovers, at_ms, imported_ms, ttl_max] = numbers.map(|number| number.to_string());
        let [_, value, omitted, ttl_ms] = outcome.as_args();
        let nonce = nonce();
        let args = [
            entry.id.scope.as_str().as_bytes(),
            entry.id.key.as_str().as_bytes(),
            entry.owner.as_str().as_bytes(),
            entry.fingerprint.as_ref().map_or("", Fingerprint::as_str).as_bytes(),
            claimed.as_bytes(),
            takeovers.as_bytes(),
            stage.as_bytes(),
            at_ms.as_bytes(),
            ttl_ms,
            if parks { b"1" } else { b"0" },
            value,
            omitted,
            nonce.as_bytes(),
            imported_ms.as_bytes(),
            ttl_max.as_bytes(),
        ];
        self.call(Script::Import, &entry.id, &args)
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
