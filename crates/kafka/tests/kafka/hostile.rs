//! A broker that claims more than it sends: the client refuses the response, and needs no memory for it.
//!
//! The client is a process of its own with little memory, because a claim that is believed ends the process.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use hapax_kafka::wire::{Cluster, Connect};

use crate::broker::Broker;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![shared("a_broker_that_claims_too_much_is_refused", claims_too_much)]
}

const CHILD: &str = "HAPAX_TEST_HOSTILE";
/// Address space of the client, in kilobytes. What is claimed is a hundred times as much.
const MEMORY_KB: u32 = 1_500_000;

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Asks for a topic's leaders, and prints why it got no answer.
pub fn run_child() {
    let address = std::env::var(CHILD).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let cluster = Cluster::new(Connect::plain([address]));
    println!("\n{}", runtime.block_on(cluster.leaders("topic")).unwrap_err());
}

/// A claim of 2,147,483,647 elements.
const COMPACT: [u8; 5] = [0x80, 0x80, 0x80, 0x80, 0x08];

/// The versions of the requests Metadata (3) and ApiVersions (18), without tags.
fn versions() -> Vec<u8> {
    [&[0, 0, 3][..], &[0, 3, 0, 0, 0, 12, 0], &[0, 18, 0, 0, 0, 3, 0], &[0; 4], &[0]].concat()
}

/// Answers the requests of one connection, one after the other.
fn serve(listener: &TcpListener, answers: &[Vec<u8>]) -> std::io::Result<()> {
    let (mut stream, _): (TcpStream, _) = listener.accept()?;
    for answer in answers {
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let mut request = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut request)?;
        let number = &request[4..8];
        stream.write_all(&u32::try_from(4 + answer.len()).unwrap().to_be_bytes())?;
        stream.write_all(&[number, answer].concat())?;
    }
    // Until the client has closed the connection.
    let _ = stream.read(&mut [0]);
    Ok(())
}

fn claims_too_much(_: &Broker) {
    let filler = vec![1; 100_000];
    // The header of the answer to Metadata has tags.
    let metadata = |rest: &[&[u8]]| [&[0][..], &[0; 4], &rest.concat()].concat();
    let broker = [0, 0, 0, 1, 2, b'h', 0, 0, 0, 9, 0, 0];
    let table: [(&str, Vec<Vec<u8>>); 5] = [
        ("versions", vec![[&[0, 0][..], &COMPACT].concat()]),
        ("versions, with bytes behind it", vec![[&[0, 0][..], &COMPACT, &filler].concat()]),
        ("brokers", vec![versions(), metadata(&[&COMPACT])]),
        ("brokers, with bytes behind it", vec![versions(), metadata(&[&COMPACT, &filler])]),
        ("topics", vec![versions(), metadata(&[&[2], &broker, &[0], &[0; 4], &COMPACT, &filler])]),
    ];
    for (name, answers) in table {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let served = std::thread::spawn(move || serve(&listener, &answers));
        let limited = format!("ulimit -v {MEMORY_KB}; exec \"$0\"");
        let done = Command::new("sh")
            .args(["-c", &limited])
            .arg(std::env::current_exe().unwrap())
            .env(CHILD, &address)
            .output()
            .unwrap();
        let (said, log) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{name}: {}: {log}", done.status);
        assert!(said.contains("a length that is not there"), "{name}: {said}");
        served.join().unwrap().unwrap();
    }
}
