"""Shapes of the floating-point tensors in a file, read without loading them where the format allows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tasks.verify.diagnose import Shape

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
ID_NAMES = ("input_ids", "token_ids", "tokens", "prompt_token_ids")


class UnreadableFile(ValueError):
    """The file holds no tensors that can be read; the message says why."""


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    shapes: tuple[Shape, ...]
    """Of all floating-point tensors, and of arrays with the bits of bfloat16."""
    num_tokens: int | None
    """Length of the token ids beside them, if there are any."""


def read_shapes(path: Path) -> Contents:
    """Read a ``.pt``, a ``.safetensors`` or a Zarr array or group.

    Raises:
        UnreadableFile: says why; nothing of a pickle but plain tensors and containers is ever loaded.
    """
    try:
        if path.is_dir():
            found = list(_zarr(path))
        elif path.suffix == ".safetensors":
            found = list(_safetensors(path))
        elif path.suffix in TORCH_SUFFIXES:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            found = list(_tensors("", loaded))
        else:
            raise UnreadableFile(
                f"{path}: known are {', '.join(TORCH_SUFFIXES)}, .safetensors and Zarr directories, and shapes such as "
                "771*[512]"
            )
    except UnreadableFile:
        raise
    except FileNotFoundError:
        raise UnreadableFile(f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, SafetensorError) as error:
        raise UnreadableFile(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    except Exception as error:  # pickle raises what it likes
        raise UnreadableFile(
            f"{path} holds more than tensors, and code in it is not run: {str(error).splitlines()[0]}"
        ) from error
    ids = [shape[-1] for name, shape, is_float in found if shape and not is_float and name.endswith(ID_NAMES)]
    shapes = tuple(shape for _, shape, is_float in found if is_float)
    if not shapes:
        raise UnreadableFile(f"{path} holds no floating-point tensor")
    return Contents(shapes, ids[0] if ids else None)


_Found = tuple[str, Shape, bool]


def _safetensors(path: Path) -> Iterator[_Found]:
    with safe_open(path, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            part = tensors.get_slice(name)
            yield name, tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF"))


def _tensors(name: str, value: Any) -> Iterator[_Found]:
    if isinstance(value, torch.Tensor):
        yield name, tuple(value.shape), value.is_floating_point()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(name, inner)


def _zarr(path: Path) -> Iterator[_Found]:
    document = json.loads((path / "zarr.json").read_text())
    if document["node_type"] == "array":
        floating = document["data_type"].startswith(("float", "bfloat")) or "logical_dtype" in document["attributes"]
        yield path.name, tuple(document["shape"]), floating
        return
    for inner in sorted(path.iterdir()):
        if (inner / "zarr.json").is_file():
            yield from _zarr(inner)
