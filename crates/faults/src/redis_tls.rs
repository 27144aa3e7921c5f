//! Certificates for servers that tests reach by TLS.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// A private authority, and a certificate of it for `localhost` and `127.0.0.1`. They are made by `openssl`.
///
/// ```no_run
/// use hapax_faults::{RedisServer, RedisTls};
///
/// let tls = RedisTls::new()?;
/// let server = RedisServer::start(&tls.settings())?;
/// let url = format!("rediss://{}", server.tls_address());
/// # Ok::<(), String>(())
/// ```
pub struct RedisTls {
    folder: TempDir,
    settings: Vec<String>,
}

impl RedisTls {
    /// Makes the authority and the certificate.
    pub fn new() -> Result<Self, String> {
        let folder = TempDir::with_prefix("hapax-redis-tls-").map_err(|error| error.to_string())?;
        let script = "
            key='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
            echo subjectAltName=DNS:localhost,IP:127.0.0.1 > names
            openssl req -x509 $key -days 2 -subj /CN=authority -keyout authority.key -out authority.pem
            openssl req $key -subj /CN=localhost -keyout key.pem -out request.pem
            openssl x509 -req -in request.pem -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 \
                -extfile names -out cert.pem
            cat key.pem cert.pem > identity.pem";
        let made = Command::new("sh").args(["-ec", script]).current_dir(&folder).output();
        let made = made.map_err(|error| format!("sh: {error}"))?;
        if !made.status.success() {
            return Err(format!("openssl: {}", String::from_utf8_lossy(&made.stderr)));
        }
        let file = |name: &str| folder.path().join(name).display().to_string();
        let settings = vec![
            format!("tls-cert-file {}", file("cert.pem")),
            format!("tls-key-file {}", file("key.pem")),
            format!("tls-ca-cert-file {}", file("authority.pem")),
            "tls-auth-clients no".to_owned(),
            "tls-replication yes".to_owned(),
        ];
        Ok(Self { folder, settings })
    }

    /// The certificate of the authority, which clients have to trust.
    pub fn authority(&self) -> PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// The server's key and certificate, in one file. A client may have them, too: its name is `CN=localhost`.
    pub fn identity(&self) -> PathBuf {
        self.folder.path().join("identity.pem")
    }

    /// The settings of a server that serves TLS on a port of its own, beside the plain one. Replicas and Sentinels use TLS too.
    pub fn settings(&self) -> Vec<&str> {
        self.settings.iter().map(String::as_str).collect()
    }
}
