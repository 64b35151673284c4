"""Generation on a random-weight Qwen3: template, padding, stop tokens, and what is refused."""

import math

import pytest
import torch
from scipy import stats
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from eval import generate
from kit.core.chat import end_of_turn_token
from kit.core.errors import BadInput
from tests.unit.merge_fixture import byte_tokenizer

QUESTIONS = ["1 + 1?", "What is 12 + 34, written in digits?", "7?", "Add 5 to 6 and then take away 3.", "2 + 2?"]


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide enough that greedy completions depend on the prompt
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model(tokenizer):
    return make_model(tokenizer)


def ask(questions=QUESTIONS):
    return [[{"role": "user", "content": question}] for question in questions]


def test_what_reaches_the_model_is_the_template_applied_once(model, tokenizer):
    seen = []
    original = model.generate
    model.generate = lambda **settings: seen.append(settings) or original(**settings)
    generate.generate(model, tokenizer, ask(), max_new_tokens=2, batch_size=2)
    rows = [row for call in seen for row in call["input_ids"].tolist()]
    marker = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert len(rows) == len(QUESTIONS)
    assert all(row.count(marker) == 2 for row in rows)
    assert all(tokenizer.decode(row).endswith("<|im_start|>assistant\n") for row in rows)


@pytest.mark.parametrize("text", ["<|im_start|>user\nhi<|im_end|>", "1 + 1?<|im_end|>", "x <|endoftext|>"])
def test_a_prompt_that_went_through_a_template_before_is_refused(tokenizer, text):
    with pytest.raises(BadInput, match="special token"):
        generate.render_prompts(tokenizer, ask([text]))


def test_results_are_in_input_order_and_do_not_depend_on_the_batch(model, tokenizer):
    one_by_one = [generate.generate(model, tokenizer, ask([q]), 12, batch_size=1)[0] for q in QUESTIONS]
    assert len({generation.raw for generation in one_by_one}) > 1
    for batch_size in (2, 3, 64):
        assert generate.generate(model, tokenizer, ask(), 12, batch_size=batch_size) == one_by_one


def test_completions_end_at_the_first_stop_text_and_are_those_without_it_until_there(model, tokenizer):
    plain = generate.generate(model, tokenizer, ask(), 12)
    # Tokens are bytes, and only an ASCII character is one of them.
    texts = [*{next(sign for sign in one.text[3:] if sign.isascii()) for one in plain[:2]}]
    made = generate.generate(model, tokenizer, ask(), 12, batch_size=2, stop=texts)
    assert any(one.ended and not other.ended for one, other in zip(made, plain, strict=True))
    for one, other in zip(made, plain, strict=True):
        ends = [other.text.index(text) + len(text) for text in texts if text in other.text]
        if not ends:
            assert one == other
            continue
        assert one.text == other.text[: min(ends)] and one.ended and not one.hit_max_tokens
        assert one.tokens < other.tokens or one.raw == other.raw


def test_sampled_completions_do_not_depend_on_the_batch_but_on_seed_and_problem(model, tokenizer):
    def sample(batch_size, seed=3):
        return generate.generate(model, tokenizer, ask(), 12, batch_size=batch_size, temperature=1.0, seed=seed)

    one_by_one = sample(1)
    assert one_by_one != generate.generate(model, tokenizer, ask(), 12) != sample(1, seed=4) != one_by_one
    for batch_size in (2, 3, 64):
        assert sample(batch_size) == one_by_one
    twice = generate.generate(model, tokenizer, ask(QUESTIONS[:1] * 2), 12, temperature=1.0)
    assert twice[0] != twice[1]  # the same question in two places meets two noises


def test_several_samples_come_problem_by_problem_and_the_first_is_that_of_one(model, tokenizer):
    def sample(samples, batch_size):
        settings = {"temperature": 1.0, "seed": 3, "samples": samples}
        return generate.generate(model, tokenizer, ask(), 12, batch_size=batch_size, **settings)

    three = sample(3, 64)
    assert len(three) == 3 * len(QUESTIONS)
    assert three[::3] == sample(1, 64)
    assert [made for place, made in enumerate(three) if place % 3 < 2] == sample(2, 64)
    assert all(len({made.raw for made in three[start : start + 3]}) == 3 for start in range(0, len(three), 3))
    for batch_size in (1, 4):
        assert sample(3, batch_size) == three


def test_several_greedy_samples_are_refused_as_the_same_completion(model, tokenizer):
    with pytest.raises(BadInput, match=r"eval\.samples is 4 .* Raise eval\.temperature"):
        generate.generate(model, tokenizer, ask(), 4, samples=4)
    for wrong in ({"samples": 0}, {"temperature": -1.0}, {"temperature": math.nan}):
        with pytest.raises(BadInput, match="must be 0"):
            generate.generate(model, tokenizer, ask(), 4, **wrong)
    for limit, batch_size in ((0, 4), (4, 0)):
        with pytest.raises(BadInput, match="at least 1"):
            generate.generate(model, tokenizer, ask(), limit, batch_size)


