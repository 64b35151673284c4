"""Supervised fine-tuning: which tokens are in the loss, the loss itself, packs, held-out loss and exact resumes."""

import json
import shutil
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from kit.core.chat import token_ids
from kit.core.config.load import load_config
from kit.core.config.recipe import PLAIN, SUPERVISED, check_recipe
from kit.core.config.sft_rules import faults
from kit.core.errors import BadInput
from kit.core.health import alerts
from kit.data.demonstrations import Demonstration, read_demonstrations
from kit.plan import memory
from kit.plan.gpus import parse_gpus
from kit.plan.shapes import find_shape
from kit.train.sft_rows import Unusable, token_row
from launch.watch import step_line

CONFIG = "recipes/configs/sft-tiny-nf4-cpu.yaml"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like Qwen3's: what the assistant thought before is removed from all turns but the last.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last %}thought {% endif %}{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config_with(*changes: str) -> Any:
    return load_config(CONFIG, [f"--{change}" for change in changes])


@pytest.fixture(scope="module")
def tokenizer(learning_model_dir):
    return AutoTokenizer.from_pretrained(learning_model_dir)


def turns(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[number % 2], "content": content} for number, content in enumerate(contents)]


def learned_text(row: Any, tokenizer: Any) -> str:
    shown = [token if is_learned else None for token, is_learned in zip(row.completion_ids, row.learned, strict=True)]
    text, was_learned = "", False
    for token in shown:
        text += "" if token is None else ("" if was_learned or not text else "|") + tokenizer.decode([token])
        was_learned = token is not None
    return text


@pytest.mark.parametrize("template", [None, MARKED])
def test_what_the_assistant_says_is_learned_with_its_stop_token_and_nothing_else(tokenizer, template, monkeypatch):
    if template:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    row = Demonstration("", "", messages=turns("1 + 2?", "It is 3", "and 4?", "So 7"))
    made = token_row(row, tokenizer, {tokenizer.eos_token_id}, config_with())
    assert learned_text(made, tokenizer) == "It is 3<|im_end|>|So 7<|im_end|>"
    assert made.prompt_ids == token_ids(tokenizer, turns("1 + 2?"), {})  # what GRPO samples from
    assert len(made.learned) == len(made.completion_ids)


def test_only_the_completion_of_a_prompt_is_learned_and_texts_end_with_the_stop_token(tokenizer):
    stops, end = {tokenizer.eos_token_id}, "<|im_end|>"
    told = Demonstration("", "", messages=turns("1?", "one", "2?", "two"), answers_from=3)
    assert learned_text(token_row(told, tokenizer, stops, config_with()), tokenizer) == f"two{end}"
    plain = Demonstration("", "", before="1 + 1 = ", text="2")
    assert learned_text(token_row(plain, tokenizer, stops, config_with()), tokenizer) == f"2{end}"
    text = token_row(
        Demonstration("", "", text="1 + 1"), tokenizer, stops, config_with("sft.rows=text", "sft.loss_on=null")
    )
    assert len(text.prompt_ids) == 1 and set(text.learned) == {1} and text.completion_ids[-1] in stops


def test_all_tokens_but_the_first_are_learned_when_asked(tokenizer):
    row = Demonstration("", "", messages=turns("1 + 2?", "It is 3"))
    made = token_row(row, tokenizer, {tokenizer.eos_token_id}, config_with("sft.loss_on=all"))
    assert len(made.prompt_ids) == 1 and set(made.learned) == {1}


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_does(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", FORGETS)
    row = Demonstration("", "", messages=turns("1?", "one", "2?", "two"))
    with pytest.raises(Unusable, match="renders what comes before message 2 differently"):
        token_row(row, tokenizer, {tokenizer.eos_token_id}, config_with())


def test_a_template_without_a_stop_token_after_the_answer_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template.replace("<|im_end|>\n{%", "\n{%"))
    row = Demonstration("", "", messages=turns("1?", "one"))
    with pytest.raises(Unusable, match="writes no stop token after message 2"):
        token_row(row, tokenizer, {tokenizer.eos_token_id}, config_with())


