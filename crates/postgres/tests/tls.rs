//! TLS to the database, with a certificate of a private authority. What is refused says what to do.

mod common;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use common::Server;
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive};
use hapax_faults::ROLE_WITH_PASSWORD;
use hapax_postgres::{Options, PostgresStore, migrate};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use sqlx::Executor as _;
use tempfile::TempDir;

fn main() -> ExitCode {
    common::main(tests![
        every_session_is_encrypted,
        the_certificate_is_verified,
        what_is_refused_says_what_to_do,
        passwords_come_from_a_file_or_the_url,
    ])
}

/// A server whose certificate is for `localhost`, not for an address.
struct Site {
    server: Server,
    /// The authority that signed it, and another one.
    authority: PathBuf,
    other: PathBuf,
    password: PathBuf,
    _folder: TempDir,
}

const PASSWORD: &str = "correct horse";

/// A role that is let in by TLS only.
const ENCRYPTED_ONLY: &str = "encrypted_only";

fn authority() -> (String, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    (params.self_signed(&key).unwrap().pem(), Issuer::new(params, key))
}

fn site() -> &'static Site {
    static SITE: OnceLock<Site> = OnceLock::new();
    SITE.get_or_init(|| {
        let folder = TempDir::new().unwrap();
        let ((trusted, issuer), (stranger, _)) = (authority(), authority());
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(["localhost".to_owned()]).unwrap();
        let certificate = certificate.signed_by(&key, &issuer).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(folder.path().join(name), text).unwrap();
            folder.path().join(name)
        };
        let (authority, other) = (write("ca.pem", &trusted), write("other.pem", &stranger));
        let password = write("password", &format!("{PASSWORD}\nnot the password\n"));
        let rules = format!("hostssl all {ENCRYPTED_ONLY} all trust\nhost all {ENCRYPTED_ONLY} all reject\n");
        let files =
            [("server.crt", certificate.pem()), ("server.key", key.serialize_pem()), ("pg_hba.conf", rules)];
        let files = files.each_ref().map(|(name, text)| (*name, text.as_str()));
        let server = Server::start_with_files(&["fsync=off", "ssl=on"], &files).unwrap();
        let create = format!(
            "CREATE ROLE {ENCRYPTED_ONLY} SUPERUSER LOGIN; \
             CREATE ROLE {ROLE_WITH_PASSWORD} SUPERUSER LOGIN PASSWORD '{PASSWORD}'"
        );
        server.sql("postgres", &create).unwrap();
        let made = async { migrate(&server.url("postgres"), &Options::default(), false).await.map(drop) };
        std::thread::scope(|scope| scope.spawn(|| common::block_on(made)).join()).unwrap().unwrap();
        Site { server, authority, other, password, _folder: folder }
    })
}

impl Site {
    /// The database's URL for a role and a host, with these parameters.
    fn url(&self, role: &str, host: &str, query: &str) -> String {
        format!("postgres://{role}@{host}:{}/postgres?{query}", self.server.address().port())
    }

    /// The file's own path as a parameter.
    fn trusting(file: &std::path::Path, mode: &str) -> String {
        format!("sslmode={mode}&sslrootcert={}", file.display())
    }
}

async fn open(url: &str) -> Result<PostgresStore, String> {
    PostgresStore::open(url, Options::default()).await.map_err(|error| error.to_string())
}

