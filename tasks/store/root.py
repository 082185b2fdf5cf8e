"""The root group, which says what all samples of a store have in common, and the way back where it is lost.

The samples' records name their identity by its digest alone, so the root cannot be made from them. A copy of it is kept
beside the manifest, written before it; the records say whether a copy, or a root that is made anew, is theirs.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from tasks.store import layout
from tasks.store.backend import Backend, Files
from tasks.store.errors import DamagedStore, IdentityMismatch, NotAStore, storage_failures
from tasks.store.layout import PRIVATE, RECORD, sample_path
from tasks.store.manifest import MANIFEST, keys_present
from tasks.vocabulary import Identity

FORMAT = "layertap"
COPY = f"{PRIVATE}/root"
"""The root's document, and the crc32c of it."""
_FEW = 8


class NewerLayout(NotAStore):
    """A store of a layout that this version does not know."""


class Kept(NamedTuple):
    """The copy of a root."""

    document: bytes
    attributes: dict[str, Any]
    identity: Identity


def describe(files: Files) -> dict[str, Any]:
    """Attributes of a store's root group.

    Raises:
        NotAStore: no store there, or one of a newer layout.
        DamagedStore: a store is there, but its root group is missing or altered.
        StorageFailure: the place cannot be read.
    """
    document = None
    try:
        with storage_failures(files.url, "read"):
            document = files.read(RECORD)
    except FileNotFoundError:
        pass
    except NotADirectoryError:
        raise NotAStore(f"{files.url} is a file or below one; a store is a directory: name that") from None
    try:
        return _attributes(document, files.url)
    except NotAStore as error:
        kept = kept_root(files)  # of a newer layout, it would be newer, too
        if isinstance(error, NewerLayout) and kept is None:
            raise
        # A run that died while it created the store has left a copy at most.
        if next(recorded(files), None) is None and not (files.names(MANIFEST) and kept):
            raise
        what = "is missing" if document is None else "was altered"
        raise DamagedStore(f"{files.url}/zarr.json, the root of the store, {what}: {_way_back(files)}") from None


def _attributes(document: bytes | None, url: str) -> dict[str, Any]:
    if document is None:
        raise NotAStore(f"there is no store at {url}")
    try:
        attributes = json.loads(document)["attributes"]
    except (ValueError, KeyError, TypeError):
        raise NotAStore(f"{url}/zarr.json is not the root of a layertap store") from None
    if not isinstance(attributes, dict) or attributes.get("format") != FORMAT:
        raise NotAStore(f"{url} is a Zarr group, but not a layertap store")
    if attributes.get("layout") != layout.LAYOUT:
        raise NewerLayout(
            f"{url} has layout {attributes.get('layout')}, this version reads {layout.LAYOUT}: use a newer layertap"
        )
    return attributes


def stored_identity(files: Files) -> Identity:
    """Identity of the extraction that a store holds.

    Raises:
        NotAStore: no store there, or one of a newer layout.
        DamagedStore: its root group is missing or altered.
    """
    attributes = describe(files)
    try:
        identity = TypeAdapter(Identity).validate_python(attributes["identity"])
    except (ValueError, KeyError) as error:
        raise DamagedStore(
            f"the identity in {files.url}/zarr.json cannot be read: that file was altered; {_way_back(files)}"
        ) from error
    if identity.digest != attributes.get("identity_digest", identity.digest):
        raise DamagedStore(
            f"the identity in {files.url}/zarr.json is not the one that the digest beside it and the samples stand "
            f"for: that file was altered{_differences(files, identity)}; {_way_back(files)}"
        )
    return identity


def kept_root(files: Files) -> Kept | None:
    """The copy of the root; None where there is none that is whole."""
    (sealed,) = files.read_all([COPY])
    if sealed is None or layout.seal(document := sealed[: -layout.CRC_BYTES]) != sealed:
        return None
    try:
        attributes = _attributes(document, files.url)
        return Kept(document, attributes, TypeAdapter(Identity).validate_python(attributes["identity"]))
    except (NotAStore, ValueError, KeyError):
        return None


