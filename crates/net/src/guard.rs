//! Protects a listener from web pages. A browser on the same machine can reach loopback, so the requests that a page
//! can cause are refused: requests from other sites, and requests to names that an attacker resolves to this machine
//! (DNS rebinding).

use std::net::{IpAddr, SocketAddr};

use http::header::{HOST, HeaderName, HeaderValue, ORIGIN, USER_AGENT};
use http::{HeaderMap, Request, Uri};

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Decides from a request's head whether to refuse it.
#[derive(Debug)]
pub struct BrowserGuard {
    /// Host names of the listener besides those of loopback, without ports.
    pub allowed_hosts: Vec<String>,
    /// Requests must carry a secret. A page does not have it, so DNS rebinding is harmless; and the names under which
    /// such a listener is reached are not known here.
    pub has_keys: bool,
    /// The network is declared trusted: any host name is accepted outside of loopback, unless `allowed_hosts` is set.
    pub insecure: bool,
}

impl BrowserGuard {
    /// `Err` holds the reason of the refusal. `local` is the address that the client connected to; `has_side_effect` tells
    /// whether the request has a side effect although it is a GET.
    pub fn check<B>(
        &self,
        request: &Request<B>,
        local: SocketAddr,
        has_side_effect: impl FnOnce() -> bool,
    ) -> Result<(), &'static str> {
        let headers = request.headers();
        let host = validated_host(headers, request.uri())?;
        if !self.host_allowed(host, local)? {
            return Err("this Host is not one of the server's names; add it to auth.allowed_hosts");
        }
        let foreign = "requests from other web sites are refused";
        let site = single_value(headers, &FETCH_SITE, foreign)?;
        if site.is_some_and(|site| site != "same-origin" && site != "none") {
            return Err(foreign);
        }
        // An image in a page of another site is fetched by GET without an Origin, and older browsers send no
        // Sec-Fetch-Site either. They do identify as browsers: programs may cause side effects by GET, pages may not.
        let browser = headers.get(USER_AGENT).is_some_and(|agent| agent.as_bytes().starts_with(b"Mozilla/"));
        if browser && site.is_none() && has_side_effect() {
            return Err("a browser cannot act by GET; use POST");
        }
        let Some(origin) = single_value(headers, &ORIGIN, foreign)? else { return Ok(()) };
        let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, a)| a);
        let own = |authority: &str| host.is_some_and(|host| authority.eq_ignore_ascii_case(host));
        let named = |authority: &str| host_name(authority).is_some_and(|name| self.is_allowed_host(name));
        if authority.is_some_and(|authority| own(authority) || named(authority)) {
            Ok(())
        } else {
            Err(foreign)
        }
    }

    fn host_allowed(&self, host: Option<&str>, local: SocketAddr) -> Result<bool, &'static str> {
        // HTTP/1.0 clients and hand-written requests send no Host; a browser always does.
        let Some(host) = host else { return Ok(true) };
        let name = host_name(host).ok_or("the Host is not a name or an address with a port")?;
        let any = self.insecure && !local.ip().is_loopback() && self.allowed_hosts.is_empty();
        if self.has_keys || any {
            return Ok(true);
        }
        let loopback_name = name.eq_ignore_ascii_case("localhost")
            || name.len() > 10 && name.as_bytes()[name.len() - 10..].eq_ignore_ascii_case(b".localhost");
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        Ok(loopback_name
            || address.is_ok_and(|ip| ip.is_loopback() || ip == local.ip())
            || self.is_allowed_host(name))
    }

    fn is_allowed_host(&self, name: &str) -> bool {
        self.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }
}

/// The value of a header that may occur only once; several values are refused like a foreign one.
fn single_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
    refusal: &'static str,
) -> Result<Option<&'a HeaderValue>, &'static str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() { Err(refusal) } else { Ok(first) }
}

/// The host of a request, with its port: from the header, the target, or HTTP/2's `:authority`. If they differ, the
/// request is refused, because intermediaries could route it to different hosts.
pub fn validated_host<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Result<Option<&'a str>, &'static str> {
    let Some(host) = single_value(headers, &HOST, "the request has several Host headers; send one")? else {
        return Ok(uri.authority().map(http::uri::Authority::as_str));
    };
    let host = host.to_str().map_err(|_| "the Host is not a name or an address with a port")?;
    match uri.authority() {
        Some(authority) if !authority.as_str().eq_ignore_ascii_case(host) => {
            Err("the Host header differs from the request's target or :authority")
        }
        _ => Ok(Some(host)),
    }
}

