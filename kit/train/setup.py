"""Steps that all recipes share: checks of model and data, the plan, the run's lock, the base and its final check.

Everything up to `started` works without weights and without a GPU; a dry run ends there.
"""

import argparse
import contextlib
import copy
import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kit.core import formats
from kit.core.cards import generation
from kit.core.config import float16_rules
from kit.core.config.base_rules import describe_base
from kit.core.config.card_rules import format_fault
from kit.core.config.checks import check_config, is_main_process, uses_deepspeed, world_size
from kit.core.config.load import parse_command
from kit.core.config.recipe import check_recipe
from kit.core.config.run_checks import check_run_directory
from kit.core.config.schema import Config
from kit.core.config.shared_gpu import describe_split, split_fault
from kit.core.errors import BadInput, CheckFailed, Interrupted, MachineFailed
from kit.core.first_cause import fail, first_cause
from kit.core.format_names import read_quant_format
from kit.core.formats import QuantFormat
from kit.core.measured import warning
from kit.core.progress import end_with_launcher, steps, watched
from kit.core.run_directory import RunDir, write_record
from kit.core.run_state import drop_replaced, record_standstill, trains_in

if TYPE_CHECKING:
    from kit.train.trainer import PolicyTrainer

LONGEST_COLLECTIVE = timedelta(days=30)


def say(text: str) -> None:
    """Print, in the main process only."""
    if is_main_process():
        print(text, flush=True)


def read_command(description: str, recipe: str) -> tuple[Config, argparse.Namespace, RunDir, int]:
    """A recipe's configuration, flags, run directory and number of processes; raises `BadInput` if it cannot work."""
    config, flags = parse_command(description)
    processes = world_size()
    check_recipe(config, recipe)
    check_config(config, processes)
    return config, flags, check_run_directory(config, flags.resume, processes, flags.overwrite), processes


def check_context(config: Config, model_config: Any) -> None:
    """`BadInput` unless a prompt and a completion of the longest allowed length fit the model's context."""
    from kit.weights.model_files import context_of

    wanted = config.rollout.max_prompt_length + config.rollout.max_completion_length
    context = context_of(model_config)
    if context is not None and wanted > context:
        raise BadInput(
            f"rollout.max_prompt_length + max_completion_length ({wanted}) exceeds the context of "
            f"{config.model.source} ({context}). Lower one of them."
        )


def say_unchecked(config: Config) -> None:
    """Print one line naming the parts of a GPU configuration that a machine without a GPU cannot check."""
    import torch

    on_gpu = {
        "train.gpus": config.train.gpus is not None,
        "train.max_gpu_gib": config.train.max_gpu_gib is not None,
        "policy.kernels": config.policy.kernels != "torch",
        "policy.compute": config.policy.compute == "fp8",
        "train.packed_attention": config.train.micro_batch_tokens is not None,
        "server.gpus": config.server.gpus is not None,
    }
    names = [name for name, is_asked in on_gpu.items() if is_asked]
    if names and not torch.cuda.is_available():
        say(f"unchecked memory, arithmetic and packages of the GPU ({', '.join(names)}): there is none here")


def check_model(config: Config, dry_run: bool = False) -> Any:
    """Run every check that depends on the model's transformers config, and return it.

    Resolves `model.attn_implementation: auto` in `config`.

    A dry run without a GPU skips the check of packages: the run is for another machine.
    """
    import torch

    from kit.policy.fused_mlp import check_fused_mlp
    from kit.policy.host_embedding import check_embeddings
    from kit.policy.layer_kernels import check_kernels
    from kit.policy.load import check_base, check_init_adapter, check_init_layers, describe_start
    from kit.policy.packed.packing import check_packing

    model_config = check_base(config)
    if fault := float16_rules.model_fault(config, model_config.model_type):
        raise BadInput(fault)
    resolve_attention(config, model_config)
    check_context(config, model_config)
    check_packing(config, model_config)
    check_embeddings(config, model_config)
    check_init_adapter(config)
    check_init_layers(config, model_config)
    if start := describe_start(config):
        say(start)
    check_kernels(config, model_config.model_type, installed=not dry_run or torch.cuda.is_available())
    check_fused_mlp(config, model_config)
    check_shared_card(config, model_config)
    return model_config


