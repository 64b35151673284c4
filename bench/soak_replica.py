"""A rollout replica in numpy: it serves the run's own policy, and samples the same completions whenever it is asked.

    python bench/soak_replica.py --base BASE --port 8000

The routes are those of the tests' stand-in (tests/unit/fake_replica.py); behind them is the dequantized base with the
served adapter folded in, in float32: a small dense Qwen3, without a prefix cache. The random numbers of a completion
come from its prompt and the adapter's version alone, so a step that is repeated after a fault gets what it got before,
and a run with faults can be compared bit for bit with one without. It starts in half a second.
"""

import argparse
import json
import os
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.run_directory import read_manifest
from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.protocol import CONFIG, CONFIG_TEXT, TENSORS, WEIGHTS, decode_ids, encode_floats, encode_ids
from tests.unit.fake_replica import FakeReplica

Weights = dict[str, np.ndarray]


def read_tensors(file: Path) -> tuple[Weights, dict[str, str]]:
    """Tensors of a safetensors file in float32, and its metadata. numpy has no bfloat16: its bits are the upper half
    of a float32."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, one in header.items():
        raw = data[start + one["data_offsets"][0] : start + one["data_offsets"][1]]
        if one["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[one["dtype"]]).astype(np.float32)
        tensors[name] = values.reshape(one["shape"])
    return tensors, metadata


def folded(base: Weights, adapter: Weights, config: dict) -> Weights:
    """The base's weights plus s·B·A of a LoRA adapter."""
    scale, weights = config["lora_alpha"] / config["r"], dict(base)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            weight = f"{layer.removeprefix(TENSORS)}.weight"
            weights[weight] = base[weight] + scale * (adapter[f"{layer}.lora_B.weight"] @ a)
    return weights


