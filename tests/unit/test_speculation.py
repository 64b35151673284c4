"""Speculative decoding: what is refused, what servers are started with and say, what came of the drafts, and vLLM's
own rejection sampler on a CPU with the kit's corrections."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from kit.core.config import speculation_rules
from kit.core.config.checks import check_config
from kit.core.config.load import load_config
from kit.core.config.schema import Config
from kit.core.errors import BadInput
from kit.core.limits import draft_gib
from kit.core.run_directory import RunDir
from kit.core.tokenizer_hash import tokenizer_hash
from kit.plan.fitting import lay_out
from kit.plan.gpus import CARDS
from kit.plan.memory import DRAFT_MODEL, DRAFTS, kv_width, sequence_gib
from kit.plan.report import counted
from kit.plan.shapes import shape_by_size
from kit.policy.stop_texts import StopTexts
from kit.rollout import drafts
from kit.rollout.client import ServerRollout
from kit.rollout.policy_view import Report
from kit.rollout.protocol import encode_floats, encode_ids
from kit.rollout.server import speculation
from kit.rollout.server.cpu_sampler import CPU_SAMPLER
from kit.rollout.server.versions import REMERGE
from launch.vllm_command import Installed, Plan, plans
from tests.unit.fake_engine import Engine, Server, without_vllm, write_base
from tests.unit.fake_replica import FakeReplica

CONFIG = "recipes/configs/grpo-qwen3_8b-nf4-fp8-gsm8k-2gpu.yaml"
ON = ["--server.speculation=ngram", "--server.draft_tokens=3", "--server.ngram_min=2", "--server.ngram_max=5"]
SAID = {"method": "ngram", "draft_tokens": 3, "ngram_min": 2, "ngram_max": 5, "model": None}
BY_MODEL = {"method": "draft_model", "draft_tokens": 3, "ngram_min": 0, "ngram_max": 0, "model": "/other"}
CUDA, CPU = Installed("0.26.0", False), Installed("0.31.0", True)
BF16 = "--server.weights=bf16"
DRAFT = "--server.speculation=draft_model"


def config(*overrides: str) -> Config:
    return load_config(CONFIG, [*ON, *overrides])


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["--rollout.backend=in_process"], "only servers draft tokens. Set it to none"),
        (["--server.ngram_min=6"], r"ngram_min \(6\) is above server.ngram_max \(5\). Lower it to 5"),
        (["--server.ngram_min=0"], "server.ngram_min .0. must be at least 1"),
        (["--server.draft_tokens=33"], "server.draft_tokens .33. must be from 1 to 32"),
        (["--rollout.routing=replay"], "rollout.routing replay: vLLM returns the experts of drafted tokens"),
        (["--server.vllm={async-scheduling: true}"], "server.vllm sets async_scheduling"),
        (["--server.draft_model=here"], "is here and server.speculation ngram, which loads no checkpoint"),
        (["--server.speculation=none", "--server.draft_model=here"], "server.speculation none, which loads no"),
        ([DRAFT], "speculation is draft_model and server.draft_model is missing"),
        ([DRAFT, "--server.tensor_parallel=2"], "tensor_parallel 2: a draft split over workers was not compared"),
        ([DRAFT, "--server.weights=w4a16"], "w4a16: vLLM loads a draft by the loader of the base"),
        ([DRAFT, "--server.vllm={async-scheduling: true}"], "compared with the policy without it only"),
    ],
)
def test_keys_that_do_not_go_with_drafts_are_refused(overrides, reason):
    with pytest.raises(BadInput, match=reason):
        check_config(config(*overrides), 1)


def test_without_speculation_the_same_keys_are_fine():
    check_config(load_config(CONFIG, ["--server.ngram_min=6", "--server.vllm={async_scheduling: true}"]), 1)
    check_config(config("--server.vllm={async_scheduling: false}"), 1)


def test_vllm_is_started_with_the_drafts_of_the_keys():
    plan = plans(config(), CUDA, ["0", "1"])[0]
    flag = plan.command[plan.command.index("--speculative-config") + 1]
    asked = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    assert json.loads(flag) == asked and "--speculative-config" in plan.by_hand
    plan = plans(load_config(CONFIG), CUDA, ["0", "1"])[0]
    assert "speculative_config" not in plan.options


def test_suffix_drafts_need_their_package_and_no_keys_of_their_own():
    ours = config("--server.speculation=suffix", "--server.draft_tokens=8")
    plan = plans(ours, CUDA, ["0", "1"])[0]
    flag = plan.command[plan.command.index("--speculative-config") + 1]
    assert json.loads(flag) == {"method": "suffix", "num_speculative_tokens": 8}
    assert plan.options["async_scheduling"] is False
    said = speculation_rules.wanted(ours.server)
    assert said == {"method": "suffix", "draft_tokens": 8, "ngram_min": 0, "ngram_max": 0, "model": None}
    assert speculation_rules.called(said) == "suffix drafts of up to 8 tokens, from other completions"
    with pytest.raises(BadInput, match=r"arctic-inference is not installed beside vLLM\. .*make arctic"):
        plans(ours, replace(CUDA, has_suffix=False), ["0", "1"])


# A checkpoint that drafts --------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2}
HEAD = LLAMA | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
HEAD3 = HEAD | {"architectures": ["LlamaForCausalLMEagle3"]}


def write_checkpoint(folder: Path, facts: dict, rows: int, tokens: tuple[str, ...] = ("a", "b")) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    words = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": words}}))
    save_file({"x.weight": np.zeros((rows, 8), np.float16)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path) -> Path:
    return write_checkpoint(tmp_path / "base", LLAMA, 100)


def planned(base: Path, draft: Path, method: str = "draft_model", vllm: Installed = CUDA) -> list[Plan]:
    keys = [f"--server.base={base}", f"--server.draft_model={draft}", f"--server.speculation={method}"]
    return plans(config(*keys, "--rollout.sync=adapter"), vllm, ["0", "1"])


@pytest.mark.parametrize(("method", "facts"), [("draft_model", LLAMA), ("eagle", HEAD), ("eagle3", HEAD3)])
def test_vllm_is_started_with_the_checkpoint_that_drafts(base, tmp_path, method, facts):
    """In the first model runner and without async scheduling, as it was compared with the policy."""
    draft = write_checkpoint(tmp_path / "draft", facts, 10)
    plan = planned(base, draft, method)[0]
    asked = {"method": method, "num_speculative_tokens": 3, "model": str(draft)}
    assert plan.options["speculative_config"] == asked and plan.environment["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert plan.options["async_scheduling"] is False and "--no-async-scheduling" in plan.command
    assert "VLLM_USE_V2_MODEL_RUNNER" not in plans(config(), CUDA, ["0", "1"])[0].environment


@pytest.mark.parametrize(
    ("method", "facts", "reason"),
    [
        ("draft_model", LLAMA | {"vocab_size": 301}, "a vocabulary of 301 tokens, the base of 300"),
        ("draft_model", LLAMA | {"layer_types": ["conv"]}, "layers of conv, whose state vLLM does not take back"),
        ("draft_model", LLAMA | {"num_experts": 4}, "a mixture of experts, which was not tried"),
        ("eagle", HEAD3, "is a LlamaForCausalLMEagle3; heads of server.speculation eagle .* are LlamaForCausalLM and"),
        ("eagle", HEAD | {"hidden_size": 4}, "hidden states of 4 values, the base's have 8"),
        ("eagle3", HEAD3 | {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, "layers 1, 3, 9, which are not different"),
        ("eagle3", HEAD3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, "layers 1, 1, which are"),
    ],
)
def test_a_checkpoint_that_cannot_draft_for_the_base_is_refused(base, tmp_path, method, facts, reason):
    draft = write_checkpoint(tmp_path / "draft", facts, 10)
    with pytest.raises(BadInput, match=reason):
        planned(base, draft, method)


def test_a_draft_that_is_missing_empty_larger_or_of_another_tokenizer_is_refused(base, tmp_path):
    with pytest.raises(BadInput, match="none is not a directory"):
        planned(base, tmp_path / "none")
    with pytest.raises(BadInput, match="has 800 weights, the base 800: it would cost more"):
        planned(base, write_checkpoint(tmp_path / "large", LLAMA, 100))
    draft = write_checkpoint(tmp_path / "draft", LLAMA, 10, ("b", "a"))
    with pytest.raises(BadInput, match="another tokenizer than the base: its ids"):
        planned(base, draft)
    (draft / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(BadInput, match="not a whole safetensors file"):
        planned(base, draft)
    (draft / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="has no weights in safetensors"):
        planned(base, draft)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_is_refused_for_a_base_that_gives_it_no_hidden_states(base, tmp_path, method):
    draft = write_checkpoint(tmp_path / "draft", HEAD if method == "eagle" else HEAD3, 10)
    (base / "config.json").write_text(json.dumps(LLAMA | {"model_type": "olmo2"}))
    with pytest.raises(BadInput, match="the base is a olmo2: vLLM gives heads the hidden states of llama, mistral"):
        planned(base, draft, method)


def test_a_base_inside_a_wrapper_gets_no_draft_by_a_model(base, tmp_path):
    (base / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": LLAMA}))
    with pytest.raises(BadInput, match=r"wraps its language model \(qwen2_5_vl\), whose drafts by a model were not"):
        plans(config(f"--server.base={base}", DRAFT, f"--server.draft_model={base}"), CUDA, ["0", "1"])


def test_the_plan_counts_a_drafts_weights_and_its_kv_cache(tmp_path):
    facts = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    draft = write_checkpoint(tmp_path / "draft", facts | {"num_key_value_heads": 2}, 1000)
    card, shape = CARDS["h100-80g"], shape_by_size("8b")
    ours = config(DRAFT, f"--server.draft_model={draft}")
    layout, plain = lay_out(shape, ours, card, 2), lay_out(shape, config(), card, 2)
    assert layout.server[DRAFT_MODEL] == 2 * 8000 / 2**30 and DRAFT_MODEL not in plain.server
    tokens = ours.rollout.max_prompt_length + ours.rollout.max_completion_length
    values = tokens * 2 * 3 * 2 * 16 * kv_width(ours)
    assert sequence_gib(shape, ours) - sequence_gib(shape, config()) == pytest.approx(values / 2**30)
    assert f"draft_model drafts of up to 3 tokens, by {draft}: " in counted(layout)
    assert "GiB for the draft's weights. Seconds assume that none is accepted, and count no pass" in counted(layout)
    away = lay_out(shape, config(DRAFT, "--server.draft_model=/none"), card, 2)
    assert "the draft cannot be read here, its weights and KV cache are not counted" in counted(away)


@pytest.mark.parametrize(
    ("sync", "vllm", "extension"),
    [("adapter", CPU, CPU_SAMPLER), ("adapter", CUDA, None), ("remerge", CPU, REMERGE), ("remerge", CUDA, REMERGE)],
)
def test_every_worker_on_a_cpu_gets_a_corrected_sampler(sync, vllm, extension):
    changed = ["--server.gpus=null", "--server.sleep=false", BF16, f"--rollout.sync={sync}"]
    plan = plans(config(*changed), vllm, None if vllm.is_cpu else ["0", "1"])[0]
    assert plan.options.get("worker_extension_cls") == extension


def test_a_vllm_for_cpus_whose_sampler_was_not_corrected_is_refused():
    with pytest.raises(BadInput, match=r"on vLLM 0\.30\.0 for CPUs"):
        plans(config("--server.gpus=null", BF16), Installed("0.30.0", True), None)


@pytest.mark.parametrize("facts", [{"layer_types": ["full_attention", "linear_attention"]}, {"layer_types": ["conv"]}])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_model_with_recurrent_layers_is_refused(tmp_path, facts, is_wrapped):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": facts} if is_wrapped else facts))
    with pytest.raises(BadInput, match=rf"layers of {facts['layer_types'][-1]}, whose state vLLM 0\.26\.0 does not"):
        plans(config(f"--server.base={tmp_path}"), CUDA, ["0", "1"])


def test_windowed_attention_may_draft(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["sliding_attention", "full_attention"]}))
    for plan in plans(config(f"--server.base={tmp_path}"), CUDA, ["0", "1"]):
        assert plan.options["speculative_config"]["method"] == "ngram"


def test_logits_of_drafts_are_left_beside_the_servers_share(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 150_000}))
    keys = [
        f"--server.base={tmp_path}",
        "--server.max_num_seqs=256",
        "--server.nf4_copy=host",
        "--server.kv_cache_gib=null",
    ]

    def share(*overrides: str) -> float:
        plan = plans(load_config(CONFIG, [*keys, *overrides]), CUDA, ["0", "1"], card_gib=80.0)[0]
        return plan.options["gpu_memory_utilization"]

    gib = 18 * 256 * 3 * 150_000 / 2**30
    assert draft_gib(256, 3, 150_000) == gib and share() - share(*ON) == pytest.approx(gib / 80, abs=2e-3)


def test_the_plan_counts_the_logits_of_drafts_and_says_that_there_are_any():
    card, ours = CARDS["h100-80g"], config("--server.max_num_seqs=128")
    shape = shape_by_size("8b")
    layout = lay_out(shape, ours, card, 2)
    assert layout.server[DRAFTS] == draft_gib(128, 3, shape.vocabulary)
    assert "speculatively, ngram drafts of up to 3 tokens, 2 to 5 tokens looked up" in counted(layout)
    plain = lay_out(shape, load_config(CONFIG), card, 2)
    assert DRAFTS not in plain.server and "speculatively" not in (counted(plain) or "")


# A server's info ---------------------------------------------------------------------------------------------------


def vllm_config(**changes) -> SimpleNamespace:
    """vLLM's configuration of a server that drafts on a GPU."""
    one = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    one |= {"rejection_sample_method": "standard", "draft_sample_method": "greedy"} | changes.pop("drafts", {})
    facts = {"is_hybrid": False, "device_type": "cuda", "worker_extension_cls": "", "async_scheduling": False}
    facts |= {"use_v2_model_runner": False} | changes
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**one),
        model_config=SimpleNamespace(is_hybrid=facts["is_hybrid"]),
        scheduler_config=SimpleNamespace(async_scheduling=facts["async_scheduling"]),
        use_v2_model_runner=facts["use_v2_model_runner"],
        device_config=SimpleNamespace(device_type=facts["device_type"]),
        parallel_config=SimpleNamespace(worker_extension_cls=facts["worker_extension_cls"]),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafts": {"method": "mtp"}}, "it drafts by mtp; only drafts of ngram, suffix, draft_model, eagle,"),
        ({"drafts": {"draft_sample_method": "probabilistic"}}, "it samples its drafts (probabilistic), which was not"),
        ({"drafts": {"use_heterogeneous_vocab": True}}, "it drafts in another vocabulary, which was not compared"),
        ({"drafts": {"parallel_drafting": True}}, "it drafts all tokens in one pass, which was not compared"),
        ({"async_scheduling": True}, "with async scheduling"),
        ({"use_v2_model_runner": True}, "in vLLM's second model runner"),
        ({"drafts": {"rejection_sample_method": "synthetic"}}, "by synthetic rejection sampling"),
        ({"is_hybrid": True}, "recurrent layers"),
        ({"device_type": "cpu"}, "uninitialized memory, and no worker extension corrects it"),
    ],
)
def test_drafts_that_change_the_distribution_are_no_way_to_sync(monkeypatch, tmp_path, changes, reason):
    assert speculation.fault(vllm_config()) is None
    assert reason in speculation.fault(vllm_config(**changes))
    without_vllm(monkeypatch, tmp_path)
    engine = Engine(write_base(tmp_path / "base"))
    for name, value in vars(vllm_config(**changes)).items():
        if name in ("speculative_config", "use_v2_model_runner"):
            setattr(engine.vllm_config, name, value)
        else:
            part = getattr(engine.vllm_config, name, None) or SimpleNamespace()
            setattr(engine.vllm_config, name, SimpleNamespace(**(vars(part) | vars(value))))
    info = Server(engine, tmp_path).info()
    assert info["sync"] == [] and all(reason in why for why in info["refused"].values())
    assert info["speculation"]["draft_tokens"] == 3


