//! Counters and gauges: declared once, with name, help, unit, labels and keeper, and read alike from the store, a worker
//! and the HTTP layer.
//!
//! [`metrics!`](crate::metrics!) declares a struct of values: the comment of a field is its help text. The numbers of a
//! process, which many threads count, are declared by [`process_counters!`](crate::process_counters!), which makes the
//! atomic cells as well. Either way [`Metrics::samples`] gives what a page of metrics shows.
//!
//! ```
//! use hapax_core::metrics::{KeptBy, Metrics as _};
//!
//! hapax_core::process_counters! {
//!     /// What a gate has done since it was made.
//!     #[derive(Debug, Clone, Copy, PartialEq, Eq)]
//!     pub struct GateCounts, counted by struct GateCells, is "demo_gate", labels ["gate"];
//!     /// Requests that passed.
//!     passed,
//!     /// Requests that were refused.
//!     refused,
//! }
//!
//! let cells = GateCells::default();
//! cells.passed.add();
//! let counts = cells.read();
//! assert_eq!((counts.passed, counts.refused), (1, 0));
//!
//! let samples = counts.samples(&["north"]);
//! assert_eq!(samples.len(), 2, "each declared metric, counted or not");
//! assert_eq!(samples[0].metric.name, "demo_gate_passed_total");
//! assert_eq!(samples[0].metric.help, "Requests that passed.");
//! assert_eq!((&samples[0].labels[..], samples[0].value), (&[("gate", "north".to_owned())][..], 1));
//! assert_eq!(samples[0].metric.kept_by, KeptBy::Process);
//! ```

mod page;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::StoreError;
use crate::ledger::Ledger;
use crate::name::QueueName;
use crate::store::QueueAdmin;

pub use self::page::{CONTENT_TYPE, page};

/// What is declared about one metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name, unique in the whole product; that of a counter ends in `_total`.
    pub name: &'static str,
    /// One sentence about it.
    pub help: &'static str,
    /// How it moves.
    pub kind: Kind,
    /// What its value counts.
    pub unit: Unit,
    /// Whose number it is.
    pub kept_by: KeptBy,
    /// The names of its labels; each takes few values.
    pub labels: &'static [&'static str],
}

/// How a metric moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows, from 0 when its keeper was opened or built.
    Counter,
    /// It grows and shrinks.
    Gauge,
}

/// What a metric's value counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Things: messages, deliveries, requests.
    Items,
    /// Bytes.
    Bytes,
    /// Milliseconds, as a duration or since 1970. A page of metrics shows seconds, see [`Sample::in_base_unit`].
    Milliseconds,
}

/// Whose number a metric is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeptBy {
    /// This process counted what it did itself; the numbers of several processes are added up.
    Process,
    /// The store answered it; whether it covers all processes is in
    /// [`Capabilities::counters`](crate::Capabilities::counters). The numbers of several processes are not added up.
    Store,
}

/// One value of one metric.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// What is declared about it.
    pub metric: &'static Metric,
    /// Its labels, in the order of the declaration.
    pub labels: Vec<(&'static str, String)>,
    /// Its value, in the unit of the declaration.
    pub value: u64,
}

impl Sample {
    /// The value as a page of metrics shows it: seconds instead of milliseconds.
    pub fn in_base_unit(&self) -> f64 {
        match self.metric.unit {
            Unit::Items | Unit::Bytes => self.value as f64,
            Unit::Milliseconds => self.value as f64 / 1000.0,
        }
    }
}

/// Values whose names, help, units and labels are declared.
pub trait Metrics {
    /// Every metric that is declared, in order.
    fn table() -> Vec<&'static Metric>;

    /// The values beside [`table`](Self::table); `None` where there is nothing to show now.
    fn values(&self) -> Vec<Option<u64>>;

    /// What is to be shown: each metric that has a value, under the given values of its labels.
    ///
    /// # Panics
    /// If there are not as many values as labels were declared.
    fn samples(&self, labels: &[&str]) -> Vec<Sample> {
        let sample = |(metric, value): (&'static Metric, Option<u64>)| {
            assert_eq!(metric.labels.len(), labels.len(), "the labels of {}", metric.name);
            let labels = metric.labels.iter().zip(labels).map(|(name, value)| (*name, (*value).to_owned()));
            value.map(|value| Sample { metric, labels: labels.collect(), value })
        };
        Self::table().into_iter().zip(self.values()).filter_map(sample).collect()
    }
}

/// Everything that a store counts: the store as a whole, each of its queues, and the ledger if it is asked for.
///
/// A queue that is deleted meanwhile is left out, and so are figures of the whole store that the
/// caller's key may not see.
pub async fn of_store(
    store: &dyn QueueAdmin,
    ledger: Option<&dyn Ledger>,
) -> Result<Vec<Sample>, StoreError> {
    let whole = store.status().await?;
    let mut samples = if whole.withheld { Vec::new() } else { whole.samples(&[]) };
    samples.extend(of_queues(store, &|_| true).await?);
    if let Some(ledger) = ledger {
        samples.extend(ledger.ledger_stats().await?.samples(&[]));
    }
    Ok(samples)
}

