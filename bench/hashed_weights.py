"""The worker extension of remerge_weights.py: hashes of the served weights. vLLM's workers import it."""

import hashlib

import torch

from kit.rollout.server.packed_loader import RemergePacked
from kit.rollout.server.remerge import find_layers


class Hashed(RemergePacked):
    """The worker extension with access to hashes of its weights."""

    def weights_hash(self) -> dict:
        """One hash per linear layer over all its parameters."""
        found = {}
        for linear in find_layers(self.model_runner.model):
            digest = hashlib.blake2b(digest_size=8)
            for name, value in sorted(linear.layer.named_parameters()):
                if name == "weight_shape":  # of a packed layer's last part; no kernel reads it
                    continue
                digest.update(name.encode())
                # Contiguous first: per-tensor weights are stored transposed.
                digest.update(value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
            found[linear.name] = digest.hexdigest()
        return found

    def weights_bytes(self) -> float:
        """Bytes per weight of the linear layers, scales included."""
        layers = find_layers(self.model_runner.model)
        held = sum(value.nbytes for linear in layers for value in linear.layer.parameters())
        return held / sum(linear.rows * linear.columns for linear in layers)
