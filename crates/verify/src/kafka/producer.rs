//! The producer of the intents. It is no target of faults: what it writes is the input, and no promise is made for it. Records
//! whose outcome is unknown are not written again, and their accounts are given up, so that the input has each intent at most
//! once and in order.

use std::sync::Arc;
use std::time::Duration;

use hapax_kafka::producer::NewRecord;
use hapax_kafka::publisher::Publisher;

use super::site::{KafkaSite, PARTITIONS};
use crate::history::{Act, Answer};
use crate::recorder::{Payment, Reporter};
use crate::roles;
use crate::workload::Workload;

/// Pause between two records of an account.
const PACE: Duration = Duration::from_millis(40);
/// The same for a control.
const CONTROL_PACE: Duration = Duration::from_millis(80);
/// Records of the workload that may wait before its producer does.
const BACKLOG_MAX: u64 = 400;

/// Writes records until its process is killed.
pub async fn run(site: &KafkaSite) -> anyhow::Result<()> {
    let reporter = Arc::new(Reporter::new(site.recorder, "producer"));
    let mut tasks = tokio::task::JoinSet::new();
    for workload in site.workloads()? {
        tasks.spawn(write(site.clone(), reporter.clone(), workload));
    }
    roles::ready();
    // A task ends only with an error.
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

async fn write(site: KafkaSite, reporter: Arc<Reporter>, workload: Workload) -> anyhow::Result<()> {
    let (input, accounts) = (site.input(&workload), workload.accounts());
    let pace = if workload.is_control() { CONTROL_PACE } else { PACE };
    let mut publisher = roles::repeat(|| Publisher::idempotent(site.direct())).await?;
    let (mut generation, mut number) = (0, 0);
    loop {
        let payments: Vec<Payment> = (0..accounts)
            .map(|account| Payment::new(&format!("account{account}x{generation}"), number))
            .collect();
        let intent = |payment: &Payment| {
            let Payment { id, account, number } = payment.clone();
            Act::Intent { id, account, number }
        };
        reporter.report(workload.name, payments.iter().map(intent).collect()).await?;
        let mut records = Vec::new();
        for (place, payment) in (0..).zip(&payments) {
            let record = NewRecord::new(&input, payment.account.clone(), serde_json::to_vec(payment)?);
            records.push(NewRecord { partition: Some(place % PARTITIONS), ..record });
        }
        let answer = if publisher.publish(records).await.is_ok() { Answer::Ok } else { Answer::Unknown };
        let sent = |payment: &Payment| Act::Send { id: payment.id.clone(), answer };
        let recorded = reporter.report(workload.name, payments.iter().map(sent).collect()).await?;
        (generation, number) =
            if answer == Answer::Ok { (generation, number + 1) } else { (generation + 1, 0) };
        tokio::time::sleep(pace).await;
        wait_for_processors(&reporter, &workload, recorded.backlog).await?;
    }
}

/// Lets processors catch up, however slow the machine is.
async fn wait_for_processors(
    reporter: &Reporter,
    workload: &Workload,
    mut backlog: u64,
) -> anyhow::Result<()> {
    // A control loses some for good.
    while backlog > BACKLOG_MAX && !workload.is_control() {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let counts = reporter.counts().await?;
        backlog = counts.per_workload.get(workload.name).map_or(0, crate::recorder::Progress::backlog);
    }
    Ok(())
}
