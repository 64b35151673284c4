"""The policy of a trainer as samplers see it: `PolicyView` of `kit/rollout/policy_view.py`."""

import contextlib

import numpy as np
import torch
from trl.models.utils import disable_gradient_checkpointing

from kit.core.config.format_rules import served_format
from kit.core.config.schema import Config
from kit.policy.other_adapter import wearing
from kit.policy.sharding import gather_adapter
from kit.rollout.adapter_file import AdapterFile
from kit.train.trl_trainer import GRPOTrainer


class TrainedPolicy:
    """`PolicyView` of a trainer. `split` is how its base is sharded over processes, from `sharding.prepare`; None:
    each process has all of it."""

    def __init__(self, trainer: GRPOTrainer, config: Config, base_hash: str, split: str | None):
        self._trainer, self.config, self.base_hash = trainer, config, base_hash
        self.processes, self.is_split = trainer.accelerator, split is not None
        self.is_deepspeed = trainer.is_deepspeed_enabled
        # ZeRO-1 and 2 exchange gradients in every backward.
        self.waits_in_every_pass = self.is_split or self.is_deepspeed
        self.stop_token_ids: list[int] = trainer.eos_token_ids
        self._file: AdapterFile | None = None
        self._start: dict[str, torch.Tensor] | None = None

    def keep_start(self) -> None:
        """Copy the adapter as it is now: it is the reference from here on (`policy.reference: init_adapter`)."""
        trained = ((name, one) for name, one in self.unwrapped.named_parameters() if one.requires_grad)
        self._start = {name: one.detach().clone() for name, one in trained}

    def reference(self) -> contextlib.AbstractContextManager:
        """Within the block, for passes without gradients, the model is the reference: the base without an adapter, or
        with the one that `keep_start` copied. Both policies pass through the same layers, so equal weights score
        equally, to the bit."""
        return self.unwrapped.disable_adapter() if self._start is None else wearing(self.unwrapped, self._start)

    @property
    def version(self) -> int:
        return self._trainer.state.global_step

    @property
    def model(self) -> torch.nn.Module:
        """The trainer's policy, possibly wrapped."""
        return self._trainer.model

    @property
    def unwrapped(self) -> torch.nn.Module:
        """The PeftModel."""
        return self.processes.unwrap_model(self.model)

    def not_checkpointed(self, model: torch.nn.Module) -> contextlib.AbstractContextManager:
        """Disable gradient checkpointing for a forward without gradients."""
        return disable_gradient_checkpointing(model, self._trainer.args.gradient_checkpointing_kwargs)

    def score(self, sequences: list[list[int]], is_adapted: bool = True) -> list[np.ndarray]:
        """Run one forward exactly as in training: same autocast, same mode, no dropout."""
        model, device = self.unwrapped, self.processes.device
        length = max(map(len, sequences))
        # Padded on the right: with causal attention earlier tokens never see the padding, so no mask is needed.
        ids = torch.tensor([row + [row[-1]] * (length - len(row)) for row in sequences], device=device)  # (S, L)
        with (
            torch.no_grad(),
            contextlib.nullcontext() if is_adapted else model.disable_adapter(),
            self.not_checkpointed(model),
            self.processes.autocast(),  # nothing under DeepSpeed, which casts the weights
        ):
            # Bypass the outer model's forward: accelerate's wrapper would copy all logits to float32. FSDP2 and ZeRO-3
            # need it, because they start a forward there.
            forward = model if self.is_split else model.get_base_model()
            logits = forward(input_ids=ids, use_cache=False).logits  # (S, L, vocabulary)
        scores = []
        for row, tokens in enumerate(sequences):
            own = logits[row, : len(tokens) - 1].float()
            chosen = own.gather(1, ids[row, 1 : len(tokens), None]).squeeze(1)
            scores.append((chosen - own.logsumexp(dim=1)).cpu().numpy())
        return scores

    def adapter(self) -> AdapterFile | None:
        gathered = gather_adapter(self.unwrapped) if self.is_split else None
        if gathered is not None:  # a snapshot: each version needs a file of its own
            return self._adapter_file(gathered) if self.processes.is_main_process else None
        if self._file is None:
            self._file = self._adapter_file(None)
        return self._file

    def _adapter_file(self, gathered: dict[str, torch.Tensor] | None) -> AdapterFile:
        model, dtype = self.unwrapped, getattr(torch, self.config.model.dtype)
        if (fmt := served_format(self.config)) is None:
            return AdapterFile(model, dtype, self.base_hash, gathered)
        from kit.policy.quantized_linear import AMAX, quantizer_state

        # Quantize from the factors in their training dtype, as merging does.
        dtype = getattr(torch, self.config.policy.adapter_dtype)
        peaks = {name.removesuffix(AMAX): peak.item() for name, peak in quantizer_state(model).items()}
        return AdapterFile(model, dtype, self.base_hash, gathered, fmt.name, peaks)
