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
INSERT INTO "body" VALUES(2,1,NULL,NULL,X'7B226E223A317D',2191551573);
INSERT INTO "body" VALUES(3,1,NULL,NULL,X'7B226E223A327D',2858192746);
INSERT INTO "body" VALUES(4,1,NULL,NULL,X'7B226E223A337D',2633606330);
INSERT INTO "body" VALUES(5,2,'d1',NULL,X'6669727374',4041728999);
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
INSERT INTO "dead" VALUES(2,'jobs',2,'rejected','bad',1,1794788690846,1794788690854,202991954);
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    seq INTEGER NOT NULL,
    ord INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
INSERT INTO "dedup" VALUES(2,X'4AFE9B9CBDE1F363B22E9991A4AF13D4',5,5,1794788690842,2578126164);
CREATE TABLE epoch (first_seq INTEGER PRIMARY KEY, salt INTEGER NOT NULL, crc INTEGER NOT NULL);
INSERT INTO "epoch" VALUES(1,-2284528129998232577,3945208184);
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
INSERT INTO "history" VALUES(2,1,1794788690854,'rejected','bad',NULL,57213505);
INSERT INTO "history" VALUES(3,1,1794788690854,'in-doubt','doubt',NULL,423704447);
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
INSERT INTO "message" VALUES(2,0,6,0,1794788690854,0,1794788690846377,1794788690838,1794788690838,0,0,7,0,3,NULL,4024790934);
INSERT INTO "message" VALUES(3,1,3,3,1794831890846,0,1794788690846378,1794788690838,1794788690838,1794788690846,1794788690846,7,0,81,NULL,3799257989);
INSERT INTO "message" VALUES(4,1,4,0,1794788690838,0,0,1794788690838,1794788690838,0,0,7,0,0,NULL,205526227);
INSERT INTO "message" VALUES(5,2,5,0,1794788690842,0,0,1794788690842,1794788690842,0,0,5,0,0,'g',543309170);
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
INSERT INTO "queue" VALUES(0,'jobs-dead','{"kind":"standard","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":null,"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794788690828,1794788690828,0,0,527381252);
INSERT INTO "queue" VALUES(1,'jobs','{"kind":"standard","tier":"effectively-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":{"queue":"jobs-dead","max_attempts":3},"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794788690829,1794788690829,0,0,3558123908);
INSERT INTO "queue" VALUES(2,'ord.fifo','{"kind":"fifo","tier":"at-least-once","lease_ms":30000,"retention_ms":345600000,"delay_ms":0,"wait_ms":0,"message_bytes_max":1048576,"retry":{"base_ms":0,"cap_ms":0,"jitter":"full"},"dead_letter":null,"redrive_allow":"all","on_dead":"continue","dedup":{"window_ms":300000,"content_based":false,"scope":"queue"},"quota":{"messages_max":null,"bytes_max":null},"key_pointer":null,"tags":{},"extra":{}}',1794788690834,1794788690834,0,0,4265596457);
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
INSERT INTO "store" VALUES(1,X'D2D72375C7BC260D663114DD0336B4C4AAA3E1CC8631961963DBD0A03C1C775C',1794788690854,1794788700846378,7,4,NULL,2827791497);
CREATE INDEX history_seq ON history (seq);
CREATE INDEX dedup_age ON dedup (queue, sent_ms);
COMMIT;