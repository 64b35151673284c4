"""Rollouts from a separate vLLM server: token ids in, token ids and the sampler's log-probs out.

The server holds the dequantized base (BF16, or FP8 as vLLM quantizes it) and serves each adapter version by name
(`recipes/parts/sync.py`). TRL's own server path is not used: it merges the adapter into the NF4 weights and streams
packed bytes. The trainer's process needs no vLLM.
"""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from recipes.parts.checks import is_main_process
from recipes.parts.config import Config
from recipes.parts.errors import BadInput, CheckFailed, KitError
from recipes.parts.policy import publish_adapter
from recipes.parts.sync import AdapterSync

IN_FLIGHT = 256  # prompts under way at once, over all replicas


class ServerRollout:
    """Generates the groups of a step on the replicas of `rollout.server_urls`; used by every trainer process."""

    def __init__(self, config: Config, tokenizer: Any):
        self.config, self.tokenizer = config, tokenizer
        self.urls = [url.rstrip("/") for url in config.rollout.server_urls]
        self.sync = AdapterSync(self.urls, config.run.name, config.rollout.request_timeout_s)
        self.version: int | None = None

    def check(self) -> None:
        """Wait for every replica and refuse one that cannot serve this run; `CheckFailed` after `server_wait_s`.

        The main process then unloads what earlier processes of this run left on the replicas.
        """
        deadline = time.monotonic() + self.config.rollout.server_wait_s
        probe = "2 + 40 = 42 <|im_end|>"
        expected = self.tokenizer(probe, add_special_tokens=False)["input_ids"]
        needed = self.config.rollout.max_prompt_length + self.config.rollout.max_completion_length
        served = {url: self._wait(url, deadline) for url in self.urls}
        for url, models in served.items():
            if models[0]["max_model_len"] < needed:
                raise BadInput(
                    f"{url} serves {models[0]['max_model_len']} tokens of context; max_prompt_length + "
                    f"max_completion_length need {needed}. Restart it with --max-model-len {needed}."
                )
            tokens = self._tokenize(url, models[0]["id"], probe)
            if tokens != expected:
                raise BadInput(
                    f"{url} ({models[0]['id']}) tokenizes {probe!r} as {tokens}, the trainer as {expected}. "
                    "Serve the base that model.id or model.path names."
                )
        if is_main_process():
            for url, models in served.items():
                self.sync.forget(url, [model["id"] for model in models[1:]])

    def _tokenize(self, url: str, model: str, text: str) -> list[int] | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return requests.post(f"{url}/tokenize", json=body, timeout=60).json().get("tokens")
        except (requests.RequestException, ValueError) as error:
            raise CheckFailed(f"{url}/tokenize failed ({type(error).__name__}): is it a vLLM server?") from None

    def _wait(self, url: str, deadline: float) -> list[dict]:
        """What the replica serves, once it answers; refused, hanging and unready replicas all end at the deadline."""
        last = "no answer"
        while True:
            try:
                response = requests.get(f"{url}/v1/models", timeout=min(5.0, self.config.rollout.server_wait_s))
                if response.status_code == 200:
                    return response.json()["data"]
                last = f"HTTP {response.status_code}"
            except (requests.RequestException, ValueError, KeyError) as error:
                last = type(error).__name__
            if time.monotonic() > deadline:
                raise CheckFailed(
                    f"the rollout server at {url} did not answer within {self.config.rollout.server_wait_s:.0f} s "
                    f"({last}). Start it (recipes/README.md has the command), look at its log, or set "
                    "rollout.server_urls."
                )
            time.sleep(1.0)

    def generate(self, trainer: Any, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Completions and sampler log-probs for this process's prompts, in order.

        The main process syncs the adapter and asks for all processes' groups; a prompt stands `group_size` times in a
        row, so it is sent once with n = group_size. Every process gets its share.
        """
        from accelerate.utils import broadcast_object_list, gather_object

        everything = gather_object(prompt_ids)
        outcome: list[Any] = [None, None]
        if trainer.accelerator.is_main_process:
            # The other processes wait for the outcome, so no error may pass them by.
            try:
                with trainer.timed("sync"):
                    self._sync(trainer)
                outcome[0] = self._generate_groups(everything)
            except KitError as error:
                outcome[1] = error
            except Exception as error:
                outcome[1] = CheckFailed(f"the rollout failed: {type(error).__name__}: {error}")
        broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        start = trainer.accelerator.process_index * len(prompt_ids)
        mine = outcome[0][start : start + len(prompt_ids)]
        return [ids for ids, _ in mine], [logps for _, logps in mine]

    def _sync(self, trainer: Any) -> None:
        version = trainer.adapter_version
        if version == self.version:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        folder = trainer.run.path / "sync" / self.sync.session
        directory = publish_adapter(model, folder / f"v{version:06d}", version, trainer.base_hash)
        self.sync.publish(directory, version)
        for old in sorted(folder.glob("v[0-9]*")):
            if old != directory:
                shutil.rmtree(old)
        self.version = version

    def _generate_groups(self, prompt_ids: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        group = self.config.rollout.group_size
        prompts = prompt_ids[::group]
        if any(prompt_ids[i] != prompts[i // group] for i in range(len(prompt_ids))):
            raise CheckFailed("the prompts of a group differ: the trainer's sampler no longer repeats each prompt.")
        # Long prompts first: the last one to finish then costs least.
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        answers: list[Any] = [None] * len(prompts)
        with ThreadPoolExecutor(min(IN_FLIGHT, len(prompts))) as pool:
            futures = {
                index: pool.submit(self._complete, self.urls[place % len(self.urls)], prompts[index])
                for place, index in enumerate(order)
            }
            for index, future in futures.items():
                answers[index] = future.result()
        return [sample for answer in answers for sample in answer]

    def _complete(self, url: str, prompt: list[int]) -> list[tuple[list[int], list[float]]]:
        """`group_size` samples of one prompt; `CheckFailed` names the replica when it fails or answers short."""
        rollout = self.config.rollout
        body = {
            "model": self.sync.served,
            "prompt": prompt,
            "n": rollout.group_size,
            "max_tokens": rollout.max_completion_length,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        try:
            response = requests.post(f"{url}/v1/completions", json=body, timeout=rollout.request_timeout_s)
            response.raise_for_status()
            choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
            samples = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise CheckFailed(
                f"the rollout server at {url} failed on a prompt of {len(prompt)} tokens: {type(error).__name__}: "
                f"{str(error)[:300]}. Look at its log, restart it, then continue with --resume."
            ) from None
        if len(samples) != rollout.group_size or any(len(ids) != len(logps) or not ids for ids, logps in samples):
            raise CheckFailed(f"{url} answered {len(samples)} samples for n = {rollout.group_size}, or empty ones.")
        if any(logp is None for _, logps in samples for logp in logps):
            raise CheckFailed(f"{url} returned a log-prob that is not a number: the served weights are damaged.")
        return samples
