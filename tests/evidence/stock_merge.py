"""What stock TRL's weight sync does to an NF4 base, and what this kit's sync does. Evidence for README.md.

TRL 1.16's own code is driven: `VLLMGeneration._iter_named_params`, which its `sync_weights` exhausts once per sync
(twice for the first). It calls peft's `merge_adapter`, yields what a server would receive, calls `unmerge_adapter`.
No server receives it here; the weights are read between the two calls and after the second.
Beside it the kit's way, by the code that syncs: `AdapterFile` writes the adapter, and `kit.rollout.server.remerge`
folds that file into the NF4 copy of a base directory, as a server's workers do.

    python tests/evidence/stock_merge.py --base models/tiny-base                        # random update, 1 % of |W|
    python tests/evidence/stock_merge.py --base models/tiny-base --adapter runs/tiny/adapters/v000080 --grow 80
    python tests/evidence/stock_merge.py --base models/smollm2-135m --dtype bfloat16 --adapter RUN/adapters/v000050 \\
        --grow 80 --syncs 0 1 5 20 80 --problems_file test.jsonl --prompt_suffix $'\\nEnd with: The answer is N.' \\
        --form stated --problems 300 --max_new_tokens 64 --batch_size 300 --json found.json     # pretrained, on a GPU

Columns: `update` |ΔW| / |W|; `kept` the share of it that the merged weights hold, <merged - W, ΔW> / <ΔW, ΔW> with W
as it was before that sync; `drift` |W_k - W_0| / |W_0|; `outward` the share of the changed weights that moved away
from zero; accuracies are greedy, on held-out problems, adapter on and off, read by the `math` reward in --form.
Completions come from dequantized copies of the NF4 layers: the same weights, not dequantized anew at every token.
Left out: the training between two syncs. The adapter is the same in every sync, or with --grow N becomes larger by
1/N of itself from sync to sync, as a run's does; it is never trained on the base that the syncs before it left.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from eval.generate import generate, set_threads
from eval.stats import wilson
from eval.tasks import task_values
from kit.core.config.schema import DataConfig, RewardConfig
from kit.core.errors import BadInput, CheckFailed, run_command
from kit.core.formats import FORMATS
from kit.core.run_directory import write_json
from kit.data.problems import Problem, chat_messages, load_problems
from kit.policy.load import load_adapter_weights
from kit.rollout.adapter_file import AdapterFile
from kit.rollout.server.remerge import Linear, Part, State, merged_weights, nf4_code, read_adapter, read_copy
from kit.weights.frozen_base import dequantize, hash_base, load_nf4, plain_name
from kit.weights.write_base import NF4_FOLDER, Original
from merge.export import export
from merge.quantize import Retained, read_back
from reward import reward_functions

Weights = dict[str, torch.Tensor]  # plain module name: (out, in) in float32
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Stock:
    """The state of the base after `syncs` of TRL's syncs; accuracies are None where they were not measured."""

    syncs: int
    update: float
    kept: float | None  # of the last sync's merge
    drift: float
    outward: float | None
    accuracy_on: float | None = None
    accuracy_off: float | None = None


@dataclass(frozen=True)
class Ours:
    """What syncs of this kit leave: the base's bytes, and the share of the update in what the server computes."""

    base_unchanged: bool
    kept_bf16: float
    kept_fp8: float
    accuracy_on: float | None = None
    accuracy_off: float | None = None


@dataclass(frozen=True)
class Questions:
    """Held-out problems, how they are asked, and in which form (reward/README.md) `math` reads answers."""

    problems: list[Problem]
    conversations: list[list[dict]]
    form: str = "boxed"
    max_new_tokens: int = 40
    batch_size: int = 100


def load_policy(
    base: Path,
    adapter: Path | None = None,
    size: float = 0.01,
    seed: int = 0,
    dtype: str = "float32",
    device: str | None = None,
) -> torch.nn.Module:
    """`base` in NF4 with a LoRA adapter: the published one of a run, else random with |ΔW| = `size`·|W| per layer.

    `dtype` is the run's model.dtype, on which its base's hash depends; the small run's YAML has float32. `device`
    defaults to CUDA when there is one.
    """
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": "all-linear"}
    if adapter:
        facts = json.loads((adapter / "adapter_config.json").read_text())
        settings = {key: facts[key] for key in (*settings, "use_rslora")}
    torch.manual_seed(seed)
    model = get_peft_model(load_nf4(base, dtype, device=device), LoraConfig(**settings, task_type="CAUSAL_LM"))
    if adapter:
        load_adapter_weights(model, adapter)
        return model.eval()
    for layer in layers(model).values():
        b = layer.lora_B["default"].weight.data
        torch.nn.init.normal_(b)
        b *= size * dequantize(layer).norm() / layer.get_delta_weight("default").norm()
    return model.eval()


