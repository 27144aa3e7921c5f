// Charges an order once, from Node: `hapax.enter` and `hapax.record` inside of your own transaction, with `pg`.
//
//   npm install pg
//   hapax migrate --store postgres://localhost/shop
//   node charge.js postgres://localhost/shop order-7 1999
import { createHash } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";

import pg from "pg";

const SCOPE = "shop/charge";
const TRIES_MAX = 60;

/** Another transaction works on the same key. */
export class InProgress extends Error {}

/** The outcome of the charge, whether it was made now or before. Throws InProgress: try again. */
export async function charge(db, order, cents) {
  const fingerprint = createHash("sha256").update(JSON.stringify([order, cents])).digest("hex");
  await db.query("BEGIN");
  try {
    const outcome = await chargeWithin(db, order, cents, fingerprint);
    await db.query("COMMIT");
    return outcome;
  } catch (error) {
    await db.query("ROLLBACK").catch(() => {}); // The connection may be the cause.
    throw error;
  }
}

async function chargeWithin(db, order, cents, fingerprint) {
  const enter = "SELECT state, outcome, failed FROM hapax.enter($1, $2, $3)";
  const { state, outcome, failed } = (await db.query(enter, [SCOPE, order, fingerprint])).rows[0];
  switch (state) {
    case "fresh": {
      await db.query("INSERT INTO charges (order_id, cents) VALUES ($1, $2)", [order, cents]);
      const made = { charged: cents };
      await db.query("SELECT hapax.record($1, $2, $3)", [SCOPE, order, JSON.stringify(made)]);
      return made;
    }
    case "completed":
      if (failed) throw new Error(`${order} has failed: ${outcome}`);
      return outcome === null ? null : JSON.parse(outcome);
    case "in-progress":
      throw new InProgress(order);
    case "mismatch":
      throw new Error(`${order} was used for another request`);
    default:
      throw new Error(`${order} is in doubt: hapax ledger resolve ${SCOPE} ${order}`);
  }
}

/** Tries again while another transaction works on the order. `hapax.enter` has waited for a second each time. */
export async function chargePatiently(db, order, cents) {
  for (let tries = 0; tries < TRIES_MAX; tries += 1) {
    try {
      return await charge(db, order, cents);
    } catch (error) {
      if (!(error instanceof InProgress)) throw error;
      await sleep(50);
    }
  }
  throw new Error(`${order} is still in progress`);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [url, order, cents] = process.argv.slice(2);
  const db = new pg.Client(url);
  await db.connect();
  await db.query("CREATE TABLE IF NOT EXISTS charges (order_id text, cents bigint)");
  console.log(await chargePatiently(db, order, Number(cents)));
  await db.end();
}
