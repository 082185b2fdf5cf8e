"""What a checkpoint's own files say of the model, read without loading a weight."""

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field
from safetensors import safe_open

from tasks.layers import Layers
from tasks.vocabulary import DType, Identity, StoredAs

#: A weight file up to this size is hashed whole; a larger one by its header and evenly spaced blocks.
WHOLE_FILE_BYTES = 64 << 20
BLOCK_BYTES = 64 << 10
BLOCKS_PER_FILE = 256

FINAL_NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight")

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Model(BaseModel):
    """Which checkpoint to run, and what it is expected to be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(min_length=1, description="Local directory, or repository id on the Hugging Face hub.")]
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub; not for a directory.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that the checkpoint ships (a tokenizer, say). Off unless asked for."
    )
    hidden_size: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Refuse a checkpoint with another hidden size. Not checked when absent."
    )
    num_layers: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Refuse a checkpoint with another number of decoder layers. Not checked when absent."
    )


class ModelError(ValueError):
    """The checkpoint cannot be found or is not what the configuration says; the message says what to change."""


@dataclass(frozen=True)
class Checkpoint:
    """A resolved checkpoint: a directory on this machine and the facts read from its files."""

    path: Path
    fingerprint: str
    architecture: str
    num_layers: int
    """Decoder layers of the language model."""
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int | None
    config: dict[str, Any]
    """config.json as it stands."""
    trust_remote_code: bool = False

    def identity(
        self, layers: Layers, dtype: DType, *, stored_as: StoredAs = "exact", numerics: Mapping[str, Any] | None = None
    ) -> Identity:
        """What decides the values and the shape of this checkpoint's states at these layers (checked before)."""
        return Identity(
            model=self.fingerprint,
            architecture=self.architecture,
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            depths=layers.depths,
            convention=layers.convention,
            layer_ids=tuple(sorted(layers.ids)),
            dtype=dtype,
            stored_as=stored_as,
            numerics=dict(numerics or {}),
        )


def resolve(model: Model) -> Checkpoint:
    """Find the checkpoint (fetching it from the hub if ``model.path`` is no directory) and read its facts.

    Raises:
        ModelError: nothing there, no config.json, no weights, or other sizes than configured.
    """
    directory = Path(model.path).expanduser()
    if directory.is_dir():
        if model.revision is not None:
            raise ModelError(f"model.revision is for the hub, but model.path {directory} is a directory; remove it")
        checkpoint = read(directory, trust_remote_code=model.trust_remote_code)
    elif model.path.startswith((".", "/", "~")) or model.path.count("/") > 1:
        raise ModelError(f"model.path {directory} does not exist")
    else:
        checkpoint = read(_fetch(model), trust_remote_code=model.trust_remote_code)
    for name in ("hidden_size", "num_layers"):
        expected, found = getattr(model, name), getattr(checkpoint, name)
        if expected is not None and expected != found:
            raise ModelError(f"model.{name} is configured as {expected}, but {checkpoint.path} has {found}")
    return checkpoint


def _fetch(model: Model) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and needed only for the hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    if model.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    except Exception as error:
        at = f" at revision {model.revision}" if model.revision else ""
        raise ModelError(
            f"model.path {model.path!r} is no directory, and fetching it from the hub{at} failed: {error}"
        ) from error


def read(directory: Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Facts of the checkpoint in ``directory``.

    Raises:
        ModelError: the directory is no checkpoint of a language model.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory} has no readable config.json: {error}") from error
    text = config.get("text_config", config)  # multimodal wrappers keep the language model's part there
    try:
        heads = int(text["num_attention_heads"])
        return Checkpoint(
            path=directory,
            fingerprint=fingerprint(directory, code=trust_remote_code),
            architecture=str(config["architectures"][0]),
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            vocab_size=int(text["vocab_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or heads),
            max_position_embeddings=text.get("max_position_embeddings"),
            config=config,
            trust_remote_code=trust_remote_code,
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{directory}/config.json does not describe a language model: missing {error}") from error


def fingerprint(directory: Path, *, code: bool = False) -> str:
    """Name the content of a checkpoint, in seconds even for 600 GB.

    ``hub:<commit>`` for a snapshot in the Hugging Face cache. Otherwise ``files:<sha256>`` over config.json, and
    over name, size and content of every weight file (and, with ``code``, of every Python file, since it then
    runs). A weight file above 64 MiB counts by its safetensors header (all names, types and shapes) and 256
    blocks of 64 KiB spread evenly from its first byte to its last: training changes all of a tensor, so a changed
    model cannot hide, while a single flipped byte between the blocks can.

    Raises:
        ModelError: the directory holds no weights.
    """
    if _COMMIT.fullmatch(directory.name) and directory.parent.name == "snapshots":
        return f"hub:{directory.name}"
    weights = sorted(p for p in directory.iterdir() if p.suffix in {".safetensors", ".bin", ".pt", ".pth"})
    if not weights:
        raise ModelError(f"{directory} holds no weights (*.safetensors, *.bin)")
    files = weights + (sorted(directory.rglob("*.py")) if code else [])
    with ThreadPoolExecutor(max_workers=8) as pool:
        digests = list(pool.map(_digest_file, files))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    total = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path, digest in zip(files, digests, strict=True):
        total.update(f"\n{path.relative_to(directory)} {path.stat().st_size} {digest}".encode())
    return f"files:{total.hexdigest()}"


def _digest_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size - 8)))
        for block in range(BLOCKS_PER_FILE):
            file.seek((size - BLOCK_BYTES) * block // (BLOCKS_PER_FILE - 1))
            digest.update(file.read(BLOCK_BYTES))
        return digest.hexdigest()


def final_norm(checkpoint: Checkpoint) -> tuple[npt.NDArray[np.float32], float]:
    """Weight [H] and epsilon of the RMS norm between r_L and the language model's head.

    Raises:
        ModelError: the checkpoint has no such tensor in its safetensors files.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name in FINAL_NORM_NAMES:
                    return tensors.get_tensor(name).float().numpy(), float(text["rms_norm_eps"])
    raise ModelError(f"{checkpoint.path} has none of the tensors {FINAL_NORM_NAMES} in *.safetensors")
