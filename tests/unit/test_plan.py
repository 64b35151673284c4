"""launch.plan: every shipped configuration gets a plan, its changes do what they say, bad input is named."""

import json
import re
import sys

import pytest

from kit.core.config.load import load_config
from kit.core.config.shared_gpu import describe_split, replicas_beside_trainer, split_fault
from kit.core.errors import BadInput
from kit.plan import fitting, matrix, memory
from kit.plan.fitting import changed, changes, lay_out, remedy
from kit.plan.gpus import CARDS, own_gpus, parse_gpus, recognize
from kit.plan.layout import choose_shape, make_layout
from kit.plan.layout import fits as plan_fits
from kit.plan.matrix import MODELS, ONE_BASE, ONE_BASE_MODELS, SIZES, fits, longest, widest
from kit.plan.placement import place
from kit.plan.report import largest, spell, summary, time_rows
from kit.plan.shapes import KNOWN, UNGATED, find_shape, shape_by_size, shape_from_facts
from kit.plan.sizes import with_keys
from kit.plan.splitting import splits
from launch.plan import main
from tests import processes
from tests.conftest import ROOT

CONFIGS = sorted((ROOT / "recipes/configs").rglob("*.yaml"))
ONE_CARD = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-1x24gb.yaml"
SHARED = ROOT / "recipes/configs/grpo-qwen3_8b-fp8-shared-1x16gb.yaml"
EIGHT = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-deepmath-8gpu.yaml"
TWO = ROOT / "recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml"
OWN = ROOT / "recipes/configs/grpo-qwen2.5_1.5b-nf4-gsm8k-1gpu.yaml"
# Published numbers of weights, in billions (the models' cards).
WEIGHTS = {"qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-32b": 32.76, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62}
WEIGHTS |= {"qwen2.5-72b": 72.7, "llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-1b": 1.236}


def plan(path, gpus, *overrides, params=None):
    config = load_config(path, list(overrides))
    return make_layout(config, choose_shape(config, params), *parse_gpus(gpus))


def words_of(keys):
    return [word for key, value in keys.items() for word in (f"--{key}", json.dumps(value))]


def best_split(layout):
    """The fastest way to use the cards that fits; None if none does or the card's speed is unknown."""
    return next((one for one in time_rows(layout) if one.fits), None)


def command(monkeypatch, capsys, *words):
    """Exit code and output of the command line, in this process."""
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "100")
    code = main()
    return code, capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_gets_a_plan(path, monkeypatch, capsys, tmp_path):
    config = load_config(path)
    own = not config.model.path or (ROOT / config.model.path).is_dir()
    # A limit is for the model that the file names, not for what stands in for it.
    words = [] if own else ["--params", "0.6b", "--train.max_gpu_gib", "60"]
    monkeypatch.chdir(ROOT)
    code, out = command(monkeypatch, capsys, "--config", path, "--gpu", "h200:8", *words)
    assert code == 0
    assert "It fits" in out
    assert "trainer, update" in out
    code, out = command(monkeypatch, capsys, "--config", path, "--gpu", "h200:8", "--json", *words)
    found = json.loads(out)
    assert found["fits"] and found["count"] == 8
    scored = "teacher" if config.distill.is_given else "log-probs"
    sampled = set() if config.sft.is_given else {"rollout", scored}
    assert sampled | {"update"} == set(found["trainer_gib"])
    assert ("Trained for" in (found["counted"] or "")) == (config.policy.quant_cfg is not None)
    assert ("Distilled from" in (found["counted"] or "")) == config.distill.is_given
    assert (found["server_gib"] is not None) == (config.rollout.backend == "server")
    assert found["seconds"]["step"] > 0


def test_the_configuration_for_24_gb_fits_a_24_gb_card_and_no_smaller_one(monkeypatch, capsys):
    assert plan(ONE_CARD, "rtx4090").fits
    code, out = command(monkeypatch, capsys, "--config", ONE_CARD, "--gpu", "rtx4080")
    assert code == 1
    assert "It does not fit" in out and "Change first" in out


