use hapax_core::policy;

use super::*;
use crate::sqs::model::TextOrNumber;

fn names() -> Names {
    Names::new("000000000000", "us-east-1").unwrap()
}

fn settings(pairs: &[(&str, &str)]) -> Settings {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), TextOrNumber((*value).to_owned()))).collect()
}

fn shown(config: QueueConfig, name: &str) -> Option<String> {
    let queue = if config.is_fifo() { "q.fifo" } else { "q" };
    let info = QueueInfo {
        name: QueueName::new(queue).unwrap(),
        config,
        revision: hapax_core::Revision(1),
        created_ms: 5000,
        modified_ms: 6000,
        paused: None,
    };
    value(name, &info, &QueueStats::default(), &names())
}

#[test]
fn attributes_that_are_set_are_shown() {
    let arn = names().arn(&QueueName::new("dead.fifo").unwrap());
    let redrive = format!("{{\"deadLetterTargetArn\":\"{arn}\",\"maxReceiveCount\":3}}");
    let allow = format!("{{\"redrivePermission\":\"byQueue\",\"sourceQueueArns\":[\"{arn}\"]}}");
    let pairs = [
        ("VisibilityTimeout", "31"),
        ("DelaySeconds", "32"),
        ("MessageRetentionPeriod", "61"),
        ("ReceiveMessageWaitTimeSeconds", "7"),
        ("MaximumMessageSize", "2048"),
        ("RedrivePolicy", redrive.as_str()),
        ("RedriveAllowPolicy", allow.as_str()),
        ("FifoQueue", "true"),
        ("ContentBasedDeduplication", "true"),
        ("DeduplicationScope", "messageGroup"),
        ("FifoThroughputLimit", "perMessageGroupId"),
        ("Policy", "{\"Version\":\"2012-10-17\"}"),
        ("SqsManagedSseEnabled", "true"),
    ];
    let mut config = QueueConfig::sqs_fifo();
    apply(&mut config, &settings(&pairs)).unwrap();
    for (name, value) in pairs {
        assert_eq!(shown(config.clone(), name).as_deref(), Some(value), "{name}");
    }
    assert_eq!(shown(config, "CreatedTimestamp").as_deref(), Some("5"));
}

#[test]
fn defaults_are_those_of_sqs() {
    for (name, value) in [
        ("VisibilityTimeout", Some("30")),
        ("MessageRetentionPeriod", Some("345600")),
        ("MaximumMessageSize", Some("1048576")),
        ("RedrivePolicy", None),
        ("FifoQueue", None),
        ("KmsMasterKeyId", None),
        ("KmsDataKeyReusePeriodSeconds", None),
        ("SqsManagedSseEnabled", Some("true")),
    ] {
        assert_eq!(shown(QueueConfig::sqs(), name).as_deref(), value, "{name}");
    }
}

#[test]
fn a_receive_count_may_be_a_text() {
    let policy = r#"{"deadLetterTargetArn":"arn:aws:sqs:x:1:dead","maxReceiveCount":"5"}"#;
    assert_eq!(redrive_policy(policy).unwrap().unwrap().1, 5);
    assert_eq!(redrive_policy("").unwrap(), None);
}

