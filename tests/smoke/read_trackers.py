"""What a run's trackers hold, as JSON: {tracker: {"steps": {step: {name: number}}, "completions": [rows]}}.

Run by the Python of .venv-trackers with the run directory as argument, and with TRACKIO_DIR as in the run.
"""

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

STEP = "train/global_step"
WANDB_HEADER, BLOCK, PIECE = 7, 1 << 15, struct.Struct("<IHB")


def tensorboard(run: Path) -> dict:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0})
    events.Reload()
    steps: dict[int, dict] = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps[event.step][name] = event.value
    texts = [event for tag in events.Tags()["tensors"] if "completions" in tag for event in events.Tensors(tag)]
    table = [line.strip("| ").split(" | ") for line in texts[0].tensor_proto.string_val[0].decode().splitlines()]
    return {"steps": steps, "completions": [dict(zip(table[0], row, strict=True)) for row in table[2:]]}


def trackio(run: Path) -> dict:
    from trackio.sqlite_storage import SQLiteStorage

    steps, rows = defaultdict(dict), []
    for entry in SQLiteStorage.get_logs("huggingface", "tiny"):
        if table := entry.pop("completions", None):
            rows = rows or table["_value"]
        steps[entry[STEP] if STEP in entry else entry["step"]] |= entry
    return {"steps": steps, "completions": rows}


def logged(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after wandb's header: pieces of (checksum, length, type) in blocks of 32 KiB."""
    place, record = WANDB_HEADER, b""
    while place < len(content):
        if BLOCK - place % BLOCK < PIECE.size:  # too little for a piece: zeros
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(content, place)
        record += content[place + PIECE.size : place + PIECE.size + length]
        place += PIECE.size + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def wandb(run: Path) -> dict:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    steps: dict[int, dict] = defaultdict(dict)
    for data in logged(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if STEP in items:
            steps[items[STEP]] |= items
    tables = (file.parent / "files/media/table").glob("completions_*.json")
    first = min(tables, key=lambda path: int(path.name.split("_")[1]))  # the number of the log
    table = json.loads(first.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return {"steps": steps, "completions": rows}


if __name__ == "__main__":
    print(json.dumps({read.__name__: read(Path(sys.argv[1])) for read in (tensorboard, trackio, wandb)}, default=str))
