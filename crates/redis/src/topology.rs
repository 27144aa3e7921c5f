//! Which node has which shard, and how many replicas may take its place.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use hapax_core::StoreError;
use redis::{Value, from_redis_value};

use crate::connect::{Kind, Target};
use crate::keys::{Keys, SHARDS, Shard};
use crate::node::{Node, pipeline};

/// A refresh that was made less than this ago is not repeated.
const REFRESH_MIN: Duration = Duration::from_millis(100);
/// Time for one node to say what it knows about the others.
const ASK_MAX: Duration = Duration::from_secs(1);

/// What is known about the nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Map {
    /// The node of each shard; empty: not known.
    owners: Vec<String>,
    /// Replicas that may be promoted, per master.
    replicas: HashMap<String, usize>,
}

/// The nodes of a store.
pub(crate) struct Topology {
    target: Target,
    slots: Vec<u16>,
    map: Mutex<Map>,
    nodes: Mutex<HashMap<String, Arc<Node>>>,
    refreshed: tokio::sync::Mutex<Option<Instant>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Topology {
    pub fn new(target: Target, keys: &Keys) -> Self {
        let slots = (0..SHARDS).map(|shard| keys.slot(shard)).collect();
        Self {
            target,
            slots,
            map: Mutex::default(),
            nodes: Mutex::default(),
            refreshed: tokio::sync::Mutex::default(),
        }
    }

    /// A node by its address, with its connections.
    pub fn node(&self, address: &str) -> Result<Arc<Node>, StoreError> {
        let mut nodes = locked(&self.nodes);
        if let Some(node) = nodes.get(address) {
            return Ok(node.clone());
        }
        let node = Node::new(&self.target, address, false);
        let node = Arc::new(node.map_err(|error| StoreError::Unavailable(error.to_string()))?);
        nodes.insert(address.to_owned(), node.clone());
        Ok(node)
    }

    /// The node of a shard.
    pub fn owner(&self, shard: Shard) -> Option<String> {
        locked(&self.map).owners.get(shard).filter(|owner| !owner.is_empty()).cloned()
    }

    /// All masters that have a shard.
    pub fn masters(&self) -> Vec<String> {
        let mut masters: Vec<String> = locked(&self.map).owners.clone();
        masters.sort_unstable();
        masters.dedup();
        masters.retain(|master| !master.is_empty());
        masters
    }

    /// Replicas of a master that must confirm a change.
    pub fn replicas(&self, master: &str) -> usize {
        let known = locked(&self.map).replicas.get(master).copied();
        self.target.options.replicas.or(known).unwrap_or_default()
    }

    /// Whether any master is known to have replicas.
    pub fn has_replicas(&self) -> bool {
        locked(&self.map).replicas.values().any(|count| *count > 0)
    }

    /// A node has told where a shard is now.
    pub fn moved(&self, shard: Shard, address: &str) {
        if let Some(owner) = locked(&self.map).owners.get_mut(shard) {
            address.clone_into(owner);
        }
    }

    /// Finds out again which node has what, unless that was done just now.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        let mut refreshed = self.refreshed.lock().await;
        if refreshed.is_some_and(|at| at.elapsed() < REFRESH_MIN) {
            return Ok(());
        }
        let found = match &self.target.kind {
            Kind::Single => self.single().await,
            Kind::Cluster => self.cluster().await,
            Kind::Sentinel(name) => self.sentinel(name).await,
        };
        *refreshed = Some(Instant::now());
        let map = found?;
        let masters = map.owners.clone();
        *locked(&self.map) = map;
        // Connections to nodes that are gone are closed.
        locked(&self.nodes)
            .retain(|address, _| masters.contains(address) || self.target.seeds.contains(address));
        Ok(())
    }

