//! A bare log: records appended to a file that was zeroed before, one fdatasync per group. It has no index and cannot
//! find records again: the minimum that a durable queue must do.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Contestant, Turn};

const FILE_BYTES: u64 = 64 * 1024 * 1024;
/// Size of a row of `message`.
const ROW_BYTES: usize = 80;
/// Size of a message's number and its result.
const ACK_BYTES: usize = 16;

pub struct Log {
    file: File,
    at: u64,
    body: Vec<u8>,
    buffer: Vec<u8>,
}

impl Log {
    pub fn open(folder: &Path, bytes: usize) -> Self {
        let file = File::options().create_new(true).write(true).open(folder.join("log"));
        let file = file.expect("a log can be made");
        let zeros = vec![0u8; 1024 * 1024];
        for at in (0..FILE_BYTES).step_by(zeros.len()) {
            file.write_all_at(&zeros, at).expect("the log can be zeroed");
        }
        file.sync_all().expect("the log can be synced");
        Self { file, at: 0, body: vec![7; bytes], buffer: Vec::new() }
    }

    fn append(&mut self, count: usize, row_bytes: usize, with_body: bool, sync: bool) {
        self.buffer.clear();
        for _ in 0..count {
            self.buffer.extend_from_slice(&[1u8; ROW_BYTES][..row_bytes]);
            if with_body {
                self.buffer.extend_from_slice(&self.body);
            }
        }
        if self.at + self.buffer.len() as u64 > FILE_BYTES {
            self.at = 0;
        }
        self.file.write_all_at(&self.buffer, self.at).expect("the log can be written");
        self.at += self.buffer.len() as u64;
        if sync {
            self.file.sync_data().expect("the log can be synced");
        }
    }
}

impl Contestant for Log {
    fn turn(&mut self, in_flight: usize, time: Duration) -> Turn {
        let mut turn = Turn::default();
        let start = Instant::now();
        while start.elapsed() < time {
            self.append(in_flight, ROW_BYTES, true, true);
            self.append(in_flight, ROW_BYTES, false, false);
            self.append(in_flight, ACK_BYTES, false, true);
            turn.lifecycles += in_flight as u64;
            turn.commits += 3;
            turn.synced += 2;
        }
        turn.operations = turn.lifecycles * 3;
        turn.secs = start.elapsed().as_secs_f64();
        turn
    }
}
