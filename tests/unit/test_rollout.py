"""Rollouts against stand-in replicas: which are accepted, and how requests are spread, retried and taken once."""

import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from kit.core.config.load import load_config
from kit.core.errors import BadInput, CheckFailed, MachineFailed
from kit.core.run_directory import RunDir
from kit.core.tokenizer_hash import tokenizer_hash
from kit.rollout.client import ServerRollout
from kit.rollout.dispatch import Dispatcher, GenerationFailed
from kit.rollout.noise import noise_of
from kit.rollout.protocol import encode_floats, encode_ids
from kit.rollout.replica import Replica, ReplicaError
from kit.rollout.restart_requests import WAIT_S
from tests import processes
from tests.unit.fake_replica import FakeReplica, samples
from tests.unit.test_sync import Adapter

CONFIG = Path(__file__).parents[2] / "recipes" / "configs" / "grpo-tiny-nf4-cpu.yaml"
LINEARS = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
GROUP = 2


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def rollout(tokenizer, tmp_path):
    """`rollout(n, info, *overrides)`: a rollout over n stand-in replicas, which are its `fakes`."""
    made: list[FakeReplica] = []

    def make(count: int, info: dict | None = None, *overrides: str) -> ServerRollout:
        made.extend(FakeReplica(**{"tokenizer_hash": tokenizer_hash(tokenizer), **(info or {})}) for _ in range(count))
        urls = [replica.url for replica in made]
        keys = ["--run.name=run", f"--rollout.group_size={GROUP}", f"--rollout.server_urls={urls}"]
        config = load_config(
            CONFIG, [*keys, "--rollout.server_wait_s=3", f"--server.base={tmp_path}/none", *overrides]
        )
        found = ServerRollout(config, tokenizer, RunDir(tmp_path / "run"))
        found.fakes = made
        return found

    yield make
    for replica in made:
        replica.stop()


def served(rollout: ServerRollout) -> ServerRollout:
    """Checked, and version 1 of the adapter on every replica."""
    rollout.check(LINEARS, 316)
    rollout.sync.served = 1
    for fake in rollout.fakes:
        fake.served = rollout.sync.session, 1
        fake.calls.clear()
    return rollout


def view(version: int = 1, index: int = 0, is_main: bool = True, **others: Any) -> SimpleNamespace:
    """A policy as the rollout sees it."""
    processes = {"is_main_process": is_main, "process_index": index, "wait_for_everyone": lambda: None}
    facts = {"version": version, "is_split": False, "stop_token_ids": [0], "processes": SimpleNamespace(**processes)}
    return SimpleNamespace(**facts | others)


def generate(rollout: ServerRollout, prompts: int = 8) -> list[tuple[list[int], list[float]]]:
    # Prompts of different lengths whose first token is their number.
    ids = [[number] * (1 + number % 3) for number in range(prompts) for _ in range(GROUP)]
    return rollout._generate_groups(ids, [0])


FORCED = ["--server.force_w8a16=true", "--server.weights=fp8_per_tensor"]


def assert_complete(answers: list, prompts: int = 8) -> None:
    assert [ids for ids, *_ in answers] == [[number, index] for number in range(prompts) for index in range(GROUP)]


