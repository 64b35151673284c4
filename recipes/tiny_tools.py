"""Make the starting models of the environments: small Qwen3s that call a tool, badly.

As recipes/tiny_base.py (0.8 M parameters, supervised on noisy demonstrations of its own), with a chat template that
renders tools, calls and results, and a response template by which transformers reads the calls. The demonstrations
are episodes played with the classes of recipes/environments:

    calculator   "Tom has 37 boxes of 48 apples and sells 12. …" Some demonstrations call the calculator with the
                 right expression, some misread a digit, some box a guess without a call. A fifth has no tool in the
                 prompt and boxes the true result, so the model shows what it can do without one.
    guess        a secret number of 1 to 7, found by "higher" and "lower". A quarter of the games are played well,
                 in the others every guess is drawn from the whole range.

    python recipes/tiny_tools.py --task calculator --out models/tiny-calculator
    python recipes/tiny_tools.py --task guess --out models/tiny-guess

Deterministic from --seed for one machine and torch version. Writes the model, its tokenizer, and the problems as
`train.jsonl` and `heldout.jsonl` (columns question, answer).
"""

import argparse
import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.errors import BadInput, run_command
from kit.core.run_directory import publish, write_manifest
from recipes.environments.calculator import Calculator
from recipes.environments.guess import GuessNumber
from recipes.tiny_base import PEOPLE, THINGS, Row, held_out, make_model, supervise, train_bpe, with_template

if TYPE_CHECKING:  # imported late, so that --help and a refused option return at once
    from transformers import PreTrainedTokenizerFast

