//! The transactional workload: the bank is a table in the database of the inbox. On a store in PostgreSQL that is the store's
//! own database, so that the ack is in the transaction, too; else it is a file of SQLite.

mod postgres;
mod sqlite;

use hapax::WorkerBuilder;

use super::Workplace;
use crate::history::Act;
use crate::roles::Site;
use crate::workload::Workload;

/// Creates the bank.
pub async fn create(site: &Site) -> anyhow::Result<()> {
    match &site.database {
        Some(url) => postgres::create(url, &site.run).await,
        None => sqlite::open(&site.bank).map(drop),
    }
}

/// A worker that writes a transfer in the transaction of its inbox.
pub async fn worker(place: &Workplace, workload: Workload, site: &Site) -> anyhow::Result<WorkerBuilder> {
    match &site.database {
        Some(url) => postgres::worker(url, workload, &site.run).await,
        None => sqlite::worker(place, workload, &site.bank),
    }
}

/// What the bank's table says, as calls that moved money.
pub async fn read(site: &Site) -> anyhow::Result<Vec<Act>> {
    match &site.database {
        Some(url) => postgres::read(url, &site.run).await,
        None => sqlite::read(&site.bank),
    }
}

/// Deletes the bank.
pub async fn drop_bank(site: &Site) -> anyhow::Result<()> {
    match &site.database {
        Some(url) => postgres::drop_bank(url, &site.run).await,
        // The file goes with the run's folder.
        None => Ok(()),
    }
}
