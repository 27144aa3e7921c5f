//! The proxy's configuration: every field with its meaning, unit and default. Unknown keys are rejected.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::policy::{ConfigError, Policy, millis, ms};
use crate::scope::{Tenant, check_service_name};

/// All settings of the proxy, except those of its ledger.
///
/// ```
/// use hapax_http::proxy::ProxyConfig;
/// let config = ProxyConfig { upstream: "http://127.0.0.1:8080".into(), ..ProxyConfig::default() };
/// assert!(config.validate().is_ok());
/// assert_eq!(config.listen.to_string(), "127.0.0.1:9325");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProxyConfig {
    /// The service's name in the ledger. Proxies that share a ledger need different names, unless they serve the same
    /// service; a proxy that changes its name loses its keys. Default `proxy`.
    pub name: String,
    /// Address to listen on. Any address other than loopback requires `tls` or `insecure`. Default `127.0.0.1:9325`.
    pub listen: SocketAddr,
    /// The service to which requests are forwarded: `http://HOST:PORT` or `https://HOST`, optionally with a path that
    /// is put before every request's path.
    pub upstream: String,
    /// Listen beyond loopback without TLS: credentials and responses can be read on the network. Use it inside a
    /// private network, or behind a TLS-terminating proxy. Default off.
    pub insecure: bool,
    /// The `Host` header for the upstream. Default `preserve`.
    pub host: HostPolicy,
    /// Keep the callers' `Forwarded` and `X-Forwarded-*` headers, and append to them. Use it behind a load balancer
    /// that sets them; any other caller may forge them. Default off: they are replaced.
    pub trust_forwarded: bool,
    /// How callers are identified: `credentials`, `header:NAME`, `cookie:NAME` or `shared`. Default `credentials`.
    #[serde(serialize_with = "write_tenant")]
    pub tenant: Tenant,
    /// Serve HTTPS with this certificate. Default none: plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Bounds on connections and timeouts.
    pub limits: ProxyLimits,
    /// How to handle requests with a key.
    pub policy: Policy,
    /// Policies of single routes; a field that one leaves out is taken from `policy`.
    #[serde(rename = "route", skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RoutePolicy>,
}

impl Default for ProxyConfig {
    fn default() -> Self {
        Self {
            name: "proxy".into(),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 9325)),
            upstream: String::new(),
            tls: None,
            insecure: false,
            host: HostPolicy::default(),
            trust_forwarded: false,
            tenant: Tenant::default(),
            limits: ProxyLimits::default(),
            policy: Policy::default(),
            routes: Vec::new(),
        }
    }
}

/// The location of the certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// PEM file with the certificate chain; the server's own certificate comes first.
    pub cert_file: PathBuf,
    /// PEM file with the private key.
    pub key_file: PathBuf,
}

/// The `Host` header for the upstream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostPolicy {
    /// The caller's host.
    #[default]
    Preserve,
    /// The host in the upstream's URL.
    Upstream,
}

