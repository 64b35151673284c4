"""From a configuration to the command line of every replica, and what is refused before anything starts."""

import json
import os
import shlex
import socket
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from kit.core.config.load import config_from_dict, load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.run_directory import write_json, write_manifest
from kit.core.run_files import read_json
from kit.rollout.replica import log_name
from launch import server, vllm_command
from launch.vllm_command import Installed, Plan, check_base, check_ports, installed_vllm, plans
from tests.conftest import CONFIG

CUDA, CPU = Installed("0.26.0", False), Installed("0.31.0", True)
ADAPTER, ASLEEP = {"sync": "adapter"}, {"sleep": True, "nf4_copy": "host"}
TWO = ["http://127.0.0.1:8000", "http://127.0.0.1:8001"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("VLLM_API_KEY", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "VLLM_NO_USAGE_STATS"):
        monkeypatch.delenv(name, raising=False)


def config(**groups) -> Config:
    """A configuration of a server run; keyword `server={...}` and the like change its groups."""
    values = {
        "run": {"name": "x", "seed": 3},
        "model": {"id": "org/m"},
        "policy": {"lora_rank": 16},
        "rollout": {"backend": "server", "max_prompt_length": 100, "max_completion_length": 28},
        "server": {},
        "data": {"path": "d"},
        "train": {"max_steps": 1},
    }
    for group, changes in groups.items():
        values[group] = values[group] | changes
    return config_from_dict(values)


def only(found: list[Plan]) -> str:
    (plan,) = found
    return " ".join(plan.command[1:])


def test_a_default_start_serves_fp8_by_remerge_with_the_kits_routes():
    command = only(plans(config(), CUDA, ["0"]))
    for part in (
        "-m vllm.entrypoints.openai.api_server --model",
        "models/bases/m --host 127.0.0.1 --port 8000",
        "--dtype bfloat16",
        "--max-model-len 129",
        "--max-num-seqs 256",
        "--tensor-parallel-size 1",
        "--kv-cache-dtype auto",
        "--quantization fp8_per_channel",
        "--gpu-memory-utilization 0.9",
        "--worker-extension-cls kit.rollout.server.remerge.Remerge",
        "--logprobs-mode processed_logprobs",
        "--generation-config vllm",
        "--middleware kit.rollout.server.endpoint.RolloutEndpoint",
        "--seed 3",
    ):
        assert part in command, part
    for part in ("--enable-lora", "--enforce-eager", "--enable-sleep-mode", "--kv-cache-memory-bytes", "--api-key"):
        assert part not in command


@pytest.mark.parametrize(
    ("groups", "there", "absent"),
    [
        ({"server": {"weights": "bf16"}}, [], ["--quantization"]),
        ({"server": {"weights": "fp8_per_tensor", "kv_cache": "fp8"}}, ["fp8_per_tensor", "--kv-cache-dtype fp8"], []),
        ({"server": {"kv_cache_gib": 2.5}}, ["--kv-cache-memory-bytes 2684354560"], []),
        ({"server": ASLEEP | {"enforce_eager": True}}, ["--enable-sleep-mode", "--enforce-eager"], []),
        ({"rollout": ADAPTER}, ["--enable-lora --max-lora-rank 16 --max-loras 2"], ["remerge"]),
        ({"rollout": ADAPTER, "policy": {"lora_rank": 20}}, ["--max-lora-rank 32"], []),
        ({"rollout": ADAPTER, "policy": {"lora_rank": 1}}, ["--max-lora-rank 1 "], []),
        # vLLM compares last names and leaves any other unserved in silence.
        (
            {"rollout": ADAPTER, "policy": {"target_modules": ["q_proj", "mlp.down_proj", "layers.1.mlp.down_proj"]}},
            *(["--lora-target-modules down_proj q_proj --logprobs-mode"], []),
        ),
        ({"model": {"dtype": "float32"}, "server": {"weights": "bf16"}}, ["--dtype float32"], []),
        ({"model": {"dtype": "float32"}}, ["--dtype bfloat16"], []),
        ({"model": {"dtype": "float16"}, "server": {"weights": "bf16"}}, ["--dtype float16"], ["--quantization"]),
        ({"model": {"dtype": "float16"}}, ["--dtype float16", "fp8_per_channel"], []),
        ({"server": {"weights": "fp8_per_tensor"}}, [], ["--linear-backend"]),
        ({"server": {"weights": "fp8_per_tensor", "force_w8a16": True}}, ["--linear-backend marlin"], []),
        (
            {"server": {"vllm": {"max_num_batched_tokens": 8192, "async_scheduling": True, "enable_x": False}}},
            *(["--max-num-batched-tokens 8192", "--async-scheduling", "--no-enable-x"], ["True"]),
        ),
        (
            {"server": {"vllm": {"compilation_config": {"a": 1}, "lora_dtype": None}}},
            *(['--compilation-config {"a": 1}'], ["lora-dtype"]),
        ),
    ],
)
def test_keys_become_the_flags_that_vllm_knows(groups, there, absent):
    command = only(plans(config(**groups), CUDA, ["0"])) + " "
    assert [part for part in there if part not in command] == []
    assert [part for part in absent if part in command] == []


@pytest.mark.parametrize("sync", ["adapter", "remerge"])
def test_vllms_own_parser_accepts_the_command(sync):
    parse = pytest.importorskip("vllm.entrypoints.launchers.cli_args").make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    server_keys = ASLEEP | {"kv_cache_gib": 1, "vllm": {"max_num_batched_tokens": 512}}
    (plan,) = plans(config(rollout={"sync": sync}, server=server_keys), CUDA, ["0"])
    parsed = parse(FlexibleArgumentParser()).parse_args(plan.command[3:])
    assert (parsed.max_model_len, parsed.middleware) == (129, ["kit.rollout.server.endpoint.RolloutEndpoint"])
    assert bool(parsed.enable_lora) == (sync == "adapter")


def test_trls_parser_makes_the_same_server_of_the_line_to_start_it_by_hand():
    vllm_serve = pytest.importorskip("trl.scripts.vllm_serve")
    keys = {"enforce_eager": True, "vllm": {"max_num_batched_tokens": 512}}
    (plan,) = plans(config(rollout=ADAPTER, server=keys), CUDA, ["0"])
    line = shlex.split(plan.by_hand)
    place = line.index("trl")
    assert {"CUDA_VISIBLE_DEVICES=0", f"PYTHONPATH={vllm_command.ROOT}"} <= {*line[:place]}
    parsed, rest = vllm_serve.make_parser().parse_args_and_config(line[place + 2 :], return_remaining_strings=True)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = vllm_serve.build_command(parsed, rest)
    parse = make_arg_parser(FlexibleArgumentParser()).parse_args
    # `vllm serve MODEL …` takes the model as its first word.
    theirs = parse(["--model", *command[command.index("serve") + 1 :]])
    ours = parse(plan.command[3:])
    differing = {key for key in vars(ours) if getattr(ours, key) != getattr(theirs, key)}
    # What TRL's own weight sync needs and the kit's does not; vLLM's own model code, which "auto" prefers too.
    assert differing == {"weight_transfer_config", "max_logprobs", "enable_scale_out", "model_impl"}


def test_replicas_get_their_own_gpus_ports_logs_and_random_numbers(tmp_path):
    groups = {"rollout": {"server_urls": TWO}, "server": {"tensor_parallel": 2}, "run": {"output_dir": str(tmp_path)}}
    first, second = plans(config(**groups), CUDA, ["4", "5", "6", "7"])
    assert (first.gpus, second.gpus) == (("4", "5"), ("6", "7"))
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert (first.log, second.log) == (tmp_path / "logs/server-8000.log", tmp_path / "logs/server-8001.log")
    assert (first.options["seed"], second.options["seed"]) == (3, 4)


@pytest.mark.parametrize("url", ["http://10.0.0.7:8000", "http://node-b:8000", "http://[2001:db8::1]:8000"])
def test_replicas_of_other_machines_write_other_logs_into_a_shared_run_directory(url):
    assert log_name("http://127.0.0.1:8000") == "server-8000.log"
    named = log_name(url)
    assert named != log_name("http://10.0.0.8:8000") and named.endswith("-8000.log") and ":" not in named


def test_a_cpu_server_gets_its_kv_cache_by_environment():
    (plan,) = plans(config(server={"kv_cache_gib": 0.5}), CPU, None)
    assert plan.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert not {"gpu_memory_utilization", "kv_cache_memory_bytes"} & plan.options.keys()


@pytest.mark.parametrize(
    ("groups", "vllm", "gpus", "reason"),
    [
        ({"rollout": {"server_urls": TWO}}, CUDA, ["0"], "need 2 GPUs, CUDA shows 1 (0)"),
        ({"server": {"tensor_parallel": 4, "gpus": [0, 1]}}, CUDA, None, "need 4 GPUs, server.gpus lists 2 (0, 1)"),
        ({}, CUDA, [], "need 1 GPUs, CUDA shows 0 (none)"),
        ({}, CUDA, None, "no GPU was found"),
        ({"server": {"gpus": [0]}}, CPU, None, "the installed vLLM is for CPUs"),
        ({"server": {"weights": "fp8_per_tensor"}}, CPU, None, "Use fp8_per_channel or bf16"),
        ({"server": {"weights": "fp8_per_block"}}, CPU, None, "no kernel in vLLM for CPUs"),
        ({"server": {"sleep": True}}, CPU, None, "cannot sleep"),
        ({"rollout": {"sync": "adapter"}, "policy": {"lora_rank": 513}}, CUDA, ["0"], "largest vLLM serves, 512"),
        ({"server": {"max_num_seqs": 4}}, CUDA, ["0"], "below rollout.group_size (8)"),
        ({"server": {"gpu_memory_utilization": 90}}, CUDA, ["0"], "at most 1"),
        ({"server": {"kv_cache_gib": -1}}, CUDA, ["0"], "server.kv_cache_gib (-1.0) must be above 0"),
        ({"server": {"sleep": True}}, CUDA, ["0"], "Set server.nf4_copy to host"),
        ({"rollout": {"server_urls": TWO}, "server": {"gpus": [1, 1]}}, CUDA, None, "must name every GPU once"),
        *(
            ({"server": {"vllm": {key: 1}}}, CUDA, ["0"], reason)
            for key, reason in {
                **{"port": "rollout.server_urls sets", "max-lora-rank": "policy.lora_rank sets"},
                **{"no-enable-lora": "rollout.sync sets", "api_key": "VLLM_API_KEY"},
                "hf-overrides.rope_theta": "determines the served weights",
                "quantization_config": "which remerge repeats",
                "enable-eplb": "experts would move between workers",
                "enable-return-routed-experts": "rollout.routing sets",
                "ssl_keyfile": "the trainer asks http://host:port",
            }.items()
        ),
        ({"rollout": {"server_urls": []}}, CUDA, ["0"], "rollout.server_urls is empty"),
        ({"rollout": {"server_urls": [TWO[0], TWO[0]]}}, CUDA, ["0", "1"], "port 8000 twice"),
        *(
            ({"rollout": {"server_urls": [url]}}, CUDA, ["0"], "http://h")
            for url in ("http://h", "https://h:1", "http://h:1/v1", "http://h:99999")
        ),
        ({"server": {"weights": "fp8_per_tensor", "force_w8a16": True}}, CPU, None, "no Marlin kernels"),
        ({"server": {"vllm": {"linear_backend": "marlin"}}}, CUDA, ["0"], "which server.force_w8a16 sets"),
        ({"server": {"host": "0.0.0.0"}}, CUDA, ["0"], "open to the network, without a key"),
        ({"rollout": {"server_urls": ["http://10.0.0.7:8000"]}}, CUDA, ["0"], "VLLM_API_KEY"),
    ],
)
def test_what_cannot_work_is_refused_with_the_key_to_change(groups, vllm, gpus, reason):
    with pytest.raises(BadInput) as refused:
        plans(config(**groups), vllm, gpus)
    assert reason in str(refused.value)


# Other weights, ids, sampling or routes than the trainer's, or more than one process that keeps the version.
REFUSED = "config api_server_count data_parallel_size dp pipeline_parallel_size pp logits_processors lora_modules"
REFUSED += " load_format hf_overrides hf_config_path quantization_config tokenizer tokenizer_mode tokenizer_revision"
REFUSED += " skip_tokenizer_init speculative_config spec_method spec_model spec_tokens uds root_path ssl_keyfile"
REFUSED += " ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh q tp max_cpu_loras api_key"


def test_a_flag_that_the_kit_sets_or_that_breaks_the_routes_is_refused_in_every_spelling():
    every = {"server": {"sleep": True, "nf4_copy": "host", "enforce_eager": True, "kv_cache_gib": 1}}
    own = {"disable_uvicorn_access_log"}  # of the log alone
    names = {*REFUSED.split()}
    for changes in ({}, {"rollout": {"sync": "adapter"}, "policy": {"target_modules": ["q_proj"]}}):
        names |= plans(config(**every, **changes), CUDA, ["0"])[0].options.keys()
    for name in sorted(names - own):
        for key in (name, name.replace("_", "-"), f"no-{name}", f"{name}.part"):
            with pytest.raises(BadInput, match=f"server.vllm names {key}"):
                plans(config(server={"vllm": {key: 1}}), CUDA, ["0"])


def test_every_problem_is_listed_at_once():
    groups = {"server": {"weights": "fp8_per_block", "sleep": True, "vllm": {"port": 1}}}
    with pytest.raises(BadInput) as refused:
        plans(config(**groups), CPU, None)
    assert len(str(refused.value).splitlines()) == 3


def test_an_open_address_is_fine_with_a_key_which_no_command_line_shows(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush-hush")
    (plan,) = plans(config(server={"host": "0.0.0.0"}), CUDA, ["0"])
    assert "--host 0.0.0.0" in " ".join(plan.command)
    assert "hush" not in " ".join(plan.command) + plan.by_hand + str(plan.environment)
    (plan,) = plans(config(rollout={"server_urls": ["http://localhost:8000"]}), CUDA, ["0"])
    assert plan.host == "127.0.0.1", "localhost listens on the loopback only"


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput, match=f"port {taken.getsockname()[1]} of {url}"):
            check_ports(plans(config(rollout={"server_urls": [url]}), CUDA, ["0"]))


@pytest.mark.parametrize(
    ("server", "sync", "share"),
    [
        ({}, "remerge", 0.846),  # 1 GiB of copy and 0.7 to fold in, of 32 GiB
        ({"tensor_parallel": 2}, "remerge", 0.862),
        ({"nf4_copy": "host"}, "remerge", 0.878),
        ({"kv_cache_gib": 2}, "remerge", 0.9),
        ({}, "adapter", 0.9),
    ],
)
def test_the_nf4_copy_is_inside_the_servers_share_of_the_card(tmp_path, server, sync, share):
    base = tmp_path / "base"
    (base / "nf4").mkdir(parents=True)
    with open(base / "nf4" / "model.safetensors", "wb") as file:
        file.truncate(1 << 30)
    groups = {"server": {"base": str(base), **server}, "rollout": {"sync": sync}, "policy": {"target_modules": ["q"]}}
    (plan,) = plans(config(**groups), CUDA, ["0", "1"], card_gib=32.0)
    assert plan.options["gpu_memory_utilization"] == pytest.approx(share, abs=2e-3)


def test_a_card_without_room_for_the_copy_is_refused(tmp_path):
    (tmp_path / "nf4").mkdir()
    with open(tmp_path / "nf4" / "model.safetensors", "wb") as file:
        file.truncate(30 << 30)
    with pytest.raises(BadInput, match=r"\(30.0 GiB\).*server.nf4_copy"):
        plans(config(server={"base": str(tmp_path)}), CUDA, ["0"], card_gib=24.0)


@pytest.mark.parametrize("host", ["203.0.113.9", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_not_started_here(monkeypatch, host):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with pytest.raises(BadInput, match="is not an address of this machine"):
        check_ports(plans(config(rollout={"server_urls": [f"http://{host}:8000"]}), CUDA, ["0"]))


@pytest.mark.parametrize("has_suffix", [True, False])
@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.25.9", False), ("0.26.0", True), ("0.31.4+cu129", True), ("0.32.0", False), ("dev", False)],
)
def test_only_tested_versions_of_vllm_are_started(monkeypatch, version, fits, has_suffix):
    monkeypatch.setattr("launch.vllm_command.importlib.util.find_spec", lambda name: has_suffix or None)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"vllm": ["vllm"]})
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if fits:
        assert installed_vllm() == Installed(version, False, has_suffix=has_suffix)
    else:
        with pytest.raises(BadInput, match=r"from 0\.26, below 0\.32"):
            installed_vllm()


