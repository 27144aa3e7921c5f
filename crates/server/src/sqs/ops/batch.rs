//! Common checks of batches: the number of entries, and their ids.

use hapax_core::policy::BATCH_MAX;

use super::super::error::{ErrorKind, Result, SqsError};
use super::super::model::Text;

/// Checks the number of entries and their ids; returns the ids.
pub(super) fn entry_ids<'t>(
    ids: impl ExactSizeIterator<Item = Option<&'t Text<'t>>>,
    entry: &str,
) -> Result<Vec<&'t str>> {
    let count = ids.len();
    if count == 0 {
        let text = format!("There should be at least one {entry} in the request.");
        return Err(SqsError::new(ErrorKind::EmptyBatchRequest, text));
    }
    if count > BATCH_MAX {
        let text = format!("Maximum number of entries per request are {BATCH_MAX}. You have sent {count}.");
        return Err(SqsError::new(ErrorKind::TooManyEntriesInBatchRequest, text));
    }
    let mut seen: Vec<&str> = Vec::with_capacity(count);
    for id in ids {
        let id = id.map(Text::as_str).ok_or_else(|| SqsError::missing(&format!("{entry}.Id")))?;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if id.is_empty() || id.len() > 80 || !id.bytes().all(plain) {
            return Err(SqsError::new(
                ErrorKind::InvalidBatchEntryId,
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can be at \
                 most 80 letters long.",
            ));
        }
        if seen.contains(&id) {
            return Err(SqsError::new(ErrorKind::BatchEntryIdsNotDistinct, format!("Id {id} repeated.")));
        }
        seen.push(id);
    }
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ids: &[&str]) -> Result<usize> {
        let texts: Vec<_> = ids.iter().map(|id| Text((*id).into())).collect();
        entry_ids(texts.iter().map(Some), "DeleteMessageBatchRequestEntry").map(|ids| ids.len())
    }

    #[test]
    fn entries_are_counted_and_their_ids_checked() {
        assert_eq!(check(&["a", "b-1", "c_2"]), Ok(3));
        assert_eq!(check(&[]).unwrap_err().kind, ErrorKind::EmptyBatchRequest);
        let eleven: Vec<String> = (0..11).map(|n| n.to_string()).collect();
        let eleven: Vec<&str> = eleven.iter().map(String::as_str).collect();
        assert_eq!(check(&eleven).unwrap_err().kind, ErrorKind::TooManyEntriesInBatchRequest);
        assert_eq!(check(&["a", "a"]).unwrap_err().kind, ErrorKind::BatchEntryIdsNotDistinct);
        for bad in ["", "a:b", "a b", &"x".repeat(81)] {
            assert_eq!(check(&[bad]).unwrap_err().kind, ErrorKind::InvalidBatchEntryId, "{bad}");
        }
    }
}
