"""The store: verified samples as Zarr, committed whole or not at all.

* :class:`Store` writes: missing, stage, commit, record, quarantine.
* :func:`open` reads: samples as torch tensors, by key, source id or position.
* :func:`tasks.store.stage.stage_states` runs in the engine's worker process.
* :class:`tasks.store.dataset.SampleDataset` and :class:`tasks.store.eagle.EagleDataset` feed PyTorch.
* :mod:`tasks.store.layout` says what is in the files.
"""

from tasks.store.backend import Share
from tasks.store.errors import (
    DamagedSample,
    DamagedStore,
    IdentityMismatch,
    NoSpace,
    NotAStore,
    SampleNotFound,
    StorageFailure,
    StoreBusy,
    StoreError,
)
from tasks.store.final_norm import FinalNorm
from tasks.store.layout import StateSpec
from tasks.store.reader import Listed, Reader, StoredSample
from tasks.store.reader import open_store as open
from tasks.store.store import Quarantined, SourceRecord, StagedSample, Store

__all__ = [
    "DamagedSample",
    "DamagedStore",
    "FinalNorm",
    "IdentityMismatch",
    "Listed",
    "NoSpace",
    "NotAStore",
    "Quarantined",
    "Reader",
    "SampleNotFound",
    "Share",
    "SourceRecord",
    "StagedSample",
    "StateSpec",
    "StorageFailure",
    "Store",
    "StoreBusy",
    "StoreError",
    "StoredSample",
    "open",
]
