//! A server writes backups into one folder: another program of the machine cannot make it write anywhere else.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;

use common::proxied::{Proxy, service};
use common::{Server, run};
use serde_json::{Value, json};

/// Asks for a backup as any program of this machine can; status and body.
fn ask(server: &Server, to: &str) -> (u16, Value) {
    ask_at(server.address(), to)
}

fn ask_at(address: &str, to: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(address).unwrap();
    let body = json!({"to": to}).to_string();
    let head = "POST /v1/backup HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap_or_default())
}

#[test]
fn a_backup_goes_into_the_stores_own_folder_and_nowhere_else() {
    let server = Server::start();
    let store = server.folder.path().join("hapax-data");
    let backups = store.join("backups");
    let outside = server.folder.path().join("outside.db");
    let refused = [
        outside.to_str().unwrap().to_owned(),
        store.join("hapax.db").display().to_string(),
        backups.join("../outside.db").display().to_string(),
        backups.join("sub/copy.db").display().to_string(),
        backups.display().to_string(),
        "../outside.db".to_owned(),
        "sub/copy.db".to_owned(),
        "..".to_owned(),
        ".".to_owned(),
        String::new(),
        "nul\0.db".to_owned(),
    ];
    for to in &refused {
        let (status, problem) = ask(&server, to);
        assert_eq!((status, &problem["code"]), (400, &json!("invalid")), "{to:?}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(backups.to_str().unwrap()), "{detail}");
        assert!(detail.contains("(store.embedded.backup_folder)"), "{detail}");
    }
    assert!(!outside.exists() && !store.join("outside.db").exists());

    // By its name, and by its whole path.
    for (to, file) in [
        ("one.db", backups.join("one.db")),
        (backups.join("two.db").to_str().unwrap(), backups.join("two.db")),
    ] {
        let (status, answer) = ask(&server, to);
        assert_eq!((status, &answer["path"]), (200, &json!(file)), "{answer}");
        assert!(file.exists());
    }
    assert_eq!(std::fs::metadata(&backups).unwrap().permissions().mode() & 0o777, 0o700);
    let (status, problem) = ask(&server, "one.db");
    assert_eq!((status, &problem["code"]), (409, &json!("refused")), "{problem}");
}

#[test]
fn the_command_says_where_the_file_is_and_what_is_allowed() {
    let server = Server::start();
    server.run(&["send", "q", "--create", "x"]).ok();
    let backups = server.folder.path().join("hapax-data/backups");
    let said = server.run(&["backup", "copy.db"]).ok();
    let file = backups.join("copy.db");
    assert_eq!(said, format!("backup written to {}\n", file.display()));
    let error = server.run(&["backup", "copy.db"]).failed(1);
    assert!(error.contains("exists"), "{error}");
    for path in ["./copy2.db", "/tmp/hapax-copy.db"] {
        let error = server.run(&["backup", path]).failed(1);
        assert!(error.contains(backups.to_str().unwrap()) && error.contains("name"), "{error}");
    }
    let folder = server.stop();
    run(&folder, &["restore", file.to_str().unwrap(), "--store", "embedded:./restored"]).ok();
    // While no server runs the user's own process writes, wherever the user may.
    let offline = run(&folder, &["backup", "offline.db", "--endpoint", "embedded:./hapax-data"]).ok();
    let file = folder.path().join("offline.db");
    assert_eq!(offline, format!("backup written to {}\n", file.display()));
    assert!(file.exists());
}

#[test]
fn another_folder_can_be_configured() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("nightly");
    let server = Server::start_in(folder, &["--store-backup-folder", path.to_str().unwrap()]);
    let file = path.join("copy.db");
    let said = server.run(&["backup", file.to_str().unwrap()]).ok();
    assert_eq!(said, format!("backup written to {}\n", file.display()));
    let own = server.folder.path().join("hapax-data/backups/copy.db");
    assert!(server.run(&["backup", own.to_str().unwrap()]).failed(1).contains(path.to_str().unwrap()));
    let folder = server.stop();
    let toml = "[store.embedded]\nbackup_folder = \"copies\"\n";
    std::fs::write(folder.path().join("hapax.toml"), toml).unwrap();
    let server = Server::start_in(folder, &["--config", "hapax.toml"]);
    server.run(&["backup", "copy.db"]).ok();
    assert!(server.folder.path().join("copies/copy.db").exists());
}

/// A proxy writes them inside its ledger's folder, or where its own setting says.
#[test]
fn the_admin_listener_of_a_proxy_names_its_own_setting() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let (upstream, _) = service();
    let elsewhere = elsewhere.path().join("nightly");
    let backup_folder = format!("backup_folder = \"{}\"\n", elsewhere.display());
    for (setting, expected) in
        [("", folder.path().join("hapax-proxy-data/backups")), (backup_folder.as_str(), elsewhere.clone())]
    {
        let text = format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n{setting}[[proxy]]\nupstream = \"http://{upstream}\"\n"
        );
        std::fs::write(folder.path().join("proxy.toml"), text).unwrap();
        let proxy = Proxy::start(&folder, &["--config", "proxy.toml"]);
        let admin = proxy.admin().unwrap();
        let (status, problem) = ask_at(admin.trim_start_matches("http://"), "../outside.db");
        let detail = problem["detail"].as_str().unwrap();
        assert_eq!((status, &problem["code"]), (400, &json!("invalid")), "{problem}");
        assert!(detail.contains(expected.to_str().unwrap()), "{detail}");
        assert!(detail.contains("admin.backup_folder") && !detail.contains("store.embedded"), "{detail}");
        let said = run(&folder, &["backup", "copy.db", "--endpoint", admin]).ok();
        let file = expected.join("copy.db");
        assert_eq!(said, format!("backup written to {}\n", file.display()));
        assert!(file.exists());
    }
}
