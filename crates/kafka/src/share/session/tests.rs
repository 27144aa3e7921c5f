use bytes::Bytes;
use kafka_protocol::records::Compression;

use super::*;
use crate::batches::tests::{encoded, zeros};
use crate::share::ShareOptions;
use crate::share::settings::Settings;
use crate::share::state::Shared;
use crate::share::undecoded::tests::part;
use crate::wire::Connect;

/// A broker may claim more than a response can have: many ranges, and long ones.
#[test]
fn the_locked_offsets_of_a_response_are_bounded() {
    let range = |first: i64, last: i64| {
        let range = AcquiredRecords::default().with_first_offset(first).with_last_offset(last);
        range.with_delivery_count(2)
    };
    let mut left = 10;
    let counts = acquired(&[range(0, 3), range(5, 5), range(7, 6)], &mut left);
    assert_eq!((counts.len(), counts.get(&5), left), (5, Some(&2), 5));
    let many = vec![range(10, i64::MAX); 1_000];
    assert_eq!((acquired(&many, &mut left).len(), left), (5, 0));
    assert_eq!(acquired(&many, &mut left).len(), 0, "the next partition of the response");
}

#[test]
fn runs_of_the_same_end_are_one_batch() {
    let acks = vec![
        (7, Kind::Accept),
        (5, Kind::Accept),
        (6, Kind::Accept),
        (8, Kind::Release),
        (10, Kind::Release),
    ];
    let found: Vec<_> = batches(acks)
        .into_iter()
        .map(|batch| (batch.first_offset, batch.last_offset, batch.acknowledge_types))
        .collect();
    assert_eq!(found, [(5, 7, vec![1]), (8, 8, vec![2]), (10, 10, vec![2])]);
}

fn session() -> Session {
    session_and_handle().0
}

fn session_and_handle() -> (Session, SessionHandle) {
    let connect = Connect::plain(["localhost:1"]);
    let settings = Settings { lock_ms: 60_000, limit: 5, retention_ms: 1, dead_retention_ms: 1 };
    let shared = Arc::new(Shared::new(settings.lock_ms));
    let options = ShareOptions::new(connect, "g", "t", "t-dead");
    let engine = Engine::new(options, settings, shared);
    let (mut session, handle) = Session::new(engine, 1, "localhost:1".into());
    session.id = Some(SessionId { node: 1, generation: 7 });
    (session, handle)
}

async fn delivered(session: &Session) -> Vec<u64> {
    let found = session.engine.shared.next(10, Duration::ZERO).await;
    found.unwrap().iter().map(|delivery| delivery.sequence).collect()
}

/// Records that take 40 MiB each come one after the other, as they are wanted, and none is given back.
#[tokio::test]
async fn a_response_is_decoded_as_its_records_are_wanted() {
    let mut session = session();
    let large = |offset| encoded(offset, &[zeros(40)], Compression::Gzip);
    session.undecoded.push_back(part(&[large(0), large(2), large(3)], [0, 1, 2, 3]));
    for offset in [0, 2, 3] {
        session.decode();
        assert_eq!(delivered(&session).await, [offset]);
    }
    assert!(session.undecoded.is_empty());
    let gaps: Vec<_> = session.waiting.iter().map(|ack| (ack.place.offset, ack.kind)).collect();
    assert_eq!(gaps, [(1, Kind::Gap)], "nothing is released");
    assert_eq!(session.fetch_max, usize::MAX);
}

#[tokio::test]
async fn what_no_receive_came_for_is_released_and_less_is_asked_for() {
    let mut session = session();
    let large = |offset| encoded(offset, &[zeros(20)], Compression::Gzip);
    session.undecoded.push_back(part(&(0..5).map(large).collect::<Vec<_>>(), 0..5));
    session.decode();
    assert_eq!(delivered(&session).await, [0, 1, 2]);
    session.release_undecoded();
    let released: Vec<_> = session.waiting.drain(..).map(|ack| (ack.place.offset, ack.kind)).collect();
    assert_eq!(released, [(3, Kind::Release), (4, Kind::Release)]);
    assert_eq!((session.fetch_max, session.undecoded.len()), (3, 0));
    // As large as before: it stays at that. Small ones, or one that is large: it grows again.
    let decodes = |session: &mut Session, batches: &[Bytes], locked: std::ops::Range<i64>| {
        (session.decoded, session.decoded_batches) = (0, 0);
        session.undecoded.push_back(part(batches, locked));
        session.decode();
        session.fetch_max
    };
    assert_eq!(decodes(&mut session, &[large(3), large(4)], 3..5), 3);
    let small = |offset| encoded(offset, &["small".into()], Compression::Gzip);
    assert_eq!(decodes(&mut session, &[small(5), small(6)], 5..7), 6);
    assert_eq!(decodes(&mut session, &[encoded(7, &[zeros(60)], Compression::Gzip)], 7..8), 12);
}

