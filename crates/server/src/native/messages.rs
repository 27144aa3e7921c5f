//! Send, receive, settle, extend.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use hapax_client::wire::{
    ClaimEndItem, ExtendItem, ExtendRequest, Problem, ReceiveRequest, ReceiveResponse, Results, SendRequest,
    SettleItem, SettleKind, SettleRequest, SettledItem, SettledKind,
};
use hapax_core::{
    Extend, NewMessage, Receipt, Receive, SendError, Settle, SettleError, Settled, Settlement, validate,
};
use hapax_net::tracker::ConnectionBudget;
use hapax_net::unread::AlwaysSent;
use http::StatusCode;

use super::Api;
use super::input::{Caller, Json};
use super::problem::{ApiError, JsonResult};
use crate::deliveries::{self, give_back};

/// Does what can be done of a batch: `items` that are no request fail alone, and answers keep their places.
pub(super) async fn call_valid_items<A, T, E, F>(
    items: Vec<Result<A, E>>,
    call: impl FnOnce(Vec<A>) -> F,
) -> Result<Vec<Result<T, E>>, hapax_core::StoreError>
where
    F: Future<Output = hapax_core::Batch<T, E>>,
{
    let mut places = Vec::with_capacity(items.len());
    let mut good = Vec::with_capacity(items.len());
    for item in items {
        match item {
            Ok(item) => {
                good.push(item);
                places.push(None);
            }
            Err(error) => places.push(Some(error)),
        }
    }
    // The store is called even if no item is left, because the queue may not exist.
    let expected = good.len();
    let answers = call(good).await?;
    assert_eq!(answers.len(), expected, "a store answers each element");
    let mut answers = answers.into_iter();
    let place = |bad: Option<E>| bad.map_or_else(|| answers.next().expect("as many as were asked"), Err);
    Ok(places.into_iter().map(place).collect())
}

pub(super) async fn send(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(request): Json<SendRequest>,
) -> JsonResult<Results<hapax_core::Sent>> {
    let queue = caller.allowed_queue("SendMessage", &queue)?;
    validate::batch("messages", request.messages.len())?;
    let items: Vec<Result<NewMessage, SendError>> =
        request.messages.into_iter().map(TryInto::try_into).collect();
    let answers = call_valid_items(items, |batch| native.store.send(&queue, batch)).await?;
    Ok(axum::Json(Results::new(answers, |sent| sent)))
}

pub(super) async fn receive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    budget: Option<Extension<ConnectionBudget>>,
    Path(queue): Path<String>,
    Json(mut request): Json<ReceiveRequest>,
) -> Result<Response, ApiError> {
    let queue = caller.allowed_queue("ReceiveMessage", &queue)?;
    let cancel_id = request.cancel_id.take();
    if cancel_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > 128) {
        return Err(ApiError::invalid("cancel_id: use 1 to 128 bytes"));
    }
    // What was acked on receive is deleted already. What was received under an attempt id stays for the repeat, which may
    // have been answered already.
    let keeps = request.attempt_id.is_some();
    let deletes = request.ack_on_receive;
    let name = cancel_id.map(|id| (caller.key_id().to_owned(), queue.clone(), id));
    let poll = native.waiting_receives.begin(name);
    let poll = poll.ok_or_else(|| ApiError::invalid("cancel_id: a receive of that name is waiting"))?;
    // A cancelled wait drops the store's receive, and so takes no messages. If both are ready, the messages win.
    let deliveries = tokio::select! {
        biased;
        got = native.store.receive(&queue, Receive::from(request)) => got?,
        () = poll.cancelled() => Vec::new(),
        () = native.shutdown.requested() => Vec::new(),
    };
    drop(poll);
    if deliveries.is_empty() {
        return Ok(axum::Json(ReceiveResponse { deliveries: Vec::new() }).into_response());
    }
    if !deletes && budget.is_some_and(|budget| !budget.fits(deliveries::response_bytes(&deliveries))) {
        if !keeps {
            give_back(native.store.as_ref(), &queue, &deliveries).await;
        }
        let detail = "too many responses wait to be read by their clients; retry with backoff";
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Problem::new("overloaded", detail, true)));
    }
    let answer = ReceiveResponse { deliveries: deliveries.into_iter().map(Into::into).collect() };
    let mut response = axum::Json(answer).into_response();
    // The messages are leased and the receive has checked that they fit, or they are already deleted.
    response.extensions_mut().insert(AlwaysSent);
    Ok(response)
}

