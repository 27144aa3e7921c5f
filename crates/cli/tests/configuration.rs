//! The configuration file, the environment and the flags.

mod common;

use common::{Done, hapax, run};

const PRINT: [&str; 4] = ["serve", "--print-config", "--config", "hapax.toml"];

#[test]
fn an_unknown_key_is_refused_with_the_one_that_was_meant() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[limits]\nconections_max = 7\n").unwrap();
    let error = run(&folder, &["serve", "--config", "hapax.toml"]).failed(1);
    assert!(error.contains("hapax.toml:2: unknown key `conections_max`"), "{error}");
    assert!(error.contains("did you mean `connections_max`?"), "{error}");
    assert!(!folder.path().join("hapax-data").exists(), "nothing was made");
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = run(&folder, &["serve", "--config", "nowhere.toml"]).failed(1);
    assert!(error.contains("nowhere.toml"), "{error}");
}

#[test]
fn a_printed_configuration_reads_back_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let text = "listen = \"127.0.0.1:9999\"\n[log]\nformat = \"json\"\n[[queue]]\nname = \"a.fifo\"\n\
                redrive_allow = { queues = [\"b.fifo\"] }\n";
    std::fs::write(folder.path().join("hapax.toml"), text).unwrap();
    let first = run(&folder, &PRINT).ok();
    assert!(first.contains("127.0.0.1:9999") && first.contains("a.fifo"), "{first}");
    std::fs::write(folder.path().join("hapax.toml"), &first).unwrap();
    assert_eq!(run(&folder, &PRINT).ok(), first);
    let defaults = run(&folder, &["serve", "--print-config"]).ok();
    assert!(defaults.contains("127.0.0.1:9324") && defaults.contains("embedded:./hapax-data"), "{defaults}");
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let text = "[sqs]\nregion = \"file\"\naccount = \"111111111111\"\n[limits]\nread_timeout_ms = 1\n";
    std::fs::write(folder.path().join("hapax.toml"), text).unwrap();
    let mut command = hapax(&folder, &PRINT);
    command.args(["--region", "flag"]).env("HAPAX_REGION", "environment").env("HAPAX_READ_TIMEOUT", "5s");
    let printed = Done::new(command.output().unwrap()).ok();
    for expected in ["region = \"flag\"", "read_timeout_ms = 5000", "account = \"111111111111\""] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
}

#[test]
fn secrets_are_not_printed() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[[auth.keys]]\nid = \"AK\"\nsecret = \"hunter2\"\n")
        .unwrap();
    let mut command = hapax(&folder, &PRINT);
    command.env("HAPAX_KEY_ID", "BK").env("HAPAX_KEY_SECRET", "hunter3");
    let printed = Done::new(command.output().unwrap()).ok();
    assert!(printed.contains("AK") && printed.contains("BK") && !printed.contains("hunter"), "{printed}");
}

/// A URL may hold a token or a password.
#[test]
fn secrets_in_urls_are_not_printed() {
    let folder = tempfile::tempdir().unwrap();
    let url = "https://OPS:hunter4@queues.example:9324/base";
    let print = ["proxy", "--print-config", "--upstream", "http://x"];
    std::fs::write(folder.path().join("proxy.toml"), format!("ledger = \"{url}\"\n")).unwrap();
    for (args, variable) in [(&["--ledger", url][..], ""), (&["--config", "proxy.toml"], ""), (&[], url)] {
        let mut command = hapax(&folder, &print);
        command.args(args);
        if !variable.is_empty() {
            command.env("HAPAX_LEDGER", variable);
        }
        let printed = Done::new(command.output().unwrap()).ok();
        assert!(printed.contains("ledger = \"https://queues.example:9324/base\"\n"), "{args:?}: {printed}");
    }
    // Nor by what refuses them.
    std::fs::write(folder.path().join("hapax.toml"), "[store]\nurl = \"postgres://me:hunter5@db/x\"\n")
        .unwrap();
    for args in [
        &["proxy", "--upstream", "http://me:hunter6@service"][..],
        &["proxy", "--upstream", "ftp://me:hunter6@service"],
        &["proxy", "--upstream", "http://me:hunter6@service/?a=b"],
        &["proxy", "--upstream", "http://x", "--ledger", "ftp://me:hunter6@service"],
        &["proxy", "--upstream", "http://x", "--ledger", "http://me:hunter6@127.0.0.1:1"],
        &["serve", "--config", "hapax.toml"],
        &["serve", "--store", "postgres://me:hunter6@db/x"],
        &["doctor", "--store", "postgres://me:hunter6@db/x"],
        &["doctor", "--endpoint", "http://me:hunter6@127.0.0.1:1"],
        &["queues", "--endpoint", "ftp://me:hunter6@service"],
    ] {
        let done = run(&folder, args);
        assert!(done.code != Some(0) && done.stderr.starts_with("error: "), "{args:?}: {done:?}");
        assert!(!done.stderr.contains("hunter"), "{args:?}: {done:?}");
    }
}

