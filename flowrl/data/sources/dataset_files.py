"""Data sets of the library `datasets` in a folder: which files a configuration and a split have, and their rows.

A folder is one that `datasets.load_dataset` reads: files whose names or folders name the splits, a data set of the Hub
with a README that lists its configurations, or what `Dataset.save_to_disk` writes. Rows are read from the files, never
from a cache that may be older than these. Data sets that are a script are refused: their code would run here.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from flowrl.errors import DataError, offer

CARD = "README.md"
"""The file of a data set that lists its configurations."""


def library() -> Any:
    """The library `datasets`; its import takes half a second."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Reading this data needs the package 'datasets', which is not installed. Install it: pip install "
            "'flowrl[datasets]'.",
            code="package.not-installed",
            package="datasets",
        ) from error
    return datasets


def patterns_of(base: str, card: Path | None, shown: str, name: str | None) -> dict[str, list[str]]:
    """By split, the patterns of the files of a configuration.

    Args:
        base: the folder, or its address on the Hub.
        card: its README, if it has one.
        shown: its name in errors.
        name: of the configuration; None is the default, or the only one.
    """
    library()
    from datasets.data_files import EmptyDatasetError, get_data_patterns, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCard

    found: Mapping[str, Any] = {}
    if card is not None:
        try:
            found = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
        except Exception as error:  # it is free text
            _refuse(shown, f"its {CARD} cannot be read ({type(error).__name__}: {error}). Correct its YAML head")
    if name is not None and name not in (found or {"default": None}):
        _refuse(shown, f"it has no configuration {name!r}; {offer(name, found or ['default'])} Pass one as name=")
    if name is None and len(found) > 1:
        name = found.get_default_config_name()  # type: ignore[attr-defined]
        if name is None:
            _refuse(
                shown, f"it has the configurations {', '.join(map(repr, found))}. Pass one: name={next(iter(found))!r}"
            )
    config = found.get(name, {}) if name is not None else next(iter(found.values()), {})
    base = f"{base}/{config['data_dir']}" if config.get("data_dir") else base
    try:
        given = config.get("data_files")
        found_patterns = sanitize_patterns(given) if given is not None else get_data_patterns(base)
    except EmptyDatasetError:
        _refuse(shown, "it has no files that the package 'datasets' reads. Pass a folder of data files")
    if foreign := [one for each in found_patterns.values() for one in each if "://" in one or one.startswith("/")]:
        _refuse(shown, f"its {CARD} names {foreign[0]!r}, a file outside of the data set. Remove it")
    return {str(split): list(each) for split, each in found_patterns.items()}


def saved_patterns(folder: Path) -> dict[str, list[str]]:
    """By split, the patterns of what ``save_to_disk`` wrote to a folder; none if it did not."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        return {split: [f"{split}/*.arrow"] for split in splits}
    return {"train": ["*.arrow"]} if (folder / "state.json").is_file() else {}


def splits_of(shown: str, splits: Collection[str], split: str | None) -> list[str]:
    """The splits that ``split=``, such as ``"train[:100]+test"``, names; None is the only one."""
    if split is None:
        if len(splits) > 1:
            _refuse(shown, f"it has the splits {', '.join(map(repr, splits))}. Pass one: split={next(iter(splits))!r}")
        return list(splits)
    named = [re.split(r"[\[(]", part.strip())[0] for part in split.split("+")]
    if unknown := [one for one in named if one not in splits]:
        _refuse(shown, f"it has no split {unknown[0]!r}; {offer(unknown[0], splits)} Correct split={split!r}")
    return list(dict.fromkeys(named))


def files_in(folder: Path, shown: str, patterns: Sequence[str]) -> list[Path]:
    """The files in a folder that match, without those of another format than most.

    Raises:
        DataError: there are none, or one is outside of the folder.
    """
    from datasets.data_files import resolve_pattern
    from datasets.load import infer_module_for_data_files_list

    found: list[Path] = []
    for pattern in patterns:
        with suppress(FileNotFoundError):  # several patterns may find the files of a split
            found += [path for path in map(Path, resolve_pattern(pattern, str(folder))) if path not in found]
    if not found:
        _refuse(shown, f"no file matches {', '.join(map(repr, patterns))}. Complete the folder")
    if outside := [str(path) for path in found if not path.is_relative_to(folder) or ".." in path.parts]:
        _refuse(shown, f"its {CARD} names {outside[0]!r}, a file outside of the data set. Remove it")
    formats = [infer_module_for_data_files_list([str(path)])[0] for path in found]
    chosen = infer_module_for_data_files_list(list(map(str, found)))[0]
    if chosen is None:
        _refuse(shown, f"the package 'datasets' does not read {found[0].name!r}. Convert it to parquet")
    return [path for path, one in zip(found, formats, strict=True) if one == chosen]


def split_files(folder: Path, shown: str, name: str | None, split: str | None) -> dict[str, list[Path]]:
    """The files in a data set's folder of each split that ``split=`` names."""
    base, card = folder.absolute(), folder / CARD
    patterns = saved_patterns(folder) or patterns_of(str(base), card if card.is_file() else None, shown, name)
    return {one: files_in(base, shown, patterns[one]) for one in splits_of(shown, patterns, split)}


