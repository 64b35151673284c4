"""How a worker reads an adapter's file, on a CPU: in several pieces at once, whole or not at all."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.remerge import read_tensors

CPU = torch.device("cpu")


@pytest.fixture
def big_file(tmp_path):
    # 12 MB, so that each of the four readers has a piece; odd sizes, so that none begins where a tensor does.
    tensors = {f"layer.{i}": torch.randn(501, 1003, generator=torch.Generator().manual_seed(i)) for i in range(6)}
    tensors |= {"half": torch.randn(7, 3).bfloat16(), "empty": torch.zeros(0, 4)}
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    return path


def test_pieces_read_at_once_are_the_file(big_file):
    expected, read = load_file(big_file), read_tensors(big_file, CPU)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name


@pytest.mark.parametrize("left", [0, 5, 100, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_a_file_that_is_cut_is_refused(big_file, left):
    big_file.write_bytes(big_file.read_bytes()[:left])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read_tensors(big_file, CPU)
