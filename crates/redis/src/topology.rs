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
    /// The configuration epoch in which each of them has become the owner: the greatest one is right.
    epochs: Vec<u64>,
    /// Replicas that may be promoted, per master.
    replicas: HashMap<String, usize>,
    /// Other names of masters, by which `MOVED` may call them.
    names: HashMap<String, String>,
}

impl Map {
    /// One node that has everything.
    fn alone(address: String, replicas: usize) -> Self {
        let replicas = HashMap::from([(address.clone(), replicas)]);
        Self { owners: vec![address; SHARDS], replicas, ..Self::default() }
    }

    /// Adds what another node knows. Each of them may lag behind: the owner of the greatest epoch counts, and the greatest
    /// number of replicas, since a change that no replica has confirmed must not count as confirmed.
    fn merge(&mut self, view: Self) {
        for (at, (owner, epoch)) in view.owners.into_iter().zip(view.epochs).enumerate() {
            if !owner.is_empty() && (self.owners[at].is_empty() || epoch > self.epochs[at]) {
                (self.owners[at], self.epochs[at]) = (owner, epoch);
            }
        }
        for (master, count) in view.replicas {
            let known = self.replicas.entry(master).or_default();
            *known = count.max(*known);
        }
        self.names.extend(view.names);
    }
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

    /// A connection of its own to a node, on which it hears what is published.
    pub async fn subscriber(
        &self,
        address: &str,
        hear: impl redis::aio::AsyncPushSender,
    ) -> Result<redis::aio::MultiplexedConnection, String> {
        let info = self.target.info(address, false).map_err(|error| error.to_string())?;
        let settings = info.redis_settings().clone().set_protocol(redis::ProtocolVersion::RESP3);
        let client =
            redis::Client::open(info.set_redis_settings(settings)).map_err(|error| error.to_string())?;
        let options = &self.target.options;
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(options.connect_timeout))
            .set_response_timeout(Some(options.operation_timeout))
            .set_push_sender(hear);
        let connected = client.get_multiplexed_async_connection_with_config(&config).await;
        connected.map_err(|error| error.to_string())
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

    /// Replicas of a master that must confirm a change. `None`: the node is not known as a master, so that nothing can be
    /// confirmed there before the nodes were looked up again.
    pub fn replicas(&self, master: &str) -> Option<usize> {
        let known = locked(&self.map).replicas.get(master).copied();
        self.target.options.replicas.or(known)
    }

    /// Whether any master is known to have replicas.
    pub fn has_replicas(&self) -> bool {
        locked(&self.map).replicas.values().any(|count| *count > 0)
    }

    /// A node has told where a shard is now.
    pub fn moved(&self, shard: Shard, address: &str) {
        let mut map = locked(&self.map);
        let before = map.owners.get(shard).cloned();
        if let Some(owner) = map.owners.get_mut(shard) {
            address.clone_into(owner);
        }
        drop(map);
        if before.is_some_and(|before| before != address) {
            self.has_taken_over(address);
        }
    }

    /// The address of a node as the map has it, which was named by another node.
    pub fn named(&self, name: &str, by: &str) -> String {
        // Without a host it is that of the node that named it.
        let name = match name.strip_prefix(':') {
            Some(port) => format!("{}:{port}", by.rsplit_once(':').map_or(by, |(host, _)| host)),
            None => name.to_owned(),
        };
        locked(&self.map).names.get(&name).cloned().unwrap_or(name)
    }

    /// Open claims on a node get a full lease before the next call.
    fn has_taken_over(&self, address: &str) {
        if let Some(node) = locked(&self.nodes).get(address) {
            node.has_taken_over();
        }
    }

