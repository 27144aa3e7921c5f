//! The membership of the share group: joins, sends heartbeats, joins again when it was fenced, and leaves.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::StoreError;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::{ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::session::stopped;
use super::state::{Partition, Shared};
use crate::wire::{Backoff, Cluster, CoordinatorKind, text};

const HEARTBEAT_VERSION: i16 = 1;
/// Joins the group.
const JOIN: i32 = 0;
/// Leaves the group.
const LEAVE: i32 = -1;
/// Bounds on the interval that a broker asks for.
const INTERVAL_MS_MIN: i32 = 50;
const INTERVAL_MS_MAX: i32 = 60_000;
/// How long leaving may take.
const LEAVE_MAX: Duration = Duration::from_secs(3);

/// One member of the group.
pub(super) struct Member {
    pub cluster: Arc<Cluster>,
    pub shared: Arc<Shared>,
    pub group: String,
    pub id: String,
    pub topics: Vec<String>,
    pub assigned: watch::Sender<Option<BTreeSet<Partition>>>,
}

impl Member {
    /// Keeps the membership until it is told to stop, then leaves.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let mut epoch = JOIN;
        let mut backoff = Backoff::new();
        while !*stop.borrow() {
            let beat = tokio::select! {
                beat = self.beat(epoch) => beat,
                () = stopped(&mut stop) => break,
            };
            let wait = match beat {
                Ok(response) => match response.error_code.err() {
                    None => {
                        backoff = Backoff::new();
                        epoch = response.member_epoch;
                        self.take(&response);
                        let interval = response.heartbeat_interval_ms.clamp(INTERVAL_MS_MIN, INTERVAL_MS_MAX);
                        Some(Duration::from_millis(u64::from(interval.unsigned_abs())))
                    }
                    // The locks are kept by the partitions' leaders, which do not look at the membership.
                    Some(error) if epoch != JOIN && is_forgotten(error) => {
                        tracing::warn!(group = self.group, member = self.id, epoch, %error, "joining the group again");
                        epoch = JOIN;
                        None
                    }
                    Some(error) => {
                        self.failed(error, response.error_message.as_deref());
                        None
                    }
                },
                Err(problem) => {
                    self.shared.has_problem(problem);
                    None
                }
            };
            let waiting = async {
                match wait {
                    Some(wait) => sleep(wait).await,
                    None => backoff.wait().await,
                }
            };
            tokio::select! {
                () = waiting => {}
                () = stopped(&mut stop) => {}
            }
        }
        if epoch != JOIN {
            let _ = timeout(LEAVE_MAX, self.beat(LEAVE)).await;
        }
    }

    async fn beat(&self, epoch: i32) -> Result<ShareGroupHeartbeatResponse, String> {
        let (kind, group) = (CoordinatorKind::Group, &self.group);
        let found = self.cluster.coordinator(kind, group).await.map_err(|error| error.to_string())?;
        let coordinator = found.map_err(|error| format!("the coordinator of group {group}: {error}"))?;
        let topics = self.topics.iter().map(|topic| text(topic).into()).collect();
        let request = ShareGroupHeartbeatRequest::default()
            .with_group_id(text(group).into())
            .with_member_id(text(&self.id))
            .with_member_epoch(epoch)
            .with_subscribed_topic_names((epoch == JOIN).then_some(topics));
        match self.cluster.call_at(&coordinator, &request, HEARTBEAT_VERSION).await {
            Ok((response, _)) => Ok(response),
            Err(error) => {
                self.cluster.forget_coordinator(kind, group);
                if !error.is_transient() {
                    self.shared.fails(StoreError::Invalid(error.to_string()));
                }
                Err(error.to_string())
            }
        }
    }

    fn take(&self, response: &ShareGroupHeartbeatResponse) {
        // `None`: as before.
        let Some(assignment) = &response.assignment else { return };
        let partitions = assignment
            .topic_partitions
            .iter()
            .flat_map(|topic| topic.partitions.iter().map(|partition| (topic.topic_id, *partition)));
        let partitions: BTreeSet<Partition> = partitions.collect();
        tracing::debug!(group = self.group, count = partitions.len(), "partitions were assigned");
        self.assigned.send_replace(Some(partitions));
    }

    fn failed(&self, error: ResponseError, message: Option<&str>) {
        let problem = format!("group {}: {error} {}", self.group, message.unwrap_or_default());
        if matches!(
            error,
            ResponseError::GroupAuthorizationFailed
                | ResponseError::TopicAuthorizationFailed
                | ResponseError::UnsupportedVersion
                | ResponseError::InvalidRequest
                | ResponseError::GroupIdNotFound
                | ResponseError::InvalidGroupId
                | ResponseError::InconsistentGroupProtocol
        ) {
            self.shared.fails(StoreError::Invalid(problem));
        } else {
            self.cluster.forget_coordinator(CoordinatorKind::Group, &self.group);
            self.shared.has_problem(problem);
        }
    }
}

/// Whether the coordinator does not know this member, or not in this epoch.
fn is_forgotten(error: ResponseError) -> bool {
    matches!(
        error,
        ResponseError::UnknownMemberId
            | ResponseError::FencedMemberEpoch
            | ResponseError::GroupIdNotFound
            | ResponseError::InvalidRequest
    )
}
