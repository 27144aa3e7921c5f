//! The model of the brokers: transaction coordinator, partition logs, committed offsets.

/// A request whose epoch the brokers do not check in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unchecked {
    EndTxn,
    Produce,
    Offsets,
}

/// The partition of the group's offsets, after those of the records.
pub const OFFSETS: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Request {
    Init,
    Produce { epoch: i16, partition: usize, sequence: i32, transaction: u8, input: u8 },
    Offsets { epoch: i16, transaction: u8, next: u8 },
    End { epoch: i16, commit: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// With the producer's epoch from now on.
    Done(i16),
    /// Come back later; nothing was changed.
    Busy,
    /// Begun, but not done yet; come back later.
    Begun,
    /// The epoch is not the present one.
    Stale,
    /// Not possible in this state.
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    Empty,
    Ongoing,
    Prepared(bool),
    Complete(bool),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// A record, or an offset.
    Data {
        transaction: u8,
        value: u8,
    },
    Marker {
        commit: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Log {
    epoch: i16,
    next_sequence: i32,
    entries: Vec<Entry>,
}

impl Log {
    fn new() -> Self {
        Self { epoch: -1, next_sequence: 0, entries: Vec::new() }
    }

    /// It holds data without a marker behind it.
    fn is_open(&self) -> bool {
        matches!(self.entries.last(), Some(Entry::Data { .. }))
    }

    /// What a read_committed reader sees: (transaction, value).
    pub fn visible(&self) -> Vec<(u8, u8)> {
        let (mut seen, mut open) = (Vec::new(), Vec::new());
        for entry in &self.entries {
            match entry {
                Entry::Data { transaction, value } => open.push((*transaction, *value)),
                Entry::Marker { commit: true } => seen.append(&mut open),
                Entry::Marker { commit: false } => open.clear(),
            }
        }
        seen
    }

    /// Appends data of a producer that the coordinator knows. `sequence` is `None` for offsets.
    fn append(&mut self, epoch: i16, sequence: Option<i32>, data: Entry) -> Answer {
        if epoch > self.epoch {
            self.epoch = epoch;
            self.next_sequence = 0;
        }
        match sequence {
            Some(sequence) if sequence < self.next_sequence => return Answer::Done(epoch),
            Some(sequence) if sequence > self.next_sequence => return Answer::Refused,
            Some(_) => self.next_sequence += 1,
            None => {}
        }
        self.entries.push(data);
        Answer::Done(epoch)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Brokers {
    epoch: i16,
    /// The epoch before the last end of a transaction; a repeated EndTxn carries it.
    last_epoch: i16,
    pub status: Status,
    in_transaction: [bool; 3],
    pub logs: [Log; 3],
}

impl Brokers {
    pub fn new() -> Self {
        Self {
            epoch: -1,
            last_epoch: -1,
            status: Status::Empty,
            in_transaction: [false; 3],
            logs: [Log::new(), Log::new(), Log::new()],
        }
    }

    /// No transaction is open or being ended.
    pub fn is_settled(&self) -> bool {
        !matches!(self.status, Status::Ongoing | Status::Prepared(_))
    }

    /// What the group would read: the next input.
    pub fn committed_offset(&self) -> u8 {
        self.logs[OFFSETS].visible().last().map_or(0, |(_, next)| *next)
    }

    pub fn handle(&mut self, request: Request, unchecked: Option<Unchecked>) -> Answer {
        match request {
            Request::Init => self.init(),
            Request::Produce { epoch, partition, sequence, transaction, input } => {
                let checked = unchecked != Some(Unchecked::Produce);
                let data = Entry::Data { transaction, value: input };
                self.write(partition, epoch, Some(sequence), data, checked)
            }
            Request::Offsets { epoch, transaction, next } => {
                let checked = unchecked != Some(Unchecked::Offsets);
                self.write(OFFSETS, epoch, None, Entry::Data { transaction, value: next }, checked)
            }
            Request::End { epoch, commit } => self.end(epoch, commit, unchecked != Some(Unchecked::EndTxn)),
        }
    }

    fn init(&mut self) -> Answer {
        match self.status {
            Status::Prepared(_) => Answer::Busy,
            Status::Ongoing => {
                self.expire();
                Answer::Begun
            }
            Status::Empty | Status::Complete(_) => {
                self.epoch += 1;
                self.last_epoch = -1;
                self.status = Status::Empty;
                Answer::Done(self.epoch)
            }
        }
    }

    /// The coordinator aborts the transaction under way, and its producer is fenced.
    pub fn expire(&mut self) {
        self.epoch += 1;
        self.last_epoch = -1;
        self.status = Status::Prepared(false);
    }

    fn write(
        &mut self,
        partition: usize,
        epoch: i16,
        sequence: Option<i32>,
        data: Entry,
        checked: bool,
    ) -> Answer {
        let log = &self.logs[partition];
        if checked && epoch < log.epoch {
            return Answer::Stale;
        }
        // Data of a new transaction: the partition asks the coordinator, which adds it to the transaction.
        if !(log.is_open() && epoch == log.epoch) {
            if checked && epoch != self.epoch {
                return Answer::Stale;
            }
            if let Status::Prepared(_) = self.status {
                return Answer::Busy;
            }
            self.status = Status::Ongoing;
            self.in_transaction[partition] = true;
        }
        self.logs[partition].append(epoch, sequence, data)
    }

    fn end(&mut self, epoch: i16, commit: bool, checked: bool) -> Answer {
        let current = epoch == self.epoch || !checked;
        let repeated = epoch == self.last_epoch;
        match self.status {
            Status::Ongoing if current => {
                self.last_epoch = self.epoch;
                self.epoch += 1;
                self.status = Status::Prepared(commit);
                Answer::Done(self.epoch)
            }
            Status::Prepared(prepared) if repeated && prepared == commit => Answer::Busy,
            Status::Complete(complete) if repeated && complete == commit => Answer::Done(self.epoch),
            Status::Prepared(_) | Status::Complete(_) if repeated => Answer::Refused,
            // Nothing of the transaction has arrived: its epoch ends all the same.
            Status::Empty | Status::Complete(_) if epoch == self.epoch && !commit => {
                self.last_epoch = self.epoch;
                self.epoch += 1;
                self.status = Status::Complete(false);
                Answer::Done(self.epoch)
            }
            Status::Empty | Status::Complete(_) if epoch == self.epoch => Answer::Refused,
            _ => Answer::Stale,
        }
    }

    /// Partitions that wait for the marker of the transaction that is being ended.
    pub fn unmarked(&self) -> Vec<usize> {
        match self.status {
            Status::Prepared(_) => (0..3).filter(|partition| self.in_transaction[*partition]).collect(),
            _ => Vec::new(),
        }
    }

    /// Writes a partition's marker. It carries the new epoch: older data is refused from here on.
    pub fn mark(&mut self, partition: usize) {
        let Status::Prepared(commit) = self.status else { return };
        let log = &mut self.logs[partition];
        log.entries.push(Entry::Marker { commit });
        log.epoch = self.epoch;
        log.next_sequence = 0;
        self.in_transaction[partition] = false;
    }

    /// All markers are written.
    pub fn complete(&mut self) {
        if let Status::Prepared(commit) = self.status
            && self.unmarked().is_empty()
        {
            self.status = Status::Complete(commit);
        }
    }
}
