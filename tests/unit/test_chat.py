"""The chat template: one prompt in training, verification, evaluation and service, and what is refused before."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from eval import generate, vllm_backend
from eval.run import ask_settings
from eval.server_backend import Endpoint, ask_server
from kit.core import chat
from kit.core.config.load import config_from_dict, load_config, to_dict
from kit.core.config.schema import ServerConfig
from kit.core.errors import BadInput
from kit.core.run_directory import RunDir, read_manifest, write_json
from kit.core.run_files import read_json
from kit.core.tokenizer_hash import tokenizer_hash
from kit.data.problems import Problem, chat_messages, load_problems, prompt_lengths
from kit.policy.load import load_tokenizer
from kit.rollout.client import ServerRollout
from kit.rollout.protocol import decode_ids
from merge.chat_template import literal, set_defaults, with_defaults
from merge.verify import as_prompt, fixed_batch
from tests.conftest import CONFIG
from tests.unit.fake_replica import FakeReplica
from tests.unit.merge_fixture import CHAT_TEMPLATE, byte_tokenizer, make_run, shared_model
from tests.unit.test_eval_server import Stub, choice
from tests.unit.test_eval_vllm import ANSWER

# As Qwen3's: the argument closes the thought before it begins.
THINKING = (
    "{%- for m in messages %}\n"
    "    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endif %}\n"
)
OFF = {"enable_thinking": False}
USER = [{"role": "user", "content": "2 + 2?"}]


def with_template(folder: Path, template: str, **facts: object) -> Path:
    """A copy of the tiny checkpoint with another chat template and other entries of its tokenizer_config.json."""
    shutil.copytree(shared_model(), folder)
    (folder / "chat_template.jinja").write_text(template)
    known = read_json(folder / "tokenizer_config.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(known | facts))
    return folder


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> SimpleNamespace:
    """A run that was trained with `enable_thinking: false`, its model, configuration and held-out problems."""
    folder = tmp_path_factory.mktemp("thinking")
    model = with_template(folder / "model", THINKING)
    for name, numbers in (("train", range(3, 30)), ("heldout", range(30, 36))):
        rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "model.path": model,
        "data.path": folder,
        "data.answer_format": "plain",
        "data.system_prompt": "Be brief.",
        "data.prompt_suffix": " Box it.",
        "data.chat_template_kwargs": "{enable_thinking: false}",
        "rollout.max_prompt_length": 200,
    }
    config = load_config(CONFIG, [f"--{key}={value}" for key, value in keys.items()])
    run = make_run(folder / "run", model)
    write_json(run.config_file, {"config": to_dict(config)})
    problems = load_problems(config.data, "eval")
    row = {"problem_id": problems[0].id, "prompt": f"{problems[0].question} Box it.", "completion": "\\boxed{60}"}
    (run.completions / "step-000010.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversation = chat_messages(config.data, problems[0])
    ids = {
        on: tokenizer.apply_chat_template(conversation, add_generation_prompt=True, enable_thinking=on)["input_ids"]
        for on in (False, True)
    }
    assert tokenizer.decode(ids[False]) == tokenizer.decode(ids[True]) + "<think>\n\n</think>\n\n"
    return SimpleNamespace(
        model=model,
        keys=keys,
        config=config,
        run=run,
        problems=problems,
        tokenizer=tokenizer,
        conversation=conversation,
        asking=ask_settings(config, problems),
        ids=ids[False],
        other_ids=ids[True],
    )


@pytest.fixture(scope="module")
def merged(thinking) -> Path:
    """The run's checkpoints, merged by the command."""
    from merge.__main__ import main

    assert main(["--run", str(thinking.run.path), "--format", "bf16", "fp8", "--skip_verify"]) == 0
    return thinking.run.merged