def test_without_vllm_the_installation_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "packages_distributions", dict)
    with pytest.raises(BadInput, match="vllm is not installed"):
        installed_vllm()


@pytest.fixture
def base(tmp_path):
    """A whole base directory of the configuration above."""
    directory = tmp_path / "base"
    (directory / "nf4").mkdir(parents=True)
    (directory / "nf4" / "index.json").write_text("{}")
    quantization = {"type": "nf4", "storage_dtype": "bfloat16", "double_quantization": True}
    facts = {"hash": "ab", "model": "org/m", "revision": None, "quantization": quantization}
    write_json(directory / "base.json", facts | {"quantized": [], "tensors": {}})
    write_manifest(directory, "checkpoint", base_hash="ab")
    return directory


@pytest.fixture
def check(base):
    """`check(**groups)`: check_base of the configuration with these changes."""

    def make(server_base: Path = base, **groups) -> dict:
        return check_base(config(**groups, server={"base": str(server_base)}), "run.yaml")

    return make


def rewrite(base: Path, **facts) -> None:
    write_json(base / "base.json", read_json(base / "base.json") | facts)
    write_manifest(base, "checkpoint", base_hash="ab")


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({"model": {"id": "org/other"}}, "its model is 'org/m', the configuration says 'org/other'"),
        ({"model": {"id": "org/m", "dtype": "float32"}}, "its model.dtype is 'bfloat16'"),
        ({"policy": {"double_quantization": False}}, "policy.double_quantization"),
        ({"model": {"id": "org/m", "revision": "v2"}}, "model.revision"),
    ],
)
def test_another_base_is_refused_with_what_differs(check, groups, reason):
    assert check()["base_hash"] == "ab"
    with pytest.raises(BadInput) as refused:
        check(**groups)
    assert reason in str(refused.value) and "python -m merge base --config run.yaml" in str(refused.value)