@pytest.mark.parametrize(
    ("info", "overrides", "reason"),
    [
        (
            {"vllm": "0.32.1"},
            [],
            r"vLLM 0\.32\.1 is not one that the kit was tested with \(0\.26 <= version < 0\.32\)",
        ),
        ({"vllm": "0.9.0"}, [], "vLLM 0.9.0 is not one"),
        ({"tokenizer_hash": "00"}, [], "the tokenizer of .* is not the one of"),
        ({"vocab_size": 320}, [], "vocabulary of 320 entries, .* one of 316"),
        ({"max_model_len": 60}, [], "serves 60 tokens of context; .* need 104"),
        ({"logprobs_mode": "raw_logprobs"}, [], "--logprobs-mode processed_logprobs"),
        ({"max_num_seqs": 1}, [], r"fewer than rollout.group_size \(2\)"),
        ({"sync": ["adapter"]}, [], "rollout.sync is remerge, which it cannot do: it offers adapter"),
        ({"sync": [], "refused": {"remerge": "no NF4 copy."}}, [], "cannot do: no NF4 copy. Restart"),
        ({"max_lora_rank": 8}, ["--rollout.sync=adapter"], "adapters up to rank 8, policy.lora_rank is 16"),
        ({"modules": LINEARS[:1]}, [], r"1 of the 2 layers with an adapter .*up_proj"),
        ({"damaged": "its weights are of no version."}, [], "of no version"),
        ({}, ["--server.sleep=true"], "server.sleep is true and it was started without"),
        ({"protocol": 1}, [], "speaks protocol 1"),
        ({"is_forced": True}, [], r"it was started with server\.force_w8a16\. Restart it"),
        ({}, ["--server.force_w8a16=true", "--server.weights=fp8_per_tensor"], "started without server.force_w8a16"),
        ({"weights": "bf16"}, [], r"its weights is bf16, server\.weights says fp8_per_channel\. Restart it"),
        ({}, ["--server.weights=bf16", "--model.dtype=bfloat16"], r"fp8_per_channel, server\.weights says bf16"),
        ({"kv_cache": "fp8_e4m3"}, ["--server.kv_cache=auto"], r"its kv_cache is fp8_e4m3, .* says auto\."),
        ({"kv_cache": "auto"}, ["--server.kv_cache=fp8"], r"its kv_cache is auto, server\.kv_cache says fp8\."),
        ({"kv_cache": "nvfp4"}, [], r"its kv_cache is nvfp4, server\.kv_cache says fastest\."),
        ({"tensor_parallel": 2}, [], r"server\.tensor_parallel says 1\..* or set server\.tensor_parallel"),
        ({"quant_cfg": "fp8"}, [], r"it computes in fp8, policy\.quant_cfg says nothing\. Restart it"),
        ({}, ["--policy.quant_cfg=fp8"], r"it computes in unquantized weights, policy\.quant_cfg says fp8\."),
        ({"quant_cfg": "fp8"}, ["--policy.quant_cfg=FP8_DEFAULT_CFG"], "computes in fp8, .* says fp8_static"),
    ],
)
def test_a_replica_that_cannot_serve_the_run_is_refused(rollout, info, overrides, reason):
    found = rollout(1, info, *overrides)
    with pytest.raises(BadInput, match=reason) as refused:
        found.check(LINEARS, 316)
    assert found.fakes[0].url in str(refused.value)


def test_a_replica_that_fits_is_accepted(rollout):
    rollout(2, {"vllm": "0.26.0+cu129", "modules": [*LINEARS, "lm_head"]}).check(LINEARS, 316)


@pytest.mark.parametrize(
    ("info", "words", "product"),
    [
        ({"product": "W8A8"}, [], "W8A8"),
        ({"product": "W8A16"}, [], "W8A16"),
        ({"product": "W8A16", "is_forced": True, "weights": "fp8_per_tensor"}, FORCED, "W8A16 (forced)"),
        ({}, [], None),
    ],
)
def test_a_product_in_16_bits_is_printed_and_called_forced_where_it_is(rollout, capsys, info, words, product):
    found = rollout(2, info, *words)
    found.check(LINEARS, 316)
    assert found.product == product
    assert ("inputs in 16 bits" in capsys.readouterr().out) == bool(product and product.startswith("W8A16"))


@pytest.mark.parametrize(
    ("infos", "served"),
    [
        ([{}, {}], "auto"),
        ([{"kv_cache": "bfloat16"}], "auto"),
        ([{"kv_cache": "fp8_e4m3", "attention_backend": "FLASHINFER"}] * 2, "fp8 (FLASHINFER)"),
        ([{"kv_cache": "fp8"}, {}], "auto, fp8"),
    ],
)
def test_what_each_servers_machine_chose_by_default_is_accepted_printed_and_recorded(
    rollout, capsys, monkeypatch, infos, served
):
    found = rollout(len(infos))
    for fake, info in zip(found.fakes, infos, strict=True):
        fake.info |= info
    found.check(LINEARS, 316)
    said = f"servers   KV cache: {served} (server.kv_cache fastest)"
    assert (said in capsys.readouterr().out) == (served != "auto")
    report = found._new_report()
    monkeypatch.setattr(found.sync, "update", lambda policy: {})
    found._sync(view(), report)
    assert report.figures["server_kv_cache"] == served


