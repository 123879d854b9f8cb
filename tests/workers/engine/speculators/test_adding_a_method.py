"""The example of docs/adding-a-method.md: put in place as the page says, it drafts and changes no token."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/adding-a-method.md").read_text()
BLOCKS = re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROGRAM = """
import importlib.util, json, sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class Overlay(MetaPathFinder):
    '''Modules of a folder that lies over the packages: what the page adds or changes.'''

    def find_spec(self, name, path=None, target=None):
        place = Path(sys.argv[1], *name.split("."))
        package = place / "__init__.py"
        if package.exists():
            return importlib.util.spec_from_file_location(name, package, submodule_search_locations=[str(place)])
        module = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, module) if module.exists() else None

sys.meta_path.insert(0, Overlay())
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig

def answers(method):
    speculation = SpeculationConfig(method=method, **({} if method == "none" else {"policy": "fixed"}))
    core = EngineCore(EngineConfig(target="scripted:order=1,eos_every=0", max_batch=4, speculation=speculation))
    for number in range(8):
        params = SamplingParams(max_tokens=40, temperature=number % 2, seed=number)
        assert core.add(Request(number, [65 + number, 66], params)) is None
    done = []
    while core.has_work:
        done += core.step()
    return {c.request_id: c.token_ids for c in done}, sum(c.stats.accepted for c in done)

tokens, accepted = answers(sys.argv[2])
print(json.dumps({"same": tokens == answers("none")[0], "accepted": accepted}))
"""


def test_the_example_touches_one_folder_and_one_line_and_changes_no_token(tmp_path: Path) -> None:
    added = [(path, code) for path, code in BLOCKS if not (ROOT / path).exists()]
    ((registry, line),) = [block for block in BLOCKS if block not in added]
    (folder,) = {Path(path).parent for path, _ in added}
    assert folder.parent == Path("workers/engine/speculators")
    assert line.count("\n") == 1
    for path, code in [*added, (registry, _with_line((ROOT / registry).read_text(), line))]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), folder.name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["same"]
    assert told["accepted"] > 0, "some drafts of the example are right"


def _with_line(source: str, line: str) -> str:
    """The registry with the line at the end of its table."""
    head, table = source.split("REGISTRY", 1)
    entries, rest = table.split("\n}", 1)
    return f"{head}REGISTRY{entries}\n{line.rstrip()}\n}}{rest}"