def test_a_server_says_which_checkpoint_drafts():
    drafts = {"method": "draft_model", "prompt_lookup_min": 0, "prompt_lookup_max": 0, "model": "/other"}
    assert speculation.described(vllm_config(drafts=drafts)) == BY_MODEL
    assert speculation.fault(vllm_config(drafts=drafts)) is None
    assert speculation.described(vllm_config(drafts={"model": "ngram"})) == SAID


def test_a_server_on_a_cpu_may_draft_with_any_extension_of_the_kit():
    for extension in (CPU_SAMPLER, REMERGE):
        assert speculation.fault(vllm_config(device_type="cpu", worker_extension_cls=extension)) is None


def test_counts_are_vllms_own(monkeypatch):
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    assert speculation.drafted() is None, "without counters there is nothing to say"
    for name, value in ((speculation.DRAFTED, 30), (speculation.ACCEPTED, 12), (speculation.GENERATED, 100)):
        counter = prometheus_client.Counter(name, name, ["engine"], registry=registry)
        for engine in ("0", "1"):
            counter.labels(engine).inc(value)
    assert speculation.drafted() == {"drafted": 60, "accepted": 24, "generated": 200}


def test_figures_are_of_what_was_drafted_between_two_counts():
    before = {"a": {"drafted": 100, "accepted": 50, "generated": 500}, "b": None, "c": None}
    after = {
        "a": {"drafted": 200, "accepted": 90, "generated": 600},  # 100 drafted, 40 accepted, 100 generated
        "b": {"drafted": 20, "accepted": 8, "generated": 20},  # was started again
        "c": None,
    }
    found = drafts.figures(before, after)
    assert found == {"draft_acceptance": 48 / 120, "tokens_per_forward": 120 / (120 - 48)}
    assert drafts.figures(after, after) == {"draft_acceptance": None, "tokens_per_forward": None}


