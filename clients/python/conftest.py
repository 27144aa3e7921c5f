import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hapax_server import Folder  # noqa: E402


@pytest.fixture(scope="session")
def server():
    """One for each pytest worker. Tests share it and keep to queues of their own."""
    with Folder() as server:
        yield server


@pytest.fixture
def own_server():
    """For tests that restart it."""
    with Folder() as server:
        yield server


@pytest.fixture
def name():
    """A queue name that no other test uses."""
    return f"q-{uuid.uuid4().hex[:16]}"