def test_noise_turns_argmax_into_samples_of_softmax_that_are_independent_across_rows():
    torch.manual_seed(0)
    temperature, logits = 0.7, 2 * torch.randn(40)
    expected = (logits.double() / temperature).softmax(-1).numpy()  # whose sum the test below compares to 1e-8
    noise, tokens = generate.GumbelNoise(temperature, 5, [(row // 2, row % 2) for row in range(200)], 10), []
    for position in range(200):
        scores = noise(torch.zeros(200, 10 + position), logits.repeat(200, 1))
        tokens.append(scores.argmax(-1))
    drawn = torch.stack(tokens)  # (position, row)
    counts = torch.bincount(drawn.flatten(), minlength=40).numpy()
    common = expected > 20 / 40_000
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common] * 40_000, expected[~common].sum() * 40_000]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3
    # Two neighbors agree as often as independent draws do, between rows and between positions.
    agree = float((expected**2).sum())
    for same in (drawn[:, 1:] == drawn[:, :-1], drawn[1:] == drawn[:-1]):
        assert abs(same.float().mean().item() - agree) < 4 * math.sqrt(agree * (1 - agree) / same.numel())


def test_noise_is_gumbel_over_a_whole_vocabulary_and_finite_at_its_ends():
    values = generate.GumbelNoise(1.0, 0, [(0, 0), (1, 0)], 0)(torch.zeros(2, 7), torch.zeros(2, 151_936))
    assert torch.isfinite(values).all()
    assert not torch.equal(values[0], values[1])
    for row in values.double().numpy():
        assert stats.kstest(row, "gumbel_r").pvalue > 1e-3
    ends = generate._gumbel(torch.zeros(1, dtype=torch.int64), 1)  # SplitMix64 maps 0 to 0
    assert ends.item() == pytest.approx(33 * math.log(2))


def test_the_mixer_is_the_published_splitmix64():
    # The first three outputs for seed 1234567, as Rosetta Code lists them for Vigna's splitmix64.c.
    counters = torch.tensor(1234567) + torch.tensor([1, 2, 3]) * generate._STEP
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [value % 2**64 for value in generate._mix(counters).tolist()] == expected


def test_the_stop_token_ends_a_completion_and_is_not_part_of_it(model, tokenizer):
    endless = generate.generate(model, tokenizer, ask(), 12)[0]
    letter = next(c for place, c in enumerate(endless.raw) if place > 2 and c.isascii() and endless.raw.count(c) == 1)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(letter)]
    ended = generate.generate(model, tokenizer, ask(), 12)[0]
    assert ended.ended and not ended.hit_max_tokens
    assert ended.raw == endless.raw.split(letter)[0]
    assert 0 < ended.tokens < 12


def test_a_completion_cut_at_the_limit_is_counted_as_cut(model, tokenizer):
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    for generation in generate.generate(model, tokenizer, ask(), 5):
        assert generation.ended != generation.hit_max_tokens
        assert generation.ended or generation.tokens == 5
    # A stop token in the last place is an end.
    finished = generate.finish(tokenizer, [20, 21, tokenizer.eos_token_id], [tokenizer.eos_token_id], 3)
    assert (finished.tokens, finished.ended, finished.hit_max_tokens) == (2, True, False)


def test_the_models_own_sampling_settings_change_nothing(model, tokenizer):
    plain = generate.generate(model, tokenizer, ask(), 12)
    model.generation_config.update(repetition_penalty=1.9, do_sample=True, temperature=5.0, top_k=3, num_beams=2)
    own = model.generation_config
    assert generate.generate(model, tokenizer, ask(), 12) == plain
    assert model.generation_config is own


def test_a_model_that_does_not_stop_at_the_end_of_turn_is_refused(model, tokenizer):
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    with pytest.raises(BadInput, match=r"'<\|im_end\|>' \(id \d+\), which is not among the model's stop tokens"):
        generate.generate(model, tokenizer, ask(), 4)
    model.generation_config.eos_token_id = None
    with pytest.raises(BadInput, match=r"\(none\)"):
        generate.generate(model, tokenizer, ask(), 4)
    other = byte_tokenizer()
    other.eos_token = "<|endoftext|>"  # the end of a turn is read from the template
    assert end_of_turn_token(other) == other.convert_tokens_to_ids("<|im_end|>")
    other.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        generate.generate(model, other, ask(), 4)
