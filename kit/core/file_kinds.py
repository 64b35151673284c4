"""What each kind of file holds: the schemas of `run_files.py`, with the words and the fix of its errors.

A key is required when a reader relies on it. Files of an earlier version lack newer keys, so those are optional; the
values that may stand in one are fixed all the same.
"""

from typing import Annotated, Any, Literal, Required, TypedDict

from kit.core.config.schema import Config
from kit.core.run_files import FileKind, PathText, Within

Count = Annotated[int, Within(0, 2**53)]
Rank = Annotated[int, Within(1, 2**20)]
Pid = Annotated[int, Within(1, 2**31)]
Time = Annotated[float, Within(0, 1e11)]  # seconds, also since 1970
Share = Annotated[float, Within(0, 1)]
Difference = Annotated[float, Within(-1, 1)]
Figure = Annotated[float, Within(-1e30, 1e30)]

RESTORE = "Restore the file, or start another run."


# --- of a run


class RunConfig(TypedDict, total=False):
    config: Required[Config]
    versions: dict[str, str | None]
    never_measured: str | None
    machine: dict[str, Any]
    processes: Count
    code_sandbox: Any
    own_rewards: dict[str, str | None]
    own_loss: str | None
    own_format: str | None
    own_environment: Any
    git_revision: str | None
    seed: int
    command: list[str]
    created: str


class Step(TypedDict, total=False):
    step: Required[Count]
    total_steps: Count | None
    time: float | None
    seconds: dict[str, Any]
    peak_gib: dict[str, Any]
    rewards: dict[str, Any]
    unknown_rewards: dict[str, dict[str, Count]] | None


class Stepped(TypedDict):
    step: Count


class Consumed(Stepped):
    problem_ids: list[str]


class Part(TypedDict, total=False):
    text: str | None


class Asked(TypedDict, total=False):
    """A message of a prompt."""

    role: Required[str]
    content: str | list[Part] | None


class Completion(TypedDict, total=False):
    problem_id: Required[str]
    prompt: Required[str | list[Asked]]
    completion: Required[str]
    text: str | None
    gold: str | None
    rewards: dict[str, Figure | None]
    advantage: Figure | None
    adapter_version: Count | None


class Message(TypedDict):
    content: str


class Logged(TypedDict, total=False):
    """Prompt and completion, of a trainer or of `merge import --prompts`."""

    prompt: Required[str | list[Asked]]
    completion: Required[str | list[Message]]
    text: str | None


class TrainedOn(TypedDict):
    problems: Count
    blake2b: str


class Ended(TypedDict, total=False):
    how: Required[Literal["done", "failed", "interrupted", "killed"]]
    error: Required[str]
    time: Required[Time]
    is_machine: bool


class Lock(TypedDict):
    host: str
    pid: Pid
    began: Count | None


class Failed(TypedDict):
    pid: Pid
    launch: str
    time: Time
    error: str
    exit_code: Annotated[int, Within(0, 255)]
    is_machine: bool


class Restart(TypedDict, total=False):
    what: Required[str]
    why: Required[str]
    step: Required[Count]
    time: Required[Time]
    pid: Required[Pid]
    seconds: Time | None


class RestartRequest(TypedDict):
    pid: Pid
    reason: str


class Replica(TypedDict, total=False):
    url: Required[str]
    pid: Required[Pid]
    started_at: Required[Count | None]
    log: Required[PathText]
    host: str


class Replicas(TypedDict):
    replicas: list[Replica]


class Canary(TypedDict):
    session: str
    version: Count
    way: str
    sequences: list[list[Count]]
    policy: list[list[Figure]]
    base: list[list[Figure]]


class Group(Stepped):
    rows: list[dict[str, Any]]
    rewards: list[list[Figure | None]]


class SharedTensor(TypedDict):
    storage: Count
    dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int8", "int32", "int64", "bool"]
    offset: Count
    shape: list[Count]
    stride: list[Count]


class SharedBase(TypedDict):
    pid: Pid
    gpu: str | None
    storages: list[dict[str, Any]]
    tensors: dict[str, SharedTensor]


class Measurement(TypedDict):
    facts: dict[str, Any]


class PassRate(TypedDict, total=False):
    problem_id: Required[str]
    pass_rate: Required[Share | None]
    known: Count
    mean_reward: Figure | None


class TrainerState(TypedDict):
    epoch: Annotated[float, Within(0, 1e9)]