def test_everything_wrong_with_all_replicas_is_said_at_once(rollout):
    found = rollout(2, {"vllm": "1.0", "max_model_len": 1})
    with pytest.raises(BadInput) as refused:
        found.check(LINEARS, 316)
    assert len(str(refused.value).splitlines()) == 4


def test_another_base_is_refused_with_both_hashes(rollout):
    found = rollout(1)
    found.check(LINEARS, 316)
    found.check_base("ab" * 32)
    with pytest.raises(BadInput, match=r"base hash is abababababab; the trainer's base has cdcdcdcdcdcd.*merge base"):
        found.check_base("cd" * 32)
    with pytest.raises(BadInput, match="base hash is"):
        found.check_base("ab" * 31 + "cd")  # the whole hash counts


def test_a_resumed_run_finds_another_base_before_it_loads_weights(rollout):
    found = rollout(1)
    found.run.path.mkdir()
    found.run.base_file.write_text('{"hash": "%s"}' % ("ef" * 32))
    with pytest.raises(BadInput, match=r"base.json has efefefefefef"):
        found.check(LINEARS, 316)


@pytest.mark.parametrize(
    ("info", "overrides"),
    [
        ({"kv_cache": "fp8_e4m3"}, ["--server.kv_cache=fp8"]),
        ({"kv_cache": "bfloat16"}, ["--server.kv_cache=auto"]),
        ({"weights": "float32"}, ["--server.weights=bf16", "--model.dtype=float32"]),
    ],
)
def test_another_name_of_the_same_setting_is_accepted(rollout, info, overrides):
    rollout(1, info, *overrides).check(LINEARS, 316)


def test_a_server_that_does_not_answer_at_the_start_is_waited_for_aloud_and_named_with_its_log(rollout, capsys):
    found = rollout(1)
    found.fakes[0].refuses["info"] = (503, "no")
    found.run.logs.mkdir(parents=True)
    log = found.run.logs / f"server-{found.fakes[0].server_port}.log"
    log.write_text("")
    with pytest.raises(CheckFailed, match=f"did not answer within 3 s .*Start it .*its log: {log}"):
        found.check(LINEARS, 316)
    assert capsys.readouterr().out.count(f"waiting for {found.replicas[0].url}, at most 3 s") == 1


@pytest.mark.parametrize(
    ("status", "error", "reason"),
    [
        (404, BadInput, r"that the kit did not start.* python -m launch\.server --config"),
        (401, BadInput, "refuses the API key. Set VLLM_API_KEY"),
        (503, CheckFailed, "did not answer within 3 s"),
    ],
)
def test_a_server_that_is_none_of_ours_is_told_from_one_that_is_not_ready(rollout, status, error, reason):
    found = rollout(1)
    found.fakes[0].refuses["info"] = (status, "no")
    with pytest.raises(error, match=reason):
        found.check(LINEARS, 316)


def test_answers_come_in_the_order_of_the_prompts_and_carry_their_version(rollout):
    found = served(rollout(2))
    assert_complete(generate(found))
    sent = [body for fake in found.fakes for action, body in fake.bodies if action == "generate"]
    assert {(body["session"], body["version"], body["n"]) for body in sent} == {(found.sync.session, 1, GROUP)}
    assert len({body["request_id"] for body in sent}) == 8


def test_what_is_sampled_is_what_the_configuration_says(rollout):
    keys = ["temperature=0.7", "top_p=0.9", "top_k=5", "max_completion_length=31"]
    found = served(rollout(1, None, *(f"--rollout.{key}" for key in keys)))
    found._generate_groups([[3, 4]] * GROUP, [7, 8])
    ((_, body),) = found.fakes[0].bodies[-1:]
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 31, "stop_token_ids": [7, 8], "n": GROUP}
    assert {key: body[key] for key in wanted} == wanted


def test_prompts_of_a_group_that_differ_are_an_error(rollout):
    found = served(rollout(1))
    with pytest.raises(CheckFailed, match="the prompts of a group differ"):
        found._generate_groups([[3, 4], [3, 5]], [0])
    assert found.fakes[0].calls == []


