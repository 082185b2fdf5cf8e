"""What a user says of the engine."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.vocabulary import ReusePrefixes

#: vLLM arguments that change how fast the engine runs and not what it computes (within a dtype's rounding).
NEUTRAL = frozenset(
    {
        "attention_backend",
        "block_size",
        "cpu_offload_gb",
        "disable_custom_all_reduce",
        "distributed_timeout_seconds",
        "enable_expert_parallel",
        "max_num_partial_prefills",
        "max_parallel_loading_workers",
        "mm_processor_cache_gb",
        "moe_backend",
        "num_gpu_blocks_override",
        "safetensors_load_strategy",
    }
)


class Engine(BaseModel):
    """Arguments of the vLLM engine and of the capture inside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tensor_parallel_size: Annotated[int, Field(ge=1, description="GPUs (or CPU processes) that share each layer.")] = 1
    max_model_len: Annotated[int, Field(ge=2, description="Longest sample in tokens, plus one.")] = 4096
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="Tokens of one engine step. When absent, up to 16384 on GPUs and 8192 on a CPU, so that a step's "
        "captured states take no more than 1 GiB.",
    )
    max_num_seqs: Annotated[int, Field(ge=1, description="Most samples of one engine step.")] = 256
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Size of the KV cache of each rank. When absent, what a GPU's memory leaves; on a CPU, two steps.",
    )
    enforce_eager: bool = Field(
        default=True, description="Run without torch.compile and CUDA graphs, which gain nothing for large prefills."
    )
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    in_process: bool = Field(
        default=False,
        description="Run the engine inside the flow's process: starts faster, one device only, and a crash of the "
        "engine ends the flow.",
    )
    staging_gib: Annotated[float, Field(gt=0)] = Field(
        default=8.0, description="Host memory for captured samples that are not written yet; the engine waits beyond."
    )
    writer_threads: Annotated[int, Field(ge=1)] = Field(
        default=4, description="Threads that encode and write samples, over all writing ranks."
    )
    writing_ranks: Literal["auto", "first", "all"] = Field(
        default="auto",
        description="`first`: rank 0 writes all samples. `all`: samples are dealt over the ranks, since one process "
        "cannot encode as fast as several GPUs compute. `auto`: `all` on GPUs, `first` on a CPU.",
    )
    writer_process: bool | None = Field(
        default=None,
        description="Assemble and write samples in a process beside each GPU's worker, so that the engine's Python "
        "need not wait for theirs. On a GPU it is always so; on a CPU, only where asked for.",
    )
    ring_slots: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="Pinned buffers to the writing process, each of one step. When absent 3, or 2 where host memory is "
        "short.",
    )
    reuse_prefixes: ReusePrefixes = Field(
        default="auto",
        description="Whether the rows of a prefix that several samples begin with are computed and stored once. "
        "`auto`: if a tenth of all tokens or more can be saved. On a CPU, KV blocks are then of 32 tokens, unless "
        "`extra` gives a `block_size`.",
    )
    reuse_gib: Annotated[float, Field(gt=0)] = Field(
        default=4.0,
        description="Host memory for rows of shared prefixes, over all ranks that keep states. A sample whose rows are "
        "no longer held when the engine counts on them is computed again.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="Further vLLM engine arguments by name. Those that would break the capture are refused.",
    )

    @field_validator("reuse_prefixes", mode="before")
    @classmethod
    def _from_yaml(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # what YAML makes of on and off

    @property
    def numerics(self) -> dict[str, Any]:
        """The arguments that decide the states' values, where they differ from vLLM's defaults."""
        values = {k: v for k, v in self.extra.items() if k not in NEUTRAL}
        if self.quantization is not None:
            values["quantization"] = self.quantization
        if self.kv_cache_dtype != "auto":
            values["kv_cache_dtype"] = self.kv_cache_dtype
        if self.load_format == "dummy":
            values["load_format"] = self.load_format
        return values
