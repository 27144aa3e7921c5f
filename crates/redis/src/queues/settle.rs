//! Settles and extensions.

use std::collections::HashMap;

use hapax_core::{
    Batch, EntryId, Extend, MessageId, QueueName, RemainingLease, Settle, SettleError, Settled, Settlement,
    StoreError, TokenError, policy, validate,
};

use super::Queues;
use super::call::Answer;
use super::message::DeliveryRef;
use super::moves::Arrival;
use super::send::partly;
use crate::keys::{Shard, member, shard_of, shard_of_queue};
use crate::ledger::{end_arguments, token_refusal};
use crate::script::QueueScript;

/// Deliveries that one script settles.
const STEP_MAX: usize = 100;

/// A settle as arguments of the script, with the names of the entries that it needs.
fn arguments(named: DeliveryRef, settle: &Settle, shard: Shard, entries: &mut Vec<String>) -> Vec<Vec<u8>> {
    let (how, after_ms, error) = match &settle.settlement {
        Settlement::Ack => ("ack", None, None),
        Settlement::Retry { after_ms, error } => ("retry", *after_ms, error.as_deref()),
        Settlement::Defer { after_ms } => ("defer", Some(*after_ms), None),
        Settlement::Park { reason } => ("park", None, Some(reason.as_str())),
        Settlement::Reject { reason } => ("reject", None, Some(reason.as_str())),
    };
    let after_ms = after_ms.map(|ms| ms.min(policy::LEASE_MS_MAX).to_string());
    let error = error.map(|text| format!("={}", policy::truncate(text, policy::ERROR_BYTES_MAX)));
    let mut number = |id: Option<&EntryId>| {
        let Some(id) = id else { return b"0".to_vec() };
        entries.push(member(id));
        entries.len().to_string().into_bytes()
    };
    let parks = matches!(settle.settlement, Settlement::Park { .. });
    let parked_for = settle.parked_for.as_ref().filter(|id| parks && shard_of(&id.scope) == shard);
    let claim = settle.claim.as_ref().filter(|end| shard_of(&end.id.scope) == shard);
    let mut args = place(named).to_vec();
    args.extend([
        how.into(),
        after_ms.unwrap_or_else(|| "-1".to_owned()).into_bytes(),
        error.unwrap_or_default().into_bytes(),
        number(parked_for),
        number(claim.map(|end| &end.id)),
    ]);
    args.extend(claim.into_iter().flat_map(end_arguments));
    args
}

fn place(named: DeliveryRef) -> [Vec<u8>; 3] {
    [
        named.sequence.to_string().into_bytes(),
        named.id.to_string().into_bytes(),
        named.fence.to_string().into_bytes(),
    ]
}

/// Why nothing was changed.
fn refusal(status: &str) -> Option<SettleError> {
    Some(match status {
        "gone" => SettleError::Gone,
        "stale" => SettleError::Stale,
        "expired" => SettleError::Expired,
        "not-in-flight" => SettleError::NotInFlight,
        "dead" => SettleError::Dead,
        _ => return None,
    })
}

impl Queues {
    pub(super) async fn settle(&self, name: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        validate::batch("settle", batch.len())?;
        let _ticket = self.asking.begin();
        self.known(name).await?;
        let named: Vec<_> = batch.iter().map(|settle| DeliveryRef::of(name, &settle.receipt)).collect();
        let valid: Vec<(DeliveryRef, &Settle)> = named
            .iter()
            .zip(&batch)
            .filter_map(|(named, settle)| Some((named.clone().ok()?, settle)))
            .collect();
        let (mut told, mut begun) = (Vec::with_capacity(valid.len()), false);
        for step in valid.chunks(STEP_MAX) {
            let (shard, mut entries, mut args) = (shard_of_queue(name), Vec::new(), Vec::new());
            for (named, settle) in step {
                args.extend(arguments(*named, settle, shard, &mut entries));
            }
            let answer = self.ask_with(QueueScript::Settle, name, |_| (entries.clone(), args.clone())).await;
            let mut answer = answer.map_err(|error| partly(error, begun))?;
            begun = true;
            let arrivals = self.after(name, &answer).await;
            told.extend(self.settled(&mut answer, step, &arrivals).await?);
        }
        self.waiters.freed(name.as_str());
        let mut told = told.into_iter();
        let each =
            named.into_iter().map(|named| named.and_then(|_| told.next().expect("one per valid receipt")));
        Ok(each.collect())
    }

