//! The payments that the banks have seen, the entries in doubt, and their resolution.

use std::time::Duration;

use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::{EntryFilter, EntryState, EntryView, Json, RecordedOutcome};
use hapax::{Hapax, OnDoubt, Resolution};

use crate::bank::{Bank, Banks, Books};
use crate::roles::scope;
use crate::storm::{PAYMENTS, Storm};

/// Number of payments that a bank has not made.
fn missing(books: &Books) -> u64 {
    PAYMENTS - books.moved.len() as u64
}

async fn entries(hapax: &Hapax, bank: Bank, state: EntryState) -> anyhow::Result<Vec<EntryView>> {
    let (scope, state) = (Some(scope(bank)), Some(state));
    let filter = EntryFilter { scope, state, limit: 1_000, ..EntryFilter::default() };
    Ok(hapax.ledger().entries(filter).await?.items)
}

async fn doubts(hapax: &Hapax, bank: Bank) -> anyhow::Result<Vec<EntryView>> {
    entries(hapax, bank, EntryState::InDoubt).await
}

/// Waits until no claim has a holder. When a store is opened, each open claim gets one more lease, because its holder
/// could not renew it while the store was down. Here the holders are dead.
pub async fn lapsed(hapax: &Hapax) -> anyhow::Result<()> {
    for bank in Bank::ALL {
        while !entries(hapax, bank, EntryState::Processing).await?.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    Ok(())
}

/// Prints whether an expectation holds.
pub fn holds(what: &str, is_so: bool) -> bool {
    println!("{} {what}", if is_so { "  ok  " } else { "FAILED" });
    is_so
}

/// Prints the table; `true` if each bank saw the expected payments.
pub async fn print(hapax: &Hapax, banks: &Banks, storm: &Storm) -> anyhow::Result<bool> {
    println!("\n{} processes were killed; all is settled.\n", storm.crashes);
    println!(
        "{:<9} {:>8} {:>8} {:>6} {:>15} {:>6} {:>10} {:>6} {:>8} {:>9} {:>8}",
        "bank",
        "on doubt",
        "payments",
        "sends",
        "crashes placed",
        "calls",
        "takeovers",
        "moved",
        "doubles",
        "in doubt",
        "missing"
    );
    println!("{:<9} {:>8} {:>8} {:>6} {:>15}", "", "", "", "", "after a payment");
    for bank in Bank::ALL {
        let books = banks.books(bank);
        let on_doubt = if bank.on_doubt() == OnDoubt::Park { "park" } else { "retry" };
        println!(
            "{:<9} {:>8} {:>8} {:>6} {:>15} {:>6} {:>10} {:>6} {:>8} {:>9} {:>8}",
            bank.name(),
            on_doubt,
            PAYMENTS,
            storm.sends.get(&bank).copied().unwrap_or_default(),
            storm.after_effect.get(bank.name()).copied().unwrap_or_default(),
            books.calls,
            books.takeovers,
            format!("{}.00", books.cents / 100),
            books.doubles(),
            doubts(hapax, bank).await?.len(),
            missing(&books),
        );
    }
    println!();
    let [keyed, fenced, trusting] = Bank::ALL.map(|bank| banks.books(bank));
    let in_doubt = doubts(hapax, Bank::Trusting).await?.len() as u64;
    let crashed = |bank: Bank| storm.after_effect.contains_key(bank.name());
    let mut all = holds("keyed: every payment once", keyed.doubles() == 0 && missing(&keyed) == 0);
    all &= holds("keyed: it was asked again after a crash", crashed(Bank::Keyed) && keyed.takeovers > 0);
    all &= holds(
        "fenced: none is missing, and a crash after a payment made it twice",
        missing(&fenced) == 0 && crashed(Bank::Fenced) && fenced.doubles() > 0,
    );
    all &= holds("trusting: nothing twice", trusting.doubles() == 0);
    all &= holds(
        "trusting: what may be missing is in doubt",
        crashed(Bank::Trusting) && in_doubt > 0 && missing(&trusting) <= in_doubt,
    );
    let one_key = |books: &Books| books.keys.values().all(|keys| keys.len() == 1);
    all &= holds("one derived key for each payment", [&keyed, &fenced, &trusting].into_iter().all(one_key));
    Ok(all)
}

/// Lists the entries in doubt, and resolves them by asking the bank.
pub async fn resolve(hapax: &Hapax, banks: &Banks) -> anyhow::Result<bool> {
    let doubts = doubts(hapax, Bank::Trusting).await?;
    println!("\nIn doubt: the worker died while it may have paid. Only the bank knows.");
    let books = banks.books(Bank::Trusting);
    for entry in &doubts {
        let paid = books.moved.contains_key(entry.id.key.as_str());
        let (says, resolution, as_) = if paid {
            let outcome = RecordedOutcome::done(Json::of("paid, says the bank")?);
            ("it was paid", Resolution::Completed { outcome, ttl_ms: TTL_MS_DEFAULT }, "completed")
        } else {
            ("it was not", Resolution::Absent, "absent")
        };
        println!(
            "  {}: the bank says {says:<11}  hapax ledger resolve '{}' {} --as {as_}",
            entry.id, entry.id.scope, entry.id.key
        );
        hapax.ledger().resolve(&entry.id, resolution, "the payments example").await?;
    }
    println!();
    Ok(holds("someone could decide", !doubts.is_empty()))
}

/// After the resolutions: `true` if the banks that make it possible have made each payment once.
pub async fn print_end(hapax: &Hapax, banks: &Banks) -> anyhow::Result<bool> {
    let books = banks.books(Bank::Trusting);
    let left = doubts(hapax, Bank::Trusting).await?.len();
    Ok(holds(
        "trusting: every payment once, now that the doubts are resolved",
        books.doubles() == 0 && missing(&books) == 0 && left == 0,
    ))
}