def layers(model: torch.nn.Module) -> dict[str, Any]:
    """{plain module name: peft layer} of the adapted NF4 linears."""
    from peft.tuners.lora.bnb import Linear4bit

    return {plain_name(name): module for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def read_weights(model: torch.nn.Module) -> Weights:
    """What the adapted layers' NF4 bytes mean now."""
    return {name: dequantize(layer).float() for name, layer in layers(model).items()}


@torch.no_grad()
def wanted_updates(model: torch.nn.Module) -> Weights:
    """s·B·A of every adapted layer."""
    return {name: layer.get_delta_weight("default").float() for name, layer in layers(model).items()}


def stock_generation(model: torch.nn.Module) -> Any:
    """TRL's `VLLMGeneration` in server mode on one process, without its server."""
    from accelerate import Accelerator
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    generation = VLLMGeneration.__new__(VLLMGeneration)  # its __init__ asks for a server
    generation.model, generation.mode, generation._weight_metadata = model, "server", None
    generation.accelerator = Accelerator(cpu=model.device.type == "cpu")
    generation._dist = DistributedBackend(generation.accelerator)
    return generation


def trl_sync(model: torch.nn.Module, read: bool = True) -> Weights:
    """One sync as TRL does it, without its receiver; returns the merged weights it passed through, if `read`."""
    merged: Weights = {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*4-bit linear may get different generations")
        for _ in stock_generation(model)._iter_named_params():
            merged = merged or (read_weights(model) if read else {})
    return merged


def kept_share(after: Weights, before: Weights, wanted: Weights) -> float:
    """<after - before, wanted> / <wanted, wanted> over all layers."""
    retained = Retained()
    for name, delta in wanted.items():
        retained.add(after[name], before[name], delta)
    share = retained.share()
    if share is None:
        raise BadInput("the adapter's update is zero, so there is nothing to keep. Pass a trained adapter.")
    return share


def relative(change: Weights, of: Weights) -> float:
    """|change| / |of| over all layers (Frobenius)."""
    squares = [sum(tensor.double().square().sum().item() for tensor in side.values()) for side in (change, of)]
    return (squares[0] / squares[1]) ** 0.5


def outward_share(now: Weights, start: Weights) -> float | None:
    """Share of the changed weights whose magnitude grew; None if none changed."""
    grew = sum(((now[name].abs() > start[name].abs()).sum().item()) for name in start)
    changed = sum(((now[name] != start[name]).sum().item()) for name in start)
    return grew / changed if changed else None


def accuracies(model: torch.nn.Module, accuracy: Callable[[], float] | None) -> tuple[float | None, float | None]:
    """With the adapter on and off; None without a way to measure."""
    if accuracy is None:
        return None, None
    with dequantized(model):
        on = accuracy()
        with model.disable_adapter():
            return on, accuracy()


@contextlib.contextmanager
def dequantized(model: torch.nn.Module) -> Iterator[None]:
    """For the length of the block, the adapted layers compute with a plain copy of what their NF4 bytes mean."""
    stored = {name: layer.base_layer for name, layer in layers(model).items()}
    for name, layer in layers(model).items():
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        # A layer that peft merged dequantizes to float32; bitsandbytes casts that to the activations' dtype.
        plain.weight = torch.nn.Parameter(dequantize(layer).to(model.dtype), requires_grad=False)
        plain.bias = stored[name].bias
        layer.base_layer = plain
    try:
        yield
    finally:
        for name, layer in layers(model).items():
            layer.base_layer = stored[name]


def growing(model: torch.nn.Module, grow: int | None) -> Callable[[int], None]:
    """A function that gives the adapter its size at a sync: syncs/grow of the whole, all of it from `grow` on."""
    whole = {name: layer.lora_B["default"].weight.data.clone() for name, layer in layers(model).items()}

    def set_size(syncs: int) -> None:
        for name, layer in layers(model).items():
            layer.lora_B["default"].weight.data = whole[name] * (min(1.0, syncs / grow) if grow else 1.0)

    return set_size


def measure_stock(
    model: torch.nn.Module, at: list[int], accuracy: Callable[[], float] | None = None, grow: int | None = None
) -> Iterator[Stock]:
    """The base after each number of syncs in `at`; the model's base is spoiled afterwards."""
    start, set_size, kept = read_weights(model), growing(model, grow), None
    for syncs in range(max(at) + 1):
        set_size(syncs)
        if syncs not in at:
            trl_sync(model, read=False)
            continue
        wanted = wanted_updates(model)
        if syncs:
            before = read_weights(model)
            kept = kept_share(trl_sync(model), before, wanted)
        now = read_weights(model)
        drift = relative({name: now[name] - start[name] for name in start}, start)
        outward = outward_share(now, start)
        yield Stock(syncs, relative(wanted, start), kept, drift, outward, *accuracies(model, accuracy))


def server_state(base: Path, facts: dict, folder: Path) -> State:
    """What a remerge worker on the trainer's device holds of `base`, from a base directory written into `folder`.

    `facts` are those of the trainer's base; `CheckFailed` when the directory's base is another one.
    """
    quantization = facts["quantization"]
    source = Original(base, quantization["storage_dtype"], quantization["double_quantization"], quantization["device"])
    written = export(source, folder / "base", {"model": str(base), "revision": None}, None)
    if written["hash"] != facts["hash"]:
        raise CheckFailed(f"the base directory holds base {written['hash'][:12]}, the trainer {facts['hash'][:12]}.")
    linears = []
    for name in facts["quantized"]:
        rows, columns = source.plan.shapes[f"{name}.weight"]
        whole = SimpleNamespace(input_size=columns)  # of vLLM's layer the copy's reader wants this much
        linears.append(Linear(name, whole, rows, columns, [Part(name, 0, rows, 0, 0)]))
    device = torch.device(quantization["device"])
    return State(linears, read_copy(folder / "base" / NF4_FOLDER, linears, device, "gpu"), nf4_code(device))


@torch.no_grad()
def measure_ours(
    model: torch.nn.Module,
    base: Path,
    syncs: int = 1,
    accuracy: Callable[[], float] | None = None,
    grow: int | None = None,
) -> Ours:
    """`syncs` syncs of this kit: the adapter to a file, and from the last file what the server computes with.

    The server's weight is dequantize(NF4) + s·B·A, rounded once to BF16, then for an FP8 server quantized per output
    channel as `merge` does it (vLLM's own quantization keeps the scale in float32); the share is against the base as
    that server holds it.
    """
    facts, set_size = hash_base(model), growing(model, grow)
    file = AdapterFile(model, getattr(torch, facts["quantization"]["storage_dtype"]), facts["hash"])
    with tempfile.TemporaryDirectory() as folder:
        state = server_state(base, facts, Path(folder))
        for version in range(1, syncs + 1):
            set_size(version)
            directory = file.write(Path(folder) / f"v{version:06d}", version)
        adapter = read_adapter(directory, state.linears, model.device)

    def computed(adapter: dict[str, tuple]) -> Weights:
        folded = merged_weights(state, adapter, model.device)
        return {linear.name: weight.to(torch.bfloat16) for linear, weight in folded}

    wanted, bf16, held = wanted_updates(model), computed(adapter), computed({})
    fp8, held_fp8 = (
        {name: read_back(FORMATS["fp8"], weight)[1] for name, weight in side.items()} for side in (bf16, held)
    )
    on, off = accuracies(model, accuracy)
    same = hash_base(model)["hash"] == facts["hash"]
    set_size(grow or 0)
    return Ours(same, kept_share(bf16, held, wanted), kept_share(fp8, held_fp8, wanted), on, off)


def read_questions(file: Path, most: int, task: str = "svamp", prompt_suffix: str = "", **more: Any) -> Questions:
    """The first `most` problems of a file in a task's columns and answer format; `more` are fields of `Questions`."""
    values = {"data": {"prompt_suffix": prompt_suffix}}
    data = DataConfig(**task_values(values, task, file)["data"], max_eval_problems=most)
    problems = load_problems(data, "eval")
    return Questions(problems, [chat_messages(data, problem) for problem in problems], **more)


def greedy_accuracy(model: torch.nn.Module, tokenizer: Any, asked: Questions) -> float:
    """Share of the problems whose greedy completion is right."""
    made = generate(model, tokenizer, asked.conversations, asked.max_new_tokens, asked.batch_size)
    (judge,), _ = reward_functions(RewardConfig(functions=["math"], options={"math": {"form": asked.form}}))
    gold = [problem.gold for problem in asked.problems]
    return sum(one == 1.0 for one in judge(asked.conversations, [one.text for one in made], gold=gold)) / len(gold)


def with_intervals(found: Stock | Ours, problems: int) -> dict[str, Any]:
    """The numbers of a row for JSON, accuracies with their 95 % Wilson intervals."""
    row = asdict(found)
    for name in ("accuracy_on", "accuracy_off"):
        row[f"{name}_interval"] = list(wilson(row[name] * problems, problems))
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", type=Path, required=True, help="directory of the 16-bit model")
    parser.add_argument("--adapter", type=Path, help="a published adapter of a run on that base; default: random")
    parser.add_argument("--size", type=float, default=0.01, help="|ΔW|/|W| of the random adapter")
    parser.add_argument("--grow", type=int, help="let the adapter grow from nothing to its size over so many syncs")
    parser.add_argument("--syncs", type=int, nargs="+", default=[0, 1, 5, 10, 20], help="after how many to look")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems for the accuracies")
    parser.add_argument("--problems_file", type=Path, help="default: heldout.jsonl of the base")
    parser.add_argument("--form", choices=("boxed", "stated", "lenient"), default="boxed", help="of a right answer")
    parser.add_argument("--task", choices=("svamp", "gsm8k", "math500"), default="svamp", help="columns of that file")
    parser.add_argument("--prompt_suffix", default="", help="appended to every question")
    parser.add_argument("--max_new_tokens", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=100, help="problems generated together")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="the run's model.dtype")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device is cuda and torch sees no GPU here. Use --device cpu.")
    if not options.base.is_dir():
        raise BadInput(f"--base {options.base} is no directory. Name one that holds a model.")
    if options.adapter and not (options.adapter / "adapter_config.json").is_file():
        raise BadInput(f"--adapter {options.adapter} holds no adapter_config.json. Name a directory RUN/adapters/v….")
    if options.json and not options.json.resolve().parent.is_dir():
        raise BadInput(f"--json {options.json}: there is no directory {options.json.resolve().parent}. Make it first.")
    return options


def main() -> None:
    options = parse()
    from transformers import AutoTokenizer

    started = time.perf_counter()
    asked = read_questions(
        options.problems_file or options.base / "heldout.jsonl",
        options.problems,
        options.task,
        options.prompt_suffix,
        form=options.form,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.base, padding_side="left")
    model = load_policy(options.base, options.adapter, options.size, options.seed, options.dtype, options.device)
    set_threads(sum(parameter.numel() for parameter in model.parameters()))
    count, last = len(asked.problems), max(options.syncs)

    def accuracy() -> float:
        return greedy_accuracy(model, tokenizer, asked)

    print(f"adapter {options.adapter or 'random'}, {count} held-out problems")
    ours = measure_ours(model, options.base, last, accuracy, options.grow)
    print(
        f"this kit after {last} syncs: base {'unchanged' if ours.base_unchanged else 'CHANGED'}, kept "
        f"{ours.kept_bf16:.3f} on a BF16 server, {ours.kept_fp8:.3f} on an FP8 server; accuracy with the adapter on "
        f"{ours.accuracy_on:.3f}, off {ours.accuracy_off:.3f}"
    )
    print("stock syncs | update | kept | drift | outward | accuracy, adapter on | off", flush=True)
    rows = []
    for row in measure_stock(model, options.syncs, accuracy, options.grow):
        values = (row.update, row.kept, row.drift, row.outward, row.accuracy_on, row.accuracy_off)
        print(row.syncs, *("–" if value is None else f"{value:.4f}" for value in values), sep=" | ", flush=True)
        rows.append(with_intervals(row, count))
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s on {options.device}")
    if options.json:
        facts = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        facts |= {"problems": count, "seconds": round(seconds, 1), "date": time.strftime("%Y-%m-%d")}
        write_json(options.json, facts | {"ours": {"syncs": last} | with_intervals(ours, count), "stock": rows})


if __name__ == "__main__":
    run_command(main)
