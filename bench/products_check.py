"""Products of a process that CUDA's multi-process service keeps to a part of a card: relative errors by size.

    python bench/products_check.py --percent 100 90 70 50 --out products.json

For every percentage a process of its own multiplies random matrices of the sizes that the kit checks before it loads
(kit/weights/products.py) and two more, in BF16 and float32 by cuBLAS and, where the card has it, in FP8 as
`policy.compute fp8` does. The service runs for this command alone. In the file an error is null where the product has
NaN. Exit 1 if a product is off by more than the kit allows. Needs CUDA.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kit.core.cards import PART_OF_CARD, generation
from kit.core.run_directory import write_json

MORE = ((512, 4096, 4096), (10192, 4096, 12288))
FP8_ERROR = 0.06  # of rows rounded to FP8: .038 where products are right


def errors(rehearse: bool) -> dict:
    """Multiprocessors of this process, and the error of each product by its size."""
    import torch

    from kit.weights.products import SHAPES, product_error
    from kit.weights.stored_weight import quantize_rows, scaled_product

    if not (torch.cuda.is_available() or rehearse):
        raise SystemExit("no GPU here: --rehearse runs this command on a CPU")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    sizes = [*SHAPES, *MORE]
    if device.type == "cpu":
        sizes = [(rows // 64, 64, 64) for rows, *_ in sizes]
    found: dict[str, list[float]] = {"fp8": []}
    for dtype in (torch.bfloat16, torch.float32):
        found[str(dtype).removeprefix("torch.")] = [product_error(*size, device, dtype) for size in sizes]
    count = None
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
    if device.type == "cpu" or generation(torch.cuda.get_device_capability(device)).trainer_fp8:
        for rows, inputs, outputs in sizes:
            x, weight = (torch.randn(n, inputs, device=device, dtype=torch.bfloat16) for n in (rows, outputs))
            (left, by_row), (right, by_column) = quantize_rows(x), quantize_rows(weight)
            product = scaled_product(left, right, by_row, by_column.view(1, -1), torch.bfloat16)[:4].double().cpu()
            exact = x[:4].double().cpu() @ weight.double().cpu().T
            found["fp8"].append(((product - exact).norm() / exact.norm()).item())
    return {"sizes": sizes, "multiprocessors": count, "errors": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--percent", type=int, nargs="+", default=[100, 90, 80, 70, 60, 50, 40, 30])
    parser.add_argument("--rehearse", action="store_true", help="small sizes on a CPU, without the service")
    parser.add_argument("--out", type=Path, required=True, help="JSON with every number")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("FOUND " + json.dumps(errors(options.rehearse)))
        return
    rows, wrong = [], 0
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        # The service would number the cards anew from 0, and its clients read the variable by that.
        service = {name: value for name, value in environment.items() if name != "CUDA_VISIBLE_DEVICES"}
        if not options.rehearse:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=service, check=True)
        try:
            for percent in options.percent:
                words = [sys.executable, __file__, *sys.argv[1:], "--child"]
                mine = environment | {PART_OF_CARD: str(percent)}
                done = subprocess.run(words, env=mine, stdout=subprocess.PIPE, text=True, check=True)
                [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
                found = json.loads(line.removeprefix("FOUND "), parse_constant=lambda name: None)  # NaN, Infinity
                rows.append({"percent": percent} | found)
        finally:
            if not options.rehearse:
                subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)
    write_json(options.out, {"command": sys.argv, "rows": rows})
    from kit.weights.products import LARGEST_ERROR

    for row in rows:
        print(f"\n{row['percent']} %, {row['multiprocessors']} multiprocessors")
        for kind, bound in (("bfloat16", LARGEST_ERROR), ("float32", LARGEST_ERROR), ("fp8", FP8_ERROR)):
            for size, error in zip(row["sizes"], row["errors"][kind], strict=False):
                wrong += (is_wrong := error is None or error > bound)
                told = "NaN" if error is None else f"{error:.1e}"
                print(f"  {kind:9} {'x'.join(map(str, size)):>18} {told:>8}{'  WRONG' if is_wrong else ''}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
