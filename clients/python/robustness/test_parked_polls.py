"""A thousand clients that wait cost nothing."""

import socket
import time
from pathlib import Path

from load import Connection, create

POLLS, WINDOW_S, CPU_MS_MAX = 1000, 15, 10


def cpu_ms(pid):
    """Time on a CPU of all threads, from the scheduler: finer than the ticks of /proc/PID/stat."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6


def park(server, url):
    body = f'{{"QueueUrl":"{url}","WaitTimeSeconds":20}}'
    poll = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    poll.sendall(
        (
            f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
            f"Content-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
    )
    return poll


def test_a_thousand_parked_long_polls_use_no_cpu_and_all_wake(own_server):
    urls = [create(own_server, f"parked-{n}") for n in range(10)]
    polls = [(park(own_server, urls[n % 10]), urls[n % 10]) for n in range(POLLS)]
    try:
        time.sleep(1.5)
        before = cpu_ms(own_server.pid)
        time.sleep(WINDOW_S)
        used = cpu_ms(own_server.pid) - before
        print(f"{POLLS} parked long polls: {used:.2f} ms of CPU in {WINDOW_S} s")
        assert used <= CPU_MS_MAX
        # They were parked, not dead: messages reach them.
        sender = Connection(own_server)
        sent = {f"{url} {n}" for url in urls for n in range(3)}
        for body in sent:
            sender.call("SendMessage", QueueUrl=body.split()[0], MessageBody=body)
        found = []
        for poll, _ in polls:
            answer = b""
            while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                answer += poll.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            found += [body for body in sent if f'"{body}"'.encode() in answer]
        assert sorted(found) == sorted(sent)
    finally:
        for poll, _ in polls:
            poll.close()