def test_training_asks_in_this_process_and_its_server_the_prompt_of_the_arguments(
    thinking, tmp_path, build_trainer, recipe_arguments
):
    trainer = build_trainer(recipe_arguments(thinking.model, tmp_path / "run", thinking.keys))
    assert trainer._tokenize_prompts([thinking.conversation])[0] == [thinking.ids]
    group = trainer.config.rollout.group_size
    fake = FakeReplica(tokenizer_hash=tokenizer_hash(thinking.tokenizer))
    try:
        keys = {"server_urls": [fake.url], "canary_prompts": 0, "group_size": group}
        config = load_config(CONFIG, [f"--rollout.{key}={value}" for key, value in keys.items()])
        config.server.base = str(tmp_path / "none")
        rollout = ServerRollout(config, thinking.tokenizer, RunDir(tmp_path / "served"))
        rollout.check(["model.layers.0.self_attn.q_proj"], 316)
        rollout.sync.served, fake.served = 0, (rollout.sync.session, 0)
        rollout.generate(trainer.policy, trainer._token_ids([thinking.conversation] * group))
    finally:
        fake.stop()
    sent = [decode_ids(body["token_ids"]).tolist() for action, body in fake.bodies if action == "generate"]
    assert sent == [thinking.ids]


def test_lengths_calibration_and_verification_are_of_the_prompts_with_the_arguments(thinking):
    from kit.data.calibration_prompts import calibration_prompts
    from merge.calibrated import calibration_set

    assert prompt_lengths(thinking.problems[:1], thinking.tokenizer, thinking.config.data) == [len(thinking.ids)]
    thinking.config.policy.quant_calib_size = 1
    assert calibration_prompts(thinking.config, [thinking.conversation], thinking.tokenizer) == [thinking.ids]
    batch = [ids[0].tolist() for ids in fixed_batch(thinking.run, thinking.tokenizer, 320)]
    completion = thinking.tokenizer("\\boxed{60}", add_special_tokens=False)["input_ids"]
    assert batch[:2] == [thinking.ids + completion, thinking.ids]  # logged, and held out
    found = calibration_set(thinking.run, thinking.tokenizer, 3, 512).sequences
    assert found[0][: len(thinking.ids)] == thinking.ids
    assert all(thinking.tokenizer.decode(ids).endswith("</think>\n\n") for ids in found[1:])
    # A logged prompt that went through the template is taken as it is.
    text, values = thinking.tokenizer.decode(thinking.ids), thinking.run.config()
    for prompt in (text, thinking.conversation):
        assert as_prompt(values, prompt, thinking.tokenizer) == text


class Asked:
    """A model that stops at once and keeps what it was asked."""

    device = "cpu"

    def __init__(self, stop: int):
        self.generation_config, self.rows = GenerationConfig(eos_token_id=stop), []

    def eval(self) -> None:
        pass

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object) -> torch.Tensor:
        self.rows += [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        return torch.cat([input_ids, torch.full((len(input_ids), 1), self.generation_config.eos_token_id[0])], dim=1)


def test_eval_asks_the_prompt_of_the_training_in_this_process_and_through_vllm(thinking, tmp_path, monkeypatch):
    asking = thinking.asking
    model = Asked(thinking.tokenizer.eos_token_id)
    settings = {"template_arguments": asking.template_arguments}
    generate.generate(model, thinking.tokenizer, asking.conversations[:1], 4, **settings)
    assert model.rows == [thinking.ids]
    (file := tmp_path / "worker.py").write_text(ANSWER)
    monkeypatch.setattr(vllm_backend, "WORKER", [sys.executable, str(file)])
    vllm_backend.ask_vllm(thinking.model, asking, ServerConfig(), tmp_path / "log")
    assert read_json(file.with_name(f"{file.name}.json"))["prompts"][0] == thinking.ids


@pytest.fixture
def stub(monkeypatch):
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    made = Stub()
    yield made
    made.server.shutdown()
    made.server.server_close()


def serve(stub: Stub, place: Path, takes_arguments: bool = True) -> list[list[int]]:
    """Let the stub render as a server of the checkpoint at `place` does; the prompts that it saw."""
    tokenizer, seen = AutoTokenizer.from_pretrained(place), []

    def answer(request: dict) -> tuple[int, dict]:
        given = request.get("chat_template_kwargs", {})
        if given and not takes_arguments:
            return 400, {"error": {"message": "unknown field chat_template_kwargs"}}
        ids = tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True, **given)["input_ids"]
        if request["max_tokens"] > 1:
            seen.append(ids)
        return 200, {"choices": [choice("4")], "usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": ids}

    stub.answer = answer
    return seen


