//! The heartbeat: keeps claims from lapsing while their requests run.
//!
//! It has a thread and a runtime of its own, so that a handler that blocks its runtime cannot stop it; and it renews
//! all claims that are due in one call. A claim counts from before its request left, on this process's clock: when it
//! runs out, its run is told to stop, whether or not the ledger can be reached.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hapax_core::{EntryId, Ledger, Remaining, Renew, Token, TokenError};
use tokio::sync::{Notify, watch};

/// Renews the claims of one layer.
pub(crate) struct Renewer {
    shared: Arc<RenewerState>,
    ledger: Arc<dyn Ledger>,
}

#[derive(Default)]
struct RenewerState {
    state: Mutex<State>,
    /// Told when there is something to renew after there was nothing.
    wake: Notify,
}

#[derive(Default)]
struct State {
    next: u64,
    started: bool,
    claims: HashMap<u64, Kept>,
}

struct Kept {
    id: EntryId,
    token: Token,
    lease: Duration,
    renew_at: Instant,
    lapses_at: Instant,
    renewing: bool,
    lost: watch::Sender<bool>,
}

impl RenewerState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps one claim until it is dropped.
pub(crate) struct Beat {
    shared: Arc<RenewerState>,
    number: u64,
    lost: watch::Receiver<bool>,
}

impl Beat {
    /// Resolves when the claim is not this process's any more, or may not be.
    pub(crate) async fn lost(&mut self) {
        if self.lost.wait_for(|lost| *lost).await.is_err() {
            // The sender goes with the claim, and the claim with this beat.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.shared.lock().claims.remove(&self.number);
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        // The thread holds only a weak reference, and looks whether it is still wanted.
        self.shared.wake.notify_one();
    }
}

impl Renewer {
    pub(crate) fn new(ledger: Arc<dyn Ledger>) -> Self {
        Self { shared: Arc::default(), ledger }
    }

    /// Keeps a claim that was asked for at `since`.
    pub(crate) fn keep(&self, id: EntryId, token: Token, lease: Duration, since: Instant) -> Beat {
        let (lost, watch) = watch::channel(false);
        let kept = Kept {
            id,
            token,
            lease,
            renew_at: since + lease / 3,
            lapses_at: since + lease,
            renewing: false,
            lost,
        };
        let mut state = self.shared.lock();
        let number = state.next;
        state.next += 1;
        let first = state.claims.is_empty();
        state.claims.insert(number, kept);
        let start = !std::mem::replace(&mut state.started, true);
        drop(state);
        if start {
            self.start();
        } else if first {
            self.shared.wake.notify_one();
        }
        Beat { shared: self.shared.clone(), number, lost: watch }
    }

    fn start(&self) {
        let (shared, ledger) = (Arc::downgrade(&self.shared), self.ledger.clone());
        let run = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            match runtime {
                Ok(runtime) => runtime.block_on(beat(&shared, &ledger)),
                Err(error) => {
                    tracing::error!(%error, "no heartbeat: requests end when their first lease does");
                }
            }
        };
        let started = std::thread::Builder::new().name("hapax-http-renew".into()).spawn(run);
        if let Err(error) = started {
            tracing::error!(%error, "no heartbeat: requests end when their first lease does");
            self.shared.lock().started = false;
        }
    }
}

async fn beat(shared: &Weak<RenewerState>, ledger: &Arc<dyn Ledger>) {
    loop {
        let Some(alive) = shared.upgrade() else { return };
        let (due, next) = due(&alive);
        if !due.is_empty() {
            // Not awaited: a ledger that hangs must not keep the others from being told that their lease is over.
            tokio::spawn(renew(alive.clone(), ledger.clone(), due));
        }
        if let Some(next) = next {
            drop(alive);
            tokio::time::sleep_until(next.into()).await;
        } else {
            // A renewer that goes away wakes it, perhaps a moment too early; the next look finds it gone.
            let _ = tokio::time::timeout(Duration::from_secs(30), alive.wake.notified()).await;
        }
    }
}

/// The claims that are due now, and when to look again; `None` while there are no claims.
fn due(shared: &RenewerState) -> (Vec<(u64, Renew)>, Option<Instant>) {
    let now = Instant::now();
    let mut due = Vec::new();
    let mut next: Option<Instant> = None;
    for (number, kept) in &mut shared.lock().claims {
        if now >= kept.lapses_at {
            kept.lost.send_replace(true);
            continue;
        }
        if now >= kept.renew_at && !kept.renewing {
            kept.renewing = true;
            let lease_ms = kept.lease.as_millis() as u64;
            due.push((*number, Renew { id: kept.id.clone(), token: kept.token.clone(), lease_ms }));
        }
        let at = if kept.renewing { kept.lapses_at } else { kept.renew_at };
        // New claims are not announced while others are there: look again soon enough for the shortest lease.
        let at = at.min(now + kept.lease / 6);
        next = Some(next.map_or(at, |next| next.min(at)));
    }
    let soon = now + Duration::from_millis(15);
    (due, next.map(|next| next.clamp(soon, now + Duration::from_millis(50))))
}

async fn renew(shared: Arc<RenewerState>, ledger: Arc<dyn Ledger>, due: Vec<(u64, Renew)>) {
    let sent = Instant::now();
    let (numbers, batch): (Vec<u64>, Vec<Renew>) = due.into_iter().unzip();
    let longest = batch.iter().map(|renew| renew.lease_ms).max().unwrap_or_default();
    let answer = tokio::time::timeout(Duration::from_millis(longest), ledger.renew(batch)).await;
    let results: Vec<Option<Result<Remaining, TokenError>>> = match answer {
        Ok(Ok(results)) => results.into_iter().map(Some).collect(),
        Ok(Err(error)) => {
            tracing::warn!(%error, claims = numbers.len(), "claims not renewed; trying again");
            numbers.iter().map(|_| None).collect()
        }
        Err(_) => numbers.iter().map(|_| None).collect(),
    };
    let mut state = shared.lock();
    for (number, result) in numbers.into_iter().zip(results) {
        let Some(kept) = state.claims.get_mut(&number) else { continue };
        kept.renewing = false;
        match result {
            Some(Ok(remaining)) => {
                kept.lapses_at = sent + Duration::from_millis(remaining.lease_ms).min(kept.lease);
                kept.renew_at = sent + kept.lease / 3;
            }
            Some(Err(error)) => {
                tracing::warn!(id = %kept.id, %error, "claim lost; stopping its request");
                kept.lost.send_replace(true);
            }
            None => kept.renew_at = Instant::now() + kept.lease / 10,
        }
    }
}
