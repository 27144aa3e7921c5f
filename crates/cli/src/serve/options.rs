//! The flags of `hapax serve`, each also an environment variable. They override the file.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;
use hapax_server::config::{AuthConfig, KeyConfig, LimitsConfig, SqsConfig, TlsConfig};

use super::config::{Config, EmbeddedConfig, LogFormat, PostgresConfig, parse_address};
use crate::config_file::{self, ConfigFile, changed_paths};
use crate::text::parse_ms;

/// The variable with the secret of the key of `--key-id`.
const KEY_SECRET: &str = "HAPAX_KEY_SECRET";

/// A duration in milliseconds; parsed from seconds, minutes or hours.
type Ms = u64;

/// Runs the server: queues in a local folder, a database or Redis, with AWS SQS's API.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML). A flag overrides its environment variable, which overrides the file.
    #[arg(long, value_name = "FILE", env = "HAPAX_CONFIG")]
    config: Option<PathBuf>,
    /// Prints the configuration in effect, secrets redacted, and exits.
    #[arg(long)]
    pub print_config: bool,
    /// The store of the messages: embedded:PATH; postgres://USER@HOST/DATABASE with its password in PGPASSWORD or a
    /// file; redis://HOST or redis+cluster://HOST,HOST with its password in REDISCLI_AUTH or a file
    /// [default: embedded:./hapax-data].
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    store: Option<String>,
    /// Address to listen on; may be repeated. Port 0 chooses a free one [default: 127.0.0.1:9324].
    #[arg(long, value_name = "ADDR", env = "HAPAX_LISTEN", value_delimiter = ',', value_parser = parse_address)]
    listen: Vec<SocketAddr>,
    /// Format of the logs, on standard error [default: text].
    #[arg(long, value_name = "FORMAT", env = "HAPAX_LOG_FORMAT")]
    log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug, trace; or by module: info,hapax_server=debug [default: info].
    #[arg(long, value_name = "LEVEL", env = "HAPAX_LOG_LEVEL")]
    log_level: Option<String>,
    /// Sends traces to this OpenTelemetry collector, OTLP over HTTP: http://127.0.0.1:4318 [default: no traces].
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Traces this many of a thousand messages that come without a trace context [default: 10].
    #[arg(long, value_name = "N", env = "HAPAX_TRACES_PER_MILLE")]
    traces_per_mille: Option<u16>,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    postgres: PostgresArgs,
    #[command(flatten)]
    sqs: SqsArgs,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Access")]
