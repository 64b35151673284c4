"""Every file in accelerate_configs is one that the pinned accelerate understands, key by key."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from tests import processes

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "accelerate_configs").rglob("*.y*ml"))
NESTED = {"deepspeed_config": "", "fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}


def resolve(path: Path):
    """The arguments that `accelerate launch` derives from a config file; ValueError on an unknown key.

    accelerate itself rejects unknown keys at the top level only: a nested one is set and never read, so nested keys
    are held against the launcher's own options.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parser = launch_command_parser()
    known = set(vars(parser.parse_args(["script.py"])))
    arguments = parser.parse_args(["--config_file", str(path), "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    for group, prefix in NESTED.items():
        keys = yaml.safe_load(path.read_text()).get(group) or {}
        options = {key if key.startswith(prefix) else prefix + key for key in keys}
        if unknown := options - known:
            raise ValueError(f"{path.name}: {group} had unknown keys {sorted(unknown)}")
    return arguments


def announces(path: Path) -> dict[str, str]:
    """What `accelerate launch` tells the processes, by its environment, of a config that splits something."""
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    arguments = resolve(path)
    arguments.deepspeed_fields_from_accelerate_config = ""  # the launcher fills it after this point
    found = prepare_deepspeed_cmd_env(arguments)[1] if arguments.use_deepspeed else prepare_multi_gpu_env(arguments)
    return {name: value for name, value in found.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def test_the_documented_configs_are_all_there():
    names = {"cpu", "one_gpu", "ddp", "zero2", "zero3", "fsdp2", "two_nodes"}
    assert {path.stem for path in CONFIGS} == names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_every_key(path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    arguments = resolve(path)
    kind = path.stem
    assert arguments.num_machines == (2 if kind == "two_nodes" else 1)
    assert arguments.num_processes == {"cpu": 1, "one_gpu": 1, "two_nodes": 16}.get(kind, 8)
    assert bool(arguments.use_cpu) == (kind == "cpu")
    assert arguments.mixed_precision == ("no" if kind == "cpu" else "bf16")
    assert arguments.multi_gpu == (kind in ("ddp", "two_nodes"))
    assert arguments.gpu_ids == ("0" if kind == "one_gpu" else "all")
    assert arguments.use_deepspeed == (kind in ("zero2", "zero3"))
    if arguments.use_deepspeed:
        assert arguments.zero_stage == int(kind[-1])
    assert arguments.use_fsdp == (kind == "fsdp2")


@pytest.mark.parametrize(("name", "group"), [("zero2", None), ("zero2", "deepspeed_config"), ("fsdp2", "fsdp_config")])
def test_an_unknown_key_fails(tmp_path, name, group):
    settings = yaml.safe_load((ROOT / f"accelerate_configs/{name}.yaml").read_text())
    (settings[group] if group else settings)["zero_stagee"] = 2
    path = tmp_path / "zero2.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"unknown keys.*zero_stagee"):
        resolve(path)


def test_cpu_config_starts_one_process_without_a_gpu(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import PartialState\n"
        "import os\n"
        "state = PartialState()\n"
        "print('started', state.num_processes, state.device, os.environ['ACCELERATE_MIXED_PRECISION'],"
        " os.environ['OMP_NUM_THREADS'])\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = processes.run([*command, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    assert "started 1 cpu no 1" in done.stdout