def test_each_replica_gets_as_many_prompts_as_it_can_generate_at_once(rollout):
    found = rollout(2, {"max_num_seqs": 4}, "--rollout.max_in_flight=64")
    found.fakes[1].info["max_num_seqs"] = 16
    served(found)
    for fake in found.fakes:
        fake.seconds_per_request = 0.1
    assert_complete(generate(found, 30), 30)
    small, large = (fake.most_at_once for fake in found.fakes)
    assert small <= 4 < large <= 16, "twice what runs at once, of two completions a prompt"


def test_every_process_gets_its_own_samples(rollout, monkeypatch):
    found = served(rollout(1))
    prompts = [[number] * 2 for number in range(4) for _ in range(GROUP)]  # of two processes
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: prompts)
    shares = []
    for index in (0, 1):
        made = found.generate(view(index=index), prompts[4 * index : 4 * index + 4])
        assert [len(one) for one in made.logps] == [len(one) for one in made.token_ids] and made.version == 1
        shares.append(made.token_ids)
    assert shares[0] == [[0, 0], [0, 1], [1, 0], [1, 1]] and shares[1] == [[2, 0], [2, 1], [3, 0], [3, 1]]


@pytest.mark.parametrize(("quant_cfg", "dtype"), [(None, "bfloat16"), ("nvfp4a16", "float32"), ("nvfp4", "float32")])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_adapter_travels_as_the_replicas_need_it(monkeypatch, quant_cfg, dtype, is_split):
    """In the type that the forward computes with; quantized weights are those of the factors as they are trained."""
    import torch

    from kit.train.trained_policy import TrainedPolicy

    keys = ["--model.dtype=bfloat16", *([f"--policy.quant_cfg={quant_cfg}"] if quant_cfg else [])]
    monkeypatch.setattr("kit.train.trained_policy.AdapterFile", lambda *facts: [*facts])
    monkeypatch.setattr("kit.train.trained_policy.gather_adapter", lambda model: {"gathered": 1})
    peaks = {"layer.input_amax": torch.tensor(2.5)} if quant_cfg == "nvfp4" else {}
    monkeypatch.setattr("kit.policy.quantized_linear.quantizer_state", lambda model: peaks)
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, is_main_process=True)
    trainer = SimpleNamespace(accelerator=accelerator, model="m", eos_token_ids=[0], is_deepspeed_enabled=False)
    policy = TrainedPolicy(trainer, load_config(CONFIG, keys), "h", "FSDP2" if is_split else None)
    made = policy.adapter()
    assert made[:4] == ["m", getattr(torch, dtype), "h", {"gathered": 1} if is_split else None]
    assert made[4:] == ([quant_cfg, {"layer": 2.5} if peaks else {}] if quant_cfg else [])
    assert (policy.adapter() is made) != is_split, "a file for all versions, but of gathered tensors one for each"
    accelerator.is_main_process = False
    assert not is_split or policy.adapter() is None


def test_of_a_sync_the_replica_farthest_from_the_trainer_is_recorded_and_the_noise_is_its_versions(
    rollout, monkeypatch
):
    noise = ["--policy.quant_noise_start=1e-2", "--policy.quant_noise_end=1e-4", "--train.max_steps=80"]
    sync, published = rollout(1, None, *noise).sync, []
    sync.canary = {
        "near": SimpleNamespace(mean=0.1, k3=0.01),
        "far": SimpleNamespace(mean=0.3, k3=0.02),
        "odd": SimpleNamespace(mean=0.2, k3=0.05),
    }
    monkeypatch.setattr(sync, "publish", lambda *arguments: published.append(arguments))
    policy = view(version=40, adapter=lambda: "adapter")
    figures = sync.update(policy)
    assert published == [(40, "adapter", None, noise_of(sync.config, 40))]
    assert (figures["canary_delta"], figures["canary_k3"]) == (0.3, 0.05)
    assert figures["noise_seed"] == noise_of(sync.config, 40).seed
    sync.served = 40
    assert sync.update(policy) == {} and len(published) == 1, "a version is published once"


