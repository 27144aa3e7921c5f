//! `hapax serve`: opens the store, declares queues, runs the server until a signal, closes the store.

mod banner;
pub mod config;
pub mod logs;
mod options;
pub mod signals;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::Context as _;
use hapax::core::QueueInfo;
use hapax::core::store::SharedStore;
use hapax::relay::Relay;
use hapax::{AdminError, QueueName};
use hapax_client::otlp::Exporter;
use hapax_http::Tenant;
use hapax_http::proxy::{Proxy, ProxyConfig, ProxyOptions};
use hapax_observe::trace::Tracer;
use hapax_server::Server;
use hapax_server::native::Native;
use http::Uri;

use tokio::net::TcpListener;

pub use self::options::ServeArgs;
pub use self::signals::Signals;

use self::banner::Banner;
use self::config::{Config, DeclaredQueue};
use crate::store::{Store, StoreOptions};
use crate::tier;

/// Serves until SIGTERM or SIGINT.
pub async fn run(args: ServeArgs) -> anyhow::Result<()> {
    let print_only = args.print_config;
    let config = args.config()?;
    if print_only {
        return crate::output::raw(&config.to_toml()?);
    }
    logs::start(&config.log)?;
    hapax_net::files::raise_file_limit();
    let mut signals = Signals::new()?;
    let starting = start(&config);
    let StartedServer { store, exporter, server, listeners, proxies, relays } = tokio::select! {
        started = starting => started?,
        () = signals.next() => return Ok(()),
    };
    let (begin, stop) = tokio::sync::watch::channel(false);
    let proxies = run_proxies(proxies, &stop);
    let relays = run_relays(relays, &stop);
    server
        .run(listeners, async {
            signals.shutdown().await;
            begin.send_replace(true);
        })
        .await;
    // Each proxy limits its own shutdown time; its last outcomes are stored before the store is closed.
    proxies.join_all().await;
    relays.join_all().await;
    store.close().await;
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    tracing::info!("stopped");
    Ok(())
}

struct StartedServer {
    store: Store,
    /// Exports traces, if they are wanted.
    exporter: Option<Exporter>,
    server: Server,
    listeners: Vec<TcpListener>,
    proxies: Vec<(Proxy, TcpListener)>,
    relays: Vec<Relay>,
}

async fn start(config: &Config) -> anyhow::Result<StartedServer> {
    let (tracer, exporter) = config.trace.tracer("hapax")?.unzip();
    let options = StoreOptions { tracer: tracer.clone(), ..config.store.options() };
    let store = Store::open(&config.store.url, options).await?;
    let first_start = store.admin().queues().await?.is_empty();
    declare(&store, &config.queue).await?;
    let server = Server::new(config.server(), store.admin().clone())?;
    let backup_folder = config.store.embedded.backup_folder.as_deref();
    let backups = store.backups(backup_folder, "store.embedded.backup_folder")?;
    let native = Native::new(store.admin().clone(), server.shutdown(), backups);
    native.observe(store.observer());
    let mut server = server.with_router(native.router(), &[]);
    let listeners = server.bind().await?;
    let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    let url = addresses.first().map(|address| url_of(*address, config.tls.is_some()));
    let proxies = bind_proxies(&config.proxy, store.admin(), url.as_deref(), tracer.as_ref()).await?;
    show_metrics(&native, &proxies);
    if let Some(url) = &url {
        store.announce(url);
    }
    let status = store.admin().status().await?;
    let banner =
        Banner { config, addresses: &addresses, place: store.location(), first_start, status: &status };
    let printed = banner.print().and_then(|()| {
        proxies.iter().try_for_each(|(proxy, listener)| crate::output::raw(&proxy_line(proxy, listener)?))
    });
    if let Err(error) = printed {
        // Standard output is closed; serve anyway.
        tracing::debug!("standard output: {error:#}");
    }
    let mut relays = Vec::with_capacity(config.relay.len());
    for relay in &config.relay {
        let outbox = store.outbox()?;
        let sink = Some(store.admin().clone());
        let relay = crate::command::relay::open(relay, outbox, sink, tracer.clone()).await?;
        let (watch, counted) = (relay.watch(), relay.watch());
        server.add_readiness(move || watch.readiness());
        native.add_samples(move || counted.samples());
        relays.push(relay);
    }
    for warning in &status.warnings {
        tracing::warn!("{warning}");
    }
    for address in &addresses {
        tracing::info!(%address, store = store.location(), messages = status.messages, "listening");
    }
    Ok(StartedServer { store, exporter, server, listeners, proxies, relays })
}

/// How a client on this machine reaches an address.
pub fn url_of(address: SocketAddr, tls: bool) -> String {
    let scheme = if tls { "https" } else { "http" };
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    format!("{scheme}://{}", SocketAddr::new(ip, address.port()))
}

