//! Project rules that are important enough to be tests. Each rule is a function that returns its violations. It is run
//! here on the workspace, and next to its code on a small bad sample, which shows that it can fail.

mod counters;
mod dependencies;
mod docs;
mod errors;
mod source;
mod workspace;

use workspace::Workspace;

/// Fails with all violations, not just the first.
#[track_caller]
fn assert_none(breaches: &[String]) {
    assert!(breaches.is_empty(), "\n{}\n", breaches.join("\n"));
}

#[test]
fn crates_depend_only_on_those_before_them() {
    assert_none(&dependencies::out_of_order(&Workspace::load().packages));
}

#[test]
fn nothing_depends_on_verify_but_the_cli() {
    assert_none(&dependencies::on_verify(&Workspace::load().packages));
}

#[test]
fn every_crate_takes_the_workspace_lints() {
    assert_none(&dependencies::without_lints(&Workspace::load().packages));
}

#[test]
fn cargo_run_starts_hapax() {
    let workspace = Workspace::load();
    assert_none(&dependencies::ambiguous_run(&workspace.packages, &workspace.default_members));
}

#[test]
fn rust_files_are_short_enough_to_read() {
    assert_none(&Workspace::load().each(&["rs"], source::too_long));
}

#[test]
fn nothing_is_left_unfinished() {
    assert_none(&Workspace::load().each_but_tidy(&["rs"], source::unfinished));
}

#[test]
fn every_log_field_keeps_its_name() {
    assert_none(&Workspace::load().each_but_tidy(&["rs"], source::log_field_called_message));
}

#[test]
fn ignored_tests_say_why() {
    assert_none(&Workspace::load().each_but_tidy(&["rs"], source::ignored_without_reason));
}

#[test]
fn no_path_of_one_machine() {
    assert_none(&Workspace::load().each(&["rs", "md", "toml", "yml"], source::machine_paths));
}

#[test]
fn no_tabs_and_no_trailing_whitespace() {
    assert_none(&Workspace::load().each(&["rs", "md", "toml", "yml"], source::stray_whitespace));
}

#[test]
fn every_page_can_be_reached_from_the_readme() {
    assert_none(&docs::unreachable(&Workspace::load()));
}

#[test]
fn links_between_pages_lead_somewhere() {
    assert_none(&docs::broken_links(&Workspace::load()));
}

#[test]
fn the_architecture_names_functions_that_exist() {
    let workspace = Workspace::load();
    let source = |file: &str| workspace.files.iter().any(|known| known == file).then(|| workspace.text(file));
    assert_none(&docs::missing_functions(&workspace.text("docs/ARCHITECTURE.md"), source));
}

#[test]
fn every_code_has_a_page_and_every_page_a_code() {
    assert_none(&errors::unexplained(&Workspace::load()));
}

#[test]
fn every_declared_counter_is_counted() {
    assert_none(&counters::uncounted(&Workspace::load()));
}

#[test]
fn the_readme_starts_with_the_two_commands() {
    assert_none(&docs::first_commands(&Workspace::load().text("README.md")));
}

#[test]
fn the_image_is_built_with_the_oldest_rust() {
    let workspace = Workspace::load();
    let (manifest, image) = (workspace.text("Cargo.toml"), workspace.text("packaging/Dockerfile"));
    assert_none(&dependencies::other_rust(&manifest, &image));
}

#[test]
fn ci_runs_what_contributors_run() {
    let workspace = Workspace::load();
    assert_none(&docs::runs_the_tests(".ci/run", &workspace.text(".ci/run")));
    let workflow = ".github/workflows/test.yml";
    assert_none(&docs::runs_the_tests(workflow, &workspace.text(workflow)));
}
