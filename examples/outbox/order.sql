-- Writes an order and its event in one transaction: psql postgres://localhost/shop -v order=7 -v cents=1999 -f order.sql
CREATE TABLE IF NOT EXISTS orders (id bigint PRIMARY KEY, cents bigint);
BEGIN;
INSERT INTO orders VALUES (:order, :cents);
SELECT hapax.enqueue('orders.placed', 'order-' || :order, jsonb_build_object('order', :order, 'cents', :cents));
COMMIT;
