"""Decoding loop of rollouts in this process: the tokens of transformers' own loop, with less work for them.

- A prompt is read once for all completions of its group.
- Rows that have ended leave the batch, as soon as they are an eighth of it.
- The KV cache is allocated once, not copied for every token.

`decode` takes the place of `GenerationMixin._sample` (transformers 5.17) by `generate(custom_generate=decode)`, which
prepares masks, positions, cache, logits processors and stopping criteria as ever. The random numbers of a token are
those that `torch.multinomial` draws for the whole batch, so no row's depend on which others have ended. Products of
another number of rows may differ in their last bits, as they do in a batch of another size.

Left to transformers' loop: beams, caches other than `DynamicCache`, models with bookkeeping of their own between
tokens, chunked prefill, and callers that ask for more than token ids. Not covered: a base that is split over
processes, whose forwards all processes must make together.
"""

from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING

LEAVING = 8  # ended rows leave once they are one in so many
# Arguments that `generate` passes for a text-only model.
KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def decode(
    model: Any,
    input_ids: torch.Tensor,  # (B, T), padded on the left
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> torch.Tensor:  # (B, T + new)
    """Prompts and completions of all rows; a completion that ends before the longest one is padded."""
    if not _is_known(model, generation_config, model_kwargs):
        method = GENERATION_MODES_MAPPING[generation_config.get_generation_mode()]
        own = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        return getattr(type(model), method)(
            model, input_ids, generation_config=generation_config, **own, **model_kwargs
        )
    (count, width), length = input_ids.shape, generation_config.max_length
    padding = generation_config._pad_token_tensor
    ids = input_ids.new_full((count, length), 0 if padding is None else int(padding))
    ids[:, :width] = input_ids
    is_open = torch.ones(count, dtype=torch.bool, device=ids.device)
    batch = _Batch(model, model_kwargs, count, length)
    logits = batch.read_prompts(input_ids)
    with model._optimize_model_for_decode():
        while True:
            scores = logits_processor(batch.rows(ids)[:, :width], logits)
            tokens = batch.choose(scores, generation_config.do_sample)
            ids[:, width] = torch.where(is_open, tokens, ids[:, width])
            width += 1
            is_open &= ~stopping_criteria(ids[:, :width], None)
            if not is_open.any():
                return ids[:, :width]
            batch.drop_ended(is_open)
            logits = batch.read(ids, width)


def _is_known(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether this loop computes what transformers' would."""
    positions, cache = model_kwargs.get("position_ids"), model_kwargs.get("past_key_values")
    return (
        config.get_generation_mode() in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH)
        and not config.return_dict_in_generate
        and config.prefill_chunk_size is None
        and model_kwargs.keys() <= KNOWN
        and bool(model_kwargs.get("use_cache"))
        and type(cache) is DynamicCache
        and not any(layer.is_initialized for layer in cache.layers if isinstance(layer, DynamicLayer))
        and (positions is None or positions.dim() == 2)
        and type(model)._update_model_kwargs_for_generation is GenerationMixin._update_model_kwargs_for_generation
    )


class _Batch:
    """The rows that are computed: all `count` of them, later without those that were dropped."""

    def __init__(self, model: Any, model_kwargs: dict[str, Any], count: int, length: int):
        self.count, self._model, self._length = count, model, length
        self._cache: DynamicCache = model_kwargs.pop("past_key_values")
        self._mask: torch.Tensor | None = model_kwargs.pop("attention_mask", None)  # (B, length)
        self._positions: torch.Tensor | None = model_kwargs.pop("position_ids", None)  # (B, 1), of the last token
        self._more = model_kwargs
        self._numbers: torch.Tensor | None = None  # of the computed rows; None: all

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """The computed rows of `values` (B, …)."""
        return values if self._numbers is None else values[self._numbers]

    def read_prompts(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (B, V) behind the prompts. Consecutive rows with the same prompt are one."""
        given = [values for values in (input_ids, self._mask) if values is not None]
        is_new = torch.ones(self.count, dtype=torch.bool, device=input_ids.device)
        is_new[1:] = torch.stack([(values[1:] != values[:-1]).any(dim=1) for values in given]).any(dim=0)
        prompts, prompt_of = is_new.nonzero().squeeze(1), is_new.cumsum(0) - 1
        mask, positions = ((None if one is None else one[prompts]) for one in (self._mask, self._positions))
        logits = self._forward(input_ids[prompts], mask, positions, is_first_iteration=True)
        for place, layer in enumerate(self._cache.layers):
            if type(layer) is DynamicLayer:
                self._cache.layers[place] = RoomyLayer(layer, self._length)
        self._cache.reorder_cache(prompt_of)
        if self._mask is not None:
            further = self._mask.new_ones(self.count, self._length - input_ids.shape[1])
            self._mask = torch.cat([self._mask, further], dim=1)
        if self._positions is not None:
            self._positions = self._positions[:, -1:]
        return logits[prompt_of]

    def read(self, ids: torch.Tensor, width: int) -> torch.Tensor:
        """Logits (rows, V) behind the first `width` tokens of `ids` (B, length), of which the last is new."""
        if self._positions is not None:
            self._positions = self._positions + 1
        mask = None if self._mask is None else self._mask[:, :width]
        return self._forward(self.rows(ids)[:, :width], mask, self._positions, next_sequence_length=1)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, **facts: Any
    ) -> torch.Tensor:
        given = {"attention_mask": mask, "position_ids": positions}
        given = {name: value for name, value in given.items() if value is not None}
        inputs = self._model.prepare_inputs_for_generation(
            ids, past_key_values=self._cache, **given, **self._more, **facts
        )
        logits = self._model(**inputs, return_dict=True).logits
        return logits[:, -1].to(copy=True, dtype=torch.float32)

    def choose(self, scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
        """The next token of every row (B,), drawn as `torch.multinomial` does it; arbitrary for dropped rows."""
        if do_sample:
            scores = scores.softmax(dim=-1)
            scores /= self.rows(scores.new_empty(self.count, scores.shape[1]).exponential_(1))
        tokens = scores.argmax(dim=-1)
        return tokens if self._numbers is None else tokens.new_zeros(self.count).index_copy_(0, self._numbers, tokens)

    def drop_ended(self, is_open: torch.Tensor) -> None:
        """Drop the rows that have ended (`is_open` (B,) is false), once they are enough to be worth the copy."""
        still = self.rows(is_open)
        if (len(still) - int(still.sum())) * LEAVING < len(still):
            return
        kept = still.nonzero().squeeze(1)
        self._numbers = kept if self._numbers is None else self._numbers[kept]
        self._cache.reorder_cache(kept)
        self._mask, self._positions = ((None if one is None else one[kept]) for one in (self._mask, self._positions))


class RoomyLayer(DynamicLayer):
    """A layer of a KV cache with memory for `length` tokens, which takes over the content of another."""

    def __init__(self, layer: DynamicLayer, length: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self.keys, self.values, self._length = layer.keys, layer.values, length
        self._rooms: list[torch.Tensor] | None = None  # (B, heads, length, size); keys and values are their beginnings

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before, new = self.keys.shape[-2], (key_states, value_states)
        after = before + key_states.shape[-2]
        if self._rooms is None:
            held = self.keys, self.values
            self._rooms = [one.new_empty(*one.shape[:2], self._length, one.shape[3]) for one in held]
            for room, one in zip(self._rooms, held, strict=True):
                room[:, :, :before] = one
        for room, one in zip(self._rooms, new, strict=True):
            room[:, :, before:after] = one
        self.keys, self.values = (room[:, :, :after] for room in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._rooms = None
