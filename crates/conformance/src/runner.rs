//! The suites as a test binary.

use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::{Case, CaseOutcome, Factory};

/// Runs every case as its own test, and one more test that checks the list of skipped cases.
///
/// `skips` is the exact list of the cases that the store cannot run: `module::case`, or `module::*` for all cases of a
/// module. It does not contain cases that only run with `HAPAX_LONG`.
pub fn main(
    factory: impl Factory + 'static,
    suites: &[&'static [Case]],
    skips: &'static [&'static str],
) -> ExitCode {
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let cases: Vec<&'static Case> = suites.iter().flat_map(|suite| suite.iter()).collect();
    let mut trials = vec![exact_skips(factory.clone(), cases.clone(), skips)];
    trials.extend(cases.into_iter().map(|case| trial(factory.clone(), case)));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

fn trial(factory: Arc<dyn Factory>, case: &'static Case) -> Trial {
    Trial::ignorable_test(case.to_string(), move || {
        let outcome = block_on(async { case.run(factory.fresh().await).await });
        Ok(match outcome {
            CaseOutcome::Passed => Completion::Completed,
            CaseOutcome::Skipped(why) if case.is_heavy() => Completion::ignored_with(format!("long: {why}")),
            CaseOutcome::Skipped(why) => Completion::ignored_with(format!("declared: {why}")),
        })
    })
}

fn exact_skips(
    factory: Arc<dyn Factory>,
    cases: Vec<&'static Case>,
    skips: &'static [&'static str],
) -> Trial {
    Trial::test("the_list_of_skipped_cases_is_exact", move || {
        let harness = block_on(factory.fresh());
        let light = || cases.iter().filter(|case| !case.is_heavy());
        let listed = |case: &Case| {
            let all = format!("{}::*", case.module);
            skips.iter().any(|skip| *skip == case.to_string() || *skip == all)
        };
        let wrong: Vec<String> = light()
            .filter_map(|case| match (case.missing(&*harness), listed(case)) {
                (Some(why), false) => Some(format!("{case} is skipped ({why}), but is not in the list")),
                (None, true) => Some(format!("{case} is in the list, but runs")),
                _ => None,
            })
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(Failed::from(wrong.join("; "))) }
    })
}