/// The host of a request, with its port, after [`validated_host`] has accepted the request.
pub fn host_of<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Option<&'a str> {
    validated_host(headers, uri).ok().flatten()
}

/// A host without its port and without the final dot of a fully qualified name. `None`: it is not `NAME[:PORT]`,
/// `IPV4[:PORT]` or `[IPV6][:PORT]`.
fn host_name(host: &str) -> Option<&str> {
    let (name, port) = match host.find(']') {
        Some(end) if host.starts_with('[') => host.split_at(end + 1),
        _ => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let port = if port.is_empty() { port } else { port.strip_prefix(':')? };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let good = match name.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']').is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok()),
        None => !name.is_empty() && name.bytes().all(plain),
    };
    let number = port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
    (good && number).then(|| name.strip_suffix('.').unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(guard: &BrowserGuard, local: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().uri("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(()).unwrap(), local.parse().unwrap(), || false).is_ok()
    }

    fn open() -> BrowserGuard {
        BrowserGuard { allowed_hosts: vec!["Host.Docker.Internal".into()], has_keys: false, insecure: false }
    }

    #[test]
    fn foreign_hosts_are_refused_without_keys() {
        for host in [
            "localhost:9324",
            "127.0.0.1:9324",
            "[::1]:9324",
            "127.0.0.1",
            "sqs.localhost:1",
            "host.docker.internal:9324",
        ] {
            assert!(check(&open(), "127.0.0.1:9324", &[("host", host)]), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9324",
            "localhost.evil.example",
            "10.0.0.1",
            "notlocalhost",
            "\u{e4}",
        ] {
            assert!(!check(&open(), "127.0.0.1:9324", &[("host", host)]), "{host}");
        }
        let with_keys = BrowserGuard { has_keys: true, ..open() };
        assert!(check(&with_keys, "10.0.0.1:9324", &[("host", "queue.corp")]));
        assert!(!check(&with_keys, "10.0.0.1:9324", &[("host", "queue.corp"), ("host", "queue.corp")]));
    }

    #[test]
    fn a_page_cannot_act_by_fetching_an_image() {
        let acts = |agent: &str, site: Option<&str>| {
            let request = Request::get("/000000000000/q?Action=PurgeQueue").header("host", "localhost:9324");
            let request = request.header("user-agent", agent);
            let request = match site {
                Some(site) => request.header("sec-fetch-site", site),
                None => request,
            };
            open().check(&request.body(()).unwrap(), "127.0.0.1:9324".parse().unwrap(), || true).is_ok()
        };
        assert!(!acts("Mozilla/5.0 (Macintosh) Version/15.0 Safari/605.1.15", None));
        assert!(!acts("Mozilla/5.0", Some("cross-site")));
        assert!(acts("Mozilla/5.0", Some("none")), "typed into the address bar");
        assert!(acts("curl/8.0", None));
    }

    #[test]
    fn cross_site_requests_are_refused() {
        let host = ("host", "localhost:9324");
        for (name, value, allowed) in [
            ("sec-fetch-site", "cross-site", false),
            ("sec-fetch-site", "same-site", false),
            ("sec-fetch-site", "same-origin", true),
            ("sec-fetch-site", "none", true),
            ("origin", "https://evil.example", false),
            ("origin", "null", false),
            ("origin", "http://localhost:9324", true),
            ("origin", "http://localhost:3000", false),
        ] {
            assert_eq!(check(&open(), "127.0.0.1:9324", &[host, (name, value)]), allowed, "{name} {value}");
        }
    }

    #[test]
    fn host_names_are_parsed() {
        for (host, name) in [
            ("a", Some("a")),
            ("a.", Some("a")),
            ("a:", Some("a")),
            ("a:1", Some("a")),
            ("[::1]", Some("[::1]")),
            ("[::1]:65535", Some("[::1]")),
            ("", None),
            (":1", None),
            ("a:1:2", None),
            ("a:123456", None),
            ("a@b", None),
            ("127.0.0.1:80@evil", None),
            ("[::1]a", None),
            ("[a]", None),
            ("a]:1", None),
            ("a/b", None),
        ] {
            assert_eq!(host_name(host), name, "{host}");
        }
    }
}