def resolve_attention(config: Config, model_config: Any) -> None:
    """Replace `model.attn_implementation: auto` by a kernel; print it unless it is sdpa."""
    from kit.weights.attention import AUTO, attention_of

    if config.model.attn_implementation != AUTO:
        return
    config.model.attn_implementation = attention_of(model_config)
    if config.model.attn_implementation != "sdpa":
        say(
            f"attention {config.model.attn_implementation}: transformers' sdpa does not compute what "
            f"{model_config.model_type} needs, so scores of (heads, tokens, tokens) are held in memory"
        )


def resolve_recompute(config: Config, model_config: Any, processes: int) -> None:
    """Replace `train.recompute: auto` by a mode and a fraction, and print them."""
    if config.train.recompute == "auto":
        from kit.plan.recompute import resolve

        say(resolve(config, model_config.to_dict(), processes))


def trained_format(config: Config, model_config: Any) -> QuantFormat | None:
    """The format that the policy computes in, if any; raises `BadInput` if model or machine do not support it."""
    if config.policy.quant_cfg is None:
        return None
    fmt = read_quant_format(config.policy.quant_cfg)
    formats.check_model(fmt, model_config)
    check_hardware(fmt, config.rollout.backend)
    return formats.fitted_to(fmt, model_config)


def check_hardware(fmt: QuantFormat, backend: str) -> None:
    """Raise `BadInput` if this machine's GPU cannot sample in `fmt` with `rollout.backend`.

    Training is never refused: every format's numbers are computed in the model's dtype, on any GPU and on a CPU,
    including FP4 without FP4 arithmetic. A rollout server leaves FP8 to vLLM, which on a GPU without FP8 arithmetic
    does not quantize activations: that is another policy than the one that learns.
    """
    import torch

    if backend != "server" or not torch.cuda.is_available():
        return
    row = generation(torch.cuda.get_device_capability())
    if fault := format_fault(fmt, torch.cuda.get_device_name(), row):
        raise BadInput(fault)


def check_shared_card(config: Config, model_config: Any) -> None:
    """Raise `BadInput` if the trainer's limit and the plan's estimate of the replicas on the same GPU exceed its
    memory."""
    import torch

    if config.train.max_gpu_gib is None or not torch.cuda.is_available():
        return
    from kit.plan.replica import replica_gib

    card_gib = torch.cuda.mem_get_info()[1] / 2**30
    if fault := split_fault(config, card_gib, replica_gib(config, model_config.to_dict())):
        raise BadInput(fault)


def problems_a_step(config: Config, processes: int) -> int:
    """Number of problems per optimizer step."""
    train = config.train
    rows = train.per_device_train_batch_size * processes * train.gradient_accumulation_steps
    return rows // config.rollout.group_size


def load_rewards(config: Config, run: RunDir, has_environment: bool, processes: int) -> tuple[list[Any], list[float]]:
    """The reward functions and their weights, checked against the columns of the training data."""
    from kit.data.problems import reward_columns
    from reward import check_run, function_of, reward_functions

    columns = reward_columns(config.data, "train")
    given = ("environments",) if config.environment.factory else ()
    facts = config.rollout.group_size, run.path, has_environment
    rewards, weights = reward_functions(config.reward, (*columns, *given), *facts)
    if given and config.rollout.backend == "server" and processes > 1:
        for name in config.reward.functions:
            if "environments" in inspect.signature(function_of(name)).parameters:
                raise BadInput(
                    f"reward {name!r} takes environments, and on servers all of {processes} processes are in the "
                    "main one. Compute it in the environment's get_reward, or train in one process."
                )
    check_run(rewards, config, columns)
    return rewards, weights


