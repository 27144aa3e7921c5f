"""Starts private `hapax serve` processes: a free port, a store of their own, ended by their process id.

The store is a folder; or, if HAPAX_TEST_POSTGRES is the URL of a PostgreSQL server, a new database there; or, if
HAPAX_TEST_REDIS is the URL of a Redis server, keys with a prefix of their own.
"""

import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
import uuid
from pathlib import Path

ADDRESS = re.compile(r"(127\.0\.0\.1:\d+)")
START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 30
POSTGRES = os.environ.get("HAPAX_TEST_POSTGRES")
REDIS = os.environ.get("HAPAX_TEST_REDIS")


def new_store(folder):
    """The arguments of `hapax serve` for a new store."""
    if REDIS:
        return ["--store", f"{REDIS}?hapax_prefix=clients-{uuid.uuid4().hex}"]
    if not POSTGRES:
        return ["--store", f"embedded:{folder}"]
    database = f"clients_{uuid.uuid4().hex}"
    psql = ["psql", "--no-psqlrc", "--quiet", f"{POSTGRES}/postgres", "-c", f"CREATE DATABASE {database}"]
    subprocess.run(psql, check=True, timeout=60)
    return ["--store", f"{POSTGRES}/{database}", "--migrate"]


class Server:
    """One server. It may be stopped, killed and started again over the same folder and on the same port."""

    def __init__(self, folder, config="", env=None, files_max=None):
        self.folder = Path(folder)
        self.store = new_store(folder)
        self.files_max = files_max
        self.config = config
        self.env = env or {}
        self.port = 0
        self.process = None
        self.output = []

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self):
        return self.process.pid

    def start(self):
        binary = os.environ.get("HAPAX_BIN")
        assert binary, "HAPAX_BIN must name the hapax binary; `cargo xtask test clients` sets it"
        command = [binary, "serve", "--listen", f"127.0.0.1:{self.port}", *self.store]
        if self.config:
            file = Path(f"{self.folder}.toml")
            file.write_text(self.config)
            command += ["--config", str(file)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.env},
            preexec_fn=self._limit_files if self.files_max else None,
            text=True,
            errors="replace",
        )
        address = threading.Event()
        threading.Thread(target=self._read, args=(self.process.stdout, address), daemon=True).start()
        if not address.wait(START_SECONDS_MAX):
            self.kill()
            raise AssertionError(f"hapax serve printed no address within {START_SECONDS_MAX} s: {self.output}")
        self._wait_ready()
        return self

    def _limit_files(self):
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.files_max, self.files_max))

    def _read(self, stream, address):
        for line in stream:
            if len(self.output) < 200:
                self.output.append(line)
            found = ADDRESS.search(line)
            if found and not address.is_set():
                self.port = int(found.group(1).rsplit(":", 1)[1])
                address.set()

    def _wait_ready(self):
        end = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                with urllib.request.urlopen(f"{self.endpoint}/readyz", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError as error:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise AssertionError(f"the server did not get ready: {error}; it said {self.output}") from error
            time.sleep(0.02)

    def stop(self):
        """SIGTERM: answers what is under way and exits. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self):
        """SIGKILL: as a crash of the process."""
        self.process.kill()
        return self.wait()

    def wait(self):
        try:
            return self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_SECONDS_MAX)
            raise AssertionError(f"the server did not end within {STOP_SECONDS_MAX} s") from None

    def cpu_ms(self):
        """CPU time used so far, of all threads, in user and kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


class Folder:
    """A server over a temporary folder, removed with it."""

    def __init__(self, config="", env=None, files_max=None):
        self.temporary = tempfile.TemporaryDirectory(prefix="hapax-clients-")
        self.server = Server(Path(self.temporary.name) / "data", config, env, files_max)

    def __enter__(self):
        return self.server.start()

    def __exit__(self, *_):
        if self.server.process.poll() is None:
            self.server.kill()
        self.temporary.cleanup()
