"""The policy: a base that never changes (NF4, FP8 or unquantized), a LoRA adapter that does, and the reference, which
is the same model with the adapter off.

Covers loading, the adapter's shape, publishing versioned adapters, and the proof that the base stayed as it was.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.chat import check_template, model_stop_tokens, question_messages
from kit.core.config.schema import Config, PolicyConfig
from kit.core.errors import BadInput, CheckFailed
from kit.core.format_names import read_quant_format
from kit.core.formats import find_experts
from kit.core.run_directory import (
    RunDir,
    check_adapter_file,
    publish,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from kit.policy.sharding import quant_storage
from kit.weights.frozen_base import hash_base, load_frozen, unquantized_config
from kit.weights.model_files import check_complete, check_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def check_base(config: Config) -> Any:
    """The base model's transformers config, read without any weight.

    `BadInput` when it is not there or quantized already, a mixture of experts, when transformers cannot build it with
    `model.attn_implementation`, when a name in `policy.target_modules` is no linear layer of it (peft would adapt
    the others and say nothing), when no layer of it would get an adapter, or when its files lack some of it or
    name it otherwise.
    """
    config.model.check_path()
    facts = unquantized_config(config.model.source, config.model.revision)
    if experts := find_experts(facts.to_dict()):
        raise BadInput(
            f"{config.model.source} ({facts.model_type}) is a mixture of experts ({experts}): its experts' weights "
            "would neither be quantized nor get an adapter, and merge does not know them. Take a dense model."
        )
    if not adapted_layers(config, facts):
        raise BadInput(
            f"{config.model.source} ({facts.model_type}) has no linear layer that could get an adapter: its products "
            "are made by layers of another kind (GPT-2's Conv1D), which merge and the servers do not know. Take "
            "another model."
        )
    check_complete(config.model.source, facts)
    check_names(config.model.source, facts)
    return facts


def adapted_layers(config: Config, facts: Any) -> list[str]:
    """Names of the linear layers that get an adapter, of a model with the transformers config `facts`; no weight is
    read. Errors as `check_base`."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(facts, attn_implementation=config.model.attn_implementation)
    except (ImportError, ValueError) as error:
        raise BadInput(f"{config.model.source} cannot be built: {str(error).splitlines()[0]}") from None
    head = model.get_output_embeddings()
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    targets = config.policy.target_modules
    if isinstance(targets, str):  # all-linear: as peft, all but the output layer
        return [name for name in linears if model.get_submodule(name) is not head]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise BadInput(f"policy.target_modules names {target!r}; linear layers here are {', '.join(known)}.")
    return [name for name in linears if any(name == target or name.endswith(f".{target}") for target in targets)]


def load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """The base model's tokenizer, with which rewards get completions as they were generated.

    `BadInput` when it has no chat template or one that fails on the run's prompts, and when no stop token can end a
    completion: what eval would refuse once the run is over.
    """
    from transformers import AutoTokenizer

    source = config.model.source
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=config.model.revision, padding_side="left")
    except (OSError, ValueError) as error:
        raise BadInput(f"no tokenizer at {source}: {str(error).splitlines()[0]}") from None
    if tokenizer.chat_template is None:
        raise BadInput(
            f"{source} has no chat template, so prompts cannot be rendered. Use an instruction-tuned model."
        )
    if tokenizer.eos_token_id is None:
        raise BadInput(f"{source} has no stop token (eos_token), so completions would never end.")
    probe = question_messages("2 + 40?", config.data.system_prompt, config.data.prompt_suffix)
    check_template(tokenizer, probe, config.data.chat_template_kwargs)
    model_stop_tokens(source, tokenizer, config.data.chat_template_kwargs, config.model.revision)
    for name in ("response_template", "response_schema"):
        # With either, TRL (1.16) parses completions and rewards get them without what was thought; eval reads it all.
        if getattr(tokenizer, name, None) is not None:
            setattr(tokenizer, name, None)
    return tokenizer


def load_policy_base(config: Config) -> "torch.nn.Module":
    """The frozen base, on this process's device but for what `policy.embeddings` says, without an adapter."""
    from accelerate import PartialState

    from kit.policy.host_embedding import keep_embedding_on_host

    model = load_frozen(
        config.model.source,
        config.policy.quantization,
        dtype=config.model.dtype,
        double_quantization=config.policy.double_quantization,
        device=PartialState().device,
        revision=config.model.revision,
        attn_implementation=config.model.attn_implementation,
        quant_storage=quant_storage(),
    )
    if config.policy.embeddings == "host":
        keep_embedding_on_host(model)
    model.generation_config = bare_generation_config(model.generation_config)
    return model


def bare_generation_config(own: Any) -> Any:
    """A model's `GenerationConfig` reduced to its special tokens.

    `generate` fills whatever the caller leaves open from the model's own file: min_p, num_beams, no_repeat_ngram_size
    and others would change what is sampled, and no log-prob would say so.
    """
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(own, name) for name in names})


def lora_config(policy: PolicyConfig) -> Any:
    """peft's `LoraConfig`; bias, DoRA and extra saved modules stay off because no rollout server can hold them."""
    from peft import LoraConfig

    return LoraConfig(
        r=policy.lora_rank,
        lora_alpha=policy.lora_alpha,
        lora_dropout=policy.lora_dropout,
        use_rslora=policy.use_rslora,
        target_modules=policy.target_modules,
        bias="none",
        task_type="CAUSAL_LM",
    )


