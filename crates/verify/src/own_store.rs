//! The servers of PostgreSQL or Redis that a run starts for itself, and may kill; or several, of which one takes over.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use hapax_faults::{PatroniCluster, PostgresServer, RedisCluster, RedisSentinels, RedisServer, Replication};

use crate::fault::{LeaderLoss, REPLICA_CUT};

/// The database of a run's own PostgreSQL.
const DATABASE: &str = "postgres";
/// A master that is silent for this time is replaced.
const DOWN_AFTER: Duration = Duration::from_secs(1);
/// How long a replica may take to become the master.
const FAILOVER: Duration = Duration::from_mins(1);
/// A write is refused where no replica would get it; what is written is on disk soon; a replica that returns has all data soon.
const REPLICATED: [&str; 4] =
    ["min-replicas-to-write 1", "min-replicas-max-lag 10", "appendonly yes", "repl-diskless-sync-delay 0"];

/// The servers of a run's own store. They end with the run.
pub enum OwnStore {
    Postgres(PostgresServer),
    Redis(RedisServer),
    /// Two servers under Patroni, of which one leads; commits wait for the other.
    Patroni(PatroniCluster),
    /// A master with two replicas, and three Sentinels.
    Sentinels(RedisSentinels),
    /// Three masters with a replica each.
    RedisCluster(RedisCluster),
}

impl OwnStore {
    /// The names that follow `private:`.
    const NAMES: &str = "private:postgres, private:postgres-patroni, private:redis, private:redis-sentinel and \
                         private:redis-cluster";

    /// Starts the servers that a store's URL asks for, such as `private:postgres`. `None` for any other URL.
    pub fn start(url: &str) -> Option<anyhow::Result<Self>> {
        let server = match url.strip_prefix("private:")? {
            "postgres" => PostgresServer::start(&[]).map(Self::Postgres),
            "postgres-patroni" => PatroniCluster::start(Replication::Synchronous).map(Self::Patroni),
            "redis" => RedisServer::start(&["appendonly yes", "appendfsync always"]).map(Self::Redis),
            "redis-sentinel" => RedisSentinels::start(&REPLICATED, DOWN_AFTER).map(Self::Sentinels),
            "redis-cluster" => {
                // Slower than a Sentinel: nodes that are slow because of the machine are not taken for dead.
                let settings = [&REPLICATED[..], &["cluster-node-timeout 3000"]].concat();
                RedisCluster::start(&settings).map(Self::RedisCluster)
            }
            other => Err(format!("there is no private:{other}; there are {}", Self::NAMES)),
        };
        Some(server.map_err(anyhow::Error::msg))
    }

    /// The store's URL.
    pub fn url(&self) -> anyhow::Result<String> {
        Ok(match self {
            Self::Postgres(server) => server.url(DATABASE),
            Self::Redis(server) => format!("redis://{}", server.address()),
            Self::Patroni(cluster) => {
                let leader = cluster.wait_for_leader().map_err(anyhow::Error::msg)?;
                format!("postgres://postgres@{leader}/{DATABASE}")
            }
            Self::Sentinels(all) => format!("{}?hapax_durability=replicated", all.url()),
            Self::RedisCluster(cluster) => format!("{}?hapax_durability=replicated", cluster.url()),
        })
    }

    /// Whether a replica takes over when the leader is lost.
    pub fn has_replicas(&self) -> bool {
        !matches!(self, Self::Postgres(_) | Self::Redis(_))
    }

    /// Ends a server without replicas as a crash does, and starts it again on the same data and port.
    pub fn restart(&self) -> anyhow::Result<()> {
        let started = match self {
            // SIGKILL would leave PostgreSQL's other processes behind; they end at once at this signal, and write nothing.
            Self::Postgres(server) => {
                server.stop("QUIT");
                server.run()
            }
            Self::Redis(server) => {
                server.kill();
                server.run()
            }
            Self::Patroni(_) | Self::Sentinels(_) | Self::RedisCluster(_) => return Ok(()),
        };
        started.map_err(anyhow::Error::msg).context("the store's server")
    }

    /// Kills or pauses a leader until a replica has taken over; then the old one returns as a replica. `moved` gets the address
    /// of the new leader, where clients have to be told. Returns when the store is whole again.
    pub fn fail_over(
        &self,
        loss: LeaderLoss,
        random: &mut fastrand::Rng,
        moved: impl Fn(SocketAddr),
    ) -> anyhow::Result<()> {
        let done = match self {
            Self::Postgres(_) | Self::Redis(_) => Ok(()),
            Self::Patroni(cluster) => fail_over_patroni(cluster, loss, moved),
            Self::Sentinels(all) => fail_over_sentinels(all, loss),
            Self::RedisCluster(cluster) => fail_over_cluster(cluster, loss, random.usize(..PAIRS)),
        };
        done.map_err(anyhow::Error::msg).context("a failover of the store")
    }

