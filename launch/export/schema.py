"""Validate an export against verl's own code; launch.export check starts this in verl's environment (.venv-verl).

hydra composes verl's configuration with the overrides of run.sh and rejects unknown keys. Values are checked against
the types of verl's dataclasses, batches against verl's validation. verl's data set reads the parquet files, and its
reward loader loads the rewards. Not covered: Ray, the engines, a GPU.
"""

import contextlib
import copy
import functools
import io
import math
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from omegaconf import DictConfig

PLAIN_TYPES = (int, float, str, bool)
# Empty in verl's schema; their keys belong to the engine and to the chat template.
OPEN_GROUPS = ("actor_rollout_ref.rollout.engine_kwargs.vllm.", "data.apply_chat_template_kwargs.")


class Refused(Exception):
    """Something that verl would reject."""


def words_of(run: Path) -> list[str]:
    """The overrides in run.sh."""
    command = run.read_text().partition("exec ")[2].replace("\\\n", " ")
    words = shlex.split(command)
    if words[:3] != ["python3", "-m", "verl.trainer.main_ppo"] or words[-1] != "$@":
        raise Refused(f"{run} does not end in the command of verl.trainer.main_ppo.")
    return words[3:-1]


@functools.cache
def compose(words: tuple[str, ...]) -> "DictConfig":
    """verl's configuration with the overrides, as its main function receives it."""
    from hydra import compose as compose_config
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose_config("ppo_trainer", overrides=[*words])


def check_words(words: list[str], config: "DictConfig") -> None:
    """Check that no key is new outside verl's open groups and that each value keeps the type of its default."""
    from omegaconf import OmegaConf

    plain = compose(())
    for word in words:
        key = word.partition("=")[0]
        if key.startswith(("+", "~")):
            if not key.startswith("+") or not key[1:].startswith(OPEN_GROUPS):
                raise Refused(f"{key} is added to verl's schema; only {', '.join(OPEN_GROUPS)}… may be filled.")
            continue
        if OmegaConf.is_missing(plain, key):  # rollout.name has no default
            continue
        before, now = OmegaConf.select(plain, key), OmegaConf.select(config, key)
        if not _is_same_kind(before, now):
            raise Refused(f"{key} is {now!r} ({type(now).__name__}), verl's default is {before!r}.")


def _is_same_kind(before: Any, now: Any) -> bool:
    from omegaconf import ListConfig

    if before is None:
        return True  # the dataclass check covers its type
    if isinstance(before, bool) or isinstance(now, bool):
        return isinstance(before, bool) and isinstance(now, bool)
    if isinstance(before, int | float):
        # verl writes the bounds of a mask as "lower_upper".
        return isinstance(now, int | float) or (isinstance(now, str) and "_" in now)
    if isinstance(before, str) and isinstance(now, ListConfig):
        return before == "all-linear"
    return isinstance(now, type(before))


def check_types(config: "DictConfig") -> None:
    """Check that verl's dataclasses accept every group the export writes to, and that each field matches its type."""
    from verl.utils.config import omega_conf_to_dataclass

    for group in (config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm):
        found = list(wrong_types(omega_conf_to_dataclass(group)))
        if found:
            raise Refused("; ".join(found))


def wrong_types(value: Any) -> Iterator[str]:
    """Fields of a dataclass, including nested ones, whose value does not match the annotated plain type.

    A null is skipped: verl's own defaults use it where the annotation does not allow it.
    """
    for name, hint in get_type_hints(type(value)).items():
        entry = getattr(value, name, None)
        if is_dataclass(entry):
            yield from wrong_types(entry)
        elif entry is not None and get_origin(hint) in (None, Union, UnionType):
            allowed = get_args(hint) or (hint,)
            if not set(allowed) <= {*PLAIN_TYPES, type(None)}:
                continue
            fits = isinstance(entry, allowed) or (float in allowed and type(entry) is int)
            if not fits or (isinstance(entry, bool) and bool not in allowed):
                yield f"{type(value).__name__}.{name} is {entry!r}, not {hint}"


