//! `hapax proxy`: a reverse proxy that makes requests with an Idempotency-Key take effect once.

mod admin;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use hapax::core::OnDoubt;
use hapax::core::store::SharedStore;
use hapax::{embedded, without_secrets};
use hapax_client::otlp::Exporter;
use hapax_http::proxy::{HostPolicy, Proxy, ProxyConfig, TlsFiles};
use hapax_http::{OnOutage, Statuses, Tenant};
use hapax_server::process::{ProcessPage, store_readiness};
use serde::{Deserialize, Serialize, Serializer};
use tokio::net::TcpListener;

use self::admin::{AdminConfig, AdminListen, AdminServer};
use crate::config_file::{self, ConfigFile, Problem, changed_paths};
use crate::remote::Remote;
use crate::serve::config::{
    LogConfig, LogFormat, TraceConfig, address_problems, certificate_problems, level_problem, parse_address,
    proxy_problems,
};
use crate::serve::signals::Signals;
use crate::serve::{bind_proxies, logs, proxy_line, run_proxies, show_metrics};
use crate::store::{Store, StoreOptions, is_store};
use crate::text::parse_ms;
use crate::{output, usage};

/// Default ledger, which holds keys and responses.
const LEDGER_DEFAULT: &str = "embedded:./hapax-proxy-data";
/// What to do about a ledger that another process has open.
const SECOND_PROXY: &str = "a second proxy needs a ledger of its own (`--ledger embedded:PATH`), or both need one that \
                            processes share (`--ledger postgres://…`, `redis://…` or a server's `http://…`)";