pub(super) async fn cancel_receive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path((queue, id)): Path<(String, String)>,
) -> Result<impl IntoResponse, ApiError> {
    let queue = caller.allowed_queue("ReceiveMessage", &queue)?;
    if native.waiting_receives.cancel(&(caller.key_id().to_owned(), queue, id)) {
        return Ok(StatusCode::NO_CONTENT);
    }
    let problem = Problem::new("no-such-receive", "no receive of that name is waiting", false);
    Err(ApiError::new(StatusCode::NOT_FOUND, problem))
}

fn settle_of(item: SettleItem) -> Result<Result<Settle, SettleError>, ApiError> {
    let stray = |field: &str| {
        let how = format!("{:?}", item.how).to_lowercase();
        Err(ApiError::invalid(format!("{field} does not go with how = {how}")))
    };
    let settlement = match item.how {
        SettleKind::Ack | SettleKind::Reject | SettleKind::Park if item.after_ms.is_some() => {
            return stray("after_ms");
        }
        SettleKind::Ack | SettleKind::Defer | SettleKind::Reject | SettleKind::Park
            if item.error.is_some() =>
        {
            return stray("error");
        }
        SettleKind::Ack | SettleKind::Defer | SettleKind::Retry if item.reason.is_some() => {
            return stray("reason");
        }
        SettleKind::Ack | SettleKind::Retry | SettleKind::Defer | SettleKind::Reject
            if item.parked_for.is_some() =>
        {
            return stray("parked_for");
        }
        SettleKind::Ack => Settlement::Ack,
        SettleKind::Retry => Settlement::Retry { after_ms: item.after_ms, error: item.error },
        SettleKind::Defer => Settlement::Defer { after_ms: item.after_ms.unwrap_or_default() },
        SettleKind::Park => Settlement::Park { reason: item.reason.unwrap_or_default() },
        SettleKind::Reject => Settlement::Reject { reason: item.reason.unwrap_or_default() },
    };
    let claim =
        match item.claim.map(ClaimEndItem::into_end).transpose().map_err(ApiError::invalid)?.transpose() {
            Ok(claim) => claim,
            Err(error) => return Ok(Err(SettleError::Claim(error))),
        };
    Ok(match Receipt::new(item.receipt) {
        Ok(receipt) => Ok(Settle { receipt, settlement, claim, parked_for: item.parked_for }),
        Err(_) => Err(SettleError::Malformed),
    })
}

pub(super) async fn settle(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(request): Json<SettleRequest>,
) -> JsonResult<Results<SettledItem>> {
    let queue = caller.allowed_queue("DeleteMessage", &queue)?;
    validate::batch("settle", request.settle.len())?;
    for claim in request.settle.iter().filter_map(|item| item.claim.as_ref()) {
        caller.check_scope("ClaimKey", &claim.scope)?;
    }
    for entry in request.settle.iter().filter_map(|item| item.parked_for.as_ref()) {
        caller.check_scope("ClaimKey", &entry.scope)?;
    }
    let items = request.settle.into_iter().map(settle_of).collect::<Result<Vec<_>, _>>()?;
    let answers = call_valid_items(items, |batch| native.store.settle(&queue, batch)).await?;
    Ok(axum::Json(Results::new(answers, settled_item)))
}

fn settled_item(settled: Settled) -> SettledItem {
    let item = |settled, after_ms| SettledItem { settled, after_ms };
    match settled {
        Settled::Acked => item(SettledKind::Acked, None),
        Settled::Returned { after_ms } => item(SettledKind::Returned, Some(after_ms)),
        Settled::Dead => item(SettledKind::Dead, None),
        Settled::Parked => item(SettledKind::Parked, None),
    }
}

pub(super) async fn extend(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(request): Json<ExtendRequest>,
) -> JsonResult<Results<hapax_core::RemainingLease>> {
    let queue = caller.allowed_queue("ChangeMessageVisibility", &queue)?;
    validate::batch("extend", request.extend.len())?;
    let item = |item: ExtendItem| match Receipt::new(item.receipt) {
        Ok(receipt) => Ok(Extend { receipt, lease_ms: item.lease_ms, own_lease: item.own }),
        Err(_) => Err(SettleError::Malformed),
    };
    let items = request.extend.into_iter().map(item).collect();
    let answers = call_valid_items(items, |batch| native.store.extend(&queue, batch)).await?;
    Ok(axum::Json(Results::new(answers, |remaining| remaining)))
}