# The trainer's side -----------------------------------------------------------------------------------------------


@pytest.fixture
def rollout(tiny_model_dir, tmp_path):
    """`rollout(info, *overrides)`: the trainer's half with one stand-in replica, its `fake`."""
    made: list[FakeReplica] = []
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)

    def make(info: dict, *overrides: str) -> ServerRollout:
        made.append(fake := FakeReplica(**{"tokenizer_hash": tokenizer_hash(tokenizer), **info}))
        keys = ["--run.name=run", "--rollout.group_size=2", f"--rollout.server_urls=['{fake.url}']"]
        keys += ["--rollout.backend=server", f"--server.base={tmp_path}/none", "--rollout.server_wait_s=3"]
        found = ServerRollout(
            load_config("recipes/configs/grpo-tiny-nf4-cpu.yaml", [*keys, *overrides]), tokenizer, RunDir(tmp_path)
        )
        found.fake = fake
        return found

    yield make
    for fake in made:
        fake.stop()


@pytest.mark.parametrize(
    ("said", "overrides", "reason"),
    [
        (SAID, [], "it makes ngram drafts of up to 3 tokens, .* its keys say no drafts. Restart it"),
        (None, ON, "it makes no drafts, .* say ngram drafts of up to 3 tokens, 2 to 5 tokens looked up"),
        (SAID | {"draft_tokens": 4}, ON, "drafts of up to 4 tokens, .* up to 3 tokens"),
        (BY_MODEL, [*ON, DRAFT, "--server.draft_model=/small"], "tokens, by /other, .* up to 3 tokens, by /small"),
        (BY_MODEL, ON, "draft_model drafts of up to 3 tokens, by /other, .* say ngram drafts"),
    ],
)
def test_a_replica_that_drafts_otherwise_is_refused(rollout, said, overrides, reason):
    with pytest.raises(BadInput, match=reason):
        rollout({"speculation": said}, *overrides).check([], 316)


