//! The SQS actions, implemented on the store.

mod batch;
mod moves;
mod permissions;
mod queues;
mod receive;
mod send;
mod settle;
mod tags;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use hapax_core::{QueueAdmin, QueueName};
use hapax_net::connection::Peer;
use hapax_net::listen::Shutdown;
use hapax_net::tracker::ConnectionBudget;

use super::error::{ErrorKind, Result, SqsError};
use super::model::{Call, Text};
use super::names::{Names, queue_of};
use super::output::Output;
use crate::auth::Identity;
use crate::config::SqsConfig;

/// The caller, and the name by which it reached the server.
pub(crate) struct CallContext<'a> {
    pub(crate) identity: Identity,
    pub(crate) peer: Peer,
    pub(crate) budget: &'a ConnectionBudget,
    pub(crate) host: &'a str,
    /// The queue in the request's path.
    pub(crate) path_queue: Option<&'a str>,
    /// The header `X-Amzn-Trace-Id`.
    pub(crate) trace: Option<&'a str>,
}

/// Executes actions.
pub(crate) struct Operations {
    names: Names,
    store: Arc<dyn QueueAdmin>,
    shutdown: Shutdown,
    purge_interval_ms: u64,
    recreate_interval_ms: u64,
}

impl Operations {
    pub(crate) fn new(
        config: &SqsConfig,
        names: Names,
        store: Arc<dyn QueueAdmin>,
        shutdown: Shutdown,
    ) -> Self {
        Self {
            names,
            store,
            shutdown,
            purge_interval_ms: config.purge_interval_ms,
            recreate_interval_ms: config.recreate_interval_ms,
        }
    }

    pub(crate) async fn call(&self, context: &CallContext<'_>, call: Call<'_>) -> Result<Output> {
        match call {
            Call::SendMessage(request) => self.send_message(context, &request).await,
            Call::ReceiveMessage(request) => self.receive_message(context, &request).await,
            Call::DeleteMessage(request) => self.delete_message(context, &request).await,
            Call::SendMessageBatch(request) => self.send_message_batch(context, &request).await,
            Call::DeleteMessageBatch(request) => self.delete_message_batch(context, &request).await,
            Call::ChangeMessageVisibility(request) => self.change_visibility(context, &request).await,
            Call::ChangeMessageVisibilityBatch(request) => {
                self.change_visibility_batch(context, &request).await
            }
            Call::CreateQueue(request) => self.create_queue(context, &request).await,
            Call::DeleteQueue(request) => self.delete_queue(context, &request).await,
            Call::GetQueueAttributes(request) => self.get_queue_attributes(context, &request).await,
            Call::GetQueueUrl(request) => self.get_queue_url(context, &request).await,
            Call::ListDeadLetterSourceQueues(request) => self.list_sources(context, &request).await,
            Call::ListQueues(request) => self.list_queues(context, &request).await,
            Call::PurgeQueue(request) => self.purge_queue(context, &request).await,
            Call::SetQueueAttributes(request) => self.set_queue_attributes(context, &request).await,
            Call::ListQueueTags(request) => self.list_queue_tags(context, &request).await,
            Call::TagQueue(request) => self.tag_queue(context, &request).await,
            Call::UntagQueue(request) => self.untag_queue(context, &request).await,
            Call::AddPermission(request) => self.add_permission(context, &request).await,
            Call::RemovePermission(request) => self.remove_permission(context, &request).await,
            Call::StartMessageMoveTask(request) => self.start_move(context, &request).await,
            Call::ListMessageMoveTasks(request) => self.list_moves(context, &request).await,
            Call::CancelMessageMoveTask(request) => self.cancel_move(context, &request).await,
        }
    }

    /// The queue that a request names, if the caller may do `action` on it. A batch needs the right for the single
    /// action, as in IAM.
    fn queue(&self, context: &CallContext<'_>, action: &str, url: Option<&Text<'_>>) -> Result<QueueName> {
        let queue = queue_of(url, context.path_queue)?;
        self.authorize(context, action, Some(&queue))?;
        Ok(queue)
    }

    fn authorize(&self, context: &CallContext<'_>, action: &str, queue: Option<&QueueName>) -> Result<()> {
        if context.identity.may(action, queue.map(QueueName::as_str)) {
            return Ok(());
        }
        let (user, verb) = (context.identity.name(), action.to_ascii_lowercase());
        let account = &self.names.account;
        let resource = queue.map_or_else(|| "*".to_owned(), |queue| self.names.arn(queue));
        Err(SqsError::new(
            ErrorKind::AccessDenied,
            format!(
                "User: arn:aws:iam::{account}:user/{user} is not authorized to perform: sqs:{verb} on resource: \
                 {resource} because no identity-based policy allows the sqs:{verb} action"
            ),
        ))
    }
}

/// Checks that a number is within its limits.
fn in_range(parameter: &str, value: i64, min: i64, max: i64, reason: &str) -> Result<u64> {
    if (min..=max).contains(&value) {
        Ok(value as u64)
    } else {
        Err(SqsError::value(parameter, value, reason))
    }
}

/// Converts a visibility timeout to milliseconds.
fn visibility_ms(seconds: i64) -> Result<u64> {
    let reason = "Must be between 0 and 43200, if provided.";
    in_range("VisibilityTimeout", seconds, 0, 43_200, reason).map(|seconds| seconds * 1000)
}
