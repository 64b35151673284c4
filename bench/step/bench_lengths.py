"""A vLLM plugin for benchmarks: the completions of a group get lengths from a list, whatever they say.

vLLM loads it through the entry point that `servers.write_plugin` puts beside it. BENCH_LENGTHS names a JSON file,
{"first": lengths of what comes first, "then": those that follow, again and again}, which is read again when it
changed. A group of ours takes its place from the number in its request's id, so that several replicas give a step the
lengths that one would; other groups take theirs in the order in which they arrive. So every step of as many
completions has the same lengths. Nothing but the count ends a completion, and no logit is changed. Requests for one
completion (a canary, a score) are left alone. Written for vllm 0.26 to 0.31.
"""

import copy
import json
import os
import re
from typing import Any

OUR_NUMBER = re.compile(r"-v\d+-(\d+)\b")  # kit/rollout/dispatch.py: session, version, number of the group


class Lengths:
    """The list of a file, and how many of it were taken since it was read."""

    def __init__(self, file: str):
        self.file, self.first, self.then, self.written, self.taken = file, [], [1], None, 0

    def place(self, request_id: str, count: int) -> int:
        """Where the lengths of the next group of `count` completions begin."""
        written = os.stat(self.file).st_mtime_ns
        if written != self.written:
            with open(self.file) as stream:
                found = json.load(stream)
            self.first, self.then, self.written, self.taken = found["first"], found["then"], written, 0
        if number := OUR_NUMBER.search(request_id):
            return int(number.group(1)) * count
        self.taken += count
        return self.taken - count

    def at(self, place: int) -> int:
        return self.first[place] if place < len(self.first) else self.then[(place - len(self.first)) % len(self.then)]


def install() -> None:
    """Wrap vLLM's parameters of the completions of a group; nothing without BENCH_LENGTHS."""
    file = os.environ.get("BENCH_LENGTHS")
    if not file:
        return
    from vllm.v1.engine.parallel_sampling import ParentRequest

    original = ParentRequest.get_child_info
    if getattr(original, "gives_lengths", False):
        return
    lengths = Lengths(file)

    def get_child_info(self: Any, index: int) -> tuple[str, Any]:
        name, shared = original(self, index)
        if not hasattr(self, "first_length"):
            self.first_length = lengths.place(str(getattr(self, "request_id", "")), self.sampling_params.n)
        params = copy.copy(shared)
        params.max_tokens = lengths.at(self.first_length + index)
        params.ignore_eos, params.stop_token_ids, params.min_tokens = True, [], 0
        for key, value in (("_eos_token_id", None), ("_all_stop_token_ids", set())):
            if hasattr(params, key):
                setattr(params, key, value)
        return name, params

    get_child_info.gives_lengths = True
    ParentRequest.get_child_info = get_child_info