CONFIG = FileKind("the config.json of a run", RunConfig, RESTORE)
METRICS = FileKind("a step of metrics.jsonl", Step, "Remove that line, or restore the file.", is_foreign=True)
STEP = FileKind("a line of a step", Stepped, METRICS.fix, is_foreign=True)
LEDGER = FileKind("an entry of a ledger", Consumed, RESTORE)
COMPLETIONS = FileKind("a logged completion", Completion, "Remove that file: it only shows what the model wrote.")
LOGGED_TEXTS = FileKind("a prompt with its completion", Logged, COMPLETIONS.fix)
PROBLEMS = FileKind("a row of problems", dict[str, Any], "Correct the file that data.path or data.eval_path names.")
DATA = FileKind("the data.json of a run", TrainedOn, RESTORE)
END = FileKind("the end.json of a run", Ended, "Remove it: it only says how the last trainer ended.")
LOCK = FileKind("the lock of a run", Lock, "Remove it if no trainer runs.")
FAILED = FileKind("the error of a process of a run", Failed, "Remove it.")
RESTARTS = FileKind("something that was started again", Restart, "Remove that line.")
RESTART_REQUEST = FileKind("a request to start a replica again", RestartRequest, "Remove it.")
SERVERS = FileKind(
    "a record of running replicas", Replicas, "End the replicas by their pids, then remove the file and start again."
)
CANARY = FileKind("a canary of this kit", Canary, "Remove it; the trainer's next sync writes another.")
REPLAYED = FileKind("the kept groups of a checkpoint", list[Group], "Resume from another checkpoint.")
SHARED_BASE = FileKind("a server's shared base", SharedBase, "Restart the server.")
MEASUREMENT = FileKind(
    "the facts of a measurement",
    Measurement,
    "Write it with python -m recipes.pass_rates --config … (recipes/README.md).",
)
PASS_RATES = FileKind("a problem's pass rate", PassRate, MEASUREMENT.fix)
TRAINER_STATE = FileKind(
    "the state of a trainer", TrainerState, "Restore the checkpoint, or resume from another.", is_foreign=True
)


# --- bases, adapters, merged checkpoints


class Quantization(TypedDict, total=False):
    type: Required[Literal["nf4", "fp8", "none"]]
    storage_dtype: Required[Literal["bfloat16", "float16", "float32"]]
    double_quantization: bool | None
    block_size: Count | None
    device: str | None


class BaseHash(TypedDict, total=False):
    hash: Required[str]
    model: PathText | None
    revision: str | None


class Base(BaseHash, total=False):
    quantization: Required[Quantization]
    quantized: Required[list[str]]
    tensors: Required[dict[str, str]]
    carried: dict[str, str]


class Listed(TypedDict):
    bytes: Count
    blake2b: str


class Fingerprint(Listed):
    mtime_ns: int


class MadeFrom(TypedDict, total=False):
    commit: Required[str | None]
    files: Required[dict[str, Fingerprint]]
    path: str | None


class Compared(TypedDict, total=False):
    mean_kl: Required[Figure]
    max_abs_dlogp: Required[Figure]
    top1_agreement: Required[Figure]
    tokens: Required[Count]
    policy_with: str | None


class Manifest(TypedDict, total=False):
    kind: Required[str]
    files: Required[dict[str, Listed]]
    created: str | None
    policy: Literal["base", "grpo"]
    format: str
    into: Literal["dequantized", "original"]
    base_hash: str | None
    tensor_hash: str | None
    adapter_hash: str | None
    adapter_version: Count | None
    version: Count | None
    step: Count
    processes: Annotated[int, Within(1, 2**20)]
    rank: Rank | None
    alpha: Figure | None
    rslora: bool
    targets: list[str]
    verify: Compared | None
    verify_bf16: Compared | None
    retained_update: Figure | None
    no_retained_update: str | None
    promoted: bool
    promotion: dict[str, Any] | None
    quant_cfg: str | None
    trained_for: str | None
    quantizer_hash: str | None
    stop: list[str] | None
    chat_template_kwargs: dict[str, Any]
    calibration: dict[str, Any] | None
    source: MadeFrom | None


class AdapterConfig(TypedDict, total=False):
    peft_type: Any
    r: Required[Rank]
    lora_alpha: Required[Figure]
    use_rslora: bool | None
    rank_pattern: dict[str, Rank] | None
    alpha_pattern: dict[str, Figure] | None
    target_modules: list[str] | str | None
    target_parameters: list[str] | None
    base_model_name_or_path: PathText | None


BASE_HASH = FileKind(
    "the facts of a base", BaseHash, "Write the base again (python -m merge base), or restore the file."
)
BASE = FileKind("the facts of a base", Base, BASE_HASH.fix)
NF4_INDEX = FileKind("the index of a base's NF4 copy", dict[str, PathText], BASE_HASH.fix)
MANIFEST = FileKind("a manifest of this kit", Manifest, "Write the artifact again, or restore it.")
ADAPTER_CONFIG = FileKind("the settings of a LoRA adapter", AdapterConfig, "Save the adapter again.", is_foreign=True)


# --- of a model, as transformers writes them


