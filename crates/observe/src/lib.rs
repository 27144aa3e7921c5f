//! What happens to messages and keys in a store, observed on the path of every call.
//!
//! [`ObservedStore`] stands before any store and passes every call on. From requests and answers it keeps, in this process,
//!
//! | what | where | bounded by |
//! |---|---|---|
//! | figures of each queue: redeliveries by cause, late settles, how long deliveries are held | [`figures`] | 10,000 queues |
//! | the *life* of each message and key to which something happened: delivered again, replayed, refused, parked, dead | [`life`] | 20,000 lives, 50 events each, 200,000 in all |
//!
//! Lives are also written to the store's documents (`history/…`, [`kept`]), where other processes find them: at most 64
//! documents of 48 KiB, those with the oldest events dropped first, and nothing older than seven days. A message that was
//! delivered once and acked leaves nothing, but for one in a thousand.
//!
//! [`mod@trace`] makes spans of sampled messages. [`story`] explains a life: why a message ran twice, or why it did not. [`advice`] turns figures into findings.

pub mod advice;
pub mod figures;
pub mod kept;
pub mod life;
mod observed;
mod observer;
mod record;
pub mod story;
pub mod trace;

pub use advice::{Advice, Located};
pub use life::{Event, Life, Moment, Subject};
pub use observed::ObservedStore;
pub use observer::Observer;
pub use story::Story;