/// Runs `hapax serve` on a file that it refuses; gives what it says, line by line.
fn refused(text: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), text).unwrap();
    let done = run(&folder, &["serve", "--config", "hapax.toml", "--listen", "127.0.0.1:0"]);
    assert_eq!(done.code, Some(1), "{text}: {done:?}");
    assert_eq!(done.stdout, "", "it did not get as far as its banner");
    assert!(!folder.path().join("hapax-data").exists(), "{text}: a store was created");
    done.stderr.lines().map(str::to_owned).collect()
}

#[test]
fn every_problem_of_the_file_is_reported_at_once_with_its_line() {
    let text = "\
[log]
level = \"inof\"

[limits]
conections_max = 7
read_timeout_ms = \"30s\"

[[queue]]
name = \"emails\"
lease = 30

[[queue]]
name = \"orders\"
lease_ms = 99999999

[[queue]]
name = \"emails\"

[sqs]
account = \"12\"

[[proxy]]
upstream = \"ftp://127.0.0.1\"
[[proxy.route]]
path = \"/payments\"
weit_ms = 7
";
    let said = refused(text);
    let expected = [
        ("error: hapax.toml has 9 problems:", ""),
        ("hapax.toml:2: ", "did you mean"),
        ("hapax.toml:5: unknown key `conections_max`", "did you mean `connections_max`?"),
        ("hapax.toml:6: limits.read_timeout_ms: ", "a whole number"),
        ("hapax.toml:10: unknown key `lease`", "did you mean `lease_ms`?"),
        ("hapax.toml:14: queue orders: lease_ms: 99999999 is out of range", "0 to 43200000"),
        ("hapax.toml:17: queue emails is declared twice", "line 9"),
        ("hapax.toml:20: sqs.account: ", "12 digits"),
        ("hapax.toml:23: proxy proxy: upstream: \"ftp://127.0.0.1\"", "http://127.0.0.1:8080"),
        ("hapax.toml:26: unknown key `weit_ms`", "did you mean `wait_ms`?"),
    ];
    let all = said.join("\n");
    for (start, remedy) in expected {
        let found = said.iter().find(|line| line.contains(start)).unwrap_or_else(|| panic!("{start}: {all}"));
        assert!(found.contains(remedy), "{start} {remedy}: {all}");
    }
    assert_eq!(said.len(), expected.len(), "{all}");
}

#[test]
fn problems_of_a_running_server_are_found_before_it_starts() {
    for (text, says) in [
        ("[[auth.keys]]\nid = \"AK\"\nsecret_env = \"HAPAX_TEST_NOT_SET\"\n", "hapax.toml:1: auth.keys.AK"),
        ("[[auth.keys]]\nid = \"AK\"\nsecret_file = \"nowhere\"\n", "hapax.toml:1: auth.keys.AK"),
        ("[tls]\ncert_file = \"nowhere.pem\"\nkey_file = \"nowhere.key\"\n", "nowhere.pem"),
        ("[store]\nurl = \"mongodb://x\"\n", "hapax.toml:2: store.url: \"mongodb://x\" names no store"),
        ("[log]\nlevel = \"info,hapax_server=dbug\"\n", "hapax.toml:2: log.level: \"hapax_server=dbug\""),
        ("[limits]\nconnections_max = 0\n", "hapax.toml:2: limits.connections_max: "),
        (
            "[[queue]]\nname = \"a\"\non_dead = \"halt-group\"\n",
            "hapax.toml:3: queue a: on_dead: halt-group needs a FIFO queue",
        ),
        ("[[queue]]\nlease_ms = 1\n", "hapax.toml:1: queue.0: missing field `name`"),
        ("[[queue]]\nname = \"a b\"\n", "hapax.toml:2: queue.0.name: "),
        (
            "[[proxy]]\nupstream = \"http://a\"\ntls = { cert_file = \"no.pem\", key_file = \"no.key\" }\n",
            "hapax.toml:3: proxy proxy: tls.cert_file no.pem: ",
        ),
        (
            "[[proxy]]\nupstream = \"http://127.0.0.1:1\"\n[proxy.policy]\nwait_ms = 99999999\n",
            "hapax.toml:4: proxy proxy: wait_ms: 99999999 is out of range",
        ),
        (
            "[[proxy]]\nupstream = \"http://a\"\n[[proxy]]\nlisten = \"127.0.0.1:9400\"\nupstream = \"http://b\"\n",
            "hapax.toml:3: two proxies before different services are both named \"proxy\"",
        ),
        (
            "[[proxy]]\nupstream = \"http://a\"\n[[proxy]]\nname = \"b\"\nupstream = \"http://b\"\n",
            "127.0.0.1:9325 is listened on twice",
        ),
    ] {
        let said = refused(text);
        assert!(said.len() == 1 && said[0].contains(says), "{text}: {said:?}");
    }
}

