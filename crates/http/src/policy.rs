//! How a request is handled, by its route.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::OnDoubt;
use hapax_core::ledger::{TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::policy::{LEASE_MS_MAX, WAIT_MS_MAX};
use http::{Method, StatusCode};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

/// Upper limit for a policy's maximum body size of requests and responses: 64 MiB.
const BODY_BYTES_MAX: usize = 64 * 1024 * 1024;

/// How to handle requests with a key. Every field has a default. In the configuration, a time has its unit in its name:
/// `ttl_ms`, `wait_ms`, `lease_ms`, `run_ms_max`, `read_ms_max`, `response_ms_max`.
///
/// ```
/// use hapax_http::Policy;
/// use std::time::Duration;
/// let policy = Policy { key_required: true, wait: Duration::ZERO, ..Policy::default() };
/// assert!(policy.validate().is_ok());
/// assert!(Policy { lease: Duration::ZERO, ..Policy::default() }.validate().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Policy {
    /// Methods to which the policy applies; requests with other methods pass through unchanged. Default `POST` and
    /// `PATCH`.
    #[serde(with = "methods")]
    pub methods: Vec<Method>,
    /// Refuse requests without a key with 400. Default off: they pass through, every time.
    pub key_required: bool,
    /// JSON pointer to the key in a JSON body, for requests without the header. Default none.
    pub key_pointer: Option<String>,
    /// Fields of a JSON body that may differ between two attempts of the same request, as JSON pointers: a time of
    /// sending, a trace id. Default none.
    pub fingerprint_excluded_fields: Vec<String>,
    /// Further headers that distinguish requests, by name: with another value of one, the same key is refused with 422.
    /// Headers that describe the body, that are conditions of the request (`If-Match` and similar), and that override
    /// the method always count. Default none.
    pub fingerprint_headers: Vec<String>,
    /// Statuses that mean that nothing happened: the response is forwarded, the key is free again, and the next request
    /// with it runs. Default 401, 408, 409, 425 and 429. Add 503 only if no component in front of the service sends it
    /// by itself.
    pub released_statuses: Statuses,
    /// Statuses after which it is unknown whether anything happened; `on_doubt` decides about the next request with the
    /// key. Default all of 5xx. Every status in neither list is an outcome: recorded, and replayed to duplicates.
    pub doubtful_statuses: Statuses,
    /// What to do about a request whose run was interrupted or ended with a doubtful status. `park`: the key gets 409
    /// until an operator decides; it never runs twice. `retry`: the next request with the key runs, and
    /// `Hapax-Takeover` tells the service; use it if the service honours the key or the fence that it is sent. Default
    /// `park`.
    pub on_doubt: OnDoubt,
    /// How long an outcome is stored. Default 4 days.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
    /// How long a duplicate waits for the first request's response before it gets 409; at most 20 s, zero for no wait.
    /// Default 10 s.
    #[serde(rename = "wait_ms", with = "millis")]
    pub wait: Duration,
    /// How long a claim remains after the process that holds it has died; renewed while a request runs. Default 30 s.
    #[serde(rename = "lease_ms", with = "millis")]
    pub lease: Duration,
    /// Maximum duration of a run; a longer one is aborted and in doubt. Default 2 min.
    #[serde(rename = "run_ms_max", with = "millis")]
    pub run_max: Duration,
    /// Maximum time for a request's body to arrive. Default 30 s.
    #[serde(rename = "read_ms_max", with = "millis")]
    pub read_max: Duration,
    /// Maximum size of the body of a request with a key, in bytes; a larger one gets 413. Default 1 MiB.
    pub request_bytes_max: usize,
    /// Maximum size of a recorded response body, in bytes. A larger one passes through, and its duplicates get 409.
    /// Default 512 KiB.
    pub response_bytes_max: usize,
    /// Maximum time to wait for a response's body; after it, the body passes through as a stream, and its duplicates
    /// get 409. Default 10 s.
    #[serde(rename = "response_ms_max", with = "millis")]
    pub response_max: Duration,
    /// What to do if the ledger cannot be reached. `closed`: 503. `open`: the request runs unprotected and is counted.
    /// Default `closed`.
    pub on_outage: OnOutage,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            methods: vec![Method::POST, Method::PATCH],
            key_required: false,
            key_pointer: None,
            fingerprint_excluded_fields: Vec::new(),
            fingerprint_headers: Vec::new(),
            released_statuses: Statuses::of(&[401, 408, 409, 425, 429]),
            doubtful_statuses: Statuses(vec![(500, 599)]),
            on_doubt: OnDoubt::Park,
            ttl: Duration::from_millis(hapax_core::ledger::TTL_MS_DEFAULT),
            wait: Duration::from_secs(10),
            lease: Duration::from_secs(30),
            run_max: Duration::from_mins(2),
            read_max: Duration::from_secs(30),
            request_bytes_max: 1024 * 1024,
            response_bytes_max: 512 * 1024,
            response_max: Duration::from_secs(10),
            on_outage: OnOutage::Closed,
        }
    }
}

