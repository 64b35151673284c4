"""The built-in tool `python`: the model's code runs in the sandbox of reward/, never in this process."""

from kit.environments.episode import UnknownEpisode
from kit.environments.tools import KEEPS_TIME, Tool, ToolFailed
from reward.sandbox import WALL_PER_CPU, Job, shared_sandbox

WORKERS = 2  # programs that run at once
MOST_CHARACTERS = 10_000  # of what a program prints
# Runs the code as an interpreter would, which shows the value of a last expression.
_PROGRAM = """
import ast, contextlib, io, traceback
def shown():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            names, body = {{"__name__": "__main__"}}, ast.parse({code!r}).body
            last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
            exec(compile(ast.Module(body, []), "code", "exec"), names)
            exec(compile(ast.Interactive(last), "code", "single"), names)
        except BaseException as error:
            print(*traceback.format_exception_only(error), sep="", end="")
    return printed.getvalue()[:{most}]
"""


def python_tool(timeout_s: float, isolation: str = "full") -> Tool:
    """The tool, with `timeout_s` seconds by the clock and a quarter of that in CPU time, after starting a sandbox.

    Raises `BadInput` if this machine allows less than `isolation`.
    """
    cpu_s = timeout_s / WALL_PER_CPU
    shared_sandbox(WORKERS, cpu_s, isolation=isolation).isolation()

    def python(code: str) -> str:
        """
        Runs a Python program and returns what it prints, or the value of its last expression.

        Args:
            code: The program. Only the standard library can be imported.
        """
        program = _PROGRAM.format(code=code, most=MOST_CHARACTERS)
        outcome = shared_sandbox(WORKERS, cpu_s, isolation=isolation).run_one(Job(program, (), (), shown="shown"))
        if not outcome.decided:
            raise UnknownEpisode("sandbox", outcome.error)
        if outcome.reason == "timeout":
            raise ToolFailed("timeout", f"the program took longer than {cpu_s:g} s of CPU time")
        if outcome.reason != "passed":
            raise ToolFailed("killed", "the program was killed: it used too much memory, or exited")
        return outcome.shown.strip() or "(no output)"

    setattr(python, KEEPS_TIME, True)  # the sandbox ends a program; waiting for a free one does not count
    return python
