//! Tags of queues.

use super::super::error::{Result, SqsError};
use super::super::model::{OnQueue, TagQueue, Text, UntagQueue};
use super::super::output::Output;
use super::{Caller, Operations};

const TAGS_MAX: usize = 50;

impl Operations {
    pub(super) async fn list_queue_tags(&self, caller: &Caller<'_>, request: &OnQueue<'_>) -> Result<Output> {
        let queue = self.queue(caller, "ListQueueTags", request.queue_url.as_ref())?;
        Ok(Output::Tags(self.store.queue(&queue).await?.config.tags))
    }

    pub(super) async fn tag_queue(&self, caller: &Caller<'_>, request: &TagQueue<'_>) -> Result<Output> {
        let queue = self.queue(caller, "TagQueue", request.queue_url.as_ref())?;
        let tags = request.tags.as_ref().filter(|tags| !tags.is_empty());
        let tags = tags.ok_or_else(|| SqsError::missing("Tags"))?;
        self.change(&queue, |config| {
            for (key, value) in tags {
                let length = key.chars().count();
                if !(1..=128).contains(&length) || value.0.chars().count() > 256 {
                    return Err(SqsError::invalid(
                        "Tag keys have 1 to 128 characters, tag values at most 256.",
                    ));
                }
                config.tags.insert(key.clone(), value.0.clone());
            }
            if config.tags.len() > TAGS_MAX {
                return Err(SqsError::invalid(format!("Too many tags added for queue {queue}.")));
            }
            Ok(())
        })
        .await?;
        Ok(Output::Empty)
    }

    pub(super) async fn untag_queue(&self, caller: &Caller<'_>, request: &UntagQueue<'_>) -> Result<Output> {
        let queue = self.queue(caller, "UntagQueue", request.queue_url.as_ref())?;
        let keys = request.tag_keys.as_ref().ok_or_else(|| SqsError::missing("TagKeys"))?;
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
