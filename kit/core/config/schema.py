"""Every key of a run's configuration: its type, its default, and what it does. Imports no torch.

The groups are those of the YAML, which `load.py` reads.
"""

import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kit.core.config.choices import OPTIMIZERS, REFERENCES, REWARDS, TRACKERS
from kit.core.errors import BadInput
from kit.core.formats import FORMATS, TRAINED
from kit.core.limits import MOST_GPUS
from kit.core.user_files import MOST_NAME, MOST_PATH, path_fault

TRAIN = "train"  # policy.quant_calib_data: the run's own training prompts


class Limit(NamedTuple):
    """The values that a key may have: in the words of an error, and as a test."""

    words: str
    holds: Callable[[Any], bool]


FROM_1 = Limit("at least 1", lambda value: value >= 1)
FROM_0 = Limit("0 or more", lambda value: value >= 0)
ABOVE_0 = Limit("a number above 0", lambda value: 0 < value < math.inf)
SHARE = Limit("between 0 and 1", lambda value: 0 <= value <= 1)
SHARE_ABOVE_0 = Limit("above 0 and at most 1", lambda value: 0 < value <= 1)
PART = Limit("above 0 and below 1", lambda value: 0 < value < 1)
POINTS = Limit("between 0 and 1; 5 points are 0.05", SHARE.holds)
GAIN = Limit("a fraction from -1 to 1; 5 points are 0.05", lambda value: -1 <= value < 1)
GROUP = Limit("at least 2: an advantage is a difference within the group", lambda value: value >= 2)
MIXTURE = Limit(
    "between 0 and 1. Its ends are other divergences: forward_kl at 0, reverse_kl at 1", lambda value: 0 < value < 1
)
CHUNK = Limit("from 1 to 4096, TRL's own tile", lambda value: 1 <= value <= 4096)
DRAFTS = Limit("from 1 to 32", lambda value: 1 <= value <= 32)
SEED = Limit(f"between 0 and {2**31 - 1}", lambda value: 0 <= value < 2**31)
NAME = Limit(
    "at most 100 letters, digits, '.', '_' and '-': it names directories",
    lambda value: bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value)),
)
GPUS = Limit(
    f"at most {MOST_GPUS} numbers of GPUs, from 0 to {MOST_GPUS - 1}",
    lambda value: len(value) <= MOST_GPUS and all(0 <= gpu < MOST_GPUS for gpu in value),
)
URLS = Limit(f"at most {MOST_GPUS} URLs", lambda value: len(value) <= MOST_GPUS)
PATH = Limit(
    f"a path without control characters, of at most {MOST_NAME} bytes between slashes and {MOST_PATH:,} in all, that "
    "is no loop of links and starts with no unknown ~user",
    lambda value: not path_fault(value),
)


