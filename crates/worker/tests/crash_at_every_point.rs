//! The worker is dropped at each point that an effectively-once delivery passes, then the message is delivered again.
//! The tests check how often the handler ran, and whether the second run was a takeover.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::Rig;
use hapax_core::{NewMessage, OnDoubt, Tier};
use hapax_worker::testing::{Trial, TrialError};
use hapax_worker::{Cx, Point, WorkerBuilder};

/// How the second delivery ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Second {
    /// A run without knowledge of an earlier one.
    Fresh,
    /// A run that is told that an earlier one may have caused the effect.
    Takeover,
    /// No run: the recorded outcome.
    Replay,
    /// No run: parked.
    Parked,
    /// No further delivery.
    None,
}

async fn crash(builder: WorkerBuilder, at: Point) -> Result<(u32, Second), TrialError> {
    let effects = Arc::<AtomicU32>::default();
    let handler = {
        let effects = effects.clone();
        move |_: u32, cx: Cx| {
            let effects = effects.clone();
            async move {
                effects.fetch_add(1, Ordering::SeqCst);
                cx.effect_point().await;
                Ok::<_, String>(cx.is_takeover())
            }
        }
    };
    let trial = Trial::new(builder.handler(handler));
    trial.send_and_crash(NewMessage::new("1"), at).await?;
    if at == Point::AfterSettle {
        return Ok((effects.load(Ordering::SeqCst), Second::None));
    }
    let ran = trial.run().await?;
    let second = match ran.value::<bool>() {
        Ok(true) => Second::Takeover,
        Ok(false) => Second::Fresh,
        Err(_) if ran.is_replay() => Second::Replay,
        Err(_) if matches!(ran.settlement, hapax_core::Settlement::Park { .. }) => Second::Parked,
        Err(other) => panic!("{other}"),
    };
    Ok((effects.load(Ordering::SeqCst), second))
}

#[tokio::test]
async fn in_one_store() {
    for (at, retry, park) in [
        (Point::AfterReceive, (1, Second::Fresh), (1, Second::Fresh)),
        (Point::AfterClaim, (1, Second::Takeover), (0, Second::Parked)),
        (Point::BeforeEffect, (1, Second::Takeover), (0, Second::Parked)),
        (Point::InEffect, (2, Second::Takeover), (1, Second::Parked)),
        (Point::AfterEffect, (2, Second::Takeover), (1, Second::Parked)),
        (Point::BeforeSettle, (2, Second::Takeover), (1, Second::Parked)),
        (Point::AfterSettle, (1, Second::None), (1, Second::None)),
    ] {
        for (on_doubt, expected) in [(OnDoubt::Retry, retry), (OnDoubt::Park, park)] {
            let rig = Rig::tier(Tier::EffectivelyOnce).await;
            let found = crash(rig.builder().on_doubt(on_doubt), at).await.unwrap();
            assert_eq!(found, expected, "{at}, {on_doubt:?}");
        }
    }
}

#[tokio::test]
async fn between_completion_and_ack_of_a_ledger_elsewhere() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let found = crash(rig.builder_elsewhere(), Point::AfterComplete).await.unwrap();
    assert_eq!(found, (1, Second::Replay));
}

#[tokio::test]
async fn a_point_that_the_tier_does_not_have_is_named() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let error = crash(rig.builder(), Point::AfterClaim).await.unwrap_err();
    assert!(matches!(error, TrialError::NotPassed(Point::AfterClaim)), "{error}");
}
