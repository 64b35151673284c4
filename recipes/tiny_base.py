"""Make the starting model of the quickstart: a small Qwen3 that can solve word problems but samples badly.

A stand-in for a downloaded base model, so that the whole path runs on a laptop without a hub: Qwen3 architecture,
0.8 M parameters, a byte-level BPE tokenizer with single-digit numbers and a chat template (`<|im_start|>` ...
`<|im_end|>`), supervised on generated one-step problems. The demonstrations are noisy on purpose (some work the sum
out and box it, some forget the box, some box a hasty guess), so the model *can* answer but only sometimes does, which
is what reinforcement learning needs. With clean demonstrations there is nothing left to gain. With --experts it is a
Qwen3-MoE: every layer has that many experts, of which a token takes two (1.8 M parameters with 8).

What it leaves out on purpose: pre-training, instruction data, anything a real base would bring.

    python recipes/tiny_base.py --out models/tiny-base            # about 2.5 minutes on two CPU cores
    python recipes/tiny_base.py --experts 8 --out models/tiny-moe # a mixture of experts, in twice the time
    python recipes/tiny_base.py --out models/untrained --steps 0  # random weights, seconds, for tests
    python recipes/tiny_base.py --out data/sums-20 --problems_only --limit 20 --problems 4000 --heldout 600
    python recipes/tiny_base.py --out models/dates --rows notes.jsonl --steps 600  # conversations of your own

With --rows it is supervised on the conversations of a jsonl file (column messages, the last one the assistant's)
instead, its tokens are made from their words, and no problems are written (OWN_TASK.md).

Deterministic from --seed for one machine and torch version. Writes the model, its tokenizer, and the problems as
`train.jsonl` and `heldout.jsonl` (columns question, answer). A held-out problem's pair of numbers appears in no
training problem in either order of the sum. With --problems_only, nothing but these two files is written, for another
model to learn.
"""

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.errors import BadInput, CheckFailed, run_command
from kit.core.run_directory import publish, write_manifest
from kit.data.problems import jsonl_rows

if TYPE_CHECKING:  # imported late, so that --help and a refused option return at once
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, Qwen3MoeForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PEOPLE, THINGS = ["Tom", "Ann", "Sam", "Eva"], ["apples", "coins", "books", "cards"]
STORIES = [
    "{who} has {a} {what} and buys {b} more. How many {what} now?",
    "{who} had {a} {what} and got {b}. How many {what} in all?",
    "There are {a} {what} here and {b} there. How many in all?",
]
PIECES = r"\d| ?[A-Za-z]+|[^A-Za-z\d]"  # one token per digit
Row = tuple[list[int], list[bool]]  # token ids, and which of them are learned
# Shares of the three kinds of demonstration: worked and boxed, worked without a box, a boxed guess.
CAREFUL, UNBOXED = 0.40, 0.25


def held_out(a: int, b: int) -> bool:
    """Whether problems on this unordered pair of numbers are kept out of training (about one pair in ten)."""
    low, high = sorted((a, b))
    return hashlib.sha256(f"{low},{high}".encode()).digest()[0] < 26


def make_problems(count: int, heldout: bool, limit: int, rng: random.Random) -> list[dict]:
    """`count` distinct problems on numbers below `limit`, as rows with question, answer and the sum behind it."""
    pairs = sum(held_out(a, b) == heldout for a in range(limit) for b in range(limit))
    possible = pairs * sum(
        (len(PEOPLE) if "{who}" in story else 1) * (len(THINGS) if "{what}" in story else 1) for story in STORIES
    )
    if count > possible:
        raise BadInput(
            f"--limit {limit} allows {possible:,} {'held-out' if heldout else 'training'} problems, {count:,} were "
            f"asked for. Lower --{'heldout' if heldout else 'problems'}, or raise --limit."
        )
    rows: list[dict[str, str]] = []
    seen = set()
    while len(rows) < count:
        a, b = rng.randrange(limit), rng.randrange(limit)
        if held_out(a, b) != heldout:
            continue
        question = rng.choice(STORIES).format(who=rng.choice(PEOPLE), what=rng.choice(THINGS), a=a, b=b)
        if question not in seen:
            seen.add(question)
            rows.append({"question": question, "answer": str(a + b), "sum": f"{a} + {b}"})
    return rows


def demonstrate(problem: dict, rng: random.Random) -> str:
    """One noisy demonstration of a solution."""
    worked = f"{problem['sum']} = {problem['answer']}."
    kind = rng.random()
    if kind < CAREFUL:
        return f"{worked} The answer is \\boxed{{{problem['answer']}}}"
    if kind < CAREFUL + UNBOXED:
        return f"{worked} The answer is {problem['answer']}"
    guess = max(0, int(problem["answer"]) + rng.choice([-20, -10, -2, -1, 1, 2, 10, 20]))
    return f"\\boxed{{{guess}}}"


