//! TLS by rustls, with HTTP/2 offered by ALPN.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
pub use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;

/// Why a certificate or its key cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", file.display())]
pub struct TlsError {
    /// The certificate or key file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// Loads a certificate chain and its key, in PEM.
pub fn acceptor(cert_file: &Path, key_file: &Path) -> Result<TlsAcceptor, TlsError> {
    let bad = |file: &Path, problem: &dyn fmt::Display| TlsError {
        file: file.to_owned(),
        problem: problem.to_string(),
    };
    let chain = CertificateDer::pem_file_iter(cert_file)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| bad(cert_file, &error))?;
    if chain.is_empty() {
        return Err(bad(cert_file, &"it holds no certificate"));
    }
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(|error| bad(key_file, &error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(cert_file, &error))?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| bad(cert_file, &error))?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(tls)))
}