struct AccessArgs {
    /// Id of a key with all rights; its secret comes from --key-secret-file or HAPAX_KEY_SECRET. Define more keys, with
    /// fewer rights, in the configuration file.
    #[arg(long, value_name = "ID", env = "HAPAX_KEY_ID")]
    key_id: Option<String>,
    /// File with the secret of that key.
    #[arg(long, value_name = "FILE", env = "HAPAX_KEY_SECRET_FILE", requires = "key_id")]
    key_secret_file: Option<PathBuf>,
    /// Listens beyond loopback without keys: everyone who can reach the port may do everything.
    #[arg(long, env = "HAPAX_INSECURE", num_args = 0..=1, require_equals = true, default_missing_value = "true",
          value_name = "BOOL", value_parser = BoolishValueParser::new())]
    insecure: Option<bool>,
    /// Host name that clients may use for a server without keys; may be repeated.
    #[arg(long, value_name = "HOST", env = "HAPAX_ALLOWED_HOSTS", value_delimiter = ',')]
    allowed_host: Vec<String>,
    /// PEM file with the certificate chain: serves HTTPS.
    #[arg(long, value_name = "FILE", env = "HAPAX_TLS_CERT", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// PEM file with the certificate's private key.
    #[arg(long, value_name = "FILE", env = "HAPAX_TLS_KEY", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Maximum number of messages in all queues together [default: no limit].
    #[arg(long, value_name = "N", env = "HAPAX_STORE_MESSAGES_MAX")]
    store_messages_max: Option<u64>,
    /// Maximum bytes of bodies and attributes in all queues together [default: no limit].
    #[arg(long, value_name = "BYTES", env = "HAPAX_STORE_BYTES_MAX")]
    store_bytes_max: Option<u64>,
    /// Maximum memory for messages, in bytes [default: no limit].
    #[arg(long, value_name = "BYTES", env = "HAPAX_STORE_MEMORY_BYTES_MAX")]
    store_memory_bytes_max: Option<u64>,
    /// Free disk space below which sends are refused [default: 67108864].
    #[arg(long, value_name = "BYTES", env = "HAPAX_STORE_RESERVE_BYTES")]
    store_reserve_bytes: Option<u64>,
    /// The most open claims, held or in doubt, in one scope of the ledger [default: 100000].
    #[arg(long, value_name = "N", env = "HAPAX_STORE_IN_DOUBT_PER_SCOPE_MAX")]
    store_in_doubt_per_scope_max: Option<u64>,
    /// Opens a store on a network file system, whose locks and syncs cannot be relied on [default: false].
    #[arg(
        long,
        value_name = "BOOL",
        env = "HAPAX_STORE_ALLOW_NETWORK_FILE_SYSTEM",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true"
    )]
    store_allow_network_file_system: Option<bool>,
    /// The only folder that `hapax backup` can have the server write into [default: backups, in the store's folder].
    #[arg(long, value_name = "FOLDER", env = "HAPAX_STORE_BACKUP_FOLDER")]
    store_backup_folder: Option<PathBuf>,
    /// The most connections at once [default: 4096].
    #[arg(long, value_name = "N", env = "HAPAX_CONNECTIONS_MAX")]
    connections_max: Option<usize>,
    /// Timeout for a request to arrive [default: 30s].
    #[arg(long, value_name = "TIME", env = "HAPAX_READ_TIMEOUT", value_parser = parse_ms)]
    read_timeout: Option<Ms>,
    /// How long a connection may stay open without a request [default: 2m].
    #[arg(long, value_name = "TIME", env = "HAPAX_IDLE_TIMEOUT", value_parser = parse_ms)]
    idle_timeout: Option<Ms>,
    /// Timeout for a request after it has arrived [default: 1m].
    #[arg(long, value_name = "TIME", env = "HAPAX_REQUEST_TIMEOUT", value_parser = parse_ms)]
    request_timeout: Option<Ms>,
    /// Maximum size of a request body [default: 6291456].
    #[arg(long, value_name = "BYTES", env = "HAPAX_BODY_BYTES_MAX")]
    body_bytes_max: Option<usize>,
    /// Maximum bytes of all request bodies that are still arriving [default: 268435456].
    #[arg(long, value_name = "BYTES", env = "HAPAX_ARRIVING_BYTES_MAX")]
    arriving_bytes_max: Option<usize>,
    /// How long a client may leave a response unread [default: 30s].
    #[arg(long, value_name = "TIME", env = "HAPAX_WRITE_TIMEOUT", value_parser = parse_ms)]
    write_timeout: Option<Ms>,
    /// Maximum bytes of all responses that clients have not read yet [default: 268435456].
    #[arg(long, value_name = "BYTES", env = "HAPAX_UNREAD_BYTES_MAX")]
    unread_bytes_max: Option<usize>,
    /// How long a shutdown waits for running requests [default: 10s].
    #[arg(long, value_name = "TIME", env = "HAPAX_SHUTDOWN_TIMEOUT", value_parser = parse_ms)]
    shutdown_timeout: Option<Ms>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "PostgreSQL")]