# A tool is shown by its name and its parameters: its JSON schema would be ten times as long as the question. Earlier
# messages are rendered the same whatever follows them, which several turns need.
CHAT_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}
{%- if tools or system %}
    {{- '<|im_start|>system\\n' + system }}
    {%- for tool in tools or [] %}
        {{- '\\n' if system or not loop.first else '' }}
        {{- tool['function']['name'] + '(' + tool['function']['parameters']['properties'] | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages[(1 if messages[0]['role'] == 'system' else 0):] %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] or '' }}
            {%- for call in message['tool_calls'] or [] %}
                {{- '<tool_call>{"name": "' + call['function']['name'] + '", "arguments": ' }}
                {{- call['function']['arguments'] | tojson + '}</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
# Shares of the demonstrations of `calculator` with the tool: the right call, a call with a mistake; the rest guesses.
RIGHT_CALL, WRONG_CALL = 0.40, 0.25
WITHOUT_TOOL = 0.20  # share of all its demonstrations
STORIES = {
    "{a}*{b}": "{who} has {a} boxes of {b} {what}. How many {what}?",
    "{a}*{b}+{c}": "{who} has {a} boxes of {b} {what} and buys {c} more. How many {what}?",
    "{a}*{b}-{c}": "{who} has {a} boxes of {b} {what} and sells {c}. How many {what}?",
}
PLAYED_WELL = 0.25  # share of the games of `guess`; in the others, guesses are at random
MARKS = re.compile(r"<\|im_start\|>|<\|im_end\|>|</?tool_call>")
Episode = tuple[list[dict], list[Callable] | None]  # messages, tools of the prompt


def call(function: Callable, **arguments: Any) -> list[dict]:
    """The assistant's message that calls a tool, and the tool's answer."""
    asked = {"type": "function", "function": {"name": function.__name__, "arguments": arguments}}
    answer = {"role": "tool", "name": function.__name__, "content": function(**arguments)}
    return [{"role": "assistant", "content": "", "tool_calls": [asked]}, answer]


def make_sums(count: int, heldout: bool, rng: random.Random) -> list[dict]:
    """`count` distinct word problems on a product; held-out ones have pairs of factors that training has not."""
    rows: dict[str, dict] = {}
    while len(rows) < count:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        if held_out(a, b) != heldout:
            continue
        expression, story = rng.choice(list(STORIES.items()))
        numbers: dict[str, Any] = {"a": a, "b": b, "c": c}
        question = story.format(who=rng.choice(PEOPLE), what=rng.choice(THINGS), **numbers)
        written = expression.format(**numbers)
        rows[question] = {"question": question, "answer": Calculator().calculate(written), "expression": written}
    return list(rows.values())


def misread(expression: str, rng: random.Random) -> str:
    """The expression with one digit changed."""
    places = [index for index, character in enumerate(expression) if character.isdigit()]
    place = rng.choice(places)
    digit = rng.choice([digit for digit in "123456789" if digit != expression[place]])
    return expression[:place] + digit + expression[place + 1 :]


def show_sum(row: dict, rng: random.Random) -> Episode:
    """One noisy demonstration of a sum, with the calculator or without."""
    question = {"role": "user", "content": row["question"]}
    if rng.random() < WITHOUT_TOOL:
        return [question, {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"}], None
    calculator, kind, messages = Calculator(), rng.random(), [question]
    if kind < RIGHT_CALL + WRONG_CALL:
        expression = row["expression"] if kind < RIGHT_CALL else misread(row["expression"], rng)
        messages += call(calculator.calculate, expression=expression)
        answer = messages[-1]["content"]
    else:
        answer = str(max(0, round(int(row["answer"]) * rng.uniform(0.8, 1.2))))
    return [*messages, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}], [calculator.calculate]


def make_games(count: int, heldout: bool, rng: random.Random) -> list[dict]:
    """`count` games with a secret each; held-out ones have other numbers. A prompt names its game, so none repeats."""
    numbers = rng.sample(range(0 if heldout else 1, 100_000, 2), count)
    highest = GuessNumber().highest
    secrets = [rng.randint(1, highest) for _ in numbers]
    return [
        {"question": f"Game {number}: find my number, 1 to {highest}.", "answer": str(secret)}
        for number, secret in zip(numbers, secrets, strict=True)
    ]


def show_game(row: dict, rng: random.Random) -> Episode:
    """One game in the right form: played well, by the middle of what is left, or with guesses at random."""
    game, messages = GuessNumber(), [{"role": "user", "content": row["question"]}]
    game.reset(answer=row["answer"])
    is_played_well = rng.random() < PLAYED_WELL
    while game.made < game.guesses and not game.found_at:
        number = (game.low + game.high) // 2 if is_played_well else rng.randint(1, game.highest)
        messages += call(game.guess, number=number)
    return [*messages, {"role": "assistant", "content": "Found." if game.found_at else "I give up."}], [game.guess]


TASKS: dict[str, tuple[Callable[..., list[dict]], Callable[..., Episode]]] = {
    "calculator": (make_sums, show_sum),
    "guess": (make_games, show_game),
}


def make_tokenizer(episodes: list[Episode], context: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer of at most 400 tokens: one per digit and line break, runs of punctuation together."""
    from tokenizers import AddedToken
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = [
        render_jinja_template([messages], tools=tools, chat_template=CHAT_TEMPLATE)[0][0]
        for messages, tools in episodes
    ]
    pieces = [piece for text in texts for piece in MARKS.split(text)]
    tokenizer = train_bpe(r"\d| ?[A-Za-z]+|\n|[^A-Za-z\d\n]+", pieces)
    # Ordinary tokens, as in Qwen3: what is decoded keeps them, so a call can be read.
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    made = with_template(tokenizer, CHAT_TEMPLATE, context)
    made.response_template = RESPONSE_TEMPLATE
    return made


def encode(tokenizer: "PreTrainedTokenizerFast", episode: Episode) -> Row:
    """Token ids of an episode; only the assistant's turns are learned."""
    messages, tools = episode
    encoded = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--task", choices=list(TASKS), required=True, help="environment to make a model for")
    parser.add_argument("--out", help="directory to write; default models/tiny-<task>")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="supervised steps; 0 leaves the weights random")
    parser.add_argument("--batch", type=int, default=32, help="episodes per step")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512, help="longest prompt and episode together, in tokens")
    parser.add_argument("--problems", type=int, default=20_000, help="training problems")
    parser.add_argument("--heldout", type=int, default=600, help="held-out problems")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="data-parallel processes")
    parser.add_argument("--device", default="cpu", help="where it trains: cpu, with --processes, or cuda")
    parser.add_argument("--dry_run", action="store_true", help="check the options, make nothing")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    options.out = options.out or f"models/tiny-{options.task}"
    if options.hidden % 64:
        raise BadInput(f"--hidden ({options.hidden}) must be a multiple of 64.")
    if options.processes < 1 or options.batch % options.processes:
        raise BadInput(f"--processes ({options.processes}) must divide --batch ({options.batch}).")
    if max(options.problems, options.heldout) > 50_000:
        raise BadInput("--problems and --heldout go up to 50,000 each.")
    if options.dry_run:
        print(f"would make {options.out}: {options.steps} steps on {options.problems:,} problems", flush=True)
        return
    make, show = TASKS[options.task]
    with publish(Path(options.out), options.overwrite) as out:
        rng = random.Random(options.seed)
        train = make(options.problems, False, rng)
        heldout = make(options.heldout, True, rng)
        for name, rows in (("train", train), ("heldout", heldout)):
            lines = [json.dumps({"question": row["question"], "answer": row["answer"]}) for row in rows]
            (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        import torch

        torch.manual_seed(options.seed)
        episodes = [show(row, rng) for row in train]
        tokenizer = make_tokenizer(episodes[:3000], options.context)
        model = make_model(tokenizer, options.hidden, options.layers, options.context)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
        if options.steps:
            supervise(model, [encode(tokenizer, episode) for episode in episodes], options)
        model.to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
        write_manifest(out, "tiny-tools", options=vars(options))
    print(f"wrote {options.out}", flush=True)


if __name__ == "__main__":
    run_command(main)
