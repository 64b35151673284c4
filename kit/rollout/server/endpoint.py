"""Routes that a rollout server needs and vLLM lacks, added to vLLM's own server through its own option:

    --middleware kit.rollout.server.endpoint.RolloutEndpoint

Everything is under /v1/rollout, so vLLM's API key guards it. Token ids and log-probs are sent in binary, nothing is
detokenized, and a request names the adapter version that it wants: if another one is served, the request fails.
Written for vllm 0.26 to 0.31; imports vllm inside functions only.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kit.core.errors import BadInput
from kit.core.run_directory import manifest_as_written
from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.protocol import (
    BINARY,
    CONFIG,
    CONFIG_TEXT,
    NUMBERS,
    PREFIX,
    PROTOCOL,
    ROUTES,
    WEIGHTS,
    Info,
    Served,
    decode_ids,
    encode_experts,
    encode_floats,
    encode_ids,
)
from kit.rollout.server import speculation
from kit.rollout.server.adapter_check import Refused, read_header
from kit.rollout.server.adapter_roots import copy_adapter
from kit.rollout.server.fence import Fence
from kit.rollout.server.packed_layers import weights_of
from kit.rollout.server.requests import Directory, Generate, Named, Noise, Score, Stage, checked, read
from kit.rollout.server.versions import COPIES, NF4_COPY, Failure, Version, Versions
from kit.rollout.server.vllm_types import (
    CompletionOutput,
    Engine,
    FlatLogprobs,
    LoRARequest,
    RequestOutput,
    SamplingParams,
    VllmConfig,
)

if TYPE_CHECKING:
    import torch
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send


HEADER_BYTES = 64 << 20  # beside an adapter's tensors


class RolloutEndpoint:
    """ASGI middleware that adds the routes once to the application it is installed in, and fences all routes."""

    def __init__(self, app: "ASGIApp"):
        self.app = Fence(app)
        self._is_attached = False

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        # The application is in the scope; the constructor only gets the next middleware.
        if not self._is_attached and scope.get("app") is not None:
            attach(scope["app"])
            self._is_attached = True
        await self.app(scope, receive, send)


def attach(app: "FastAPI") -> None:
    """Add the routes to vLLM's FastAPI application; `RuntimeError` if its servers would not share one state or
    `NF4_COPY` in the environment has an unknown value."""
    if nf4_copy() not in COPIES:
        raise RuntimeError(f"{NF4_COPY} is {nf4_copy()!r}, it must be one of {', '.join(COPIES)}.")
    arguments = getattr(app.state, "args", None)
    if (getattr(arguments, "api_server_count", None) or 1) > 1 or (
        getattr(arguments, "data_parallel_size", None) or 1
    ) > 1:
        raise RuntimeError(
            "kit.rollout.server.endpoint keeps the served version in one process: start one server per replica, "
            "without --api-server-count and --data-parallel-size."
        )
    routes = Routes(app)
    for action, method in ROUTES.items():
        app.router.add_route(f"{PREFIX}/{action}", routes.handler(action), methods=[method])


class Routes:
    """Handlers of one server. vLLM's engine is looked up on the first request: it is set after startup."""

    def __init__(self, app: "FastAPI"):
        self.app = app
        self._numbers = itertools.count()

    @functools.cached_property
    def engine(self) -> Engine:
        return self.app.state.engine_client

    @functools.cached_property
    def versions(self) -> Versions:
        directory = Path(self.engine.vllm_config.model_config.model)
        models = self.app.state.openai_serving_models
        return Versions(self.engine, models, directory, base_hash(directory), nf4_copy())

    @functools.cached_property
    def vocab_size(self) -> int:
        return self.engine.vllm_config.model_config.get_vocab_size()

    def handler(self, action: str) -> "Callable[[Request], Awaitable[Response]]":
        """Make the handler of `action`: its answer as JSON, every failure as {"error": sentence} with its status."""
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        act = getattr(self, action)

        async def handle(request: Request) -> JSONResponse:
            try:
                return JSONResponse(await act(request))
            except Failure as failed:
                return JSONResponse({"error": failed.text}, failed.status)
            except ClientGone:
                return JSONResponse({"error": "the client hung up."}, 499)
            except Exception as error:  # the client gets the message that is in vLLM's log
                return JSONResponse({"error": f"{type(error).__name__}: {str(error)[:500]}"}, 500)

        return handle

    # GET /v1/rollout/info

    async def info(self, request: "Request") -> Info:
        """Return what this server holds, serves and supports."""
        config, versions = self.engine.vllm_config, self.versions
        ways, refused, modules = await versions.ways()
        drafts = speculation.described(config)
        served = versions.served
        return {
            "protocol": PROTOCOL,
            "vllm": vllm_version(),
            "model": str(config.model_config.model),
            "base_hash": versions.base_hash,
            "weights": weights_of(config.model_config) or unquantized(config.model_config.dtype),
            "product": versions.product,
            "is_forced": getattr(getattr(config, "kernel_config", None), "linear_backend", "auto") == "marlin",
            "quant_cfg": versions.quant_cfg,
            "kv_cache": str(config.cache_config.cache_dtype),
            "attention_backend": attention_backend(config),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "speculation": drafts,
            "drafted": speculation.drafted() if drafts else None,
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "vocab_size": self.vocab_size,
            "tokenizer_hash": await self._tokenizer_hash(),
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "sync": ways,
            "refused": refused,
            "max_lora_rank": versions.max_lora_rank,
            "modules": modules,
            "served": Served(way=served.way, session=served.session, version=served.version) if served else None,
            "noise": versions.noise,
            "damaged": versions.damaged,
            "sleep_enabled": bool(config.model_config.enable_sleep_mode),
            "asleep": await versions.is_asleep(),
            "pid": os.getpid(),
        }

    async def _tokenizer_hash(self) -> str | None:
        if not hasattr(self, "_hash"):
            tokenizer = self.engine.get_tokenizer()
            if inspect.isawaitable(tokenizer):
                tokenizer = await tokenizer
            # Sorting 150,000 names would noticeably delay the requests in flight.
            self._hash = tokenizer and await asyncio.to_thread(tokenizer_hash, tokenizer)
        return self._hash

    # POST /v1/rollout/generate and score

    async def generate(self, request: "Request") -> dict:
        """Return n samples of one prompt from the named version."""
        body = await read(request, Generate)
        ids = self._ids(body.token_ids, "token_ids")
        stops = body.stop_token_ids or []
        if any(one >= self.vocab_size for one in stops):
            raise Failure(400, f"stop_token_ids has {max(stops)}, the served model has {self.vocab_size} tokens.")
        self._check_sizes(len(ids), body.n, body.max_tokens)
        served = self.versions.serving(*body.asked)
        sampling = {key: getattr(body, key) for key in NUMBERS}
        params = sampling_params(**sampling, stop=body.stop or [], stop_token_ids=stops, logprobs=0)
        (output,) = await self._engine_outputs(request, [ids], params, served, body.request_id)
        samples = [sample(one, body.routing) for one in sorted(output.outputs, key=lambda one: one.index)]
        return {"version": served and served.version, "samples": samples}

    async def score(self, request: "Request") -> dict:
        """Return log-probs of given sequences, each token given those before it, at temperature 1."""
        body = await read(request, Score)
        ids = [self._ids(text, f"sequences[{place}]") for place, text in enumerate(body.sequences)]
        for one in ids:
            if len(one) < 2:
                raise Failure(400, "a sequence of one token has nothing to score.")
            self._check_sizes(len(one), 1, 1)
        served = self.versions.serving(*body.asked, may_be_base=True)
        params = sampling_params(n=1, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = await self._engine_outputs(request, ids, params, served, "score")
        return {
            "version": served and served.version,
            "logprobs": [
                encode_floats(flat_floats(one.prompt_logprobs, len(one.prompt_token_ids), 1)) for one in outputs
            ],
        }

    def _ids(self, text: str, where: str) -> list[int]:
        try:
            ids = decode_ids(text)
        except ValueError as error:
            raise Failure(400, f"{where} is not base64 of int32 token ids: {error}.") from None
        if not len(ids):
            raise Failure(400, f"{where} is empty.")
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise Failure(400, f"{where} holds the id {wrong}, the served model has {self.vocab_size} tokens.")
        return ids.tolist()

    def _check_sizes(self, length: int, n: int, max_tokens: int) -> None:
        config = self.engine.vllm_config
        longest, most = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
        if n < 1 or max_tokens < 1:
            raise Failure(400, f"n ({n}) and max_tokens ({max_tokens}) must be at least 1.")
        if n > most:
            raise Failure(400, f"n ({n}) is above the server's --max-num-seqs {most}. Start it with {n} or more.")
        if length + max_tokens > longest:
            raise Failure(
                400,
                f"{length} tokens and {max_tokens} new ones are more than the server's --max-model-len {longest}. "
                f"Start it with {length + max_tokens} or more.",
            )

    async def _engine_outputs(
        self, request: "Request", prompts: list[list[int]], params: SamplingParams, served: Version | None, name: str
    ) -> list[RequestOutput]:
        """Return vLLM's final output per prompt; `Failure` if the weights changed or a request was aborted."""
        epoch = self.versions.epoch
        under_way = served.requests if served else set()
        work = asyncio.ensure_future(self._all_outputs(prompts, params, served.lora if served else None, name))
        under_way.add(work)
        try:
            outputs = await unless_gone(request, work)
        except asyncio.CancelledError:
            if served is None or not served.is_gone:
                raise
            other = self.versions.other_trainer(served.session)
            raise Failure(409, f"{served.name} was discarded during this request.{other}") from None
        except (ValueError, TypeError) as error:  # raised by vLLM's own request validation
            raise Failure(400, f"vLLM refuses the request: {error}") from None
        finally:
            under_way.discard(work)
        self.versions.check_epoch(epoch, served.session if served else None)
        return outputs

    async def _all_outputs(
        self, prompts: list[list[int]], params: SamplingParams, lora: LoRARequest | None, name: str
    ) -> list[RequestOutput]:
        """Return the outputs in the order of `prompts`; one failure cancels the others."""
        tasks = [
            asyncio.ensure_future(
                final_output(self.engine, ids, params, f"rollout-{name}-{next(self._numbers)}", lora)
            )
            for ids in prompts
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # POST /v1/rollout/stage, activate, discard, noise, sleep, wake, share

    async def stage(self, request: "Request") -> dict:
        """Load an adapter version from a directory or from the body, without serving it."""
        asked = checked(Stage.model_validate, dict(request.query_params))
        is_sent = request.headers.get("content-type", "").startswith(BINARY)
        named = "the body" if is_sent else (await read(request, Directory)).path
        # Private from here on: nobody can change what was checked.
        directory = self.versions.files.make()
        try:
            if is_sent:
                await self._receive(request, directory)
            else:
                await asyncio.to_thread(copy_adapter, named, directory, self._adapter_limit())
        except BaseException as error:
            self.versions.files.remove(directory)
            if isinstance(error, Refused):
                raise Failure(422, str(error)) from None
            raise
        try:
            arguments = (asked.way, asked.run, asked.session, asked.version, asked.base_hash)
            return {"seconds": await self.versions.stage(*arguments, directory)}
        except Failure as failed:
            raise Failure(failed.status, failed.text.replace(str(directory), named)) from None

    async def _receive(self, request: "Request", directory: Path) -> None:
        """Write the adapter from the body to a directory."""
        size, limit = 0, self._adapter_limit()
        with open(directory / WEIGHTS, "wb") as file:
            async for chunk in request.stream():
                size += len(chunk)
                if max(size, int(request.headers.get("content-length", 0))) > limit:
                    raise Failure(413, f"the body has more than {limit} bytes, the largest adapter that fits here.")
                file.write(chunk)
        config = read_header(directory / WEIGHTS).metadata.get(CONFIG_TEXT)
        if config is None:
            raise Refused("the body's metadata has no adapter_config: send the file as the trainer writes it.")
        (directory / CONFIG).write_text(config)

    def _adapter_limit(self) -> int:
        """Most bytes of an adapter: of every layer's full rank in float32, and of half of the room for it."""
        versions = self.versions
        most = sum(4 * (out + width) * min(out, width) for out, width in versions.shapes.values())
        room = versions.files.free_bytes() // 2
        return min(most + HEADER_BYTES, room) if most else room

    async def activate(self, request: "Request") -> dict:
        """Serve a staged version."""
        started = time.perf_counter()
        body = await read(request, Named)
        seconds = await self.versions.activate(body.session, body.version)
        return {"seconds": {**seconds, "total": time.perf_counter() - started}}

    async def discard(self, request: "Request") -> dict:
        """Discard a staged version."""
        body = await read(request, Named)
        await self.versions.discard(body.session, body.version)
        return {}

    async def noise(self, request: "Request") -> dict:
        """Add noise to the norms of the served version, until another is activated."""
        body = await read(request, Noise)
        return {"seconds": await self.versions.set_noise(body.session, body.version, body.sigma, body.seed)}

    async def sleep(self, request: "Request") -> dict:
        """Free the GPU memory."""
        return {"seconds": await self.versions.sleep()}

    async def wake(self, request: "Request") -> dict:
        """Restore weights and KV cache."""
        return {"seconds": await self.versions.wake()}

    async def share(self, request: "Request") -> dict:
        """Name the file that says where the base lies in memory."""
        return {"path": str(await self.versions.share())}


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


async def unless_gone(request: "Request", work: asyncio.Future) -> list[RequestOutput]:
    """Return the result of `work`, which is cancelled (and aborted in the engine) if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone
    finally:
        for task in (work, watch):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task


async def final_output(
    engine: Engine, ids: list[int], params: SamplingParams, request_id: str, lora: LoRARequest | None
) -> RequestOutput:
    """Return vLLM's single RequestOutput of a prompt; `Failure` 503 if the engine aborted it."""
    output = None
    # The rendered form of a token prompt: vLLM's renderer would only wrap the ids this way.
    prompt = {"type": "token", "prompt_token_ids": ids}
    async for answer in engine.generate(prompt, params, request_id, lora_request=lora):
        output = answer
    reasons = {one.finish_reason for one in output.outputs} if output is not None else {"nothing"}
    if not reasons <= {"stop", "length"}:
        raise Failure(503, f"vLLM ended the request with {', '.join(sorted(map(str, reasons)))}.")
    return output


def sampling_params(**options: Any) -> SamplingParams:
    """Build vLLM's SamplingParams for a single final output: token ids and log-probs. Text is decoded only to find
    stop texts in it."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    fixed = {"flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
    fixed["detokenize"] = bool(options.get("stop"))
    return SamplingParams(**options, **fixed)


def sample(output: CompletionOutput, has_experts: bool = False) -> dict:
    """Encode one completion for the wire, with the experts that it took if they are asked for."""
    count = len(output.token_ids)
    found: dict[str, Any] = {
        "token_ids": encode_ids(output.token_ids),
        "logprobs": encode_floats(flat_floats(output.logprobs, count, 0)),
        "finish_reason": output.finish_reason,
    }
    if has_experts:
        if output.routed_experts is None:
            raise Failure(
                409,
                "this server does not return the experts that its tokens took. Start it with rollout.routing in its "
                "configuration (--enable-return-routed-experts).",
            )
        found["experts"] = encode_experts(output.routed_experts)
    return found


def flat_floats(flat: FlatLogprobs, positions: int, empty: int) -> np.ndarray:
    """Return (positions - empty,) float32: the first log-prob of every position of vLLM's FlatLogprobs, which is that
    of the sampled or given token; the first `empty` positions have none."""
    if len(flat.start_indices) != positions:
        raise RuntimeError(f"vLLM returned {len(flat.start_indices)} log-probs for {positions} tokens")
    values = np.asarray(flat.logprobs, dtype="<f4")
    wanted = positions - empty
    return values if len(values) == wanted else values[np.asarray(flat.start_indices[empty:])]


def base_hash(directory: Path) -> str | None:
    """Base hash of a directory that `python -m merge base` wrote, else None."""
    try:
        found = manifest_as_written(directory).get("base_hash")
    except (BadInput, AttributeError):
        return None
    return found if isinstance(found, str) else None


def nf4_copy() -> str:
    """Where the workers keep their NF4 copy, from the environment."""
    return os.environ.get(NF4_COPY, "gpu")


def unquantized(dtype: "torch.dtype | str") -> str:
    """Name of unquantized weights: bf16, or the dtype's own name (float32)."""
    name = str(dtype).removeprefix("torch.")
    return "bf16" if name == "bfloat16" else name


def attention_backend(config: VllmConfig) -> str | None:
    """Name of the attention backend that the server was started with; None if vLLM chooses it."""
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return None if backend is None else str(getattr(backend, "name", backend))


def vllm_version() -> str:
    """Return vLLM's version without a local part such as +cpu."""
    import vllm

    return vllm.__version__.split("+")[0]
