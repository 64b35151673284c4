"""Four gloo processes that split the tokens of packs compute what each computes alone."""

import os
import sys

import pytest
import torch

from tests import processes


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int | str, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("sequences") / "found.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "4"]
    command += ["tests/smoke/sequence_worker.py", str(out)]
    done = processes.run(command, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("size", [2, 4])
def test_log_probs_and_entropies_are_those_of_whole_rows(found, size):
    """With 2 heads of keys and values, also where four processes share them."""
    for name in ("logps", "entropies"):
        torch.testing.assert_close(found[size][name], found[1][name], atol=2e-6, rtol=1e-5)
    assert found[1]["logps"].ne(0).sum() == 7 + 3 + 5 + 1 + 6


@pytest.mark.parametrize(("size", "alone"), [(2, 1), (4, "first")])
def test_gradients_are_those_of_the_same_rows_in_processes_of_their_own(found, size, alone):
    """Two groups with the rows that two of four processes have each, and one group with the rows of all."""
    names = [name for name in found[alone] if name.endswith("weight")]
    assert len(names) == 6
    for name in names:
        scale = found[alone][name].abs().max()
        assert scale > 1e-3, name
        torch.testing.assert_close(found[size][name], found[alone][name], atol=float(1e-5 * scale), rtol=1e-4)
    assert not torch.allclose(found[1][names[0]], found["first"][names[0]], rtol=0.1)
