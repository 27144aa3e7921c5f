//! The URL of the sink: `kafka://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/PREFIX][?positions=TOPIC&sasl=MECHANISM&request_timeout_ms=MS]`; `kafkas://` with TLS.

use std::time::Duration;

use hapax_kafka::wire::{Connect, Sasl, SaslMechanism, Tls};

use crate::sink::SinkError;

const PORT_DEFAULT: u16 = 9092;
/// The topic of the positions.
pub const POSITIONS_DEFAULT: &str = "hapax-relay-positions";

/// What a URL says.
#[derive(Debug)]
pub struct Target {
    pub connect: Connect,
    /// Stands before the topic, with a dot; may be empty.
    pub prefix: String,
    pub positions: String,
}

impl Target {
    pub fn parse(url: &str) -> Result<Self, SinkError> {
        let wrong = |why: &str| {
            SinkError(format!(
                "{why}; the URL is kafka://HOST:PORT,HOST:PORT/PREFIX?positions=TOPIC, or kafkas:// with TLS"
            ))
        };
        let (tls, rest) = match (url.strip_prefix("kafka://"), url.strip_prefix("kafkas://")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return Err(wrong("the scheme is not kafka")),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, hosts) =
            authority.rsplit_once('@').map_or((None, authority), |(user, hosts)| (Some(user), hosts));
        let mut positions = POSITIONS_DEFAULT.to_owned();
        let mut timeout = None;
        let mut mechanism = SaslMechanism::ScramSha512;
        for (name, value) in query
            .split('&')
            .filter(|part| !part.is_empty())
            .map(|part| part.split_once('=').unwrap_or((part, "")))
        {
            match (name, value) {
                ("positions", topic) if is_topic(topic) => topic.clone_into(&mut positions),
                ("positions", topic) => return Err(wrong(&format!("positions={topic:?} is not a topic"))),
                ("sasl", "PLAIN") => mechanism = SaslMechanism::Plain,
                ("sasl", "SCRAM-SHA-256") => mechanism = SaslMechanism::ScramSha256,
                ("sasl", "SCRAM-SHA-512") => mechanism = SaslMechanism::ScramSha512,
                ("sasl", _) => return Err(wrong("sasl is not PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512")),
                ("request_timeout_ms", value) => {
                    let ms = value.parse().ok().filter(|ms| (1_000..=300_000).contains(ms));
                    let ms = ms.ok_or_else(|| wrong("request_timeout_ms is not 1000 to 300000"))?;
                    timeout = Some(Duration::from_millis(ms));
                }
                _ => return Err(wrong(&format!("{name:?} is not known"))),
            }
        }
        let addresses: Vec<String> = hosts.split(',').map(with_port).collect();
        if addresses.iter().any(|address| address.starts_with(':')) {
            return Err(wrong("a host is missing"));
        }
        if !(prefix.is_empty() || is_topic(prefix)) {
            return Err(wrong(&format!("the prefix {prefix:?} cannot be part of a topic's name")));
        }
        let mut connect = Connect::plain(addresses);
        connect.sasl = match user {
            None => None,
            Some(user) => {
                let (user, password) =
                    user.split_once(':').ok_or_else(|| wrong("the password is missing"))?;
                if mechanism == SaslMechanism::Plain && !tls {
                    return Err(wrong("PLAIN sends the password itself: use kafkas://"));
                }
                let decoded = |text: &str| {
                    let text = percent_encoding::percent_decode_str(text).decode_utf8();
                    text.map(String::from).map_err(|_| wrong("user or password is not UTF-8"))
                };
                Some(Sasl { mechanism, user: decoded(user)?, password: decoded(password)? })
            }
        };
        connect.request_timeout = timeout.unwrap_or(connect.request_timeout);
        if tls {
            connect.tls = Some(Tls::new(None, None).map_err(|error| SinkError(error.to_string()))?);
        }
        Ok(Self { connect, prefix: prefix.to_owned(), positions })
    }
}

fn with_port(host: &str) -> String {
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port { host.to_owned() } else { format!("{host}:{PORT_DEFAULT}") }
}

/// Whether this can be the name of a topic.
pub fn is_topic(name: &str) -> bool {
    let is_char = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    !name.is_empty() && name.len() <= 249 && name != "." && name != ".." && name.bytes().all(is_char)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read() {
        let target = Target::parse("kafka://a,b:9093/shop?positions=p&request_timeout_ms=2000").unwrap();
        assert_eq!(target.connect.bootstrap, ["a:9092", "b:9093"]);
        assert_eq!(target.connect.request_timeout, Duration::from_secs(2));
        assert_eq!((target.prefix.as_str(), target.positions.as_str()), ("shop", "p"));
        let target = Target::parse("kafkas://me:s%40cr%3Aet@a?sasl=PLAIN").unwrap();
        assert!(target.connect.tls.is_some());
        let sasl = target.connect.sasl.unwrap();
        assert_eq!(
            (sasl.user.as_str(), sasl.password.as_str(), sasl.mechanism),
            ("me", "s@cr:et", SaslMechanism::Plain)
        );
        assert_eq!(
            Target::parse("kafka://me:secret@a").unwrap().connect.sasl.unwrap().mechanism.name(),
            "SCRAM-SHA-512"
        );
        for wrong in [
            "nats://a",
            "kafka://",
            "kafka://a,",
            "kafka://a/b c",
            "kafka://a?positions=",
            "kafka://a?topic=x",
            "kafka://a?request_timeout_ms=10",
            "kafka://me@a",
            "kafka://me:secret@a?sasl=PLAIN",
            "kafkas://me:secret@a?sasl=GSSAPI",
        ] {
            assert!(Target::parse(wrong).is_err(), "{wrong}");
        }
    }
}