async fn until_buried(engine: &Engine, running: &tokio::task::JoinHandle<()>) {
    let start = Instant::now();
    while !engine.buries() {
        assert!(!running.is_finished() && start.elapsed() < Duration::from_secs(30), "it is buried");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// The broker would drop the record when it is released, or when the session is closed.
#[tokio::test]
async fn a_last_delivery_is_decoded_for_the_dead_letters_though_no_record_is_wanted() {
    for is_closed in [false, true] {
        let (mut session, _acks) = session_and_handle();
        let large = |offset| encoded(offset, &[zeros(40)], Compression::Gzip);
        session.undecoded.push_back(part(&[large(0)], [0]));
        let mut last = part(&[large(1)], [1]);
        last.locked.insert(1, 5);
        session.undecoded.push_back(last);
        let engine = session.engine.clone();
        let (_stop, stopping) = watch::channel(is_closed);
        let running = tokio::spawn(session.run(stopping));
        until_buried(&engine, &running).await;
        running.abort();
    }
}

/// Those that are on their way have memory of their own; the next ones are decoded after them, and stay locked until then.
#[tokio::test]
async fn last_deliveries_are_decoded_when_those_before_them_are_written() {
    let large = |offset| encoded(offset, &[zeros(40)], Compression::Gzip);
    let mut last = part(&[large(0), large(1), large(2)], 0..3);
    last.locked = [(0, 5), (1, 5), (2, 4)].into();

    let (mut session, _acks) = session_and_handle();
    let until = last.until;
    session.undecoded.push_back(Undecoded { until: until - Duration::from_secs(20), ..last.clone() });
    session.release_undecoded();
    let found: Vec<_> = session.waiting.iter().map(|ack| (ack.place.offset, ack.kind)).collect();
    assert_eq!(found, [(2, Kind::Release), (0, Kind::Renew), (1, Kind::Renew)]);
    assert!(session.last[0].until >= until - Duration::from_secs(1), "they are locked for longer");
    assert!(session.undecoded.is_empty(), "they do not keep the session from other records");

    let (mut session, _acks) = session_and_handle();
    session.undecoded.push_back(last);
    let engine = session.engine.clone();
    let (_stop, stopping) = watch::channel(false);
    let running = tokio::spawn(session.run(stopping));
    until_buried(&engine, &running).await;
    // Its dead letter cannot be written here.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.buried.load(Ordering::SeqCst), 1);
    running.abort();
}

/// The source ends by it, but the dead letters of other partitions are written before that.
#[tokio::test]
async fn a_batch_that_cannot_be_read_does_not_keep_others_from_the_dead_letters() {
    let mut session = session();
    let small = |offset| encoded(offset, &["a".into()], Compression::None);
    let mut broken = small(0).to_vec();
    *broken.last_mut().unwrap() ^= 1;
    session.undecoded.push_back(part(&[broken.into()], [0]));
    let mut last = part(&[small(1)], [1]);
    last.locked.insert(1, 5);
    session.undecoded.push_back(last);
    session.decode();
    assert!(session.engine.buries() && session.undecoded.is_empty());
    assert!(session.engine.shared.next(1, Duration::ZERO).await.is_err());
}

/// A handler needs time.
#[tokio::test]
async fn what_is_not_decoded_is_given_back_when_half_of_its_lock_is_over() {
    let mut session = session();
    let mut late = part(&[encoded(0, &["a".into(), "b".into()], Compression::None)], [0]);
    late.locked.insert(1, 5);
    late.until = Instant::now() + Duration::from_secs(29);
    session.undecoded.push_back(late);
    session.decode();
    let found: Vec<_> = session.waiting.iter().map(|ack| (ack.place.offset, ack.kind)).collect();
    assert_eq!(found, [(0, Kind::Release)]);
    assert!(session.engine.buries(), "the other one would be dropped");
}

/// The end of the session ends the locks, and the broker drops a record that was delivered for the last time.
#[tokio::test(start_paused = true)]
async fn a_close_waits_for_dead_letters_that_are_on_their_way() {
    for ends in [Some(Duration::from_secs(2)), None] {
        let (session, _acks) = session_and_handle();
        let engine = session.engine.clone();
        engine.buried.store(1, Ordering::SeqCst);
        let (_stop, stopping) = watch::channel(true);
        let start = Instant::now();
        let running = tokio::spawn(session.run(stopping));
        if let Some(after) = ends {
            tokio::time::sleep(after).await;
            engine.buried.store(0, Ordering::SeqCst);
            engine.shared.wake_sessions();
        }
        running.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), ends.unwrap_or(BURY_MAX).as_secs());
    }
}

/// A response that is cut off, or has no records at all.
#[tokio::test]
async fn offsets_that_were_never_seen_are_given_back() {
    let mut session = session();
    let whole = encoded(0, &["a".into()], Compression::None);
    let cut = encoded(2, &["b".into()], Compression::None);
    session.undecoded.push_back(part(&[whole, cut.slice(..cut.len() - 1)], [0, 1, 2]));
    session.decode();
    assert_eq!(delivered(&session).await, [0]);
    let found: Vec<_> = session.waiting.iter().map(|ack| (ack.place.offset, ack.kind)).collect();
    assert_eq!(found, [(1, Kind::Release), (2, Kind::Release)]);
}

/// What was locked under an ended session is not delivered.
#[tokio::test]
async fn what_is_not_decoded_ends_with_its_session_and_with_its_locks() {
    let mut session = session();
    let small = encoded(0, &["a".into()], Compression::None);
    let mut late = part(std::slice::from_ref(&small), [0]);
    late.until = Instant::now();
    session.undecoded.push_back(late.clone());
    session.decode();
    assert!(!session.engine.buries());
    // The broker has dropped this one.
    late.locked.insert(0, 5);
    session.undecoded.push_back(late);
    session.decode();
    assert!(session.engine.buries());
    session.undecoded.push_back(part(&[small], [0]));
    session.end();
    session.decode();
    assert!(session.undecoded.is_empty() && session.waiting.is_empty());
    assert!(session.engine.shared.unwanted(Duration::ZERO).is_empty(), "nothing is ready");
}
