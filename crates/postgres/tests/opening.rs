//! A store that cannot be opened says what is wrong and what to do about it.

mod common;

use std::process::ExitCode;

use common::{Database, Server};
use hapax_core::{AsyncInbox as _, Ledger as _, QueueStore as _};
use hapax_faults::ROLE_WITH_PASSWORD;
use hapax_postgres::{Options, PostgresInbox, PostgresStore};
use sqlx::Executor as _;

fn main() -> ExitCode {
    common::main(tests![
        a_refusal_says_what_to_do,
        a_url_without_a_database_is_refused,
        a_server_that_does_not_sync_is_not_durable,
    ])
}

/// The messages of opening a store and of migrating it.
async fn refusals(url: &str) -> [String; 2] {
    let options = Options::default();
    let opened = PostgresStore::open(url, options.clone()).await;
    let opened = opened.err().unwrap_or_else(|| panic!("{url} was opened")).to_string();
    let migrated = hapax_postgres::migrate(url, &options, false).await;
    [opened, migrated.err().unwrap_or_else(|| panic!("{url} was migrated")).to_string()]
}

async fn a_refusal_says_what_to_do(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (url, name) = (database.direct_url(), &database.name);
    let mut admin = database.connect().await;
    let few = format!("few_{name}");
    let shut_out = format!("out_{name}");
    for sql in [
        format!("CREATE ROLE {few} LOGIN"),
        format!("CREATE ROLE {shut_out} LOGIN"),
        format!("REVOKE CONNECT ON DATABASE {name} FROM PUBLIC"),
        format!("GRANT CONNECT ON DATABASE {name} TO {few}"),
        format!(
            "DO $$ BEGIN CREATE ROLE {ROLE_WITH_PASSWORD} LOGIN PASSWORD 'secret'; \
             EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        ),
    ] {
        admin.execute(sql.as_str()).await.unwrap();
    }
    let role = |role: &str| url.replace("postgres@", &format!("{role}@"));
    let cases = [
        (url.replace(name.as_str(), "not_there"), "CREATE DATABASE"),
        (role("no_such_role"), "CREATE ROLE"),
        (role(&shut_out), "GRANT CONNECT"),
        (role(&few), "docs/postgres.md"),
        (role(ROLE_WITH_PASSWORD), "PGPASSWORD"),
        (role(&format!("{ROLE_WITH_PASSWORD}:wrong")), "PGPASSWORD"),
        ("postgres://postgres@127.0.0.1:1/shop".to_owned(), "host and port"),
        ("postgres://postgres@no-such-host.invalid/shop".to_owned(), "host and port"),
    ];
    for (url, remedy) in cases {
        for said in refusals(&url).await {
            assert!(said.contains(remedy), "{url}: {said}");
            assert!(!said.contains("wrong"), "{url} shows the password: {said}");
        }
    }
    let empty = Database::empty(server).await;
    let said = PostgresStore::open(&empty.direct_url(), Options::default()).await.err().unwrap().to_string();
    assert!(said.contains("hapax migrate"), "{said}");
}

/// The server's default would be a database with the name of the user, which is hardly what is meant.
async fn a_url_without_a_database_is_refused(server: &'static Server) {
    let url = server.url("");
    for url in [url.trim_end_matches('/'), &url] {
        for said in refusals(url).await {
            assert!(said.contains("names no database"), "{url}: {said}");
        }
    }
}

/// A crash of the machine loses what such a server has accepted. What the store declares decides about tiers.
async fn a_server_that_does_not_sync_is_not_durable(server: &'static Server) {
    let unsynced = Server::start(&["fsync=off"]).unwrap();
    let sync = Options { sync_receives: true, migrate: true, ..Options::default() };
    let synced = Database::empty(server).await;
    for (url, durable) in [(synced.url(), true), (unsynced.url("postgres"), false)] {
        let store = PostgresStore::open(&url, sync.clone()).await.unwrap();
        assert_eq!(store.ledger_capabilities().durable, durable, "{url}");
        assert_eq!(store.capabilities().durable_lease, durable, "{url}");
        assert_eq!(PostgresInbox::new(&store).inbox_capabilities().durable, durable, "{url}");
    }
}
