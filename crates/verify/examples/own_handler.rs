//! A handler of your own under `hapax verify`: its processes are killed and stopped, and another process counts its effects.
//!
//! ```sh
//! cargo build --bin hapax
//! cargo run -p hapax-verify --example own_handler -- target/debug/hapax
//! ```
//!
//! It prints the table with the naive programs beside the handler, and fails unless the guarantee held. Replace the key by
//! `None` to see the handler caught.

use hapax::{Cx, HandlerOutcome};
use hapax_verify::report::Verdict;
use hapax_verify::{Effects, Handler, Options, Payment, verify};

struct Charge;

impl Handler for Charge {
    type Outcome = HandlerOutcome<u64>;

    async fn handle(&self, payment: Payment, cx: Cx, effects: Effects) -> HandlerOutcome<u64> {
        match effects.call(&payment, Some(&cx.derived_key("charge"))).await {
            Ok(receipt) => HandlerOutcome::Done(receipt),
            Err(error) => HandlerOutcome::in_doubt(error),
        }
    }
}

fn main() -> anyhow::Result<()> {
    // A worker is this program again, without arguments; then this call does not return.
    let program = std::env::args().nth(1).unwrap_or_else(|| "hapax".to_owned());
    let report = verify(Charge, &Options::for_handler(program))?;
    print!("{}", report.to_text());
    anyhow::ensure!(report.verdict == Verdict::Held, "{}", report.why);
    Ok(())
}
