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
from merge.chat_template import literal, set_defaults, with_defaults
from merge.verify import as_prompt, fixed_batch
from recipes.parts import chat
from recipes.parts.config import ServerConfig, config_from_dict, load_config, to_dict
from recipes.parts.data import chat_messages, load_problems, prompt_lengths
from recipes.parts.errors import BadInput
from recipes.parts.policy import load_tokenizer
from recipes.parts.replica import decode_ids, tokenizer_hash
from recipes.parts.rollout import ServerRollout
from recipes.parts.rundir import RunDir, read_json, read_manifest, write_json
from tests.conftest import CONFIG
from tests.unit.fake_replica import FakeReplica
from tests.unit.test_eval_server import Stub, choice
from tests.unit.test_eval_vllm import ANSWER
from tests.unit.test_merge_fixture import CHAT_TEMPLATE, byte_tokenizer, make_run, shared_model

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
    group = thinking.config.rollout.group_size
    fake = FakeReplica(tokenizer_hash=tokenizer_hash(thinking.tokenizer))
    try:
        keys = [f"--rollout.server_urls={[fake.url]}", "--rollout.canary_prompts=0", f"--server.base={tmp_path}/none"]
        rollout = ServerRollout(load_config(CONFIG, keys), thinking.tokenizer, RunDir(tmp_path / "run"))
        rollout.check(["model.layers.0.self_attn.q_proj"], 316)
        rollout.sync.served, fake.served = 0, (rollout.sync.session, 0)
        trainer.rollout = rollout
        trainer._generate([thinking.conversation] * group)
    finally:
        fake.stop()
    sent = [decode_ids(body["token_ids"]).tolist() for action, body in fake.bodies if action == "generate"]
    assert sent == [thinking.ids]


def test_lengths_and_calibration_are_of_the_prompts_with_the_arguments(thinking):
    from recipes.parts.calibration import calibration_prompts

    assert prompt_lengths(thinking.problems[:1], thinking.tokenizer, thinking.config.data) == [len(thinking.ids)]
    thinking.config.policy.quant_calib_size = 1
    assert calibration_prompts(thinking.config, [thinking.conversation], thinking.tokenizer) == [thinking.ids]


def test_merge_verifies_on_the_prompts_of_the_training_held_out_and_logged(thinking):
    batch = [ids[0].tolist() for ids in fixed_batch(thinking.run, thinking.tokenizer, 320)]
    completion = thinking.tokenizer("\\boxed{60}", add_special_tokens=False)["input_ids"]
    assert batch[:2] == [thinking.ids + completion, thinking.ids]


def test_merge_calibrates_on_the_prompts_of_the_training(thinking):
    from merge.calibrated import calibration_set

    found = calibration_set(thinking.run, thinking.tokenizer, 3, 512).sequences
    assert found[0][: len(thinking.ids)] == thinking.ids
    assert all(thinking.tokenizer.decode(ids).endswith("</think>\n\n") for ids in found[1:])


class Asked:
    """A model that stops at once and keeps what it was asked."""

    device = "cpu"

    def __init__(self, stop: int):
        self.generation_config, self.rows = GenerationConfig(eos_token_id=stop), []

    def eval(self) -> None:
        pass

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object) -> torch.Tensor:
        self.rows += [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]
        return torch.cat([input_ids, torch.full((len(input_ids), 1), self.generation_config.eos_token_id)], dim=1)


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


def test_a_server_of_the_base_is_asked_with_the_arguments_and_said_to_have_other_defaults(thinking, stub, capsys):
    seen = serve(stub, thinking.model)
    answers = ask_server(Endpoint(stub.url), thinking.model, thinking.asking)
    assert thinking.ids in seen and len(seen) == len(thinking.problems)
    assert all(request["chat_template_kwargs"] == OFF for request in stub.measured())
    assert answers.versions["without_arguments"] == "another prompt"
    assert "ask another prompt than the policy was trained on" in capsys.readouterr().out


def test_a_server_of_the_merged_checkpoint_renders_the_prompt_of_the_training_unasked(thinking, merged, stub, capsys):
    seen = serve(stub, merged / "grpo" / "fp8", takes_arguments=False)
    answers = ask_server(Endpoint(stub.url), merged / "grpo" / "fp8", thinking.asking)
    assert thinking.ids in seen and len(seen) == len(thinking.problems)
    assert answers.versions["refused"] == "chat_template_kwargs" and "without_arguments" not in answers.versions
    assert "WARNING" not in capsys.readouterr().out


def test_a_server_of_the_base_that_takes_no_arguments_is_refused(thinking, stub):
    serve(stub, thinking.model, takes_arguments=False)
    with pytest.raises(BadInput, match="makes .* tokens of a prompt of which the checkpoint's tokenizer"):
        ask_server(Endpoint(stub.url), thinking.model, thinking.asking)


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
    with pytest.raises(BadInput, match="other defaults in its chat template"):
        main(["--run", str(run.path), "--format", "fp8_block", "--policy", "grpo", "--skip_verify"])


def test_another_task_is_asked_with_the_runs_arguments(thinking):
    from eval.tasks import task_config

    assert task_config(thinking.config, "svamp").data.chat_template_kwargs == OFF
