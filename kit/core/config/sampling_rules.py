"""Settings that conflict with dynamic sampling, replay or measured pass rates. Imports no torch."""

from kit.core.config.schema import Config


def faults(config: Config) -> list[str]:
    """One sentence for each such setting."""
    return [*_resampling(config), *_replay(config), *_pass_rates(config)]


def _resampling(config: Config) -> list[str]:
    rollout = config.rollout
    if not rollout.resample_rounds:
        if rollout.resample_budget is None:
            return []
        return [
            f"rollout.resample_budget is {rollout.resample_budget} and rollout.resample_rounds 0, so nothing is "
            "replaced. Set rollout.resample_rounds, or leave the budget out."
        ]
    found, named = [], f"rollout.resample_rounds is {rollout.resample_rounds}"
    if rollout.overlap:
        found.append(
            f"{named} and rollout.overlap true: which problems are fresh is known once a step's rewards are, and by "
            "then its successor is generated. Set one of them to 0 or false."
        )
    if config.distill.is_given:
        found.append(f"{named} in a distillation, which learns from every completion. Leave it out.")
    if rollout.resample_budget is not None and rollout.resample_budget < rollout.group_size:
        found.append(
            f"rollout.resample_budget ({rollout.resample_budget}) is below rollout.group_size ({rollout.group_size}): "
            "no group fits. Raise it, or leave it out."
        )
    return found


def _replay(config: Config) -> list[str]:
    rollout, found = config.rollout, []
    if not rollout.replay_steps:
        return []
    named = f"rollout.replay_steps is {rollout.replay_steps}"
    if config.distill.is_given:
        found.append(f"{named} in a distillation, which learns from every completion. Leave it out.")
    if config.environment.is_given:
        found.append(f"{named} with an environment, whose episodes no checkpoint holds. Set it to 0.")
    if rollout.routing != "own":
        found.append(
            f"{named} and rollout.routing {rollout.routing}: no checkpoint holds the experts that the sampler took. "
            "Set replay_steps to 0, or routing to own."
        )
    return found


def _pass_rates(config: Config) -> list[str]:
    data = config.data
    if data.pass_rates is not None:
        if data.min_pass_rate > data.max_pass_rate:
            return [f"data.min_pass_rate ({data.min_pass_rate:g}) is above max_pass_rate ({data.max_pass_rate:g})."]
        if data.order == "easy_first" and "shuffle_dataset" in config.train.trl:
            return ["data.order is easy_first and train.trl.shuffle_dataset is set. Remove the latter."]
        return []
    keys = {"min_pass_rate": 0.0, "max_pass_rate": 1.0, "order": "shuffled"}
    changed = [f"data.{key} ({getattr(data, key)})" for key, value in keys.items() if getattr(data, key) != value]
    if not changed:
        return []
    return [f"{changed[0]} needs data.pass_rates, a file that python -m recipes.pass_rates writes. Set it."]