def test_a_server_renders_the_prompt_of_the_training_or_is_told_to(thinking, merged, stub, capsys):
    # of the base: asked with the arguments, and said to have other defaults
    seen = serve(stub, thinking.model)
    answers = ask_server(Endpoint(stub.url), thinking.model, thinking.asking)
    assert thinking.ids in seen and len(seen) == len(thinking.problems)
    assert all(request["chat_template_kwargs"] == OFF for request in stub.measured())
    assert answers.versions["without_arguments"] == "another prompt"
    assert "get a different prompt from the policy's training" in capsys.readouterr().out
    # of the base, which takes no arguments
    serve(stub, thinking.model, takes_arguments=False)
    with pytest.raises(BadInput, match=r"into .* tokens, the checkpoint's tokenizer"):
        ask_server(Endpoint(stub.url), thinking.model, thinking.asking)
    capsys.readouterr()
    # of the merged checkpoint
    seen = serve(stub, place := merged / "grpo" / "fp8", takes_arguments=False)
    answers = ask_server(Endpoint(stub.url), place, thinking.asking)
    assert thinking.ids in seen and len(seen) == len(thinking.problems)
    assert answers.versions["refused"] == "chat_template_kwargs" and "without_arguments" not in answers.versions
    assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize("cell", ["base/bf16", "grpo/bf16", "grpo/fp8"])
def test_the_merged_checkpoint_has_the_arguments_as_defaults_and_a_callers_own_win(thinking, merged, cell):
    tokenizer = AutoTokenizer.from_pretrained(merged / cell)
    plain = tokenizer.apply_chat_template(thinking.conversation, add_generation_prompt=True)["input_ids"]
    asked = tokenizer.apply_chat_template(thinking.conversation, add_generation_prompt=True, enable_thinking=True)
    assert (plain, asked["input_ids"]) == (thinking.ids, thinking.other_ids)
    assert read_manifest(merged / cell)["chat_template_kwargs"] == OFF
    assert '`{\\"enable_thinking\\": false}`'.replace("\\", "") in (merged / cell / "README.md").read_text()


def test_a_checkpoint_with_other_defaults_than_the_runs_is_neither_evaluated_nor_quantized(thinking, merged, tmp_path):
    from eval.artifacts import artifact
    from merge.__main__ import main

    run = RunDir(shutil.copytree(thinking.run.path, tmp_path / "run"))
    assert artifact(run, "grpo", "fp8").manifest["format"] == "fp8"
    values = read_json(run.config_file)
    values["config"]["data"]["chat_template_kwargs"] = {}
    write_json(run.config_file, values)
    with pytest.raises(BadInput, match=r"chat_template_kwargs \{'enable_thinking': False\}, the run was .* \{\}"):
        artifact(run, "grpo", "fp8")
    with pytest.raises(BadInput, match="its chat template has other defaults"):
        main(["--run", str(run.path), "--format", "fp8_block", "--policy", "grpo", "--skip_verify"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{enable_thinking: 'false'}", "is the text 'false', which a template treats as true"),
        ("{messages: []}", "messages is passed to the template by transformers itself"),
        ("{add_generation_prompt: false}", "add_generation_prompt is passed to the template by transformers"),
        ("{bos_token: x}", "bos_token is passed to the template"),
        ("{chat_template: x}", "chat_template is passed"),
        ("{a b: 1}", "names 'a b', which is not a variable's name"),
        ("{1: 2}", "data.chat_template_kwargs must be a group of keys, it is {1: 2}"),
        ("{limit: .inf}", "holds inf, which JSON cannot carry"),
        ("{tools_by: {1: x}}", "has keys that are not text"),
        ("{words: [a, 'no']}", "is the text 'no'"),
        ("[enable_thinking]", "data.chat_template_kwargs must be a group of keys"),
        ("enable_thinking", "data.chat_template_kwargs must be a group of keys"),
    ],
)
def test_an_argument_that_no_template_can_be_given_is_refused(arguments, message):
    with pytest.raises(BadInput) as refused:
        load_config(CONFIG, [f"--data.chat_template_kwargs={arguments}"])
    assert message in str(refused.value)


