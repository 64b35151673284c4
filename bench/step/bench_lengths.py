"""A vLLM plugin for benchmarks: completions of a group get their lengths from a list, whatever their text.

vLLM loads it through the entry point that `servers.write_plugin` puts beside it. BENCH_LENGTHS names a JSON file,
{"first": initial lengths, "then": lengths that follow, repeated}, which is read again whenever it changes. A group of
ours takes its position from the version and number in its request's id, so that several replicas give a step the same
lengths as one would; other groups take theirs in order of arrival. So all steps with equally many completions have the
same lengths. Only the count ends a completion, and no logit is changed. Requests for one completion (a canary, a
score) are left alone, but not in TRL's colocated mode, which asks for every completion by itself: there each process
names its part of a step, "1/2", in BENCH_LENGTHS_PART, and its engine gives the lengths of that part. Written for vllm
0.26 to 0.31.
"""

import copy
import json
import os
import re
from typing import Any

OUR_NUMBER = re.compile(r"-v(\d+)-(\d+)\b")  # kit/rollout/dispatch.py: session, version, number in the version


class Lengths:
    """The list of a file, and how many of its lengths were taken since it was read."""

    def __init__(self, file: str):
        self.file, self.first, self.then, self.written, self.taken = file, [], [1], None, 0

    def place(self, request_id: str, count: int) -> int:
        """Position in the list where the lengths of the next group of `count` completions begin."""
        written = os.stat(self.file).st_mtime_ns
        if written != self.written:
            with open(self.file) as stream:
                found = json.load(stream)
            self.first, self.then, self.written, self.taken = found["first"], found["then"], written, 0
        if found := OUR_NUMBER.search(request_id):
            version, number = map(int, found.groups())  # a step's numbers follow each other, from anywhere
            return version * len(self.then) + number * count % len(self.then)
        self.taken += count
        return self.taken - count

    def next_of(self, part: int, parts: int) -> int:
        """Length of the next completion of a process that samples this part of every step."""
        taken, each = self.place("", 1), len(self.then) // parts
        step, number = divmod(taken, each)
        return self.at(step * len(self.then) + part * each + number)

    def at(self, place: int) -> int:
        return self.first[place] if place < len(self.first) else self.then[(place - len(self.first)) % len(self.then)]


def install() -> None:
    """Wrap how vLLM makes the parameters of a group's completions; no-op without BENCH_LENGTHS."""
    if file := os.environ.get("BENCH_LENGTHS"):
        wrap_groups(Lengths(file))
        if part := os.environ.get("BENCH_LENGTHS_PART"):
            wrap_engine(Lengths(file), *map(int, part.split("/")))


def ended_at(shared: Any, length: int) -> Any:
    """Copy of sampling parameters whose completion ends at this length and nowhere else."""
    params = copy.copy(shared)
    params.max_tokens, params.ignore_eos, params.stop_token_ids, params.min_tokens = length, True, [], 0
    for key, value in (("_eos_token_id", None), ("_all_stop_token_ids", set())):
        if hasattr(params, key):
            setattr(params, key, value)
    return params


def wrap_groups(lengths: Lengths) -> None:
    from vllm.v1.engine.parallel_sampling import ParentRequest

    original = ParentRequest.get_child_info
    if getattr(original, "gives_lengths", False):
        return

    def get_child_info(self: Any, index: int) -> tuple[str, Any]:
        name, shared = original(self, index)
        if not hasattr(self, "first_length"):
            self.first_length = lengths.place(str(getattr(self, "request_id", "")), self.sampling_params.n)
        return name, ended_at(shared, lengths.at(self.first_length + index))

    get_child_info.gives_lengths = True
    ParentRequest.get_child_info = get_child_info


def wrap_engine(lengths: Lengths, part: int, parts: int) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    original = LLMEngine.add_request
    if getattr(original, "gives_lengths", False):
        return

    def add_request(self: Any, request_id: str, prompt: Any, params: Any, *others: Any, **keys: Any) -> Any:
        return original(self, request_id, prompt, ended_at(params, lengths.next_of(part, parts)), *others, **keys)

    add_request.gives_lengths = True
    LLMEngine.add_request = add_request
