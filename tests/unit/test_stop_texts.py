"""Stop texts: one rule for every sampler. vLLM's own detokenizer is the reference."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.errors import BadInput
from kit.policy import stop_texts
from kit.policy.stop_texts import StopTexts
from kit.policy.stopping import StopCriterion
from kit.rollout.server.endpoint import sampling_params

CONFIG = Path(__file__).parents[2] / "recipes/configs/grpo-tiny-nf4-cpu.yaml"
TEXT = "So the answer is 42.</answer> 🦊 naïve — <tool_call> {'a': 1} </tool_call>\n\nÜber ∀x: x² ≥ 0, 日本語 END STOP"
STOPS = ["</answer>", "\n\n", "🦊", "日本", "STOP", " E", "\n", "²", "naïve —", "a", "  ", "er is"]
SPECIAL = ["<|end|>", "<|pad|>"]


def byte_level() -> Tokenizer:
    """As Qwen, Llama 3 and most others: characters outside ASCII are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=words))
    return made


def sentence_piece() -> Tokenizer:
    """As Llama 2: a space is part of the next word, the first one of a text is stripped, unknown bytes are tokens."""
    letters = sorted({*TEXT.replace(" ", "▁")} - {*"🦊日本語∀"})
    letters += ["▁E", "▁STOP", "▁answer", "er", "▁is", "</answer>"]
    words = {
        word: index for index, word in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters])
    }
    made = Tokenizer(models.BPE(words, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex("(?=▁)"), "isolated"), decoders.Sequence(parts)
    return made


def word_piece() -> Tokenizer:
    """As BERT: a token's text depends on the one before it."""
    words = ["[UNK]", *"abcdefghijklmnopqrstuvwxyzSTOPEND.,:;!<>/\n ", *(f"##{one}" for one in "abcdeghinorstuw"), "²"]
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


MADE = {"byte_level": byte_level, "sentence_piece": sentence_piece, "word_piece": word_piece}


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    made = MADE[kind]()
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|pad|>")


def vllms_length(own: PreTrainedTokenizerFast, stops: list[str], prompt: list[int], ids: list[int]) -> int | None:
    """The tokens after which vLLM ends a completion at a stop text."""
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(stop=stops, detokenize=True)
    request = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt, request_id="0")
    made = detokenizer.FastIncrementalDetokenizer(own, request)
    return next((count for count, token in enumerate(ids, 1) if made.update([token], False)), None)


@pytest.mark.parametrize("kind", MADE)
def test_a_completion_ends_at_the_token_at_which_vllm_ends_it(kind):
    own, rng = tokenizer(kind), random.Random(0)
    written = own(TEXT, add_special_tokens=False)["input_ids"]
    lengths = []
    for _ in range(1500):
        stops = rng.sample(STOPS, rng.randint(1, 4))
        if rng.random() < 0.5:  # text as a model writes it, from anywhere, with anything between
            start = rng.randrange(len(written))
            ids = written[start : start + 30]
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(len(own) + 3))  # a model has unused ids beyond
        else:
            ids = [rng.randrange(len(own)) for _ in range(30)]
        at = rng.randrange(len(written))
        prompt = rng.choice([written[at : at + 8], own("STO", add_special_tokens=False)["input_ids"], ids[:3]])
        lengths.append(StopTexts(own, stops).length(prompt, ids))
        assert lengths[-1] == vllms_length(own, stops, prompt, ids), (stops, prompt, ids)
    ended = [length for length in lengths if length is not None]
    assert 300 < len(ended) < 1500 and len({*ended}) > 10


def test_a_server_decodes_text_only_to_find_stop_texts():
    pytest.importorskip("vllm.sampling_params")
    for stop in ([], ["END"]):
        params = sampling_params(n=1, max_tokens=4, temperature=1.0, stop=stop, logprobs=0)
        assert (params.stop, params.detokenize) == (stop, bool(stop))


def test_a_character_of_several_tokens_ends_a_completion_with_the_last_of_them():
    own = tokenizer("byte_level")
    fox = own("🦊", add_special_tokens=False)["input_ids"]
    assert len(fox) > 1
    ids = [*own("a ", add_special_tokens=False)["input_ids"], *fox, *own(" b", add_special_tokens=False)["input_ids"]]
    assert StopTexts(own, ["🦊"]).cut([5], ids) == ids[: ids.index(fox[-1]) + 1]


