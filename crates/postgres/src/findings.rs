//! What `hapax doctor` says about the database: its settings, its sessions, its tables, and what this role may do.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use hapax_core::outbox::RouteStatus;
use hapax_core::policy::tier::{Finding, Severity};
use hapax_core::{Examination, StoreError};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::Base;
use crate::error::{Access, Failure};

const fn refusal(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Refusal)
}

const fn warning(code: &'static str) -> (&'static str, Severity) {
    (code, Severity::Warning)
}

/// Every code that an examination of the database can find, with how grave it is.
pub const FINDING_CODES: &[(&str, Severity)] = &[
    refusal("database-too-old"),
    refusal("fsync-off"),
    refusal("commit-not-synchronous"),
    refusal("table-unlogged"),
    refusal("privilege-missing"),
    warning("replication-asynchronous"),
    warning("xmin-held"),
    warning("dead-rows"),
    warning("database-clock-differs"),
    warning("pooler-without-listen"),
    warning("relay-lags"),
];

/// The oldest version that the suites run on.
const VERSION_MIN: i32 = 150_000;

/// A snapshot that is held for longer than this, or while more transactions than this were begun, is reported.
const HELD_MS_MAX: i64 = 60_000;
const HELD_TRANSACTIONS_MAX: i32 = 10_000;

/// Dead rows of a table are reported past this count, if they are also most of the table.
const DEAD_ROWS_MAX: i64 = 100_000;

/// Clocks that NTP keeps together differ by less.
const CLOCK_MS_MAX: i64 = 5_000;

/// Something that keeps the database from removing dead rows.
#[derive(Debug, Clone)]
struct Holder {
    /// What it is, for people.
    what: String,
    /// How it is ended.
    remedy: String,
    /// `None`: not known.
    held_ms: Option<i64>,
    since: Option<String>,
    /// Transactions that were begun since.
    transactions: i32,
}

/// What was measured. Values of a part that could not be examined are left out.
#[derive(Debug, Clone, Default)]
struct Measured {
    version_number: i32,
    settings: BTreeMap<String, String>,
    standbys: i64,
    unlogged: Vec<String>,
    /// Tables and sequences with the privilege that this role lacks.
    missing: Vec<String>,
    holders: Vec<Holder>,
    /// Tables with their live and dead rows.
    rows: Vec<(String, i64, i64)>,
    /// Routes of the outbox, with how long the oldest message of each waits.
    routes: Vec<(RouteStatus, u64)>,
    /// The database's clock minus ours.
    clock_ahead_ms: i64,
    pooler: bool,
    listens: bool,
}

/// Examines the database, now.
pub(crate) async fn examine(base: &Base) -> Result<Examination, StoreError> {
    let pooler = base.options.pooler;
    let listens = !pooler || base.options.listen_url.is_some();
    base.pool
        .run("examine", Access::Read, move |connection| Box::pin(measure(connection, pooler, listens)))
        .await
}

/// The routes of the outbox: each with its sink, and with what a crash of a relay can repeat there.
async fn relays(connection: &mut PgConnection) -> Result<Vec<(String, String)>, Failure> {
    let exists = "SELECT to_regclass('hapax.outbox_route') IS NOT NULL";
    if !sqlx::query(exists).fetch_one(&mut *connection).await?.try_get::<bool, _>(0)? {
        return Ok(Vec::new());
    }
    let sql = "SELECT route, target || '; ' || after_a_crash FROM hapax.outbox_route ORDER BY route";
    Ok(sqlx::query_as(sql).fetch_all(connection).await?)
}