/// What to do if the ledger cannot be reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnOutage {
    /// Refuse with 503.
    #[default]
    Closed,
    /// Run without protection, and count it.
    Open,
}

/// What a response says about the effect. A service may put it into its response's extensions, where it overrides the
/// policy's lists of statuses.
///
/// ```
/// use hapax_http::EffectVerdict;
/// let mut response = http::Response::new("not now");
/// *response.status_mut() = http::StatusCode::SERVICE_UNAVAILABLE;
/// response.extensions_mut().insert(EffectVerdict::NothingHappened);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EffectVerdict {
    /// The response is the outcome: recorded, and replayed to duplicates.
    Final,
    /// Nothing happened: the key is free again.
    NothingHappened,
    /// Something may have happened.
    InDoubt,
}

/// Why a policy or a route was rejected: the field, the problem, and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ConfigError(pub(crate) String);

impl Policy {
    /// Checks the limits.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let bounds = [
            ("ttl_ms", ms(self.ttl), TTL_MS_MIN, TTL_MS_MAX),
            ("wait_ms", ms(self.wait), 0, WAIT_MS_MAX),
            ("lease_ms", ms(self.lease), 100, LEASE_MS_MAX),
            ("run_ms_max", ms(self.run_max), 1, LEASE_MS_MAX),
            ("read_ms_max", ms(self.read_max), 1, LEASE_MS_MAX),
            ("response_ms_max", ms(self.response_max), 1, LEASE_MS_MAX),
            ("request_bytes_max", self.request_bytes_max as u64, 1, BODY_BYTES_MAX as u64),
            ("response_bytes_max", self.response_bytes_max as u64, 0, BODY_BYTES_MAX as u64),
        ];
        for (field, value, min, max) in bounds {
            if !(min..=max).contains(&value) {
                return Err(ConfigError(format!("{field}: {value} is out of range; use {min} to {max}")));
            }
        }
        for name in &self.fingerprint_headers {
            if name.parse::<http::HeaderName>().is_err() {
                return Err(ConfigError(format!("fingerprint_headers: {name:?} is no name of a header")));
            }
        }
        let key_pointer = self.key_pointer.iter().map(|pointer| ("key_pointer", pointer));
        for (field, pointer) in key_pointer.chain(
            self.fingerprint_excluded_fields.iter().map(|pointer| ("fingerprint_excluded_fields", pointer)),
        ) {
            if !pointer.starts_with('/') {
                let problem = format!("{field}: {pointer:?} is no JSON pointer; write it as /order/id");
                return Err(ConfigError(problem));
            }
        }
        Ok(())
    }

    /// What a status says about the effect.
    pub fn verdict(&self, status: StatusCode) -> EffectVerdict {
        if self.released_statuses.contains(status) {
            EffectVerdict::NothingHappened
        } else if self.doubtful_statuses.contains(status) {
            EffectVerdict::InDoubt
        } else {
            EffectVerdict::Final
        }
    }
}

/// A set of statuses. Written as a list of numbers and classes: `[429, "5xx"]`.
///
/// ```
/// use hapax_http::Statuses;
/// let statuses: Statuses = serde_json::from_str(r#"[429, "5xx"]"#).unwrap();
/// assert!(statuses.contains(http::StatusCode::BAD_GATEWAY) && !statuses.contains(http::StatusCode::OK));
/// assert_eq!(serde_json::to_string(&statuses).unwrap(), r#"[429,"5xx"]"#);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statuses(Vec<(u16, u16)>);

impl Statuses {
    /// Exactly these statuses.
    pub fn of(statuses: &[u16]) -> Self {
        Self(statuses.iter().map(|status| (*status, *status)).collect())
    }

    /// Whether the set contains a status.
    pub fn contains(&self, status: StatusCode) -> bool {
        self.0.iter().any(|(from, to)| (*from..=*to).contains(&status.as_u16()))
    }
}

impl std::str::FromStr for Statuses {
    type Err = ConfigError;

    /// Parses a comma-separated list, as on a command line: `429,5xx`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
        items.map(range).collect::<Result<_, _>>().map(Self)
    }
}

fn range(text: &str) -> Result<(u16, u16), ConfigError> {
    let class = text.strip_suffix("xx").and_then(|class| class.parse::<u16>().ok());
    let range = match class {
        Some(class) => Some((class * 100, class * 100 + 99)),
        None => text.parse::<u16>().ok().map(|status| (status, status)),
    };
    let fits = |(from, to): &(u16, u16)| *from >= 100 && *to <= 599;
    range.filter(fits).ok_or_else(|| {
        ConfigError(format!("{text:?} is neither a status nor a class of them; write 429 or 5xx"))
    })
}

impl fmt::Display for Statuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (from, to)) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            if from == to { write!(f, "{comma}{from}") } else { write!(f, "{comma}{}xx", from / 100) }?;
        }
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Item {
    Number(u16),
    Text(String),
}

impl<'de> Deserialize<'de> for Statuses {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let items = Vec::<Item>::deserialize(from)?;
        let range = |item: Item| match item {
            Item::Number(status) => range(&status.to_string()),
            Item::Text(text) => range(&text),
        };
        items.into_iter().map(range).collect::<Result<_, _>>().map(Self).map_err(de::Error::custom)
    }
}

