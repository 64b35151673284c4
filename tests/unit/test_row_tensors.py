"""A step's rows as tensors: what TRL's own padding makes of them."""

import numpy as np
import pytest
import torch
from trl.trainer.utils import pad

from kit.rollout.policy_view import Rollouts
from kit.train.sampling import padded_rows, row_tensors

ROWS = {"several lengths": [[5, 6, 7], [8], [], [9, 10]], "equal lengths": [[1, 2], [3, 4]], "none": [[], []]}


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [np.int64, np.float32])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_are_padded_as_trl_pads_them(rows, kind, side, multiple):
    tensors = [torch.from_numpy(np.array(row, kind)) for row in rows]
    wanted = pad(tensors, padding_value=-3, padding_side=side, pad_to_multiple_of=multiple)
    found = torch.from_numpy(padded_rows(rows, -3, side, multiple, kind))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_step_has_ids_masks_and_the_samplers_log_probs():
    made = Rollouts([[7, 8], [9]], [[-0.5, -0.25], [-1.0]], 1)
    found = row_tensors([[1, 2, 3], [4]], made, [False, True], 0, None, torch.device("cpu"))
    wanted = {
        "prompt_ids": [[1, 2, 3], [0, 0, 4]],
        "prompt_mask": [[1, 1, 1], [0, 0, 1]],
        "completion_ids": [[7, 8], [9, 0]],
        "completion_mask": [[1, 1], [0, 0]],  # a completion that was cut at its limit is masked
        "sampling_per_token_logps": [[-0.5, -0.25], [-1.0, 0.0]],
    }
    assert {name: value.tolist() for name, value in found.items()} == wanted
    kinds = {name: torch.int64 for name in wanted} | {"sampling_per_token_logps": torch.float32}
    assert {name: value.dtype for name, value in found.items()} == kinds