def load_data(
    config: Config,
    tokenizer: Any,
    processes: int,
    runner: Any = None,
    rewards: Sequence[Any] = (),
    weights: Sequence[float] = (),
) -> tuple[Any, int]:
    """The training set for TRL and its size, after checking that every prompt fits and that the held-out problems can
    be read. Warns about held-out problems that are trained on, because `eval` refuses them.

    With a `runner` of episodes one is started on the first problem; what its tools and first observation add to a
    prompt must fit too. `rewards` are tried on the references of some problems."""
    from kit.data.leaks import find_leaks
    from kit.data.pass_rates import select
    from kit.data.problems import drop_long, hidden_columns, read_problems, to_dataset
    from kit.data.references import try_rewards
    from reward import gold_checks, heldout_gold_checks

    problems, report = read_problems(config.data, "train", gold_checks(config.reward.functions))
    note_date(config, tokenizer, problems)
    added = 0
    if runner is not None:
        from kit.rollout.episodes import try_first

        added = try_first(runner, to_dataset(problems[:1], config.data)[0])
    problems, dropped = drop_long(problems, tokenizer, config.data, config.rollout.max_prompt_length, added)
    say(f"training problems: {report.summary()}, {dropped} too long, {len(problems):,} used")
    problems, said = select(problems, config)
    for line in said:
        say(line)
    heldout, report = read_problems(config.data, "eval", heldout_gold_checks(config))
    say(f"held-out problems: {report.summary()}, {len(heldout):,} used")
    if leaks := find_leaks(heldout, problems):
        say(
            f"WARNING: {len(leaks):,} of {len(heldout):,} held-out problems are training problems (the first: "
            f"{leaks[0][0].source}, {leaks[0][1].source}). The evaluation will refuse them: remove them from one "
            "split, or name other problems with data.eval_split or data.eval_path."
        )
    for line in try_rewards(config, rewards, weights, problems):
        say(line)
    needed = problems_a_step(config, processes)
    if len(problems) < needed:
        raise BadInput(
            f"a step needs {needed} problems and {len(problems)} are left. Lower the batch size, or add problems."
        )
    if hidden := hidden_columns(problems, config.data):
        say(f"columns of the data that rewards do not get, because a run uses these names: {', '.join(hidden)}")
    return to_dataset(problems, config.data), len(problems)


def note_date(config: Config, tokenizer: Any, problems: list[Any]) -> None:
    """Warn when the chat template writes the current date into every prompt."""
    from kit.core.chat import date_arguments
    from kit.data.problems import chat_messages

    arguments = config.data.chat_template_kwargs
    if not problems or not getattr(tokenizer, "chat_template", None):
        return
    if (names := date_arguments(tokenizer, chat_messages(config.data, problems[0]), arguments)) is None:
        return
    pin = f"Pin it, e.g. data.chat_template_kwargs {{{names[0]}: 26 Jul 2024}}." if names else "It cannot be pinned."
    say(
        "WARNING: the chat template writes today's date into every prompt, so a resume, an evaluation and a server on "
        f"another day use a different prompt than this run. {pin}"
    )


def describe_plan(config: Config, problems: int, processes: int) -> str:
    """A GRPO run in a few lines."""
    import torch

    train, rollout = config.train, config.rollout
    has_gpu = torch.cuda.is_available() or train.max_gpu_gib is not None or config.server.gpus is not None
    split = describe_split(config) if has_gpu else None
    return "\n".join(
        [
            f"run       {config.run.name} -> {config.run.directory}",
            f"base      {describe_base(config)}",
            f"adapter   LoRA rank {config.policy.lora_rank}, alpha {config.policy.lora_alpha}, "
            f"{config.policy.adapter_dtype}, on {config.policy.target_modules}{describe_experts(config)}",
            *describe_adapter_type(config),
            describe_step(config, problems, processes),
            f"loss      {train.loss or train.loss_type}, beta {train.beta}"
            f"{' on the KL in the reward' if train.kl_in_reward else ''}, learning rate {train.learning_rate}",
            f"rollouts  {rollout.backend}, temperature {rollout.temperature}{describe_resampling(config)}",
            *([f"memory    {split}"] if split else []),
            *describe_environment(config),
            f"rewards   {', '.join(config.reward.functions) or 'of the environment'}",
        ]
    )


def describe_resampling(config: Config) -> str:
    """What the plan's line of the rollouts says of dynamic sampling."""
    rollout = config.rollout
    if not rollout.resample_rounds:
        return ""
    most = "" if rollout.resample_budget is None else f", at most {rollout.resample_budget} completions a step"
    return f"; groups without signal are replaced in up to {rollout.resample_rounds} rounds{most}"


def describe_experts(config: Config) -> str:
    """What the plan's line of the adapter says of routed experts, where `policy.expert_rank` is set."""
    rank = config.policy.expert_rank
    return "" if rank is None else f"; experts {f'rank {rank}' if rank else 'none'}"


def describe_environment(config: Config) -> list[str]:
    """A line of the plan for the environment, if there is one."""
    given = config.environment
    if not given.is_given:
        return []
    names = ", ".join([*([given.factory] if given.factory else []), *given.tools])
    return [f"episodes  {names}; at most {given.max_turns} turns, {given.on_tool_error} after a failed call"]