def test_arguments_of_an_earlier_versions_key_are_read_from_its_runs():
    values = to_dict(load_config(CONFIG))
    del values["data"]["chat_template_kwargs"]
    for given in (OFF, json.dumps(OFF)):
        values["train"]["trl"] = {"chat_template_kwargs": given}
        assert chat.arguments_of(values) == config_from_dict(values).data.chat_template_kwargs == OFF
    values["train"]["trl"] = {"chat_template_kwargs": "{"}
    assert chat.arguments_of(values) == {}


def tokenizer_with(template: str) -> object:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS_SYSTEM = "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (THINKING, {"chat_template_kwargs": "{enable_thought: false}"}, "never reads 'enable_thought'. Did you mean"),
        (CHAT_TEMPLATE, {"chat_template_kwargs": "{enable_thinking: false}"}, "It reads no argument at all"),
        (NO_SYSTEM + CHAT_TEMPLATE, {"system_prompt": "Be brief."}, "takes no system message (TemplateError: System"),
        (DROPS_SYSTEM + CHAT_TEMPLATE, {"system_prompt": "Be brief."}, "drops the system message"),
        ("{% for m in messages %}", {}, "is not valid: TemplateSyntaxError in line 1"),
        ("{{ messages[0].missing.more }}", {}, "fails on a conversation of user: UndefinedError"),
        ("{{ messages[0].content + 1 }}", {}, "fails on a conversation of user: TypeError"),
        ("{{ {'no': 'default'} }}{% include 'x' %}", {}, "fails on a conversation of user"),
        (
            "{{ date + 'x' }}" + CHAT_TEMPLATE,
            {"chat_template_kwargs": "{date: 3}"},
            "of user and data.chat_template_kwargs {'date': 3}",
        ),
        (
            CHAT_TEMPLATE.replace("<|im_end|>", "<|endoftext|>"),
            {},
            "which is not among the model's stop tokens (['<|im_end|>']): every completion would run",
        ),
        (
            CHAT_TEMPLATE.replace("<|im_end|>", ""),
            {},
            "ends an assistant's turn with '\\n', which is no special token",
        ),
    ],
)
def test_a_template_that_cannot_ask_or_stop_is_refused_before_weights_are_loaded(tmp_path, template, changes, message):
    folder = with_template(tmp_path / "model", template)
    keys = [f"--data.{key}={value}" for key, value in changes.items()]
    with pytest.raises(BadInput) as refused:
        load_tokenizer(load_config(CONFIG, [f"--model.path={folder}", *keys]))
    assert message in str(refused.value) and str(folder) in str(refused.value)


def test_the_doctor_finds_a_template_that_the_recipe_refuses(tmp_path, monkeypatch):
    from launch.checks.steps import recipe_checks

    monkeypatch.chdir(tmp_path)
    folder = with_template(tmp_path / "model", NO_SYSTEM + CHAT_TEMPLATE)
    config = to_dict(load_config(CONFIG, [f"--model.path={folder}", "--data.system_prompt=Be brief."]))
    assert "takes no system message" in recipe_checks(json.dumps(config), 1, str(tmp_path))["refused"]
    config["data"]["system_prompt"] = None
    assert recipe_checks(json.dumps(config), 1, str(tmp_path)) == {"skipped": "", "refused": "", "kind": "qwen3"}


