"""vLLM's engine as launch/endpoint.py sees it, without vLLM: an application with a fake engine client in its state.

The fake's weights are a name: "base", or the adapter that was folded in. Its log-probs tell which weights and which
LoRA answered, so a test sees what a request was really answered from.
"""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi import FastAPI
from safetensors.numpy import save, save_file

from launch.endpoint import RolloutEndpoint

HASH = "ab" * 32
LAYERS = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.0.mlp.up_proj": (12, 6)}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}


def write_base(folder: Path, nf4: bool = True) -> Path:
    """A base directory with the layers above, an embedding and a norm."""
    folder.mkdir(parents=True)
    tensors = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in LAYERS.items()}
    tensors |= {
        "model.embed_tokens.weight": np.zeros((9, 6), np.float32),
        "model.norm.weight": np.zeros(6, np.float32),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"base_hash": HASH}))
    if nf4:
        (folder / "nf4").mkdir()
        (folder / "nf4" / "index.json").write_text("{}")
    return folder


def adapter_tensors(rank: int = 2) -> dict[str, np.ndarray]:
    """A whole LoRA of the layers above."""
    found = {}
    for name, (rows, columns) in LAYERS.items():
        found[f"base_model.model.{name}.lora_A.weight"] = np.ones((rank, columns), np.float32)
        found[f"base_model.model.{name}.lora_B.weight"] = np.ones((rows, rank), np.float32)
    return found


def write_adapter(folder: Path, tensors: dict | None = None, **config: Any) -> Path:
    """An adapter directory as peft writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter_tensors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def adapter_body(config: dict | None = CONFIG) -> bytes:
    """The same as one file for the body of a request."""
    return save(adapter_tensors(), metadata={"adapter_config": json.dumps(config)} if config else {"other": "1"})


class Engine:
    """`calls` is what was asked, in order; `fails` {method: error} of the workers; `gate` holds generations back."""

    def __init__(self, base: Path, lora_rank: int | None = 8, remerge: bool = True, sleep: bool = False):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(base),
                quantization="fp8_per_channel",
                logprobs_mode="processed_logprobs",
                max_model_len=32,
                enable_sleep_mode=sleep,
                get_vocab_size=lambda: 300,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, worker_extension_cls="launch.remerge.Remerge" if remerge else ""
            ),
            lora_config=SimpleNamespace(max_lora_rank=lora_rank) if lora_rank else None,
        )
        self.calls: list[str] = []
        self.fails: dict[str, str] = {}
        self.weights, self.sleeping, self.cache_is_busy = "base", False, 0
        self.gate: asyncio.Event | None = None
        self.while_resuming: Any = None
        self.params: list[Any] = []
        self.finish_reason, self.aborted = "stop", 0
        self.loras: set[int] = set()

    async def generate(self, prompt: dict, params: Any, request_id: str, lora_request: Any = None):
        self.params.append(params)
        assert prompt["type"] == "token"
        ids = prompt["prompt_token_ids"]
        assert lora_request is None or lora_request.lora_int_id in self.loras, "an adapter that was unloaded"
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        logprob = self.logprob(lora_request)
        outputs = [
            SimpleNamespace(
                index=index,
                token_ids=[7, 8, index],
                logprobs=flat([logprob, float("nan"), -float(index)]),
                finish_reason=self.finish_reason,
            )
            for index in reversed(range(params.n))
        ]
        scored = flat([None, *([logprob] * (len(ids) - 1))]) if getattr(params, "prompt_logprobs", None) == 0 else None
        yield SimpleNamespace(outputs=outputs, prompt_token_ids=ids, prompt_logprobs=scored)

    def logprob(self, lora: Any) -> float:
        """Minus a number that stands for the weights and the LoRA of an answer."""
        return -float(sum(map(ord, self.weights)) + (1000 + lora.lora_int_id if lora else 0))

    async def collective_rpc(self, method: str, timeout: Any, args: tuple, kwargs: dict) -> list[dict]:
        self.calls.append(" ".join([method, *map(str, args)]))
        if (error := self.fails.get(method) or self.fails.get(self.calls[-1])) is not None:
            return [{}, {"error": error}]
        if method == "remerge_activate":
            self.weights = args[0]
        if method == "remerge_stage":
            assert (Path(args[1]) / "adapter_model.safetensors").is_file()
        return [{"modules": [*LAYERS], "ready": False, "why": None}] * 2 if method == "remerge_describe" else [{}, {}]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("abort", True)
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        if self.while_resuming is not None:
            await self.while_resuming()

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        self.cache_is_busy -= 1
        return self.cache_is_busy < 0

    async def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    async def wake_up(self) -> None:
        self.calls.append("wake")

    async def is_sleeping(self) -> bool:
        return self.sleeping

    async def remove_lora(self, number: int) -> None:
        self.loras.discard(number)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(get_vocab=lambda: {"a": 1}, encode=lambda text, add_special_tokens: [1, 2])


def flat(values: list[float | None]) -> SimpleNamespace:
    """vLLM's FlatLogprobs of one log-prob a position; None is a position without one."""
    ends = np.cumsum([value is not None for value in values]).tolist()
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]], end_indices=ends, logprobs=[value for value in values if value is not None]
    )


class Models:
    """vLLM's OpenAIServingModels: `refuses` is the message of a failing load."""

    def __init__(self, engine: Engine):
        self.engine, self.lora_requests, self.loaded, self.refuses = engine, {}, [], None

    async def load_lora_adapter(self, request: Any) -> Any:
        if self.refuses:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
        assert request.lora_name not in self.lora_requests
        self.loaded.append(request.lora_name)
        self.engine.loras.add(len(self.loaded))
        self.lora_requests[request.lora_name] = SimpleNamespace(
            lora_name=request.lora_name, lora_path=request.lora_path, lora_int_id=len(self.loaded)
        )
        return "Success"

    async def unload_lora_adapter(self, request: Any) -> str:
        del self.lora_requests[request.lora_name]
        return "Success"


class KeyGuard:
    """Answers 401 under /v1 without the key, as vLLM's AuthenticationMiddleware."""

    def __init__(self, app: Any, key: str):
        self.app, self.key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            if dict(scope["headers"]).get(b"authorization") != self.key:
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"{}"})
                return
        await self.app(scope, receive, send)


def application(engine: Engine, key: str | None = None, **arguments: Any) -> FastAPI:
    """An application put together in vLLM's order: its own routes and key, then --middleware."""
    app = FastAPI()
    app.get("/health")(lambda: "fine")
    if key:
        app.add_middleware(KeyGuard, key=key)
    app.add_middleware(RolloutEndpoint)
    app.state.args = SimpleNamespace(**arguments)
    app.state.engine_client = engine
    app.state.openai_serving_models = Models(engine)
    return app
