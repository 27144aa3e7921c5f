//! `hapax relay`: publishes the messages of an outbox.

mod page;

use std::net::SocketAddr;
use std::path::PathBuf;

use self::page::Page;
use anyhow::Context as _;
use clap::Args;
use hapax::core::outbox::OutboxStore;
use hapax::core::store::SharedStore;
use hapax::relay::{self, Relay, RelayConfig};
use hapax::{QueueName, without_secrets};
use hapax_client::otlp::OtlpEndpoint;
use hapax_observe::trace::Tracer;
use std::sync::Arc;

use crate::output::raw;
use crate::serve::config::{LogConfig, LogFormat};
use crate::serve::logs;
use crate::serve::signals::Signals;
use crate::text::parse_ms;
use crate::usage;

/// Publishes what business transactions have written into an outbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax relay --from postgres://localhost/shop --to http://127.0.0.1:9324 --queue orders.fifo
  hapax relay --from postgres://localhost/shop --to postgres://localhost/shop --queue orders --topic 'orders.*'
  HAPAX_WEBHOOK_SECRET=whsec_… hapax relay --from sqlite:shop.db --to webhook+https://shop.example/events
  hapax relay --from postgres://localhost/shop --to nats://localhost/shop --listen 127.0.0.1:9325
  hapax relay --from postgres://localhost/shop --to kafka://localhost:9092/shop
  AWS_REGION=eu-central-1 hapax relay --from postgres://db/shop --to sqs+https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo

Several relays with the same --name share the work; one that stops is replaced by the others.
SIGTERM or SIGINT stops it after what the sink is working on; a second one stops it at once.")]
pub struct RelayArgs {
    /// The outbox: postgres://HOST/DATABASE (with its password in PGPASSWORD) or sqlite:PATH.
    #[arg(long, value_name = "URL", env = "HAPAX_OUTBOX", hide_env_values = true)]
    from: String,
    /// Where to publish: a store or server with --queue, webhook+https://HOST/PATH, sqs+https://HOST/ACCOUNT/QUEUE,
    /// nats://HOST:PORT/PREFIX, or kafka://HOST:PORT/PREFIX (in builds with the feature kafka).
    #[arg(long, value_name = "URL", hide_env_values = true)]
    to: String,
    /// The queue, if the sink is a store or a server; created if it does not exist.
    #[arg(long, value_name = "QUEUE")]
    queue: Option<QueueName>,
    /// The route's name: what it has published is remembered under it [default: default].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Topics to publish, with * for any characters; may be repeated [default: *].
    #[arg(long, value_name = "PATTERN")]
    topic: Vec<String>,
    /// File with the secret of a webhook's signature, instead of HAPAX_WEBHOOK_SECRET.
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// How long the share of a relay that does not answer stays its own [default: 15s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u64>,
    /// After how many failed attempts a message is parked; 0: never [default: 20].
    #[arg(long, value_name = "COUNT")]
    max_attempts: Option<u32>,
    /// After how long without progress the relay is not ready [default: 30s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    stalled: Option<u64>,
    /// Shows /metrics, /readyz and /healthz at this address [default: none].
    #[arg(long, value_name = "ADDR", env = "HAPAX_RELAY_LISTEN")]
    listen: Option<SocketAddr>,
    /// Lets --listen be an address beyond loopback: anyone who reaches it can read the figures.
    #[arg(long, requires = "listen")]
    insecure: bool,
    /// Sends a span for each message that was enqueued in a recorded trace to this OpenTelemetry collector, OTLP over HTTP:
    /// http://127.0.0.1:4318 [default: no traces].
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Format of the logs, on standard error [default: text].
    #[arg(long, value_name = "FORMAT", env = "HAPAX_LOG_FORMAT")]
    log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace [default: info].
    #[arg(long, value_name = "LEVEL", env = "HAPAX_LOG_LEVEL")]
    log_level: Option<String>,
}

/// Runs a relay until SIGTERM or SIGINT.
pub async fn run(args: RelayArgs) -> anyhow::Result<()> {
    let mut log = LogConfig::default();
    log.format = args.log_format.unwrap_or(log.format);
    log.level = args.log_level.unwrap_or(log.level);
    let defaults = RelayConfig::default();
    let config = RelayConfig {
        name: args.name.unwrap_or(defaults.name),
        from: Some(args.from),
        to: Some(args.to),
        queue: args.queue,
        topics: if args.topic.is_empty() { defaults.topics } else { args.topic },
        secret_file: args.secret_file,
        lease_ms: args.lease.unwrap_or(defaults.lease_ms),
        max_attempts: args.max_attempts.unwrap_or(defaults.max_attempts),
        stalled_ms: args.stalled.unwrap_or(defaults.stalled_ms),
    };
    if let Some((_, problem)) = config.problems().into_iter().next() {
        return Err(usage(format!("--{problem}")));
    }
    if let Some(address) = args.listen.filter(|address| !address.ip().is_loopback() && !args.insecure) {
        return Err(usage(format!(
            "--listen {address}: anyone who reaches it could read the figures; use a loopback address, or --insecure in a \
             network that is trusted"
        )));
    }
    logs::start(&log)?;
    let mut signals = Signals::new()?;
    let collector = args.otlp.as_deref().map(|url| OtlpEndpoint::new(url, "hapax-relay")).transpose();
    let collector = collector.map_err(|error| usage(format!("--otlp: {error}")))?;
    // What was enqueued without a context is sampled by the server that takes it.
    let (tracer, exporter) = collector.map(|collector| collector.trace(0.0)).unzip();
    let page = match args.listen {
        Some(address) => Some(Page::bind(address, args.insecure).await?),
        None => None,
    };
    let relay = tokio::select! {
        opened = open(&config, None, None, tracer) => opened?,
        () = signals.next() => return Ok(()),
    };
    let watch = relay.watch();
    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let page = page.map(|page| tokio::spawn(page.run(watch.clone(), async { drop(ends.await) })));
    let run = relay.run(signals.shutdown()).await;
    // Its figures can be read while it finishes.
    drop(end);
    if let Some(page) = page {
        let _ = page.await;
    }
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    run.with_context(|| format!("relay {}", config.name))?;
    let counts = watch.counts();
    tracing::info!(published = counts.published, duplicates = counts.duplicates, "stopped");
    Ok(())
}

/// Opens a relay and prints where it leads.
pub async fn open(
    config: &RelayConfig,
    outbox: Option<Arc<dyn OutboxStore>>,
    store: Option<SharedStore>,
    tracer: Option<Arc<Tracer>>,
) -> anyhow::Result<Relay> {
    let opened = relay::open_traced(config, outbox, store, tracer).await;
    let relay = opened.with_context(|| format!("relay {}", config.name))?;
    let from = config.from.as_deref().map_or("this store".to_owned(), without_secrets);
    let sink = relay.sink();
    let line = format!("  Relay {}: {from} -> {}; {}\n", config.name, sink.name, sink.dedup.after_a_crash());
    if let Err(error) = raw(&line) {
        // Standard output is closed; publish anyway.
        tracing::debug!("standard output: {error:#}");
    }
    Ok(relay)
}
