"""GGUF files of merged checkpoints compute in llama.cpp what transformers computes, or are refused before conversion.

In .venv-llamacpp, with llama.cpp's own converter and llama.cpp itself; all models go through one process of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kit.core.errors import BadInput, CheckFailed
from kit.core.run_directory import RunDir, read_manifest
from kit.weights.gguf_file import field, open_gguf
from merge import gguf
from merge.__main__ import main
from merge.ollama import COMMENT
from merge.verify import load_for_scoring
from tests.sandbox import side_environment
from tests.unit.merge_fixture import CHAT_TEMPLATE, byte_tokenizer, make_model, make_run
from tests.unit.wrapped_models import make_wrapped

TEXTS = [
    "<|im_start|>user\nWhat is 2 + 40?<|im_end|>\n",
    "The answer of  Tom's 12,345 coins:\n\n\tnaïve 東京 🙂 I'll see.\n",
]
# KL of llama.cpp from transformers, in nats per token; random models measure at most 3e-5 in bf16 and 8e-4 in q8_0.
BOUND = {"bf16": 2e-4, "q8_0": 5e-3}


def merging_tokenizer(pieces: str = "") -> Any:
    """A byte-level BPE of 310 tokens with merges; `pieces` splits text by a regular expression of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pieces:
        split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["What is the answer? The answer is the number of coins that Tom has."], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDir:
    """A run on a tied Qwen3, merged in BF16 and written as GGUF in two types."""
    side_environment("llamacpp")
    folder = tmp_path_factory.mktemp("gguf")
    run = make_run(folder / "run", make_model(folder / "model", tokenizer=merging_tokenizer()))
    assert main(["--run", str(run.path), "--format", "bf16", "--policy", "grpo", "--skip_verify"]) == 0
    assert main(["gguf", "--run", str(run.path), "--type", *BOUND]) == 0
    return run


@pytest.fixture(scope="module")
def llamacpp(tmp_path_factory):
    python = side_environment("llamacpp") / "bin/python"
    with gguf.LlamaCpp(python, tmp_path_factory.mktemp("log")) as process:
        yield process


def checkpoint_of(folder: Path, texts: list[str] = TEXTS) -> gguf.Checkpoint:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
    return gguf.Checkpoint(RunDir(folder), folder, {}, tokenizer, batch, texts)


def test_the_files_of_a_run_are_its_checkpoint(run):
    for name, bound in BOUND.items():
        manifest = read_manifest(run.merged / "grpo" / f"gguf_{name}", "gguf", deep=True)
        assert 0 < manifest["verify"]["mean_kl"] < bound and manifest["verify"]["tokens"] > 300
        assert set(manifest["files"]) == {f"run-{name}.gguf", "Modelfile"}
        assert manifest["adapter_hash"] == read_manifest(run.merged / "grpo/bf16")["adapter_hash"]


def test_transformers_reads_the_same_weights(run):
    place = run.merged / "grpo/gguf_bf16"
    found = AutoModelForCausalLM.from_pretrained(place, gguf_file="run-bf16.gguf", dtype=torch.float32).state_dict()
    wanted = load_for_scoring(run.merged / "grpo/bf16", "cpu").state_dict()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_file_has_the_tokenizer_and_the_template_of_the_checkpoint(run):
    reader = open_gguf(run.merged / "grpo/gguf_bf16/run-bf16.gguf")
    tokenizer = AutoTokenizer.from_pretrained(run.merged / "grpo/bf16")
    assert field(reader, "tokenizer.ggml.pre") == "gpt-2"
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[field(reader, "tokenizer.ggml.eos_token_id")] == "<|im_end|>"
    assert field(reader, "tokenizer.chat_template") == COMMENT + tokenizer.chat_template


def test_greedy_tokens_are_those_of_transformers(run, llamacpp, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(run.merged / "grpo/bf16")
    model = load_for_scoring(run.merged / "grpo/bf16", "cpu")
    prompt = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    ids = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=-1)[0].tolist()
    file = str(run.merged / "grpo/gguf_bf16/run-bf16.gguf")
    llamacpp.run("compute", file=file, sequences=[ids], conversations=[], out=str(tmp_path / "logits.npy"))
    # Each token is the most likely one after those before it, so llama.cpp generates the same ones.
    chosen = open_logits(tmp_path / "logits.npy").argmax(-1)[prompt.shape[1] - 1 :]
    assert chosen.tolist() == ids[prompt.shape[1] :] and len(set(ids[prompt.shape[1] :])) > 3


def open_logits(file: Path) -> torch.Tensor:
    import numpy as np

    return torch.from_numpy(np.load(file))