/// What a store counts of those queues that `shows` accepts; a queue that is deleted meanwhile is left out.
pub async fn of_queues(
    store: &dyn QueueAdmin,
    shows: &(dyn Fn(&QueueName) -> bool + Sync),
) -> Result<Vec<Sample>, StoreError> {
    let queues = store.queues().await?.into_iter();
    let names: Vec<QueueName> = queues.map(|queue| queue.name).filter(|name| shows(name)).collect();
    let mut samples = Vec::new();
    for (name, stats) in names.iter().zip(store.stats_of(&names).await?) {
        if let Some(stats) = stats {
            samples.extend(stats.samples(&[name.as_str()]));
        }
    }
    Ok(samples)
}

/// What is wrong with a table of metrics, as sentences: names that are taken twice or badly formed, help that is no
/// sentence. For tests of those who declare some.
pub fn table_problems(table: &[&'static Metric]) -> Vec<String> {
    let mut faults = Vec::new();
    for (at, metric) in table.iter().enumerate() {
        let Metric { name, help, kind, .. } = metric;
        if table[..at].iter().any(|other| other.name == *name) {
            faults.push(format!("{name} is declared twice"));
        }
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_') {
            faults.push(format!("{name} is not made of lower-case letters and underscores"));
        }
        if (*kind == Kind::Counter) != name.ends_with("_total") {
            faults.push(format!("{name}: a counter ends in `_total`, a gauge does not"));
        }
        if help.is_empty() || !help.ends_with('.') {
            faults.push(format!("{name}: its help is not a sentence: {help:?}"));
        }
    }
    faults
}

/// A counter that many threads count.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts one.
    pub fn add(&self) {
        self.add_many(1);
    }

    /// Counts some.
    pub fn add_many(&self, many: usize) {
        self.0.fetch_add(many as u64, Ordering::Relaxed);
    }

    /// The count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The type of a declared field.
pub trait MetricValue {
    /// Its value, if there is one now.
    fn metric_value(&self) -> Option<u64>;
}

impl MetricValue for u64 {
    fn metric_value(&self) -> Option<u64> {
        Some(*self)
    }
}

impl MetricValue for Option<u64> {
    fn metric_value(&self) -> Option<u64> {
        *self
    }
}

