"""The teacher of a distillation: the model whose next-token distribution the student learns to match.

- `distill.teacher base`: the student's own model with its adapter off and its quantizers off. No second model.
- `distill.teacher_adapter`: the same with another adapter's weights swapped in for the teacher's pass.
  Quantization-aware distillation heals a policy that was trained unquantized: that policy is the teacher, and
  `policy.init_adapter`, the same directory, is where the student starts. Costs the memory of one more adapter.
- another model by id or path: loaded next to the student and stored as its base is (policy.quantization). It must
  have the student's tokenizer.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kit.core.checkpoint_files import from_files, read_header
from kit.core.config.distill_rules import is_own_model
from kit.core.config.schema import Config
from kit.core.config.sharding_rules import CONFIGS, ZERO3, announced
from kit.core.errors import BadInput
from kit.core.file_kinds import ADAPTER_CONFIG, BASE_HASH
from kit.core.lora import scale_of
from kit.core.run_directory import RunDir, base_directory
from kit.core.run_files import read_object
from kit.core.tokenizer_hash import tokenizer_hash
from kit.policy.adapter_files import PREFIX, adapter_facts
from kit.policy.load import adapted_layers, check_same_base, load_stored
from kit.policy.other_adapter import wearing
from kit.policy.sharding import loading_whole
from kit.weights.frozen_base import unquantized_config
from kit.weights.model_files import check_complete, context_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TrainingArguments


def check_teacher(
    config: Config, run: RunDir, tokenizer: "PreTrainedTokenizerBase", model_config: "PreTrainedConfig"
) -> None:
    """`BadInput` unless the teacher fits the student, as far as the files tell; reads no weights.

    `model_config` is the transformers config of the student's model.
    """
    if config.distill.teacher_adapter:
        _check_adapter(config, run, model_config)
    elif not is_own_model(config):
        _check_model(config, tokenizer, model_config)


def _check_adapter(config: Config, run: RunDir, model_config: "PreTrainedConfig") -> None:
    directory = Path(config.distill.teacher_adapter)
    facts = adapter_facts(directory)
    if known := _known_base(config, run):
        check_adapter_base(config, *known)
    layers = adapted_layers(config, model_config)
    tensors = read_header(directory / "adapter_model.safetensors").tensors
    theirs = {name for name in tensors if name.endswith(".lora_A.weight")}
    ranks, rank = {tensors[name][1][0] for name in theirs}, config.policy.lora_rank
    if (kind := announced()) and ranks != {rank}:
        raise BadInput(
            f"distill.teacher_adapter {directory} has rank {', '.join(map(str, sorted(ranks)))}, policy.lora_rank is "
            f"{rank}: under {kind} the teacher's values take the place of the student's, part by part. Use a student "
            "of the same rank, or accelerate_configs/ddp.yaml."
        )
    ours = {f"{PREFIX}{layer}.lora_A.weight" for layer in layers}
    if other := sorted(theirs ^ ours):
        raise BadInput(
            f"distill.teacher_adapter {directory} adapts {len(theirs)} layers ({', '.join(facts['targets'])}), "
            f"policy.target_modules {len(ours)}; only one of them adapts {other[0].removesuffix('.lora_A.weight')}. "
            "Set model.id or model.path and policy.target_modules to what it was trained with."
        )


def _known_base(config: Config, run: RunDir) -> tuple[str, str] | None:
    """Hash of the student's base before it is loaded, and the file it comes from; None if not recorded."""
    own = [] if run.replaces else [run.base_file]
    for file in (*own, base_directory(config) / "base.json"):
        if file.is_file():
            return read_object(file, BASE_HASH)["hash"], str(file)
    if config.policy.init_adapter:
        theirs = adapter_facts(Path(config.policy.init_adapter))["base_hash"]
        return (theirs, config.policy.init_adapter) if theirs else None
    return None


def check_adapter_base(config: Config, base_hash: str, source: str = "this base") -> None:
    """`BadInput` if `distill.teacher_adapter` was trained on another base than the one with this base hash."""
    directory = config.distill.teacher_adapter
    if directory is None:
        return
    theirs = adapter_facts(Path(directory))["base_hash"]
    if theirs is not None:  # a plain peft adapter has none
        check_same_base(f"distill.teacher_adapter {directory}", theirs, base_hash, source)