@pytest.mark.parametrize("is_main", [True, False])
def test_of_a_base_that_is_split_every_process_gathers_and_scores_each_version_once(rollout, monkeypatch, is_main):
    """A gather or a forward that one process leaves out stops the others for ever."""
    found, calls, published = rollout(1), [], []

    def score(sequences: list, is_adapted: bool = True) -> list:
        calls.append("policy" if is_adapted else "base")
        return [np.zeros(1)]

    policy = view(4, is_main=is_main, is_split=True, score=score)
    policy.adapter = lambda: calls.append("adapter") or ("file" if is_main else None)
    found.sync.scorer.choose([[5, 6]])
    assert found._prepare(policy) is None
    assert calls == ["adapter", "policy", "base"]
    monkeypatch.setattr(found.sync, "publish", lambda *facts: published.append((*facts[:2], facts[2]())))
    if is_main:
        found.sync.update(policy)
        assert published == [(4, "file", ([[5, 6]], [np.zeros(1)], [np.zeros(1)]))]
        assert calls == ["adapter", "policy", "base"] and found.sync._prepared is None, "gathered tensors are released"
    found._served = 4
    calls.clear()
    assert found._prepare(policy) is None and calls == []
    policy.version = 5
    policy.score = lambda sequences, is_adapted=True: [np.full(1, np.nan)]
    assert isinstance(found._prepare(policy), CheckFailed), "told to all once they have met"


def test_other_processes_wait_longer_than_the_main_one_can_take(rollout, monkeypatch):
    """Prompt by prompt, each failing as often as it may, at its limit of time; and what else a step asks."""
    keys = ["max_in_flight=1", "retries=3", "request_timeout_s=7", "server_wait_s=11"]
    found = rollout(1, None, *(f"--rollout.{key}" for key in keys), "--watch.eval_problems=5")
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    train = found.config.train
    prompts = 2 * train.per_device_train_batch_size * train.gradient_accumulation_steps // GROUP + 5
    assert found.longest_s >= 11 + 7 * (prompts * 4 + 7)


def test_a_slow_replica_gets_less_work(rollout):
    found = served(rollout(2, {"max_num_seqs": 4}, "--rollout.max_in_flight=4"))
    found.fakes[0].seconds_per_request = 0.4
    assert_complete(generate(found, 24), 24)
    slow, fast = (fake.calls.count("generate") for fake in found.fakes)
    assert slow + fast == 24 and slow < 8 < fast
    assert all(fake.most_at_once <= 4 for fake in found.fakes)


@pytest.mark.parametrize("fault", ["cut connection", "error 500"])
def test_a_request_that_fails_is_answered_by_the_other_replica(rollout, fault):
    found = served(rollout(2))
    if fault == "error 500":
        found.fakes[0].refuses["generate"] = (500, "engine busy")
    else:
        found.fakes[0].before["generate"] = cut
    assert_complete(generate(found))
    assert found.fakes[1].calls.count("generate") == 8


def cut(body: dict) -> None:
    raise ConnectionError


def test_a_request_is_tried_as_often_as_the_config_says_and_no_more(rollout):
    found = served(rollout(2, None, "--rollout.retries=2"))
    for fake in found.fakes:
        fake.refuses["generate"] = (500, "no KV cache left")
    with pytest.raises(CheckFailed) as failed:
        generate(found, 1)
    assert sum(fake.calls.count("generate") for fake in found.fakes) == 3
    assert "attempt 3 of at most 3" in str(failed.value) and "no KV cache left" in str(failed.value)
    assert all(fake.url in str(failed.value) for fake in found.fakes) and "--resume" in str(failed.value)


def test_a_request_that_is_wrong_is_not_tried_again(rollout):
    found = served(rollout(2))
    for fake in found.fakes:
        fake.refuses["generate"] = (409, "this server serves run/7")
    with pytest.raises(CheckFailed, match=r"serves run/7 Then continue with --resume\.$"):  # which needs no restart
        generate(found, 1)
    assert sum(fake.calls.count("generate") for fake in found.fakes) == 1


def test_the_log_of_a_replica_that_failed_is_named(rollout):
    found = served(rollout(1, None, "--rollout.retries=0"))
    found.run.logs.mkdir(parents=True)
    log = found.run.logs / f"server-{found.fakes[0].server_port}.log"
    log.write_text("")
    found.fakes[0].refuses["generate"] = (500, "dead")
    with pytest.raises(CheckFailed, match=str(log)):
        generate(found, 1)


def test_an_answer_of_another_version_ends_the_run(rollout):
    found = served(rollout(1))
    found.fakes[0].before["generate"] = lambda body: {"version": 7, "samples": samples([1], GROUP)}
    with pytest.raises(CheckFailed, match="sampled from adapter version 7, version 1 was asked for"):
        generate(found, 2)