#[test]
fn an_old_name_is_refused_with_the_new_one() {
    for key in ["reserve_bytes = 1", "messages_max = 1", "bytes_max = 1", "memory_bytes_max = 1"] {
        let (name, _) = key.split_once(' ').unwrap();
        let said = refused(&format!("[store]\nurl = \"embedded:x\"\n{key}\n"));
        let expected = format!("error: hapax.toml:3: `store.{name}` is now `store.embedded.{name}`");
        assert_eq!(said, [expected], "{key}");
    }
    let said = refused("[[queue]]\nname = \"a\"\ndead_letter = { queue = \"b\", max_attempts = 3 }\n");
    let expected = "error: hapax.toml:3: `queue.dead_letter.max_attempts` is now `queue.retry.max_attempts`";
    assert_eq!(said, [expected]);
    let said = refused("[store]\nallow_network_file_system = true\n");
    assert!(said[0].contains("is now `store.embedded.allow_network_file_system`"), "{said:?}");
    let said = refused("[limits]\nbodies_bytes_max = 1\n");
    assert_eq!(said, ["error: hapax.toml:2: `limits.bodies_bytes_max` is now `limits.arriving_bytes_max`"]);
    for (table, old, new) in [
        ("limits", "pool_idle_ms = 1", "pool_idle_timeout_ms"),
        ("limits", "pool_idle_max = 1", "pool_idle_connections_max"),
        ("policy", "required = true", "key_required"),
        ("policy", "counted_headers = []", "fingerprint_headers"),
        ("policy", "excluded = []", "fingerprint_excluded_fields"),
        ("policy", "released = []", "released_statuses"),
        ("policy", "doubtful = []", "doubtful_statuses"),
        ("route", "required = true", "key_required"),
        ("route", "counted_headers = []", "fingerprint_headers"),
        ("route", "excluded = []", "fingerprint_excluded_fields"),
        ("route", "released = []", "released_statuses"),
        ("route", "doubtful = []", "doubtful_statuses"),
    ] {
        let heading = if table == "route" {
            "[[proxy.route]]\npath = \"/a\"".to_owned()
        } else {
            format!("[proxy.{table}]")
        };
        let said = refused(&format!("[[proxy]]\nupstream = \"http://a\"\n{heading}\n{old}\n"));
        let (name, _) = old.split_once(' ').unwrap();
        let expected = format!("`proxy.{table}.{name}` is now `proxy.{table}.{new}`");
        assert!(said.len() == 1 && said[0].ends_with(&expected), "{table} {old}: {said:?}");
    }
}

#[test]
fn a_wrong_flag_is_not_blamed_on_a_line_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("hapax.toml"), "[log]\nlevel = \"info\"\n").unwrap();
    let args = ["serve", "--config", "hapax.toml", "--log-level", "loud", "--listen", "127.0.0.1:0"];
    let error = run(&folder, &args).failed(1);
    assert!(error.starts_with("error: log.level: \"loud\" is no level"), "{error}");
    assert!(error.contains("error, warn, info, debug, trace"), "{error}");
}

#[test]
fn a_proxy_file_is_checked_the_same_way() {
    let folder = tempfile::tempdir().unwrap();
    let text = "ledgr = \"x\"\n[log]\nlevel = \"loud\"\n[[proxy]]\nupstream = \"ftp://x\"\n";
    std::fs::write(folder.path().join("proxy.toml"), text).unwrap();
    let done = run(&folder, &["proxy", "--config", "proxy.toml"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    for says in
        ["proxy.toml:1: unknown key `ledgr`; did you mean `ledger`?", "proxy.toml:3: ", "proxy.toml:5: "]
    {
        assert!(done.stderr.contains(says), "{says}: {}", done.stderr);
    }
    assert!(!folder.path().join("hapax-proxy-data").exists(), "nothing was made");
}
