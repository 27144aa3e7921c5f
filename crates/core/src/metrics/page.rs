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
    // Each queue has the same metrics in the same order, so the next sample most often belongs to the next family.
    let mut next = 0;
    for sample in samples {
        let is_its_own = |(metric, _): &(&'static Metric, Vec<&Sample>)| metric.name == sample.metric.name;
        let found = if families.get(next).is_some_and(is_its_own) {
            Some(next)
        } else {
            families.iter().position(is_its_own)
        };
        let at = found.unwrap_or(families.len());
        match families.get_mut(at) {
            Some((_, values)) => values.push(sample),
            None => families.push((sample.metric, vec![sample])),
        }
        next = at + 1;
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
        text.push(open);
        text.push_str(name);
        text.push_str("=\"");
        push_escaped(text, value);
        text.push('"');
    }
    if !sample.labels.is_empty() {
        text.push('}');
    }
    let _ = match sample.metric.unit {
        Unit::Items | Unit::Bytes => writeln!(text, " {}", sample.value),
        Unit::Milliseconds => writeln!(text, " {}", sample.in_base_unit()),
    };
}

/// Adds the value of a label. Most have nothing to escape.
fn push_escaped(text: &mut String, value: &str) {
    if !value.contains(['\\', '"', '\n']) {
        return text.push_str(value);
    }
    for c in value.chars() {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
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
    fn each_value_is_with_its_metric_also_if_a_queue_has_fewer() {
        let oldest_sent_ms = Some(1_000);
        let samples: Vec<Sample> = [("a", oldest_sent_ms), ("b", None), ("c", oldest_sent_ms)]
            .into_iter()
            .flat_map(|(queue, oldest_sent_ms)| {
                QueueStats { ready: 1, oldest_sent_ms, ..QueueStats::default() }.samples(&[queue])
            })
            .collect();
        let page = page(&samples);
        assert_eq!(page.lines().filter(|line| !line.starts_with('#')).count(), samples.len());
        for family in page.split("# HELP ").skip(1) {
            let name = family.split(' ').next().unwrap();
            let mut values = family.lines().skip(2);
            assert!(values.all(|line| line.split('{').next() == Some(name)), "{family}");
        }
        assert!(
            page.contains(
                "_seconds{queue=\"a\"} 1\nhapax_queue_oldest_sent_timestamp_seconds{queue=\"c\"} 1\n"
            )
        );
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