@pytest.mark.parametrize(("stored", "wanted"), [("fp8", "nf4"), ("nf4", "fp8"), ("nf4", "none")])
def test_a_base_in_another_storage_is_refused(base, check, stored, wanted):
    rewrite(base, quantization={"storage_dtype": "bfloat16", "double_quantization": True, "type": stored})
    with pytest.raises(BadInput, match=f"its policy.quantization is '{stored}', the configuration says '{wanted}'"):
        check(policy={"quantization": wanted})


@pytest.mark.parametrize(("trained", "fits"), [("ab", True), ("cd", False), (None, True)])
def test_a_local_models_base_is_the_one_that_the_run_was_started_on(base, tmp_path, trained, fits):
    """By its content: a path differs from machine to machine."""
    (tmp_path / "run").mkdir()
    if trained:
        write_json(tmp_path / "run" / "base.json", {"hash": trained})
    given = config(
        server={"base": str(base)}, run={"output_dir": str(tmp_path / "run")}, model={"path": "/elsewhere/m"}
    )
    given.model.id = None
    if fits:
        assert check_base(given, "run.yaml")["base_hash"] == "ab"
    else:
        with pytest.raises(BadInput, match=r"its base hash is ab, that of the run .* is cd"):
            check_base(given, "run.yaml")


