//! A shop whose books balance: an axum service writes orders with their events, a relay publishes the events, a consumer ships
//! each order once and publishes that, too.
//!
//! `cargo run --release --features postgres,relay --example orders -- [--seconds N] [--seed N]`
//!
//! For a minute, all processes are killed with SIGKILL at random times, and so is the database server; it is a private
//! one, PostgreSQL 15 or later has to be installed. Then everything is left to finish, and the books are compared.
//!
//! Beside it runs the same shop as it is often written, on the same orders: its service writes order and event in one
//! transaction, too, but its relay remembers the largest id that it has published, and its consumer ships, acks and announces
//! one after the other.

mod naive;
mod shop;

use std::os::unix::process::ExitStatusExt as _;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use hapax::postgres::{Options, PostgresStore};
use hapax::{Hapax, QueueConfig, RetryPolicy, Tier};
use hapax_faults::PostgresServer;
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;

const TABLES: &str = "
    CREATE TABLE orders (id bigint PRIMARY KEY, cents bigint NOT NULL);
    CREATE TABLE shipments (order_id bigint NOT NULL);
    CREATE TABLE naive_orders (id bigint PRIMARY KEY, cents bigint NOT NULL);
    CREATE TABLE naive_outbox (id bigserial PRIMARY KEY, body text NOT NULL);
    CREATE TABLE naive_position (last bigint NOT NULL);
    INSERT INTO naive_position VALUES (0);
    CREATE TABLE naive_shipments (order_id bigint NOT NULL);
";

/// The queues: orders to be shipped, and what was shipped.
const QUEUES: [(&str, Tier); 4] = [
    ("orders", Tier::Transactional),
    ("shipped", Tier::AtLeastOnce),
    ("naive-orders", Tier::AtLeastOnce),
    ("naive-shipped", Tier::AtLeastOnce),
];

/// The programs that are killed.
const ROLES: [&str; 6] = ["service", "relay", "consumer", "naive-service", "naive-relay", "naive-consumer"];

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["service", url, port] => shop::service(url, port.parse()?).await,
        ["relay", url, _] => shop::relay(url).await,
        ["consumer", url, _] => shop::consumer(url).await,
        ["naive-service", url, port] => naive::service(url, port.parse()?).await,
        ["naive-relay", url, _] => naive::relay(url).await,
        ["naive-consumer", url, _] => naive::consumer(url).await,
        _ => show(&args).await,
    }
}

async fn show(args: &[&str]) -> anyhow::Result<()> {
    let (mut seconds, mut seed) = (60, fastrand::u64(..1_000_000));
    for pair in args.chunks(2) {
        match pair {
            ["--seconds", number] => seconds = number.parse()?,
            ["--seed", number] => seed = number.parse()?,
            other => bail!("{other:?}: use --seconds N or --seed N"),
        }
    }
    println!("seed {seed}");
    let server = tokio::task::spawn_blocking(|| PostgresServer::start(&[])).await?;
    let server = Arc::new(server.map_err(|why| anyhow!(why).context("install PostgreSQL 15 or later"))?);
    let url = server.url("postgres");
    set_up(&url).await?;
    let random = fastrand::Rng::with_seed(seed);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (orders, killed, database_kills) = storm(&server, &url, until, random).await?;
    println!("Killed: {killed} processes, and the whole database server {database_kills} times.");
    let ours = books(&url, "", orders).await?;
    let naive = books(&url, "naive-", orders).await?;
    println!(
        "{:<8} {:>7} {:>8} {:>13} {:>10} {:>15}",
        "shop", "orders", "shipped", "not shipped", "twice", "announced"
    );
    for (name, books) in [("hapax", &ours), ("naive", &naive)] {
        let Books { orders, shipments, unshipped, twice, announced } = books;
        println!("{name:<8} {orders:>7} {shipments:>8} {unshipped:>13} {twice:>10} {announced:>15}");
    }
    if !ours.balance() {
        bail!("FAILED: the books do not balance");
    }
    println!("The books balance: every order was shipped once and announced once.");
    println!("The naive shop's books {}.", if naive.balance() { "balance, this time" } else { "do not" });
    Ok(())
}

async fn set_up(url: &str) -> anyhow::Result<()> {
    let store = PostgresStore::open(url, Options { migrate: true, ..Options::default() }).await?;
    let hapax = Hapax::with_store(Arc::new(store));
    for (name, tier) in QUEUES {
        let config =
            QueueConfig { tier, lease_ms: 1_000, retry: RetryPolicy::at_once(), ..QueueConfig::default() };
        hapax.queue::<u64>(name)?.ensure(config).await?;
    }
    PgConnection::connect(url).await?.execute(TABLES).await?;
    Ok(())
}

