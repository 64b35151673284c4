"""A tiny random Qwen3 and a fake run directory around it, for the tests of merge."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from kit.core.run_directory import RunDir, publish, write_json, write_manifest
from kit.weights.frozen_base import carried_hashes, hash_base, load_nf4

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPE = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A token for each byte, the end of a text and the two of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_model(
    folder: Path,
    tied: bool = True,
    seed: int = 0,
    spread: float = 0.08,
    family: str = "Qwen3",
    tokenizer: Any = None,
    **shape,
) -> Path:
    """A random BF16 checkpoint (weights of standard deviation `spread`), two shards, byte-level tokenizer by default.

    Qwen3 has no biases; Qwen2 has them on q, k and v.
    """
    import transformers
    from transformers import GenerationConfig

    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.save_pretrained(folder)
    config = getattr(transformers, f"{family}Config")(
        **SHAPE | shape,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():  # the default 0.02 gives nearly flat logits, on which any two models agree
        for parameter in model.parameters():
            if parameter.ndim == 2 or (family == "Qwen2" and parameter.ndim == 1):  # its biases, which begin as zeros
                parameter.normal_(float(parameter.ndim == 1), spread)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, temperature=1.0, do_sample=True)
    size = sum(p.numel() * p.element_size() for p in model.to(torch.bfloat16).parameters())
    model.save_pretrained(folder, max_shard_size=int(size * 0.6))
    return folder


def save_adapter(run: RunDir, base_hash: str, version: int, model: torch.nn.Module, **manifest) -> Path:
    from kit.policy.quantized_linear import write_quantizer_state

    with publish(run.adapter_dir(version)) as partial:
        model.save_pretrained(partial, save_embedding_layers=False)
        manifest |= write_quantizer_state(model, partial)
        write_manifest(partial, "adapter", version=version, step=version, base_hash=base_hash, **manifest)
    return run.adapter_dir(version)


def make_run(
    folder: Path,
    model_dir: Path,
    dtype: str = "float32",
    update: float = 0.004,
    device: str = "cpu",
    quant_cfg: str | None = None,
    **lora,
) -> RunDir:
    """A run directory with base.json, one adapter of random LoRA weights and held-out problems, but no training.

    With `quant_cfg` as a run for that format leaves it: quantizers that were calibrated, and their state.
    """
    from peft import LoraConfig, get_peft_model

    folder.mkdir(parents=True)
    run = RunDir(folder)
    problems = folder / "problems.jsonl"
    rows = [{"question": f"What is {a} plus {b}?", "answer": str(a + b)} for a in range(2, 8) for b in (11, 25)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run": {"name": folder.name},
        "model": {"id": "tiny", "path": str(model_dir), "revision": None, "dtype": dtype},
        "data": {
            "path": str(problems),
            "eval_path": str(problems),
            "answer_format": "plain",
            "system_prompt": "Answer.",
        },
    }
    if quant_cfg is not None:
        config["policy"] = {"quant_cfg": quant_cfg}
    write_json(run.config_file, {"config": config})
    model = load_nf4(model_dir, dtype, device=device)
    info = hash_base(model)
    if found := carried_hashes(model_dir, None, set(info["tensors"]), model.config):
        info["carried"] = found
    write_json(run.base_file, info)
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": LINEARS, **lora}))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, update)
    if quant_cfg is not None:
        add_quantizers(wrapped, quant_cfg)
    save_adapter(run, info["hash"], 10, wrapped)
    run.completions.mkdir()
    row = {"problem_id": "0", "prompt": "<|im_start|>user\nWhat is 2 plus 11?<|im_end|>\n<|im_start|>assistant\n"}
    (run.completions / "step-000010.jsonl").write_text(json.dumps({**row, "completion": "It is 13.<|im_end|>"}) + "\n")
    return run


def add_quantizers(model: torch.nn.Module, name: str) -> None:
    """Quantizers of format `name` that were calibrated on some tokens."""
    from kit.core.format_names import read_quant_format
    from kit.policy.calibration import calibrate
    from kit.policy.quantized_linear import use_quantized_linears

    use_quantized_linears(model, read_quant_format(name))
    ids = torch.arange(1, 257, device=next(model.parameters()).device).view(4, 64)
    calibrate(model, [(ids, torch.ones_like(ids, dtype=torch.bool))])


def alter_adapter(run: RunDir, folder: Path, config: dict | None = None, rename=None, base_hash=None) -> Path:
    """A copy of the run's adapter with some entries of its config, or its tensors' names, or its base changed."""
    from safetensors.torch import load_file, save_file

    source = run.newest_adapter()
    settings = {**json.loads((source / "adapter_config.json").read_text()), **(config or {})}
    tensors = {(rename or str)(name): t for name, t in load_file(source / "adapter_model.safetensors").items()}
    with publish(folder) as partial:
        (partial / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, partial / "adapter_model.safetensors")
        known = json.loads(run.base_file.read_text())["hash"]
        write_manifest(partial, "adapter", version=11, step=11, base_hash=base_hash or known)
    return folder


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, or of a folder of safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@functools.cache
def shared_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="merge-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def shared_model(tied: bool = True) -> Path:
    """Read-only: the tiny checkpoint, made once a session."""
    folder = shared_folder() / f"model-{tied}"
    return folder if folder.exists() else make_model(folder, tied)


def shared_run(tied: bool = True, dtype: str = "float32") -> RunDir:
    """Read-only: a run on the tiny checkpoint, made once a session."""
    folder = shared_folder() / f"run-{tied}-{dtype}"
    return RunDir.open(folder) if folder.exists() else make_run(folder, shared_model(tied), dtype)