def test_an_adapter_of_all_layers_gets_the_layers_of_the_base_directory(base):
    """vLLM would give the embeddings and the output layer slots too."""
    rewrite(base, quantized=["model.layers.0.q_proj", "model.layers.1.q_proj", "model.x.up_proj"])
    given = config(server={"base": str(base)}, rollout={"sync": "adapter"})
    assert plans(given, CUDA, ["0"])[0].options["lora_target_modules"] == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("quant_cfg", "weights", "gib"), [("fp8", "fp8_per_channel", 1.1), ("w4a16", "bf16", 0.7), (None, "bf16", 0.7)]
)
def test_what_a_fold_takes_is_left_beside_the_servers_share(quant_cfg, weights, gib):
    """Weights that vLLM's FP8 is given are float32."""
    given = config(server={"weights": weights, "base": "/none"}, policy={"quant_cfg": quant_cfg})
    share = plans(given, CUDA, ["0"], card_gib=32.0)[0].options["gpu_memory_utilization"]
    assert share == pytest.approx(0.9 - gib / 32, abs=6e-4)


def test_a_base_that_is_missing_cut_or_without_its_copy_names_the_command_that_writes_it(base, check, tmp_path):
    command = "python -m merge base --config run.yaml"
    with pytest.raises(BadInput, match=f"absent does not exist.*{command}"):
        check(tmp_path / "absent")
    (base / "nf4" / "index.json").rename(base / "kept.json")
    write_manifest(base, "checkpoint", base_hash="ab")
    with pytest.raises(BadInput, match="no NF4 copy"):
        check()
    assert check(rollout=ADAPTER)
    (base / "kept.json").write_text("{} ")
    with pytest.raises(BadInput, match=f"not whole: kept.json has 3 bytes.*{command}"):
        check()


