"""What must hold on GPUs, shown with small random checkpoints: both models, TP 1 and 2, both model runners.

    python -m infra.bench.gpu_checks                          everything that this machine's GPUs allow
    python -m infra.bench.gpu_checks --models kimi --sizes 2 --runners v2
    python -m infra.bench.gpu_checks --cpu                    the same on a CPU: V1 runner, float32, shorter prompts

Each configuration is a process of its own. In one engine: states of every depth against Hugging Face in float32, where
the same model in the engine's dtype says what rounding alone does, with prompts of one token and one far longer than a
step; more prompts than the KV cache holds, so that some are preempted; then one worker is killed while it computes,
what was committed is read again, and a new engine completes the rest.
Every sample goes the whole way through capture, verification and commit. Prints one JSON line a check and a table, and
ends with 0 only if every check holds.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from infra.assets.tiny import draw, write_kimi
from tasks.layers import Layers
from tasks.model import read
from tasks.vocabulary import Identity, PlannedSample, Receipt, digest_ids

#: DeepSeek-V3's architecture with Kimi-K2's head sizes and routing, and everything else small.
TEXT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 65536,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "dtype": "bfloat16",
}
IMAGE_TOKEN = 3
DEPTHS = tuple(range(1, TEXT["num_hidden_layers"] + 1))
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}


@dataclass(frozen=True)
class Scale:
    """How much a machine is asked for."""

    dtype: str
    long: int
    """Tokens of the prompt that is far longer than a step."""
    step: int
    """Tokens of a step."""
    piece: int
    """Tokens that one prompt may have in a step, so that several are under way at once."""
    crowd: tuple[int, int]
    """Prompts, and tokens of each, that together exceed the KV cache."""
    block: int
    """Tokens of a block of the KV cache."""
    far: float
    """Relative error from which a row is taken for another than Hugging Face's: in bfloat16, one in ten or so of a
    random model is routed to another expert, or follows such a row."""

    @property
    def cached(self) -> int:
        """Tokens that the KV cache holds: the longest prompt and little more."""
        return self.long + 4 * self.block


GPU = Scale("bfloat16", long=32000, step=8192, piece=1024, crowd=(8, 6000), block=64, far=0.1)
CPU = Scale("float32", long=1500, step=512, piece=64, crowd=(6, 400), block=16, far=1e-4)
NEIGHBOUR = 0.2
"""What 99 of 100 rows of another depth are away at least, as a relative error."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--models", nargs="+", choices=["deepseek", "kimi"], default=["deepseek", "kimi"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2], help="tensor parallel sizes")
    parser.add_argument("--runners", nargs="+", choices=["v1", "v2"], default=["v1", "v2"])
    parser.add_argument("--parts", nargs="+", choices=["states", "crowd", "kill"], default=["states", "crowd", "kill"])
    parser.add_argument("--at-once", type=int, help="configurations that run at the same time; a fourth of the cores")
    parser.add_argument("--directory", type=Path, help="where checkpoints, logs and stores go; kept when given")
    parser.add_argument("--long", type=int, help="tokens of the longest prompt")
    parser.add_argument("--reference", help=argparse.SUPPRESS)  # this process computes the reference of a model
    parser.add_argument("--configuration", help=argparse.SUPPRESS)  # this process runs one configuration
    args = parser.parse_args()
    scale = CPU if args.cpu else GPU
    if args.long:
        scale = Scale(**vars(scale) | {"long": args.long})
    if args.reference:
        compute_reference(args.directory, args.reference, scale, set(args.parts))
    elif args.configuration:
        model, size, runner = args.configuration.split("-")
        check_configuration(args.directory, model, int(size), runner, scale, set(args.parts))
    else:
        sys.exit(run_all(args, scale))


# --- all configurations