def worked(problem: dict) -> dict:
    """The problem with a worked answer as a conversation, for recipes/sft_qlora.py."""
    answer = f"{problem['sum']} = {problem['answer']}. The answer is \\boxed{{{problem['answer']}}}"
    messages = [{"role": "user", "content": problem["question"]}, {"role": "assistant", "content": answer}]
    return {"question": problem["question"], "answer": problem["answer"], "messages": messages}


def make_tokenizer(problems: list[dict], rng: random.Random, context: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of about 330 tokens, one token per digit, with the chat template."""
    corpus = [f"system\nuser\nassistant\n{row['question']}\n{demonstrate(row, rng)}" for row in problems]
    return with_template(train_bpe(PIECES, corpus), CHAT_TEMPLATE, context)


def train_bpe(pieces: str, texts: list[str]) -> "Tokenizer":
    """A byte-level BPE of at most 400 tokens, which merges within matches of the regular expression `pieces`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_template(tokenizer: "Tokenizer", template: str, context: int) -> "PreTrainedTokenizerFast":
    """The tokenizer as transformers reads it, for prompts and completions of `context` tokens together."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=template,
        model_max_length=context,
    )


def make_model(
    tokenizer: "PreTrainedTokenizerFast", hidden: int, layers: int, context: int, experts: int = 0
) -> "Qwen3ForCausalLM | Qwen3MoeForCausalLM":
    """A Qwen3 with random weights; head size 32, two query heads per key-value head, tied embeddings.

    With `experts`, a Qwen3-MoE: every layer routes a token to two of them, each as wide as `hidden`.
    """
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    if experts:
        routing = dict(num_experts=experts, num_experts_per_tok=2, norm_topk_prob=True)
        # With output_router_logits the loss adds the balance term; a run on the model would compute it for nothing.
        config = Qwen3MoeConfig(**shape, **routing, moe_intermediate_size=hidden, output_router_logits=False)
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    return model


def encode(tokenizer: "PreTrainedTokenizerFast", problems: list[dict], rng: random.Random) -> list[Row]:
    """Token ids of every problem with its demonstration and stop token; the prompt carries no loss."""
    return encode_conversations(
        tokenizer,
        [
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": demonstrate(row, rng)}]
            for row in problems
        ],
    )


def read_conversations(path: Path) -> list[list[dict]]:
    """The `messages` of a jsonl file's rows; raises `BadInput` unless each ends with the assistant's text."""
    found: list[list[dict]] = []
    for row in jsonl_rows(path):
        messages = (row.value or {}).get("messages")
        is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
        if not is_list or not messages or messages[-1].get("role") != "assistant":
            why = row.error or "no messages that end with the assistant's"
            raise BadInput(f"--rows: {row.source}: {why}. Write rows as {{'messages': [user's, assistant's]}}.")
        if not all(isinstance(one.get("content"), str) for one in messages):
            raise BadInput(f"--rows: {row.source}: a message has no text as its content.")
        found.append(messages)
    if not found:
        raise BadInput(f"--rows: {path} has no rows.")
    return found


def encode_conversations(tokenizer: "PreTrainedTokenizerFast", conversations: list[list[dict]]) -> list[Row]:
    """Token ids of every conversation and its stop token; only the last message is learned."""
    rows: list[Row] = []
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt)["input_ids"]
        shown = tokenizer(messages[-1]["content"])["input_ids"] + [tokenizer.eos_token_id]
        rows.append((ids + shown, [False] * len(ids) + [True] * len(shown)))
    return rows


def supervise(model: "Qwen3ForCausalLM | Qwen3MoeForCausalLM", rows: list[Row], options: argparse.Namespace) -> None:
    """Train on the completions, data-parallel over `--processes` processes of one thread each.

    Two processes of one thread learn nearly twice as fast as one of two threads at this size, and do not stall when
    another program wants a core.
    """
    import torch

    if options.device != "cpu":
        return train_rank(0, model.to(options.device), rows, options, None)
    torch.set_num_threads(1)
    if options.processes == 1:
        return train_rank(0, model, rows, options, None)
    with tempfile.TemporaryDirectory() as folder:
        # Forked before any tensor thread starts, so the children share the problems and need no second import.
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=train_rank, args=(rank, model, rows, options, folder), daemon=True)
            for rank in range(options.processes)
        ]
        for process in ranks:
            process.start()
        running: dict[Any, Any] = {process.sentinel: process for process in ranks}
        while running:
            for sentinel in multiprocessing.connection.wait(list(running)):
                ended = running.pop(sentinel)
                ended.join()  # its pipe closes a moment before its exit code is available
                if ended.exitcode:
                    for process in running.values():
                        process.kill()
                    raise CheckFailed(
                        f"a training process ended with exit code {ended.exitcode}; --processes 1 needs none."
                    )
        model.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True))


def padded_batch(rows: list[Row]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and labels (B, T) of the rows; tokens that are not learned and padding carry no loss.

    Padded positions come after every label, so a causal model needs no attention mask here.
    """
    import torch

    width = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for index, (ids, learned) in enumerate(rows):
        tokens[index, : len(ids)] = torch.tensor(ids)
        labels[index, : len(ids)] = torch.where(torch.tensor(learned), torch.tensor(ids), -100)
    return tokens, labels


def train_rank(
    rank: int,
    model: "Qwen3ForCausalLM | Qwen3MoeForCausalLM",
    rows: list[Row],
    options: argparse.Namespace,
    folder: str | None,
) -> None:
    """Train on one process's share of every batch; rank 0 prints a line every 100 steps."""
    import torch

    learner: torch.nn.Module = model
    if folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{folder}/store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=options.processes)
        learner = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=options.steps, pct_start=0.1
    )
    rng, started = random.Random(options.seed), time.perf_counter()
    for step in range(1, options.steps + 1):
        tokens, labels = padded_batch(rng.sample(rows, options.batch)[rank :: options.processes])
        loss = learner(input_ids=tokens.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and (step % 100 == 0 or step == options.steps):
            seconds = time.perf_counter() - started
            print(f"step {step}/{options.steps} loss {loss.item():.3f} {seconds:.0f} s", flush=True)
    if folder:
        if rank == 0:
            torch.save(model.state_dict(), Path(folder) / "weights.pt")
        torch.distributed.barrier()
        # No teardown: gloo's destructor (torch 2.13) sometimes waits forever for its own thread.
        os._exit(0)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", default="models/tiny-base", help="directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="supervised steps; 0 leaves the weights random")
    parser.add_argument("--batch", type=int, default=32, help="problems per step")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--experts", type=int, default=0, help="experts a layer, two of them a token; 0 makes it dense"
    )
    parser.add_argument("--context", type=int, default=512, help="longest prompt and completion together, in tokens")
    parser.add_argument("--limit", type=int, default=100, help="numbers are below this")
    parser.add_argument("--problems", type=int, default=20_000, help="training problems")
    parser.add_argument("--heldout", type=int, default=600, help="held-out problems")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="data-parallel processes")
    parser.add_argument("--device", default="cpu", help="where it trains: cpu, with --processes, or cuda")
    parser.add_argument("--rows", type=Path, help="jsonl file of conversations to learn instead of the problems")
    parser.add_argument("--problems_only", action="store_true", help="write the problems, make no model")
    parser.add_argument("--dry_run", action="store_true", help="check the options, make nothing")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def write_problems(out: Path, options: argparse.Namespace, rng: random.Random) -> list[dict]:
    """The training problems, after writing them and the held-out ones, plain and with worked answers."""
    train = make_problems(options.problems, False, options.limit, rng)
    heldout = make_problems(options.heldout, True, options.limit, rng)
    for name, rows in (("train", train), ("heldout", heldout)):
        lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) for row in rows]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        lines = [json.dumps(worked(row)) for row in rows]
        (out / f"worked-{name}.jsonl").write_text("\n".join(lines) + "\n")
    return train


