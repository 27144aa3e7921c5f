//! The ledger's functions find rows by an index, whatever the statistics say: a table that was empty when it was analyzed
//! must not be read from end to end once it has grown.

mod common;

use common::{Database, Server};
use sqlx::{Executor as _, PgConnection, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![a_claim_and_its_end_never_scan_a_table])
}

/// Claims keys, reads them and completes them, on one connection, as the store does.
const LIFECYCLE: &str = "
WITH k AS (SELECT decode(md5($1 || '/' || n), 'hex') AS id, n FROM generate_series(1, 20) n ORDER BY 1),
     a AS (SELECT array_agg(id ORDER BY id) AS ids, array_agg('s'::text) AS scopes, array_agg(n::text) AS keys,
                  array_agg('o'::text) AS owners, array_agg(NULL::text) AS none, array_agg(60000::bigint) AS leases,
                  array_agg(false) AS no, array_agg(NULL::bigint) AS nulls FROM k)
SELECT count(*) FROM a, hapax.ledger_claim(ids, scopes, keys, owners, none, leases, no, nulls, 1000)";
const READ: &str = "
SELECT count(*) FROM hapax.ledger_read(
  ARRAY(SELECT decode(md5($1 || '/' || n), 'hex') FROM generate_series(1, 20) n ORDER BY 1), true, true) WHERE stage = 0";
const END: &str = "
WITH e AS (SELECT * FROM hapax.ledger_read(
             ARRAY(SELECT decode(md5($1 || '/' || n), 'hex') FROM generate_series(1, 20) n ORDER BY 1), false, false)),
     a AS (SELECT array_agg(id ORDER BY id) AS ids, array_agg(fence ORDER BY id) AS fences,
                  array_agg(version ORDER BY id) AS versions, array_agg(true) AS yes, array_agg(false) AS no,
                  array_agg(scope) AS scopes, array_agg(key) AS keys, array_agg(owner) AS owners,
                  array_agg(NULL::text) AS none, array_agg(claimed_ms) AS times, array_agg(0) AS zero,
                  array_agg(2::smallint) AS stages, array_agg(NULL::bigint) AS nulls FROM e)
SELECT count(*) FROM a, hapax.ledger_write(ids, fences, versions, yes, scopes, keys, fences, owners, none, times, zero, stages,
  times, times, no, times, none, nulls, '{}')";
/// What the sweep does: it looks for open entries, and for ended ones whose time is over.
const SWEEP: &str = "
WITH d AS (SELECT * FROM hapax.ledger_due_behind(0, 5)),
     a AS (SELECT array_agg(prune_ms) AS times, array_agg(fence) AS fences, array_agg(id) AS ids, count(*) AS n FROM d)
SELECT 15 + n + (SELECT 0 * count(*) FROM hapax.ledger_open_behind(0, 10)) FROM a, hapax.ledger_due_done(times, fences, ids, 60000)
WHERE $1 <> ''";

async fn lifecycle(connection: &mut PgConnection, name: &str) {
    for sql in [LIFECYCLE, READ, END, SWEEP] {
        let row = sqlx::query(sql).bind(name).fetch_one(&mut *connection).await.unwrap();
        assert_eq!(row.get::<i64, _>(0), 20, "{name}: {sql}");
    }
}

/// How often a table of the ledger was read from end to end. `ledger_count` is only ever read as a whole.
async fn scans(connection: &mut PgConnection) -> i64 {
    connection.execute("SELECT pg_stat_force_next_flush()").await.unwrap();
    let sql = "SELECT sum(seq_scan)::bigint FROM pg_stat_user_tables WHERE schemaname = 'hapax'
               AND relname IN ('ledger_entry', 'ledger_open', 'ledger_due')";
    sqlx::query(sql).fetch_one(connection).await.unwrap().get(0)
}

async fn a_claim_and_its_end_never_scan_a_table(server: &'static Server) {
    let database = Database::migrated(server).await;
    let mut connection = database.connect().await;
    let mut many = database.connect().await;
    let analyze = "VACUUM (ANALYZE) hapax.ledger_entry; VACUUM (ANALYZE) hapax.ledger_open; VACUUM (ANALYZE) hapax.ledger_due";
    for (state, analyzed, grow_to) in [
        ("new", false, 0),
        ("empty", true, 0),
        ("grown", false, 100),
        ("small", true, 0),
        ("large", true, 400),
    ] {
        for n in 0..grow_to {
            lifecycle(&mut many, &format!("{state}-many-{n}")).await;
        }
        if analyzed {
            for one in analyze.split("; ") {
                connection.execute(one).await.unwrap();
            }
        }
        let before = scans(&mut connection).await;
        // Beyond five calls a session keeps one plan for all arguments.
        for n in 0..8 {
            lifecycle(&mut connection, &format!("{state}-{n}")).await;
        }
        let after = scans(&mut connection).await;
        assert_eq!(after, before, "{state}: a table was read from end to end");
    }
}