def recorded(files: Files) -> Iterator[dict[str, Any]]:
    """Attributes of the samples' completion records, those that can be read."""
    for key in keys_present(files):
        (document,) = files.read_all([f"{sample_path(key)}/{RECORD}"])
        try:
            yield layout.record_attributes(document or b"")
        except ValueError:
            continue


def root_problem(files: Files, attributes: Mapping[str, Any]) -> str | None:
    """How a root with these attributes differs from its copy, as a sentence; None where it does not."""
    kept = kept_root(files)
    if kept is None or _agrees(attributes, kept):
        return None
    return f"zarr.json is not what was written: {_way_back(files)}"


def refuse_mixture(files: Files, identity: Identity) -> None:
    """Refuse to make a root for samples of another identity, which outlive theirs.

    Raises:
        IdentityMismatch: says how they differ, and what to do.
    """
    kept = kept_root(files) if files.names(MANIFEST) else None
    others = any(record["identity"] != identity.digest for record in islice(recorded(files), _FEW))
    if others or (kept is not None and kept.identity.digest != identity.digest):
        raise IdentityMismatch(
            f"{files.url} has lost its zarr.json, and holds another extraction{_differences(files, identity)}. Choose "
            f"another store for this run; as to the zarr.json: {_way_back(files)}"
        )


def keep_root(backend: Backend, identity: Identity) -> None:
    """Copy the root, whose identity this is, where that was not done yet.

    Raises:
        DamagedStore: the root is not that of the samples.
    """
    kept = kept_root(backend)
    if kept.identity.digest != identity.digest if kept else _is_of_others(backend, identity):
        raise DamagedStore(
            f"{backend.url}/zarr.json is of another extraction than the store's samples"
            f"{_differences(backend, identity)}: that file was replaced; {_way_back(backend)}"
        )
    if kept is None:
        backend.put(COPY, layout.seal(backend.read(RECORD)))


def restore_root(backend: Backend) -> bool:
    """Put the root back from its copy where it is missing or altered; whether that was so and could be done.

    Raises:
        DamagedStore: the copy is not that of the samples.
        StoreBusy: a run is writing to the store.
    """
    kept = kept_root(backend)
    if kept is None:
        return False
    try:
        if _agrees(_attributes(next(backend.read_all([RECORD])), backend.url), kept):
            return False
    except NotAStore:
        pass
    if _is_of_others(backend, kept.identity):
        raise DamagedStore(
            f"{backend.url}/zarr.json and the copy of it, {COPY}, are not those of the samples: put both back, or "
            "remove both and extract with the settings that the samples were made with"
        )
    lease = backend.lease("repair")
    try:
        backend.put(RECORD, kept.document)
    finally:
        lease.release()
    return True


def _agrees(attributes: Mapping[str, Any], kept: Kept) -> bool:
    """Whether a root says what its copy says; two shares that create a store may differ in the time."""
    return all(attributes.get(name) == value for name, value in kept.attributes.items() if name != "created")


def _is_of_others(files: Files, identity: Identity) -> bool:
    records = list(islice(recorded(files), _FEW))
    return bool(records) and all(record["identity"] != identity.digest for record in records)


def _way_back(files: Files) -> str:
    if kept_root(files) is not None:
        return f"`layertap repair {files.url}` puts back what it was, the samples need no change"
    return (
        "put back what it was, the samples need no change; or, with that file removed, extract with the settings that "
        "they were made with: that writes it anew, and refuses others"
    )


def _differences(files: Files, identity: Identity) -> str:
    """In which fields an identity differs from what a sample's record says, as far as that says it."""
    ours = {"depths": list(identity.depths), "dtype": identity.dtype, "stored_as": identity.stored_as}
    for record in islice(recorded(files), 1):
        found = [f"{name} {value} instead of {record[name]}" for name, value in ours.items() if value != record[name]]
        return f" ({', '.join(found)})" if found else ""
    return ""
