"""Adapter sync: how a new version of the adapter reaches the rollout servers, unmerged and by name.

Only the adapter travels. vLLM's prefix cache is keyed by an adapter's name and path, so every version of every process
gets its own: a resumed run that makes version 41 again must not be answered from what the first version 41 left there.
A version is served by every replica or by none. The replicas must see the run directory (same host or a shared file
system).
"""

import re
import secrets
from pathlib import Path

import requests

from recipes.parts.errors import CheckFailed


class AdapterSync:
    """Loads one adapter version on every replica and unloads the one before."""

    def __init__(self, urls: list[str], run_name: str, timeout_s: float):
        self.urls, self.run_name, self.timeout_s = urls, run_name, timeout_s
        self.session = secrets.token_hex(4)
        self.served: str | None = None

    def publish(self, directory: Path, version: int) -> str:
        """Serve the adapter in `directory` as `<run>-<session>-v<version>`; returns that name.

        `CheckFailed`, naming the replica, when one refuses: the others then drop the new version again and keep the
        old one.
        """
        name = f"{self.run_name}-{self.session}-v{version:06d}"
        loaded: list[str] = []
        for url in self.urls:
            try:
                self._post(url, "load_lora_adapter", {"lora_name": name, "lora_path": str(directory.resolve())})
            except CheckFailed as error:
                left = [other for other in loaded if not self._unload(other, name)]
                raise CheckFailed(
                    f"the replica at {url} did not load adapter version {version}: {error}. All replicas stay on "
                    f"{self.served or 'the base'}{f'; {left} did not drop it again' if left else ''}. Start it with "
                    "--enable-lora, a --max-lora-rank that fits and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, where it "
                    "can read the run directory."
                ) from None
            loaded.append(url)
        if self.served and self.served != name:
            for url in self.urls:
                self._unload(url, self.served)
        self.served = name
        return name

    def forget(self, url: str, names: list[str]) -> None:
        """Unload what earlier processes of this run left on a replica; `names` is what it lists."""
        ours = re.compile(rf"{re.escape(self.run_name)}-[0-9a-f]{{8}}-v\d{{6}}")
        for name in names:
            if ours.fullmatch(name):
                self._unload(url, name)

    def _unload(self, url: str, name: str) -> bool:
        """Whether the replica no longer serves `name`; a slot that stays taken is not worth the run."""
        try:
            self._post(url, "unload_lora_adapter", {"lora_name": name}, absent_is_fine=True)
        except CheckFailed:
            return False
        return True

    def _post(self, url: str, action: str, body: dict, absent_is_fine: bool = False) -> None:
        try:
            response = requests.post(f"{url}/v1/{action}", json=body, timeout=self.timeout_s)
        except requests.RequestException as error:
            raise CheckFailed(f"{action}: {type(error).__name__}: {error}") from None
        if response.status_code == 404 and absent_is_fine:
            return
        if response.status_code != 200:
            raise CheckFailed(f"{action} answered {response.status_code}: {response.text[:300]}")
