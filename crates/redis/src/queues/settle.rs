//! Settles and extensions.

use std::collections::HashMap;

use hapax_core::{
    Batch, Extend, MessageId, QueueName, RemainingLease, Settle, SettleError, Settled, Settlement,
    StoreError, policy, validate,
};

use super::Queues;
use super::call::Answer;
use super::message::Named;
use super::moves::Arrival;
use super::send::partly;
use crate::script::QueueScript;

/// Deliveries that one script settles.
const STEP_MAX: usize = 100;

/// A settlement as arguments of the script.
fn arguments(named: Named, settlement: &Settlement) -> [Vec<u8>; 6] {
    let (how, after_ms, error) = match settlement {
        Settlement::Ack => ("ack", None, None),
        Settlement::Retry { after_ms, error } => ("retry", *after_ms, error.as_deref()),
        Settlement::Defer { after_ms } => ("defer", Some(*after_ms), None),
        Settlement::Park { reason } => ("park", None, Some(reason.as_str())),
        Settlement::Reject { reason } => ("reject", None, Some(reason.as_str())),
    };
    let after_ms = after_ms.map(|ms| ms.min(policy::LEASE_MS_MAX).to_string());
    let error = error.map(|text| format!("={}", policy::truncate(text, policy::ERROR_BYTES_MAX)));
    let [sequence, id, fence] = place(named);
    [
        sequence,
        id,
        fence,
        how.into(),
        after_ms.unwrap_or_else(|| "-1".to_owned()).into_bytes(),
        error.unwrap_or_default().into_bytes(),
    ]
}

fn place(named: Named) -> [Vec<u8>; 3] {
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
        if batch.iter().any(|settle| settle.claim.is_some()) {
            let problem =
                "claim: this store ends no claims with a delivery; end the claim first, then settle";
            return Err(StoreError::Invalid(problem.to_owned()));
        }
        let _ticket = self.asking.begin();
        self.known(name).await?;
        let named: Vec<_> = batch.iter().map(|settle| Named::of(name, &settle.receipt)).collect();
        let valid: Vec<(Named, &Settlement)> = named
            .iter()
            .zip(&batch)
            .filter_map(|(named, settle)| Some((named.clone().ok()?, &settle.settlement)))
            .collect();
        let (mut told, mut begun) = (Vec::with_capacity(valid.len()), false);
        for step in valid.chunks(STEP_MAX) {
            let args =
                step.iter().flat_map(|(named, settlement)| arguments(*named, settlement)).collect::<Vec<_>>();
            let answer = self.ask(QueueScript::Settle, name, |_| args.clone()).await;
            let mut answer = answer.map_err(|error| partly(error, begun))?;
            begun = true;
            let arrivals = self.after(name, &answer).await;
            let ids: Vec<MessageId> = step.iter().map(|(named, _)| named.id).collect();
            told.extend(self.settled(&mut answer, &ids, &arrivals).await?);
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
        ids: &[MessageId],
        arrivals: &HashMap<String, Arrival>,
    ) -> Result<Vec<Result<Settled, SettleError>>, StoreError> {
        let mut told = Vec::with_capacity(ids.len());
        for (mut row, id) in answer.values.rows()?.into_iter().zip(ids) {
            let status = row.text()?;
            told.push(match status.as_str() {
                "acked" => Ok(Settled::Acked),
                "returned" => Ok(Settled::Returned { after_ms: row.number()? }),
                "parked" => Ok(Settled::Parked),
                "moving" => match arrivals.get(&row.text()?) {
                    Some(Arrival::Parked) => Ok(Settled::Parked),
                    _ => Ok(Settled::Dead),
                },
                status => Err(self.refused(answer, status, *id).await?.ok_or_else(|| row.unexpected())?),
            });
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
        let named: Vec<_> = batch.iter().map(|extend| Named::of(name, &extend.receipt)).collect();
        let valid: Vec<(Named, &Extend)> = named
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
    pub(super) async fn undo(&self, name: &QueueName, named: Vec<Named>) {
        let _ticket = self.asking.begin();
        for step in named.chunks(STEP_MAX) {
            let each = step.iter().flat_map(|named| {
                let [sequence, id, fence] = place(*named);
                [sequence, id, fence, b"undo".to_vec(), b"-1".to_vec(), Vec::new()]
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
