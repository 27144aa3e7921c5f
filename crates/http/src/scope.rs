//! The scope of an entry: to whom a key belongs.

use std::fmt;
use std::sync::{Arc, LazyLock};

use blake3::hazmat::{ContextKey, HasherExt as _, hash_derive_key_context};
use hapax_core::Scope;
use http::header::{AUTHORIZATION, COOKIE, HeaderName, HeaderValue};
use http::request::Parts;

use crate::canonical::hash_part;
use crate::policy::ConfigError;

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// How callers are identified. Two callers with the same key never share an entry: each runs its own request and gets
/// its own response.
///
/// The default, [`Tenant::Credentials`], identifies callers only by `Authorization`, `X-Api-Key` and `Cookie`. If the
/// service distinguishes them by anything else (`Private-Token`, a gateway's header), name that: otherwise they count
/// as one caller and get each other's responses. The default has a cost: a caller whose credentials change between two
/// attempts (a refreshed token, a rotated session) counts as another caller, and the request runs again. If that may
/// happen, name something that stays the same: a header that a gateway has verified, the session's cookie, or a
/// function of the request.
#[derive(Clone, Default)]
pub enum Tenant {
    /// Callers with the same `Authorization`, `X-Api-Key` and `Cookie` are one.
    #[default]
    Credentials,
    /// Callers with the same value of this header are one; an earlier hop must have verified it. A request with a key
    /// but without this header is refused.
    Header(HeaderName),
    /// Callers with the same value of this cookie are one. A request with a key but without this cookie is refused.
    Cookie(String),
    /// The result of a function of the request; `None` refuses a request with a key. Use only *verified* data: a value
    /// that callers choose freely lets them get another caller's responses.
    Function(TenantFunction),
    /// All callers are one: a caller who knows a key and the request may get its response. For services with a single
    /// caller.
    Shared,
}

/// Returns the caller of a request.
pub type TenantFunction = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant({self})")
    }
}

/// The form used in the configuration.
impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Credentials => f.write_str("credentials"),
            Self::Header(name) => write!(f, "header:{name}"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::Function(_) => f.write_str("function"),
            Self::Shared => f.write_str("shared"),
        }
    }
}

impl PartialEq for Tenant {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Function(one), Self::Function(two)) => Arc::ptr_eq(one, two),
            (Self::Function(_), _) | (_, Self::Function(_)) => false,
            _ => self.to_string() == other.to_string(),
        }
    }
}

impl Eq for Tenant {}

impl std::str::FromStr for Tenant {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let known = match (text, text.split_once(':')) {
            ("credentials", _) => Some(Self::Credentials),
            ("shared", _) => Some(Self::Shared),
            (_, Some(("header", name))) => name.parse().ok().map(Self::Header),
            (_, Some(("cookie", name))) if !name.is_empty() => Some(Self::Cookie(name.to_owned())),
            _ => None,
        };
        known.ok_or_else(|| {
            ConfigError(format!(
                "{text:?} is no tenant; write credentials, header:NAME, cookie:NAME or shared"
            ))
        })
    }
}

impl Tenant {
    /// Identifies callers by a function of the request.
    pub fn function(tenant: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::Function(Arc::new(tenant))
    }

    /// Whether a header may determine the caller.
    #[cfg(feature = "proxy")]
    pub(crate) fn uses_header(&self, name: &HeaderName) -> bool {
        match self {
            Self::Credentials => [AUTHORIZATION, X_API_KEY, COOKIE].contains(name),
            Self::Header(header) => header == name,
            Self::Cookie(_) => *name == COOKIE,
            // A function sees the same request as the upstream; see `Forward::admit`.
            Self::Function(_) | Self::Shared => false,
        }
    }

    /// The caller's name in scopes, or an error that names the missing part. It is hashed: credentials must not be
    /// readable in a ledger.
    fn identify(&self, parts: &Parts) -> Result<String, String> {
        let mut hasher = blake3::Hasher::new_from_context_key(&TENANT_CONTEXT);
        match self {
            Self::Shared => return Ok("shared".into()),
            Self::Credentials => {
                let mut any = false;
                for name in [AUTHORIZATION, X_API_KEY] {
                    if let Some(value) = single_value(parts, &name)? {
                        any = true;
                        hash_part(&mut hasher, name.as_str().as_bytes());
                        hash_part(&mut hasher, value);
                    }
                }
                let cookies = cookies(parts);
                if !cookies.is_empty() {
                    any = true;
                    hash_part(&mut hasher, COOKIE.as_str().as_bytes());
                    hash_part(&mut hasher, &cookies.join(&b"; "[..]));
                }
                if !any {
                    return Ok("anyone".into());
                }
            }
            Self::Header(name) => match single_value(parts, name)? {
                Some(value) if !value.is_empty() => hash_part(&mut hasher, value),
                _ => return Err(format!("the header {name}, once")),
            },
            Self::Cookie(name) => hash_part(&mut hasher, cookie(parts, name)?),
            Self::Function(function) => match function(parts) {
                Some(value) => hash_part(&mut hasher, value.as_bytes()),
                None => return Err("credentials that tell who is calling".into()),
            },
        }
        Ok(hex_128(&hasher))
    }
}

/// The value of a header that identifies the caller. If it is sent twice, it is unknown which one the service uses.
fn single_value<'a>(parts: &'a Parts, name: &HeaderName) -> Result<Option<&'a [u8]>, String> {
    let mut values = parts.headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (value, None) => Ok(value.map(HeaderValue::as_bytes)),
        (_, Some(_)) => Err(format!("the header {name}, once")),
    }
}

