//! A worker process: the workers of Hapax under test, and the controls beside them.

mod claims;
mod controls;
mod deliveries;
pub mod transfers;

use std::sync::Arc;
use std::time::Duration;

use hapax::worker::SettledDelivery;
use hapax::{Cx, HandlerOutcome, Hapax, Ledger, OnDoubt, Queue, Settlement, WorkerBuilder};
use tokio::sync::mpsc;

use crate::handler::{Effects, Handler};
use crate::history::{Act, Answer, Effect};
use crate::recorder::{Pay, Payment, Reporter};
use crate::roles::{self, Site};
use crate::workload::{HANDLER, Shape, Workload};

/// Handlers of one workload that run at the same time in one process.
const CONCURRENCY: usize = 3;

/// Runs the user's handler until its process is killed.
pub async fn run_handler(site: &Site, handler: Arc<impl Handler>) -> anyhow::Result<()> {
    let (place, effects) = (Workplace::new(site).await?, Effects::new(site));
    let workload = Workload::named(HANDLER).expect("it is listed");
    let run = move |payment: Payment, cx: Cx| {
        let (handler, effects) = (handler.clone(), effects.clone());
        async move { handler.handle(payment, cx, effects).await }
    };
    roles::ready();
    let build = || place.with_ledger(place.queue(workload).worker(run.clone()).on_doubt(OnDoubt::Retry));
    place.work(workload, || async { Ok(build()) }).await
}

/// What the tasks of a worker process share.
pub struct Workplace {
    hapax: Hapax,
    /// The ledger, if it is in another store.
    ledger: Option<Arc<dyn Ledger>>,
    reporter: Arc<Reporter>,
    run: String,
    lease: Duration,
}

