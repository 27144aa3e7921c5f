//! Queue names in SQS's forms: URLs and ARNs.

use hapax_core::QueueName;

use super::error::{Result, SqsError};
use super::model::{Text, required};
use crate::error::ServerError;

/// The account and region used in names.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    pub(crate) account: String,
    region: String,
}

impl Names {
    pub(crate) fn new(account: &str, region: &str) -> std::result::Result<Self, ServerError> {
        let bad =
            |field: &str, problem: String| Err(ServerError::Config { field: field.to_owned(), problem });
        if account.len() != 12 || !account.bytes().all(|b| b.is_ascii_digit()) {
            return bad("sqs.account", format!("{account:?} is no account id; use 12 digits"));
        }
        if region.is_empty() || !region.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return bad(
                "sqs.region",
                format!("{region:?} is no region; use letters, digits and hyphens, as us-east-1"),
            );
        }
        Ok(Self { account: account.to_owned(), region: region.to_owned() })
    }

    /// A queue's URL, with the host that the client used: SDKs send further requests to it.
    pub(crate) fn url(&self, tls: bool, host: &str, queue: &QueueName) -> String {
        let scheme = if tls { "https" } else { "http" };
        format!("{scheme}://{host}/{}/{queue}", self.account)
    }

    pub(crate) fn arn(&self, queue: &QueueName) -> String {
        format!("arn:aws:sqs:{}:{}:{queue}", self.region, self.account)
    }
}

/// The queue of a `QueueUrl`. Only the last segment of its path counts, so URLs made for another host or account still
/// work, and so does a bare name. Without a URL, it is the queue in the request's own path.
pub(crate) fn queue_of(url: Option<&Text<'_>>, path_queue: Option<&str>) -> Result<QueueName> {
    let name = match (url.map(Text::as_str).filter(|url| !url.is_empty()), path_queue) {
        (Some(url), _) => {
            let path = url.split_once("://").map_or(url, |(_, rest)| rest);
            let path = path.split(['?', '#']).next().unwrap_or(path).trim_end_matches('/');
            match path.rsplit_once('/') {
                Some((_, name)) => name,
                // A host alone names no queue.
                None if url.contains("://") => return Err(SqsError::no_queue()),
                None => path,
            }
        }
        (None, Some(name)) => name,
        (None, None) => required(None, "QueueUrl")?,
    };
    // An invalid name cannot belong to a queue.
    QueueName::new(name).map_err(|_| SqsError::no_queue())
}

/// The queue in `arn:aws:sqs:region:account:name`; `None` if it is not such an ARN.
pub(crate) fn queue_of_arn(arn: &str) -> Option<QueueName> {
    let parts: Vec<&str> = arn.split(':').collect();
    match parts.as_slice() {
        ["arn", _, "sqs", _, _, name] => QueueName::new(name).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::ErrorKind;
    use super::*;

    fn of(url: &str) -> Result<String> {
        queue_of(Some(&Text(url.into())), Some("path")).map(|name| name.to_string())
    }

    #[test]
    fn only_the_last_segment_of_a_url_counts() {
        for url in [
            "http://127.0.0.1:9324/000000000000/q",
            "https://sqs.eu-west-1.amazonaws.com/123456789012/q",
            "q",
            "/1/q",
            "http://h/1/q/",
        ] {
            assert_eq!(of(url).unwrap(), "q", "{url}");
        }
        assert_eq!(of("").unwrap(), "path");
        assert_eq!(of("http://host").unwrap_err().kind, ErrorKind::QueueDoesNotExist);
        assert_eq!(of("http://host/1/no spaces").unwrap_err().kind, ErrorKind::QueueDoesNotExist);
        assert_eq!(queue_of(None, None).unwrap_err().kind, ErrorKind::MissingParameter);
    }

    #[test]
    fn arns_and_urls() {
        let names = Names::new("000000000000", "us-east-1").unwrap();
        let queue = QueueName::new("q.fifo").unwrap();
        assert_eq!(names.arn(&queue), "arn:aws:sqs:us-east-1:000000000000:q.fifo");
        assert_eq!(names.url(true, "h:1", &queue), "https://h:1/000000000000/q.fifo");
        assert_eq!(queue_of_arn(&names.arn(&queue)), Some(queue));
        assert_eq!(queue_of_arn("arn:aws:sns:us-east-1:000000000000:q"), None);
        assert!(Names::new("1", "us-east-1").is_err() && Names::new("000000000000", "").is_err());
    }
}
