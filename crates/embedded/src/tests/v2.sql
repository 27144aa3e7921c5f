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
INSERT INTO "body" VALUES(1,1,NULL,NULL,X'7B226F72646572223A312C226174223A2264696573227D',1131429322);
INSERT INTO "body" VALUES(3,1,NULL,NULL,X'7B226F72646572223A322C226174223A227265616479227D',395210523);
INSERT INTO "body" VALUES(4,1,NULL,'{"hapax-idempotency-key":{"data_type":"String","value":{"text":"stated-3"}}}',X'7B226F72646572223A332C226174223A22617474726962757465227D',1824261648);
INSERT INTO "body" VALUES(5,1,NULL,NULL,X'6E6F74206A736F6E',129248246);
INSERT INTO "body" VALUES(6,1,'d4',NULL,X'7B226F72646572223A342C226174223A226465647570227D',1421733148);
INSERT INTO "body" VALUES(7,2,NULL,NULL,X'7B226F72646572223A397D',1228941327);
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
INSERT INTO "dead" VALUES(1,'pay',1,'rejected','bad',1,1794808899585,1794808900271,434607601);
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    seq INTEGER NOT NULL,
    ord INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
INSERT INTO "dedup" VALUES(1,X'1043774B3575CDD5A013526986EF69C1',6,6,1794808900364,1792793273);
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
INSERT INTO "history" VALUES(1,1,1794808900271,'rejected','bad',NULL,3236114587);
CREATE TABLE keyed (seq INTEGER NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (seq, entry)) WITHOUT ROWID;
INSERT INTO "keyed" VALUES(6,X'0BF28D028680BD6156C7C06AD2174F74');
INSERT INTO "keyed" VALUES(1,X'15F617F94807727BED2227BE53B641DC');
INSERT INTO "keyed" VALUES(4,X'C9C5B20FB1F753ECD96A61339355F197');
INSERT INTO "keyed" VALUES(5,X'DCE5E031274EC366B14CD1AEC869E141');
INSERT INTO "keyed" VALUES(3,X'DFD4BE90474EEFF601867A507DA67E2F');
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
INSERT INTO "message" VALUES(1,0,2,0,1794808900271,0,1794808899585661,1794808899489,1794808899489,0,0,23,0,7,NULL,3861953028);
INSERT INTO "message" VALUES(3,1,3,0,1794808900319,0,0,1794808900319,1794808900319,0,0,24,0,4,NULL,350831746);
INSERT INTO "message" VALUES(4,1,4,0,1794808900343,0,0,1794808900343,1794808900343,0,0,63,0,4,NULL,2427098458);
INSERT INTO "message" VALUES(5,1,5,0,1794808900353,0,0,1794808900353,1794808900353,0,0,8,0,4,NULL,1420753794);
INSERT INTO "message" VALUES(6,1,6,0,1794808900364,0,0,1794808900364,1794808900364,0,0,24,0,4,NULL,1403935150);
INSERT INTO "message" VALUES(7,2,7,0,1794808900374,0,0,1794808900374,1794808900374,0,0,11,0,0,NULL,2095007200);
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
INSERT INTO "queue" VALUES(0,'pay-dead','{"kind":"standard","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":null,"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794808899423,1794808899423,0,0,2271830369);
INSERT INTO "queue" VALUES(1,'pay','{"kind":"standard","tier":"effectively-once","lease_ms":30000,"retention_ms":1209600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":{"queue":"pay-dead","max_attempts":3},"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":"/order","tags":{},"extra":{}}',1794808899463,1794808899463,0,0,2706785327);
INSERT INTO "queue" VALUES(2,'plain','{"kind":"standard","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":null,"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794808899477,1794808899477,0,0,4033414970);
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
INSERT INTO "store" VALUES(1,X'8C9FDE85C1138C62C2D809C0E261DD6A66681A4244046438B2D76B1E91B7EA9C',1794808900374,1794808909585661,8,6,NULL,3623570570);
CREATE INDEX history_seq ON history (seq);
CREATE INDEX dedup_age ON dedup (queue, sent_ms);
CREATE UNIQUE INDEX ledger_id ON ledger (id);
CREATE INDEX ledger_prune ON ledger (prune_ms);
CREATE INDEX keyed_entry ON keyed (entry);
COMMIT;
