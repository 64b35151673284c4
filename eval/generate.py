"""Batched completions of chat prompts, with the checks that keep a measurement from being invalid.

Covers: the chat template applied exactly once, left padding, the model's own end-of-turn token as stop token, greedy
decoding, and sampling with common random numbers: every checkpoint gets the same noise for the same problem, sample,
position and token, so two nearly equal checkpoints draw nearly equal completions and their paired difference is tight.
A chat model that is fed raw prompts, or that generates past its end of turn, silently measures the wrong thing, so
both are refused before the first batch.
Not covered: top_p and top_k. Engines other than transformers are in vllm_backend.py and server_backend.py.
"""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kit.core.chat import render, special_tokens, stop_tokens
from kit.core.errors import BadInput
from kit.policy.stop_texts import StopTexts

if TYPE_CHECKING:
    from kit.rollout.episodes import EpisodeResult

SMALL_MODEL = 50_000_000  # parameters


@dataclass(frozen=True)
class Generation:
    """One completion. `text` has no special tokens, `raw` keeps those before the stop token; `tokens` excludes it.

    Of an `episode`, `text` is the last turn, `raw` all turns and answers, `said` the turns, `tokens` those sampled.
    """

    text: str
    raw: str
    tokens: int
    ended: bool
    hit_max_tokens: bool
    said: str | None = None  # what the model wrote of `raw`; None: all of it
    episode: "EpisodeResult | None" = None


def render_prompts(
    tokenizer: Any, conversations: Sequence[list[dict]], template_arguments: dict | None = None
) -> list[str]:
    """Render each conversation with the chat template applied once and the assistant's turn opened.

    `BadInput` if a message already contains a special token of the tokenizer: its text already went through a
    template, or the data would forge a turn.
    """
    special = list(special_tokens(tokenizer))
    for conversation in conversations:
        for message in conversation:
            if found := next((token for token in special if token in message["content"]), None):
                raise BadInput(
                    f"a {message['role']} message holds the special token {found}: {message['content'][:120]!r}. "
                    "The chat template is applied here, once; pass plain text."
                )
    return [render(tokenizer, turns, template_arguments or {}) for turns in conversations]


def generate(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[list[dict]],
    max_new_tokens: int,
    batch_size: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    samples: int = 1,
    template_arguments: dict | None = None,
    stop: Sequence[str] = (),
) -> list[Generation]:
    """Generate `samples` completions per conversation, those of one together, of at most `max_new_tokens` tokens each.

    `temperature` 0 is greedy; above it, tokens are drawn from softmax(logits / temperature) by the Gumbel-max method
    (Maddison et al. 2014, section 2) with noise that depends only on `seed`, the problem's index in `conversations`,
    the sample, the position and the token: not on the batch, the order or the number of samples. Prompts of similar
    length share a batch to keep padding small; results are in input order. `template_arguments` are
    `data.chat_template_kwargs`, `stop` is `rollout.stop`.
    """
    if max_new_tokens < 1 or batch_size < 1:
        raise BadInput(f"max_new_tokens ({max_new_tokens}) and batch_size ({batch_size}) must be at least 1.")
    check_sampling(temperature, samples)
    stops = stop_tokens(model.generation_config, tokenizer, template_arguments)
    rendered = render_prompts(tokenizer, conversations, template_arguments)
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    places = list(itertools.product(range(len(prompts)), range(samples)))
    texts = StopTexts(tokenizer, stop)
    decoder = Decoder(model, tokenizer, stops, batch_size, temperature, seed, texts)
    asked = [prompts[problem] for problem, _ in places]
    rows = decoder.complete(asked, places, max_new_tokens)
    return [
        finish(tokenizer, row, stops, max_new_tokens, texts, prompt) for row, prompt in zip(rows, asked, strict=True)
    ]


class Decoder:
    """Completes token ids with a model in batches, greedily or with the noise of `GumbelNoise`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stops: list[int],
        batch_size: int,
        temperature: float = 0.0,
        seed: int = 0,
        texts: StopTexts | None = None,
    ):
        self.model, self.stops, self.batch_size = model, stops, batch_size
        self.texts = texts or StopTexts(tokenizer, ())
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
        self.temperature, self.seed = temperature, seed
        model.eval()

    def complete(
        self,
        prompts: list[list[int]],
        places: Sequence[tuple[int, int]],
        max_new_tokens: int,
        starts: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Token ids after each prompt, with padding behind their end. `places` are the (problem, sample) that key
        the noise, `starts` the position of each row's first new token in it (default 0)."""
        import torch
        from transformers import LogitsProcessorList

        from kit.policy.stopping import StopCriterion, stopping

        # Longest first: fails at once if memory is short.
        order = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        rows: list[list[int]] = [[] for _ in prompts]
        with torch.inference_mode(), _plain_greedy(self.model, self.stops, self.pad, max_new_tokens) as settings:
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                batch, mask = _left_padded([prompts[row] for row in chosen], self.pad, self.model.device)
                noise = []
                if self.temperature > 0:
                    keys = [places[row] for row in chosen]
                    offsets = [starts[row] for row in chosen] if starts is not None else None
                    noise.append(GumbelNoise(self.temperature, self.seed, keys, batch.shape[1], offsets))
                criterion = StopCriterion(self.texts, [prompts[row] for row in chosen], self.stops)
                with stopping(self.model, criterion):
                    output = self.model.generate(
                        input_ids=batch,
                        attention_mask=mask,
                        generation_config=settings,
                        logits_processor=LogitsProcessorList(noise),
                    )
                for row, ids in zip(chosen, output[:, batch.shape[1] :].tolist(), strict=True):
                    rows[row] = ids
        return rows


