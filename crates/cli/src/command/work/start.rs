//! Starts a command only after the watchdog knows its process group.
//!
//! `hapax work` may be killed between the start of a process and its report to the watchdog, and the command would then
//! outlive it. So the new process is at first this program: it waits for one byte of its standard input, and only then
//! becomes the command. If `hapax work` dies before it has sent that byte, the pipe closes and nothing runs.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// The subcommand of the process that becomes the command.
pub const START_COMMAND: &str = "__start";
/// The byte that lets the command start.
pub const GO: u8 = b'\n';

/// This program. The executable file may have been replaced since this process started; the path in `/proc` still
/// refers to the original.
pub fn own_program() -> std::io::Result<PathBuf> {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() { Ok(own) } else { std::env::current_exe() }
}

/// The process that becomes the command when it is told to. If the command cannot be executed, standard output begins
/// with `secret`, which the command itself never learns, and `failure` finds the reason.
pub fn command(secret: &str, program: &OsStr, args: &[OsString]) -> std::io::Result<tokio::process::Command> {
    let mut command = tokio::process::Command::new(own_program()?);
    command.arg(START_COMMAND).arg(secret).arg(program).args(args);
    Ok(command)
}

/// Why the command could not be executed, if that is what its output says.
pub fn failure(secret: &str, stdout: &[u8]) -> Option<std::io::Error> {
    let code = stdout.strip_prefix(secret.as_bytes())?;
    let code = std::str::from_utf8(code).ok().and_then(|code| code.trim().parse().ok());
    Some(
        code.map_or_else(
            || std::io::Error::other("the reason is unknown"),
            std::io::Error::from_raw_os_error,
        ),
    )
}

/// The new process: waits for its byte, then becomes the command. Returns only if that is not possible.
pub fn start(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let (Some(secret), Some(program)) = (args.next(), args.next()) else { return ExitCode::FAILURE };
    // Not through `Stdin`, which reads ahead: what follows the byte is the command's input.
    let input = std::io::stdin().as_fd().try_clone_to_owned().map(File::from);
    if input.and_then(|mut input| input.read_exact(&mut [0])).is_err() {
        return ExitCode::FAILURE;
    }
    let error = Command::new(program).args(args).exec();
    let report = format!("{}{}\n", secret.display(), error.raw_os_error().unwrap_or_default());
    // If it cannot be written, the exit code remains.
    let _ = std::io::stdout().write_all(report.as_bytes());
    ExitCode::from(127)
}
