"""The plan of a base that FSDP2 or ZeRO-3 splits over the trainer's processes, against what GPUs allocated."""

import json

import pytest

from kit.core.config import recompute_rules, sharding_rules
from kit.core.config.load import load_config
from kit.core.config.sharding_rules import FSDP2, announced
from kit.core.errors import BadInput
from kit.plan import memory
from kit.plan.fitting import candidates
from kit.plan.gpus import parse_gpus
from kit.plan.layout import choose_shape, make_layout
from kit.plan.sizes import with_keys
from launch import up
from launch.starting.trainer_command import environment_of, read_launcher
from tests.conftest import ROOT
from tests.unit.test_plan import command

SFT = ROOT / "recipes/configs/sft-tiny-nf4-cpu.yaml"
GRPO = ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml"
LARGE = ROOT / "recipes/configs/grpo-qwen3_32b-nf4-fp8-gsm8k-2gpu.yaml"
WORDS = ["--model.dtype=bfloat16", "--train.recompute=full", "--rollout.max_completion_length=1216"]
WORDS += ["--rollout.max_prompt_length=64", "--train.gradient_accumulation_steps=1"]
LEVERS = ["--train.micro_batch_tokens=5120", "--policy.compute=fp8"]
# Hidden size, width of the MLP, heads, layers.
SHAPES = {"8b": (4096, 12288, 32, 36), "half of 8b": (4096, 12288, 32, 18), "32b": (5120, 25600, 64, 64)}
SHAPES["70b"] = (8192, 28672, 64, 80)
# Launcher, processes, rows of a micro-batch or packs, GiB a card (bench/README.md, Levers on a split base).
MEASURED = [
    ("8b", "fsdp2", 4, None, 4.82),
    ("32b", "fsdp2", 2, None, 15.74),
    ("32b", "zero3", 2, None, 17.13),
    ("70b", "fsdp2", 4, None, 20.48),
    ("half of 8b", "fsdp2", 2, None, 4.72),
    ("half of 8b", "fsdp2", 2, 4, 4.66),
    ("8b", "ddp", 4, None, 8.95),
    ("half of 8b", "ddp", 2, None, 6.19),
]


def write_shape(folder, name):
    hidden, width, heads, layers = SHAPES[name]
    facts = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128}
    facts |= {"hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads}
    facts |= {"num_hidden_layers": layers, "num_key_value_heads": 8, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 4096}))
    return folder


def layout_of(folder, name, launcher, processes, rows=None, card="h200", more=()):
    words = [*WORDS, f"--train.per_device_train_batch_size={rows or 32 // processes}", *more]
    config = load_config(SFT, words if rows else [*words, *LEVERS])
    with environment_of(read_launcher(launcher).announces):
        shape = choose_shape(config, model=str(write_shape(folder, name)))
        return make_layout(config, shape, *parse_gpus(f"{card}:{processes}"))


@pytest.mark.parametrize(("name", "launcher", "processes", "rows", "gib"), MEASURED)
def test_the_update_takes_what_cards_allocated(tmp_path, name, launcher, processes, rows, gib):
    found = layout_of(tmp_path, name, launcher, processes, rows)
    assert memory.allocated(found.trainer["update"]) == pytest.approx(gib, rel=0.08)


def test_each_card_holds_the_whole_base_while_it_loads(tmp_path):
    found = layout_of(tmp_path, "70b", "fsdp2", 4)
    whole = layout_of(tmp_path, "70b", "ddp", 4)
    assert "loading" not in whole.trainer
    base = [name for name in found.trainer["loading"] if name != "adapter"]
    assert [found.trainer["loading"][name] for name in base] == [whole.trainer["update"][name] for name in base]
    # Eight processes leave room for the update on a card of 24 GB, and none for loading.
    small = layout_of(tmp_path, "70b", "fsdp2", 8, card="rtx4090")
    card = small.cards[0]
    assert card.phases["update"].high < card.limit_gib < card.phases["loading"].low and not small.fits


def test_auto_recomputes_less_where_the_base_is_split(tmp_path):
    more = ["--train.recompute=auto", "--train.micro_batch_tokens=9216"]
    whole, split = (layout_of(tmp_path, "32b", kind, 8, card="h100-80g", more=more) for kind in ("ddp", "fsdp2"))
    modes = [(one.config.train.recompute, one.config.train.recompute_fraction) for one in (whole, split)]
    assert whole.chose and split.chose and whole.fits and split.fits and modes[0] != modes[1], modes
    parts = [one.trainer["update"].get("checkpoints", 0.0) for one in (whole, split)]
    assert parts[1] < parts[0]


