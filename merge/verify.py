"""Compare a merged checkpoint with the policy (base plus adapter), token by token, on the run's own prompts.

Covers: loading the policy and any checkpoint the kit writes (bf16, fp8, w4a16, nf4) for scoring, and the numbers that
decide: mean KL(policy‖merged), largest |Δlogp| of the batch's own tokens, top-1 agreement. Not covered: accuracy,
which the evaluation measures.
"""

import contextlib
import gc
import itertools
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from kit.core.cards import generation
from kit.core.chat import arguments_of, render, special_tokens
from kit.core.checkpoint_files import from_files, quantization_of
from kit.core.config.schema import DataConfig
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import LOGGED_TEXTS
from kit.core.run_directory import INTO, RunDir, check_adapter_file, read_manifest
from kit.core.run_files import numbered_lines, parse
from kit.data.problems import prompt_of_row
from kit.policy.adapted_experts import targets_as_named, use_adapted_experts
from kit.weights.attention import attention_of
from kit.weights.checkpoint import find_checkpoint
from kit.weights.experts import FrozenExperts
from kit.weights.fp8 import Fp8Linear
from kit.weights.frozen_base import BaseCheckpoint, default_device, disable_cpu_repacking, load_base
from kit.weights.initialization import loaded_weights_kept
from kit.weights.plain_linear import plain_linears
from kit.weights.read_quantized import StoredWeights
from kit.weights.wrapped import language_config, loading, wrapper_of
from merge.devices import placement
from merge.quantized_experts import read_experts
from merge.trained import find_trained