def _option(default: Any = MISSING, help: str = "", limit: Limit | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its help string; without a default the YAML or the command line must set it.

    `limit_faults` checks `limit`; null passes. `choices` are the values that a later check accepts; a Literal has its
    own.
    """
    metadata = {"help": help, "limit": limit, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Limits of what a configuration is read for before it is checked as a whole: files, directories, GPUs.
WHEN_READ = (NAME, PATH, GPUS, URLS)


@dataclass(kw_only=True)
class RunConfig:
    name: str = _option(
        help="name of the run; its directory is runs/<name> unless output_dir says otherwise", limit=NAME
    )
    output_dir: str | None = _option(None, "run directory; must not hold another run", limit=PATH)
    seed: int = _option(0, "seed of in-process sampling, adapter initialization and data order", SEED)
    imported_from: str | None = _option(
        None,
        "adapter of another program that python -m merge import made this run of, which sets this key",
        limit=PATH,
    )

    @property
    def directory(self) -> Path:
        return Path(self.output_dir or f"runs/{self.name}").expanduser()


@dataclass(kw_only=True)
class ModelConfig:
    id: str = _option(help="hub id of the 16-bit base model, e.g. Qwen/Qwen3-8B", limit=PATH)
    path: str | None = _option(None, "local directory of the base model; overrides id", limit=PATH)
    revision: str | None = _option(None, "hub revision (branch, tag or commit)", limit=PATH)
    dtype: Literal["bfloat16", "float16", "float32"] = _option(
        "bfloat16",
        "dtype of activations and of dequantized weights; float16, with loss scaling, for GPUs without BF16",
    )
    attn_implementation: str = _option(
        "auto", "attention kernel of transformers: eager, sdpa, flash_attention_2, …; auto: sdpa, eager without it"
    )

    @property
    def source(self) -> str:
        return self.path or self.id

    def check_path(self) -> None:
        """Raise `BadInput` if `path` is not a local directory: transformers would look for it on the hub."""
        if self.path is not None and not Path(self.path).is_dir():
            seen = f"model.path {self.path} is not a directory (seen from {Path.cwd()})."
            raise BadInput(f"{seen} Name one that holds a model, or leave it out to take {self.id} from the hub.")


@dataclass(kw_only=True)
class PolicyConfig:
    quantization: Literal["nf4", "fp8", "none"] = _option("nf4", "storage of the frozen base; none: model.dtype")
    double_quantization: bool = _option(True, "quantize nf4's block scales too: 4.13 instead of 4.5 bits per weight")
    lora_rank: int = _option(16, "rank r of the adapter", FROM_1)
    expert_rank: int | None = _option(
        None, "rank of the adapter on each routed expert; null: lora_rank; 0: experts get no adapter", FROM_0
    )
    lora_alpha: int = _option(32, "the adapter's update is scaled by alpha / rank", FROM_1)
    lora_dropout: float = _option(
        0.0, "dropout on the adapter's input, in the loss only; completions are sampled without", SHARE
    )
    use_rslora: bool = _option(False, "scale by alpha / sqrt(rank) instead")
    target_modules: str | list[str] = _option("all-linear", "all-linear, or names of linear layers")
    adapter_dtype: Literal["float32", "bfloat16"] = _option(
        "float32", "dtype of the trained adapter weights; with bfloat16 only DeepSpeed keeps float32 masters"
    )
    compute: Literal["plain", "fused", "fp8"] = _option(
        "plain",
        "matmuls with the frozen base: plain is peft's path; fused computes base and adapter in one autograd "
        "function; fp8 is fused with the base's matmuls in FP8, quantized as on the server",
    )
    kernels: Literal["torch", "liger", "fused"] = _option(
        "torch", "norms, residual sums, rotary embedding and SwiGLU; liger needs a GPU and its package"
    )
    fused_mlp: bool = _option(
        False, "a SwiGLU MLP and its adapters as one autograd function; needs policy.compute fused or fp8"
    )
    embeddings: Literal["gpu", "host"] = _option(
        "gpu", "where the input embedding is stored; host looks its rows up in host memory (untied models)"
    )
    reference: str = _option(
        "adapter_off",
        "KL reference: adapter_off, the base itself; init_adapter, the base with the adapter that the run started "
        "from; none with beta 0",
        choices=REFERENCES,
    )
    init_adapter: str | None = _option(
        None,
        "adapter directory to start from, of a run or as peft, TRL or Unsloth save it (same base, rank and targets)",
        limit=PATH,
    )
    quant_cfg: str | None = _option(
        None,
        "format to train for; also an nvidia-modelopt name, or its YAML; null: none",
        choices=tuple(TRAINED),
        limit=PATH,
    )
    quant_calib_data: str = _option(
        "train", "prompts that calibrate activation ranges: train, or a local jsonl file", limit=PATH
    )
    quant_calib_size: int = _option(128, "prompts to calibrate with", FROM_1)
    quant_batch_size: int = _option(8, "prompts per forward of the calibration", FROM_1)
    quant_sequence_length: int = _option(512, "tokens of a prompt that the calibration uses", FROM_1)
    quant_noise_start: float = _option(0.0, "noise on the sampler's RMSNorm scales at the start; 0 = off")
    quant_noise_end: float = _option(0.0, "noise on the sampler's RMSNorm scales at the end")
    quant_noise_stages: int = _option(10, "number of stages from the start noise to the end noise")


@dataclass(kw_only=True)
class RolloutConfig:
    backend: Literal["in_process", "server"] = _option("in_process", "who generates: the trainer, or a vLLM server")
    group_size: int = _option(8, "completions per prompt (num_generations)", GROUP)
    max_prompt_length: int = _option(
        512, "longest prompt in tokens, with chat template; longer: dropped, up to data.max_bad_fraction", FROM_1
    )
    max_completion_length: int = _option(256, "longest completion in tokens; longer ones count as truncated", FROM_1)
    keep_weights: Literal["auto", "always", "never"] = _option(
        "auto",
        "in process: make each weight once per rollout instead of for every token; auto: if the weights take at most "
        "half of the free memory",
    )
    overlap: bool = _option(False, "generate the next batch during the update: off-policy lag of one step, corrected")
    stream_groups: int | None = _option(
        None,
        "update with groups while the servers generate the others, as soon as each process has so many; null: with "
        "all at once",
        FROM_1,
    )
    resample_rounds: int = _option(
        0, "dynamic sampling: rounds per step that replace groups without signal by fresh problems; 0 = off", FROM_0
    )
    resample_budget: int | None = _option(
        None, "completions per step that all rounds together may sample; null sets no limit", FROM_1
    )
    replay_steps: int = _option(
        0,
        "groups that still have no signal give way to ones with signal, at most so many steps old, with their old "
        "log-probs; 0 = off",
        FROM_0,
    )
    temperature: float = _option(1.0, "sampling temperature; log-probs are computed at the same temperature", ABOVE_0)
    top_p: float = _option(1.0, "nucleus sampling; below 1 the sampler is no longer the policy", SHARE)
    top_k: int = _option(0, "0 = off", FROM_0)
    stop: list[str] = _option(
        [], "stop texts: a completion ends with the token that completes one of them; at most 4, e.g. [</answer>]"
    )
    routing: Literal["own", "compare", "replay"] = _option(
        "own",
        "mixtures of experts on a server: the trainer's routers choose, are compared with the sampler's experts, or "
        "take these",
    )
    correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "none"] = _option(
        "token_truncate",
        "importance sampling correction for the sampler-trainer mismatch; token_truncate is TIS, token_mask is MIS",
    )
    correction_cap: float = _option(2.0, "cap C of the importance ratio")
    server_urls: list[str] = _option(["http://127.0.0.1:8000"], "base URLs of the vLLM replicas", URLS)
    sync: Literal["remerge", "adapter"] = _option(
        "remerge", "remerge: replicas fold each adapter into their weights; adapter: they serve it unmerged"
    )
    transport: Literal["path", "body"] = _option(
        "path", "how an adapter reaches the replicas: path on a file system they share, or in the HTTP body"
    )
    request_timeout_s: float = _option(600.0, "longest wait for one generation request", ABOVE_0)
    retries: int = _option(1, "retries of a failed generation request, on the next replica", FROM_0)
    max_in_flight: int = _option(256, "prompts in flight at once, over all replicas", FROM_1)
    canary_prompts: int = _option(
        4, "training prompts that trainer and replicas score after each sync; 0 = no check", FROM_0
    )
    max_canary_delta: float = _option(
        0.25, "stop when the mean |Δlogp| on the canary, nats per token, exceeds this", ABOVE_0
    )
    max_sampler_k3: float = _option(
        0.1, "stop when KL(sampler || policy) per token, nats, exceeds this; with overlap it includes the lag", ABOVE_0
    )
    server_wait_s: float = _option(300.0, "longest wait for a server to answer at the start", ABOVE_0)


@dataclass(kw_only=True)
class ServerConfig:
    base: str | None = _option(
        None, "directory of the dequantized base (python -m merge base); default models/bases/<name>", limit=PATH
    )
    weights: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "bf16", "w4a16"] = _option(
        "fp8_per_channel", "format in which vLLM stores the dequantized base; w4a16: INT4, with rollout.sync remerge"
    )
    force_w8a16: bool = _option(
        False, "FP8 weights, inputs in 16 bits (vLLM's Marlin kernels, as on Ampere) on a GPU that multiplies FP8 too"
    )
    quant_cfg: str | None = _option(
        None,
        "format that the replicas compute in; default policy.quant_cfg, the only one allowed",
        choices=tuple(TRAINED),
    )
    kv_cache: Literal["fastest", "auto", "fp8"] = _option(
        "fastest",
        "dtype of the KV cache; auto: the model's own; fastest: fp8 with FlashInfer where that was measured to be "
        "faster, else auto (launch/README.md)",
    )
    tensor_parallel: int = _option(1, "GPUs per replica", FROM_1)
    gpus: list[int] | None = _option(None, "GPUs of the replicas, tensor_parallel each; default what CUDA shows", GPUS)
    gpu_memory_utilization: float = _option(
        0.9, "share of the GPU's memory that a replica may take, weights and KV cache", SHARE_ABOVE_0
    )
    kv_cache_gib: float | None = _option(None, "GiB of KV cache instead of what the share leaves", ABOVE_0)
    nf4_copy: Literal["gpu", "host"] = _option("gpu", "where remerge keeps its NF4 copy (0.56 bytes per weight)")
    sleep: bool = _option(False, "during the update, weights in host memory and no KV cache: for a shared GPU")
    share_base: bool = _option(
        False,
        "one base in memory: a trainer on the server's card maps its FP8 base instead of loading one (sync: adapter)",
    )
    max_num_seqs: int = _option(256, "completions that a replica generates at once", FROM_1)
    enforce_eager: bool = _option(False, "no CUDA graphs: starts faster, generates slower")
    speculation: Literal["none", "ngram", "suffix", "draft_model", "eagle", "eagle3"] = _option(
        "none",
        "speculative decoding, exact: what drafts tokens, which rejection sampling verifies: ngram (prompt lookup), "
        "suffix (what a group's other completions and earlier ones went on with), a small model, or a head on the "
        "base's hidden states",
    )
    draft_model: str | None = _option(
        None, "with speculation draft_model, eagle or eagle3: directory of the checkpoint that drafts", limit=PATH
    )
    draft_tokens: int = _option(4, "with speculation: most tokens drafted per sequence and step", DRAFTS)
    ngram_min: int = _option(2, "with speculation ngram: last tokens that must occur earlier, at least", FROM_1)
    ngram_max: int = _option(4, "with speculation ngram: last tokens that are looked up, at most", FROM_1)
    host: str | None = _option(None, "address to bind; default the URL's host, which must be this machine's")
    adapter_roots: list[str] = _option(
        [], "directories, besides the run's own, below which the servers read adapters, for runs that share them"
    )
    vllm: dict[str, Any] = _option({}, "further vLLM flags by name, e.g. {max_num_batched_tokens: 8192}")


@dataclass(kw_only=True)
class RewardConfig:
    functions: list[str] = _option(
        ["math"], "reward functions, also module:function (reward/README.md)", choices=REWARDS
    )
    weights: list[float] | None = _option(None, "one weight per function; default 1 each")
    timeout_s: float = _option(2.0, "wall-clock limit per answer comparison", ABOVE_0)
    request_timeout_s: float = _option(60.0, "wall-clock limit per call of an async reward of your own", ABOVE_0)
    workers: int = _option(2, "killable worker processes for comparisons that need a parser", FROM_1)
    max_unknown_fraction: float = _option(0.02, "stop when more rewards than this could not be computed", SHARE)
    options: dict[str, Any] = _option({}, "settings of reward functions by their name, e.g. {math: {ordered: false}}")
    try_references: int = _option(
        16, "references of the data that each reward is asked about before the base is loaded; 0: none", FROM_0
    )
    answer_form: str | None = _option(
        None,
        "form of an answer in which the references are tried, with {answer} in its place, e.g. 'Label: {answer}'; "
        "null: the usual forms, and those that the prompt mentions",
    )
    allow_code_execution: bool = _option(False, "let reward functions run the model's code, in a sandbox")


@dataclass(kw_only=True)
class EnvironmentConfig:
    factory: str | None = _option(
        None,
        "module:callable that makes an environment by TRL's contract, or openenv, verifiers (kit/environments); "
        "`environment: module:callable` is short for it",
    )
    options: dict[str, Any] = _option({}, "keyword arguments of the factory")
    tools: list[str] = _option([], "functions that the model may call, as module:function, or python")
    max_turns: int = _option(8, "turns of the model in an episode", FROM_1)
    max_turn_tokens: int | None = _option(
        None,
        "tokens of one turn; null: what is left of rollout.max_completion_length, which bounds the episode",
        FROM_1,
    )
    max_observation_tokens: int | None = _option(
        None, "tokens of one answer of a tool or environment, which is cut there; null: what is left", FROM_1
    )
    tool_timeout_s: float = _option(10.0, "longest wait for one call of a tool", ABOVE_0)
    episode_timeout_s: float = _option(
        120.0, "longest time that an episode may spend in its environment, without the model's turns", ABOVE_0
    )
    on_tool_error: Literal["observe", "unknown"] = _option(
        "observe",
        "a call that raises, or takes too long: the model reads the error, or the episode's reward is unknown",
    )
    max_unknown_fraction: float = _option(0.02, "stop when more episodes than this are unknown", SHARE)
    allow_code_execution: bool = _option(False, "let the tool python run the model's code, in a sandbox")
    isolation: Literal["full", "confined", "any"] = _option(
        "full", "least isolation of that sandbox; a machine that allows less is refused (reward/README.md)"
    )

    @property
    def is_given(self) -> bool:
        """Whether completions are episodes of an environment or with tools."""
        return self.factory is not None or bool(self.tools)


@dataclass(kw_only=True)
class DataConfig:
    id: str | None = _option(None, "hub id of the problem set, e.g. openai/gsm8k", limit=PATH)
    config: str | None = _option(None, "hub configuration name, e.g. main", limit=PATH)
    path: str | None = _option(
        None,
        "local jsonl/json/csv/tsv/parquet file, folder of <split>.jsonl, or of save_to_disk; overrides id",
        limit=PATH,
    )
    train_split: str = _option("train", "split to train on", limit=PATH)
    eval_split: str = _option("test", "held-out split", limit=PATH)
    eval_path: str | None = _option(None, "local file of held-out problems; overrides eval_split", limit=PATH)
    heldout_fraction: float | None = _option(
        None, "hold out this share of the training split instead of reading another, by a hash of each question", PART
    )
    heldout_seed: int = _option(0, "with heldout_fraction: another number holds out other problems", SEED)
    question_column: str = _option(
        "question",
        "column of the problem: text, or messages [{role, content}]; Body+Question joins two texts; without this "
        "column, prompt is taken",
    )
    answer_column: str | None = _option(
        "answer",
        "column of the reference answer, or a path such as reward_model.ground_truth; without this column, solution "
        "or reward_model.ground_truth is taken; null, with answer_format any: there is none",
    )
    answer_format: Literal["gsm8k", "boxed", "plain", "countdown", "code", "mbpp", "humaneval", "any"] = _option(
        "plain",
        "where the answer is: #### 42, \\boxed{42}, 42; for code, the format of the tests (reward/code_gold.py); "
        "any: the column as it is, for a reward function that reads it",
    )
    format: str | None = _option(
        None,
        "your own function of a row as module:function, which returns the prompt: text, messages or None to skip the "
        "row; instead of question_column (recipes/README.md)",
    )
    repeated_questions: Literal["drop", "keep"] = _option(
        "drop", "rows whose question came before; keep: they are problems of their own, with columns that differ"
    )
    system_prompt: str | None = _option(None, "system message; null sends none")
    prompt_suffix: str = _option("", "appended to every question")
    chat_template_kwargs: dict[str, Any] = _option(
        {},
        "arguments of the chat template, e.g. {enable_thinking: false}: for training, evaluation and as defaults of "
        "the merged checkpoint",
    )
    pass_rates: str | None = _option(
        None, "file of measured pass rates of the training problems (python -m recipes.pass_rates)", limit=PATH
    )
    min_pass_rate: float = _option(0.0, "with pass_rates: leave out problems below this share of right answers", SHARE)
    max_pass_rate: float = _option(1.0, "with pass_rates: leave out problems above this share of right answers", SHARE)
    order: Literal["shuffled", "easy_first"] = _option(
        "shuffled", "order of the training problems; easy_first: by their pass rates, the same in every pass"
    )
    max_bad_fraction: float = _option(0.0, "share of rows that may be unusable before loading fails", SHARE)
    max_train_problems: int | None = _option(None, "use only the first N training problems", FROM_1)
    max_eval_problems: int | None = _option(None, "use only the first N held-out problems", FROM_1)


@dataclass(kw_only=True)
class TrainConfig:
    max_steps: int = _option(help="optimizer steps", limit=FROM_1)
    learning_rate: float = _option(
        1e-5, "peak learning rate; a LoRA wants about 10x that of full fine-tuning", ABOVE_0
    )
    lr_scheduler: Literal["constant", "linear", "cosine", "constant_with_warmup"] = _option("constant", "schedule")
    warmup_steps: int = _option(0, "steps of linear warm-up")
    loss_type: Literal["dr_grpo", "dapo", "grpo", "gspo", "cispo", "sapo"] = _option(
        "dr_grpo", "the objective, and how token losses are averaged (recipes/README.md)"
    )
    loss: str | None = _option(None, "your own loss as module:function, instead of loss_type (kit/README.md)")
    scale_rewards: Literal["group", "batch", "none"] | None = _option(
        None,
        "divide advantages by the standard deviation of the group or batch; default none for dr_grpo, group otherwise",
    )
    beta: float = _option(0.01, "KL coefficient: weight of the KL to the reference", FROM_0)
    kl_in_reward: bool = _option(
        False, "subtract beta times the KL of a completion's tokens from its reward, instead of a KL term in the loss"
    )
    epsilon: float = _option(0.2, "lower clip of the probability ratio", ABOVE_0)
    epsilon_high: float | None = _option(
        None,
        "upper clip (clip-higher); default epsilon (DAPO: 0.28); with cispo the cap of the ratio itself (5.0)",
        ABOVE_0,
    )
    delta: float | None = _option(
        None, "two-sided clipping: upper bound of the ratio where the advantage is negative", ABOVE_0
    )
    importance_sampling_level: Literal["token", "sequence"] = _option(
        "token", "the probability ratio is one per token, or one per completion (gspo)"
    )
    entropy_coef: float = _option(0.0, "weight of the entropy bonus: the step's mean entropy, nats per token", FROM_0)
    num_iterations: int = _option(1, "updates per batch of rollouts", FROM_1)
    mask_truncated: bool = _option(False, "leave truncated completions out of the loss: DAPO's overlong filtering")
    per_device_train_batch_size: int = _option(8, "micro-batch size: completions per forward on one device", FROM_1)
    gradient_accumulation_steps: int = _option(1, "forwards per optimizer step", FROM_1)
    micro_batch_tokens: int | None = _option(
        None,
        "sequence packing: tokens per forward, without padding, instead of per_device_train_batch_size completions",
        FROM_1,
    )
    share_prompts: bool = _option(
        True, "with micro_batch_tokens: prefix sharing, the prompt of a group is computed once"
    )
    packed_attention: Literal["flash", "cudnn", "flex"] = _option(
        "flash", "with micro_batch_tokens on a GPU: FlashAttention or cuDNN, in half precision, or FlexAttention"
    )
    sequence_parallel: int = _option(
        1,
        "with micro_batch_tokens: processes that split the tokens of each pack (Ulysses), for longer completions",
        FROM_1,
    )
    max_grad_norm: float = _option(1.0, "gradient clipping norm", ABOVE_0)
    weight_decay: float = _option(0.0, "AdamW weight decay", FROM_0)
    optimizer: str = _option("adamw_torch", "optimizer, as transformers names it", choices=OPTIMIZERS)
    gpus: list[int] | None = _option(
        None, "GPUs of the trainer under launch.up, one process each; default those that no replica uses", GPUS
    )
    max_gpu_gib: float | None = _option(
        None, "GPU memory that a trainer process may take; default the whole GPU", ABOVE_0
    )
    recompute: Literal["full", "selective", "none", "auto"] = _option(
        "full",
        "gradient checkpointing: full recomputes decoder layers in the backward pass; selective all but matmuls and "
        "attention; none; "
        "auto, the least for which the plan's upper memory estimate fits the GPU",
    )
    recompute_fraction: float = _option(1.0, "share of the decoder layers that recompute applies to, evenly spread")
    recompute_offload: bool = _option(
        False, "activation offloading: with recompute, keep the layers' inputs in pinned host memory"
    )
    keep_weights: bool = _option(
        False, "keep the FP8 codes that policy.compute fp8 makes of an NF4 base, 2 bytes per weight, for the whole run"
    )
    keep_logits: bool = _option(
        False, "keep the logits of a micro-batch for the backward pass, which then multiplies with the head once"
    )
    save_steps: int = _option(50, "steps between checkpoints and published adapters", FROM_1)
    keep_checkpoints: int = _option(2, "training checkpoints to keep; adapters are all kept", FROM_1)
    trl: dict[str, Any] = _option({}, "further GRPOConfig fields by their TRL name")

    @property
    def ratio_level(self) -> str:
        """Whether the loss has a probability ratio per token or per sequence."""
        return "sequence" if self.loss_type == "gspo" else self.importance_sampling_level


@dataclass(kw_only=True)
class DistillConfig:
    teacher: str | None = _option(
        None,
        "base: the student's own model without quantizers or adapter; or another model by id or path, stored as "
        "policy.quantization says; null with teacher_adapter null: no distillation",
        limit=PATH,
    )
    teacher_revision: str | None = _option(None, "hub revision of another model as teacher", limit=PATH)
    teacher_adapter: str | None = _option(
        None,
        "adapter directory of an earlier run on the same base: the base with it, unquantized, is the teacher",
        limit=PATH,
    )
    divergence: Literal["reverse_kl", "forward_kl", "js"] = _option(
        "reverse_kl", "KL(student || teacher), KL(teacher || student), or the generalized Jensen-Shannon divergence"
    )
    js_beta: float = _option(
        0.5, "with js: share of the teacher in the mixture that both are compared with, between 0 and 1", MIXTURE
    )
    temperature: float = _option(1.0, "softens both distributions before they are compared", ABOVE_0)
    chunk_tokens: int = _option(
        1024, "tokens whose logits exist at a time, 256 KiB each (32,768 words of both models)", CHUNK
    )

    @property
    def is_given(self) -> bool:
        """Whether the run is a distillation, recipes/distill_qat.py."""
        return self.teacher is not None or self.teacher_adapter is not None


@dataclass(kw_only=True)
class SftConfig:
    rows: Literal["messages", "prompt_completion", "text"] | None = _option(
        None,
        "the columns of the data: messages, a conversation; prompt and completion, both texts or both messages; text; "
        "null: no supervised fine-tuning",
    )
    loss_on: Literal["answers", "all"] | None = _option(
        None, "tokens in the loss: answers of the assistant, or completions; or all; default answers, all for text"
    )

    @property
    def is_given(self) -> bool:
        """Whether the run is supervised fine-tuning, recipes/sft_qlora.py."""
        return self.rows is not None

    @property
    def learns_all(self) -> bool:
        """Whether prompts are in the loss too."""
        return (self.loss_on or ("all" if self.rows == "text" else "answers")) == "all"


@dataclass(kw_only=True)
class WatchConfig:
    completions_every: int = _option(10, "steps between samples of completions; 0 = never", FROM_0)
    completions_per_step: int = _option(64, "completions written per sampled step", FROM_1)
    eval_every: int = _option(0, "steps between measurements of held-out accuracy during training; 0 = never", FROM_0)
    eval_problems: int = _option(64, "held-out problems per measurement, one completion each", FROM_1)
    report_to: list[Literal[TRACKERS]] = _option([], "trackers that get each step's metrics and completions")


@dataclass(kw_only=True)
class LaunchConfig:
    stall_s: float = _option(
        900.0, "seconds without progress (no token, no answer, no micro-batch) that end the run; 0 = never", FROM_0
    )


@dataclass(kw_only=True)
class GateConfig:
    format: Literal[tuple(FORMATS)] = _option(
        "fp8", "the format that would be deployed; with policy.quant_cfg by default its own"
    )
    min_gain: float = _option(0.0, "minimum accuracy gain over the base, at the lower end of its interval", GAIN)
    max_quantization_loss: float = _option(0.05, "maximum accuracy that the format may lose against bf16", POINTS)
    min_parse_rate: float = _option(0.9, "minimum share of completions with a parseable answer", POINTS)
    max_prompt_leak: float = _option(0.01, "maximum share of completions that repeat the prompt", POINTS)
    min_end_of_turn_rate: float = _option(0.9, "minimum share of completions that end with the stop token", POINTS)
    max_token_hit_rate: float = _option(0.1, "maximum share of completions truncated at the token limit", POINTS)
    min_problems: int | None = _option(
        None, "minimum held-out problems behind the verdict; null sets no limit", FROM_1
    )
    max_policy_kl: float = _option(0.05, "maximum KL(policy || artifact) per token, nats", FROM_0)


@dataclass(kw_only=True)
class EvalConfig:
    max_problems: int = _option(300, "held-out problems per cell of the matrix", FROM_1)
    backend: Literal["transformers", "vllm", "server"] = _option(
        "transformers", "who generates: this process, vLLM in a child process, or an OpenAI-compatible server by URL"
    )
    samples: int = _option(1, "completions per problem; above 1 needs eval.temperature above 0", FROM_1)
    batch_size: int = _option(64, "prompts generated together", FROM_1)
    max_new_tokens: int | None = _option(None, "default: rollout.max_completion_length")
    temperature: float = _option(0.0, "0 = greedy; above 0 every checkpoint samples with the same random numbers")
    seed: int = _option(0, "seed of the sampled completions")
    formats: list[Literal[tuple(FORMATS)]] = _option(
        ["nf4", "bf16", "fp8", "w4a16"], "columns of the matrix; default with policy.quant_cfg nf4, bf16 and its own"
    )
    bootstrap_samples: int = _option(10_000, "resamples of the bootstrap intervals", FROM_1)
    reward: str | None = _option(
        None, "score by this reward, also module:function; default what data.answer_format says", choices=REWARDS
    )
    reward_threshold: float = _option(1.0, "with eval.reward, the minimum reward of a correct completion")
    gate: GateConfig = field(default_factory=GateConfig, metadata={"help": "thresholds for promotion"})


@dataclass(kw_only=True)
class Config:
    run: RunConfig
    model: ModelConfig
    policy: PolicyConfig
    rollout: RolloutConfig
    server: ServerConfig
    environment: EnvironmentConfig
    reward: RewardConfig
    data: DataConfig
    train: TrainConfig
    distill: DistillConfig
    sft: SftConfig
    watch: WatchConfig
    launch: LaunchConfig
    eval: EvalConfig


def limit_faults(group: Any, prefix: str = "") -> list[str]:
    """A line for each value of a configuration, or of one of its groups, that is outside its key's limit."""
    found = []
    for item in fields(group):
        key, value, limit = f"{prefix}{item.name}", getattr(group, item.name), item.metadata.get("limit")
        if is_dataclass(value):
            found += limit_faults(value, f"{key}.")
        elif limit and value is not None and not limit.holds(value):
            found.append(f"{key} ({value!r}) must be {limit.words}.")
    return found
