"""`make audit`: bandit on the rooms against the accepted findings, and known vulnerabilities of the pinned packages.

Exit code 1 for a finding that audit_accepted.toml does not list, for a listed one that is gone, for a vulnerable
package, and if the advisories of a package could not be asked for: not audited is not clean.
"""

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kit", "reward", "merge", "launch", "eval", "recipes", "src")
ACCEPTED = ROOT / "tests/audit_accepted.toml"
REQUIREMENTS = ("requirements.txt", "requirements-cpu.txt", "requirements-cuda.txt")
SHOWN = 5  # packages named in a line


def compare(found: Counter[tuple[str, str]], accepted: list[dict]) -> list[str]:
    """A line for each (file, rule) whose number of findings is not the accepted one, and each without a reason."""
    known: Counter[tuple[str, str]] = Counter()
    faults = []
    for entry in accepted:
        if not str(entry.get("reason", "")).strip():
            faults.append(f"{entry['rule']}: accepted without a reason.")
        for file, count in entry["files"].items():
            known[file, entry["rule"]] += count
    for file, rule in sorted(found.keys() | known.keys()):
        there, allowed = found[file, rule], known[file, rule]
        if there > allowed:
            faults.append(f"{file}: {there} findings of {rule}, {allowed} accepted. Fix it, or list it with a reason.")
        elif there < allowed:
            faults.append(
                f"{file}: {there} findings of {rule}, {allowed} accepted. Remove what is gone from the list."
            )
    return faults


def run_bandit() -> tuple[Counter[tuple[str, str]], list[str]]:
    """{(file, rule): findings} in the rooms, and each as a line."""
    command = [sys.executable, "-m", "bandit", "-q", "-r", *ROOMS, "-f", "json"]
    results = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout)
    if results["errors"]:
        raise SystemExit(f"error: bandit could not read {results['errors'][0]['filename']}.")
    rows = results["results"]
    lines = [f"  {row['filename']}:{row['line_number']} {row['test_id']} {row['issue_text']}" for row in rows]
    return Counter((row["filename"], row["test_id"]) for row in rows), lines


def judge_packages(answer: str) -> list[str]:
    """What pip-audit's JSON says against the pins: a line for each vulnerability, one for those not audited."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return ["NOT AUDITED: pip-audit gave no answer; the advisory service cannot be reached."]
    faults = [
        f"{package['name']} {package['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'none'}."
        for package in packages
        for one in package.get("vulns", ())
    ]
    if skipped := [package["name"] for package in packages if "skip_reason" in package]:
        more = " …" if len(skipped) > SHOWN else ""
        faults.append(
            f"NOT AUDITED: {len(skipped)} of {len(packages)} pinned packages ({', '.join(skipped[:SHOWN])}{more}): "
            "the advisory service cannot be reached, or does not know them. Run this where pypi.org can be."
        )
    return faults


def main() -> int:
    found, lines = run_bandit()
    faults = compare(found, tomllib.loads(ACCEPTED.read_text())["accepted"])
    if faults:
        print("\n".join(lines))
    print(f"bandit: {found.total()} findings, {len(faults)} differ from the accepted ones")
    for name in REQUIREMENTS:
        command = [sys.executable, "-m", "pip_audit", "-r", name, "--no-deps", "--disable-pip", "-f", "json"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        said = judge_packages(answer)
        print(f"pip-audit, {name}: {'; '.join(said) or 'no known vulnerability'}")
        faults += said
    print("\n".join(f"error: {fault}" for fault in faults) or "nothing against it")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
