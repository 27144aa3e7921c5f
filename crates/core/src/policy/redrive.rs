use crate::name::{MessageId, QueueName};
use crate::store::{DeadLetter, FailureCause, RedriveFilter};

/// How a dead letter died, as far as a filter asks.
#[derive(Debug, Clone, Copy)]
pub struct DeadLetterRef<'a> {
    /// The queue that it died in.
    pub source: &'a QueueName,
    /// Why.
    pub cause: FailureCause,
    /// The last error.
    pub error: Option<&'a str>,
    /// When.
    pub died_ms: u64,
}

impl<'a> From<&'a DeadLetter> for DeadLetterRef<'a> {
    fn from(dead: &'a DeadLetter) -> Self {
        Self { source: &dead.source, cause: dead.cause, error: dead.error.as_deref(), died_ms: dead.died_ms }
    }
}

impl RedriveFilter {
    /// Whether the filter selects a message. `death` is `None` for a message that was sent to the dead-letter queue by
    /// hand: it never died, so only a filter that asks nothing of its death selects it.
    ///
    /// ```
    /// # use hapax_core::{FailureCause, MessageId, QueueName, RedriveFilter, policy::DeadLetterRef};
    /// let jobs = QueueName::new("jobs").unwrap();
    /// let death = DeadLetterRef { source: &jobs, cause: FailureCause::Retry, error: Some("timeout after 3 s"), died_ms: 7 };
    /// let filter = RedriveFilter { error_contains: Some("timeout".into()), ..RedriveFilter::default() };
    /// assert!(filter.selects(MessageId(1), Some(death)));
    /// assert!(!filter.selects(MessageId(1), None));
    /// ```
    pub fn selects(&self, id: MessageId, death: Option<DeadLetterRef<'_>>) -> bool {
        if !self.ids.is_empty() && !self.ids.contains(&id) {
            return false;
        }
        let Some(death) = death else {
            return *self == Self { ids: self.ids.clone(), ..Self::default() };
        };
        let in_error = |text: &String| death.error.is_some_and(|error| error.contains(text.as_str()));
        self.cause.is_none_or(|cause| cause == death.cause)
            && self.source.as_ref().is_none_or(|source| source == death.source)
            && (self.sources.is_empty() || self.sources.contains(death.source))
            && self.error_contains.as_ref().is_none_or(in_error)
            && self.died_from_ms.is_none_or(|from_ms| death.died_ms >= from_ms)
            && self.died_until_ms.is_none_or(|until_ms| death.died_ms < until_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_of_a_filter_selects() {
        let (jobs, other) = (QueueName::new("jobs").unwrap(), QueueName::new("other").unwrap());
        let death = DeadLetterRef {
            source: &jobs,
            cause: FailureCause::Retry,
            error: Some("no such order"),
            died_ms: 100,
        };
        let all = RedriveFilter::default;
        // The filter, whether it selects the dead letter, and whether it selects one that was sent by hand.
        let rows = [
            (all(), true, true),
            (RedriveFilter { ids: vec![MessageId(7), MessageId(8)], ..all() }, true, true),
            (RedriveFilter { ids: vec![MessageId(8)], ..all() }, false, false),
            (RedriveFilter { cause: Some(FailureCause::Retry), ..all() }, true, false),
            (RedriveFilter { cause: Some(FailureCause::Expired), ..all() }, false, false),
            (RedriveFilter { source: Some(jobs.clone()), ..all() }, true, false),
            (RedriveFilter { source: Some(other.clone()), ..all() }, false, false),
            (RedriveFilter { sources: vec![other.clone(), jobs.clone()], ..all() }, true, false),
            (RedriveFilter { sources: vec![other.clone()], ..all() }, false, false),
            (RedriveFilter { error_contains: Some("order".into()), ..all() }, true, false),
            (RedriveFilter { error_contains: Some("invoice".into()), ..all() }, false, false),
            (RedriveFilter { died_from_ms: Some(100), ..all() }, true, false),
            (RedriveFilter { died_from_ms: Some(101), ..all() }, false, false),
            (RedriveFilter { died_until_ms: Some(101), ..all() }, true, false),
            (RedriveFilter { died_until_ms: Some(100), ..all() }, false, false),
            (RedriveFilter { cause: Some(FailureCause::Retry), source: Some(other), ..all() }, false, false),
        ];
        for (filter, dead, by_hand) in rows {
            assert_eq!(filter.selects(MessageId(7), Some(death)), dead, "{filter:?}");
            assert_eq!(filter.selects(MessageId(7), None), by_hand, "{filter:?}, sent by hand");
        }
        let silent = DeadLetterRef { error: None, ..death };
        let filter = RedriveFilter { error_contains: Some(String::new()), ..all() };
        assert!(!filter.selects(MessageId(7), Some(silent)), "there is no error that could contain it");
    }
}
