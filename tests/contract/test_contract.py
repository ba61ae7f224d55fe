"""The contract suite on every built-in drafter, or on `--drafter`; and that it can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.testing.contract import DrafterContract

MINE = '''
from dataclasses import dataclass
from slipstream.drafters.base import Draft, Drafter, TokenTree

@dataclass(frozen=True)
class Config:
    fault: str = "none"

class Mine(Drafter):
    """Repeats the root; or breaks the contract in a way that the engine alone would not see."""
    name, Config, num_speculative_tokens = "mine", Config, 3

    def __init__(self, config, target):
        self.fault, self.memory = config.fault, {}

    def propose(self, requests):
        drafts = []
        for i, r in enumerate(requests):
            self.memory[r.seq_id] = r.root
            tokens = [i if self.fault == "company" else r.root] * r.budget.depth
            drafts.append(Draft(TokenTree.chain(r.root + (self.fault == "root"), tokens)))
        return drafts

    def close(self, seq_id):
        if self.fault != "memory":
            self.memory.pop(seq_id, None)
'''


class TestDrafters(DrafterContract):
    pass


@pytest.mark.slow
def test_a_drafter_from_a_file_is_tested_and_its_faults_are_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    faults = {"company": "neither_on_company", "memory": "closed_row_leaves_no_memory", "root": "rooted_at"}
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__)), "-p", "no:cacheprovider"]
    command += ["-k", f"TestDrafters and ({' or '.join(faults.values())})"]
    for fault in ("none", *faults):
        command += ["--drafter", f"{file}:Mine:fault={fault}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert run.returncode == 1 and not any("fault=none" in line for line in failed), run.stdout
    for fault, test in faults.items():
        assert any(test in line and f"fault={fault}" in line for line in failed), run.stdout