/// Runs a reverse proxy that makes requests with an Idempotency-Key take effect once.
#[derive(Debug, Args)]
pub struct ProxyArgs {
    /// Configuration file (TOML): `ledger`, `[admin]`, and `[log]`, `[trace]` and `[[proxy]]` as in that of `serve`. Flags beat it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Prints the configuration in effect and exits.
    #[arg(long)]
    print_config: bool,
    /// The upstream server: http://HOST:PORT or https://HOST.
    #[arg(long, value_name = "URL", env = "HAPAX_UPSTREAM")]
    upstream: Option<String>,
    /// The ledger for keys and responses: embedded:PATH, postgres://HOST/DATABASE (with its password in PGPASSWORD),
    /// redis://HOST or redis+cluster://HOST,HOST (with its password in REDISCLI_AUTH), or a server's http://HOST:PORT (with its token, ID:SECRET, in HAPAX_TOKEN) [default: embedded:./hapax-proxy-data].
    #[arg(long, value_name = "URL", env = "HAPAX_LEDGER", hide_env_values = true)]
    ledger: Option<String>,
    /// Address to listen on; any address except loopback needs TLS or --insecure [default: 127.0.0.1:9325].
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    listen: Option<SocketAddr>,
    /// Where `hapax ledger` and `hapax doctor` reach this proxy while it runs: auto (127.0.0.1:9326, or a free port while
    /// that is taken), none, or an address; any other than loopback needs `admin.keys` in the file [default: auto].
    #[arg(long, value_name = "ADDR", env = "HAPAX_ADMIN_LISTEN")]
    admin_listen: Option<AdminListen>,
    /// The service's name in the ledger: part of every key [default: proxy].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Format of the logs, on standard error [default: text].
    #[arg(long, value_name = "FORMAT", env = "HAPAX_LOG_FORMAT")]
    log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace [default: info].
    #[arg(long, value_name = "LEVEL", env = "HAPAX_LOG_LEVEL")]
    log_level: Option<String>,
    /// Sends traces to this OpenTelemetry collector, OTLP over HTTP: http://127.0.0.1:4318 [default: no traces].
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Traces this many of a thousand requests that come without a trace context [default: 10].
    #[arg(long, value_name = "N", env = "HAPAX_TRACES_PER_MILLE")]
    traces_per_mille: Option<u16>,
    #[command(flatten)]
    connections: ConnectionArgs,
    #[command(flatten)]
    keys: KeyArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Connections")]
struct ConnectionArgs {
    /// PEM file with the certificate chain: serves HTTPS.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Listens beyond loopback without TLS: for use behind a proxy that terminates TLS.
    #[arg(long)]
    insecure: bool,
    /// The Host header that the upstream sees: the caller's or its own [default: preserve].
    #[arg(long, value_name = "WHICH")]
    host: Option<HostArg>,
    /// Adds to callers' Forwarded and X-Forwarded-* headers instead of replacing them.
    #[arg(long)]
    trust_forwarded: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Keys")]
struct KeyArgs {
    /// The tenant that a key belongs to: credentials, header:NAME, cookie:NAME or shared [default: credentials].
    #[arg(long, value_name = "TENANT")]
    tenant: Option<Tenant>,
    /// Refuses requests without a key.
    #[arg(long)]
    key_required: bool,
    /// Methods whose keys are honoured; may be repeated [default: POST, PATCH].
    #[arg(long, value_name = "METHOD", value_delimiter = ',')]
    method: Vec<String>,
    /// JSON pointer to the key in the body, for requests without the header: /order/id.
    #[arg(long, value_name = "POINTER")]
    key_pointer: Option<String>,
    /// Field of a JSON body that may differ between repeated requests; may be repeated: /sent_at.
    #[arg(long, value_name = "POINTER", value_delimiter = ',')]
    fingerprint_exclude: Vec<String>,
    /// Statuses which mean that nothing happened; they free the key [default: 401,408,409,425,429].
    #[arg(long, value_name = "STATUSES")]
    released_statuses: Option<Statuses>,
    /// Statuses after which the effect may have happened [default: 5xx].
    #[arg(long, value_name = "STATUSES")]
    doubtful_statuses: Option<Statuses>,
    /// After an interrupted run or such a status: park the key until an operator decides, or retry [default: park].
    #[arg(long, value_name = "WHAT")]
    on_doubt: Option<DoubtArg>,
    /// While the ledger is unreachable: closed (503) or open (unprotected, counted) [default: closed].
    #[arg(long, value_name = "WHAT")]
    on_outage: Option<OutageArg>,
    /// How long a response is kept [default: 4d].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    ttl: Option<u64>,
    /// How long a duplicate waits for the first response before it gets 409; at most 20s [default: 10s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    wait: Option<u64>,
    /// How long a claim lasts after its proxy has crashed [default: 30s].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u64>,
    /// Time limit of a request [default: 2m].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    run_max: Option<u64>,
    /// Maximum body of a request with a key [default: 1048576].
    #[arg(long, value_name = "BYTES")]
    request_bytes_max: Option<usize>,
    /// Maximum response that is recorded [default: 524288].
    #[arg(long, value_name = "BYTES")]
    response_bytes_max: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum HostArg {
    Preserve,
    Upstream,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum DoubtArg {
    Park,
    Retry,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum OutageArg {
    Closed,
    Open,
}

/// The configuration of `hapax proxy`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Config {
    /// Where keys and responses are kept.
    #[serde(serialize_with = "serialize_without_secrets")]
    ledger: String,
    /// The listener for operators.
    admin: AdminConfig,
    /// What is logged, and how.
    log: LogConfig,
    /// Where traces go.
    trace: TraceConfig,
    /// The proxies.
    proxy: Vec<ProxyConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            ledger: LEDGER_DEFAULT.to_owned(),
            admin: AdminConfig::default(),
            log: LogConfig::default(),
            trace: TraceConfig::default(),
            proxy: Vec::new(),
        }
    }
}

/// What is printed is read by others: a server's token and a database's password are left out. They can be given in
/// `HAPAX_TOKEN`, `PGPASSWORD` and `REDISCLI_AUTH`.
fn serialize_without_secrets<S: Serializer>(url: &str, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&without_secrets(url))
}

fn set<T>(field: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *field = value;
    }
}

impl ProxyArgs {
    /// The configuration in effect: defaults, then the file, then flags.
    fn config(self) -> anyhow::Result<Config> {
        let print_only = self.print_config;
        let read = config_file::read(self.config.as_deref())?;
        let (before, file) = ConfigFile::parse_or_default::<Config>(read.as_ref())?;
        let config = match self.apply_to(before.clone()) {
            Ok(config) => config,
            Err(error) => {
                // A missing value may be missing because it is wrong in the file: report that first.
                file.check(Vec::new(), |_| false)?;
                return Err(error);
            }
        };
        let mut problems: Vec<Problem> = level_problem(&config.log).into_iter().collect();
        problems.extend(config.trace.problems());
        problems.extend(proxy_problems(&config.proxy));
        problems.extend(config.admin.problems(&config.ledger));
        problems.extend(address_problems(config.admin.address().into_iter(), &config.proxy));
        if !print_only {
            problems.extend(config.admin.machine_problems());
            problems.extend(certificate_problems(&config.proxy));
        }
        file.check(problems, changed_paths(&before, &config)?)?;
        Ok(config)
    }

