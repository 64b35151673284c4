"""vLLM's engine as kit/rollout/server/endpoint.py sees it, without vLLM: an application with a fake engine client in
its state.

The fake's weights are a name: "base", or the adapter that was folded in. Its log-probs tell which weights and which
LoRA answered, so a test sees what a request was really answered from.
"""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import numpy as np
from fastapi import FastAPI
from safetensors.numpy import save, save_file
from starlette.testclient import TestClient

from kit.core.file_kinds import MANIFEST
from kit.rollout.protocol import decode_floats, encode_ids
from kit.rollout.server import endpoint
from kit.rollout.server.adapter_roots import ROOTS
from kit.rollout.server.private_files import PrivateFiles
from tests.unit.filled import filled

HASH = "ab" * 32
ADDRESS = "http://127.0.0.1"
LAYERS = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.0.mlp.up_proj": (12, 6)}
SAMPLING = {"n": 2, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
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
    (folder / "manifest.json").write_text(json.dumps(filled(MANIFEST, {"base_hash": HASH})))
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


def write_adapter(folder: Path, tensors: dict | None = None, quant_cfg: str | None = None, **config: Any) -> Path:
    """An adapter directory as peft writes it; with `quant_cfg` as the trainer sends one trained in a format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = adapter_tensors() if tensors is None else tensors
    save_file(tensors, folder / "adapter_model.safetensors", {"quant_cfg": quant_cfg} if quant_cfg else None)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def adapter_body(config: dict | None = CONFIG) -> bytes:
    """The same as one file for the body of a request."""
    return save(adapter_tensors(), metadata={"adapter_config": json.dumps(config)} if config else {"other": "1"})


class Engine:
    """`calls` is what was asked, in order; `fails` {method: error} of the workers; `gate` holds generations back;
    `raises` and `hangs` name calls to the engine that end in an exception, or never."""

    def __init__(
        self,
        base: Path,
        lora_rank: int | None = 8,
        remerge: bool = True,
        sleep: bool = False,
        workers: int = 2,
        targets: list[str] | None = None,
        quantization: str | None = "fp8_per_channel",
        dtype: str = "torch.bfloat16",
    ):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model=str(base),
                quantization=quantization,
                dtype=dtype,
                logprobs_mode="processed_logprobs",
                max_model_len=32,
                enable_sleep_mode=sleep,
                get_vocab_size=lambda: 300,
            ),
            cache_config=SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=workers,
                worker_extension_cls="kit.rollout.server.remerge.Remerge" if remerge else "",
            ),
            lora_config=SimpleNamespace(max_lora_rank=lora_rank, target_modules=targets) if lora_rank else None,
        )
        self.calls: list[str] = []
        self.fails: dict[str, str] = {}
        self.raises: set[str] = set()
        self.hangs: set[str] = set()
        self.breaks: set[tuple[int, ...]] = set()
        self.weights, self.sleeping, self.cache_is_busy = "base", False, 0
        self.gate: asyncio.Event | None = None
        self.while_resuming: Any = None
        self.params: list[Any] = []
        self.finish_reason, self.aborted = "stop", 0
        self.loras: set[int] = set()
        self.workers = workers
        self.engine_core = self

    async def generate(self, prompt: dict, params: Any, request_id: str, lora_request: Any = None):
        self.params.append(params)
        assert prompt["type"] == "token"
        ids = prompt["prompt_token_ids"]
        assert lora_request is None or lora_request.lora_int_id in self.loras, "an adapter that was unloaded"
        try:
            if tuple(ids) in self.breaks:
                raise ValueError("a request that breaks")
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # the abort is sent
            self.aborted += 1
            raise
        # vLLM reads it again when the slot was given to another one.
        assert lora_request is None or Path(lora_request.lora_path).is_dir(), "the engine died"
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
        await self._call(" ".join([method, *map(str, args)]))
        if (error := self.fails.get(method) or self.fails.get(self.calls[-1])) is not None:
            return [{}, {"error": error}] if self.workers > 1 else [{"error": error}]
        if method == "remerge_activate":
            self.weights = args[0]
        if method == "remerge_stage":
            assert (Path(args[1]) / "adapter_model.safetensors").is_file()
        answer = {"modules": [*LAYERS], "ready": False, "why": None} if method == "remerge_describe" else {}
        return [answer] * self.workers

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise RuntimeError(f"{name} went wrong")
        if name.split()[0] in self.hangs:
            await asyncio.Event().wait()

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("abort", True)
        await self._call("pause")

    async def resume_generation(self) -> None:
        await self._call("resume")
        if self.while_resuming is not None:
            await self.while_resuming()

    async def reset_prefix_cache(self) -> bool:
        await self._call("reset_prefix_cache")
        self.cache_is_busy -= 1
        return self.cache_is_busy < 0

    async def sleep(self, level: int) -> None:
        await self._call(f"sleep {level}")
        self.sleeping = True

    async def wake_up(self) -> None:
        await self._call("wake")
        self.sleeping = False

    async def is_sleeping(self) -> bool:
        if "is_sleeping" in self.hangs:
            await asyncio.Event().wait()
        return self.sleeping

    async def remove_lora(self, number: int) -> None:
        if "remove_lora" in self.raises:
            raise RuntimeError("remove_lora went wrong")
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

    async def unload_lora_adapter(self, request: Any) -> Any:
        if self.refuses:
            return SimpleNamespace(error=SimpleNamespace(message=self.refuses))
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
    app.add_middleware(endpoint.RolloutEndpoint)
    app.state.args = SimpleNamespace(**arguments)
    app.state.engine_client = engine
    app.state.openai_serving_models = Models(engine)
    return app


def without_vllm(monkeypatch: Any, tmp_path: Path) -> None:
    """The three names of vLLM that the routes import, and private directories where the test sees them."""
    protocol = SimpleNamespace(LoadLoRAAdapterRequest=SimpleNamespace, UnloadLoRAAdapterRequest=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.serve.lora.protocol", protocol)
    monkeypatch.setattr(endpoint, "sampling_params", lambda **options: SimpleNamespace(**options))
    monkeypatch.setattr(endpoint, "vllm_version", lambda: "0.31.0")
    (tmp_path / "private").mkdir()
    monkeypatch.setattr("kit.rollout.server.versions.PrivateFiles", lambda: PrivateFiles(tmp_path / "private"))
    monkeypatch.setenv(ROOTS, str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


class Server:
    """An application and its engine; `post` returns (status, answer)."""

    def __init__(self, engine: Engine, tmp_path: Path):
        self.engine, self.tmp_path = engine, tmp_path
        self.app = application(engine)
        self.client = TestClient(self.app, base_url=ADDRESS)
        self.private = tmp_path / "private"

    def post(self, action: str, body: dict | None = None, **query) -> tuple[int, dict]:
        answer = self.client.post(f"/v1/rollout/{action}", json=body or {}, params=query)
        return answer.status_code, answer.json()

    def info(self) -> dict:
        return self.client.get("/v1/rollout/info").json()

    def stage(self, version: int, way: str, session: str = "s1", run: str = "r", hash: str = HASH, **adapter):
        path = write_adapter(self.tmp_path / f"{session}-{version}", **adapter)
        return self.post(
            "stage", {"path": str(path)}, way=way, run=run, session=session, version=version, base_hash=hash
        )

    def serve(self, version: int, way: str, session: str = "s1", run: str = "r") -> None:
        assert self.stage(version, way, session, run)[0] == 200
        assert self.post("activate", {"session": session, "version": version})[0] == 200

    def score(self, session: str | None, version: int | None) -> tuple[int, dict]:
        return self.post("score", {"sequences": [encode_ids([1, 2, 3])], "session": session, "version": version})

    def first_logprob(self, session: str | None, version: int | None) -> float:
        status, answer = self.score(session, version)
        assert status == 200, answer
        return float(decode_floats(answer["logprobs"][0])[0])


def generate_body(**changes) -> dict:
    return {
        "request_id": "q",
        "token_ids": encode_ids([1, 2, 3]),
        **SAMPLING,
        "session": None,
        "version": None,
    } | changes


async def ask(app, action: str, body: dict, hang_up: asyncio.Event | None = None, **query) -> tuple[int, dict]:
    """One request on the running event loop; the client hangs up when `hang_up` is set."""
    sent, content = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict:
        if content:
            return content.pop()
        await (hang_up or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/rollout/{action}",
        "headers": [],
        "root_path": "",
        "app": app,
    }
    await app(scope | {"query_string": urlencode(query).encode()}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def started(server: Server, requests: int = 1) -> None:
    """Until the engine has the requests."""
    while len(server.engine.params) < requests:
        await asyncio.sleep(0)
