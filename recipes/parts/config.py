"""The configuration of a run: one YAML, strict, checked before any weight is loaded. Imports no torch.

Precedence: default < YAML < command line (`--train.learning_rate 1e-4`). An unknown key, a wrong type or choice is an
error that names the key, where it stands and the nearest valid key. Checks of several keys are in `checks.py`.
"""

import argparse
import dataclasses
import typing
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from recipes.parts import chat
from recipes.parts.choices import OPTIMIZERS, REFERENCES, REWARDS, TRACKERS, TRAINED_FORMATS
from recipes.parts.config_types import StrictLoader, literals, match_type, spell_type
from recipes.parts.errors import BadInput, did_you_mean

FLAGS = ("config", "dry_run", "resume", "overwrite")  # of a recipe; what a misspelled argument may have meant
# Keys that have a successor, and how each value is written there.
REPLACED = {"train.gradient_checkpointing": {True: "train.recompute: full", False: "train.recompute: none"}}
# The formats of a checkpoint, in the order in which they are made; merge/README.md says what each stores.
FORMATS = ("bf16", "fp8", "fp8_block", "fp8_static", "w4a16", "awq", "nvfp4a16", "nvfp4", "nf4")


def _option(default: Any = MISSING, help: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its help string; without a default the YAML or the command line must give it. `choices`
    are the values that a later check takes; those of a Literal are its own."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class RunConfig:
    name: str = _option(help="name of the run; its directory is runs/<name> unless output_dir says otherwise")
    output_dir: str | None = _option(None, "run directory; must not hold another run")
    seed: int = _option(0, "seed of in-process sampling, adapter initialization and data order")

    @property
    def directory(self) -> Path:
        return Path(self.output_dir or f"runs/{self.name}").expanduser()


@dataclass(kw_only=True)
class ModelConfig:
    id: str = _option(help="hub id of the 16-bit base model, e.g. Qwen/Qwen3-8B")
    path: str | None = _option(None, "local directory of the base model; overrides id")
    revision: str | None = _option(None, "hub revision (branch, tag or commit)")
    dtype: Literal["bfloat16", "float32"] = _option("bfloat16", "type of activations and of dequantized weights")
    attn_implementation: str = _option("sdpa", "attention kernel of transformers: eager, sdpa, flash_attention_2, …")

    @property
    def source(self) -> str:
        return self.path or self.id

    def check_path(self) -> None:
        """`BadInput` when `path` is no directory here: transformers would ask the hub for a model of that name."""
        if self.path is not None and not Path(self.path).is_dir():
            seen = f"model.path {self.path} is no directory (seen from {Path.cwd()})."
            raise BadInput(f"{seen} Name one that holds a model, or leave it out to take {self.id} from the hub.")


@dataclass(kw_only=True)
class PolicyConfig:
    quantization: Literal["nf4", "fp8", "none"] = _option("nf4", "storage of the frozen base; none: model.dtype")
    double_quantization: bool = _option(True, "quantize nf4's block scales too: 4.13 instead of 4.5 bits a weight")
    lora_rank: int = _option(16, "rank of the adapter")
    lora_alpha: int = _option(32, "the adapter's update is scaled by alpha / rank")
    lora_dropout: float = _option(
        0.0, "dropout on the adapter's input, in the loss only; completions are sampled without"
    )
    use_rslora: bool = _option(False, "scale by alpha / sqrt(rank) instead")
    target_modules: str | list[str] = _option("all-linear", "all-linear, or names of linear layers")
    adapter_dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "type of the trained adapter weights; with bfloat16 only DeepSpeed keeps float32 masters"
    )
    compute: Literal["plain", "fused", "fp8"] = _option(
        "plain",
        "products with the frozen base: plain is peft's path; fused is one function for base and adapter; fp8 is that "
        "with the base's products in FP8, as the server quantizes them",
    )
    kernels: Literal["torch", "liger"] = _option("torch", "norms, rotary embedding and SwiGLU; liger needs a GPU")
    embeddings: Literal["gpu", "host"] = _option(
        "gpu", "where the input embedding lies; host looks its rows up in host memory (untied models)"
    )
    reference: str = _option(
        "adapter_off", "KL reference; adapter_off is the same model without the adapter; none with beta 0", REFERENCES
    )
    init_adapter: str | None = _option(None, "adapter directory to start from (same base, rank and targets)")
    quant_cfg: str | None = _option(
        None,
        "format to train for; also a name of nvidia-modelopt, or a YAML file in its form; null: none",
        TRAINED_FORMATS,
    )
    quant_calib_data: str = _option("train", "prompts that calibrate activation ranges: train, or a local jsonl file")
    quant_calib_size: int = _option(128, "prompts to calibrate with")
    quant_batch_size: int = _option(8, "prompts per forward of the calibration")
    quant_sequence_length: int = _option(512, "tokens of a prompt that the calibration uses")
    quant_noise_start: float = _option(0.0, "noise on the sampler's RMSNorm scales at the start; 0 = off")
    quant_noise_end: float = _option(0.0, "noise on the sampler's RMSNorm scales at the end")
    quant_noise_stages: int = _option(10, "stages in which the noise goes from start to end")