@pytest.mark.parametrize(
    ("form", "row", "error"),
    [
        ("messages", {"messages": turns("1?")}, "no message of the assistant to learn"),
        ("messages", {"messages": turns("1?", "")}, "message 2 of the assistant is empty"),
        ("messages", {"messages": [{"role": "assistant", "content": "2"}]}, "no message before the assistant's first"),
        ("messages", {"conversations": [{"from": "human", "value": "1?"}]}, "Write the columns of one .*human: user"),
        ("messages", {"messages": "1?"}, "messages: str, expected lists of messages"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": [{"role": "robot", "content": "x"}]}, "message 1 has no role of"),
        (
            "messages",
            {"messages": [*turns("1?"), {"role": "assistant", "tool_calls": [1], "content": ""}]},
            "tool_calls",
        ),
        ("messages", {"messages": turns("\ud800", "x")}, "an unpaired surrogate"),
        ("prompt_completion", {"prompt": "x", "completion": turns("1?", "2")}, "str and list, expected lists"),
        ("prompt_completion", {"prompt": "x", "completion": ""}, "completion is empty"),
        ("text", {"text": 7}, "text is a int"),
        ("text", {"question": "1?", "messages": turns("1?", "2")}, "no column 'text'.* Set sft.rows to messages."),
    ],
)
def test_a_row_that_cannot_be_learned_is_refused_by_its_place(tmp_path, form, row, error):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=rf"rows.jsonl:1.*{error}"):
        read_demonstrations(config_with(f"data.path={file}").data, form, "train")


def test_the_runs_system_prompt_and_suffix_are_where_grpo_has_them(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": turns("1?", "one")}) + "\n")
    data = config_with(f"data.path={file}", "data.system_prompt=Be brief.", "data.prompt_suffix= Box it.").data
    (row,), _ = read_demonstrations(data, "messages", "train")
    assert [message["content"] for message in row.messages] == ["Be brief.", "1? Box it.", "one"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["rollout.backend=server"], "supervised fine-tuning samples nothing"),
        (["rollout.resample_rounds=2"], "rollout.resample_rounds is for GRPO"),
        (["train.num_iterations=2"], "train.num_iterations is 2"),
        (["policy.quant_cfg=nvfp4a16"], "policy.quant_cfg is nvfp4a16: quantizers are trained by"),
        (["sft.rows=text"], "text has no answers"),
        (["distill.teacher=base"], "the groups sft and distill are both set"),
        (["train.per_device_train_batch_size=1"], "a step has 1 row"),
    ],
)
def test_settings_of_grpo_are_refused_by_name(changes, error):
    assert any(error in fault for fault in faults(config_with(*changes), 1))


def test_each_recipe_refuses_the_other_ones_configuration():
    check_recipe(config_with(), SUPERVISED)
    with pytest.raises(BadInput, match=r"sft.rows is messages: recipes/grpo_qlora.py does not train this"):
        check_recipe(config_with(), PLAIN)
    with pytest.raises(BadInput, match=r"sft.rows is not set: recipes/sft_qlora.py does not train this"):
        check_recipe(config_with("sft.rows=null", "sft.loss_on=null"), SUPERVISED)