def describe_adapter_type(config: Config) -> list[str]:
    """A line of the plan if small updates of the adapter would be lost."""
    if config.policy.adapter_dtype == "float32" or uses_deepspeed():
        return []
    rate = config.train.learning_rate
    lost = f"updates of less than 0.2 % of a weight are rounded away (learning rate {rate:g})"
    return [f"          no float32 masters without DeepSpeed: {lost}. policy.adapter_dtype float32 keeps them"]


def describe_step(config: Config, problems: int, processes: int) -> str:
    """Problems and completions of a step, as a line of the plan."""
    rollout = config.rollout
    return (
        f"step      {problems_a_step(config, processes)} problems x {rollout.group_size} completions of at most "
        f"{rollout.max_completion_length} tokens, {config.train.max_steps} steps over {problems:,} problems"
    )


def describe_format(fmt: QuantFormat, config: Config) -> str:
    """The format that the policy computes in, as further lines of the plan."""
    weight, activation, policy = fmt.weight, fmt.activation, config.policy
    rows, columns = weight.block
    names: dict[tuple, str] = {(None, None): "whole weight", (1, None): "output channel"}
    shared = names.get((rows, columns), f"{rows} x {columns}")
    inputs = "inputs unquantized"
    if activation is not None:
        inputs = f"inputs {activation.kind}, a scale per {activation.per}"
    lines = [f"format    {fmt.name}: weights {weight.kind}, a scale per {shared}; {inputs}"]
    if fmt.needs_calibration:
        lines.append(
            f"ranges    of inputs from {policy.quant_calib_size} prompts of {policy.quant_calib_data}, at most "
            f"{policy.quant_sequence_length} tokens each"
        )
    if activation is not None and activation.kind == "nvfp4":
        lines.append("note      activations in 4 bits are known to make GRPO unstable: watch quant_clip_fraction")
    return "\n".join(lines)


def record_config(config: Config, run: RunDir, processes: int) -> None:
    """Write `config.json`, in the main process only; warn about versions that were never measured."""
    from accelerate import PartialState

    from kit.train.record import unmeasured, write_config

    if PartialState().is_main_process:
        write_config(config, run, processes)
        if text := unmeasured():
            say(warning(text))


@contextlib.contextmanager
def started(config: Config, run: RunDir, processes: int) -> Iterator[None]:
    """Lock the run directory for the block and write the configuration, after checking the GPU and capping memory at
    `train.max_gpu_gib`; record how the block ends. A server whose memory holds the base may end after it. Raises
    `BadInput` if another process holds the lock."""
    from accelerate import PartialState

    from kit.policy.gpu_memory import limit_gpu_memory, use_expandable_segments
    from kit.policy.layer_kernels import check_gpu
    from kit.rollout.server_watch import unwatch

    state = PartialState()

    def on_stall(reason: str) -> None:
        record_standstill(run, reason)
        fail(MachineFailed(reason))

    end_with_launcher()
    with (
        trains_in(run) if state.is_main_process else contextlib.nullcontext(),
        watched(run, state.process_index, config.launch.stall_s, on_stall),
        first_cause(run, state.process_index, processes),
    ):
        if run.replaces:  # no process may look for a base.json before the old one is moved aside
            state.wait_for_everyone()
        record_config(config, run, processes)
        use_expandable_segments()
        check_gpu(config)
        limit_gpu_memory(config)
        try:
            yield
        finally:
            unwatch()


def make_rollout(config: Config, tokenizer: Any, model_config: Any, run: RunDir, episodes: Any = None) -> Any:
    """The rollout backend, checked as far as possible without weights; None: the policy generates in this process.
    `episodes` is the runner of the run's episodes, if it has any."""
    if config.rollout.backend == "in_process":
        return None
    from kit.policy.load import adapted_layers
    from kit.rollout.client import ServerRollout

    rollout = ServerRollout(config, tokenizer, run, episodes)
    rollout.check(adapted_layers(config, model_config), model_config.get_text_config().vocab_size)
    return rollout


