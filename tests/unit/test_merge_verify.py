"""The comparison with the policy: it sees a wrong merge, and only a wrong one."""

import contextlib
import gc
import json
import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, write_json
from merge import verify as verify_module
from merge.merge import read_adapter, write_bf16
from merge.verify import (
    Comparison,
    Verifier,
    base_checkpoint,
    base_directory,
    compare,
    fixed_batch,
    load_for_scoring,
    load_policy,
    log_probs,
)
from tests.unit.merge_fixture import alter_adapter, make_run, shared_folder, shared_model, shared_run


def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_model())


def batch_of(run):
    return fixed_batch(run, tokenizer(), 320)


def verifier(run=None):
    run = run or shared_run()
    return Verifier(run, run.newest_adapter(), base_checkpoint(run), batch_of(run))


def trained_run():
    """A run whose update shows: KL(policy‖base) is 6e-3."""
    folder = shared_folder() / "run-trained"
    return RunDir.open(folder) if folder.exists() else make_run(folder, shared_model(), update=0.01)


def write(folder, updates, run=None):
    write_bf16(base_checkpoint(run or shared_run()), updates, folder, lambda _: {})
    return folder


def adapter_updates(run=None):
    run = run or shared_run()
    return read_adapter(run.newest_adapter(), base_checkpoint(run))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_merge_passes_far_below_the_bound(tmp_path, dtype):
    run = shared_run(dtype=dtype)
    found = verifier(run).check_bf16("grpo", write(tmp_path / "m", adapter_updates(run), run))
    assert found.mean_kl < 1e-4
    assert found.top1_agreement > 0.97
    assert found.tokens > 300


@pytest.mark.parametrize(
    "wrong",
    [
        lambda u: {},
        lambda u: {n: replace(f, scale=2 * f.scale) for n, f in u.items()},
        lambda u: {n: replace(f, scale=-f.scale) for n, f in u.items()},
    ],
    ids=["adapter left out", "scale doubled", "sign flipped"],
)
def test_wrong_merge_is_refused(tmp_path, wrong):
    run = trained_run()
    folder = write(tmp_path / "m", wrong(adapter_updates(run)), run)
    with pytest.raises(CheckFailed, match=r"is not the policy: mean KL"):
        verifier(run).check_bf16("grpo", folder)


def test_merged_adapter_is_refused_as_the_base(tmp_path):
    check = verifier()
    with pytest.raises(CheckFailed, match="merged base checkpoint is not the policy"):
        check.check_bf16(
            "base", write(tmp_path / "m", {n: replace(f, scale=20.0) for n, f in adapter_updates().items()})
        )
    assert check.check_bf16("base", write(tmp_path / "b", {})).mean_kl < 1e-4


def test_comparison_equals_its_definition():
    torch.manual_seed(0)
    ids = [torch.tensor([[0, 2, 1]]), torch.tensor([[1, 1]])]
    p, q = ([torch.randn(n, 3).log_softmax(-1) for n in (2, 1)] for _ in range(2))
    found = compare(p, q, ids)
    kl, worst, same = 0.0, 0.0, 0
    for rows_p, rows_q, tokens in zip(p, q, ids, strict=True):
        for t in range(len(rows_p)):
            a, b = rows_p[t].tolist(), rows_q[t].tolist()
            kl += sum(math.exp(x) * (x - y) for x, y in zip(a, b, strict=True))
            token = tokens[0, t + 1].item()
            worst = max(worst, abs(a[token] - b[token]))
            same += a.index(max(a)) == b.index(max(b))
    assert found.mean_kl == pytest.approx(kl / 3, rel=1e-5)
    assert found.max_abs_dlogp == pytest.approx(worst, rel=1e-5)
    assert (found.top1_agreement, found.tokens) == (pytest.approx(same / 3), 3)
    assert compare(p, p, ids).mean_kl == pytest.approx(0, abs=1e-9)


def test_batch_is_the_same_every_time_and_holds_templated_prompts_and_completions():
    run = shared_run()
    batch = batch_of(run)
    texts = [tokenizer().decode(ids[0]) for ids in batch]
    assert texts == [tokenizer().decode(ids[0]) for ids in batch_of(run)]
    assert texts[0].endswith("It is 13.<|im_end|>")
    assert texts[1].startswith("<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nWhat is 2 plus 11?")
    assert texts[1].count("<|im_start|>assistant") == 1
    assert len(texts) == 13


def test_a_large_vocabulary_leaves_its_tokens_to_the_completions(monkeypatch):
    monkeypatch.setattr(verify_module, "MAX_LOGPROBS", 320 * 60)
    (first, *_) = batch = batch_of(shared_run())
    assert tokenizer().decode(first[0]).endswith("It is 13.<|im_end|>")
    assert sum(ids.shape[1] for ids in batch) <= 60


