//! Hints between the processes of one store: "these keys have changed, look again". A hint may be lost or late; a process that
//! waits also looks by itself from time to time.
//!
//! Hints travel by NOTIFY, in a transaction of their own and at most every [`PAUSE`]: a transaction that notifies takes one
//! lock of the whole server when it commits, so none that does work may do so. A process listens only once it waits for
//! something.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::broadcast;
use tokio::task::AbortHandle;

use crate::error::Access;
use crate::pool::Pool;

const CHANNEL: &str = "hapax";
/// Minimum time between two notifications of a process.
const PAUSE: Duration = Duration::from_millis(50);
/// Keys in one notification. With more, every waiting call looks again. A payload has less than 8,000 bytes.
const KEYS_MAX: usize = 400;
/// Hints that a slow subscriber may lag behind.
const LAG_MAX: usize = 64;
/// Time before the listening connection is opened again.
const RECONNECT: Duration = Duration::from_millis(500);

/// What a hint is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    /// Entries of the ledger, by the first 8 bytes of their hash.
    Ledger,
    /// Queues, by their number.
    Queues,
    /// Outboxes; the key means nothing.
    Outbox,
}

impl Topic {
    const ALL: [Self; 3] = [Self::Ledger, Self::Queues, Self::Outbox];

    fn letter(self) -> &'static str {
        match self {
            Self::Ledger => "l",
            Self::Queues => "q",
            Self::Outbox => "o",
        }
    }

    fn of(letter: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|topic| topic.letter() == letter)
    }
}

/// A hint from another process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hint {
    pub topic: Topic,
    /// The keys that have changed; `None`: any may have.
    pub keys: Option<Vec<u64>>,
}

#[derive(Default)]
struct Unsent {
    keys: BTreeSet<(Topic, u64)>,
    /// A task is sending, and will send these too.
    sending: bool,
}

struct Inner {
    pool: Pool,
    listen: Option<PgConnectOptions>,
    /// Tells our own notifications from those of others.
    process: u64,
    unsent: Mutex<Unsent>,
    heard: broadcast::Sender<Hint>,
    listens: AtomicBool,
    listener: Mutex<Option<AbortHandle>>,
}

/// Sends and receives hints.
#[derive(Clone)]
pub(crate) struct Hints {
    inner: Arc<Inner>,
}

impl Hints {
    pub fn new(pool: Pool, listen: Option<PgConnectOptions>) -> Self {
        let (heard, _) = broadcast::channel(LAG_MAX);
        let (unsent, listens, listener) = (Mutex::default(), AtomicBool::new(false), Mutex::default());
        let process = fastrand::u64(..);
        Self { inner: Arc::new(Inner { pool, listen, process, unsent, heard, listens, listener }) }
    }

    /// Tells the other processes that these keys have changed. Returns at once.
    pub fn publish(&self, topic: Topic, keys: impl IntoIterator<Item = u64>) {
        if self.inner.listen.is_none() {
            return;
        }
        let mut unsent = self.inner.unsent();
        unsent.keys.extend(keys.into_iter().map(|key| (topic, key)));
        if !unsent.sending && !unsent.keys.is_empty() {
            unsent.sending = true;
            let inner = self.inner.clone();
            self.inner.pool.runtime().spawn(async move { inner.send().await });
        }
    }

    /// Receives the hints of other processes from now on. The first call opens the connection that listens.
    pub fn subscribe(&self) -> broadcast::Receiver<Hint> {
        let receiver = self.inner.heard.subscribe();
        let mut listener = self.inner.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if let (None, Some(options)) = (&*listener, &self.inner.listen) {
            let (inner, options) = (self.inner.clone(), options.clone());
            let task = self.inner.pool.runtime().spawn(async move { inner.listen(options).await });
            *listener = Some(task.abort_handle());
        }
        receiver
    }

    /// Whether hints arrive now. If not, changes of other processes are found by polling alone.
    pub fn is_listening(&self) -> bool {
        self.inner.listens.load(Ordering::Relaxed)
    }

    /// Stops listening.
    pub fn close(&self) {
        let listener = self.inner.listener.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = listener {
            task.abort();
        }
    }
}

