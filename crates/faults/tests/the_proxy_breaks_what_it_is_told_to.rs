//! Each fault does what its name says, hits what it matches and nothing else, and is counted.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_faults::{Action, FaultProxy, Match, Protocol, TIMEOUT};

/// Answers each request with its path; records the paths in the order of arrival.
fn service() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::<Mutex<Vec<String>>>::default();
    let record = seen.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let record = record.clone();
            std::thread::spawn(move || serve(stream.unwrap(), &record));
        }
    });
    (address, seen)
}

fn serve(mut stream: TcpStream, seen: &Mutex<Vec<String>>) {
    while let Some(head) = read_head(&mut stream) {
        let path = head.split(' ').nth(1).unwrap().to_owned();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{path}", path.len());
        seen.lock().unwrap().push(path);
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

fn read_head(stream: &mut TcpStream) -> Option<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    String::from_utf8(head).ok()
}

fn connect(proxy: &FaultProxy) -> TcpStream {
    let stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream
}

fn send(stream: &mut TcpStream, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
}

/// The body of the next response; `None` at the end of the connection.
fn answer(stream: &mut TcpStream) -> Option<String> {
    let head = read_head(stream)?;
    let length = head.split("content-length: ").nth(1).unwrap().lines().next().unwrap();
    let mut body = vec![0; length.parse().unwrap()];
    stream.read_exact(&mut body).ok()?;
    String::from_utf8(body).ok()
}

fn call(stream: &mut TcpStream, path: &str) -> Option<String> {
    send(stream, path);
    answer(stream)
}

fn setting() -> (FaultProxy, Arc<Mutex<Vec<String>>>) {
    let (address, seen) = service();
    (FaultProxy::start(address, Protocol::Http).unwrap(), seen)
}

#[test]
fn without_a_fault_everything_passes() {
    let (proxy, seen) = setting();
    let mut stream = connect(&proxy);
    assert_eq!(call(&mut stream, "/a").as_deref(), Some("/a"));
    assert_eq!(call(&mut stream, "/b").as_deref(), Some("/b"));
    assert_eq!(*seen.lock().unwrap(), ["/a", "/b"]);
}

#[test]
fn a_cut_request_never_arrives_and_a_cut_answer_is_lost() {
    let (proxy, seen) = setting();
    let request = proxy.inject(Match::request("/lost"), Action::Cut).times(1);
    let answer = proxy.inject(Match::answer_to("/done"), Action::Cut).times(1);
    assert_eq!(call(&mut connect(&proxy), "/lost"), None);
    assert_eq!(call(&mut connect(&proxy), "/done"), None);
    assert_eq!((request.count(), answer.count()), (1, 1));
    assert_eq!(*seen.lock().unwrap(), ["/done"]);
    assert_eq!(call(&mut connect(&proxy), "/done").as_deref(), Some("/done"), "only once");
}

#[test]
fn a_dropped_request_leaves_the_connection() {
    let (proxy, seen) = setting();
    let dropped = proxy.inject(Match::request("/x"), Action::Drop).after(1).times(1);
    let mut stream = connect(&proxy);
    assert_eq!(call(&mut stream, "/x1").as_deref(), Some("/x1"), "the first passes");
    send(&mut stream, "/x2");
    assert_eq!(call(&mut stream, "/y").as_deref(), Some("/y"));
    assert_eq!(dropped.count(), 1);
    assert_eq!(*seen.lock().unwrap(), ["/x1", "/y"]);
}

#[test]
fn a_duplicated_request_arrives_twice_and_is_answered_once() {
    let (proxy, seen) = setting();
    let twice = proxy.inject(Match::request("/pay"), Action::Duplicate);
    let mut stream = connect(&proxy);
    assert_eq!(call(&mut stream, "/pay").as_deref(), Some("/pay"));
    assert_eq!(call(&mut stream, "/next").as_deref(), Some("/next"));
    assert_eq!(*seen.lock().unwrap(), ["/pay", "/pay", "/next"]);
    assert_eq!(twice.count(), 1);
}

#[tokio::test]
async fn a_repeated_request_arrives_again_when_it_is_released() {
    let (proxy, seen) = setting();
    let again = proxy.inject(Match::request("/pay"), Action::Repeat);
    let mut stream = connect(&proxy);
    for path in ["/pay", "/pay", "/next"] {
        assert_eq!(call(&mut stream, path).as_deref(), Some(path));
    }
    assert_eq!(again.count(), 1, "only the first one is copied");
    again.release();
    again.wait_for_repeated().await;
    assert_eq!(*seen.lock().unwrap(), ["/pay", "/pay", "/next", "/pay"]);
}

#[tokio::test]
async fn a_held_request_arrives_after_its_sender_has_gone() {
    let (proxy, seen) = setting();
    let held = proxy.inject(Match::request("/late"), Action::Hold);
    let mut stream = connect(&proxy);
    send(&mut stream, "/late");
    held.wait_for(1).await;
    drop(stream);
    assert_eq!(call(&mut connect(&proxy), "/other").as_deref(), Some("/other"), "others are not held up");
    held.release();
    let deadline = std::time::Instant::now() + TIMEOUT;
    while seen.lock().unwrap().len() < 2 {
        assert!(std::time::Instant::now() < deadline, "the held request is lost");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(*seen.lock().unwrap(), ["/other", "/late"]);
}

#[test]
fn a_partition_passes_nothing_until_it_heals() {
    let (proxy, seen) = setting();
    let mut stream = connect(&proxy);
    assert_eq!(call(&mut stream, "/a").as_deref(), Some("/a"));
    proxy.partition(true);
    send(&mut stream, "/b");
    stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    assert_eq!(*seen.lock().unwrap(), ["/a"]);
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    proxy.partition(false);
    assert_eq!(answer(&mut stream).as_deref(), Some("/b"));
}

#[test]
fn all_connections_can_be_cut_and_led_to_another_server() {
    let (proxy, first) = setting();
    let mut stream = connect(&proxy);
    assert_eq!(call(&mut stream, "/a").as_deref(), Some("/a"));
    let (address, second) = service();
    proxy.retarget(address);
    proxy.cut_all();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "cut");
    assert_eq!(call(&mut connect(&proxy), "/b").as_deref(), Some("/b"));
    assert_eq!((first.lock().unwrap().len(), second.lock().unwrap().len()), (1, 1));
}
