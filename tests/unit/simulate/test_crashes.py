"""Lives that crash, on a disk that forgets: whatever is lost, the ledger balances, and the run goes on."""

import numpy as np
import pytest

from antiphon.simulate.crashes import UnreliableDisk, crash_seed

# Seeds that once found something: a round of groups that were all taken over, a commit after one that had failed.
FOUND = (47, 189)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [*FOUND, *range(1000, 1024)])
def test_the_ledger_balances_after_every_crash(tmp_path, seed):
    assert crash_seed(seed, tmp_path).total()


def test_unreliable_disk_keeps_only_synced_writes(tmp_path):
    (tmp_path / "kept").mkdir()
    disk, folder = UnreliableDisk(("kept",), tmp_path), tmp_path / "kept"
    for name in ("durable", "torn", "renamed.partial"):
        (folder / name).write_bytes(b"content" * 20)
        disk.record_sync(folder / name)
    disk.record_sync(folder)
    (folder / "torn").write_bytes(b"later" * 20)
    (folder / "renamed.partial").rename(folder / "renamed")
    (folder / "new").write_bytes(b"new")
    seen = set()
    for seed in range(40):
        disk.lose_writes(np.random.default_rng(seed))
        assert (folder / "durable").read_bytes() == b"content" * 20
        names = {entry.name for entry in folder.iterdir()}
        assert ("renamed" in names) != ("renamed.partial" in names)
        seen |= names
        (folder / "torn").write_bytes(b"later" * 20)
        if "renamed" not in names:
            (folder / "renamed.partial").rename(folder / "renamed")
    assert {"renamed", "renamed.partial"} <= seen
