import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from tasks.store import Store, object_store
from tests.store.s3_server import BUCKET, s3_server
from tests.store.samples import identity


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A local store, open for writing."""
    with Store.open(tmp_path / "store", identity(), run="first") as opened:
        yield opened


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes URLs of object stores in this process's memory, the fast stand-in for a server."""
    places: dict[str, Any] = {}
    monkeypatch.setattr(object_store, "connect", lambda url: places.setdefault(url, MemoryStore()))
    return lambda: f"memory://{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """Makes URLs on a real S3 server, which runs for the session."""
    with s3_server(tmp_path_factory.mktemp("s3")) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield lambda: f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["local", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a store, on each kind of backend in turn."""
    if request.param == "local":
        return str(tmp_path / "store")
    made: str = request.getfixturevalue(request.param)()
    return made
