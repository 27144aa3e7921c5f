//! Requests to the transaction coordinator: initialisation, the end of a transaction.

use std::time::Duration;

use hapax_core::mutant;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::describe_transactions_response::TransactionState;
use kafka_protocol::messages::{DescribeTransactionsRequest, EndTxnRequest, InitProducerIdRequest};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::error::{Meaning, meaning};
use super::offsets::send_offsets;
use super::{Cause, Prepared, Producer, ProducerError};
use crate::machine::{Ending, Identity, State};
use crate::wire::{Backoff, Call, Cluster, CoordinatorKind, WireError, text};

/// The feature of the cluster, and the level that is needed.
const FEATURE: &str = "transaction.version";
const FEATURE_LEVEL: i16 = 2;
/// The last version without two-phase commit.
const INIT_VERSION: i16 = 5;
/// The version that raises the epoch.
const END_VERSION: i16 = 5;
const DESCRIBE_VERSION: i16 = 0;

/// How long the markers of a transaction are waited for before the next one is sent. The first questions follow each other: mostly
/// the second answer says that they are written, and a pause would take longer than that.
const MARKERS_WAIT_MAX: Duration = Duration::from_millis(100);
const MARKERS_QUESTIONS: u32 = 4;
/// Time for the markers before the first question, if the next transaction is another producer's.
const MARKERS_REST: Duration = Duration::from_millis(1);
const MARKERS_WAIT_STEP: Duration = Duration::from_millis(2);

/// The known-bad variant that takes an unanswered commit for one that failed.
const UNANSWERED_FAILED: &str = "kafka-unanswered-commit-failed";

const INIT: &str = "the initialisation of the producer";
const OFFSETS: &str = "sending offsets";
const COMMIT: &str = "the commit";
const ABORT: &str = "the abort";
const DESCRIBE: &str = "asking who has the transactional id";

impl Producer {
    /// Refuses a cluster whose transactions let a delayed request of one reach the next.
    pub(super) async fn require_version_2(&self) -> Result<(), ProducerError> {
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        let versions = loop {
            match self.cluster.versions().await {
                Ok(versions) => break versions,
                Err(error) if error.is_transient() && Instant::now() < deadline => backoff.wait().await,
                Err(error) if error.is_transient() => {
                    return Err(ProducerError::Unavailable { what: INIT, cause: error.into() });
                }
                Err(error) => return Err(ProducerError::Fatal { what: INIT, cause: error.into() }),
            }
        };
        let level = versions.feature(FEATURE);
        if level >= FEATURE_LEVEL {
            return Ok(());
        }
        Err(ProducerError::Refused {
            key: FEATURE,
            value: level.to_string(),
            remedy: format!(
                "a delayed request of one transaction could end the next one; on brokers of version 4.0 or later run: \
                 kafka-features.sh --bootstrap-server {} upgrade --feature {FEATURE}={FEATURE_LEVEL}",
                self.config.connect.bootstrap.join(",")
            ),
        })
    }