/// Orders, and kills; then everything is left to finish.
async fn storm(
    server: &Arc<PostgresServer>,
    url: &str,
    until: Instant,
    mut random: fastrand::Rng,
) -> anyhow::Result<(u64, u64, u64)> {
    let ports = [free_port()?, free_port()?];
    let port_of = |role: &str| if role.starts_with("naive") { ports[1] } else { ports[0] };
    let mut killers = tokio::task::JoinSet::new();
    let (stop, stopped) = tokio::sync::watch::channel(false);
    for role in ROLES {
        let (url, random, port, mut stopped) =
            (url.to_owned(), random.fork(), port_of(role), stopped.clone());
        killers.spawn(async move { keep_killing(role, &url, port, until, random, &mut stopped).await });
    }
    let buyer = tokio::spawn(buy(ports, until));
    let mut database_kills = 0;
    while Instant::now() < until {
        let pause_ms =
            random.u64(500..4_000).min(until.saturating_duration_since(Instant::now()).as_millis() as u64);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        let server = server.clone();
        tokio::task::spawn_blocking(move || kill_database(&server)).await??;
        database_kills += 1;
    }
    let orders = buyer.await??;
    until_settled(url, orders).await?;
    stop.send_replace(true);
    let mut killed = 0;
    while let Some(done) = killers.join_next().await {
        killed += done??;
    }
    Ok((orders, killed, database_kills))
}

fn free_port() -> anyhow::Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn kill_database(server: &PostgresServer) -> anyhow::Result<()> {
    server.signal_all("KILL");
    server.stop("KILL");
    let start = Instant::now();
    loop {
        match server.run() {
            Ok(()) => return Ok(()),
            // A process of the killed server may still hold the shared memory for a moment.
            Err(why) if start.elapsed() > Duration::from_mins(2) => return Err(anyhow!(why)),
            Err(_) => {}
        }
    }
}

/// Runs a program again and again, and kills it at random times; the last one is killed when all is done.
async fn keep_killing(
    role: &'static str,
    url: &str,
    port: u16,
    until: Instant,
    mut random: fastrand::Rng,
    stopped: &mut tokio::sync::watch::Receiver<bool>,
) -> anyhow::Result<u64> {
    let mut killed = 0;
    loop {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([role, url, &port.to_string()]).stdin(Stdio::null()).kill_on_drop(true);
        let mut child = command.stderr(Stdio::null()).spawn()?;
        let last = Instant::now() >= until;
        let life = Duration::from_millis(random.u64(50..1_500));
        tokio::select! {
            ended = child.wait() => {
                let status = ended?;
                if status.signal().is_none() {
                    // It could not reach the database.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                continue;
            }
            () = tokio::time::sleep(life), if !last => {}
            () = async { drop(stopped.wait_for(|stopped| *stopped).await) }, if last => {}
        }
        child.kill().await?;
        killed += 1;
        if last {
            return Ok(killed);
        }
    }
}

/// Places orders at both shops, each until it is confirmed.
async fn buy(ports: [u16; 2], until: Instant) -> anyhow::Result<u64> {
    let mut order = 0;
    while Instant::now() < until {
        order += 1;
        for port in ports {
            while !place(port, order).await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(order)
}

/// Whether the shop has confirmed the order.
async fn place(port: u16, order: u64) -> bool {
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let request = format!(
            "POST /orders/{order} HTTP/1.1\r\nhost: shop\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer.starts_with("HTTP/1.1 200"))
    };
    matches!(tokio::time::timeout(Duration::from_secs(5), exchange).await, Ok(Ok(true)))
}

/// Waits until our shop has shipped and announced everything, and for as long again for the other one.
async fn until_settled(url: &str, orders: u64) -> anyhow::Result<()> {
    let start = Instant::now();
    while !books(url, "", orders).await.is_ok_and(|books| books.balance()) {
        if start.elapsed() > Duration::from_mins(1) {
            // The books will say so.
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tokio::time::sleep(start.elapsed().max(Duration::from_secs(3))).await;
    Ok(())
}

struct Books {
    orders: u64,
    shipments: u64,
    unshipped: u64,
    twice: u64,
    announced: u64,
}

impl Books {
    fn balance(&self) -> bool {
        self.shipments == self.orders
            && self.unshipped == 0
            && self.twice == 0
            && self.announced == self.orders
    }
}

async fn books(url: &str, prefix: &str, orders: u64) -> anyhow::Result<Books> {
    let mut db = PgConnection::connect(url).await?;
    let table = prefix.replace('-', "_");
    let sql = format!(
        "SELECT (SELECT count(*) FROM {table}orders), (SELECT count(*) FROM {table}shipments),
           (SELECT count(*) FROM {table}orders o WHERE NOT EXISTS (SELECT 1 FROM {table}shipments s WHERE s.order_id = o.id)),
           (SELECT count(*) FROM (SELECT 1 FROM {table}shipments GROUP BY order_id HAVING count(*) > 1) twice)"
    );
    let found: (i64, i64, i64, i64) = sqlx::query_as(&sql).fetch_one(&mut db).await?;
    let hapax = Hapax::open(url).await?;
    let stats = hapax.store().stats(&format!("{prefix}shipped").parse()?).await?;
    let (placed, shipments, unshipped, twice) = found;
    if placed as u64 != orders {
        bail!("{placed} of {orders} orders are there");
    }
    let [shipments, unshipped, twice] = [shipments, unshipped, twice].map(|count| count as u64);
    Ok(Books { orders, shipments, unshipped, twice, announced: stats.ready })
}

/// Connects, or fails with the reason.
async fn connect(url: &str) -> anyhow::Result<PgConnection> {
    PgConnection::connect(url).await.with_context(|| "the database cannot be reached")
}
