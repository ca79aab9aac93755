"""Which sources each room has and which tests guard it: the one place that knows where they are."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What reads declarations, and so reaches lines that are run at import.
DECLARATIONS = ("tests/unit/test_options.py",)


@dataclass(frozen=True, slots=True)
class Room:
    """Sources, and the tests that should notice a fault in them."""

    sources: tuple[str, ...]
    """Globs from the root of the checkout."""
    tests: tuple[str, ...]
    """Files or folders of unit tests. Of these a mutant is tried on those that reach its line."""
    runs: tuple[str, ...] = ()
    """Test files with runs in processes of their own. What survives the unit tests is tried on them, in this order."""
    elsewhere: tuple[str, ...] = ()
    """Globs of sources that unit tests run in other processes: there any test of the room may reach any line."""
    excluded: tuple[tuple[str, str], ...] = ()
    """Globs of sources that are not mutated, each with the reason."""

    def files(self) -> list[str]:
        """Return the sources that are mutated, as paths from the root of the checkout, sorted."""
        found = {path for glob in self.sources for path in ROOT.glob(glob)}
        left_out = {path for glob, _ in self.excluded for path in ROOT.glob(glob)}
        return sorted(str(path.relative_to(ROOT)) for path in found - left_out)

    def test_files(self) -> Iterator[str]:
        """Yield the files of unit tests."""
        for name in self.tests:
            path = ROOT / name
            found = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
            yield from (str(file.relative_to(ROOT)) for file in found)

    def all_test_files(self) -> set[Path]:
        """Return all Python files that its tests may use: they, and what lies beside them and is no test."""
        found = {ROOT / "tests" / "conftest.py"}
        for path in (ROOT / name for name in (*self.tests, *self.runs)):
            if path.is_dir():
                found.update(path.rglob("*.py"))
            else:
                found |= {path, *(file for file in path.parent.glob("*.py") if not file.name.startswith("test_"))}
        return found

    def runs_elsewhere(self, path: str) -> bool:
        """Return True if unit tests run this source in other processes."""
        return any(ROOT / path in ROOT.glob(glob) for glob in self.elsewhere)


ROOMS = {
    "algorithms": Room(
        sources=("antiphon/algorithms/*.py",),
        tests=(
            "tests/unit/algorithms",
            "tests/unit/learning/test_stages.py",
            "tests/unit/learning/test_batch.py",
            "tests/unit/learning/test_gradient.py",
            "tests/unit/learning/test_offline.py",
            *DECLARATIONS,
        ),
        excluded=(
            (
                "antiphon/algorithms/testing_packs.py",
                "draws inputs for checks of losses; others are as good",
            ),
        ),
    ),
    "rollout": Room(
        sources=("antiphon/rollout/**/*.py",),
        tests=(
            "tests/unit/rollout",
            "tests/unit/simulate",
            "tests/unit/run/test_config.py",
            "tests/unit/core/test_types.py",
            *DECLARATIONS,
        ),
        runs=("tests/system/test_agents.py", "tests/system/test_shards.py"),
    ),
    "record": Room(
        sources=("antiphon/record/*.py",),
        tests=(
            "tests/unit/record",
            "tests/unit/simulate",
            "tests/unit/dashboard/test_notes.py",
            "tests/unit/run/test_config.py",
            *DECLARATIONS,
        ),
        runs=("tests/system/test_disk.py", "tests/system/test_damaged_runs.py", "tests/chaos/test_resume.py"),
    ),
    "learning": Room(
        sources=("antiphon/learning/**/*.py",),
        tests=(
            "tests/unit/learning",
            "tests/unit/algorithms/test_attention_credit.py",
            "tests/unit/algorithms/test_normalization.py",
            "tests/unit/algorithms/test_settings.py",
            "tests/unit/run/test_config.py",
            *DECLARATIONS,
        ),
        runs=(
            "tests/parity/test_meshes.py",
            "tests/parity/test_mixtures.py",
            "tests/parity/test_loading.py",
            "tests/system/test_algorithms.py",
            "tests/system/test_offline_resume.py",
        ),
        excluded=(
            ("antiphon/learning/backends/megatron*.py", "needs megatron-core: `make parity`"),
            ("antiphon/learning/backends/deepspeed.py", "needs DeepSpeed: `make parity`"),
        ),
    ),
    "weights": Room(
        sources=("antiphon/weights/*.py",),
        tests=("tests/unit/weights", "tests/unit/engines", "tests/unit/run/test_config.py", *DECLARATIONS),
        runs=("tests/chaos/test_weights.py",),
    ),
    "grading": Room(
        sources=("antiphon/tasks/grading/*.py",),
        tests=("tests/unit/tasks/test_grading.py", "tests/unit/tasks/test_reward_router.py"),
        runs=("tests/system/test_confined_graders.py", "tests/system/test_reward_integrity.py"),
        elsewhere=("antiphon/tasks/grading/worker.py", "antiphon/tasks/grading/worker_process.py"),
    ),
}
CORE = tuple(name for name in ROOMS if name != "algorithms")
