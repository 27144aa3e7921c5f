BEGIN TRANSACTION;
CREATE TABLE audit (at_ms INTEGER NOT NULL, by TEXT NOT NULL, what TEXT NOT NULL);
CREATE TABLE body (
    seq INTEGER PRIMARY KEY,
    origin INTEGER NOT NULL,           -- the queue it was sent to
    dedup TEXT,
    attributes TEXT,                   -- JSON
    body BLOB NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE dead (
    seq INTEGER PRIMARY KEY,
    source TEXT NOT NULL,
    source_ord INTEGER NOT NULL,
    cause TEXT NOT NULL,
    error TEXT,
    attempts INTEGER NOT NULL,
    first_ms INTEGER NOT NULL,
    died_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    seq INTEGER NOT NULL,
    ord INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
CREATE TABLE epoch (first_seq INTEGER PRIMARY KEY, salt INTEGER NOT NULL, crc INTEGER NOT NULL);
INSERT INTO "epoch" VALUES(1,3325005888644511366,1527062918);
CREATE TABLE halted (
    queue INTEGER NOT NULL,
    grp TEXT NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, grp)
) WITHOUT ROWID;
CREATE TABLE history (
    seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    cause TEXT NOT NULL,
    error TEXT,
    consumer TEXT,
    crc INTEGER NOT NULL
);
CREATE TABLE keyed (seq INTEGER NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (seq, entry)) WITHOUT ROWID;
CREATE TABLE ledger (
    fence INTEGER PRIMARY KEY,
    id BLOB NOT NULL,                  -- hash of scope and key
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    state INTEGER NOT NULL,            -- 0 held until at_ms, 1 in doubt since at_ms, 2 completed at at_ms, 3 failed then
    owner TEXT NOT NULL,
    fingerprint TEXT,
    lease_ms INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL,
    on_doubt INTEGER NOT NULL,         -- 0 retry, 1 park
    claimed_ms INTEGER NOT NULL,
    takeovers INTEGER NOT NULL,
    omitted INTEGER,                   -- size of an outcome that was too large to keep
    outcome_crc INTEGER NOT NULL,
    prune_ms INTEGER,                  -- when to look whether it can go; NULL while it is open
    crc INTEGER NOT NULL,              -- over all other columns but the outcome, which has its own
    outcome TEXT
);
CREATE TABLE ledger_rows (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    rows INTEGER NOT NULL,             -- how many rows `ledger` has
    sum BLOB NOT NULL,                 -- exclusive or of their ids: tells when the index has lost one
    crc INTEGER NOT NULL
);
CREATE TABLE message (
    seq INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    ord INTEGER NOT NULL,              -- place in the queue
    state INTEGER NOT NULL,            -- 0 ready, 1 delayed until due_ms, 2 in flight until due_ms, 3 parked
    due_ms INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    base_ms INTEGER NOT NULL,          -- retention counts from here
    first_ms INTEGER NOT NULL,
    received_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    flags INTEGER NOT NULL,
    grp TEXT,
    crc INTEGER NOT NULL
);
CREATE TABLE queue (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    config TEXT NOT NULL,              -- JSON
    created_ms INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    purged_before INTEGER NOT NULL,
    deleted INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE redrive (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,                -- JSON
    upto INTEGER NOT NULL,
    cursor INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    secret BLOB NOT NULL,              -- seals receipts
    clock_ms INTEGER NOT NULL,
    fence_floor INTEGER NOT NULL,
    next_seq INTEGER NOT NULL,
    message_rows INTEGER NOT NULL,     -- how many rows `message` has
    paused TEXT,                       -- why deliveries are paused
    crc INTEGER NOT NULL
);
CREATE INDEX history_seq ON history (seq);
CREATE INDEX dedup_age ON dedup (queue, sent_ms);
CREATE UNIQUE INDEX ledger_id ON ledger (id);
CREATE INDEX ledger_prune ON ledger (prune_ms);
CREATE INDEX keyed_entry ON keyed (entry);
INSERT INTO "queue" VALUES(0,'ord-dead.fifo','{"kind":"fifo","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":null,"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794808900000,1794808900000,0,0,1355267011);
INSERT INTO "queue" VALUES(1,'ord.fifo','{"kind":"fifo","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":{"queue":"ord-dead.fifo","max_attempts":1},"redrive_allow":"all","on_dead":"halt-group","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794808900000,1794808900000,0,0,624467379);
INSERT INTO "message" VALUES(1,0,7,0,1794808900000,0,1794808900000001,1794808900000,1794808900000,0,0,6,0,2,'a',3472415032);
INSERT INTO "body" VALUES(1,1,'1',NULL,X'612064696573',2673834260);
INSERT INTO "message" VALUES(2,1,2,0,1794808900000,0,0,1794808900000,1794808900000,0,0,7,0,0,'a',3920720813);
INSERT INTO "body" VALUES(2,1,'2',NULL,X'61207761697473',1551164549);
INSERT INTO "message" VALUES(3,1,3,0,1794808900000,0,0,1794808900000,1794808900000,0,0,7,0,0,'b',3937779050);
INSERT INTO "body" VALUES(3,1,'3',NULL,X'62207761697473',244918355);
INSERT INTO "message" VALUES(4,1,4,0,1794808900000,0,0,1794808900000,1794808900000,0,0,9,0,0,'c',395727293);
INSERT INTO "body" VALUES(4,1,'4',NULL,X'632069732066726565',1738804574);
INSERT INTO "message" VALUES(5,0,8,0,1794808900000,0,1794808900000002,1794808900000,1794808900000,0,0,10,0,2,'a',2720906097);
INSERT INTO "body" VALUES(5,1,'5',NULL,X'61206469657320746F6F',343446439);
INSERT INTO "dead" VALUES(1,'ord.fifo',1,'rejected','bad',1,1794808900000,1794808900000,3192083679);
INSERT INTO "dead" VALUES(5,'ord.fifo',5,'rejected','bad',1,1794808900000,1794808900000,3760526801);
INSERT INTO "halted" VALUES(1,'a',1669824371);
INSERT INTO "halted" VALUES(1,'b',4203622089);
INSERT INTO "store" VALUES(1,X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F',1794808900000,1794808910000000,9,5,NULL,4118459742);
COMMIT;