@dataclass(kw_only=True)
class RolloutConfig:
    backend: Literal["in_process", "server"] = _option("in_process", "who generates: the trainer, or a vLLM server")
    group_size: int = _option(8, "completions per prompt (num_generations)")
    max_prompt_length: int = _option(
        512, "longest prompt in tokens, with chat template; longer: dropped, up to data.max_bad_fraction"
    )
    max_completion_length: int = _option(256, "longest completion in tokens; cut ones count as truncated")
    keep_weights: Literal["auto", "always", "never"] = _option(
        "auto",
        "in process: make each weight once a rollout instead of for every token; auto, where the weights take at most "
        "half of the free memory",
    )
    overlap: bool = _option(False, "generate the next batch during the update: one step off-policy, corrected")
    temperature: float = _option(1.0, "sampling temperature; log-probs are computed at the same temperature")
    top_p: float = _option(1.0, "nucleus sampling; below 1 the sampler is no longer the policy")
    top_k: int = _option(0, "0 = off")
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = _option(
        "token_truncate", "importance correction for the sampler-trainer mismatch"
    )
    correction_cap: float = _option(2.0, "cap C of the importance ratio")
    server_urls: list[str] = _option(["http://127.0.0.1:8000"], "base URLs of the vLLM replicas")
    sync: Literal["remerge", "adapter"] = _option(
        "remerge", "remerge: replicas fold each adapter into their weights; adapter: they serve it unmerged"
    )
    transport: Literal["path", "body"] = _option(
        "path", "how an adapter reaches the replicas: path on a file system they share, or in the HTTP body"
    )
    request_timeout_s: float = _option(600.0, "longest wait for one generation request")
    retries: int = _option(1, "further attempts, on the next replica, at a generation request that failed")
    max_in_flight: int = _option(256, "prompts under way at once, over all replicas")
    canary_prompts: int = _option(4, "training prompts that trainer and replicas score after each sync; 0 = no check")
    max_canary_delta: float = _option(0.25, "stop when the mean |Δlogp| on the canary, nats a token, exceeds this")
    max_sampler_k3: float = _option(
        0.1, "stop when KL(sampler || policy) per token, nats, exceeds this; with overlap it includes the lag"
    )
    server_wait_s: float = _option(300.0, "longest wait for a server to answer at the start")


@dataclass(kw_only=True)
class ServerConfig:
    base: str | None = _option(
        None, "directory of the dequantized base (python -m merge base); default models/bases/<name>"
    )
    weights: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "bf16"] = _option(
        "fp8_per_channel", "what vLLM stores the dequantized base as"
    )
    quant_cfg: str | None = _option(
        None, "format that the replicas compute in; default policy.quant_cfg, and no other", TRAINED_FORMATS
    )
    kv_cache: Literal["auto", "fp8"] = _option("auto", "type of the KV cache; auto is the model's own")
    tensor_parallel: int = _option(1, "GPUs per replica")
    gpus: list[int] | None = _option(None, "GPUs of the replicas, tensor_parallel each; default what CUDA shows")
    gpu_memory_utilization: float = _option(0.9, "share of the card that a replica may take, weights and KV cache")
    kv_cache_gib: float | None = _option(None, "GiB of KV cache instead of what the share leaves")
    nf4_copy: Literal["gpu", "host"] = _option("gpu", "where remerge keeps its NF4 copy (0.56 bytes a weight)")
    sleep: bool = _option(False, "weights to host memory and no KV cache during the update: for a shared card")
    max_num_seqs: int = _option(256, "completions that a replica generates at once")
    enforce_eager: bool = _option(False, "no CUDA graphs: starts faster, generates slower")
    host: str | None = _option(None, "address to bind; default the URL's host, which must be this machine's")
    vllm: dict[str, Any] = _option({}, "further vLLM flags by name, e.g. {max_num_batched_tokens: 8192}")