def test_a_text_that_begins_in_the_prompt_ends_nothing():
    own = tokenizer("byte_level")
    prompt, ids = (own(text, add_special_tokens=False)["input_ids"] for text in ("ST", "OP and on"))
    assert StopTexts(own, ["STOP", "ST"]).length(prompt, ids) is None
    assert StopTexts(own, ["OP"]).length(prompt, ids) is not None


def test_a_completion_has_ended_at_a_stop_token_or_text_and_not_at_its_limit():
    own = tokenizer("byte_level")
    ids, texts = own("say STOP", add_special_tokens=False)["input_ids"], StopTexts(own, ["STOP"])
    end = {own.eos_token_id}
    assert texts.has_ended([], ids, len(ids), end) and not texts.has_ended([], ids[:-1], len(ids) - 1, end)
    none = StopTexts(own, [])
    assert not none and not none.has_ended([], ids, len(ids), end) and none.has_ended([], [own.eos_token_id], 1, end)
    assert none.cut([], ids) == ids


def test_rows_of_a_batch_end_alone_and_padding_is_not_searched():
    own = tokenizer("byte_level")
    rows = [own(text, add_special_tokens=False)["input_ids"] for text in ("x STOP y z", "a b c d e f g h", "q r")]
    prompts, width = [[7, 8], [9], [10, 11, 12]], 12
    rows = [row[:width] + [own.eos_token_id] * (width - len(row)) for row in rows]
    stop = own("STOP")["input_ids"]
    rows[2][4:] = (stop * width)[: width - 4]  # behind the stop token, as a padded row of another model may have it
    rows[2][3] = own.eos_token_id
    batch = torch.tensor([[0] * (3 - len(ids)) + ids + row for ids, row in zip(prompts, rows, strict=True)])
    criterion = StopCriterion(StopTexts(own, ["STOP"]), prompts, [own.eos_token_id])
    ended = [criterion(batch[:, : 4 + step], None).tolist() for step in range(width)]
    expected = StopTexts(own, ["STOP"]).length(prompts[0], rows[0])
    assert [one[0] for one in ended] == [step + 1 >= expected for step in range(width)]
    assert not any(one[1] or one[2] for one in ended)
    assert criterion.cut(rows) == [rows[0][:expected], rows[1], rows[2]]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a", "b", "c", "d", "e"], "has 5 texts; vLLM takes at most 4"),
        (["a", ""], "an empty text, at which every completion would end"),
        (["a", "a"], "names 'a' more than once"),
        (["\ufffd"], "no whole character"),
    ],
)
def test_texts_that_no_sampler_can_take_are_refused_with_the_configuration(texts, said):
    with pytest.raises(BadInput) as refused:
        check_config(load_config(CONFIG, [f"--rollout.stop={json.dumps(texts)}"]), 1)
    assert str(refused.value).startswith("rollout.stop") and said in str(refused.value)


def test_half_of_a_surrogate_pair_is_refused_where_the_text_is_read():
    with pytest.raises(BadInput, match=r"--rollout\.stop .*has a NUL or an unpaired surrogate"):
        load_config(CONFIG, ['--rollout.stop=["\\ud83e"]'])


@pytest.mark.parametrize(
    ("text", "said"),
    [("x<|end|>", r"holds the special token <\|end\|>"), ("assistant:", "with which every prompt ends")],
)
def test_texts_that_can_end_no_completion_are_refused_before_weights_load(text, said):
    with pytest.raises(BadInput, match=said):
        stop_texts.check(tokenizer("byte_level"), [text], "user: 2 + 2?\nassistant:")


def test_a_line_end_may_end_prompts_and_a_tokenizer_of_another_kind_is_refused():
    stop_texts.check(tokenizer("byte_level"), ["\n"], "2 + 2?\n")
    slow = SimpleNamespace(name_or_path="slow")
    stop_texts.check(slow, [], "")
    with pytest.raises(BadInput, match="not one of the package tokenizers"):
        stop_texts.check(slow, ["\n"], "")