def test_a_step_reports_what_came_of_its_own_drafts(rollout, capsys):
    found = rollout({"speculation": SAID, "drafted": {"drafted": 10, "accepted": 9, "generated": 99}}, *ON)
    found.check([], 316)
    assert "speculative decoding: ngram drafts of up to 3 tokens, 2 to 5 tokens looked up" in capsys.readouterr().out

    def generate() -> list:
        found.fake.info["drafted"] = {"drafted": 50, "accepted": 19, "generated": 129}
        return ["samples"]

    report = Report({}, {})
    assert found._counted(generate, report) == ["samples"]
    assert report.figures == {"draft_acceptance": 10 / 40, "tokens_per_forward": 30 / 20}
    again = Report({}, {})
    found._counted(list, again)
    assert again.figures == {"draft_acceptance": None, "tokens_per_forward": None}


def test_tokens_behind_a_stop_text_are_cut_off_when_replicas_draft(rollout):
    """vLLM accepts several tokens at once and returns all of them (vllm#47616)."""
    found = rollout({"speculation": SAID, "drafted": None}, *ON, "--rollout.stop=['=', 'x1']")
    found.check([], 316)
    found.sync.served = 1
    found.fake.served = found.sync.session, 1
    whole = found.tokenizer("12+3=15", add_special_tokens=False)["input_ids"]
    none = found.tokenizer("12+3", add_special_tokens=False)["input_ids"]

    def answer(body: dict) -> dict:
        logps = [encode_floats(-np.arange(1.0, 1 + len(ids))) for ids in (whole, none)]
        samples = [
            {"token_ids": encode_ids(ids), "logprobs": one, "finish_reason": "stop"}
            for ids, one in zip((whole, none), logps, strict=True)
        ]
        return {"version": 1, "samples": samples}

    found.fake.before["generate"] = answer
    (first, logps, _), (second, others, _) = found._generate_groups([[5, 6]] * 2, [0])
    kept = StopTexts(found.tokenizer, ["="]).length([5, 6], whole)
    assert first == whole[:kept] and len(first) < len(whole) and found.tokenizer.decode(first) == "12+3="
    assert logps == [-1.0 - place for place in range(kept)]
    assert second == none and len(others) == len(none)


