//! Operations on queues: create, delete, list, purge, attributes.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hapax_core::{AdminError, QueueConfig, QueueName, QueueStats, RedriveAllow, Revision, StoreError};

use super::super::attributes;
use super::super::error::{ErrorKind, Result, SqsError};
use super::super::model::{
    CreateQueue, GetQueueAttributes, GetQueueUrl, ListDeadLetterSourceQueues, ListQueues, QueueOnly,
    SetQueueAttributes, Settings, Text, required,
};
use super::super::output::{Output, QueuePage};
use super::{CallContext, Operations, in_range, tags};
use crate::auth::sources_of;

const PAGE_MAX: usize = 1000;

/// Maximum number of attempts to apply a change while others change the configuration.
const CHANGES_MAX: usize = 20;

fn new_name(name: &str, fifo: bool) -> Result<QueueName> {
    match QueueName::new(name) {
        Ok(name) if name.is_fifo() == fifo => Ok(name),
        _ if fifo => Err(SqsError::invalid(
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, must end \
             with .fifo suffix and be 1 to 80 in length.",
        )),
        _ => Err(SqsError::invalid(
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
        )),
    }
}

/// One page of names in order, and the start of the next.
fn page(
    mut names: Vec<QueueName>,
    max_results: Option<i64>,
    token: Option<&Text<'_>>,
) -> Result<(Vec<QueueName>, Option<String>)> {
    let reason = "MaxResults must be between 1 and 1000.";
    let max = max_results.map(|max| in_range("MaxResults", max, 1, PAGE_MAX as i64, reason)).transpose()?;
    if let Some(token) = token.map(Text::as_str).filter(|token| !token.is_empty()) {
        let after = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let after = after.ok_or_else(|| SqsError::invalid("Invalid or expired next token."))?;
        names.retain(|name| name.as_str() > after.as_str());
    }
    let limit = max.map_or(PAGE_MAX, |max| max as usize);
    let more = names.len() > limit;
    names.truncate(limit);
    // Without MaxResults, SQS returns no token.
    let next = names.last().filter(|_| more && max.is_some());
    let next = next.map(|name| URL_SAFE_NO_PAD.encode(name.as_str()));
    Ok((names, next))
}

impl Operations {
    fn url(&self, context: &CallContext<'_>, queue: &QueueName) -> String {
        self.names.url(context.peer.tls, context.host, queue)
    }

    fn queue_page(
        &self,
        context: &CallContext<'_>,
        (names, next): (Vec<QueueName>, Option<String>),
    ) -> QueuePage {
        QueuePage { urls: names.iter().map(|name| self.url(context, name)).collect(), next }
    }