impl Serialize for Statuses {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let item = |(from, end): &(u16, u16)| {
            if from == end { Item::Number(*from) } else { Item::Text(format!("{}xx", from / 100)) }
        };
        to.collect_seq(self.0.iter().map(item))
    }
}

/// Converts to whole milliseconds.
pub(crate) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) mod millis {
    use super::{Deserialize, Deserializer, Duration, Serializer, ms};

    pub(crate) fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(ms(*time))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

mod methods {
    use super::{Deserialize, Deserializer, Method, Serializer, de};

    pub(super) fn serialize<S: Serializer>(methods: &[Method], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(methods.iter().map(Method::as_str))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Method>, D::Error> {
        let parse = |text: String| {
            let upper = text.to_ascii_uppercase();
            upper.parse().map_err(|_| de::Error::custom(format!("{text:?} is no method; write it as POST")))
        };
        Vec::<String>::deserialize(from)?.into_iter().map(parse).collect()
    }
}

/// Policies by route. A pattern is a path with `{name}` for one segment and `{*rest}` for the rest. Patterns and paths
/// are compared in their normal form.
#[derive(Debug, Clone)]
pub(crate) struct Routes {
    fallback: Arc<Policy>,
    routes: matchit::Router<usize>,
    policies: Vec<(String, Arc<Policy>)>,
}

impl Routes {
    pub(crate) fn new(fallback: Policy, policies: Vec<(String, Policy)>) -> Result<Self, ConfigError> {
        fallback.validate()?;
        let mut routes = matchit::Router::new();
        for (at, (pattern, policy)) in policies.iter().enumerate() {
            let refused = |problem: &dyn fmt::Display| ConfigError(format!("route {pattern:?}: {problem}"));
            if !pattern.starts_with('/') {
                return Err(refused(&"a route begins with /"));
            }
            policy.validate().map_err(|error| refused(&error))?;
            let route = crate::path::normalize(pattern).into_owned();
            routes.insert(route, at).map_err(|error| refused(&error))?;
        }
        let policies = policies.into_iter().map(|(pattern, policy)| (pattern, Arc::new(policy))).collect();
        Ok(Self { fallback: Arc::new(fallback), routes, policies })
    }

    /// The policy for a path in its normal form, and the matching pattern.
    pub(crate) fn find(&self, path: &str) -> (Option<&str>, &Arc<Policy>) {
        match self.routes.at(path) {
            Ok(found) => {
                let (pattern, policy) = &self.policies[*found.value];
                (Some(pattern), policy)
            }
            Err(_) => (None, &self.fallback),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_by_default() {
        let policy = Policy::default();
        for (status, verdict) in [
            (200, EffectVerdict::Final),
            (204, EffectVerdict::Final),
            (302, EffectVerdict::Final),
            (400, EffectVerdict::Final),
            (422, EffectVerdict::Final),
            (401, EffectVerdict::NothingHappened),
            (409, EffectVerdict::NothingHappened),
            (429, EffectVerdict::NothingHappened),
            (500, EffectVerdict::InDoubt),
            (503, EffectVerdict::InDoubt),
        ] {
            assert_eq!(policy.verdict(StatusCode::from_u16(status).unwrap()), verdict, "{status}");
        }
    }

    #[test]
    fn policies_are_read_and_refused() {
        let policy: Policy =
            serde_json::from_str(r#"{"methods":["put"],"doubtful_statuses":["5xx",404],"on_doubt":"retry"}"#)
                .unwrap();
        assert_eq!((policy.methods[0].as_str(), policy.on_doubt), ("PUT", OnDoubt::Retry));
        assert_eq!(policy.doubtful_statuses.to_string(), "5xx,404");
        for json in [
            r#"{"weit_ms":1}"#,
            r#"{"doubtful_statuses":["6xx"]}"#,
            r#"{"released_statuses":[42]}"#,
            r#"{"methods":["A B"]}"#,
        ] {
            assert!(serde_json::from_str::<Policy>(json).is_err(), "{json}");
        }
        let error = Policy { fingerprint_excluded_fields: vec!["at".into()], ..Policy::default() }
            .validate()
            .unwrap_err();
        assert!(error.to_string().contains("JSON pointer"), "{error}");
    }

    #[test]
    fn routes_are_found_by_pattern() {
        let strict = Policy { key_required: true, ..Policy::default() };
        let routes = Routes::new(Policy::default(), vec![("/orders/{id}/pay".into(), strict)]).unwrap();
        assert_eq!(routes.find("/orders/7/pay").0, Some("/orders/{id}/pay"));
        assert!(routes.find("/orders/7/pay").1.key_required && !routes.find("/orders/7").1.key_required);
        assert!(Routes::new(Policy::default(), vec![("orders".into(), Policy::default())]).is_err());
        assert!(Routes::new(Policy::default(), vec![("/{a}{b}".into(), Policy::default())]).is_err());
    }
}