@pytest.mark.parametrize("answer", ["too few", "empty", "unequal", "not binary", "too long", "nothing at all"])
def test_an_answer_that_is_not_what_was_asked_for_ends_the_run(rollout, answer):
    found = served(rollout(1))
    rows = samples([1], GROUP)
    if answer == "too few":
        rows.pop()
    elif answer in ("too long", "nothing at all"):
        count = found.config.rollout.max_completion_length + 1 if answer == "too long" else 0
        rows[0] |= {"token_ids": encode_ids([5] * count), "logprobs": encode_floats([-1.0] * count)}
    else:
        rows[0]["token_ids"] = {"empty": "", "unequal": "AAAA", "not binary": "?"}[answer]
    found.fakes[0].before["generate"] = lambda body: {"version": 1, "samples": rows}
    with pytest.raises(CheckFailed, match=r"not what was asked for|not of protocol"):
        generate(found, 1)
    assert found.fakes[0].calls.count("generate") == 1, "a second time it would be the same"


def test_a_late_answer_of_an_abandoned_attempt_is_dropped():
    # The first attempt answers after its deadline, while the second prompt is under way, with other tokens.
    calls: list[str] = []
    release = threading.Event()

    def ask(replica: Replica, request_id: str, prompt: list[int]) -> list:
        calls.append(request_id)
        if len(calls) == 1:
            dispatcher.timeout_s = 60.0  # of the attempts that follow, however busy the machine is
            release.wait(60)
            return ["late"]
        if prompt == [2]:
            release.set()
            processes.wait_until(lambda: dispatcher.late_answers)
        return [f"answer {prompt[0]}"]

    replica = SimpleNamespace(url="http://replica", info=lambda timeout_s: {})
    dispatcher = Dispatcher([replica, replica], [1.0, 1.0], retries=1, max_in_flight=1, timeout_s=0.2)
    answers = dispatcher.run([[1], [2]], ask, "v1")
    assert answers == [["answer 1"], ["answer 2"]]
    assert dispatcher.late_answers == 1 and len(set(calls)) == 3


def test_a_replica_that_hangs_is_given_up_long_before_the_request_times_out(monkeypatch):
    monkeypatch.setattr("kit.rollout.replica.PROBE_EVERY_S", 0.1)
    hanging = threading.Event()

    def silent(timeout_s: float) -> dict:
        raise ReplicaError("http://hangs", "info", "no answer within 10 s")

    replicas = [
        SimpleNamespace(url="http://hangs", info=silent),
        SimpleNamespace(url="http://fine", info=lambda **_: {}),
    ]

    def ask(replica: SimpleNamespace, request_id: str, prompt: list[int]) -> list:
        if replica.url == "http://hangs":
            hanging.wait(60)
        return [prompt[0]]

    dispatcher = Dispatcher(replicas, [1.0, 1.0], retries=1, max_in_flight=8, timeout_s=600)
    started = time.monotonic()
    assert dispatcher.run([[number] for number in range(4)], ask, "v1") == [[0], [1], [2], [3]]
    with pytest.raises(GenerationFailed, match="answers none, not even info"):
        Dispatcher(replicas[:1], [1.0], retries=1, max_in_flight=8, timeout_s=600).run([[1]], ask, "v1")
    assert time.monotonic() - started < 200  # of 600
    hanging.set()


def test_a_replica_that_dies_in_mid_generation_ends_the_run_quickly(rollout):
    found = served(rollout(1))
    found.fakes[0].seconds_per_request = 60
    threading.Timer(0.5, found.fakes[0].stop).start()
    started = time.monotonic()
    with pytest.raises(CheckFailed, match=found.fakes[0].url):
        generate(found)
    assert time.monotonic() - started < 50  # of 60


