"""Settings of the loss that conflict or that it would ignore. Imports no torch."""

from kit.core.config.schema import Config

WITHOUT_DELTA = ("cispo", "sapo")  # of train.loss_type: they do not clip, so there is no second bound to clip at
SAPO_FIELDS = ("sapo_temperature_pos", "sapo_temperature_neg")  # of train.trl


def faults(config: Config) -> list[str]:
    """One sentence for each such setting."""
    train, found = config.train, []
    delta = train.delta if train.delta is not None else train.trl.get("delta")
    high = train.epsilon if train.epsilon_high is None else train.epsilon_high
    if train.loss_type == "cispo" and not (train.epsilon_high or 0.0) > 1:
        found.append(
            f"train.epsilon_high is {train.epsilon_high} with train.loss_type cispo, whose ratio it caps: 1 is the "
            "ratio of a policy that has not moved. Set it above 1, e.g. 5.0 (ScaleRL)."
        )
    if delta is not None and train.loss_type in WITHOUT_DELTA:
        found.append(f"train.delta ({delta}) does nothing with train.loss_type {train.loss_type}. Remove it.")
    elif train.delta is not None and not train.delta > 1 + high:
        found.append(
            f"train.delta ({train.delta}) must be above {1 + high:g}, 1 plus the upper clip: below it nothing changes "
            "where the advantage is negative, which is what it is for."
        )
    for key in SAPO_FIELDS:
        value = train.trl.get(key)
        if value is not None and train.loss_type != "sapo":
            found.append(f"train.trl.{key} does nothing with train.loss_type {train.loss_type}. Remove it.")
        elif isinstance(value, int | float) and not value > 0:
            found.append(f"train.trl.{key} ({value}) must be above 0.")
    return found + _kl_in_reward(config)


def _kl_in_reward(config: Config) -> list[str]:
    train = config.train
    if not train.kl_in_reward:
        return []
    if train.beta == 0:
        return ["train.kl_in_reward is true and train.beta 0, which weighs the KL. Set train.beta, or leave it out."]
    found = []
    if train.trl.get("use_bias_correction_kl"):
        found.append(
            "train.trl.use_bias_correction_kl weighs the KL in the loss, and with train.kl_in_reward there is none. "
            "Remove it."
        )
    if train.trl.get("multi_objective_aggregation", "sum_then_normalize") != "sum_then_normalize":
        found.append(
            "train.kl_in_reward with train.trl.multi_objective_aggregation normalize_then_sum: the KL would be "
            "normalized like a reward, and train.beta not be its weight. Remove one of them."
        )
    return found
