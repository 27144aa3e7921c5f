//! `hapax verify --broker`.

use std::time::Duration;

use hapax_verify::kafka::{ASKED_FOR, KafkaFault, KafkaOptions, ROUND};
use hapax_verify::workload::{KAFKA, Shape, Workload};

use super::{VerifyArgs, program};
use crate::usage;

/// The workloads of a run, with or without the control of our own tests.
pub fn workloads(librdkafka: bool) -> impl Iterator<Item = Workload> {
    KAFKA.into_iter().filter(move |workload| librdkafka || workload.shape != Shape::Librdkafka)
}

/// All faults, also those that a run has only if they are asked for.
pub fn faults() -> Vec<KafkaFault> {
    ROUND.into_iter().chain(ASKED_FOR).collect()
}

pub fn options(args: &VerifyArgs, broker: &str) -> anyhow::Result<KafkaOptions> {
    for name in &args.only {
        if !KAFKA.iter().any(|workload| workload.name == name && !workload.is_control()) {
            let ours: Vec<&str> = KAFKA
                .iter()
                .filter(|workload| !workload.is_control())
                .map(|workload| workload.name)
                .collect();
            return Err(usage(format!("with --broker, --only is one of: {}", ours.join(", "))));
        }
    }
    let (seed, time_ms) = args.schedule();
    Ok(KafkaOptions {
        program: program()?,
        broker: broker.to_owned(),
        workloads: workloads(args.librdkafka).collect(),
        faults: if args.faults.is_empty() { ROUND.to_vec() } else { args.chosen(&faults())? },
        time: Duration::from_millis(time_ms),
        seed,
        history: args.history.clone(),
        command: args.command(seed, time_ms),
    })
}