INFO = {"base_hash": "ab", "logprobs_mode": "processed_logprobs", "max_model_len": 128, "sync": ["remerge"]}
INFO |= {"weights": "fp8_per_channel"}


def differences(changes: dict, **groups) -> list[str]:
    return server.differences(config(**groups), {"base_hash": "ab"}, INFO | changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("quant_cfg", "fp8"), ("base_hash", "cd"), ("logprobs_mode", "raw_logprobs"), ("max_model_len", 127)),
        *(("sync", []), ("weights", "bf16")),
    ],
)
def test_an_answer_that_does_not_fit_the_run_says_what_differs(key, value):
    (wrong,) = differences({key: value, "refused": {"remerge": "no copy"}})
    assert key != "sync" or "no copy" in wrong
    assert differences({}) == differences({"quant_cfg": "fp8"}, policy={"quant_cfg": "fp8"}) == []


@pytest.mark.parametrize(
    ("groups", "weights"),
    [
        ({"server": {"weights": "bf16"}}, "bf16"),
        ({"server": {"weights": "bf16"}, "model": {"dtype": "float32"}}, "float32"),
        ({"model": {"dtype": "float32"}}, "fp8_per_channel"),
    ],
)
def test_weights_without_quantization_are_compared_by_their_dtype(groups, weights):
    for served in ("bf16", "float32", "fp8_per_channel"):
        assert bool(differences({"weights": served}, **groups)) == (served != weights)