/// Whether a URL names this machine by one of its loopback addresses.
fn is_loopback(url: &str) -> bool {
    let Ok(uri) = url.parse::<Uri>() else { return false };
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Makes the configured proxies and lets them listen. `admin` is where operators reach the store; callers of the proxies
/// are told about it only if it is on loopback, since other names and addresses are the operator's business.
pub async fn bind_proxies(
    configs: &[ProxyConfig],
    store: &SharedStore,
    admin: Option<&str>,
    tracer: Option<&Arc<Tracer>>,
) -> anyhow::Result<Vec<(Proxy, TcpListener)>> {
    let admin = admin.filter(|url| is_loopback(url));
    let mut proxies = Vec::with_capacity(configs.len());
    for config in configs {
        let options = ProxyOptions { admin: admin.map(ToOwned::to_owned), tracer: tracer.cloned() };
        let proxy = Proxy::with_options(config.clone(), store.clone(), options)?;
        let listener = proxy.bind().await?;
        proxies.push((proxy, listener));
    }
    Ok(proxies)
}

/// Shows the counters of the proxies on the page of metrics.
pub fn show_metrics(native: &Native, proxies: &[(Proxy, TcpListener)]) {
    for (proxy, _) in proxies {
        let layer = proxy.layer();
        native.add_samples(move || layer.samples());
    }
}

/// One line about a proxy: its address, its upstream and its tenant.
pub fn proxy_line(proxy: &Proxy, listener: &TcpListener) -> anyhow::Result<String> {
    let config = proxy.config();
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let address = listener.local_addr()?;
    let callers = match &config.tenant {
        Tenant::Shared => "all callers share their keys".to_owned(),
        tenant => format!("callers told apart by {tenant}"),
    };
    Ok(format!("  Proxy {scheme}://{address} -> {} ({callers})\n", config.upstream))
}

/// Runs the proxies until `stop` is set.
pub fn run_proxies(
    proxies: Vec<(Proxy, TcpListener)>,
    stop: &tokio::sync::watch::Receiver<bool>,
) -> tokio::task::JoinSet<()> {
    let mut running = tokio::task::JoinSet::new();
    for (proxy, listener) in proxies {
        let mut stop = stop.clone();
        running.spawn(proxy.run(listener, async move {
            let _ = stop.wait_for(|stop| *stop).await;
        }));
    }
    running
}

/// Runs the relays until `stop` is set.
fn run_relays(relays: Vec<Relay>, stop: &tokio::sync::watch::Receiver<bool>) -> tokio::task::JoinSet<()> {
    let mut running = tokio::task::JoinSet::new();
    for relay in relays {
        let mut stop = stop.clone();
        running.spawn(async move {
            let route = relay.watch().route().to_owned();
            let stopped = async move {
                let _ = stop.wait_for(|stop| *stop).await;
            };
            if let Err(error) = relay.run(stopped).await {
                tracing::error!(route, %error, "the relay has not started");
            }
        });
    }
    running
}

/// Creates the declared queues, or changes existing ones to their declaration; dead-letter queues before the queues
/// that name them.
async fn declare(store: &Store, queues: &[DeclaredQueue]) -> anyhow::Result<()> {
    let mut waiting: Vec<&DeclaredQueue> = queues.iter().collect();
    while !waiting.is_empty() {
        let names: Vec<QueueName> = waiting.iter().map(|queue| queue.name.clone()).collect();
        let is_free = |queue: &&DeclaredQueue| {
            queue.config.dead_letter.as_ref().is_none_or(|dead| !names.contains(&dead.queue))
        };
        let (mut now, later): (Vec<_>, Vec<_>) = waiting.into_iter().partition(is_free);
        waiting = later;
        if now.is_empty() {
            // They name each other in a cycle; the store reports the error.
            now = std::mem::take(&mut waiting);
        }
        for queue in now {
            let done = declare_one(store, queue).await;
            done.with_context(|| format!("queue {} of the configuration", queue.name))?;
            for warning in tier::warnings(store.admin().as_ref(), &queue.name, &queue.config).await {
                tracing::warn!("{warning}");
            }
        }
    }
    Ok(())
}

async fn declare_one(store: &Store, queue: &DeclaredQueue) -> Result<(), AdminError> {
    let DeclaredQueue { name, config } = queue;
    match store.admin().create_queue(name, config.clone()).await {
        Ok(true) => tracing::info!(queue = %name, "queue created"),
        Ok(false) => {}
        Err(AdminError::Exists(..)) => {
            let QueueInfo { config: before, revision, .. } = store.admin().queue(name).await?;
            let mut config = config.clone();
            if config.extra.is_empty() {
                // Clients store their own values there, for example permissions; the file must not delete them.
                config.extra.clone_from(&before.extra);
            }
            if let Some(field) = before.first_difference(&config) {
                store.admin().set_queue(name, config, Some(revision)).await?;
                tracing::info!(queue = %name, field, "queue changed to what the configuration says");
            }
        }
        Err(error) => return Err(error),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_addresses_are_named_to_callers() {
        for (url, expected) in [
            ("http://127.0.0.1:9326", true),
            ("http://127.8.9.1:1", true),
            ("https://[::1]:9326", true),
            ("http://localhost:9324/base", true),
            ("http://10.0.0.5:9326", false),
            ("http://[fd00::1]:9326", false),
            ("https://ledger.internal", false),
            ("http://localhost.evil.example", false),
            ("http://127.0.0.1@evil.example", false),
            ("no url", false),
        ] {
            assert_eq!(is_loopback(url), expected, "{url}");
        }
    }

    #[test]
    fn an_address_of_every_interface_is_reached_on_loopback() {
        for (address, url) in [
            ("0.0.0.0:1", "http://127.0.0.1:1"),
            ("[::]:1", "http://[::1]:1"),
            ("10.0.0.5:1", "http://10.0.0.5:1"),
        ] {
            assert_eq!(url_of(address.parse().unwrap(), false), url);
        }
        assert_eq!(url_of("127.0.0.1:1".parse().unwrap(), true), "https://127.0.0.1:1");
    }
}