# In llama.cpp every sixth layer of a Gemma 3 has full attention, which is scaled by the size of a head.
GEMMA = {
    "query_pre_attn_scalar": 16,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


def rules() -> dict[str, Any]:
    """Pre-tokenizers as in the tokenizer.json of SmolLM2 and of Qwen2.5, by llama.cpp's names for them."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    qwen += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    level = ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return {
        "smollm": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        "qwen2": Sequence([Split(Regex(qwen), behavior="isolated", invert=False), level]),
    }


@pytest.mark.parametrize("name", ["smollm", "qwen2"])
def test_a_vocabulary_of_its_own_is_recognized_by_its_rule(name, llamacpp, tmp_path):
    tokenizer = merging_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = rules()[name]
    source = checkpoint_of(make_model(tmp_path / "model", tokenizer=tokenizer))
    (tmp_path / "copy").mkdir()
    gguf.check_vocabulary(llamacpp, source, model := gguf.prepared(source, tmp_path / "copy"))
    assert field(open_gguf(model.with_suffix(".vocabulary.gguf")), "tokenizer.ggml.pre") == name


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3Moe", "gemma3", "qwen3_vl"])
def test_other_families_compute_the_same(family, llamacpp, tmp_path):
    folder = tmp_path / "model"
    if family[0].islower():  # inside a vision-language checkpoint
        tokenizer = merging_tokenizer()
        shape = GEMMA if family == "gemma3" else {}
        make_wrapped(folder, family, tokenizer=tokenizer, vocab_size=len(tokenizer), **shape)
    else:
        shape = MIXTURE if family == "Qwen3Moe" else {}
        make_model(folder, family != "Llama", family=family, tokenizer=merging_tokenizer(), **shape)
    source = checkpoint_of(folder)
    (tmp_path / "copy").mkdir()
    model = gguf.prepared(source, tmp_path / "copy")
    gguf.check_vocabulary(llamacpp, source, model)
    gguf.write_file(llamacpp, model, "bf16", file := tmp_path / "model.gguf", None)
    reference = gguf.reference_scores(source)
    assert gguf.compare_file(llamacpp, source, file, "bf16", reference).mean_kl < BOUND["bf16"]


def test_a_file_of_another_model_is_refused(run, llamacpp):
    source = checkpoint_of(run.merged / "grpo/bf16")
    file = run.merged / "grpo/gguf_bf16/run-bf16.gguf"
    reference = [scores.roll(1, -1) for scores in gguf.reference_scores(source)]
    with pytest.raises(CheckFailed, match=r"run-bf16.gguf is not the BF16 checkpoint: mean KL .* bound is 2e-02"):
        gguf.compare_file(llamacpp, source, file, "bf16", reference)
    source.tokenizer.chat_template = source.tokenizer.chat_template.replace("assistant", "model")
    with pytest.raises(CheckFailed, match=r"llama.cpp renders the chat template as .*assistant.*, transformers as"):
        gguf.compare_file(llamacpp, source, file, "bf16", reference)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("architecture", "llama.cpp's converter does not know the architecture NovelForCausalLM"),
        ("Phi3", "llama.cpp's converter does not take it: .*Missing .*tokenizer.model"),
        ("merges", "llama.cpp does not load it: .*cannot find tokenizer merges"),
        ("rule", "its tokenizer splits text as none that llama.cpp knows"),
        ("normalizer", "llama.cpp makes other tokens of .*What is 2"),
        ("stop", "llama.cpp would not stop at '<|im_start|>'"),
    ],
)
def test_what_llama_cpp_cannot_hold_is_refused_before_a_weight_is_read(change, reason, llamacpp, tmp_path):
    tokenizer = merging_tokenizer(r"\d| ?[A-Za-z]+|[^A-Za-z\d]" if change == "rule" else "")
    if change == "normalizer":
        from tokenizers.normalizers import Lowercase

        tokenizer.backend_tokenizer.normalizer = Lowercase()
    family = "Phi3" if change == "Phi3" else "Qwen3"
    tokenizer = byte_tokenizer() if change == "merges" else tokenizer
    folder = make_model(tmp_path / "model", False, family=family, tokenizer=tokenizer)
    for file in folder.glob("*.safetensors"):  # a weight that is read would fail
        content = file.read_bytes()
        file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])  # the header alone
    values = json.loads((folder / "config.json").read_text())
    if change == "architecture":
        (folder / "config.json").write_text(json.dumps(values | {"architectures": ["NovelForCausalLM"]}))
    if change == "stop":
        stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    source = checkpoint_of(folder)
    with pytest.raises(BadInput, match=reason.replace("|", r"\|").replace("(", r"\(")):
        (tmp_path / "copy").mkdir()
        gguf.check_vocabulary(llamacpp, source, gguf.prepared(source, tmp_path / "copy"))
