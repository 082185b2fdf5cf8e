"""Whether a committed sample, and what the store has besides, is what was written."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tasks.store.backend import Backend, Files
from tasks.store.errors import DamagedSample, ForeignSample
from tasks.store.final_norm import final_norm_problem
from tasks.store.layout import RECORD, OtherIdentity, Record, StateSpec, is_group, is_shard, parse_record, sample_path
from tasks.store.root import root_problem
from tasks.vocabulary import Identity


def load_record(files: Files, key: str, identity: Identity) -> Record:
    """Read a sample's completion record, checked against itself, its place and the store.

    Raises:
        FileNotFoundError: the sample is not committed.
        ForeignSample: the record is whole, and of another extraction.
        DamagedSample: the record is not what was committed.
    """
    document = files.read(f"{sample_path(key)}/{RECORD}")
    try:
        record = parse_record(document, StateSpec.of(identity), identity.digest)
    except OtherIdentity as error:
        raise ForeignSample(key, str(error)) from error
    except ValueError as error:
        raise DamagedSample(key, str(error)) from error
    if record.key != key:
        raise DamagedSample(key, "its zarr.json belongs to another sample")
    return record


def probe(backend: Backend, key: str, identity: Identity) -> Record:
    """Read a sample's completion record and check that all its files are there with their sizes.

    Raises:
        FileNotFoundError: the sample is not committed.
        DamagedSample: it is committed, but not whole.
    """
    record = load_record(backend, key, identity)
    present = backend.sizes(sample_path(key))
    for path, (size, _) in record.objects.items():
        _check_size(record, path, size, present.get(path))
    return record


def checked_files(
    files: Files, record: Record, paths: Collection[str] | None = None
) -> Iterator[tuple[str, memoryview]]:
    """Read a sample's files, each checked against the record: (path, content).

    All but the record itself are read, unless ``paths`` says which.

    A content is valid until the next one is taken.

    Raises:
        DamagedSample: a file is missing, or not byte for byte what was committed.
    """
    directory = sample_path(record.key)
    if paths is None:
        paths = record.objects
    for path, content in zip(paths, files.read_summed([f"{directory}/{path}" for path in paths]), strict=True):
        size, crc = record.objects[path]
        data, found = content or (None, 0)
        _check_size(record, path, size, None if data is None else len(data))
        if data is None or found != crc:
            raise DamagedSample(record.key, f"{path} does not match its checksum")
        yield path, data


def _check_size(record: Record, path: str, expected: int, found: int | None) -> None:
    if found is None:
        raise DamagedSample(record.key, f"{path} is missing")
    if found != expected:
        raise DamagedSample(record.key, f"{path} has {found} bytes instead of {expected}")


def altered_groups(files: Files) -> Iterator[str]:
    """Paths of the group documents between the store and its samples that are missing or altered."""
    groups = ["samples", *(f"samples/{name}" for name in files.names("samples") if is_shard(name))]
    paths = [f"{group}/{RECORD}" for group in groups]
    for path, document in zip(paths, files.read_all(paths), strict=True):
        if not is_group(document):
            yield path


def strangers(files: Files) -> Iterator[str]:
    """Paths beside the samples that no layertap has made; nothing reads them."""
    yield from (f"samples/{name}" for name in files.names("samples") if name != RECORD and not is_shard(name))


def store_problems(files: Files, attributes: Mapping[str, Any]) -> Iterator[str]:
    """What is missing or altered outside of the samples and the manifest, each as a sentence.

    Args:
        files: of the store.
        attributes: of its root group.
    """
    yield from (f"{path} is missing or altered" for path in altered_groups(files))
    yield from filter(None, (root_problem(files, attributes), final_norm_problem(files, attributes)))