def test_the_command_line_ends_with_1_and_2():
    words = [sys.executable, "-m", "launch.plan", "--config", ONE_CARD]
    for gpus, code in (("rtx4080", 1), ("rtx1", 2)):
        done = processes.run([*words, "--gpu", gpus])
        assert done.returncode == code
        assert done.stdout if code < 2 else done.stderr.startswith("error: --gpu rtx1: unknown card")


def test_what_the_memory_of_a_cpu_does_not_hold_is_to_be_planned_for_gpus(monkeypatch, capsys):
    words = ["--gpu", "cpu", "--train.gpus", "null", "--server.gpus", "null", "--params", "32b"]
    code, out = command(monkeypatch, capsys, "--config", TWO, *words)
    assert code == 1 and "Plan it for GPUs with --gpu" in " ".join(out.split())


def test_cards_are_named_together_only_when_they_follow_each_other(monkeypatch, capsys):
    _, out = command(monkeypatch, capsys, "--config", EIGHT, "--gpu", "h200:8")
    assert "GPU 0 to 3, trainer" in out and "GPU 4 to 7, server" in out
    words = ["--gpu", "h200:4", "--rollout.server_urls", "[http://a:1, http://b:1]", "--server.gpus", "[1, 3]"]
    _, out = command(monkeypatch, capsys, "--config", EIGHT, *words)
    assert "GPU 0, 2, trainer" in out and "GPU 1, 3, server" in out


def test_it_starts_within_a_second_and_imports_no_torch():
    program = (
        "import sys, launch.plan, kit.plan.report, kit.plan.matrix, kit.plan.compare_points\n"
        "print(*({'torch', 'transformers', 'vllm', 'rich'} & set(sys.modules)))"
    )
    done = processes.run([sys.executable, "-c", program])
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.parametrize("name", WEIGHTS)
def test_built_in_shapes_have_the_published_number_of_weights(name):
    assert shape_by_size(name).parameters / 1e9 == pytest.approx(WEIGHTS[name], rel=0.005)


def test_a_built_in_shape_equals_what_transformers_builds():
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    kinds = {"qwen3-0.6b": Qwen3Config, "qwen2.5-0.5b": Qwen2Config, "llama3-1b": LlamaConfig}
    for name, kind in kinds.items():
        shape = shape_by_size(name)
        sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "head_dim": shape.head_dim}
        sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
        sizes |= {"num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(kind(**sizes, tie_word_embeddings=shape.tied))
        linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
        assert shape.parameters == sum(p.numel() for p in model.parameters())
        assert shape.linear_weights == sum(m.weight.numel() for m in linears)
        facts = model.config.to_dict() | {"model_type": kind.model_type}
        assert shape_from_facts(facts, "x").parameters == shape.parameters


@pytest.mark.parametrize("kind", UNGATED)
def test_an_mlp_without_a_gate_has_two_matrices(kind):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = CONFIG_MAPPING[kind](**sizes, num_key_value_heads=4, vocab_size=96, head_dim=16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(facts)
    head = model.get_output_embeddings()
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one is not head]
    shape = shape_from_facts(facts.to_dict(), "x")
    assert shape.linear_weights == sum(one.weight.numel() for one in linears)
    assert shape.targeted("all-linear") == ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


def test_a_model_directory_is_read_without_weights(tmp_path):
    facts = {"model_type": "qwen3", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    facts |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 347}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"tie_word_embeddings": True}))
    shape = find_shape(str(tmp_path))
    assert (shape.q_size, shape.kv_size, shape.tied, shape.qk_norm) == (128, 64, True, True)
    # Left out of the file: what transformers takes for this kind of model.
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert find_shape(str(tmp_path)).tied is False


