//! A page of metrics in Prometheus's text format, version 0.0.4.
//!
//! The format is a few lines of text, and this is all of it that counters and gauges need. A library for it would want to
//! hold the values itself; here they come from the store when the page is asked for.

use std::fmt::Write as _;

use super::{KeptBy, Kind, Metric, Sample, Unit};

/// The content type of [`page`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The samples as a page that Prometheus reads: each metric once, with its help, then all its values.
///
/// ```
/// use hapax_core::QueueStats;
/// use hapax_core::metrics::{Metrics as _, page};
///
/// let stats = QueueStats { ready: 3, ..QueueStats::default() };
/// let page = page(&stats.samples(&["jobs"]));
/// assert!(page.contains("TYPE hapax_queue_ready gauge\nhapax_queue_ready{queue=\"jobs\"} 3\n"));
/// ```
pub fn page(samples: &[Sample]) -> String {
    // All values of a metric have to follow its head; samples come queue by queue.
    let mut families: Vec<(&'static Metric, Vec<&Sample>)> = Vec::new();
    for sample in samples {
        match families.iter_mut().find(|(metric, _)| metric.name == sample.metric.name) {
            Some((_, values)) => values.push(sample),
            None => families.push((sample.metric, vec![sample])),
        }
    }
    let mut text = String::with_capacity(samples.len() * 64);
    for (metric, values) in families {
        let kind = match metric.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let keeper = match metric.kept_by {
            KeptBy::Process => "Kept by this process.",
            KeptBy::Store => "Kept by the store.",
        };
        let help = metric.help.replace('\\', "\\\\").replace('\n', "\\n");
        let _ = writeln!(text, "# HELP {} {help} {keeper}", metric.name);
        let _ = writeln!(text, "# TYPE {} {kind}", metric.name);
        for sample in values {
            write_sample(&mut text, sample);
        }
    }
    text
}

fn write_sample(text: &mut String, sample: &Sample) {
    text.push_str(sample.metric.name);
    for (at, (name, value)) in sample.labels.iter().enumerate() {
        let open = if at == 0 { '{' } else { ',' };
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let _ = write!(text, "{open}{name}=\"{value}\"");
    }
    if !sample.labels.is_empty() {
        text.push('}');
    }
    let _ = match sample.metric.unit {
        Unit::Items | Unit::Bytes => writeln!(text, " {}", sample.value),
        Unit::Milliseconds => writeln!(text, " {}", sample.in_base_unit()),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics as _;
    use crate::store::QueueStats;

    #[test]
    fn values_of_one_metric_follow_its_head_whatever_their_order() {
        let stats = |ready| QueueStats { ready, ..QueueStats::default() };
        let samples = [stats(1).samples(&["a"]), stats(2).samples(&["b"])].concat();
        let page = page(&samples);
        assert!(
            page.contains("gauge\nhapax_queue_ready{queue=\"a\"} 1\nhapax_queue_ready{queue=\"b\"} 2\n#")
        );
        let heads: Vec<_> = page.lines().filter(|line| line.starts_with("# TYPE")).collect();
        assert_eq!(heads.len(), QueueStats::table().len() - 1, "each once; there is no oldest message");
        assert!(heads.contains(&"# TYPE hapax_queue_sent_total counter"));
    }

    #[test]
    fn labels_are_escaped_and_times_are_seconds() {
        let stats = QueueStats { oldest_sent_ms: Some(1_794_848_657_516), ..QueueStats::default() };
        let page = page(&stats.samples(&["a\"b\\c\nd"]));
        let oldest = page.lines().find(|line| line.starts_with("hapax_queue_oldest")).unwrap();
        assert_eq!(
            oldest,
            "hapax_queue_oldest_sent_timestamp_seconds{queue=\"a\\\"b\\\\c\\nd\"} 1794848657.516"
        );
    }
}
