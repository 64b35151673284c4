"""Make a run directory of an adapter that this kit did not train, so that every command on runs takes it.

`python -m merge import --adapter DIR --out runs/X` checks a plain peft adapter against its base, hashes the base
tensor by tensor, and writes config.json, base.json and the adapter as version 0 with its manifest. merge, its
verification, diagnose, eval, the gate and rollout servers then work on it as on any run. Nothing is trained or loaded.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kit.core.checksum import line_of
from kit.core.config.load import config_from_dict, load_config, resolve, to_dict
from kit.core.config.schema import Config, DataConfig, limit_faults
from kit.core.errors import DONE, BadInput
from kit.core.file_kinds import TOKENIZER_CONFIG
from kit.core.installed import installed_versions
from kit.core.run_directory import RunDir, file_hash, is_plain_adapter, publish, read_manifest, stored_as, write_record
from kit.core.run_files import parse, read_optional
from kit.core.user_files import read_text
from kit.policy.adapter_files import (
    CONFIG,
    WEIGHTS,
    factor_shapes,
    import_adapter,
    is_four_bit,
    is_same_model,
    read_plain,
)
from merge.card import PACKAGES
from merge.options import import_parser

TEMPLATE = "chat_template.jinja"
MOST_PROMPTS = 1 << 28  # bytes


def main(argv: list[str]) -> int:
    arguments, overrides = import_parser().parse_known_args(argv)
    made = Import(arguments, overrides)
    if made.out.exists():
        raise BadInput(f"{made.out} exists already. Choose another --out, or remove it first.")
    print(made.describe(), flush=True)
    if made.dry_run:
        return DONE
    run = made.write()
    print(f"wrote {run.path}: base hash {run.base()['hash'][:12]}, adapter {run.adapter_dir(0)}")
    print(f"merge it with: python -m merge --run {run.as_argument} --format bf16 fp8")
    return DONE


def import_of(arguments: argparse.Namespace, overrides: Sequence[str] = ()) -> "Import":
    """The checked import of a command that was given --adapter and --out instead of --run."""
    if arguments.adapter is None or arguments.out is None:
        raise BadInput(
            "--run is missing. For an adapter that no run of this kit trained, give --adapter DIR, and --out for the "
            "run directory to make of it, e.g. --out runs/theirs."
        )
    options = import_parser().parse_args(["--adapter", str(arguments.adapter), "--out", str(arguments.out)])
    for name in ("base", "base_storage", "prompts", "config", "dry_run", "allow_own_code"):
        setattr(options, name, getattr(arguments, name, None))  # merge has no --config, diagnose no --dry_run
    return Import(options, list(overrides))


def run_of(arguments: argparse.Namespace) -> RunDir | None:
    """The run directory of a command on runs, such as `python -m merge`: the one of --run, else the one that --out
    names, made now of --adapter or earlier of the same adapter and base. None after a dry run that would make it.

    Options that mean something else for a run (--adapter, --base, --out) are cleared when they named the import.
    """
    if arguments.run is not None:
        check_run_alone(arguments)
        return RunDir.open(arguments.run, arguments.allow_own_code)
    made = import_of(arguments)
    run = made.existing() if made.out.exists() else None
    if run is None:
        print(made.describe(), flush=True)
        run = None if made.dry_run else made.write()
    arguments.run = made.out
    arguments.adapter = arguments.base = arguments.out = None
    return run


def check_run_alone(arguments: argparse.Namespace) -> None:
    """Raise `BadInput` if --run comes with an option of an adapter that has no run yet."""
    if given := [f"--{name}" for name in ("base_storage", "prompts") if getattr(arguments, name) is not None]:
        raise BadInput(f"{given[0]} is of an adapter without a run, and --run names one. Leave one of them out.")


class Import:
    """A checked command: the constructor refuses everything that can be refused before a tensor is read."""

    def __init__(self, options: argparse.Namespace, overrides: list[str]):
        self.adapter, self.out, self.dry_run = Path(options.adapter), Path(options.out), bool(options.dry_run)
        self.allow_own_code = bool(getattr(options, "allow_own_code", False))  # of a run that exists
        if not is_plain_adapter(self.adapter):
            raise BadInput(_no_plain_adapter(self.adapter))
        self.settings = read_plain(self.adapter)
        self.config = self._configuration(options, overrides)
        model = self.config.model
        model.check_path()
        self.rows = [] if options.prompts is None else list(_prompts(Path(options.prompts), self.config.data))

        from kit.weights.checkpoint import find_checkpoint
        from kit.weights.model_files import unquantized_config

        self.described = unquantized_config(model.source, model.revision)
        # transformers also reports a commit for a directory in the hub's cache.
        commit = None if model.path else getattr(self.described, "_commit_hash", None)
        self.origin = {
            "model": str(Path(model.source).resolve()) if model.path else model.source,
            "revision": model.revision or commit,
        }
        self.place = find_checkpoint(model.source, commit or model.revision, weights=not self.dry_run)
        self.source: Any = None  # `Original`; None if a dry run has no weights
        if any(self.place.glob("*.safetensors")):
            self._check_fit()

    def _configuration(self, options: argparse.Namespace, overrides: list[str]) -> Config:
        """The run's configuration: the YAML of --config, if given, with what adapter and command line say."""
        facts = self.settings
        alpha = facts["lora_alpha"]
        if alpha != int(alpha):
            raise BadInput(f"{self.adapter / CONFIG}: lora_alpha is {alpha}, and policy.lora_alpha is a whole number.")
        values: dict[str, Any] = {"train": {"max_steps": 1}}
        if options.config:
            values = to_dict(load_config(options.config))
        values["run"] = {"name": self.out.resolve().name, "output_dir": str(self.out)}
        values["run"]["imported_from"] = str(self.adapter.resolve())
        if options.base is not None or not options.config:
            values["model"] = (values.get("model") or {}) | self._model(options)
        if options.base_storage is not None or not options.config:
            values["policy"] = (values.get("policy") or {}) | {"quantization": self._storage(options)}
        names = {name.partition(".lora_")[0] for name in factor_shapes(self.adapter) if ".lora_" in name}
        values["policy"] |= {"lora_rank": facts["r"], "lora_alpha": int(alpha), "init_adapter": None}
        values["policy"] |= {"use_rslora": bool(facts.get("use_rslora")), "quant_cfg": None}
        values["policy"] |= {"target_modules": sorted({name.rpartition(".")[2] for name in names})}
        config = resolve(values, overrides, options.config or "python -m merge import", tuple(vars(options)))
        if faults := limit_faults(config):
            raise BadInput("\n".join(faults))
        return config

    def _model(self, options: argparse.Namespace) -> dict:
        """Keys of the group `model`: the base that the command line names, or else the adapter's config."""
        named = self.settings.get("base_model_name_or_path")
        base, revision = options.base or named, options.revision
        if not base:
            raise BadInput(f"{self.adapter / CONFIG} names no base (base_model_name_or_path). Name it with --base.")
        base = str(base)
        if Path(base).is_dir():
            return {"id": Path(base).resolve().name, "path": str(Path(base).resolve()), "revision": None}
        if Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1:
            whose = "--base" if options.base else f"{self.adapter / CONFIG} names the base {base}, which"
            said = f"{whose} {base} is" if options.base else f"{whose} is"
            raise BadInput(f"{said} not a directory here (seen from {Path.cwd()}). Name the base with --base.")
        if not options.base:
            revision = revision or self.settings.get("revision")
        return {"id": base, "path": None, "revision": revision}

    def _storage(self, options: argparse.Namespace) -> str:
        """Storage of the base that the adapter was trained on; `BadInput` if it was probably 4-bit and nobody said."""
        named = str(self.settings.get("base_model_name_or_path") or "")
        if options.base_storage is None and is_four_bit(named):
            raise BadInput(
                f"{self.adapter} was trained on a 4-bit base ({named}). Choose the weights that it is merged into: "
                "--base_storage nf4 for the 16-bit model quantized to NF4 and dequantized, which is near what it was "
                "trained on, or --base_storage none for the 16-bit model itself."
            )
        return options.base_storage or "none"

    def _check_fit(self) -> None:
        """`BadInput` unless every tensor of the adapter has its place in the base."""
        from kit.weights.frozen_base import BaseCheckpoint, default_device
        from kit.weights.write_base import Original, outline_base
        from merge.merge import read_adapter

        policy = self.config.policy
        stored = (policy.double_quantization, default_device(), policy.quantization)
        self.source = Original(self.place, self.config.model.dtype, *stored)
        read_adapter(self.adapter, BaseCheckpoint(self.place, outline_base(self.source, **self.origin)))

    def describe(self) -> str:
        """What will be imported, in a few lines, with what the adapter's directory says differently."""
        policy, facts = self.config.policy, self.settings
        scale = "alpha / sqrt(rank)" if policy.use_rslora else "alpha / rank"
        patterns = ", with patterns" if facts.get("rank_pattern") or facts.get("alpha_pattern") else ""
        lines = [
            f"adapter   {self.adapter}: rank {facts['r']}, alpha {facts['lora_alpha']}, {scale}{patterns}, on "
            f"{', '.join(policy.target_modules)}",
            f"base      {self.origin['model']}, {_STORED[policy.quantization]}",
            f"run       {self.out}",
        ]
        named = facts.get("base_model_name_or_path")
        if named and not is_same_model(str(named), self.config.model.source):
            lines.append(f"WARNING: the adapter names {named} as its base, not {self.config.model.source}.")
        if (theirs := _template(self.adapter)) is not None and theirs != _template(self.place):
            lines.append(
                f"WARNING: {self.adapter} has a chat template of its own, and merge keeps the base's. If it was "
                "trained with its own, copy its tokenizer files into a copy of the base and name that with --base."
            )
        if self.source is None:
            lines.append("note: the base's weights are not on this machine, so names and shapes are not checked")
        return "\n".join(lines)

    def write(self) -> RunDir:
        """Hash the base and publish the run directory, all or nothing."""
        from kit.weights.wrapped import wrapper_of
        from kit.weights.write_base import describe_base

        with publish(self.out) as partial:
            run = RunDir(partial)
            info = describe_base(self.source, **self.origin)
            write_record(run.base_file, info)
            wrapped = bool(wrapper_of(self.described))
            import_adapter(self.adapter, run.adapter_dir(0), 0, info["hash"], wrapped)
            if self.rows:
                run.completions.mkdir()
                lines = "".join(f"{line_of(row)}\n" for row in self.rows)
                (run.completions / "step-000000.jsonl").write_text(lines)
            found = {
                "config": to_dict(self.config),
                "versions": installed_versions(PACKAGES),
                "command": ["python", "-m", "merge", *sys.argv[1:]],
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
            write_record(run.config_file, found)
        return RunDir.open(self.out)

    def existing(self) -> RunDir:
        """The run at --out if it was made of this adapter and base; `BadInput` if not."""
        run = RunDir.open(self.out, self.allow_own_code)
        there = config_from_dict(run.config(), str(run.config_file))
        origin = read_manifest(run.adapter_dir(0), "adapter", deep=True).get("imported_from") or {}
        same = (there.model, stored_as(there)) == (self.config.model, stored_as(self.config))
        if not same or origin.get("blake2b") != file_hash(self.adapter / WEIGHTS):
            what = "on another base, or stored otherwise" if not same else "of other weights"
            raise BadInput(f"{self.out} exists and was made {what}. Choose another --out, or remove it first.")
        print(f"run       {self.out}, made of this adapter before", flush=True)
        return run


_STORED = {
    "none": "in 16 bits, as it is",
    "nf4": "quantized to NF4 and dequantized",
    "fp8": "quantized to FP8 and dequantized",
}


def _no_plain_adapter(directory: Path) -> str:
    """Error text for a directory that holds no plain adapter."""
    if (directory / CONFIG).is_file():
        return f"{directory} was published by a run of this kit: name that run with --run instead."
    inside = sorted(str(file.parent) for file in directory.glob(f"*/{CONFIG}")) if directory.is_dir() else []
    others = f" There is one in {inside[-1]}." if inside else ""
    return f"{directory} holds no adapter: it has no {CONFIG} (seen from {Path.cwd()}).{others}"


def _template(directory: Path) -> str | None:
    """Text of the chat template in a directory; None if it has none."""
    if (directory / TEMPLATE).is_file():
        return (directory / TEMPLATE).read_text()
    found = read_optional(directory / "tokenizer_config.json", TOKENIZER_CONFIG).get("chat_template")
    return found if isinstance(found, str) else None


def _prompts(file: Path, data: DataConfig) -> Iterator[dict]:
    """Rows of a jsonl file of prompts, in the form that a run logs completions; `BadInput` names a line without one.

    A row has `messages`, `prompt` with an optional `completion`, `text`, or the data's own question column.
    """
    from kit.data.problems import prompt_of_row

    for number, line in enumerate(read_text(file, MOST_PROMPTS, "file of --prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse(line.encode(), is_foreign=True)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"--prompts {file}, line {number} is not JSON: {error}.") from None
        found = _logged(row) if isinstance(row, dict) else None
        if found is None and isinstance(row, dict) and (prompt := prompt_of_row(data, row, f"{file}:{number}")):
            found = {"prompt": prompt, "completion": ""}
        if found is None:
            raise BadInput(
                f"--prompts {file}, line {number} has no prompt. Give it messages, prompt (and completion), text or "
                f"{data.question_column}."
            )
        yield found


def _logged(row: dict) -> dict | None:
    """A row as a run logs it; None if it is not in a form that TRL or this kit knows."""
    messages = row.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages):
        answered = messages[-1].get("role") == "assistant" and len(messages) > 1
        prompt, last = (messages[:-1], messages[-1:]) if answered else (messages, "")
        return {"prompt": prompt, "completion": last}
    if isinstance(prompt := row.get("prompt"), str | list) and prompt:
        completion = row.get("completion", "")
        return {"prompt": prompt, "completion": completion if isinstance(completion, str | list) else ""}
    if isinstance(text := row.get("text"), str) and text:
        return {"prompt": text, "completion": "", "text": text}
    return None
