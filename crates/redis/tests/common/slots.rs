//! Slots of a Cluster that move from one master to another.

use hapax_faults::{RedisCluster, RedisServer};

/// A slot on its way.
pub struct Move<'c> {
    from: &'c RedisServer,
    to: &'c RedisServer,
    to_id: String,
    slot: String,
}

pub fn is_master(node: &RedisServer) -> bool {
    node.cli(&["ROLE"]).is_ok_and(|role| role.starts_with("master"))
}

impl<'c> Move<'c> {
    /// Prepares the move of the slot of the first key that fits.
    pub fn begin(cluster: &'c RedisCluster, pattern: &str) -> Self {
        let masters: Vec<&RedisServer> = cluster.nodes.iter().filter(|node| is_master(node)).collect();
        let found = masters.iter().find_map(|node| {
            let keys = node.cli(&["--scan", "--pattern", pattern]).unwrap();
            Some((*node, keys.lines().next()?.to_owned()))
        });
        let (from, key) = found.expect("a node has such a key");
        let slot = from.cli(&["CLUSTER", "KEYSLOT", &key]).unwrap();
        let to = masters.into_iter().find(|node| node.address() != from.address()).unwrap();
        let id = |node: &RedisServer| node.cli(&["CLUSTER", "MYID"]).unwrap();
        let (from_id, to_id) = (id(from), id(to));
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).unwrap();
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).unwrap();
        Self { from, to, to_id, slot }
    }

    /// The first keys of the slot that have not been moved.
    pub fn keys(&self) -> Vec<String> {
        let keys = self.from.cli(&["CLUSTER", "GETKEYSINSLOT", &self.slot, "100"]).unwrap();
        keys.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
    }

    pub fn migrate(&self, keys: &[String]) {
        let port = self.to.address().split_once(':').unwrap().1.to_owned();
        let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        command.extend(keys.iter().map(String::as_str));
        self.from.cli(&command).unwrap();
    }

    /// Moves all keys, ten at a time as `redis-cli --cluster reshard` does; says how many there were.
    pub fn migrate_all(&self) -> usize {
        let mut moved = 0;
        loop {
            let keys = self.keys();
            if keys.is_empty() {
                return moved;
            }
            for some in keys.chunks(10) {
                self.migrate(some);
            }
            moved += keys.len();
        }
    }

    pub fn end(&self) {
        for node in [self.to, self.from] {
            node.cli(&["CLUSTER", "SETSLOT", &self.slot, "NODE", &self.to_id]).unwrap();
        }
    }
}