async fn measure(connection: &mut PgConnection, pooler: bool, listens: bool) -> Result<Examination, Failure> {
    let mut measured = Measured { pooler, listens, ..Measured::default() };
    let mut facts = BTreeMap::new();
    let mut not_examined = Vec::new();
    let before_ms = now_ms();
    let row = sqlx::query(BASE).fetch_one(&mut *connection).await?;
    let (database_ms, after_ms) = (row.try_get::<i64, _>("now_ms")?, now_ms());
    // The answer was made between the two times.
    measured.clock_ahead_ms = (database_ms - after_ms).max(0) - (before_ms - database_ms).max(0);
    measured.version_number = row.try_get("version_number")?;
    facts.insert("clock_ms".to_owned(), database_ms.into());
    facts.insert("database_version".to_owned(), row.try_get::<String, _>("version")?.into());
    facts.insert("database_bytes".to_owned(), row.try_get::<i64, _>("bytes")?.into());
    facts.insert("database_role".to_owned(), row.try_get::<String, _>("role")?.into());
    facts.insert("pooler".to_owned(), pooler.into());
    facts.insert("listens".to_owned(), listens.into());
    for (route, sink) in relays(connection).await? {
        facts.insert(format!("relay {route}"), sink.into());
    }

    let mut rows = Vec::new();
    for &(part, sql) in PARTS {
        match sqlx::query(sql).fetch_all(&mut *connection).await {
            Ok(found) => rows.push((part, found)),
            // The server answered: this role, or this kind of database, does not have it.
            Err(error @ sqlx::Error::Database(_)) => not_examined.push(format!("{part:?} ({error})")),
            Err(error) => return Err(error.into()),
        }
    }
    for (part, found) in rows {
        measured.add(part, &found)?;
    }
    for (name, value) in &measured.settings {
        facts.insert(name.clone(), value.clone().into());
    }
    facts.insert("standbys".to_owned(), measured.standbys.into());
    if !not_examined.is_empty() {
        facts.insert("not_examined".to_owned(), not_examined.join(", ").into());
    }
    Ok(Examination { facts, findings: measured.findings() })
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

const BASE: &str = "
SELECT hapax.now_ms() AS now_ms, current_setting('server_version') AS version,
  current_setting('server_version_num')::int AS version_number, pg_database_size(current_database()) AS bytes,
  current_user::text AS role";

/// The parts of an examination that a role or a kind of database may not have.
#[derive(Debug, Clone, Copy)]
enum Part {
    Settings,
    Tables,
    Privileges,
    Replication,
    Sessions,
    PreparedTransactions,
    ReplicationSlots,
    Outbox,
}

const PARTS: &[(Part, &str)] = &[
    (
        Part::Settings,
        "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes',
           'autovacuum', 'synchronous_standby_names', 'max_connections')",
    ),
    (
        Part::Tables,
        "SELECT c.relname::text AS name, c.relpersistence = 'u' AS unlogged,
           coalesce(s.n_live_tup, 0) AS live, coalesce(s.n_dead_tup, 0) AS dead
         FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
         WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind IN ('r', 'p') ORDER BY 1",
    ),
    (
        // Who may only read a table that the store only reads lacks nothing.
        Part::Privileges,
        "SELECT p.name || ' on ' || c.relname AS missing
         FROM pg_class c, unnest(CASE
           WHEN c.relkind = 'S' THEN ARRAY['USAGE', 'SELECT', 'UPDATE']
           WHEN c.relname IN ('migration', 'store') THEN ARRAY['SELECT']
           ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) AS p(name)
         WHERE c.relnamespace = 'hapax'::regnamespace AND c.relkind IN ('r', 'p', 'S') AND NOT CASE
           WHEN c.relkind = 'S' THEN has_sequence_privilege(c.oid, p.name) ELSE has_table_privilege(c.oid, p.name) END
         UNION ALL
         SELECT 'EXECUTE on ' || f.proname FROM pg_proc f
         WHERE f.pronamespace = 'hapax'::regnamespace AND NOT has_function_privilege(f.oid, 'EXECUTE')
         ORDER BY 1",
    ),
    (Part::Replication, "SELECT count(*) AS standbys FROM pg_stat_replication"),
    (
        // Sessions of other roles are visible to members of pg_read_all_stats.
        Part::Sessions,
        "SELECT 'session ' || pid || ' of ' || coalesce(usename, '?') || ' (' || coalesce(nullif(application_name, ''),
             'no application name') || ', ' || coalesce(host(client_addr), 'local') || ', ' || coalesce(state, '?') || ')' AS what,
           'SELECT pg_terminate_backend(' || pid || ')' AS remedy,
           (extract(epoch FROM clock_timestamp() - xact_start) * 1000)::bigint AS held_ms,
           to_char(xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') AS since,
           greatest(age(backend_xmin), age(backend_xid)) AS transactions
         FROM pg_stat_activity
         WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
           AND backend_type <> 'autovacuum worker'
         ORDER BY 5 DESC LIMIT 5",
    ),
    (
        Part::PreparedTransactions,
        "SELECT 'the prepared transaction ' || gid || ' of ' || owner AS what,
           'COMMIT PREPARED or ROLLBACK PREPARED ' || quote_literal(gid) AS remedy,
           (extract(epoch FROM clock_timestamp() - prepared) * 1000)::bigint AS held_ms,
           to_char(prepared AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') AS since, age(transaction) AS transactions
         FROM pg_prepared_xacts WHERE database = current_database() ORDER BY 5 DESC LIMIT 5",
    ),
    (
        Part::ReplicationSlots,
        "SELECT 'the replication slot ' || slot_name || CASE WHEN active THEN '' ELSE ' (not in use)' END AS what,
           'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ')' AS remedy,
           NULL::bigint AS held_ms, NULL::text AS since, age(xmin) AS transactions
         FROM pg_replication_slots WHERE xmin IS NOT NULL ORDER BY 5 DESC LIMIT 5",
    ),
    (
        Part::Outbox,
        "SELECT route, relays, lag, held, parked_keys, (hapax.now_us() - oldest_us) / 1000 AS waited_ms
         FROM hapax.outbox_status() WHERE oldest_us IS NOT NULL",
    ),
];

