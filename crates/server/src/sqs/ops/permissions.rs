//! AddPermission and RemovePermission keep a policy document with the queue, as SQS does. It is only stored for tools
//! that read it back; the keys decide who may do what.

use serde_json::{Map, Value, json};

use super::super::attributes::POLICY;
use super::super::error::{ErrorKind, Result, SqsError};
use super::super::model::{Action, AddPermission, RemovePermission, Text, required};
use super::super::output::Output;
use super::{CallContext, Operations};

/// Maximum number of statements in a policy to which AddPermission adds.
const STATEMENTS_MAX: usize = 20;
/// Maximum number of actions in a statement.
const ACTIONS_MAX: usize = 7;
/// Actions reserved to the owner of a queue: they cannot be allowed to another account.
const OWNER_ONLY: [&str; 12] = [
    "AddPermission",
    "CancelMessageMoveTask",
    "CreateQueue",
    "DeleteQueue",
    "ListMessageMoveTasks",
    "ListQueueTags",
    "ListQueues",
    "RemovePermission",
    "SetQueueAttributes",
    "StartMessageMoveTask",
    "TagQueue",
    "UntagQueue",
];

fn read_policy(document: Option<&String>, arn: &str) -> Map<String, Value> {
    document.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_else(|| {
        let mut policy = Map::new();
        policy.insert("Version".into(), "2008-10-17".into());
        policy.insert("Id".into(), format!("{arn}/SQSDefaultPolicy").into());
        policy
    })
}

fn statements(policy: &Map<String, Value>) -> Vec<Value> {
    match policy.get("Statement") {
        Some(Value::Array(statements)) => statements.clone(),
        Some(statement) => vec![statement.clone()],
        None => Vec::new(),
    }
}

fn has_label(statement: &Value, label: &str) -> bool {
    statement.get("Sid").and_then(Value::as_str) == Some(label)
}

/// A single value stands alone; several become a list.
fn one_or_many(mut values: Vec<String>) -> Value {
    if values.len() == 1 { Value::String(values.remove(0)) } else { json!(values) }
}

fn check_label(label: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    if label.len() <= 80 && label.bytes().all(plain) {
        return Ok(());
    }
    let reason = "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length.";
    Err(SqsError::value("Label", label, reason))
}

fn over_limit(count: usize, what: &str, max: usize) -> SqsError {
    SqsError::new(ErrorKind::OverLimit, format!("{count} {what} were found, maximum allowed is {max}."))
}

fn check_actions(actions: &[Text<'_>]) -> Result<Vec<String>> {
    if actions.len() > ACTIONS_MAX {
        return Err(over_limit(actions.len(), "Actions", ACTIONS_MAX));
    }
    let check = |action: &Text<'_>| {
        let name = action.as_str();
        if OWNER_ONLY.contains(&name) {
            let reason = "Only the queue owner is allowed to invoke this action.";
            return Err(SqsError::value("ActionName", format_args!("SQS:{name}"), reason));
        }
        if name == "*" || Action::from_name(name).is_some() {
            return Ok(format!("SQS:{name}"));
        }
        let reason = "Please refer to the appropriate WSDL for a list of valid actions. ";
        Err(SqsError::value("ActionName", format_args!("SQS:{name}"), reason))
    };
    actions.iter().map(check).collect()
}

fn check_accounts(accounts: &[Text<'_>]) -> Result<Vec<String>> {
    if accounts.is_empty() {
        return Err(SqsError::value("PrincipalId", "[]", "Unable to verify."));
    }
    let check = |account: &Text<'_>| {
        let id = account.as_str();
        if id.len() == 12 && id.bytes().all(|b| b.is_ascii_digit()) {
            return Ok(format!("arn:aws:iam::{id}:root"));
        }
        Err(SqsError::value("PrincipalId", id, "Unable to verify."))
    };
    accounts.iter().map(check).collect()
}

impl Operations {
    pub(super) async fn add_permission(
        &self,
        context: &CallContext<'_>,
        request: &AddPermission<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "AddPermission", request.queue_url.as_ref())?;
        let label = required(request.label.as_ref(), "Label")?;
        check_label(label)?;
        let accounts = request.aws_account_ids.as_ref().ok_or_else(|| SqsError::missing("AWSAccountIds"))?;
        let actions = request.actions.as_ref().filter(|actions| !actions.is_empty());
        let actions = check_actions(actions.ok_or_else(|| SqsError::missing("Actions"))?)?;
        let accounts = check_accounts(accounts)?;
        let arn = self.names.arn(&queue);
        self.change(&queue, |config| {
            let mut policy = read_policy(config.extra.get(POLICY), &arn);
            let mut statements = statements(&policy);
            if statements.iter().any(|statement| has_label(statement, label)) {
                return Err(SqsError::value("Label", label, "Already exists."));
            }
            if statements.len() >= STATEMENTS_MAX {
                return Err(over_limit(statements.len() + 1, "Statements", STATEMENTS_MAX));
            }
            statements.push(json!({
                "Sid": label,
                "Effect": "Allow",
                "Principal": { "AWS": one_or_many(accounts.clone()) },
                "Action": one_or_many(actions.clone()),
                "Resource": arn,
            }));
            policy.insert("Statement".into(), Value::Array(statements));
            config.extra.insert(POLICY.to_owned(), Value::Object(policy).to_string());
            Ok(())
        })
        .await?;
        Ok(Output::Empty)
    }

    pub(super) async fn remove_permission(
        &self,
        context: &CallContext<'_>,
        request: &RemovePermission<'_>,
    ) -> Result<Output> {
        let queue = self.queue(context, "RemovePermission", request.queue_url.as_ref())?;
        let label = required(request.label.as_ref(), "Label")?;
        let arn = self.names.arn(&queue);
        self.change(&queue, |config| {
            let mut policy = read_policy(config.extra.get(POLICY), &arn);
            let before = statements(&policy);
            let after: Vec<Value> =
                before.iter().filter(|statement| !has_label(statement, label)).cloned().collect();
            if after.len() == before.len() {
                return Err(SqsError::value("Label", label, "can't find label."));
            }
            if after.is_empty() {
                config.extra.remove(POLICY);
            } else {
                policy.insert("Statement".into(), Value::Array(after));
                config.extra.insert(POLICY.to_owned(), Value::Object(policy).to_string());
            }
            Ok(())
        })
        .await?;
        Ok(Output::Empty)
    }
}
