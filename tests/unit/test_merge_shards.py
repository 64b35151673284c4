"""Files of parts that come as they are made: readable, aligned, and a fault of the writing thread is never lost."""

import json
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kit.core.checkpoint_files import INDEX
from kit.core.errors import CheckFailed
from kit.weights.checkpoint import checkpoint_shards
from kit.weights.shards import Behind, PartsFile, TensorFile, write_parts

PARTS = {
    "a.weight": torch.arange(21, dtype=torch.uint8).view(3, 7),  # 21 bytes: what follows would not be aligned
    "a.weight_scale": torch.randn(3, 1).bfloat16(),
    "b.weight": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "b.weight_shape": torch.tensor([4, 8]),
    "b.weight_packed": torch.arange(5, dtype=torch.int32),
    "c.scalar": torch.tensor(2.5),
    "c.empty": torch.zeros(0, 4, dtype=torch.float16),
    "ü.bias": torch.randn(3, dtype=torch.float64),
}


def test_parts_of_any_type_and_size_are_read_back_and_lie_aligned(tmp_path):
    with PartsFile(tmp_path / "x.safetensors", ["a", "b", "c", "ü"]) as out:
        for name, part in PARTS.items():
            out.write(name, part)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(PARTS)
    for name, part in PARTS.items():
        assert (found[name].dtype, found[name].shape) == (part.dtype, part.shape)
        assert torch.equal(found[name].view(torch.uint8), part.view(torch.uint8)) if part.ndim else found[name] == part
    for name, entry in out.header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % PARTS[name].element_size() == 0, name
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_name_that_comes_twice_and_a_header_without_room_are_errors(tmp_path):
    with pytest.raises(ValueError, match="holds a already"), PartsFile(tmp_path / "x", ["a"]) as out:
        out.write("a", torch.zeros(8))
        out.write("a", torch.zeros(8))
    with pytest.raises(ValueError, match="bytes of room"), PartsFile(tmp_path / "x", ["a"]) as out:
        for number in range(40):
            out.write(f"{number}.{'x' * 100}", torch.zeros(8))


def test_one_file_has_the_plain_name_and_several_an_index(tmp_path):
    def parts(name):
        return {f"{name}.x": torch.ones(4), f"{name}.y": torch.zeros(2)}

    for folder, shards in (("one", {"part.safetensors": ["a", "b"]}), ("two", {"1.safetensors": ["a"], "2": ["b"]})):
        (tmp_path / folder).mkdir()
        write_parts(tmp_path / folder, {**shards, "none.safetensors": []}, parts)
        found = checkpoint_shards(tmp_path / folder)
        assert sorted(name for names in found.values() for name in names) == ["a.x", "a.y", "b.x", "b.y"]
        assert list(found) == (["model.safetensors"] if folder == "one" else list(shards))


def test_a_piece_has_its_place_and_a_tensor_without_its_last_piece_is_missing(tmp_path):
    whole = torch.arange(10).float()
    with TensorFile(tmp_path / "x", {"a": (torch.float32, (2, 5))}, {}) as out:
        out.write("a", whole[:4], 0)
        out.write("a", whole[4:], 4)
    assert torch.equal(load_file(tmp_path / "x")["a"], whole.view(2, 5))
    for at, piece in ((8, whole[:4]), (0, whole[:4].double())):
        with pytest.raises(ValueError, match=r"has .* for it"):
            with TensorFile(tmp_path / "x", {"a": (torch.float32, (2, 5))}, {}) as out:
                out.write("a", piece, at)
    with pytest.raises(ValueError, match="lacks a"):
        with TensorFile(tmp_path / "x", {"a": (torch.float32, (2, 5))}, {}) as out:
            out.write("a", whole[:4], 0)


def test_several_threads_write_a_file_that_one_call_of_safetensors_would_write(tmp_path):
    tensors = {f"{number}": torch.full((1 + number % 7, 4096), number, dtype=torch.float32) for number in range(60)}
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}
    with TensorFile(tmp_path / "ours", kinds, {"format": "pt"}) as out, Behind(1 << 30, threads=8) as behind:
        for name in sorted(tensors):
            behind.run(1, out.write, name, tensors[name])
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_several_threads_compute_at_once_with_one_thread_of_torch_each():
    together, threads = threading.Barrier(3, timeout=60), []

    def call():
        together.wait()
        threads.append(torch.get_num_threads())

    with Behind(room=3, threads=3) as behind:
        for _ in range(3):
            behind.run(1, call)
    assert threads == [1, 1, 1]


def fail():
    raise CheckFailed("the disk is full")


@pytest.mark.parametrize("later", [0, 1, 5])
def test_a_fault_behind_is_raised_whatever_comes_after_it(later):
    with pytest.raises(CheckFailed, match="the disk is full"), Behind() as behind:
        behind.run(1, fail)
        for _ in range(later):
            behind.run(1, lambda: None)


def test_calls_run_in_order_and_no_more_of_them_wait_than_there_is_room_for():
    done, waiting, most = [], 0, 0
    lock = threading.Lock()

    def call(number):
        nonlocal waiting
        time.sleep(0.002)
        with lock:
            waiting -= 10
        done.append(number)

    with Behind(room=30) as behind:
        for number in range(20):
            behind.run(10, call, number)
            with lock:
                waiting += 10
                most = max(most, waiting)
    assert done == list(range(20))
    assert most <= 40  # what a call is counted as before it is done, and the one that is just added


def test_what_is_larger_than_the_room_runs_alone():
    with Behind(room=1) as behind:
        behind.run(5, time.sleep, 0.01)
        behind.run(5, time.sleep, 0)
        assert len(behind.calls) == 1


def test_a_fault_of_the_caller_does_not_wait_for_what_has_not_begun():
    begun = []
    with pytest.raises(KeyboardInterrupt), Behind(room=100) as behind:
        behind.run(1, time.sleep, 2.5)
        for number in range(5):
            behind.run(1, begun.append, number)
        raise KeyboardInterrupt
    assert begun == []


def test_a_call_that_has_no_room_beside_those_under_way_waits_for_them():
    free, order = threading.Event(), []
    with Behind(10) as behind:
        behind.run(6, lambda: (free.wait(5), order.append("first")))
        behind.run(4, order.append, "second")
        timer = threading.Timer(0.1, free.set)
        timer.start()
        behind.run(1, order.append, "third")  # 11 with the others
        assert order[:1] == ["first"] and free.is_set()
    assert order == ["first", "second", "third"]


def test_the_index_says_the_bytes_of_all_tensors(tmp_path):
    made = {"a": torch.ones(3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2, 2)}
    write_parts(tmp_path, {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}, lambda n: {n: made[n]})
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in made.values()) == 12 + 10 + 16
