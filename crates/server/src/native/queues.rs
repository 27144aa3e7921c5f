//! Queues and their configuration.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

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

/// How long a queue's key pointer is taken as known. Only other servers on the same database can change it unseen.
const POINTER_TTL: Duration = Duration::from_secs(2);

/// The most key pointers that are remembered.
const POINTERS_MAX: usize = 10_000;

type Known = (Instant, Option<Arc<str>>);

/// The queues' key pointers, so that not every receive has to ask the store for its queue's configuration.
#[derive(Default)]
pub(super) struct KeyPointers(Mutex<HashMap<QueueName, Known>>);

impl KeyPointers {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<QueueName, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget(&self, queue: &QueueName) {
        self.lock().remove(queue);
    }
}

impl Api {
    /// Where in a body the queue's idempotency key is. A queue that went away meanwhile has none.
    pub(super) async fn key_pointer(&self, queue: &QueueName) -> Option<Arc<str>> {
        if let Some((since, pointer)) = self.key_pointers.lock().get(queue)
            && since.elapsed() < POINTER_TTL
        {
            return pointer.clone();
        }
        let pointer: Option<Arc<str>> =
            self.store.queue(queue).await.ok()?.config.key_pointer.map(Into::into);
        let mut known = self.key_pointers.lock();
        if known.len() >= POINTERS_MAX {
            known.clear();
        }
        known.insert(queue.clone(), (Instant::now(), pointer.clone()));
        pointer
    }
}

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
    let created = native.store.create_queue(&name, config_of(&name, fields)?).await?;
    native.key_pointers.forget(&name);
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
    let _alone = native.patching.lock().await;
    let config = native.store.queue(&name).await?.config;
    let mut fields = serde_json::to_value(&config).map_err(|error| ApiError::invalid(error.to_string()))?;
    merge(&mut fields, Value::Object(patch));
    set(&native, &name, parse(fields.to_string().as_bytes())?).await
}

pub(super) async fn replace(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(fields): Json<Map<String, Value>>,
) -> Answer<QueueItem> {
    let name = caller.queue("SetQueueAttributes", &queue)?;
    let _alone = native.patching.lock().await;
    set(&native, &name, config_of(&name, fields)?).await
}

async fn set(native: &Api, name: &QueueName, config: QueueConfig) -> Answer<QueueItem> {
    native.store.set_queue(name, config).await?;
    native.key_pointers.forget(name);
    Ok(axum::Json(native.store.queue(name).await?.into()))
}

pub(super) async fn remove(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Result<StatusCode, ApiError> {
    let name = caller.queue("DeleteQueue", &queue)?;
    native.store.delete_queue(&name).await?;
    native.key_pointers.forget(&name);
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
