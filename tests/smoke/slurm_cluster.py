"""Hosts, Slurm commands and sides of a run to execute the bodies of sbatch scripts with, all on this machine.

The hosts are 127.0.0.2 and up. `srun` runs its command here under the name of the host; `scontrol` lists the hosts and
notes a requeue. In place of the interpreter and of accelerate stand programs that listen, connect, write checkpoints
and end as servers and trainer do, and note what they were called with. Run as a program, this file is those two.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import processes  # noqa: E402

SRUN = """#!/usr/bin/env bash
count=1 hosts=()
while [[ $1 == --* ]]; do
  case $1 in
    --ntasks=*) count=${1#*=} ;;
    --nodelist=*) IFS=, read -ra hosts <<< "${1#*=}" ;;
    --nodes=* | --kill-on-bad-exit=1) ;;
    *) echo "srun: unrecognized option '$1'" >&2; exit 1 ;;
  esac
  shift
done
pids=() code=0
trap 'kill -TERM "${pids[@]}"' TERM
for ((rank = 0; rank < count; rank++)); do
  SLURM_PROCID=$rank SLURMD_NODENAME=${hosts[rank]} "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2> /dev/null; do wait "$pid"; ended=$?; done
  ((ended == 0)) || code=$ended
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show && $2 == hostnames ]]; then tr , '\\n' <<< "$3"; else echo "$*" >> "$CLUSTER/requeued"; fi
"""
SHORT_SLEEP = "#!/usr/bin/env bash\nexec /bin/sleep 0.05\n"  # job.sh looks once a second


class Cluster:
    """A checkout on a shared file system with the stand-ins; `submit` runs a script as Slurm would."""

    def __init__(self, folder: Path, real: bool = False):
        self.folder, self.stubs, self.calls_file = folder, folder / "slurm-bin", folder / "calls.jsonl"
        self.stubs.mkdir(parents=True)
        for name in ("kit", "launch", "recipes", "accelerate_configs", "merge", "reward") if real else ("launch",):
            (folder / name).symlink_to(ROOT / name)
        commands = {self.stubs / "srun": SRUN, self.stubs / "scontrol": SCONTROL}
        if real:
            (folder / ".venv").symlink_to(Path(sys.prefix))
        else:
            (folder / ".venv/bin").mkdir(parents=True)
            commands[self.stubs / "sleep"] = SHORT_SLEEP
            for name in ("python", "accelerate"):
                text = f'#!/usr/bin/env bash\nexec {sys.executable} {Path(__file__)} {name} "$@"\n'
                commands[folder / ".venv/bin" / name] = text
        for path, text in commands.items():
            path.write_text(text)
            path.chmod(0o755)

    def submit(self, script: str, hosts: int, restarts: int = 0, **environment: str) -> subprocess.Popen:
        """The batch shell, on the first host."""
        path = self.folder / "job.sbatch"
        path.write_text(script)
        names = [f"127.0.0.{number}" for number in range(2, hosts + 2)]
        variables = {
            **os.environ,
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "CLUSTER": str(self.folder),
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "42",
            "SLURM_JOB_NAME": "job",
            "SLURM_JOB_NODELIST": ",".join(names),
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_CPUS_PER_TASK": "2",
            "SLURMD_NODENAME": names[0],
        }
        variables.pop("VLLM_API_KEY", None)
        return subprocess.Popen(
            ["bash", str(path)],
            env=variables | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def calls(self, what: str) -> list[dict]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [call for call in map(json.loads, lines) if call["what"] == what]

    def wait_for(self, path: str) -> None:
        processes.wait_until(lambda: any(self.folder.glob(path)))

    @property
    def requeued(self) -> bool:
        return (self.folder / "requeued").exists()


def words_of(arguments: list[str]) -> dict[str, str]:
    """Options and their values, the last of each."""
    found = {}
    for word, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            found[name] = value if equals else after
    return found


def note(what: str, arguments: list[str]) -> None:
    facts = {"what": what, "host": os.environ["SLURMD_NODENAME"], "arguments": arguments, "pid": os.getpid()}
    facts["key"] = os.environ.get("VLLM_API_KEY")
    with open(Path(os.environ["CLUSTER"]) / "calls.jsonl", "a") as file:
        file.write(json.dumps(facts) + "\n")


def address(arguments: list[str]) -> tuple[str, int]:
    host, port = re.findall(r"http://([\d.]+):(\d+)", words_of(arguments)["--rollout.server_urls"])[0]
    return host, int(port)


def serve(arguments: list[str]) -> None:
    """Stand-in of launch.server: answers on its host to those who know the key, until SIGTERM."""
    note("servers", arguments)
    _, port = address(arguments)
    if dies_after := os.environ.get("SERVER_DIES_AFTER_S"):
        threading.Timer(float(dies_after), lambda: (print("CUDA out of memory", flush=True), os._exit(3))).start()

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # srun and the job may both send one
        note("servers ended", [])
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    with socket.create_server((os.environ["SLURMD_NODENAME"], port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                given = connection.recv(100).decode()
                connection.sendall(b"ready" if given == os.environ["VLLM_API_KEY"] else b"401")


def train(arguments: list[str], has_server: bool = True) -> None:
    """Stand-in of the recipe: waits for the server, then a checkpoint at every second of ten steps. Without a server
    that of launch.up, which is all of a job on one node."""
    note("trainer", arguments)
    if os.environ.get("SLURM_PROCID", "0") != "0":
        return
    run = Path(os.environ["RUN"])
    steps = sorted(run.glob("checkpoints/step-*"))
    if (run / "base.json").exists() and not ("--resume" in arguments and steps):
        sys.exit("holds a run already")
    while has_server:
        try:
            with socket.create_connection(address(arguments), timeout=5) as connection:
                connection.sendall(os.environ["VLLM_API_KEY"].encode())
                if connection.recv(100) != b"ready":
                    sys.exit("answered 401")
                break
        except ConnectionRefusedError:
            time.sleep(0.02)
    run.mkdir(parents=True, exist_ok=True)
    (run / "base.json").write_text("{}")
    for step in range(int(steps[-1].name[5:]) + 1 if steps else 1, 11):
        time.sleep(float(os.environ.get("STEP_S", "0.02")))
        if step == int(os.environ.get("FAILS_AT", "0")):
            print("loss is nan", flush=True)
            sys.exit(7)
        if step % 2 == 0:
            (run / f"checkpoints/step-{step:06d}").mkdir(parents=True)
    note("trainer done", [])


def main() -> None:
    program, *arguments = sys.argv[1:]
    if program == "accelerate":
        train(arguments)
    elif arguments[:2] == ["-m", "launch.up"]:
        train(arguments[2:], has_server=False)
    elif arguments[:2] == ["-m", "launch.server"]:
        serve(arguments[2:])
    elif arguments[:3] == ["-m", "merge", "base"]:
        note("base", arguments)
        base = Path(os.environ["BASE"])
        base.mkdir(parents=True)
        (base / "manifest.json").write_text("{}")
    else:
        sys.exit(f"nothing stands in for {sys.argv[1:]}")


if __name__ == "__main__":
    main()