def test_a_default_system_message_and_a_stop_token_of_the_model_config_alone_are_enough(tmp_path):
    # As Qwen2.5's template, which adds its own system message if there is none.
    default = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    folder = with_template(tmp_path / "model", default + CHAT_TEMPLATE)
    config = load_config(CONFIG, [f"--model.path={folder}", "--data.system_prompt=Be brief."])
    assert load_tokenizer(config).chat_template == default + CHAT_TEMPLATE
    (folder / "generation_config.json").unlink()
    load_tokenizer(config)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(BadInput, match=r"no readable generation_config"):
        load_tokenizer(config)


def test_rewards_get_completions_as_they_were_generated_whatever_the_tokenizer_would_parse(
    tmp_path, build_trainer, recipe_arguments, thinking, monkeypatch
):
    """TRL parses completions of a tokenizer with a response template, and the thought is gone from them."""
    from trl.chat_template_utils import parse_response

    thought = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    fields = {"reasoning_content": thought, "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}
    parts = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}
    folder = with_template(tmp_path / "model", CHAT_TEMPLATE, response_template=parts)
    raw = AutoTokenizer.from_pretrained(folder)
    keys = thinking.keys | {"model.path": folder, "data.chat_template_kwargs": "{}"}
    trainer = build_trainer(recipe_arguments(folder, tmp_path / "run", keys))
    said = "<think>\n4?\n</think>\n\n\\boxed{4}"
    ids = thinking.tokenizer(said, add_special_tokens=False)["input_ids"]
    prompt = raw.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert parse_response(raw, ids, prefix=prompt)["content"] == "\\boxed{4}"
    seen = []
    monkeypatch.setattr(trainer, "_generate_single_turn", lambda prompts, *_: ([ids] * len(prompts), None))
    trainer.reward_funcs[0] = lambda completions, **others: seen.extend(completions) or [0.0] * len(completions)
    trainer.sample([{"prompt": USER, "problem_id": "one"}] * trainer.config.rollout.group_size)
    assert {completion[0]["content"] for completion in seen} == {said}


def test_eval_stops_where_training_does(tmp_path, thinking, build_trainer, recipe_arguments):
    """TRL adds the tokenizer's own stop token to the model's."""
    folder = with_template(tmp_path / "model", THINKING, eos_token="<|endoftext|>")
    trainer = build_trainer(recipe_arguments(folder, tmp_path / "run", thinking.keys | {"model.path": folder}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = chat.model_stop_tokens(folder, tokenizer)
    assert (
        sorted(stops)
        == sorted(trainer.eos_token_ids)
        == sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]))
    )


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{{ strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE, []),
        ("{{ date_string or strftime_now('%d %b %Y') }}" + CHAT_TEMPLATE, ["date_string"]),
        ("{% if tools %}{{ strftime_now('%d') }}{% endif %}" + CHAT_TEMPLATE, None),
        (CHAT_TEMPLATE, None),
    ],
)
def test_a_prompt_that_changes_with_the_date_is_found_and_warned_about(template, names, capsys):
    from kit.train.setup import note_date

    tokenizer, problems = tokenizer_with(template), [Problem("", "2 + 2?", "4", "")]
    assert chat.date_arguments(tokenizer, USER, {}) == names
    note_date(load_config(CONFIG), tokenizer, problems)
    said = capsys.readouterr().out
    assert said == "" if names is None else "It cannot be pinned" in said or "{date_string: 26 Jul 2024}" in said
    if names:
        assert chat.date_arguments(tokenizer, USER, {"date_string": "26 Jul 2024"}) is None
        note_date(load_config(CONFIG, ["--data.chat_template_kwargs={date_string: 26 Jul 2024}"]), tokenizer, problems)
        assert capsys.readouterr().out == ""