    fn apply_to(self, mut config: Config) -> anyhow::Result<Config> {
        set(&mut config.ledger, self.ledger);
        set(&mut config.admin.listen, self.admin_listen);
        set(&mut config.log.format, self.log_format);
        set(&mut config.log.level, self.log_level);
        if self.otlp.is_some() {
            config.trace.endpoint = self.otlp;
        }
        set(&mut config.trace.sampled_per_mille, self.traces_per_mille);
        if config.proxy.is_empty() {
            config.proxy.push(ProxyConfig::default());
        }
        if let [proxy] = config.proxy.as_mut_slice() {
            set(&mut proxy.upstream, self.upstream);
            set(&mut proxy.listen, self.listen);
            set(&mut proxy.name, self.name);
            self.connections.apply_to(proxy);
            self.keys.apply_to(proxy)?;
            if proxy.upstream.is_empty() {
                return Err(usage(
                    "--upstream is missing: where do requests go? For example http://127.0.0.1:8080",
                ));
            }
        } else if self.upstream.is_some() || self.listen.is_some() {
            return Err(usage(
                "the configuration has several proxies; flags for one cannot be laid over them",
            ));
        }
        Ok(config)
    }
}

impl ConnectionArgs {
    fn apply_to(self, proxy: &mut ProxyConfig) {
        if let (Some(cert_file), Some(key_file)) = (self.tls_cert, self.tls_key) {
            proxy.tls = Some(TlsFiles { cert_file, key_file });
        }
        proxy.insecure |= self.insecure;
        proxy.trust_forwarded |= self.trust_forwarded;
        set(
            &mut proxy.host,
            self.host.map(|host| match host {
                HostArg::Preserve => HostPolicy::Preserve,
                HostArg::Upstream => HostPolicy::Upstream,
            }),
        );
    }
}

impl KeyArgs {
    fn apply_to(self, proxy: &mut ProxyConfig) -> anyhow::Result<()> {
        set(&mut proxy.tenant, self.tenant);
        let policy = &mut proxy.policy;
        policy.key_required |= self.key_required;
        if !self.method.is_empty() {
            let parse = |text: &String| {
                let method = text.to_ascii_uppercase().parse();
                method.map_err(|_| usage(format!("--method {text:?} is no method; write it as POST")))
            };
            policy.methods = self.method.iter().map(parse).collect::<Result<_, _>>()?;
        }
        if self.key_pointer.is_some() {
            policy.key_pointer = self.key_pointer;
        }
        if !self.fingerprint_exclude.is_empty() {
            policy.fingerprint_excluded_fields = self.fingerprint_exclude;
        }
        set(&mut policy.released_statuses, self.released_statuses);
        set(&mut policy.doubtful_statuses, self.doubtful_statuses);
        set(
            &mut policy.on_doubt,
            self.on_doubt.map(|doubt| match doubt {
                DoubtArg::Park => OnDoubt::Park,
                DoubtArg::Retry => OnDoubt::Retry,
            }),
        );
        set(
            &mut policy.on_outage,
            self.on_outage.map(|outage| match outage {
                OutageArg::Closed => OnOutage::Closed,
                OutageArg::Open => OnOutage::Open,
            }),
        );
        set(&mut policy.ttl, self.ttl.map(Duration::from_millis));
        set(&mut policy.wait, self.wait.map(Duration::from_millis));
        set(&mut policy.lease, self.lease.map(Duration::from_millis));
        set(&mut policy.run_max, self.run_max.map(Duration::from_millis));
        set(&mut policy.request_bytes_max, self.request_bytes_max);
        set(&mut policy.response_bytes_max, self.response_bytes_max);
        Ok(())
    }
}

/// Runs the proxies until SIGTERM or SIGINT.
pub async fn run(args: ProxyArgs) -> anyhow::Result<()> {
    let print_only = args.print_config;
    let config = args.config()?;
    if print_only {
        let text = toml::to_string(&config).context("the configuration cannot be written as TOML")?;
        return output::raw(&text);
    }
    logs::start(&config.log)?;
    hapax_net::files::raise_file_limit();
    let mut signals = Signals::new()?;
    let StartedProxies { store, exporter, admin, counters, proxies } = tokio::select! {
        started = start(&config) => started?,
        () = signals.next() => return Ok(()),
    };
    let (begin, stop) = tokio::sync::watch::channel(false);
    let running = run_proxies(proxies, &stop);
    let (end_admin, admin_ends) = tokio::sync::oneshot::channel::<()>();
    let admin_ends = async {
        let _ = admin_ends.await;
    };
    let admin = match (admin, counters) {
        (Some(admin), _) => Some(tokio::spawn(admin.run(admin_ends))),
        (None, Some((page, listener))) => Some(tokio::spawn(page.run(listener, false, admin_ends))),
        (None, None) => None,
    };
    signals.shutdown().await;
    begin.send_replace(true);
    running.join_all().await;
    // Operators can look into a proxy that waits for requests under way.
    drop(end_admin);
    if let Some(admin) = admin {
        let _ = admin.await;
    }
    if let Some(store) = store {
        store.close().await;
    }
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    Ok(())
}

