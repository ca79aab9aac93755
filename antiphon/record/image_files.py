"""The images of trajectories as files of a run: each image once, under the digest of its content."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from antiphon.core.errors import RecordError
from antiphon.core.image_checks import MOST_BYTES
from antiphon.core.types import PlacedImage, Trajectory
from antiphon.record import safe_files
from antiphon.record.run_dir import atomic_write

DIRECTORY = "_images"  # in `rollouts/`; readers of Parquet directories skip such names


def write_images(rollouts: Path, trajectories: Iterable[Trajectory]) -> None:
    """Make the images of trajectories durable, where they are not yet, before a file that names them is written."""
    images = {image.digest: image for each in trajectories for segment in each.segments for image in segment.images}
    for digest, image in images.items():
        place = rollouts / DIRECTORY / digest
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            with suppress(FileNotFoundError), atomic_write(place) as file:  # a process of another machine was faster
                file.write(image.data)
            if not place.is_file():
                raise RecordError(f"{place} could not be written", path=place)


def read_image(rollouts: Path, digest: str) -> bytes:
    """Return the content of an image; `RecordError` if its file is missing or holds something else."""
    path = safe_files.resolve_file(rollouts, f"{DIRECTORY}/{digest}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise RecordError(f"{path} has {size:,} bytes; at most {MOST_BYTES:,} are read", path=path)
    content = path.read_bytes()
    if PlacedImage(content, 0, 1).digest != digest:
        raise RecordError(f"{path} is not the image that was recorded", path=path)
    return content
