"""What a worker does with an adapter, on a CPU: reads its file in pieces, whole or not at all, and adds its update."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from kit.rollout.server.remerge import add_update, read_tensors

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


@pytest.mark.parametrize("left", [0, 5, 100, 1 << 20, (1 << 20) + 1, 5_000_000, -1, -8])
def test_a_file_that_is_cut_is_refused(big_file, left):
    big_file.write_bytes(big_file.read_bytes()[:left])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        read_tensors(big_file, CPU)


def test_the_update_is_added_once_with_its_scale_and_sign():
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((48, 64), (4, 64), (48, 4)))
    expected = weight.double() + 2.0 * (b.double() @ a.double())
    add_update(weight, a, b, 2.0)
    # Rounded once to bfloat16, whose numbers lie at most 2^-8 of themselves from what they stand for.
    assert ((weight.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