#[test]
fn wrong_values_have_aws_s_errors() {
    let refused = |fifo: bool, name: &str, text: &str| {
        let mut config = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        apply(&mut config, &settings(&[(name, text)])).unwrap_err()
    };
    for (fifo, name, text, kind) in [
        (false, "VisibilityTimeout", "43201", ErrorKind::InvalidAttributeValue),
        (false, "VisibilityTimeout", "-1", ErrorKind::InvalidAttributeValue),
        (false, "VisibilityTimeout", "x", ErrorKind::InvalidAttributeValue),
        (false, "MaximumMessageSize", "1023", ErrorKind::InvalidAttributeValue),
        (false, "MessageRetentionPeriod", "59", ErrorKind::InvalidAttributeValue),
        (false, "FifoQueue", "true", ErrorKind::InvalidAttributeName),
        (true, "FifoQueue", "false", ErrorKind::InvalidAttributeValue),
        (false, "ContentBasedDeduplication", "true", ErrorKind::InvalidAttributeName),
        (false, "DeduplicationScope", "queue", ErrorKind::InvalidAttributeName),
        (true, "FifoThroughputLimit", "perMessageGroupId", ErrorKind::InvalidAttributeValue),
        (false, "QueueArn", "x", ErrorKind::InvalidAttributeName),
        (false, "Nonsense", "x", ErrorKind::InvalidAttributeName),
        (false, "Policy", "no json", ErrorKind::InvalidAttributeValue),
        (false, "RedrivePolicy", "no json", ErrorKind::InvalidParameterValue),
        (false, "RedrivePolicy", "{\"maxReceiveCount\":1}", ErrorKind::InvalidParameterValue),
        (false, "RedriveAllowPolicy", "{\"redrivePermission\":\"some\"}", ErrorKind::InvalidParameterValue),
    ] {
        assert_eq!(refused(fifo, name, text).kind, kind, "{name} {text}");
    }
    let bad_arn =
        refused(false, "RedrivePolicy", "{\"deadLetterTargetArn\": \"dummy\", \"maxReceiveCount\": 42}");
    assert_eq!(
        bad_arn.message,
        "Value {\"deadLetterTargetArn\": \"dummy\", \"maxReceiveCount\": 42} for parameter RedrivePolicy is invalid. \
         Reason: Invalid value for deadLetterTargetArn."
    );
}

#[test]
fn limits_agree_with_the_core() {
    for (name, text) in
        [("VisibilityTimeout", "43200"), ("DelaySeconds", "900"), ("MessageRetentionPeriod", "1209600")]
    {
        let mut config = QueueConfig::sqs();
        apply(&mut config, &settings(&[(name, text)])).unwrap();
        config.validate(&QueueName::new("q").unwrap()).unwrap();
    }
    assert_eq!(policy::MESSAGE_BYTES_MAX, 1_048_576);
}

#[test]
fn names_that_can_be_asked_for() {
    let text = |names: &[&str]| names.iter().map(|name| Text((*name).to_owned().into())).collect::<Vec<_>>();
    assert_eq!(wanted(Some(&text(&["All"]))).unwrap().len(), READABLE.len());
    assert_eq!(wanted(Some(&text(&["DelaySeconds"]))).unwrap(), ["DelaySeconds"]);
    assert!(wanted(None).unwrap().is_empty());
    assert_eq!(wanted(Some(&text(&["Nonsense"]))).unwrap_err().kind, ErrorKind::InvalidAttributeName);
}

#[test]
fn a_queue_that_is_its_own_dead_letter_queue_has_neither_a_limit_nor_dead_letters() {
    for (own, mut config) in [("q", QueueConfig::sqs()), ("q.fifo", QueueConfig::sqs_fifo())] {
        let own = QueueName::new(own).unwrap();
        let policy = |queue: &QueueName, count: u32| {
            format!("{{\"deadLetterTargetArn\":\"{}\",\"maxReceiveCount\":{count}}}", names().arn(queue))
        };
        let set = |config: &mut QueueConfig, text: &str| {
            apply(config, &settings(&[("RedrivePolicy", text)])).unwrap();
            keep_own_dead_letters(config, &own);
            config.validate(&own).unwrap();
        };
        set(&mut config, &policy(&own, 3));
        assert_eq!((&config.dead_letter, config.retry.limit()), (&None, None));
        assert!(has_own_dead_letters(&config));
        assert_eq!(shown(config.clone(), "RedrivePolicy"), Some(policy(&own, 3)));
        // A second policy replaces it, whether it names the queue itself, another queue or none.
        set(&mut config, &policy(&own, 5));
        assert_eq!(shown(config.clone(), "RedrivePolicy"), Some(policy(&own, 5)));
        let other = QueueName::new(format!("d-{own}")).unwrap();
        set(&mut config, &policy(&other, 2));
        assert_eq!((config.retry.limit(), has_own_dead_letters(&config)), (Some(2), false));
        assert_eq!(shown(config.clone(), "RedrivePolicy"), Some(policy(&other, 2)));
        set(&mut config, &policy(&own, 5));
        set(&mut config, "");
        assert!(shown(config.clone(), "RedrivePolicy").is_none() && config.extra.is_empty());
    }
}
