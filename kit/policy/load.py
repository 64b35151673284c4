"""The policy: a frozen base (NF4, FP8 or unquantized), a trained LoRA adapter, and the reference, which is the same
model with the adapter off.

Covers loading, the adapter's shape, publishing versioned adapters, and verifying that the base is unchanged.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.chat import check_template, model_stop_tokens, question_messages, render
from kit.core.checkpoint_files import from_files
from kit.core.config import expert_rules
from kit.core.config.schema import Config, PolicyConfig
from kit.core.config.sharding_rules import announced
from kit.core.errors import BadInput, CheckFailed
from kit.core.file_kinds import ADAPTER_CONFIG
from kit.core.format_names import read_quant_format
from kit.core.formats import find_experts
from kit.core.lora import EXPERT_PARAMETERS, expert_parameter, expert_wrappers, scale_of
from kit.core.run_directory import (
    RunDir,
    file_hash,
    is_plain_adapter,
    publish,
    read_manifest,
    write_manifest,
    write_record,
)
from kit.core.run_files import read_object
from kit.policy import stop_texts
from kit.policy.adapter_files import (
    PREFIX,
    WEIGHTS,
    adapter_facts,
    factor_shapes,
    import_adapter,
    is_same_model,
    language_key,
    named_base,
)
from kit.policy.sharding import quant_storage
from kit.weights.attention import attention_of
from kit.weights.frozen_base import carried_hashes, hash_base, load_frozen, unquantized_config
from kit.weights.layout import ROUTERS, expert_matrices, expert_modules, unquantized_names
from kit.weights.model_files import buffer_names, check_complete, check_names, without_weights
from kit.weights.nf4 import BLOCK_SIZE
from kit.weights.wrapped import wrapper_of

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

# Recurrent models of transformers 5.17 whose state takes in padding.
READS_PADDING = ("rwkv", "xlstm")


def check_base(config: Config) -> "PreTrainedConfig":
    """Check the base model without reading any weight; return its transformers config.

    `BadInput` if the model is missing, already quantized or a mixture of experts that cannot be trained with this
    configuration; if transformers cannot build it with `model.attn_implementation`; if a name in
    `policy.target_modules` is not a linear layer of it (peft would silently adapt only the others); if no layer of it
    would get an adapter; if a server could not serve its adapter; or if its files lack some of its tensors or name
    them differently.
    """
    config.model.check_path()
    facts = unquantized_config(config.model.source, config.model.revision)
    check_experts(config, facts)
    if facts.model_type in READS_PADDING:
        raise BadInput(
            f"{config.model.source} ({facts.model_type}) reads padding as text: transformers' forward of it "
            "ignores the attention mask, so log-probs of shorter prompts would be wrong. Take another model."
        )
    if not adapted_layers(config, facts):
        raise BadInput(
            f"{config.model.source} ({facts.model_type}) has no linear layer that could get an adapter: its products "
            "are made by layers of another kind (GPT-2's Conv1D), which merge and the servers do not know. Take "
            "another model."
        )
    if wrapper_of(facts) and config.rollout.backend == "server" and config.rollout.sync == "adapter":
        raise BadInput(
            f"rollout.sync is adapter and {config.model.source} wraps its language model ({wrapper_of(facts)}): vLLM "
            "names the layers otherwise and would serve the base without the adapter. Set rollout.sync to remerge."
        )
    check_complete(config.model.source, facts)
    check_names(config.model.source, facts)
    return facts


def check_experts(config: Config, facts: "PreTrainedConfig") -> None:
    """`BadInput` for a mixture of experts whose experts no rule knows, and for settings that do not reach experts."""
    found = find_experts(facts.to_dict())
    try:
        matrices = expert_matrices(without_weights(facts))
    except BadInput as error:
        raise BadInput(f"{config.model.source}: {error} Take another model.") from None
    if found and not matrices:
        raise BadInput(
            f"{config.model.source} ({facts.model_type}) is a mixture of experts ({found}) whose experts' layers are "
            "not known here: they would neither be quantized nor get an adapter. Take another model."
        )
    if not matrices and config.rollout.routing != "own":
        raise BadInput(
            f"rollout.routing is {config.rollout.routing} and {config.model.source} ({facts.model_type}) has no "
            "experts. Set it to own."
        )
    if not matrices:
        return
    policy, why = config.policy, expert_rules.faults(config)
    if config.server.share_base:
        why.append("vLLM stores their experts in layouts of its own. Set server.share_base to false")
    if kind := announced():
        why.append(f"{kind} would split its experts, which was not tested. Use one process, or DDP")
    place = next((one for one in matrices.values() if one.rows * one.columns % BLOCK_SIZE), None)
    if policy.quantization == "nf4" and place is not None:
        why.append(
            f"its experts have matrices of {place.rows} x {place.columns}, which NF4's blocks of {BLOCK_SIZE} do not "
            "divide. Set policy.quantization to fp8 or none"
        )
    if routers := [name for name in routing_names(policy.target_modules) if name in ROUTERS]:
        why.append(
            f"policy.target_modules names {', '.join(routers)}: routers stay frozen, because sampler and trainer must "
            "send a token to the same experts. Remove it"
        )
    if why:
        raise BadInput(f"{config.model.source} ({facts.model_type}) is a mixture of experts: {'; '.join(why)}.")


def routing_names(targets: str | list[str]) -> list[str]:
    """Last parts of the names in `policy.target_modules`."""
    return [] if isinstance(targets, str) else [name.rpartition(".")[2] for name in targets]


def adapted_layers(config: Config, facts: "PreTrainedConfig") -> list[str]:
    """Names of the modules that get an adapter, as an adapter's file has them, for a model with the transformers
    config `facts`; reads no weights. Errors as in `check_base`."""
    import torch
    from transformers import AutoModelForCausalLM

    attention = attention_of(facts, config.model.attn_implementation)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(facts, attn_implementation=attention)
    except (ImportError, ValueError) as error:
        raise BadInput(f"{config.model.source} cannot be built: {str(error).splitlines()[0]}") from None
    return adapted_linears(config.policy.target_modules, model) + adapted_experts(config.policy, model)


def adapted_linears(targets: str | list[str], model: "torch.nn.Module") -> list[str]:
    """Names of a model's linear layers that `policy.target_modules` names; `BadInput` if it names any other."""
    import torch

    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    if isinstance(targets, str):  # all-linear: as in peft, all but the output layer
        others = set(unquantized_names(model))
        return [name for name in linears if name not in others]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linears):
            known = sorted({name.rpartition(".")[2] for name in linears})
            raise BadInput(f"policy.target_modules names {target!r}; linear layers here are {', '.join(known)}.")
    return [name for name in linears if any(name == target or name.endswith(f".{target}") for target in targets)]


