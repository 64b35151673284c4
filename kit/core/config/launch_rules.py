"""Settings that conflict with `launch.stall_s`. Imports no torch."""

from kit.core.config.schema import Config


def faults(config: Config) -> list[str]:
    """A sentence if something that a run may wait for takes longer than `launch.stall_s`; 0 sets no limit."""
    stall_s = config.launch.stall_s
    if not stall_s:
        return []
    waits = {"reward.timeout_s": config.reward.timeout_s, "reward.request_timeout_s": config.reward.request_timeout_s}
    if config.rollout.backend == "server":
        waits["rollout.request_timeout_s"] = config.rollout.request_timeout_s
    if config.environment.is_given:
        waits["environment.episode_timeout_s"] = config.environment.episode_timeout_s
    key, longest = max(waits.items(), key=lambda item: item[1])
    if longest < stall_s:
        return []
    return [
        f"launch.stall_s ({stall_s:g}) is not above {key} ({longest:g}): a run that waits as long as it may would be "
        f"taken for one that stands still. Set launch.stall_s above {longest:g}, or to 0."
    ]