def check_sampling(temperature: float, samples: int) -> None:
    """Raise `BadInput` for a temperature below 0, no sample, or several samples that would all be the greedy one."""
    if not temperature >= 0 or samples < 1:
        raise BadInput(
            f"eval.temperature ({temperature}) must be 0 (greedy) or above, eval.samples ({samples}) at least 1."
        )
    if samples > 1 and temperature == 0:
        raise BadInput(
            f"eval.samples is {samples} and eval.temperature is 0: greedy decoding gives {samples} times the same "
            "completion. Raise eval.temperature (the run's own is rollout.temperature), or leave eval.samples at 1."
        )


class GumbelNoise:
    """A logits processor after which argmax is an exact sample of softmax(scores / temperature).

    The noise of a token is a hash of (seed, problem, sample, position, token): it is the same for every checkpoint and
    any batch, and on every device up to the last bits of a float32 logarithm. `rows` are the (problem, sample) of the
    batch's rows, where a problem is its index among all problems; `starts` the positions at which they go on.
    """

    def __init__(
        self,
        temperature: float,
        seed: int,
        rows: Sequence[tuple[int, int]],
        prompt_length: int,
        starts: Sequence[int] | None = None,
    ):
        self.temperature, self.prompt_length = temperature, prompt_length
        self.keys = [sample_key(seed, problem, sample) for problem, sample in rows]
        self.starts = [0] * len(rows) if starts is None else list(starts)

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # (B, T) and (B, V) -> (B, V)
        import torch

        positions = torch.tensor(self.starts, device=scores.device) + (input_ids.shape[1] - self.prompt_length)
        streams = _mix(torch.tensor(self.keys, device=scores.device) + positions * _STEP)
        # On a CPU, one row at a time stays in the cache: 2.4 times as fast at V = 151,936.
        rows = streams.split(1) if scores.device.type == "cpu" else [streams]
        noise = torch.cat([_gumbel(row, scores.shape[1]) for row in rows])
        return noise.add_(scores.float() / self.temperature)


# SplitMix64 (Steele, Lea and Flood 2014): a 64-bit counter times an odd constant, mixed. Constants are signed
# integers, whose products wrap around in the same way.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXERS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def sample_key(seed: int, problem: int, sample: int) -> int:
    """64-bit signed seed from which all random numbers of one completion derive."""
    digest = hashlib.blake2b(f"{seed}/{problem}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _mix(values: Any) -> Any:
    """Apply SplitMix64's finalizer to an int64 tensor in place."""
    for shift, factor in _MIXERS:
        values ^= (values >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # the mask makes the shift a logical one
        values *= factor
    values ^= (values >> 31).bitwise_and_((1 << 33) - 1)
    return values


def _gumbel(streams: Any, width: int) -> Any:
    """Gumbel noise (rows, width) in float32, one stream of counters per row (int64)."""
    import torch

    counters = torch.arange(width, device=streams.device) * _STEP
    top = (_mix(streams[:, None] + counters) >> 32).bitwise_and_((1 << 32) - 1)
    # -log(-log(1 - v)): near v = 0, where the large values come from, float32 has all 32 bits of v.
    uniform = top.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def set_threads(parameters: int) -> None:
    """Limit torch to one CPU thread for a model whose matrices are too small to split (measured in MEASUREMENTS.md).

    OMP_NUM_THREADS in the environment takes precedence if it is set.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and parameters < SMALL_MODEL:
        torch.set_num_threads(1)


@contextmanager
def _plain_greedy(model: Any, stops: list[int], pad: int, max_new_tokens: int) -> Iterator[Any]:
    """Yield generation settings with only greedy, stop and pad, and hide the model's own meanwhile.

    transformers fills what a passed configuration leaves unset from the model's own: Qwen2.5-Instruct ships
    repetition_penalty 1.1, which would change greedy completions.
    """
    from transformers import GenerationConfig

    own = model.generation_config
    settings = GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=stops, pad_token_id=pad
    )
    model.generation_config = settings
    try:
        yield settings
    finally:
        model.generation_config = own


def _left_padded(rows: list[list[int]], pad: int, device: Any) -> tuple[Any, Any]:
    """Token ids and attention mask, both (B, longest): a decoder continues from the last column."""
    import torch

    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def finish(
    tokenizer: Any,
    row: list[int],
    stops: list[int],
    max_new_tokens: int,
    texts: StopTexts | None = None,
    prompt: Sequence[int] = (),
) -> Generation:
    """The completion of the token ids `prompt` up to its first stop token, or through the first stop text; what
    follows is padding."""
    end = next((place for place, token in enumerate(row) if token in stops), None)
    kept = row[:end]
    if texts and (length := texts.length(prompt, kept)) is not None:
        end, kept = length, kept[:length]
    return Generation(
        text=tokenizer.decode(kept, skip_special_tokens=True),
        raw=tokenizer.decode(kept, skip_special_tokens=False),
        tokens=len(kept),
        ended=end is not None,
        hit_max_tokens=end is None and len(kept) >= max_new_tokens,
    )