/// Works until its process is killed.
pub async fn run(site: &Site, workloads: &[Workload]) -> anyhow::Result<()> {
    let place = Arc::new(Workplace::new(site).await?);
    let mut tasks = tokio::task::JoinSet::new();
    for workload in workloads.iter().copied() {
        let (place, site) = (place.clone(), site.clone());
        match workload.shape {
            Shape::Worker(on_doubt) => {
                tasks.spawn(async move {
                    place.work(workload, || async { Ok(place.payer(workload, on_doubt)) }).await
                });
            }
            Shape::Outbox => {
                tasks.spawn(async move {
                    place.work(workload, || async { Ok(place.payer(workload, OnDoubt::Retry)) }).await
                });
            }
            // They run in processes of their own.
            Shape::PublishMark
            | Shape::Proxy(_)
            | Shape::Own
            | Shape::Processor
            | Shape::ProduceCommit
            | Shape::CommitProduce
            | Shape::Librdkafka => {}
            Shape::Transactional => {
                tasks.spawn(async move {
                    place.work(workload, || transfers::worker(&place, workload, &site)).await
                });
            }
            Shape::Claims => {
                for number in 0..CONCURRENCY {
                    tasks.spawn(claims::claim(place.clone(), number));
                }
            }
            Shape::Receiver => {
                for _ in 0..CONCURRENCY {
                    tasks.spawn(deliveries::consume(place.clone(), workload));
                }
            }
            Shape::AckBefore | Shape::AckAfter | Shape::LookUp => {
                for _ in 0..CONCURRENCY {
                    tasks.spawn(controls::consume(place.clone(), workload));
                }
            }
        }
    }
    roles::ready();
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

impl Workplace {
    async fn new(site: &Site) -> anyhow::Result<Self> {
        let hapax = roles::connect(site).await?;
        let ledger = match &site.ledger {
            Some(url) => Some(roles::repeat(|| Hapax::open(url)).await?.ledger()),
            None => None,
        };
        let reporter = Arc::new(Reporter::new(site.recorder, "worker"));
        Ok(Self { hapax, ledger, reporter, run: site.run.clone(), lease: site.lease() })
    }

    fn queue(&self, workload: Workload) -> Queue<Payment> {
        self.hapax.queue(workload.queue(&self.run).as_str()).expect("a valid name")
    }

    /// The ledger that the workers use.
    fn ledger(&self) -> Arc<dyn Ledger> {
        self.ledger.clone().unwrap_or_else(|| self.hapax.ledger())
    }

    /// A worker whose handler calls the bank.
    fn payer(&self, workload: Workload, on_doubt: OnDoubt) -> WorkerBuilder {
        let reporter = self.reporter.clone();
        let builder = self
            .queue(workload)
            .worker(move |payment: Payment, cx: Cx| pay(reporter.clone(), workload.name, payment, cx))
            .on_doubt(on_doubt);
        self.with_ledger(builder)
    }

    /// Lets a worker use the ledger of another store, if there is one.
    fn with_ledger(&self, builder: WorkerBuilder) -> WorkerBuilder {
        match &self.ledger {
            Some(ledger) => builder.ledger(ledger.clone()),
            None => builder,
        }
    }

    /// Runs a worker, and reports how its deliveries end. To build one reads the queue, and the server may be down.
    async fn work<F: Future<Output = anyhow::Result<WorkerBuilder>>>(
        &self,
        workload: Workload,
        builder: impl Fn() -> F,
    ) -> anyhow::Result<()> {
        let (tell, told) = mpsc::unbounded_channel();
        tokio::spawn(report_settles(self.reporter.clone(), workload.name, told));
        let build = || async {
            let tell = tell.clone();
            let builder = builder().await?.concurrency(CONCURRENCY).lease(self.lease);
            let builder = builder.on_settled(move |settled| drop(tell.send(act_of(settled))));
            anyhow::Ok(builder.build().await?)
        };
        roles::repeat(build).await?.run(std::future::pending()).await?;
        Ok(())
    }
}

/// The handler: one call to the bank, with all that a bank could check.
async fn pay(
    reporter: Arc<Reporter>,
    workload: &'static str,
    payment: Payment,
    cx: Cx,
) -> HandlerOutcome<u64> {
    let pay = Pay {
        who: reporter.who().to_owned(),
        workload: workload.to_owned(),
        payment,
        key: cx.derived_key("pay").to_string(),
        fence: cx.fence().0,
        deliveries: cx.delivery().deliveries,
        takeover: cx.is_takeover(),
    };
    match reporter.pay(&pay).await {
        Ok(paid) if paid.effect == Effect::Closed => HandlerOutcome::reject("the account is closed"),
        Ok(paid) => HandlerOutcome::Done(paid.receipt),
        Err(error) => HandlerOutcome::in_doubt(error),
    }
}

/// A delivery's end as an event.
fn act_of(settled: &SettledDelivery<'_>) -> Act {
    let answer = match (&settled.settled, &settled.error) {
        (Some(_), None) => Answer::Ok,
        // A repeated settle found the message gone: the worker takes it that its first one was accepted, and cannot know.
        (Some(_), Some(_)) => Answer::Unknown,
        (None, Some(error)) if error.contains("unknown") => Answer::Unknown,
        (None, _) => Answer::Failed,
    };
    Act::Settle {
        id: settled.key.to_string(),
        message: settled.delivery.id.to_string(),
        fence: settled.delivery.fence.0,
        ack: matches!(settled.settlement, Settlement::Ack),
        answer,
        ran: settled.ran,
        deliveries: settled.delivery.deliveries,
        error: settled.error.clone(),
    }
}

async fn report_settles(
    reporter: Arc<Reporter>,
    workload: &'static str,
    mut told: mpsc::UnboundedReceiver<Act>,
) -> anyhow::Result<()> {
    let mut acts = Vec::new();
    while told.recv_many(&mut acts, 100).await > 0 {
        reporter.report(workload, std::mem::take(&mut acts)).await?;
        // Several at once: a settle is evidence, and no step of the workload.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
