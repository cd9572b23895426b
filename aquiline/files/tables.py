"""Data sets of Hugging Face: of the hub, or saved in a folder. They need the package datasets, which is not ours."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aquiline.config import UserError
from aquiline.files.disk import one_line


def is_saved_table(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def table_rows(name: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """The rows of a data set of the hub, or of a folder that holds or saved one; UserError where it cannot be read."""
    try:
        import datasets  # optional, and slow to import
    except ImportError as error:
        raise UserError(
            f"{name} is no file, and reading it as a data set needs the package datasets: pip install datasets"
        ) from error
    try:
        if is_saved_table(Path(name)):
            saved = datasets.load_from_disk(name)
            table = saved[split] if isinstance(saved, dict) else saved
        else:
            table = datasets.load_dataset(name, split=split)
    except Exception as error:  # offline, no such data set or split, a damaged file: a class for each
        part = "" if split == "train" else f":{split}"
        raise UserError(f"the data set {name}{part} cannot be read: {one_line(error)}") from error
    yield from (dict(row) for row in table)
