"""The recipe's real command line on an 8B shape with random weights, generating in the trainer's process.

Shows what a CPU cannot: that the NF4 path fits and runs at this size, and its cost. Random weights: no reward is
learned. For rollouts from a server see rollout_8b.py.

    python bench/path_8b.py --part local     # train in process, write the base, merge, quantize
    python bench/path_8b.py --part parallel --layers 8  # two GPUs: one, DDP, ZeRO-2, ZeRO-3, FSDP2
    python bench/path_8b.py --part parallel --launchers ddp zero3 fsdp2  # the memory of each card, whole and split
    python bench/path_8b.py --part levers --launchers ddp zero3 fsdp2  # fine-tuning, levers off and on
    python bench/path_8b.py --part levers --launchers ddp fsdp2 --processes 4  # four GPUs
    python bench/path_8b.py --part model --shape 32b --layers 64  # only the model, for a later call
    python bench/path_8b.py --part levers --shape 32b --layers 64 --launchers fsdp2 zero3 --sides levers
    python bench/path_8b.py --part levers --shape 70b --layers 80 --launchers fsdp2 --sides levers --processes 4
    python bench/path_8b.py --part levers --rehearse  # every part on two CPU cores: a tiny shape, one process and DDP

Prints a table last. Needs torch with CUDA, bitsandbytes, trl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
CONFIG = "recipes/configs/grpo-tiny-nf4-cpu.yaml"
LAUNCHERS = {"one_gpu": 1, "ddp": 2, "zero2": 2, "zero3": 2, "fsdp2": 2}  # number of processes
ON_CPU = ("one_gpu", "ddp")  # accelerate splits a base on GPUs only

# Sizes of Qwen3-8B, Qwen3-32B and Llama-3.1-70B, in Qwen3's layers.
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
}
# For rehearsals on a CPU.
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 32, "vocab_size": 400}


def make_model(
    directory: Path, tokenizer_dir: Path, layers: int, branches: float = 1.0, sizes: dict[str, int] = SHAPES["8b"]
) -> float:
    """Write a Qwen3-8B shape, or one of other sizes, with random BF16 weights and the small tokenizer, on the GPU if
    there is one; return its parameters in billions. The files of a large model are written by several processes.

    `branches` scales what attention and MLP add to the residual stream: random branches amplify rounding, small ones
    leave it about as visible as in a trained model.
    """
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    config = Qwen3Config(
        **{"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128} | sizes,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(directory)
    GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    ).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with torch.device("meta"):
        weights = Qwen3ForCausalLM(config).to(torch.bfloat16).state_dict()
    split = split_torch_state_dict_into_shards(weights, max_shard_size="4GB")
    files = [
        (directory / file, {name: tuple(weights[name].shape) for name in names}, seed, branches)
        for seed, (file, names) in enumerate(split.filename_to_tensors.items())
    ]
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if len(files) == 1:
        write_weights(*files[0])
    else:
        with ProcessPoolExecutor(min(8, len(files)), mp_context=get_context("spawn")) as pool:
            list(pool.map(write_weights, *zip(*files, strict=True)))
    return sum(tensor.numel() for tensor in weights.values()) / 1e9


def write_weights(file: Path, shapes: dict[str, tuple[int, ...]], seed: int, branches: float) -> None:
    """Write random BF16 weights as Qwen3 initializes them: norms of ones, matrices normal with a deviation of .02."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        scale = 0.02 * (branches if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
        value = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
        weights[name] = (value.fill_(1) if len(shape) == 1 else value.normal_(0, scale, generator=generator)).cpu()
    save_file(weights, file, metadata={"format": "pt"})


def write_model(work: Path, layers: int, shape: dict[str, int]) -> None:
    """Write tokenizer and model into `work`, unless an earlier call did."""
    written = work / "model.json"
    facts = {"layers": layers, **shape}
    if written.is_file() and json.loads(written.read_text()) == facts:
        return
    written.unlink(missing_ok=True)
    command("tiny", ["recipes/tiny_base.py", "--out", str(work / "tiny"), "--steps", "0"], work)
    started = time.perf_counter()
    billions = make_model(work / "model", work / "tiny", layers, sizes=shape)
    written.write_text(json.dumps(facts))
    print(f"model: {billions:.2f} B parameters, {time.perf_counter() - started:.0f} s", flush=True)


