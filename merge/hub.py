"""Upload published checkpoints to the Hugging Face hub, with the token that huggingface_hub itself would use."""

from pathlib import Path

from kit.core.errors import BadInput, CheckFailed

NO_TOKEN = "Set HF_TOKEN, or run `hf auth login`."


def check_access(repo_id: str) -> None:
    """Check the repository name and the token before anything is merged; `BadInput` if the name is malformed, the
    token is missing or wrong, or the hub does not answer."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise BadInput(f"--push_to_hub {repo_id} is not a repository name: {str(error).splitlines()[0]}") from None
    if get_token() is None:
        raise BadInput(f"--push_to_hub needs a token with write access, and there is none. {NO_TOKEN}")
    try:
        HfApi().whoami()
    except (OSError, HTTPError) as error:  # a refused token, offline mode, no connection
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"--push_to_hub: the hub does not accept the token or does not answer: {reason}") from None


def destinations(repo_id: str, places: dict[tuple[str, str], Path]) -> dict[Path, str]:
    """Return {directory: repository} for the checkpoints `places`, {(policy, format): directory}.

    The trained policy is pushed; the base only if there is nothing else. A single format goes to `repo_id`, several go
    to `repo_id`-<format> each.
    """
    policy = "grpo" if any(policy == "grpo" for policy, _ in places) else "base"
    chosen = {name: place for (of, name), place in places.items() if of == policy}
    return {place: repo_id if len(chosen) == 1 else f"{repo_id}-{name}" for name, place in chosen.items()}


def push(directory: Path, repo_id: str, private: bool) -> str:
    """Upload a published checkpoint and return its address; `CheckFailed` if the upload fails."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        # None leaves the choice to the account's settings; an existing repository keeps its own.
        address = api.create_repo(repo_id, private=private or None, exist_ok=True, repo_type="model")
        api.upload_folder(folder_path=directory, repo_id=repo_id, commit_message=f"Upload {directory.name}")
    except (OSError, HTTPError, ValueError) as error:
        raise CheckFailed(
            f"{directory} is written, and was not uploaded to {repo_id}: {(str(error) or repr(error)).splitlines()[0]}"
            ". Upload it with: python -m merge card --run … --push_to_hub …"
        ) from None
    return str(address)