    /// A new identity; the transaction under way is ended by the coordinator.
    pub(super) async fn initialise(&mut self) -> Result<(), ProducerError> {
        self.machine.initialise()?;
        let timeout_ms = self.config.transaction_timeout.as_millis();
        let request = InitProducerIdRequest::default()
            .with_transactional_id(self.transactional_id())
            .with_transaction_timeout_ms(i32::try_from(timeout_ms).unwrap_or(i32::MAX))
            // An initialisation that names the present identity would be refused after the coordinator has aborted the
            // transaction of that identity, hence none is named.
            .with_producer_id((-1).into())
            .with_producer_epoch(-1);
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            let before = std::mem::replace(&mut self.initialising, true);
            let called = match self.transactional_id() {
                Some(_) => self.coordinator(&request, INIT_VERSION).await,
                // Any broker gives identities to producers without transactions.
                None => self.cluster.call_any(&request, INIT_VERSION).await.map(first).map_err(Cause::Wire),
            };
            let cause = match called {
                Ok(response) => match response.error_code.err() {
                    None => {
                        let (producer_id, epoch) = (response.producer_id.0, response.producer_epoch);
                        self.machine.initialised(Identity { producer_id, epoch })?;
                        self.initialising = false;
                        self.forget();
                        return Ok(());
                    }
                    Some(ResponseError::InvalidTransactionTimeout) => {
                        let remedy =
                            "it is above the broker's transaction.max.timeout.ms; use less, or raise that";
                        return Err(ProducerError::Refused {
                            key: "transaction.timeout.ms",
                            value: timeout_ms.to_string(),
                            remedy: remedy.to_owned(),
                        });
                    }
                    Some(error) => {
                        if !may_have_been_done(error) {
                            self.initialising = before;
                        }
                        self.look_up_again(error);
                        Cause::Broker(error)
                    }
                },
                Err(cause) => {
                    // The request was not sent: there is no connection, or the coordinator is not known.
                    if matches!(cause, Cause::Wire(WireError::Connect { .. }) | Cause::Broker(_)) {
                        self.initialising = before;
                    }
                    cause
                }
            };
            if !may_retry(&cause) {
                let cause = self.named(cause, "Write", "");
                return Err(ProducerError::Fatal { what: INIT, cause });
            }
            if Instant::now() >= deadline {
                return Err(ProducerError::Unavailable { what: INIT, cause });
            }
            backoff.wait().await;
            // A successor may have begun since the attempt that was not answered.
            if self.initialising && self.transactional_id().is_some() && self.identity().is_some() {
                self.require_no_successor(deadline).await?;
            }
        }
    }

    /// After a commit of unknown outcome: settles it with the coordinator, and makes the producer ready. The caller then reads
    /// the committed offsets before it produces anything. After [`ProducerError::Unavailable`] it may be called again.
    pub async fn recover(&mut self) -> Result<(), ProducerError> {
        self.require_no_successor(Instant::now() + self.config.delivery_timeout).await?;
        self.initialise().await
    }

    /// Writes what belongs to the transaction, its offsets too, up to the request that ends it. [`Producer::commit`] does it by
    /// itself; this is for a caller that decides in between. Afterwards the transaction takes no records. After it was cancelled
    /// it may be called again.
    pub async fn prepare(&mut self) -> Result<(), ProducerError> {
        if self.state() == State::Open {
            self.form_last_batches().await?;
            self.machine.seal(self.offsets.is_some())?;
        }
        if self.state() == State::Sealed && self.prepared.is_none() {
            let offsets_may_return = self.deliver_with_offsets().await?;
            self.prepared = Some(Prepared { offsets_may_return });
        }
        Ok(())
    }

    /// Commits the transaction. After [`ProducerError::Unavailable`] and after it was cancelled it may be called again.
    pub async fn commit(&mut self) -> Result<(), ProducerError> {
        self.prepare().await?;
        match self.machine.commit()? {
            Ending::Empty => Ok(()),
            Ending::Request(identity) => self.end_commit(identity).await,
        }
    }

    /// Sends the last batches, and the offsets beside them if the coordinator knows the partitions already. While it adds one
    /// thing to a transaction it refuses another, and the broker of a batch tries that again only after 20 ms. Returns whether a copy of
    /// the offsets may arrive later.
    async fn deliver_with_offsets(&mut self) -> Result<bool, ProducerError> {
        if self.unanswered.keys().any(|at| !self.added.contains(at)) {
            self.deliver().await?;
        }
        let Some(request) = self.offsets_request() else { return self.deliver().await.map(|()| false) };
        self.ended_before().await;
        self.followed_is_complete().await?;
        let before = std::mem::replace(&mut self.known, true);
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut offsets = JoinSet::new();
        offsets.spawn(send_offsets(self.cluster.clone(), request, deadline));
        let sent = match self.deliver().await {
            Ok(()) => self.offsets_sent(offsets).await,
            Err(error) => Err(error),
        };
        if sent.as_ref().is_err_and(ProducerError::is_stale) {
            self.known = before || !self.added.is_empty();
        }
        sent
    }

    /// Waits until the coordinator has completed the transaction that this one follows.
    async fn followed_is_complete(&mut self) -> Result<(), ProducerError> {
        let Some((id, after)) = self.follows.clone() else { return Ok(()) };
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            let cause = match self.described(&id, deadline).await {
                Ok(None) => break,
                Ok(Some((told, state))) if is_complete(after, told, &state) => break,
                Ok(Some((told, state))) => {
                    Cause::Other(format!("the transaction of {id} is not complete: {state}, {told}"))
                }
                Err(cause) => cause,
            };
            if Instant::now() >= deadline {
                return Err(self.failed(OFFSETS, cause));
            }
            backoff.wait().await;
        }
        self.follows = None;
        Ok(())
    }

    async fn offsets_sent(
        &mut self,
        mut offsets: JoinSet<Result<bool, Cause>>,
    ) -> Result<bool, ProducerError> {
        let Some(sent) = offsets.join_next().await else { return Ok(false) };
        let sent = sent.unwrap_or_else(|error| Err(Cause::Other(error.to_string())));
        sent.map_err(|cause| match &cause {
            Cause::Broker(error) if meaning(*error) == Meaning::Forbidden => {
                let offsets = self.offsets.iter().flat_map(|(_, offsets)| offsets.keys());
                let mut topics: Vec<&str> = offsets.map(|at| &*at.topic).collect();
                topics.dedup();
                let cause = self.named(cause, "Read", &topics.join(", "));
                self.forbidden(OFFSETS, cause)
            }
            _ => self.failed(OFFSETS, cause),
        })
    }

    /// Aborts the transaction. After [`ProducerError::Unavailable`] and after it was cancelled it may be called again.
    pub async fn abort(&mut self) -> Result<(), ProducerError> {
        let Ending::Request(identity) = self.machine.abort()? else { return Ok(()) };
        if !self.calls.is_empty() {
            self.known = true;
            self.drop_calls();
        }
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            let cause = match self.end(identity, false).await {
                Ok(next) => return self.ended(next),
                Err(cause) => cause,
            };
            match &cause {
                Cause::Broker(error) => match meaning(*error) {
                    Meaning::Retry | Meaning::Moved => {}
                    Meaning::Forbidden => return Err(ProducerError::Fatal { what: ABORT, cause }),
                    // The coordinator has ended it already, because it timed out or was taken over; or it knows of no
                    // transaction.
                    Meaning::Stale | Meaning::Abort => return self.recover().await,
                },
                Cause::Wire(error) if !error.is_transient() => {
                    return Err(ProducerError::Fatal { what: ABORT, cause });
                }
                _ => {}
            }
            if Instant::now() >= deadline {
                return Err(ProducerError::Unavailable { what: ABORT, cause });
            }
            backoff.wait().await;
        }
    }

    /// Repeats the commit until it is answered, or the coordinator has timed the transaction out.
    async fn end_commit(&mut self, identity: Identity) -> Result<(), ProducerError> {
        let deadline = Instant::now() + self.config.transaction_timeout + self.config.connect.request_timeout;
        let mut backoff = Backoff::new();
        loop {
            let before = std::mem::replace(&mut self.uncertain, true);
            let cause = match self.end(identity, true).await {
                Ok(next) => return self.ended(next),
                Err(cause) => cause,
            };
            match &cause {
                Cause::Broker(ResponseError::RequestTimedOut | ResponseError::UnknownServerError) => {}
                Cause::Broker(error) => {
                    self.uncertain = before;
                    match meaning(*error) {
                        Meaning::Retry | Meaning::Moved => {}
                        _ if before => return Err(self.unknown(cause)),
                        Meaning::Stale => {
                            self.machine.commit_refused();
                            // If there is no answer now, the abort asks again.
                            let deadline = Instant::now() + self.config.delivery_timeout;
                            return Err(match self.require_no_successor(deadline).await {
                                Err(fenced @ ProducerError::Fenced { .. }) => fenced,
                                _ => ProducerError::Abort { what: COMMIT, cause },
                            });
                        }
                        Meaning::Forbidden => {
                            self.machine.commit_refused();
                            return Err(ProducerError::Fatal { what: COMMIT, cause });
                        }
                        Meaning::Abort => {
                            self.machine.commit_refused();
                            return Err(ProducerError::Abort { what: COMMIT, cause });
                        }
                    }
                }
                // No connection: the request was not sent.
                Cause::Wire(WireError::Connect { .. }) => self.uncertain = before,
                Cause::Wire(_) if mutant::is(UNANSWERED_FAILED) => {
                    self.machine.commit_refused();
                    return Err(ProducerError::Abort { what: COMMIT, cause });
                }
                Cause::Wire(_) | Cause::Denied { .. } | Cause::Other(_) => {}
            }
            if Instant::now() >= deadline {
                return Err(self.unknown(cause));
            }
            backoff.wait().await;
        }
    }

    /// The transaction was ended. The coordinator answers before it has written the markers, and a batch that comes earlier than that
    /// is tried again by its broker only after 20 ms: it is asked until they are written, and the next batch waits for that.
    fn ended(&mut self, next: Identity) -> Result<(), ProducerError> {
        self.machine.ended(next)?;
        let (cluster, rests) = (self.cluster.clone(), self.rests);
        let id = self.config.transactional_id.clone();
        self.ending = JoinSet::new();
        self.ending.spawn(async move {
            drop(timeout(MARKERS_WAIT_MAX, markers_written(&cluster, &id, rests)).await);
        });
        Ok(())
    }

    /// Whether the transaction before this one may not have all of its markers.
    pub(super) fn is_ending(&mut self) -> bool {
        while self.ending.try_join_next().is_some() {}
        !self.ending.is_empty()
    }

    /// Waits until the transaction before this one has its markers, for a bounded time.
    pub(super) async fn ended_before(&mut self) {
        while self.ending.join_next().await.is_some() {}
    }

    fn unknown(&mut self, cause: Cause) -> ProducerError {
        self.machine.give_up();
        ProducerError::Unknown { cause }
    }

    async fn end(&self, identity: Identity, commit: bool) -> Result<Identity, Cause> {
        let request = EndTxnRequest::default()
            .with_transactional_id(text(&self.config.transactional_id).into())
            .with_producer_id(identity.producer_id.into())
            .with_producer_epoch(identity.epoch)
            .with_committed(commit);
        let response = self.coordinator(&request, END_VERSION).await?;
        match response.error_code.err() {
            None => Ok(Identity { producer_id: response.producer_id.0, epoch: response.producer_epoch }),
            Some(error) => {
                self.look_up_again(error);
                Err(Cause::Broker(error))
            }
        }
    }

    /// The producer is fenced if the coordinator knows a later one than this one's last transaction can have left behind. Without an
    /// answer nothing is known: an initialisation could take the id over from a successor.
    async fn require_no_successor(&mut self, deadline: Instant) -> Result<(), ProducerError> {
        let described = self.described(&self.config.transactional_id, deadline).await;
        let described = described.map_err(|cause| ProducerError::Unavailable { what: DESCRIBE, cause })?;
        let (Some(ours), Some((theirs, state))) = (self.identity(), described) else {
            return Ok(());
        };
        let is_own = self.initialising && is_of_initialisation(&state);
        if is_own || !is_successor(ours, theirs, &state, self.known) {
            return Ok(());
        }
        self.machine.fenced();
        let transactional_id = self.config.transactional_id.clone();
        Err(ProducerError::Fenced { transactional_id, ours, theirs: Some(theirs) })
    }

    /// What the coordinator knows of a transactional id: the present identity and the state of its transaction. `None`: it knows
    /// nothing, or does not tell this user. An error: it did not answer in time.
    async fn described(&self, id: &str, deadline: Instant) -> Result<Option<(Identity, String)>, Cause> {
        let mut backoff = Backoff::new();
        let kind = CoordinatorKind::Transaction;
        let request = DescribeTransactionsRequest::default().with_transactional_ids(vec![text(id).into()]);
        loop {
            let called = call_coordinator(&self.cluster, kind, id, &request, DESCRIBE_VERSION).await;
            let found = called.map(|response| response.transaction_states.into_iter().next());
            let cause = match found {
                Ok(None) => Cause::Other("the answer leaves the transactional id out".to_owned()),
                Ok(Some(found)) => match found.error_code.err() {
                    None => {
                        let (producer_id, epoch) = (found.producer_id.0, found.producer_epoch);
                        let identity = Identity { producer_id, epoch };
                        return Ok(Some((identity, found.transaction_state.to_string())));
                    }
                    Some(error) => match meaning(error) {
                        Meaning::Retry => Cause::Broker(error),
                        Meaning::Moved => {
                            self.cluster.forget_coordinator(kind, id);
                            Cause::Broker(error)
                        }
                        Meaning::Stale | Meaning::Abort | Meaning::Forbidden => return Ok(None),
                    },
                },
                Err(cause) => cause,
            };
            if Instant::now() >= deadline {
                return Err(cause);
            }
            backoff.wait().await;
        }
    }

    /// One attempt with the transaction coordinator.
    async fn coordinator<R: Call>(&self, request: &R, version: i16) -> Result<R::Answer, Cause> {
        call_coordinator(
            &self.cluster,
            CoordinatorKind::Transaction,
            &self.config.transactional_id,
            request,
            version,
        )
        .await
    }

    fn look_up_again(&self, error: ResponseError) {
        if meaning(error) == Meaning::Moved {
            self.cluster.forget_coordinator(CoordinatorKind::Transaction, &self.config.transactional_id);
        }
    }
}