def command(name: str, arguments: list[str], logs: Path) -> tuple[float, str]:
    """Run one command line from the repository root; return (seconds, output). Exits if it fails."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    (logs / f"{name}.log").write_text(done.stdout + done.stderr)
    seconds = time.perf_counter() - started
    print(f"{name}: exit {done.returncode}, {seconds:.0f} s", flush=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-6000:], flush=True)
        raise SystemExit(1)
    return seconds, done.stdout


def launch_words(launcher: str, processes: int) -> list[str]:
    """Words that launch a script in this many processes; without a GPU those of `ON_CPU`, several by torchrun, because
    accelerate starts them by MPI there."""
    import torch

    if torch.cuda.is_available():
        config = f"accelerate_configs/{launcher}.yaml"
    elif processes > 1:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    else:
        config = "accelerate_configs/cpu.yaml"
    words = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", str(processes)]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    # A call on other cards of the host meets on a port of its own.
    return [*words, "--main_process_port", str(29500 + int(first))] if processes > 1 else words


def train(name: str, work: Path, extra: list[str], launcher: str = "one_gpu", processes: int = 1) -> list[dict]:
    """Run steps of the recipe; return the rows of its metrics.jsonl."""
    overrides = {
        "run.name": name,
        "run.output_dir": work / name,
        "model.path": work / "model",
        "model.dtype": "bfloat16",
        "data.path": work / "tiny",
        "train.max_steps": 3,
        "train.save_steps": 3,
        "train.per_device_train_batch_size": 8,
        "train.gradient_accumulation_steps": 8 // processes,
        "train.recompute": "full",
        "train.learning_rate": "1e-5",
        "rollout.max_completion_length": 256,
    }
    flat = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    command(
        name, [*launch_words(launcher, processes), "recipes/grpo_qlora.py", "--config", CONFIG, *flat, *extra], work
    )
    return [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]


# Padded micro-batches of peft's and bitsandbytes' layers, and all that a split base may have.
ROWS = 32  # of a step
LEVERS = {
    "plain": {"train.per_device_train_batch_size": 4},
    "levers": {
        "train.micro_batch_tokens": 4 * 1280,
        "policy.compute": "fp8",
    },
}


def demonstrations(file: Path, rows: int = 128, words: int = 160) -> None:
    """Prompts with completions of some 1,000 tokens of the small tokenizer, of different lengths."""
    import random

    numbers = random.Random(0)
    with open(file, "w") as out:
        for row in range(rows):
            text = " ".join(
                str(numbers.randrange(10_000, 99_999)) for _ in range(words - numbers.randrange(words // 4))
            )
            out.write(json.dumps({"prompt": f"{row} + 1 =", "completion": f" {text}"}) + "\n")


def fine_tune(name: str, work: Path, launcher: str, levers: str) -> dict:
    """Figures of supervised steps on 32 demonstrations: an update without rollouts, split or whole."""
    keys = {"run.name": name, "run.output_dir": work / name, "model.path": work / "model", "model.dtype": "bfloat16"}
    keys |= {"data.path": work / "demonstrations.jsonl", "sft.rows": "prompt_completion", "train.max_steps": 4}
    keys |= {"train.save_steps": 4, "train.recompute": "full", "rollout.max_completion_length": 1216}
    keys |= {
        "rollout.max_prompt_length": 64,
        "data.heldout_fraction": 0.1,
        "data.train_split": "train",
        "data.eval_split": "heldout",
        "watch.eval_every": 0,
        "train.learning_rate": "1e-5",
        **LEVERS[levers],
    }
    processes = LAUNCHERS[launcher]
    each = ROWS // processes
    micro = int(keys.setdefault("train.per_device_train_batch_size", each))
    keys["train.gradient_accumulation_steps"] = each // micro
    flat = [f"--{key}={value}" for key, value in keys.items()]
    recipe = ["recipes/sft_qlora.py", "--config", "recipes/configs/sft-tiny-nf4-cpu.yaml"]
    command(name, [*launch_words(launcher, processes), *recipe, *flat], work)
    rows = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    return {
        "what": f"{launcher} x {processes}, {levers}",
        "update_s": statistics.median(row["seconds"]["update"] for row in rows[1:]),
        "tok_s": statistics.median(row["update_tokens_per_s"] for row in rows[1:]),
        "peak_gib": rows[-1]["peak_gib"]["update"],
        "loss": [row["loss"] for row in rows],
        "grad_norm": [row["grad_norm"] for row in rows],
    }


def levers_part(work: Path, launchers: list[str], sides: list[str], words: int, out: Path) -> None:
    """Print what fine-tuning takes with the levers off and on; exit 1 if a split base computes another loss."""
    demonstrations(work / "demonstrations.jsonl", words=words)
    rows = []
    for levers in sides:
        for one in launchers:
            rows.append(fine_tune(f"{one}-{levers}", work, one, levers))
            out.write_text(json.dumps(rows, indent=2))
    print(f"{f'{ROWS} rows of about {6 * words:,} tokens':<32} update s   tok/s  GiB a card  loss of each step")
    for one in rows:
        losses = " ".join(f"{value:.4f}" for value in one["loss"])
        print(f"{one['what']:<32} {one['update_s']:8.2f} {one['tok_s']:7,.0f} {one['peak_gib']:11.2f}  {losses}")
    apart = [
        f"{one['what']}: loss {one['loss'][0]:.5f}, {first['what']} {first['loss'][0]:.5f}"
        for one in rows
        for first in rows
        if first["what"].split(", ")[1] == one["what"].split(", ")[1]
        and abs(one["loss"][0] / first["loss"][0] - 1) > 1e-3
    ]
    print("\n".join(apart) or "every claim holds")
    raise SystemExit(bool(apart))


def row(name: str, metrics: list[dict]) -> dict:
    """Figures of the last step, when every kernel is warm."""
    last = metrics[-1]
    seconds, peak = last["seconds"], last["peak_gib"]
    return {
        "what": name,
        "seconds": seconds,
        "rollout_tok_s": last["rollout_tokens_per_s"],
        "update_tok_s": last["update_tokens_per_s"],
        "peak_rollout_gib": peak["rollout"],
        "peak_update_gib": peak["update"],
        "kl_step1": metrics[0]["kl"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, help="default /tmp/path8b, of a rehearsal a new directory")
    parser.add_argument("--part", choices=("model", "local", "parallel", "levers"), required=True)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS), help="of parallel and levers"
    )
    parser.add_argument("--sides", nargs="+", choices=LEVERS, default=list(LEVERS), help="of levers")
    parser.add_argument("--processes", type=int, default=2, help="of every launcher but one_gpu, a card each")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help=f"a tiny shape on a CPU, short completions; of the launchers {' and '.join(ON_CPU)} only",
    )
    parser.add_argument("--out", type=Path, help="JSON with every number")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="path8b-") if options.rehearse else "/tmp/path8b")
    shape, layers, extra = SHAPES[options.shape], options.layers, []
    if options.rehearse:
        options.launchers = [name for name in options.launchers if name in ON_CPU]
        shape, layers, extra = TINY, 2, ["--rollout.max_completion_length=16"]
        os.environ |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    work.mkdir(parents=True, exist_ok=True)
    if ROWS % options.processes:
        parser.error(f"--processes {options.processes} does not divide the {ROWS} rows of a step")
    LAUNCHERS.update({name: options.processes for name, count in LAUNCHERS.items() if count > 1})
    write_model(work, layers, shape)
    if options.part == "model":
        return
    if options.part == "levers":
        words = 8 if options.rehearse else 160
        return levers_part(work, options.launchers, options.sides, words, options.out or work / "levers.json")
    if options.part == "local":
        rows, seconds = local_part(work, extra)
    else:
        rows, seconds = parallel_part(work, extra, options.launchers)
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "seconds": seconds}, indent=2))
    print("64 completions x 256 tokens step s  rollout  update   roll tok/s  upd tok/s  GiB in rollout, update")
    for r in rows:
        s = r["seconds"]
        print(
            f"{r['what']:<26} {s['step']:6.1f} {s['rollout']:7.1f} {s['update']:8.1f} {r['rollout_tok_s']:10.0f} "
            f"{r['update_tok_s']:10.0f} {r['peak_rollout_gib']:8.1f} "
            f"{r['peak_update_gib']:6.1f}"
        )
    print({name: round(value) for name, value in seconds.items()})


def local_part(work: Path, extra: list[str]) -> tuple[list[dict], dict]:
    """Rows and seconds of the parts that need no server."""
    rows, seconds = [row("in process", train("inproc", work, extra))], {}
    config = ["--config", CONFIG, "--model.path", str(work / "model"), "--model.dtype", "bfloat16"]
    seconds["merge base"], _ = command("base", ["-m", "merge", "base", *config, "--out", str(work / "deq")], work)
    merge = ["-m", "merge", "--run", str(work / "inproc"), "--policy", "grpo", "--format", "bf16", "fp8", "w4a16"]
    seconds["merge and verify 3 formats"], table = command("merge", merge, work)
    print(table[-2500:])
    return rows, seconds


def parallel_part(work: Path, extra: list[str], launchers: list[str]) -> tuple[list[dict], dict]:
    """Rows of the same steps on one GPU and on two, with the base whole on each and split over both."""
    rows, seconds = [], {}
    for launcher in launchers:
        started, processes = time.perf_counter(), LAUNCHERS[launcher]
        rows.append(row(f"{launcher} x {processes}", train(f"run-{launcher}", work, extra, launcher, processes)))
        seconds[launcher] = time.perf_counter() - started
    return rows, seconds


if __name__ == "__main__":
    main()
