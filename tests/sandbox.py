"""The directory, the home and the environment that tests run in, apart from those of whoever starts them.

`pytest` in a checkout copies what git tracks, and what it would track, to a temporary directory and goes on there, in
the same process. So `runs/`, `models/` and `.venv` are absent for every test and for every process that a test starts,
HOME is empty, and of the caller's environment only `KEPT` is left. What tests use of the outside is named here: the
interpreter, the side environments (links in the copy), the data sets (`GRPO_KIT_DATA`) and packages that were fetched
once (`GRPO_KIT_CACHE`). `KIT_TESTS_RUN_IN=$PWD`
leaves all this out, for a debugger that must see the checkout's own files.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "KIT_TESTS_RUN_IN"
CHECKOUT = "KIT_TESTS_CHECKOUT"
WAIT_FOR = "KIT_TESTS_WAIT_FOR"  # id of a process that still makes side environments
SIDE_ENVIRONMENTS = (
    ".venv-llmcompressor",
    ".venv-lm_eval",
    ".venv-verl",
    ".venv-modelopt",
    ".venv-openenv",
    ".venv-verifiers",
    ".venv-trackers",
    ".venv-llamacpp",
    ".venv-arctic",
)
# The machine's own: where programs and libraries are, the terminal, temporary files, whether this is CI.
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TMPDIR", "CI", "USER")
KEPT += ("BAD_INPUTS", "RUN_FILES", "RANK_SEEDS")  # how many cases a test tries
KEPT += ("GRPO_KIT_DATA", "GRPO_KIT_CACHE", "PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", WAIT_FOR)
SET = {
    # Before the first import of torch: on two cores more threads only wait for each other.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A vLLM server for CPUs is three processes that import vllm for 10 s each, the third bound to the core that every
    # other server has. Here it is two, as for one GPU, placed by the system; tests/smoke/test_server.py has three.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # With an eager model vLLM still compiles some lines of its sampler, every server anew and by the C++ compiler.
    # tests/smoke/test_doctor.py has them compiled, tests/unit/test_packing.py what the kit itself compiles.
    "TORCH_COMPILE_DISABLE": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
MADE_BY_RUNS = ("runs", "models", "data")  # at the root


def inside() -> bool:
    """Whether this process runs from the copy."""
    return os.environ.get(MARK) == str(ROOT)


def tracked_files(root: Path) -> list[Path]:
    """What git tracks or would track, relative; without git everything that is neither hidden nor made by a run."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        done = subprocess.run(listing, env=ours, capture_output=True, text=True)
        names = [Path(name) for name in done.stdout.split("\0") if name] if (root / ".git").exists() else []
    except OSError:
        names = []
    if not names:
        for folder, below, files in os.walk(root):
            left_out = {"__pycache__", *(MADE_BY_RUNS if Path(folder) == root else ())}
            below[:] = [name for name in below if name not in left_out and (name == ".ci" or name[0] != ".")]
            names += [Path(folder, file).relative_to(root) for file in files if file != ".git"]
    return [name for name in dict.fromkeys(names) if (root / name).is_file()]  # a tracked file may be deleted


def is_owner(folder: Path) -> bool:
    """Whether this process made the copy in `folder`; xdist's workers and other children did not."""
    return folder.name.startswith(f"kit-tests-{os.getpid()}-")


def being_made() -> bool:
    """Whether the process that makes the side environments is still at work."""
    import psutil

    pid = int(os.environ.get(WAIT_FOR) or 0)
    return bool(pid) and psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def make_copy(root: Path, folder: Path) -> None:
    """Copy the files of `root` to `folder`, link its side environments, and commit the files when git is there."""
    for name in tracked_files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name)
    for name in SIDE_ENVIRONMENTS:
        if (root / name / ".installed").is_file() or being_made():  # else make was interrupted
            (folder / name).symlink_to((root / name).resolve())
    if shutil.which("git"):
        git = ["git", "-C", str(folder), "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
        ours = {"PATH": os.environ.get("PATH", os.defpath), **SET}
        for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "a copy"]):
            subprocess.run([*git, *words], env=ours, check=True, capture_output=True)


def environment(caller: Mapping[str, str], root: Path, copy: Path) -> dict[str, str]:
    """All that tests see of an environment."""
    found = {name: value for name, value in caller.items() if name in KEPT or name.startswith("LC_")}
    data = found.get("GRPO_KIT_DATA") or root.parent / "shared" / "data"
    found["GRPO_KIT_DATA"] = os.path.abspath(data)
    cache = found.get("GRPO_KIT_CACHE") or Path(caller.get("HOME") or root, ".cache", "grpo-kit")
    found["GRPO_KIT_CACHE"] = os.path.abspath(cache)
    (home := copy.with_name("home")).mkdir(exist_ok=True)
    # Compiled modules are kept: a hundred processes would each compile the kit's own.
    start = str(copy / "tests" / "start")  # its sitecustomize.py
    return {**found, **SET, "HOME": str(home), "PYTHONPATH": start, MARK: str(copy), CHECKOUT: str(root)}


def moved(argument: str, here: Path, copy: Path, is_file: bool) -> str:
    """An argument that names a file of the checkout, `a.py::test` or `--rootdir=…`, with the same file of the copy.

    Only files to collect are looked up from `here` on; a word like `eval` may be the value of `-k`.
    """
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    name, separator, test = value.partition("::")
    path = Path(os.path.abspath(here / name))
    if not (is_file or os.path.isabs(name)) or not path.is_relative_to(ROOT):
        return argument
    path = copy / path.relative_to(ROOT)
    return f"{option}{equals}{path}{separator}{test}" if path.exists() else argument


def enter(arguments: tuple[str, ...], files: list[str], here: Path, outputs: list[str]) -> None:
    """Replace this process by pytest in a fresh copy, with the same `arguments`.

    Those in `files` name what to collect, from `here` on. `outputs` are options for files to be written outside.
    """
    if is_owner(already := Path(os.environ.get(MARK, ROOT)).parent):
        sys.exit(f"error: pytest was started in {already} and took the tests of {ROOT} all the same: {arguments}")
    copy = Path(tempfile.mkdtemp(prefix=f"kit-tests-{os.getpid()}-")).resolve() / "kit"
    copy.mkdir()
    make_copy(ROOT, copy)
    below = here.relative_to(ROOT) if here.is_relative_to(ROOT) else Path()
    os.chdir(copy / below if (copy / below).is_dir() else copy)
    words = [moved(argument, here, copy, argument in files) for argument in arguments]
    command = [sys.executable, "-m", "pytest", *words, *outputs]
    os.execve(sys.executable, command, environment(os.environ, ROOT, copy))


def has_environment(name: str) -> bool:
    """Whether `.venv-<name>` is whole; waits for the process that makes it."""
    whole = ROOT / f".venv-{name}" / ".installed"
    while being_made() and not whole.is_file():
        time.sleep(0.2)
    return whole.is_file()


def side_environment(name: str) -> Path:
    """`.venv-<name>`. Without it the test is skipped; in CI, which makes them all, it fails."""
    import pytest

    if not has_environment(name):
        missing = f"needs .venv-{name}: make {name}"
        pytest.fail(f"{missing}; CI leaves no test out") if os.environ.get("CI") else pytest.skip(missing)
    return ROOT / f".venv-{name}"


def leave() -> None:
    """Remove the copy, in the process that made it."""
    if inside() and is_owner(ROOT.parent):
        os.chdir(tempfile.gettempdir())
        shutil.rmtree(ROOT.parent, ignore_errors=True)