def _check_model(config: Config, tokenizer: "PreTrainedTokenizerBase", student: "PreTrainedConfig") -> None:
    from transformers import AutoTokenizer

    from kit.policy.packed.packing import check_packing

    name, revision = config.distill.teacher, config.distill.teacher_revision
    try:
        theirs = unquantized_config(name, revision)
        check_complete(name, theirs)
        other = from_files(
            "tokenizer", name, lambda: AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        )
    except BadInput as error:
        raise BadInput(f"distill.teacher: {error}") from None
    if tokenizer_hash(other) != tokenizer_hash(tokenizer):
        raise BadInput(
            f"distill.teacher {name} has another tokenizer than {config.model.source} ({len(other):,} and "
            f"{len(tokenizer):,} entries): the same ids would be other text. Use a teacher of the same family."
        )
    facts = theirs.get_text_config()
    if facts.vocab_size < len(tokenizer):
        raise BadInput(
            f"distill.teacher {name} scores {facts.vocab_size:,} ids, the tokenizer has {len(tokenizer):,}. Use "
            "another teacher."
        )
    words = student.get_text_config().vocab_size
    if announced() == ZERO3 and facts.vocab_size < words:
        raise BadInput(
            f"distill.teacher {name} scores {facts.vocab_size:,} ids, {config.model.source} {words:,}: a part of its "
            f"output matrix, which {ZERO3} splits, would be read. Use {CONFIGS}, or another teacher."
        )
    wanted = config.rollout.max_prompt_length + config.rollout.max_completion_length
    if (context := context_of(theirs)) is not None and context < wanted:
        raise BadInput(
            f"distill.teacher {name} has a context of {context} tokens, "
            f"rollout.max_prompt_length + max_completion_length need {wanted}."
        )
    try:
        check_packing(config, theirs)
    except BadInput as error:
        raise BadInput(f"distill.teacher: {error}") from None


def load_teacher(config: Config, arguments: "TrainingArguments") -> "torch.nn.Module | None":
    """Load another model as teacher, frozen, on this process's device; None if it is the student's own. Every process
    holds all of it, also where the student's base is split."""
    if is_own_model(config):
        return None
    with loading_whole(arguments):
        model = load_stored(config, config.distill.teacher, config.distill.teacher_revision)
    return model.eval().requires_grad_(False)


class Teacher:
    """Provide the teacher for passes without gradients: `with teacher.of(student) as model:`.

    `student` is the peft model being trained; within the block it must not be used as the student.
    """

    def __init__(self, config: Config, student: "torch.nn.Module", other: "torch.nn.Module | None" = None):
        self.other = other
        self._has_quantizers = config.policy.quant_cfg is not None
        directory = config.distill.teacher_adapter
        self._weights = _read_adapter(student, Path(directory)) if directory else None

    @contextlib.contextmanager
    def of(self, student: "torch.nn.Module") -> Iterator["torch.nn.Module"]:
        """Yield the teacher's causal language model. The student's quantizers, adapter and gradients are as before on
        exit."""
        if self.other is not None:
            yield self.other
            return
        with contextlib.ExitStack() as stack:
            if self._has_quantizers:
                from kit.policy.quantized_linear import quantizers_off

                stack.enter_context(quantizers_off(student))
            stack.enter_context(
                student.disable_adapter() if self._weights is None else wearing(student, self._weights)
            )
            yield student.get_base_model()


def _read_adapter(student: "torch.nn.Module", directory: Path) -> "dict[str, torch.Tensor]":
    """Return the teacher's weight for each of the student's adapter parameters, by the parameter's name.

    The teacher's scale is folded into B, so that the student's own scaling gives the teacher's s·B·A even if rank or
    alpha differ."""
    from safetensors.torch import load_file

    facts = read_object(directory / "adapter_config.json", ADAPTER_CONFIG)
    tensors, found = load_file(directory / "adapter_model.safetensors"), {}
    names = {id(module): name for name, module in student.named_modules()}
    for name, module in student.get_base_model().named_modules():
        if "default" not in getattr(module, "lora_A", {}):
            continue
        ratio = scale_of(facts, name) / module.scaling["default"]
        for factor, scale in (("lora_A", 1.0), ("lora_B", ratio)):
            parameter = getattr(module, factor)["default"].weight
            value = tensors.pop(f"{PREFIX}{name}.{factor}.weight", None)
            if value is None:
                raise BadInput(f"distill.teacher_adapter {directory} has no {factor} of {name}.")
            own = f"{names[id(module)]}.{factor}.default.weight"
            found[own] = (value.float() * scale).to(parameter.device, parameter.dtype)
    if tensors:
        raise BadInput(f"distill.teacher_adapter {directory} has weights that the student lacks: {min(tensors)}.")
    return found
