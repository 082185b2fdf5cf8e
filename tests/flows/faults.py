"""Scripted faults: a stage that fails for the samples of chosen lengths, named in an environment variable."""

import errno
import os
from typing import Any

from tasks.store.errors import storage_failures
from tasks.store.stage import stage_states

LENGTHS = "LAYERTAP_TEST_FAIL_LENGTHS"
FULL = "LAYERTAP_TEST_FULL_DISK_LENGTHS"


def stage(directory: Any, key: str, spec: Any, states_LTH: Any, input_ids: Any, executor: Any) -> Any:
    if str(states_LTH.shape[1]) in os.environ.get(LENGTHS, "").split(","):
        raise ArithmeticError("scripted")
    if str(states_LTH.shape[1]) in os.environ.get(FULL, "").split(","):
        with storage_failures(directory):
            raise OSError(errno.ENOSPC, "No space left on device")
    return stage_states(directory, key, spec, states_LTH, input_ids, executor)