def load_base(
    config: Config, run: RunDir, tokenizer: Any, model_config: Any, arguments: Any, episodes: Any = None
) -> tuple[Any, dict, Any]:
    """(frozen base, its record as now in `base.json`, rollout backend whose servers hold the same base).

    `arguments` are the trainer's, `episodes` the runner of its episodes. Raises `BadInput` if a server, the run to
    resume, or an adapter that the run starts or learns from has another base.
    """
    from accelerate import PartialState

    from kit.policy.load import load_policy_base, record_base, record_start
    from kit.policy.sharding import loading_whole
    from kit.policy.teacher import check_adapter_base

    with loading_whole(arguments):
        rollout = make_rollout(config, tokenizer, model_config, run, episodes)
        base = load_policy_base(config, rollout.share_base() if config.server.share_base else None)
        facts = record_base(base, run, config, write=False)
    check_adapter_base(config, facts["hash"])
    if rollout:
        rollout.check_base(facts["hash"])
    if PartialState().is_main_process:
        write_record(run.base_file, facts)
        record_start(config, run, facts["hash"], model_config)
        drop_replaced(run)
    return base, facts, rollout


@dataclass
class Task:
    """The model, format, rewards and problems of a run, checked before any weight is loaded."""

    model_config: Any
    fmt: QuantFormat | None  # that the policy computes in; None: unquantized
    tokenizer: Any
    rewards: list[Any]
    weights: list[float]
    dataset: Any
    heldout: Any  # None without watch.eval_every
    episodes: Any  # the runner of episodes; None without an environment
    own_reward: list[Any]  # that of the environment, if it has one, beside `rewards`


def read_task(config: Config, run: RunDir, processes: int, dry_run: bool) -> Task:
    """Model, format, rewards and problems of a run; raises `BadInput` for what cannot be trained.

    Resolves `train.recompute: auto` in `config`.
    """
    from kit.data.own_format import check_format
    from kit.environments.load import load_environment
    from kit.policy.load import load_tokenizer
    from kit.train.data_order import check_problems
    from kit.train.episode_steps import EnvironmentReward
    from kit.train.heldout import HeldOut

    model_config = check_model(config, dry_run)
    resolve_recompute(config, model_config, processes)
    fmt = trained_format(config, model_config)
    environment = load_environment(config)
    rewards, weights = load_rewards(config, run, environment is not None, processes)
    tokenizer = load_tokenizer(config)
    runner = make_runner(config, environment, tokenizer) if environment else None
    check_format(config, run)
    dataset, _ = load_data(config, tokenizer, processes, runner, rewards, weights)
    check_problems(run, dataset)
    owns_reward = environment is not None and environment.owns_reward
    heldout = HeldOut(config, tokenizer, owns_reward) if config.watch.eval_every else None
    own = [EnvironmentReward(environment)] if owns_reward else []
    weights += [1.0] * len(own)
    return Task(model_config, fmt, tokenizer, rewards, weights, dataset, heldout, runner, own)


def make_runner(config: Config, environment: Any, tokenizer: Any) -> Any:
    """The runner of the run's episodes; raises `BadInput` if the chat template does not do for them."""
    from kit.rollout.episode_tokens import EpisodeTokens
    from kit.rollout.episodes import EpisodeRunner

    # A copy: episodes run in another thread, and a fast tokenizer fails when two threads change its padding.
    own = copy.deepcopy(tokenizer)
    tokens = EpisodeTokens(own, config.data.chat_template_kwargs, environment.takes_tools)
    return EpisodeRunner(environment, tokens, config)


def range_prompts(config: Config, task: Task, resume: bool) -> list[list[int]]:
    """Prompts that calibrate the format's input ranges; none if it has no ranges or they are in the checkpoint."""
    from kit.data.calibration_prompts import calibration_prompts

    if resume or task.fmt is None or not task.fmt.needs_calibration:
        return []
    return calibration_prompts(config, task.dataset["prompt"], task.tokenizer)


def trainer_parts(config: Config, run: RunDir, task: Task, arguments: Any) -> tuple[dict[str, Any], dict]:
    """Arguments of every trainer (the frozen base, its servers, the data) and the base's facts; records both."""
    from kit.data.pass_rates import describe_other_base
    from kit.policy.load import lora_config
    from kit.policy.sharding import loading_whole
    from kit.train.data_order import record_problems
    from reward import start

    with loading_whole(arguments):
        start(task.rewards)
    facts_of_task = task.tokenizer, task.model_config, arguments, task.episodes
    base, facts, rollout = load_base(config, run, *facts_of_task)
    record_problems(run, task.dataset)
    if warning := describe_other_base(config, facts["hash"]):
        say(warning)
    arguments.reward_weights = task.weights
    parts = {"config": config, "run": run, "base_hash": facts["hash"], "rollout": rollout, "model": base}
    parts |= {"args": arguments, "train_dataset": task.dataset, "processing_class": task.tokenizer}
    parts |= {"reward_funcs": task.rewards + task.own_reward, "heldout": task.heldout, "episodes": task.episodes}
    return parts | {"peft_config": lora_config(config.policy, base)}, facts


