"""What the server half uses of vLLM 0.26 to 0.31, as protocols: nothing here imports vLLM, and nothing runs."""

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class ModelConfig(Protocol):
    model: str
    quantization: str | None
    hf_config: Any
    dtype: "torch.dtype"
    logprobs_mode: str
    max_model_len: int
    enable_sleep_mode: bool
    is_hybrid: bool

    def get_vocab_size(self) -> int: ...


class LoRAConfig(Protocol):
    max_lora_rank: int
    target_modules: list[str] | None


class ParallelConfig(Protocol):
    tensor_parallel_size: int
    worker_extension_cls: str


class SchedulerConfig(Protocol):
    max_num_seqs: int


class DeviceConfig(Protocol):
    device_type: str


class CacheConfig(Protocol):
    cache_dtype: str
    enable_prefix_caching: bool


class VllmConfig(Protocol):
    model_config: ModelConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    cache_config: CacheConfig
    device_config: DeviceConfig
    lora_config: LoRAConfig | None
    additional_config: dict[str, Any]


class FlatLogprobs(Protocol):
    """Log-probs of all positions; those of position i begin at start_indices[i]."""

    start_indices: list[int]
    logprobs: Sequence[float | None]


class CompletionOutput(Protocol):
    index: int
    token_ids: list[int]
    logprobs: FlatLogprobs
    finish_reason: str
    routed_experts: (
        Any  # (tokens that the model read, layers, experts of a token), with --enable-return-routed-experts
    )


class RequestOutput(Protocol):
    outputs: list[CompletionOutput]
    prompt_token_ids: list[int]
    prompt_logprobs: FlatLogprobs


class SamplingParams(Protocol):
    n: int


class LoRARequest(Protocol):
    lora_name: str
    lora_int_id: int


class EngineCore(Protocol):
    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None: ...


class Engine(Protocol):
    """The engine client of vLLM's API server."""

    vllm_config: VllmConfig
    engine_core: EngineCore

    def generate(
        self, prompt: dict, sampling_params: SamplingParams, request_id: str, *, lora_request: LoRARequest | None
    ) -> AsyncIterator[RequestOutput]: ...

    def get_tokenizer(self) -> Any: ...  # a tokenizer, or an awaitable of one

    async def collective_rpc(self, method: str, timeout: float | None, args: tuple, kwargs: dict) -> list[dict]: ...

    async def resume_generation(self) -> None: ...

    async def reset_prefix_cache(self) -> bool | None: ...

    async def remove_lora(self, lora_id: int) -> object: ...

    async def sleep(self, level: int) -> None: ...

    async def wake_up(self) -> None: ...

    async def is_sleeping(self) -> bool: ...


class ErrorInfo(Protocol):
    message: str


class ErrorResponse(Protocol):
    error: ErrorInfo


class Models(Protocol):
    """OpenAIServingModels."""

    lora_requests: dict[str, LoRARequest]

    async def load_lora_adapter(self, request: Any) -> str | ErrorResponse: ...

    async def unload_lora_adapter(self, request: Any) -> str | ErrorResponse: ...


class QuantMethod(Protocol):
    process_weights_after_loading: "Callable[[torch.nn.Module], None]"


class LinearLayer(Protocol):
    """A linear layer of a worker; a row-parallel one also has `input_size_per_partition`, a fused one
    `output_partition_sizes`."""

    input_size: int
    output_size: int
    tp_rank: int
    tp_size: int
    quant_method: QuantMethod


class ExpertLayer(Protocol):
    """A worker's experts of one layer (RoutedExperts)."""

    hidden_size: int
    global_num_experts: int
    local_num_experts: int
    moe_config: Any
    _expert_map: "torch.Tensor | None"


class ModelRunner(Protocol):
    model: "torch.nn.Module"


class Worker(Protocol):
    model_runner: ModelRunner
    model_config: ModelConfig
    vllm_config: VllmConfig
    device: "torch.device"
