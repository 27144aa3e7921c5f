//! The only list of the document cases: a case that is not listed is dead code, and the compiler warns about it.

use crate::Case;
use crate::suite::suite;

/// Every case of the document suite.
pub fn document_cases() -> &'static [Case] {
    DOCUMENT_CASES
}

suite! {
    DOCUMENT_CASES from document_cases;
    0 d00_documents {
        a_document_is_read_as_it_was_put,
        what_is_not_there_is_none,
        a_change_expects_what_it_read,
        what_must_not_exist_is_created_once,
        of_many_concurrent_changes_of_one_revision_one_wins,
        a_revision_is_never_used_twice,
        a_deleted_document_is_gone,
        a_refused_change_changes_nothing,
        documents_are_listed_in_order_of_name_by_prefix,
        a_listing_goes_page_by_page,
        a_page_of_large_documents_is_short,
        a_document_has_at_most_64_kibibytes,
        documents_have_room_for_16_mebibytes_together,
        documents_survive_a_restart_and_a_crash,
        a_listing_out_of_range_is_refused,
    }
}