@pytest.fixture
def detached(tmp_path, monkeypatch):
    """A configuration, and a way to act as one of several machines that share its run directory."""
    shared = config(run={"output_dir": str(tmp_path / "run")})
    (tmp_path / "run" / "logs").mkdir(parents=True)
    ended = []
    monkeypatch.setattr(server, "started_at", lambda pid: 7)
    monkeypatch.setattr(server, "stop_groups", lambda groups: ended.extend(groups) or [])

    def on(machine: str, *pids: int) -> list[int]:
        monkeypatch.setattr(server.socket, "gethostname", lambda: machine)
        plan = plans(shared, CUDA, ["0"])[0]
        if pids:
            server.remember(shared, [server._state(plan, pid) for pid in pids])
        return ended

    return shared, on


def test_a_second_detached_start_adds_to_what_the_first_left(detached, monkeypatch):
    shared, on = detached
    on("a", 11)
    monkeypatch.setattr(server, "started_at", lambda pid: None if pid == 11 else 7)
    on("a", 12)  # 11 has ended meanwhile
    on("a", 13)
    monkeypatch.setattr(server, "started_at", lambda pid: 7)
    assert server.stop(shared) == 0 and on("a") == [12, 13]


def test_stop_ends_this_machines_replicas_and_names_the_others(detached, capsys):
    shared, on = detached
    on("a", 11)
    on("b", 22)
    assert server.stop(shared) == 0 and on("b") == [22], "process 11 here is somebody else's"
    assert "http://127.0.0.1:8000 on a" in capsys.readouterr().out
    with pytest.raises(BadInput, match=r"no detached replica of this machine \(b\).*http://127.0.0.1:8000 on a"):
        server.stop(shared)
    assert server.stop(on("a") and shared) == 0 and on("a") == [22, 11]


@pytest.fixture
def command(base, tmp_path, monkeypatch):
    """`command(*words)`: the command in this process on a configuration in run.yaml, its output in `tmp_path / x`."""
    values = {"run": {"name": "x", "output_dir": str(tmp_path / "x")}, "model": {"id": "org/m"}}
    values |= {"train": {"max_steps": 1}, "server": {"base": str(base)}, "data": {"path": "d"}}
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    monkeypatch.setattr(server, "installed_vllm", lambda: CPU)

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["server", *words])
        return server.main()

    return run


def test_a_dry_run_says_what_would_be_served_and_starts_nothing(command, tmp_path, capsys):
    assert command("start", "--config", str(tmp_path / "run.yaml"), "--dry_run") == 0
    said = capsys.readouterr().out
    assert "sync by remerge" in said and "trl vllm-serve --model" in said and "VLLM_SERVER_DEV_MODE" in said
    assert not (tmp_path / "x").exists()


