"""A thousand clients that wait cost nothing."""

import re
import socket
import time
from pathlib import Path

from load import Connection, create

# Wake-ups are counted, not time on a CPU: a busy machine makes the same work take longer, never more often.
POLLS, POLL_S, WINDOW_S, QUIET_S_MAX, WAKES_MAX = 1000, 20, 5, 8, 100
WAKES = re.compile(r"^voluntary_ctxt_switches:\s+(\d+)", re.MULTILINE)


def wakes(pid):
    """How often a thread of the process went to sleep, all threads together."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int(WAKES.search((thread / "status").read_text())[1]) for thread in threads)


def wakes_within(pid, seconds):
    before = wakes(pid)
    time.sleep(seconds)
    return wakes(pid) - before


def are_parked(pid):
    """Whether the server is done with all requests: it sleeps through a whole second."""
    end = time.monotonic() + QUIET_S_MAX
    while wakes_within(pid, 1) > WAKES_MAX / WINDOW_S:
        if time.monotonic() > end:
            return False
    return True


def park(server, url):
    body = f'{{"QueueUrl":"{url}","WaitTimeSeconds":{POLL_S}}}'
    poll = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    poll.sendall(
        (
            f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nX-Amz-Target: AmazonSQS.ReceiveMessage\r\n"
            f"Content-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()
    )
    return poll


def test_a_thousand_parked_long_polls_sleep_and_all_wake(own_server):
    """A machine may be too slow to park so many before the first has waited its 20 s: then with fewer."""
    for round, count in enumerate([POLLS, POLLS, POLLS // 2, POLLS // 4]):
        urls = [create(own_server, f"parked-{round}-{n}") for n in range(10)]
        start = time.monotonic()
        polls = [(park(own_server, urls[n % 10]), urls[n % 10]) for n in range(count)]
        try:
            quiet = are_parked(own_server.pid)
            seen = wakes_within(own_server.pid, WINDOW_S)
            if time.monotonic() - start > POLL_S - 6:
                continue
            assert quiet, f"the server does not come to rest {QUIET_S_MAX} s after the last poll was sent"
            assert seen <= WAKES_MAX, f"{count} parked long polls: {seen} wake-ups in {WINDOW_S} s"
            all_wake(own_server, urls, polls)
            return
        finally:
            for poll, _ in polls:
                poll.close()
    raise AssertionError("this machine is too slow to park the polls before they end")


def all_wake(server, urls, polls):
    """They were parked, not dead: messages reach them."""
    sender = Connection(server)
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