async fn every_session_is_encrypted(_: &'static Server) {
    let site = site();
    let role = ENCRYPTED_ONLY;
    let store = open(&site.url(role, "127.0.0.1", "sslmode=require")).await.unwrap();
    let jobs = QueueName::new("encrypted").unwrap();
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    // The connection that listens is opened by the first wait.
    let (waits, name) = (store.clone(), jobs.clone());
    let wait = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
    let waiting = tokio::spawn(async move { waits.receive(&name, wait).await });
    let mut direct = site.server.connect("postgres").await;
    let listening =
        "SELECT count(*) FROM pg_stat_activity WHERE usename = 'encrypted_only' AND query LIKE 'LISTEN%'";
    let start = std::time::Instant::now();
    while sqlx::query_scalar::<_, i64>(listening).fetch_one(&mut direct).await.unwrap() == 0 {
        assert!(start.elapsed() < std::time::Duration::from_mins(1), "no session listens");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let bare = "SELECT count(*) FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid)
                WHERE a.usename = 'encrypted_only' AND NOT s.ssl";
    assert_eq!(sqlx::query_scalar::<_, i64>(bare).fetch_one(&mut direct).await.unwrap(), 0);
    store.send(&jobs, vec![NewMessage::new("a")]).await.unwrap().remove(0).unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().len(), 1);
    store.shut_down();
    direct.execute("SELECT 1").await.unwrap();
}

async fn the_certificate_is_verified(_: &'static Server) {
    let site = site();
    let role = ENCRYPTED_ONLY;
    for (host, mode) in [("localhost", "verify-full"), ("localhost", "verify-ca")] {
        let url = site.url(role, host, &Site::trusting(&site.authority, mode));
        open(&url).await.unwrap_or_else(|why| panic!("{host}, {mode}: {why}")).shut_down();
        migrate(&url, &Options::default(), true).await.unwrap();
    }
}

async fn what_is_refused_says_what_to_do(plain: &'static Server) {
    let site = site();
    let without_tls = plain.url("postgres");
    let without_tls =
        format!("{without_tls}{}sslmode=require", if without_tls.contains('?') { '&' } else { '?' });
    let role = ENCRYPTED_ONLY;
    for (url, says) in [
        (without_tls, "ssl = on"),
        (site.url(role, "localhost", "sslmode=disable"), "sslmode=require"),
        (site.url(role, "localhost", "sslmode=verify-full"), "sslrootcert=FILE"),
        (site.url(role, "localhost", &Site::trusting(&site.other, "verify-full")), "sslrootcert=FILE"),
        (site.url(role, "localhost", &Site::trusting(&site.other, "verify-ca")), "sslrootcert=FILE"),
        (site.url(role, "127.0.0.1", &Site::trusting(&site.authority, "verify-full")), "a name that"),
        (site.url(role, "localhost", "sslmode=verify-full&sslrootcert=/not/there.pem"), "/not/there.pem"),
        (site.url(role, "localhost", "sslmode=sometimes"), "sometimes"),
        (
            site.url(&format!("{ROLE_WITH_PASSWORD}:wrong"), "localhost", "sslmode=require"),
            "hapax_password_file",
        ),
    ] {
        let refused = open(&url).await.map(drop).expect_err(&url);
        assert!(refused.contains(says), "{url}: {refused}");
        let migrated = migrate(&url, &Options::default(), false).await.expect_err(&url).to_string();
        assert!(migrated.contains(says), "migrate, {url}: {migrated}");
        assert!(!refused.contains("wrong@") && !migrated.contains("wrong@"), "the password is told");
    }
}

async fn passwords_come_from_a_file_or_the_url(_: &'static Server) {
    let site = site();
    let verified = Site::trusting(&site.authority, "verify-full");
    let by_file = format!("{verified}&hapax_password_file={}", site.password.display());
    let url = site.url(ROLE_WITH_PASSWORD, "localhost", &by_file);
    open(&url).await.unwrap().shut_down();
    let role = format!("{ROLE_WITH_PASSWORD}:{}", PASSWORD.replace(' ', "%20"));
    open(&site.url(&role, "localhost", &verified)).await.unwrap().shut_down();
    // The file beats the URL, and it is an option, too.
    let wrong = format!("{ROLE_WITH_PASSWORD}:wrong");
    let options = Options { password_file: Some(site.password.clone()), ..Options::default() };
    let opened = PostgresStore::open(&site.url(&wrong, "localhost", &verified), options).await;
    opened.map_err(|error| error.to_string()).unwrap().shut_down();
}
