"""`python -m merge verify`: how far existing checkpoints are from the policy, whoever merged them.

Covers the run's own merged checkpoints, and with --checkpoint those that another program merged of the same base and
adapter (peft's merge_and_unload, Unsloth's save_pretrained_merged, …). A checkpoint in 16 bits, or in the format that
the run was trained for, has to be the policy up to rounding; the distance of the others is printed.
Not covered: whether a file changed since it was merged; `python -m eval` compares the hashes.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from kit.core.checkpoint_files import quantization_of
from kit.core.errors import CHECK_FAILED, DONE, BadInput, CheckFailed
from kit.core.file_kinds import MODEL_CONFIG
from kit.core.gguf_types import PREFIX
from kit.core.run_directory import INTO, MANIFEST, RunDir, read_manifest
from kit.core.run_files import read_object
from merge.imported import run_of
from merge.options import verify_parser
from merge.tables import show_table

HEAD = ("policy", "format", "KL(policy‖it)", "max |Δlogp|", "top-1", "path", "s")


@dataclass(frozen=True)
class Target:
    """A checkpoint to compare: its policy (base or grpo), format, directory, and the base that it was merged into."""

    policy: str
    format: str
    path: Path
    into: str = INTO[0]


def main(argv: list[str]) -> int:
    """Compare, print a table; return 1 if a checkpoint that has to be the policy is not."""
    arguments = verify_parser().parse_args(argv)
    run = run_of(arguments)
    assert run is not None  # there is no dry run
    targets = [_foreign(path) for path in arguments.checkpoint] or _merged(run)

    from merge.verify import Verifier, base_checkpoint, check_adapter_base, fixed_batch, read_tokenizer

    adapter = arguments.adapter or run.newest_adapter()
    check_adapter_base(adapter, run.base())
    base = base_checkpoint(run, arguments.base)
    for target in targets:
        _check_vocabulary(target.path, base.config.vocab_size)
    batch = fixed_batch(run, read_tokenizer(base.directory), base.config.vocab_size)
    print(f"scoring the policy on {sum(ids.shape[1] for ids in batch)} tokens", flush=True)
    verifier = Verifier(run, adapter, base, batch)
    rows, notes, update = [], [], verifier.update_kl()
    failed = False
    for target in targets:
        started = time.perf_counter()
        try:
            found = verifier.judge(target.policy, target.format, target.path, target.into)
            numbers = [f"{found['mean_kl']:.2e}", f"{found['max_abs_dlogp']:.3f}", f"{found['top1_agreement']:.3f}"]
            if target.policy == "grpo" and found["mean_kl"] > update / 2:
                notes.append(f"note: {target.path} is more than half as far from the policy as the base is")
        except CheckFailed as error:
            failed = True
            notes.append(f"failed: {target.path}: {error}")
            numbers = ["not the policy", "-", "-"]
        seconds = f"{time.perf_counter() - started:.1f}"
        rows.append((target.policy, target.format, *numbers, str(target.path), seconds))
    show_table(HEAD, rows)
    print(f"the base without the adapter is {update:.2e} from the policy (mean KL)")
    for note in notes:
        print(note, flush=True)
    return CHECK_FAILED if failed else DONE


def _merged(run: RunDir) -> list[Target]:
    """The run's own merged checkpoints, by their manifests; `BadInput` if there is none."""
    found = []
    for into in INTO:
        for file in sorted(run.merged_into(into).glob(f"[!.]*/[!.]*/{MANIFEST}")):
            if file.parent.name.startswith(PREFIX):  # a GGUF file, compared in llama.cpp when it was written
                continue
            manifest = read_manifest(file.parent, "checkpoint", deep=True)
            found.append(Target(manifest["policy"], manifest["format"], file.parent, into))
    if not found:
        raise BadInput(
            f"{run.merged} holds no merged checkpoint. Merge with: python -m merge --run {run.as_argument} --format "
            "bf16; or name one that another program merged with --checkpoint."
        )
    return found


def _foreign(path: Path) -> Target:
    """A checkpoint of the trained policy that --checkpoint names; `BadInput` if it is none."""
    if not (path / "config.json").is_file():
        raise BadInput(f"--checkpoint {path} has no config.json (seen from {Path.cwd()}): it is no checkpoint.")
    settings = quantization_of(read_object(path / "config.json", MODEL_CONFIG))
    return Target("grpo", settings.get("quant_method", "bf16"), path)


def _check_vocabulary(path: Path, size: int) -> None:
    """Raise `BadInput` unless the checkpoint has as many tokens as the base."""
    from kit.weights.model_files import read_config
    from kit.weights.wrapped import language_config

    if (found := language_config(read_config(path)).vocab_size) != size:
        raise BadInput(
            f"{path} has {found} tokens and the base {size}: its embeddings were resized, and an adapter of LoRA "
            "factors says nothing about further rows. Compare with a checkpoint of the base's vocabulary."
        )
