//! TLS by rustls, with HTTP/2 offered by ALPN.

use std::sync::Arc;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls;

use crate::config::TlsConfig;
use crate::error::ServerError;

/// Loads the certificate and key.
pub(crate) fn acceptor(config: &TlsConfig) -> Result<TlsAcceptor, ServerError> {
    let bad = |file: &std::path::Path, problem: &dyn std::fmt::Display| ServerError::Tls {
        file: file.to_owned(),
        problem: problem.to_string(),
    };
    let (cert, key) = (config.cert_file.as_path(), config.key_file.as_path());
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|e| bad(cert, &e))?;
    if chain.is_empty() {
        return Err(bad(cert, &"it holds no certificate"));
    }
    let key_der = PrivateKeyDer::from_pem_file(key).map_err(|e| bad(key, &e))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| bad(cert, &e))?
        .with_no_client_auth()
        .with_single_cert(chain, key_der)
        .map_err(|e| bad(cert, &e))?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(tls)))
}
