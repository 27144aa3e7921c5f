//! The admin listener of a standalone proxy: where `hapax ledger`, `doctor`, `backup` and `resume` reach its store while it
//! runs, and Prometheus its metrics. It has an address of its own, so that no path of the service behind the proxy is taken away.

use std::fmt;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;
use hapax_http::proxy::ProxyConfig;
use hapax_server::config::{AuthConfig, KeyConfig, LimitsConfig, TlsConfig};
use hapax_server::native::{Backups, Native};
use hapax_server::{Server, ServerConfig, ServerError};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use tokio::net::TcpListener;

use crate::config_file::Problem;
use crate::serve::config::redacted_problems;
use crate::serve::url_of;
use crate::store::{Store, folder, is_store};

/// The port that is tried first.
const ADMIN_PORT: u16 = 9326;

/// Maximum number of connections: operators are few.
const CONNECTIONS_MAX: usize = 100;

/// Where it listens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AdminListen {
    /// 127.0.0.1:9326, or a free port while that one is taken.
    #[default]
    Auto,
    /// Nowhere.
    None,
    /// Here and nowhere else.
    At(SocketAddr),
}

impl FromStr for AdminListen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            _ => text.parse().map(Self::At).map_err(|_| {
                format!(
                    "{text:?} is no address; write it with its port, as 127.0.0.1:{ADMIN_PORT}, or auto or none"
                )
            }),
        }
    }
}

impl fmt::Display for AdminListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::At(address) => address.fmt(f),
        }
    }
}

impl Serialize for AdminListen {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for AdminListen {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

/// `[admin]` of a proxy's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// `auto`, `none` or an address. Any other than loopback needs `keys`. Default `auto`.
    pub listen: AdminListen,
    /// The folder that backups are written into; a relative one is relative to where the proxy is started. Default none:
    /// `backups` in the ledger's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backup_folder: Option<PathBuf>,
    /// Serve HTTPS with this certificate. Default none: plain HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Keys of operators, used as bearer tokens. Default none: on loopback no token is needed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyConfig>,
}

impl AdminConfig {
    /// The address that is listened on in any case, for the check that no address is used twice.
    pub fn address(&self) -> Option<(String, SocketAddr)> {
        match self.listen {
            AdminListen::At(address) => Some(("admin.listen".to_owned(), address)),
            AdminListen::Auto | AdminListen::None => None,
        }
    }

    /// Every problem with the values themselves.
    pub fn problems(&self, ledger: &str) -> Vec<Problem> {
        let mut found = redacted_problems(&self.keys, "admin.keys");
        if self.backup_folder.is_some() && folder(ledger).is_none() {
            let problem = "admin.backup_folder: only an embedded:PATH ledger is backed up by the proxy; a server writes its own \
                           backups, and a database has its own tools: leave admin.backup_folder out";
            found.push(Problem::at("admin.backup_folder", problem));
        }
        if let AdminListen::At(address) = self.listen {
            if !is_store(ledger) {
                // The server that keeps the ledger has an address for its operators; what is left here are counters.
                if !address.ip().is_loopback() || !self.keys.is_empty() || self.tls.is_some() {
                    let problem = "admin.listen: the ledger is kept by a server (--ledger), whose own address is for operators; here \
                                   /metrics and /readyz are shown, on loopback alone, without admin.keys and admin.tls";
                    found.push(Problem::at("admin.listen", problem));
                }
            } else if !address.ip().is_loopback() && self.keys.is_empty() {
                let problem = format!(
                    "refusing to listen on {address} for operators without keys: anyone who reaches it could read responses \
                     and decide about keys in doubt; configure admin.keys, or listen on loopback"
                );
                found.push(Problem::at("admin.listen", problem));
            }
        }
        found
    }

    /// Every problem that depends on this machine too: secrets and certificates that cannot be read.
    pub fn machine_problems(&self) -> Vec<Problem> {
        let found = self.server(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).problems();
        let problem = |error: &ServerError| match error {
            ServerError::Tls { .. } => Problem::at("admin.tls", error),
            ServerError::Config { field, problem } => {
                let id = field.strip_prefix("auth.keys.");
                let at = id.and_then(|id| self.keys.iter().position(|key| key.id == id));
                let path = at.map_or_else(|| "admin.keys".to_owned(), |at| format!("admin.keys.{at}"));
                Problem::at(path, format!("{}: {problem}", field.replacen("auth.", "admin.", 1)))
            }
            _ => Problem::at("admin.listen", error),
        };
        found.iter().map(problem).collect()
    }

    fn server(&self, address: SocketAddr) -> ServerConfig {
        ServerConfig {
            listen: vec![address],
            tls: self.tls.clone(),
            auth: AuthConfig { keys: self.keys.clone(), ..AuthConfig::default() },
            limits: LimitsConfig { connections_max: CONNECTIONS_MAX, ..LimitsConfig::default() },
            ..ServerConfig::default()
        }
    }

    /// Listens for operators of `store`, if that is wanted.
    pub async fn bind(&self, store: &Store, proxies: &[ProxyConfig]) -> anyhow::Result<Option<AdminServer>> {
        let usual = SocketAddr::from((Ipv4Addr::LOCALHOST, ADMIN_PORT));
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let backups = store.backups(self.backup_folder.as_deref(), "admin.backup_folder")?;
        let backups = backups.as_ref();
        let bound = match self.listen {
            AdminListen::None => return Ok(None),
            AdminListen::At(address) => self.bind_to(address, store, backups).await,
            // The proxies bind after this.
            AdminListen::Auto if proxies.iter().any(|proxy| proxy.listen.port() == ADMIN_PORT) => {
                self.bind_to(any, store, backups).await
            }
            AdminListen::Auto => match self.bind_to(usual, store, backups).await {
                Err(ServerError::Bind { source, .. }) if source.kind() == ErrorKind::AddrInUse => {
                    self.bind_to(any, store, backups).await
                }
                bound => bound,
            },
        };
        bound.map(Some).context("the admin listener (--admin-listen ADDR, or none)")
    }

    /// The address for the counters of proxies whose ledger is a server.
    pub fn counters_address(&self) -> Option<SocketAddr> {
        match self.listen {
            AdminListen::At(address) => Some(address),
            AdminListen::Auto | AdminListen::None => None,
        }
    }

    async fn bind_to(
        &self,
        address: SocketAddr,
        store: &Store,
        backups: Option<&Backups>,
    ) -> Result<AdminServer, ServerError> {
        let (server, native) =
            Server::for_operators(self.server(address), store.admin().clone(), backups.cloned())?;
        native.observe(store.observer());
        let listeners = server.bind().await?;
        let address = listeners.first().and_then(|listener| listener.local_addr().ok()).unwrap_or(address);
        Ok(AdminServer { server, native, listeners, url: url_of(address, self.tls.is_some()) })
    }
}

/// The admin listener, bound.
pub struct AdminServer {
    server: Server,
    native: Native,
    listeners: Vec<TcpListener>,
    /// How a client on this machine reaches it.
    pub url: String,
}

impl AdminServer {
    /// The API that it serves, for the counters of the proxies.
    pub fn native(&self) -> &Native {
        &self.native
    }

    /// Serves until `stop` resolves.
    pub async fn run(self, stop: impl Future<Output = ()> + Send) {
        self.server.run(self.listeners, stop).await;
    }
}
