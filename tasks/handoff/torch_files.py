"""Files that torch.save writes: plain tensors in a dict, read without running any code in them."""

import gzip
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.handoff.errors import UnreadableSample


def load_dict(path: Path) -> dict[str, Any]:
    """What a ``.pt`` or ``.ckpt`` file holds, gzipped or not.

    Raises:
        UnreadableSample: it is cut off, is no dict, or holds more than tensors and plain containers.
    """
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                loaded = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UnreadableSample("missing", "there is no such file") from None
    except Exception as error:  # pickle and zip raise what they like
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadableSample("unreadable", f"no plain tensors can be read from it: {first}") from error
    if not isinstance(loaded, dict):
        raise UnreadableSample("unreadable", f"it holds a {type(loaded).__name__}, not a dict of tensors")
    return loaded


def save_dict(path: Path, values: Mapping[str, Any]) -> None:
    """Write a dict; the bytes do not depend on the file's name, as they would if torch.save were given the path."""
    with path.open("wb") as file:
        torch.save(dict(values), file)


def tensor(values: Mapping[str, Any], name: str, *ndims: int) -> torch.Tensor:
    """One tensor out of a file's dict.

    Raises:
        UnreadableSample: it is missing, or has another number of axes.
    """
    value = values.get(name)
    if not isinstance(value, torch.Tensor):
        raise UnreadableSample("keys", f"it has no tensor `{name}`, only {sorted(map(str, values))}")
    if value.ndim not in ndims:
        raise UnreadableSample("shape", f"`{name}` has shape {list(value.shape)}")
    return value
