"""Generation backends: one request type and one answer type for all engines.

A backend is a function from `Asking` (and the place of the weights) to `Answers`. All follow one protocol: the chat
template applied once, the model's own stop tokens, no penalty, no top_p or top_k, no defaults from the checkpoint's
generation_config.json, and random numbers that depend only on (seed, problem, sample).
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.episodes import Episodes, play
from eval.generate import Decoder, Generation, check_sampling, generate, render_prompts, set_threads
from kit.core.chat import check_template, end_of_turn_token, model_stop_tokens, render, stop_tokens
from kit.core.checkpoint_files import from_files
from kit.core.errors import BadInput
from kit.policy import stop_texts
from kit.policy.stop_texts import StopTexts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT_TOKENS = 512  # prompt length assumed when memory for the KV cache is reserved
# vLLM raises lower nonzero temperatures to this one (vllm/sampling_params.py, 0.26 to 0.31).
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0  # of OpenAI's API; vLLM's server enforces it


@dataclass(frozen=True)
class Asking:
    """The request, the same for every checkpoint; each conversation gets `samples` completions, or episodes."""

    conversations: Sequence[list[dict]]
    max_new_tokens: int
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0
    batch_size: int = 64
    template_arguments: dict[str, Any] = field(default_factory=dict)  # data.chat_template_kwargs
    episodes: Episodes | None = None  # None: a completion is one turn
    stop: Sequence[str] = ()  # rollout.stop


@dataclass(frozen=True)
class Answers:
    """Completions and what generated them.

    `generations` are in the order of the conversations, the samples of one together. `engine` is "transformers",
    "vllm" or "server"; `dtype` is what it computed in ("unknown" if it does not say); `versions` is what to record
    about the engine besides the versions of this process.
    """

    generations: list[Generation]
    engine: str
    dtype: str
    versions: dict[str, str] = field(default_factory=dict)


def check_backend(backend: str, temperature: float, samples: int) -> None:
    """Raise `BadInput` for sampling that a backend cannot do, before anything is loaded or started."""
    check_sampling(temperature, samples)
    if backend != "transformers" and 0 < temperature < LOWEST_TEMPERATURE:
        raise BadInput(
            f"eval.temperature ({temperature}) is below {LOWEST_TEMPERATURE}, which vLLM would raise to "
            f"{LOWEST_TEMPERATURE}. Use 0 for greedy completions, or eval.backend transformers."
        )
    if backend == "server" and temperature > HIGHEST_TEMPERATURE:
        raise BadInput(
            f"eval.temperature ({temperature}) is above {HIGHEST_TEMPERATURE:g}, the maximum that servers accept."
        )


def load_tokenizer(place: str | Path, asking: Asking) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint, before its weights.

    `BadInput` if its chat template cannot render the request or cannot end a turn.
    """
    from transformers import AutoTokenizer

    tokenizer = from_files("tokenizer", place, lambda: AutoTokenizer.from_pretrained(place, trust_remote_code=False))
    end_of_turn_token(tokenizer, asking.template_arguments)
    check_template(tokenizer, asking.conversations[0], asking.template_arguments)
    stop_texts.check(tokenizer, asking.stop, render(tokenizer, asking.conversations[0], asking.template_arguments))
    return tokenizer


@dataclass(frozen=True)
class Encoded:
    """The request as a checkpoint's own tokenizer and chat template encode it, and the model's stop tokens."""

    tokenizer: "PreTrainedTokenizerBase"
    stops: list[int]
    prompts: list[list[int]]
    texts: StopTexts  # at which completions end too


def encode(place: str | Path, asking: Asking) -> Encoded:
    """Encode the request from a checkpoint's files alone, as transformers would with its model."""
    tokenizer = load_tokenizer(place, asking)
    stops = model_stop_tokens(place, tokenizer, asking.template_arguments)
    rendered = render_prompts(tokenizer, asking.conversations, asking.template_arguments)
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return Encoded(tokenizer, stops, prompts, StopTexts(tokenizer, asking.stop))


def ask_transformers(load: Callable[[], "PreTrainedModel"], place: str | Path, asking: Asking) -> Answers:
    """Generate `Answers` in this process with the model that `load` returns, then free its memory."""
    import torch

    from kit.policy.kept_weights import keeping_weights
    from merge.verify import default_device, scoring_dtype

    tokenizer = load_tokenizer(place, asking)
    model = load()
    set_threads(sum(parameter.numel() for parameter in model.parameters()))
    tokens = PROMPT_TOKENS + asking.max_new_tokens
    # Weights in NF4, or in a format that a policy was trained for, are not recomputed for every token.
    with keeping_weights(model, "auto", asking.batch_size, tokens):
        if asking.episodes is None:
            made = generate(
                model,
                tokenizer,
                asking.conversations,
                asking.max_new_tokens,
                asking.batch_size,
                temperature=asking.temperature,
                seed=asking.seed,
                samples=asking.samples,
                template_arguments=asking.template_arguments,
                stop=asking.stop,
            )
        else:
            stops = stop_tokens(model.generation_config, tokenizer, asking.template_arguments)
            texts = StopTexts(tokenizer, asking.stop)
            decoder = Decoder(model, tokenizer, stops, asking.batch_size, asking.temperature, asking.seed, texts)
            made = play(asking.episodes, tokenizer, stops, asking.samples, decoder.complete)
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Answers(made, "transformers", str(scoring_dtype(default_device())).removeprefix("torch."))
