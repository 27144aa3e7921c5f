//! TLS by rustls, with HTTP/2 offered by ALPN.

use tokio_rustls::TlsAcceptor;

use crate::config::TlsConfig;
use crate::error::ServerError;

/// Loads the certificate and key.
pub(crate) fn acceptor(config: &TlsConfig) -> Result<TlsAcceptor, ServerError> {
    hapax_http::tls::acceptor(&config.cert_file, &config.key_file)
        .map_err(|error| ServerError::Tls { file: error.file, problem: error.problem })
}