/// Returns when the coordinator has completed the last transaction, or does not say.
async fn markers_written(cluster: &Cluster, id: &str, rests: bool) {
    if rests {
        sleep(MARKERS_REST).await;
    }
    let request = DescribeTransactionsRequest::default().with_transactional_ids(vec![text(id).into()]);
    let is_ending = |state: &TransactionState| state.transaction_state.starts_with("Prepare");
    for question in 1.. {
        let kind = CoordinatorKind::Transaction;
        match call_coordinator(cluster, kind, id, &request, DESCRIBE_VERSION).await {
            Ok(response) if response.transaction_states.first().is_some_and(is_ending) => {}
            _ => return,
        }
        if question >= MARKERS_QUESTIONS {
            sleep(MARKERS_WAIT_STEP).await;
        }
    }
}

fn first<A, B>(pair: (A, B)) -> A {
    pair.0
}

/// One attempt with a coordinator.
pub(super) async fn call_coordinator<R: Call>(
    cluster: &Cluster,
    kind: CoordinatorKind,
    key: &str,
    request: &R,
    version: i16,
) -> Result<R::Answer, Cause> {
    let address = cluster.coordinator(kind, key).await?.map_err(Cause::Broker)?;
    match cluster.call_at(&address, request, version).await {
        Ok((response, _)) => Ok(response),
        Err(error) => {
            cluster.forget_coordinator(kind, key);
            Err(Cause::Wire(error))
        }
    }
}

