"""recipes/tiny_base.py with all its arithmetic in float64: the same model on every CPU.

In float32 another instruction set adds in another order, and 200 steps of training make another model of the
rounding: other samples, other rewards. In float64 two CPUs end 1e-11 apart, and the model is stored in BF16. How far
apart grows with the training: 300 steps at a learning rate of 5e-3 ended 7e-5 apart.

A program, not a function: Qwen3 asks for float32 by name in its norms, its rotary embedding and its loss, so the name
is given to float64, which no test process should live with. It takes what recipes/tiny_base.py takes.
"""

import torch

if __name__ == "__main__":
    from kit.core.errors import run_command
    from recipes.tiny_base import main

    torch.set_default_dtype(torch.float64)
    torch.float = torch.float32 = torch.float64
    torch.Tensor.float = torch.Tensor.double
    run_command(main)