def run_all(args: argparse.Namespace, scale: Scale) -> int:
    """Start every process, and print what they found; 0 if all is well."""
    began = time.perf_counter()
    gpus = 0 if args.cpu else torch.cuda.device_count()
    runners = ["v1"] if args.cpu else args.runners
    configurations = [f"{m}-{s}-{r}" for s in args.sizes for m in args.models for r in runners]
    left_out = [] if args.cpu else [c for c in configurations if int(c.split("-")[1]) > gpus]
    configurations = [c for c in configurations if c not in left_out]
    directory = args.directory or Path(tempfile.mkdtemp(prefix="layertap-checks-"))
    directory.mkdir(parents=True, exist_ok=True)
    write_checkpoints(directory, scale)
    at_once = args.at_once or max(1, (os.cpu_count() or 1) // 4)
    command = [sys.executable, "-m", "infra.bench.gpu_checks", "--directory", str(directory)]
    command += ["--parts", *args.parts, *(["--cpu"] if args.cpu else [])]
    command += ["--long", str(args.long)] if args.long else []

    def start(number: int, name: str, *more: str, devices: str, runner: str = "v1") -> tuple[str, int]:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": devices, "HF_HUB_OFFLINE": "1"}
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
        environment["LAYERTAP_NODE"] = f"checks-{os.getpid()}-{name}"  # small engines share a device
        with (directory / f"{name}.log").open("w") as log:
            ended = subprocess.run([*command, *more], stdout=log, stderr=subprocess.STDOUT, env=environment)
        print(f"{time.perf_counter() - began:6.1f} s  {name} ended with {ended.returncode}", flush=True)
        return name, ended.returncode

    def device(number: int, size: int) -> str:
        return ",".join(map(str, range(size))) if size > 1 else str(number % max(1, gpus))

    with ThreadPoolExecutor(len(args.models)) as first, ThreadPoolExecutor(at_once) as pool:
        references = [
            first.submit(start, i, f"reference-{m}", "--reference", m, devices=device(i, 1))
            for i, m in enumerate(args.models)
        ]
        if args.cpu:  # there the engines would wait for the cores that the reference needs
            for reference in references:
                reference.result()
        running = [
            pool.submit(
                start,
                i,
                c,
                "--configuration",
                c,
                devices=device(i, int(c.split("-")[1])),
                runner=c.split("-")[2],
            )
            for i, c in enumerate(configurations)
        ]
        ended = [r.result() for r in [*references, *running]]
    found = [finding for name, _ in ended for finding in findings(directory / f"{name}.log")]
    told = {finding["configuration"] for finding in found}
    for name, code in ended:
        if code or (name in configurations and name not in told):
            log = (directory / f"{name}.log").read_text(errors="replace")
            found.append({"configuration": name, "check": "ended", "holds": False, "detail": f"exit code {code}"})
            print(f"--- {name}\n{log[-4000:]}", flush=True)
    for finding in found:
        print("CHECK " + json.dumps(finding))
    print(table(found))
    for name in left_out:
        print(f"not run for want of GPUs: {name}")
    print(f"{time.perf_counter() - began:.0f} s, {directory}")
    held = bool(found) and all(finding["holds"] for finding in found)
    if held and args.directory is None:
        shutil.rmtree(directory)
    return 0 if held else 1


def findings(log: Path) -> Iterator[dict[str, Any]]:
    """What a process has found, from its output."""
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("CHECK "):  # other threads may have written behind it
            yield json.JSONDecoder().raw_decode(line.removeprefix("CHECK "))[0]


def table(found: list[dict[str, Any]]) -> str:
    """Configurations by checks."""
    checks = list(dict.fromkeys(f["check"] for f in found))
    by_name: dict[str, dict[str, str]] = {}
    for f in found:
        by_name.setdefault(f["configuration"], {})[f["check"]] = "yes" if f["holds"] else "NO"
    rows = [["configuration", *checks]]
    rows += [[name, *(held.get(check, "-") for check in checks)] for name, held in by_name.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


# --- checkpoints, prompts and the reference


def text_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the language model's weights, as published."""
    hidden, heads = TEXT["hidden_size"], TEXT["num_attention_heads"]
    query, latent, rope = TEXT["q_lora_rank"], TEXT["kv_lora_rank"], TEXT["qk_rope_head_dim"]
    nope, value = TEXT["qk_nope_head_dim"], TEXT["v_head_dim"]
    yield "model.embed_tokens.weight", (TEXT["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (TEXT["vocab_size"], hidden)
    for layer in range(TEXT["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}post_attention_layernorm.weight", (hidden,)
        attention = f"{name}self_attn."
        yield f"{attention}q_a_proj.weight", (query, hidden)
        yield f"{attention}q_a_layernorm.weight", (query,)
        yield f"{attention}q_b_proj.weight", (heads * (nope + rope), query)
        yield f"{attention}kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield f"{attention}kv_a_layernorm.weight", (latent,)
        yield f"{attention}kv_b_proj.weight", (heads * (nope + value), latent)
        yield f"{attention}o_proj.weight", (hidden, heads * value)
        experts = {f"mlp.experts.{i}.": TEXT["moe_intermediate_size"] for i in range(TEXT["n_routed_experts"])}
        if layer < TEXT["first_k_dense_replace"]:
            blocks = {"mlp.": TEXT["intermediate_size"]}
        else:
            blocks = experts | {"mlp.shared_experts.": TEXT["moe_intermediate_size"] * TEXT["n_shared_experts"]}
            yield f"{name}mlp.gate.weight", (TEXT["n_routed_experts"], hidden)
            yield f"{name}mlp.gate.e_score_correction_bias", (TEXT["n_routed_experts"],)
        for block, width in blocks.items():
            yield f"{name}{block}gate_proj.weight", (width, hidden)
            yield f"{name}{block}up_proj.weight", (width, hidden)
            yield f"{name}{block}down_proj.weight", (hidden, width)


def write_checkpoints(directory: Path, scale: Scale) -> None:
    """The same language model as a checkpoint of its own and inside Kimi-K2.5."""
    deepseek, kimi = directory / "deepseek", directory / "kimi"
    if (kimi / "preprocessor_config.json").exists():
        return
    for path in (deepseek, kimi):
        path.mkdir(exist_ok=True)
    dtype = getattr(torch, scale.dtype)
    config = TEXT | {"dtype": scale.dtype}
    save_file({n: draw(n, s).to(dtype) for n, s in text_shapes()}, deepseek / "model.safetensors", {"format": "pt"})
    (deepseek / "config.json").write_text(json.dumps(config))
    write_kimi(kimi, load_file(deepseek / "model.safetensors"), config, IMAGE_TOKEN)


def prompts(scale: Scale) -> dict[str, list[npt.NDArray[np.int32]]]:
    """Token ids by what they are for."""
    random = np.random.default_rng(7)

    def some(count: int, length: int) -> list[npt.NDArray[np.int32]]:
        return [random.integers(8, TEXT["vocab_size"], size=length, dtype=np.int32) for _ in range(count)]

    return {
        "one": [np.array([token], np.int32) for token in range(16, 32)],
        "several": [*some(1, 2), *some(1, 7), *some(1, 512), *some(1, 259), *some(1, min(700, scale.long))],
        "long": some(1, scale.long),
        "crowd": some(*scale.crowd),
        "killed": some(24, scale.step // 4),
    }


def compute_reference(directory: Path, model: str, scale: Scale, parts: set[str]) -> None:
    """Write Hugging Face's states of the prompts that are compared; without vLLM, which changes its classes."""
    import transformers

    from tasks.verify.reference import load, residual_states

    # A release that does not know Kimi-K2.5 can still run its language model.
    known = model != "kimi" or hasattr(transformers, "Kimi_K25Config")
    path = directory / (model if known else "deepseek")
    if torch.cuda.is_available():
        load(path, torch.float32).to("cuda")  # with the arguments of the calls that are to find it
    wanted = {
        f"{kind}-{i}": ids
        for kind, group in prompts(scale).items()
        for i, ids in enumerate(group)
        if (kind in ("one", "several", "long") and "states" in parts) or (kind == "crowd" and "crowd" in parts)
    }
    states = {name: residual_states(path, ids, DEPTHS).cpu() for name, ids in wanted.items()}
    if scale.dtype != "float32":  # what rounding alone does
        dtype = getattr(torch, scale.dtype)
        if torch.cuda.is_available():
            load(path, dtype).to("cuda")
        for name, ids in wanted.items():
            rounded_LTH = residual_states(path, ids, DEPTHS, dtype).float().cpu()
            states[f"{name}-error"] = torch.from_numpy(_relative(rounded_LTH, states[name]))
    unfinished = directory / f"reference-{model}.unfinished"
    save_file({name: states_LTH.contiguous() for name, states_LTH in states.items()}, unfinished)
    unfinished.rename(directory / f"reference-{model}.safetensors")


def reference(directory: Path, model: str) -> dict[str, torch.Tensor]:
    """What :func:`compute_reference` wrote; waits for it."""
    path = directory / f"reference-{model}.safetensors"
    deadline = time.monotonic() + 300
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not written; see its log")
        time.sleep(0.5)
    return load_file(path)


# --- one configuration


def check_configuration(directory: Path, model: str, size: int, runner: str, scale: Scale, parts: set[str]) -> None:
    """Run the checks of one configuration in this process; prints a line for each."""
    from tasks.store import Store

    name = f"{model}-{size}-{runner}"
    checkpoint = read(directory / model)
    layers = Layers(ids=DEPTHS, convention="input")
    identity = checkpoint.identity(layers, scale.dtype)  # type: ignore[arg-type]
    store_path = directory / f"store-{name}"
    shutil.rmtree(store_path, ignore_errors=True)
    with Store.open(store_path, identity, run=name) as store:
        checks = Configuration(name, store, checkpoint, identity, size, scale, directory, model)
        checks.run(runner, parts)


class Configuration:
    """The checks of one configuration, one engine after another on the same store."""

    def __init__(
        self,
        name: str,
        store: Any,
        checkpoint: Any,
        identity: Identity,
        size: int,
        scale: Scale,
        directory: Path,
        model: str,
    ) -> None:
        from tasks.verify.config import Audit
        from tasks.verify.examine import Examiner

        self.name, self.store, self.checkpoint, self.identity = name, store, checkpoint, identity
        self.size, self.scale, self.directory, self.model = size, scale, directory, model
        self.examiner = Examiner(checkpoint, identity, size, Audit())
        self.prompts = prompts(scale)

    def say(self, check: str, holds: bool, **figures: Any) -> None:
        found = {"configuration": self.name, "check": check, "holds": bool(holds)} | figures
        print("CHECK " + json.dumps(found), flush=True)

    def engine(self, in_process: bool = False) -> Any:
        """A new engine."""
        from infra.bench.extract import BenchEngine
        from tasks.extract import engine as engine_module
        from tasks.extract.config import Engine
        from tasks.extract.engine import EngineSpec
        from tasks.store.stage import STAGE

        on_cpu = self.scale.dtype == CPU.dtype
        worker = "infra.bench.bench_worker." + ("CpuWatching" if on_cpu else "GpuWatching")
        engine_module.WORKERS.update(cpu=worker, gpu=worker)
        extra: dict[str, Any] = {
            # Prompts are taken in though they will not all fit, and grow side by side: some must be preempted.
            "scheduler_reserve_full_isl": False,
            "long_prefill_token_threshold": self.scale.piece,
            "block_size": self.scale.block,
            "num_gpu_blocks_override": -(-self.scale.cached // self.scale.block),
        }
        engine = Engine(
            tensor_parallel_size=self.size,
            max_model_len=self.scale.long + 16,
            max_num_batched_tokens=self.scale.step,
            max_num_seqs=32,
            gpu_memory_utilization=0.1,
            kv_cache_gib=0.25 if on_cpu else 1.0,
            staging_gib=1.0,
            writer_threads=2,
            writing_ranks="all" if self.size > 1 else "first",
            in_process=in_process,
            extra=extra,
        )
        began = time.perf_counter()
        spec = EngineSpec(
            self.checkpoint,
            self.identity.depths,
            self.identity.dtype,
            engine,
            STAGE,
            self.store.spec.to_dict(),
            probe=tuple(range(8, 48)),
        )
        running = BenchEngine(spec).start()
        print(f"engine started in {time.perf_counter() - began:.1f} s", flush=True)
        return running

    def run(self, runner: str, parts: set[str]) -> None:
        from tasks.extract.engine import GO_ON_TOKENS

        began = time.perf_counter()
        # Where nothing is to die, one process is enough on a CPU, and starts sooner.
        running = self.engine(in_process=self.scale.dtype == CPU.dtype and self.size == 1 and "kill" not in parts)
        try:
            device, module = running.ranks[0]["device"], running.ranks[0]["model_runner"].rpartition(".")[0]
            on_cpu = device == "cpu"
            self.say("runner", on_cpu or module == RUNNERS[runner], found=module, device=device)
            self.say("goes on", len(running.continuation) == GO_ON_TOKENS, tokens=running.continuation)
            if "states" in parts:
                self.states(running)
            if "crowd" in parts:
                self.crowd(running)
            if "kill" in parts:
                self.kill(running)
        finally:
            running.shutdown()
        print(f"all of {self.name} took {time.perf_counter() - began:.1f} s", flush=True)

    def extract(self, running: Any, ids: list[npt.NDArray[np.int32]]) -> list[str]:
        """Capture, verify and commit samples; returns what is wrong with those that were refused."""
        from tasks.extract.engine import Job

        samples = {self.identity.key(i): i for i in ids}
        receipts = running.submit(Job(self.store.staging(), samples)).result(timeout=300)
        return self.commit(samples, receipts)

    def commit(self, samples: Mapping[str, npt.NDArray[np.int32]], receipts: dict[str, list[Receipt]]) -> list[str]:
        from tasks.store import StagedSample

        planned = [PlannedSample(key, len(ids), (0,)) for key, ids in samples.items()]
        verdicts = self.examiner.examine(planned, receipts, {key: digest_ids(ids) for key, ids in samples.items()})
        staged = []
        for verdict in verdicts:
            if verdict.accepted:
                receipt = next(r for r in verdict.receipts if r.objects is not None)
                ids = samples[verdict.key]
                mask = np.ones(len(ids), bool)
                staged.append(StagedSample(verdict.key, len(ids), receipt.objects or {}, mask, receipt.next_token))
        self.store.commit(staged)
        self.store.record()
        return [f"{v.reason}: {v.detail}" for v in verdicts if not v.accepted]

    def compare(self, kind: str) -> tuple[bool, dict[str, float]]:
        """Whether samples are what Hugging Face computes, up to what rounding does to its own states; the figures."""
        from tasks.store import open as open_store

        wanted, reader = reference(self.directory, self.model), open_store(self.store.url)
        own, rounding, others = [], [], []
        for i, ids in enumerate(self.prompts[kind]):
            key, name = self.identity.key(ids), f"{kind}-{i}"
            if key not in reader.keys:
                continue
            states_LTH, right_LTH = reader[key].hidden_states.float(), wanted[name]
            own.append(_relative(states_LTH, right_LTH).flatten())
            rounding.append(wanted[f"{name}-error"].numpy().flatten() if f"{name}-error" in wanted else 0 * own[-1])
            others.append(_relative(states_LTH[:-1], right_LTH[1:]).flatten())
        if not own:
            return False, {"rows": 0}
        errors, by_rounding = np.concatenate(own), np.concatenate(rounding)
        figures = {
            "rows": errors.size // len(DEPTHS),
            "median": round(float(np.median(errors)), 7),
            "median_by_rounding": round(float(np.median(by_rounding)), 7),
            "far": round(float((errors > self.scale.far).mean()), 5),
            "far_by_rounding": round(float((by_rounding > self.scale.far).mean()), 5),
            "neighbour_first": round(float(np.quantile(np.concatenate(others), 0.01)), 4),
        }
        alike = figures["median"] <= 1.2 * figures["median_by_rounding"] + 1e-4
        alike = alike and figures["far"] <= 1.5 * figures["far_by_rounding"] + 0.01
        return alike and figures["neighbour_first"] >= NEIGHBOUR, figures

    def states(self, running: Any) -> None:
        refused = self.extract(running, [i for k in ("one", "several", "long") for i in self.prompts[k]])
        self.say("ranks agree, tokens proved", not refused, ranks=self.size, refused=refused[:3])
        for kind, check in (("several", "states"), ("one", "one token"), ("long", "chunked prefill")):
            holds, figures = self.compare(kind)
            if kind == "long":
                figures["tokens"] = len(self.prompts["long"][0])
                figures["steps"] = running.rpc("bench_pieces", self.identity.key(self.prompts["long"][0]))[0]
                holds = holds and figures["steps"] > 1
            self.say(check, holds, **figures)

    def crowd(self, running: Any) -> None:
        before = running.rpc("bench_restarts")
        refused = self.extract(running, self.prompts["crowd"])
        preempted = [after - b for after, b in zip(running.rpc("bench_restarts"), before, strict=True)]
        holds, figures = self.compare("crowd")
        self.say(
            "preemption",
            holds and not refused and min(preempted) > 0,
            preempted=preempted,
            refused=refused[:3],
            **figures,
        )

    def kill(self, running: Any) -> None:
        """Kill the last rank's worker while it computes, and complete the rest with another engine."""
        from tasks.extract.engine import EngineDied, Job
        from tasks.store import open as open_store
        from tasks.store.maintenance import verify

        half = len(self.prompts["killed"]) // 2
        refused = self.extract(running, self.prompts["killed"][:half])
        reader = open_store(self.store.url)
        before = {key: reader[key].states_LTH.copy() for key in reader.keys}
        victim = running.rpc("bench_pid")[-1]
        samples = {self.identity.key(i): i for i in self.prompts["killed"][half:]}
        finished: list[str] = []

        def kill(key: str, num_tokens: int) -> None:
            if not finished:
                os.kill(victim, signal.SIGKILL)
            finished.append(key)

        began = time.perf_counter()
        job = Job(self.store.staging(), samples, on_sample=kill)
        try:
            running.submit(job).result(timeout=180)
            died = "the job ended as if nothing had happened"
        except EngineDied as error:
            died = ""
            print(f"died as it should: {error}", flush=True)
        except TimeoutError:
            died = "nobody noticed"
        self.say("death is noticed", not died, detail=died, seconds=round(time.perf_counter() - began, 1))
        running.shutdown()

        reader = open_store(self.store.url)
        intact = all(np.array_equal(reader[key].states_LTH, states) for key, states in before.items())
        checked = verify(self.store.url)
        fine = intact and len(reader) == len(before) and not checked.damaged
        self.say("committed is intact", fine, samples=len(reader), damaged=len(checked.damaged))

        again = self.engine()
        try:
            refused += self.extract(again, list(samples.values()))
        finally:
            again.shutdown()
        reader = open_store(self.store.url)
        complete = all(self.identity.key(ids) in reader.keys for ids in self.prompts["killed"])
        self.say("a new engine completes", complete and not refused, samples=len(reader), refused=refused[:3])


def _relative(a_LTH: torch.Tensor, b_LTH: torch.Tensor) -> npt.NDArray[np.float32]:
    """Relative error of each row, in the Euclidean norm."""
    errors: npt.NDArray[np.float32] = ((a_LTH - b_LTH).norm(dim=-1) / b_LTH.norm(dim=-1)).numpy()
    return errors


if __name__ == "__main__":
    main()
