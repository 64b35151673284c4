"""Stop texts (`rollout.stop`): the one rule by which a completion ends at a text, for every sampler.

A completion ends with the first token after which its text holds a stop text. Its text is what vLLM's detokenizer
makes of its tokens (`FastIncrementalDetokenizer`, vLLM 0.31): special tokens are skipped, the prompt is context and no
part of it, and a character whose bytes are in several tokens appears with the last of them. Here the same decoder of
`tokenizers` is asked token by token, so policy, servers and evaluation stop at the same token. That token stays in the
completion. Imports no torch.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kit.core.chat import special_tokens
from kit.core.config.rollout_rules import STOP as KEY
from kit.core.config.rollout_rules import stop_faults
from kit.core.errors import BadInput

_RESET = "Invalid prefix encountered"  # of tokenizers, after which vLLM starts a new stream


def check(tokenizer: Any, texts: Sequence[str], prompt: str) -> None:
    """Raise `BadInput` for a stop text that cannot work with this tokenizer, or with which `prompt`, a rendered prompt
    of the run, ends. Blanks and line ends may end a prompt: only the completion is searched."""
    if not texts:
        return
    if faults := stop_faults(texts):
        raise BadInput("\n".join(faults))
    if not hasattr(tokenizer, "_tokenizer"):
        raise BadInput(
            f"{KEY}: the tokenizer of {tokenizer.name_or_path} ({type(tokenizer).__name__}) is not one of the package "
            "tokenizers, whose decoder finds the texts. Save it as tokenizer.json, or leave the key out."
        )
    special = [token for token in special_tokens(tokenizer) if token]
    for text in texts:
        if found := next((token for token in special if token in text), None):
            raise BadInput(
                f"{KEY} has {text!r}, which holds the special token {found}: special tokens are no part of a "
                "completion's text, so it would never be found. Name the text around it, or add the token's id to "
                "eos_token_id in generation_config.json of a local copy (model.path)."
            )
        if text.strip() and prompt.endswith(text):
            raise BadInput(
                f"{KEY} has {text!r}, with which every prompt ends: {prompt[-40:]!r}. Only the completion is "
                "searched. Name a text that the model writes."
            )


class StopTexts:
    """The stop texts of a run and the tokenizer that decodes completions; without texts nothing ends at one."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self.texts = tuple(texts)
        self.tokenizer = getattr(tokenizer, "_tokenizer", None) if texts else None

    def __bool__(self) -> bool:
        return bool(self.texts)

    def watch(self, prompt_ids: Sequence[int]) -> "Watch":
        """Follow one completion of a prompt while it is sampled."""
        return Watch(self.tokenizer, self.texts, prompt_ids)

    def length(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> int | None:
        """Number of tokens through the first one that completes a stop text; None if there is none in `ids`."""
        if not self.texts:
            return None
        watch = self.watch(prompt_ids)
        return next((count for count, token in enumerate(ids, 1) if watch.add(token)), None)

    def cut(self, prompt_ids: Sequence[int], ids: list[int]) -> list[int]:
        """The completion `ids` of a prompt through the token that ends it, or all of it."""
        return ids[: self.length(prompt_ids, ids)]

    def has_ended(self, prompt_ids: Sequence[int], ids: Sequence[int], most: int, stop_ids: set[int]) -> bool:
        """Whether a sampled completion of at most `most` tokens ended by itself: at one of the tokens `stop_ids`, or
        at a stop text."""
        if ids[-1] in stop_ids:
            return True
        # A sampler ends earlier for no other reason, so the text is decoded only where its limit may be the reason.
        return bool(self.texts) and (len(ids) < most or self.length(prompt_ids, ids) is not None)


class Watch:
    """Whether the tokens of one completion have completed a stop text."""

    def __init__(self, tokenizer: Any, texts: tuple[str, ...], prompt_ids: Sequence[int]):
        self._tokenizer, self._texts, self._tail = tokenizer, texts, ""
        self._kept = max(map(len, texts)) - 1  # characters that may begin a stop text
        self._stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=True)

    def add(self, token: int) -> bool:
        """Whether the text holds a stop text once `token` is added; the completion ends there."""
        piece = self._decoded(token)
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[max(0, len(text) - self._kept) :]
        return any(stop in text for stop in self._texts)

    def _decoded(self, token: int) -> str | None:
        """The text that a token adds; None while the bytes of a character are incomplete."""
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as error:
            if not str(error).startswith(_RESET):
                raise
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer, token)
