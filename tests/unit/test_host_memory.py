"""What is free of a machine's memory and of its cgroups, and this process's own peak."""

import pytest

from kit.policy import host_memory
from kit.policy.host_memory import available_gib, limit_gib, peak_resident_gib, release_freed, reset_peak_resident

MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   16777216 kB\n"  # 32 and 16 GiB


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(lines, {folder: (limit, used, cache)}, names)`: a machine of 32 GiB, half of it free."""

    def make(lines: str, groups: dict[str, tuple], names: tuple[str, ...]) -> None:
        for folder, values in groups.items():
            (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
            for name, value in zip(names[:2], values[:2], strict=True):
                (tmp_path / "groups" / folder / name).write_text(f"{value}\n")
            (tmp_path / "groups" / folder / "memory.stat").write_text(f"anon 5\n{names[2]} {values[2]}\n")
        (tmp_path / "own").write_text(lines)
        (tmp_path / "meminfo").write_text(MEMINFO)
        monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
        monkeypatch.setattr(host_memory, "OWN_GROUPS", tmp_path / "own")
        monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(host_memory, "_total", lambda: 32 * 2**30)

    return make


def test_without_a_limit_it_is_what_linux_calls_available(machine):
    machine("0::/\n", {}, host_memory.VERSION_2)
    assert (available_gib(), limit_gib()) == (16, 32)


def test_the_tightest_group_above_a_process_counts_and_page_cache_is_free(machine):
    groups = {"job": (8 * 2**30, 6 * 2**30, 2**30), "job/step": ("max", 2**30, 0), "": (20 * 2**30, 7 * 2**30, 0)}
    machine("0::/job/step\n", groups, host_memory.VERSION_2)
    assert (available_gib(), limit_gib()) == (3, 8)


def test_a_container_that_shows_its_own_group_as_the_root_is_found(machine):
    machine("0::/host/only/docker-1\n", {"": (4 * 2**30, 2**30, 0)}, host_memory.VERSION_2)
    assert (available_gib(), limit_gib()) == (3, 4)


def test_the_older_interface_is_read_too(machine):
    groups = {"memory/a": (6 * 2**30, 4 * 2**30, 2 * 2**30), "memory": (2**63 - 4096, 9 * 2**30, 0)}
    machine("8:pids:/\n4:cpu,memory:/a\n0::/\n", groups, host_memory.VERSION_1)
    assert (available_gib(), limit_gib()) == (4, 6)


def test_freed_memory_between_blocks_that_are_used_goes_back_to_the_system():
    """Blocks below the size that glibc asks the system for each of, freed one and kept one."""
    size, count = 64 * 2**10, 8192  # 512 MiB
    blocks = [bytearray(size) for _ in range(count)]
    for block in blocks:
        block[::4096] = b"1" * len(block[::4096])
    kept = blocks[::2]
    del blocks, block
    reset_peak_resident()
    before = peak_resident_gib()
    release_freed()
    reset_peak_resident()
    assert before - peak_resident_gib() > 0.2 and len(kept) == count // 2


def test_a_peak_is_that_of_the_time_since_the_reset():
    reset_peak_resident()
    start, large = peak_resident_gib(), bytearray(512 * 2**20)
    large[::4096] = b"1" * len(large[::4096])
    peak = peak_resident_gib()
    assert peak - start > 0.45
    del large
    reset_peak_resident()
    assert peak_resident_gib() < peak - 0.4