impl Measured {
    fn add(&mut self, part: Part, rows: &[PgRow]) -> Result<(), Failure> {
        for row in rows {
            match part {
                Part::Settings => {
                    self.settings.insert(row.try_get("name")?, row.try_get("setting")?);
                }
                Part::Tables => {
                    let name: String = row.try_get("name")?;
                    if row.try_get("unlogged")? {
                        self.unlogged.push(name.clone());
                    }
                    self.rows.push((name, row.try_get("live")?, row.try_get("dead")?));
                }
                Part::Privileges => self.missing.push(row.try_get("missing")?),
                Part::Replication => self.standbys = row.try_get("standbys")?,
                Part::Sessions | Part::PreparedTransactions | Part::ReplicationSlots => {
                    self.holders.push(Holder {
                        what: row.try_get("what")?,
                        remedy: row.try_get("remedy")?,
                        held_ms: row.try_get("held_ms")?,
                        since: row.try_get("since")?,
                        transactions: row.try_get("transactions")?,
                    });
                }
                Part::Outbox => {
                    let number = |name: &str| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
                    let status = RouteStatus {
                        route: row.try_get("route")?,
                        relays: number("relays")?,
                        lag: number("lag")?,
                        oldest_ms: Some(0),
                        held: number("held")?,
                        parked: number("parked_keys")?,
                        ..RouteStatus::default()
                    };
                    self.routes.push((status, row.try_get::<i64, _>("waited_ms")?.max(0).unsigned_abs()));
                }
            }
        }
        Ok(())
    }

    fn is(&self, setting: &str, value: &str) -> bool {
        self.settings.get(setting).is_some_and(|set| set == value)
    }

    fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if self.version_number < VERSION_MIN {
            let message = format!("the database has version number {}", self.version_number);
            found.push(finding("database-too-old", message, "use PostgreSQL 15 or later"));
        }
        if self.is("fsync", "off") {
            let message = "fsync is off: a crash of the machine loses or damages what was accepted";
            found.push(finding(
                "fsync-off",
                message.to_owned(),
                "set fsync = on in the server's configuration",
            ));
        }
        if self.is("synchronous_commit", "off") {
            let message =
                "synchronous_commit is off: a crash of the database loses what was accepted just before";
            let remedy = "set it to on for this role: ALTER ROLE … SET synchronous_commit = on";
            found.push(finding("commit-not-synchronous", message.to_owned(), remedy));
        }
        if !self.unlogged.is_empty() {
            let message = format!("tables are UNLOGGED, a crash empties them: {}", self.unlogged.join(", "));
            found.push(finding("table-unlogged", message, "ALTER TABLE hapax.… SET LOGGED"));
        }
        if !self.missing.is_empty() {
            let message =
                format!("this role lacks privileges in the schema hapax: {}", self.missing.join(", "));
            let remedy = "grant them; docs/postgres.md has the statements";
            found.push(finding("privilege-missing", message, remedy));
        }
        found.extend(self.warnings());
        found
    }

    fn warnings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        if self.standbys > 0 && self.is("synchronous_standby_names", "") {
            let message = format!(
                "{} standbys replicate asynchronously: a failover to one of them loses what it has not received",
                self.standbys
            );
            let remedy = "set synchronous_standby_names, or accept the loss at a failover";
            found.push(finding("replication-asynchronous", message, remedy));
        }
        found.extend(self.holders.iter().filter_map(Holder::finding));
        let bloated = self.rows.iter().filter(|(_, live, dead)| *dead > DEAD_ROWS_MAX && dead > live);
        let bloated: Vec<String> =
            bloated.map(|(table, live, dead)| format!("{table} ({dead} dead, {live} live)")).collect();
        if !bloated.is_empty() {
            let message = format!("dead rows are not removed in time: {}", bloated.join(", "));
            let remedy =
                "end what holds xmin, see that autovacuum is on and not too slow, then VACUUM these tables";
            found.push(finding("dead-rows", message, remedy));
        }
        if self.clock_ahead_ms.abs() > CLOCK_MS_MAX {
            let (ms, word) =
                (self.clock_ahead_ms.abs(), if self.clock_ahead_ms > 0 { "ahead of" } else { "behind" });
            let message = format!("the database's clock is {ms} ms {word} the clock of this process");
            let remedy = "run an NTP client on both machines; times of messages are the database's";
            found.push(finding("database-clock-differs", message, remedy));
        }
        if self.pooler && !self.listens {
            let message = "behind the pooler, messages that other processes send are found by polling";
            let remedy = "set listen_url to a URL that does not lead through the pooler";
            found.push(finding("pooler-without-listen", message.to_owned(), remedy));
        }
        found.extend(self.routes.iter().filter_map(|(route, waited_ms)| route.lag_finding(*waited_ms)));
        found
    }
}

