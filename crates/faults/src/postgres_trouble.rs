//! Faults of a PostgreSQL server and of the connections to it, at random times.

use std::time::Duration;

use crate::{Action, FaultHandle, FaultProxy, Match, PostgresServer};

/// What can happen to a database that several processes share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostgresFault {
    /// Some sessions are terminated.
    Terminate,
    /// The server crashes and is started again.
    Restart,
    /// All its processes stand still for a moment.
    Pause,
    /// Changes are committed, and the answers are lost with their connections.
    CutAnswers,
    /// Changes are committed, and the answers come late.
    DelayAnswers,
}

impl PostgresFault {
    /// Every kind.
    pub const ALL: [Self; 5] =
        [Self::Terminate, Self::Restart, Self::Pause, Self::CutAnswers, Self::DelayAnswers];

    /// Injects it, and waits for its end; returns what it hit. `proxy` stands between the processes and the server, `below`
    /// gives random numbers below a bound.
    ///
    /// # Panics
    /// If the server was not started here, or does not start again.
    pub fn inject(
        self,
        server: &PostgresServer,
        proxy: &FaultProxy,
        below: &mut dyn FnMut(u64) -> u64,
    ) -> u64 {
        match self {
            Self::Terminate => {
                let sql = format!(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'hapax' \
                     ORDER BY random() LIMIT {}",
                    1 + below(4)
                );
                server.sql("postgres", &sql).map_or(0, |killed| killed.lines().count() as u64)
            }
            Self::Restart => {
                server.stop("QUIT");
                std::thread::sleep(Duration::from_millis(below(300)));
                server.run().expect("the server starts again");
                1
            }
            Self::Pause => {
                server.signal_all("STOP");
                std::thread::sleep(Duration::from_millis(200 + below(1_500)));
                server.signal_all("CONT");
                1
            }
            Self::CutAnswers => on_answers(proxy, Action::Cut, below),
            Self::DelayAnswers => {
                on_answers(proxy, Action::Delay(Duration::from_millis(200 + below(1_500))), below)
            }
        }
    }
}

fn on_answers(proxy: &FaultProxy, action: Action, below: &mut dyn FnMut(u64) -> u64) -> u64 {
    let sql = [
        "COMMIT",
        "q_recv",
        "q_take",
        "q_send",
        "q_ack",
        "q_write",
        "ledger_claim",
        "ledger_complete",
        "ledger_write",
    ];
    let faults = sql.map(|sql| {
        let (skip, times) = (below(4), 1 + below(2));
        proxy.inject(Match::answer_to(sql), action).after(skip).times(times)
    });
    std::thread::sleep(Duration::from_millis(300));
    for fault in &faults {
        fault.remove();
    }
    faults.iter().map(FaultHandle::count).sum()
}
