"""Input ranges of formats with static activations: the prompts that they are measured over, and the measurement.

`policy.quant_calib_data: train` are the run's own training prompts, evenly spread over the split. A path is a jsonl
file; every row has a `text` that is taken as it is, a `prompt` (text, or chat messages) or the question column of
`data`. A file with a held-out problem in it is refused. Everything is checked before any weight is loaded.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kit.core.chat import token_ids
from kit.core.config.schema import TRAIN, Config
from kit.core.errors import BadInput, CheckFailed


def calibration_prompts(config: Config, messages: list[list[dict]], tokenizer: Any) -> list[list[int]]:
    """Token ids of `policy.quant_calib_size` prompts, each at most `policy.quant_sequence_length` of them.

    `messages` are the run's training prompts as chat messages. The same each time. `BadInput` when there are fewer
    prompts, and when a file of them is missing, empty, has a row without a prompt, or a held-out problem.
    """
    policy = config.policy
    if policy.quant_calib_data == TRAIN:
        source, prompts = "the training split", messages
    else:
        source, prompts = policy.quant_calib_data, _read(Path(policy.quant_calib_data), config)
    size = policy.quant_calib_size
    if len(prompts) < size:
        what = "no prompt" if not prompts else f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        raise BadInput(
            f"{source} holds {what} and policy.quant_calib_size is {size}. Name more in policy.quant_calib_data, or "
            "lower policy.quant_calib_size."
        )
    chosen = prompts[:: len(prompts) // size][:size]
    arguments = config.data.chat_template_kwargs
    return [_token_ids(prompt, tokenizer, arguments)[: policy.quant_sequence_length] for prompt in chosen]


def _check_disjoint(rows: list[tuple[str, str | list[dict]]], config: Config) -> None:
    """`BadInput` when a held-out question is one of these (place, prompt), or stands in one word for word."""
    from recipes.parts.data import Problem, load_problems
    from recipes.parts.leaks import find_leaks

    suffix, seen = config.data.prompt_suffix, []
    for place, prompt in rows:
        texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
        # What a question was followed by is no part of it.
        texts += [text.removesuffix(suffix) for text in texts if suffix and text.endswith(suffix)]
        seen += [Problem("", text, "", place) for text in texts]
    heldout = load_problems(config.data, "eval")
    if leaked := find_leaks(heldout, seen):
        problem, row, whole = leaked[0]
        raise BadInput(
            f"policy.quant_calib_data {config.policy.quant_calib_data} holds {len(leaked)} of {len(heldout)} held-out "
            f"problems ({problem.source} {'is' if whole else 'stands in'} {row.source}: {problem.question[:80]!r}), "
            "so the input ranges would be fit to what the run is measured on. Remove them from the file, or set "
            "policy.quant_calib_data to train."
        )


def _read(path: Path, config: Config) -> list[str | list[dict]]:
    """The prompts of a jsonl file: text, or chat messages."""
    if not path.is_file():
        raise BadInput(f"policy.quant_calib_data: no file at {path}. Name a jsonl file, or train.")
    found = []
    with open(path, "rb") as lines:  # split at line feeds alone: JSON may hold other ends of lines
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found.append((f"{path}:{number}", _prompt(json.loads(line), config)))
            except (ValueError, TypeError, KeyError) as error:
                raise BadInput(
                    f"{path}:{number} has no prompt ({error}). A row is an object with text, prompt or "
                    f"{config.data.question_column}."
                ) from None
    _check_disjoint(found, config)
    return [prompt for _, prompt in found]


def _prompt(row: dict, config: Config) -> str | list[dict]:
    from recipes.parts.data import Problem, chat_messages

    if not isinstance(row, dict):
        raise ValueError(f"it is {row!r:.40}")
    key = next((key for key in ("text", "prompt", config.data.question_column) if key in row), None)
    if key is None:
        raise ValueError(f"it has {', '.join(map(str, row))[:80] or 'no keys'}")
    value = row[key]
    if isinstance(value, list) and value and key == "prompt":
        return [{"role": str(one["role"]), "content": str(one["content"])} for one in value]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} is {value!r:.40}")
    return value if key == "text" else chat_messages(config.data, Problem("", value, "", ""))


def _token_ids(prompt: str | list[dict], tokenizer: Any, arguments: dict) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return token_ids(tokenizer, prompt, arguments)


def batches(prompts: list[list[int]], size: int, device: Any) -> Iterator[tuple[Any, Any]]:
    """`size` prompts at a time, of similar lengths, as (token ids (B, L) padded on the right, which of them are real
    (B, L))."""
    import torch

    prompts = sorted((ids for ids in prompts if ids), key=len)
    for start in range(0, len(prompts), size):
        rows = prompts[start : start + size]
        length = max(map(len, rows))
        ids = torch.tensor([row + [row[-1]] * (length - len(row)) for row in rows], device=device)
        real = torch.tensor([[n < len(row) for n in range(length)] for row in rows], device=device)
        yield ids, real


def set_input_ranges(config: Config, model: Any, prompts: list[list[int]]) -> str:
    """Calibrate a policy as it starts over `prompts` (token ids), or take over the ranges of `policy.init_adapter`
    where that was trained for a format; what was done, in one line."""
    from kit.core.run_directory import read_manifest
    from recipes.parts.qat import restore_quantizers

    start = config.policy.init_adapter
    if start and read_manifest(Path(start)).get("quant_cfg"):
        restore_quantizers(model, start)
        return f"input ranges of {start}"
    state = calibrate(model, batches(prompts, config.policy.quant_batch_size, model.device))
    peaks = sorted(peak.item() for peak in state.values())
    tokens = sum(map(len, prompts))
    return (
        f"calibrated {len(peaks)} layers over {len(prompts)} prompts, {tokens:,} tokens: largest |input| "
        f"{peaks[0]:.3g} to {peaks[-1]:.3g}"
    )


def calibrate(model: Any, batches: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Find the input ranges of formats with static activations and return the state; nothing for other formats.

    The largest |input| of every layer over batches of (token ids (B, L), which of them are real (B, L)), padded on the
    right, by the model as it is now with its quantizers off. `CheckFailed` when a layer gets no input or one that is
    not finite.
    """
    import torch

    from kit.weights.frozen_base import plain_name
    from recipes.parts.qat import (
        AMAX,
        load_quantizer_state,
        quantized_layers,
        quantizer_state,
        quantizers_of,
        quantizers_off,
    )

    quantizers = quantizers_of(model)
    if quantizers is None or not quantizers.fmt.needs_calibration:
        return {}
    layers, peaks, now = quantized_layers(model), {}, {}

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple) -> None:
            peak = inputs[0][now["real"]].abs().amax().float()
            peaks[name] = torch.maximum(peaks[name], peak) if name in peaks else peak

        return hook

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in layers.items()]
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model  # no output layer
    was_training = model.training
    try:
        model.eval()
        with torch.no_grad(), quantizers_off(model):
            for ids, now["real"] in batches:
                backbone(input_ids=ids, use_cache=False)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    bad = [name for name in layers if name not in peaks or not 0 < peaks[name].item() < float("inf")]
    if bad:
        raise CheckFailed(
            f"{len(bad)} of {len(layers)} layers have no usable input over the calibration prompts (first: "
            f"{plain_name(bad[0])}). Calibrate with other prompts (policy.quant_calib_data), or use a format that "
            "needs none: fp8, nvfp4a16, w4a16."
        )
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        everyone = torch.stack([peaks[name] for name in layers])  # the same but for another device's rounding
        torch.distributed.all_reduce(everyone, op=torch.distributed.ReduceOp.MAX)
        peaks = dict(zip(layers, everyone.unbind(), strict=True))
    load_quantizer_state(model, {f"{plain_name(name)}{AMAX}": peak for name, peak in peaks.items()})
    return quantizer_state(model)
