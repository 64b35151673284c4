"""Tiny random checkpoints of dense decoder families, and what the whole path shows for one of them."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kit.core.config.recipe import PLAIN, QUANTIZED
from kit.core.formats import FORMATS
from kit.core.run_directory import RunDir
from kit.weights.frozen_base import dequantize, load_frozen
from merge.calibrated import calibration_set, input_peaks
from merge.verify import compute_in, load_for_scoring, load_policy, read_tokenizer
from tests.conftest import CONFIG, SMALL
from tests.unit.merge_fixture import byte_tokenizer

# Every format's blocks divide 256, and there is more than one block of 128 x 128 across.
SHAPE = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512}
HEADS = {key: SHAPE[key] for key in SHAPE if key not in ("num_key_value_heads", "head_dim")}
GPT = {"vocab_size": 320, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 256}
LATENT = {**SHAPE, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_rope_head_dim": 128}
LATENT |= {"head_dim": 128, "qk_nope_head_dim": 64, "v_head_dim": 64}
SPREAD = 0.08  # standard deviation of the weights: at the usual 0.02 logits are nearly flat
RATE = 0.3  # of every dropout that the family's configuration knows
SCALED = ("biogpt", "gemma", "gemma2", "gemma3_text", "vaultgemma", "xglm")  # multiply embeddings by sqrt(hidden)
NO_DROPOUT = ("diffllama",)  # refuses any
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2"), SHAPE),
    **dict.fromkeys(("gemma3_text", "glm", "glm4", "granite", "helium", "hunyuan_v1_dense", "hyperclovax"), SHAPE),
    **dict.fromkeys(("jais2", "lfm2", "llama", "ministral", "ministral3", "mistral", "nanochat", "nemotron"), SHAPE),
    **dict.fromkeys(("olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3"), SHAPE),
    **dict.fromkeys(("stablelm", "starcoder2", "vaultgemma", "diffllama", "bitnet", "granite_swa"), SHAPE),
    **dict.fromkeys(("gpt_neox", "persimmon", "biogpt"), HEADS),
    **{family: {**GPT, "rotary_dim": 32} for family in ("gptj", "codegen")},
    "gpt_bigcode": GPT,
    "bloom": {"vocab_size": 320, "hidden_size": 256, "n_layer": 2, "n_head": 4},
    "falcon": {**HEADS, "ffn_hidden_size": 256},
    "mpt": {"vocab_size": 320, "d_model": 256, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    "opt": {**HEADS, "ffn_dim": 256, "word_embed_proj_dim": 256},
    "gpt_neo": {**HEADS, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "xglm": {"vocab_size": 320, "d_model": 256, "num_layers": 2, "attention_heads": 4, "ffn_dim": 256},
    **dict.fromkeys(("minicpm3", "youtu"), LATENT),
}


# Model types that AutoModelForCausalLM knows and the table leaves out, by what they are.
OTHERS = {
    "encoders, encoder-decoders and their halves": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus"),
        *("plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "wrappers of a language model": (
        *("emu3", "fuyu", "gemma3n", "gemma3n_text", "gemma4_assistant", "gemma4_text", "gemma4_unified", "git"),
        *("gemma4_unified_assistant", "gemma4_unified_text", "got_ocr2", "mllama", "moshi", "musicgen"),
        *("musicgen_melody", "phi4_multimodal", "qwen3_5_text"),
    ),
    "recurrent": (
        *("bamba", "falcon_h1", "falcon_mamba", "mamba", "mamba2", "olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm"),
        *("zamba", "zamba2"),
    ),
    "Conv1D": ("gpt2", "gpt-sw3", "openai-gpt"),
    "not tried": (
        *("blt", "cohere_compass_text", "cpmant", "ctrl", "gpt_neox_japanese", "hrm_text", "modernbert-decoder"),
    ),
}


def family_config(family: str, **changes: Any) -> Any:
    """A tiny configuration of a family, every dropout rate that it knows at `RATE`."""
    from transformers import AutoConfig

    tokenizer = byte_tokenizer()
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("eos", "pad")}
    tokens["bos_token_id"] = tokens["eos_token_id"]
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **tokens, **changes})
    for name, value in list(vars(config).items()):
        if "drop" in name and type(value) in (int, float) and family not in NO_DROPOUT:
            vars(config)[name] = RATE
    return config


def make_family(folder: Path, family: str) -> Path:
    """A random BF16 checkpoint of a family with a tokenizer and problems."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    tokenizer, config = byte_tokenizer(), family_config(family)
    tokenizer.bos_token = tokenizer.eos_token  # as in the configuration: not every family takes none
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, SPREAD)
        if family in SCALED:
            model.get_input_embeddings().weight.normal_(0.0, 0.02)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a in range(8) for b in (1, 25)]
    for split in ("train", "heldout"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward with a spread on any text."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


@dataclass
class Shown:
    """What the path showed for a family; `row` is its line of the table."""

    family: str
    attention: str = ""
    stored: list[str] = field(default_factory=list)  # of policy.quantization: trained, and merged as the policy
    formats: list[str] = field(default_factory=list)  # reloaded, with equal greedy tokens
    levers: list[str] = field(default_factory=list)  # the adapter is that of the run without
    refused: dict[str, str] = field(default_factory=dict)  # {format or lever: the message}

    def row(self) -> str:
        """The family's line of the table in recipes/README.md."""
        missing = [name for name in WRITTEN if name not in self.formats]
        formats = "all" if not missing else f"all but {', '.join(missing)}"
        stored = ", ".join(self.stored)
        return f"| `{self.family}` | {self.attention} | {stored} | {formats} | {', '.join(self.levers)} |"


WRITTEN = [name for name, fmt in FORMATS.items() if not fmt.needs_llmcompressor]
RATE_OF_LEARNING = 2e-2  # two steps take the policy far from the base
# Mean KL in nats a token of two models with the same weights, but for a code that rounds the other way: on one CPU a
# single family has 7.9e-5 in nvfp4, all others are below 1e-5.
NOISE = 1e-4
SAMPLES = 8  # of calibration
# {lever: (keys, largest relative difference of the adapter after two steps)}.
LEVERS = {
    "fused": ({"policy.compute": "fused"}, 1e-2),
    "selective": ({"train.recompute": "selective"}, 0.0),
    "host": ({"policy.embeddings": "host"}, 0.0),
    "packs": ({"train.micro_batch_tokens": 256}, 1e-2),
}


def train(recipe: Callable[..., Any], model: Path, run: Path, file: str = PLAIN, **keys: Any) -> Any:
    """Two steps of GRPO by the recipe's command line, in this process."""
    given = {
        **SMALL,
        "train.max_steps": 2,
        "train.learning_rate": RATE_OF_LEARNING,
        "reward.options": "{}",
        **{"run.output_dir": run, "model.path": model},
    }
    given |= {"reward.functions": f"[{__name__}:spread]", "data.path": model, **keys}
    return recipe(["--config", str(CONFIG), *(f"--{key}={value}" for key, value in given.items())], file)


def adapter_of(run: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    tensors = load_file(RunDir(run).newest_adapter() / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def show(family: str, folder: Path, recipe: Callable[..., Any], merge: Callable[..., Any]) -> Shown:
    """Train a tiny model of `family` on every kind of base, with every lever and for a format; merge it into every
    format and reload each.

    `recipe(arguments)` and `merge("merge", …)` run the command lines. `AssertionError` where one computes something
    else or fails otherwise than by a refusal (exit code 2).
    """
    shown, model, run = Shown(family), make_family(folder / "model", family), folder / "nf4"

    def works(name: str, done: Any) -> bool:
        assert done.code in (0, 2), f"{family} {name}: {done.err}"
        if done.code:
            shown.refused[name] = done.err.strip()
        return not done.code

    for stored in ("nf4", "fp8", "none"):
        if works(stored, train(recipe, model, folder / stored, **{"policy.quantization": stored})):
            check_steps(folder / stored)
            shown.stored.append(stored)
    shown.attention = json.loads((run / "config.json").read_text())["config"]["model"]["attn_implementation"]
    policy = load_policy(run, RunDir(run).newest_adapter())
    with policy.disable_adapter():
        base = log_probs(policy)
    update = mean_kl(log_probs(policy), base)
    options = ("--skip_verify", "--force", "--overwrite", "--calib_samples", SAMPLES)
    at_once = merge("merge", "--run", run, "--format", *WRITTEN, "--policy", "grpo", *options).code == 0
    for name in WRITTEN:
        if at_once or works(name, merge("merge", "--run", run, "--format", name, "--policy", "grpo", *options)):
            wanted, found = expected(policy, model, run, name), load_for_scoring(merged_to(run, name))
            off = mean_kl(log_probs(wanted), log_probs(found))
            assert off <= min(NOISE, update / 10), f"{family} {name}: mean KL {off:.1e}, the update's is {update:.1e}"
            assert greedy_tokens(found) == greedy_tokens(wanted), f"{family} {name}"
            shown.formats.append(name)
    plain = adapter_of(run)
    for lever, (keys, bound) in LEVERS.items():
        if works(lever, train(recipe, model, folder / lever, **keys)):
            off = ((adapter_of(folder / lever) - plain).norm() / plain.norm()).item()
            assert off <= bound, f"{family} {lever}: the adapter is off by {off:.1e}"
            shown.levers.append(lever)
    if works("quant_cfg", train(recipe, model, folder / "qat", QUANTIZED, **{"policy.quant_cfg": "nvfp4a16"})):
        check_steps(folder / "qat")
        shown.levers.append("quant_cfg")
    return shown


def check_steps(run: Path) -> None:
    """A policy that has not moved is its reference, with every dropout of its configuration; both steps learn."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["kl"] == 0 for row in rows] == [True, False], run
    assert all(row["grad_norm"] > 0 for row in rows), run


def merged_to(run: Path, name: str) -> Path:
    return run / "merged" / "grpo" / name


def greedy_tokens(model: torch.nn.Module) -> list[list[int]]:
    """Sixteen most likely tokens after each of two prompts of different lengths, by the model's cache."""
    prompts = torch.arange(40, 72).view(2, 16)
    mask = torch.ones_like(prompts)
    mask[1, :5] = 0
    length = {"max_new_tokens": 16, "min_new_tokens": 16}
    return model.generate(input_ids=prompts, attention_mask=mask, do_sample=False, **length)[:, 16:].tolist()


@torch.no_grad()
def log_probs(model: torch.nn.Module) -> torch.Tensor:
    """Log-probs (T, V) of every next token of a fixed sequence."""
    return model(torch.arange(30, 94)[None]).logits[0].log_softmax(-1)


def mean_kl(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.exp() * (one - other)).sum(-1).mean().item()


def expected(policy: torch.nn.Module, model: Path, run: Path, name: str) -> torch.nn.Module:
    """The policy as trained, computing with the numbers of format `name`."""
    from kit.policy.quantized_linear import AMAX, load_quantizer_state, use_quantized_linears

    fmt = FORMATS[name]
    if name == "bf16":  # no quantizer of a policy either: base and update, rounded once
        rounded = load_for_scoring(model)
        for layer, module in policy.get_base_model().named_modules():
            if hasattr(module, "lora_A"):
                weight = dequantize(module).float() + module.get_delta_weight("default")
                rounded.get_submodule(layer).weight.data = weight.to(torch.bfloat16).float()
        return rounded
    if fmt.layout == "bitsandbytes":  # of the merged weights
        stored = load_frozen(merged_to(run, "bf16"), "nf4", device="cpu")
        compute_in(stored, torch.float32)
        return stored.eval()
    model = copy.deepcopy(policy)
    use_quantized_linears(model, fmt)
    if fmt.needs_calibration:
        bf16, info = merged_to(run, "bf16"), RunDir(run).base()
        calibration = calibration_set(RunDir(run), read_tokenizer(bf16), SAMPLES, 512)
        peaks = input_peaks(bf16, {f"{one}.weight" for one in info["quantized"]}, calibration)
        ranges = {f"{one.removesuffix('.weight')}{AMAX}": torch.tensor(peak) for one, peak in peaks.items()}
        load_quantizer_state(model, ranges)
    return model