def test_a_hub_id_is_read_from_the_cache_without_the_network(tmp_path, monkeypatch):
    facts = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    facts |= {"num_attention_heads": 4, "vocab_size": 100, "tie_word_embeddings": False}
    cached = tmp_path / "models--someone--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    (cached / "snapshots/abc").mkdir(parents=True)
    (cached / "snapshots/abc/config.json").write_text(json.dumps(facts))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shape = find_shape("someone/small")
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (2, 4, 16)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--gpu", "h2000"], "Did you mean h200?"),
        (["--gpu", "rtx490"], "Did you mean rtx4090?"),
        (["--gpu", "h200:0"], "must be at least 1"),
        (["--gpu", "h200:many"], "must be at least 1"),
        (["--gpu", "h200:"], "must be at least 1"),
        (["--gpu", ""], "unknown card ''"),
        (["--gpu", "h200", "--params", "11b"], "is no known size"),
        (["--gpu", "h200", "--params", "qwen3-8"], "Did you mean qwen3-8b?"),
        (["--gpu", "h200", "--params", "8b", "--model", "Qwen/Qwen3-8B"], "Give one"),
        (["--gpu", "h200", "--model", "someone/never-downloaded"], "hf download someone/never-downloaded config.json"),
        (["--gpu", "h200", "--model", "Qwen/Qwen3-235B-A22B"], "neither known nor in the hub's cache"),
        (["--gpu", "h200", "--model", "./nowhere"], "nowhere/config.json does not exist"),
        (["--gpu", "h200", "--train.learning_rat", "1"], "Did you mean train.learning_rate?"),
        (["--gpu", "h200", "--jsno"], "unknown argument --jsno. Did you mean --json?"),
        (["--gpu", "h200", "--dryrun"], "unknown argument --dryrun. Keys are given as"),
        (["--gpu", "h200", "--train.per_device_train_batch_size", "0"], "must be at least 1"),
        (["--gpu", "h200", "--policy.target_modules", "[q_prj]"], "policy.target_modules names 'q_prj'"),
        (["--gpu", "h200:2", "--rollout.server_urls", "[http://a:1, http://b:1, http://c:1]"], "need 3 GPUs"),
        (["--gpu", "h200", "--server.gpus", "[1]"], "server.gpus [1] need 2 GPUs, there are 1 (h200)"),
        (["--gpu", "cpu"], "there are 0 (cpu). Name the GPUs of the run's machine, such as --gpu h200:1"),
        (["--gpu", "h200", "--model.path", "nowhere"], "model.path nowhere is not a directory (seen from"),
    ],
)
def test_bad_input_is_named_with_its_fix(words, complaint, monkeypatch, capsys):
    with pytest.raises(BadInput, match=None) as caught:
        command(monkeypatch, capsys, "--config", ONE_CARD, *words)
    assert complaint in str(caught.value)


def test_without_a_configuration_the_command_says_what_to_give(monkeypatch, capsys):
    with pytest.raises(BadInput, match="--config is missing"):
        command(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"model_type": "gpt_oss", "num_local_experts": 8}, "experts have biases"),
        ({"model_type": "mamba", "intermediate_size": None}, "no intermediate_size"),
        ({"model_type": "gpt2", "hidden_size": None}, "no hidden_size"),
    ],
)
def test_models_that_the_plan_does_not_cover_are_refused_with_the_reason(facts, complaint, tmp_path):
    dense = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    dense |= {"vocab_size": 100, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(dense | facts))
    with pytest.raises(BadInput, match=complaint):
        find_shape(str(tmp_path))