@pytest.fixture(scope="module")
def base(learning_model_dir, tmp_path_factory):
    """A model with conversations beside it: long and short ones, of one and of two answers."""
    folder = tmp_path_factory.mktemp("sft") / "model"
    shutil.copytree(learning_model_dir, folder)
    for name, count in (("worked-train", 40), ("worked-heldout", 10)):
        rows = []
        for number in range(count):
            said = turns(f"{number} + {number % 7}?", f"{number} + {number % 7} = {number + number % 7}.")
            more = turns("And 1?", f"{number + 1}") if number % 3 == 0 else []
            rows.append(json.dumps({"messages": said + more}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def build(build_trainer, base, tmp_path):
    def make(changes: dict | None = None, flags: tuple[str, ...] = (), name: str = "run") -> Any:
        keys = {
            "run.output_dir": tmp_path / name,
            "model.path": base,
            "data.path": base,
            "train.max_steps": 2,
            "train.save_steps": 2,
            "train.warmup_steps": 0,
            "train.lr_scheduler": "constant",
            "train.per_device_train_batch_size": 4,
            "train.gradient_accumulation_steps": 2,
            "watch.eval_every": 2,
            "policy.lora_rank": 4,
        }
        words = [f"--{key}={value}" for key, value in (keys | (changes or {})).items()]
        return build_trainer(["--config", CONFIG, *words, *flags], file=SUPERVISED)

    return make


def cross_entropy(trainer: Any, rows: Any) -> tuple[float, float]:
    """Mean cross-entropy and share of top tokens over the learned tokens of the rows, one row at a time."""
    total, top, count = 0.0, 0, 0
    model = trainer.model.get_base_model()
    for row in rows:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].double()
        learned = torch.tensor([0] * (len(row["prompt_ids"]) - 1) + row["learned"]).bool()
        labels = ids[0, 1:]
        total -= logits.log_softmax(-1).gather(1, labels[:, None])[learned].sum().item()
        top += (logits.argmax(-1) == labels)[learned].sum().item()
        count += int(learned.sum())
    return total / count, top / count


@pytest.mark.parametrize("way", [{}, {"train.micro_batch_tokens": 128}, {"policy.compute": "fused"}])
def test_loss_and_accuracy_are_the_plain_ones_over_the_whole_step(build, read_jsonl, way):
    trainer = build(way | {"train.max_steps": 1})
    seen, sample = [], trainer.sample
    trainer.sample = lambda rows: (seen.extend(rows), sample(rows))[1]
    heldout = cross_entropy(trainer, trainer.heldout_rows)
    trainer.train_run(resume=False)
    trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert all(parameter.abs().max() > 0 for parameter in trained)
    for parameter in trained:
        parameter.data.zero_()  # the adapter as it was in step 1
    rows = seen
    assert len(rows) == 8 and len({row["problem_id"] for row in rows}) == 8
    loss, accuracy = cross_entropy(trainer, rows)
    (line,) = read_jsonl(trainer.run.metrics_file)
    assert line["loss"] == pytest.approx(loss, rel=1e-4)
    assert line["token_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    assert (line["heldout_loss"], line["heldout_token_accuracy"]) == pytest.approx(heldout, rel=1e-4)
    assert line["loss_tokens"] == sum(sum(row["learned"]) for row in rows)
    assert "loss" in step_line(line, 1) and "reward" not in step_line(line, 1)


def test_a_resumed_run_equals_the_uninterrupted_one(build, read_jsonl):
    build({"train.max_steps": 4}, name="whole").train_run(resume=False)
    build({"train.max_steps": 2}, name="parted").train_run(resume=False)
    parted = build({"train.max_steps": 4}, flags=("--resume",), name="parted")
    parted.train_run(resume=True)
    whole = parted.run.path.parent / "whole"
    lines = [read_jsonl(folder / "metrics.jsonl") for folder in (whole, parted.run.path)]
    keys = ("step", "loss", "token_accuracy", "grad_norm", "heldout_loss")
    assert [[line[key] for key in keys] for line in lines[0]] == [[line[key] for key in keys] for line in lines[1]]
    files = [folder / "adapters/v000004/adapter_model.safetensors" for folder in (whole, parted.run.path)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_resumed_in_a_later_pass_takes_the_rows_of_the_uninterrupted_one(build, read_jsonl):
    # 40 rows, 16 a step: a pass has 2 steps, and the rest of the rows wait for the next one.
    wide = {"train.per_device_train_batch_size": 16, "train.gradient_accumulation_steps": 1, "watch.eval_every": 0}
    build({"train.max_steps": 5} | wide, name="whole").train_run(resume=False)
    build({"train.max_steps": 4} | wide, name="parted").train_run(resume=False)
    parted = build({"train.max_steps": 5} | wide, flags=("--resume",), name="parted")
    parted.train_run(resume=True)
    whole = parted.run.path.parent / "whole"
    ledgers = [read_jsonl(folder / "ledger.jsonl") for folder in (whole, parted.run.path)]
    assert ledgers[0] == ledgers[1] and len(ledgers[0]) == 5
    assert ledgers[0][0]["problem_ids"] != ledgers[0][2]["problem_ids"] != ledgers[0][4]["problem_ids"]


def test_grpo_continues_from_the_adapter_with_a_kl_of_0(
    build, build_trainer, recipe_arguments, base, tmp_path, read_jsonl
):
    first = build({"train.learning_rate": 1e-2})
    first.train_run(resume=False)
    keys = {"policy.init_adapter": first.run.adapter_dir(2), "policy.reference": "init_adapter", "train.max_steps": 1}
    keys |= {"policy.lora_rank": 4, "policy.lora_alpha": 32}
    trainer = build_trainer(recipe_arguments(base, tmp_path / "grpo", keys))
    trainer.train_run(resume=False)
    assert read_jsonl(trainer.run.metrics_file)[0]["kl"] == 0.0


def test_a_rising_heldout_loss_is_an_alert():
    lines = [
        {"step": step, "loss": 1.0, "token_accuracy": 0.5, "heldout_loss": value if step % 10 == 0 else None}
        for step, value in zip(range(1, 41), [2.0] * 15 + [1.0] * 10 + [1.2] * 15, strict=True)
    ]
    assert [alert.name for alert in alerts(lines)] == ["held-out loss rises"]


def test_the_plan_has_an_update_and_no_rollout(learning_model_dir):
    shape, card = find_shape(str(learning_model_dir), None), parse_gpus("cpu")[0]
    assert list(memory.trainer_phases(shape, config_with(), card)) == ["update"]
