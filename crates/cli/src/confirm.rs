//! Asks for confirmation before data is lost.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use clap::Args;

use crate::usage;

/// The flag that skips the question.
#[derive(Debug, Clone, Copy, Args)]
pub struct Confirm {
    /// Does not ask for confirmation. Required without a terminal.
    #[arg(long, short)]
    yes: bool,
}

impl Confirm {
    /// Asks the user at the terminal. Without a terminal, `--yes` is required.
    pub fn ask(self, question: &str) -> anyhow::Result<()> {
        if self.yes {
            return Ok(());
        }
        if !std::io::stdin().is_terminal() {
            return Err(usage(format!("{question} There is no terminal to ask at; add --yes")));
        }
        let mut err = std::io::stderr().lock();
        write!(err, "{question} [y/N] ")?;
        err.flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        match answer.trim() {
            "y" | "Y" | "yes" => Ok(()),
            _ => anyhow::bail!("nothing was changed"),
        }
    }
}