VALUES = [False, True, None, 0, -3, 1.5e-7, "a\"'\n%}{{ {# é 😀 \\", [1, "x", [None]], {"a'b": {"c": [False]}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_default_is_the_value_to_the_last_character(value):
    template = "{{ x | tojson }}{% if x is none %}none{% elif x is false %}false{% endif %}"
    render = tokenizer_with(template).apply_chat_template
    changed = tokenizer_with(with_defaults(template, {"x": value})).apply_chat_template
    assert changed(USER, tokenize=False) == render(USER, tokenize=False, x=value)
    assert changed(USER, tokenize=False, x=17) == "17"


@pytest.mark.parametrize(
    "template",
    [
        THINKING,
        "\n\n" + THINKING,
        "\n  {% if true %}a{% endif %}{{ enable_thinking }}",
        "   {{ enable_thinking }}  \n",
        "  {%- if not enable_thinking %}x{% endif %}\n\n",
        "\t{# note #}\n{{ enable_thinking }}",
        "text {{ enable_thinking }}\n",
        "{%- macro f() %}[{{ enable_thinking }}]{%- endmacro %}{{ f() }}{% for m in messages %}{{ f() }}{% endfor %}",
        "{%- set enable_thinking = enable_thinking | default(true) %}{{ enable_thinking }}",
        "{% generation %}{{ enable_thinking }}{% endgeneration %}",
        "{% for m in messages %}{% if enable_thinking is false %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_with_defaults_renders_the_same_bytes_as_one_with_arguments(template):
    before, after = tokenizer_with(template), tokenizer_with(with_defaults(template, OFF))
    again = tokenizer_with(with_defaults(after.chat_template, {"enable_thinking": True}))
    wanted = chat.render(before, USER, OFF)
    assert [chat.render(one, USER, given) for one, given in ((after, {}), (after, OFF), (again, OFF))] == [wanted] * 3
    on = {"enable_thinking": True}
    assert chat.render(after, USER, on) == chat.render(before, USER, on) == chat.render(again, USER, {})


def test_every_template_of_a_checkpoint_gets_the_defaults(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools" + THINKING)
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (tmp_path / "additional_chat_templates" / "torn.jinja").write_text(torn := THINKING[:-20])
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": {"default": THINKING}}))
    named = [{"name": "default", "template": THINKING}, {"name": "rag", "template": "rag é"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "</s>"}))
    set_defaults(tmp_path, OFF)
    changed = with_defaults(THINKING, OFF)
    assert changed != THINKING
    assert (tmp_path / "chat_template.jinja").read_text() == changed
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").read_text() == with_defaults(
        "tools" + THINKING, OFF
    )
    assert (tmp_path / "additional_chat_templates" / "rag.jinja").read_text() == "rag"
    assert (tmp_path / "additional_chat_templates" / "torn.jinja").read_text() == torn
    assert read_json(tmp_path / "chat_template.json")["chat_template"] == {"default": changed}
    facts = read_json(tmp_path / "tokenizer_config.json")
    assert facts["chat_template"] == [{**named[0], "template": changed}, named[1]] and facts["eos_token"] == "</s>"
    assert literal({"a": [True]}) == "{'a': [true]}"


def test_another_task_and_the_export_to_verl_have_the_arguments():
    from eval.tasks import task_config
    from launch.export.files import words
    from launch.export.translate import Cluster, translate

    config = load_config(CONFIG, ["--data.chat_template_kwargs={enable_thinking: false}"])
    assert task_config(config, "svamp").data.chat_template_kwargs == OFF
    found = translate(config, Cluster(1, 1), 1, False, Path("out"))
    assert "+data.apply_chat_template_kwargs.enable_thinking=false" in words(found)