def adapted_experts(policy: PolicyConfig, model: "torch.nn.Module") -> list[str]:
    """Names of the wrappers that hold the adapter of a model's routed experts, inner ones first."""
    if policy.expert_rank == 0:
        return []
    return [wrapper for name in expert_modules(model) for wrapper in expert_wrappers(name)]


def load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """Load the base model's tokenizer, set up so that rewards get completions as they were generated.

    `BadInput` if it has no chat template or one that fails on the run's prompts, or if no stop token can end a
    completion: eval would refuse these after the run.
    """
    from transformers import AutoTokenizer

    source = config.model.source

    def read() -> "PreTrainedTokenizerBase":
        found = AutoTokenizer.from_pretrained(
            source, revision=config.model.revision, padding_side="left", trust_remote_code=False
        )
        found("2 + 40?")  # some wrong values are read only here
        return found

    tokenizer = from_files("tokenizer", source, read)
    if tokenizer.chat_template is None:
        raise BadInput(
            f"{source} has no chat template, so prompts cannot be rendered. Use an instruction-tuned model."
        )
    if tokenizer.eos_token_id is None:
        raise BadInput(f"{source} has no stop token (eos_token), so completions would never end.")
    probe = question_messages("2 + 40?", config.data.system_prompt, config.data.prompt_suffix)
    check_template(tokenizer, probe, config.data.chat_template_kwargs)
    model_stop_tokens(source, tokenizer, config.data.chat_template_kwargs, config.model.revision)
    stop_texts.check(tokenizer, config.rollout.stop, render(tokenizer, probe, config.data.chat_template_kwargs))
    for name in () if config.environment.is_given else ("response_template", "response_schema"):
        # With either, TRL (1.16) parses completions and strips the thinking from what rewards get; eval reads it all.
        if getattr(tokenizer, name, None) is not None:
            setattr(tokenizer, name, None)
    return tokenizer