@dataclass(kw_only=True)
class RewardConfig:
    functions: list[str] = _option(["math"], "reward functions, also module:function (reward/README.md)", REWARDS)
    weights: list[float] | None = _option(None, "one weight per function; default 1 each")
    timeout_s: float = _option(2.0, "wall-clock limit per answer comparison")
    workers: int = _option(2, "killable worker processes for comparisons that need a parser")
    max_unknown_fraction: float = _option(0.02, "stop when more rewards than this could not be computed")
    options: dict[str, Any] = _option({}, "settings of reward functions by their name, e.g. {math: {ordered: false}}")
    allow_code_execution: bool = _option(False, "let reward functions run the model's code, in a sandbox")


@dataclass(kw_only=True)
class DataConfig:
    id: str | None = _option(None, "hub id of the problem set, e.g. openai/gsm8k")
    config: str | None = _option(None, "hub configuration name, e.g. main")
    path: str | None = _option(
        None, "local jsonl/json/parquet file, folder of <split>.jsonl, or of save_to_disk; overrides id"
    )
    train_split: str = _option("train", "split to train on")
    eval_split: str = _option("test", "split that is held out")
    eval_path: str | None = _option(None, "local file of held-out problems; overrides eval_split")
    question_column: str = _option("question", "column of the problem text; Body+Question joins two")
    answer_column: str = _option("answer", "column of the reference answer")
    answer_format: Literal["gsm8k", "boxed", "plain", "countdown", "code", "mbpp", "humaneval", "any"] = _option(
        "plain",
        "where the answer is: #### 42, \\boxed{42}, 42; for code, what form the tests have (reward/code_gold.py); "
        "any: the column as it is, for a reward function that reads it",
    )
    system_prompt: str | None = _option(None, "system message; null sends none")
    prompt_suffix: str = _option("", "appended to every question")
    chat_template_kwargs: dict[str, Any] = _option(
        {},
        "arguments of the chat template, e.g. {enable_thinking: false}: for training, evaluation and as defaults of "
        "the merged checkpoint",
    )
    max_bad_fraction: float = _option(0.0, "share of rows that may be unusable before loading fails")
    max_train_problems: int | None = _option(None, "use only the first N training problems")
    max_eval_problems: int | None = _option(None, "use only the first N held-out problems")


@dataclass(kw_only=True)
class TrainConfig:
    max_steps: int = _option(help="optimizer steps")
    learning_rate: float = _option(1e-5, "peak learning rate; a LoRA wants about 10x that of full fine-tuning")
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = _option("constant", "schedule")
    warmup_steps: int = _option(0, "steps of linear warm-up")
    loss_type: Literal["dr_grpo", "dapo", "grpo"] = _option("dr_grpo", "how token losses are averaged")
    scale_rewards: Literal["group", "batch", "none"] | None = _option(
        None, "divide advantages by the spread of the group or batch; default none for dr_grpo, group otherwise"
    )
    beta: float = _option(0.01, "weight of the KL to the reference")
    epsilon: float = _option(0.2, "lower clip of the probability ratio")
    epsilon_high: float | None = _option(None, "upper clip; default epsilon (DAPO: 0.28)")
    num_iterations: int = _option(1, "updates per batch of rollouts")
    mask_truncated: bool = _option(False, "leave truncated completions out of the loss")
    per_device_train_batch_size: int = _option(8, "completions per forward on one device")
    gradient_accumulation_steps: int = _option(1, "forwards per optimizer step")
    micro_batch_tokens: int | None = _option(
        None, "tokens per forward, without padding, instead of per_device_train_batch_size completions"
    )
    share_prompts: bool = _option(True, "with micro_batch_tokens: compute the prompt of a group once")
    packed_attention: Literal["flash", "cudnn", "flex"] = _option(
        "flash", "with micro_batch_tokens on a GPU: FlashAttention or cuDNN, in half precision, or FlexAttention"
    )
    max_grad_norm: float = _option(1.0, "gradient clipping norm")
    weight_decay: float = _option(0.0, "AdamW weight decay")
    optimizer: str = _option("adamw_torch", "optimizer, as transformers names it", OPTIMIZERS)
    gpus: list[int] | None = _option(
        None, "GPUs of the trainer under launch.up, one process each; default those that no replica uses"
    )
    max_gpu_gib: float | None = _option(None, "GPU memory that a trainer process may take; default the whole card")
    recompute: Literal["full", "selective", "none", "auto"] = _option(
        "full",
        "what the backward pass computes again: full, decoder layers; selective, all but products and attention; "
        "none; auto, the least for which the plan's high memory figure fits the card",
    )
    recompute_fraction: float = _option(1.0, "share of the decoder layers that recompute applies to, evenly spread")
    recompute_offload: bool = _option(False, "with recompute: the layers' inputs wait in pinned host memory")
    save_steps: int = _option(50, "steps between checkpoints and published adapters")
    keep_checkpoints: int = _option(2, "training checkpoints to keep; adapters are all kept")
    trl: dict[str, Any] = _option({}, "further GRPOConfig fields by their TRL name")


