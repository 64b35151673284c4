"""A reward model from a local checkpoint: its scores are transformers' own, and what cannot score is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from kit.core.config.load import load_config
from kit.core.config.schema import RewardConfig
from kit.core.errors import BadInput
from reward import check_run, reward_functions, start
from reward.reward_model import load
from tests.conftest import CONFIG
from tests.unit.merge_fixture import byte_tokenizer

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 256}
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 40?"}]
TEXTS = ("42", "It is forty-two, I believe, since 2 and 40 make 42.", "", "No.")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    facts = Qwen3Config(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **SHAPE)
    model = Qwen3ForSequenceClassification(facts)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def changed(checkpoint, tmp_path):
    """changed(keys of config.json) -> a copy of the checkpoint."""

    def make(**keys) -> Path:
        folder = shutil.copytree(checkpoint, tmp_path / "changed")
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(facts | keys))
        return folder

    load.cache_clear()
    return make


def bound(path, limit=1.0, **options):
    given = {"reward_model": {"path": str(path), "dtype": "float32", "device": "cpu", **options}}
    config = RewardConfig(functions=["reward_model"], options=given, max_unknown_fraction=limit)
    return reward_functions(config, ["path"])[0][0]


def scores(reward, *texts, prompt=PROMPT):
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return reward(prompts=[prompt] * len(texts), completions=completions, gold=["42"] * len(texts), path=["a"])


def by_transformers(path: Path, text: str) -> float:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    rendered = tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", "content": text}], tokenize=False)
    with torch.no_grad():
        return model.eval()(**tokenizer(rendered, return_tensors="pt", add_special_tokens=False)).logits.item()


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("padding", [True, False])
def test_a_score_is_that_of_transformers_for_the_conversation_alone(checkpoint, changed, batch_size, padding):
    path = checkpoint if padding else changed(pad_token_id=None)
    found = scores(bound(path, batch_size=batch_size), *TEXTS)
    assert found == pytest.approx([by_transformers(checkpoint, text) for text in TEXTS], abs=1e-5)
    assert len({round(value, 3) for value in found}) == len(TEXTS), "the scores differ, so their order is shown"


def test_a_text_prompt_is_the_users_message(checkpoint):
    one, other = bound(checkpoint), [{"role": "user", "content": "1 + 1?"}]
    assert scores(one, "2", prompt="1 + 1?") == scores(one, "2", prompt=other) != scores(one, "2")
    assert one(prompts=[other], completions=["2"]) == scores(one, "2", prompt=other)


def test_what_is_too_long_or_not_finite_is_unknown_and_never_cut(checkpoint):
    reward = bound(checkpoint, max_length=100)
    assert scores(reward, "42", "long " * 40) == [scores(bound(checkpoint), "42")[0], None]
    assert scores(bound(checkpoint), "long " * 80) == [None], "the context of the model holds too"
    assert reward.unknown_counts == {"too long": 1}
    load.cache_clear()
    load(str(checkpoint), "float32", "cpu").model.score.weight.data.fill_(torch.nan)
    assert scores(reward, "42") == [None] and reward.unknown_counts == {"too long": 1, "not finite": 1}
    load.cache_clear()


def run_config(*keys: str):
    return load_config(CONFIG, ["--rollout.max_prompt_length=128", "--rollout.max_completion_length=128", *keys])


def test_a_sound_checkpoint_passes_and_is_loaded_once(checkpoint):
    load.cache_clear()
    reward = bound(checkpoint)
    check_run([reward], run_config(), [])
    assert load.cache_info().misses == 0, "the check reads no weights"
    start([reward])
    start([reward])
    scores(reward, "42")
    assert load.cache_info().misses == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id2label": {"0": "A", "1": "B"}, "num_labels": 2}, "has 2 labels (num_labels); a reward model has 1"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "holds a Qwen3ForCausalLM. A reward model is saved from a class"),
        ({"architectures": None}, "holds a model without architectures"),
        ({"model_type": "nothing"}, "no model config at"),
        ({"max_position_embeddings": 200}, "(256) exceeds what the reward model"),
    ],
)
def test_a_checkpoint_that_is_no_reward_model_is_bad_input(changed, keys, message):
    with pytest.raises(BadInput) as error:
        check_run([bound(changed(**keys))], run_config(), [])
    assert message in str(error.value)


def test_its_tokenizer_must_render_the_runs_conversations(changed):
    folder = changed()
    (template := folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    check_run([bound(folder)], run_config(), [])
    with pytest.raises(BadInput, match=r"fails on system, user, assistant: no system\."):
        check_run([bound(folder)], run_config("--data.system_prompt=Be brief."), [])
    template.unlink()
    with pytest.raises(BadInput, match="has no chat template"):
        check_run([bound(folder)], run_config(), [])


@pytest.mark.parametrize("damage", ["cut", "headless"])
def test_weights_that_cannot_be_read_or_are_missing_are_bad_input(changed, damage):
    from safetensors.torch import load_file, save_file

    folder = changed()
    file = folder / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        kept = {name: tensor for name, tensor in load_file(file).items() if "score" not in name}
        save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(
        BadInput, match="cannot be loaded on cpu: " + ("its files lack score" if damage != "cut" else "")
    ):
        start([bound(folder)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere"}, "path is 'nowhere', which holds no config.json"),
        ({"batch_size": 0}, "batch_size (0)"),
        ({"max_length": 0}, "max_length (0)"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"dtype": "fp8"}, "dtype must be one of auto, float32, bfloat16, float16"),
    ],
)
def test_wrong_options_are_bad_input(checkpoint, options, message):
    with pytest.raises(BadInput) as error:
        bound(**{"path": checkpoint} | options)
    assert message in str(error.value)


def test_a_max_length_above_the_context_is_bad_input(checkpoint):
    with pytest.raises(BadInput, match=r"max_length \(300\) exceeds the context of .* \(256\)"):
        check_run([bound(checkpoint, max_length=300)], run_config(), [])
