//! The usual middleware of many services, for comparison: looks up the key, runs, stores the response afterwards, and
//! lets everything pass if the store is down.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::BodyExt as _;

type TestResponse = (StatusCode, HeaderMap, Bytes);

/// Stored responses by key.
#[derive(Clone, Default)]
pub struct Naive {
    answers: Arc<Mutex<HashMap<String, TestResponse>>>,
    down: Arc<AtomicBool>,
}

impl Naive {
    /// The store cannot be reached from now on.
    pub fn go_down(&self) {
        self.down.store(true, Ordering::SeqCst);
    }

    fn look_up(&self, key: &str) -> Option<TestResponse> {
        if self.down.load(Ordering::SeqCst) {
            return None;
        }
        self.answers.lock().unwrap().get(key).cloned()
    }
}

/// `axum::middleware::from_fn_with_state(naive, middleware)`.
pub async fn middleware(State(naive): State<Naive>, request: Request, next: Next) -> Response {
    let key = request.headers().get("idempotency-key").and_then(|key| key.to_str().ok()).map(str::to_owned);
    let Some(key) = key else { return next.run(request).await };
    if let Some((status, headers, body)) = naive.look_up(&key) {
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        return response;
    }
    let (parts, body) = next.run(request).await.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    if !naive.down.load(Ordering::SeqCst) {
        let answer = (parts.status, parts.headers.clone(), body.clone());
        naive.answers.lock().unwrap().insert(key, answer);
    }
    Response::from_parts(parts, Body::from(body))
}