impl Inner {
    fn unsent(&self) -> MutexGuard<'_, Unsent> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn send(&self) {
        loop {
            let keys = {
                let mut unsent = self.unsent();
                unsent.sending = !unsent.keys.is_empty();
                if !unsent.sending {
                    return;
                }
                std::mem::take(&mut unsent.keys)
            };
            for topic in Topic::ALL {
                let of_topic: Vec<u64> =
                    keys.iter().filter(|(of, _)| *of == topic).map(|(_, key)| *key).collect();
                if !of_topic.is_empty() {
                    self.notify(payload(self.process, topic, &of_topic)).await;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn notify(&self, payload: String) {
        let sent = self.pool.run_here("notify", Access::Read, move |connection| {
            Box::pin(async move {
                // A hint may be lost: it does not wait for the disk, and does not hold that lock meanwhile.
                let sql = "SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, $2)";
                let notify = sqlx::query(sql).bind(CHANNEL).bind(payload);
                notify.execute(connection).await?;
                Ok(())
            })
        });
        if let Err(error) = sent.await {
            tracing::debug!(%error, "a hint to other processes was not sent; they find the change by polling");
        }
    }

    /// Listens until it is aborted.
    async fn listen(&self, options: PgConnectOptions) {
        loop {
            let ended = self.listen_once(&options).await;
            self.listens.store(false, Ordering::Relaxed);
            if let Err(error) = ended {
                tracing::debug!(%error, "the connection that listens for changes broke; it is opened again");
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }

    async fn listen_once(&self, options: &PgConnectOptions) -> Result<(), sqlx::Error> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .max_lifetime(None)
            .idle_timeout(None)
            .acquire_timeout(self.pool.bounds().connect)
            .connect_lazy_with(options.clone());
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.listen(CHANNEL).await?;
        self.listens.store(true, Ordering::Relaxed);
        // What changed before we listened.
        for topic in Topic::ALL {
            let _ = self.heard.send(Hint { topic, keys: None });
        }
        while let Some(notification) = listener.try_recv().await? {
            if let Some(hint) = read(self.process, notification.payload()) {
                // No subscriber is left if this fails.
                let _ = self.heard.send(hint);
            }
        }
        Ok(())
    }
}

/// `process topic keys`, the keys in hexadecimal with commas, or `*`.
fn payload(process: u64, topic: Topic, keys: &[u64]) -> String {
    let keys = if keys.len() > KEYS_MAX {
        "*".to_owned()
    } else {
        keys.iter().map(|key| format!("{key:x}")).collect::<Vec<_>>().join(",")
    };
    format!("{process:x} {} {keys}", topic.letter())
}

/// The hint in a payload; `None` if it is our own or not a hint.
fn read(process: u64, payload: &str) -> Option<Hint> {
    let mut parts = payload.split(' ');
    let (from, topic, keys) = (parts.next()?, Topic::of(parts.next()?)?, parts.next()?);
    if u64::from_str_radix(from, 16).ok()? == process {
        return None;
    }
    let parse = |key| u64::from_str_radix(key, 16);
    // A payload that cannot be read is a newer process's: look at everything.
    Some(Hint { topic, keys: keys.split(',').map(parse).collect::<Result<_, _>>().ok() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_read_as_it_was_sent() {
        let keys: Vec<u64> = (0..KEYS_MAX as u64).map(|n| u64::MAX - n).collect();
        let sent = payload(7, Topic::Ledger, &keys);
        assert!(sent.len() < 8_000, "{}", sent.len());
        assert_eq!(read(8, &sent), Some(Hint { topic: Topic::Ledger, keys: Some(keys.clone()) }));
        assert_eq!(read(7, &sent), None, "our own");
        let many = payload(7, Topic::Queues, &[&keys[..], &[1]].concat());
        assert_eq!(read(8, &many), Some(Hint { topic: Topic::Queues, keys: None }));
        for foreign in ["", "7", "7 l", "x l 1", "8 z 1"] {
            assert_eq!(read(1, foreign), None, "{foreign:?}");
        }
    }
}
