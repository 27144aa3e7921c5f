BEGIN TRANSACTION;
CREATE TABLE audit (at_ms INTEGER NOT NULL, by TEXT NOT NULL, what TEXT NOT NULL);
CREATE TABLE body (
    seq INTEGER PRIMARY KEY,
    origin INTEGER NOT NULL,           -- the queue it was sent to
    dedup TEXT,
    attributes TEXT,                   -- JSON
    body BLOB NOT NULL,
    crc INTEGER NOT NULL
, key_source INTEGER, key TEXT);
INSERT INTO "body" VALUES(3,1,'1',NULL,X'64696573',3777491163,NULL,NULL);
INSERT INTO "body" VALUES(4,1,'2',NULL,X'7761697473',2505255590,NULL,NULL);
INSERT INTO "body" VALUES(5,1,'3',NULL,X'68656C64',55209113,NULL,NULL);
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
, deliveries INTEGER NOT NULL DEFAULT 0);
INSERT INTO "dead" VALUES(3,'ord.fifo',3,'rejected','bad',1,1794820408471,1794820409079,1290377660,1);
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    seq INTEGER NOT NULL,
    ord INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
INSERT INTO "dedup" VALUES(1,X'0370C66149D8F747C663F3562D2865DE',5,5,1794820408419,4279392761);
INSERT INTO "dedup" VALUES(1,X'7798F5B3EB9987E95F4A99BC06E24CFA',4,4,1794820408419,1990740209);
INSERT INTO "dedup" VALUES(1,X'C3423493C1E5782A17AA077AD9DB84DC',3,3,1794820408419,3213541751);
CREATE TABLE deleted_queue (name TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE document (
    name TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    value TEXT NOT NULL,               -- JSON
    crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE epoch (first_seq INTEGER PRIMARY KEY, salt INTEGER NOT NULL, crc INTEGER NOT NULL);
INSERT INTO "epoch" VALUES(1,5172102250320876675,1541419486);
CREATE TABLE halted (
    queue INTEGER NOT NULL,
    grp TEXT NOT NULL,
    seq INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, grp, seq)
) WITHOUT ROWID;
INSERT INTO "halted" VALUES(1,'a',3,242599878);
CREATE TABLE history (
    seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    cause TEXT NOT NULL,
    error TEXT,
    consumer TEXT,
    crc INTEGER NOT NULL
, deliveries INTEGER NOT NULL DEFAULT 0);
INSERT INTO "history" VALUES(3,1,1794820409079,'rejected','bad',NULL,3888318617,1);
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
, deliveries INTEGER NOT NULL DEFAULT 0);
INSERT INTO "message" VALUES(3,0,6,0,1794820409079,0,1794820408471123,1794820408419,1794820409079,0,0,4,0,3,'a',3155942616,1);
INSERT INTO "message" VALUES(4,1,4,0,1794820408419,0,0,1794820408419,1794820408419,0,0,5,0,0,'a',1853888037,0);
INSERT INTO "message" VALUES(5,1,5,2,1794824009128,1,1794820409128728,1794820408419,1794820408419,1794820409128,1794820409128,4,0,0,'b',992722824,1);
CREATE TABLE queue (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    config TEXT NOT NULL,              -- JSON
    created_ms INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    purged_before INTEGER NOT NULL,
    deleted INTEGER NOT NULL,
    crc INTEGER NOT NULL
, revision INTEGER NOT NULL DEFAULT 0, purged_ms INTEGER NOT NULL DEFAULT 0, paused TEXT);
INSERT INTO "queue" VALUES(0,'ord-dead.fifo','{"kind":"fifo","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":1000,"cap_ms":10000,"jitter":"full","max_attempts":20},"dead_letter":null,"redrive_allow":"all","on_dead":"halt-group","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794820408322,1794820408322,0,0,1226168834,1,0,NULL);
INSERT INTO "queue" VALUES(1,'ord.fifo','{"kind":"fifo","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full","max_attempts":1},"dead_letter":{"queue":"ord-dead.fifo"},"redrive_allow":"all","on_dead":"halt-group","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794820408377,1794820408377,0,0,3942084755,2,0,NULL);
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
INSERT INTO "store" VALUES(1,X'C2299929F32BB9F5494F0F07A0E8BAEC9A5756601459625F60643E9A6020D140',1794820409128,1794820418471123,7,3,NULL,3620855394);
CREATE INDEX history_seq ON history (seq);
CREATE INDEX dedup_age ON dedup (queue, sent_ms);
CREATE UNIQUE INDEX ledger_id ON ledger (id);
CREATE INDEX ledger_prune ON ledger (prune_ms);
CREATE INDEX keyed_entry ON keyed (entry);
COMMIT;