/// Declares a struct of metrics.
///
/// Each field is a `counter` or a `gauge`; its comment is its help text. Its metric is named after prefix and field, or as
/// the parentheses say, which give the unit too. Fields that are no metrics go under `plain`, structs of further metrics
/// with the same labels under `nested`.
///
/// ```
/// use hapax_core::metrics::Metrics as _;
///
/// hapax_core::metrics! {
///     /// What waits in a tray.
///     #[derive(Debug, Default)]
///     pub struct Tray is "demo_tray", kept by Store, labels [];
///     plain {
///         /// Why it is closed, if it is.
///         pub closed: Option<String>,
///     }
///     nested {}
///     /// Sheets in it.
///     gauge sheets,
///     /// When the oldest sheet was put there.
///     gauge oldest_ms("oldest_timestamp_seconds", Milliseconds): Option<u64>,
///     /// Sheets that were ever put there.
///     counter put,
/// }
///
/// let tray = Tray { sheets: 2, put: 7, ..Tray::default() };
/// let shown: Vec<_> = tray.samples(&[]).iter().map(|sample| (sample.metric.name, sample.value)).collect();
/// assert_eq!(shown, [("demo_tray_sheets", 2), ("demo_tray_put_total", 7)]);
/// ```
#[macro_export]
macro_rules! metrics {
    (
        $(#[$outer:meta])*
        $vis:vis struct $name:ident is $prefix:literal, kept by $keeper:ident, labels $labels:tt;
        plain { $($(#[$plain_meta:meta])* pub $plain:ident : $plain_type:ty),* $(,)? }
        nested { $($(#[$nested_meta:meta])* pub $nested:ident : $nested_type:ty),* $(,)? }
        $(
            $(#[doc = $help:literal])+
            $kind:ident $field:ident $(($metric:literal, $unit:ident))? $([$meta:meta])? $(: $type:ty)?
        ),+ $(,)?
    ) => {
        $(#[$outer])*
        $vis struct $name {
            $($(#[$plain_meta])* pub $plain: $plain_type,)*
            $($(#[doc = $help])+ $(#[$meta])? pub $field: $crate::metrics!(@type $($type)?),)+
            $($(#[$nested_meta])* pub $nested: $nested_type,)*
        }

        impl $crate::metrics::Metrics for $name {
            fn table() -> Vec<&'static $crate::metrics::Metric> {
                static TABLE: &[$crate::metrics::Metric] = &[$($crate::metrics::Metric {
                    name: $crate::metrics!(@name $kind $prefix $field $($metric)?),
                    help: concat!($($help),+).trim_ascii(),
                    kind: $crate::metrics!(@kind $kind),
                    unit: $crate::metrics!(@unit $($unit)?),
                    kept_by: $crate::metrics::KeptBy::$keeper,
                    labels: &$labels,
                }),+];
                #[allow(unused_mut, reason = "not every struct has others inside")]
                let mut table: Vec<_> = TABLE.iter().collect();
                $(table.extend(<$nested_type as $crate::metrics::Metrics>::table());)*
                table
            }

            fn values(&self) -> Vec<Option<u64>> {
                #[allow(unused_mut, reason = "not every struct has others inside")]
                let mut values = vec![$($crate::metrics::MetricValue::metric_value(&self.$field)),+];
                $(values.extend($crate::metrics::Metrics::values(&self.$nested));)*
                values
            }
        }
    };
    (@type) => { u64 };
    (@type $type:ty) => { $type };
    (@kind counter) => { $crate::metrics::Kind::Counter };
    (@kind gauge) => { $crate::metrics::Kind::Gauge };
    (@unit) => { $crate::metrics::Unit::Items };
    (@unit $unit:ident) => { $crate::metrics::Unit::$unit };
    (@name counter $prefix:literal $field:ident) => { concat!($prefix, "_", stringify!($field), "_total") };
    (@name gauge $prefix:literal $field:ident) => { concat!($prefix, "_", stringify!($field)) };
    (@name $kind:ident $prefix:literal $field:ident $metric:literal) => { concat!($prefix, "_", $metric) };
}

/// Declares counters that this process keeps: the struct of values, as [`metrics!`](crate::metrics!) makes it, and the
/// atomic cells that are counted, with a method `read` that gives the values.
#[macro_export]
macro_rules! process_counters {
    (
        $(#[$outer:meta])*
        $vis:vis struct $name:ident, counted by $cells_vis:vis struct $cells:ident, is $prefix:literal,
        labels $labels:tt;
        $($(#[doc = $help:literal])+ $field:ident),+ $(,)?
    ) => {
        $crate::metrics! {
            $(#[$outer])*
            $vis struct $name is $prefix, kept by Process, labels $labels;
            plain {}
            nested {}
            $($(#[doc = $help])+ counter $field),+
        }

        #[doc = concat!("The cells of [`", stringify!($name), "`], which many threads count.")]
        #[derive(Debug, Default)]
        $cells_vis struct $cells {
            $($(#[doc = $help])+ pub $field: $crate::metrics::Counter,)+
        }

        impl $cells {
            /// The values.
            $cells_vis fn read(&self) -> $name {
                $name { $($field: self.$field.get(),)+ }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::LedgerStats;
    use crate::store::{QueueStats, StoreStatus};

    #[test]
    fn the_tables_of_a_store_are_sound() {
        let table: Vec<_> =
            [StoreStatus::table(), QueueStats::table(), LedgerStats::table()].into_iter().flatten().collect();
        assert_eq!(table_problems(&table), Vec::<String>::new());
        assert!(table.iter().all(|metric| metric.kept_by == KeptBy::Store));
    }

    #[test]
    fn a_bad_metric_table_is_detected() {
        let good = Metric {
            name: "demo_total",
            help: "Something.",
            kind: Kind::Counter,
            unit: Unit::Items,
            kept_by: KeptBy::Process,
            labels: &[],
        };
        let leak = |metric: Metric| -> &'static Metric { Box::leak(Box::new(metric)) };
        assert_eq!(table_problems(&[leak(good)]), Vec::<String>::new());
        for bad in [
            Metric { kind: Kind::Gauge, ..good },
            Metric { name: "demo", ..good },
            Metric { name: "Demo_total", ..good },
            Metric { help: "", ..good },
            Metric { help: "something", ..good },
        ] {
            assert_eq!(table_problems(&[leak(bad)]).len(), 1, "{bad:?}");
        }
        assert_eq!(table_problems(&[leak(good), leak(good)]), ["demo_total is declared twice"]);
    }

    /// What JSON shows of a queue is what its metrics show: no field is forgotten.
    #[test]
    fn every_number_of_a_queue_and_of_the_ledger_is_a_sample() {
        let leaves = |value: serde_json::Value| {
            fn count(value: &serde_json::Value) -> usize {
                value.as_object().map_or(1, |fields| fields.values().map(count).sum())
            }
            count(&value)
        };
        let queue = QueueStats { oldest_sent_ms: Some(5), ..QueueStats::default() };
        let samples = queue.samples(&["jobs"]);
        assert_eq!(samples.len(), leaves(serde_json::to_value(queue).unwrap()));
        let oldest = samples.iter().find(|sample| sample.metric.unit == Unit::Milliseconds).unwrap();
        assert!((oldest.in_base_unit() - 0.005).abs() < 1e-9, "seconds");
        let ledger = LedgerStats::default();
        assert_eq!(ledger.samples(&[]).len(), leaves(serde_json::to_value(ledger).unwrap()));
    }

    #[test]
    #[should_panic(expected = "the labels of hapax_queue_ready")]
    fn a_forgotten_label_is_a_mistake() {
        QueueStats::default().samples(&[]);
    }
}