    pub(super) async fn create_queue(
        &self,
        context: &CallContext<'_>,
        request: &CreateQueue<'_>,
    ) -> Result<Output> {
        let name = request.queue_name.as_ref().ok_or_else(|| SqsError::missing("QueueName"))?.as_str();
        let none = Settings::new();
        let settings = request.attributes.as_ref().unwrap_or(&none);
        let fifo = settings.get("FifoQueue").is_some_and(|value| value.0.eq_ignore_ascii_case("true"));
        let name = new_name(name, fifo)?;
        self.authorize(context, "CreateQueue", Some(&name))?;
        let mut config = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        attributes::apply(&mut config, settings)?;
        tags::add(&mut config, &name, request.tags.as_ref().unwrap_or(&none))?;
        match self.store.queue(&name).await {
            Ok(info) => self.same_attributes(&info.config, settings)?,
            Err(StoreError::NoSuchQueue(_)) => {
                self.check_dead_letters(context, &name, &config).await?;
                match self.store.create_queue_with_interval(&name, config, self.recreate_interval_ms).await {
                    Ok(_) => {}
                    Err(AdminError::TooSoon { .. }) => {
                        return Err(SqsError::new(
                            ErrorKind::QueueDeletedRecently,
                            "You must wait 60 seconds after deleting a queue before you can create another with the \
                             same name.",
                        ));
                    }
                    // Another server on the same store created it first.
                    Err(AdminError::Exists(..)) => {
                        self.same_attributes(&self.store.queue(&name).await?.config, settings)?;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        }
        Ok(Output::QueueUrl(self.url(context, &name)))
    }

    /// Checks that a dead-letter queue exists, is of the same kind, and allows this queue.
    async fn check_dead_letters(
        &self,
        context: &CallContext<'_>,
        name: &QueueName,
        config: &QueueConfig,
    ) -> Result<()> {
        let Some(dead) = &config.dead_letter else { return Ok(()) };
        // Dead letters of this queue arrive there, so the caller needs the right to send there.
        self.authorize(context, "SendMessage", Some(&dead.queue))?;
        let arn = self.names.arn(&dead.queue);
        let shown = format!(
            "{{\"deadLetterTargetArn\":\"{arn}\",\"maxReceiveCount\":{}}}",
            attributes::max_receive_count(config)
        );
        let bad = |reason: &str| SqsError::value("RedrivePolicy", &shown, reason);
        if dead.queue.is_fifo() != config.is_fifo() {
            return Err(bad("Dead-letter queue must be same type of queue as the source."));
        }
        let target = match self.store.queue(&dead.queue).await {
            Ok(target) => target,
            Err(StoreError::NoSuchQueue(_)) => return Err(bad("Dead letter target does not exist.")),
            Err(error) => return Err(error.into()),
        };
        let allowed = match &target.config.redrive_allow {
            RedriveAllow::All => true,
            RedriveAllow::None => false,
            RedriveAllow::Queues(queues) => queues.contains(name),
        };
        if allowed {
            Ok(())
        } else {
            Err(bad("Dead letter target's RedriveAllowPolicy does not allow this source queue."))
        }
    }

    pub(super) async fn delete_queue(
        &self,
        context: &CallContext<'_>,
        request: &QueueOnly<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "DeleteQueue", request.queue_url.as_ref())?;
        self.store.delete_queue(&queue).await?;
        Ok(Output::Empty)
    }

    pub(super) async fn get_queue_url(
        &self,
        context: &CallContext<'_>,
        request: &GetQueueUrl<'_>,
    ) -> Result<Output> {
        let name = required(request.queue_name.as_ref(), "QueueName")?;
        let name = QueueName::new(name).map_err(|_| SqsError::no_queue())?;
        self.authorize(context, "GetQueueUrl", Some(&name))?;
        self.store.queue(&name).await?;
        Ok(Output::QueueUrl(self.url(context, &name)))
    }

    pub(super) async fn list_queues(
        &self,
        context: &CallContext<'_>,
        request: &ListQueues<'_>,
    ) -> Result<Output> {
        self.authorize(context, "ListQueues", None)?;
        let prefix = request.queue_name_prefix.as_ref().map_or("", Text::as_str);
        let names = self.store.queues().await?.into_iter().map(|info| info.name);
        let names =
            names.filter(|name| name.as_str().starts_with(prefix) && context.identity.may_see(name.as_str()));
        let page = page(names.collect(), request.max_results, request.next_token.as_ref())?;
        Ok(Output::Queues(self.queue_page(context, page)))
    }

    pub(super) async fn list_sources(
        &self,
        context: &CallContext<'_>,
        request: &ListDeadLetterSourceQueues<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "ListDeadLetterSourceQueues", request.queue_url.as_ref())?;
        let info = self.store.queue(&queue).await?;
        let mut names = self.sources_of(&queue).await?;
        if attributes::has_own_dead_letters(&info.config) {
            names.push(queue);
            names.sort_unstable();
        }
        names.retain(|name| context.identity.may_see(name.as_str()));
        let page = page(names, request.max_results, request.next_token.as_ref())?;
        Ok(Output::Sources(self.queue_page(context, page)))
    }

    /// The queues that name `dead` as their dead-letter queue.
    pub(super) async fn sources_of(&self, dead: &QueueName) -> Result<Vec<QueueName>> {
        Ok(sources_of(&self.store.queues().await?, dead))
    }

    pub(super) async fn purge_queue(
        &self,
        context: &CallContext<'_>,
        request: &QueueOnly<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "PurgeQueue", request.queue_url.as_ref())?;
        match self.store.purge_with_interval(&queue, self.purge_interval_ms).await {
            Err(AdminError::TooSoon { .. }) => {
                let text = format!("Only one PurgeQueue operation on {queue} is allowed every 60 seconds.");
                Err(SqsError::new(ErrorKind::PurgeQueueInProgress, text))
            }
            purged => Ok(purged.map(|_| Output::Empty)?),
        }
    }