impl Holder {
    fn finding(&self) -> Option<Finding> {
        let Self { what, remedy, held_ms, since, transactions } = self;
        if held_ms.is_none_or(|held| held <= HELD_MS_MAX) && *transactions <= HELD_TRANSACTIONS_MAX {
            return None;
        }
        let since = since.as_ref().map(|since| format!(" since {since} UTC")).unwrap_or_default();
        let message = format!(
            "{what} holds xmin{since}, {transactions} transactions back: dead rows are not removed while it does"
        );
        let remedy = format!("end it, for example with: {remedy}");
        Some(finding("xmin-held", message, &remedy))
    }
}

fn finding(code: &'static str, message: String, remedy: &str) -> Finding {
    let (_, severity) = FINDING_CODES.iter().find(|(known, _)| *known == code).expect("a known code");
    Finding { code: code.into(), severity: *severity, message, remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound() -> Measured {
        let settings = [("fsync", "on"), ("synchronous_commit", "on"), ("synchronous_standby_names", "")];
        let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        Measured { version_number: 150_010, settings, listens: true, ..Measured::default() }
    }

    fn holder(held_ms: Option<i64>, transactions: i32) -> Holder {
        Holder { what: "session 7".into(), remedy: "end 7".into(), held_ms, since: None, transactions }
    }

    /// A route whose oldest message was enqueued at the time 0.
    fn route() -> RouteStatus {
        RouteStatus {
            route: "orders".into(),
            relays: 1,
            lag: 3,
            oldest_ms: Some(0),
            ..RouteStatus::default()
        }
    }

    #[test]
    fn a_route_lags_by_time_and_is_told_what_to_do() {
        assert!(route().lag_finding(60_000).is_none());
        let remedy = |route: RouteStatus| route.lag_finding(60_001).unwrap().remedy;
        assert!(remedy(route()).contains("/readyz"));
        assert!(remedy(RouteStatus { relays: 0, ..route() }).starts_with("start a relay"));
        let parked = RouteStatus { lag: 0, held: 2, parked: 1, ..route() };
        assert!(remedy(parked).contains("hapax outbox parked"));
        assert!(RouteStatus { oldest_ms: None, ..route() }.lag_finding(u64::MAX).is_none(), "nothing waits");
    }

    /// One thing that is not right.
    type Change = fn(&mut Measured);

    /// A code, its cause, and what is said about it.
    #[rustfmt::skip]
    const CAUSES: [(&str, Change, &str, &str); 11] = [
        (
            "database-too-old", |m| m.version_number = 149_999,
            "the database has version number 149999", "use PostgreSQL 15 or later",
        ),
        (
            "fsync-off", |m| drop(m.settings.insert("fsync".into(), "off".into())),
            "fsync is off: a crash of the machine loses or damages what was accepted",
            "set fsync = on in the server's configuration",
        ),
        (
            "commit-not-synchronous", |m| drop(m.settings.insert("synchronous_commit".into(), "off".into())),
            "synchronous_commit is off: a crash of the database loses what was accepted just before",
            "set it to on for this role: ALTER ROLE … SET synchronous_commit = on",
        ),
        (
            "table-unlogged", |m| m.unlogged.extend(["q_ready".into(), "q_due".into()]),
            "tables are UNLOGGED, a crash empties them: q_ready, q_due", "ALTER TABLE hapax.… SET LOGGED",
        ),
        (
            "privilege-missing", |m| m.missing.push("DELETE on q_ready".into()),
            "this role lacks privileges in the schema hapax: DELETE on q_ready",
            "grant them; docs/postgres.md has the statements",
        ),
        (
            "replication-asynchronous", |m| m.standbys = 2,
            "2 standbys replicate asynchronously: a failover to one of them loses what it has not received",
            "set synchronous_standby_names, or accept the loss at a failover",
        ),
        (
            "xmin-held",
            |m| m.holders.push(Holder { since: Some("2026-01-02 03:04:05".into()), ..holder(Some(60_001), 7) }),
            "session 7 holds xmin since 2026-01-02 03:04:05 UTC, 7 transactions back: dead rows are not removed while it does",
            "end it, for example with: end 7",
        ),
        (
            "dead-rows", |m| m.rows.push(("q_ready".into(), 10, 100_001)),
            "dead rows are not removed in time: q_ready (100001 dead, 10 live)",
            "end what holds xmin, see that autovacuum is on and not too slow, then VACUUM these tables",
        ),
        (
            "database-clock-differs", |m| m.clock_ahead_ms = -5_001,
            "the database's clock is 5001 ms behind the clock of this process",
            "run an NTP client on both machines; times of messages are the database's",
        ),
        (
            "pooler-without-listen", |m| (m.pooler, m.listens) = (true, false),
            "behind the pooler, messages that other processes send are found by polling",
            "set listen_url to a URL that does not lead through the pooler",
        ),
        (
            "relay-lags", |m| m.routes.push((route(), 61_000)),
            "the oldest message of the outbox waits for 61 s to be published by route orders: up to 3 are not published, 0 are set aside after failures, 0 keys are parked, 1 relays run",
            "`/readyz` of the relay says what the sink or the database answers; else look for a transaction that has enqueued and stays open (in PostgreSQL: pg_stat_activity)",
        ),
    ];

    #[test]
    fn each_code_has_its_cause_its_evidence_and_a_change() {
        assert!(sound().findings().is_empty(), "{:?}", sound().findings());
        assert!(CAUSES.iter().map(|cause| cause.0).eq(FINDING_CODES.iter().map(|(code, _)| *code)));
        for ((code, change, message, remedy), (_, severity)) in CAUSES.iter().zip(FINDING_CODES) {
            let mut measured = sound();
            change(&mut measured);
            let found = measured.findings();
            assert!(matches!(found.as_slice(), [only] if only.code == *code), "{code}: {found:?}");
            assert_eq!((found[0].message.as_str(), found[0].remedy.as_str()), (*message, *remedy));
            assert_eq!(found[0].severity, *severity, "{code}");
        }
    }

    #[test]
    fn what_is_just_not_too_much_is_not_reported() {
        let calm: [Change; 8] = [
            |m| m.version_number = 150_000,
            |m| drop(m.settings.insert("synchronous_commit".into(), "local".into())),
            |m| drop((m.standbys = 1, m.settings.insert("synchronous_standby_names".into(), "one".into()))),
            |m| m.rows.push(("q_ready".into(), 0, 100_000)),
            |m| m.rows.push(("q_ready".into(), 200_000, 200_000)),
            |m| m.clock_ahead_ms = 5_000,
            |m| m.clock_ahead_ms = -5_000,
            |m| m.pooler = true,
        ];
        for (at, change) in calm.iter().enumerate() {
            let mut measured = sound();
            change(&mut measured);
            assert!(measured.findings().is_empty(), "{at}: {:?}", measured.findings());
        }
        let mut ahead = sound();
        ahead.clock_ahead_ms = 5_001;
        assert!(ahead.findings()[0].message.contains("5001 ms ahead of"), "{:?}", ahead.findings());
    }

    #[test]
    fn refusals_come_first() {
        assert!(FINDING_CODES.iter().map(|(_, severity)| *severity).is_sorted());
    }

    #[test]
    fn a_snapshot_is_old_by_time_or_by_transactions() {
        let is_found = |held_ms, transactions| holder(held_ms, transactions).finding().is_some();
        assert!(!is_found(Some(60_000), 10_000) && !is_found(None, 10_000));
        assert!(is_found(Some(60_001), 0) && is_found(None, 10_001) && is_found(Some(0), 10_001));
    }
}
