// Writes an order and its event in one transaction, with node's `pg`.
//
//   npm install pg
//   node order.js postgres://localhost/shop 7 1999
import { pathToFileURL } from "node:url";

import pg from "pg";

/** Places an order; resolves to the id of its event. Both are there after the commit, or neither. */
export async function place(db, order, cents) {
  await db.query("BEGIN");
  try {
    await db.query("INSERT INTO orders (id, cents) VALUES ($1, $2)", [order, cents]);
    const enqueue = "SELECT hapax.enqueue('orders.placed', $1, $2::text) AS id";
    const { rows } = await db.query(enqueue, [`order-${order}`, JSON.stringify({ order, cents })]);
    await db.query("COMMIT");
    return rows[0].id;
  } catch (error) {
    await db.query("ROLLBACK");
    throw error;
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const [url, order, cents] = process.argv.slice(2);
  const db = new pg.Client(url);
  await db.connect();
  await db.query("CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, cents bigint)");
  console.log(await place(db, Number(order), Number(cents)));
  await db.end();
}
