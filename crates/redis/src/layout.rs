//! The form of what is kept in Redis has a number. Scripts write it into a shard with its first queue or entry, and a store is not
//! opened where it is another one.

use hapax_core::StoreError;
use redis::{Value, from_redis_value};

use crate::OpenError;
use crate::keys::{SHARDS, Shard};
use crate::node::{Node, pipeline};
use crate::run::{Runner, ask_all};

/// The layout that this version reads and writes. It changes when an earlier version could not read what is written, or its
/// data could not be read any more.
pub(crate) const LAYOUT: u64 = 1;

/// Why what is there cannot be used.
pub(crate) async fn problem(runner: &Runner) -> Result<Option<OpenError>, StoreError> {
    for master in runner.topology.masters() {
        let is_own = |shard: &Shard| runner.topology.owner(*shard).as_ref() == Some(&master);
        let shards: Vec<Shard> = (0..SHARDS).filter(is_own).collect();
        let node = runner.topology.node(&master)?;
        if let Some(found) = other_layout(runner, &node, &shards).await? {
            return Ok(Some(OpenError::Layout { node: master, found }));
        }
    }
    Ok(None)
}

/// The layout of one of these shards, if it is not ours.
async fn other_layout(runner: &Runner, node: &Node, shards: &[Shard]) -> Result<Option<String>, StoreError> {
    let mut asked = pipeline();
    for shard in shards {
        asked.cmd("HGET").arg(runner.keys.meta(*shard)).arg("layout");
        asked.cmd("EXISTS").arg(runner.keys.queues(*shard));
    }
    let mut answers = Vec::with_capacity(2 * shards.len());
    for answer in ask_all(node, &asked).await? {
        answers.push(match answer {
            // The shard has moved to another node, or is on its way there, key by key.
            Err(error) if ["MOVED", "ASK", "CLUSTERDOWN"].contains(&error.code().unwrap_or_default()) => None,
            answer => {
                Some(answer.map_err(|error| StoreError::Unavailable(format!("{}: {error}", node.address)))?)
            }
        });
    }
    for pair in answers.chunks_exact(2) {
        // A number that is elsewhere by now is not missing.
        let Some(number) = &pair[0] else { continue };
        let number: Option<String> = from_redis_value(number.clone()).unwrap_or_default();
        match number {
            Some(number) if number == LAYOUT.to_string() => {}
            Some(number) => return Ok(Some(format!("layout {number}"))),
            // Entries of the ledger have always had this form.
            None if pair[1] == Some(Value::Int(1)) => {
                return Ok(Some("queues of a layout without a number".to_owned()));
            }
            None => {}
        }
    }
    Ok(None)
}
