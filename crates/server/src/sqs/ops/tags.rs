//! Tags of queues.

use hapax_core::{QueueConfig, QueueName};

use super::super::error::{Result, SqsError};
use super::super::model::{QueueOnly, Settings, TagQueue, Text, UntagQueue};
use super::super::output::Output;
use super::{CallContext, Operations};

const TAGS_MAX: usize = 50;

fn check_key(key: &str) -> Result<()> {
    if (1..=128).contains(&key.chars().count()) {
        return Ok(());
    }
    Err(SqsError::invalid("Tag keys must be between 1 and 128 characters in length."))
}

/// Adds tags to a queue.
pub(super) fn add(config: &mut QueueConfig, queue: &QueueName, tags: &Settings) -> Result<()> {
    for (key, value) in tags {
        check_key(key)?;
        if value.0.chars().count() > 256 {
            return Err(SqsError::invalid("Tag values must be between 0 and 256 characters in length."));
        }
        config.tags.insert(key.clone(), value.0.clone());
    }
    if config.tags.len() > TAGS_MAX {
        return Err(SqsError::invalid(format!("Too many tags added for queue {queue}.")));
    }
    Ok(())
}

impl Operations {
    pub(super) async fn list_queue_tags(
        &self,
        context: &CallContext<'_>,
        request: &QueueOnly<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "ListQueueTags", request.queue_url.as_ref())?;
        Ok(Output::Tags(self.store.queue(&queue).await?.config.tags))
    }

    pub(super) async fn tag_queue(
        &self,
        context: &CallContext<'_>,
        request: &TagQueue<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "TagQueue", request.queue_url.as_ref())?;
        let tags = request.tags.as_ref().filter(|tags| !tags.is_empty());
        let tags = tags.ok_or_else(|| SqsError::missing("Tags"))?;
        self.change(&queue, |config| add(config, &queue, tags)).await?;
        Ok(Output::Empty)
    }

    pub(super) async fn untag_queue(
        &self,
        context: &CallContext<'_>,
        request: &UntagQueue<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "UntagQueue", request.queue_url.as_ref())?;
        let keys = request.tag_keys.as_ref().ok_or_else(|| SqsError::missing("TagKeys"))?;
        keys.iter().map(Text::as_str).chain(keys.is_empty().then_some("")).try_for_each(check_key)?;
        self.change(&queue, |config| {
            for key in keys.iter().map(Text::as_str) {
                config.tags.remove(key);
            }
            Ok(())
        })
        .await?;
        Ok(Output::Empty)
    }
}