pub(super) fn may_retry(cause: &Cause) -> bool {
    match cause {
        Cause::Broker(error) => matches!(meaning(*error), Meaning::Retry | Meaning::Moved),
        Cause::Wire(error) => error.is_transient(),
        Cause::Denied { .. } | Cause::Other(_) => false,
    }
}

/// Whether the coordinator may have initialised the producer and answered this error: it writes the new identity to its log first.
fn may_have_been_done(error: ResponseError) -> bool {
    use ResponseError as E;
    matches!(error, E::CoordinatorNotAvailable | E::RequestTimedOut | E::UnknownServerError)
}

/// Whether an initialisation can lead to this state: it ends the transaction that is open, and begins none. Others are those of a
/// producer that has begun a transaction since, or of the end of our own transaction.
fn is_of_initialisation(state: &str) -> bool {
    matches!(state, "Empty" | "PrepareEpochFence" | "PrepareAbort" | "CompleteAbort")
}

/// Whether a transaction has its markers: the one at whose end its producer got the identity `after`. A coordinator that was replaced, and
/// does not know it yet, tells of an earlier one.
fn is_complete(after: Option<Identity>, told: Identity, state: &str) -> bool {
    let is_earlier =
        after.is_some_and(|after| told.producer_id == after.producer_id && told.epoch < after.epoch);
    !is_earlier && !state.starts_with("Prepare")
}