/// Bounds on connections and timeouts. In the configuration, a time has its unit in its name: `read_timeout_ms`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProxyLimits {
    /// Maximum number of connections from callers. At the limit, the longest idle connection is closed for a new one.
    /// Default 4,096.
    pub connections_max: usize,
    /// Maximum size of a request's head, in bytes. Default 32 KiB.
    pub header_bytes_max: usize,
    /// Maximum time for a TLS handshake or a request's head, or for an idle connection. Default 60 s.
    #[serde(rename = "read_timeout_ms", with = "millis")]
    pub read_timeout: Duration,
    /// Maximum time for connecting to the upstream. Default 5 s.
    #[serde(rename = "connect_timeout_ms", with = "millis")]
    pub connect_timeout: Duration,
    /// How long the upstream may take for the head of its response, counted from the last part of the request that it
    /// took; the time in which the caller's body is waited for does not count. Default 60 s.
    #[serde(rename = "response_timeout_ms", with = "millis")]
    pub response_timeout: Duration,
    /// Maximum time that a body may stall in either direction. For callers that do not read their responses it is a tenth of
    /// this, and at most 3 s, while `unread_bytes_max` is nearly reached. Default 60 s.
    #[serde(rename = "idle_timeout_ms", with = "millis")]
    pub idle_timeout: Duration,
    /// Maximum bytes of unread responses of all callers together. Above it, requests wait briefly and are then told to
    /// retry, streamed responses pause, and callers that read slowly are disconnected. Responses up to 256 KiB of
    /// requests that are under way when it is reached may use as much again; beyond that a response is cut off. Default 256
    /// MiB.
    pub unread_bytes_max: usize,
    /// How long an idle connection to the upstream is kept for the next request. It must be shorter than the upstream's own
    /// timeout: a request on a connection that is just being closed is in doubt. Default 3 s.
    #[serde(rename = "pool_idle_timeout_ms", with = "millis")]
    pub pool_idle_timeout: Duration,
    /// Maximum number of idle connections to the upstream. Default 256.
    pub pool_idle_connections_max: usize,
    /// Maximum time that a shutdown waits for running requests. Default 10 s.
    #[serde(rename = "shutdown_timeout_ms", with = "millis")]
    pub shutdown_timeout: Duration,
}

impl Default for ProxyLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            header_bytes_max: 32 * 1024,
            read_timeout: Duration::from_mins(1),
            connect_timeout: Duration::from_secs(5),
            response_timeout: Duration::from_mins(1),
            idle_timeout: Duration::from_mins(1),
            unread_bytes_max: 256 * 1024 * 1024,
            pool_idle_timeout: Duration::from_secs(3),
            pool_idle_connections_max: 256,
            shutdown_timeout: Duration::from_secs(10),
        }
    }
}

/// A route with its policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoutePolicy {
    /// A path, with `{name}` for one segment and `{*rest}` for the rest.
    pub path: String,
    /// The policy of this route.
    pub policy: Policy,
}

impl Serialize for RoutePolicy {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let json = serde_json::to_value(&self.policy).map_err(serde::ser::Error::custom)?;
        let serde_json::Value::Object(mut fields) = json else { unreachable!("a policy is a table") };
        // TOML has no null.
        fields.retain(|_, value| !value.is_null());
        fields.insert("path".into(), self.path.clone().into());
        fields.serialize(to)
    }
}

impl<'de> Deserialize<'de> for ProxyConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Written {
            name: Option<String>,
            listen: Option<SocketAddr>,
            upstream: Option<String>,
            tls: Option<TlsFiles>,
            #[serde(default)]
            insecure: bool,
            #[serde(default)]
            host: HostPolicy,
            #[serde(default)]
            trust_forwarded: bool,
            tenant: Option<String>,
            #[serde(default)]
            limits: ProxyLimits,
            #[serde(default)]
            policy: Policy,
            #[serde(default)]
            route: Vec<serde_json::Map<String, serde_json::Value>>,
        }
        let written = Written::deserialize(from)?;
        let other = Self::default();
        let tenant = written.tenant.as_deref().map(str::parse::<Tenant>).transpose();
        let route = |fields| route(&written.policy, fields);
        Ok(Self {
            name: written.name.unwrap_or(other.name),
            listen: written.listen.unwrap_or(other.listen),
            upstream: written.upstream.unwrap_or_default(),
            tls: written.tls,
            insecure: written.insecure,
            host: written.host,
            trust_forwarded: written.trust_forwarded,
            tenant: tenant.map_err(de::Error::custom)?.unwrap_or_default(),
            limits: written.limits,
            routes: written
                .route
                .into_iter()
                .map(route)
                .collect::<Result<_, _>>()
                .map_err(de::Error::custom)?,
            policy: written.policy,
        })
    }
}

