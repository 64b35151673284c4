"""Settings that conflict with `environment`. Imports no torch."""

from kit.core.config.schema import Config, EnvironmentConfig

ADAPTERS = ("openenv", "verifiers")  # of kit/environments; any other factory is module:callable


def faults(config: Config, sharding: str | None) -> list[str]:
    """Settings that conflict with an environment. `sharding` is what splits the base over processes."""
    given, rollout = config.environment, config.rollout
    if not given.is_given:
        return _without(given)
    named = f"environment.factory is {given.factory}" if given.factory else f"environment.tools is {given.tools}"
    found = []
    if given.factory is not None and ":" not in given.factory and given.factory not in ADAPTERS:
        found.append(
            f"environment.factory is {given.factory!r}. Write it as module:callable, or use {' or '.join(ADAPTERS)}."
        )
    if given.factory in ADAPTERS and given.tools:
        found.append(
            f"environment.factory is {given.factory}, whose environments bring their own tools, and environment.tools "
            f"is {given.tools}. Leave it out."
        )
    if given.factory is None and given.options:
        found.append("environment.options are for environment.factory, which is not set. Leave them out.")
    if wrong := [name for name in given.tools if ":" not in name and name != "python"]:
        found.append(f"environment.tools names {wrong[0]!r}. Write it as module:function, or use python.")
    if rollout.routing != "own":
        found.append(
            f"{named} and rollout.routing {rollout.routing}: a server gives the experts of one turn, not of an "
            "episode. Set rollout.routing to own."
        )
    if config.distill.is_given:
        found.append(f"{named} in a distillation, which was not tested with several turns. Leave one of them out.")
    if rollout.backend == "in_process" and sharding:
        found.append(
            f"{named} under {sharding}: all processes generate together there, and episodes take turns of their own. "
            "Use rollout.backend server, or accelerate_configs/ddp.yaml."
        )
    for key in ("max_turn_tokens", "max_observation_tokens"):
        if (tokens := getattr(given, key)) is not None and tokens > rollout.max_completion_length:
            found.append(
                f"environment.{key} ({tokens}) is above rollout.max_completion_length "
                f"({rollout.max_completion_length}), which bounds a whole episode. Lower it, or leave it out."
            )
    if given.tool_timeout_s > given.episode_timeout_s:
        found.append(
            f"environment.tool_timeout_s ({given.tool_timeout_s:g}) is above environment.episode_timeout_s "
            f"({given.episode_timeout_s:g}), which bounds all calls of an episode. Lower it."
        )
    return found


def _without(given: EnvironmentConfig) -> list[str]:
    """Keys that nothing reads without a factory or tools."""
    default = EnvironmentConfig()
    changed = [key for key, value in vars(given).items() if value != getattr(default, key)]
    if not changed:
        return []
    return [f"environment.{changed[0]} is set and there is no environment. Set environment.factory, or leave it out."]