@dataclass(kw_only=True)
class DistillConfig:
    teacher: str | None = _option(
        None,
        "base: the student's own model without quantizers and adapter; or another model by id or path, stored as "
        "policy.quantization says; null with teacher_adapter null: no distillation",
    )
    teacher_revision: str | None = _option(None, "hub revision of another model as teacher")
    teacher_adapter: str | None = _option(
        None, "adapter directory of an earlier run on the same base: the base with it, unquantized, is the teacher"
    )
    divergence: Literal["reverse_kl", "forward_kl", "js"] = _option(
        "reverse_kl", "KL(student || teacher), KL(teacher || student), or the generalized Jensen-Shannon divergence"
    )
    js_beta: float = _option(
        0.5, "with js: share of the teacher in the mixture that both are compared with, between 0 and 1"
    )
    temperature: float = _option(1.0, "both distributions are softened by it before they are compared")
    chunk_tokens: int = _option(
        1024, "tokens whose logits exist at a time, 256 KiB each (32,768 words of both models)"
    )

    @property
    def is_given(self) -> bool:
        """Whether the run is a distillation, recipes/distill_qat.py."""
        return self.teacher is not None or self.teacher_adapter is not None


@dataclass(kw_only=True)
class WatchConfig:
    completions_every: int = _option(10, "steps between samples of completions; 0 = never")
    completions_per_step: int = _option(64, "completions written per sampled step")
    eval_every: int = _option(0, "steps between measurements of the held-out accuracy while training; 0 = never")
    eval_problems: int = _option(64, "held-out problems of such a measurement, one completion each")
    report_to: list[str] = _option([], "trackers that get each step's metrics and completions", TRACKERS)


@dataclass(kw_only=True)
class GateConfig:
    format: Literal[FORMATS] = _option(
        "fp8", "the format that would be deployed; with policy.quant_cfg by default its own"
    )
    min_gain: float = _option(0.0, "least accuracy gain over the base, at the lower end of its interval")
    max_quantization_loss: float = _option(0.05, "most accuracy that the format may lose against bf16")
    min_parse_rate: float = _option(0.9, "least share of completions with an answer that can be read")
    max_prompt_leak: float = _option(0.01, "most share of completions that repeat the prompt")
    min_end_of_turn_rate: float = _option(0.9, "least share of completions that end by the stop token")
    max_token_hit_rate: float = _option(0.1, "most share of completions that are cut at the token limit")
    min_problems: int | None = _option(None, "least held-out problems behind the verdict; null sets no limit")
    max_policy_kl: float = _option(0.05, "most KL(policy || artifact) per token, nats")

    def problems(self) -> list[str]:
        """What is wrong with the limits, such as 5 for 5 points: a share outside 0..1 lets everything pass."""
        names = ("max_quantization_loss", "min_parse_rate", "max_prompt_leak", "min_end_of_turn_rate")
        found = [
            f"eval.gate.{name} ({value:g}) must be a fraction in 0..1; 5 points are 0.05."
            for name in (*names, "max_token_hit_rate")
            if not 0 <= (value := getattr(self, name)) <= 1
        ]
        if not -1 <= self.min_gain < 1:
            found.append(f"eval.gate.min_gain ({self.min_gain:g}) must be a fraction from -1 to 1; 5 points are 0.05.")
        if not self.max_policy_kl >= 0:
            found.append(f"eval.gate.max_policy_kl ({self.max_policy_kl:g}) must be 0 or above, in nats.")
        if self.min_problems is not None and self.min_problems < 1:
            found.append(f"eval.gate.min_problems ({self.min_problems}) must be at least 1, or null.")
        return found


