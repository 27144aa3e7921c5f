//! The reference inbox passes the async inbox suite.

use std::time::Duration;

use hapax_conformance::inbox::{AsyncHarness, InboxHarness};
use hapax_conformance::{MemoryInbox, inbox_suite};

async fn fresh() -> Box<dyn InboxHarness> {
    let inbox = MemoryInbox::new(Duration::from_millis(50));
    let same = inbox.clone();
    Box::new(AsyncHarness {
        inbox,
        open: Box::new(move || same.clone()),
        write: |tx| Box::pin(async { tx.write("effect") }),
        count: |tx| Box::pin(async { tx.effects().len() as u64 }),
    })
}

inbox_suite!(fresh);