class ModelConfig(TypedDict, total=False):
    model_type: str | None
    vocab_size: Count | None
    max_position_embeddings: Count | None
    text_config: dict[str, Any] | None
    vision_config: dict[str, Any] | None
    quantization_config: dict[str, Any] | None


class TokenizerConfig(TypedDict, total=False):
    chat_template: Any


class DeepSpeed(TypedDict):
    zero_optimization: dict[str, Any]


class Judged(TypedDict):
    reply: str


class Points(TypedDict):
    card: str
    date: str
    points: list[dict[str, Any]]


class Token(TypedDict):
    id: Count


class TokenizerFile(TypedDict, total=False):
    added_tokens: list[Token]
    model: dict[str, Any]


class ShardIndex(TypedDict):
    weight_map: dict[str, PathText]


DEEPSPEED = FileKind("a DeepSpeed configuration", DeepSpeed, "Correct it (accelerate_configs/).", is_foreign=True)
JUDGED = FileKind("a judge's kept reply", Judged, "Remove it: the judge is asked again.")
POINTS = FileKind("a file of measured points", Points, "Write it with bench/memory_points.py.")
DOWNLOAD = "Download the model again, or save it again with save_pretrained."
MODEL_CONFIG = FileKind("a model's config.json", ModelConfig, DOWNLOAD, is_foreign=True)
TOKENIZER_CONFIG = FileKind("a tokenizer's configuration", TokenizerConfig, DOWNLOAD, is_foreign=True)
TOKENIZER = FileKind("a tokenizer of the tokenizers library", TokenizerFile, DOWNLOAD, is_foreign=True)
GENERATION_CONFIG = FileKind("a generation_config.json", dict[str, Any], DOWNLOAD, is_foreign=True)
SHARD_INDEX = FileKind("an index of safetensors shards", ShardIndex, DOWNLOAD, is_foreign=True)


# --- of evaluations (eval/README.md)

Interval = tuple[Difference, Difference]


class Measured(TypedDict, total=False):
    """A cell of the matrix."""

    n: Required[Count]
    accuracy: Required[Share]
    interval: Required[tuple[Share, Share]]
    strict: Required[Share | None]
    correct: Count | None
    samples: Count
    undecided: Count
    parse_rate: Share | None
    prompt_leak_rate: Share | None
    end_of_turn_rate: Share | None
    max_token_hit_rate: Share | None
    undecided_rate: Share | None
    max_token_hits: Count
    mean_tokens: Figure
    engine: str
    compute_dtype: str
    engine_facts: dict[str, Any]
    seconds: Time
    artifact_hash: str | None


class Elsewhere(TypedDict):
    difference: Difference
    interval: Interval


class BaseForm(TypedDict):
    share: Share
    gain_there: Difference
    elsewhere: Elsewhere


class Estimate(TypedDict, total=False):
    base: Required[Share]
    grpo: Required[Share]
    difference: Required[Difference]
    interval: Required[Interval]
    n: Required[Count]
    k: Count


class Tested(TypedDict, total=False):
    """A difference between two cells on the same problems."""

    difference: Required[Difference]
    interval: Required[Interval]
    n: Required[Count]
    p: Share | None
    holm_p: Share | None
    comparisons: Count
    margin: Share
    verdict: str
    needed_problems: dict[str, Any] | None


class Survival(Tested, total=False):
    needed_problems: Count | None  # type: ignore[misc]


class Gain(Tested, total=False):
    test: str
    mcnemar_p: Share | None
    discordant: Required[tuple[Count, Count]]
    disagreement: Share
    minimum_detectable_effect: Required[Figure]
    base_form: BaseForm | None
    pass_at_k: dict[str, Estimate | None]
    maj_at_k: Estimate | None
    variance: dict[str, Figure] | None


class Finding(TypedDict, total=False):
    key: Required[str]
    text: Required[str]


class Hygiene(TypedDict, total=False):
    limits: dict[str, Figure]
    cells: dict[str, dict[str, list[Finding]]]
    undecided: dict[str, dict[str, tuple[Count, Count]]]
    refused: dict[str, dict[str, list[str]]]


class Matrix(TypedDict):
    base: dict[str, Measured]
    grpo: dict[str, Measured]


class Evaluation(TypedDict, total=False):
    matrix: Required[Matrix]
    gain: Required[dict[str, Gain]]
    gain_survival: Required[dict[str, Survival]]
    quantization_loss: Required[dict[str, Tested]]
    conclusion: Required[str]
    n: Required[Count]
    hygiene: Hygiene
    task: str | None
    scoring: str
    problems_hash: str
    samples_per_problem: Count
    reference: str
    minimum_detectable_effect: Figure
    trained_policy: str
    trained_for: str | None
    base_storage: str
    into: Literal["dequantized", "original"]
    base_hash: str | None
    adapter_version: Count | None
    adapter_hash: str | None
    data: dict[str, Any] | None
    eval: dict[str, Any] | None
    reward_options: dict[str, Any]
    engine: str
    compute_dtype: str
    max_new_tokens: Count
    temperature: Figure
    samples: Count
    seed: int
    bootstrap_samples: Count
    versions: dict[str, str | None]
    date: str
    command: list[str]