def test_no_data_path_does_not_mean_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "test.jsonl").write_text('{"question": "Whose is this?", "answer": "1"}\n')
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_json(run.config_file, {"config": {"data": {"id": "openai/gsm8k", "path": None, "eval_path": None}}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="nothing to verify on"):
        batch_of(run)


def test_every_model_is_freed_before_the_next_is_loaded(tmp_path, monkeypatch):
    loaded: list[weakref.ref] = []

    def watch(name):
        load = getattr(verify_module, name)

        def watched(*arguments):
            assert [ref() for ref in loaded] == [None] * len(loaded)
            model = load(*arguments)
            loaded.extend(weakref.ref(part) for part in (model, *model.modules()))
            return model

        monkeypatch.setattr(verify_module, name, watched)

    watch("load_policy")
    watch("load_for_scoring")
    folder = write(tmp_path / "m", adapter_updates())
    gc.disable()  # an NF4 layer is a reference cycle, so nothing but an explicit collection frees it
    try:
        check = verifier()
        for policy in ("base", "grpo"):
            check.compare(policy, folder)
    finally:
        gc.enable()
    assert [ref() for ref in loaded] == [None] * len(loaded)


def test_a_run_on_a_local_base_that_is_gone_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    shutil.copytree(shared_run().path, run.path)
    info = json.loads(run.base_file.read_text())
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    for gone in ("models/tiny", str(tmp_path / "models" / "tiny")):
        write_json(run.base_file, {**info, "model": gone})
        with pytest.raises(BadInput, match=f"local checkpoint {gone}, which does not exist.*--base"):
            base_directory(run)
        assert base_directory(run, shared_model()) == shared_model()


def test_messages_in_the_log_are_templated_and_a_run_without_text_is_bad_input(tmp_path):
    run = RunDir(tmp_path)
    write_json(run.config_file, {"config": {"data": {"id": "openai/gsm8k", "path": None}}})
    with pytest.raises(BadInput, match="nothing to verify on"):
        batch_of(run)
    run.completions.mkdir()
    row = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]}
    (run.completions / "step-000002.jsonl").write_text(json.dumps(row) + "\n")
    assert tokenizer().decode(batch_of(run)[0][0]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho"
    (run.completions / "step-000002.jsonl").write_text("not json\n" + json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=r"step-000002\.jsonl:1 is damaged"):
        batch_of(run)


def test_policy_is_the_base_plus_the_adapter_and_refuses_another_base(tmp_path):
    run, ids = shared_run(), [torch.arange(1, 30)[None]]
    plain = log_probs(load_policy(run.path, None), ids)
    policy = load_policy(run, run.newest_adapter())
    adapted = log_probs(policy, ids)
    assert (plain[0] - adapted[0]).abs().max() > 0.01
    with policy.disable_adapter():
        assert torch.equal(log_probs(policy, ids)[0], plain[0])
    assert not policy.training
    stranger = alter_adapter(run, tmp_path / "adapter", base_hash="0" * 64)
    with pytest.raises(BadInput, match="another base"):
        load_policy(run, stranger)


def test_scoring_needs_a_checkpoint(tmp_path):
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_for_scoring(tmp_path)


@pytest.mark.parametrize(
    ("trained", "dtype", "policy", "update_kl", "most"),
    [
        (torch.float32, torch.float32, "base", 0.0, 2e-3),
        (torch.bfloat16, torch.bfloat16, "base", 0.0, 2e-2),
        (torch.bfloat16, torch.float32, "base", 0.0, 2e-2),  # weights are rounded to BF16, whatever compares them
        (torch.bfloat16, torch.float32, "grpo", 1.0, 2e-2),
        (torch.float32, torch.float32, "grpo", 1.0, 2e-3),
        (torch.float32, torch.float32, "grpo", 2e-3, 1e-3),  # half of what the adapter changes
        (torch.float32, torch.float32, "grpo", 1e-6, 5e-4),  # but for the noise of a right merge
        (torch.bfloat16, torch.float32, "grpo", 1e-6, 5e-4),
        (torch.bfloat16, torch.bfloat16, "grpo", 1e-6, 5e-3),
    ],
)
def test_the_bound_of_a_bf16_merge_is_what_rounding_and_half_of_the_update_allow(
    monkeypatch, trained, dtype, policy, update_kl, most
):
    verifier = object.__new__(Verifier)
    verifier.weights, verifier.dtype = trained, dtype
    monkeypatch.setattr(Verifier, "update_kl", lambda *_: update_kl)
    for kl, is_right in ((0.0, True), (0.99 * most, True), (1.01 * most, False), (float("nan"), False)):
        monkeypatch.setattr(Verifier, "compare", lambda *_, kl=kl, **__: Comparison(kl, 0.1, 1.0, 9))
        with contextlib.nullcontext() if is_right else pytest.raises(CheckFailed, match="is not the policy"):
            assert verifier.check_bf16(policy, Path("merged")).mean_kl == kl


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_either_side_must_be_finite_to_be_compared(side, value):
    scores = [torch.full((3, 4), 0.25).log() for _ in range(2)]
    ids = torch.tensor([[0, 1, 2, 3]])
    assert compare([scores[0]], [scores[1]], [ids]).mean_kl == 0
    scores[side][1, 2] = value
    with pytest.raises(CheckFailed, match="non-finite"):
        compare([scores[0]], [scores[1]], [ids])


def test_log_probs_are_of_the_next_tokens():
    model, ids = load_for_scoring(shared_model(), "cpu"), torch.arange(5, 40)[None]
    (found,) = log_probs(model, [ids])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert found.shape[0] == 34
    assert -found.gather(1, ids[0, 1:, None]).mean().item() == pytest.approx(loss, rel=1e-5)


def test_a_logged_episode_is_compared_with_all_its_turns():
    from merge.verify import logged_texts
    from tests.unit.merge_fixture import byte_tokenizer

    tokenizer = byte_tokenizer()
    row = {"prompt": "How many?", "completion": "7"}
    prompt, plain = logged_texts({}, row, tokenizer)
    assert plain == f"{prompt}7"
    assert logged_texts({}, row | {"text": "all of it"}, tokenizer) == (prompt, "all of it")