def test_the_command_to_stop_a_detached_start_ends_that_run_and_no_other(command, tmp_path, monkeypatch, capsys):
    def ready(found: list[Plan], detach: bool) -> MagicMock:
        """Replicas that started and are ready, each of them this process."""
        found[0].log.parent.mkdir(parents=True)
        replicas = MagicMock(running=[SimpleNamespace(plan=found[0], process=SimpleNamespace(pid=os.getpid()))])
        replicas.__enter__.return_value = replicas
        return replicas

    ended = []
    monkeypatch.setattr(server, "Replicas", ready)
    monkeypatch.setattr(server, "stop_groups", lambda groups: ended.extend(groups) or [])
    output = ["--run.output_dir", str(tmp_path / "another run")]
    assert command("--config", str(tmp_path / "run.yaml"), *output, "--detach") == 0
    told = capsys.readouterr().out.partition("end them with: ")[2]
    assert command(*shlex.split(told)[3:]) == 0 and ended == [os.getpid()]


@pytest.mark.parametrize(("shards", "gib"), [(1, 1.75), (2, 0.875)])
def test_a_fold_of_a_layers_experts_is_left_beside_the_servers_share(tmp_path, shards, gib):
    matrices = [
        f"model.layers.0.mlp.experts.{n}.{part}_proj.weight" for n in range(2) for part in ("gate", "up", "down")
    ]
    size, sizes = 8192 * 8192 * 2, {"dtype": "BF16", "shape": [8192, 8192]}
    header = {name: sizes | {"data_offsets": [at * size, (at + 1) * size]} for at, name in enumerate(matrices)}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:  # sparse: no block of the weights is written
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(matrices) * size)
    given = config(server={"base": str(tmp_path), "tensor_parallel": shards, "nf4_copy": "host"})
    share = plans(given, CUDA, ["0", "1"], card_gib=32.0)[0].options["gpu_memory_utilization"]
    assert share == pytest.approx(0.9 - gib / 32, abs=6e-4)


def test_routers_stay_unquantized_and_experts_are_returned_where_they_are_asked_for(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    block = "model.layers.0.mlp"
    quantized = [f"{block}.experts.0.gate_proj", f"{block}.shared_expert.up_proj", "model.layers.0.self_attn.q_proj"]
    others = [f"{block}.gate.weight", f"{block}.shared_expert_gate.weight", "lm_head.weight", "model.norm.weight"]
    names = [*(f"{name}.weight" for name in quantized), *others]
    facts = {"hash": "ab", "quantized": quantized, "tensors": dict.fromkeys(names, "a hash")}
    facts["quantization"] = {"type": "nf4", "storage_dtype": "bfloat16"}
    (base / "base.json").write_text(json.dumps(facts))
    routers = [f"{block}.gate", f"{block}.shared_expert_gate"]
    assert vllm_command.router_names(base) == routers and vllm_command.router_names(tmp_path) == []
    keys = [f"--server.base={base}", "--rollout.backend=server", "--rollout.routing=replay"]
    config = load_config(CONFIG, keys)
    options = vllm_command._options(config, Installed("0.31.0", False))
    assert options["quantization_config"] == {"ignore": routers} and options["enable_return_routed_experts"]
    assert vllm_command._environment(config, Installed("0.31.0", False), None)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in vllm_command._environment(config, Installed("0.26.0", False), None)
    faults = vllm_command._unservable(config, Installed("0.31.0", True))
    assert any("no kernel for experts" in fault for fault in faults) and any(
        "needs Triton" in fault for fault in faults
    )
    plain = vllm_command._options(
        load_config(CONFIG, [keys[0], keys[1], "--server.weights=bf16"]), Installed("0.31.0", False)
    )
    assert "quantization_config" not in plain and "enable_return_routed_experts" not in plain


def test_of_a_vision_language_base_only_the_language_model_is_served(tmp_path):
    base = {"server": {"base": str(tmp_path)}}
    write_json(tmp_path / "config.json", {"model_type": "qwen3"})
    assert "--language-model-only" not in only(plans(config(**base), CPU, None))
    write_json(tmp_path / "config.json", {"model_type": "qwen3_vl"})
    assert "--language-model-only" in only(plans(config(**base), CPU, None))
    with pytest.raises(BadInput, match=r"wraps its language model \(qwen3_vl\).*Set rollout.sync to remerge"):
        plans(config(**base, rollout=ADAPTER), CPU, None)
    write_json(tmp_path / "config.json", {"model_type": "qwen3_5"})
    with pytest.raises(BadInput, match="in_proj_qkv of qwen3_5"):
        plans(config(server=base["server"] | {"tensor_parallel": 2}), CUDA, ["0", "1"])
