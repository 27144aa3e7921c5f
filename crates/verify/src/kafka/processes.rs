//! The processes of a run on Kafka.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::bail;
use hapax_faults::Process;

use super::broker::Broker;
use super::site::{KafkaRole, KafkaSite, READ_TO_END};
use crate::cluster::{last_lines, start};
use crate::roles::Role;

/// Processor processes. While one is stopped or dead, the other takes over.
pub const PROCESSORS: usize = 2;

/// A processor process and its number, which is part of its transactional id.
pub struct NumberedProcess {
    pub number: usize,
    pub process: Process,
}

/// What a run consists of.
pub struct Processes {
    program: PathBuf,
    pub broker: Broker,
    pub site: KafkaSite,
    recorder: Process,
    producer: Option<Process>,
    reader: Option<Process>,
    /// Workloads whose output the reader has read to the end.
    read: HashSet<String>,
    pub processors: Vec<NumberedProcess>,
}

impl Processes {
    /// Starts the recorder; `site` gets its address.
    pub fn start(
        program: &Path,
        broker: Broker,
        mut site: KafkaSite,
        history: &Path,
    ) -> anyhow::Result<Self> {
        let recorder = start(program, &Role::Recorder(history.to_owned(), None))?;
        site.recorder = recorder.wait_for_prefix("at ").parse()?;
        let program = program.to_owned();
        let (read, processors) = (HashSet::new(), Vec::new());
        Ok(Self { program, broker, site, recorder, producer: None, reader: None, read, processors })
    }

    /// Starts the reader, the processors and the producer.
    pub fn start_clients(&mut self) -> anyhow::Result<()> {
        self.reader = Some(self.begin(KafkaRole::Reader(self.site.clone()))?);
        for number in 0..PROCESSORS {
            let started = self.processor(number)?;
            self.processors.push(started);
        }
        self.producer = Some(self.begin(KafkaRole::Producer(self.site.clone()))?);
        Ok(())
    }

    /// Starts a processor that is not one of the run's own yet.
    pub fn processor(&self, number: usize) -> anyhow::Result<NumberedProcess> {
        let process = self.begin(KafkaRole::Processor(self.site.clone(), number))?;
        Ok(NumberedProcess { number, process })
    }

    fn begin(&self, role: KafkaRole) -> anyhow::Result<Process> {
        start(&self.program, &Role::Kafka(role))
    }

    /// Kills a processor and starts another in its place. Returns the killed one's process id.
    pub fn restart_processor(&mut self, place: usize) -> anyhow::Result<u32> {
        let number = self.processors[place].number;
        let id = self.processors[place].process.id();
        self.processors[place].process.kill();
        self.processors[place] = self.processor(number)?;
        Ok(id)
    }

    pub fn stop_producer(&mut self) {
        if let Some(mut producer) = self.producer.take() {
            producer.kill();
        }
    }

    pub fn stop_processors(&mut self) {
        for mut processor in self.processors.drain(..) {
            processor.process.kill();
        }
    }

    /// The workloads whose output the reader has read to the end.
    pub fn read_to_end(&mut self) -> anyhow::Result<&HashSet<String>> {
        if let Some(reader) = &mut self.reader {
            let status = reader.ended().filter(|status| !status.success());
            while let Some(line) = reader.try_next_line() {
                self.read.extend(line.strip_prefix(READ_TO_END).map(str::to_owned));
            }
            if let Some(status) = status {
                bail!("the reader ended by itself ({status}): {}", last_lines(&reader.log()));
            }
        }
        Ok(&self.read)
    }

    /// What the reader has logged last.
    pub fn reader_log(&self) -> String {
        self.reader.as_ref().map(|reader| last_lines(&reader.log())).unwrap_or_default()
    }

    /// Fails if a process has ended by itself: faults kill processes, and nothing else may.
    pub fn check_alive(&mut self) -> anyhow::Result<()> {
        let processors = self.processors.iter_mut().map(|processor| ("a processor", &mut processor.process));
        let named = processors
            .chain(self.producer.iter_mut().map(|process| ("the producer", process)))
            .chain(self.reader.iter_mut().map(|process| ("the reader", process)))
            .chain([("the recorder", &mut self.recorder)]);
        for (name, process) in named {
            if let Some(status) = process.ended() {
                bail!("{name} ended by itself ({status}): {}", last_lines(&process.log()));
            }
        }
        Ok(())
    }
}
