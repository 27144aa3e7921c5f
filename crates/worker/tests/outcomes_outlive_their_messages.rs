//! A ledger in another store that forgets outcomes before the queue forgets its messages: the worker does not start, or warns about
//! redrives.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Rig, dies_after};
use hapax_core::policy::tier::Finding;
use hapax_core::{QueueConfig, Tier};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{BuildError, Cx, Worker};

const HOUR_MS: u64 = 3_600_000;

/// The codes of refusals and of warnings when outcomes are kept for this time.
async fn found(rig: &Rig, ledger: &Arc<Embedded>, ttl_ms: u64) -> (Vec<String>, Vec<String>) {
    let about_ttl = |findings: &[Finding]| {
        let codes = findings.iter().map(|finding| finding.code.to_string());
        codes.filter(|code| code.starts_with("ledger-ttl")).collect::<Vec<_>>()
    };
    let handler = async |_: u32, _: Cx| Ok::<_, std::io::Error>(());
    let built = Worker::over(rig.store.clone(), rig.queue.clone())
        .ledger(ledger.clone())
        .outcome_ttl(Duration::from_millis(ttl_ms))
        .handler(handler)
        .build()
        .await;
    match built {
        Ok(worker) => (Vec::new(), about_ttl(worker.warnings())),
        Err(BuildError::Tier(refusals)) => (about_ttl(&refusals), Vec::new()),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn an_outcome_is_kept_as_long_as_its_message_may_return() {
    let kept_ms = 10 * HOUR_MS;
    for config in [QueueConfig::sqs(), QueueConfig::fifo()] {
        let config = QueueConfig { tier: Tier::EffectivelyOnce, retention_ms: kept_ms, ..config };
        let (fifo, sqs_kept_ms) = (config.is_fifo(), QueueConfig::sqs().retention_ms);
        let rig = Rig::new(dies_after(3, config)).await;
        let folder = tempfile::tempdir().unwrap();
        let ledger = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
        let (too_short, below_redrive) =
            ("ledger-ttl-too-short".to_owned(), "ledger-ttl-below-redrive".to_owned());
        let (refused, _) = found(&rig, &ledger, kept_ms - 1).await;
        assert_eq!(refused, [too_short], "fifo {fifo}");
        assert_eq!(found(&rig, &ledger, kept_ms).await, (vec![], vec![below_redrive.clone()]), "fifo {fifo}");
        // A dead letter of a standard queue has the age of its message; after a redrive it may wait as long again.
        let horizon_ms = sqs_kept_ms + kept_ms + if fifo { kept_ms } else { 0 };
        assert_eq!(found(&rig, &ledger, horizon_ms - 1).await, (vec![], vec![below_redrive]), "fifo {fifo}");
        assert_eq!(found(&rig, &ledger, horizon_ms).await, (vec![], vec![]), "fifo {fifo}");
    }
}
