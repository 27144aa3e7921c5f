//! Encryption and authentication, once for both clients: this crate's own connections and librdkafka's.

use std::path::PathBuf;

use crate::wire::{Connect, Sasl, Tls, WireError};

/// How a cluster is reached and trusted.
///
/// ```
/// use hapax_kafka::security::Security;
///
/// let plain = Security::default();
/// assert_eq!(plain.properties(), [("security.protocol".to_owned(), "PLAINTEXT".to_owned())]);
/// ```
#[derive(Debug, Clone, Default)]
pub struct Security {
    /// Encryption. `None`: plain TCP.
    pub tls: Option<TlsFiles>,
    /// Authentication. `None`: none, or by the certificate.
    pub sasl: Option<Sasl>,
}

/// PEM files for TLS.
#[derive(Debug, Clone, Default)]
pub struct TlsFiles {
    /// Certificates that are trusted. `None`: those of the system.
    pub authority: Option<PathBuf>,
    /// This client's certificate chain and its key, for brokers that ask for them.
    pub identity: Option<(PathBuf, PathBuf)>,
}

impl Security {
    /// Addresses for this crate's own connections.
    pub fn connect<A: Into<String>>(
        &self,
        bootstrap: impl IntoIterator<Item = A>,
    ) -> Result<Connect, WireError> {
        let mut connect = Connect::plain(bootstrap);
        if let Some(files) = &self.tls {
            connect.tls = Some(Tls::new(files.authority.clone(), files.identity.clone())?);
        }
        connect.sasl.clone_from(&self.sasl);
        Ok(connect)
    }

    /// The properties of librdkafka that mean the same.
    pub fn properties(&self) -> Vec<(String, String)> {
        let protocol = match (&self.tls, &self.sasl) {
            (None, None) => "PLAINTEXT",
            (Some(_), None) => "SSL",
            (None, Some(_)) => "SASL_PLAINTEXT",
            (Some(_), Some(_)) => "SASL_SSL",
        };
        let mut properties = vec![("security.protocol", protocol.to_owned())];
        let path = |path: &PathBuf| path.display().to_string();
        if let Some(files) = &self.tls {
            properties.extend(files.authority.as_ref().map(|file| ("ssl.ca.location", path(file))));
            if let Some((chain, key)) = &files.identity {
                properties.push(("ssl.certificate.location", path(chain)));
                properties.push(("ssl.key.location", path(key)));
            }
        }
        if let Some(sasl) = &self.sasl {
            properties.push(("sasl.mechanism", sasl.mechanism.name().to_owned()));
            properties.push(("sasl.username", sasl.user.clone()));
            properties.push(("sasl.password", sasl.password.clone()));
        }
        properties.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}