struct PostgresArgs {
    /// Applies missing migrations of the database's schema at start, as `hapax migrate` does [default: false].
    #[arg(long, value_name = "BOOL", env = "HAPAX_MIGRATE", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = BoolishValueParser::new())]
    migrate: Option<bool>,
    /// The most connections to the database, in addition to one that listens for changes [default: 10].
    #[arg(long, value_name = "N", env = "HAPAX_POSTGRES_CONNECTIONS_MAX")]
    postgres_connections_max: Option<usize>,
    /// How long to wait for a connection to the database [default: 5s].
    #[arg(long, value_name = "TIME", env = "HAPAX_POSTGRES_CONNECT_TIMEOUT", value_parser = parse_ms)]
    postgres_connect_timeout: Option<Ms>,
    /// How long to wait for an operation of the database [default: 20s].
    #[arg(long, value_name = "TIME", env = "HAPAX_POSTGRES_OPERATION_TIMEOUT", value_parser = parse_ms)]
    postgres_operation_timeout: Option<Ms>,
    /// The URL leads to a pooler that assigns a session per transaction, for example PgBouncer [default: false].
    #[arg(long, value_name = "BOOL", env = "HAPAX_POSTGRES_POOLER", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = BoolishValueParser::new())]
    postgres_pooler: Option<bool>,
    /// A URL that does not lead through the pooler, for the connection that listens for changes [default: none].
    #[arg(long, value_name = "URL", env = "HAPAX_POSTGRES_LISTEN_URL", hide_env_values = true)]
    postgres_listen_url: Option<String>,
    /// File whose first line is the password, instead of PGPASSWORD.
    #[arg(long, value_name = "FILE", env = "HAPAX_POSTGRES_PASSWORD_FILE")]
    postgres_password_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "SQS")]
struct SqsArgs {
    /// Account id in queue URLs and ARNs: 12 digits [default: 000000000000].
    #[arg(long, value_name = "ID", env = "HAPAX_ACCOUNT")]
    account: Option<String>,
    /// Region in ARNs; requests signed for any region are accepted [default: us-east-1].
    #[arg(long, value_name = "REGION", env = "HAPAX_REGION")]
    region: Option<String>,
    /// Refuses a second purge of a queue within this time; 60s in SQS [default: 0].
    #[arg(long, value_name = "TIME", env = "HAPAX_PURGE_INTERVAL", value_parser = parse_ms)]
    purge_interval: Option<Ms>,
    /// Refuses to create a queue that was deleted within this time; 60s in SQS [default: 0].
    #[arg(long, value_name = "TIME", env = "HAPAX_RECREATE_INTERVAL", value_parser = parse_ms)]
    recreate_interval: Option<Ms>,
}

fn set<T>(field: &mut T, given: Option<T>) {
    if let Some(value) = given {
        *field = value;
    }
}

fn set_some<T>(field: &mut Option<T>, given: Option<T>) {
    if given.is_some() {
        *field = given;
    }
}

fn set_list<T>(field: &mut Vec<T>, given: Vec<T>) {
    if !given.is_empty() {
        *field = given;
    }
}

impl ServeArgs {
    /// The configuration in effect: defaults, then the file, then environment and flags.
    ///
    /// All problems are reported at once. Without `--print-config`, secrets and certificates are read too.
    pub fn config(self) -> anyhow::Result<Config> {
        let print_only = self.print_config;
        let read = config_file::read(self.config.as_deref())?;
        let (before, file) = ConfigFile::parse_or_default::<Config>(read.as_ref())?;
        let config = self.apply_to(before.clone());
        let mut problems = config.problems();
        if !print_only {
            problems.extend(config.machine_problems());
        }
        file.check(problems, changed_paths(&before, &config)?)?;
        Ok(config)
    }

    fn apply_to(self, mut config: Config) -> Config {
        set(&mut config.store.url, self.store);
        set_list(&mut config.listen, self.listen);
        set(&mut config.log.format, self.log_format);
        set(&mut config.log.level, self.log_level);
        set_some(&mut config.trace.endpoint, self.otlp);
        set(&mut config.trace.sampled_per_mille, self.traces_per_mille);
        self.access.apply_to(&mut config);
        self.limits.apply_to(&mut config);
        self.postgres.apply_to(&mut config);
        self.sqs.apply_to(&mut config);
        config
    }
}