    /// Stops a replica for a while, so that it receives and confirms nothing: to its leader, it is cut off.
    pub fn cut_replica(&self, random: &mut fastrand::Rng) -> anyhow::Result<()> {
        let done = match self {
            Self::Postgres(_) | Self::Redis(_) => Ok(()),
            Self::Patroni(cluster) => cluster.stop_receiver().and_then(|receiver| {
                std::thread::sleep(REPLICA_CUT);
                cluster.continue_receiver(receiver)
            }),
            Self::Sentinels(all) => known_master(all).map(|master| {
                let replica = &all.nodes[(master + 1) % all.nodes.len()];
                pause_for(replica, REPLICA_CUT);
            }),
            Self::RedisCluster(cluster) => {
                let (_, replica) = pair(cluster, random.usize(..PAIRS));
                pause_for(replica, REPLICA_CUT);
                cluster.wait_until_whole()
            }
        };
        done.map_err(anyhow::Error::msg).context("a cut of a replica")
    }
}

/// Masters of a Cluster, each with a replica.
const PAIRS: usize = 3;

fn pause_for(server: &RedisServer, time: Duration) {
    server.pause();
    std::thread::sleep(time);
    server.resume();
}

fn fail_over_patroni(
    cluster: &PatroniCluster,
    loss: LeaderLoss,
    moved: impl Fn(SocketAddr),
) -> Result<(), String> {
    let before = cluster.wait_for_leader()?;
    // Patroni promotes only a standby that has confirmed all commits.
    cluster.wait_for_standby()?;
    let old = if loss == LeaderLoss::Pause { cluster.pause_leader() } else { cluster.kill_leader() };
    let end = Instant::now() + FAILOVER;
    let other = wait_until(end, || cluster.leader().filter(|leader| *leader != before));
    if let Some(leader) = other {
        moved(leader);
    }
    if loss == LeaderLoss::Pause {
        cluster.resume_node(old)?;
    } else {
        cluster.run(old)?;
    }
    other.ok_or("no standby took over")?;
    cluster.wait_for_standby()
}

fn known_master(all: &RedisSentinels) -> Result<usize, String> {
    let end = Instant::now() + FAILOVER;
    wait_until(end, || all.master()).ok_or_else(|| "the Sentinels know no master".to_owned())
}

fn fail_over_sentinels(all: &RedisSentinels, loss: LeaderLoss) -> Result<(), String> {
    let master = known_master(all)?;
    lose(&all.nodes[master], loss);
    let end = Instant::now() + FAILOVER;
    let other = wait_until(end, || all.master().filter(|now| *now != master));
    find_again(&all.nodes[master], loss)?;
    other.map(drop).ok_or_else(|| "no replica took over".to_owned())
}

/// The master of a pair, and its replica.
fn pair(cluster: &RedisCluster, number: usize) -> (&RedisServer, &RedisServer) {
    let (one, other) = (&cluster.nodes[number], &cluster.nodes[number + PAIRS]);
    if is_master(one) { (one, other) } else { (other, one) }
}

fn is_master(node: &RedisServer) -> bool {
    node.cli(&["ROLE"]).is_ok_and(|role| role.starts_with("master"))
}

fn fail_over_cluster(cluster: &RedisCluster, loss: LeaderLoss, number: usize) -> Result<(), String> {
    cluster.wait_until_whole()?;
    let (master, replica) = pair(cluster, number);
    lose(master, loss);
    let end = Instant::now() + FAILOVER;
    let took_over = wait_until(end, || is_master(replica).then_some(()));
    find_again(master, loss)?;
    took_over.ok_or("no replica took over")?;
    cluster.wait_until_whole()
}

fn lose(server: &RedisServer, loss: LeaderLoss) {
    if loss == LeaderLoss::Pause { server.pause() } else { server.kill() }
}

fn find_again(server: &RedisServer, loss: LeaderLoss) -> Result<(), String> {
    if loss != LeaderLoss::Pause {
        return server.run();
    }
    server.resume();
    Ok(())
}

fn wait_until<T>(end: Instant, mut found: impl FnMut() -> Option<T>) -> Option<T> {
    loop {
        match found() {
            Some(found) => return Some(found),
            None if Instant::now() > end => return None,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}
