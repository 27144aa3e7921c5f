//! TLS to a broker.

use std::path::PathBuf;
use std::sync::Arc;

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use super::WireError;

/// Encryption by TLS 1.2 or 1.3; the broker's certificate is always verified.
#[derive(Clone)]
pub struct Tls(Arc<ClientConfig>);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

impl Tls {
    /// Trusts the certificates of a PEM file, or without one those of the system. `identity` is the PEM file of this
    /// client's certificate chain and that of its key, for brokers that ask for them.
    pub fn new(authority: Option<PathBuf>, identity: Option<(PathBuf, PathBuf)>) -> Result<Self, WireError> {
        let mut roots = RootCertStore::empty();
        match authority {
            Some(file) => {
                for certificate in certificates(&file)? {
                    roots.add(certificate).map_err(|error| problem(&file, &error))?;
                }
            }
            None => {
                for certificate in rustls_native_certs::load_native_certs().certs {
                    // An unusable certificate in the system's store does not affect the others.
                    let _ = roots.add(certificate);
                }
            }
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| WireError::Tls(error.to_string()))?
            .with_root_certificates(roots);
        let config = match identity {
            None => builder.with_no_client_auth(),
            Some((chain, key_file)) => {
                let key =
                    PrivateKeyDer::from_pem_file(&key_file).map_err(|error| problem(&key_file, &error))?;
                builder
                    .with_client_auth_cert(certificates(&chain)?, key)
                    .map_err(|error| problem(&chain, &error))?
            }
        };
        Ok(Self(Arc::new(config)))
    }

    pub(super) async fn handshake(
        &self,
        address: &str,
        tcp: TcpStream,
    ) -> Result<TlsStream<TcpStream>, WireError> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| WireError::Tls(format!("'{host}' is no host name or IP address")))?;
        TlsConnector::from(self.0.clone()).connect(name, tcp).await.map_err(|source| WireError::Connect {
            address: address.to_owned(),
            reason: format!("TLS handshake: {source}"),
        })
    }
}

fn certificates(file: &PathBuf) -> Result<Vec<CertificateDer<'static>>, WireError> {
    CertificateDer::pem_file_iter(file).and_then(Iterator::collect).map_err(|error| problem(file, &error))
}

fn problem(file: &std::path::Path, error: &dyn std::fmt::Display) -> WireError {
    WireError::Tls(format!("{}: {error}", file.display()))
}