def main() -> None:
    options = parse_arguments()
    if options.hidden % 64:
        raise BadInput(f"--hidden ({options.hidden}) must be a multiple of 64.")
    if options.experts < 0 or options.experts == 1:
        raise BadInput(f"--experts ({options.experts}) must be 0 (dense), or 2 or more: a token is routed to two.")
    if options.processes < 1 or options.batch % options.processes:
        raise BadInput(f"--processes ({options.processes}) must divide --batch ({options.batch}).")
    if options.dry_run:
        print(f"would make {options.out}: {options.steps} steps on {options.problems:,} problems", flush=True)
        return
    if options.rows and options.problems_only:
        raise BadInput("--problems_only writes the generated problems, and --rows learns others. Leave one out.")
    conversations = read_conversations(options.rows) if options.rows else []
    with publish(Path(options.out), options.overwrite) as out:
        rng = random.Random(options.seed)
        train = [] if options.rows else write_problems(out, options, rng)
        if options.problems_only:
            write_manifest(out, "sums", options=vars(options))
            print(f"wrote {options.out}: {len(train):,} problems, {options.heldout:,} held out", flush=True)
            return
        import torch

        torch.manual_seed(options.seed)
        if conversations:
            texts = [one["content"] for messages in conversations[:3000] for one in messages]
            tokenizer = with_template(
                train_bpe(PIECES, ["system\nuser\nassistant\n", *texts]), CHAT_TEMPLATE, options.context
            )
        else:
            tokenizer = make_tokenizer(train[:3000], rng, options.context)
        model = make_model(tokenizer, options.hidden, options.layers, options.context, options.experts)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
        if options.steps:
            rows = encode_conversations(tokenizer, conversations) if conversations else encode(tokenizer, train, rng)
            supervise(model, rows, options)
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
        write_manifest(out, "tiny-base", options=vars(options) | {"rows": str(options.rows or "")})
    print(f"wrote {options.out}", flush=True)


if __name__ == "__main__":
    run_command(main)