def load_policy_base(config: Config, shared: dict[str, Any] | None = None) -> "torch.nn.Module":
    """Load the frozen base without an adapter, on this process's device except what `policy.embeddings` keeps on the
    host; with `shared`, map it from a server's memory (kit/weights/shared_memory.py). `CheckFailed` for a GPU that
    multiplies wrong."""
    from accelerate import PartialState

    from kit.policy.host_embedding import keep_embedding_on_host
    from kit.weights.products import check_products

    check_products(PartialState().device)
    if shared is not None:
        model = map_stored(config, shared)
    else:
        model = load_stored(config, config.model.source, config.model.revision, quant_storage=quant_storage())
    if config.policy.embeddings == "host":
        keep_embedding_on_host(model)
    model.generation_config = bare_generation_config(model.generation_config)
    return model


def load_stored(config: Config, source: str, revision: str | None, **storage: "torch.dtype") -> "torch.nn.Module":
    """Load a frozen model, stored as the configuration says of the base, on this process's device."""
    from accelerate import PartialState

    return load_frozen(
        source,
        config.policy.quantization,
        dtype=config.model.dtype,
        double_quantization=config.policy.double_quantization,
        device=PartialState().device,
        revision=revision,
        attn_implementation=config.model.attn_implementation,
        **storage,
    )


def map_stored(config: Config, shared: dict[str, Any]) -> "torch.nn.Module":
    """The FP8 base as views of a server's memory on this process's device."""
    from accelerate import PartialState

    from kit.weights.shared_base import load_shared
    from kit.weights.shared_memory import attach

    device, model = PartialState().device, config.model
    place = {"revision": model.revision, "device": device, "attn_implementation": model.attn_implementation}
    return load_shared(model.source, attach(shared, device), model.dtype, **place)


def bare_generation_config(own: "GenerationConfig") -> "GenerationConfig":
    """Reduce a model's `GenerationConfig` to its special tokens.

    `generate` fills options that the caller leaves unset from the model's own file: min_p, num_beams,
    no_repeat_ngram_size and others would change what is sampled, and no log-prob would show it.
    """
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(own, name) for name in names})


def lora_config(policy: PolicyConfig, base: "torch.nn.Module | None" = None) -> "LoraConfig":
    """Build peft's `LoraConfig`, for a dense model or for `base`. Bias, DoRA and extra saved modules stay off: no
    rollout server supports them."""
    from peft import LoraConfig

    experts: dict[str, Any] = {}
    targets = policy.target_modules
    if base is not None and expert_modules(base):
        # peft 0.21 reads all-linear as it was for transformers 4, where routers and experts were linear layers.
        targets = sorted({name.rpartition(".")[2] for name in adapted_linears(targets, base)})
        if policy.expert_rank != 0:
            names = [f"experts.{name}" for name in EXPERT_PARAMETERS]
            experts["target_parameters"] = names
            if policy.expert_rank is not None:
                experts["rank_pattern"] = dict.fromkeys(names, policy.expert_rank)
    return LoraConfig(
        r=policy.lora_rank,
        lora_alpha=policy.lora_alpha,
        lora_dropout=policy.lora_dropout,
        use_rslora=policy.use_rslora,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
        **experts,
    )


def set_adapter_dtype(model: "torch.nn.Module", dtype: str) -> None:
    """Store the trained adapter weights as `dtype`.

    TRL 1.16 casts the adapter of a 4-bit model to bfloat16. In bfloat16 most updates of a small learning rate round to
    nothing (at 1e-6 six entries in a thousand move in 30 steps), so the default here is float32.
    """
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != getattr(torch, dtype):
            parameter.data = parameter.data.to(getattr(torch, dtype))


def check_init_adapter(config: Config, base_hash: str | None = None) -> None:
    """`BadInput` unless `policy.init_adapter` is a whole adapter of this rank and scale (and of this base, if known),
    trained for no format other than `policy.quant_cfg`. A plain peft adapter has no base hash to compare."""
    directory = config.policy.init_adapter
    if directory is None:
        return
    facts, policy = adapter_facts(Path(directory)), config.policy
    keys = {"lora_rank": "rank", "lora_alpha": "alpha", "use_rslora": "rslora"}
    if wrong := [key for key, name in keys.items() if facts.get(name) != getattr(policy, key)]:
        has = [f"policy.{key} is {getattr(policy, key)}, {directory} has {facts.get(keys[key])}." for key in wrong]
        raise BadInput(f"{' '.join(has)} An adapter to start from keeps its shape: set the same.")
    if (trained := facts.get("quant_cfg")) is not None:
        wanted = policy.quant_cfg and read_quant_format(policy.quant_cfg).name
        if trained != wanted:
            raise BadInput(
                f"{directory} was trained for {trained}, policy.quant_cfg says {wanted or 'nothing'}. Set "
                f"policy.quant_cfg to {trained}, or start from an adapter of plain GRPO."
            )
    if base_hash is not None and facts["base_hash"] is not None:
        check_same_base(str(directory), facts["base_hash"], base_hash)


