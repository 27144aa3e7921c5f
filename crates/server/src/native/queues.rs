//! Queues and their configuration.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use hapax_client::wire::{Count, QueueItem, Queues};
use hapax_core::{QueueConfig, QueueName, QueueStats};
use http::StatusCode;
use serde::Serialize;
use serde_json::{Map, Value};

use super::Api;
use super::input::{Caller, Json, parse};
use super::problem::ApiError;

type Answer<T> = Result<axum::Json<T>, ApiError>;

pub(super) async fn list(State(native): State<Arc<Api>>, caller: Caller) -> Answer<Queues> {
    caller.store("ListQueues")?;
    let queues = native.store.queues().await?;
    let visible = queues.into_iter().filter(|info| caller.sees(&info.name));
    Ok(axum::Json(Queues { queues: visible.map(QueueItem::from).collect() }))
}

/// A queue that was created, or was there already.
#[derive(Serialize)]
struct Created {
    created: bool,
    #[serde(flatten)]
    queue: QueueItem,
}

/// A configuration as it is written for a new queue: the name says whether it is FIFO, if nothing else does.
fn config_of(name: &QueueName, mut fields: Map<String, Value>) -> Result<QueueConfig, ApiError> {
    if name.is_fifo() && !fields.contains_key("kind") {
        fields.insert("kind".to_owned(), "fifo".into());
    }
    parse(Value::Object(fields).to_string().as_bytes())
}

pub(super) async fn create(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(fields): Json<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let name = caller.queue("CreateQueue", &queue)?;
    let config = config_of(&name, fields)?;
    caller.may_fill(&config)?;
    let created = native.store.create_queue(&name, config).await?;
    let queue = native.store.queue(&name).await?.into();
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(Created { created, queue })).into_response())
}

pub(super) async fn show(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Answer<QueueItem> {
    let name = caller.queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(native.store.queue(&name).await?.into()))
}

/// RFC 7396: what is given replaces, what is null goes back to its default.
fn merge(target: &mut Value, change: Value) {
    let Value::Object(change) = change else {
        *target = change;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (key, value) in change {
        if value.is_null() {
            target.remove(&key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

pub(super) async fn change(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(patch): Json<Map<String, Value>>,
) -> Answer<QueueItem> {
    let name = caller.queue("SetQueueAttributes", &queue)?;
    let _alone = crate::CHANGING.lock().await;
    let config = native.store.queue(&name).await?.config;
    let mut fields = serde_json::to_value(&config).map_err(|error| ApiError::invalid(error.to_string()))?;
    merge(&mut fields, Value::Object(patch));
    let changed: QueueConfig = parse(fields.to_string().as_bytes())?;
    if changed.dead_letter != config.dead_letter {
        caller.may_fill(&changed)?;
    }
    set(&native, &name, changed).await
}

pub(super) async fn replace(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(fields): Json<Map<String, Value>>,
) -> Answer<QueueItem> {
    let name = caller.queue("SetQueueAttributes", &queue)?;
    let _alone = crate::CHANGING.lock().await;
    let config = config_of(&name, fields)?;
    caller.may_fill(&config)?;
    set(&native, &name, config).await
}

async fn set(native: &Api, name: &QueueName, config: QueueConfig) -> Answer<QueueItem> {
    native.store.set_queue(name, config).await?;
    Ok(axum::Json(native.store.queue(name).await?.into()))
}

pub(super) async fn remove(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Result<StatusCode, ApiError> {
    let name = caller.queue("DeleteQueue", &queue)?;
    native.store.delete_queue(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn stats(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Answer<QueueStats> {
    let name = caller.queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(native.store.stats(&name).await?))
}

pub(super) async fn purge(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Answer<Count> {
    let name = caller.queue("PurgeQueue", &queue)?;
    Ok(axum::Json(Count { count: native.store.purge(&name).await? }))
}
