//! `cargo xtask bench proxy`: the proxy beside a minimal reverse-proxy hop, interleaved in one run.
//!
//! Service, plain hop, proxy and client share this process and its two threads, over loopback: absolute times are high,
//! and only ratios within one run are meaningful. The plain hop is hyper's server and hyper-util's pooled client, with
//! nothing between them but the removal of hop-by-hop headers.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Json, Ledger, Owner, RecordedOutcome, Scope,
};
use hapax_embedded::{Embedded, Options};
use hapax_http::proxy::{Proxy, ProxyConfig};
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};

type Error = Box<dyn std::error::Error + Send + Sync>;

const HELP: &str = "\
cargo xtask bench proxy [OPTIONS]
  --quick        one short round of each: is it alive?
  --markdown     a table for docs/BENCHMARKS.md
  --rounds N     rounds of each load [default: 9]
  --hops N       no times: N requests through the plain hop, for a profiler or `perf stat`
  --passes N     the same through the proxy, without a key
  --keyed N      the same, each request with its own key
  --replays N    the same, all with one key
Environment: HAPAX_BENCH_DIR is the folder for data [default: target/bench]; it must be on a real disk.";

/// The measured variants, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Through the plain hop.
    Plain,
    /// Through the proxy, without a key.
    NoKey,
    /// Through the proxy, each request with its own key.
    Key,
    /// Through the proxy, with one key: all but the first are replays.
    Replay,
    /// The ledger alone: a claim and its end.
    Ledger,
}

const WAYS: [Way; 5] = [Way::Plain, Way::NoKey, Way::Key, Way::Replay, Way::Ledger];

struct Args {
    markdown: bool,
    rounds: usize,
    round: Duration,
    /// Send only this many requests of one variant.
    only: Option<(Way, usize)>,
}

fn args() -> Result<Args, String> {
    let mut args = Args { markdown: false, rounds: 9, round: Duration::from_secs(1), only: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--quick" => (args.rounds, args.round) = (1, Duration::from_millis(200)),
            "--markdown" => args.markdown = true,
            "--rounds" => {
                let rounds = words.next().and_then(|rounds| rounds.parse().ok());
                args.rounds = rounds.ok_or("--rounds needs a number")?;
            }
            "--hops" | "--passes" | "--keyed" | "--replays" => {
                let way = match word.as_str() {
                    "--hops" => Way::Plain,
                    "--passes" => Way::NoKey,
                    "--keyed" => Way::Key,
                    _ => Way::Replay,
                };
                let requests = words.next().and_then(|requests| requests.parse().ok());
                args.only = Some((way, requests.ok_or_else(|| format!("{word} needs a number"))?));
            }
            // Passed by cargo.
            "--bench" => {}
            _ => return Err(format!("unknown option {word}\n\n{HELP}")),
        }
    }
    Ok(args)
}

/// Serves connections with a function.
async fn serve<F, R>(answer: F) -> std::io::Result<SocketAddr>
where
    F: Fn(Request<Incoming>) -> R + Clone + Send + Sync + 'static,
    R: Future<Output = Response<http_body_util::Either<Full<Bytes>, Incoming>>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let answer = answer.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let answering = answer(request);
                    async move { Ok::<_, Infallible>(answering.await) }
                });
                let mut builder = auto::Builder::new(TokioExecutor::new());
                builder.http1().timer(TokioTimer::new());
                let _ = builder.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
    Ok(address)
}

/// The service: reads the body, responds with 256 bytes.
async fn service() -> std::io::Result<SocketAddr> {
    serve(|request| async {
        let _ = request.into_body().collect().await;
        Response::new(http_body_util::Either::Left(Full::new(Bytes::from_static(&[b'x'; 256]))))
    })
    .await
}

/// The plain hop.
async fn plain(upstream: SocketAddr) -> std::io::Result<SocketAddr> {
    let client: Client<_, Incoming> = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(3))
        .build_http();
    serve(move |mut request| {
        let client = client.clone();
        async move {
            let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
            *request.uri_mut() =
                format!("http://{upstream}{path}").parse::<Uri>().expect("an address and a path");
            request.headers_mut().remove("connection");
            let mut response = client.request(request).await.expect("the service answers");
            response.headers_mut().remove("connection");
            response.map(http_body_util::Either::Right)
        }
    })
    .await
}

async fn proxy(upstream: SocketAddr, ledger: Arc<dyn Ledger>) -> Result<SocketAddr, Error> {
    let listen = SocketAddr::from(([127, 0, 0, 1], 0));
    let config = ProxyConfig { listen, upstream: format!("http://{upstream}"), ..ProxyConfig::default() };
    let proxy = Proxy::new(config, ledger)?;
    let listener = proxy.bind().await?;
    let address = listener.local_addr()?;
    tokio::spawn(proxy.run(listener, std::future::pending()));
    Ok(address)
}

