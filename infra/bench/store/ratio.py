"""How small real hidden states become, and what other lossless ways would give.

``python -m infra.bench.store.ratio [--model DIR] [--tokens 1024]``; without a directory, SmolLM2-135M is fetched.

The states come from Hugging Face's forward in bfloat16 over real chats, at the depths the field trains on.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numcodecs import blosc, zstd
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.bench.store.common import print_machine
from tasks.store import blosc_frame
from tasks.store.layout import StateSpec, chunk_tokens
from tasks.store.stage import stage_states

Bits = npt.NDArray[np.uint16]


def real_states(model_dir: Path, chats: Path, num_tokens: int) -> tuple[Bits, Bits]:
    """[L, T, H] bits of bfloat16 for two texts of different conversations."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    num_layers = model.config.num_hidden_layers
    depths = [3, num_layers // 2 + 1, num_layers - 2, num_layers]
    ids: list[int] = []
    with chats.open() as lines:
        for line in lines:
            for message in json.loads(line).get("messages", []):
                ids += tokenizer(str(message.get("content") or ""))["input_ids"]
            if len(ids) >= 2 * num_tokens:
                break
    captured: dict[int, torch.Tensor] = {}
    for k in depths:
        # Hooks rather than output_hidden_states, whose last entry is normalized.
        model.model.layers[k - 1].register_forward_hook(
            lambda _, __, out, k=k: captured.update({k: out[0] if isinstance(out, tuple) else out})
        )
    found = []
    with torch.no_grad():
        for part in (ids[:num_tokens], ids[num_tokens : 2 * num_tokens]):
            captured.clear()
            model.model(torch.tensor([part]))
            states = torch.stack([captured[k].reshape(len(part), -1) for k in depths])
            found.append(states.contiguous().view(torch.uint16).numpy())
    return found[0], found[1]


def entropy(symbols: npt.NDArray[np.integer]) -> float:
    """Bits a symbol, order 0."""
    counts = np.bincount(symbols.ravel())
    p = counts[counts > 0] / symbols.size
    return float(-(p * np.log2(p)).sum())


def conditional(symbols: npt.NDArray[np.integer], context: npt.NDArray[np.integer]) -> float:
    """Bits a symbol, given the context; no cost of a model is counted, so it flatters large contexts."""
    pair = context.astype(np.int64) * 256 + symbols
    return entropy(np.unique(pair, return_inverse=True)[1]) - entropy(np.unique(context, return_inverse=True)[1])


def bounds(states: Bits) -> None:
    low, high = states & 0xFF, states >> 8
    exponent = (states >> 7) & 0xFF
    rest = (states & 0x7F) | ((states >> 8) & 0x80)
    layers, _, hidden = states.shape
    depth = np.broadcast_to(np.arange(layers)[:, None, None], states.shape)
    channel = np.broadcast_to(np.arange(hidden), states.shape)
    each = [16 / (entropy(a) + entropy(b)) for a, b in zip(low, high, strict=True)]
    print(
        f"two byte planes, order 0: ratio {16 / (entropy(low) + entropy(high)):.3f} over all depths, "
        f"{statistics.harmonic_mean(each):.3f} with a code for each depth"
    )
    print(f"sign and mantissa {entropy(rest):.2f} bits of 8; exponent {entropy(exponent):.2f} bits of 8, and given")
    before = np.roll(exponent, 1, axis=1)
    above = np.roll(exponent, 1, axis=0)
    for name, context in {
        "depth": depth,
        "channel": channel,
        "depth and channel": depth * hidden + channel,
        "depth, exponent of the token before": depth * 256 + before,
        "depth, exponent of the depth before": depth * 256 + above,
    }.items():
        bits = conditional(exponent, context)
        print(f"  {name:36} {bits:.2f} bits -> ratio {16 / (entropy(rest) + bits):.3f}")


def centred(states: Bits) -> tuple[Bits, npt.NDArray[np.uint8]]:
    """Exponents less the median of their depth and channel, in one byte; sign and mantissa in the other."""
    exponent = ((states >> 7) & 0xFF).astype(np.uint8)
    median = np.median(exponent, axis=1).astype(np.uint8)
    rest = ((states & 0x7F) | ((states >> 8) & 0x80)).astype(np.uint8)
    return ((exponent - median[:, None]).astype(np.uint16) << 8) | rest, median


def uncentred(pair: Bits, median: npt.NDArray[np.uint8]) -> Bits:
    exponent = ((pair >> 8).astype(np.uint8) + median[:, None]).astype(np.uint16)
    return (((pair & 0x80) << 8) | (exponent << 7) | (pair & 0x7F)).astype(np.uint16)


def trial(
    name: str, states: Bits, encode: Callable[[Bits], object], decode: Callable[[object], object], stock: bool
) -> None:
    def size(encoded: object) -> int:
        return sum(map(size, encoded)) if isinstance(encoded, tuple) else memoryview(encoded).nbytes  # type: ignore[arg-type]

    times: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(5):
        start = time.perf_counter()
        encoded = encode(states)
        middle = time.perf_counter()
        decoded = decode(encoded)
        times["encode"].append(middle - start)
        times["decode"].append(time.perf_counter() - middle)
    given = np.frombuffer(np.ascontiguousarray(decoded), dtype=np.uint16)
    assert np.array_equal(np.sort(given), np.sort(states.ravel())), name
    speeds = [states.nbytes / 1e6 / statistics.median(values) for values in times.values()]
    print(
        f"| {name:58} | {states.nbytes / size(encoded):.3f} | {speeds[0]:6.0f} | {speeds[1]:6.0f} | "
        f"{'yes' if stock else 'no'} |"
    )


def trials(states: Bits) -> None:
    chunk = np.ascontiguousarray(states[:, : chunk_tokens(states.shape[2])])
    mib = 1 << 20
    print("| lossless codec, a chunk of each depth, one thread | ratio | encode MB/s | decode MB/s | stock readers |")
    print("|---|---|---|---|---|")

    def blosc_trial(name: str, cname: bytes, level: int, shuffle: int, block: int, flip: bool = False) -> None:
        def encode(s: Bits) -> tuple[bytes, ...]:
            planes = (np.ascontiguousarray(plane.T) if flip else plane for plane in s)
            return tuple(bytes(blosc.compress(plane, cname, level, shuffle, block, 2)) for plane in planes)

        def decode(e: object) -> Bits:
            planes = [np.frombuffer(blosc.decompress(plane), dtype=np.uint16) for plane in e]  # type: ignore[attr-defined]
            if flip:
                planes = [np.ascontiguousarray(plane.reshape(chunk.shape[:0:-1]).T) for plane in planes]
            return np.stack(planes)

        trial(name, chunk, encode, decode, True)

    def store_encode(s: Bits) -> object:
        return tuple(b"".join(blosc_frame.compress(plane, shuffle=True)) for plane in s)

    def store_decode(e: object) -> object:
        return b"".join(blosc.decompress(plane) for plane in e)  # type: ignore[attr-defined]

    trial("blosc(zstd from 7 bytes on, shuffle, 4 MiB): the store's", chunk, store_encode, store_decode, True)
    blosc_trial("blosc(zstd 1, shuffle, 1 MiB)", b"zstd", 1, blosc.SHUFFLE, mib)
    blosc_trial("blosc(zstd 1, shuffle, 256 KiB)", b"zstd", 1, blosc.SHUFFLE, mib // 4)
    blosc_trial("blosc(zstd 1, shuffle, default block)", b"zstd", 1, blosc.SHUFFLE, 0)
    blosc_trial("blosc(zstd 3, shuffle, 1 MiB)", b"zstd", 3, blosc.SHUFFLE, mib)
    blosc_trial("blosc(zstd 9, shuffle, 1 MiB)", b"zstd", 9, blosc.SHUFFLE, mib)
    blosc_trial("blosc(zstd 1, bitshuffle, 1 MiB)", b"zstd", 1, blosc.BITSHUFFLE, mib)
    blosc_trial("transpose (channel first), blosc(zstd 1, shuffle, 1 MiB)", b"zstd", 1, blosc.SHUFFLE, mib, True)
    blosc_trial("transpose (channel first), blosc(zstd 1, bitshuffle)", b"zstd", 1, blosc.BITSHUFFLE, mib, True)
    blosc_trial("blosc(lz4 1, bitshuffle, 1 MiB)", b"lz4", 1, blosc.BITSHUFFLE, mib)
    trial("zstd 1", chunk, lambda s: zstd.compress(s, 1), zstd.decompress, True)

    def fields(s: Bits) -> bytes:
        exponent = (s >> 7) & 0xFF
        return bytes(blosc.compress((exponent << 8) | (s & 0x7F) | ((s >> 8) & 0x80), b"zstd", 1, 1, mib, 2))

    def unfields(e: object) -> Bits:
        pair = np.frombuffer(blosc.decompress(e), dtype=np.uint16)
        return (((pair & 0x80) << 8) | ((pair >> 8) << 7) | (pair & 0x7F)).astype(np.uint16)

    trial("exponent apart from sign and mantissa, blosc(zstd 1)", chunk, fields, unfields, False)

    def encode_centred(s: Bits) -> tuple[bytes, bytes]:
        pair, median = centred(s)
        return bytes(blosc.compress(pair, b"zstd", 1, 1, mib, 2)), median.tobytes()

    def decode_centred(e: Any) -> Bits:
        packed, median = e
        pair = np.frombuffer(blosc.decompress(packed), dtype=np.uint16).reshape(chunk.shape)
        return uncentred(pair, np.frombuffer(median, dtype=np.uint8).reshape(chunk.shape[0], chunk.shape[2]))

    trial("exponent less the channel's median, blosc(zstd 1)", chunk, encode_centred, decode_centred, False)

    def xor_depth(s: Bits) -> bytes:
        # Exponents only: mantissas of different depths have nothing in common, and the difference would add noise.
        exponent = ((s >> 7) & 0xFF).astype(np.uint8)
        exponent[1:] -= exponent[:-1].copy()
        pair = (exponent.astype(np.uint16) << 8) | (s & 0x7F) | ((s >> 8) & 0x80)
        return bytes(blosc.compress(pair, b"zstd", 1, 1, mib, 2))

    def unxor_depth(e: object) -> Bits:
        pair = np.frombuffer(blosc.decompress(e), dtype=np.uint16).reshape(chunk.shape)
        exponent = np.cumsum(pair >> 8, axis=0, dtype=np.uint8).astype(np.uint16)
        return (((pair & 0x80) << 8) | (exponent << 7) | (pair & 0x7F)).astype(np.uint16)

    trial("exponent less that of the depth before, blosc(zstd 1)", chunk, xor_depth, unxor_depth, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--chats", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    if args.model is None or args.chats is None:
        from infra.assets.chats import demo_chats
        from infra.assets.smollm2 import smollm2

        args.model, args.chats = args.model or smollm2(), args.chats or demo_chats()
    print_machine()
    for states in real_states(args.model, args.chats, args.tokens):
        largest = np.abs((states.astype(np.uint32) << 16).view(np.float32)).max()
        print(f"\nSmolLM2-135M, [L, T, H] = {list(states.shape)}, largest magnitude {largest:.0f}")
        with tempfile.TemporaryDirectory() as staging:
            for length in (len(states[0]), 300, 64):
                part = np.ascontiguousarray(states[:, :length])
                spec = StateSpec(len(part), part.shape[2], "bfloat16")
                objects = stage_states(staging, "0" * 64, spec, part, np.zeros(length))
                stored = sum(size for size, _ in objects.values())
                print(f"the store, {length} tokens, all files: ratio {part.nbytes / stored:.3f} (>= 1.45)")
        bounds(states)
    print()
    trials(states)


if __name__ == "__main__":
    main()