@dataclass(kw_only=True)
class EvalConfig:
    max_problems: int = _option(300, "held-out problems per cell of the matrix")
    backend: Literal["transformers", "vllm", "server"] = _option(
        "transformers", "who generates: this process, vLLM in a child process, or an OpenAI-compatible server by URL"
    )
    samples: int = _option(1, "completions per problem; above 1 needs eval.temperature above 0")
    batch_size: int = _option(64, "prompts generated together")
    max_new_tokens: int | None = _option(None, "default: rollout.max_completion_length")
    temperature: float = _option(0.0, "0 = greedy; above 0 every checkpoint samples with the same random numbers")
    seed: int = _option(0, "seed of the sampled completions")
    formats: list[str] = _option(
        ["nf4", "bf16", "fp8", "w4a16"],
        "columns of the matrix; default with policy.quant_cfg nf4, bf16 and its own",
        FORMATS,
    )
    bootstrap_samples: int = _option(10_000, "resamples of the bootstrap intervals")
    reward: str | None = _option(
        None, "score by this reward, also module:function; default what data.answer_format says", REWARDS
    )
    reward_threshold: float = _option(1.0, "with eval.reward, a completion of at least this reward counts as right")
    gate: GateConfig = field(default_factory=GateConfig, metadata={"help": "thresholds for promotion"})


@dataclass(kw_only=True)
class Config:
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig
    rollout: RolloutConfig
    server: ServerConfig
    reward: RewardConfig
    data: DataConfig
    train: TrainConfig
    distill: DistillConfig
    watch: WatchConfig
    eval: EvalConfig


def to_dict(config: Config) -> dict:
    """The configuration as nested plain dictionaries, ready for JSON."""
    return dataclasses.asdict(config)


def config_from_dict(values: dict, where: str = "config") -> Config:
    """A checked `Config` from nested dictionaries; `BadInput` lists every wrong key, type and choice at once."""
    problems: list[str] = []
    config = _build(Config, values, "", where, problems)
    if config is not None:
        config.data.chat_template_kwargs = chat.arguments_of(values)
        problems += [f"{where}: {problem}" for problem in chat.problems(config.data.chat_template_kwargs)]
    if problems:
        raise BadInput("\n".join(problems))
    if config.policy.quant_cfg is not None:
        from recipes.parts.own_format import judge_in_own_format

        judge_in_own_format(config, values.get("eval") or {})
    return config


def load_config(path: str | Path | None, overrides: list[str] = (), flags: tuple[str, ...] = FLAGS) -> Config:
    """The configuration of a YAML file with command-line overrides (`--group.key value` or `--group.key=value`)."""
    values: dict = {}
    if path is not None:
        try:
            values = yaml.load(Path(path).read_text(), StrictLoader)
        except FileNotFoundError:
            raise BadInput(f"no config file at {path}.") from None
        except OSError as error:
            raise BadInput(f"{path} cannot be read as a config file: {error.strerror}.") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} is not YAML: {error}") from None
        if not isinstance(values, dict):
            raise BadInput(f"{path} must hold the groups {', '.join(_names(Config))}; it holds {values!r:.60}.")
    return resolve(values, overrides, str(path or "defaults"), flags)


def resolve(values: dict, overrides: list[str], where: str, flags: tuple[str, ...] = FLAGS) -> Config:
    """The checked configuration of nested dictionaries with command-line overrides; `where` names their source."""
    for key, value in _split_overrides(list(overrides), flags):
        *groups, leaf = key.split(".")
        target = values
        for group in groups:
            if target.get(group) is None:  # a group left empty in the YAML
                target[group] = {}
            target = target[group]
            if not isinstance(target, dict):
                raise BadInput(f"--{key}: {group} is not a group of keys.")
        target[leaf] = value
    return config_from_dict(values, f"{where} and the command line" if overrides else where)