    async fn settled(
        &self,
        answer: &mut Answer,
        step: &[(DeliveryRef, &Settle)],
        arrivals: &HashMap<String, Arrival>,
    ) -> Result<Vec<Result<Settled, SettleError>>, StoreError> {
        let mut told = Vec::with_capacity(step.len());
        for (mut row, (named, settle)) in answer.values.rows()?.into_iter().zip(step) {
            let status = row.text()?;
            told.push(match status.as_str() {
                "acked" => row.number().map(|_| Ok(Settled::Acked))?,
                "returned" => Ok(Settled::Returned { after_ms: row.number()? }),
                "parked" => row.number().map(|_| Ok(Settled::Parked))?,
                "moving" => match arrivals.get(&row.text()?) {
                    Some(Arrival::Parked) => Ok(Settled::Parked),
                    _ => Ok(Settled::Dead),
                },
                "claim damaged" => {
                    let id = settle.claim.as_ref().map(|end| end.id.to_string()).unwrap_or_default();
                    return Err(StoreError::Damaged(format!("the entry {id} of the ledger cannot be read")));
                }
                "claim closed" => {
                    let problem = "the ledger is closed for a copy, so no claim can be ended with a delivery";
                    return Err(StoreError::Moved(problem.to_owned()));
                }
                status => {
                    row.number()?;
                    let refused = match status.strip_prefix("claim ").and_then(token_refusal) {
                        Some(refused) => Some(SettleError::Claim(refused)),
                        None => self.refused(answer, status, named.id).await?,
                    };
                    Err(refused.ok_or_else(|| row.unexpected())?)
                }
            });
            let stale = told.last() == Some(&Err(SettleError::Claim(TokenError::Stale)));
            if let Some(end) = &settle.claim {
                self.claims.ended(end, row.number()? == 1, stale);
            }
        }
        Ok(told)
    }

    /// Why nothing was changed. One that has died is not gone.
    async fn refused(
        &self,
        answer: &Answer,
        status: &str,
        id: MessageId,
    ) -> Result<Option<SettleError>, StoreError> {
        let refusal = refusal(status);
        let target = answer.config()?.dead_letter.map(|dead| dead.queue);
        if refusal == Some(SettleError::Gone)
            && let Some(target) = target
            && self.is_there(&target, id).await?
        {
            return Ok(Some(SettleError::Dead));
        }
        Ok(refusal)
    }

    pub(super) async fn extend(
        &self,
        name: &QueueName,
        batch: Vec<Extend>,
    ) -> Batch<RemainingLease, SettleError> {
        validate::batch("extend", batch.len())?;
        let _ticket = self.asking.begin();
        self.known(name).await?;
        let named: Vec<_> = batch.iter().map(|extend| DeliveryRef::of(name, &extend.receipt)).collect();
        let valid: Vec<(DeliveryRef, &Extend)> = named
            .iter()
            .zip(&batch)
            .filter_map(|(named, extend)| Some((named.clone().ok()?, extend)))
            .collect();
        let (mut told, mut begun) = (Vec::with_capacity(valid.len()), false);
        for step in valid.chunks(STEP_MAX) {
            let each = step.iter().flat_map(|(named, extend)| {
                let [sequence, id, fence] = place(*named);
                // Beyond any lease, so that the script refuses it.
                let lease_ms = extend.lease_ms.min(1 << 50).to_string().into_bytes();
                [sequence, id, fence, lease_ms, if extend.own_lease { b"1".to_vec() } else { b"0".to_vec() }]
            });
            let args: Vec<Vec<u8>> = each.collect();
            let answer = self.ask(QueueScript::Extend, name, |_| args.clone()).await;
            let mut answer = answer.map_err(|error| partly(error, begun))?;
            begun = true;
            self.after(name, &answer).await;
            for (mut row, (named, _)) in answer.values.rows()?.into_iter().zip(step) {
                let (status, number) = (row.text()?, row.number()?);
                told.push(match status.as_str() {
                    "done" => Ok(RemainingLease { lease_ms: number }),
                    "too-long" => Err(SettleError::LeaseTooLong {
                        lease_ms: number,
                        lease_ms_max: policy::LEASE_MS_MAX,
                    }),
                    status => {
                        Err(self.refused(&answer, status, named.id).await?.ok_or_else(|| row.unexpected())?)
                    }
                });
            }
        }
        self.waiters.freed(name.as_str());
        let mut told = told.into_iter();
        let each =
            named.into_iter().map(|named| named.and_then(|_| told.next().expect("one per valid receipt")));
        Ok(each.collect())
    }

    /// Returns deliveries as if they had not been received; the last of a group first. Where it fails, their leases end.
    pub(super) async fn undo(&self, name: &QueueName, named: Vec<DeliveryRef>) {
        let _ticket = self.asking.begin();
        for step in named.chunks(STEP_MAX) {
            let each = step.iter().flat_map(|named| {
                let [sequence, id, fence] = place(*named);
                [
                    sequence,
                    id,
                    fence,
                    b"undo".to_vec(),
                    b"-1".to_vec(),
                    Vec::new(),
                    b"0".to_vec(),
                    b"0".to_vec(),
                ]
            });
            let args: Vec<Vec<u8>> = each.collect();
            match self.ask(QueueScript::Settle, name, |_| args.clone()).await {
                Ok(answer) => drop(self.after(name, &answer).await),
                Err(error) => {
                    tracing::debug!(%error, queue = %name, "deliveries of a dropped receive return when their leases end");
                }
            }
        }
        self.waiters.freed(name.as_str());
    }
}
