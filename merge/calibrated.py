"""Formats that need data: the calibration set, the ranges of the layers' inputs, and AWQ by llm-compressor.

Calibration reads the run's own training prompts, with the policy's logged completions if there are any, and never the
held-out problems. Both policies are calibrated on the same sequences, so that they differ only in their weights. Not
covered: GPTQ; several GPUs.
"""

import hashlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kit.core.errors import BadInput
from kit.core.own_code import OwnCodeHeldBack
from kit.core.run_directory import RunDir, publish, write_manifest
from kit.weights.checkpoint import checkpoint_shards
from kit.weights.frozen_base import BaseCheckpoint
from merge.merge import write_config
from merge.quantize import Refused, format_of, quantization_config
from merge.verify import as_prompt, imported_from, load_for_scoring, logged_rows, logged_texts, release_memory

WORKER = Path(__file__).with_name("awq.py")
SHARD = "5GB"
NO_SHARE = "AWQ moves scales between layers, so a stored weight has no counterpart in the base's"


@dataclass(frozen=True)
class Calibration:
    """Token ids of the sequences, at most `max_length` each, and the facts that a manifest records about them."""

    sequences: list[list[int]]
    facts: dict


def calibration_set(run: RunDir, tokenizer: Any, samples: int, max_length: int) -> Calibration:
    """Return up to `samples` of the run's training prompts, without duplicates; deterministic for a run.

    Prompts of logged completions come first, newest step first, together with the completion; then prompts spread
    evenly over the training split. Each is truncated to `max_length` tokens. `BadInput` if there is none at all.
    """
    values = run.config()
    texts: dict[str, str] = {}  # {prompt: prompt with its completion}
    files = sorted(run.completions.glob("step-*.jsonl"), reverse=True)
    for row in itertools.chain.from_iterable(map(logged_rows, files)):
        if len(texts) < samples:
            texts.setdefault(*logged_texts(values, row, tokenizer))
    completions, reason = len(texts), ""
    if completions < samples:
        try:
            prompts = [prompt for prompt in _training_prompts(run, tokenizer) if prompt not in texts]
        except OwnCodeHeldBack:
            raise
        except BadInput as error:
            prompts, reason = [], str(error)
        missing = samples - completions
        texts |= {prompt: prompt for prompt in prompts[:: max(1, len(prompts) // missing)][:missing]}
    if not texts:
        fix = " An imported adapter gets them from merge import --prompts." if imported_from(values) else ""
        why = reason or "there is no problem."
        raise BadInput(f"nothing to calibrate on: {run.completions} holds no completion, and {why}{fix}")
    if reason:
        print(f"note: calibrating on {completions} logged completions alone, since {reason}", flush=True)
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"][:max_length] for text in texts.values()]
    content = hashlib.blake2b(json.dumps(sequences).encode(), digest_size=16).hexdigest()
    facts = {"samples": len(sequences), "with_completion": completions, "tokens": sum(map(len, sequences))}
    return Calibration(sequences, {**facts, "max_length": max_length, "hash": content})


def _training_prompts(run: RunDir, tokenizer: Any) -> list[str]:
    from kit.core.config.schema import DataConfig
    from kit.data.problems import chat_messages, load_problems

    values = run.config()
    try:
        data = DataConfig(**values["data"])
    except (TypeError, KeyError) as error:
        raise BadInput(f"{run.config_file} has no data section that this version reads: {error}.") from None
    return [as_prompt(values, chat_messages(data, problem), tokenizer) for problem in load_problems(data, "train")]


@torch.no_grad()
def input_peaks(merged: Path, names: set[str], calibration: Calibration) -> dict[str, float]:
    """Return {weight name: largest |input| of that layer over the sequences} for the BF16 checkpoint `merged`.

    The whole model is loaded, as for verification: float32 on a CPU, bfloat16 on a GPU. `Refused` if a layer gets no
    input or a non-finite one.
    """
    model = load_for_scoring(merged)
    device = model.get_input_embeddings().weight.device
    peaks = {name: torch.zeros((), device=device) for name in names}

    def watch(name: str) -> Callable:
        def hook(_: torch.nn.Module, inputs: tuple) -> None:
            peaks[name] = torch.maximum(peaks[name], inputs[0].abs().amax().float())

        return hook

    modules = dict(model.named_modules())
    for name in names:
        if (module := modules.get(name.removesuffix(".weight"))) is None:
            raise Refused(
                f"transformers' model has no layer {name}, so its inputs cannot be observed. Leave fp8_static and "
                "nvfp4 out."
            )
        module.register_forward_pre_hook(watch(name))
    for ids in calibration.sequences:
        model(torch.tensor([ids], device=device))
    found = {name: peak.item() for name, peak in peaks.items()}
    del model, modules, module
    release_memory()
    if bad := [name for name, peak in sorted(found.items()) if not 0 < peak < float("inf")]:
        raise Refused(
            f"{len(bad)} of {len(found)} layers have no usable input over {calibration.facts['tokens']} tokens of "
            f"calibration ({bad[0]}: largest |input| {found[bad[0]]}). Leave fp8_static and nvfp4 out; fp8 and "
            "nvfp4a16 need none."
        )
    return found


def check_awq(python: Path) -> str:
    """Return the version of llm-compressor that `python` has; `BadInput` with the fix if it has none."""
    fix = (
        "AWQ is written by llm-compressor in an environment of its own: create it with `make llmcompressor`, or name "
    )
    fix += "its Python with --awq_python."
    if not python.is_file():
        raise BadInput(f"{python} does not exist. {fix}")
    command = [str(python), "-I", "-c", "from importlib.metadata import version; print(version('llmcompressor'))"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"{python} has no llm-compressor. {fix}")
    return done.stdout.strip()


def write_awq(
    merged: Path,
    final: Path,
    base: BaseCheckpoint,
    calibration: Calibration,
    python: Path,
    verify: Callable[[Path], dict | None],
    overwrite: bool = False,
    **manifest: Any,
) -> dict:
    """Publish the BF16 checkpoint `merged` as AWQ W4A16 at `final`, in the layout of w4a16; return the manifest.

    llm-compressor loads the whole model into host memory and moves it to the GPU, if there is one, layer by layer.
    `Refused`, with the end of its output, if it fails; also if it stored other tensors than requested.
    """
    ignore, compressor, fmt = base.unquantized_linears(), check_awq(python), format_of(base, "awq")
    with publish(final, overwrite) as partial:
        request: dict[str, Any] = {"model": str(merged.absolute()), "out": str(partial.absolute()), "ignore": ignore}
        request |= {"max_shard_size": SHARD, "sequences": calibration.sequences, "group": fmt.weight.block[1]}
        _run_worker(python, request)
        for file in partial.iterdir():
            if not file.name.startswith("model") or file.suffix not in (".safetensors", ".json"):
                file.unlink()  # its configuration, tokenizer and recipe: ours come from the merged checkpoint
            else:
                shutil.copymode(merged / "config.json", file)  # it makes them readable only by their owner
        _check_stored(merged, partial, base.quantized)
        write_config(merged, partial, quantization_config(fmt, ignore))
        facts: dict[str, Any] = {"calibration": {**calibration.facts, "llmcompressor": compressor}}
        facts |= {"retained_update": None, "no_retained_update": NO_SHARE, "verify": verify(partial)}
        return write_manifest(partial, "checkpoint", format=fmt.name, **manifest, **facts)


def _run_worker(python: Path, request: dict) -> None:
    with tempfile.TemporaryDirectory(prefix="merge-awq-") as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        done = subprocess.run(
            [python, "-I", WORKER, file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-15:])
        raise Refused(f"llm-compressor failed (exit code {done.returncode}), so nothing was kept. Its output:\n{said}")


def _check_stored(merged: Path, partial: Path, quantized: set[str]) -> None:
    expected: set[str] = set()
    for names in checkpoint_shards(merged).values():
        for name in names:
            module = name.removesuffix(".weight")
            parts = ("weight_packed", "weight_scale", "weight_shape")
            expected |= {f"{module}.{part}" for part in parts} if name in quantized else {name}
    stored = {name for names in checkpoint_shards(partial).values() for name in names}
    if stored != expected:
        raise Refused(
            f"llm-compressor stored {len(stored - expected)} tensors that were not requested "
            f"({', '.join(sorted(stored - expected)[:3])}) and left out {len(expected - stored)} "
            f"({', '.join(sorted(expected - stored)[:3])}), so nothing was kept."
        )