/// The cookies in order, even if spread over several header fields: HTTP/2 may send each in its own field, with the
/// same meaning (RFC 9113, 8.2.3).
fn cookies(parts: &Parts) -> Vec<&[u8]> {
    let lines =
        parts.headers.get_all(COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    lines.map(<[u8]>::trim_ascii).filter(|pair| !pair.is_empty()).collect()
}

fn cookie<'a>(parts: &'a Parts, name: &str) -> Result<&'a [u8], String> {
    let mut found = None;
    for pair in cookies(parts) {
        let value = pair.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
        match (value, found) {
            (Some(value), Some(earlier)) if value != earlier => {
                return Err(format!("the cookie {name}, once"));
            }
            (Some(value), _) => found = Some(value),
            (None, _) => {}
        }
    }
    found.filter(|value| !value.is_empty()).ok_or_else(|| format!("the cookie {name}"))
}

/// The first 128 bits, in hexadecimal.
/// Hashed once per process: that costs as much as hashing a caller's credentials.
static TENANT_CONTEXT: LazyLock<ContextKey> = LazyLock::new(|| hash_derive_key_context("hapax tenant"));

fn hex_128(hasher: &blake3::Hasher) -> String {
    hasher.finalize().to_hex()[..32].to_owned()
}

/// The scope of a request's key: service, caller, method and route.
pub(crate) fn scope(service: &str, tenant: &Tenant, route: &str, parts: &Parts) -> Result<Scope, String> {
    let tenant = if hapax_core::mutant::is("answer-of-another-tenant") {
        "shared".to_owned()
    } else {
        tenant.identify(parts)?
    };
    let method = &parts.method;
    let readable = Scope::new(format!("http/{service}/{tenant}/{method} {route}"));
    Ok(readable.unwrap_or_else(|_| {
        let mut hasher = blake3::Hasher::new_derive_key("hapax route");
        hash_part(&mut hasher, route.as_bytes());
        // The colon distinguishes it from every readable form: a route begins with a slash.
        let short = format!("http/{service}/{tenant}/{}:{}", method.as_str(), hex_128(&hasher));
        Scope::new(&short)
            .expect("service and method are short; see `check_service_name` and `METHOD_BYTES_MAX`")
    }))
}

/// Maximum length of a method for requests with keys; HTTP's own methods are shorter.
pub(crate) const METHOD_BYTES_MAX: usize = 32;

/// Checks the name of a service: it is part of every scope.
pub(crate) fn check_service_name(name: &str) -> Result<(), String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    if (1..=80).contains(&name.len()) && name.bytes().all(fits) {
        return Ok(());
    }
    Err(format!("service {name:?} is not valid: use 1 to 80 of A-Z a-z 0-9 _ - ."))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parts(headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::post("/orders?x=1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn scope_of(tenant: &Tenant, headers: &[(&str, &str)]) -> Result<Scope, String> {
        scope("shop", tenant, "/orders", &parts(headers))
    }

    #[test]
    fn callers_with_other_credentials_have_other_scopes() {
        let tenant = Tenant::default();
        let callers: [&[(&str, &str)]; 8] = [
            &[],
            &[("authorization", "Bearer a")],
            &[("authorization", "Bearer b")],
            &[("x-api-key", "Bearer a")],
            &[("cookie", "Bearer a")],
            &[("authorization", "Bearer a"), ("cookie", "s=1")],
            &[("authorization", "Bearer a"), ("cookie", "s=2")],
            &[("authorization", "Bearer acookie"), ("cookie", "s=2")],
        ];
        let scopes: Vec<_> = callers.iter().map(|headers| scope_of(&tenant, headers).unwrap()).collect();
        for (at, scope) in scopes.iter().enumerate() {
            assert!(!scope.as_str().contains("Bearer"), "{scope}");
            assert!(!scopes[at + 1..].contains(scope), "{scope}");
        }
        assert_eq!(scopes[0].as_str(), "http/shop/anyone/POST /orders");
    }

    #[test]
    fn a_named_tenant_must_be_there() {
        let header = Tenant::Header(HeaderName::from_static("x-account"));
        assert!(scope_of(&header, &[]).is_err());
        assert!(scope_of(&header, &[("x-account", "a"), ("x-account", "b")]).is_err());
        let refreshed = [("x-account", "a"), ("authorization", "new")];
        assert_eq!(scope_of(&header, &[("x-account", "a")]), scope_of(&header, &refreshed));
        let cookie = Tenant::Cookie("session".into());
        assert!(scope_of(&cookie, &[("cookie", "other=1")]).is_err());
        assert_eq!(
            scope_of(&cookie, &[("cookie", "a=1; session=x")]),
            scope_of(&cookie, &[("cookie", "session=x; b=2")])
        );
        let nobody = Tenant::function(|_| None);
        assert!(scope_of(&nobody, &[]).is_err());
    }

    #[test]
    fn a_long_route_still_has_a_scope_of_its_own() {
        let long = |end: &str| format!("/{}{end}", "x".repeat(300));
        let of = |route: &str| scope("shop", &Tenant::Shared, route, &parts(&[])).unwrap();
        assert_ne!(of(&long("a")), of(&long("b")));
        assert!(of(&long("a")).as_str().len() < 255);
    }
}