def check_init_layers(config: Config, model_config: "PreTrainedConfig") -> None:
    """`BadInput` unless `policy.init_adapter` adapts exactly the layers that the run trains, with their shapes and
    scales; reads headers only. The run's adapter is built without weights to compare with."""
    directory = config.policy.init_adapter
    if directory is None:
        return
    facts, found = read_object(Path(directory) / "adapter_config.json", ADAPTER_CONFIG), factor_shapes(Path(directory))
    if wrapper_of(model_config):
        found = {language_key(name): shape for name, shape in found.items()}
    expected, scales = _adapter_outline(config, model_config)
    if other := sorted(found.keys() ^ expected.keys()):
        theirs, ours = (sorted({_module(name) for name in names}) for names in (found, expected))
        lasts = ", ".join(sorted({name.rpartition(".")[2] for name in theirs}))
        raise BadInput(
            f"policy.init_adapter {directory} adapts {len(theirs)} layers ({lasts}), policy.target_modules "
            f"{len(ours)} of {config.model.source}; only {'the adapter' if other[0] in found else 'the run'} has "
            f"{other[0]}. Set policy.target_modules (and policy.expert_rank) to what it was trained with, or model.id "
            "or model.path to its base."
        )
    if odd := next((name for name in sorted(found) if found[name] != expected[name]), None):
        raise BadInput(
            f"policy.init_adapter {directory} has {odd} as {found[odd]}, {config.model.source} needs {expected[odd]}: "
            "it was trained on another model, or has a rank_pattern. Set model.id or model.path to its base; an "
            "adapter of several ranks can be merged (python -m merge) but not trained further."
        )
    for module, scale in scales.items():
        other_scale = scale_of(facts, expert_parameter(facts, module) or module)
        if not math.isclose(other_scale, scale):
            raise BadInput(
                f"policy.init_adapter {directory} scales {module} by {other_scale:g}, the run by {scale:g}: it has an "
                "alpha_pattern, and a run has one alpha. It can be merged (python -m merge) but not trained further."
            )


def _adapter_outline(
    config: Config, model_config: "PreTrainedConfig"
) -> tuple[dict[str, tuple[int, ...]], dict[str, float]]:
    """({name in an adapter's file: shape}, {module: scale}) of the adapter that a run trains."""
    import torch
    from peft import get_peft_model, get_peft_model_state_dict

    from kit.policy.adapted_experts import targets_as_named

    base = without_weights(model_config)
    with torch.device("meta"), targets_as_named():
        model = get_peft_model(base, lora_config(config.policy, base))
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    scales = {
        name.removeprefix(PREFIX): module.scaling["default"]
        for name, module in model.named_modules()
        if "default" in getattr(module, "lora_A", {})
    }
    return {name: tuple(one.shape) for name, one in tensors.items()}, scales


def _module(name: str) -> str:
    """Name of the layer that a tensor of an adapter's file belongs to."""
    return name.removeprefix(PREFIX).partition(".lora_")[0]


def describe_start(config: Config) -> str:
    """A line on the base of a plain adapter to start from, which no hash proves; empty for an adapter of a run."""
    directory = config.policy.init_adapter
    if directory is None or not is_plain_adapter(Path(directory)):
        return ""
    theirs, what = named_base(Path(directory)), f"{directory} was not trained by this kit"
    if theirs is None:
        return f"WARNING: {what} and names no base. That it belongs to {config.model.source} is taken from you."
    if not is_same_model(theirs, config.model.source):
        return f"WARNING: {what} and names {theirs} as its base, this run trains on {config.model.source}."
    return f"start     {what}; it names this base ({theirs}), which no hash proves"


def record_start(config: Config, run: RunDir, base_hash: str, model_config: "PreTrainedConfig") -> None:
    """Publish a plain `policy.init_adapter` as the run's version 0, with a manifest; `BadInput` if the run to resume
    started from other weights. `model_config` is the transformers config of the base."""
    directory = config.policy.init_adapter
    if directory is None or not is_plain_adapter(Path(directory)):
        return
    if not (own := run.adapter_dir(0)).exists():
        import_adapter(Path(directory), own, 0, base_hash, is_wrapped=bool(wrapper_of(model_config)))
    elif file_hash(Path(directory) / WEIGHTS) != read_manifest(own, "adapter")["imported_from"]["blake2b"]:
        raise BadInput(
            f"{run.path} was started from other weights than {directory} holds now. Set policy.init_adapter to {own}, "
            "the copy of what it was started from, or start another run."
        )


