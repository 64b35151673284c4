"""Adapter sync: how a new version of the adapter reaches the rollout servers, unmerged and by name.

Only the adapter travels. Each version gets its own directory and its own name: vLLM's prefix cache is keyed by both,
so nothing made by an old version is ever served as the new one. A version is served by every replica or by none.
The replicas must see the run directory (same host or a shared file system).
"""

from pathlib import Path

import requests

from recipes.parts.errors import CheckFailed


class AdapterSync:
    """Loads one adapter version on every replica and unloads the one before."""

    def __init__(self, urls: list[str], run_name: str, timeout_s: float):
        self.urls, self.run_name, self.timeout_s = urls, run_name, timeout_s
        self.served: str | None = None

    def publish(self, directory: Path, version: int) -> str:
        """Serve the adapter in `directory` as `<run>-v<version>`; returns that name.

        `CheckFailed`, naming the replica, when one refuses: the others then drop the new version again and keep the
        old one.
        """
        name = f"{self.run_name}-v{version:06d}"
        loaded: list[str] = []
        for url in self.urls:
            try:
                self._post(url, "load_lora_adapter", {"lora_name": name, "lora_path": str(directory.resolve())})
            except (requests.RequestException, CheckFailed) as error:
                for other in loaded:
                    self._post(other, "unload_lora_adapter", {"lora_name": name})
                raise CheckFailed(
                    f"the replica at {url} did not load adapter version {version}: {error}. All replicas stay on "
                    f"{self.served or 'the base'}. Start it with --enable-lora, a --max-lora-rank that fits and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, where it can read the run directory."
                ) from None
            loaded.append(url)
        if self.served and self.served != name:
            for url in self.urls:
                self._post(url, "unload_lora_adapter", {"lora_name": self.served})
        self.served = name
        return name

    def forget(self, names: list[str], prefix: str) -> None:
        """Unload what an earlier process of this run left on the replicas (`names` as they list them)."""
        for url in self.urls:
            for name in names:
                if name.startswith(prefix):
                    self._post(url, "unload_lora_adapter", {"lora_name": name})

    def _post(self, url: str, action: str, body: dict) -> None:
        response = requests.post(f"{url}/v1/{action}", json=body, timeout=self.timeout_s)
        if response.status_code != 200:
            raise CheckFailed(f"{action} answered {response.status_code}: {response.text[:300]}")
