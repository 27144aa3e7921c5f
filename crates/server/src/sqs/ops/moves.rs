//! Message move tasks: SQS's name for redrives.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax_core::{QueueName, RedriveFilter, RedriveRequest, RedriveState, RedriveTask, StoreError};
use serde::{Deserialize, Serialize};

use super::super::error::{ErrorKind, Result, SqsError};
use super::super::model::{
    CancelMessageMoveTask, ListMessageMoveTasks, StartMessageMoveTask, Text, required,
};
use super::super::names::queue_of_arn;
use super::super::output::{MoveTaskOutput, Output};
use super::{CallContext, Operations, in_range};

/// SQS does not report its own rate if none was requested; likewise, a task with the store's default rate shows none.
const PER_SECOND_DEFAULT: u32 = 500;

/// The content of a task handle: opaque to clients, but in the same format as AWS's.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Handle {
    task_id: String,
    source_arn: String,
}

/// A task's number as a UUID of version 7: its start time, with the number in place of random bits.
fn task_uuid(task: &RedriveTask) -> String {
    let at = u128::from(task.started_ms & 0xffff_ffff_ffff) << 80;
    let number = u128::from(task.id & 0x3fff_ffff_ffff_ffff);
    hapax_core::MessageId(at | 0x7 << 76 | 0b10 << 62 | number).to_string()
}

fn is_uuid(text: &str) -> bool {
    let groups: Vec<&str> = text.split('-').collect();
    let lengths = groups.iter().map(|group| group.len());
    lengths.eq([8, 4, 4, 4, 12]) && groups.concat().bytes().all(|b| b.is_ascii_hexdigit())
}

fn not_found(parameter: &str) -> SqsError {
    let text = format!("The resource that you specified for the {parameter} parameter doesn't exist.");
    SqsError::new(ErrorKind::ResourceNotFound, text)
}

fn arn(text: &str, parameter: &str) -> Result<QueueName> {
    queue_of_arn(text).ok_or_else(|| {
        SqsError::invalid(format!(
            "You must use this format to specify the {parameter}: \
             arn:<partition>:<service>:<region>:<account-id>:<resource-id>"
        ))
    })
}

fn status(state: RedriveState) -> &'static str {
    match state {
        RedriveState::Running => "RUNNING",
        RedriveState::Completed => "COMPLETED",
        RedriveState::Cancelled => "CANCELLED",
        RedriveState::Failed => "FAILED",
    }
}