def test_replicas_sleep_after_the_step_and_are_left_awake(rollout, monkeypatch):
    found = served(rollout(2, {"sleep_enabled": True}, "--server.sleep=true", "--rollout.canary_prompts=0"))
    update = lambda policy: [fake.calls.append("sync") for fake in found.fakes] and {}  # noqa: E731
    monkeypatch.setattr(found.sync, "update", update)
    monkeypatch.setattr(found.sync, "settle", lambda: found.fakes[0].calls.append("settle"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    prompts, phases = [[3, 4]] * GROUP, []
    for _ in range(2):
        phases += found.generate(view(), prompts).report.seconds
        assert all(fake.asleep for fake in found.fakes)
    one_step = ["sync", "generate", "settle", "sleep"]
    assert found.fakes[0].calls == [*one_step, "wake", *one_step]
    assert phases == ["sync", "sleep", "wake", "sync", "sleep"]
    found.close()
    assert not any(fake.asleep for fake in found.fakes)


def test_a_trainer_with_an_allowance_waits_for_a_replica_that_is_lost_while_it_sleeps(rollout, monkeypatch):
    """It is awake when it is back, serves the version of the others, and the step goes on."""
    monkeypatch.setenv(WAIT_S, "60")
    monkeypatch.setattr("kit.rollout.recovery.POLL_S", 0.05)
    found = served(rollout(2, {"sleep_enabled": True}, "--server.sleep=true", "--rollout.canary_prompts=0"))
    policy = view(version=2, adapter=Adapter)
    step = lambda: found._step(policy, lambda: generate(found), found._new_report())  # noqa: E731
    first = step()
    assert all(fake.asleep for fake in found.fakes)
    found.fakes[0].die()
    threading.Timer(0.5, found.fakes[0].come_back).start()
    assert step() == first
    assert [fake.served for fake in found.fakes] == [(found.sync.session, 2)] * 2
    assert found.fakes[0].pid == 2 and all(fake.asleep for fake in found.fakes)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    allowed = found.longest_s
    monkeypatch.delenv(WAIT_S)
    assert allowed == found.longest_s + 60, "the other processes wait as long"


def test_replicas_that_were_left_asleep_are_woken_before_the_first_sync(rollout, monkeypatch):
    found = rollout(1, {"sleep_enabled": True}, "--server.sleep=true", "--rollout.canary_prompts=0")
    found.fakes[0].asleep = True
    served(found)
    found.generate(view(), [[3, 4]] * GROUP)
    assert found.fakes[0].calls[0] == "wake"


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_every_process_frees_its_gpu_memory_before_the_replicas_wake(rollout, monkeypatch, is_main, fails):
    found = served(rollout(1, {"sleep_enabled": True}, "--server.sleep=true"))
    order = []

    def step(policy: Any, generate: Any, report: Any) -> list:
        order.append("step")
        if fails:
            raise CheckFailed("the replica did not wake up")
        return [([1], [-0.5], None)] * GROUP

    def broadcast(outcome: list) -> None:
        order.append("broadcast")
        if not is_main:
            outcome[:] = (
                [None, None, CheckFailed("did not wake up")] if fails else [[([1], [-0.5], None)] * GROUP, 1, None]
            )

    monkeypatch.setattr(found, "_step", step)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda rows: rows)
    monkeypatch.setattr(found, "_broadcast", broadcast)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: order.append("free"))
    policy = view(is_main=is_main)
    policy.processes.wait_for_everyone = lambda: order.append("barrier")
    with pytest.raises(CheckFailed, match="did not wake up") if fails else contextlib.nullcontext():
        found.generate(policy, [[3, 4]] * GROUP)
    assert order == ["free", "barrier", *(["step"] if is_main else []), "broadcast"]


def test_a_replica_that_cannot_be_woken_at_the_end_is_told(rollout, capsys):
    found = served(rollout(2, {"sleep_enabled": True}, "--server.sleep=true"))
    found._may_be_asleep = True
    found.fakes[1].refuses["wake"] = (500, "no memory")
    found.close()
    line = f"{found.fakes[1].url} may be left asleep: no memory. The next start of a trainer wakes it.\n"
    assert capsys.readouterr().out == line
    assert found.fakes[0].calls == ["wake"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(28, "No space left on device"), MachineFailed), (OSError(13, "Permission denied"), CheckFailed)],
)
def test_a_rollout_that_the_machine_failed_can_be_resumed_from(rollout, error, kind):
    def work():
        raise error

    with pytest.raises(CheckFailed, match="the rollout failed: ") as caught:
        rollout(1)._in_main_process(SimpleNamespace(is_main_process=True), work)
    assert type(caught.value) is kind
