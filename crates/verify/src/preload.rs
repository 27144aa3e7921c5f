//! Faults of disk and clock, by a library that processes of a run are started with (`preload/faults.c`). It is not part of any
//! release: without it, these faults are left out.

use std::fs::{self, File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::fault::ClockStep;

/// What the disk of a server does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    Works,
    SyncFails,
    WriteFails,
    SyncIsSlow,
}

/// The library, and the files by which a run tells it what to do.
pub struct Preload {
    library: PathBuf,
    server: PathBuf,
    /// Of clients with an even number, and of those with an odd one.
    clients: [PathBuf; 2],
    undo: PathBuf,
}

impl Preload {
    /// The files are in a new folder inside that of the run.
    pub fn new(library: &Path, run_folder: &Path) -> anyhow::Result<Self> {
        let folder = run_folder.join("preload");
        let undo = folder.join("undo");
        fs::create_dir_all(&undo)?;
        let (server, clients) = (folder.join("server"), ["even", "odd"].map(|clients| folder.join(clients)));
        for control in clients.iter().chain([&server]) {
            fs::write(control, *b"n\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0")?;
        }
        let library = library.canonicalize().with_context(|| library.display().to_string())?;
        Ok(Self { library, server, clients, undo })
    }

    /// Starts a server with it, whose store is in this folder.
    pub fn load_into_server(&self, command: &mut Command, store: &Path) -> anyhow::Result<()> {
        // The library looks the folder up when the process starts.
        fs::create_dir_all(store)?;
        command.env("LD_PRELOAD", &self.library).env("VERIFY_FAULTS_CONTROL", &self.server);
        command.env("VERIFY_FAULTS_FOLDER", store).env("VERIFY_FAULTS_UNDO", &self.undo);
        Ok(())
    }

    /// Starts a client with it; clients with an even and an odd number have different clocks.
    pub fn load_into_client(&self, command: &mut Command, number: usize) {
        command.env("LD_PRELOAD", &self.library).env("VERIFY_FAULTS_CONTROL", &self.clients[number % 2]);
    }

    /// Breaks or mends the disk of servers.
    pub fn set_disk(&self, disk: Disk) -> anyhow::Result<()> {
        let mode = match disk {
            Disk::Works => b'n',
            Disk::SyncFails => b'f',
            Disk::WriteFails => b'w',
            Disk::SyncIsSlow => b's',
        };
        // In place: the file is mapped.
        Ok(OpenOptions::new().write(true).open(&self.server)?.write_all_at(&[mode], 0)?)
    }

    /// Sets the wall clocks to these times after the true one, or before it.
    pub fn step_clocks(&self, step: ClockStep) -> anyhow::Result<()> {
        let [even, odd] = &self.clients;
        for (control, ms) in
            [(even, step.clients_ms[0]), (odd, step.clients_ms[1]), (&self.server, step.server_ms)]
        {
            OpenOptions::new().write(true).open(control)?.write_all_at(&ms.to_le_bytes(), 8)?;
        }
        Ok(())
    }

    /// Takes away what was written to the files of a store and not synced. Its server has been killed.
    pub fn cut_power(&self, store: &Path) -> anyhow::Result<()> {
        for entry in fs::read_dir(&self.undo)? {
            let entry = entry?;
            let file = store.join(entry.file_name());
            let mut log = Vec::new();
            File::open(entry.path())?.read_to_end(&mut log)?;
            if let Ok(file) = OpenOptions::new().write(true).open(&file) {
                undo(&file, &log)?;
            }
            fs::remove_file(entry.path())?;
        }
        Ok(())
    }
}

/// Undoes writes, the last one first. Each record: offset, length of the file before, length of the data, and the data.
fn undo(file: &File, log: &[u8]) -> anyhow::Result<()> {
    let mut records = Vec::new();
    let mut rest = log;
    while let Some((head, after)) = rest.split_at_checked(24) {
        let number = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        let (offset, before, length) = (number(0), number(8), number(16));
        // The process was killed while it wrote this record; the write itself did not happen.
        let Some((data, after)) = after.split_at_checked(usize::try_from(length)?) else { break };
        records.push((offset, before, data));
        rest = after;
    }
    for (offset, before, data) in records.into_iter().rev() {
        file.write_all_at(data, offset)?;
        file.set_len(before)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_undone_in_reverse() {
        let path = tempfile::NamedTempFile::new().unwrap();
        fs::write(path.path(), b"XY3456").unwrap();
        let record = |offset: u64, before: u64, data: &[u8]| {
            let numbers = [offset, before, data.len() as u64].map(u64::to_le_bytes).concat();
            [numbers, data.to_vec()].concat()
        };
        // "123" became "X23", then "XY3", then "XY3456"; the last record was not finished.
        let log = [record(0, 3, b"1"), record(1, 3, b"2"), record(3, 3, b""), record(9, 6, b"abc")].concat();
        let file = OpenOptions::new().write(true).open(path.path()).unwrap();
        undo(&file, &log[..log.len() - 1]).unwrap();
        assert_eq!(fs::read(path.path()).unwrap(), b"123");
    }
}