    /// Finds out again which node has what, unless that was done just now.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        let now = Instant::now();
        self.refresh_unless_since(now.checked_sub(REFRESH_MIN).unwrap_or(now)).await
    }

    /// The same, unless another call has begun with it meanwhile.
    pub async fn refresh_now(&self) -> Result<(), StoreError> {
        self.refresh_unless_since(Instant::now()).await
    }

    async fn refresh_unless_since(&self, oldest: Instant) -> Result<(), StoreError> {
        let mut refreshed = self.refreshed.lock().await;
        if refreshed.is_some_and(|at| at >= oldest) {
            return Ok(());
        }
        let began = Instant::now();
        let found = match &self.target.kind {
            Kind::Single => self.single().await,
            Kind::Cluster => self.cluster().await,
            Kind::Sentinel(name) => self.sentinel(name).await,
        };
        *refreshed = Some(began);
        self.learn(found?);
        Ok(())
    }

    fn learn(&self, map: Map) {
        let masters = map.owners.clone();
        let before = std::mem::replace(&mut *locked(&self.map), map).owners;
        for (owner, before) in masters.iter().zip(&before) {
            if owner != before {
                self.has_taken_over(owner);
            }
        }
        // Connections to nodes that are gone are closed.
        locked(&self.nodes)
            .retain(|address, _| masters.contains(address) || self.target.seeds.contains(address));
    }

    async fn single(&self) -> Result<Map, StoreError> {
        let address = self.target.seeds[0].clone();
        let info = self.tell(&*self.node(&address)?, &["INFO", "replication"]).await?;
        let connected = field(&info, "connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        // A replica that is away may come back and be promoted by an operator: the count never shrinks.
        let before = locked(&self.map).replicas.get(&address).copied().unwrap_or_default();
        Ok(Map::alone(address, connected.max(before)))
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
            // A list that cannot be read is not a list without replicas.
            let Some(replicas) = told.pop().and_then(Result::ok).as_ref().and_then(promotable) else {
                problem = format!("the Sentinel {seed} does not say which replicas {name:?} has");
                continue;
            };
            let master = told.pop().and_then(Result::ok).map(from_redis_value::<Option<(String, u16)>>);
            if let Some(Ok(Some((host, port)))) = master {
                let address =
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                // A Sentinel that was reset has not heard of them yet; the master knows those that follow it.
                let info = self.tell(&*self.node(&address)?, &["INFO", "replication"]).await?;
                return Ok(Map::alone(address, replicas.max(following(&info).unwrap_or_default())));
            }
            problem = format!("the Sentinel {seed} knows no master {name:?}");
        }
        Err(StoreError::Unavailable(format!("no Sentinel could say where the master is: {problem}")))
    }

    async fn cluster(&self) -> Result<Map, StoreError> {
        let masters = self.masters();
        let seeds: Vec<String> =
            self.target.seeds.iter().filter(|seed| !masters.contains(seed)).cloned().collect();
        let mut problem = StoreError::Unavailable("no node is known".to_owned());
        // A node that has failed may be among the seeds, and would be waited for.
        for address in shuffled(&masters).into_iter().chain(shuffled(&seeds)) {
            let told = self.tell(&*self.node(&address)?, &["CLUSTER", "NODES"]).await;
            match told.map(|text| read_nodes(&text, &address, &self.slots, self.target.tls)) {
                Ok(map) if map.owners.iter().any(|owner| !owner.is_empty()) => {
                    return Ok(self.with_all_views(map, &address).await);
                }
                Ok(_) => problem = StoreError::Unavailable(format!("{address} knows no node with our slots")),
                Err(error) => problem = error,
            }
        }
        Err(problem)
    }

    /// Adds what each of the masters knows: a node may not have heard yet of a replica, or of a new master.
    async fn with_all_views(&self, mut map: Map, asked: &str) -> Map {
        let others: Vec<String> = map.replicas.keys().filter(|master| *master != asked).cloned().collect();
        let views = others.iter().map(async |address| {
            let node = self.node(address).ok()?;
            let told = self.tell(&node, &["CLUSTER", "NODES"]).await.ok()?;
            Some(read_nodes(&told, address, &self.slots, self.target.tls))
        });
        join_all(views).await.into_iter().flatten().for_each(|view| map.merge(view));
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

/// Replicas that follow a master, as its INFO says; `None`: it does not say. One that is not online yet counts: what the master
/// does until then reaches it later, and it can be promoted before. A replica that is online tells every second how far it is,
/// so one that has been silent for longer is on its way out.
pub(crate) fn following(info: &str) -> Option<usize> {
    const LAG_MAX_S: u64 = 2;
    field(info, "connected_slaves")?;
    let follows = |line: &&str| {
        let Some((name, facts)) = line.split_once(':') else { return false };
        let lag = facts.split(',').find_map(|fact| fact.trim().strip_prefix("lag=")?.parse::<u64>().ok());
        let is_silent = facts.contains("state=online") && lag.is_some_and(|lag| lag > LAG_MAX_S);
        name.strip_prefix("slave").is_some_and(|number| number.parse::<u32>().is_ok()) && !is_silent
    };
    Some(info.lines().filter(follows).count())
}

/// Replicas in the answer of a Sentinel that it does not take for down; `None`: it is no such answer.
fn promotable(told: &Value) -> Option<usize> {
    let replicas: Vec<HashMap<String, String>> = from_redis_value(told.clone()).ok()?;
    let is_down = |flags: &String| flags.split(',').any(|flag| ["s_down", "o_down"].contains(&flag));
    Some(replicas.iter().filter(|replica| !replica.get("flags").is_some_and(is_down)).count())
}

/// The address of a node in `CLUSTER NODES`, `ip:port@bus,host,...`, and its other name.
fn read_address(text: &str, asked: &str, by_host: bool) -> (String, Option<String>) {
    let mut parts = text.split(',');
    let address = parts.next().unwrap_or_default().split('@').next().unwrap_or_default();
    // A node that was never met by another does not know its own host.
    let address = match address.strip_prefix(':') {
        Some(port) => format!("{}:{port}", asked.rsplit_once(':').map_or(asked, |(host, _)| host)),
        None => address.to_owned(),
    };
    // What follows it are facts, `name=value`.
    let host = parts.next().filter(|host| !host.is_empty() && !host.contains('='));
    let named = host.zip(address.rsplit_once(':')).map(|(host, (_, port))| format!("{host}:{port}"));
    match named {
        Some(named) if by_host => (named, Some(address)),
        named => (address, named),
    }
}

/// Reads `CLUSTER NODES`. A replica counts unless the majority of masters has declared it failed (`fail`, not `fail?`): only
/// then it is not promoted.
fn read_nodes(text: &str, asked: &str, slots: &[u16], by_host: bool) -> Map {
    let (owners, epochs) = (vec![String::new(); slots.len()], vec![0; slots.len()]);
    let mut map = Map { owners, epochs, ..Map::default() };
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
        let (address, other) = read_address(address, asked, by_host);
        let epoch = words.nth(2).and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        for range in words.skip(1).filter(|word| !word.starts_with('[')) {
            let (from, to) = range.split_once('-').unwrap_or((range, range));
            let (Ok(from), Ok(to)) = (from.parse::<u16>(), to.parse::<u16>()) else { continue };
            for (at, _) in slots.iter().enumerate().filter(|(_, slot)| (from..=to).contains(*slot)) {
                (map.owners[at], map.epochs[at]) = (address.clone(), epoch);
            }
        }
        map.names.extend(other.map(|other| (other, address.clone())));
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

    const SLOT: &[u16] = &[0];

    /// The topology of a Cluster that has one slot.
    fn topology(map: Map) -> Topology {
        let target = Target::new("redis+cluster://a:1", &crate::Options::default()).unwrap();
        let topology = Topology::new(target, &Keys::new("hapax"));
        topology.learn(map);
        topology
    }

    #[test]
    fn the_nodes_of_a_cluster_are_read() {
        let text = "a1 :7000@17000 myself,master - 0 0 1 connected 0-5460 [93-<-c3]\n\
                    b2 10.0.0.2:7000@17000,host master - 0 0 2 connected 5461-10000 10002\n\
                    c3 10.0.0.3:7000@17000 master,fail - 0 0 3 disconnected 10001 10003-16383\n\
                    d4 10.0.0.4:7000@17000 slave a1 0 0 1 connected\n\
                    e5 10.0.0.5:7000@17000 slave,fail? a1 0 0 1 connected\n\
                    f6 10.0.0.6:7000@17000 slave,fail a1 0 0 1 connected\n";
        let slots = [0, 5461, 10_001, 10_002];
        let map = read_nodes(text, "10.0.0.1:7000", &slots, false);
        assert_eq!(map.owners, ["10.0.0.1:7000", "10.0.0.2:7000", "", "10.0.0.2:7000"]);
        assert_eq!(map.epochs, [1, 2, 0, 2]);
        assert_eq!((map.replicas["10.0.0.1:7000"], map.replicas["10.0.0.2:7000"]), (2, 0));
        let map = read_nodes(text, "10.0.0.1:7000", &slots, true);
        assert_eq!(
            map.owners,
            ["10.0.0.1:7000", "host:7000", "", "host:7000"],
            "its certificate names the host"
        );
    }

    #[test]
    fn what_is_no_list_of_nodes_gives_no_owner() {
        for text in ["", "garbage", "a b c d e f g h 0-x"] {
            let map = read_nodes(text, "h:1", SLOT, false);
            assert_eq!(map.owners, [""], "{text:?}");
        }
    }

    #[test]
    fn a_node_has_one_address_and_may_have_another_name() {
        let read = |text: &str, by_host| read_address(text, "asked:1", by_host);
        let (ip, named) = ("10.0.0.2:7000".to_owned(), "host:7000".to_owned());
        assert_eq!(read("10.0.0.2:7000@17000", true), (ip.clone(), None));
        assert_eq!(read("10.0.0.2:7000@17000,", true), (ip.clone(), None));
        assert_eq!(read("10.0.0.2:7000@17000,,shard-id=7", true), (ip.clone(), None));
        assert_eq!(read("10.0.0.2:7000@17000,shard-id=7", true), (ip.clone(), None));
        assert_eq!(read("10.0.0.2:7000@17000,host,tls-port=0", false), (ip.clone(), Some(named.clone())));
        assert_eq!(read("10.0.0.2:7000@17000,host", true), (named, Some(ip)));
        assert_eq!(read(":7000@17000", true), ("asked:7000".to_owned(), None));
    }

    /// A node that has just become the master is not known as one: that it has no replica must not follow.
    #[test]
    fn a_master_that_is_not_known_is_not_one_without_replicas() {
        let before = "a1 a:1@2 master - 0 0 1 connected 0\nb2 b:1@2 slave a1 0 0 1 connected\n";
        let topology = topology(read_nodes(before, "a:1", SLOT, false));
        assert_eq!(topology.replicas("a:1"), Some(1));
        topology.moved(0, "b:1");
        assert_eq!((topology.owner(0).as_deref(), topology.replicas("b:1")), (Some("b:1"), None));
    }

    /// The first view lags behind, as gossip does after a failover.
    #[test]
    fn the_latest_of_all_views_counts() {
        let old = "a1 a:1@2 master - 0 0 1 connected 0\nb2 b:1@2 slave a1 0 0 1 connected\n";
        let new = "a1 a:1@2 slave b2 0 0 7 connected\nb2 b:1@2 master - 0 0 7 connected 0\n";
        let (old, new) = (read_nodes(old, "a:1", SLOT, false), read_nodes(new, "b:1", SLOT, false));
        for views in [[&old, &new], [&new, &old]] {
            let mut map = views[0].clone();
            map.merge(views[1].clone());
            assert_eq!((map.owners[0].as_str(), map.epochs[0], map.replicas["b:1"]), ("b:1", 7, 1));
        }
    }

    #[test]
    fn a_node_is_known_by_each_of_its_names() {
        let nodes = "a1 10.0.0.1:1@2,a master - 0 0 1 connected 0\n";
        let topology = topology(read_nodes(nodes, "10.0.0.1:1", SLOT, false));
        assert_eq!(topology.named("a:1", "b:1"), "10.0.0.1:1");
        assert_eq!(topology.named("c:1", "b:1"), "c:1");
        assert_eq!(topology.named(":7", "10.0.0.1:1"), "10.0.0.1:7");
    }

    #[test]
    fn a_replica_that_is_silent_does_not_count() {
        let info = "# Replication\r\nrole:master\r\nconnected_slaves:4\r\n\
                    slave0:ip=h,port=1,state=online,offset=1,lag=1\r\n\
                    slave1:ip=h,port=2,state=online,offset=1,lag=30\r\n\
                    slave2:ip=h,port=3,state=send_bulk,offset=0,lag=0\r\n\
                    slave3:ip=h,port=4,state=online,offset=1,lag=0\r\n\
                    slaves_waiting_psync:1\r\n";
        assert_eq!(following(info), Some(3));
        assert_eq!(following("connected_slaves:0\r\n"), Some(0));
        assert_eq!(following("role:master\r\n"), None);
    }

    #[test]
    fn a_sentinel_that_does_not_list_replicas_has_not_said_that_there_are_none() {
        let replica = |flags: &str| {
            let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
            Value::Array(vec![text("name"), text("r"), text("flags"), text(flags)])
        };
        let told = Value::Array(vec![replica("slave"), replica("slave,s_down"), replica("o_down,slave")]);
        assert_eq!(promotable(&told), Some(1));
        assert_eq!(promotable(&Value::Array(vec![])), Some(0));
        assert_eq!(promotable(&Value::Okay), None);
        assert_eq!(promotable(&Value::Array(vec![Value::Int(1)])), None);
    }
}