/// A route's policy: the general one, overridden by the route's own fields.
fn route(
    general: &Policy,
    mut fields: serde_json::Map<String, serde_json::Value>,
) -> Result<RoutePolicy, serde_json::Error> {
    let path = fields.remove("path").ok_or_else(|| de::Error::missing_field("path"))?;
    let path = String::deserialize(path)?;
    let mut policy = serde_json::to_value(general)?;
    policy.as_object_mut().expect("a policy is a table").extend(fields);
    Ok(RoutePolicy { path, policy: Policy::deserialize(policy)? })
}

fn write_tenant<S: Serializer>(tenant: &Tenant, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(tenant)
}

impl ProxyConfig {
    /// Checks everything that can be checked without opening anything.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check_service_name(&self.name).map_err(ConfigError)?;
        super::forward::Target::parse(&self.upstream)?;
        let limits = &self.limits;
        let counts = [
            ("connections_max", limits.connections_max as u64),
            ("header_bytes_max", limits.header_bytes_max.saturating_sub(8 * 1024 - 1) as u64),
            ("read_timeout_ms", ms(limits.read_timeout)),
            ("connect_timeout_ms", ms(limits.connect_timeout)),
            ("response_timeout_ms", ms(limits.response_timeout)),
            ("idle_timeout_ms", ms(limits.idle_timeout)),
            ("unread_bytes_max", limits.unread_bytes_max as u64),
        ];
        if let Some((field, _)) = counts.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError(format!("limits.{field}: it is too small to let anything through")));
        }
        if !self.listen.ip().is_loopback() && self.tls.is_none() && !self.insecure {
            return Err(ConfigError(format!(
                "listen: {} can be reached from other machines, in plain text; give a certificate (tls), or allow it \
                 (insecure)",
                self.listen
            )));
        }
        let routes = self.routes.iter().map(|route| (route.path.clone(), route.policy.clone()));
        crate::policy::Routes::new(self.policy.clone(), routes.collect()).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<ProxyConfig, String> {
        let config: ProxyConfig = serde_json::from_str(json).map_err(|error| error.to_string())?;
        config.validate().map(|()| config).map_err(|error| error.to_string())
    }

    #[test]
    fn a_route_has_the_general_policy_but_for_its_own_fields() {
        let json = r#"{"upstream":"http://u","policy":{"wait_ms":7,"key_required":true},
                       "route":[{"path":"/a/{id}","key_required":false,"methods":["PUT"]}]}"#;
        let config = parse(json).unwrap();
        let route = &config.routes[0].policy;
        let wait = Duration::from_millis(7);
        assert_eq!((route.wait, route.key_required, route.methods[0].as_str()), (wait, false, "PUT"));
        let again: ProxyConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn invalid_configurations_are_refused() {
        for (json, says) in [
            (r#"{"upstream":"ftp://x"}"#, "http"),
            (r"{}", "upstream"),
            (r#"{"upstream":"http://u","lissen":"x"}"#, "unknown field"),
            (r#"{"upstream":"http://u","route":[{"path":"/a","weit_ms":1}]}"#, "unknown field"),
            (r#"{"upstream":"http://u","route":[{"wait_ms":1}]}"#, "path"),
            (r#"{"upstream":"http://u","tenant":"heather:x"}"#, "header:NAME"),
            (r#"{"upstream":"http://u","listen":"0.0.0.0:80"}"#, "insecure"),
            (r#"{"upstream":"http://u","limits":{"idle_timeout_ms":0}}"#, "idle_timeout_ms"),
            (r#"{"upstream":"http://u","limits":{"unread_bytes_max":0}}"#, "unread_bytes_max"),
            (r#"{"upstream":"http://u","policy":{"wait_ms":99999999}}"#, "wait_ms"),
        ] {
            let error = parse(json).unwrap_err();
            assert!(error.contains(says), "{json}: {error}");
        }
    }
}