    async fn single(&self) -> Result<Map, StoreError> {
        let address = self.target.seeds[0].clone();
        let info = self.tell(&*self.node(&address)?, &["INFO", "replication"]).await?;
        let connected = field(&info, "connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        // A replica that is away may come back and be promoted by an operator: the count never shrinks.
        let before = locked(&self.map).replicas.get(&address).copied().unwrap_or_default();
        let replicas = HashMap::from([(address.clone(), connected.max(before))]);
        Ok(Map { owners: vec![address; SHARDS], replicas })
    }

    async fn sentinel(&self, name: &str) -> Result<Map, StoreError> {
        let mut problem = String::new();
        for seed in shuffled(&self.target.seeds) {
            let sentinel = Node::new(&self.target, &seed, true)
                .map_err(|error| StoreError::Unavailable(error.to_string()))?;
            let mut asked = pipeline();
            asked.cmd("SENTINEL").arg("get-master-addr-by-name").arg(name);
            asked.cmd("SENTINEL").arg("replicas").arg(name);
            let told = tokio::time::timeout(ASK_MAX, sentinel.ask(&asked)).await;
            let Ok(Ok(mut told)) = told else {
                problem = format!("the Sentinel {seed} does not answer");
                continue;
            };
            let replicas = told.pop().and_then(Result::ok).map_or(0, |told| promotable(&told));
            let master = told.pop().and_then(Result::ok).map(from_redis_value::<Option<(String, u16)>>);
            if let Some(Ok(Some((host, port)))) = master {
                let address =
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                let replicas = HashMap::from([(address.clone(), replicas)]);
                return Ok(Map { owners: vec![address; SHARDS], replicas });
            }
            problem = format!("the Sentinel {seed} knows no master {name:?}");
        }
        Err(StoreError::Unavailable(format!("no Sentinel could say where the master is: {problem}")))
    }

    async fn cluster(&self) -> Result<Map, StoreError> {
        let mut known: Vec<String> = self.masters();
        known.extend(
            self.target.seeds.iter().filter(|seed| !known.contains(seed)).cloned().collect::<Vec<_>>(),
        );
        let mut problem = StoreError::Unavailable("no node is known".to_owned());
        for address in shuffled(&known) {
            let told = self.tell(&*self.node(&address)?, &["CLUSTER", "NODES"]).await;
            match told.map(|text| read_nodes(&text, &address, &self.slots)) {
                Ok(map) if map.owners.iter().any(|owner| !owner.is_empty()) => {
                    return Ok(self.with_all_replicas(map, &address).await);
                }
                Ok(_) => problem = StoreError::Unavailable(format!("{address} knows no node with our slots")),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Counts the replicas as each master knows them. A node that has not heard of a replica yet takes it for something
    /// else, and a change that no replica has confirmed must not count as confirmed.
    async fn with_all_replicas(&self, mut map: Map, asked: &str) -> Map {
        let others: Vec<String> = map.replicas.keys().filter(|master| *master != asked).cloned().collect();
        let views = others.iter().map(async |address| {
            let node = self.node(address).ok()?;
            let told = self.tell(&node, &["CLUSTER", "NODES"]).await.ok()?;
            Some(read_nodes(&told, address, &self.slots))
        });
        for view in join_all(views).await.into_iter().flatten() {
            for (master, count) in &mut map.replicas {
                *count = view.replicas.get(master).copied().unwrap_or_default().max(*count);
            }
        }
        map
    }

    /// The answer of one node to a question about the whole.
    async fn tell(&self, node: &Node, command: &[&str]) -> Result<String, StoreError> {
        let mut asked = pipeline();
        asked.cmd(command[0]).arg(&command[1..]);
        let told = tokio::time::timeout(ASK_MAX, node.ask(&asked)).await;
        let unavailable = |why: String| StoreError::Unavailable(format!("{}: {why}", command.join(" ")));
        let told = told.map_err(|_| unavailable(format!("{} does not answer", node.address)))?;
        let told = told.map_err(|error| unavailable(format!("{error:?}")))?.pop();
        let told = told.unwrap_or(Ok(Value::Nil)).map_err(|error| unavailable(error.to_string()))?;
        from_redis_value(told).map_err(|error| unavailable(error.to_string()))
    }
}

fn shuffled(addresses: &[String]) -> Vec<String> {
    let mut addresses = addresses.to_vec();
    fastrand::shuffle(&mut addresses);
    addresses
}

/// A line `name:value` of INFO.
pub(crate) fn field<'t>(info: &'t str, name: &str) -> Option<&'t str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Replicas in the answer of a Sentinel that it does not take for down.
fn promotable(told: &Value) -> usize {
    let replicas: Vec<HashMap<String, String>> = from_redis_value(told.clone()).unwrap_or_default();
    let is_down = |flags: &String| flags.split(',').any(|flag| ["s_down", "o_down"].contains(&flag));
    replicas.iter().filter(|replica| !replica.get("flags").is_some_and(is_down)).count()
}

/// Reads `CLUSTER NODES`. A replica counts unless the majority of masters has declared it failed (`fail`, not `fail?`): only
/// then it is not promoted.
fn read_nodes(text: &str, asked: &str, slots: &[u16]) -> Map {
    let mut map = Map { owners: vec![String::new(); slots.len()], replicas: HashMap::new() };
    let mut masters: HashMap<&str, String> = HashMap::new();
    let mut replicas_of: Vec<&str> = Vec::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        let (Some(id), Some(address), Some(flags), Some(master)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let flags: Vec<&str> = flags.split(',').collect();
        if ["noaddr", "handshake", "fail"].iter().any(|flag| flags.contains(flag)) {
            continue;
        }
        if flags.contains(&"slave") {
            replicas_of.push(master);
            continue;
        }
        let address = address.split(['@', ',']).next().unwrap_or_default();
        // A node that was never met by another does not know its own host.
        let address = match address.strip_prefix(':') {
            Some(port) => format!("{}:{port}", asked.rsplit_once(':').map_or(asked, |(host, _)| host)),
            None => address.to_owned(),
        };
        for range in words.skip(4).filter(|word| !word.starts_with('[')) {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            let (Ok(from), Ok(to)) = (from.parse::<u16>(), to.parse::<u16>()) else { continue };
            for (owner, _) in map.owners.iter_mut().zip(slots).filter(|(_, slot)| (from..=to).contains(slot))
            {
                owner.clone_from(&address);
            }
        }
        map.replicas.insert(address.clone(), 0);
        masters.insert(id, address);
    }
    for master in replicas_of {
        if let Some(count) = masters.get(master).and_then(|address| map.replicas.get_mut(address)) {
            *count += 1;
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_of_a_cluster_are_read() {
        let text = "a1 :7000@17000 myself,master - 0 0 1 connected 0-5460 [93-<-c3]\n\
                    b2 10.0.0.2:7000@17000,host master - 0 0 2 connected 5461-10000 10002\n\
                    c3 10.0.0.3:7000@17000 master,fail - 0 0 3 disconnected 10001 10003-16383\n\
                    d4 10.0.0.4:7000@17000 slave a1 0 0 1 connected\n\
                    e5 10.0.0.5:7000@17000 slave,fail? a1 0 0 1 connected\n\
                    f6 10.0.0.6:7000@17000 slave,fail a1 0 0 1 connected\n";
        let map = read_nodes(text, "10.0.0.1:7000", &[0, 5461, 10_001, 10_002]);
        assert_eq!(map.owners, ["10.0.0.1:7000", "10.0.0.2:7000", "", "10.0.0.2:7000"]);
        assert_eq!((map.replicas["10.0.0.1:7000"], map.replicas["10.0.0.2:7000"]), (2, 0));
    }

    #[test]
    fn what_is_no_list_of_nodes_gives_no_owner() {
        for text in ["", "garbage", "a b c d e f g h 0-x"] {
            let map = read_nodes(text, "h:1", &[0]);
            assert_eq!(map.owners, [""], "{text:?}");
        }
    }
}