impl Operations {
    /// The source queue of a task; it must exist.
    async fn source(&self, context: &CallContext<'_>, action: &str, text: &str) -> Result<QueueName> {
        let queue = arn(text, "SourceArn")?;
        self.authorize(context, action, Some(&queue))?;
        match self.store.queue(&queue).await {
            Ok(_) => Ok(queue),
            Err(StoreError::NoSuchQueue(_)) => Err(not_found("SourceArn")),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn start_move(
        &self,
        context: &CallContext<'_>,
        request: &StartMessageMoveTask<'_>,
    ) -> Result<Output> {
        let source = required(request.source_arn.as_ref(), "SourceArn")?;
        let from = self.source(context, "StartMessageMoveTask", source).await?;
        let sources = self.sources_of(&from).await?;
        if sources.is_empty() {
            return Err(SqsError::invalid("Source queue must be configured as a Dead Letter Queue."));
        }
        let to = match request.destination_arn.as_ref().map(Text::as_str).filter(|arn| !arn.is_empty()) {
            None => {
                // Each dead letter goes back to the queue that it came from.
                for source in &sources {
                    self.authorize(context, "SendMessage", Some(source))?;
                }
                None
            }
            Some(text) => {
                let queue = arn(text, "DestinationArn")?;
                self.authorize(context, "SendMessage", Some(&queue))?;
                match self.store.queue(&queue).await {
                    Ok(_) => Some(queue),
                    Err(StoreError::NoSuchQueue(_)) => return Err(not_found("DestinationArn")),
                    Err(error) => return Err(error.into()),
                }
            }
        };
        let rate = |rate| {
            let reason = "MaxNumberOfMessagesPerSecond must be between 1 and 500.";
            in_range("MaxNumberOfMessagesPerSecond", rate, 1, 500, reason).map(|rate| rate as u32)
        };
        let per_second = request.max_number_of_messages_per_second.map(rate).transpose()?;
        let by = context.identity.name().to_owned();
        let mut filter = RedriveFilter::default();
        if to.is_none() && !context.identity.may_operate("SendMessage") {
            // Some dead letters may come from a queue that no longer names this one and that the caller has no right
            // to.
            filter.sources = sources;
        }
        let redrive = RedriveRequest { from, to, filter, per_second, by };
        let task = self.store.start_redrive(redrive).await?;
        Ok(Output::MoveStarted(self.handle(&task)))
    }

    fn handle(&self, task: &RedriveTask) -> String {
        let handle = Handle { task_id: task_uuid(task), source_arn: self.names.arn(&task.from) };
        STANDARD.encode(serde_json::to_string(&handle).unwrap_or_default())
    }

    pub(super) async fn list_moves(
        &self,
        context: &CallContext<'_>,
        request: &ListMessageMoveTasks<'_>,
    ) -> Result<Output> {
        let source = required(request.source_arn.as_ref(), "SourceArn")?;
        let reason = "MaxResults must be between 1 and 10.";
        let max = in_range("MaxResults", request.max_results.unwrap_or(1), 1, 10, reason)?;
        let from = self.source(context, "ListMessageMoveTasks", source).await?;
        let mut tasks = self.store.redrives(&from).await?;
        tasks.retain(|task| context.identity.may_see_task(task));
        Ok(Output::Moves(tasks.iter().take(max as usize).map(|task| self.move_task_output(task)).collect()))
    }

    fn move_task_output(&self, task: &RedriveTask) -> MoveTaskOutput {
        MoveTaskOutput {
            task_handle: (task.state == RedriveState::Running).then(|| self.handle(task)),
            status: status(task.state),
            source_arn: self.names.arn(&task.from),
            destination_arn: task.to.as_ref().map(|queue| self.names.arn(queue)),
            max_number_of_messages_per_second: (task.per_second != PER_SECOND_DEFAULT)
                .then_some(task.per_second),
            approximate_number_of_messages_moved: task.moved,
            approximate_number_of_messages_to_move: task.total,
            // A task fails only if its source or target queue was deleted.
            failure_reason: task
                .failure
                .as_ref()
                .map(|_| ErrorKind::QueueDoesNotExist.wire().code.to_owned()),
            started_timestamp: task.started_ms,
        }
    }

    pub(super) async fn cancel_move(
        &self,
        context: &CallContext<'_>,
        request: &CancelMessageMoveTask<'_>,
    ) -> Result<Output> {
        let text = required(request.task_handle.as_ref(), "TaskHandle")?;
        let handle: Option<Handle> =
            STANDARD.decode(text).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let handle = handle.filter(|handle| is_uuid(&handle.task_id));
        let handle = handle.ok_or_else(|| SqsError::invalid("Value for parameter TaskHandle is invalid."))?;
        let from = self.source(context, "CancelMessageMoveTask", &handle.source_arn).await?;
        let mut tasks = self.store.redrives(&from).await?;
        tasks.retain(|task| context.identity.may_see_task(task));
        let task = tasks.iter().find(|task| task_uuid(task).eq_ignore_ascii_case(&handle.task_id));
        let task = task.ok_or_else(|| SqsError::new(ErrorKind::ResourceNotFound, "Task does not exist."))?;
        if task.state != RedriveState::Running {
            return Err(SqsError::invalid("Only active tasks can be cancelled."));
        }
        let task = self.store.cancel_redrive(task.id).await?;
        Ok(Output::MoveCancelled(task.moved))
    }
}