class CellHeader(TypedDict, total=False):
    identity: Required[dict[str, Any]]
    records: Required[str]
    engine: Required[str]
    compute_dtype: Required[str]
    seconds: Required[Time]
    engine_facts: dict[str, Any]
    date: str


class ScoredCompletion(TypedDict, total=False):
    problem_id: Required[str]
    completion: Required[str]
    tokens: Required[Count]
    ended: Required[bool]
    hit_max_tokens: Required[bool]
    parsed: Required[bool]
    answer: Required[str | None]
    gold: Required[str]
    correct: Required[bool | None]
    correct_strict: Required[bool | None]
    prompt_leak: Required[bool]
    sample: Count
    reward: Figure | None


class Endpoint(TypedDict, total=False):
    deployed: str
    n: Count
    cell: dict[str, Any]
    compared: Elsewhere | None
    not_compared: str | None
    out_of_limits: list[str]
    command: list[str]
    versions: dict[str, str | None]


class Load(TypedDict, total=False):
    """One concurrency of a serving benchmark."""

    batch: Required[Count]
    requests: Count
    tokens_per_s: Required[Figure]
    ttft_p50_s: Required[Time]
    ttft_p95_s: Required[Time]
    latency_p50_s: Required[Time]
    latency_p95_s: Required[Time]
    itl_p50_s: Required[Time | None]


class Served(TypedDict, total=False):
    bytes: Required[Count]
    batches: Required[list[Load]]
    start_s: Time | None
    weights_gib: Figure | None
    kv_cache_gib: Figure | None
    notes: list[str] | None


class Serving(TypedDict, total=False):
    formats: Required[dict[str, Served]]
    failed: Required[dict[str, dict[str, str | None]]]
    versions: dict[str, str | None]
    prompt_tokens: Count
    new_tokens: Count
    command: list[str]


class HarnessScore(TypedDict, total=False):
    task: Required[str]
    filter: Required[str]
    accuracy: Required[Share]
    interval: Required[tuple[Share, Share]]
    n: Required[Count]
    num_fewshot: Count | None
    difference: Elsewhere | None


class OwnScore(TypedDict):
    accuracy: Share
    interval: tuple[Share, Share]


class HarnessCell(TypedDict, total=False):
    policy: Required[str]
    format: Required[str]
    ours: Required[OwnScore]
    n: Required[Count]
    harness: Required[list[HarnessScore]]
    differences: Required[dict[str, list[str]]]
    command: list[str]


class LmEval(TypedDict):
    cells: dict[str, HarnessCell]


class HarnessResults(TypedDict):
    results: dict[str, dict[str, Any]]


class HarnessSample(TypedDict):
    doc: dict[str, Any]
    filter: str
    exact_match: Share


class BeforeAfter(TypedDict, total=False):
    base: Figure | None
    grpo: Figure | None


class StoredLayer(TypedDict, total=False):
    error: BeforeAfter | None
    snr: Figure | None
    retained: Figure | None
    control_error: Figure | None


class Layer(TypedDict, total=False):
    name: Required[str]
    shape: list[Count]
    relative_update: Figure | None
    kurtosis: BeforeAfter | None
    outlier_fraction: BeforeAfter | None
    formats: dict[str, StoredLayer]


class Distance(TypedDict):
    kl: Figure
    top1: Share


class Diagnostics(TypedDict, total=False):
    layers: Required[list[Layer]]
    summary: dict[str, StoredLayer]
    verdict: list[str]
    tokens: dict[str, Distance]
    command: list[str]


AGAIN = "Measure it again (eval/README.md)."
EVALUATION = FileKind("the result of an evaluation", Evaluation, "Make it again with python -m eval --run RUN.")
CELL = FileKind("the header of a cell", CellHeader, AGAIN)
RECORDS = FileKind("a completion of an evaluation", ScoredCompletion, AGAIN)
ENDPOINT = FileKind("a measured endpoint", Endpoint, AGAIN)
SERVING = FileKind("the result of a serving benchmark", Serving, AGAIN)
LM_EVAL = FileKind("a comparison with lm_eval", LmEval, AGAIN)
HARNESS_RESULTS = FileKind("a results file of lm_eval (results_<date>.json)", HarnessResults, AGAIN, is_foreign=True)
HARNESS_SAMPLES = FileKind("a sample of lm_eval", HarnessSample, AGAIN, is_foreign=True)
DIAGNOSTICS = FileKind("the result of diagnostics", Diagnostics, "Make it again with python -m merge diagnose.")
