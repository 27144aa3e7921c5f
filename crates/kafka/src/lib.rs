//! Exactly-once inside Kafka, and from Kafka to a database.