impl AccessArgs {
    fn apply_to(self, config: &mut Config) {
        if let Some(id) = self.key_id {
            let secret_env = self.key_secret_file.is_none().then(|| KEY_SECRET.to_owned());
            let everything = || vec!["*".to_owned()];
            config.auth.keys.retain(|key| key.id != id);
            config.auth.keys.push(KeyConfig {
                id,
                secret: None,
                secret_file: self.key_secret_file,
                secret_env,
                queues: everything(),
                actions: everything(),
            });
        }
        let AuthConfig { keys: _, insecure, allowed_hosts } = &mut config.auth;
        set(insecure, self.insecure);
        set_list(allowed_hosts, self.allowed_host);
        if let (Some(cert_file), Some(key_file)) = (self.tls_cert, self.tls_key) {
            config.tls = Some(TlsConfig { cert_file, key_file });
        }
    }
}

// Destructured, so that a new option of the server does not compile without its flag.

impl LimitArgs {
    fn apply_to(self, config: &mut Config) {
        // Every kind of store has this limit, in its own section.
        set(config.store.in_doubt_per_scope_max(), self.store_in_doubt_per_scope_max);
        let EmbeddedConfig {
            reserve_bytes,
            messages_max,
            bytes_max,
            memory_bytes_max,
            in_doubt_per_scope_max: _,
            allow_network_file_system,
            backup_folder,
        } = &mut config.store.embedded;
        set_some(messages_max, self.store_messages_max);
        set_some(bytes_max, self.store_bytes_max);
        set_some(memory_bytes_max, self.store_memory_bytes_max);
        set(reserve_bytes, self.store_reserve_bytes);
        set(allow_network_file_system, self.store_allow_network_file_system);
        set_some(backup_folder, self.store_backup_folder);
        let LimitsConfig {
            connections_max,
            read_timeout_ms,
            idle_timeout_ms,
            request_timeout_ms,
            body_bytes_max,
            arriving_bytes_max,
            write_timeout_ms,
            unread_bytes_max,
            shutdown_timeout_ms,
        } = &mut config.limits;
        set(connections_max, self.connections_max);
        set(read_timeout_ms, self.read_timeout);
        set(idle_timeout_ms, self.idle_timeout);
        set(request_timeout_ms, self.request_timeout);
        set(body_bytes_max, self.body_bytes_max);
        set(arriving_bytes_max, self.arriving_bytes_max);
        set(write_timeout_ms, self.write_timeout);
        set(unread_bytes_max, self.unread_bytes_max);
        set(shutdown_timeout_ms, self.shutdown_timeout);
    }
}

impl PostgresArgs {
    fn apply_to(self, config: &mut Config) {
        let PostgresConfig {
            connections_max,
            connect_timeout_ms,
            operation_timeout_ms,
            pooler,
            listen_url,
            password_file,
            migrate,
            // With the limits of the other stores.
            in_doubt_per_scope_max: _,
        } = &mut config.store.postgres;
        set(connections_max, self.postgres_connections_max);
        set(connect_timeout_ms, self.postgres_connect_timeout);
        set(operation_timeout_ms, self.postgres_operation_timeout);
        set(pooler, self.postgres_pooler);
        set_some(listen_url, self.postgres_listen_url);
        set_some(password_file, self.postgres_password_file);
        set(migrate, self.migrate);
    }
}

impl SqsArgs {
    fn apply_to(self, config: &mut Config) {
        let SqsConfig { account, region, purge_interval_ms, recreate_interval_ms } = &mut config.sqs;
        set(account, self.account);
        set(region, self.region);
        set(purge_interval_ms, self.purge_interval);
        set(recreate_interval_ms, self.recreate_interval);
    }
}