class Qwen3:
    """The forward of a dense Qwen3 with tied embeddings."""

    def __init__(self, config: dict, context: int):
        self.config, self.size, self.eps = config, config["head_dim"], config["rms_norm_eps"]
        rope = (config.get("rope_parameters") or config)["rope_theta"]
        angles = np.arange(context)[:, None] / rope ** (np.arange(0, self.size, 2) / self.size)
        angles = np.concatenate([angles, angles], axis=1)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)  # (context, d)

    def forward(self, weights: Weights, ids: np.ndarray, cache: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Logits (b, T, vocabulary) of `ids` (b, T), which follow what is in `cache`; its keys and values, one pair
        (b, heads, all so far, d) a layer, are appended to it."""
        x = weights["model.embed_tokens.weight"][ids]
        past = cache[0][0].shape[2] if cache else 0
        layers = self.config["num_hidden_layers"]
        for number in range(layers):
            layer = f"model.layers.{number}"
            normed = self._norm(x, weights[f"{layer}.input_layernorm.weight"])
            x = x + self._attention(weights, f"{layer}.self_attn", normed, cache, number, past)
            normed = self._norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
            gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            gated = normed @ gate
            x = x + (gated / (1 + np.exp(-gated)) * (normed @ up)) @ down
        return self._norm(x, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T

    def _norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps)) * weight

    def _attention(
        self, weights: Weights, name: str, x: np.ndarray, cache: list, number: int, past: int
    ) -> np.ndarray:
        rows, length, _ = x.shape

        def heads(kind: str) -> np.ndarray:  # (b, heads, T, d)
            return (x @ weights[f"{name}.{kind}_proj.weight"].T).reshape(rows, length, -1, self.size).swapaxes(1, 2)

        query = self._turned(self._norm(heads("q"), weights[f"{name}.q_norm.weight"]), past)
        key = self._turned(self._norm(heads("k"), weights[f"{name}.k_norm.weight"]), past)
        value = heads("v")
        if number < len(cache):
            key, value = (np.concatenate(pair, axis=2) for pair in zip(cache[number], (key, value), strict=True))
            cache[number] = key, value
        else:
            cache.append((key, value))
        shared = query.shape[1] // key.shape[1]
        key, value = np.repeat(key, shared, axis=1), np.repeat(value, shared, axis=1)
        scores = query @ key.swapaxes(2, 3) / np.float32(np.sqrt(self.size))
        future = np.arange(past + length)[None, :] > past + np.arange(length)[:, None]
        scores = np.where(future, np.float32(-np.inf), scores)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
        return mixed.swapaxes(1, 2).reshape(rows, length, -1) @ weights[f"{name}.o_proj.weight"].T

    def _turned(self, x: np.ndarray, past: int) -> np.ndarray:
        cos, sin = (table[past : past + x.shape[2]] for table in (self.cos, self.sin))
        half = self.size // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class NumpyReplica(FakeReplica):
    """Serves one base, written by `python -m merge base`, and what is staged on it."""

    def __init__(self, base: Path, port: int = 0):
        from tokenizers import Tokenizer

        self.config = json.loads((base / "config.json").read_text())
        self.model = Qwen3(self.config, self.config["max_position_embeddings"])
        self.base = read_tensors(base / "model.safetensors")[0]
        self.folded: dict[tuple[str, int], Weights] = {}
        super().__init__(
            port,
            model=str(base),
            base_hash=read_manifest(base)["base_hash"],
            weights="float32",
            tokenizer_hash=tokenizer_hash(_Names(Tokenizer.from_file(str(base / "tokenizer.json")))),
            vocab_size=self.config["vocab_size"],
            max_model_len=self.config["max_position_embeddings"],
        )
        # What was asked is of use to a test of a few requests; here there are thousands.
        self.calls, self.bodies, self.connections = (deque(maxlen=1) for _ in range(3))

    def do_info(self, body: None, query: dict) -> tuple[int, dict]:
        status, info = super().do_info(body, query)
        return status, info | {"pid": os.getpid()}

    def do_stage(self, body: Any, query: dict) -> tuple[int, dict]:
        if isinstance(body, bytes):
            raise ValueError("the replica of the soak takes adapters by path alone, not rollout.transport body")
        folder = Path(body["path"])
        adapter, metadata = read_tensors(folder / WEIGHTS)
        config = json.loads(metadata.get(CONFIG_TEXT) or (folder / CONFIG).read_text())
        self.folded[query["session"], int(query["version"])] = folded(self.base, adapter, config)
        return super().do_stage(None, query)

    def do_discard(self, body: dict, query: dict) -> tuple[int, dict]:
        status, answer = super().do_discard(body, query)
        if status == 200:
            self.folded.pop((body["session"], body["version"]), None)
        return status, answer

    def do_score(self, body: dict, query: dict) -> tuple[int, dict]:
        weights = self._weights(body)
        if weights is None:
            return 409, {"error": "not what is served"}
        scores = []
        for text in body["sequences"]:
            ids = decode_ids(text)
            found = log_softmax(self.model.forward(weights, ids[None, :-1], []))[0]
            scores.append(encode_floats(found[np.arange(len(ids) - 1), ids[1:]]))
        return 200, {"version": body["version"], "logprobs": scores}

    def do_generate(self, body: dict, query: dict) -> tuple[int, dict]:
        weights = self._weights(body)
        if weights is None:
            return 409, {"error": "not what is served"}
        if body["top_p"] != 1 or body["top_k"] or body.get("stop"):
            return 400, {"error": "this replica samples from the whole distribution and stops at token ids"}
        prompt, stop = decode_ids(body["token_ids"]), set(body["stop_token_ids"])
        n, most, hot = body["n"], body["max_tokens"], np.float32(body["temperature"])
        chances = np.random.default_rng([body["version"] or 0, *prompt.tolist()]).random((most, n), np.float32)
        cache: list[tuple[np.ndarray, np.ndarray]] = []
        logits = np.repeat(self.model.forward(weights, prompt[None], cache)[:, -1], n, axis=0)  # (n, vocabulary)
        cache[:] = [(np.repeat(key, n, axis=0), np.repeat(value, n, axis=0)) for key, value in cache]
        made: list[list[int]] = [[] for _ in range(n)]
        logps: list[list[float]] = [[] for _ in range(n)]
        is_open = [True] * n
        for chance in chances:
            found = log_softmax(logits / hot)
            total = np.exp(found).cumsum(axis=1)
            chosen = (total < chance[:, None] * total[:, -1:]).sum(axis=1)
            for row, token in enumerate(chosen.tolist()):
                if is_open[row]:
                    made[row].append(token)
                    logps[row].append(float(found[row, token]))
                    is_open[row] = token not in stop
            if not any(is_open):
                break
            logits = self.model.forward(weights, chosen[:, None], cache)[:, -1]
        samples = [
            {
                "token_ids": encode_ids(ids),
                "logprobs": encode_floats(scores),
                "finish_reason": "length" if goes_on else "stop",
            }
            for ids, scores, goes_on in zip(made, logps, is_open, strict=True)
        ]
        return 200, {"version": body["version"], "samples": samples}

    def _weights(self, body: dict) -> Weights | None:
        """The weights that a request asks for; None if they are not served."""
        key = body["session"], body["version"]
        if key == (None, None):
            return self.base
        return self.folded.get(key) if key == self.served else None


class _Names:
    """What `tokenizer_hash` asks of a tokenizer, without importing transformers."""

    def __init__(self, tokenizer: Any):
        self.get_vocab, self._encode = tokenizer.get_vocab, tokenizer.encode

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._encode(text, add_special_tokens=add_special_tokens).ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", required=True, type=Path, help="directory that `python -m merge base` wrote")
    parser.add_argument("--port", required=True, type=int)
    options = parser.parse_args()
    replica = NumpyReplica(options.base, options.port)
    print(f"serves {options.base} at {replica.url}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
