"""A vLLM plugin for benchmarks: completions of a group get their lengths from a list, whatever their text.

vLLM loads it through the entry point that `servers.write_plugin` puts beside it. BENCH_LENGTHS names a JSON file,
{"first": initial lengths, "then": lengths that follow, repeated}, which is read again whenever it changes. A group of
ours takes its position from the number in its request's id, so that several replicas give a step the same lengths as
one would; other groups take theirs in order of arrival. So all steps with equally many completions have the same
lengths. Only the count ends a completion, and no logit is changed. Requests for one completion (a canary, a score) are
left alone. Written for vllm 0.26 to 0.31.
"""

import copy
import json
import os
import re
from typing import Any

OUR_NUMBER = re.compile(r"-v\d+-(\d+)\b")  # kit/rollout/dispatch.py: session, version, number of the group


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
        if number := OUR_NUMBER.search(request_id):
            return int(number.group(1)) * count
        self.taken += count
        return self.taken - count

    def at(self, place: int) -> int:
        return self.first[place] if place < len(self.first) else self.then[(place - len(self.first)) % len(self.then)]


def install() -> None:
    """Wrap how vLLM makes the parameters of a group's completions; no-op without BENCH_LENGTHS."""
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