struct StartedProxies {
    /// The ledger, if it is a store that this process has opened.
    store: Option<Store>,
    /// Exports traces, if they are wanted.
    exporter: Option<Exporter>,
    admin: Option<AdminServer>,
    /// The listener for counters alone, where the ledger is a server.
    counters: Option<(ProcessPage, TcpListener)>,
    proxies: Vec<(Proxy, TcpListener)>,
}

async fn start(config: &Config) -> anyhow::Result<StartedProxies> {
    let (ledger, store) = open(&config.ledger).await?;
    let admin = match &store {
        Some(store) => config.admin.bind(store, &config.proxy).await?,
        None => None,
    };
    let operators = match &store {
        None => Some(without_secrets(&config.ledger)),
        Some(_) => admin.as_ref().map(|admin| admin.url.clone()),
    };
    let (tracer, exporter) = config.trace.tracer("hapax-proxy")?.unzip();
    let proxies = bind_proxies(&config.proxy, &ledger, operators.as_deref(), tracer.as_ref()).await?;
    if let Some(admin) = &admin {
        show_metrics(admin.native(), &proxies);
    }
    let counters = match config.admin.counters_address().filter(|_| store.is_none()) {
        Some(address) => Some((counters_page(&proxies, &ledger), ProcessPage::bind(address, false).await?)),
        None => None,
    };
    let mut text = format!("Hapax {} is ready\n", env!("CARGO_PKG_VERSION"));
    for (proxy, listener) in &proxies {
        text += &proxy_line(proxy, listener)?;
    }
    let about_admin = match (&store, &operators) {
        (Some(_), Some(url)) => format!("{url} (for `hapax ledger list --endpoint {url}`)"),
        (None, Some(url)) => format!("{url} (the server that keeps the ledger)"),
        (_, None) => "none (keys in doubt can be decided while the proxy is stopped)".to_owned(),
    };
    writeln!(text, "  Admin {about_admin}")?;
    let place = match &store {
        Some(store) => opened(store, operators.as_deref(), &mut text).await?,
        None => without_secrets(&config.ledger),
    };
    writeln!(text, "  Data  {place}")?;
    if let Err(error) = output::raw(&text) {
        // Standard output is closed: no reason not to serve.
        tracing::debug!("standard output: {error:#}");
    }
    if let Some((_, listener)) = &counters {
        let address = listener.local_addr()?;
        let _ = output::raw(&format!("  Metrics http://{address}/metrics\n"));
    }
    Ok(StartedProxies { store, exporter, admin, counters, proxies })
}

/// The counters of proxies whose ledger is a server. They are ready while that server is.
fn counters_page(proxies: &[(Proxy, TcpListener)], ledger: &SharedStore) -> ProcessPage {
    let layers: Vec<_> = proxies.iter().map(|(proxy, _)| proxy.layer()).collect();
    let ledger = ledger.clone();
    ProcessPage::new(
        move || layers.iter().flat_map(hapax_http::IdempotencyLayer::samples).collect(),
        move || {
            let ledger = ledger.clone();
            Box::pin(async move { store_readiness(ledger.as_ref()).await })
        },
    )
}

/// Says what is to be known about a store that this process has opened; returns where it is.
async fn opened(store: &Store, admin: Option<&str>, text: &mut String) -> anyhow::Result<String> {
    let status = store.admin().status().await?;
    if let Some(paused) = &status.paused {
        writeln!(text, "  The ledger is paused: {paused}")?;
        if let Some(url) = admin {
            writeln!(text, "  Let it accept requests with keys again with: hapax resume --endpoint {url}")?;
        }
    }
    if let Some(url) = admin {
        store.announce(url);
    }
    for warning in &status.warnings {
        tracing::warn!("{warning}");
    }
    Ok(store.location().to_owned())
}

/// Opens the ledger: a store, which is closed at the end, or a server's.
async fn open(url: &str) -> anyhow::Result<(SharedStore, Option<Store>)> {
    if is_store(url) {
        let opened = Store::open(url, StoreOptions::default()).await;
        let store = opened.map_err(|error| match error.downcast_ref() {
            Some(embedded::OpenError::InUse { .. }) => anyhow::anyhow!("{error}; {SECOND_PROXY}"),
            _ => error,
        })?;
        return Ok((store.admin().clone(), Some(store)));
    }
    Ok((Remote::at(url).connect().await?, None))
}
