"""The decoding loop of in-process rollouts: transformers' tokens, each prompt read once, ended rows dropped."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from kit.policy import decoding
from kit.policy.decoding import RoomyLayer, decode
from kit.policy.stop_texts import StopTexts
from kit.policy.stopping import StopCriterion, stopping
from tests.unit.families import FAMILIES, family_config
from tests.unit.merge_fixture import byte_tokenizer

ENDS = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=97, pad_token_id=0, eos_token_id=5)
    return LlamaForCausalLM(config).eval()


def prompts(groups: int = 4, group: int = 4, padded: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(9, 97, (groups, 9)).repeat_interleave(group, 0)
    mask = torch.ones_like(ids)
    if padded:
        ids[: group * 2, :3] = mask[: group * 2, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sample(model, given, seed: int = 3, **settings) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Token ids, and the (rows, tokens) that each forward read."""
    asked = {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": ENDS}
    read = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: read.append((*inputs[0].shape,)))
    options = {"custom_generate": settings.pop("custom_generate", None)}
    torch.manual_seed(seed)
    try:
        made = model.generate(**given, **options, generation_config=GenerationConfig(**asked | settings))
    finally:
        hook.remove()
    return made, read


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.3},
        {"do_sample": False},
        {"min_new_tokens": 20},
        {"eos_token_id": [96], "max_new_tokens": 12},
    ],
    ids=str,
)
def test_the_tokens_are_those_of_transformers_own_loop(model, settings, padded):
    given = prompts(padded=padded)
    for seed in range(3):
        theirs, _ = sample(model, given, seed, **settings)
        ours, _ = sample(model, given, seed, **settings, custom_generate=decode)
        assert torch.equal(ours, theirs)
    assert "eos_token_id" in settings or (theirs[:, 9:] == 0).any(), "some rows ended before others"


def test_a_prompt_is_read_once_for_its_group_and_ended_rows_leave(model):
    made, read = sample(model, prompts(), custom_generate=decode)
    _, theirs = sample(model, prompts())
    assert read[0] == (4, 9) and theirs[0] == (16, 9)
    ended = torch.isin(made[:, 9:], torch.tensor(ENDS))
    lengths = [int(row.nonzero()[0]) + 1 if row.any() else len(row) for row in ended]
    assert len(read) == len(theirs) == max(lengths)
    assert {rows for rows, _ in theirs[1:]} == {16}
    for place, (rows, tokens) in enumerate(read[1:], 1):
        still = sum(length > place for length in lengths)
        assert tokens == 1 and still <= rows < still + max(1, rows / decoding.LEAVING), (
            "fewer than an eighth have ended"
        )
    assert read[-1][0] < 4


def test_the_same_prompt_with_other_padding_is_another_and_only_neighbours_share(model):
    ids = torch.tensor([[0, 9, 10], [0, 9, 10], [0, 9, 10], [11, 9, 10], [0, 9, 10]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 1]])
    given = {"input_ids": ids, "attention_mask": mask}
    ours, read = sample(model, given, custom_generate=decode)
    assert read[0] == (4, 3) and torch.equal(ours, sample(model, given)[0])


def test_the_cache_is_allocated_once_and_holds_what_a_growing_one_does(model):
    torch.manual_seed(0)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(torch.arange(9, 21).view(2, 6), past_key_values=cache)
        roomy = caches[1]
        roomy.layers = [RoomyLayer(layer, 10) for layer in roomy.layers]
        logits = [
            [model(torch.tensor([[9], [10]]), past_key_values=cache).logits for _ in range(4)] for cache in caches
        ]
        rooms = [room.data_ptr() for layer in roomy.layers for room in layer._rooms]
        assert rooms == [kept.data_ptr() for layer in roomy.layers for kept in (layer.keys, layer.values)]
    assert all(map(torch.equal, *logits))
    for ours, theirs in zip(roomy.layers, caches[0].layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert ours.get_seq_length() == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "num_beams": 3},
        {"return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"use_cache": False, "max_new_tokens": 5},
        {"prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_what_the_loop_does_not_cover_is_left_to_transformers(model, settings):
    ours, theirs = (sample(model, prompts(), **settings, custom_generate=loop)[0] for loop in (decode, None))
    assert torch.equal(getattr(ours, "sequences", ours), getattr(theirs, "sequences", theirs))


class Bookkeeping(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


def test_a_model_with_own_bookkeeping_is_left_to_transformers(model):
    own = Bookkeeping(model.config).eval()
    sample(own, prompts(), custom_generate=decode, max_new_tokens=4)
    assert own.calls >= 4


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_sample_transformers_tokens_too(family):
    torch.manual_seed(0)
    config = family_config(family)
    config._attn_implementation = "eager"
    own = AutoModelForCausalLM.from_config(config).eval()
    theirs, ours = (sample(own, prompts(), custom_generate=loop, max_new_tokens=30)[0] for loop in (None, decode))
    assert torch.equal(ours, theirs)


def test_completions_end_at_stop_texts_as_in_transformers_own_loop(model):
    tokenizer = byte_tokenizer()
    text = "a"
    (end,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    given, made = prompts(), []
    for loop in (None, decode):
        criterion = StopCriterion(StopTexts(tokenizer, [text]), given["input_ids"].tolist(), ENDS)
        with stopping(model, criterion, loop):
            rows = sample(model, given, max_new_tokens=80)[0][:, 9:].tolist()
        made.append(criterion.cut(rows))
        assert "generate" not in vars(model)
    assert made[0] == made[1] and any(row[-1] == end for row in made[0])


def test_rollouts_of_a_recipe_use_the_loop(monkeypatch, recipe, recipe_arguments, learning_model_dir, tmp_path):
    read = []

    def watched(model, input_ids, **given):
        read.append(len(input_ids))
        return decode(model, input_ids, **given)

    monkeypatch.setattr("kit.train.trainer.decode", watched)
    run = recipe(recipe_arguments(learning_model_dir, tmp_path / "run", {"train.max_steps": 1, "train.save_steps": 1}))
    assert run.code == 0 and read, run.err