def check_batches(config: "DictConfig") -> str:
    """Run verl's validation, and check the division into micro-batches that its engine asserts during training
    (verl.workers.engine.utils.prepare_micro_batches)."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    checked = copy.deepcopy(config)
    # With an adapter the validation imports vLLM, which the export does not need: the rank is already checked.
    checked.actor_rollout_ref.model.lora_rank = 0
    with contextlib.redirect_stdout(io.StringIO()):
        validate_config(checked, need_reference_policy(checked), need_critic(checked))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    completions = config.data.train_batch_size * rollout.n
    each = completions / gpus
    for name, micro in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu),
        ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_micro_batch_size_per_gpu),
        ("ref.log_prob_micro_batch_size_per_gpu", config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu),
    ):
        if each % micro:
            raise Refused(f"{name} ({micro}) does not divide the {each:g} completions of a GPU.")
    if config.data.train_batch_size % actor.ppo_mini_batch_size:
        raise Refused(f"ppo_mini_batch_size ({actor.ppo_mini_batch_size}) does not divide data.train_batch_size.")
    if gpus % rollout.tensor_model_parallel_size:
        raise Refused(f"rollout.tensor_model_parallel_size does not divide {gpus} GPUs.")
    return f"{config.data.train_batch_size} prompts x {rollout.n} = {completions} completions a step on {gpus} GPUs"


class PlainTokenizer:
    """Stand-in for the model's tokenizer: verl's data set asks it for a prompt's length."""

    def apply_chat_template(self, messages: list[dict], **_: Any) -> list[int]:
        return [0] * sum(len(message["content"].split()) for message in messages)


def check_data(config: "DictConfig") -> str:
    """Check that verl's data set reads both files and that the epochs cover the requested steps."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    sizes, settings = [], copy.deepcopy(config.data)
    settings.filter_overlong_prompts_workers = None  # in this process
    for files in (config.data.train_files, config.data.val_files):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            data = RLHFDataset(files, PlainTokenizer(), settings)
            row = data[len(data) - 1]
        prompt, truth = row["raw_prompt"], row["reward_model"]["ground_truth"]
        if prompt[-1]["role"] != "user" or not prompt[-1]["content"] or not isinstance(truth, str):
            raise Refused(f"{files}: the last row reads {prompt!r:.80} with {truth!r:.40}.")
        if not row["data_source"] or row["index"] != row["extra_info"]["index"]:
            raise Refused(f"{files}: no data_source, or another index than in extra_info.")
        sizes.append(len(data))
    steps = sizes[0] // config.data.train_batch_size * config.trainer.total_epochs
    if steps < config.trainer.total_training_steps:
        raise Refused(f"{config.trainer.total_epochs} epochs are {steps} steps, total_training_steps asks for more.")
    return f"{sizes[0]:,} problems, {sizes[1]:,} held out"


def check_reward(config: "DictConfig") -> str:
    """Check that verl's loader finds compute_score and that it answers as verl expects for the first problems."""
    from datasets import load_dataset
    from verl.trainer.ppo.reward import get_custom_reward_fn

    score = get_custom_reward_fn(config)
    rows = load_dataset("parquet", data_files=config.data.train_files, split="train[:2]")
    found = []
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        for text in (rf"\boxed{{{truth}}}", "nothing"):
            result = score(
                data_source=row["data_source"], solution_str=text, ground_truth=truth, extra_info=row["extra_info"]
            )
            if not math.isfinite(result["score"]) or not all(isinstance(value, float) for value in result.values()):
                raise Refused(f"compute_score answered {result!r} for {text!r:.60}.")
            found.append(f"{result['score']:g}")
    return f"boxed reference and nothing, of two problems: {', '.join(found)}"


def check_yaml(directory: Path, config: "DictConfig") -> None:
    """Check that overrides.yaml composes to the same configuration as run.sh."""
    from hydra import compose as compose_config
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(directory), version_base=None):
        other = compose_config("overrides")
    plain = [OmegaConf.to_container(one, resolve=False) for one in (config, other)]
    if plain[0] != plain[1]:
        raise Refused("overrides.yaml is another configuration than run.sh.")


def check(directory: Path) -> list[str]:
    """Return what was found about the export; raises what verl raises."""
    words = words_of(directory / "run.sh")
    config = compose(tuple(words))
    check_words(words, config)
    check_types(config)
    found = [f"{len(words)} overrides in its schema", check_batches(config), check_data(config), check_reward(config)]
    check_yaml(directory, config)
    return found


def main() -> int:
    warnings.simplefilter("ignore")
    refused = 0
    for directory in map(Path, sys.argv[1:]):
        try:
            lines = "".join(f"  {line}\n" for line in check(directory))
            print(f"verl {version('verl')} takes {directory}:\n{lines}", end="", flush=True)
        except Exception as error:  # verl and hydra raise many types; each is a rejection
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            print(f"error: verl {version('verl')} refuses {directory}: {kind}{error}", file=sys.stderr, flush=True)
            refused += 1
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
