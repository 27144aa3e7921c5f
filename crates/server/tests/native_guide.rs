//! The commands of docs/native-api.md work as printed.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;

use hapax_embedded::{Embedded, Options};
use hapax_server::{Server, ServerConfig, native};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

const GUIDE: &str = include_str!("../../../docs/native-api.md");

/// All code blocks of one language.
fn blocks(language: &str) -> Vec<&'static str> {
    GUIDE.split(&format!("```{language}\n")).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

fn has(tool: &str) -> bool {
    std::process::Command::new(tool).arg("--version").output().is_ok()
}

fn main() -> ExitCode {
    let trial = Trial::ignorable_test("the_guide_works_as_printed", || {
        if let Some(missing) = ["curl", "jq", "python3"].into_iter().find(|tool| !has(tool)) {
            return Ok(Completion::ignored_with(format!("needs {missing}")));
        }
        let runtime = tokio::runtime::Runtime::new()?;
        runtime.block_on(the_guide_works_as_printed());
        Ok::<_, Failed>(Completion::Completed)
    });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

async fn the_guide_works_as_printed() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
    let listen = vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))];
    let server = Server::new(ServerConfig { listen, ..ServerConfig::default() }, store.clone()).unwrap();
    let router = native::router(store, server.shutdown(), None);
    let server = server.with_router(router, &[]);
    let listeners = server.bind().await.unwrap();
    let endpoint = format!("http://{}", listeners[0].local_addr().unwrap());
    tokio::spawn(server.run(listeners, std::future::pending()));

    let guided = endpoint.clone();
    let run = move || {
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-euc", &blocks("sh").concat()])
            .env("HAPAX", guided)
            .env("NO_PROXY", "127.0.0.1")
            .output()
            .unwrap()
    };
    let python = {
        let endpoint = endpoint.clone();
        move || {
            // The block after it is a part of examples/claims/worker.py, which has its own test.
            let script = blocks("python")[0];
            let mut python = std::process::Command::new("python3");
            python.args(["-c", script]).env("HAPAX", endpoint).env("NO_PROXY", "127.0.0.1").output().unwrap()
        }
    };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let problems = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{problems}");
    for expected in [
        "\"key\": \"7\"",
        "\"key_source\": \"body\"",
        "\"settled\":\"dead\"",
        "no such account",
        "90000",
        "\"takeover\": false",
        "\"charge\": \"ch_1\"",
        "\"state\": \"in_doubt\"",
        "\"key\": \"order-8\"",
        "\"charge\": \"ch_2\"",
        "{\"settled\":\"acked\"}",
        "\"takeovers\": 0",
    ] {
        assert!(said.contains(expected), "{expected} is not in\n{said}");
    }

    let output = tokio::task::spawn_blocking(python).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let problems = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{problems}");
    assert_eq!(said.matches("sending").count(), 1, "{said}");
    assert_eq!(said.matches("{'mail': 'm-1'}").count(), 2, "{said}");
}
