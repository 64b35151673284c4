"""`python -m eval report --run …`: one page on everything in a run's directory.

Writes report.html and report.md, and redraws eval.md and eval.png.
"""

from pathlib import Path

from eval.naming import GRPO
from eval.options import command_parser
from eval.report import write_report, write_whole
from eval.result import read_result
from kit.core.errors import DONE, BadInput
from kit.core.run_directory import RunDir, publish

PICTURES = "report-pictures"  # of report.md, replaced as a whole


def main(argv: list[str]) -> int:
    """Write report.html and report.md from the files that exist, and eval.md and eval.png if there is an eval.json."""
    arguments = command_parser("report", __doc__, "folder that holds eval.json", may_import=False).parse_args(argv)
    run = RunDir.open(arguments.run)
    folder = arguments.out or run.path
    if not folder.is_dir():
        raise BadInput(f"{folder} does not exist. --out names the folder that holds eval.json.")
    result = read_result(folder / "eval.json", run) if (folder / "eval.json").is_file() else None
    if result is not None:
        write_report(result, folder)
    missing = write_page(run, folder, result)
    print(f"written: {folder / 'report.html'}, report.md{', eval.md, eval.png' if result is not None else ''}")
    for what, command in missing:
        print(f"not in it: {what} Make it with: {command}")
    return DONE


def write_page(run: RunDir, folder: Path, result: dict | None) -> list[tuple[str, str]]:
    """Write report.html, report.md and its pictures, each replaced whole; return (missing part, its command) pairs."""
    from eval.document import Document, Missing, to_html, to_markdown
    from eval.found import find
    from eval.sections import sections

    found = find(run, folder, result)
    made = sections(found)
    name = found.group("run").get("name") or run.path.resolve().name
    what = "GRPO run" if found.trained == GRPO else "Distillation"
    document = Document(f"{what} {name}: did the gain survive?", f"From the files in {run.path}", made)
    pictures = document.pictures()
    with publish(folder / PICTURES, overwrite=True) as partial:
        for picture in pictures:
            (partial / picture.file).write_bytes(picture.svg)
    write_whole(folder / "report.md", to_markdown(document, f"{PICTURES}/"))
    write_whole(folder / "report.html", to_html(document))
    blocks = [block for section in made for block in section.blocks]
    return [(block.what, block.command) for block in blocks if isinstance(block, Missing)]
