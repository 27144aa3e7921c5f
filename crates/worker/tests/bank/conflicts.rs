// Transactions that conflict with one another: the database ends one of them, and its run is started again.

/// Two runs that lock two accounts in opposite orders, the first time.
async fn deadlock(server: &'static PostgresServer) {
    let bank = Bank::open(server).await;
    let (queue, _) = create(&bank.store, Kind::Standard).await;
    let there = Transfer { number: 1, from: "a".into(), to: "b".into(), cents: 5 };
    let return_transfer = Transfer { number: 2, from: "b".into(), to: "a".into(), cents: 7 };
    let transfers = vec![there, return_transfer];
    for transfer in &transfers {
        bank.store.send(&queue, vec![message(transfer, Kind::Standard, 0)]).await.unwrap().remove(0).unwrap();
    }
    let inbox = PostgresInbox::new(&bank.store);
    let (both, runs) = (Arc::new(tokio::sync::Barrier::new(2)), Arc::new(AtomicU32::new(0)));
    let counted = runs.clone();
    let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone()).concurrency(2);
    let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
        let (both, runs) = (both.clone(), counted.clone());
        Box::pin(async move {
            let take = "UPDATE accounts SET cents = cents - $2 WHERE id = $1";
            sqlx::query(take).bind(&transfer.from).bind(transfer.cents).execute(&mut *db).await?;
            if runs.fetch_add(1, Ordering::SeqCst) < 2 {
                both.wait().await;
            }
            let give = "UPDATE accounts SET cents = cents + $2 WHERE id = $1";
            sqlx::query(give).bind(&transfer.to).bind(transfer.cents).execute(&mut *db).await?;
            transfer.note(db, &cx).await
        })
    });
    let report = run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
    let counts = &report.counts;
    // It is not delivered again for that.
    assert_eq!((counts.done, counts.retried, counts.delivered), (2, 0, 2), "{report:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 3, "one of the two ran again");
    bank.check(&transfers).await;
}

/// Two handlers that each read both accounts and take from one of them if both together allow it. At READ COMMITTED and
/// REPEATABLE READ both take; at SERIALIZABLE one of them is started again, and finds too little.
async fn write_skew(server: &'static PostgresServer) {
    for (isolation, taken) in
        [(Isolation::ReadCommitted, 2), (Isolation::RepeatableRead, 2), (Isolation::Serializable, 1)]
    {
        let bank = Bank::open(server).await;
        server.sql(&bank.database, "UPDATE accounts SET cents = 50 WHERE id IN ('a', 'b')").unwrap();
        let (queue, _) = create(&bank.store, Kind::Standard).await;
        for (number, from) in [(1, "a"), (2, "b")] {
            let transfer = Transfer { number, from: from.into(), to: "c".into(), cents: 100 };
            let sent = bank.store.send(&queue, vec![message(&transfer, Kind::Standard, 0)]).await.unwrap();
            assert!(sent[0].is_ok());
        }
        let options = InboxOptions { isolation, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&bank.store, options).unwrap();
        let (both, runs) = (Arc::new(tokio::sync::Barrier::new(2)), Arc::new(AtomicU32::new(0)));
        let counted = runs.clone();
        let builder = Worker::over(Arc::new(bank.store.clone()), queue.clone()).concurrency(2);
        let worker = builder.async_transactional_handler(&inbox, move |transfer: Transfer, db, cx: Cx| {
            let (both, runs) = (both.clone(), counted.clone());
            Box::pin(async move {
                let sum = "SELECT sum(cents)::bigint FROM accounts WHERE id IN ('a', 'b')";
                let sum: i64 = sqlx::query_scalar(sum).fetch_one(&mut *db).await?;
                if runs.fetch_add(1, Ordering::SeqCst) < 2 {
                    both.wait().await;
                }
                if sum < transfer.cents {
                    return Ok::<_, sqlx::Error>(false);
                }
                let take = "UPDATE accounts SET cents = cents - $2 WHERE id = $1";
                sqlx::query(take).bind(&transfer.from).bind(transfer.cents).execute(&mut *db).await?;
                transfer.note(db, &cx).await?;
                Ok(true)
            })
        });
        let report = run_until(worker.build().await.unwrap(), async || bank.is_empty(&queue).await).await;
        let counts = &report.counts;
        // What is started again is not delivered again.
        assert_eq!((counts.done, counts.retried, counts.delivered), (2, 0, 2), "{isolation:?}: {report:?}");
        assert_eq!(bank.numbers().await.len(), taken, "{isolation:?}");
        assert!(runs.load(Ordering::SeqCst) as usize >= 4 - taken, "{isolation:?}: one ran again");
    }
}