/// Whether `theirs` was initialised after `ours`. The commit of our transaction raises the epoch by one, its abort (by us, or because it
/// timed out) by one or two, and leaves it ending or complete; an initialisation leaves it empty, at a higher epoch, so a successor's first
/// commit is two above ours. A transaction that the coordinator does not know cannot have ended: then it was another producer's.
fn is_successor(ours: Identity, theirs: Identity, state: &str, known: bool) -> bool {
    if theirs == ours {
        return false;
    }
    if !known {
        return true;
    }
    let ended = state.starts_with("Prepare") || state.starts_with("Complete");
    let raised = i32::from(theirs.epoch) - i32::from(ours.epoch);
    let raised_max = if state.ends_with("Commit") { 1 } else { 2 };
    // An exhausted epoch continues with a new producer id at 0.
    let near = if theirs.producer_id == ours.producer_id {
        (1..=raised_max).contains(&raised)
    } else {
        theirs.epoch == 0
    };
    !(ended && near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_complete_only_by_what_is_told_of_it() {
        let id = |producer_id, epoch| Identity { producer_id, epoch };
        for (after, told, state, complete) in [
            (id(7, 5), id(7, 5), "PrepareCommit", false),
            (id(7, 5), id(7, 5), "CompleteCommit", true),
            (id(7, 5), id(7, 5), "Ongoing", true),
            (id(7, 5), id(7, 6), "Empty", true),
            (id(7, 5), id(7, 4), "CompleteCommit", false),
            (id(7, 5), id(7, 4), "Ongoing", false),
            // An exhausted epoch continues with a new producer id at 0.
            (id(7, 5), id(8, 0), "CompleteCommit", true),
        ] {
            assert_eq!(is_complete(Some(after), told, state), complete, "{after} {told} {state}");
        }
    }

    #[test]
    fn an_own_initialisation_begins_no_transaction() {
        for state in ["Empty", "PrepareEpochFence", "PrepareAbort", "CompleteAbort"] {
            assert!(is_of_initialisation(state), "{state}");
        }
        for state in ["Ongoing", "PrepareCommit", "CompleteCommit", "Dead"] {
            assert!(!is_of_initialisation(state), "{state}");
        }
    }

    #[test]
    fn a_successor_is_told_from_the_end_of_the_own_transaction() {
        let id = |producer_id, epoch| Identity { producer_id, epoch };
        let ours = id(7, 4);
        for (theirs, state, successor) in [
            (ours, "Ongoing", false),
            (id(7, 5), "PrepareCommit", false),
            (id(7, 5), "CompleteCommit", false),
            (id(7, 6), "CompleteAbort", false),
            (id(7, 6), "PrepareCommit", true),
            (id(7, 6), "CompleteCommit", true),
            (id(8, 0), "CompleteCommit", false),
            (id(7, 5), "Empty", true),
            (id(7, 5), "Ongoing", true),
            (id(7, 7), "CompleteCommit", true),
            (id(8, 1), "Ongoing", true),
        ] {
            assert_eq!(is_successor(ours, theirs, state, true), successor, "{theirs} {state}");
            assert_eq!(is_successor(ours, theirs, state, false), theirs != ours, "{theirs} {state}, unknown");
        }
    }
}