def test_nvidia_smi_names_are_recognized(monkeypatch):
    for name, gib, card in (
        ("NVIDIA H200", 140.4, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40.0, "a100-40g"),
        ("Tesla V100-SXM2-16GB", 16.0, "v100-16g"),
        ("Tesla T4", 15.0, "t4"),
        ("NVIDIA A40", 45.0, "a40"),
        ("NVIDIA A100-SXM4-80GB", 80.0, "a100-80g"),
        ("NVIDIA L40S", 45.0, "l40s"),
        ("NVIDIA L4", 22.5, "l4"),
        ("NVIDIA A10G", 22.5, "a10"),
        ("NVIDIA GeForce RTX 4090", 24.0, "rtx4090"),
    ):
        assert recognize(name, gib).name == card
    unknown = recognize("NVIDIA Something New", 50.0)
    assert (unknown.half_tflops, unknown.gib) == (None, 49.5)
    monkeypatch.setattr("shutil.which", lambda name: None)
    card, count = own_gpus()
    assert (card.name, count) == ("cpu", 0)


def test_auto_counts_the_cards_that_cuda_shows(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    lines = "\n".join(f"{number}, NVIDIA H100 80GB HBM3, 81559" for number in range(4))
    tool.write_text(f"#!/bin/sh\ncat <<END\n{lines}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    card, count = parse_gpus("auto")
    assert (card.name, count) == ("h100-80g", 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert parse_gpus("auto")[1] == 2


def test_a_card_whose_speed_is_not_known_gets_memory_and_no_seconds(monkeypatch):
    layout = lay_out(shape_by_size("8b"), load_config(ONE_CARD), recognize("NVIDIA New", 30.0), 1)
    assert layout.fits
    assert best_split(layout) is None


# What does not fit, on which card, and with what model
TOO_LARGE = [
    (ONE_CARD, "rtx4090", [], "32b"),
    (ONE_CARD, "rtx4090", [], "14b"),
    (ONE_CARD, "rtx4080", ["--server.sleep", "false"], "8b"),
    (EIGHT, "rtx4090:8", ["--train.per_device_train_batch_size", "64"], None),
    (EIGHT, "l40s:8", ["--train.recompute", "none"], None),
    (EIGHT, "a100-40g:8", [], None),
    (OWN, "l4", ["--rollout.max_completion_length", "8192"], None),
    (OWN, "rtx4080", ["--train.per_device_train_batch_size", "128"], "8b"),
]


@pytest.mark.parametrize(("path", "gpus", "overrides", "params"), TOO_LARGE, ids=lambda one: getattr(one, "stem", one))
def test_a_change_saves_what_is_printed_and_makes_it_fit_where_that_is_said(path, gpus, overrides, params):
    layout = plan(path, gpus, *overrides, params=params)
    assert not layout.fits
    found = changes(layout)
    assert found
    for one in found:
        after = plan(path, gpus, *overrides, *words_of(one.keys), params=params)
        same = next(card for card in after.cards if card.name == layout.worst.name)
        assert layout.worst.peak.expected - same.peak.expected == pytest.approx(one.saves_gib)
        assert after.fits == one.then_fits
    keys = remedy(layout)
    assert (keys is None) == (params == "32b"), keys
    if keys is not None:
        assert (path is ONE_CARD) == ("server.share_base" in keys)
        assert plan(path, gpus, *overrides, *words_of(keys), params=params).fits
        assert spell(keys) in summary(layout).replace("\n", " ")


def test_the_largest_pack_fits_and_a_larger_one_does_not():
    layout = plan(EIGHT, "h100-80g:8", "--train.micro_batch_tokens", "8192", "--train.recompute", "none")
    found = largest(layout)
    assert "micro_batch" not in found
    size = found["micro_batch_tokens"]
    assert size >= 8192 and size % 1024 == 0
    assert changed(layout, {"train.micro_batch_tokens": size}).fits
    assert not changed(layout, {"train.micro_batch_tokens": size + 1024}).fits


def test_a_full_card_is_told_to_sleep_first():
    layout = plan(ONE_CARD, "rtx4090", "--server.sleep", "false", "--server.nf4_copy", "gpu")
    first = changes(layout)[0]
    assert first.keys == {"server.sleep": True, "server.nf4_copy": "host"}


def test_a_card_without_fp8_is_told_to_serve_weights_only():
    layout = plan(EIGHT, "a100-80g:8")
    assert not layout.fits
    assert "server.weights is fp8_per_channel, which vLLM refuses" in layout.faults[0]
    assert remedy(layout) == {"server.weights": "fp8_per_tensor"}


def test_what_fits_is_the_largest_that_fits():
    layout = plan(EIGHT, "l40s:8")
    micro, tokens = fitting.largest_micro_batch(layout), fitting.largest_completion(layout)
    own = layout.config.train.per_device_train_batch_size * layout.config.train.gradient_accumulation_steps
    sizes = fitting.micro_batches(own)
    larger = sizes[sizes.index(micro) + 1 :][:1]
    assert changed(layout, fitting.micro_batch_keys(layout.config, micro)).fits
    assert all(not changed(layout, fitting.micro_batch_keys(layout.config, size)).fits for size in larger)
    assert changed(layout, {"rollout.max_completion_length": tokens}).fits
    longer = changed(layout, {"rollout.max_completion_length": tokens + 128})
    assert not longer.fits or fitting.sequences(longer) < 8


def test_sequences_longer_than_the_model_reads_do_not_fit():
    layout = plan(EIGHT, "h200:8", "--rollout.max_completion_length", "40000")
    assert any("longer than the model's 40960" in one for one in layout.faults)


def test_the_recommended_split_is_the_fastest_that_fits():
    layout = plan(EIGHT, "h100-80g:8")
    rows = [one for one in splits(layout) if one.fits]
    assert best_split(layout) == min(rows, key=lambda one: one.time.step)
    assert all(one.time.completions == layout.completions == 256 for one in rows)
    assert {one.trainers for one in rows} <= {1, 2, 4, 8}  # those that divide 256 completions
    assert plan(EIGHT, "h100-80g:8", *words_of(best_split(layout).keys)).fits


def test_one_card_is_told_when_a_server_beside_the_trainer_is_faster():
    best = best_split(plan(OWN, "l4"))
    assert best.keys["rollout.backend"] == "server" and best.keys["server.sleep"]
    after = plan(OWN, "l4", *words_of(best.keys))
    assert after.fits and fitting.sequences(after) >= after.config.rollout.group_size


def test_fewer_trainers_update_longer_and_more_servers_generate_faster():
    found = {one.servers: one.time for one in splits(plan(EIGHT, "h200:8")) if one.servers}
    assert found[7].update > found[6].update > found[4].update
    assert found[7].rollout < found[4].rollout


@pytest.mark.parametrize("recompute", ["none", "auto"])
@pytest.mark.parametrize(("cards", "overlap"), [("h200:2", "true"), ("h200:4", "false")])
def test_cards_with_room_for_both_train_and_serve_in_turn(cards, overlap, recompute, monkeypatch):
    now = plan(TWO, cards, "--train.recompute", recompute, "--rollout.overlap", overlap)
    best = best_split(now)
    everyone = list(range(now.count))
    assert best.keys["train.gpus"] == best.keys["server.gpus"] == everyone
    assert len(best.keys["rollout.server_urls"]) == best.trainers == best.servers == now.count
    after = plan(TWO, cards, "--train.recompute", recompute, *words_of(best.keys))
    assert after.completions == now.completions and not after.config.rollout.overlap
    assert [(one.name, one.roles) for one in after.cards] == [(f"GPU {n}", ["trainer", "server"]) for n in everyone]
    assert all(one.verdict == "fits" for one in after.cards)
    # What launch.up and the recipe look at.
    config = after.config
    where = place(config, [str(number) for number in everyone], replicas_on_gpus=True)
    assert where.servers == where.trainer == tuple(map(str, everyone))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(now.count))
    assert replicas_beside_trainer(config) == 1
    assert split_fault(config, after.card.gib, memory.server_memory(after.server, config).expected) is None
    assert "share a GPU" in describe_split(config)
    # The allocator's limit, the replica and both contexts.
    server = memory.server_memory(after.server, config).high
    assert config.train.max_gpu_gib + server <= after.card.gib


def test_train_recompute_auto_leaves_room_for_the_replica_on_every_card():
    keys = ["--train.recompute", "auto", "--server.gpus", "[0, 1]", "--train.gpus", "[0, 1]", "--train.max_gpu_gib"]
    keys += ["130", "--rollout.server_urls", "[http://a:1, http://a:2]", "--server.kv_cache_gib"]
    roomy, full = (plan(TWO, "h200:2", *keys, gib) for gib in ("8", "80"))
    assert roomy.config.train.recompute == "none" and full.config.train.recompute != "none"
    assert roomy.fits and full.fits


def test_cards_without_room_for_both_are_not_offered_it():
    shared = [one for one in splits(plan(TWO, "h100-80g:2", params="70b")) if one.trainers == one.servers == 2]
    assert not shared


def test_the_matrix_says_the_largest_that_fits():
    shape, card = shape_by_size("8b"), CARDS["rtx4090"]
    tokens, micro = longest(shape, card, "shared"), widest(shape, card, "shared")
    assert fits(shape, card, "shared", tokens, 1) and not fits(shape, card, "shared", tokens + 128, 1)
    assert fits(shape, card, "shared", 2048, micro) and not fits(shape, card, "shared", 2048, 2 * micro)


@pytest.fixture(scope="module")
def made_matrix() -> dict:
    return matrix.matrix()


def test_the_matrix_of_the_readme_is_the_one_that_the_plan_prints(made_matrix, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "matrix", lambda: made_matrix)
    code, out = command(monkeypatch, capsys, "--matrix")
    shared = [f"{model}, {ONE_BASE}" for model in ONE_BASE_MODELS]
    names = "|".join((*MODELS, *matrix.REFUSED, *shared))
    printed = [line for line in out.splitlines() if re.match(rf"\| ({names}) \|", line)]
    rows = re.findall(rf"^\| (?i:{names}) \|.*", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert code == 0 and len(printed) == len(MODELS) + len(matrix.REFUSED) + len(shared)
    assert [row.lower().replace("–", "-") for row in rows] == [line.lower() for line in printed]


def test_8b_fits_16_gb_and_14b_24_gb_on_one_card_only_with_one_base(made_matrix):
    for model, size in (("qwen3-8b", "16 GB"), ("qwen3-14b", "24 GB")):
        cells = made_matrix[model][size]
        assert cells["shared"]["completion_tokens"] is None
        assert cells[ONE_BASE]["completion_tokens"] >= 2048 and cells[ONE_BASE]["micro_batch"] == 1


def test_a_base_that_is_mapped_is_counted_in_the_server_alone():
    config, card, shape = matrix.matrix_config(ONE_BASE), CARDS["rtx4080"], shape_by_size("8b")
    shared, own = (memory.resident(shape, with_keys(config, {"server.share_base": on}), card) for on in (True, False))
    stored = {name: own[name] for name in own.keys() - shared.keys()}
    assert sum(stored.values()) == pytest.approx((shape.linear_weights + 2 * shape.other_weights) / 2**30)
    assert shared == {name: own[name] for name in shared}
    server = memory.server_parts(shape, config, card)
    assert sum(stored.values()) == pytest.approx(server["weights"] + server["16-bit layers"])


def test_one_base_is_planned_for_a_machine_without_a_gpu_too():
    keys = [
        "--policy.quantization=fp8",
        "--model.dtype=bfloat16",
        "--rollout.backend=server",
        "--rollout.sync=adapter",
    ]
    config = load_config(ROOT / "recipes/configs/grpo-tiny-nf4-cpu.yaml", [*keys, "--server.share_base=true"])
    shape, cpu = shape_by_size("0.6b"), parse_gpus("cpu")
    shared = make_layout(config, shape, *cpu).worst.peak.low
    own = make_layout(with_keys(config, {"server.share_base": False}), shape, *cpu).worst.peak.low
    base = shape.linear_weights + 2 * shape.other_weights
    assert own - shared == pytest.approx(base / 2**30)


def test_the_16_gb_configuration_fits_as_its_file_says(monkeypatch, capsys):
    code, out = command(monkeypatch, capsys, "--config", SHARED, "--gpu", "rtx4080")
    (figures,) = re.findall(r"GPU 0: ([\d.]+ \([\d.]+ to [\d.]+\) of [\d.]+) GiB", " ".join(out.split()))
    assert code == 0 and f"{figures} GiB" in " ".join(SHARED.read_text().replace("\n#", "\n").split())


def test_the_24_gb_configuration_fits_as_the_documents_say(monkeypatch, capsys):
    code, out = command(monkeypatch, capsys, "--config", ONE_CARD, "--gpu", "rtx4090")
    said = " ".join(out.split())
    (figures,) = re.findall(r"GPU 0: ([\d.]+ \([\d.]+ to [\d.]+\) of [\d.]+) GiB", said)
    (longest,) = re.findall(r"completion (\d+) tokens \(now (\d+)\)", said)
    assert code == 0 and longest[1] == "1024"
    for file in ("README.md", ONE_CARD):
        text = " ".join((ROOT / file).read_text().replace("\n#", "\n").replace(",", "").split())
        assert f"{figures} GiB" in text and f"{longest[0]} tokens" in text, file


def test_what_does_not_fit_at_all_is_said_in_words(monkeypatch, capsys):
    keys = ("--gpu", "rtx4080:2", "--train.gpus", "[0]", "--server.gpus", "[1]", "--server.kv_cache_gib", "null")
    keys += ("--rollout.server_urls", "['http://127.0.0.1:8000']", "--server.gpu_memory_utilization", "0.5")
    code, out = command(monkeypatch, capsys, "--config", TWO, *keys)
    said = " ".join(out.split())
    assert code == 1 and "no pack fits (now 17408 tokens); no completion fits (now 1024 tokens)" in said
    assert "pack none" not in said and "memory 0" not in said
    assert "no KV cache, context or CUDA graphs" in said


def test_on_a_larger_card_and_for_a_smaller_model_the_matrix_never_says_less(made_matrix, monkeypatch, capsys):
    monkeypatch.setattr(matrix, "matrix", lambda: made_matrix)
    code, out = command(monkeypatch, capsys, "--matrix", "--json")
    found = json.loads(out)
    assert (code, list(found)) == (0, [*MODELS, *matrix.REFUSED])
    order, dense = list(SIZES), [name for name in MODELS if name.startswith("qwen3-") and "a3b" not in name]

    def tokens(model, size, way):
        return found[model][size][way]["completion_tokens"] or 0

    for way in ("shared", "split", ONE_BASE):
        for model in ONE_BASE_MODELS if way == ONE_BASE else MODELS:
            assert [tokens(model, size, way) for size in order] == sorted(tokens(model, size, way) for size in order)
        for size in order:
            row = [tokens(model, size, way) for model in (ONE_BASE_MODELS if way == ONE_BASE else dense)]
            assert row == sorted(row, reverse=True)
    assert all(tokens(m, s, "split") >= tokens(m, s, "shared") for m in MODELS for s in order)


def test_another_command_can_ask_whether_it_fits():
    config = load_config(ONE_CARD)
    fine, text = plan_fits(config, gpus="rtx4090")
    assert fine and "It fits" in text
    facts = {"model_type": "qwen3", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
    facts |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False}
    fine, text = plan_fits(config, facts, "rtx4090")
    assert not fine and "It does not fit" in text


def test_known_sizes_are_found_by_name_and_by_hub_id():
    for name in KNOWN:
        assert shape_by_size(name).name == name
    assert find_shape("Qwen/Qwen3-8B").linear_weights == shape_by_size("8b").linear_weights
    assert find_shape("Qwen/Qwen2.5-1.5B-Instruct").layers == 28
    assert find_shape("meta-llama/Llama-3.1-8B-Instruct").intermediate == 14336