def refuse_script(names: Collection[str], shown: str) -> None:
    """Refuse a data set with a script of its name among these files."""
    script = f"{Path(shown).name}.py"
    if script in names:
        raise DataError(
            f"The data set {shown} is the script {script}, and flowrl runs no code of a data set. Pass one in files, "
            f"or convert it once where you trust it: datasets.Dataset.to_parquet('rows.parquet').",
            code="prompts.script",
            path=shown,
            script=script,
        )


def rows_of(
    files: Mapping[str, Sequence[Path]], shown: str, split: str | None, columns: Collection[str] | None
) -> Iterator[tuple[str, Any]]:
    """The rows of a split, each with its place for errors; `columns` are read, None is all.

    Args:
        files: by split.
    """
    if split is None or split in files:
        yield from _stream(files, shown, split or next(iter(files)), columns)
        return
    rows = {name: list(_stream(files, shown, name, columns)) for name in files}
    try:
        parts = library().ReadInstruction.from_spec(split).to_absolute({name: len(of) for name, of in rows.items()})
    except (ValueError, AssertionError) as error:
        _refuse(shown, f"split={split!r} cannot be read ({error}). Pass a slice, such as split='train[:100]'")
    for part in parts:
        yield from rows[part.splitname][part.from_ : part.to]


def _stream(
    files: Mapping[str, Sequence[Path]], shown: str, split: str, columns: Collection[str] | None
) -> Iterator[tuple[str, Any]]:
    """The rows of one split."""
    library()
    from datasets.data_files import DataFilesDict
    from datasets.load import import_main_class, infer_module_for_data_files

    row = 0
    try:
        named = {name: [glob.escape(str(path)) for path in of] for name, of in files.items()}
        found = DataFilesDict.from_patterns(named)
        module, arguments = infer_module_for_data_files(found, shown)
        builder = import_main_class(f"datasets.packaged_modules.{module}.{module}")(data_files=found, **arguments)
        for record in _selected(builder.as_streaming_dataset(split), columns):
            yield f"{shown} {split} row {row}", record
            row += 1
    except GeneratorExit:
        raise
    except Exception as error:  # a library for each format raises its own
        raise DataError(
            f"Cannot read {shown} with the package 'datasets' after {row} rows of {split} ({type(error).__name__}: "
            f"{error}). Write the files again.",
            code="prompts.broken-file",
            path=shown,
            row=row,
        ) from error
    if row == 0:
        raise DataError(
            f"{shown} has no rows in {split}. Expected at least one; pass another split.",
            code="prompts.no-rows",
            path=shown,
        )


def _selected(stream: Any, columns: Collection[str] | None) -> Any:
    """A stream of these columns, without decoded images, as far as the format names its columns."""
    if not stream.features:
        return stream
    known = [name for name in stream.features if columns is None or name in columns]
    return stream.decode(False).select_columns(known or list(stream.features))


def _refuse(shown: str, what: str) -> NoReturn:
    raise DataError(f"The data set {shown} cannot be read: {what}.", code="prompts.no-data-files", path=shown)