def test_auto_chooses_nothing_that_zero3_refuses(tmp_path):
    more = ["--train.recompute=auto"]
    found = {kind: layout_of(tmp_path, "8b", kind, 2, card="rtx4090", more=more) for kind in ("fsdp2", "zero3")}
    assert all(one.fits for one in found.values())
    assert found["fsdp2"].config.train.recompute == "selective" and found["zero3"].config.train.recompute == "full"


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
@pytest.mark.parametrize("recompute", ["none", "full", "auto"])
def test_no_proposal_is_refused_where_the_base_is_split(tmp_path, kind, recompute):
    found = layout_of(tmp_path, "32b", kind, 2, card="rtx4080", more=[f"--train.recompute={recompute}"])
    with environment_of(read_launcher(kind).announces):
        changes = [keys for keys, _ in candidates(found)]
        assert {"policy.lora_rank": 8} in changes
        for keys in changes:
            made = with_keys(found.config, keys)
            assert [*recompute_rules.faults(made, announced()), *sharding_rules.faults(made)] == [], keys


def rollout_parts(folder, kind, backend):
    words = ["--model.dtype=bfloat16", "--rollout.max_prompt_length=64", "--rollout.max_completion_length=960"]
    words += ["--train.per_device_train_batch_size=8", "--train.gradient_accumulation_steps=1"]
    config = load_config(GRPO, [*words, f"--rollout.backend={backend}"])
    with environment_of(read_launcher(kind).announces):
        found = make_layout(config, choose_shape(config, model=str(write_shape(folder, "32b"))), *parse_gpus("h200:8"))
    return found.trainer["rollout"]


def test_zero3_gathers_everything_to_generate_in_process(tmp_path):
    for backend, gathers in (("in_process", True), ("server", False)):
        whole, split = (rollout_parts(tmp_path, kind, backend)["NF4 weights"] for kind in ("ddp", "zero3"))
        assert (split > whole) == gathers, backend


def test_a_split_base_keeps_no_weights_for_a_rollout(tmp_path):
    kept = {kind: memory.KEPT in rollout_parts(tmp_path, kind, "in_process") for kind in ("ddp", "fsdp2", "zero3")}
    assert kept == {"ddp": True, "fsdp2": False, "zero3": False}


def test_the_command_plans_for_a_launcher(tmp_path, monkeypatch, capsys):
    words = ["--config", SFT, "--gpu", "rtx4090:8", "--model", write_shape(tmp_path, "32b"), *WORDS, *LEVERS]
    words.append("--train.per_device_train_batch_size=4")
    assert command(monkeypatch, capsys, *words)[0] == 1
    code, told = command(monkeypatch, capsys, *words, "--launcher", "fsdp2")
    told = " ".join(told.split())
    assert code == 0 and "8 trainer processes that split the base" in told and " loading " in told


def test_up_plans_for_its_launcher(monkeypatch, tmp_path):
    seen = []

    def fits(config):
        seen.append(announced())
        return True, "one\ntwo"

    monkeypatch.setattr(up, "fits", fits)
    monkeypatch.setattr(up, "gpus_to_plan", lambda config, asked, dry_run: (["0", "1", "2"], False))
    monkeypatch.setattr(up, "installed_vllm", lambda: None)
    monkeypatch.setattr(up, "server_plans", lambda *_: [])
    monkeypatch.setattr(up, "check_base", lambda *_: None)
    words = [f"--model.path={write_shape(tmp_path, '32b')}", f"--run.output_dir={tmp_path / 'run'}"]
    words += ["--train.gpus=[0, 1]", "--server.gpus=[2]", "--train.per_device_train_batch_size=4"]
    for launcher in ("fsdp2", "ddp"):
        up.prepare(str(LARGE), words, launcher_path=launcher, resume=False)
    assert seen == [FSDP2, None] and announced() is None
    monkeypatch.setattr(up, "fits", lambda config: (False, "It does not fit."))
    with pytest.raises(BadInput, match=r"Details: python -m launch.plan .*--launcher fsdp2"):
        up.prepare(str(LARGE), words, launcher_path="fsdp2", resume=False)
