"""Commands that look into data sets and make others of them: data report, clean, split, mix, stratify."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from antiphon.cli.errors import exit_on_error
from antiphon.cli.tables import flatten, print_line, print_table
from antiphon.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.tasks.data.selection import Solved

File = Annotated[Path, typer.Argument(metavar="FILE", help="JSONL or Parquet file.")]
Out = Annotated[Path, typer.Option("--out", help="JSONL or Parquet file to write.")]
Column = Annotated[str, typer.Option(help="Column with the question.")]
Against = Annotated[
    list[Path] | None,
    typer.Option(help="File of test questions, which training questions may not overlap; may be repeated."),
]
Ngram = Annotated[int, typer.Option(help="Words in a row in common that make an overlap.", min=1)]
Samples = Annotated[
    Path, typer.Option("--samples", help="Parquet file of `antiphon generate` with samples of the rows.")
]
Seed = Annotated[int, typer.Option(help="Seed of the choice of rows.", min=0)]

data = typer.Typer(help="Look into data sets and make others of them.", no_args_is_help=True)


@data.command()
def report(
    file: File,
    column: Column = "prompt",
    against: Against = None,
    ngram: Ngram = 13,
    samples: Annotated[
        Path | None, typer.Option(help="Parquet file of `antiphon generate`: pass@k, and rows by difficulty.")
    ] = None,
) -> None:
    """Count rows, repeated questions and overlaps with test questions; with samples of a model, measure pass@k."""
    with exit_on_error():
        from antiphon.tasks.data.files import questions_of, read_rows
        from antiphon.tasks.data.overlap import find_duplicates, find_overlaps, words_of

        rows = read_rows(file)
        questions = questions_of(file, rows, column)
        lengths = [len(words_of(question)) for question in questions]
        facts: dict[str, Any] = {"rows": len(rows), "repeated questions": len(find_duplicates(questions))}
        facts |= {"words of a question, mean": sum(lengths) / len(lengths), "most": max(lengths)}
        for other in against or ():
            tests = questions_of(other, read_rows(other), column)
            found = list(find_overlaps(questions, tests, ngram))
            facts[f"overlap with {other}"] = len(found)
            for each in found[:5]:
                print_line(f"row {each.row + 1} overlaps row {each.test_row + 1} of {other}: {each.words}")
        if samples is not None:
            from antiphon.tasks.data.selection import read_solved, solved_of

            facts |= _describe_difficulty(solved_of(rows, read_solved(samples), file))
        print_table("measure", "value", flatten(facts))


@data.command()
def clean(file: File, out: Out, column: Column = "prompt", against: Against = None, ngram: Ngram = 13) -> None:
    """Remove rows whose question came before, or overlaps a test question."""
    with exit_on_error():
        from antiphon.tasks.data.files import questions_of, read_rows, write_rows
        from antiphon.tasks.data.overlap import find_duplicates, find_overlaps

        rows = read_rows(file)
        questions = questions_of(file, rows, column)
        repeated, overlapping = set(find_duplicates(questions)), set[int]()
        for other in against or ():
            tests = questions_of(other, read_rows(other), column)
            overlapping |= {each.row for each in find_overlaps(questions, tests, ngram)}
        kept = [row for number, row in enumerate(rows) if number not in repeated | overlapping]
        write_rows(out, kept)
        print_line(f"{len(kept)} of {len(rows)} rows; {len(repeated)} repeated, {len(overlapping)} overlapping; {out}")


@data.command()
def split(
    file: File,
    out: Annotated[Path, typer.Option(help="Folder for the files train, validation and test.", file_okay=False)],
    column: Column = "prompt",
    test: Annotated[float, typer.Option(help="Share of test questions.", min=0.0, max=1.0)] = 0.1,
    validation: Annotated[float, typer.Option(help="Share of validation questions.", min=0.0, max=1.0)] = 0.0,
) -> None:
    """Divide rows by a hash of their question: equal questions are in the same part, whatever the file."""
    with exit_on_error():
        from antiphon.tasks.data.files import questions_of, read_rows, write_rows
        from antiphon.tasks.data.selection import split_of

        if test + validation > 1:
            raise ConfigError(f"{validation:g} and {test:g} of --test are more than the whole", key="--validation")
        rows = read_rows(file)
        parts: dict[str, list[Any]] = {"train": [], "validation": [], "test": []}
        for row, question in zip(rows, questions_of(file, rows, column), strict=True):
            parts[split_of(question, {"test": test, "validation": validation})].append(row)
        places = {name: out / f"{name}{file.suffix}" for name in parts}
        # A part of an earlier split that stayed would have rows in common with those of this one.
        stale = [place for name, place in places.items() if not parts[name] and place.exists()]
        if any(place.samefile(file) for place in stale):
            raise ConfigError(f"{file} has the name of a part that stays empty; give another folder", key="--out")
        out.mkdir(parents=True, exist_ok=True)
        for name, chosen in parts.items():
            if chosen:
                write_rows(places[name], chosen)
        for place in stale:
            place.unlink()
            print_line(f"{place} of an earlier split is removed: this one leaves the part empty")
        print_line(", ".join(f"{len(chosen)} {name}" for name, chosen in parts.items()) + f"; {out}")


@data.command()
def mix(
    files: Annotated[list[str], typer.Argument(metavar="FILE=WEIGHT...", help="Files, each with its weight.")],
    out: Out,
    rows: Annotated[int, typer.Option(help="Number of rows; 0 is as many as there can be.", min=0)] = 0,
    seed: Seed = 0,
) -> None:
    """Mix files in proportion to weights, in random order; no row comes twice."""
    with exit_on_error():
        from antiphon.tasks.data.files import read_rows, write_rows
        from antiphon.tasks.data.selection import mix as mix_rows

        named = [_parse_weight(each) for each in files]
        mixed = mix_rows([read_rows(path) for path, _ in named], [weight for _, weight in named], rows, seed)
        write_rows(out, mixed)
        print_line(f"{len(mixed)} rows; {out}")


@data.command()
def stratify(
    file: File,
    samples: Samples,
    out: Out,
    least: Annotated[float, typer.Option(help="Least share of successes of a row.", min=0.0, max=1.0)] = 0.0,
    most: Annotated[float, typer.Option(help="Greatest share of successes of a row.", min=0.0, max=1.0)] = 1.0,
    each: Annotated[int, typer.Option(help="Most rows of each fifth of the shares; 0 is no bound.", min=0)] = 0,
    seed: Seed = 0,
) -> None:
    """Keep the rows that a model solves neither too rarely nor too often, and write the share as `pass_rate`."""
    with exit_on_error():
        from antiphon.tasks.data.files import read_rows, write_rows
        from antiphon.tasks.data.selection import choose_by_difficulty, read_solved, solved_of

        rows = read_rows(file)
        solved = solved_of(rows, read_solved(samples), file)
        chosen = choose_by_difficulty(rows, solved, least, most, each, seed)
        write_rows(out, chosen)
        print_line(f"{len(chosen)} of {len(rows)} rows; {out}")


def _parse_weight(text: str) -> tuple[Path, float]:
    path, _, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    if not path or not value > 0:
        raise ConfigError(f"{text!r} must be FILE=WEIGHT with a weight above 0", value=text)
    return Path(path), value


def _describe_difficulty(solved: "Sequence[Solved]") -> dict[str, Any]:
    from antiphon.rollout.evaluation import Evaluation
    from antiphon.tasks.data.selection import STRATA

    names = tuple(map(str, range(len(solved))))
    correct = [each.correct for each in solved]
    found = Evaluation(prompt_ids=names, tasks=("",) * len(solved), correct=correct, ungraded=0, truncated=0.0)
    ks = sorted({2**power for power in range(found.samples.bit_length())} | {found.samples})
    strata = {
        f"rows solved at {number / STRATA:.1f} to {(number + 1) / STRATA:.1f}": sum(
            each.stratum == number for each in solved
        )
        for number in range(STRATA)
    }
    return {f"pass@{k}": found.pass_at(k) for k in ks} | {"accuracy, 95 % interval": found.interval()} | strata
