"""Runs of recipes, one after the other in the processes of one launch: imports cost more than a tiny run.

    python -m torch.distributed.run --nproc_per_node 2 tests/smoke/sharded_worker.py PLAN

PLAN is JSON, a list of {"name", "recipe", "environment", "arguments"}; "copy" [from, to] and "remove" a path come
first. At the end of each run a process writes to rank-<n>.jsonl what it holds of the base, what the check of the base
says when a bit of the second process's part has changed, how many micro-batches by tokens its updates so far had, and
how many decoder layers ZeRO-3 held gathered at once.
accelerate 1.15 splits a model on GPUs only. Here it takes two gloo processes on a CPU for GPUs; the rest is its own.
"""

import importlib
import json
import os
import shutil
import sys
import weakref
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def take_cpu_for_gpus() -> None:
    from accelerate import state
    from accelerate.utils import DistributedType

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state.PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)
    partial, whole = state.PartialState.__init__, state.AcceleratorState.__init__

    def start(self, cpu=False, **kwargs):
        partial(self, False, **kwargs)

    def start_whole(self, *args, cpu=False, **kwargs):
        whole(self, *args, cpu=False, **kwargs)

    state.PartialState.__init__, state.AcceleratorState.__init__ = start, start_whole


def parts(model) -> dict:
    """What this process holds of the base by name: its parameters, or its parts of them."""
    from torch.distributed.tensor import DTensor

    held = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            part = getattr(parameter, "ds_tensor", parameter.detach())
            held[name] = part.to_local() if isinstance(part, DTensor) else part
    return held


def change(model) -> None:
    """Turn one bit of the base over, in the second process only."""
    import torch

    if os.environ["RANK"] == "1":
        name = next(name for name in parts(model) if "down_proj" in name)
        parts(model)[name].reshape(-1).view(torch.uint8)[7] ^= 1


def count_micro_batches() -> list[int]:
    """A list that gets the number of micro-batches of every update in this process.

    In the second process every row is one of its own, so that the numbers differ whatever is sampled, unless both
    compute the same packs.
    """
    from kit.train.step import PolicyStep

    plan, counts = PolicyStep.plan, []

    def note(self, inputs: dict) -> list[list[int]]:
        found = plan(self, inputs)
        if os.environ["RANK"] == "1" and self.group is None:
            found = [[row] for rows in found for row in rows]
        counts.append(len(found))
        return found

    PolicyStep.plan = note
    return counts


def count_layers() -> list[int]:
    """A list of the numbers of decoder layers whose base ZeRO-3 holds gathered, whenever it gathers one."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import z3_leaf_module

    fetch, layers, counts = PartitionedParameterCoordinator.fetch_sub_module, weakref.WeakSet(), []

    def is_gathered(layer) -> bool:
        base = [one for one in layer.parameters() if not (one.requires_grad or one.ds_persist)]
        return any(one.ds_status == ZeroParamStatus.AVAILABLE for one in base)

    def fetch_and_count(self, module, forward: bool) -> None:
        fetch(self, module, forward)
        if z3_leaf_module(module):
            layers.add(module)
            counts.append(sum(map(is_gathered, layers)))

    PartitionedParameterCoordinator.fetch_sub_module = fetch_and_count
    return counts


def main() -> None:
    take_cpu_for_gpus()
    import deepspeed
    import torch.distributed
    from accelerate.state import AcceleratorState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    import kit.policy.load
    import kit.train.setup
    import kit.weights.frozen_base
    from kit.core.errors import CheckFailed

    kit.weights.frozen_base.GATHERED_BYTES = 100_000  # several groups of tensors and some alone, as of a large base
    # A helper for CPUs that DeepSpeed compiles as it starts; GPUs have none.
    sys.modules[deepspeed.comm.TorchBackend.__module__].build_shm_op = lambda: None
    plan = Path(sys.argv[1])
    check = kit.policy.load.check_base_unchanged

    def check_and_note(model, facts: dict) -> None:
        check(model, facts)
        note = {"run": sys.argv[0], "hash": facts["hash"], "bytes": sum(part.nbytes for part in parts(model).values())}
        note |= {"micro_batches": [*counts], "layers": [*layers]}
        layers.clear()
        change(model)
        try:
            check(model, facts)
        except CheckFailed as error:
            note["error"] = str(error)
        change(model)
        with open(plan.with_name(f"rank-{os.environ['RANK']}.jsonl"), "a") as file:
            file.write(f"{json.dumps(note)}\n")

    look = kit.train.setup.check_run_directory

    def look_together(*words):
        """Wait for all processes, as a launch of its own does: it starts its process group between this check and the
        run's first file. Without that a late process would find the others' run."""
        found = look(*words)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return found

    kit.train.setup.check_run_directory = look_together
    kit.policy.load.check_base_unchanged = check_and_note
    counts, layers = count_micro_batches(), count_layers()
    for run in json.loads(plan.read_text()):
        os.environ.update(run["environment"])
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        if os.environ["RANK"] == "0" and "copy" in run:
            shutil.copytree(*run["copy"])
            shutil.rmtree(run["remove"])
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        sys.argv = [run["name"], *run["arguments"]]
        importlib.import_module(run["recipe"]).main()


if __name__ == "__main__":
    main()
