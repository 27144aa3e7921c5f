//! Keeps web pages out. A browser on the same machine reaches loopback, so whatever a page can make it send must be
//! turned away: requests of other sites, and names that an attacker let resolve to this machine (DNS rebinding).

use std::net::{IpAddr, SocketAddr};

use http::header::{HOST, HeaderName, ORIGIN, USER_AGENT};
use http::{HeaderMap, Method, Request, Uri};

use crate::config::AuthConfig;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Decides from the headers alone.
#[derive(Debug)]
pub(crate) struct Guard {
    allowed_hosts: Vec<String>,
    has_keys: bool,
    insecure: bool,
}

impl Guard {
    pub(crate) fn new(config: &AuthConfig, has_keys: bool) -> Self {
        let allowed_hosts = config.allowed_hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        Self { allowed_hosts, has_keys, insecure: config.insecure }
    }

    /// `Err` says why the request is refused. `local` is the address that the client connected to.
    pub(crate) fn check<B>(&self, request: &Request<B>, local: SocketAddr) -> Result<(), &'static str> {
        let host = host_of(request.headers(), request.uri());
        if !self.host_allowed(host, local) {
            return Err("this Host is not one of the server's names; add it to auth.allowed_hosts");
        }
        let headers = request.headers();
        if headers.get(&FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none") {
            return Err("requests from other web sites are refused");
        }
        // An image in a page of another site is fetched by GET without an Origin, and older browsers do not say where
        // a request comes from. What they do say is that they are browsers; programs may act by GET, pages may not.
        let browser = headers.get(USER_AGENT).is_some_and(|agent| agent.as_bytes().starts_with(b"Mozilla/"));
        let acts =
            request.method() == Method::GET && request.uri().query().is_some_and(|q| q.contains("Action="));
        if browser && acts && !headers.contains_key(&FETCH_SITE) {
            return Err("a browser cannot act by GET; use POST");
        }
        if let Some(origin) = headers.get(ORIGIN) {
            let authority = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, a)| a);
            let own =
                host.is_some() && authority.is_some_and(|a| host.is_some_and(|h| a.eq_ignore_ascii_case(h)));
            let named = authority.is_some_and(|a| self.named(name_of(a)));
            if !own && !named {
                return Err("requests from other web sites are refused");
            }
        }
        Ok(())
    }

    /// With keys, or on a network declared trusted, a foreign name gives an attacker nothing: its page has no secret,
    /// and the server's own names cannot be known here. So the check applies without keys, and wherever names were
    /// configured.
    fn host_allowed(&self, host: Option<&str>, local: SocketAddr) -> bool {
        if self.has_keys || (self.insecure && !local.ip().is_loopback() && self.allowed_hosts.is_empty()) {
            return true;
        }
        // HTTP/1.0 and hand-made requests have none; a browser always sends one.
        let Some(host) = host else { return true };
        let name = name_of(host);
        let loopback_name = name.eq_ignore_ascii_case("localhost")
            || name.len() > 10 && name.as_bytes()[name.len() - 10..].eq_ignore_ascii_case(b".localhost");
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        loopback_name || address.is_ok_and(|ip| ip.is_loopback() || ip == local.ip()) || self.named(name)
    }

    fn named(&self, name: &str) -> bool {
        self.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }
}

/// The host that the client asked for, with its port: from the header, or HTTP/2's `:authority`.
pub(crate) fn host_of<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Option<&'a str> {
    match headers.get(HOST) {
        // Unreadable is not absent: it must not pass.
        Some(host) => Some(host.to_str().unwrap_or("?")),
        None => uri.authority().map(http::uri::Authority::as_str),
    }
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    match host.rfind(':') {
        Some(colon) if !host[colon..].contains(']') => &host[..colon],
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(guard: &Guard, local: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().uri("/");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(()).unwrap(), local.parse().unwrap()).is_ok()
    }

    fn open() -> Guard {
        let config =
            AuthConfig { allowed_hosts: vec!["Host.Docker.Internal".into()], ..AuthConfig::default() };
        Guard::new(&config, false)
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
        assert!(check(&Guard::new(&AuthConfig::default(), true), "10.0.0.1:9324", &[("host", "queue.corp")]));
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
            open().check(&request.body(()).unwrap(), "127.0.0.1:9324".parse().unwrap()).is_ok()
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
}