def parse_command(description: str, arguments: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """The configuration and the flags (`dry_run`, `resume`, `overwrite`) of a recipe's command line."""
    parser = argparse.ArgumentParser(
        description=description.strip(),
        epilog="Every key of the YAML can be given as --group.key value:\n" + describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument("--dry_run", action="store_true", help="resolve and check everything, write and train nothing")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest whole checkpoint")
    parser.add_argument(
        "--overwrite", action="store_true", help="start the run anew; what its directory holds is named and deleted"
    )
    flags, overrides = parser.parse_known_args(arguments)
    return load_config(flags.config, overrides), flags


def describe() -> str:
    """One line per key: name, default, choices, meaning."""
    lines = []

    def visit(kind: type, prefix: str) -> None:
        hints = typing.get_type_hints(kind)
        for item in dataclasses.fields(kind):
            if dataclasses.is_dataclass(hints[item.name]):
                visit(hints[item.name], f"{prefix}{item.name}.")
                continue
            default = item.default if item.default is not MISSING else None
            if item.default_factory is not MISSING:
                default = item.default_factory()
            required = item.default is MISSING and item.default_factory is MISSING
            shown = "required" if required else f"default {default!r}"
            if choices := item.metadata["choices"] or literals(hints[item.name]):
                shown += f"; {'some' if isinstance(default, list) else 'one'} of {', '.join(map(str, choices))}"
            lines.append(f"  {prefix}{item.name} ({shown}): {item.metadata['help']}")

    visit(Config, "")
    return "\n".join(lines)


def _names(kind: type) -> list[str]:
    return [item.name for item in dataclasses.fields(kind)]


def _all_keys(kind: type = Config, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        keys += _all_keys(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else [f"{prefix}{name}"]
    return keys


def _nearest(key: str, group: list[str]) -> str:
    """The valid key meant by a misspelled one: in its own group first, then the same leaf name in any group."""
    prefix, _, leaf = key.rpartition(".")
    if hint := did_you_mean(leaf, group, f"{prefix}." if prefix else ""):
        return hint
    elsewhere = [name for name in _all_keys() if name.rpartition(".")[2] == leaf]
    if elsewhere:
        return f" Did you mean {elsewhere[0]}?"
    return f" Valid keys: {', '.join(group)}."


def _build(kind: type, values: Any, prefix: str, where: str, problems: list[str]) -> Any:
    if not isinstance(values, dict):
        problems.append(f"{where}: {prefix.rstrip('.') or 'the file'} must be a group of keys, it is {values!r:.60}.")
        return None
    hints, known, arguments = typing.get_type_hints(kind), _names(kind), {}
    for key in values:
        if replaced := REPLACED.get(f"{prefix}{key}"):
            now = replaced.get(values[key]) if isinstance(values[key], bool) else " or ".join(replaced.values())
            problems.append(f"{where}: {prefix}{key} no longer exists. Write {now} in its place.")
        elif key not in known:
            problems.append(f"{where}: unknown key {prefix}{key}.{_nearest(f'{prefix}{key}', known)}")
    for item in dataclasses.fields(kind):
        name, hint = item.name, hints[item.name]
        if dataclasses.is_dataclass(hint):
            group = values.get(name)
            arguments[name] = _build(hint, {} if group is None else group, f"{prefix}{name}.", where, problems)
        elif name in values:
            arguments[name] = _convert(values[name], hint, f"{prefix}{name}", where, problems)
        elif item.default is MISSING and item.default_factory is MISSING:
            problems.append(f"{where}: {prefix}{name} is missing: {item.metadata['help']}.")
    return None if problems else kind(**arguments)


def _convert(value: Any, hint: Any, key: str, where: str, problems: list[str]) -> Any:
    """`value` as the annotated type; only lossless conversions (int to float, "1e-4" to float) are made."""
    matched, converted = match_type(value, hint)
    if not matched:
        problems.append(f"{where}: {key} must be {spell_type(hint)}, it is {value!r:.60} ({type(value).__name__}).")
    return converted


def _split_overrides(arguments: list[str], flags: tuple[str, ...]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--") or "." not in argument.split("=")[0]:
            hint = did_you_mean(argument, {f"--{flag}" for flag in flags} - {argument})
            raise BadInput(f"unknown argument {argument}.{hint or ' Keys are given as --group.key value.'}")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not arguments:
                raise BadInput(f"--{key} needs a value.")
            text = arguments.pop(0)
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        # Where text is expected, what was typed is the text: a name like 007, a prompt with a colon in it.
        kind = _leaf_type(key)
        pairs.append((key, text if kind is str or (kind == (str | None) and value is not None) else value))
    return pairs


def _leaf_type(key: str) -> Any:
    hint: Any = Config
    for part in key.split("."):
        hint = typing.get_type_hints(hint).get(part) if dataclasses.is_dataclass(hint) else None
    return hint