    pub(super) async fn get_queue_attributes(
        &self,
        context: &CallContext<'_>,
        request: &GetQueueAttributes<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "GetQueueAttributes", request.queue_url.as_ref())?;
        let wanted = attributes::wanted(request.attribute_names.as_deref())?;
        let info = self.store.queue(&queue).await?;
        let stats = if attributes::needs_stats(&wanted) {
            self.store.stats(&queue).await?
        } else {
            QueueStats::default()
        };
        Ok(Output::Attributes(attributes::values(&wanted, &info, &stats, &self.names)))
    }

    pub(super) async fn set_queue_attributes(
        &self,
        context: &CallContext<'_>,
        request: &SetQueueAttributes<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "SetQueueAttributes", request.queue_url.as_ref())?;
        let settings = request.attributes.as_ref().ok_or_else(|| SqsError::missing("Attribute.Name"))?;
        let mut tries = 1;
        loop {
            let before = self.store.queue(&queue).await?;
            let mut config = before.config.clone();
            attributes::apply(&mut config, settings)?;
            if config.dead_letter != before.config.dead_letter {
                self.check_dead_letters(context, &queue, &config).await?;
                attributes::keep_own_dead_letters(&mut config, &queue);
            }
            if self.changed(&queue, config, before.revision, &mut tries).await? {
                return Ok(Output::Empty);
            }
        }
    }

    /// Changes a queue's configuration. `change` is applied again to the newest one if another change came first.
    pub(super) async fn change(
        &self,
        queue: &QueueName,
        change: impl Fn(&mut QueueConfig) -> Result<()>,
    ) -> Result<()> {
        let mut tries = 1;
        loop {
            let before = self.store.queue(queue).await?;
            let mut config = before.config.clone();
            change(&mut config)?;
            if self.changed(queue, config, before.revision, &mut tries).await? {
                return Ok(());
            }
        }
    }

    /// Writes a configuration that was derived from `revision`; `false` if that is no longer the newest.
    async fn changed(
        &self,
        queue: &QueueName,
        config: QueueConfig,
        revision: Revision,
        tries: &mut usize,
    ) -> Result<bool> {
        match self.store.set_queue(queue, config, Some(revision)).await {
            Ok(_) => Ok(true),
            Err(AdminError::RevisionConflict { .. }) if *tries < CHANGES_MAX => {
                *tries += 1;
                Ok(false)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Creating an existing queue is allowed if every attribute in the request equals the current one.
    fn same_attributes(&self, config: &QueueConfig, settings: &Settings) -> Result<()> {
        let mut changed = config.clone();
        attributes::apply(&mut changed, settings)?;
        let told = |name: &str, config: &QueueConfig| attributes::configured(name, config, &self.names);
        match settings.keys().find(|name| told(name, &changed) != told(name, config)) {
            None => Ok(()),
            Some(name) => Err(SqsError::new(
                ErrorKind::QueueNameExists,
                format!(
                    "A queue already exists with the same name and a different value for attribute {name}"
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: usize) -> Vec<QueueName> {
        (0..count).map(|n| QueueName::new(format!("q{n:04}")).unwrap()).collect()
    }

    #[test]
    fn pages_cover_everything_once() {
        let (mut token, mut seen) = (None, Vec::new());
        loop {
            let (page, next) = page(names(25), Some(10), token.as_ref()).unwrap();
            seen.extend(page);
            match next {
                Some(next) => token = Some(Text(next.into())),
                None => break,
            }
        }
        assert_eq!(seen, names(25));
        let (all, next) = page(names(1500), None, None).unwrap();
        assert_eq!((all.len(), next), (1000, None));
        assert!(page(names(1), Some(0), None).is_err());
        assert!(page(names(1), None, Some(&Text("!".into()))).is_err());
    }

    #[test]
    fn a_fifo_name_and_the_attribute_go_together() {
        assert!(new_name("a", false).is_ok() && new_name("a.fifo", true).is_ok());
        assert!(new_name("a.fifo", false).is_err() && new_name("a", true).is_err());
    }
}