# vLLM's rejection sampler -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler():
    """vLLM's rejection sampler for CPUs, corrected, with log-probs of the processed logits."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the corrections are those of vLLM for CPUs")
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from kit.rollout.server import cpu_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    cpu_sampler.correct()
    return RejectionSampler(Sampler("processed_logprobs"))


@pytest.mark.parametrize("draft", [2, 0, -1], ids=["likely", "unlikely", "padding"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.6, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.75), (0.8, 4, 0.9)]
)
def test_rejection_sampling_gives_tokens_and_log_probs_of_the_policy(sampler, draft, temperature, top_k, top_p):
    """Two drafts in each of 20,000 sequences; chi-squared tests of the first token, and of the second after each."""
    import torch
    from scipy.stats import chi2
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    torch.manual_seed(draft + 10)
    count, words = 20_000, 6
    logits = torch.tensor([[0.3, -1.0, 1.5, 0.0, -0.5, 0.9], [1.0, 0.2, 0.1, -2.0, 0.5, 0.0], [0.0, 1, 2, 0, 1, 0]])
    metadata = SamplingMetadata(
        temperature=torch.full((count,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((count,), top_p) if top_p < 1 else None,
        top_k=torch.full((count,), top_k, dtype=torch.int32) if top_k else None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(count),
        presence_penalties=torch.zeros(count),
        repetition_penalties=torch.ones(count),
        output_token_ids=[[] for _ in range(count)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=None,
        spec_token_ids=[[draft, 5] for _ in range(count)],
    )
    rows = torch.arange(3 * count, dtype=torch.int32).view(count, 3)  # of the logits: two drafts and a bonus
    ends = torch.arange(1, count + 1, dtype=torch.int32)
    drafted = SpecDecodeMetadata(
        draft_token_ids=torch.tensor([draft, 5], dtype=torch.int32).repeat(count),
        num_draft_tokens=[2] * count,
        cu_num_draft_tokens=2 * ends,
        cu_num_sampled_tokens=3 * ends,
        target_logits_indices=rows[:, :2].flatten(),
        bonus_logits_indices=rows[:, 2].contiguous(),
        logits_indices=rows.flatten(),
    )
    output = sampler(drafted, None, logits.repeat(count, 1), metadata)
    tokens = output.sampled_token_ids  # (count, 3), -1 behind a rejected draft
    expected = logits / temperature
    if top_k:
        expected = expected.masked_fill(expected < expected.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:  # the most likely tokens, up to the one that brings them to top_p
        shares, order = expected.softmax(-1).sort(descending=True)
        dropped = torch.zeros_like(shares, dtype=torch.bool).scatter(1, order, shares.cumsum(-1) - shares >= top_p)
        expected = expected.masked_fill(dropped, -torch.inf)
    expected = expected.log_softmax(-1).double()
    log_probs = output.logprobs_tensors.logprobs[:, 0].view(count, 3)
    accepted, statistic, freedom = torch.ones(count, dtype=torch.bool), 0.0, 0
    for place, ours in enumerate((draft, 5, None)):
        made = tokens[accepted, place].long()
        assert torch.equal(tokens[~accepted, place], torch.full_like(tokens[~accepted, place], -1))
        assert torch.allclose(log_probs[accepted, place].double(), expected[place][made], atol=1e-5)
        wanted = len(made) * expected[place].exp()
        seen = torch.bincount(made, minlength=words)
        assert not seen[wanted == 0].any()
        if len(made) > 500:
            cells = wanted > 0
            statistic += ((seen - wanted)[cells] ** 2 / wanted[cells]).sum().item()
            freedom += int(cells.sum()) - 1
        accepted = accepted & (tokens[:, place] == ours) if ours is not None and ours >= 0 else accepted & False
    assert (tokens[:, 1] >= 0).any() == (draft >= 0)
    assert chi2.sf(statistic, freedom) > 1e-4
