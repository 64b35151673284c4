"""AWQ by llm-compressor, run by the Python of its own environment; imports nothing from the kit.

    .venv-llmcompressor/bin/python -I merge/awq.py request.json

The request names the BF16 checkpoint, the output directory, the linear layers to leave unquantized, and the
calibration sequences as token ids. `calibrated.py` writes the request, and the files beside the weights that complete
the checkpoint.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM


def main(request: dict) -> None:
    if not torch.accelerator.is_available():
        # llm-compressor 0.14.0.1 pins memory for copies to an accelerator even if there is none, which raises.
        IntermediatesCache.pin_memory = lambda *_, **__: None
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.bfloat16, trust_remote_code=False)
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = request["group"]
    sequences = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in request["sequences"]]
    oneshot(
        model=model,
        dataset=Dataset.from_list(sequences),
        recipe=[
            # The search over activations alone also tries no scaling; the one over activations and weights does not.
            AWQModifier(duo_scaling="both"),
            # Symmetric INT4 in w4a16's groups, so that the two formats differ only in the scaling.
            QuantizationModifier(config_groups={"group_0": scheme}, ignore=request["ignore"]),
        ],
        max_seq_length=max(map(len, request["sequences"])),
        num_calibration_samples=len(sequences),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(request["out"], save_compressed=True, max_shard_size=request["max_shard_size"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
