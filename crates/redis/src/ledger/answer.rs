//! The answers of the scripts.

use std::collections::VecDeque;

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::{
    Claim, ClaimError, EntryId, Fence, Grant, Json, OnDoubt, RecordedOutcome, Scope, StoreError, Token,
    TokenError,
};
use redis::Value;

use crate::copy::refusal;
use crate::error::unexpected;

/// An answer: a word, the time, the number of entries that were pruned, the entries whose doubt has ended, and what depends
/// on the word.
pub(super) struct Answer {
    what: &'static str,
    pub status: String,
    pub now_ms: u64,
    pub pruned: u64,
    pub resumed: Vec<String>,
    values: VecDeque<Value>,
}

impl Answer {
    pub fn read(what: &'static str, value: Value) -> Result<Self, StoreError> {
        let Value::Array(values) = value else { return Err(unexpected(what)) };
        let (status, resumed) = (String::new(), Vec::new());
        let mut answer = Self { what, status, now_ms: 0, pruned: 0, resumed, values: values.into() };
        answer.status = answer.text()?;
        answer.now_ms = answer.number()?;
        answer.pruned = answer.number()?;
        let resumed = answer.values.pop_front().unwrap_or_default();
        answer.resumed = redis::from_redis_value(resumed).map_err(|_| unexpected(what))?;
        if answer.status == "closed" {
            return Err(refusal(&answer.text()?, "the ledger"));
        }
        Ok(answer)
    }

    pub fn text(&mut self) -> Result<String, StoreError> {
        match self.values.pop_front() {
            Some(Value::BulkString(bytes)) => String::from_utf8(bytes).map_err(|_| unexpected(self.what)),
            _ => Err(unexpected(self.what)),
        }
    }

    fn signed(&mut self) -> Result<i64, StoreError> {
        match self.values.pop_front() {
            Some(Value::Int(number)) => Ok(number),
            _ => Err(unexpected(self.what)),
        }
    }

    pub fn number(&mut self) -> Result<u64, StoreError> {
        self.signed()?.try_into().map_err(|_| unexpected(self.what))
    }

    fn name<T: std::str::FromStr>(&mut self) -> Result<T, StoreError> {
        self.text()?.parse().map_err(|_| unexpected(self.what))
    }

    /// Whether it failed, its value, and the bytes of a value that was too large.
    fn outcome(&mut self, failed: bool) -> Result<RecordedOutcome, StoreError> {
        let value = match self.text()?.as_str() {
            "" => None,
            text => Some(Json::parse(text).map_err(|_| unexpected(self.what))?),
        };
        Ok(RecordedOutcome { failed, value, omitted_bytes: self.signed()?.try_into().ok() })
    }

    /// The fields of an entry, in the order of `common.lua`.
    pub fn entry(&mut self) -> Result<(EntryId, LedgerEntry), StoreError> {
        let id = EntryId::new(self.name()?, self.name()?);
        let fence = Fence(self.number()?);
        let _nonce = self.text()?;
        let owner = self.name()?;
        let fingerprint = match self.text()?.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| unexpected(self.what))?),
        };
        let (claimed_ms, takeovers, stage) = (self.number()?, self.number()? as u32, self.number()?);
        let (lease_ms, until_ms) = (self.number()?, self.number()?);
        let on_doubt = if self.number()? == 1 { OnDoubt::Park } else { OnDoubt::Retry };
        let outcome = self.outcome(stage == 3)?;
        let stage = if stage < 2 {
            Stage::Processing { lease_ms, until_ms, on_doubt, doubted: stage == 1 }
        } else {
            Stage::Completed { at_ms: until_ms, ttl_ms: lease_ms, outcome }
        };
        Ok((id, LedgerEntry { fingerprint, owner, fence, claimed_ms, takeovers, stage }))
    }
}

/// The answer to a claim.
#[derive(Debug)]
pub(super) enum Claimed {
    Granted { grant: Grant, is_new: bool },
    Ended { outcome: RecordedOutcome, at_ms: u64 },
    Held { retry_after_ms: u64 },
    InDoubt { since_ms: u64 },
    Mismatch,
    Full { open: u64, in_doubt: u64 },
}

impl Claimed {
    pub fn read(answer: &mut Answer) -> Result<Self, StoreError> {
        Ok(match answer.status.as_str() {
            "granted" => {
                let (fence, nonce) = (Fence(answer.number()?), answer.text()?);
                let token = token(fence, &nonce)?;
                let (lease_ms, takeover) = (answer.number()?, answer.number()? == 1);
                let is_new = answer.number()? == 1;
                Self::Granted { grant: Grant { token, fence, lease_ms, takeover }, is_new }
            }
            "ended" => {
                let (at_ms, failed) = (answer.number()?, answer.number()? == 1);
                Self::Ended { outcome: answer.outcome(failed)?, at_ms }
            }
            "held" => Self::Held { retry_after_ms: answer.number()? },
            "doubt" => Self::InDoubt { since_ms: answer.number()? },
            "mismatch" => Self::Mismatch,
            "full" => Self::Full { open: answer.number()?, in_doubt: answer.number()? },
            _ => return Err(unexpected("claim")),
        })
    }

    pub fn into_claim(self, scope: &Scope, max: u64) -> Result<Claim, ClaimError> {
        match self {
            Self::Granted { grant, .. } => Ok(Claim::Granted(grant)),
            Self::Ended { outcome, at_ms } => Ok(Claim::Completed { outcome, at_ms }),
            Self::Held { retry_after_ms } => Ok(Claim::InProgress { retry_after_ms }),
            Self::InDoubt { since_ms } => Ok(Claim::InDoubt { since_ms }),
            Self::Mismatch => Err(ClaimError::Mismatch),
            Self::Full { open, in_doubt } => {
                Err(ClaimError::TooManyInDoubt { scope: scope.clone(), open, in_doubt, max })
            }
        }
    }
}

/// Why a token did not count.
pub(crate) fn token_refusal(status: &str) -> Option<TokenError> {
    Some(match status {
        "gone" => TokenError::Gone,
        "stale" => TokenError::Stale,
        "ended" => TokenError::Ended,
        _ => return None,
    })
}

/// A token is the fence and a random text that the entry keeps, so that a fence, which others may see, is not enough to end a
/// claim.
fn token(fence: Fence, nonce: &str) -> Result<Token, StoreError> {
    Token::new(format!("{}-{nonce}", fence.0)).map_err(|_| unexpected("claim"))
}

/// The parts of a token. A text that is none has parts that fit no entry.
pub(super) fn parts(token: &Token) -> (&str, &str) {
    match token.as_str().split_once('-') {
        Some((fence, nonce)) if fence.bytes().all(|byte| byte.is_ascii_digit()) => (fence, nonce),
        _ => ("0", ""),
    }
}