/// Sends requests one after the other on one connection while `more` of the number done is true; returns the duration
/// of each.
async fn drive(to: SocketAddr, way: Way, more: impl Fn(usize) -> bool) -> Result<Vec<Duration>, Error> {
    let stream = TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut times = Vec::new();
    while more(times.len()) {
        let mut request =
            Request::post("/orders").header("host", "bench").header("content-type", "application/json");
        match way {
            Way::Key => request = request.header("idempotency-key", format!("{:032x}", fastrand::u128(..))),
            Way::Replay => request = request.header("idempotency-key", "the-same"),
            _ => {}
        }
        let request = request.body(Full::new(Bytes::from_static(br#"{"order":7,"cents":1999}"#)))?;
        let begun = Instant::now();
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        response.into_body().collect().await?;
        times.push(begun.elapsed());
        if !status.is_success() {
            return Err(format!("{way:?}: {status}").into());
        }
    }
    Ok(times)
}

/// Claims and completes keys, one after the other.
async fn claims(ledger: Arc<dyn Ledger>, until: Instant) -> Result<Vec<Duration>, Error> {
    let mut times = Vec::new();
    let outcome = RecordedOutcome::done(Json::of(&"x".repeat(300))?);
    while Instant::now() < until {
        let name = format!("{:032x}", fastrand::u128(..));
        let id = EntryId::new(Scope::new("bench")?, name.parse()?);
        let begun = Instant::now();
        let claim =
            ledger.claim(vec![ClaimRequest::new(id.clone(), Owner::new(&name)?, 30_000)]).await?.pop();
        let Some(Ok(Claim::Granted(grant))) = claim else { return Err(format!("{claim:?}").into()) };
        let ending = ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: 60_000 };
        ledger.end(vec![EndClaim { id, token: grant.token, ending }]).await?.pop().ok_or("no answer")??;
        times.push(begun.elapsed());
    }
    Ok(times)
}

fn quantile(times: &[Duration], q: f64) -> f64 {
    times[((times.len() - 1) as f64 * q) as usize].as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// p50 and p99 of each variant in each round, in microseconds.
struct Measured {
    rounds: Vec<[(f64, f64); WAYS.len()]>,
}

impl Measured {
    fn of(&self, way: Way, pick: fn((f64, f64)) -> f64) -> f64 {
        median(self.rounds.iter().map(|round| pick(round[way as usize])).collect())
    }

    fn ratio(&self, way: Way, pick: fn((f64, f64)) -> f64) -> f64 {
        let ratio =
            |round: &[(f64, f64); WAYS.len()]| pick(round[way as usize]) / pick(round[Way::Plain as usize]);
        median(self.rounds.iter().map(ratio).collect())
    }
}

async fn measure(
    to: (SocketAddr, SocketAddr),
    ledger: &Arc<dyn Ledger>,
    connections: usize,
    args: &Args,
) -> Result<Measured, Error> {
    let mut rounds = Vec::new();
    // One round more than requested: the first is a warm-up.
    for at in 0..=args.rounds {
        let mut round = [(0.0, 0.0); WAYS.len()];
        for turn in 0..WAYS.len() {
            let way = WAYS[(at + turn) % WAYS.len()];
            let until = Instant::now() + args.round;
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..connections {
                let ledger = ledger.clone();
                match way {
                    Way::Plain => tasks.spawn(drive(to.0, way, move |_| Instant::now() < until)),
                    Way::Ledger => tasks.spawn(claims(ledger, until)),
                    _ => tasks.spawn(drive(to.1, way, move |_| Instant::now() < until)),
                };
            }
            let mut times = Vec::new();
            while let Some(done) = tasks.join_next().await {
                times.extend(done??);
            }
            times.sort_unstable();
            round[way as usize] = (quantile(&times, 0.5), quantile(&times, 0.99));
        }
        if at > 0 {
            rounds.push(round);
        }
    }
    Ok(Measured { rounds })
}

async fn run(args: &Args) -> Result<(), Error> {
    let root = std::env::var("HAPAX_BENCH_DIR").unwrap_or_else(|_| "target/bench".into());
    std::fs::create_dir_all(&root)?;
    let folder = tempfile::tempdir_in(root)?;
    let ledger: Arc<dyn Ledger> = Arc::new(Embedded::open(folder.path(), Options::default())?);
    let upstream = service().await?;
    let to = (plain(upstream).await?, proxy(upstream, ledger.clone()).await?);
    if let Some((way, requests)) = args.only {
        drive(if way == Way::Plain { to.0 } else { to.1 }, way, |done| done < requests).await?;
        return Ok(());
    }
    if args.markdown {
        println!(
            "| connections | | plain hop us | no key us | of plain | with a key us | claim and end alone us | replay us |"
        );
        println!("|--:|---|--:|--:|--:|--:|--:|--:|");
    }
    for connections in [1, 16, 64] {
        let measured = measure(to, &ledger, connections, args).await?;
        for (name, pick) in [("p50", (|t| t.0) as fn((f64, f64)) -> f64), ("p99", |t| t.1)] {
            let us = |way| measured.of(way, pick);
            let ratio = measured.ratio(Way::NoKey, pick);
            if args.markdown {
                println!(
                    "| {connections} | {name} | {:.0} | {:.0} | {ratio:.2} | {:.0} | {:.0} | {:.0} |",
                    us(Way::Plain),
                    us(Way::NoKey),
                    us(Way::Key),
                    us(Way::Ledger),
                    us(Way::Replay)
                );
            } else {
                println!(
                    "{connections:>3} connections, {name}: plain hop {:.0} us, no key {:.0} us ({ratio:.2} of it), with a \
                     key {:.0} us (claim and end alone {:.0} us), replay {:.0} us",
                    us(Way::Plain),
                    us(Way::NoKey),
                    us(Way::Key),
                    us(Way::Ledger),
                    us(Way::Replay)
                );
            }
        }
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let done = args().map_err(Error::from).and_then(|args| runtime?.block_on(run(&args)));
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
