"""The program inside the code sandbox: a fork server and, for every sample, a judge and a candidate.

    parent (trainer)  --job-->  judge      the hidden tests; never runs the model's code
                                  |  plain values, both ways
                                candidate  the model's code; never sees the tests

The fork server holds neither: it forks a judge, the judge forks the candidate, and only then does the judge read the
job from the pipe that all three inherited (the candidate closes its end first). So there are no tests in the
candidate's memory to find. `reward.sandbox` runs this file as a script; standard library only.

Frames are four bytes of length and JSON. Job: {"prompt", "code", "setup", "tests", "names"}. Verdict:
{"passed", "total", "reason"}.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import time
import types

MAX_JOB_BYTES = 8 << 20
BOX_MIB = 16
OPEN_FILES = 64
REPORT_GRACE_S = 2.0  # the judge keeps time; the server's limit on the judge is this much later
# Modules that solutions import most; loaded once, so that a sample does not pay for them.
PRELOADED = (
    "abc array ast bisect calendar cmath collections.abc copy csv dataclasses datetime decimal enum fractions "
    "functools hashlib heapq inspect io itertools logging math numbers operator pprint queue random re "
    "statistics string struct textwrap threading traceback typing unicodedata uuid warnings zlib bz2 "
    "concurrent.futures contextlib encodings.idna encodings.ascii encodings.latin_1"
).split()


# This folder as a package under another name: on sys.path it would make `import math` find reward/math.py, and as
# `reward` it would import the rest of the kit.
_package = types.ModuleType("sandbox_parts")
_package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
sys.modules["sandbox_parts"] = _package
kernel = importlib.import_module("sandbox_parts.sandbox_kernel")
values = importlib.import_module("sandbox_parts.sandbox_values")
Line, run_tests = (getattr(importlib.import_module("sandbox_parts.sandbox_judge"), n) for n in ("Line", "run_tests"))
pipe = importlib.import_module("sandbox_parts.sandbox_pipe")
failed, read_frame, write_frame, wait = pipe.failed, pipe.read_frame, pipe.write_frame, pipe.wait
_NULL = os.open(os.devnull, os.O_RDWR)  # opened before the root that has no /dev


# ------------------------------------------------------------------------------------------------------- candidate


def candidate(requests: int, replies: int, how: dict) -> None:
    """The process that runs the model's code. Does not return."""
    _close_all_but(requests, replies)
    try:
        os.setsid()  # out of the judge's process group
        if "mount" in how["parts"]:
            kernel.mount_box(BOX_MIB)
            os.chdir(kernel.BOX)
        else:
            os.chdir(how["scratch"])
        os.environ.clear()
        os.environ.update({"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "LC_ALL": "C.UTF-8"})
        rules = kernel.FileRules(os.getcwd()) if "landlock" in how["parts"] else None
        kernel.limit(math.ceil(how["timeout_s"]), how["memory_bytes"], 1 << 20, OPEN_FILES, 1)
        kernel.drop_privileges()
        kernel.die_with_parent()
        if rules:
            rules.enforce()
        if "seccomp" in how["parts"]:
            kernel.filter_system_calls(files_writable="mount" in how["parts"])
    except Exception as error:
        write_frame(replies, json.dumps(["sandbox", f"{type(error).__name__}: {error}"]).encode())
        os._exit(1)
    write_frame(replies, b'["ready"]')
    with contextlib.suppress(BaseException):
        _answer_calls(requests, replies)
    os._exit(1)


def _answer_calls(requests: int, replies: int) -> None:
    program = json.loads(read_frame(requests, MAX_JOB_BYTES, float("inf")))
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    try:
        _run_program(program, module.__dict__)
        reply = b'["ran"]'
    except BaseException as error:
        reply = json.dumps(["raised", *_described(error)]).encode()
    write_frame(replies, reply)
    while True:
        name, arguments = json.loads(read_frame(requests, MAX_JOB_BYTES, float("inf")))
        try:
            positional, keywords = values.decode(arguments.encode())
            reply = b"v" + values.encode(module.__dict__[name](*positional, **keywords))
        except BaseException as error:
            reply = b"e" + json.dumps(_described(error)).encode()
        write_frame(replies, reply)


def _run_program(program: dict, namespace: dict) -> None:
    """Run the prompt's code, then the completion's; code that is only a function's body continues the prompt."""
    prompt, code = program["prompt"], program["code"]
    try:
        compiled = compile(code, "solution.py", "exec")
    except SyntaxError:
        if not prompt or not code[:1].isspace():
            raise
        compiled, prompt = compile(f"{prompt.rstrip()}\n{code.strip(chr(10))}\n", "solution.py", "exec"), ""
    if prompt:
        exec(compile(prompt, "prompt.py", "exec"), namespace)
    exec(compiled, namespace)


def _described(error: BaseException) -> list[str]:
    try:
        text = str(error)[:300]
    except BaseException:
        text = ""
    return [type(error).__name__, text]


def _close_all_but(*kept: int) -> None:
    _close_standard_streams()
    low = 3
    for descriptor in (*sorted(kept), 1 << 16):
        os.closerange(low, descriptor)
        low = descriptor + 1


def _close_standard_streams() -> None:
    for standard in (0, 1, 2):
        os.dup2(_NULL, standard)


# ----------------------------------------------------------------------------------------------------------- judge


def judge(report: int, how: dict) -> None:
    """The process that runs the tests. Does not return."""
    child = 0
    try:
        child, requests, replies = _fork_candidate(how)
        os.write(report, child.to_bytes(4, "big"))
        line = Line(requests, replies)
        deadline = time.monotonic() + 30.0  # for the isolation; the sample's own time starts once it is up
        ready = json.loads(read_frame(replies, 1 << 16, deadline))
        job = json.loads(read_frame(0, MAX_JOB_BYTES, deadline))
        os.write(report, b"r")
        if ready != ["ready"]:
            verdict = failed("sandbox", error=str(ready[1:]))
        else:
            _restrict_judge(how)
            line.deadline = time.monotonic() + how["wall_s"]
            verdict = run_tests(job, line)
    except BaseException as error:
        verdict = failed("sandbox", error=f"{type(error).__name__}: {error}")
    if child:
        os.kill(child, signal.SIGKILL)
        _, _, used = os.wait4(child, 0)
        if verdict["reason"] == "died" and used.ru_utime + used.ru_stime > how["timeout_s"] - 0.5:
            verdict["reason"] = "timeout"  # the kernel's limit on CPU time
    write_frame(report, json.dumps(verdict).encode())
    os._exit(0)


def _fork_candidate(how: dict) -> tuple[int, int, int]:
    """Fork a candidate, in namespaces of its own if possible; return its pid, its requests and its replies."""
    (request_end, requests), (replies, reply_end) = os.pipe(), os.pipe()
    flags = (kernel.NEW_PID if "pid" in how["parts"] else 0) | (kernel.NEW_MOUNT if "mount" in how["parts"] else 0)
    if flags:
        kernel.unshare(flags)
    child = os.fork()
    if child == 0:
        candidate(request_end, reply_end, how)
    os.close(request_end)
    os.close(reply_end)
    return child, requests, replies


def _restrict_judge(how: dict) -> None:
    _close_standard_streams()
    kernel.limit(_judge_cpu_s(how), 2 * how["memory_bytes"], 0, OPEN_FILES, 1)
    kernel.drop_privileges()
    kernel.die_with_parent()
    if "seccomp" in how["parts"]:
        kernel.filter_system_calls(files_writable=False, may_kill=True)


# ----------------------------------------------------------------------------------------------------- fork server


def serve(how: dict, parent: int) -> None:
    """Judge one job after another until the parent closes the pipe or is gone."""
    answers = os.dup(1)
    os.dup2(_NULL, 1)
    write_frame(answers, json.dumps({"isolation": sorted(how["parts"]), "missing": how["missing"]}).encode())
    gc.collect()
    gc.freeze()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while os.getppid() == parent:
        events = poll.poll(1000)
        if not events:
            continue
        if not events[0][1] & select.POLLIN:
            break
        verdict = _one_sample(how, parent)
        if verdict is None:
            break
        write_frame(answers, verdict)
        if b'"leaving"' in verdict:
            break


def _one_sample(how: dict, parent: int) -> bytes | None:
    """Return the judge's verdict as written, None if the parent is gone. Leaves no process of the sample behind."""
    scratch = how["scratch"]
    if "mount" not in how["parts"]:
        shutil.rmtree(scratch, ignore_errors=True)
        os.mkdir(scratch, 0o700)
        if os.geteuid() == 0:
            os.chown(scratch, kernel.NOBODY, kernel.NOBODY)
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(here)
        judge(there, how)
    os.close(there)
    candidate_pid, consumed, data = 0, False, None
    try:
        candidate_pid = int.from_bytes(_patient_read(here, 4, parent, 60.0), "big")
        consumed = _patient_read(here, 1, parent, 60.0) == b"r"
        limit_s = how["wall_s"] + REPORT_GRACE_S
        size = int.from_bytes(_patient_read(here, 4, parent, limit_s), "big")
        data = _patient_read(here, size, parent, limit_s)
    except TimeoutError:  # the tests themselves hang on the candidate's values
        data = json.dumps(failed("timeout")).encode()
    except EOFError:
        reason, pid = _why_judge_ended(pid, how), 0
        data = json.dumps(failed(reason)).encode()
    except ConnectionAbortedError:
        data = None
    os.close(here)
    _end_children({pid, candidate_pid} - {0})
    if "mount" not in how["parts"]:
        shutil.rmtree(scratch, ignore_errors=True)
    if data is not None and not consumed:  # half a job may be left in the pipe
        return json.dumps(failed("sandbox", leaving=True)).encode()
    return data


def _why_judge_ended(pid: int, how: dict) -> str:
    """ "timeout" if the kernel ended the judge for its CPU time: the tests computed with a value of the candidate that
    takes too long, as when they hang by the clock. Else "judge", which is no verdict."""
    os.kill(pid, signal.SIGKILL)  # if it only closed the pipe
    _, _, used = os.wait4(pid, 0)
    return "timeout" if used.ru_utime + used.ru_stime > _judge_cpu_s(how) - 0.5 else "judge"


def _judge_cpu_s(how: dict) -> int:
    return math.ceil(how["timeout_s"]) + 2


def _patient_read(descriptor: int, size: int, parent: int, limit_s: float) -> bytes:
    """Read `size` bytes; `ConnectionAbortedError` within a second of the parent's end."""
    deadline, data = time.monotonic() + limit_s, b""
    while len(data) < size:
        if os.getppid() != parent:
            raise ConnectionAbortedError
        try:
            wait(descriptor, select.POLLIN, min(deadline, time.monotonic() + 1.0))
        except TimeoutError:
            if time.monotonic() >= deadline:
                raise
            continue
        if not (part := os.read(descriptor, size - len(data))):
            raise EOFError("the judge has ended")
        data += part
    return data


def _end_children(known: set[int]) -> None:
    """Kill and reap the judge, the candidate and any other descendants; orphans were reparented to this process.

    The candidate is the first process of its pid namespace: the kernel kills everything in it along with it.
    """
    while True:
        for pid in known | set(_children()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            known -= {os.waitpid(-1, 0)[0]}
        except ChildProcessError:
            return


def _children() -> list[int]:
    with contextlib.suppress(OSError), open("/proc/self/task/self/children") as children:
        return [int(pid) for pid in children.read().split()]
    return []  # without /proc the pid namespace and the parent-death signal cover it


def isolate(how: dict) -> None:
    """Enter the strongest isolation that this machine allows and store it in `how["parts"]`; `SystemExit` if none."""
    spaces = ("mount", "net", "ipc", "pid")
    attempts = [
        (*spaces, "seccomp"),
        ("user", *spaces, "seccomp"),
        ("net", "ipc", "pid", "landlock", "seccomp"),
        ("user", "net", "ipc", "pid", "landlock", "seccomp"),
        spaces,
        ("user", *spaces),
        ("landlock", "seccomp"),
        ("seccomp",),
    ]
    if os.geteuid() == 0:  # in its own user namespace it could not become nobody
        attempts.remove(("user", "net", "ipc", "pid", "landlock", "seccomp"))
    for parts in attempts:
        if not set(parts) & set(how["refused"]) and (error := _rehearse(parts, how)) is None:
            how["parts"] = parts
            break
        how["missing"].append(f"{' '.join(parts)}: {'not wanted' if set(parts) & set(how['refused']) else error}")
    else:
        raise SystemExit(
            "this machine allows neither namespaces nor a system call filter: " + "; ".join(how["missing"])
        )
    _enter(how["parts"])


def _rehearse(parts: tuple[str, ...], how: dict) -> str | None:
    """Try the isolation in a process that then exits; return the error, or None if every step worked."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        error = ""
        try:
            _enter(parts)
            child, _, replies = _fork_candidate(how | {"parts": parts, "scratch": "/"})
            answer = read_frame(replies, 1 << 16, time.monotonic() + 20.0)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            error = "" if answer == b'["ready"]' else answer.decode()
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
        os.write(there, error.encode()[:4000])
        os._exit(0)
    os.close(there)
    _, status = os.waitpid(pid, 0)
    said = os.read(here, 4096).decode(errors="replace")
    os.close(here)
    return None if status == 0 and not said else said or f"ended with status {status}"


def _enter(parts: tuple[str, ...]) -> None:
    named = {"mount": kernel.NEW_MOUNT, "net": kernel.NEW_NET, "ipc": kernel.NEW_IPC | kernel.NEW_UTS}
    flags = sum(flag for name, flag in named.items() if name in parts)
    if "user" in parts:
        kernel.enter_user_namespace(flags)
    elif flags:
        kernel.unshare(flags)
    if "mount" in parts:
        kernel.private_root()


def main() -> None:
    parent, how = int(sys.argv[1]), json.loads(sys.argv[2])
    how |= {"parts": (), "missing": []}
    for name in PRELOADED:
        importlib.import_module(name)
    random.seed(0)
    kernel.adopt_orphans()
    isolate(how)
    kernel.hide_memory()
    serve(how, parent)


if __name__ == "__main__":
    main()