def out_of_memory(config: Config, step: int, error: Exception) -> CheckFailed:
    """The error for a step that ran out of GPU memory, with the changes that need less and are allowed on --resume."""
    train, rollout = config.train, config.rollout
    longest = -(-(rollout.max_prompt_length + rollout.max_completion_length) // train.sequence_parallel)
    changes = []
    if train.micro_batch_tokens is None and _may_change(config, micro_batch_tokens=longest):
        changes.append(f"set train.micro_batch_tokens ({longest} or more)")
    elif train.micro_batch_tokens is not None and train.micro_batch_tokens > longest:
        changes.append(f"lower train.micro_batch_tokens ({train.micro_batch_tokens}; at least {longest})")
    if train.recompute != "full" or train.recompute_fraction < 1:
        changes.append("set train.recompute to full and train.recompute_fraction to 1")
    elif not train.recompute_offload and _may_change(config, recompute_offload=True):
        changes.append("set train.recompute_offload to true")
    if train.max_gpu_gib is not None:
        changes.append(f"raise train.max_gpu_gib ({train.max_gpu_gib:g})")
    what = "; or ".join(changes) or "use a larger GPU"
    return CheckFailed(
        f"step {step}: out of GPU memory. To continue with --resume, {what}. `python -m launch.plan --config …` "
        "prints what fits. "
        f"{str(error).partition('. See documentation')[0].partition('. If reserved')[0]}"
    )


def _may_change(config: Config, **keys: Any) -> bool:
    """Whether these keys of `train` are allowed where this process was launched, as far as `check_config` knows."""

    def runs(one: Config) -> bool:
        try:
            check_config(one, world_size())
        except BadInput:
            return False
        return True

    return runs(replace(config, train=replace(config.train, **keys))) or not runs(config)


def say_alerts(run: RunDir) -> None:
    """Print the health rules that fire at the end of a run, one per line, and their examples below them."""
    from kit.core.health import alerts
    from kit.core.metrics_log import MetricsLog

    log = MetricsLog(run.metrics_file)
    log.poll()
    for alert in alerts(log.rows, run):
        for line in alert.lines:
            say(line)


def wait_for_progress(stall_s: float) -> None:
    """Let collectives wait for as long as any process makes progress. `launch.stall_s` ends a run in which none does;
    the process group's own limit would also end one whose main process judges or samples for longer than that."""
    from torch import distributed

    if stall_s and distributed.is_available() and distributed.is_initialized():
        distributed.distributed_c10d._set_pg_timeout(LONGEST_COLLECTIVE)


@contextlib.contextmanager
def training(trainer: "PolicyTrainer", facts: dict, note: str = "") -> Iterator[None]:
    """Release the servers of `trainer` on exit and verify that the base is unchanged.

    Raises `CheckFailed` if the base is not the one of `facts` (base.json), or if the GPU runs out of memory, with the
    keys that need less of it. Prints the results, followed by `note`; on Ctrl-C, where a resume starts.
    """
    import torch

    from kit.policy.load import check_base_unchanged

    began = time.perf_counter()
    wait_for_progress(trainer.config.launch.stall_s)
    try:
        with steps():
            yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(trainer.config, trainer.state.global_step + 1, error) from error
    except KeyboardInterrupt as error:
        try:
            rest = f"--resume continues from {trainer.run.newest_checkpoint()}"
        except BadInput:
            rest = f"there is no checkpoint yet (train.save_steps {trainer.config.train.save_steps})"
        raise Interrupted(f"interrupted in step {trainer.state.global_step + 1}: {rest}") from error
    finally:
        if trainer.accelerator.is_main_process:
            trainer.sampler.close()
    check_base_unchanged(trainer.accelerator.unwrap_model(trainer.model), facts)
    trainer.accelerator.wait_for_everyone()  # the run is done when it is in every process
    say_alerts(trainer.run)
    say(
        f"done: {trainer.state.global_step} steps in {time.perf_counter() - began:.0f} s, base unchanged "
        f"({facts['hash'][:12]}), adapter {trainer.run.newest_adapter()}{note}"
    )