SEQUENCES = 12  # of each kind: held-out prompts, logged completions
MAX_LENGTH = 512  # tokens of one sequence
MAX_TOKENS = 4096  # tokens of the batch
MAX_LOGPROBS = 1 << 28  # log-probs held at once for a policy: 1 GiB in float32
# Bounds on the mean KL (nats per token) of a correct BF16 merge. In float32, random models of 2 and 12 layers, which
# amplify rounding, measure 3e-5 and 1.4e-4 (bench/CPU.md); BF16 arithmetic adds noise and is allowed ten times more.
# The bound is that of the dtype that the policy was trained in, whatever the comparison computes in: a pretrained
# model of 135 M parameters trained in BF16 is 1.3e-3 to 6.3e-3 from its rounded merge, computed in float32
# (bench/README.md).
# Float16 has bfloat16's bounds: its merge is rounded to BF16 as well.
KL_NOISE = {torch.float32: 5e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
BF16_KL_BOUND = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# The same for a checkpoint in the format that the policy was trained for, against the policy with its quantizers. Both
# compute with the same numbers: 0 in float32 (bench/CPU.md). In BF16, readers round activations with other arithmetic.
OWN_KL_NOISE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
OWN_KL_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


# Prompts for an adapter that came without any: both sides of the comparison read the same tokens, whatever they say.
GENERIC = (
    "Explain why the sky is blue to a ten-year-old.",
    "What is 17 * 24? Show your work.",
    "Write a Python function that reverses a linked list.",
    "Translate into French: The train leaves at half past seven.",
    "Summarize the plot of Romeo and Juliet in two sentences.",
    "List three causes of the First World War.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost?",
    "Write a polite email asking for a deadline to be extended by a week.",
)


def read_tokenizer(directory: Path) -> Any:
    """The tokenizer of a checkpoint; `BadInput` if it has none."""
    from transformers import AutoTokenizer

    return from_files(
        "tokenizer", directory, lambda: AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    )


def scoring_dtype(device: torch.device | str) -> torch.dtype:
    """float32 on a CPU, bfloat16 on a GPU, float16 on one without it."""
    if torch.device(device).type == "cpu":
        return torch.float32
    return getattr(torch, generation(torch.cuda.get_device_capability(device)).dtypes[0])


def load_for_scoring(
    directory: str | Path,
    device: torch.device | str | None = None,
    weights: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Load a checkpoint of any format, in eval mode, for computing in `dtype`.

    `dtype` is by default float32 on a CPU, bfloat16 on a GPU. fp8 and w4a16 weights are dequantized at load time (a
    GPU then holds them as bfloat16); fp8's activations are still rounded to FP8 at every layer, as on a server with
    FP8 kernels. With `weights`, the dequantized weights are rounded to that dtype, as in a reader that computes in it.
    What one GPU cannot hold goes over all of them (`devices.py`).
    """
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise BadInput(f"no checkpoint at {directory}: it has no config.json.")
    device = torch.device(device) if device is not None else default_device()
    dtype = dtype or scoring_dtype(device)
    config = language_config(AutoConfig.from_pretrained(directory, trust_remote_code=False))
    method = quantization_of(config).get("quant_method")
    options: dict[str, Any] = {"attn_implementation": attention_of(config)}
    if method == "compressed-tensors":
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    # compressed-tensors compiles its rounding to FP4, which takes longer than everything computed here.
    stance = torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings(), stance, loading(config) as names, plain_linears(config), loaded_weights_kept():
        # transformers warns that the checkpoint's own configuration overrides ours, except for `dequantize`: as
        # intended.
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        place: dict[str, Any] = {"": device}
        if method != "bitsandbytes":
            with torch.device("meta"):
                empty = AutoModelForCausalLM.from_config(config, attn_implementation=options["attn_implementation"])
            place = placement(empty, device, dtype, not method, directory)
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, device_map=place, **names, **options, trust_remote_code=False
        )
    if method == "compressed-tensors":
        if wrapper_of(config):
            _reload_renamed(model, directory, dtype)
        for module in model.modules():  # compressed-tensors dequantizes FP4 to BF16 whatever the model computes in
            if isinstance(module, torch.nn.Linear):
                module.weight.data = module.weight.data.to(weights or dtype).to(dtype)
                _round_by_token(module)
        read_experts(model, directory, weights or dtype, dtype)
    if method == "bitsandbytes":
        disable_cpu_repacking(model)
        compute_in(model, dtype)
    return model.eval()


def _round_by_token(module: torch.nn.Module) -> None:
    """Let a layer whose inputs are rounded by token do so for inputs of any shape (…, n), as servers do.

    compressed-tensors 0.17 takes the first two dimensions for tokens: OPT's MLP, whose input is (T, n), would get one
    scale for all, and so would multi-head latent attention, whose input is (B, 1, T, n).
    """
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None or scheme.input_activations is None or scheme.input_activations.strategy != "token":
        return
    forward = module.forward

    def by_token(x: torch.Tensor) -> torch.Tensor:
        return forward(x.reshape(1, -1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    module.forward = by_token


def _reload_renamed(model: torch.nn.Module, directory: Path, dtype: torch.dtype) -> None:
    """Make a model in `dtype` of a quantized checkpoint whose tensors were renamed on loading.

    transformers 5.17 leaves renamed tensors of a quantized checkpoint in the dtype of their file, whatever dtype is
    asked for, and weights would be dequantized with scales in 16 bits.
    """
    stored = StoredWeights(directory)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and (weight := stored.weight(name, module.weight.device)) is not None:
            module.weight.data = weight.to(dtype)
    kept = set(model.state_dict())  # without the rotary frequencies, which stay in float32
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and name in kept:
            value.data = value.data.to(dtype)


def compute_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Make a model compute in `dtype`, keeping the bytes of its NF4 and FP8 layers and their dequantized dtype."""
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit | Fp8Linear):
            module.compute_dtype, module.compute_type_is_set = dtype, True
        elif isinstance(module, FrozenExperts):
            module.compute_dtype = dtype
        elif isinstance(module, torch.nn.Linear) and not hasattr(module, "storage_dtype"):
            module.storage_dtype = module.weight.dtype  # the dtype that kit/weights/quantize.py rounds to
    for parameter in model.parameters():
        if parameter.is_floating_point() and getattr(parameter, "quant_state", None) is None:
            parameter.data = parameter.data.to(dtype)


def release_memory() -> None:
    """Free what `del model` leaves: an NF4 parameter and its module form a cycle that only the collector can free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def base_directory(run: RunDir, base: str | Path | None = None, weights: bool = True) -> Path:
    """Return the directory of a run's original checkpoint: `base` if given, else the one its base.json names.

    Without `weights`, the weights of a hub id are not downloaded. `BadInput` if the checkpoint does not exist; a run
    that was trained on a local directory is never looked up on the hub.
    """
    info = run.base()
    local = (run.config().get("model") or {}).get("path") is not None
    if base is None and local and not Path(info["model"]).is_dir():
        raise BadInput(
            f"the run was trained on the local checkpoint {info['model']}, which does not exist (seen from "
            f"{Path.cwd()}). Pass the base with --base."
        )
    return find_checkpoint(base or info["model"], info.get("revision"), weights)


def base_checkpoint(run: RunDir, base: str | Path | None = None, device: Any = None) -> BaseCheckpoint:
    """Open a run's original checkpoint: `base` if given, else the one its base.json names."""
    return BaseCheckpoint(base_directory(run, base), run.base(), device)


def check_adapter_base(adapter: Path, info: dict) -> dict:
    """Return the manifest of an adapter that was trained on the base of `info` (base.json); `BadInput` for another
    base, and for files whose content does not match the manifest."""
    manifest = read_manifest(adapter, "adapter", deep=True)
    check_adapter_file(adapter, manifest)
    if manifest.get("base_hash") != info["hash"]:
        raise BadInput(
            f"{adapter} was trained on another base: its manifest says base_hash {manifest.get('base_hash')}, the "
            f"run's base.json says {info['hash']}. Pass the run that the adapter comes from."
        )
    return manifest


def load_policy(
    run: RunDir | str | Path,
    adapter: str | Path | None,
    base: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """Load the policy as trained, in eval mode: the run's base as it was stored, with `adapter` on it if given.

    A run that was trained for a format (policy.quant_cfg) gets the quantizers of `adapter`, or of the run's newest
    one. Computes in `dtype`, by default float32 on a CPU and bfloat16 on a GPU. `BadInput` for an adapter of another
    base, before weights are loaded; `CheckFailed` if the loaded base does not match base.json bit for bit.
    """
    run = run if isinstance(run, RunDir) else RunDir.open(run)
    checkpoint = base_checkpoint(run, base)
    trained = find_trained(run, None if adapter is None else Path(adapter))
    if adapter is not None:
        check_adapter_base(Path(adapter), checkpoint.info)
    device = torch.device(device) if device is not None else default_device()
    dtype = dtype or scoring_dtype(device)
    model = load_base(checkpoint, device)
    compute_in(model, dtype)
    if adapter is not None:
        from peft import PeftConfig, PeftModel

        # The factors are read, so their initialization does not matter. peft would repeat it, and "orthogonal" gives
        # them the dtype of the packed NF4 weights.
        settings = PeftConfig.from_pretrained(str(adapter))
        settings.init_lora_weights = True
        with targets_as_named():
            model = PeftModel.from_pretrained(model, str(adapter), config=settings)
        use_adapted_experts(model)
        compute_in(model, dtype)
    if trained is not None:
        from kit.policy.quantized_linear import load_quantizer_state, use_quantized_linears

        use_quantized_linears(model, trained.format)
        load_quantizer_state(model, trained.state())
    return model.eval()


def fixed_batch(run: RunDir, tokenizer: Any, vocabulary: int) -> list[torch.Tensor]:
    """Token ids (1, T) of the run's own sequences: prompts with their logged completions, then held-out prompts.

    Deterministic for a run. Completions come first, since prompts alone would use up the tokens of a large vocabulary.
    Held-out prompts come from a local jsonl, with the chat template applied; a run on a hub data set has only its
    completions. An imported adapter without either gets `GENERIC` ones. `BadInput` if there is neither.
    """
    texts = batch_texts(run, tokenizer)
    budget = min(MAX_TOKENS, MAX_LOGPROBS // vocabulary)
    batch = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][:, : min(budget, MAX_LENGTH)]
        if ids.shape[1] > 1:
            batch.append(ids)
            budget -= ids.shape[1]
        if budget < 2:
            break
    if not batch:
        raise BadInput(
            f"nothing to verify on: {run.completions} holds no completion and data.eval_path / data.path of "
            f"{run.config_file} is not a local jsonl file. Pass --skip_verify to merge unverified."
        )
    return batch


def batch_texts(run: RunDir, tokenizer: Any) -> list[str]:
    """The texts of `fixed_batch`."""
    texts = [*_logged_completions(run, tokenizer), *_held_out_prompts(run, tokenizer)]
    if not texts and imported_from(run.config()):
        print("note: no prompts were given for this adapter, so it is verified on generic ones", flush=True)
        texts = [as_prompt(run.config(), prompt, tokenizer) for prompt in GENERIC]
    return texts


def imported_from(values: dict) -> str | None:
    """The adapter of another program that the run with the configuration `values` was made of; None for others."""
    return (values.get("run") or {}).get("imported_from")


def _held_out_prompts(run: RunDir, tokenizer: Any) -> list[str]:
    values = run.config()
    data = values.get("data", {})
    if not (place := data.get("eval_path") or data.get("path")):
        return []  # Path("") would be the current directory, whose test.jsonl is not the run's
    file = Path(place)
    if file.is_dir():
        file = file / f"{data.get('eval_split', 'test')}.jsonl"
    if file.suffix != ".jsonl" or not file.is_file():
        return []
    known = {one.name for one in fields(DataConfig)}  # an earlier version may have had others
    settings = DataConfig(**{key: value for key, value in data.items() if key in known})
    prompts: list[str] = []
    for row in itertools.islice(rows_in(file), SEQUENCES):
        if (messages := prompt_of_row(settings, row, f"a row of {file}")) is not None:
            prompts.append(as_prompt(values, messages, tokenizer))
    return prompts


def _logged_completions(run: RunDir, tokenizer: Any) -> list[str]:
    files = sorted(run.completions.glob("step-*.jsonl"), reverse=True)
    rows = [row for file in files[:1] for row in itertools.islice(logged_rows(file), SEQUENCES)]
    values = run.config()
    return [logged_texts(values, row, tokenizer)[1] for row in rows]


def logged_texts(values: dict, row: dict, tokenizer: Any) -> tuple[str, str]:
    """The prompt of a logged completion, and the prompt with the completion; all turns and answers of an episode."""
    prompt = as_prompt(values, row["prompt"], tokenizer)
    if isinstance(text := row.get("text"), str):
        return prompt, text
    return prompt, prompt + as_completion(row["completion"])


def logged_rows(file: Path) -> Iterator[dict]:
    """Texts that a run logged in a file, without the truncated last line of a killed run."""
    return (row for _, row in numbered_lines(file, LOGGED_TEXTS, may_be_growing=True))


def rows_in(file: Path) -> Iterator[dict]:
    """Rows of a user's jsonl file; other lines are skipped."""
    with open(file, "rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):
                if isinstance(row := parse(line, is_foreign=True), dict):
                    yield row


def as_prompt(values: dict, prompt: str | list[dict], tokenizer: Any) -> str:
    """A prompt as the run with the configuration `values` rendered it.

    `prompt` is a list of chat messages, or the user's message alone, which is what a run logs. Text that holds special
    tokens already went through a chat template and is returned unchanged, and so is text for a base without one.
    """
    if isinstance(prompt, str):
        if not tokenizer.chat_template or any(token in prompt for token in special_tokens(tokenizer)):
            return prompt
        system = (values.get("data") or {}).get("system_prompt")
        prompt = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]
    return render(tokenizer, prompt, arguments_of(values))


def as_completion(completion: str | list[dict]) -> str:
    """A logged completion, text or chat messages, as text."""
    return completion if isinstance(completion, str) else "".join(part["content"] for part in completion)


@torch.no_grad()
def log_probs(model: torch.nn.Module, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """Per sequence, the log-probs (T-1, V) of every next token, float32 on the CPU."""
    device = model.get_input_embeddings().weight.device
    with torch.compiler.set_stance("force_eager"), divided_input_scales():
        return [model(ids.to(device)).logits[0, :-1].float().log_softmax(-1).cpu() for ids in batch]


@contextlib.contextmanager
def divided_input_scales() -> Iterator[None]:
    """Make compressed-tensors divide for the input scale of a token or a group, as servers and the policy do.

    It computes peak / 448.0, which PyTorch on a GPU turns into peak times the reciprocal: off by the last bit in
    float32. That moves a few inputs to the next FP8 number, and affects every layer behind them. In float64 the last
    bit is right after rounding, whatever the arithmetic.
    """
    from compressed_tensors.quantization.utils import helpers

    theirs = helpers.calculate_qparams

    def divided(low: torch.Tensor, high: torch.Tensor, form: Any, *others: Any, **keys: Any) -> tuple:
        if form.scale_dtype is not None:  # scales rounded to FP8 are already divided by a tensor
            return theirs(low, high, form, *others, **keys)
        scale, zero = theirs(low.double(), high.double(), form, *others, **keys)
        return scale.to(low.dtype), zero

    helpers.calculate_qparams = divided
    try:
        yield
    finally:
        helpers.calculate_qparams = theirs


@dataclass(frozen=True)
class Comparison:
    """Comparison of a checkpoint with the policy, over the tokens of a batch."""

    mean_kl: float
    max_abs_dlogp: float
    top1_agreement: float
    tokens: int


def compare(policy: list[torch.Tensor], merged: list[torch.Tensor], batch: list[torch.Tensor]) -> Comparison:
    """Mean KL(policy‖merged) in nats per token, largest |Δlogp| of the batch's tokens, share of equal argmax."""
    kl, same, worst, tokens = 0.0, 0, 0.0, 0
    for p, q, ids in zip(policy, merged, batch, strict=True):
        if not (torch.isfinite(p).all() and torch.isfinite(q).all()):
            raise CheckFailed("a model returned non-finite log-probs, so nothing can be compared.")
        kl += torch.nn.functional.kl_div(q.double(), p.double(), reduction="sum", log_target=True).item()
        same += (p.argmax(-1) == q.argmax(-1)).sum().item()
        taken = ids[0, 1:, None].cpu()
        worst = max(worst, (p.gather(1, taken) - q.gather(1, taken)).abs().max().item())
        tokens += taken.shape[0]
    return Comparison(kl / tokens, worst, same / tokens, tokens)


class Verifier:
    """Compares checkpoints with the policies of a run on its fixed batch; the policies are scored once.

    For a run that was trained for a format, `scores` are of the policies as trained, with their quantizers, and
    `plain` of the same with quantizers off, which BF16 is merged from; for other runs the two are equal. A run trained
    for a format is scored in float32 on a GPU too if there is room: with BF16 arithmetic, activations round to other
    codes.
    """

    def __init__(self, run: RunDir, adapter: Path | None, base: BaseCheckpoint, batch: list[torch.Tensor]):
        self.batch = batch
        self.device = default_device()
        self.weights, self.dtype = base.dtype, scoring_dtype(self.device)
        self.trained = trained = find_trained(run, adapter)
        if trained is not None and _has_room(base, self.device):
            self.dtype = torch.float32
        model = load_policy(run, adapter, base.directory, self.device, self.dtype)
        self.scores = self.plain = _policy_scores(model, adapter is not None, batch)
        if trained is not None:
            from kit.policy.quantized_linear import quantizers_off

            with quantizers_off(model):
                self.plain = _policy_scores(model, adapter is not None, batch)
        del model
        release_memory()

    def update_kl(self, plain: bool = False) -> float:
        """KL(policy‖base): what a checkpoint without the adapter would measure."""
        scores = self.plain if plain else self.scores
        return compare(scores["grpo"], scores["base"], self.batch).mean_kl

    def compare(
        self, policy: str, directory: Path, plain: bool = False, weights: torch.dtype | None = None
    ) -> Comparison:
        """Compare a checkpoint with the policy as trained, or with `plain` with the policy without quantizers."""
        model = load_for_scoring(directory, self.device, weights, self.dtype)
        scores = log_probs(model, self.batch)
        del model
        release_memory()
        return compare((self.plain if plain else self.scores)[policy], scores, self.batch)

    def check_bf16(self, policy: str, directory: Path) -> Comparison:
        """Compare a BF16 checkpoint; `CheckFailed` if it is not the policy up to rounding."""
        found = self.compare(policy, directory, plain=True)
        return self._check(policy, found, BF16_KL_BOUND[self.weights], KL_NOISE[self.dtype], plain=True)

    def check_own(self, policy: str, directory: Path) -> Comparison:
        """Compare a checkpoint in the format that the policy was trained for, its weights read in the dtype of the
        training; `CheckFailed` if the two do not compute the same."""
        found = self.compare(policy, directory, weights=self.weights)
        return self._check(policy, found, OWN_KL_BOUND[self.dtype], OWN_KL_NOISE[self.dtype], plain=False)

    def judge(self, policy: str, name: str, directory: Path, into: str = INTO[0]) -> dict:
        """Distance of a checkpoint in the format `name` to the policy.

        `CheckFailed` if it is in BF16, or in the format that the policy was trained for, and is not the policy. A
        checkpoint that was merged into other weights than the policy's is another model: its distance is not judged.
        """
        judged = into == INTO[0]
        if name == "bf16":
            found = self.check_bf16(policy, directory) if judged else self.compare(policy, directory, True)
        elif judged and self.trained is not None and self.trained.format.name == name:
            found = self.check_own(policy, directory)
        else:
            found = self.compare(policy, directory)
        if self.trained is None:
            return asdict(found)
        to = "no quantizers" if name == "bf16" else f"quantizers of {self.trained.format.name}"
        return {**asdict(found), "policy_with": to}

    def _check(self, policy: str, found: Comparison, bound: float, noise: float, plain: bool) -> Comparison:
        if policy == "grpo":  # a small update must not hide under the bound: be closer to the policy than the base
            bound = min(bound, max(noise, 0.5 * self.update_kl(plain)))
        if not found.mean_kl <= bound:
            raise CheckFailed(
                f"the merged {policy} checkpoint is not the policy: mean KL(policy‖merged) {found.mean_kl:.2e} over "
                f"{found.tokens} tokens, the bound is {bound:.2e}; max |Δlogp| {found.max_abs_dlogp:.3f}, top-1 "
                f"agreement {found.top1_agreement:.3f}."
            )
        return found


def _has_room(base: BaseCheckpoint, device: torch.device) -> bool:
    """Whether a checkpoint of the model in float32 takes at most half of the device's free memory."""
    if device.type != "cuda":
        return True
    return 4 * sum(math.prod(base.shape(name)) for name in base.files) <= torch.cuda.mem_get_info(device)[0] / 2


def _policy_scores(model: torch.nn.Module, has_adapter: bool, batch: list[torch.Tensor]) -> dict[str, list]:
    """{"base": log-probs}, plus "grpo" if there is an adapter."""
    if not has_adapter:
        return {"base": log_probs(model, batch)}
    scores = {"grpo": log_probs(model, batch)}
    with model.disable_adapter():
        return scores | {"base": log_probs(model, batch)}