def check_same_base(adapter: str, theirs: str, base_hash: str, source: str = "this base") -> None:
    """`BadInput` if an adapter was trained on another base (hash `theirs`) than that of `source` (`base_hash`)."""
    if theirs != base_hash:
        raise BadInput(
            f"{adapter} was trained on another base (base hash {theirs[:12]}, {source} has {base_hash[:12]}). "
            "Set model.id or model.path, model.dtype and policy.quantization to those of its run."
        )


def load_adapter_weights(model: "torch.nn.Module", directory: str | Path) -> None:
    """Load a published adapter's weights into the model's adapter; `BadInput` if any name or shape differs."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors = load_file(Path(directory) / "adapter_model.safetensors")
    if wrapper_of(model.get_base_model().config):
        tensors = {language_key(name): tensor for name, tensor in tensors.items()}
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
    **facts: Any,
) -> Path:
    """Write the adapter and its manifest, with `facts` in it, to `directory`, all or nothing; return the directory.

    `gathered` are its tensors if the model holds only parts of them (`sharding.gather_adapter`). The state of
    quantized layers is written with it.
    """
    from peft import get_peft_model_state_dict

    from kit.policy.quantized_linear import write_quantizer_state
    from kit.weights.frozen_base import hash_pairs, hash_tensor

    adapter = model.peft_config["default"]
    tensors = get_peft_model_state_dict(model, state_dict=gathered, save_embedding_layers=False)
    with publish(directory, overwrite=True) as partial:
        model.save_pretrained(partial, selected_adapters=["default"], state_dict=gathered, save_embedding_layers=False)
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
            **facts,
        )
    return directory


def record_base(model: "torch.nn.Module", run: RunDir, config: Config, write: bool = True) -> dict:
    """Hash the frozen base, write it as `base.json` and return its content.

    `BadInput`, and nothing is written, if a resumed run was started on another base or `policy.init_adapter` was
    trained on another.
    """
    facts = hash_base(model)
    # For a local path, one that merge and eval find from anywhere; for a hub id, the commit that was loaded.
    source = str(Path(config.model.path).resolve()) if config.model.path else config.model.id
    facts |= {"model": source, "revision": config.model.revision or facts["revision"]}
    described = getattr(model, "config", None)
    if described is not None and (wrapper_of(described) or buffer_names(without_weights(described))):
        facts["carried"] = carried_hashes(source, facts["revision"], set(facts["tensors"]), described)
    check_init_adapter(config, facts["hash"])
    if config.policy.reference == "init_adapter":
        facts["reference"] = file_hash(Path(config.policy.init_adapter) / WEIGHTS)
    if run.base_file.exists():
        earlier = run.base()
        if earlier["hash"] != facts["hash"]:
            raise BadInput(
                f"{run.path} was started on another base: its base hash is {earlier['hash'][:12]}, this one is "
                f"{facts['hash'][:12]}. Resume with the model it was started with."
            )
        if earlier.get("reference") != facts.get("reference"):
            raise BadInput(
                f"{config.policy.init_adapter} is not the adapter that {run.path} started from, and it is the run's "
                "reference (policy.reference init_adapter). Restore it, or start another run."
            )
        if odd := sorted(set(earlier.get("carried", {}).items()) ^ set(facts.get("carried", {}).items())):
            raise BadInput(
                f"{run.path} was started on a checkpoint with another {odd[0][0]}. Resume with the one it was started "
                "with."
            )
    if write:
        write_record(run.base_file, facts)
    return facts


def check_base_unchanged(model: "torch.nn.Module", facts: dict) -> None:
    """`CheckFailed`, naming the tensors, if any byte of the frozen base differs from `facts` (base.json)."""
    now = hash_base(model)
    if now["hash"] == facts["hash"]:
        return
    changed = [name for name, value in now["tensors"].items() if facts["tensors"].get(name) != value]
    raise CheckFailed(
        f"the frozen base changed during training: {len(changed)} of {len(now['tensors'])} tensors, first "
        f"{changed[:3]}. The adapters of this run do not belong to any known base; do not merge them."
    )
