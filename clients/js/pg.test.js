// examples/transactional/charge.js: `hapax.enter` and `hapax.record` in transactions of `pg`, on the database DATABASE_URL.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { randomUUID } from "node:crypto";
import { test } from "node:test";
import { promisify } from "node:util";

import pg from "pg";

import { InProgress, charge, chargePatiently } from "./charge.js";

const url = process.env.DATABASE_URL;
assert.ok(url, "DATABASE_URL is missing; `cargo xtask test clients` sets it");
const patience = { timeout: 120_000 };

/** Runs a test with a key of its own and connections that are closed after it. */
function withDatabase(name, body) {
  test(name, patience, async () => {
    const opened = [];
    const connect = async () => {
      const db = new pg.Client(url);
      await db.connect();
      opened.push(db);
      return db;
    };
    try {
      await body({ db: await connect(), connect, order: randomUUID() });
    } finally {
      await Promise.all(opened.map((db) => db.end()));
    }
  });
}

async function charges(db, order) {
  const { rows } = await db.query("SELECT count(*)::int AS n FROM charges WHERE order_id = $1", [order]);
  return rows[0].n;
}

const enter = "SELECT state FROM hapax.enter('shop/charge', $1, NULL, 100)";

withDatabase("a fresh key has its effect, and a duplicate gets its outcome", async ({ db, connect, order }) => {
  assert.deepEqual(await charge(db, order, 1999), { charged: 1999 });
  assert.deepEqual(await charge(await connect(), order, 1999), { charged: 1999 });
  assert.equal(await charges(db, order), 1);
});

withDatabase("a rollback leaves neither effect nor entry", async ({ db, order }) => {
  await db.query("BEGIN");
  assert.equal((await db.query(enter, [order])).rows[0].state, "fresh");
  await db.query("INSERT INTO charges VALUES ($1, 1)", [order]);
  await db.query("SELECT hapax.record('shop/charge', $1, '1')", [order]);
  await db.query("ROLLBACK");
  assert.equal(await charges(db, order), 0);
  await charge(db, order, 1);
  assert.equal(await charges(db, order), 1);
});

withDatabase("a key of an open transaction is in progress for others", async ({ db, connect, order }) => {
  const other = await connect();
  await db.query("BEGIN");
  assert.equal((await db.query(enter, [order])).rows[0].state, "fresh");
  await assert.rejects(charge(other, order, 1), InProgress);
  await db.query("ROLLBACK");
  assert.deepEqual(await charge(other, order, 1), { charged: 1 });
  assert.equal(await charges(db, order), 1);
});

withDatabase("another request with the same key is refused", async ({ db, order }) => {
  await charge(db, order, 1);
  await assert.rejects(charge(db, order, 2), /another request/);
  assert.equal(await charges(db, order), 1);
});

withDatabase("a commit without an outcome is refused", async ({ db, order }) => {
  await db.query("BEGIN");
  await db.query(enter, [order]);
  await db.query("INSERT INTO charges VALUES ($1, 1)", [order]);
  await assert.rejects(db.query("COMMIT"), /recorded no outcome/);
  assert.equal(await charges(db, order), 0);
});

withDatabase("fifty concurrent duplicates have one effect", async ({ db, connect, order }) => {
  const connections = await Promise.all(Array.from({ length: 50 }, connect));
  const outcomes = await Promise.all(connections.map((each) => chargePatiently(each, order, 5)));
  assert.deepEqual(outcomes, Array(50).fill({ charged: 5 }));
  assert.equal(await charges(db, order), 1);
});

withDatabase("the example runs as it is", async ({ db, order }) => {
  for (let times = 0; times < 2; times += 1) {
    const { stdout } = await promisify(execFile)(process.execPath, ["charge.js", url, order, "7"], { timeout: 60_000 });
    assert.equal(stdout.trim(), "{ charged: 7 }");
  }
  assert.equal(await charges(db, order), 1);
});
