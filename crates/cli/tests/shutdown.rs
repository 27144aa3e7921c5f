//! Signals: the first one starts an orderly shutdown, a second one ends the server at once.

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use common::Server;
use rustix::process::Signal;

/// A long poll over SQS; returns once the server has begun to handle it.
fn long_poll(server: &Server, queue: &str) -> TcpStream {
    let body =
        format!("{{\"QueueUrl\":\"{}/000000000000/{queue}\",\"WaitTimeSeconds\":20}}", server.endpoint);
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         x-amz-target: AmazonSQS.ReceiveMessage\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n",
        server.address(),
        body.len()
    );
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(head.as_bytes()).unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).unwrap();
    assert_eq!(&go_on, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).unwrap();
    // A later request was answered, so the server has started the poll.
    server.run(&["queues"]).ok();
    stream
}

#[test]
fn a_long_poll_is_answered_before_the_server_ends() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Server::start();
        server.run(&["queue", "create", "jobs"]).ok();
        let mut poll = long_poll(&server, "jobs");
        let start = std::time::Instant::now();
        server.signal(signal);
        let mut answer = String::new();
        poll.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert_eq!(server.wait().code(), Some(0));
        assert!(start.elapsed().as_secs() < 15, "within the bound, not when the poll's 20 s are over");
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start_in(folder, &["--shutdown-timeout", "10m"]);
    // A request whose body never arrives delays the shutdown.
    let mut stream = TcpStream::connect(server.address()).unwrap();
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {}\r\nx-amz-target: AmazonSQS.ListQueues\r\n\
         content-type: application/x-amz-json-1.0\r\ncontent-length: 10\r\nexpect: 100-continue\r\n\r\n",
        server.address()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).unwrap();
    server.signal(Signal::TERM);
    // The server has handled the first signal when it no longer accepts connections.
    while TcpStream::connect(server.address()).is_ok() {
        std::thread::yield_now();
    }
    server.signal(Signal::INT);
    assert_eq!(server.wait().code(), Some(1));
    assert!(server.log().contains("second signal"));
}
