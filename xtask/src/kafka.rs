//! Apache Kafka's broker, from its packages of Maven, and what the build of its client needs. The tests start it themselves.

use std::path::Path;

use hapax_faults::KafkaServer;

use crate::child;
use crate::services::{has, install, services_folder, with_args};
use crate::suite::{Context, Outcome, Skip, Step};

/// What is missing without a package of Debian: a file that the package installs, its name, and its purpose.
const HEADERS: [(&str, &str, &str); 2] = [
    ("/usr/include/openssl/ssl.h", "libssl-dev", "OpenSSL's headers, for the Kafka consumer"),
    ("/usr/include/zlib.h", "zlib1g-dev", "zlib's headers, for the Kafka consumer"),
];

pub fn step(cx: &Context, step: &Step) -> Outcome {
    for (file, package, what) in HEADERS {
        if !Path::new(file).exists()
            && let Some(outcome) = install(cx, step, what, package)
        {
            return outcome;
        }
    }
    if !has("java")
        && let Some(outcome) = install(cx, step, "Java, for Kafka", "openjdk-17-jre-headless")
    {
        return outcome;
    }
    // An older version is refused by what is tested, which the long run shows.
    let long = cx.is_long().then_some(KafkaServer::VERSION_3);
    for version in [KafkaServer::VERSION].into_iter().chain(long) {
        if KafkaServer::jars_of(version).is_ok() {
            continue;
        }
        if !has("mvn")
            && let Some(outcome) = install(cx, step, "Maven, for Kafka", "maven")
        {
            return outcome;
        }
        if let Err(outcome) = copy_jars(cx, step, version) {
            return outcome;
        }
    }
    match KafkaServer::jars() {
        Ok(jars) => {
            let jars = format!("{}/*", jars.display());
            step.run(cx, with_args("java", &["-cp", &jars, "kafka.Kafka", "--version"]))
        }
        Err(why) => Outcome::Skipped(Skip::Because(why)),
    }
}

/// Copies the jars beside their folder, and moves them there when they are complete.
fn copy_jars(cx: &Context, step: &Step, version: &str) -> Result<(), Outcome> {
    let folder = services_folder(cx).join(KafkaServer::folder(version));
    let new = folder.with_file_name(format!("{}.{}", KafkaServer::folder(version), std::process::id()));
    let failed =
        |error: std::io::Error| Outcome::Skipped(Skip::Because(format!("{}: {error}", new.display())));
    std::fs::create_dir_all(&new).map_err(failed)?;
    let mut get = with_args("mvn", &["--batch-mode", "--quiet", "dependency:copy-dependencies"]);
    get.arg("-f").arg(cx.root().join("xtask/kafka/pom.xml"));
    get.arg(format!("-Dkafka.version={version}"));
    get.args(["-DincludeScope=runtime", &format!("-DoutputDirectory={}", new.display())]);
    println!("\n==> {}: the jars of Kafka {version}", step.name);
    if child::run(&mut get, step.limit).problem.is_some() {
        let _ = std::fs::remove_dir_all(&new);
        return Err(Outcome::Skipped(Skip::RegistryOutOfReach("Kafka could not be had".to_owned())));
    }
    // Another run may have been faster.
    let moved = std::fs::rename(&new, &folder);
    let _ = std::fs::remove_dir_all(&new);
    if KafkaServer::jars_of(version).is_ok() { Ok(()) } else { moved.map_err(failed) }
}
