// examples/outbox/order.js: an order and its event in one transaction of `pg`, on the database DATABASE_URL.
import assert from "node:assert/strict";
import { test } from "node:test";

import pg from "pg";

import { place } from "./order.js";

const url = process.env.DATABASE_URL;
assert.ok(url, "DATABASE_URL is missing; `cargo xtask test clients` sets it");

test("an order and its event are there, or neither", { timeout: 120_000 }, async () => {
  const db = new pg.Client(url);
  await db.connect();
  try {
    await db.query("CREATE TABLE orders (id bigint PRIMARY KEY, cents bigint)");
    const id = await place(db, 7, 1999);
    await assert.rejects(place(db, 7, 1999), /duplicate key/);
    const all = "SELECT * FROM hapax.outbox_read(ARRAY[hapax.outbox_bucket('order-7')], '{0}', '{9}', 10, 1000000)";
    const { rows } = await db.query(all);
    assert.deepEqual(rows.map((row) => [row.id, row.topic, row.key]), [[id, "orders.placed", "order-7"]]);
    assert.deepEqual(JSON.parse(rows[0].body.toString()), { order: 7, cents: 1999 });
  } finally {
    await db.end();
  }
});