def set_adapter_dtype(model: "torch.nn.Module", dtype: str) -> None:
    """Store the trained adapter weights as `dtype`.

    TRL 1.16 casts the adapter of a 4-bit model to bfloat16. There most updates of a small learning rate round to
    nothing (at 1e-6 six entries in a thousand move in 30 steps), so float32 is the default here.
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != getattr(torch, dtype):
            parameter.data = parameter.data.to(getattr(torch, dtype))


def check_init_adapter(config: Config, base_hash: str | None = None) -> None:
    """`BadInput` unless `policy.init_adapter` is a whole adapter of this shape (and of this base, when known), trained
    for no format but `policy.quant_cfg`."""
    directory = config.policy.init_adapter
    if directory is None:
        return
    manifest = read_manifest(Path(directory), "adapter", deep=True)
    check_adapter_file(Path(directory), manifest)
    policy = config.policy
    keys = {"lora_rank": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
    if wrong := [key for key, name in keys.items() if manifest.get(name) != getattr(policy, key)]:
        has = [f"policy.{key} is {getattr(policy, key)}, {directory} has {manifest.get(keys[key])}." for key in wrong]
        raise BadInput(f"{' '.join(has)} An adapter to start from keeps its shape: set the same.")
    if (trained := manifest.get("quant_cfg")) is not None:
        wanted = policy.quant_cfg and read_quant_format(policy.quant_cfg).name
        if trained != wanted:
            raise BadInput(
                f"{directory} was trained for {trained}, policy.quant_cfg says {wanted or 'nothing'}. Set "
                f"policy.quant_cfg to {trained}, or start from an adapter of plain GRPO."
            )
    if base_hash is not None and manifest["base_hash"] != base_hash:
        raise BadInput(
            f"{directory} was trained on another base (base hash {manifest['base_hash'][:12]}, this base has "
            f"{base_hash[:12]}). Set model.id or model.path, model.dtype and policy.quantization to those of its run."
        )


def load_adapter_weights(model: "torch.nn.Module", directory: str | Path) -> None:
    """Put a published adapter's weights into the model's adapter; `BadInput` when any name or shape differs."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    result = set_peft_model_state_dict(model, tensors)
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        raise BadInput(
            f"{directory} does not fit the adapter: {len(missing)} tensors missing, {len(result.unexpected_keys)} "
            f"unexpected (first: {(missing + list(result.unexpected_keys))[0]}). Use the same policy.target_modules."
        )


def publish_adapter(
    model: "torch.nn.Module",
    directory: Path,
    version: int,
    base_hash: str,
    gathered: "dict[str, torch.Tensor] | None" = None,
) -> Path:
    """Write the adapter to `directory` whole or not at all, with its manifest; returns the directory.

    `gathered` are its tensors where the model holds parts of them (`sharding.gather_adapter`). The state of quantized
    layers goes with it.
    """
    from peft import get_peft_model_state_dict

    from kit.policy.quantized_linear import write_quantizer_state
    from kit.weights.frozen_base import hash_pairs, hash_tensor

    adapter = model.peft_config["default"]
    tensors = get_peft_model_state_dict(model, state_dict=gathered)
    with publish(directory, overwrite=True) as partial:
        model.save_pretrained(partial, selected_adapters=["default"], state_dict=gathered)
        (partial / "README.md").unlink(missing_ok=True)
        quantizers = write_quantizer_state(model, partial)
        write_manifest(
            partial,
            "adapter",
            version=version,
            step=version,
            base_hash=base_hash,
            rank=adapter.r,
            alpha=adapter.lora_alpha,
            rslora=adapter.use_rslora,
            targets=sorted(adapter.target_modules),
            tensor_hash=hash_pairs({name: hash_tensor(tensor) for name, tensor in tensors.items()}),
            **quantizers,
        )
    return directory


def record_base(model: "torch.nn.Module", run: RunDir, config: Config, write: bool = True) -> dict:
    """The content of the frozen base, written as `base.json`.

    `BadInput`, and nothing is written, when a resumed run was started on another base or `policy.init_adapter` was
    trained on another.
    """
    facts = hash_base(model)
    # A local path as merge and eval can find it from anywhere; of a hub id, the commit that was loaded.
    source = str(Path(config.model.path).resolve()) if config.model.path else config.model.id
    facts |= {"model": source, "revision": config.model.revision or facts["revision"]}
    check_init_adapter(config, facts["hash"])
    if run.base_file.exists():
        earlier = read_json(run.base_file)
        if earlier["hash"] != facts["hash"]:
            raise BadInput(
                f"{run.path} was started on another base: its base hash is {earlier['hash'][:12]}, this one is "
                f"{facts['hash'][:12]}. Resume with the model it was started with."
            )
    if write:
        write_json(run.base_file, facts)
    return facts


def check_base_unchanged(model: "torch.nn.Module", facts: dict) -> None:
    """`CheckFailed`, naming the tensors, when any byte of the frozen base differs from `facts` (base.json)."""
    now = hash_base(model)
    if now["hash"] == facts["hash"]:
        return
    changed = [name for name, value in now["tensors"].items() if facts["tensors"].get(name) != value]
    raise CheckFailed(
        f"the frozen base changed during training: {len(changed)} of {len(now['tensors'])} tensors, first "
        f"{changed[:3]}. The adapters of this run do not belong to any known base; do not merge them."
    )
