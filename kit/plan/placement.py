"""Assign GPUs to the replicas and to the trainer, from the run's configuration."""

from dataclasses import dataclass

from kit.core.config.schema import Config
from kit.core.errors import BadInput


@dataclass(frozen=True)
class Placement:
    """GPUs of the replicas, in order, and of the trainer, named as in CUDA_VISIBLE_DEVICES."""

    servers: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    is_machine_without: bool = False

    def environment(self, gpus: tuple[str, ...]) -> dict[str, str]:
        """Environment variables that show a process these GPUs and no others."""
        return {} if self.is_machine_without else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def place(config: Config, visible: list[str], replicas_on_gpus: bool, trainer_on_gpus: bool = True) -> Placement:
    """Assign the visible GPUs to replicas and trainer; raises `BadInput` with the numbers if they do not suffice.

    Replicas take the GPUs of `server.gpus`, or else the first ones. The trainer takes those of `train.gpus`, or else
    the others, or all if it has to share: on a machine with one GPU, and when the replicas sleep during the update.
    With `server.share_base` it takes the replica's own.
    The lists count from the first GPU of CUDA_VISIBLE_DEVICES.
    """
    server, train = config.server, config.train
    servers: tuple[str, ...] = ()
    if replicas_on_gpus and server.gpus is not None:
        servers = _named("server.gpus", server.gpus, visible)
    elif replicas_on_gpus:
        servers = tuple(visible[: server.tensor_parallel * len(config.rollout.server_urls)])
    if not trainer_on_gpus:
        return Placement(servers, (), not visible)
    if train.gpus is not None:
        trainer = _named("train.gpus", train.gpus, visible)
    elif server.share_base:
        trainer = servers
    elif server.sleep or len(visible) == 1:
        trainer = tuple(visible)
    else:
        trainer = tuple(gpu for gpu in visible if gpu not in servers)
        if visible and not trainer:
            raise BadInput(
                f"the replicas take all {len(visible)} GPUs ({', '.join(visible)}: {len(config.rollout.server_urls)} "
                f"rollout.server_urls of server.tensor_parallel {server.tensor_parallel}) and none is left for the "
                "trainer. Use fewer replicas, or let them sleep during the update (server.sleep true)."
            )
    shared = [gpu for gpu in trainer if gpu in servers]
    if shared and len(visible) > 1 and not server.sleep and train.max_gpu_gib is None:
        raise BadInput(
            f"train.gpus ({', '.join(trainer)}) and the replicas' GPUs ({', '.join(servers)}) share "
            f"{', '.join(shared)} without limits on memory. Name other GPUs, set server.sleep, or set "
            "train.max_gpu_gib and server.gpu_memory_utilization."
        )
    return Placement(servers, trainer, not visible)


def _named(key: str, listed: list[int], visible: list[str]) -> tuple[str, ...]:
    if not listed or len(set(listed)) != len(listed):
        raise BadInput(f"{key} ({listed}) must name at least one GPU, and every GPU once.")
    if wrong := [gpu for gpu in listed if not 0 <= gpu < len(visible)]:
        shown = ", ".join(visible) or "none"
        raise BadInput(
            f"{key} names {', '.join(map(str, wrong))}; CUDA shows {len(visible)} GPUs here ({shown}), counted from 0."
        )
    return tuple(visible[gpu] for gpu in listed)
